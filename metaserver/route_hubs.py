"""Shell. A hub for the routes of each kind of groups, and where the routes of delay servers come from.

Delayed messages of any subject may go to any group of delay servers. So their route is one for all subjects, follows
from the groups that there are, and is not stored; for the rest it is watched, told and confirmed as others are.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from qmq.errors import InvalidRequest
from qmq.metaserver.changes import Changes
from qmq.metaserver.metrics import Metrics
from qmq.metaserver.model import ALL_SUBJECTS, DELAY, NORMAL, Directory, Group, Route
from qmq.metaserver.quotas import Quotas
from qmq.metaserver.watch import RouteSource, WatchHub
from qmq.metaserver.watchers import ClientInfo, Counts
from qmq.rights import Caller


class DelayRoutes:
    """The route of delayed messages, as a hub asks for it. Made by `RouteHubs`."""

    def __init__(self, registry: RouteSource) -> None:
        self._registry = registry
        self._directory: Directory | None = None
        self._route = Route(ALL_SUBJECTS, (), version=0)

    @property
    def changes(self) -> Changes:
        return self._registry.changes

    @property
    def directory(self) -> Directory:
        return self._registry.directory

    @property
    def routes_version(self) -> int:
        return self.find(ALL_SUBJECTS).version

    def find(self, subject: str) -> Route:
        if self._directory is not self._registry.directory:
            self._directory = self._registry.directory
            groups = tuple(sorted(self._directory.groups_of(DELAY)))
            if groups != self._route.groups:
                self._route = Route(ALL_SUBJECTS, groups, self._route.version + 1)
        return self._route

    def is_short(self, subject: str, groups: Sequence[str]) -> bool:
        return False  # it lists all there are

    def is_writable(self, group: Group) -> bool:
        return self._registry.is_writable(group)

    async def routes_for(self, subjects: list[str]) -> None:
        """There is nothing to store."""


class RouteHubs:
    """Made by main, which runs `run` as a task; all methods are called from the loop. Arguments: see `WatchHub`."""

    def __init__(
        self, registry: RouteSource, metrics: Metrics, allow: Callable[[Caller, int], tuple[int, str]], quotas: Quotas
    ) -> None:
        self._quotas = quotas
        self._hubs = {
            NORMAL: WatchHub(registry, metrics, allow, quotas),
            DELAY: WatchHub(DelayRoutes(registry), metrics, allow, quotas, kind=DELAY),
        }
        metrics.observe_quotas(lambda: quotas.subjects, lambda: quotas.refused)

    async def run(self) -> None:
        """Look at each change of the registry until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for hub in self._hubs.values():
                tasks.create_task(hub.run())

    def of(self, kind: int) -> WatchHub:
        """The hub for a kind of groups; 0 stands for normal ones. Raises InvalidRequest."""
        hub = self._hubs.get(kind or NORMAL)
        if hub is None:
            raise InvalidRequest(f"kind {kind} of groups is unknown; {NORMAL} is of brokers, {DELAY} of delay servers")
        return hub

    def old_routes(self, broker_group: str, subject: str) -> Counts:
        """Count the clients of this metaserver that may still take the group for writable."""
        counts = [hub.old_routes(broker_group, subject) for hub in self._hubs.values()]
        return Counts(*(sum(numbers) for numbers in zip(*counts, strict=True)))

    def refusals(self) -> dict[str, str]:
        """Return the tokens whose clients are refused routes for a bound at present, and why."""
        return self._quotas.refusals(time.monotonic())

    def clients(self) -> list[ClientInfo]:
        return [client._replace(kind=kind) for kind, hub in self._hubs.items() for client in hub.clients()]
