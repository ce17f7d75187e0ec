"""Shell. Prometheus metrics of this process's clients, for the application's own /metrics. Needs `qmq[metrics]`.

    import qmq.metrics

    qmq.metrics.register()  # in prometheus-client's default registry

The numbers are read at each scrape; qmq.client.numbers lists them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import REGISTRY, Collector, CollectorRegistry

from qmq.client.numbers import BUCKETS, FAMILIES, METRIC_PREFIX, SUM, Kind, Sample, read


class ClientCollector(Collector):
    """Collector of all clients.

    Args:
        source: returns the numbers; by default those of this process.
    """

    def __init__(self, source: Callable[[], Iterable[Sample]] = read) -> None:
        self._source = source

    def describe(self) -> Iterable[Metric]:
        """Name the metrics without reading them, so that two registrations are an error."""
        return [_family(name) for name in FAMILIES]

    def collect(self) -> Iterator[Metric]:
        by_name: dict[str, list[Sample]] = {}
        for sample in self._source():
            by_name.setdefault(sample.name, []).append(sample)
        for name in FAMILIES:
            metric, samples = _family(name), by_name.get(name, [])
            if isinstance(metric, HistogramMetricFamily):
                _add_histograms(metric, samples)
            else:
                for sample in samples:
                    metric.add_metric(sample.labels, sample.value)
            yield metric


def _family(name: str) -> CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily:
    family = FAMILIES[name]
    match family.kind:
        case Kind.COUNTER:
            return CounterMetricFamily(METRIC_PREFIX + name, family.help, labels=family.labels)
        case Kind.GAUGE:
            return GaugeMetricFamily(METRIC_PREFIX + name, family.help, labels=family.labels)
        case Kind.HISTOGRAM:
            return HistogramMetricFamily(METRIC_PREFIX + name, family.help, labels=family.labels[:-1])


def _add_histograms(metric: HistogramMetricFamily, samples: Iterable[Sample]) -> None:
    by_labels: dict[tuple[str, ...], dict[str, float]] = {}
    for sample in samples:
        by_labels.setdefault(sample.labels[:-1], {})[sample.labels[-1]] = sample.value
    for labels, values in by_labels.items():
        counts = accumulate(values.get(bucket, 0) for bucket in BUCKETS)
        metric.add_metric(labels, list(zip(BUCKETS, counts)), values.get(SUM, 0.0))


def register(registry: CollectorRegistry = REGISTRY) -> None:
    """Add the clients' metrics to a registry.

    Raises:
        ValueError: the registry has these metrics already.
    """
    registry.register(ClientCollector())
