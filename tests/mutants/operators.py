"""Core. Small faults that a programmer might make, one at a time, in the functions of a module.

Operators are those that lost messages elsewhere: a call, a check or an effect that is missing, two effects in the wrong
order, a bound that is one off, a condition that is turned round or lacks a part, a value that is not stored.

Left alone, because nobody can tell the difference: what is logged, what errors and reasons say, assertions, and what is
checked only to raise `BrokenInvariant`, which cannot be unless the product has another fault.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType

Function = ast.FunctionDef | ast.AsyncFunctionDef
Edit = Callable[[], Callable[[], None]]
"""Changes the tree; what it returns takes that back."""

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {ast.Add: ast.Sub, ast.Sub: ast.Add}
CHOICES = {"max": "min", "min": "max", "any": "all", "all": "any"}
UNSEEN = (
    *(f"log.{level}(" for level in ("debug", "info", "warning", "error", "critical", "exception", "log")),
    "logging.",
    "warnings.",
    "require(",
)
"""Calls that begin so change nothing that a promise rests on: `require` is a tripwire for what cannot be."""
OF_CONTAINERS = {"append": 1, "add": 1, "discard": 1, "remove": 1, "update": 1, "pop": 2, "popleft": 0, "clear": 0}
"""Methods that change a container and do nothing else, by the number of arguments that tells them from others."""
PURE = {"len", "sum", "int", "min", "max", "isinstance", "get", "setdefault"}
COUNTERS = "self._counters."
"""Metrics: who scrapes them does so between two passes of the core."""
DESCRIBING = {"__repr__", "__str__", "__init_subclass__"}


@dataclass(frozen=True, slots=True)
class Mutant:
    """One function with one fault. Its `name` changes only if the function's name or the changed text does."""

    path: str
    function: str
    change: str
    line: int
    lines: range
    """Those of the statement, without its body: a test that executes none of them cannot notice the fault."""
    code: CodeType
    original: CodeType

    @property
    def name(self) -> str:
        return f"{self.path}:{self.function}: {self.change}"


def mutants(root: Path, path: str) -> Iterator[Mutant]:
    """Yield all mutants of the module `path`, which is relative to `root`, in the order of its lines."""
    place = root / path
    tree = ast.parse(place.read_bytes())
    for function, module in functions_of(tree):
        original = compiled(module, function, place)
        spans = _spans(function)
        seen: dict[str, int] = {}
        for node, change, edit in _edits(function):
            undo = edit()
            code = compiled(module, function, place)
            undo()
            if code.co_freevars != original.co_freevars or _same(code, original):
                continue
            seen[change] = seen.get(change, 0) + 1
            numbered = change if seen[change] == 1 else f"{change} ({seen[change]})"
            line = getattr(node, "lineno", 0)
            yield Mutant(path, original.co_qualname, numbered, line, _span(spans, line), code, original)


def functions_of(tree: ast.Module) -> Iterator[tuple[Function, ast.Module]]:
    """Yield each outermost function, with a module in which it stands alone in its classes."""
    future = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module == "__future__"]

    def walk(body: list[ast.stmt], classes: list[ast.ClassDef]) -> Iterator[tuple[Function, ast.Module]]:
        for node in body:
            if isinstance(node, ast.ClassDef):
                yield from walk(node.body, [*classes, node])
            elif isinstance(node, Function) and node.name not in DESCRIBING:
                alone: ast.stmt = node
                for outer in reversed(classes):
                    alone = ast.copy_location(ast.ClassDef(outer.name, [], [], [alone], []), outer)
                yield node, ast.fix_missing_locations(ast.Module([*future, alone], []))

    yield from walk(tree.body, [])


def compiled(module: ast.Module, function: Function, place: Path) -> CodeType:
    found = compile(module, str(place), "exec", dont_inherit=True)
    while found.co_name != function.name:
        found = next(const for const in reversed(found.co_consts) if isinstance(const, CodeType))
    return found


def _spans(function: Function) -> list[range]:
    """Return the lines of each statement, of a compound one only those before its body."""
    spans = []
    for node in ast.walk(function):
        if isinstance(node, ast.stmt) and node is not function:
            body = getattr(node, "body", None)
            end = body[0].lineno if isinstance(body, list) and body[0].lineno > node.lineno else _end(node)
            spans.append(range(node.lineno, end))
    return spans


def _end(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) + 1


def _span(spans: list[range], line: int) -> range:
    return min((span for span in spans if line in span), key=len, default=range(line, line + 1))


def _same(one: CodeType, other: CodeType) -> bool:
    """Whether the compiler made the same of both."""
    return (
        one.co_code == other.co_code
        and all(
            _same(a, b) if isinstance(a, CodeType) and isinstance(b, CodeType) else (type(a), a) == (type(b), b)
            for a, b in zip(one.co_consts, other.co_consts, strict=False)
        )
        and (one.co_names, one.co_varnames) == (other.co_names, other.co_varnames)
    )


# What may be changed.


def _edits(function: Function) -> Iterator[tuple[ast.AST, str, Edit]]:
    """Yield (where, what in words, how) for each fault that fits somewhere in the function."""
    for statements in _bodies(function):
        yield from _of_statements(statements, ordered=function.name != "__init__")
    for node in _seen_nodes(function):
        yield from _of_expression(node)


def _bodies(function: Function) -> Iterator[list[ast.stmt]]:
    for node in ast.walk(function):
        for field in ("body", "orelse", "finalbody"):
            statements = getattr(node, field, None)
            if isinstance(statements, list) and statements and isinstance(statements[0], ast.stmt):
                yield statements


def _of_statements(statements: list[ast.stmt], *, ordered: bool) -> Iterator[tuple[ast.AST, str, Edit]]:
    for place, node in enumerate(statements):
        if _is_effect(node):
            yield node, f"without `{_text(node)}`", _replaced(statements, place, ast.copy_location(ast.Pass(), node))
        following = statements[place + 1] if place + 1 < len(statements) else None
        if ordered and following is not None and _order_matters(node, following):
            yield node, f"`{_text(following)}` before `{_text(node)}`", _swapped(statements, place)


def _order_matters(one: ast.stmt, other: ast.stmt) -> bool:
    """Whether somebody might notice which of two effects comes first."""
    if not _is_effect(one) or not _is_effect(other) or _are_checks(one, other):
        return False
    ours, theirs = _place(one), _place(other)
    if ours.startswith(COUNTERS) or theirs.startswith(COUNTERS):
        return False
    return not ours or not theirs or _is_in(theirs, one) or _is_in(ours, other)


def _is_in(place: str, node: ast.stmt) -> bool:
    return re.search(rf"{re.escape(place)}\b", _text(node)) is not None


def _place(node: ast.stmt) -> str:
    """Return what an effect changes in memory, as text; nothing if it may do more than that.

    One thread runs a core: a change of one place and a change of another that neither looks at are made in either
    order."""
    match node:
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=place, attr=name), args=arguments, keywords=[])):
            if len(arguments) != OF_CONTAINERS.get(name):
                return ""
            seen: list[ast.expr] = arguments
        case ast.Expr(value=ast.Call(func=ast.Name("heappush"), args=[place, entry])):
            seen = [entry]
        case ast.AugAssign(target=place, value=value) | ast.Assign(targets=[place], value=value):
            seen = [value]
        case ast.Delete(targets=[place]):
            seen = []
        case _:
            return ""
    whole = place
    while isinstance(place, ast.Subscript | ast.Call):
        found = place.func if isinstance(place, ast.Call) else place
        place = found.value if isinstance(found, ast.Attribute | ast.Subscript) else ast.Name("")
    calls = [part.func for one in (whole, *seen) for part in ast.walk(one) if isinstance(part, ast.Call)]
    return _text(place) if all(_text(call).rpartition(".")[2] in PURE for call in calls) else ""


def _are_checks(*nodes: ast.stmt) -> bool:
    """Whether these only raise: of two that would, their order says which error is told."""
    return all(_text(node).split("(")[0].rpartition(".")[2].lstrip("_").startswith("check_") for node in nodes)


def _is_effect(node: ast.stmt) -> bool:
    """A call for its effect, or a value stored in an object."""
    if isinstance(node, ast.Expr):
        value = node.value.value if isinstance(node.value, ast.Await) else node.value
        return isinstance(value, ast.Call) and not _text(value).startswith(UNSEEN)
    if isinstance(node, ast.AugAssign):
        return True
    if isinstance(node, ast.Assign):
        return not any(isinstance(name, ast.Name | ast.Tuple) for name in node.targets)
    return isinstance(node, ast.Delete)


def _seen_nodes(function: Function) -> Iterator[ast.expr | ast.stmt]:
    """Yield what a caller could notice, without defaults, annotations, assertions and what is only said."""
    stack: list[ast.AST] = list(reversed(function.body))
    while stack:
        node = stack.pop()
        if isinstance(node, ast.Assert | ast.Raise) or _is_tripwire(node) or _is_saying(node):
            continue
        if isinstance(node, ast.Call) and _text(node).startswith(UNSEEN):
            continue
        if isinstance(node, ast.AnnAssign):
            stack.extend([node.value] if node.value else [])
            continue
        if isinstance(node, ast.expr | ast.stmt):
            yield node
        if isinstance(node, ast.JoinedStr):
            continue
        stack.extend(reversed(list(ast.iter_child_nodes(node))))


def _is_tripwire(node: ast.AST) -> bool:
    """Whether this does nothing unless the product has another fault."""
    if not isinstance(node, ast.If) or node.orelse or len(node.body) > 1 or not isinstance(node.body[0], ast.Raise):
        return False
    return node.body[0].exc is not None and _text(node.body[0].exc).startswith("BrokenInvariant(")


def _is_saying(node: ast.AST) -> bool:
    """Whether this chooses between two texts."""
    if not isinstance(node, ast.IfExp):
        return False
    return all(
        isinstance(part, ast.JoinedStr) or (isinstance(part, ast.Constant) and isinstance(part.value, str))
        for part in (node.body, node.orelse)
    )


def _of_expression(node: ast.expr | ast.stmt) -> Iterator[tuple[ast.AST, str, Edit]]:
    match node:
        case ast.Compare(ops=[op]) if type(op) in COMPARISONS:
            yield _change(node, "ops", [COMPARISONS[type(op)]()])
        case ast.Compare(ops=ops):
            for place, op in enumerate(ops):
                if type(op) in COMPARISONS:
                    yield _change(node, "ops", [*ops[:place], COMPARISONS[type(op)](), *ops[place + 1 :]])
        case ast.BoolOp(op=op, values=values):
            for place in range(len(values)):
                neutral = ast.Constant(isinstance(op, ast.And))
                yield _change(node, "values", [*values[:place], neutral, *values[place + 1 :]])
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield _change(node, "operand", ast.UnaryOp(ast.Not(), operand))
        case ast.BinOp(op=op) if type(op) in ARITHMETIC:
            yield _change(node, "op", ARITHMETIC[type(op)]())
        case ast.Call(func=ast.Name(id=name)) if name in CHOICES:
            yield _change(node, "func", ast.Name(CHOICES[name], ast.Load()))
        case ast.Constant(value=bool(value)):
            yield _change(node, "value", not value)
        case ast.Constant(value=int(value)):
            yield _change(node, "value", value + 1)
        case ast.If(test=test) | ast.IfExp(test=test):
            for never in (False, True):
                before = f"if {_text(test)}"
                yield node, f"`{before}` -> `if {never}`", _set(node, "test", ast.Constant(never))


def _change(node: ast.AST, field: str, value: object) -> tuple[ast.AST, str, Edit]:
    before, edit = _text(node), _set(node, field, value)
    undo = edit()
    after = _text(node)
    undo()
    return node, f"`{before}` -> `{after}`", edit


def _set(node: ast.AST, field: str, value: object) -> Edit:
    def edit() -> Callable[[], None]:
        before = getattr(node, field)
        setattr(node, field, value)
        ast.fix_missing_locations(node)
        return lambda: setattr(node, field, before)

    return edit


def _replaced(statements: list[ast.stmt], place: int, node: ast.stmt) -> Edit:
    def edit() -> Callable[[], None]:
        before, statements[place] = statements[place], node
        return lambda: statements.__setitem__(place, before)

    return edit


def _swapped(statements: list[ast.stmt], place: int) -> Edit:
    def swap() -> Callable[[], None]:
        statements[place], statements[place + 1] = statements[place + 1], statements[place]
        return lambda: None if swap() else None

    return swap


def _text(node: ast.AST) -> str:
    return " ".join(ast.unparse(node).split())
