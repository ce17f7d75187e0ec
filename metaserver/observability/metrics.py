"""Shell. The metaserver's metrics; docs/metrics.md maps QMQ's names to them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from qmq.process_metrics import Reader, register_process

GroupReading = tuple[str, int, bool, dict[str, bool], bool]
"""Name of a broker group, its term, whether it is writable, for each role whether its brokers are up, and whether its
row is older than its brokers.
"""


class Metrics:
    """Counters and gauges. Created by main, passed to the parts that count. Gauges read their state at the scrape."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # it would add an unused series to each counter
        self.registry = CollectorRegistry()
        register_process(self.registry)
        self.registrations = Counter(
            "qmq_metaserver_broker_registrations",
            "Registrations of brokers, by result: accepted or refused.",
            ["broker_group", "result"],
            registry=self.registry,
        )
        self.heartbeats = Counter(
            "qmq_metaserver_heartbeats", "Heartbeats of brokers.", ["broker_group"], registry=self.registry
        )
        self.disconnects = Counter(
            "qmq_metaserver_broker_disconnects",
            "Heartbeat streams of brokers that ended.",
            ["broker_group"],
            registry=self.registry,
        )
        self.watches = Gauge(
            "qmq_metaserver_route_watches", "Clients that watch routes at this moment.", registry=self.registry
        )
        self.route_requests = Counter(
            "qmq_metaserver_route_requests", "Requests of clients for routes.", registry=self.registry
        )
        self.route_updates = Counter(
            "qmq_metaserver_route_updates", "Routes pushed to clients.", registry=self.registry
        )
        self.routes_created = Counter(
            "qmq_metaserver_routes_stored", "Routes of subjects created or extended.", registry=self.registry
        )
        self.actions = Counter(
            "qmq_metaserver_management_actions",
            "Operators' actions, by result: done, refused, unknown or wait.",
            ["action", "result"],
            registry=self.registry,
        )
        self.rows_raised = Counter(
            "qmq_metaserver_rows_raised",
            "Rows of groups that were older than their brokers and were raised to what these agree on.",
            registry=self.registry,
        )
        self.failovers = Counter(
            "qmq_metaserver_failovers",
            "Slaves promoted by automatic failover.",
            ["broker_group"],
            registry=self.registry,
        )
        self.refused_tokens = Counter(
            "qmq_metaserver_refused_tokens", "Requests without a valid API token.", registry=self.registry
        )

    def observe_groups(self, read: Callable[[], Iterable[GroupReading]]) -> None:
        """Export the state of all broker groups that `read` returns."""
        self.registry.register(_Groups(read))

    def observe_quotas(self, watched: Callable[[], int], refused: Callable[[], int]) -> None:
        """Export the numbers of watched routes and of refusals for a bound."""
        self.registry.register(_Quotas(watched, refused))

    def observe(self, read: Callable[[], Iterable[Metric]]) -> None:
        """Export the metrics that `read` returns."""
        self.registry.register(Reader(read))

    def render(self) -> bytes:
        return generate_latest(self.registry)


class _Quotas(Collector):
    """Watched routes and refusals."""

    def __init__(self, watched: Callable[[], int], refused: Callable[[], int]) -> None:
        self._watched = watched
        self._refused = refused

    def collect(self) -> Iterable[Metric]:
        yield GaugeMetricFamily(
            "qmq_metaserver_watched_routes", "Routes that clients watch, counted for each client.", self._watched()
        )
        yield CounterMetricFamily(
            "qmq_metaserver_refused_watches", "Watches and subjects refused because of a bound.", self._refused()
        )


class _Groups(Collector):
    """Broker groups as gauges."""

    def __init__(self, read: Callable[[], Iterable[GroupReading]]) -> None:
        self._read = read

    def collect(self) -> Iterable[GaugeMetricFamily]:
        writable = GaugeMetricFamily(
            "qmq_metaserver_group_writable", "1 while the group accepts produces.", labels=["broker_group"]
        )
        term = GaugeMetricFamily("qmq_metaserver_group_term", "Term of the group's master.", labels=["broker_group"])
        up = GaugeMetricFamily(
            "qmq_metaserver_broker_up",
            "1 while the broker sends heartbeats; of several slaves, while all do.",
            labels=["broker_group", "role"],
        )
        old = GaugeMetricFamily(
            "qmq_metaserver_group_row_old",
            "1 while a broker reports a newer term than the group's row: the database is an old copy.",
            labels=["broker_group"],
        )
        for name, term_now, writable_now, roles, is_old in self._read():
            old.add_metric([name], is_old)
            writable.add_metric([name], writable_now)
            term.add_metric([name], term_now)
            for role, up_now in roles.items():
                up.add_metric([name, role], up_now)
        return [writable, term, up, old]


EVERY_S = 60.0


class Scrapes:
    """Readings after scrapes, for metrics that are costly to read. Main runs `run`; without scrapes nothing is read."""

    def __init__(self, look: Callable[[], Awaitable[None]]) -> None:
        self._look = look
        self._came = asyncio.Event()

    def note_scrape(self) -> None:
        self._came.set()

    async def run(self) -> None:
        """Read once after each scrape, but not more often than each `EVERY_S`."""
        while True:
            await self._came.wait()
            self._came.clear()
            await self._look()
            await asyncio.sleep(EVERY_S)
