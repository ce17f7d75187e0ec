"""Shell. SwapRoles: exchange the master and a slave of a running group.

1. The master stops taking messages and waits until its slave has everything.
2. Both logs must end at the same offset with the same chain.
3. One compare-and-set exchanges the roles.
4. The new assignments are sent, and the new master reports.

Before the compare-and-set every failure cancels the swap. After it the roles are exchanged. If the hold expires in
between, epochs still protect every acknowledged message: the slave rejects the old epoch from the change on. With
several slaves the master could continue with another one, so it promises to be no master of an older term.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from qmq.errors import NotServed, OperatorError, OutcomeUnknown, QmqError
from qmq.metaserver.cluster.registry import Registry
from qmq.metaserver.model import ALL_SUBJECTS, DELAY, AuditRow, Broker, BrokerKey, Group, ReplicaState
from qmq.metaserver.roles import promotion, rules
from qmq.metaserver.rpc.broker_client import Brokers
from qmq.metaserver.settings import MetaserverSettings
from qmq.metaserver.storage.changes import StaleTerm
from qmq.types import Role

log = logging.getLogger("qmq.metaserver")

TRIES_MAX = 10
"""Retries after another field of the group's row changed: the row is compared as a whole."""
WRITABLE_WAIT_MS = 5000
"""Time to wait until the new master's slave connects and the group accepts produces."""


@dataclass(frozen=True, slots=True)
class Swapped:
    """Result of a swap."""

    group: Group
    old_master: BrokerKey
    at_end: ReplicaState
    """State of the old master at the swap."""
    writable: bool
    duration_ms: int


@dataclass(frozen=True, slots=True)
class _Exchange:
    """Swap in progress."""

    group: Group
    slave: Broker
    """New master."""
    term: int
    """Term of the new row."""
    audit: AuditRow

    @property
    def promised_term(self) -> int:
        """Term that the old master promises."""
        return promotion.to_promise(self.group, self.term)


class Swaps:
    """Carries out SwapRoles, one at a time per group. Created by main."""

    def __init__(self, registry: Registry, brokers: Brokers, settings: MetaserverSettings) -> None:
        self._registry = registry
        self._brokers = brokers
        self._settings = settings
        self._running: set[str] = set()

    async def swap(self, name: str, audit: AuditRow, *, to: str = "") -> Swapped:
        """Exchange the roles of a group's brokers; the exchange and `audit` are one transaction.

        Args:
            to: the slave, as in `ready`.

        Raises:
            OperatorError: refused; the roles are unchanged.
            OutcomeUnknown: the roles are exchanged, or may be, but the new master did not report.
        """
        if name in self._running:
            raise OperatorError(f"a swap of {name} is running; wait for it")
        self._running.add(name)
        try:
            return await self._swap(name, audit, to)
        finally:
            self._running.discard(name)

    async def _swap(self, name: str, audit: AuditRow, to: str) -> Swapped:
        began = time.monotonic()
        group, slave = self.ready(name, to)
        assert group.master  # checked by `ready`
        hold_ends = time.monotonic() + self._settings.swap_hold_ms / 1000  # the master's own hold begins and ends later
        exchange = _Exchange(group, slave, max(group.term, self._registry.terms.floor(name)) + 1, audit)
        at_end = await self._prepare(exchange)
        await self._exchange(exchange, at_end, hold_ends=hold_ends)
        writable = await self._finish(name, exchange.term)
        duration_ms = round((time.monotonic() - began) * 1000)
        log.info("roles swapped broker_group=%s term=%d duration_ms=%d", name, exchange.term, duration_ms)
        return Swapped(self._swapped(name), group.master.key, at_end, writable, duration_ms)

    def ready(self, name: str, to: str = "") -> tuple[Group, Broker]:
        """Return the group and the new master if the roles can be swapped now.

        Args:
            to: hostname, or hostname:port, of the slave; empty: the longest one.

        Raises:
            OperatorError: the reason why not.
        """
        group = self._registry.directory.groups.get(name)
        if group is None:
            raise OperatorError(f"there is no broker group {name}; ListBrokerGroups names them")
        rules.check_not_half_swapped(group)
        if group.master is None or not group.slaves:
            raise OperatorError(f"{name} has no {'slave' if group.master else 'master'}; AddBroker adds one")
        slave = self._target(group, to)
        for broker in (group.master, slave):
            state = self._registry.state(broker)
            label = f"{broker.key} ({broker.part.name} of {name})"
            if state is None:
                raise OperatorError(f"{label} is down; start it, or {_without(group, broker)}")
            if state.term > group.term:
                old = self._registry.old_row(name)
                raise OperatorError(f"{name}: {old.found if old else label}; {old.remedy if old else 'repeat soon'}")
            if (state.role, state.term) != (broker.role, group.term):
                raise OperatorError(f"{label} has not begun its role in term {group.term} yet; repeat soon")
        rules.check_clock(group, slave, self._registry.state(slave))
        return group, slave

    def _target(self, group: Group, to: str) -> Broker:
        named = [slave for slave in group.slaves if to in ("", slave.hostname, str(slave.key))]
        if not named:
            slaves = ", ".join(str(slave.key) for slave in group.slaves)
            raise OperatorError(f"{to} is no slave of {group.name}; its slaves are {slaves}")
        states = {slave.key: self._registry.state(slave) for slave in named}

        def fitness(slave: Broker) -> tuple[bool, bool, int]:
            state = states[slave.key]
            return state is not None, rules.has_clock_for(group, state), state.log_end if state else -1

        return max(named, key=fitness)

    async def _prepare(self, exchange: _Exchange) -> ReplicaState:
        group = exchange.group
        assert group.master  # checked by `ready`
        try:
            if group.kind == DELAY:  # offsets are not stored, and another metaserver may have them
                rules.check_clock(group, exchange.slave, await self._brokers.replica_status(exchange.slave))
            at_end = await self._brokers.prepare_swap(
                group.master,
                term=group.term,
                hold_ms=self._settings.swap_hold_ms,
                timeout_ms=self._settings.swap_catch_up_ms,
                target=exchange.slave.incarnation,
                promised_term=exchange.promised_term,
            )
            if at_end.promised_term < exchange.promised_term:
                raise OperatorError(
                    f"{group.master.key} runs an older version, which promises nothing: update it first"
                )
            rules.check_same_log(at_end, await self._brokers.replica_status(exchange.slave))
        except (OperatorError, NotServed) as error:
            await self._cancel(group)
            raise OperatorError(f"{error}. The roles of {group.name} are as before") from error
        except BaseException:
            await self._cancel(group)
            raise
        return at_end

    async def _exchange(self, exchange: _Exchange, at_end: ReplicaState, *, hold_ends: float) -> None:
        try:
            for attempt in range(1, TRIES_MAX + 1):
                try:
                    await self._exchange_once(exchange, at_end, hold_ends=hold_ends)
                    break
                except StaleTerm:  # a registration changes the row too; only a newer term is an obstacle
                    if attempt == TRIES_MAX:
                        raise
        except OutcomeUnknown as error:
            await self._settle(exchange, error)
        except (OperatorError, NotServed) as error:
            await self._cancel(exchange.group)
            raise OperatorError(f"{error}. This swap changed nothing") from error

    async def _exchange_once(self, exchange: _Exchange, at_end: ReplicaState, *, hold_ends: float) -> None:
        group, slave = exchange.group, exchange.slave
        await self._registry.mirror.catch_up()
        current = self._registry.directory.groups.get(group.name)
        if time.monotonic() > hold_ends:
            raise OperatorError("it took too long; the master accepts produces again")
        if current is None:
            raise OperatorError(f"{group.name} was removed meanwhile")
        if _disks(current) != _disks(group):
            raise OperatorError(
                f"a broker of {group.name} came with another data directory meanwhile; look with ReplicaStatus, repeat "
                "once its copy is whole"
            )
        change = replace(rules.swap_roles(current, term=group.term, to=slave.key), above=exchange.term - 1)
        await self._registry.change(promotion.changes_of(change, group, slave, at_end), exchange.audit)

    async def _settle(self, exchange: _Exchange, error: OutcomeUnknown) -> None:
        """Look up whether a compare-and-set without an answer was stored."""
        group = exchange.group
        try:
            await self._registry.settle()
        except (NotServed, OutcomeUnknown):
            raise OutcomeUnknown(
                f"the database failed while it stored the roles of {group.name} ({error}); they are exchanged or as "
                "before. ListBrokers shows it once the database is back"
            ) from error
        if not _is_exchanged(exchange, self._registry.directory.groups.get(group.name)):
            await self._cancel(group)
            raise OperatorError(f"the database failed: {error}. This swap changed nothing") from error

    async def _finish(self, name: str, term: int) -> bool:
        """Wait for the new master's report, then a while for a writable group; return whether it is writable."""
        if not await self._wait_until(lambda: self._is_master_in(name, term), self._settings.swap_finish_ms):
            raise OutcomeUnknown(
                f"the roles of {name} are exchanged (term {term}), but the new master did not report in time; look "
                "with ReplicaStatus. Do not swap back before it answers"
            )
        directory = self._registry.directory
        kept_closed = directory.is_marked(name, ALL_SUBJECTS) or self._swapped(name).draining
        return not kept_closed and await self._wait_until(lambda: self._writable(name), WRITABLE_WAIT_MS)

    def _is_master_in(self, name: str, term: int) -> bool:
        group = self._swapped(name)
        state = self._registry.state(group.master) if group.master else None
        return group.term > term or (state is not None and state.is_master_in(term))

    def _writable(self, name: str) -> bool:
        return self._registry.is_writable(self._swapped(name))

    def _swapped(self, name: str) -> Group:
        """Return the group after its swap. Raises OutcomeUnknown: another operator removed it since."""
        group = self._registry.directory.groups.get(name)
        if group is None:
            raise OutcomeUnknown(f"the roles of {name} were exchanged, but the group was removed at the same time")
        return group

    async def _wait_until(self, condition: Callable[[], bool], timeout_ms: int) -> bool:
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                with self._registry.changes.watch() as wake:
                    while not condition():
                        wake.clear()
                        await wake.wait()
        except TimeoutError:
            return False
        return True

    async def _cancel(self, group: Group) -> None:
        assert group.master
        try:
            await self._brokers.cancel_swap(group.master)
        except QmqError as error:
            log.warning("swap not cancelled, its hold expires by itself broker_group=%s: %s", group.name, error)


def _without(group: Group, gone: Broker) -> str:
    """Return the remedy if a broker never returns."""
    if len(group.slaves) < 2:
        return "use ReplaceBroker"
    if gone.role == Role.SLAVE:
        return "name another slave with --to"
    return f"qmq Failover --brokerGroup={group.name}"


def _disks(group: Group) -> set[tuple[BrokerKey, str]]:
    """Return the incarnations of the compared copies. A slave that registers with an emptied disk raises no term."""
    return {(broker.key, broker.incarnation) for broker in group.brokers}


def _is_exchanged(exchange: _Exchange, now: Group | None) -> bool:
    """Return whether the new term began with the slave as the master."""
    return (
        now is not None
        and now.term == exchange.term
        and now.master is not None
        and now.master.key == exchange.slave.key
    )
