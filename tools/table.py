"""Core. Output of a command: lines of text, and tables fitted to a width."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum
from typing import Any

GAP = "  "


class Tone(Enum):
    """Meaning of a cell; terminals show it as a colour."""

    PLAIN, GOOD, WARN, BAD = "plain", "good", "warn", "bad"


@dataclass(frozen=True, slots=True)
class Cell:
    """One displayed value."""

    text: str
    tone: Tone = Tone.PLAIN
    is_number: bool = False


@dataclass(frozen=True, slots=True)
class Column:
    """One column: its title, and the field of a row (a mapping), or a function of the row."""

    title: str
    value: str | Callable[[Any], object]
    drop: int = 0
    """Order of dropping while the width is too short: the highest number first; 0 stays."""
    fold: int = 0
    """Smallest width; longer text wraps. 0: never wraps."""

    def cell(self, row: Mapping[str, Any]) -> Cell:
        return to_cell(self.value(row) if callable(self.value) else row.get(self.value))


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under titles. `empty` replaces a table without rows."""

    columns: tuple[Column, ...]
    rows: Sequence[Mapping[str, Any]]
    empty: str = "none"
    title: str = ""


Block = str | Cell | Table
"""A piece of a command's output."""


@dataclass(frozen=True, slots=True)
class Laid:
    """A table reduced to the columns that fit."""

    titles: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    widths: tuple[int, ...]
    folds: tuple[bool, ...]
    left_out: tuple[str, ...]


def lay(table: Table, width: int | None) -> Laid:
    """Choose the columns that fit into `width`; None: all fit. Droppable columns without any value go first."""
    columns = list(table.columns)
    cells = {column.title: [column.cell(row) for row in table.rows] for column in columns}
    columns = [column for column in columns if not column.drop or any(cell.text != "-" for cell in cells[column.title])]
    widths = {title: max(len(title), *(len(cell.text) for cell in column)) for title, column in cells.items()}
    left_out: list[str] = []
    least = {column.title: min(column.fold or widths[column.title], widths[column.title]) for column in columns}
    while width is not None and sum(least[column.title] + len(GAP) for column in columns) - len(GAP) > width:
        droppable = max(columns, key=lambda column: column.drop)
        if not droppable.drop:
            break
        columns.remove(droppable)
        left_out.append(droppable.title)
    titles = tuple(column.title for column in columns)
    rows = tuple(zip(*(cells[title] for title in titles))) if table.rows else ()
    folds = tuple(bool(column.fold) for column in columns)
    return Laid(titles, rows, tuple(widths[title] for title in titles), folds, tuple(left_out))


def plain(blocks: Iterable[Block], width: int | None = None) -> str:
    """Format blocks as text without colours; numbers are right-aligned, missing values are hyphens."""
    return "\n".join(_plain_block(block, width) for block in blocks)


def _plain_block(block: Block, width: int | None) -> str:
    if isinstance(block, Table):
        return _plain_table(block, width)
    return printable(block.text if isinstance(block, Cell) else block, lines=True)


def _plain_table(table: Table, width: int | None) -> str:
    title = [table.title] if table.title else []
    if not table.rows:
        return "\n".join([*title, table.empty])
    laid = lay(table, width)
    head = GAP.join(title.ljust(width) for title, width in zip(laid.titles, laid.widths))
    body = [GAP.join(align(cell, width) for cell, width in zip(row, laid.widths)) for row in laid.rows]
    return "\n".join(line.rstrip() for line in [*title, head, *body, *left_out(laid)])


def left_out(laid: Laid) -> list[str]:
    """Name the columns dropped for lack of width."""
    return [f"(too narrow for {', '.join(laid.left_out)})"] if laid.left_out else []


def align(cell: Cell, width: int) -> str:
    return cell.text.rjust(width) if cell.is_number else cell.text.ljust(width)


def to_cell(value: object) -> Cell:
    """Format any JSON value."""
    if isinstance(value, Cell):
        return value
    if value is None or value == "" or value == []:
        return Cell("-")
    if isinstance(value, bool):
        return Cell("yes" if value else "no")
    if isinstance(value, int):
        return Cell(str(value), is_number=True)
    if isinstance(value, list | tuple):
        return Cell(printable(",".join(map(str, value))))
    if isinstance(value, dict):
        return Cell(printable(" ".join(f"{name}={to_cell(item).text}" for name, item in value.items())))
    return Cell(printable(str(value)))


def printable(text: str, *, lines: bool = False) -> str:
    """Remove control characters: names and messages are untrusted input for a terminal."""
    return "".join(char if char.isprintable() or (lines and char == "\n") else "�" for char in text)


def good_or_bad(field: str, *, good: str = "yes", bad: str = "no") -> Callable[[Mapping[str, Any]], Cell]:
    """Return a column function for values that are good when true."""

    def cell(row: Mapping[str, Any]) -> Cell:
        value = row.get(field)
        if value is None:
            return Cell("-")
        return Cell(good, Tone.GOOD) if value else Cell(bad, Tone.BAD)

    return cell


def moment(field: str) -> Callable[[Mapping[str, Any]], str]:
    """Return a column function for milliseconds since 1970, in UTC; 0 is empty."""
    return lambda row: utc(row.get(field))


def utc(milliseconds: int | None) -> str:
    if not milliseconds:
        return ""
    try:
        return datetime.fromtimestamp(milliseconds / 1000, UTC).strftime("%Y-%m-%d %H:%M:%SZ")
    except (ValueError, OverflowError, OSError):
        return str(milliseconds)


def span(milliseconds: int | None) -> str:
    """Format a duration in its largest useful unit: `3 d 4 h`, `12 min`, `4.2 s`."""
    if milliseconds is None:
        return ""
    seconds = milliseconds / 1000
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes, hours, days = round(seconds / 60), seconds / 3600, seconds / 86400
    if minutes < 100:
        return f"{minutes} min"
    return f"{hours:.1f} h" if hours < 48 else f"{days:.1f} d"


def size(count: int | float | None) -> str:
    """Format a number of bytes in its largest useful unit."""
    if count is None:
        return ""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
