"""Shell. What a broker tells Prometheus. docs/metrics.md maps QMQ's names to these."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator
from itertools import accumulate
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from broker.counters import Counters
from broker.master import BrokerMaster
from broker.settings import BrokerSettings
from qmq.errors import NotServed
from qmq.replication.readonly import Reason
from qmq.server.metrics_door import MetricsDoor, serve_door
from qmq.server.overload import ConnectionState
from qmq.server.producing import PRODUCE_MS_BUCKETS
from qmq.server.service import Service
from qmq.version import VERSION


class BrokerCollector(Collector):
    """Reads the state on its loop whenever Prometheus asks; nothing is counted twice or kept beside the core."""

    def __init__(
        self, service: Service[BrokerMaster], counters: Counters, settings: BrokerSettings,
        loop: asyncio.AbstractEventLoop,
    ) -> None:  # fmt: skip
        self._service, self._counters, self._settings, self._loop = service, counters, settings, loop

    def collect(self) -> Iterator[Metric]:
        async def read() -> list[Metric]:
            return list(self._read())

        yield from asyncio.run_coroutine_threadsafe(read(), self._loop).result(timeout=5)

    def _read(self) -> Iterator[Metric]:
        node = self._service.node
        group, master, message_log = node.group, node.master, node.log
        for name, text, value in self._gauges():
            gauge = GaugeMetricFamily(f"qmq_broker_{name}", text, labels=["broker_group"])
            gauge.add_metric([group], value)
            yield gauge
        for name, text, value in self._counts():
            count = CounterMetricFamily(f"qmq_broker_{name}", text, labels=["broker_group"])
            count.add_metric([group], value)
            yield count
        info = GaugeMetricFamily("qmq_broker_info", "Always 1; says what runs", labels=["broker_group", "version"])
        info.add_metric([group, VERSION], 1)
        yield info
        reasons = GaugeMetricFamily(
            "qmq_broker_readonly", "1 while this is a reason to take no new messages", labels=["broker_group", "reason"]
        )
        for reason in Reason:
            reasons.add_metric([group, reason.value], float(reason.value in node.readonly_reasons))
        yield reasons
        yield from self._flow(group)
        yield self._produce_seconds(group)
        yield from self._lags(group)
        received = CounterMetricFamily(
            "qmq_broker_subject_messages", "Messages in the log since its beginning", labels=["broker_group", "subject"]
        )
        for subject, sequence in message_log.state.next_sequence.items():
            received.add_metric([group, subject], sequence)
        yield received
        if master is not None:
            skipped = CounterMetricFamily(
                "qmq_broker_skipped_messages", "Messages that retention took before a consumer group acked them",
                labels=["broker_group", "subject", "consumer_group"],
            )  # fmt: skip
            for (subject, consumer_group), messages in master.skipped.items():
                skipped.add_metric([group, subject, consumer_group], messages)
            yield skipped

    def _gauges(self) -> Iterator[tuple[str, str, float]]:
        node, service = self._service.node, self._service
        master, message_log = node.master, node.log
        yield "is_master", "1 if this broker is the master of its group", float(master is not None)
        yield "writable", "1 if it takes new messages", float(node.writable)
        yield "term", "Term of the newest epoch known", node.identity.value.term
        yield "boot", "Boot of the newest epoch known", node.identity.value.boot
        yield "log_start_bytes", "Offset of the oldest frame", message_log.start
        yield "log_end_bytes", "Offset behind the newest frame", message_log.end
        yield "flushed_end_bytes", "Offset below which this disk has everything", message_log.flushed_end
        yield "disk_free_bytes", "Free space on the disk of the log", service.disk_free_bytes
        yield "disk_free_limit_bytes", "Free space below which no message is taken", self._settings.disk_free_limit
        yield "connections", "Open connections of clients and slave", service.connections
        yield "memory_bytes", "Memory of this process alone", service.memory_bytes
        yield "memory_limit_bytes", "Memory above which producers wait", service.memory_alarm.limit_bytes
        yield "sync_cost_seconds", "Recent mean time of a small fsync", service.sync_us / 1e6
        if master is not None:
            lag = message_log.end - master.gate.matched_end if not master.gate.alone else message_log.end
            yield "high_watermark_bytes", "Offset below which both disks have everything", master.gate.high_watermark
            yield "sync_lag_bytes", "Bytes that the slave has not confirmed; all of them while it is missing", lag
            yield "slave_connected", "1 while a slave follows and has matched", float(not master.gate.alone)
            yield "waiting_answers", "Answers that wait for both disks", master.gate.waiting
            yield "subscriptions", "Consumers that are connected", len(master.subscriptions)

    def _counts(self) -> Iterator[tuple[str, str, float]]:
        counters, service = self._counters, self._service
        yield "produced_messages", "Messages taken from producers", counters.produced_messages
        yield "produced_bytes", "Bytes of batches taken from producers", counters.produced_bytes
        yield "repeated_batches", "Batches sent again and stored once", counters.repeated_batches
        yield "refused_messages", "Messages refused on their own, too large or malformed", counters.refused_messages
        yield "pulled_messages", "Messages handed to consumers", counters.pulled_messages
        yield "acked_messages", "Pull sequences acked by consumers", counters.acked_messages
        yield "departed_consumers", "Consumers that left or whose lease ended", counters.returned_consumers
        yield "commits", "Writes with fsync", service.commits
        yield "sync_seconds", "Time spent in writes with fsync", service.sync_seconds

    def _flow(self, group: str) -> Iterator[Metric]:
        labels = ["broker_group", "state"]
        now = GaugeMetricFamily(
            "qmq_broker_client_connections", "Clients' connections by state; flow and blocked ones are not read",
            labels=labels,
        )  # fmt: skip
        stops = CounterMetricFamily(
            "qmq_broker_stopped_connections", "How often a producer's connection was not read any more", labels=labels
        )
        counts = Counter(door.flow.state for door in self._service.doors)
        for state in ConnectionState:
            now.add_metric([group, state.value], counts[state])
            if state is not ConnectionState.RUNNING:
                stops.add_metric([group, state.value], self._service.stops[state])
        yield now
        yield stops

    def _produce_seconds(self, group: str) -> Metric:
        counters = self._counters
        running = list(accumulate(counters.produce_ms_counts))
        bounds = [str(ms / 1000) for ms in PRODUCE_MS_BUCKETS] + ["+Inf"]
        histogram = HistogramMetricFamily(
            "qmq_broker_produce_seconds", "Time from a batch's arrival to its acknowledgement", labels=["broker_group"]
        )
        histogram.add_metric([group], list(zip(bounds, running, strict=True)), counters.produce_ms_sum / 1000)
        return histogram

    def _lags(self, group: str) -> Iterator[Metric]:
        labels = ["broker_group", "subject", "consumer_group"]
        lag = GaugeMetricFamily("qmq_broker_lag_messages", "Messages not handed out yet", labels=labels)
        unacked = GaugeMetricFamily("qmq_broker_unacked_messages", "Messages handed out and not acked", labels=labels)
        state = self._service.node.log.state
        for (subject, name), progress in state.groups.items():
            returned = sum(entry[1] for entry in progress.returned)
            lag.add_metric([group, subject, name], state.next_sequence.get(subject, 0) - progress.position + returned)
            held = sum(consumer.unacked_messages for consumer in progress.consumers.values())
            unacked.add_metric([group, subject, name], held)
        yield lag
        yield unacked


def connections(service: Service[BrokerMaster]) -> list[dict[str, object]]:
    """What each client's connection does: `/connections`."""
    return [
        {
            "peer": door.connection.peer, "app": door.app, "state": door.flow.state.value,
            "produces": door.flow.produces, "consumes": door.flow.consumes, "reads": door.connection.writable,
            "unacked_bytes": door.connection.unacked_bytes, "owed_bytes": door.connection.owed_bytes,
        }
        for door in service.doors
    ]  # fmt: skip


def serve_metrics(
    service: Service[BrokerMaster], counters: Counters, settings: BrokerSettings
) -> tuple[WSGIServer, threading.Thread]:
    """Serve /metrics on a thread of its own."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    loop = asyncio.get_running_loop()
    registry.register(BrokerCollector(service, counters, settings, loop))
    try:
        return serve_door(MetricsDoor(registry, service.access, loop, lambda: connections(service)), settings)
    except OSError as error:
        address = f"{settings.ip}:{settings.metrics_port}"
        raise NotServed(f"cannot listen on {address}: {error}; stop what uses it, or set another port") from None
