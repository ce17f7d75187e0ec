"""`python -m tests.delay_simulation --seeds 500`: many seeds, what they met, and those that break a promise."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from collections import Counter
from multiprocessing import Pool

from tests.delay_simulation.nemesis import FAULTS
from tests.delay_simulation.world import simulate
from tests.simulation.coverage import Met, never_met
from tests.simulation.run import print_outcome

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
    return run(range(options.first, options.first + options.seeds), options.jobs)


def run(seeds: range, jobs: int) -> int:
    began, counts, failed = time.monotonic(), Counter[str](), []
    met: Met = Counter()
    steps = acknowledged = stored = 0
    with Pool(jobs, initializer=logging.disable, initargs=(logging.CRITICAL,)) as pool:
        for outcome in pool.imap_unordered(simulate, seeds, chunksize=4):
            counts += outcome.counts
            met.update(outcome.met)
            steps += outcome.steps
            acknowledged += outcome.acknowledged
            stored += outcome.delivered
            if outcome.failure:
                failed.append(outcome)
                print_outcome(outcome)
    took_s = time.monotonic() - began
    for name in sorted(counts):
        print(f"{counts[name]:>10}  {name}")
    print("\n".join(["states that a fault never met:", *never_met(met, FAULTS)]))
    missing = [name for name in MUST_OCCUR if not counts[name]]
    print(
        f"{len(seeds)} seeds in {took_s:.1f} s: {len(seeds) / took_s:.1f} seeds/s with {jobs} jobs, "
        f"{steps / len(seeds):.0f} events, {acknowledged / len(seeds):.0f} acknowledged messages a seed, "
        f"{stored} messages stored at broker groups"
    )
    if missing:
        print(f"never happened: {', '.join(missing)}", file=sys.stderr)
    if failed:
        print(f"FAILED seeds: {sorted(outcome.seed for outcome in failed)}", file=sys.stderr)
    return bool(missing or failed)


if __name__ == "__main__":
    sys.exit(main())
