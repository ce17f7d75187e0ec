"""Shell. Numbers of clients: counted once, read by each exporter."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from prometheus_client import CollectorRegistry, generate_latest

import qmq
from qmq import metrics, otel
from qmq.client import numbers
from qmq.client.numbers import FAMILIES, Handled, Kind, Sample, merged, read
from qmq.remoting.commands import Command
from tests.support.waiting import consuming, until_async
from tests.unit.client.world import TOKEN

PAGE = Path(__file__).parents[3] / "docs" / "observability.md"


def value(name, *labels):
    """Return the number of one sample of this test's application."""
    return {(sample.name, sample.labels): sample.value for sample in read()}[name, ("numbers", *labels)]


async def test_outcomes_of_handlers_are_counted(qmq_broker):
    options = {"metaserver": qmq_broker.metaserver, "app": "numbers"}
    consumer, begun, may_end = qmq.Consumer(**options), asyncio.Event(), asyncio.Event()

    @consumer.listen("a", group="g", start="earliest", retry_delay=0, retries_max=2)
    async def handle(message):
        match message["n"]:
            case "retry" if message.times == 1:
                raise ValueError
            case "dead":
                raise qmq.DeadLetter("bad")
            case "last":
                begun.set()
                await may_end.wait()

    async with qmq.Producer(**options) as producer:
        kinds = ["done", "retry", "dead", "last", "waits"]
        receipts = await producer.send_many(qmq.Message("a", {"n": kind}) for kind in kinds)
        assert receipts.all_stored and value("outcomes", "stored") == 5 and value("outcomes", "unknown") == 0
        assert value("state", "producer", "connected") == 1 and value("open_messages") == 0
        async with consuming(consumer):
            await begun.wait()
            assert value("handlers_running", "a", "g") == value("unacked_messages", "a", "g") == 1
            await until_async(lambda: value("waiting_messages", "a", "g") >= 1)
            assert value("lag_seconds", "a", "g") > 0 and value("prefetch_messages", "a", "g") > 0
            may_end.set()
            await qmq_broker.wait_until_consumed("a", "g")
            handled = [value("handled", "a", "g", outcome) for outcome in ("done", "retry", "dead_letter")]
            assert handled == [4, 1, 1]
            assert value("delivered", "a", "g") == 6 and value("lag_seconds", "a", "g") == 0
    assert value("delivered", "a", "g") == 6, "the subscription has ended"
    assert value("state", "consumer", "not connected") == 1


async def test_refused_messages_are_counted(qmq_broker):
    async with qmq.Producer(metaserver=qmq_broker.metaserver, app="numbers") as producer:
        receipts = await producer.send_many([qmq.Message("a\nb"), qmq.Message("a", id="x" * 70_000)])
        assert receipts.count_of(qmq.Outcome.REFUSED) == value("outcomes", "refused") == 2


async def test_repeated_batch_is_counted(metaserver, broker):
    async with qmq.Producer(metaserver=metaserver.url, app="numbers", token=TOKEN) as producer:
        broker.lose_answer(Command.PRODUCE)
        assert (await producer.send(qmq.Message("a"))).is_stored
        assert value("repeats") == value("outcomes", "stored") == 1


def test_slow_calls_are_all_measured():
    counts = Handled()
    counts.measured(0.0001, 16)
    counts.measured(0.3, 1)
    counts.measured(1000.0, 1)
    samples = {sample.labels: sample.value for sample in counts.samples("x") if sample.name == "handler_seconds"}
    assert samples["x", "0.001"] == 16 and samples["x", "0.5"] == samples["x", "+Inf"] == 1
    assert samples["x", "sum"] == pytest.approx(1000.3016)


def test_equal_samples_are_merged():
    samples = [Sample("handled", ("a",), 1), Sample("handled", ("a",), 2), Sample("handled", ("b",), 4)]
    assert merged(samples) == [Sample("handled", ("a",), 3), Sample("handled", ("b",), 4)]
    assert merged([Sample("lag_seconds", (), 3.0), Sample("lag_seconds", (), 2.0)]) == [Sample("lag_seconds", (), 3.0)]


SAMPLES = [
    Sample("outcomes", ("shop", "stored"), 3),
    Sample("handlers_running", ("shop", "a", "g"), 1),
    Sample("handler_seconds", ("shop", "a", "g", "0.001"), 16),
    Sample("handler_seconds", ("shop", "a", "g", "0.5"), 2),
    Sample("handler_seconds", ("shop", "a", "g", "sum"), 0.6),
]


def test_prometheus_gets_every_family():
    registry = CollectorRegistry()
    registry.register(metrics.ClientCollector(lambda: SAMPLES))
    text = generate_latest(registry).decode()
    for line in (
        'qmq_client_outcomes_total{app="shop",outcome="stored"} 3.0',
        'qmq_client_handlers_running{app="shop",group="g",subject="a"} 1.0',
        'qmq_client_handler_seconds_bucket{app="shop",group="g",le="0.1",subject="a"} 16.0',
        'qmq_client_handler_seconds_bucket{app="shop",group="g",le="+Inf",subject="a"} 18.0',
        'qmq_client_handler_seconds_sum{app="shop",group="g",subject="a"} 0.6',
    ):
        assert line in text.splitlines()
    assert all(f"# HELP qmq_client_{name}" in text for name in FAMILIES)
    with pytest.raises(ValueError):
        metrics.register(registry)


def test_opentelemetry_gets_the_same_numbers(monkeypatch):
    monkeypatch.setattr(otel, "read", lambda: SAMPLES)
    reader = InMemoryMetricReader()
    otel.observe(MeterProvider([reader], shutdown_on_exit=False))
    (resource,) = reader.get_metrics_data().resource_metrics
    points = {
        metric.name: [(dict(point.attributes), point.value) for point in metric.data.data_points]
        for metric in resource.scope_metrics[0].metrics
    }
    assert points["qmq_client_outcomes"] == [({"app": "shop", "outcome": "stored"}, 3)]
    place = {"app": "shop", "subject": "a", "group": "g"}
    assert points["qmq_client_handler_calls"] == [(place, 18)]
    assert points["qmq_client_handler_seconds"] == [(place, 0.6)]


def test_families_name_their_labels_once():
    assert all(
        len(set(family.labels)) == len(family.labels) and family.help.endswith(".") for family in FAMILIES.values()
    )
    assert [name for name, family in FAMILIES.items() if family.kind is Kind.HISTOGRAM] == ["handler_seconds"]
    assert numbers.METRIC_PREFIX == "qmq_client_"


def test_every_number_is_documented():
    rows = re.findall(r"^\| `qmq_client_(\w+)` \| (\w+) \| ([^|]*) \| (.*) \|$", PAGE.read_text(), re.MULTILINE)
    expected = {
        (name, family.kind.value, ", ".join(f"`{label}`" for label in family.labels), family.help)
        for name, family in FAMILIES.items()
    }
    assert set(rows) == expected
