"""Shell. Prints a command's output: coloured tables on a terminal, plain text elsewhere."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable
from typing import TextIO

from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable
from rich.text import Text

from qmq.tools.table import GAP, Block, Cell, Table, Tone, lay, left_out, plain, printable

_COMMAND = re.compile(r"\bqmq (?=[A-Z])")
_STYLES = {Tone.PLAIN: "", Tone.GOOD: "green", Tone.WARN: "yellow", Tone.BAD: "bold red"}


def is_interactive(stream: TextIO) -> bool:
    try:
        return stream.isatty()
    except ValueError:  # closed
        return False


def program() -> str:
    """Return the program name that the operator typed."""
    return "qmq" if os.path.basename(sys.argv[0]) == "qmq" else "tools.sh"


def as_typed(text: str) -> str:
    """Replace `qmq Failover` in a metaserver's text by the command as typed here."""
    return _COMMAND.sub(f"{program()} ", text)


def complain(text: str) -> None:
    print(f"{program()}: {printable(as_typed(text), lines=True)}", file=sys.stderr)


def confirm(question: str) -> bool:
    """Ask for confirmation at the terminal."""
    ask(question)
    return is_yes(sys.stdin.readline())


def ask(question: str) -> None:
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)


def is_yes(line: str) -> bool:
    """Return whether the line is `y` or `yes`."""
    return line.strip().lower() in ("y", "yes")


def show(blocks: Iterable[Block], stream: TextIO | None = None) -> None:
    """Print blocks. With NO_COLOR set, or TERM=dumb, a terminal shows them without colours.

    Raises OSError if they cannot be written.
    """
    stream = stream or sys.stdout
    if not is_interactive(stream):
        print(plain(blocks), file=stream, flush=True)
        return
    is_colourless = bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"
    console = Console(file=stream, highlight=False, emoji=False, force_terminal=not is_colourless)
    for block in blocks:
        _show_block(console, block)


def _show_block(console: Console, block: Block) -> None:
    if isinstance(block, Table):
        _show_table(console, block)
    elif isinstance(block, Cell):
        console.print(Text(printable(block.text, lines=True), style=_STYLES[block.tone]))
    else:
        console.print(Text(printable(block, lines=True)))


def _show_table(console: Console, table: Table) -> None:
    if table.title:
        console.print(Text(table.title, style="bold"))
    if not table.rows:
        console.print(Text(table.empty, style="dim"))
        return
    laid = lay(table, console.width)
    rich = RichTable(box=None, padding=(0, len(GAP), 0, 0), pad_edge=False, header_style="bold")
    for title, cells, folds in zip(laid.titles, zip(*laid.rows), laid.folds):
        numeric = any(cell.is_number for cell in cells)
        rich.add_column(escape(title), justify="right" if numeric else "left", overflow="fold", no_wrap=not folds)
    for row in laid.rows:
        rich.add_row(*(Text(cell.text, style=_STYLES[cell.tone]) for cell in row))
    console.print(rich)
    for line in left_out(laid):
        console.print(Text(line, style="dim"))
