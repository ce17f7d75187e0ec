"""Shell. Numbers of this process's clients: one source for every exporter.

Clients count with plain integers where they work. Everything else is read when an exporter asks, from any thread. The
tables below are the whole list; docs/observability.md is generated from them.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from enum import Enum
from typing import NamedTuple, Protocol
from weakref import WeakSet

from qmq.client.health import Health, HealthState


class Kind(Enum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"
    """Its last label is the bucket's upper bound, or SUM for the sum. Buckets are not cumulative."""


class Family(NamedTuple):
    """Numbers with one name."""

    kind: Kind
    labels: tuple[str, ...]
    help: str
    is_max: bool = False
    """Whether samples with equal labels, of two clients or two processes, are merged to their maximum; otherwise to
    their sum.
    """


class Sample(NamedTuple):
    """One number: `labels` are the values of its family's labels."""

    name: str
    labels: tuple[str, ...]
    value: float


_APP, _GROUP = ("app",), ("app", "subject", "group")
METRIC_PREFIX = "qmq_client_"
FAMILIES: dict[str, Family] = {
    "state": Family(
        Kind.GAUGE, ("app", "client", "state"), "Clients in this state: connected, degraded, not connected."
    ),
    "open_messages": Family(Kind.GAUGE, _APP, "Messages of producers without an outcome, waiting or in flight."),
    "queue_messages": Family(Kind.GAUGE, _APP, "Single messages that wait for a batch."),
    "queue_bytes": Family(Kind.GAUGE, _APP, "Bytes of single messages that wait for a batch."),
    "requests_in_flight": Family(Kind.GAUGE, _APP, "Batches at a broker without an answer."),
    "outcomes": Family(Kind.COUNTER, ("app", "outcome"), "Messages by outcome: stored, refused, unknown."),
    "repeats": Family(Kind.COUNTER, _APP, "Batches sent again, to the same broker group or another."),
    "outbox_rows": Family(Kind.GAUGE, _APP, "Unsent rows of the outbox that wait longer than timeout_s.", is_max=True),
    "outbox_parked": Family(Kind.GAUGE, _APP, "Parked rows of the outbox, which wait for OutboxRetry.", is_max=True),
    "outbox_oldest_seconds": Family(Kind.GAUGE, _APP, "Age of the oldest row that waits.", is_max=True),
    "delivered": Family(Kind.COUNTER, _GROUP, "Messages received from brokers."),
    "waiting_messages": Family(Kind.GAUGE, _GROUP, "Messages that wait here for a handler or a pull."),
    "unacked_messages": Family(Kind.GAUGE, _GROUP, "Messages taken and not decided yet."),
    "prefetch_messages": Family(Kind.GAUGE, _GROUP, "Messages that may wait here or be requested now."),
    "lag_seconds": Family(
        Kind.GAUGE,
        _GROUP,
        "Age of the next waiting message, since it was created or due; 0 without one.",
        is_max=True,
    ),
    "handlers_running": Family(Kind.GAUGE, _GROUP, "Calls of the handler that run now."),
    "handlers": Family(Kind.GAUGE, _GROUP, "Calls of the handler that may run at the same time."),
    "hung_threads": Family(Kind.GAUGE, _GROUP, "Threads with a call that outlived its timeout and still runs."),
    "unreadable_messages": Family(Kind.GAUGE, _GROUP, "Messages that this process cannot decode, until they go back."),
    "handled": Family(
        Kind.COUNTER, (*_GROUP, "outcome"), "Messages of ended calls: done, retry (the call failed), dead_letter."
    ),
    "handler_seconds": Family(
        Kind.HISTOGRAM,
        (*_GROUP, "le"),
        "Duration of calls. While they take less than 1 ms, one of 16 is measured and counts 16 times.",
    ),
}
"""Families by name without `METRIC_PREFIX`; a Prometheus counter gets `_total`."""

BOUNDS = (0.001, 0.005, 0.02, 0.1, 0.5, 2.0, 10.0, 60.0, 300.0)
"""Upper bounds of the buckets, in seconds."""
BUCKETS = (*map(str, BOUNDS), "+Inf")
SUM = "sum"


class Client(Protocol):
    """Client that has numbers."""

    def numbers(self) -> Iterable[Sample]:
        """Return the present numbers; called from any thread."""


class Handled:
    """Counts of one listener or puller; changed on its event loop."""

    __slots__ = ("done", "retry", "dead_letter", "delivered", "seconds", "calls")

    def __init__(self) -> None:
        self.done: int = 0
        self.retry: int = 0
        self.dead_letter: int = 0
        self.delivered: int = 0
        """Number of messages that ended subscriptions received."""
        self.seconds: float = 0.0
        self.calls: list[int] = [0] * len(BUCKETS)

    def measured(self, seconds: float, times: int) -> None:
        """Count a call that stands for `times` calls."""
        self.seconds += seconds * times
        self.calls[bisect_left(BOUNDS, seconds)] += times

    def samples(self, *labels: str) -> Iterator[Sample]:
        for outcome in ("done", "retry", "dead_letter"):
            yield Sample("handled", (*labels, outcome), getattr(self, outcome))
        for bucket, calls in zip(BUCKETS, self.calls):
            yield Sample("handler_seconds", (*labels, bucket), calls)
        yield Sample("handler_seconds", (*labels, SUM), self.seconds)


def state_samples(app: str, client: str, health: Health) -> Iterator[Sample]:
    """Return the state as one sample per state."""
    for state in HealthState:
        yield Sample("state", (app, client, state.value), int(state is health.state))


def merged(samples: Iterable[Sample]) -> list[Sample]:
    """Merge samples with equal name and labels."""
    values: dict[tuple[str, tuple[str, ...]], list[float]] = {}
    for name, labels, value in samples:
        values.setdefault((name, labels), []).append(value)
    return [
        Sample(name, labels, max(many) if FAMILIES[name].is_max else sum(many))
        for (name, labels), many in values.items()
    ]


_clients: WeakSet[Client] = WeakSet()
_lock = threading.Lock()


def register(client: Client) -> None:
    """Register a client, whose numbers are read as long as it exists."""
    with _lock:
        _clients.add(client)


def clients() -> list[Client]:
    """Return the registered clients of this process."""
    with _lock:
        return list(_clients)


def read() -> list[Sample]:
    """Return the numbers of all clients of this process."""
    return merged(sample for client in clients() for sample in client.numbers())


def _after_fork() -> None:
    global _clients, _lock
    _clients, _lock = WeakSet(), threading.Lock()


if hasattr(os, "register_at_fork"):  # another thread of the parent may have held the lock
    os.register_at_fork(after_in_child=_after_fork)
