"""Core. Plain tables for terminals."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def render_table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Lay out rows in columns as wide as their widest cell; numbers are right-aligned, None is a hyphen."""
    body = [list(row) for row in rows]
    cells = [[_text(value) for value in row] for row in body]
    widths = [max(len(line[column]) for line in [list(head), *cells]) for column in range(len(head))]
    lines = ["  ".join(title.ljust(width) for title, width in zip(head, widths))]
    for row, texts in zip(body, cells):
        lines.append("  ".join(_align(value, text, width) for value, text, width in zip(row, texts, widths)))
    return "\n".join(line.rstrip() for line in lines)


def _text(value: object) -> str:
    if value is None or value == "":
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)


def _align(value: object, text: str, width: int) -> str:
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return text.rjust(width) if is_number else text.ljust(width)
