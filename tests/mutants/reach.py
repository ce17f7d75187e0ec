"""Shell. Which tests, and which seeds of the simulator, execute which lines of the product.

That is found out by running each of them once, and kept in a file: what is learnt of the tests of a file holds until it
or a module that they execute changes.
"""

from __future__ import annotations

import builtins
import gc
import hashlib
import os
import pickle
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

from tests.mutants.marks import MARK, marked

ROOT = Path(__file__).parents[2]
Key = tuple[str, str, int]
"""(real path, qualified name, first line) of a function"""
Line = tuple[str, int]
"""(path below the root, number)"""
Named = tuple[str, Callable[[], bool]]
"""A test or a seed, and what runs it and returns whether it failed."""
Place = tuple[str, str, tuple[str, ...]]
"""(file, its first test, modules that were looked at)"""
Functions = dict[Key, list[FunctionType]]


@dataclass(frozen=True, slots=True)
class Run:
    """One test or seed, run on the product as it is."""

    name: str
    took_s: float
    """Of CPU."""
    failed: bool
    lines: frozenset[Line]


@dataclass(slots=True)
class Reach:
    """What was learnt, by file of tests. Each answer is stored when it is known: who is stopped goes on later."""

    path: Path
    modules: tuple[str, ...]
    """Of the product, whose lines are looked at."""
    _learnt: dict[Place, tuple[dict[str, str], list[Run]]] = field(default_factory=dict)
    """Digests of the files that an answer rests on, and the answer."""

    def load(self) -> None:
        if self.path.exists():
            self._learnt = pickle.loads(self.path.read_bytes())

    def of(self, file: str, named: list[Named], functions: Functions) -> tuple[list[Run], bool]:
        """Return what these tests of a file execute, and whether that was known before."""
        place = (file, named[0][0], self.modules)
        digests, runs = self._learnt.get(place, ({}, []))
        is_same = all((ROOT / path).exists() and digest_of(path) == digest for path, digest in digests.items())
        if is_same and {name for name, _ in named} <= {run.name for run in runs}:
            return runs, True
        runs = runs_of(named, self.modules, functions)
        rests_on = {file} | {path for run in runs for path, _ in run.lines}
        self._learnt[place] = ({path: digest_of(path) for path in rests_on}, runs)
        self._store()
        return runs, False

    def _store(self) -> None:
        self.path.parent.mkdir(exist_ok=True)
        beside = self.path.with_suffix(".new")
        beside.write_bytes(pickle.dumps(self._learnt))
        beside.replace(self.path)


@cache
def digest_of(path: str) -> str:
    return hashlib.sha256((ROOT / path).read_bytes()).hexdigest()


def runs_of(named: list[Named], modules: tuple[str, ...], functions: Functions) -> list[Run]:
    """Run each of these in a fork, one after the other."""
    _marked(modules)  # here, not in each fork
    return [Run(*answer) for answer in in_child(lambda: list(_answers(named, modules, functions)))]


def _answers(named: list[Named], modules: tuple[str, ...], functions: Functions) -> Any:
    reached: set[Line] = set()
    setattr(builtins, MARK, reached.add)
    for key, code in _marked(modules):
        for function in functions.get(key, ()):
            function.__code__ = code
    for name, run in named:
        reached.clear()
        began = time.process_time()
        failed = run()
        yield name, time.process_time() - began, failed, frozenset(reached)


@cache
def _marked(modules: tuple[str, ...]) -> list[tuple[Key, CodeType]]:
    return [(key_of(original), code) for path in modules for original, code in marked(ROOT, path)]


def live_functions() -> Functions:
    """Return all functions of the product that exist; decorated and copied ones are found as well as named ones."""
    found: Functions = defaultdict(list)
    gc.unfreeze()  # tests/conftest.py freezes what was imported, and what is frozen is not listed
    for thing in gc.get_objects():
        if type(thing) is FunctionType and thing.__code__.co_filename.startswith(str(ROOT)):
            found[key_of(thing.__code__)].append(thing)
    return found


@cache
def _real(path: str) -> str:
    """The folders of the repo are imported by way of links: their files have two names."""
    return os.path.realpath(path)


def key_of(code: CodeType) -> Key:
    return _real(code.co_filename), code.co_qualname, code.co_firstlineno


def in_child(work: Callable[[], Any]) -> Any:
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
