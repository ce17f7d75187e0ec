"""Shell. Writes the drawings of docs/states.md anew from the tables: `make drawings`."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

from qmq.states import TransitionTable, draw

PAPER = Path(__file__).parents[1] / "docs" / "states.md"
_BLOCK = re.compile(r"(?ms)^<!-- drawn from (\S+)\.(\w+) -->\n```\n.*?^```$")


def table(module: str, name: str) -> TransitionTable:
    found: TransitionTable = getattr(import_module(module), name)
    return found


def tables(text: str) -> list[tuple[str, str]]:
    """Return (module, name) of each table that the paper has a drawing of."""
    return [(found[1], found[2]) for found in _BLOCK.finditer(text)]


def drawn(text: str) -> str:
    """Return the paper with its drawings as the tables are now."""
    return _BLOCK.sub(lambda m: f"<!-- drawn from {m[1]}.{m[2]} -->\n```\n{draw(table(m[1], m[2]))}```", text)


if __name__ == "__main__":
    PAPER.write_text(drawn(PAPER.read_text()))
