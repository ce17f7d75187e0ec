"""Core. Functions that note which of their statements are executed.

A trace function would be called for each line of Python that runs anywhere; a mark costs one call per statement, and
only in the product.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from types import CodeType

from tests.mutants.operators import Function, compiled, functions_of

MARK = "__reached__"
"""The name in `builtins` of what is called with (path, line) before each statement."""


def marked(root: Path, path: str) -> Iterator[tuple[CodeType, CodeType]]:
    """Yield (the code of a function of `path`, the same with marks) for all of them."""
    place = root / path
    tree = ast.parse(place.read_bytes())
    for function, module in functions_of(tree):
        original = compiled(module, function, place)
        _mark(function, path)
        code = compiled(module, function, place)
        if code.co_freevars == original.co_freevars:
            yield original, code


def _mark(function: Function, path: str) -> None:
    for node in list(ast.walk(function)):
        for field in ("body", "orelse", "finalbody"):
            statements = getattr(node, field, None)
            if isinstance(statements, list) and statements and isinstance(statements[0], ast.stmt):
                statements[:] = [part for one in statements for part in (_call(path, one), one)]
    ast.fix_missing_locations(function)


def _call(path: str, statement: ast.stmt) -> ast.stmt:
    called = ast.Call(ast.Name(MARK, ast.Load()), [ast.Constant((path, statement.lineno))], [])
    return ast.copy_location(ast.Expr(called), statement)
