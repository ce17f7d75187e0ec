"""Shell. Prometheus metrics of every process: memory, processor time, open files, start, version."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from qmq.version import VERSION


def register_process(registry: CollectorRegistry) -> None:
    """Export memory, processor time, open files and the start of this process, and its Python.

    `changes(process_start_time_seconds[1h])` counts restarts.
    """
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)


def version_of(process: str) -> Metric:
    """Running build, as a gauge that is always 1."""
    info = GaugeMetricFamily(f"qmq_{process}_info", "Always 1; says what runs.", labels=["version"])
    info.add_metric([VERSION], 1)
    return info


class Reader(Collector):
    """Exports the samples of a function, called at each scrape."""

    def __init__(self, read: Callable[[], Iterable[Metric]]) -> None:
        self._read = read

    def collect(self) -> Iterable[Metric]:
        return self._read()
