"""Shell. Pages of metrics of cores that have no process around them, made as a process makes them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from qmq.broker.metrics import BrokerCollector
from qmq.delayserver.metrics import DelayCollector
from qmq.outbox.drain_plan import Counts
from qmq.server.http import render
from qmq.server.metrics import CopyCollector
from qmq.server.overload import ConnectionState, LimitsReached, MemoryAlarm
from qmq.watchdog.database import Stats
from qmq.watchdog.leader import Leader
from qmq.watchdog.metrics import Metrics
from qmq.watchdog.settings import WatchdogSettings


def broker_page(broker: Any, limits: LimitsReached | None = None) -> str:
    """Return the metrics page of a `Broker` of tests/unit/broker/world.py; `limits`: limits that its clients
    reached.
    """
    service = _service(broker, limits)
    return _page(BrokerCollector(service, broker.counters, None, broker.keeper, broker.settings))  # type: ignore[arg-type]


def delay_page(server: Any, limits: LimitsReached | None = None) -> str:
    """Return the metrics page of a `DelayServer` of tests/unit/delayserver/world.py."""
    service = _service(server, limits)
    return _page(DelayCollector(service, server.counters, server.filing, None, dict, server.settings))  # type: ignore[arg-type]


DATABASE = "sqlite://here:1/shop.db"


def watchdog_page(counts: Counts, stats: Stats | None = None) -> str:
    """Return the metrics page of a watchdog with these counts of DATABASE; `stats`: its last statistics."""
    sender = SimpleNamespace(on_change=lambda callback: None, refusals={})
    leader = Leader(WatchdogSettings(metaserver="http://nowhere", token="t"), None, sender, "")  # type: ignore[arg-type]
    leader.counts[DATABASE] = counts
    metrics = Metrics(leader)
    if stats is not None:
        metrics.stats[DATABASE] = stats
    return metrics.render().decode()


def samples(page: str, name: str) -> list[tuple[dict[str, str], float]]:
    """Return (labels, value) of each sample of this name."""
    families = text_string_to_metric_families(page)
    return [(sample.labels, sample.value) for family in families for sample in family.samples if sample.name == name]


def value(page: str, name: str) -> float:
    """Return the value of the only sample of this name."""
    ((_, found),) = samples(page, name)
    return found


def _page(collector: CopyCollector[Any]) -> str:
    later = [family for make in collector.copied() for family in make()]
    return render([*collector.read(), *later]).decode()


def _service(copy: Any, limits: LimitsReached | None) -> Any:
    """Return a collector's inputs from a process besides its core."""
    return SimpleNamespace(
        node=copy.node,
        is_registered=True,
        connections=0,
        acceptors={},
        scrub=None,
        memory_bytes=0,
        memory_alarm=MemoryAlarm(1 << 30),
        disk_free_bytes=1 << 30,
        disk_free_limit=0,
        quarantine=SimpleNamespace(bytes=0, limit=1 << 30),
        sync_us=0.0,
        commits=0,
        sync_seconds=0.0,
        stops=dict.fromkeys(ConnectionState, 0),
        limits=limits or LimitsReached(),
        now_ms=copy.host.now_ms,
        monotonic_ms=copy.host.monotonic_ms,
    )
