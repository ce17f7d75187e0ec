"""Shell. Metrics of the gateway."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Sized
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric

from qmq.process_metrics import Reader, register_process, version_of


class HasDeliveries(Protocol):
    """`qmq.gateway.session.Session`."""

    @property
    def deliveries(self) -> Sized: ...


class Observed(Protocol):
    """`qmq.gateway.clients.Clients`."""

    @property
    def tokens(self) -> int: ...

    @property
    def sessions(self) -> Sequence[HasDeliveries]: ...


class Metrics:
    """Registry of one process. Made by main."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        register_process(registry)
        self.requests = Counter(
            "qmq_gateway_requests",
            "Requests by address and status.",
            ["method", "route", "status"],
            registry=registry,
        )
        self.seconds = Histogram(
            "qmq_gateway_request_seconds",
            "Time of requests, waits of pulls included; streams are left out.",
            ["route"],
            registry=registry,
            buckets=(0.001, 0.005, 0.025, 0.1, 0.5, 2.5, 10, 30, 60),
        )
        self.sent = Counter("qmq_gateway_sent", "Messages sent, by outcome.", ["outcome"], registry=registry)
        self.repeats = Counter(
            "qmq_gateway_repeats", "Messages not sent again, by their Idempotency-Key.", registry=registry
        )
        self.delivered = Counter("qmq_gateway_delivered", "Messages delivered to clients.", registry=registry)
        self.decisions = Counter(
            "qmq_gateway_decisions",
            "Decisions of clients on messages, by outcome.",
            ["decision", "outcome"],
            registry=registry,
        )
        self.expired = Counter(
            "qmq_gateway_expired", "Messages returned to their group because a lease ended.", registry=registry
        )
        self._observed: Observed | None = None
        registry.register(Reader(self._read))

    def observe(self, clients: Observed) -> None:
        self._observed = clients

    def render(self) -> bytes:
        return generate_latest(self.registry)

    def _read(self) -> Iterable[Metric]:
        yield version_of("gateway")
        if (clients := self._observed) is not None:
            yield GaugeMetricFamily("qmq_gateway_tokens", "Tokens with clients here.", clients.tokens)
            yield GaugeMetricFamily("qmq_gateway_sessions", "Open sessions.", len(clients.sessions))
            unacked = sum(len(session.deliveries) for session in clients.sessions)
            yield GaugeMetricFamily("qmq_gateway_unacked_messages", "Delivered, undecided messages.", unacked)
