"""Shell. Prometheus metrics of every process: memory, processor time, open files, start, version."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from qmq.memory import memory_bytes
from qmq.proto import qmq_pb2 as pb
from qmq.version import VERSION

_STARTED_S = time.monotonic()


def register_process(registry: CollectorRegistry) -> None:
    """Export memory, processor time, open files and the start of this process, and its Python.

    `changes(process_start_time_seconds[1h])` counts restarts.
    """
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)


def version_of(process: str) -> Metric:
    """Return the running version, as a gauge that is always 1."""
    info = GaugeMetricFamily(f"qmq_{process}_info", "Always 1; its labels name the version.", labels=["version"])
    info.add_metric([VERSION], 1)
    return info


def process_figures(data: Path | None = None) -> pb.ProcessFigures:
    """Return figures of this process, and of the file system that holds `data`."""
    figures = pb.ProcessFigures(
        version=VERSION,
        memory_bytes=memory_bytes(),
        cpu_seconds=time.process_time(),
        running_ms=int((time.monotonic() - _STARTED_S) * 1000),
    )
    if data is not None:
        with contextlib.suppress(OSError):
            status = os.statvfs(data)
            figures.disk_free_bytes = status.f_bavail * status.f_frsize
            figures.disk_bytes = status.f_blocks * status.f_frsize
    return figures


class Reader(Collector):
    """Collector of the samples of a function, which is called at each scrape."""

    def __init__(self, read: Callable[[], Iterable[Metric]]) -> None:
        self._read = read

    def collect(self) -> Iterable[Metric]:
        return self._read()
