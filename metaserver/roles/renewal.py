"""Shell. New terms with unchanged roles, for one of two reasons.

the master has started        with several slaves: its disk may have been put back, and with it the epochs it used
a promise without promotion   the slaves that promised no longer follow a master of the row's term
"""

from __future__ import annotations

import logging
import time

from qmq.errors import NotServed, OperatorError
from qmq.metaserver.actions.shapes import parts_json
from qmq.metaserver.cluster.registry import Registry
from qmq.metaserver.model import AuditRow, Broker, Group
from qmq.metaserver.roles import rules
from qmq.metaserver.rpc.broker_client import Brokers
from qmq.metaserver.storage.changes import SetRoles, StaleTerm
from qmq.metaserver.storage.database import DatabaseAway

log = logging.getLogger("qmq.metaserver")

TRIES_MAX = 3
PROMISE_S = 3.0
"""Time that a promise waits for its promotion."""


async def begin_life(registry: Registry, broker: Broker) -> None:
    """Begin a new term if the broker that has just started is the master of several slaves.

    Raises:
        OperatorError: the row is older than brokers' reports, or keeps changing.
        DatabaseAway, OutcomeUnknown: the term was not stored, or maybe.
    """
    try:
        if not registry.database.is_up:  # waiting for one that hangs would take longer than a registration may
            raise DatabaseAway(registry.database.trouble)
        await registry.mirror.catch_up()  # it may have been promoted a moment ago
    except DatabaseAway:
        known = registry.directory.groups.get(broker.group)
        if known is None or len(known.slaves) > 1:
            raise
        return
    for attempt in range(1, TRIES_MAX + 1):
        group = registry.directory.groups.get(broker.group)
        if group is None or not rules.needs_new_life(group, broker.key):
            return
        if (old := registry.old_row(group.name)) is not None:
            raise OperatorError(f"{broker.key} is the master of an old row: {old.found}; {old.remedy}")
        try:
            return await _renew(registry, group, registry.terms.floor(group.name), f"{broker.key} has started")
        except StaleTerm:  # memory is outdated
            if attempt == TRIES_MAX:
                raise
            await registry.mirror.catch_up()


class Promises:
    """Promises without promotion. Made by `Upkeep`, which calls `look` each second."""

    def __init__(self, registry: Registry, brokers: Brokers) -> None:
        self._registry = registry
        self._brokers = brokers
        self._open: dict[str, tuple[int, int, float]] = {}
        """By group: the row's term, the promised term above it, and since when."""

    async def look(self) -> None:
        """Begin the promised term with the same master, if it is up and no slave was promoted.

        Raises:
            NotServed, OperatorError, OutcomeUnknown: not stored, or maybe.
        """
        for name, group in self._registry.directory.groups.items():
            promised = self._promised(group) if self._is_any(group) else 0
            if promised <= group.term:
                self._open.pop(name, None)
                continue
            known, now_s = self._open.get(name), time.monotonic()
            if known is None or known[:2] != (group.term, promised):
                self._open[name] = group.term, promised, now_s
            elif now_s - known[2] >= PROMISE_S:
                del self._open[name]
                await self._end(group, promised)

    def _is_any(self, group: Group) -> bool:
        """Return whether a broker ever promised a term above the row's; in nearly all groups none did."""
        states = map(self._registry.last_state, group.brokers)
        return any(state is not None and state.promised_term > group.term for state in states)

    def _promised(self, group: Group) -> int:
        """Return the newest term that its brokers promised; 0: there is no master to continue with."""
        if not group.slaves or group.master is None or self._registry.state(group.master) is None:
            return 0
        states = (self._registry.own_state(broker) for broker in group.brokers)
        return max((state.promised_term for state in states if state is not None), default=0)

    async def _end(self, group: Group, promised: int) -> None:
        if self._registry.old_row(group.name) is not None or not await self._is_there(group.master):
            return
        try:
            await _renew(self._registry, group, promised - 1, f"term {promised} was promised without a promotion")
        except StaleTerm:
            pass  # a slave was promoted

    async def _is_there(self, master: Broker | None) -> bool:
        """Query the master: the stored "up" may come from a metaserver that was paused since.

        A term of a dead master would have no slave in sync, so no slave could be promoted.
        """
        if master is None:
            return False
        try:
            return (await self._brokers.replica_status(master)).incarnation in ("", master.incarnation)
        except (NotServed, OperatorError):
            return False


async def _renew(registry: Registry, group: Group, above: int, cause: str) -> None:
    change = rules.renew(group, above=above)
    found = {"brokerGroup": group.name, "cause": cause}
    audit = AuditRow("metaserver", "", "NewTerm", found, parts_json(group), parts_json(change), result="done")
    await registry.change((SetRoles(change),), audit)
    log.warning("new term broker_group=%s term=%d: %s", group.name, change.new_term, cause)
