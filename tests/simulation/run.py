"""`python -m tests.simulation --seeds 2000 --jobs 2`: many seeds, what they met, and those that break a promise."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from multiprocessing import Pool
from typing import Any, NamedTuple

from tests.shell_simulation import nemesis as shells
from tests.shell_simulation.world import simulate as simulate_shells
from tests.simulation.coverage import Met, never_met
from tests.simulation.nemesis import FAULTS
from tests.simulation.world import Outcome, copies_of, simulate

MUST_OCCUR = (
    *FAULTS,
    "batch acknowledged",
    "batch repeated",
    "crash in recovery",
    "crash within a commit",
    "damage found in recovery",
    "disk refused",
    "flow control",
    "given up",
    "half-open connection",
    "nacked",
    "pulled from a master alone",
    "recovery compared",
    "repaired",
    "role change",
    "segment dropped",
    "stale assignment",
    "start without metaserver",
    "swap prepared",
    "swapped",
    "torn tail",
    "unsubscribe",
)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument(
        "--scenario", choices=SCENARIOS, default="cores", help="cores (default), or all that ships, on a virtual loop"
    )
    parser.add_argument("--seeds", type=int, default=2000, help="how many (default 2000)")
    parser.add_argument("--first", type=int, default=1, help="the first one (default 1)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: one per core)")
    parser.add_argument("--seed", type=int, help="run this one only, and print its last events")
    parser.add_argument("--moves", action="store_true", help="with an operator who moves consumer groups")
    parser.add_argument("--copies", type=int, help="of each group (default: a mix of two and three)")
    parser.add_argument("--min-copies", type=int, default=2, help="how many acknowledge (default 2)")
    parser.add_argument("--failover", action="store_true", help="the metaserver makes slaves masters by itself")
    options = parser.parse_args(arguments)
    logging.disable(logging.CRITICAL)
    scenario = SCENARIOS[options.scenario]
    kinds: dict[str, Any] = {"moves": options.moves, "fails_over": options.failover}
    if options.copies is not None or options.moves or options.failover:
        kinds |= {"copies": options.copies or 2, "min_copies": options.min_copies}
    if options.scenario == "shells":  # a seed draws the rest
        kinds = {}
    if options.seed is not None:
        outcome = scenario.simulate(options.seed, **kinds)
        print_outcome(outcome)
        return bool(outcome.failure)
    return run(range(options.first, options.first + options.seeds), options.jobs, scenario, **kinds)


def of_mix(seed: int, **kinds: Any) -> Outcome:
    return simulate(seed, **(kinds if "copies" in kinds else kinds | copies_of(seed)))


class Scenario(NamedTuple):
    simulate: Callable[..., Outcome]
    faults: Iterable[str]
    must_occur: tuple[str, ...]


SCENARIOS = {
    "cores": Scenario(of_mix, FAULTS, MUST_OCCUR),
    "shells": Scenario(simulate_shells, shells.FAULTS, shells.MUST_OCCUR),
}


def run(seeds: range, jobs: int, scenario: Scenario, **kinds: Any) -> int:
    began, counts, failed = time.monotonic(), Counter[str](), []
    met: Met = Counter()
    steps = acknowledged = delivered = 0
    with Pool(jobs, initializer=logging.disable, initargs=(logging.CRITICAL,)) as pool:
        for outcome in pool.imap_unordered(partial(scenario.simulate, **kinds), seeds, chunksize=4):
            counts += outcome.counts
            met.update(outcome.met)
            steps += outcome.steps
            acknowledged += outcome.acknowledged
            delivered += outcome.delivered
            if outcome.failure:
                failed.append(outcome)
                print_outcome(outcome)
    took_s = time.monotonic() - began
    for name in sorted(counts):
        print(f"{counts[name]:>10}  {name}")
    print("\n".join(["states that a fault never met:", *never_met(met, scenario.faults)]))
    missing = [name for name in scenario.must_occur if not counts[name] and kinds.get("copies", 2) == 2]
    print(
        f"{len(seeds)} seeds in {took_s:.1f} s: {len(seeds) / took_s:.1f} seeds/s with {jobs} jobs, "
        f"{steps / len(seeds):.0f} events and {acknowledged / len(seeds):.0f} acknowledged messages a seed, "
        f"{delivered} messages delivered"
    )
    if missing:
        print(f"never happened: {', '.join(missing)}", file=sys.stderr)
    if failed:
        print(f"FAILED seeds: {sorted(outcome.seed for outcome in failed)}", file=sys.stderr)
    return bool(missing or failed)


def print_outcome(outcome: Outcome) -> None:
    print("\n".join(outcome.recent))
    said = outcome.failure or "well"
    print(f"seed {outcome.seed}: {said} (trace {outcome.hash:08x}, {outcome.steps} events)", flush=True)


if __name__ == "__main__":
    sys.exit(main())
