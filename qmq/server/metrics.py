"""Shell. Metrics of every process that keeps a copy of a group: its part, its log, its producers."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from heapq import nlargest
from itertools import accumulate
from typing import Any, Generic

from prometheus_client import CollectorRegistry
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from qmq.errors import NotServed
from qmq.http_port import HttpPort, listen
from qmq.process_metrics import register_process
from qmq.replication.readonly import Reason
from qmq.replication.settings import CopySettings
from qmq.server.http import CopyHttp, Series, machines, states
from qmq.server.overload import ConnectionState
from qmq.server.producing import PRODUCE_MS_BUCKETS, ProduceCounters
from qmq.server.service import M, Service
from qmq.subjects import is_dead_letter_subject, matching
from qmq.types import Endpoint
from qmq.version import VERSION

Reading = tuple[str, str, float]
"""Metric without labels: name without the prefix, help text, value."""
Later = Callable[[], Iterable[Metric]]


def largest(sizes: Mapping[str, int], most: int, is_always: Callable[[str], bool]) -> dict[str, int]:
    """Return the `most` largest sizes by name, first the names that are always shown. All of 10,000 subjects would be a
    page of 3 MB. Of equal sizes the first names count, so the choice is the same each time.
    """
    if len(sizes) <= most:
        return dict(sizes)
    always = dict.fromkeys(filter(is_always, sizes))
    ranked = nlargest(most, always, sizes.__getitem__)
    ranked += nlargest(most - len(ranked), (name for name in sizes if name not in always), sizes.__getitem__)
    return {name: sizes[name] for name in ranked}


class CopyCollector(Collector, Generic[M]):
    """Collector that reads the state on its loop at each scrape. It keeps no counts of its own.

    Args:
        prefix: prefix of all names.
        settings: how many subjects and consumer groups have series of their own, and which always have them.
    """

    def __init__(
        self,
        prefix: str,
        service: Service[M],
        counters: ProduceCounters,
        loop: asyncio.AbstractEventLoop,
        settings: CopySettings,
    ) -> None:
        self._prefix = prefix
        self._service = service
        self._loop = loop
        self._produce_counters = counters
        self._shown_max = settings.metrics_subjects_max
        self._is_always = matching(settings.metrics_subjects)

    def collect(self) -> Iterator[Metric]:
        async def read() -> tuple[list[Metric], list[Later]]:
            return list(self.read()), list(self.copied())

        found, made_later = asyncio.run_coroutine_threadsafe(read(), self._loop).result(timeout=5)
        yield from found
        for make in made_later:
            yield from make()

    def copied(self) -> Iterator[Later]:
        """Copy the facts about all subjects and groups, on the loop. The returned functions rank them and make
        families, which takes longer, on another thread.
        """
        ends = dict(self._service.node.log.state.next_sequence)
        yield lambda: self._subjects(ends)

    def read(self) -> Iterator[Metric]:
        """Yield the metrics of every process; a subclass adds those of its own."""
        yield from map(self.gauge, self._gauges())
        yield from map(self.count, self._counts())
        info = self.gauges("info", "Always 1; its labels name the version", "version")
        info.add_metric([self.group, VERSION], 1)
        yield info
        readonly = self.gauges("readonly", "1 while this reason stops new messages", "reason")
        for reason in Reason:
            readonly.add_metric([self.group, reason.value], float(reason.value in self._service.node.readonly_reasons))
        yield readonly
        ahead = self.gauges("clock_ahead_seconds", "This machine's clock minus another's, by recent messages", "of")
        for clock, ms in self._service.node.clocks_ahead_ms().items():
            ahead.add_metric([self.group, clock], ms / 1000)
        yield ahead
        yield from self._copies()
        yield from self._flow()
        yield self.histogram(
            "produce_seconds",
            "Time from a batch's arrival to its acknowledgement",
            PRODUCE_MS_BUCKETS,
            self._produce_counters.produce_ms_counts,
            self._produce_counters.produce_ms_sum,
        )

    def _copies(self) -> Iterator[Metric]:
        """Yield the metrics of a master's slaves, of which there are at most four."""
        master, end = self._service.node.master, self._service.node.log.end
        lag = self.gauges(
            "copy_lag_bytes", "Bytes that a slave has not confirmed; all of them while it is away", "copy"
        )
        in_sync = self.gauges("copy_in_sync", "1 while a slave's confirmations count", "copy")
        for watch in master.slaves.all if master is not None else ():
            if watch.owner:
                lag.add_metric([self.group, watch.owner], end - (watch.confirmed_end or 0))
                in_sync.add_metric([self.group, watch.owner], float(watch.follower.in_sync is not None))
        yield from (lag, in_sync)

    def readiness(self) -> dict[str, object]:
        """Return the answer of `/health/ready`: a process is ready when it has a part in its group and can do it."""
        node = self._service.node
        return {
            "ready": node.role is not None,
            "group": node.group,
            "master": node.master is not None,
            "writable": node.writable,
            "readonlyReasons": sorted(map(str, node.readonly_reasons)),
            "metaserver": self._service.is_registered,
        }

    # Families, all labelled with the group first.

    @property
    def group(self) -> str:
        return self._service.node.group

    def gauge(self, reading: Reading) -> Series:
        name, text, value = reading
        family = self.gauges(name, text)
        family.add_metric([self.group], value)
        return family

    def count(self, reading: Reading) -> Series:
        name, text, value = reading
        family = self.counts(name, text)
        family.add_metric([self.group], value)
        return family

    def gauges(self, name: str, text: str, *labels: str) -> Series:
        return Series(f"{self._prefix}_{name}", text, "gauge", ["broker_group", *labels])

    def counts(self, name: str, text: str, *labels: str) -> Series:
        return Series(f"{self._prefix}_{name}", text, "counter", ["broker_group", *labels])

    def histogram(self, name: str, text: str, buckets_ms: Sequence[int], counts: list[int], sum_ms: float) -> Metric:
        """Make a histogram in seconds; the last place of `counts` is for values above every bucket."""
        bounds = [str(ms / 1000) for ms in buckets_ms] + ["+Inf"]
        family = HistogramMetricFamily(f"{self._prefix}_{name}", text, labels=["broker_group"])
        family.add_metric([self.group], list(zip(bounds, accumulate(counts), strict=True)), sum_ms / 1000)
        return family

    # Metrics of every process.

    def _gauges(self) -> Iterator[Reading]:
        node, service = self._service.node, self._service
        master, message_log = node.master, node.log
        yield "is_master", "1 if this process is the master of its group", float(master is not None)
        yield "writable", "1 if the group accepts new messages", float(node.writable)
        yield "term", "Term of the newest epoch known", node.identity.value.term
        yield "boot", "Boot of the newest epoch known", node.identity.value.boot
        yield "log_start_bytes", "Offset of the oldest frame", message_log.start
        yield "log_end_bytes", "Offset behind the newest frame", message_log.end
        yield "flushed_end_bytes", "Offset below which this disk has every frame", message_log.flushed_end
        yield "disk_free_bytes", "Free space on the disk of the log", service.disk_free_bytes
        limit = service.disk_free_limit
        yield "disk_free_limit_bytes", "Free space below which no message is accepted", limit
        yield "quarantine_bytes", "Bytes in quarantine: they left the log and are kept", service.quarantine.bytes
        yield (
            "quarantine_limit_bytes",
            "Bound of the quarantine; above it, all but evidence of a loss is deleted",
            service.quarantine.limit,
        )
        apart = bool(self._service.node.clocks_disagreement())
        yield "clocks_disagree", "1 while clocks differ by more than clock_difference_ms_max: nothing is deleted", apart
        yield "metaserver_connected", "1 while a metaserver answers this process", float(service.is_registered)
        yield "connections", "Open connections of clients and slave", service.connections
        if service.scrub is not None:
            text = "Time since the last reading of the closed segment that waits longest for the next"
            yield "scrub_oldest_seconds", text, service.scrub.oldest_s
            yield "scrub_every_seconds", "Time between two readings of a closed segment", service.scrub.every_s
            if (ago_s := service.scrub.last_finding_s) is not None:
                yield (
                    "scrub_last_finding_seconds",
                    "Time since a reading found damage; absent: not in this process",
                    ago_s,
                )
        yield "memory_bytes", "Memory of this process alone", service.memory_bytes
        yield "memory_limit_bytes", "Memory above which producers wait", service.memory_alarm.limit_bytes
        yield "sync_cost_seconds", "Recent mean time of a small fsync", service.sync_us / 1e6
        if master is not None:
            lag = message_log.end - master.gate.matched_end if not master.gate.too_few_in_sync else message_log.end
            yield "high_watermark_bytes", "Offset below which enough disks have every frame", master.gate.high_watermark
            yield (
                "sync_lag_bytes",
                "Bytes that too few copies have confirmed; all of them while too few are in sync",
                lag,
            )
            yield (
                "slave_connected",
                "1 while enough slaves follow and have matched",
                float(not master.gate.too_few_in_sync),
            )
            yield "waiting_answers", "Answers that wait for enough disks", master.gate.waiting

    def _counts(self) -> Iterator[Reading]:
        counters, service = self._produce_counters, self._service
        yield "produced_messages", "Messages accepted from producers", counters.produced_messages
        yield "produced_bytes", "Bytes of batches accepted from producers", counters.produced_bytes
        yield "repeated_batches", "Batches sent again and stored once", counters.repeated_batches
        yield "refused_messages", "Messages refused on their own, too large or malformed", counters.refused_messages
        yield "commits", "Writes with fsync", service.commits
        yield "sync_seconds", "Time spent in writes with fsync", service.sync_seconds
        illegal = sum(machine.table.illegal for _, machine in machines(service.node))
        yield (
            "illegal_transitions",
            "Transitions missing from a table of states: a defect in qmq; the role restarts",
            illegal,
        )
        if service.scrub is not None:
            yield "scrubbed_bytes", "Bytes of closed segments that were read again", service.scrub.bytes
            yield "scrub_findings", "Damage that a scrub, a read or the start found", service.scrub.findings

    def _subjects(self, ends: Mapping[str, int]) -> Iterator[Metric]:
        """Yield the number of messages of each subject. Dead-letter subjects come first, because alerts watch them."""
        yield self.gauge(("subjects", "Subjects in the log; metrics_subjects_max of them are shown", len(ends)))
        received = self.counts("subject_messages", "Messages in the log since its beginning", "subject")
        shown = largest(ends, self._shown_max, lambda name: is_dead_letter_subject(name) or self._is_always(name))
        for subject, end in shown.items():
            received.add_metric([self.group, subject], end)
        yield received

    def _flow(self) -> Iterator[Metric]:
        now = self.gauges("client_connections", "Clients' connections by state; only running ones are read", "state")
        stops = self.counts("stopped_connections", "Pauses in reading producers' connections", "state")
        counts = Counter(acceptor.flow.state for acceptor in self._service.acceptors)
        for state in ConnectionState:
            now.add_metric([self.group, state.value], counts[state])
            if state is not ConnectionState.RUNNING:
                stops.add_metric([self.group, state.value], self._service.stops[state])
        yield now
        yield stops
        off = sum(acceptor.is_clock_off for acceptor in self._service.acceptors)
        yield self.gauge(("client_clocks_off", "Clients with a clock difference above clock_difference_ms_max", off))
        reached = self.counts("limits_reached", "Times that a setting's bound stopped or refused a client", "setting")
        lately = self.gauges(
            "limited", "1 if a setting's bound stopped or refused a client within the last minute", "setting"
        )
        limits, now_ms = self._service.limits, self._service.monotonic_ms()
        for setting, count in limits.counts.items():
            reached.add_metric([self.group, setting], count)
            lately.add_metric([self.group, setting], float(limits.is_lately(setting, now_ms)))
        text = "1 if an operator's limit of a subject refused producers within the last minute; at most 100 subjects"
        subjects = self.gauges("limited_subject", text, "setting", "subject")
        for setting, subject in limits.subjects_lately(now_ms):
            subjects.add_metric([self.group, setting, subject], 1)
        yield from (reached, lately, subjects)


def connections(service: Service[Any]) -> list[dict[str, object]]:
    """Return the answer of `/connections`: the state of each client's connection."""
    return [
        {
            "peer": acceptor.connection.peer,
            "app": acceptor.app,
            "clock_ahead_ms": acceptor.clock_ahead_ms,
            "state": acceptor.flow.state.value,
            "produces": acceptor.flow.produces,
            "consumes": acceptor.flow.consumes,
            "reads": acceptor.connection.writable,
            "unacked_bytes": acceptor.connection.unacked_bytes,
            "owed_bytes": acceptor.connection.owed_bytes,
        }
        for acceptor in service.acceptors
    ]


def http_port(collector: CopyCollector[M], service: Service[M], settings: CopySettings) -> HttpPort:
    """Open the HTTP port; raises NotServed if it is taken."""
    registry = CollectorRegistry()
    register_process(registry)
    registry.register(collector)
    try:
        http = CopyHttp(
            registry,
            service.access,
            lambda: connections(service),
            collector.readiness,
            lambda: states(service.node, now_ms=service.monotonic_ms()),
        )
        return HttpPort(
            http.app(), listen(settings.listen_on, settings.metrics_port), connections_max=service.bounds.http
        )
    except OSError as error:
        address = Endpoint(settings.listen_on, settings.metrics_port)
        raise NotServed(f"cannot listen on {address}: {error}; stop its user, or set another port or bind") from None
