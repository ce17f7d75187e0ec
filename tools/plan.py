"""Core. Display of a change's plan, before the operator confirms it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from qmq.differences import differences
from qmq.tools.command import Command, bad, good, warning
from qmq.tools.table import Block, Cell, Column, Table, to_cell, utc

_TIMES = ("updateTime", "created", "expires", "revoked")
"""Milliseconds since 1970, 0: never."""
_UNSAID = ("action", "dryRun", "details")
NAMES_MAX = 12
"""Number of subject and group names shown; the count is always complete."""


def refusal(preview: Any) -> str:
    """Return the reason to refuse a change, or an empty text."""
    return "; ".join(preview.get("reasons") or ()) if isinstance(preview, Mapping) else ""


def show_plan(command: Command, words: Mapping[str, str], preview: Any) -> Iterable[Block]:
    """Yield the changes of a plan and the subjects, groups and clients that they affect."""
    given = " ".join(f"{name}={_short(value)}" for name, value in words.items() if name not in _UNSAID)
    yield f"{command.name} {given}"
    if not isinstance(preview, Mapping):
        return
    for objection in preview.get("objections") or ():
        if objection not in (preview.get("reasons") or ()):  # forced: carried out despite the objection
            yield warning(f"objection: {objection}")
    yield from _reach(preview)
    yield from _changes(preview.get("before"), preview.get("after"))
    if refusal(preview):
        yield bad("it would be refused")
    elif not preview.get("wouldChange", True) and preview.get("before") == preview.get("after"):
        yield good("nothing would change")


def _reach(preview: Mapping[str, Any]) -> Iterable[Block]:
    if preview.get("clients") or any((preview.get(kind) or {}).get("count") for kind in ("subjects", "groups")):
        yield f"affects {preview['blastRadius']}"
    for kind in ("subjects", "groups"):
        names = (preview.get(kind) or {}).get("names") or []
        if names:
            more = preview[kind]["count"] - len(names[:NAMES_MAX])
            yield f"  {kind}: {', '.join(names[:NAMES_MAX])}{f' and {more:,} more' if more else ''}"


def _changes(before: Any, after: Any) -> Iterable[Block]:
    """Yield the differences field by field."""
    rows = [
        {
            "field": difference.path,
            "before": _cell(difference.path, difference.before),
            "after": _cell(difference.path, difference.after),
        }
        for difference in differences(before, after)
    ]
    if rows:
        yield Table(
            (
                Column("CHANGES", "field"),
                Column("FROM", "before", fold=16),
                Column("TO", "after", fold=16),
            ),
            rows,
        )


def _cell(path: str, value: Any) -> Cell | None:
    if value is None:
        return None
    if isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        return Cell("; ".join(to_cell(item).text for item in value))
    last = path.rpartition(".")[2]
    return to_cell(utc(value) if last in _TIMES and isinstance(value, int) else value)


def _short(value: str) -> str:
    return value if len(value) <= 60 else f"({len(value):,} characters)"
