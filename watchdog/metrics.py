"""Shell. The watchdog's metrics. Only the leader counts rows; a standby reports that it is one."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from qmq.process_metrics import register_process, version_of
from qmq.watchdog.database import Stats
from qmq.watchdog.leader import Leader, now_ms

_COUNTED = {
    "sent": "Rows deleted because their messages are stored.",
    "failed": "Rows of batches that a broker group did not store.",
    "released": "Rows that were released, to be claimed again after a back-off.",
    "parked": "Rows not sent until OutboxRetry.",
    "unknown": "Attempts with unknown outcome.",
    "claimed": "Rows that were claimed.",
}


class Metrics:
    """Registry of one process. Made by main; the watcher sets `stats` and `reconciled` by database."""

    def __init__(self, leader: Leader) -> None:
        self.registry = CollectorRegistry()
        self.stats: dict[str, Stats] = {}
        self.reconciled: dict[str, dict[str, int]] = {}
        register_process(self.registry)
        self.registry.register(_Watchdog(leader, self))

    def render(self) -> bytes:
        return generate_latest(self.registry)


class _Watchdog(Collector):
    """Collector of a watchdog's metrics."""

    def __init__(self, leader: Leader, metrics: Metrics) -> None:
        self._leader = leader
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        leader = self._leader
        yield version_of("watchdog")
        yield GaugeMetricFamily(
            "qmq_watchdog_metaserver_up", "1 while a metaserver answers.", int(not leader.metaserver_trouble)
        )
        yield GaugeMetricFamily("qmq_watchdog_leader", "1 at the active watchdog.", int(leader.is_leader))
        yield GaugeMetricFamily("qmq_watchdog_term", "Term of the watchdog's lease; 0 at a standby.", leader.lease.term)
        yield CounterMetricFamily("qmq_watchdog_elections", "Times that this watchdog became active.", leader.elections)
        yield GaugeMetricFamily(
            "qmq_watchdog_refused_routes",
            "Subjects without a route, refused by the metaserver.",
            sum(map(bool, leader.refusals)),
        )
        yield from self._databases()
        yield from self._rows()

    def _databases(self) -> Iterable[Metric]:
        leader = self._leader
        up = GaugeMetricFamily("qmq_watchdog_database_up", "1 while the database answers.", labels=["database"])
        passed = GaugeMetricFamily(
            "qmq_watchdog_last_pass_seconds", "Time since the whole table was last read.", labels=["database"]
        )
        for url, drain in leader.drains.items():
            up.add_metric([url], int(not drain.trouble))
            if drain.core.last_pass_ms is not None:
                passed.add_metric([url], (now_ms() - drain.core.last_pass_ms) / 1000)
        for url in leader.problems:
            up.add_metric([url], 0)
        yield from (up, passed)
        for name, text in _COUNTED.items():
            family = CounterMetricFamily(f"qmq_watchdog_{name}", text, labels=["database"])
            for url, counts in leader.counts.items():
                family.add_metric([url], getattr(counts, name))
            yield family

    def _rows(self) -> Iterable[Metric]:
        rows = GaugeMetricFamily("qmq_watchdog_rows", "Rows by state, up to 100,000.", labels=["database", "state"])
        oldest = GaugeMetricFamily("qmq_watchdog_oldest_seconds", "Age of the oldest row.", labels=["database"])
        aged = GaugeMetricFamily(
            "qmq_watchdog_rows_older",
            "Pending rows older than `seconds`, of the 10,000 that are due longest.",
            labels=["database", "seconds"],
        )
        for url, stats in self._metrics.stats.items():
            for state in ("pending", "claimed", "parked"):
                rows.add_metric([url, state], getattr(stats, state))
            oldest.add_metric([url], stats.oldest_s)
            for step, count in stats.by_age.items():
                aged.add_metric([url, str(step)], count)
        looked = GaugeMetricFamily(
            "qmq_watchdog_reconciled_rows",
            "Rows of the last reconciliation, by their state in the logs.",
            labels=["database", "state"],
        )
        for url, states in self._metrics.reconciled.items():
            for state, count in states.items():
                looked.add_metric([url, state], count)
        yield from (rows, oldest, aged, looked)
