"""`python -m tests.simulation --seeds 2000`: run many seeds of a scenario; report faults, states met, and failures.

The last tenth of the seeds is steered to states that a fault has not met in the seeds before.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from multiprocessing import Pool
from random import Random
from typing import Any

from tests.simulation.bugs import Bug
from tests.simulation.events import Met
from tests.simulation.outcome import Outcome, print_outcome
from tests.simulation.planted import BUGS
from tests.simulation.scenarios import SCENARIOS, Scenario
from tests.simulation.search import first_seed_with, shrink
from tests.simulation.states import never_met
from tests.simulation.steering import UNSTEERED, Steering

STEERED = 10
"""Every tenth seed is steered."""


def main(arguments: list[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    logging.disable(logging.CRITICAL)
    if options.bug is not None:
        return _run_bug(BUGS[options.bug], options.seeds)
    scenario = SCENARIOS[options.scenario]
    kinds: dict[str, Any] = _kinds_of_cores(options) if options.scenario == "cores" else {}
    steering = Steering.parse(options.steer)
    if steering.fault not in ("", *scenario.faults) or steering.state not in ("", *scenario.states):
        parser.error(f"--steer: one of {', '.join(scenario.faults)}; one of {', '.join(scenario.states)}")
    if options.seed is not None:
        return _run_one(scenario, options.seed, options.shrink, {**kinds, "steering": steering})
    return run(range(options.first, options.first + options.seeds), options.jobs, scenario, kinds)


def _run_bug(bug: Bug, seeds: int) -> int:
    outcome = first_seed_with(bug, SCENARIOS[bug.scenario], seeds)
    if outcome is None:
        print(f"not found in {seeds} seeds: {bug.name}")
        return 1
    print_outcome(outcome)
    return 0


def _run_one(scenario: Scenario, seed: int, is_shrunk: bool, kinds: dict[str, Any]) -> int:
    if is_shrunk:
        outcome, strikes = shrink(scenario.simulate, seed, **kinds)
        print(f"needs strikes {sorted(strikes)}:")
    else:
        outcome = scenario.simulate(seed, **kinds)
    print_outcome(outcome)
    return bool(outcome.failure)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument(
        "--scenario",
        choices=SCENARIOS,
        default="cores",
        help="cores of brokers (default), with clones, of delay groups; metaservers; or all shells",
    )
    parser.add_argument("--seeds", type=int, default=2000, help="how many (default 2000)")
    parser.add_argument("--first", type=int, default=1, help="the first one (default 1)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: one per core)")
    parser.add_argument("--seed", type=int, help="run this one only, and print its last events")
    parser.add_argument("--steer", default="", metavar="FAULT[@STATE]", help="with --seed: as the report names it")
    parser.add_argument("--shrink", action="store_true", help="with --seed: leave out strikes that it does not need")
    parser.add_argument("--bug", choices=BUGS, metavar="NAME", help="print the first seed that shows this planted bug")
    parser.add_argument("--moves", action="store_true", help="cores: with an operator who moves consumer groups")
    parser.add_argument("--copies", type=int, help="cores: of each group (default: a mix of two and three)")
    parser.add_argument("--min-copies", type=int, default=2, help="cores: how many acknowledge (default 2)")
    parser.add_argument("--failover", action="store_true", help="cores: slaves are made masters by the metaserver")
    return parser


def _kinds_of_cores(options: argparse.Namespace) -> dict[str, Any]:
    kinds: dict[str, Any] = {"moves": options.moves, "fails_over": options.failover}
    if options.copies is not None or options.moves or options.failover:
        kinds |= {"copies": options.copies or 2, "min_copies": options.min_copies}
    return kinds


@dataclass
class Report:
    """Totals of a run."""

    seeds: int = 0
    steps: int = 0
    acknowledged: int = 0
    delivered: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    met: Met = field(default_factory=Counter)
    failed: list[str] = field(default_factory=list)

    def take(self, ran: Iterable[tuple[Outcome, Steering]]) -> None:
        for outcome, steering in ran:
            self.seeds += 1
            self.counts += outcome.counts
            self.met.update(outcome.met)
            self.steps += outcome.steps
            self.acknowledged += outcome.acknowledged
            self.delivered += outcome.delivered
            if outcome.failure:
                self.failed.append(f"--seed {outcome.seed}" + (f" --steer '{steering}'" if steering.fault else ""))
                print_outcome(outcome)


@dataclass(frozen=True)
class _Job:
    """Picklable call that runs one seed in a process of the pool."""

    simulate: Callable[..., Outcome]
    kinds: dict[str, Any]

    def __call__(self, job: tuple[int, Steering]) -> tuple[Outcome, Steering]:
        seed, steering = job
        return self.simulate(seed, steering=steering, **self.kinds), steering


def run(seeds: range, jobs: int, scenario: Scenario, kinds: dict[str, Any]) -> int:
    began, report = time.monotonic(), Report()
    job = _Job(scenario.simulate, kinds)
    plain = len(seeds) - (len(seeds) // STEERED if scenario.states else 0)
    with Pool(jobs, initializer=logging.disable, initargs=(logging.CRITICAL,)) as pool:
        report.take(pool.imap_unordered(job, ((seed, UNSTEERED) for seed in seeds[:plain]), chunksize=4))
        goals = list(never_met(report.met, scenario.faults, scenario.states))
        Random(seeds.start).shuffle(goals)  # or no run would reach the last ones
        if goals and seeds[plain:]:
            steered = zip(seeds[plain:], itertools.cycle(Steering(*goal) for goal in goals), strict=False)
            report.take(pool.imap_unordered(job, steered, chunksize=1))
    took_s = time.monotonic() - began
    missing = [name for name in scenario.must_occur if not report.counts[name] and kinds.get("copies", 2) == 2]
    _print(report, scenario, goals, took_s, jobs)
    if missing:
        print(f"never happened: {', '.join(missing)}", file=sys.stderr)
    if report.failed:
        print("\n".join(["FAILED:", *sorted(report.failed)]), file=sys.stderr)
    return bool(missing or report.failed)


def _print(report: Report, scenario: Scenario, goals: list[tuple[str, str]], took_s: float, jobs: int) -> None:
    for name in sorted(report.counts):
        print(f"{report.counts[name]:>10}  {name}")
    left = list(never_met(report.met, scenario.faults, scenario.states))
    print("states that a fault never met:")
    for fault, pairs in itertools.groupby(left, key=lambda pair: pair[0]):
        print(f"{fault}: {', '.join(state for _, state in pairs)}")
    print(
        f"{report.seeds} seeds in {took_s:.1f} s: {report.seeds / took_s:.1f} seeds/s with {jobs} jobs, "
        f"{report.steps / report.seeds:.0f} events and {report.acknowledged / report.seeds:.0f} acknowledged messages "
        f"a seed, {report.delivered} messages delivered; {len(goals) - len(left)} of {len(goals)} pairs of fault and "
        f"state that seeds may be steered to were met by those that were"
    )
