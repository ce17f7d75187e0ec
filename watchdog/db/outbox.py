"""Shell. The watchdog's statements on one outbox. Every method blocks and is one transaction.

A scan reads without a lock; a claiming locks just the rows that it was given, by their keys, and passes over those
that others lock. So an application waits for the watchdog no longer than for any other short transaction on its rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import DBAPIError

from qmq.outbox.table import table_name
from qmq.watchdog.claims import Candidate, candidate_of
from qmq.watchdog.db.dialect import DIALECTS
from qmq.watchdog.db.engine import READING
from qmq.watchdog.sources import Source
from qmq.watchdog.work import Claiming, Disown, Due, Known, Page, ReadClaims, ReadPage, Settling, TakeOver

PARKED = -2
"""QMQ's number of a row that is not sent any more."""
PAGE_BYTES_MAX = 4 << 20
CLAIMS_MAX = 100
DISOWNED_MAX = 1_000
"""Rows parked in one transaction, of a claim that none of ours wrote and whose rows nobody counted."""
TRIES_MAX = 3
_REPEAT_SQLSTATES = {"40001", "40P01"}
_REPEAT_NUMBERS = {1020, 1213}
"""Deadlocks, and MariaDB's record that changed since it was read: the same transaction may do next time."""

T = TypeVar("T")


class Outbox:
    """The table of one registered database. Made when a drain begins; any thread may call it, one at a time."""

    def __init__(self, engine: Engine, source: Source) -> None:
        self._engine, self._age_ms = engine, source.age_ms
        self._reading = engine.execution_options(**{READING: True})
        self._table = table_name(source.table)
        self._dialect = DIALECTS[source.kind]

    def close(self) -> None:
        self._engine.dispose()

    # What a drain asks (watchdog.work).

    def read_page(self, work: ReadPage) -> Page:
        return self._read(lambda connection: self._page(connection, work))

    def claim(self, work: Claiming) -> dict[str, list[int]]:
        return self._write(lambda connection: self._claim(connection, work))

    def settle(self, work: Settling) -> None:
        self._write(lambda connection: self._settle(connection, work))

    def read_claims(self, work: ReadClaims) -> list[Known]:
        statement = (
            f"SELECT claim, {self._dialect.age.format('MIN(update_time)')} FROM {self._table}"
            f" WHERE {'claim > :after' if work.after else 'claim IS NOT NULL'}"
            f" GROUP BY claim ORDER BY claim LIMIT {CLAIMS_MAX}"
        )
        values = {"after": work.after} if work.after else {}
        return self._read(lambda connection: [Known(*row) for row in connection.execute(text(statement), values)])

    def take_over(self, work: TakeOver) -> list[Candidate]:
        return self._write(lambda connection: self._take_over(connection, work))

    def disown(self, work: Disown) -> int:
        return self._write(lambda connection: self._disown(connection, work))

    # How.

    def _page(self, connection: Connection, work: ReadPage) -> Page:
        behind, values = "", {}
        if work.after is not None:
            behind = " AND update_time >= :time AND (update_time > :time OR id > :id)"
            values = {"time": work.after[0], "id": work.after[1]}
        found = connection.execute(text(self.page_statement(behind, work.limit)), values).all()
        taken = _within(PAGE_BYTES_MAX, [row[3] for row in found])
        whole = taken == len(found) < work.limit
        rows = self._candidates(connection, [row[0] for row in found[:taken]])
        errors = {row[0]: row[2] for row in found}
        after = None if whole else (found[taken - 1][1], found[taken - 1][0])
        told = found[0][4] if found else None
        return Page([rows[id]._replace(errors=errors[id]) for id, *_ in found[:taken] if id in rows], after, told)

    def page_statement(self, behind: str, limit: int) -> str:
        """The scan: by the index (status, update_time, id), without the contents."""
        old = self._dialect.moment.format(-self._age_ms)
        return (
            f"SELECT id, update_time, error, LENGTH(content), {self._dialect.moment.format(0)} FROM {self._table}"
            f" WHERE status = 0 AND claim IS NULL AND update_time <= {old}{behind}"
            f" ORDER BY update_time, id LIMIT {int(limit)}"
        )

    def _candidates(self, connection: Connection, ids: Sequence[int]) -> dict[int, Candidate]:
        if not ids:
            return {}
        statement = f"SELECT id, content FROM {self._table} WHERE id IN ({_list(ids)})"
        now_ms = time.time_ns() // 1_000_000
        return {id: candidate_of(id, content, 0, now_ms) for id, content in connection.execute(text(statement))}

    def _claim(self, connection: Connection, work: Claiming) -> dict[str, list[int]]:
        wanted = [id for ids in work.claims.values() for id in ids]
        wanted += [id for id, _ in work.parked] + [id for one in work.postponed for id in one.ids]
        free = self._lock(connection, wanted)
        got = {claim: [id for id in ids if id in free] for claim, ids in work.claims.items()}
        now = self._dialect.moment.format(0)
        for claim, ids in got.items():
            self._update(connection, ids, f"claim = :claim, update_time = {now}", claim=claim)
        for reason, ids in _by_reason(work.parked):
            self._update(connection, [id for id in ids if id in free], self._parking(), reason=reason)
        for one in work.postponed:
            due, values = self._due(one.due)
            setting = f"reason = :reason, update_time = {due}"
            self._update(connection, [id for id in one.ids if id in free], setting, reason=one.reason, **values)
        return got

    def _lock(self, connection: Connection, ids: Sequence[int]) -> set[int]:
        """Lock the rows that are as the scan saw them and that nobody else locks; return which. One that is too young
        was never seen: a database that lost its last commits gave it the id. As a condition, its age could lead the
        optimizer to an index of more rows than these, which it would lock."""
        if not ids:
            return set()
        is_old = f"update_time <= {self._dialect.moment.format(-self._age_ms)}"
        statement = (
            f"SELECT id, {is_old} FROM {self._table} WHERE id IN ({_list(sorted(ids))})"
            f" AND status = 0 AND claim IS NULL{self._dialect.lock}"
        )
        return {id for id, is_old in connection.execute(text(statement)) if is_old}

    def _settle(self, connection: Connection, work: Settling) -> None:
        for one in work.settled:
            if one.stored:
                where = f"id IN ({_list(sorted(one.stored))}) AND claim = :claim"
                connection.execute(text(f"DELETE FROM {self._table} WHERE {where}"), {"claim": one.claim})
            for reason, ids in _by_reason(one.parked):
                setting = f"{self._parking()}, error = error + 1"
                self._update(connection, ids, setting, " AND claim = :claim", claim=one.claim, reason=reason)
        for back in work.released:
            due, values = self._due(back.due)
            setting = f"claim = NULL, error = error + {int(back.failures)}, reason = :reason, update_time = {due}"
            self._update(
                connection, back.ids, setting, " AND claim = :claim", claim=back.claim, reason=back.reason, **values
            )

    def _due(self, due: Due) -> tuple[str, dict[str, Any]]:
        """Return what `update_time` is set to, as SQL, and its values."""
        plus_ms = due.plus_ms - self._age_ms
        if due.told is None:
            return self._dialect.moment.format(plus_ms), {}
        return self._dialect.since.format(plus_ms), {"told": due.told}

    def _parking(self) -> str:
        return f"status = {PARKED}, reason = :reason, claim = NULL, update_time = {self._dialect.moment.format(0)}"

    def _take_over(self, connection: Connection, work: TakeOver) -> list[Candidate]:
        values = {"old": work.old, "new": work.new}
        # MariaDB moves `update_time` on with each update that does not name it, and it tells since when this claim is.
        setting = "claim = :new, update_time = update_time"
        connection.execute(text(f"UPDATE {self._table} SET {setting} WHERE claim = :old"), values)
        found = connection.execute(
            text(f"SELECT id, content, error FROM {self._table} WHERE claim = :new ORDER BY id"), values
        )
        now_ms = time.time_ns() // 1_000_000
        return [candidate_of(id, content, errors, now_ms) for id, content, errors in found]

    def _disown(self, connection: Connection, work: Disown) -> int:
        where = "claim = :claim AND status = 0"
        chosen = f"SELECT id FROM {self._table} WHERE {where} LIMIT {DISOWNED_MAX}"
        ids = [row[0] for row in connection.execute(text(chosen), {"claim": work.claim})]
        self._update(connection, ids, self._parking(), f" AND {where}", claim=work.claim, reason=work.reason)
        return len(ids)

    def _update(self, connection: Connection, ids: Sequence[int], setting: str, more: str = "", **values: Any) -> None:
        if ids:
            where = f"id IN ({_list(sorted(ids))}){more}"
            connection.execute(text(f"UPDATE {self._table} SET {setting} WHERE {where}"), values)

    def _read(self, work: Callable[[Connection], T]) -> T:
        return _repeat(self._reading, work)

    def _write(self, work: Callable[[Connection], T]) -> T:
        return _repeat(self._engine, work)


def _repeat(engine: Engine, work: Callable[[Connection], T]) -> T:
    """Run one transaction; again, if the database ended it in favour of another one."""
    for attempt in range(1, TRIES_MAX + 1):
        try:
            with engine.begin() as connection:
                return work(connection)
        except DBAPIError as error:
            if attempt == TRIES_MAX or not _was_in_the_way(error):
                raise
    raise AssertionError("the last try returns or raises")


def _was_in_the_way(error: DBAPIError) -> bool:
    original = error.orig
    numbers = getattr(original, "args", ())[:1]
    return getattr(original, "sqlstate", None) in _REPEAT_SQLSTATES or not _REPEAT_NUMBERS.isdisjoint(numbers)


def _within(bytes_max: int, sizes: Sequence[int | None]) -> int:
    """Return how many of the first contents are not more than `bytes_max` together; one at least."""
    total = 0
    for position, size in enumerate(sizes):
        total += size or 0
        if position and total > bytes_max:
            return position
    return len(sizes)


def _by_reason(parked: Sequence[tuple[int, str]]) -> Iterator[tuple[str, list[int]]]:
    found: dict[str, list[int]] = {}
    for id, reason in parked:
        found.setdefault(reason, []).append(id)
    yield from found.items()


def _list(ids: Sequence[int]) -> str:
    return ", ".join(str(int(id)) for id in ids)
