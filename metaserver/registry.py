"""Shell. The metaserver's state in memory: what the database holds and what brokers said, kept together.

Answers come from memory, so that routes and heartbeats go on while the database is away. Every change is written to
the database first; then the directory is read anew and everybody who waits is woken.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import replace

from metaserver import roles, routing
from metaserver.changes import Changes
from metaserver.db.repository import Repository
from metaserver.liveness import Liveness
from metaserver.metrics import GroupReading, Metrics
from metaserver.model import Broker, BrokerKey, Directory, Group, ReadonlyMark, ReplicaState, Route
from metaserver.roles import RoleChange
from qmq.errors import OperatorError

log = logging.getLogger("qmq.metaserver")


def now_ms() -> int:
    """Time for liveness: it only goes forward."""
    return time.monotonic_ns() // 1_000_000


class Registry:
    """Created by main, ends with the process. All methods are called from the loop."""

    def __init__(
        self, repository: Repository, liveness: Liveness, metrics: Metrics, *, groups_min: int, groups_new: int
    ) -> None:
        self._repository = repository
        self._metrics = metrics
        self._groups_min, self._groups_new = groups_min, groups_new
        self._writing = asyncio.Lock()
        self.routes: dict[str, Route] = {}
        self._loads = routing.Loads()
        self._seen: object = None
        self.liveness = liveness
        self.directory = Directory()
        self.changes = Changes()
        metrics.observe_groups(self._read_groups)

    async def load(self) -> None:
        """Read everything from the database, at start."""
        _, routes = await asyncio.to_thread(self._repository.load_routes)
        for route in routes:
            self._keep(route)
        await self.reload()

    async def reload(self) -> None:
        """Read groups, brokers and marks anew and wake who waits for them."""
        self.directory = await asyncio.to_thread(self._repository.load)
        self.changes.publish()

    async def ping(self) -> None:
        """Raise when the database does not answer."""
        await asyncio.to_thread(self._repository.ping)

    async def change_roles(self, decide: Callable[[Directory], RoleChange]) -> None:
        """Decide on the newest directory and store the decision; raises what `decide` and the repository raise."""
        async with self._writing:
            await self.reload()
            change = decide(self.directory)
            await asyncio.to_thread(self._repository.change_roles, change)
            await self.reload()
        log.info("roles changed broker_group=%s term=%d %s", change.group, change.term + 1, _parts(change))

    async def replace_broker(self, broker: Broker) -> Broker:
        """Carry out an operator's ReplaceBroker; return the holder before."""
        async with self._writing:
            await self.reload()
            change, before = roles.replace_broker(self.directory, broker, self._may_be_up)
            if change:
                await asyncio.to_thread(self._repository.change_roles, change)
                log.info("roles changed broker_group=%s term=%d %s", change.group, change.term + 1, _parts(change))
            else:
                await asyncio.to_thread(self._repository.store_addresses, broker)
            await self.reload()
        return before

    async def register(self, said: Broker) -> Broker:
        """Store what a broker said about itself; return it with group and role.

        Args:
            said: group and role of it are not looked at.

        Raises:
            OperatorError: it was not added, its place is taken, or it must not serve with this data directory.
        """
        async with self._writing:
            known = self.directory.find(said.key)
            if known is None:
                await self.reload()  # perhaps another metaserver added it
                known = self.directory.find(said.key) or _refuse_unknown(said, self.directory)
            self.liveness.check_free(said.key, said.incarnation, now_ms=now_ms())
            roles.check_registration(known, said.incarnation)
            self.liveness.claim(said.key, said.incarnation, now_ms=now_ms())
            same_disk = known.incarnation == said.incarnation
            broker = replace(said, group=known.group, role=known.role, complete=known.complete and same_disk)
            if broker != known:
                await asyncio.to_thread(self._repository.store_registration, broker)
                await self.reload()
        return broker

    def beat(self, key: BrokerKey, session: int, state: ReplicaState) -> bool:
        """Note a heartbeat; False: that stream was replaced by a newer one."""
        if not self.liveness.beat(key, session, state, now_ms=now_ms()):
            return False
        self.publish_if_seen_changed()
        return True

    def leave(self, key: BrokerKey, session: int) -> None:
        self.liveness.leave(key, session)
        self.publish_if_seen_changed()

    def publish_if_seen_changed(self) -> None:
        """Wake who waits, if a broker's role, term or readiness is another than when last looked at."""
        now, seen = now_ms(), []
        for broker in self.directory.brokers():
            state = self.liveness.state(broker.key, now_ms=now)
            seen.append((broker.key, state and (state.role, state.term, state.writable, state.readonly_reasons)))
        writable = [self.is_writable(group) for group in self.directory.groups.values()]
        if (seen, writable) != self._seen:
            self._seen = (seen, writable)
            self.changes.publish()

    async def watch_silence(self) -> None:
        """Notice brokers that fell silent without closing their connection. Runs as a task until cancelled."""
        while True:
            now = now_ms()
            await asyncio.sleep((self.liveness.next_change_ms(now_ms=now) - now) / 1000 + 0.001)
            self.publish_if_seen_changed()

    async def note_completeness(self, group: Group, state: ReplicaState) -> None:
        """Store what a master's heartbeat says about its slave, when that is news."""
        complete, slave = roles.slave_complete(group, state), group.slave
        if complete is None or slave is None or not slave.incarnation or slave.complete == complete:
            return
        async with self._writing:
            await asyncio.to_thread(self._repository.store_complete, slave, term=group.term, complete=complete)
            await self.reload()

    async def mark(self, mark: ReadonlyMark, *, readonly: bool) -> None:
        """Set or remove an operator's mark."""
        store = self._repository.mark_readonly if readonly else self._repository.unmark_readonly
        async with self._writing:
            await asyncio.to_thread(store, mark)
            await self.reload()
        log.info("readonly mark broker_group=%s subject=%s set=%s", mark.group, mark.subject, readonly)

    async def routes_for(self, subjects: Iterable[str]) -> None:
        """Make or extend the routes of legal, real subjects where that is needed; `routes` has them afterwards."""
        placement = routing.Placement(
            self.directory, self.is_writable, self._loads, groups_min=self._groups_min, groups_new=self._groups_new
        )
        for subject in subjects:
            route = self.routes.get(subject)
            groups = placement.choose(subject, route.groups if route else ())
            if groups and (route is None or set(groups) != set(route.groups)):
                version = route.version if route else 0
                self._keep(await asyncio.to_thread(self._repository.store_route, subject, groups, version=version))
                self._metrics.routes_created.inc()

    async def route(self, subject: str) -> list[routing.GroupRoute]:
        """Return the route of a legal subject, created or extended where it must be; empty: no broker group exists."""
        await self.routes_for([subject])
        groups = self.routes[subject].groups if subject in self.routes else ()
        return routing.route_for_clients(subject, groups, self.directory, self.is_writable)

    def _keep(self, route: Route) -> None:
        before = self.routes.get(route.subject)
        self._loads.moved(before.groups if before else (), route.groups)
        self.routes[route.subject] = route

    def is_writable(self, group: Group) -> bool:
        """Whether the group takes messages of subjects that nobody marked readonly."""
        writable = self.liveness.is_writable(group, now_ms=now_ms())
        return writable and not self.directory.is_marked(group.name, "*")

    def is_up(self, broker: Broker) -> bool:
        return self.liveness.is_up(broker.key, now_ms=now_ms())

    def state(self, broker: Broker) -> ReplicaState | None:
        return self.liveness.state(broker.key, now_ms=now_ms())

    def _may_be_up(self, broker: Broker) -> bool:
        return self.liveness.may_be_up(broker, now_ms=now_ms())

    def _read_groups(self) -> list[GroupReading]:
        return [
            (
                g.name,
                g.term,
                self.is_writable(g),
                {broker.role.name.lower(): self.is_up(broker) for broker in g.brokers},
            )
            for g in self.directory.groups.values()
        ]


def _parts(change: RoleChange) -> str:
    return f"master={change.master and change.master.key} slave={change.slave and change.slave.key}"


def _refuse_unknown(said: Broker, directory: Directory) -> Broker:
    vacant = next((group for group in directory.groups.values() if group.half_swapped), None)
    command, group, role = "AddBroker", said.group or "GROUP", "0 (master) or 1 (slave)"
    if vacant and said.group in ("", vacant.name):
        command, group, role = "ReplaceBroker", vacant.name, "1"
    raise OperatorError(
        f"{said.key} is no broker here. Run: tools/tools.sh {command} --metaserver=HOST:PORT --token=TOKEN "
        f"--brokerGroup={group} --role={role} --hostname={said.hostname} --ip={said.ip} "
        f"--servePort={said.serve_port} --syncPort={said.sync_port}"
    )
