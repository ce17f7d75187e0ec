"""Shell. Plays a story of a metaserver with its database, and lists its calls, its rows and the assignments it sends.

The metaserver's code, also its heartbeat streams, runs on an SQLite database in virtual time. Brokers are fakes: they
answer calls with the state of their last heartbeat, and report a new assignment at once.

    metaserver                     one metaserver with an empty database
    group g1 copies=3              brokers g1-a (master), g1-b and g1-c (complete slaves), which send heartbeats
    beat g1-b chain=78             a heartbeat of g1-b with changed fields, which its answers to calls have too
    mute g1-b                      g1-b does not answer the next call
    stop g1-a                      g1-a ends
    before ReplicaStatus empty g1-b
                                   the next call ReplicaStatus begins with the command `empty g1-b`; CompareAndSet: the
                                   next change of a row
    empty g1-b                     g1-b registers with an empty data directory
    another g1-b                   another metaserver makes the slave g1-b the master
    operator SwapRoles brokerGroup=g1
                                   a command of the operator anna, and its answer
    wait 5000                      time passes
    failover g1                    the metaserver's own failover of a group, if its master is gone
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import replace
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

from qmq.errors import NotServed
from qmq.metaserver.model import BrokerKey, Group, ReplicaState
from qmq.metaserver.roles import rules
from qmq.metaserver.roles.failover import Failovers
from qmq.metaserver.rpc.convert import state_from_message
from qmq.metaserver.storage.changes import SetRoles, StaleTerm
from qmq.proto import qmq_pb2 as pb
from qmq.replication.identity import Point
from qmq.types import Role
from tests.transcripts.story import LoopStory
from tests.unit.metaserver.actions_world import World, place
from tests.unit.metaserver.rpc_world import Aborting, service_of

CALLS = {
    "replica_status": "ReplicaStatus",
    "prepare_swap": "PrepareSwap",
    "prepare_failover": "PrepareFailover",
    "cancel_swap": "CancelSwap",
}
"""Methods of the metaserver's client of brokers, and the gRPC calls that they make."""
PORT = 20881


class MetaserverPlayer(LoopStory):
    """Story of one metaserver."""

    settle_s = 60.0

    def __init__(self) -> None:
        super().__init__()
        for module in ("swap", "failover"):
            self.patch.setattr(f"qmq.metaserver.roles.{module}.time", SimpleNamespace(monotonic=self.loop.time))
        self._directory = TemporaryDirectory()
        self._world: Any = None
        self._beats: dict[str, asyncio.Queue[pb.BrokerState | None]] = {}
        self._state: dict[str, dict[str, Any]] = {}
        self._mute: set[str] = set()
        self._before: dict[str, Callable[[], Coroutine[Any, Any, None]]] = {}
        self._groups: dict[str, Group] = {}
        self._points: dict[str, Point] = {}
        self._audit_rows = 0

    def close(self) -> None:
        for beats in self._beats.values():
            beats.put_nowait(None)
        self.run_until(asyncio.sleep(1))
        if self._world is not None:
            self._world.close()
        self._directory.cleanup()
        super().close()

    # Commands.

    async def _do_metaserver(self) -> None:
        self._world = World(f"{self._directory.name}/metaserver.db")
        for method, call in CALLS.items():
            setattr(self._world.brokers, method, self._noted(call, getattr(self._world.brokers, method)))
        await self._world.open()
        self._write = self._world.database.write

    async def _do_group(self, group: str, *, copies: int = 2) -> None:
        self._world.database.write = self._write
        for name in [f"{group}-{letter}" for letter in "abcde"[:copies]]:
            is_slave = name != f"{group}-a"
            await self._world.done("AddBroker", **place(group, int(is_slave), name))
            await self._world.start(name, complete=is_slave)
        self._note_rows(with_audit=False)
        self._world.database.write = self._storing(self._write)
        for broker in self._groups[group].brokers:
            await self._join(broker.hostname)

    async def _do_beat(self, name: str, **fields: Any) -> None:
        self._report(name, **fields)

    async def _do_mute(self, name: str) -> None:
        self._mute.add(name)

    async def _do_stop(self, name: str) -> None:
        self._beats.pop(name).put_nowait(None)
        await asyncio.sleep(1)
        self._world.stop(name)

    async def _do_before(self, call: str, command: str, *words: str, **fields: Any) -> None:
        self._before[call] = lambda: getattr(self, f"_do_{command}")(*words, **fields)

    async def _do_empty(self, name: str) -> None:
        known = self._world.registry.directory.find(BrokerKey(name, PORT))
        fresh = replace(known, incarnation="empty", complete=False)
        await self._world.database.write(lambda repository: repository.store_registration(fresh, known))

    async def _do_another(self, name: str) -> None:
        group = self._groups[self._world.registry.directory.find(BrokerKey(name, PORT)).group]
        change = rules.swap_roles(group, term=group.term, to=BrokerKey(name, PORT))
        await self._world.database.write(lambda repository: repository.change([SetRoles(change)]))

    async def _do_operator(self, action: str, **words: Any) -> None:
        answer = await self._world.run(action, **words)
        if answer.done:
            shown = {key: answer.data[key] for key in ("term", "logEnd", "chain", "writable") if key in answer.data}
            self.say(f"operator: done master={answer.data['master']['hostname']}", shown)
        else:
            self.say(f"operator: {answer.status.name.lower()}: {answer.message}")

    async def _do_wait(self, ms: str) -> None:
        await asyncio.sleep(int(ms) / 1000)

    async def _do_failover(self, group: str) -> None:
        settings = replace(self._world.settings, failover=True)
        await Failovers(self._world.registry, self._world.brokers, settings).fail_over(group)
        if (refusal := self._world.registry.no_failover.get(group)) is not None:
            self.say(f"no failover: {refusal[0].value}: {refusal[1]}")

    # Brokers.

    async def _join(self, name: str) -> None:
        """Open the heartbeat stream of a broker."""
        service, identity = service_of(self._world, self.patch, name)
        beats = self._beats[name] = asyncio.Queue()
        place_of = {key: identity[key] for key in ("hostname", "incarnation", "serve_port")}
        disks = [f"disk of {broker.hostname}" for group in self._groups.values() for broker in group.slaves]
        log = {"log_end": 4096, "flushed_end": 4096, "chain": 77, "last_term": 2}
        self._state[name] = {**place_of, **log, "in_step": disks}

        async def sent() -> AsyncIterator[pb.BrokerState]:
            while (beat := await beats.get()) is not None:
                yield beat

        async def stream() -> None:
            async for assignment in service.Heartbeat(sent(), Aborting()):
                if assignment.broker_group:
                    role = Role(assignment.role)
                    part = {"term": assignment.term, "role": role.name.lower()}
                    self.say(f"metaserver -> {name}: assignment", part)
                    is_master = role == Role.MASTER
                    self.say(f"{name} -> metaserver: heartbeat", part)
                    self._report(name, term=assignment.term, role=role, writable=is_master, in_sync=not is_master)

        self._report(name)
        self.process.start(stream())
        await asyncio.sleep(1)

    def _report(self, name: str, **fields: Any) -> None:
        self._state[name] |= fields
        state = pb.BrokerState(**self._state[name])
        self._world.brokers.states[BrokerKey(name, PORT)] = state_from_message(state)
        self._beats[name].put_nowait(state)

    # Effects.

    def _noted(self, call: str, real: Any) -> Any:
        async def noted(broker: Any, **fields: Any) -> ReplicaState:
            if (command := self._before.pop(call, None)) is not None:
                await command()
            asked = {key: fields[key] for key in ("term", "promised_term") if key in fields}
            self.say(f"metaserver -> {broker.hostname}: {call}", asked)
            if broker.hostname in self._mute:
                self._mute.remove(broker.hostname)
                self.say(f"{broker.hostname} -> metaserver: no answer")
                raise NotServed(f"{broker.key} did not answer")
            answer: ReplicaState = await real(broker, **fields)
            returned = {key: getattr(answer, key) for key in ("log_end", "chain", "promised_term")}
            self.say(f"{broker.hostname} -> metaserver: state", returned)
            return answer

        return noted

    def _storing(self, real: Any) -> Any:
        async def write(work: Any, **options: Any) -> Any:
            if (command := self._before.pop("CompareAndSet", None)) is not None:
                await command()
            try:
                return await real(work, **options)
            except StaleTerm as error:
                self.say(f"compare-and-set fails: {error}")
                raise
            finally:
                self._note_rows()

        return write

    def _note_rows(self, *, with_audit: bool = True) -> None:
        """Show the new and changed rows of groups, and a new row of the audit trail."""
        repository = self._world.database.repository
        before, self._groups = self._groups, dict(repository.load().groups)
        for name, group in self._groups.items():
            old = before.get(name)
            if old is None or old.term != group.term:
                terms = f"{old.term} -> {group.term}" if old else str(group.term)
                slaves = ",".join(slave.hostname for slave in group.slaves)
                self.say(f"row of {name}: term {terms} master={group.master.hostname} slaves={slaves}")
            for disk, point in repository.load_points(name).by_incarnation.items():
                if self._points.get(disk) != point:
                    self.say(f"row of the {disk}: acknowledged up to {point.end}")
                self._points[disk] = point
        newest = repository.audit_trail(limit=1)[0]
        if with_audit and newest.id > self._audit_rows:
            terms = f"term {newest.before['term']} -> {newest.after['term']}"
            found = {key: newest.parameters[key] for key in ("slaveEnd", "promised") if key in newest.parameters}
            self.say(f"row of the audit trail: {newest.action} by {newest.who}, {terms}", found)
        self._audit_rows = newest.id
