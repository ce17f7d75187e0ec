"""Shell. Automatic failover: notice that a master is gone, ask its slaves, exchange the roles, report it.

Every metaserver does so for every group; there is no leader among them, as one compare-and-set decides. So nothing
depends on who of them heard the master last, or was paused meanwhile: the loser finds that the row has changed.

    master gone ─► read the row and the points ─► ask the slaves ─► may one? ─► let them follow nobody ─► and now?
                                                                     └─ no: say why, look again     ─► compare-and-set

With several slaves, following nobody is a promise for ever: `failover` says of how many. One that leads to nothing is
ended by `metaserver.renewals`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace

from qmq.errors import NotServed, OperatorError, OutcomeUnknown, QmqError
from qmq.metaserver import failover
from qmq.metaserver.actions.shapes import parts_json
from qmq.metaserver.database import DatabaseAway
from qmq.metaserver.db.changes import RememberPoint, SetRoles
from qmq.metaserver.db.errors import CommitUnknown, StaleTerm
from qmq.metaserver.failover import NOT_STORED, Facts, Refusal, chosen_with
from qmq.metaserver.model import AuditRow, Broker, BrokerKey, Group, ReplicaState
from qmq.metaserver.registry import Registry
from qmq.metaserver.roles import RoleChange
from qmq.metaserver.rpc.broker_client import Brokers
from qmq.metaserver.settings import MetaserverSettings
from qmq.ticking import until_next_second

log = logging.getLogger("qmq.metaserver")

LOOK_S = 0.1
"""So often silence is looked for, when there may be some; what is said wakes at once."""
AGAIN_S = 1.0
HOLD_MS = 3000
"""A slave follows nobody for so long; a compare-and-set takes a few ms."""
NOT_STORED_AGAIN_S = 3 * HOLD_MS / 1000
"""Behind a failed commit a slave gets the time to follow its master, should that be there for it."""
REPORT_S = 10.0


class Failovers:
    """Made by main; `run` ends when it is cancelled. Does nothing unless it is switched on."""

    def __init__(self, registry: Registry, brokers: Brokers, settings: MetaserverSettings) -> None:
        self._registry, self._brokers, self._settings = registry, brokers, settings
        self._running: dict[str, asyncio.Task[None]] = {}
        self._again_at: dict[str, float] = {}

    async def run(self) -> None:
        """Look after all groups."""
        if not self._settings.failover:
            await asyncio.Event().wait()
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
            for task in self._running.values():
                task.cancel()

    def _pause_s(self) -> float:
        """Until a master may have been silent for long enough; not long, while one is gone."""
        registry = self._registry
        now_ms, silence_ms = registry.now_ms(), self._settings.failover_silence_ms
        quiet_s = 0.0 if self._again_at else registry.liveness.quiet_ms(now_ms=now_ms, silence_ms=silence_ms) / 1000
        return max(LOOK_S, min(quiet_s, until_next_second(asyncio.get_running_loop().time())))

    def _look(self) -> None:
        registry, now_s = self._registry, time.monotonic()
        if registry.is_stopping:
            return
        for name, group in registry.directory.groups.items():
            if not self._cause(group):
                self._again_at.pop(name, None)
                registry.no_failover.pop(name, None)
            elif now_s >= self._again_at.get(name, 0.0) and name not in self._running:
                self._again_at[name] = now_s + AGAIN_S
                task = self._running[name] = asyncio.create_task(self._try(name))
                task.add_done_callback(lambda _, name=name: self._running.pop(name))  # type: ignore[misc]
        for name in registry.no_failover.keys() - registry.directory.groups.keys():
            del registry.no_failover[name]

    def _cause(self, group: Group) -> str:
        """Say why the master counts as gone; empty: it does not, or there is none."""
        if group.master is None:
            return ""
        return self._registry.is_gone(group.master, self._settings.failover_silence_ms)

    async def _try(self, name: str) -> None:
        try:
            await self.fail_over(name)
        except (DatabaseAway, CommitUnknown, OutcomeUnknown) as error:
            self._again_at[name] = time.monotonic() + NOT_STORED_AGAIN_S
            self._refuse(name, Refusal.NOT_STORED, f"{NOT_STORED}: {error}")
        except StaleTerm:
            self._again_at.pop(name, None)  # another metaserver was first, or what a broker says was stored: look anew
        except QmqError as error:
            self._refuse(name, Refusal.SLAVE_DOWN, str(error))
        except Exception:
            log.exception("failover not tried broker_group=%s", name)

    async def fail_over(self, name: str) -> None:
        """Make a slave of a group whose master is gone its master, or note why not.

        Raises:
            DatabaseAway, OutcomeUnknown, StaleTerm: not stored, maybe stored, or the row has changed meanwhile.
        """
        registry, began = self._registry, time.monotonic()
        await registry.reload()
        group = registry.directory.groups.get(name)
        if group is None or not (cause := self._cause(group)):
            return
        reported, given = registry.reported_term(name), registry.given_term(name)
        said, points = await asyncio.gather(self._ask_all(group), registry.points_of(name))
        facts = Facts(group, reported, given, _said_by_master(registry, group), said, points)
        if refused := failover.refusal(facts):
            return self._refuse(name, *refused)
        facts = await self._hold_all(facts)
        if refused := failover.refusal(facts):
            return self._refuse(name, *refused)
        await self._exchange(facts, cause, began)
        await self._report(facts, cause, began)

    async def _ask_all(self, group: Group) -> dict[BrokerKey, ReplicaState]:
        answers = await asyncio.gather(*map(self._ask, group.slaves))
        return {slave.key: said for slave, said in zip(group.slaves, answers, strict=True) if said is not None}

    async def _ask(self, slave: Broker) -> ReplicaState | None:
        try:
            return await self._brokers.replica_status(slave)
        except (NotServed, OperatorError):
            return None

    async def _hold_all(self, facts: Facts) -> Facts:
        """Let the slaves that may be chosen follow nobody; return what they say then, and who hears its master."""
        term, slaves = facts.new_term, facts.eligible
        held = await asyncio.gather(*(self._hold(slave, facts.group, term) for slave in slaves))
        answers = dict(zip((slave.key for slave in slaves), held, strict=True))
        said = {key: one for key, one in facts.slaves_said.items() if key not in answers}
        promises = term if len(facts.group.slaves) > 1 else 0
        said |= {
            key: one
            for key, one in answers.items()
            if isinstance(one, ReplicaState) and one.promised_term >= promises  # an older version promises nothing
        }
        hear = frozenset(key for key, one in answers.items() if isinstance(one, OperatorError))
        return replace(facts, slaves_said=said, hear_master=hear)

    async def _hold(self, slave: Broker, group: Group, term: int) -> ReplicaState | OperatorError | None:
        silent_ms = self._settings.failover_silence_ms * 3 // 4
        promised_term = term if len(group.slaves) > 1 else 0
        try:
            return await self._brokers.prepare_failover(
                slave, term=group.term, hold_ms=HOLD_MS, silent_ms=silent_ms, promised_term=promised_term
            )
        except OperatorError as refused:
            return refused
        except NotServed:
            return None

    async def _exchange(self, facts: Facts, cause: str, began: float) -> None:
        registry, change, name = self._registry, failover.choose(facts), facts.group.name
        has_several = len(facts.group.slaves) > 1
        with_it = (RememberPoint(name, facts.best.incarnation, chosen_with(facts.best_said)),) if has_several else ()
        try:
            await registry.change((SetRoles(change), *with_it), _audit(facts, change, cause, began))
        except OutcomeUnknown:
            await registry.settle()
            now = registry.directory.groups.get(change.group)
            if now is None or (now.term, _key(now.master)) != (change.new_term, _key(change.master)):
                raise

    async def _report(self, facts: Facts, cause: str, began: float) -> None:
        """Say that it is done; until the new master reports, for the time it took."""
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
            "failover broker_group=%s from=%s to=%s term=%d end=%d acknowledged=%s duration_ms=%d: of the master, %s",
            name,
            facts.group.master and facts.group.master.key,
            facts.best.key,
            now.term if now else 0,
            facts.best_said.flushed_end,
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


def _said_by_master(registry: Registry, group: Group) -> ReplicaState | None:
    return registry.last_state(group.master) if group.master else None


def _is_at_work(registry: Registry, group: Group) -> bool:
    state = registry.state(group.master) if group.master else None
    return state is not None and state.is_master_in(group.term)


def _audit(facts: Facts, change: RoleChange, cause: str, began: float) -> AuditRow:
    """The report: who, why, from which epoch, and what each side was known to have."""
    before, said = facts.group, facts.master_said
    assert said is not None, "a condition"
    found = {
        "brokerGroup": before.name,
        "cause": cause,
        "epoch": [said.term, said.boot],
        "slaveEnd": facts.best_said.flushed_end,
        "promised": [str(slave.key) for slave in facts.eligible],
        "acknowledged": list(facts.newest_point.to_list()) if facts.newest_point else [],
        "decidedMs": round((time.monotonic() - began) * 1000),
    }
    return AuditRow("metaserver", "", "Failover", found, parts_json(before), parts_json(change), result="done")
