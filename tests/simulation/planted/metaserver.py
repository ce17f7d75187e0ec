"""Planted bugs of metaservers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable
from dataclasses import replace
from typing import Any
from unittest import mock

from qmq.metaserver.actions import routes as actions
from qmq.metaserver.cluster import old_database
from qmq.metaserver.cluster.mirror import DatabaseMirror
from qmq.metaserver.cluster.registry import Registry
from qmq.metaserver.roles import rules
from qmq.metaserver.roles.rules import RoleChange
from qmq.metaserver.rpc import convert
from qmq.metaserver.storage import changes, groups, operators, repository, routes, transactions
from qmq.metaserver.storage.commits import Commits
from qmq.metaserver.storage.database import Database, DatabaseAway
from qmq.metaserver.storage.repository import Repository
from qmq.metaserver.storage.sql import BadRows
from qmq.tools import recover_group
from tests.simulation.bugs import Patch, bug
from tests.simulation.metaserver.brokers import Brokers, Process


@bug("metaserver", first=115)
def versions_of_routes_are_not_compared() -> list[Patch]:
    """Versions of routes are not compared: the last write wins."""
    real = routes.set_routes

    def set_routes(connection: Any, orders: Any, changed: int) -> None:
        stored, _ = routes._read(connection, [subject for subject, _, _ in orders], BadRows())
        newest = {subject: route.version for subject, route in stored.items()}
        real(connection, [(subject, names, newest.get(subject, 0)) for subject, names, _ in orders], changed)

    return [mock.patch.object(routes, "set_routes", set_routes)]


@bug("metaserver", first=20)
def routes_are_compared_one_by_one_only() -> list[Patch]:
    """Routes that `*` does not change, and new ones, are not compared again."""
    return [mock.patch.object(actions, "_none_since", lambda desk, subject, group, *, without="": ())]


@bug("metaserver")
def stale_probe_answer_counts() -> list[Patch]:
    """A late answer of an earlier probe counts."""

    async def probe(self: Database) -> dict[str, int]:
        asked = self._probe = self._probe or asyncio.ensure_future(self._on_thread(self._ask_versions))
        asked.add_done_callback(lambda probe: probe.cancelled() or probe.exception())
        versions = await self._answer(asked)
        self._probe = None
        return versions

    return [mock.patch.object(Database, "probe", probe)]


@bug("metaserver", first=9)
def abandoned_change_is_stored() -> list[Patch]:
    """A change that was given up before it began is stored later."""
    return [mock.patch.object(changes.Order, "is_withdrawn", property(lambda order: False, lambda order, value: None))]


@bug("metaserver")
def one_transaction_for_each_subject() -> list[Patch]:
    """An action on `*` stores each route in its own transaction, the audit row with the last."""
    real = Repository.change

    def change(self: Repository, ordered: Iterable[Any], audit: Any = None, order: Any = None) -> None:
        *most, last = list(ordered) or [None]
        for earlier in most:
            real(self, [earlier])
        real(self, [last] if last else [], audit)

    return [mock.patch.object(Repository, "change", change)]


@bug("metaserver")
def lost_answers_count_as_failures() -> list[Patch]:
    """A commit without an answer counts as not stored."""

    async def was_stored(*_: Any) -> bool:
        return False

    return [mock.patch.object(Commits, "_was_stored", was_stored)]


@bug("metaserver", first=7)
def late_answers_count_as_failures() -> list[Patch]:
    """A commit without an answer is looked up while it may still be under way."""

    async def was_stored(self: Commits, audit: Any, error: Exception) -> bool:
        await self.database.probe()
        rows = await self.database.read(lambda r: r.audit_trail(limit=200))
        return any(dict(row.parameters) == dict(audit.parameters) for row in rows)

    return [mock.patch.object(Commits, "_was_stored", was_stored)]


@bug("metaserver", first=7)
def done_is_answered_without_the_database() -> list[Patch]:
    real = Registry.change

    async def change(self: Registry, ordered: Any, audit: Any) -> None:
        with contextlib.suppress(DatabaseAway):
            await real(self, ordered, audit)

    return [mock.patch.object(Registry, "change", change)]


@bug("metaserver", first=90)
def incomplete_slaves_are_promoted() -> list[Patch]:
    real = rules._promote
    return [
        mock.patch.object(
            rules, "_promote", lambda directory, group, broker, _, why: real(directory, group, broker, True, why)
        )
    ]


@bug("metaserver", first=7, copies_max=4)
def half_of_the_copies_acknowledge() -> list[Patch]:
    """Half of the copies acknowledge, so the other half may too in the same term of a restored database."""
    return [mock.patch.object(rules, "majority", lambda copies: (copies + 1) // 2)]


@bug("metaserver")
def promises_are_not_heeded() -> list[Patch]:
    """A copy that promised goes on following the old master."""
    return [mock.patch.object(Brokers, "_is_held", lambda self, slave: False)]


@bug("metaserver")
def one_copy_less_acknowledges() -> list[Patch]:
    def are_too_few(self: Brokers, master: Process) -> bool:
        return len(master.slaves) < master.assignment.min_copies - 2

    return [mock.patch.object(Brokers, "are_too_few_in_sync", are_too_few)]


@bug("metaserver")
def a_new_term_is_no_newer() -> list[Patch]:
    """A restarted master keeps the term of its earlier process."""
    return [mock.patch.object(RoleChange, "new_term", property(lambda change: max(change.term, change.above, 1)))]


@bug("metaserver")
def changes_are_not_announced() -> list[Patch]:
    """The version that other metaservers poll is not raised."""
    real = transactions.raise_versions

    def raise_versions(connection: Any, *names: str) -> list[int]:
        real(connection, *(name for name in names if name != "directory"))
        versions = transactions.read_versions(connection)
        return [versions.get(name, 0) for name in names]

    return [mock.patch.object(repository, "raise_versions", raise_versions)]


@bug("metaserver")
def a_mark_is_forgotten() -> list[Patch]:
    """A mark is answered and recorded, but not stored."""
    return [mock.patch.object(operators, "set_mark", lambda connection, mark: None)]


@bug("metaserver")
def terms_begin_anew_with_a_group() -> list[Patch]:
    """The term of a removed group is removed too."""
    return [mock.patch.object(groups, "remove_group", _delete_group)]


def _delete_group(connection: Any, group: str, term: int) -> None:
    marks, named = groups.readonly_broker_group_setting, groups.broker_group
    connection.execute(groups.delete(marks).where(marks.c.broker_group == group))
    connection.execute(groups.delete(named).where(named.c.group_name == group))


@bug("metaserver", first=7, faults="database")
def old_rows_keep_the_reported_term() -> list[Patch]:
    """A row is raised to the reported term, not above it."""
    real = old_database._with_master
    raised = lambda group, named, *, above: real(group, named, above=above - 1)
    return [mock.patch.object(old_database, "_with_master", raised)]


@bug("metaserver", faults="emptied")
def a_database_that_lost_groups_is_used() -> list[Patch]:
    return [mock.patch.object(DatabaseMirror, "check_rows", lambda self: None)]


@bug("metaserver", first=43, faults="database")
def reported_terms_stay_at_one_metaserver() -> list[Patch]:
    """Terms that brokers report at registration stay at that metaserver."""
    return [mock.patch.object(DatabaseMirror, "_note_terms", lambda self, rows: None)]


@bug("metaserver", first=18)
def a_slave_that_was_never_filled_counts_as_whole() -> list[Patch]:
    real = recover_group._copy

    def copy(*known: Any) -> recover_group.Copy:
        made = real(*known)
        return replace(
            made, troubles=tuple(trouble for trouble in made.troubles if trouble != recover_group.INCOMPLETE)
        )

    return [mock.patch.object(recover_group, "_copy", copy)]


@bug("metaserver", first=8, faults="losses")
def an_accepted_loss_is_not_noted() -> list[Patch]:
    real = groups.set_state

    def set_state(connection: Any, group: str, **values: Any) -> None:
        if rest := {name: value for name, value in values.items() if name != "lost_term"}:
            real(connection, group, **rest)

    return [mock.patch.object(groups, "set_state", set_state)]


@bug("metaserver", first=9, faults="fillings")
def fill_orders_are_not_sent() -> list[Patch]:
    real = convert.assignment_for

    def assignment_for(*known: Any) -> Any:
        if (assignment := real(*known)) is not None:
            del assignment.fills[:]
        return assignment

    return [mock.patch.object(convert, "assignment_for", assignment_for)]
