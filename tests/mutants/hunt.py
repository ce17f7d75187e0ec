"""Shell. Plants one mutant after the other in a process of its own, and runs what might notice it.

One process imports everything and collects the tests once. The first run of all tests, and of some seeds of the
simulator, tells which lines each of them executes, and how long it takes. For a mutant the process forks; the child
replaces the function's code, and runs the tests that execute the changed lines, the quick ones first, and then the
simulator, the seeds that come there first, until something fails.
"""

from __future__ import annotations

import gc
import logging
import os
import pickle
import resource
import signal
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

import pytest

from tests.mutants.operators import Mutant

ROOT = Path(__file__).parents[2]
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
Key = tuple[str, str, int]
"""(real path, qualified name, first line) of a function"""
Line = tuple[str, int]
"""(real path, number)"""
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
    """A pytest plugin: what it collected is run for each mutant. `catches` is filled by `pytest.main`."""

    mutants: list[Mutant]
    seeds: int
    jobs: int
    noted: Callable[[Catch], None]
    _tests: Lines = field(default_factory=dict)
    _seeds: Lines = field(default_factory=dict)
    _simulate: Callable[[int], bool] = lambda seed: False

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        from tests.simulation.scenarios import of_mix  # not before pytest has begun: it rewrites what it imports first

        self._simulate = lambda seed: bool(of_mix(seed, **_kinds(seed)).failure)
        functions = _live_functions()
        gc.collect()
        gc.freeze()  # what is collected in a child would be copied
        watched = _watched_lines(self.mutants)
        self._tests.update(_in_child(lambda: _lines_of_tests(session.items, watched)))
        self._seeds.update(_in_child(lambda: _lines_of_seeds(self._simulate, min(self.seeds, SEEDS_WATCHED), watched)))
        print(f"\n{len(session.items)} tests, {len(self.mutants)} mutants", flush=True)
        for mutant, by, took_s in self._all(session, functions):
            self.noted(Catch(mutant, by, took_s))
            print(f"{took_s:6.1f} s  {by[:70] or 'SURVIVES':<70}  {mutant.line} {mutant.name}", flush=True)
        return True

    def _all(
        self, session: pytest.Session, functions: dict[Key, list[FunctionType]]
    ) -> Iterator[tuple[Mutant, str, float]]:
        running: dict[int, tuple[Mutant, int, float]] = {}
        waiting = list(reversed(self.mutants))
        while waiting or running:
            while waiting and len(running) < self.jobs:
                mutant = waiting.pop()
                pid, pipe = self._start(session.items, mutant, functions)
                running[pid] = (mutant, pipe, time.monotonic())
            pid, status = os.wait()
            mutant, pipe, began = running.pop(pid)
            with os.fdopen(pipe, "rb") as answer:
                by = answer.read().decode()
            if os.WIFSIGNALED(status) and not by:
                by = f"ended by signal {os.WTERMSIG(status)}"
            yield mutant, by, time.monotonic() - began

    def _start(
        self, items: list[pytest.Item], mutant: Mutant, functions: dict[Key, list[FunctionType]]
    ) -> tuple[int, int]:
        """Fork a child for the mutant; return its process id and where its answer can be read."""
        reader, writer = os.pipe()
        sys.stdout.flush()
        if pid := os.fork():
            os.close(writer)
            return pid, reader
        by = "fails while it is planted"
        try:
            resource.setrlimit(resource.RLIMIT_AS, (BYTES_MAX, BYTES_MAX))
            made = functions.get(_key(mutant.original), [])
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
            with _alarm(max(TEST_S_MAX, 20 * took_s)) as late:
                failed = _failure(items[place], None)
            if failed or late:
                return items[place].nodeid
        logging.disable(logging.CRITICAL)
        first = [seed for _, seed in _reaching(mutant, self._seeds)]
        rest = [seed for seed in range(1, self.seeds + 1) if seed not in first] if first else []
        for seed in [*first, *rest]:
            with _alarm(SEED_S_MAX):
                if self._simulate(seed):
                    return f"seed {seed}"
        return ""


def _reaching(mutant: Mutant, lines: Lines) -> list[tuple[float, int]]:
    """Return what executes the mutant's lines, the quick ones first."""
    path = _real(mutant.original.co_filename)
    return sorted({one for line in mutant.lines for one in lines.get((path, line), ())})


def _kinds(seed: int) -> dict[str, bool]:
    """Every fifth one with an operator who moves groups, every tenth with failover; the rest is the mix of
    `make simulate`. CI has them so, too."""
    kinds = {"moves": seed % 5 == 0, "fails_over": seed % 10 == 1}
    return {**kinds, "copies": 2} if any(kinds.values()) else {}


def _lines_of_tests(items: list[pytest.Item], watched: dict[str, set[int]]) -> Lines:
    """Run all tests as they are. One that fails would call every mutant caught: it takes no part."""
    lines: Lines = defaultdict(list)
    for place, item in enumerate(items):
        began = time.process_time()
        with _lines_noted(watched) as executed:
            failed = _failure(item, items[place + 1] if place + 1 < len(items) else None)
        if failed:
            print(f"takes no part, it fails without a mutant: {item.nodeid}", flush=True)
            continue
        for line in executed:
            lines[line].append((time.process_time() - began, place))
    return dict(lines)


def _lines_of_seeds(simulate: Callable[[int], bool], seeds: int, watched: dict[str, set[int]]) -> Lines:
    logging.disable(logging.CRITICAL)
    lines: Lines = defaultdict(list)
    for seed in range(1, seeds + 1):
        began = time.process_time()
        with _lines_noted(watched) as executed:
            failed = simulate(seed)
        if failed:
            raise SystemExit(f"seed {seed} fails without a mutant")
        for line in executed:
            lines[line].append((time.process_time() - began, seed))
    return dict(lines)


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


def _watched_lines(mutants: list[Mutant]) -> dict[str, set[int]]:
    """Return, by real path, all lines of the functions that are changed."""
    watched: dict[str, set[int]] = defaultdict(set)
    for mutant in mutants:
        path = _real(mutant.original.co_filename)
        watched[path].update(_lines_in(mutant.original))
    return watched


def _lines_in(code: CodeType) -> Iterator[int]:
    """Yield the lines of a function, and of those inside it."""
    yield code.co_firstlineno
    yield from (line for _, _, line in code.co_lines() if line is not None)
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from _lines_in(const)


@contextmanager
def _lines_noted(watched: dict[str, set[int]]) -> Iterator[set[Line]]:
    """Collect which of the watched lines are executed meanwhile, on any thread."""
    executed: set[Line] = set()

    def called(frame: FrameType, event: str, _: object) -> Any:
        code = frame.f_code
        return line if code.co_firstlineno in watched.get(_real(code.co_filename), ()) else None

    def line(frame: FrameType, event: str, _: object) -> Any:
        executed.add((_real(frame.f_code.co_filename), frame.f_lineno))
        return line

    threading.settrace(called)
    sys.settrace(called)
    try:
        yield executed
    finally:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]


def _live_functions() -> dict[Key, list[FunctionType]]:
    """Return all functions of the product that exist; decorated and copied ones are found as well as named ones."""
    found: dict[Key, list[FunctionType]] = defaultdict(list)
    for thing in gc.get_objects():
        if type(thing) is FunctionType and thing.__code__.co_filename.startswith(str(ROOT)):
            found[_key(thing.__code__)].append(thing)
    return found


@cache
def _real(path: str) -> str:
    """The folders of the repo are imported by way of links: their files have two names."""
    return os.path.realpath(path)


def _key(code: CodeType) -> Key:
    return _real(code.co_filename), code.co_qualname, code.co_firstlineno


def _in_child(work: Any) -> Any:
    """Return what `work` returns in a fork: it leaves nothing behind here."""
    reader, writer = os.pipe()
    sys.stdout.flush()
    if pid := os.fork():
        os.close(writer)
        with os.fdopen(reader, "rb") as answer:
            data = answer.read()
        os.waitpid(pid, 0)
        return pickle.loads(data)
    try:
        with os.fdopen(writer, "wb") as answer:
            pickle.dump(work(), answer)
    finally:
        sys.stdout.flush()
        os._exit(0)


def hunt(mutants: Iterable[Mutant], tests: list[str], *, seeds: int, jobs: int, noted: Callable[[Catch], None]) -> None:
    """Tell, for each mutant, who caught it: one of `tests`, or one of the first `seeds` seeds."""
    hunter = Hunter(list(mutants), seeds, jobs, noted)
    quiet = ["-o", "addopts=", "-p", "no:cacheprovider", "-p", "no:terminal", "--hypothesis-profile=no shrinking"]
    quiet += ["-o", "timeout=0"]  # it would take the alarm clock
    code = pytest.main([*quiet, *tests], plugins=[hunter])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        raise SystemExit(f"the tests could not be collected: {code!r}")
