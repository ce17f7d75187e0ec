"""`python -m tests.shell_simulation.shrink SEED`: the few strikes of a failing seed without which it would not fail."""

from __future__ import annotations

import logging
import sys

from tests.shell_simulation.world import simulate
from tests.simulation.run import print_outcome
from tests.simulation.world import Outcome


def shrink(seed: int, favoured: str = "") -> tuple[Outcome, set[int]]:
    """Leave out one strike after the other, as long as a promise is broken; return the last outcome that broke one, and
    the strikes that it needs."""
    outcome = simulate(seed, favoured=favoured)
    needed = set(range(outcome.counts["strike"])) if outcome.failure else set()
    everything = set(needed)
    for number in sorted(everything, reverse=True):
        less = simulate(seed, favoured=favoured, skipped=everything - needed | {number})
        if less.failure:
            outcome = less
            needed.discard(number)
    return outcome, needed


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    found, strikes = shrink(int(sys.argv[1]))
    print_outcome(found)
    print(f"needs strikes {sorted(strikes)}")
    sys.exit(bool(found.failure))
