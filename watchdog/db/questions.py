"""Shell. What operators and metrics ask about one outbox; each question is bounded, and reads by an index."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from sqlalchemy import Engine, Row, text

from qmq.errors import CallError
from qmq.outbox.dialect import DIALECTS
from qmq.outbox.row import decode_row
from qmq.outbox.table import Flavor, table_name
from qmq.watchdog.db.engine import READING
from qmq.watchdog.sources import Source

COUNT_MAX = 100_000
"""Beyond it nothing is counted: a table of millions of rows would be read for a number that says "too many" anyway."""
AGES_MAX = 10_000
AGE_STEPS_S = (60, 600, 3_600, 86_400)
RETRY_ROWS = 1_000
"""Of one statement."""

_SHOWN = "id, content, status, error, reason, claim"


class Stats(NamedTuple):
    """Counts up to COUNT_MAX. `by_age`: of the pending rows that are due longest, how many are older than each step."""

    pending: int
    claimed: int
    parked: int
    oldest_s: float
    by_age: dict[int, int]


class StuckRow(NamedTuple):
    """A row that waits or is parked. `created_ms`: by its producer's clock; 0: nobody knows."""

    id: int
    state: str
    errors: int
    reason: str
    age_s: float
    subject: str
    message_id: str
    created_ms: int


class Questions:
    """Asked on any thread, beside a drain."""

    def __init__(self, engine: Engine, source: Source) -> None:
        self._engine, self._reading = engine, engine.execution_options(**{READING: True})
        self._table, self._dialect = table_name(source.table), DIALECTS[Flavor(source.kind)]
        self._age_ms = source.age_ms

    def close(self) -> None:
        self._engine.dispose()

    def stats(self) -> Stats:
        with self._reading.begin() as connection:

            def count(where: str) -> int:
                some = f"SELECT 1 AS one FROM {self._table} WHERE {where} LIMIT {COUNT_MAX}"
                return int(connection.execute(text(f"SELECT COUNT(*) FROM ({some}) AS some_rows")).scalar_one())

            age = self._dialect.created_age.format("create_time")
            oldest = f"SELECT {age} FROM {self._table} WHERE status = 0 ORDER BY update_time, id LIMIT {AGES_MAX}"
            ages_s = [max(0, row[0] or 0) / 1000 for row in connection.execute(text(oldest))]
            by_age = {step: sum(age_s >= step for age_s in ages_s) for step in AGE_STEPS_S}
            return Stats(
                count("status = 0"), count("claim > ''"), count("status < 0"), max(ages_s, default=0.0), by_age
            )

    def stuck(self, *, older_s: int, limit: int) -> list[StuckRow]:
        """Return parked rows, then of the AGES_MAX waiting ones that are due longest those older than `older_s`."""
        age = self._dialect.created_age.format("create_time")
        parked = f"SELECT id FROM {self._table} WHERE status < 0 ORDER BY status, update_time, id LIMIT {int(limit)}"
        due = f"SELECT id, {age} AS age FROM {self._table} WHERE status = 0 ORDER BY update_time, id LIMIT {AGES_MAX}"
        waiting = f"SELECT id FROM ({due}) AS due WHERE age >= {older_s * 1000} LIMIT {int(limit)}"
        with self._reading.begin() as connection:
            ids = [row[0] for statement in (parked, waiting) for row in connection.execute(text(statement))][:limit]
            if not ids:
                return []
            listed = ", ".join(map(str, ids))
            statement = f"SELECT {_SHOWN}, {age} FROM {self._table} WHERE id IN ({listed})"
            found = {row.id: _stuck(row) for row in connection.execute(text(statement))}
        return [found[id] for id in ids if id in found]

    def retry(self, ids: Sequence[int] | None) -> int:
        """Let parked rows be sent, as if they had never failed; of those that wait, end the back-off. None: all that
        are parked by now; a drain may park some of them again as fast as this goes on.

        Returns how many.
        """
        if ids is not None:
            return sum(self._retry(list(ids[at : at + RETRY_ROWS])) for at in range(0, len(ids), RETRY_ROWS))
        total, now = 0, f"SELECT {self._dialect.moment.format(0)}"
        with self._reading.begin() as connection:
            began = connection.execute(text(now)).scalar_one()
        while part := self._parked(began):
            total += self._retry(part)
        return total

    def _parked(self, before: object) -> list[int]:
        chosen = (
            f"SELECT id FROM {self._table} WHERE status < 0 AND update_time <= :before"
            f" ORDER BY status, update_time, id LIMIT {RETRY_ROWS}"
        )
        with self._reading.begin() as connection:
            return [row[0] for row in connection.execute(text(chosen), {"before": before})]

    def _retry(self, ids: list[int]) -> int:
        due = self._dialect.moment.format(-self._age_ms)
        statement = (
            f"UPDATE {self._table} SET status = 0, error = 0, reason = NULL, claim = NULL, update_time = {due}"
            f" WHERE id IN ({', '.join(str(int(id)) for id in ids)}) AND (status < 0 OR claim IS NULL)"
        )
        with self._engine.begin() as connection:
            return connection.execute(text(statement)).rowcount


def _stuck(row: Row[Any]) -> StuckRow:
    id, content, status, errors, reason, claim, age_ms = tuple(row)
    state = "parked" if status < 0 else "claimed" if claim else "waiting"
    subject = message_id = ""
    created_ms = 0
    try:
        message = decode_row(content)
        subject, message_id = _sendable(message.subject), _sendable(str(message.id))
        created_ms = message.created_ms if 0 < message.created_ms < 1 << 63 else 0
    except (CallError, ValueError, TypeError, OverflowError, RecursionError) as error:
        reason = reason or str(error)
    shown = _sendable(reason or "")
    return StuckRow(id, state, errors, shown, max(0, age_ms or 0) / 1000, subject, message_id, created_ms)


def _sendable(text: str) -> str:
    """Return a text as it may travel: JSON in a row, and SQLite, give halves of characters, which UTF-8 cannot say."""
    return text.encode("utf-8", "backslashreplace").decode()
