"""The database of an application with an outbox, which outlives its programs and whoever reads it."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from qmq.outbox.schema import create_statements
from qmq.outbox.table import DEFAULT_TABLE
from tests.simulation.shells.loop import current
from tests.simulation.shells.stand_ins import give_virtual_time


class Shop:
    """SQLite as it is, but for its clock. Each order has the id of the message that its transaction sends."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._look: sqlite3.Connection | None = None

    def create(self) -> None:
        self._look = sqlite3.connect(self.path)
        for statement in [*create_statements("sqlite"), "CREATE TABLE orders (id TEXT PRIMARY KEY)"]:
            self._look.execute(statement)

    def connect(self) -> sqlite3.Connection:
        """Connect a program; the kernel closes its files when it is killed."""
        connection = sqlite3.connect(self.path, timeout=0)
        give_virtual_time(connection)
        if (process := current()) is not None:
            process.ended.append(connection.close)
        return connection

    def orders(self) -> set[str]:
        """Ids of what was committed."""
        return {row[0] for row in self._read("SELECT id FROM orders")}

    def rows(self) -> int:
        """How many messages wait in the outbox."""
        return len(self._read(f"SELECT id FROM {DEFAULT_TABLE}"))

    def _read(self, statement: str) -> list[tuple[str]]:
        return self._look.execute(statement).fetchall() if self._look is not None else []

    def close(self) -> None:
        if self._look is not None:
            self._look.close()
