"""Planted bugs of metaservers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from qmq.metaserver.cluster import old_database
from qmq.metaserver.cluster.mirror import DatabaseMirror
from qmq.metaserver.cluster.registry import Registry
from qmq.metaserver.roles import rules
from qmq.metaserver.roles.rules import RoleChange
from qmq.metaserver.rpc import convert
from qmq.metaserver.storage import changes, groups, operators, repository, routes, sql
from qmq.metaserver.storage.database import Commits, Database, DatabaseAway
from qmq.metaserver.storage.repository import Repository
from qmq.metaserver.storage.sql import BadRows
from qmq.tools import recover_group
from tests.simulation.bugs import Patch, bug, plant
from tests.simulation.metaserver.brokers import Brokers, Process


@bug("metaserver", routes, "set_routes", first=115)
def versions_of_routes_are_not_compared(real: Any, connection: Any, orders: Any, changed: int) -> None:
    """Versions of routes are not compared: the last write wins."""
    stored, _ = routes._read(connection, [subject for subject, _, _ in orders], BadRows())
    newest = {subject: route.version for subject, route in stored.items()}
    real(connection, [(subject, names, newest.get(subject, 0)) for subject, names, _ in orders], changed)


@bug("metaserver", Database, "probe")
async def stale_probe_answer_counts(self: Database) -> dict[str, int]:
    """A late answer of an earlier probe counts."""
    asked = self._probe = self._probe or asyncio.ensure_future(self._on_thread(self._ask_versions))
    asked.add_done_callback(lambda probe: probe.cancelled() or probe.exception())
    versions = await self._answer(asked)
    self._probe = None
    return versions


# A change that was given up before it began is stored later.
plant(
    "metaserver",
    "abandoned change is stored",
    patch.object(changes.Order, "is_withdrawn", property(lambda order: False, lambda order, value: None)),
    first=9,
)


@bug("metaserver", Repository, "change")
def one_transaction_for_each_subject(
    real: Any, self: Repository, ordered: Iterable[Any], audit: Any = None, order: Any = None
) -> None:
    """An action on `*` stores each route in its own transaction, the audit row with the last."""
    *most, last = list(ordered) or [None]
    for earlier in most:
        real(self, [earlier])
    real(self, [last] if last else [], audit)


@bug("metaserver", Commits, "_was_stored", first=7)
async def late_answers_count_as_failures(self: Commits, audit: Any, error: Exception) -> bool:
    """A commit without an answer is looked up while it may still be under way."""
    await self.database.probe()
    rows = await self.database.read(lambda r: r.audit_trail(limit=200))
    return any(dict(row.parameters) == dict(audit.parameters) for row in rows)


@bug("metaserver", Registry, "change", first=7)
async def done_is_answered_without_the_database(real: Any, self: Registry, ordered: Any, audit: Any) -> None:
    with contextlib.suppress(DatabaseAway):
        await real(self, ordered, audit)


@bug("metaserver", first=90)
def incomplete_slaves_are_promoted() -> list[Patch]:
    real = rules._promote
    return [
        patch.object(
            rules, "_promote", lambda directory, group, broker, _, why: real(directory, group, broker, True, why)
        )
    ]


# Half of the copies acknowledge, so the other half may too in the same term of a restored database.
plant(
    "metaserver",
    "half of the copies acknowledge",
    patch.object(rules, "majority", lambda copies: (copies + 1) // 2),
    first=7,
    copies_max=4,
)
# A copy that promised goes on following the old master.
plant("metaserver", "promises are not heeded", patch.object(Brokers, "_is_held", lambda self, slave: False))


@bug("metaserver", Brokers, "are_too_few_in_sync")
def one_copy_less_acknowledges(self: Brokers, master: Process) -> bool:
    return len(master.slaves) < master.assignment.min_copies - 2


# A restarted master keeps the term of its earlier process.
plant(
    "metaserver",
    "a new term is no newer",
    patch.object(RoleChange, "new_term", property(lambda change: max(change.term, change.above, 1))),
)


@bug("metaserver")
def changes_are_not_announced() -> list[Patch]:
    """The version that other metaservers poll is not raised."""
    real = sql.raise_versions

    def raise_versions(connection: Any, *names: str) -> list[int]:
        real(connection, *(name for name in names if name != "directory"))
        versions = sql.read_versions(connection)
        return [versions.get(name, 0) for name in names]

    return [patch.object(repository, "raise_versions", raise_versions)]


# A mark is answered and recorded, but not stored.
plant("metaserver", "a mark is forgotten", patch.object(operators, "set_mark", lambda connection, mark: None))


@bug("metaserver", first=7, faults="database")
def old_rows_keep_the_reported_term() -> list[Patch]:
    """A row is raised to the reported term, not above it."""
    real = old_database._with_master
    raised = lambda group, named, *, above: real(group, named, above=above - 1)
    return [patch.object(old_database, "_with_master", raised)]


plant(
    "metaserver",
    "a database that lost groups is used",
    patch.object(DatabaseMirror, "check_rows", lambda self: None),
    faults="emptied",
)
# Terms that brokers report at registration stay at that metaserver.
plant(
    "metaserver",
    "reported terms stay at one metaserver",
    patch.object(DatabaseMirror, "_note_terms", lambda self, rows: None),
    first=43,
    faults="database",
)


@bug("metaserver", recover_group, "_copy", first=18)
def a_slave_that_was_never_filled_counts_as_whole(real: Any, *known: Any) -> recover_group.Copy:
    made = real(*known)
    return replace(made, troubles=tuple(trouble for trouble in made.troubles if trouble != recover_group.INCOMPLETE))


@bug("metaserver", groups, "set_state", first=8, faults="losses")
def an_accepted_loss_is_not_noted(real: Any, connection: Any, group: str, **values: Any) -> None:
    if rest := {name: value for name, value in values.items() if name != "lost_term"}:
        real(connection, group, **rest)


@bug("metaserver", convert, "assignment_for", first=9, faults="fillings")
def fill_orders_are_not_sent(real: Any, *known: Any) -> Any:
    if (assignment := real(*known)) is not None:
        del assignment.fills[:]
    return assignment
