"""Shell. New terms that begin without a swap: failover, and new terms with unchanged roles.

Automatic failover detects that a master is gone, asks its slaves, promotes one, reports it. Every metaserver does this
for every group, without a leader: one compare-and-set decides. The loser finds a changed row, so it does not matter
which metaserver received the master's heartbeats or was paused.

    master gone ─► read row, points ─► ask slaves ─► eligible? ─► hold them ─► eligible? ─► compare-and-set
                                                     └─ no: report, retry      └─ no: report, retry

With several slaves, each slave that leaves its master promises that permanently; `promotion` requires a number of
promises. An operator's Failover takes the same steps, once.

Roles stay, and the term is new, for one of two reasons:

    the master has started        with several slaves: its disk may be in an older state, without the epochs it used
    a promise without promotion   the slaves that promised no longer follow a master of the row's term
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, field, replace
from enum import Enum, auto

from qmq.errors import NotServed, OperatorError, OutcomeUnknown, QmqError
from qmq.metaserver.actions.shapes import parts_json
from qmq.metaserver.cluster.registry import Registry
from qmq.metaserver.model import AuditRow, Broker, BrokerKey, Group, ReplicaState
from qmq.metaserver.roles import promotion, rules
from qmq.metaserver.roles.promotion import NOT_STORED, Facts, NoFailover, Refusal
from qmq.metaserver.roles.rules import RoleChange
from qmq.metaserver.rpc.broker_client import Brokers
from qmq.metaserver.settings import MetaserverSettings
from qmq.metaserver.storage.changes import CommitUnknown, SetRoles, StaleTerm, UnknownGroup
from qmq.metaserver.storage.database import DatabaseAway
from qmq.states import Machine, TransitionTable
from qmq.ticking import until_next_second

log = logging.getLogger("qmq.metaserver")

LOOK_S = 0.1
"""Time between checks for silence while there may be some; heartbeats and changes wake the task at once."""
RETRY_WAITS_S = (0.1, 0.2, 0.5, 1.0)
"""Waits between attempts while a master is gone. The first obstacle may be short: a slave that has not yet detected the
closed connection to its master.
"""
HOLD_MS = 3000
"""Time in which a slave follows no master; a compare-and-set takes a few ms."""
NOT_STORED_AGAIN_S = 3 * HOLD_MS / 1000
"""Wait after a failed commit: the slave may follow its master again, if that is up."""
REPORT_S = 10.0
TRIES_MAX = 10
"""Retries of an operator's failover after a changed row; the automatic one retries with the next second."""


class FailoverState(Enum):
    """Automatic failover of one group at one metaserver."""

    MASTER_UP = auto()
    TRYING = auto()
    WAITING = auto()
    OUTDATED = auto()


class FailoverEvent(Enum):
    """Changes of that state."""

    MASTER_GONE = auto()
    MASTER_RETURNED = auto()
    """Or failover was switched off, or the group was removed."""
    ATTEMPT_ENDED = auto()
    WAIT_ENDED = auto()


FAILOVER = TransitionTable(
    FailoverState.MASTER_UP,
    {
        (FailoverState.MASTER_UP, FailoverEvent.MASTER_GONE): FailoverState.TRYING,
        (FailoverState.TRYING, FailoverEvent.ATTEMPT_ENDED): FailoverState.WAITING,
        (FailoverState.TRYING, FailoverEvent.MASTER_RETURNED): FailoverState.OUTDATED,
        (FailoverState.WAITING, FailoverEvent.WAIT_ENDED): FailoverState.TRYING,
        (FailoverState.WAITING, FailoverEvent.MASTER_RETURNED): FailoverState.MASTER_UP,
        (FailoverState.OUTDATED, FailoverEvent.MASTER_GONE): FailoverState.TRYING,
        (FailoverState.OUTDATED, FailoverEvent.ATTEMPT_ENDED): FailoverState.MASTER_UP,
    },
)
"""OUTDATED: the master returned during an attempt; the attempt detects that by itself."""


@dataclass(slots=True)
class _Attempts:
    """Attempts for one group while its master is gone."""

    life: Machine[FailoverState] = field(default_factory=lambda: Machine(FAILOVER))
    tries: int = 0
    again_at_s: float = 0.0
    task: asyncio.Task[None] | None = None


class Failovers:
    """Automatic failover of all groups that have it on. Made by main; `run` ends when it is cancelled."""

    def __init__(self, registry: Registry, brokers: Brokers, settings: MetaserverSettings) -> None:
        self._registry = registry
        self._brokers = brokers
        self._settings = settings
        self._attempts: dict[str, _Attempts] = {}
        """Groups in any state but MASTER_UP."""

    async def run(self) -> None:
        """Watch the masters of all groups."""
        try:
            with self._registry.changes.watch() as wake:
                while True:
                    wake.clear()
                    self._look()
                    try:
                        async with asyncio.timeout(self._pause_s()):
                            await wake.wait()
                    except TimeoutError:
                        pass
        finally:
            for attempts in self._attempts.values():
                if attempts.task is not None:
                    attempts.task.cancel()

    def _pause_s(self) -> float | None:
        """Return the time until a master may have been silent for too long; short while one is gone.

        None: no group has failover on; wait for a change.
        """
        registry = self._registry
        groups = [group for group in registry.directory.groups.values() if self._is_on(group)]
        if not groups:
            return None
        now_ms, silence_ms = registry.now_ms(), self._settings.failover_silence_ms
        masters = [group.master.key for group in groups if group.master]
        quiet_ms = registry.liveness.quiet_ms(now_ms=now_ms, silence_ms=silence_ms, brokers=masters)
        quiet_s = 0.0 if self._attempts else quiet_ms / 1000
        return max(LOOK_S, min(quiet_s, until_next_second(asyncio.get_running_loop().time())))

    def _look(self) -> None:
        registry, now_s = self._registry, time.monotonic()
        if registry.is_stopping:
            return
        groups = registry.directory.groups
        for name in (self._attempts.keys() | registry.no_failover.keys()) - groups.keys():
            self._reset(name)
        for name, group in groups.items():
            if self._is_on(group) and self._cause(group):
                self._try_again(name, now_s)
            else:
                self._reset(name)

    def _try_again(self, name: str, now_s: float) -> None:
        """Begin an attempt, unless one runs or the next one is not due."""
        attempts = self._attempts.setdefault(name, _Attempts())
        state = attempts.life.state
        if state is FailoverState.OUTDATED:
            attempts.life.on(FailoverEvent.MASTER_GONE)
        elif state is not FailoverState.TRYING and now_s >= attempts.again_at_s:
            is_first = state is FailoverState.MASTER_UP
            attempts.life.on(FailoverEvent.MASTER_GONE if is_first else FailoverEvent.WAIT_ENDED)
            attempts.tries += 1
            attempts.again_at_s = now_s + RETRY_WAITS_S[min(attempts.tries, len(RETRY_WAITS_S)) - 1]
            attempts.task = asyncio.create_task(self._try(name, attempts))
            attempts.task.add_done_callback(lambda _: self._ended(name, attempts))

    def _ended(self, name: str, attempts: _Attempts) -> None:
        if attempts.life.on(FailoverEvent.ATTEMPT_ENDED) is FailoverState.MASTER_UP:
            del self._attempts[name]

    def _reset(self, name: str) -> None:
        """Note that the master is up, failover is off, or the group was removed."""
        self._registry.no_failover.pop(name, None)
        attempts = self._attempts.get(name)
        if attempts is None:
            return
        attempts.tries = 0
        attempts.again_at_s = 0.0
        if attempts.life.may(FailoverEvent.MASTER_RETURNED):
            if attempts.life.on(FailoverEvent.MASTER_RETURNED) is FailoverState.MASTER_UP:
                del self._attempts[name]

    def _is_on(self, group: Group) -> bool:
        return group.failover == "on" or (self._settings.failover and group.failover != "off")

    def _cause(self, group: Group) -> str:
        """Return why the master counts as gone; empty: it does not, or there is none."""
        if group.master is None:
            return ""
        return self._registry.is_gone(group.master, self._settings.failover_silence_ms)

    async def _try(self, name: str, attempts: _Attempts) -> None:
        try:
            await self.fail_over(name)
        except (DatabaseAway, CommitUnknown, OutcomeUnknown) as error:
            attempts.again_at_s = time.monotonic() + NOT_STORED_AGAIN_S
            self._refuse(name, Refusal.NOT_STORED, f"{NOT_STORED}: {error}")
        except StaleTerm:
            attempts.again_at_s = 0.0  # another metaserver was first, or a registration was stored: retry
        except QmqError as error:
            self._refuse(name, Refusal.SLAVE_DOWN, str(error))
        except Exception:
            log.exception("failover attempt failed broker_group=%s", name)

    async def fail_over(self, name: str) -> None:
        """Promote a slave of a group that lost its master, or record why not.

        Raises:
            DatabaseAway, OutcomeUnknown, StaleTerm: not stored, maybe stored, or the row changed meanwhile.
        """
        await self._registry.mirror.catch_up()
        group = self._registry.directory.groups.get(name)
        if group is None or not self._is_on(group) or not self._cause(group):
            return
        try:
            await self._once(group, AuditRow("metaserver", "", "Failover", {"brokerGroup": name}, result="done"))
        except NoFailover as refused:
            self._refuse(name, refused.why, refused.found)

    async def plan(self, name: str, *, master_gone: bool) -> RoleChange:
        """Return the change that `order` would make, as far as is known before slaves promise. Raises as `order`."""
        group = self._registry.directory.groups.get(name)
        if group is None:
            raise UnknownGroup(name)
        if group.master is not None and not self._cause(group):
            raise OperatorError(f"{group.master.key}, the master of {name}, is up; SwapRoles exchanges the roles")
        facts = await self._learn(group, master_gone=master_gone)
        promotion.require(facts)
        return promotion.choose(facts)

    async def order(self, name: str, audit: AuditRow, *, master_gone: bool) -> tuple[Facts, Group]:
        """Fail over once, after `plan`; return the facts and the new row.

        Raises:
            NoFailover, OperatorError: nothing was changed. DatabaseAway, OutcomeUnknown, StaleTerm: as `fail_over`.
        """
        for attempt in range(1, TRIES_MAX + 1):
            group = self._registry.directory.groups.get(name)
            if group is None or not self._cause(group):
                raise OperatorError(f"{name} has a master again, or was removed; check ListBrokers, then repeat")
            try:
                facts = await self._once(group, audit, master_gone=master_gone)
                break
            except StaleTerm:  # a registration changes the row too, but no fact of the decision
                if attempt == TRIES_MAX:
                    raise
                await self._registry.mirror.catch_up()
        return facts, self._registry.directory.groups[name]

    async def _once(self, group: Group, audit: AuditRow, *, master_gone: bool = False) -> Facts:
        cause, began = self._cause(group), time.monotonic()
        facts = await self._learn(group, master_gone=master_gone)
        promotion.require(facts)
        facts = await self._hold_all(facts)
        promotion.require(facts)
        change = promotion.choose(facts)
        await self._exchange(facts, change, _audit(audit, facts, change, cause, began))
        await self._report(facts, cause, began)
        return facts

    async def _learn(self, group: Group, *, master_gone: bool) -> Facts:
        registry, name = self._registry, group.name
        reported, used = registry.terms.reported(name), registry.terms.used(name)
        slave_states, points = await asyncio.gather(self._ask_all(group), registry.points_of(name, must_be_read=True))
        master_state = _last_master_state(registry, group)
        return Facts(group, reported, used, master_state, slave_states, points, master_gone=master_gone)

    async def _ask_all(self, group: Group) -> dict[BrokerKey, ReplicaState]:
        answers = await asyncio.gather(*map(self._ask, group.slaves))
        return {slave.key: state for slave, state in zip(group.slaves, answers, strict=True) if state is not None}

    async def _ask(self, slave: Broker) -> ReplicaState | None:
        try:
            return await self._brokers.replica_status(slave)
        except (NotServed, OperatorError):
            return None

    async def _hold_all(self, facts: Facts) -> Facts:
        """Make eligible slaves leave their master; return the facts with their new states and their refusals."""
        slaves, promises = facts.eligible, promotion.to_promise(facts.group, facts.new_term)
        held = await asyncio.gather(*(self._hold(slave, facts, promises) for slave in slaves))
        answers = dict(zip((slave.key for slave in slaves), held, strict=True))
        states = {key: answer for key, answer in facts.slave_states.items() if key not in answers}
        states |= {
            key: answer
            for key, answer in answers.items()
            if isinstance(answer, ReplicaState) and answer.promised_term >= promises
        }
        unwilling = {key: str(answer) for key, answer in answers.items() if isinstance(answer, OperatorError)}
        return replace(facts, slave_states=states, unwilling=unwilling)

    async def _hold(self, slave: Broker, facts: Facts, promises: int) -> ReplicaState | OperatorError | None:
        try:
            return await self._brokers.prepare_failover(
                slave,
                term=facts.group.term,
                hold_ms=HOLD_MS,
                silent_ms=self._settings.failover_silence_ms * 3 // 4,
                promised_term=promises,
                master_gone=facts.master_gone,
            )
        except OperatorError as refused:
            return refused
        except NotServed:
            return None

    async def _exchange(self, facts: Facts, change: RoleChange, audit: AuditRow) -> None:
        registry = self._registry
        changes = promotion.changes_of(change, facts.group, facts.best, facts.best_state)
        try:
            await registry.change(changes, audit)
        except OutcomeUnknown as error:
            try:
                await registry.settle()
            except (NotServed, OutcomeUnknown):
                raise error from None  # DatabaseAway would report that nothing was changed
            now = registry.directory.groups.get(change.group)
            if now is None or (now.term, _key(now.master)) != (change.new_term, _key(change.master)):
                raise

    async def _report(self, facts: Facts, cause: str, began: float) -> None:
        """Wait for the new master's report, then log the failover and its duration."""
        registry, name = self._registry, facts.group.name
        registry.no_failover.pop(name, None)
        registry.metrics.failovers.labels(name).inc()
        now = registry.directory.groups.get(name)
        try:
            async with asyncio.timeout(REPORT_S):
                while now is not None and not _is_at_work(registry, now):
                    await asyncio.sleep(LOOK_S / 10)
                    now = registry.directory.groups.get(name)
        except TimeoutError:
            log.error("new master did not report broker_group=%s: look with ReplicaStatus", name)
        log.warning(
            "failover broker_group=%s from=%s to=%s term=%d end=%d acknowledged=%s duration_ms=%d: the master: %s",
            name,
            facts.group.master and facts.group.master.key,
            facts.best.key,
            now.term if now else 0,
            facts.best_state.flushed_end,
            facts.newest_point,
            round((time.monotonic() - began) * 1000),
            cause,
        )

    def _refuse(self, name: str, why: Refusal, text: str) -> None:
        if self._registry.no_failover.get(name, ("", ""))[0] != why:
            log.warning("no failover broker_group=%s reason=%s: %s", name, why.value, text)
        self._registry.no_failover[name] = why, text


def _key(broker: Broker | None) -> BrokerKey | None:
    return broker.key if broker else None


def _last_master_state(registry: Registry, group: Group) -> ReplicaState | None:
    return registry.last_state(group.master) if group.master else None


def _is_at_work(registry: Registry, group: Group) -> bool:
    state = registry.state(group.master) if group.master else None
    return state is not None and state.is_master_in(group.term)


def _audit(audit: AuditRow, facts: Facts, change: RoleChange, cause: str, began: float) -> AuditRow:
    """Return the audit row: cause, old epoch, and the log ends and points the decision used."""
    before, master = facts.group, facts.master_state
    found = {
        "cause": cause,
        "epoch": [master.term, master.boot] if master else [],
        "slaveEnd": facts.best_state.flushed_end,
        "promised": [str(slave.key) for slave in facts.eligible],
        "acknowledged": list(facts.newest_point.to_list()) if facts.newest_point else [],
        "decidedMs": round((time.monotonic() - began) * 1000),
    }
    parameters = {**audit.parameters, **found}
    return replace(audit, parameters=parameters, before=parts_json(before), after=parts_json(change))


RENEW_TRIES_MAX = 3
PROMISE_S = 3.0
"""Time that a promise waits for its promotion."""


async def begin_term_at_start(registry: Registry, broker: Broker) -> None:
    """Begin a new term if the broker that has just started is the master of several slaves.

    Raises:
        OperatorError: the row is older than brokers' reports, or keeps changing.
        DatabaseAway, OutcomeUnknown: the term was not stored, or maybe.
    """
    try:
        if not registry.database.is_up:  # a registration must not wait for a database that hangs
            raise DatabaseAway(registry.database.trouble)
        await registry.mirror.catch_up()  # the broker may have been promoted a moment ago
    except DatabaseAway:
        known = registry.directory.groups.get(broker.group)
        if known is None or len(known.slaves) > 1:
            raise
        return
    for attempt in range(1, RENEW_TRIES_MAX + 1):
        group = registry.directory.groups.get(broker.group)
        if group is None or not rules.needs_new_term(group, broker.key):
            return
        if (old := registry.old_row(group.name)) is not None:
            raise OperatorError(f"{broker.key} is the master of an old row: {old.found}; {old.remedy}")
        try:
            return await _renew(registry, group, registry.terms.floor(group.name), f"{broker.key} has started")
        except StaleTerm:  # memory is outdated
            if attempt == RENEW_TRIES_MAX:
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
        """Return whether the master answers a query: the stored "up" may come from a metaserver that was paused since.

        A term that begins without its master would have no slave in sync, so no slave could be promoted.
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
