"""Shell. The metaserver's metrics; QMQ's names for some of them are mapped in the docs."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, disable_created_metrics, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

GroupReading = tuple[str, int, bool, dict[str, bool]]
"""Name of a broker group, its term, whether it takes messages, and for each role whether the broker is up."""


class Metrics:
    """Created by main; handed to whoever counts. State is read when it is asked for, so it is never stale."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # a series more for each counter, which nobody reads
        self.registry = CollectorRegistry()
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
        self.refused_tokens = Counter(
            "qmq_metaserver_refused_tokens", "Requests without a valid API token.", registry=self.registry
        )

    def observe_groups(self, read: Callable[[], Iterable[GroupReading]]) -> None:
        """Export the state of all broker groups as `read` gives it."""
        self.registry.register(_Groups(read))

    def render(self) -> bytes:
        return generate_latest(self.registry)


class _Groups(Collector):
    """Broker groups as gauges."""

    def __init__(self, read: Callable[[], Iterable[GroupReading]]) -> None:
        self._read = read

    def collect(self) -> Iterable[GaugeMetricFamily]:
        writable = GaugeMetricFamily(
            "qmq_metaserver_group_writable", "1 while the group takes messages.", labels=["broker_group"]
        )
        term = GaugeMetricFamily("qmq_metaserver_group_term", "Term of the group's master.", labels=["broker_group"])
        up = GaugeMetricFamily(
            "qmq_metaserver_broker_up", "1 while the broker sends heartbeats.", labels=["broker_group", "role"]
        )
        for name, term_now, writable_now, roles in self._read():
            writable.add_metric([name], writable_now)
            term.add_metric([name], term_now)
            for role, up_now in roles.items():
                up.add_metric([name, role], up_now)
        return [writable, term, up]
