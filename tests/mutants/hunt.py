"""Shell. Plants one mutant after the other in a process of its own, and runs what might notice it.

One process imports everything and collects the tests once. The first run of all tests tells which functions each of
them calls, and how long it takes. For a mutant the process forks; the child replaces the function's code, runs the
tests that call it, the quick ones first, and then the simulator, until something fails.
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
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

import pytest

from tests.mutants.operators import Mutant

ROOT = Path(__file__).parents[2]
TESTS_S_MAX = 15
"""So long the tests of one mutant take together: the slow ones that are left find less than the simulator does."""
TEST_S_MAX = 60
"""A test that takes longer in a child hangs, unless it took a tenth of that before."""
SEED_S_MAX = 120
BYTES_MAX = 8 << 30
"""Address space of a child: a mutant may loop and fill the machine's memory."""
Key = tuple[str, str, int]
"""(real path, qualified name, first line) of a function"""


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
    catches: list[Catch] = field(default_factory=list)
    _calls: dict[Key, list[tuple[float, int]]] = field(default_factory=lambda: defaultdict(list))
    """Function -> (seconds, place among the collected) of the tests that call it."""
    _simulate: Any = None

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self._calls.update(_in_child(lambda: self._watched(session.items)))
        from tests.simulation.world import simulate  # not before pytest has begun: it rewrites what it imports first

        self._simulate = simulate
        functions = _live_functions()
        print(f"\n{len(session.items)} tests, {len(self.mutants)} mutants", flush=True)
        for mutant, by, took_s in self._all(session, functions):
            self.catches.append(Catch(mutant, by, took_s))
            print(f"{took_s:6.1f} s  {by[:70] or 'SURVIVES':<70}  {mutant.name}", flush=True)
        return True

    def _watched(self, items: list[pytest.Item]) -> dict[Key, list[tuple[float, int]]]:
        """Run all tests as they are. One that fails would call every mutant caught: it takes no part."""
        calls: dict[Key, list[tuple[float, int]]] = defaultdict(list)
        for place, item in enumerate(items):
            with _calls_noted() as called:
                began = time.monotonic()
                failed = _failure(item, items[place + 1] if place + 1 < len(items) else None)
                took_s = time.monotonic() - began
            if failed:
                print(f"takes no part, it fails without a mutant: {item.nodeid}", flush=True)
                continue
            for code in called:
                calls[_key(code)].append((took_s, place))
        return dict(calls)

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
        for took_s, place in sorted(self._calls[_key(mutant.original)]):
            spent_s += took_s
            if spent_s > TESTS_S_MAX:
                break
            with _alarm(max(TEST_S_MAX, 10 * took_s)) as late:
                failed = _failure(items[place], None)
            if failed or late:
                return items[place].nodeid
        logging.disable(logging.CRITICAL)
        for seed in range(1, self.seeds + 1):
            with _alarm(SEED_S_MAX):
                # Every fifth one with an operator who moves groups, every tenth with failover: CI has them so, too.
                if self._simulate(seed, moves=seed % 5 == 0, fails_over=seed % 10 == 1).failure:
                    return f"seed {seed}"
        return ""


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
def _alarm(seconds: float) -> Iterator[list[bool]]:
    """End what runs too long by an exception, and, if that is caught as well, the process."""
    late: list[bool] = []

    def ring(*_: object) -> None:
        late.append(True)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(5)
        raise TimeoutError("hangs")

    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield late
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


@contextmanager
def _calls_noted() -> Iterator[set[CodeType]]:
    """Collect the code of every function that is called meanwhile, on any thread."""
    called: set[CodeType] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            called.add(frame.f_code)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield called
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]


def _live_functions() -> dict[Key, list[FunctionType]]:
    """Return all functions of the product that exist; decorated and copied ones are found as well as named ones."""
    found: dict[Key, list[FunctionType]] = defaultdict(list)
    for thing in gc.get_objects():
        if type(thing) is FunctionType and thing.__code__.co_filename.startswith(str(ROOT)):
            found[_key(thing.__code__)].append(thing)
    return found


_REAL: dict[str, str] = {}


def _key(code: CodeType) -> Key:
    """The folders of the repo are imported by way of links: their files have two names."""
    real = _REAL.get(code.co_filename)
    if real is None:
        real = _REAL[code.co_filename] = os.path.realpath(code.co_filename)
    return real, code.co_qualname, code.co_firstlineno


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


def hunt(mutants: Iterable[Mutant], tests: list[str], *, seeds: int, jobs: int) -> list[Catch]:
    """Return, for each mutant, who caught it: one of `tests`, or one of the first `seeds` seeds."""
    hunter = Hunter(list(mutants), seeds, jobs)
    quiet = ["-o", "addopts=", "-p", "no:cacheprovider", "-p", "no:terminal", "--hypothesis-seed=0"]
    code = pytest.main([*quiet, *tests], plugins=[hunter])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        raise SystemExit(f"the tests could not be collected: {code!r}")
    return hunter.catches
