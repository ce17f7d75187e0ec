"""Shell. Plants one mutant after the other in a process of its own, and runs what might notice it.

One process imports everything and collects the tests once. For a mutant it forks; the child replaces the function's
code, and runs the tests that execute the changed lines (reach.py), the quick ones first, and then the simulator, the
seeds that come there first, until something fails.
"""

from __future__ import annotations

import gc
import logging
import os
import resource
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby

import pytest

from tests.mutants.operators import Mutant
from tests.mutants.reach import ROOT, Functions, Line, Reach, in_child, key_of, live_functions

TESTS_S_MAX = 15
"""So much CPU the tests of one mutant take together: the slow ones that are left find less than the simulator does."""
TEST_S_MAX = 5
"""So much CPU a test takes in a child, or twenty times what it took before: then it loops."""
SEED_S_MAX = 30
WAIT_S_MAX = 120
"""A test or a seed that takes so long waits for what does not come: the machine may be busy."""
SEEDS_WATCHED = 40
"""A line that none of these seeds reaches is looked for in no other."""
BYTES_MAX = 8 << 30
"""Address space of a child: a mutant may loop and fill the machine's memory."""
Lines = dict[Line, list[tuple[float, int]]]
"""Line -> (seconds of CPU, which) of the tests that execute it: their places among the collected; or of the seeds."""


@dataclass(frozen=True, slots=True)
class Catch:
    """Who noticed a mutant."""

    mutant: Mutant
    by: str
    """A test, a seed, "hangs" or "memory"; empty: nobody."""
    took_s: float


@dataclass(slots=True)
class Hunter:
    """A pytest plugin: what it collected is run for each mutant. `noted` hears of each that was judged."""

    mutants: list[Mutant]
    seeds: int
    jobs: int
    reach: Reach
    noted: Callable[[Catch], None]
    _tests: Lines = field(default_factory=lambda: defaultdict(list))
    _seeds: Lines = field(default_factory=lambda: defaultdict(list))
    _named: dict[str, Callable[[], bool]] = field(default_factory=dict)
    _passed: set[str] = field(default_factory=set)
    """Tests and seeds that were seen to pass on the product as it is: only these can call a mutant caught."""
    _simulate: Callable[[int], bool] = lambda seed: False

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        if session.testsfailed:
            return None  # a file could not be collected: pytest's own loop ends the run
        if self.seeds:
            from tests.simulation.scenarios import of_mix  # not before pytest begins: it rewrites what it imports first

            self._simulate = lambda seed: bool(of_mix(seed, **_kinds(seed)).failure)
        functions = live_functions()
        gc.collect()
        gc.freeze()  # what is collected in a child would be copied
        self._learn(session.items, functions)
        print(f"\n{len(session.items)} tests, {len(self.mutants)} mutants", flush=True)
        for mutant, by, took_s in self._all(session.items, functions):
            self.noted(Catch(mutant, by, took_s))
            print(f"{took_s:6.1f} s  {by[:70] or 'SURVIVES':<70}  {mutant.line} {mutant.name}", flush=True)
        return True

    def _learn(self, items: list[pytest.Item], functions: Functions) -> None:
        """Fill in which lines each test executes, and some of the seeds."""
        self.reach.load()
        self._named = {item.nodeid: partial(_failure, item, None) for item in items}
        self._named |= {f"seed {seed}": partial(self._simulate, seed) for seed in range(1, self.seeds + 1)}
        places = {item.nodeid: place for place, item in enumerate(items)}
        for file, group in groupby(items, key=lambda item: item.path):
            self._note(
                self._tests,
                str(file.relative_to(ROOT)),
                {item.nodeid: places[item.nodeid] for item in group},
                functions,
            )
        if items and not self._tests:
            raise SystemExit("no test executes a line of the product: every mutant would survive")
        for seed in range(1, min(self.seeds, SEEDS_WATCHED) + 1):
            self._note(self._seeds, "tests/simulation/scenarios.py", {f"seed {seed}": seed}, functions)

    def _note(self, lines: Lines, file: str, places: dict[str, int], functions: Functions) -> None:
        """What fails without a mutant would call every one caught: it takes no part."""
        runs, was_known = self.reach.of(file, [(name, self._named[name]) for name in places], functions)
        for run in runs:
            if run.failed:
                print(f"takes no part, it fails without a mutant: {run.name}", flush=True)
            elif run.name in places:
                self._passed |= set() if was_known else {run.name}
                for line in run.lines:
                    lines[line].append((run.took_s, places[run.name]))

    def _all(self, items: list[pytest.Item], functions: Functions) -> Iterator[tuple[Mutant, str, float]]:
        running: dict[int, tuple[Mutant, int, float]] = {}
        waiting = list(reversed(self.mutants))
        while waiting or running:
            while waiting and len(running) < self.jobs:
                mutant = waiting.pop()
                pid, pipe = self._start(items, mutant, functions)
                running[pid] = (mutant, pipe, time.monotonic())
            pid, status = os.wait()
            mutant, pipe, began = running.pop(pid)
            with os.fdopen(pipe, "rb") as answer:
                by = answer.read().decode()
            if os.WIFSIGNALED(status) and not by:
                by = f"ended by signal {os.WTERMSIG(status)}"
            if self._passes(by):
                yield mutant, by, time.monotonic() - began
            else:
                waiting.append(mutant)

    def _passes(self, by: str) -> bool:
        """Whether who caught a mutant is green without it. What was learnt of it may be of another day."""
        if by not in self._named or by in self._passed:
            return True
        if in_child(self._named[by]):
            print(f"takes no part, it fails without a mutant: {by}", flush=True)
            del self._named[by]
            return False
        self._passed.add(by)
        return True

    def _start(self, items: list[pytest.Item], mutant: Mutant, functions: Functions) -> tuple[int, int]:
        """Fork a child for the mutant; return its process id and where its answer can be read."""
        reader, writer = os.pipe()
        sys.stdout.flush()
        if pid := os.fork():
            os.close(writer)
            return pid, reader
        by = "fails while it is planted"
        try:
            resource.setrlimit(resource.RLIMIT_AS, (BYTES_MAX, BYTES_MAX))
            made = functions.get(key_of(mutant.original), [])
            for function in made:
                function.__code__ = mutant.code
            by = self._caught_by(items, mutant) if made else ""
        except MemoryError:
            by = "memory"
        finally:
            os.write(writer, by.encode())
            os._exit(0)

    def _caught_by(self, items: list[pytest.Item], mutant: Mutant) -> str:
        spent_s = 0.0
        for took_s, place in _reaching(mutant, self._tests):
            spent_s += took_s
            if spent_s > TESTS_S_MAX:
                break
            if items[place].nodeid not in self._named:
                continue
            with _alarm(max(TEST_S_MAX, 20 * took_s)) as late:
                failed = _failure(items[place], None)
            if failed or late:
                return items[place].nodeid
        logging.disable(logging.CRITICAL)
        first = [seed for _, seed in _reaching(mutant, self._seeds)]
        rest = [seed for seed in range(1, self.seeds + 1) if seed not in first] if first else []
        for seed in (seed for seed in [*first, *rest] if f"seed {seed}" in self._named):
            with _alarm(SEED_S_MAX):
                if self._simulate(seed):
                    return f"seed {seed}"
        return ""


def _reaching(mutant: Mutant, lines: Lines) -> list[tuple[float, int]]:
    """Return what executes the mutant's lines, the quick ones first."""
    return sorted({one for line in mutant.lines for one in lines.get((mutant.path, line), ())})


def _kinds(seed: int) -> dict[str, bool]:
    """Every fifth one with an operator who moves groups, every tenth with failover; the rest is the mix of
    `make simulate`. CI has them so, too."""
    kinds = {"moves": seed % 5 == 0, "fails_over": seed % 10 == 1}
    return {**kinds, "copies": 2} if any(kinds.values()) else {}


def _failure(item: pytest.Item, following: pytest.Item | None) -> bool:
    """Run one test, without a word; return whether it failed."""
    failed = False

    class Listener:
        @pytest.hookimpl(tryfirst=True)
        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            nonlocal failed
            failed = failed or report.failed

    listener = Listener()
    item.config.pluginmanager.register(listener)
    try:
        item.ihook.pytest_runtest_protocol(item=item, nextitem=following)
    finally:
        item.config.pluginmanager.unregister(listener)
    return failed


@contextmanager
def _alarm(cpu_s: float) -> Iterator[list[bool]]:
    """End what runs too long by an exception, and, if that is caught as well, the process."""
    late: list[bool] = []

    def ring(*_: object) -> None:
        late.append(True)
        for kind in (signal.SIGALRM, signal.SIGVTALRM):
            signal.signal(kind, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_VIRTUAL, TEST_S_MAX)
        signal.alarm(WAIT_S_MAX)
        raise TimeoutError("hangs")

    timers = ((signal.SIGVTALRM, signal.ITIMER_VIRTUAL, cpu_s), (signal.SIGALRM, signal.ITIMER_REAL, WAIT_S_MAX))
    for kind, timer, seconds in timers:
        signal.signal(kind, ring)
        signal.setitimer(timer, seconds)
    try:
        yield late
    finally:
        for _, timer, _ in timers:
            signal.setitimer(timer, 0)


def hunt(hunter: Hunter, tests: list[str]) -> None:
    """Tell the hunter's `noted`, for each mutant, who caught it: one of `tests`, or one of the seeds."""
    quiet = ["-o", "addopts=", "-p", "no:cacheprovider", "-p", "no:terminal", "--hypothesis-profile=no shrinking"]
    quiet += ["--import-mode=importlib"]  # as everywhere: files of one name in two folders are two
    quiet += ["-o", "timeout=0"]  # it would take the alarm clock
    code = pytest.main([*quiet, *tests], plugins=[hunter])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        raise SystemExit(f"the tests could not be collected: {code!r}")
