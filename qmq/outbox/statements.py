"""Shell. SQL statements of a drain (`qmq.outbox.claims`) on one outbox, for any driver, and the counts of its rows.

A scan reads without a lock. A claim locks only the given rows, by key, and skips rows locked by others. So an
application waits for a drain no longer than for any other short transaction on its rows. All times are by the
database's clock: watchdogs and applications on other machines may have other clocks.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from qmq.outbox.claims import (
    AdoptClaims,
    Candidate,
    ClaimName,
    ClaimRows,
    Disown,
    Due,
    Known,
    Page,
    ReadClaims,
    ReadPage,
    SettleClaims,
    Work,
    candidate_of,
)
from qmq.outbox.table import Flavor, Rows, ids_text


class Dialect(NamedTuple):
    """Fragments of SQL.

    `moment`: now plus {0} milliseconds, which may be negative. `since`: the same from :clock, an earlier moment. `age`:
    milliseconds since the column {0}. `created_age`: the same for `create_time`, which MariaDB keeps in the server's
    time zone, for a session in UTC.
    """

    moment: str
    since: str
    age: str
    created_age: str
    lock: str


_PASSING_BY = " FOR UPDATE SKIP LOCKED"
_MARIADB_US = "TIMESTAMPDIFF(MICROSECOND, {0}, %s) DIV 1000"
_MARIADB_LOCAL = "CONVERT_TZ(CURRENT_TIMESTAMP(6), '+00:00', @@GLOBAL.time_zone)"

_MARIADB = Dialect(
    "(CURRENT_TIMESTAMP(6) + INTERVAL {0} * 1000 MICROSECOND)",
    "(CAST(:clock AS DATETIME(6)) + INTERVAL {0} * 1000 MICROSECOND)",
    _MARIADB_US % "CURRENT_TIMESTAMP(6)",
    _MARIADB_US % f"COALESCE({_MARIADB_LOCAL}, CURRENT_TIMESTAMP(6))",
    _PASSING_BY,
)
DIALECTS = {
    Flavor.MARIADB: _MARIADB,
    Flavor.MYSQL: _MARIADB,
    Flavor.POSTGRESQL: Dialect(
        "(now() + {0} * interval '1 millisecond')",
        "(CAST(:clock AS timestamptz) + {0} * interval '1 millisecond')",
        "CAST(EXTRACT(EPOCH FROM now() - {0}) * 1000 AS bigint)",
        "CAST(EXTRACT(EPOCH FROM now() - {0}) * 1000 AS bigint)",
        _PASSING_BY,
    ),
    # A writing transaction has the whole file, so no row is locked by others.
    Flavor.SQLITE: Dialect(
        "strftime('%Y-%m-%d %H:%M:%f', 'now', (({0}) / 1000.0) || ' seconds')",
        "strftime('%Y-%m-%d %H:%M:%f', :clock, (({0}) / 1000.0) || ' seconds')",
        "CAST((julianday('now') - julianday({0})) * 86400000 AS INTEGER)",
        "CAST((julianday('now') - julianday({0})) * 86400000 AS INTEGER)",
        "",
    ),
}


PARKED = -2
"""Status of a parked row, which is QMQ's for a row that is no longer sent."""
PAGE_BYTES_MAX = 4 << 20
CLAIMS_MAX = 100
DISOWNED_MAX = 1_000
"""Limit of rows of an unreadable claim that are parked per transaction."""
COUNT_MAX = 10_000
"""Upper bound of counts."""


class Left(NamedTuple):
    """Waiting rows, up to COUNT_MAX, age of the oldest by the database's clock, and number of parked rows."""

    rows: int
    oldest_ms: int
    parked: int


class Statements:
    """A drain's work within one transaction of one connection; `do` is called once.

    Args:
        age_ms: age from which a drain may claim a row.
    """

    def __init__(self, rows: Rows, age_ms: int) -> None:
        self._run = rows.run
        self._table = rows.table
        self._age_ms = age_ms
        self._dialect = DIALECTS[rows.flavor]

    def do(self, work: Work) -> Any:
        """Carry out work; return its answer."""
        match work:
            case ReadPage():
                return self._page(work)
            case ClaimRows():
                return self._claim(work)
            case SettleClaims():
                return self._settle(work)
            case ReadClaims():
                return self._read_claims(work)
            case AdoptClaims():
                return self._adopt_claims(work)
            case Disown():
                return self._disown(work)

    def left(self, older_ms: int) -> Left:
        """Count the rows waiting longer than `older_ms`; `create_time` is in this session's time zone."""
        age = self._dialect.age.format("create_time")
        waiting = f"SELECT {age} AS age FROM {self._table} WHERE status = 0 ORDER BY update_time, id LIMIT {COUNT_MAX}"
        parked = f"SELECT 1 AS one FROM {self._table} WHERE status < 0 LIMIT {COUNT_MAX}"
        [(rows, oldest_ms)] = self._run(
            f"SELECT COUNT(*), MAX(age) FROM ({waiting}) AS waiting WHERE age >= {int(older_ms)}"
        )
        [(parked_rows,)] = self._run(f"SELECT COUNT(*) FROM ({parked}) AS parked")
        return Left(int(rows), int(oldest_ms or 0), int(parked_rows))

    def _read_claims(self, work: ReadClaims) -> list[Known]:
        statement = (
            f"SELECT claim, {self._dialect.age.format('MIN(update_time)')} FROM {self._table}"
            f" WHERE {'claim > :after' if work.after else 'claim IS NOT NULL'}"
            f" GROUP BY claim ORDER BY claim LIMIT {CLAIMS_MAX}"
        )
        values = {"after": work.after} if work.after else {}
        return [Known(*row) for row in self._run(statement, **values)]

    def _page(self, work: ReadPage) -> Page:
        behind, values = "", {}
        if work.after is not None:
            behind = " AND update_time >= :time AND (update_time > :time OR id > :id)"
            values = {"time": work.after[0], "id": work.after[1]}
        found = self._run(self.page_statement(behind, work.limit), **values)
        taken = _within(PAGE_BYTES_MAX, [row[3] for row in found])
        whole = taken == len(found) < work.limit
        rows = self._candidates([row[0] for row in found[:taken]])
        errors = {row[0]: row[2] for row in found}
        after = None if whole else (found[taken - 1][1], found[taken - 1][0])
        clock = found[0][4] if found else None
        return Page([rows[id]._replace(errors=errors[id]) for id, *_ in found[:taken] if id in rows], after, clock)

    def page_statement(self, behind: str, limit: int) -> str:
        """Return the scan: by the index (status, update_time, id), without contents."""
        old = self._dialect.moment.format(-self._age_ms)
        return (
            f"SELECT id, update_time, error, LENGTH(content), {self._dialect.moment.format(0)} FROM {self._table}"
            f" WHERE status = 0 AND claim IS NULL AND update_time <= {old}{behind}"
            f" ORDER BY update_time, id LIMIT {int(limit)}"
        )

    def _candidates(self, ids: Sequence[int]) -> dict[int, Candidate]:
        if not ids:
            return {}
        statement = f"SELECT id, content FROM {self._table} WHERE id IN ({ids_text(ids)})"
        now_ms = time.time_ns() // 1_000_000
        return {id: candidate_of(id, content, 0, now_ms) for id, content in self._run(statement)}

    def _claim(self, work: ClaimRows) -> dict[str, list[int]]:
        wanted = [id for ids in work.claims.values() for id in ids]
        wanted += [id for id, _ in work.parked] + [id for postponed in work.postponed for id in postponed.ids]
        free = self._lock(wanted)
        busy = self._groups_of_others(work.known) if work.ordered else set()
        got = {}
        for claim, ids in work.claims.items():
            taken = [id for id in ids if id in free]
            if claim in work.ordered and (len(taken) < len(ids) or ClaimName.parse(claim).group in busy):
                taken = []  # another drain has, or had, earlier rows, which these must not overtake
            got[claim] = self._take(claim, taken)
        for reason, ids in _by_reason(work.parked):
            self._update([id for id in ids if id in free], self._parking(), reason=reason)
        for postponed in work.postponed:
            due, values = self._due(postponed.due)
            setting = f"reason = :reason, update_time = {due}"
            self._update([id for id in postponed.ids if id in free], setting, _FREE, reason=postponed.reason, **values)
        return got

    def _take(self, claim: str, ids: Sequence[int]) -> list[int]:
        """Put a claim on rows; return the ids of the rows that have it.

        Without row locks, as on SQLite or in autocommit, another drain may have been faster.
        """
        if not ids:
            return []
        now = self._dialect.moment.format(0)
        self._update(ids, f"claim = :claim, update_time = {now}", _FREE, claim=claim)
        held = {row[0] for row in self._run(f"SELECT id FROM {self._table} WHERE claim = :claim", claim=claim)}
        return [id for id in ids if id in held]

    def _groups_of_others(self, known: frozenset[str]) -> set[str]:
        """Return the broker groups claimed by other drains."""
        found = self._run(f"SELECT claim FROM {self._table} WHERE claim IS NOT NULL GROUP BY claim LIMIT {COUNT_MAX}")
        return {claim.split(":", 3)[-1] for (claim,) in found if claim not in known}

    def _lock(self, ids: Sequence[int]) -> set[int]:
        """Lock the rows that are unchanged since the scan and not locked by others; return their ids.

        A row that is too young is a new one, whose id was reused by a database that lost its last commits. The age is
        checked here, not in WHERE, where it could make the optimizer use an index of more rows, and lock these.
        """
        if not ids:
            return set()
        is_old = f"update_time <= {self._dialect.moment.format(-self._age_ms)}"
        statement = (
            f"SELECT id, {is_old} FROM {self._table} WHERE id IN ({ids_text(sorted(ids))}){_FREE}{self._dialect.lock}"
        )
        return {id for id, is_old in self._run(statement) if is_old}

    def _settle(self, work: SettleClaims) -> None:
        for settled in work.settled:
            if settled.stored:
                where = f"id IN ({ids_text(sorted(settled.stored))}) AND claim = :claim"
                self._run(f"DELETE FROM {self._table} WHERE {where}", claim=settled.claim)
            for reason, ids in _by_reason(settled.parked):
                setting = f"{self._parking()}, error = error + 1"
                self._update(ids, setting, " AND claim = :claim", claim=settled.claim, reason=reason)
        for back in work.released:
            due, values = self._due(back.due)
            setting = f"claim = NULL, error = error + {int(back.failures)}, reason = :reason, update_time = {due}"
            self._update(back.ids, setting, " AND claim = :claim", claim=back.claim, reason=back.reason, **values)

    def _due(self, due: Due) -> tuple[str, dict[str, Any]]:
        """Return the SQL for `update_time`, and its values."""
        plus_ms = due.plus_ms - self._age_ms
        if due.clock is None:
            return self._dialect.moment.format(plus_ms), {}
        return self._dialect.since.format(plus_ms), {"clock": due.clock}

    def _parking(self) -> str:
        return f"status = {PARKED}, reason = :reason, claim = NULL, update_time = {self._dialect.moment.format(0)}"

    def _adopt_claims(self, work: AdoptClaims) -> list[Candidate]:
        # MariaDB advances `update_time` with each update that does not set it, but it must keep the age of the claim.
        setting = "claim = :new, update_time = update_time"
        self._run(f"UPDATE {self._table} SET {setting} WHERE claim = :old", old=work.old, new=work.new)
        found = self._run(f"SELECT id, content, error FROM {self._table} WHERE claim = :new ORDER BY id", new=work.new)
        now_ms = time.time_ns() // 1_000_000
        return [candidate_of(id, content, errors, now_ms) for id, content, errors in found]

    def _disown(self, work: Disown) -> int:
        where = "claim = :claim AND status = 0"
        chosen = f"SELECT id FROM {self._table} WHERE {where} LIMIT {DISOWNED_MAX}"
        ids = [row[0] for row in self._run(chosen, claim=work.claim)]
        self._update(ids, self._parking(), f" AND {where}", claim=work.claim, reason=work.reason)
        return len(ids)

    def _update(self, ids: Sequence[int], setting: str, more: str = "", **values: Any) -> None:
        if ids:
            where = f"id IN ({ids_text(sorted(ids))}){more}"
            self._run(f"UPDATE {self._table} SET {setting} WHERE {where}", **values)


_FREE = " AND status = 0 AND claim IS NULL"


def _within(bytes_max: int, sizes: Sequence[int | None]) -> int:
    """Return how many of the first contents are within `bytes_max`, at least one."""
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
