"""`python -m tests.delay_simulation --seeds 500`: many seeds, what they met, and those that break a promise."""

from __future__ import annotations

import argparse
import logging
import os
import sys

from tests.delay_simulation.nemesis import FAULTS
from tests.delay_simulation.world import simulate
from tests.simulation.run import Scenario, print_outcome, run

MUST_OCCUR = (
    *FAULTS,
    "batch acknowledged",
    "batch known",
    "crash in recovery",
    "crash within a commit",
    "disk refused",
    "message refused later",
    "outcome unknown",
    "role change",
    "schedule begins with its checkpoint",
    "schedule compared",
    "schedule made anew",
    "segment dropped",
    "sent by a master alone",
    "swapped",
    "told: cancelled",
    "told: rescheduled",
    "told: sent",
)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.delay_simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=500, help="how many (default 500)")
    parser.add_argument("--first", type=int, default=1, help="the first one (default 1)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: one per core)")
    parser.add_argument("--seed", type=int, help="run this one only, and print its last events")
    options = parser.parse_args(arguments)
    logging.disable(logging.CRITICAL)
    if options.seed is not None:
        outcome = simulate(options.seed)
        print_outcome(outcome)
        return bool(outcome.failure)
    return run(
        range(options.first, options.first + options.seeds), options.jobs, Scenario(simulate, FAULTS, MUST_OCCUR)
    )


if __name__ == "__main__":
    sys.exit(main())
