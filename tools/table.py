"""Core. What a command shows: lines of text, and tables that fit the width they are given."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum
from typing import Any

GAP = "  "


class Tone(Enum):
    """How a cell is meant; terminals show it as a colour."""

    PLAIN, GOOD, WARN, BAD = "plain", "good", "warn", "bad"


@dataclass(frozen=True, slots=True)
class Cell:
    """One value as it is shown."""

    text: str
    tone: Tone = Tone.PLAIN
    is_number: bool = False


@dataclass(frozen=True, slots=True)
class Column:
    """One column: its title, and the field of a row (a mapping) that it shows, or how it is made of the row."""

    title: str
    value: str | Callable[[Any], object]
    drop: int = 0
    """Where the width does not do, columns go, the highest number first; 0 stays."""
    fold: int = 0
    """The column may be this narrow: its text goes on in the next line. 0: it is shown as wide as it is."""

    def cell(self, row: Mapping[str, Any]) -> Cell:
        return to_cell(self.value(row) if callable(self.value) else row.get(self.value))


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under titles. `empty` is said when there are none."""

    columns: tuple[Column, ...]
    rows: Sequence[Mapping[str, Any]]
    empty: str = "none"
    title: str = ""


Block = str | Cell | Table
"""A piece of what a command shows."""


@dataclass(frozen=True, slots=True)
class Laid:
    """A table whose columns are chosen: as many as fit."""

    titles: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    widths: tuple[int, ...]
    folds: tuple[bool, ...]
    left_out: tuple[str, ...]


def lay(table: Table, width: int | None) -> Laid:
    """Choose columns. A column without any value goes first of all if it may go; None as width: all fit."""
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
    """Write blocks as text without colours; numbers are right-aligned, what is missing is a hyphen."""
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
    """Say which columns the width did not allow."""
    return [f"(too narrow for {', '.join(laid.left_out)})"] if laid.left_out else []


def align(cell: Cell, width: int) -> str:
    return cell.text.rjust(width) if cell.is_number else cell.text.ljust(width)


def to_cell(value: object) -> Cell:
    """Show any JSON value."""
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
    """Leave out what could steer a terminal: names and messages come from others."""
    return "".join(char if char.isprintable() or (lines and char == "\n") else "�" for char in text)


def good_or_bad(field: str, *, good: str = "yes", bad: str = "no") -> Callable[[Mapping[str, Any]], Cell]:
    """Make the value of a column that is fine when true."""

    def cell(row: Mapping[str, Any]) -> Cell:
        value = row.get(field)
        if value is None:
            return Cell("-")
        return Cell(good, Tone.GOOD) if value else Cell(bad, Tone.BAD)

    return cell


def moment(field: str) -> Callable[[Mapping[str, Any]], str]:
    """Make the value of a column with milliseconds since 1970, shown in UTC; 0 is none."""
    return lambda row: utc(row.get(field))


def utc(milliseconds: int | None) -> str:
    if not milliseconds:
        return ""
    try:
        return datetime.fromtimestamp(milliseconds / 1000, UTC).strftime("%Y-%m-%d %H:%M:%SZ")
    except (ValueError, OverflowError, OSError):
        return str(milliseconds)


def span(milliseconds: int | None) -> str:
    """Write a length of time in the largest unit that says something: `3 d 4 h`, `12 min`, `4.2 s`."""
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
    """Write a number of bytes in the unit that says something."""
    if count is None:
        return ""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
