"""Shell. Which tests, and which seeds of the simulator, execute which lines of the product.

That is found out by running each of them once, and kept in a file: what is learnt of the tests of a file holds until it
or a function that they execute changes, or what stands around that in its module. Other functions may change and move.
Of a new one that is called in place of another, because it is a subclass's, nobody learns: its mutants survive, and who
looks why finds that no test is said to execute it.
"""

from __future__ import annotations

import ast
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
from tests.mutants.operators import Function

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
Part = tuple[str, str]
"""(path below the root, qualified name of a function that stands in no other one, or one of these two)"""
AROUND, WHOLE = "", "*"
"""All of a file but its functions; all of it."""


@dataclass(frozen=True, slots=True)
class Run:
    """One test or seed, run on the product as it is."""

    name: str
    took_s: float
    """Of CPU."""
    failed: bool
    lines: frozenset[Line]


@dataclass(frozen=True, slots=True)
class _Kept:
    """A run as it is stored: its lines are counted from the begin of their functions, which may move."""

    name: str
    took_s: float
    failed: bool
    lines: dict[Part, tuple[int, ...]]

    @classmethod
    def of(cls, run: Run) -> _Kept:
        lines: dict[Part, list[int]] = defaultdict(list)
        for path, line in sorted(run.lines):
            name = _name_at(path, line)
            lines[path, name].append(line - _begin_of(path, name))
        return cls(run.name, run.took_s, run.failed, {part: tuple(found) for part, found in lines.items()})

    def run(self) -> Run:
        lines = ((path, _begin_of(path, name) + at) for (path, name), found in self.lines.items() for at in found)
        return Run(self.name, self.took_s, self.failed, frozenset(lines))


@dataclass(slots=True)
class Reach:
    """What was learnt, by file of tests. Each answer is stored when it is known: who is stopped goes on later."""

    path: Path
    modules: tuple[str, ...]
    """Of the product, whose lines are looked at."""
    _learnt: dict[Place, tuple[dict[Part, str], list[_Kept]]] = field(default_factory=dict)
    """Digests of what an answer rests on, and the answer."""

    def load(self) -> None:
        if self.path.exists():
            self._learnt = pickle.loads(self.path.read_bytes())

    def of(self, file: str, named: list[Named], functions: Functions) -> tuple[list[Run], bool]:
        """Return what these tests of a file execute, and whether that was known before."""
        place = (file, named[0][0], self.modules)
        digests, kept = self._learnt.get(place, ({}, []))
        is_same = all(digest_of(*part) == digest for part, digest in digests.items())
        if is_same and {name for name, _ in named} <= {one.name for one in kept}:
            return [one.run() for one in kept], True
        runs = runs_of(named, self.modules, functions)
        kept = [_Kept.of(run) for run in runs]
        parts = {part for one in kept for part in one.lines}
        rests_on = {(file, WHOLE), *parts, *((path, AROUND) for path, _ in parts)}
        self._learnt[place] = ({part: digest_of(*part) for part in rests_on}, kept)
        self._store()
        return runs, False

    def _store(self) -> None:
        self.path.parent.mkdir(exist_ok=True)
        beside = self.path.with_suffix(".new")
        beside.write_bytes(pickle.dumps(self._learnt))
        beside.replace(self.path)


@cache
def digest_of(path: str, name: str) -> str:
    """Digest a part of a file as it is now; empty: there is none."""
    lines = _lines_of(path)
    if name != WHOLE:
        inside = parts_of(path).values() if name == AROUND else [parts_of(path).get(name, range(0))]
        numbers = {number for part in inside for number in part}
        lines = [line for number, line in enumerate(lines, start=1) if (number in numbers) != (name == AROUND)]
    return hashlib.sha256(b"\n".join(lines)).hexdigest() if lines else ""


@cache
def _lines_of(path: str) -> list[bytes]:
    return (ROOT / path).read_bytes().split(b"\n") if (ROOT / path).exists() else []


@cache
def parts_of(path: str) -> dict[str, range]:
    """Return the lines of each function of a module that stands in no other function."""
    found: dict[str, range] = {}

    def walk(body: list[ast.stmt], before: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef):
                walk(node.body, f"{before}{node.name}.")
            elif isinstance(node, Function):
                name, begin = before + node.name, min([node.lineno, *(one.lineno for one in node.decorator_list)])
                while name in found:  # what reads a property, and what sets it
                    name += "+"
                found[name] = range(begin, (node.end_lineno or node.lineno) + 1)

    walk(ast.parse(b"\n".join(_lines_of(path))).body, "")
    return found


@cache
def _names_by_line(path: str) -> dict[int, str]:
    return {line: name for name, lines in parts_of(path).items() for line in lines}


def _name_at(path: str, line: int) -> str:
    return _names_by_line(path).get(line, AROUND)


def _begin_of(path: str, name: str) -> int:
    return parts_of(path)[name].start if name != AROUND else 0


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
