"""Shell. Registration of brokers: check each process that registers, and store its report."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from qmq.metaserver.cluster.liveness import STOP_ONE, PlaceTaken, Question
from qmq.metaserver.model import AuditRow, Broker, BrokerKey, Group
from qmq.metaserver.roles import rules
from qmq.metaserver.storage.changes import SetRoles, StaleTerm
from qmq.types import Role

if TYPE_CHECKING:
    from qmq.metaserver.cluster.registry import Registry

log = logging.getLogger("qmq.metaserver")

Ask = Callable[[Question], Awaitable[None]]

REGISTER_TRIES = 3
UNPLACED_MAX = 1_000
REFUSED_SHOWN_MS = 60_000
"""A rejected process registers again every second or two."""


class Registration:
    """Registration of brokers. Made by the registry."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._refused: dict[BrokerKey, tuple[Broker, str, int]] = {}
        """Latest rejection of a second process, by broker: the process, the reason and the time."""
        self._unplaced: dict[BrokerKey, tuple[Broker, int, int]] = {}
        """Brokers with a group's log and without a place: the broker, its newest stored term and the time."""

    async def register(self, registering: Broker, ask: Ask, *, term: int = 0) -> Broker:
        """Check and store a broker's report about itself; return the broker with its group and role.

        Args:
            registering: the broker's report; its group and role are ignored.
            ask: queries a broker.
            term: newest term that the broker has stored.

        Raises:
            OperatorError: it was not added, its place is taken, or it must not serve with this data directory.
            DatabaseAway: the report is new and cannot be stored now.
        """
        self._registry.terms.note(registering.group, term)
        row = self._registry.directory.find(registering.key)
        if row is None:
            await self._registry.mirror.catch_up()  # another metaserver may have added it
            row = self._row_of(registering, term)
        doubt, has_moved = self._registry.liveness.doubt(registering.key), rules.may_be_copy(row, registering)
        if doubt is not None and (doubt.incarnation != registering.incarnation or has_moved):
            await ask(doubt)
        for attempt in range(REGISTER_TRIES):
            row = self._row_of(registering, term)
            rules.check_group(row, registering.group)
            rules.check_kind(row, registering)
            self._check_place(row, registering)
            is_older = rules.is_older(row, registering, term, self._registry.last_state(row))
            rules.check_registration(row, registering.incarnation, is_older=is_older)
            self._registry.liveness.claim(registering.key, registering.incarnation, now_ms=self._registry.now_ms())
            same_disk = row.incarnation == registering.incarnation
            complete = row.complete and same_disk
            broker = replace(
                registering,
                group=row.group,
                role=row.role,
                kind=row.kind,
                complete=complete,
                fill_id=row.fill_id,
                fill_allowed=row.fill_allowed,
            )
            if broker == row:
                break
            try:
                await self._store_registration(broker, row)
                break
            except StaleTerm:  # memory is outdated
                if attempt + 1 == REGISTER_TRIES:
                    raise
                await self._registry.mirror.catch_up()
        return broker

    def _row_of(self, registering: Broker, term: int) -> Broker:
        directory = self._registry.directory
        if (row := directory.find(registering.key)) is not None:
            self._unplaced.pop(registering.key, None)
            return row
        if registering.group and term and len(self._unplaced) < UNPLACED_MAX:
            self._unplaced[registering.key] = registering, term, self._registry.now_ms()
        rules.refuse_unknown(registering, directory)

    def unplaced(self) -> list[tuple[Broker, int]]:
        """Return brokers that lately reported a term of a group in which they have no place, the newest term first."""
        since_ms = self._registry.now_ms() - REFUSED_SHOWN_MS
        self._unplaced = {key: noted for key, noted in self._unplaced.items() if noted[2] >= since_ms}
        find = self._registry.directory.find  # a broker may have got a place, and registered at another metaserver
        found = [(broker, term) for key, (broker, term, _) in self._unplaced.items() if find(key) is None]
        return sorted(found, key=lambda noted: (-noted[1], noted[0].key))

    def _check_place(self, row: Broker, registering: Broker) -> None:
        """Raise PlaceTaken while another process serves as this broker, by heartbeats or by its master's report."""
        has_moved, group = rules.may_be_copy(row, registering), self._registry.directory.groups[row.group]
        try:
            self._registry.liveness.check_free(
                registering.key, registering.incarnation, now_ms=self._registry.now_ms(), has_moved=has_moved
            )
            if has_moved and self._is_in_sync(group, row):
                raise PlaceTaken(
                    f"another process is connected to the master of {group.name} as {row.key}, from another address "
                    f"or directory: one of the two data directories is a copy of the other. {STOP_ONE}"
                )
        except PlaceTaken as error:
            self._refused[registering.key] = registering, str(error), self._registry.now_ms()
            raise

    def _is_in_sync(self, group: Group, slave: Broker) -> bool:
        """Return whether the group's master has a stream here and reports this slave in sync."""
        master = self._registry.state(group.master) if group.master and slave.role == Role.SLAVE else None
        liveness = self._registry.liveness
        is_connected_here = group.master is not None and liveness.where(group.master.key) == liveness.own
        return is_connected_here and master is not None and slave.incarnation in master.in_step

    def refused_lately(self, broker: Broker) -> str:
        """Return why another process was rejected as this broker within the last minute.

        Empty: none was, or that process has the place now.
        """
        refused, text, refused_ms = self._refused.get(broker.key, (broker, "", 0))
        has_place = refused.incarnation == broker.incarnation and not rules.may_be_copy(broker, refused)
        return "" if has_place or self._registry.now_ms() - refused_ms > REFUSED_SHOWN_MS else text

    async def _store_registration(self, broker: Broker, before: Broker) -> None:
        if rules.is_elsewhere(before, broker) and self._registry.old_row(broker.group) is None:
            return await self._begin_elsewhere(broker)
        async with self._registry.commits.writing:
            await self._registry.database.write(lambda r: r.store_registration(broker, before))
            await self._registry.mirror.catch_up()

    async def _begin_elsewhere(self, broker: Broker) -> None:
        """Give a broker its role in a new term, so that the earlier process no longer counts. Raises as `change`."""
        group = self._registry.directory.groups[broker.group]
        change = rules.begin_elsewhere(group, broker, above=self._registry.terms.floor(group.name))
        cause = f"{broker.key} has started on another machine or directory, or its machine was started again"
        audit = AuditRow("metaserver", "", "NewTerm", {"brokerGroup": group.name, "cause": cause}, result="done")
        await self._registry.change((SetRoles(change),), audit)
        log.warning("new term broker_group=%s term=%d: %s", group.name, change.new_term, cause)
