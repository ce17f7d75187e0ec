"""Core. One fault of `required.txt`, planted in the module that a test imports.

    path:function: without `statement`
    path:function: `code` -> `other code`
    path:function: `if condition` -> `if other condition`
    path:function: `second statement` before `first statement`

Code is written as `ast.unparse` prints it. ` (2)` at the end is the second place of the function that matches.
"""

from __future__ import annotations

import ast
import importlib.abc
import importlib.machinery
import importlib.util
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
REQUIRED = Path(__file__).with_name("required.txt")
CHANGE = re.compile(r"(?:without `(?P<gone>.*)`|`(?P<old>.*)` (?P<how>->|before) `(?P<new>.*)`)(?: \((?P<nth>\d+)\))?")

OPTIONS = ["-q", "-x", "--tb=line", "--assert=plain", "-p", "no:cacheprovider", "--timeout=30"]
OPTIONS += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
CAUGHT, SURVIVES = 101, 100
"""Exit statuses that no exception has."""


@dataclass(frozen=True)
class Fault:
    """A change of one function, the promise that it breaks, and the test files of which one must fail."""

    path: str
    function: str
    change: str
    promise: str
    tests: tuple[str, ...]

    @property
    def module(self) -> str:
        """Name of the changed module: the folders of the product are sub-packages of `qmq`."""
        name = self.path.removesuffix(".py").replace("/", ".")
        return name if name.startswith("qmq.") else f"qmq.{name}"

    def __str__(self) -> str:
        return f"{self.path}:{self.function}: {self.change}"


def read_faults(text: str) -> list[Fault]:
    """Return the faults of `required.txt`: a line with the change, then an indented promise and indented test files.

    Raises:
        ValueError: a fault has no promise or no test file.
    """
    faults = []
    for block in re.split(r"\n(?! )", re.sub(r"(?m)^(#.*)?\n", "", text).strip("\n")):
        head, promise, *tests = [line.strip() for line in block.splitlines()] + [""]
        if not (tests := [name for name in tests if name]):
            raise ValueError(f"{head}: add the promise and a test file below it, indented")
        path, function, change = head.split(":", 1)[0], *head.split(":", 1)[1].split(": ", 1)
        faults.append(Fault(path, function, change, promise, tuple(tests)))
    return faults


def planted(source: str, fault: Fault) -> ast.Module:
    """Return the syntax tree of `source` with the fault in it.

    Raises:
        LookupError: the function has no such code; update the line of `required.txt`.
    """
    tree = ast.parse(source)
    function: ast.AST = tree
    for name in fault.function.split("."):
        function = next((node for node in ast.walk(function) if getattr(node, "name", "") == name), ast.Pass())
    match = CHANGE.fullmatch(fault.change)
    places = list(_places(function, **{k: v for k, v in match.groupdict().items() if k != "nth"})) if match else []
    number = int(match["nth"] or 1) if match else 1
    if len(places) < number:
        raise LookupError(f"{fault}: the code does not contain this text; update tests/mutants/required.txt")
    owner, field, value = places[number - 1]
    setattr(owner, field, value)
    return ast.fix_missing_locations(tree)


def _places(function: ast.AST, gone: str | None, old: str | None, how: str | None, new: str | None) -> Iterator[Any]:
    """Yield (owner, field, value) of each place that matches; `setattr` of these plants the fault."""
    for owner in ast.walk(function):
        for field, value in ast.iter_fields(owner):
            children = value if isinstance(value, list) else [value]
            texts = [ast.unparse(child) if isinstance(child, ast.AST) else "" for child in children]
            for at, text in enumerate(texts):
                if gone is not None and text == gone and isinstance(children[at], ast.stmt):
                    yield owner, field, _with(value, at, ast.Pass())
                elif how == "before" and text == old and at and texts[at - 1] == new:
                    yield owner, field, [*value[: at - 1], value[at], value[at - 1], *value[at + 1 :]]
                elif how == "->" and isinstance(children[at], ast.expr) and text == _condition(old, field):
                    yield owner, field, _with(value, at, ast.parse(_condition(new, field), mode="eval").body)


def _condition(text: str | None, field: str) -> str:
    """Return the expression of `if …` for the field of a condition; for other fields and texts, the text."""
    return (text or "").removeprefix("if ") if field == "test" else text or ""


def _with(value: Any, at: int, node: ast.AST) -> Any:
    return [*value[:at], node, *value[at + 1 :]] if isinstance(value, list) else node


class Planter(importlib.abc.MetaPathFinder):
    """Import hook that compiles the module of a fault from its changed tree."""

    def __init__(self, fault: Fault) -> None:
        self._fault = fault
        self._tree = planted((ROOT / fault.path).read_text(), fault)

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._fault.module:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        assert spec is not None and spec.origin is not None, fullname
        return importlib.util.spec_from_loader(fullname, _Loader(self._tree, spec.origin), origin=spec.origin)


class _Loader(importlib.abc.InspectLoader):
    def __init__(self, tree: ast.Module, origin: str) -> None:
        self._tree = tree
        self._origin = origin

    def get_source(self, fullname: str) -> str:
        return ast.unparse(self._tree)

    def get_code(self, fullname: str) -> Any:
        return compile(self._tree, self._origin, "exec")


def run_planted(fault: Fault) -> None:
    """Run the fault's test files; exit with `CAUGHT` if a test fails, with `SURVIVES` if all pass."""
    import pytest

    sys.meta_path.insert(0, Planter(fault))
    status = pytest.main([*OPTIONS, *fault.tests])
    sys.exit({pytest.ExitCode.TESTS_FAILED: CAUGHT, pytest.ExitCode.OK: SURVIVES}.get(status, int(status)))
