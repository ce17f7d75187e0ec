"""Shell. A Prometheus page stays small with many subjects and consumer groups."""

from __future__ import annotations

from types import SimpleNamespace

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from qmq.broker.group_status import Backlogs
from qmq.broker.metrics import BrokerCollector
from qmq.log.group import Consumer, Group, UnackedRange
from qmq.process_metrics import Reader, register_process
from qmq.server.http import Series, render
from qmq.server.metrics import largest

SHOWN = 2000
SUBJECTS = [f"business.unit.orders.changed.{number:05d}" for number in range(10_000)]


def test_page_equals_prometheus_clients_output():
    def families():
        counts = Series("qmq_messages", 'of "all"\nsubjects \\', "counter", ["subject", "broker_group"])
        for subject in ("a.b", "%RETRY%a%b", "100 %s", 'a "b" \\ c', "two\nlines", "ü", ""):
            counts.add_metric([subject, "g1"], 1e6)
        yield counts
        yield Series("qmq_none", "nothing there", "gauge", ["subject"])
        yield CounterMetricFamily("qmq_other", "of prometheus-client's own", value=3)
        gauge = Series("qmq_age_seconds", "", "gauge", ["of"])
        for value in (0, -1, 0.25, 1e-9, 123456789.0, 2.0**60, float("inf"), float("-inf"), float("nan"), True):
            gauge.add_metric(["x"], value)
        yield gauge
        yield GaugeMetricFamily("qmq_is_master", "without labels", value=1)
        times = HistogramMetricFamily("qmq_produce_seconds", "buckets", labels=["broker_group"])
        times.add_metric(["g1"], [("0.001", 3), ("+Inf", 5)], 0.5)
        yield times

    process, registry = CollectorRegistry(), CollectorRegistry()
    register_process(process)
    found = [*process.collect(), *families()]
    registry.register(Reader(lambda: found))
    assert render(found) == generate_latest(registry)


def test_largest_and_configured_series_are_shown():
    def shown(most, always="", **sizes):
        return "".join(largest(sizes, most, lambda name: name in always))

    assert shown(3, a=1, b=3, c=2, d=3) == "bdc"
    assert shown(2, a=1, b=3) == "ab"
    assert shown(1, a=1, b=1) == "a", "of equals, the first"
    assert shown(2, "a", a=1, b=3, c=2) == "ab"
    assert shown(1, "ac", a=1, b=3, c=2) == "c"
    assert shown(0, "a", a=1) == ""


def page(ends, groups, always=()):
    state = SimpleNamespace(next_sequence=ends, groups=groups)
    log = SimpleNamespace(state=state, frames=lambda *_: [])
    backlogs = Backlogs(SimpleNamespace(log=log, host=SimpleNamespace(now_ms=lambda: 0)), always)
    backlogs.look(groups)
    master = SimpleNamespace(backlogs=backlogs, causes=SimpleNamespace(found={}))
    service = SimpleNamespace(node=SimpleNamespace(group="g1", log=log, master=master), now_ms=lambda: 0)
    settings = SimpleNamespace(metrics_subjects_max=SHOWN, metrics_subjects=always)
    collector = BrokerCollector(service, None, None, None, settings)
    return render(family for make in collector.copied() for family in make()).decode()


def behind(position, unacked=0):
    held = [UnackedRange(0, position - unacked, unacked, 1)] if unacked else []
    return Group(position, consumers={"c": Consumer(unacked, held)})


def test_page_of_ten_thousand_subjects_is_small():
    ends = {name: 1000 + number for number, name in enumerate(SUBJECTS)} | {"%DEAD_RETRY%a%billing": 1}
    groups = {(name, "billing"): behind(ends[name] - 5) for name in SUBJECTS}
    groups[SUBJECTS[0], "billing"] = behind(7)
    groups[SUBJECTS[1], "billing"] = behind(ends[SUBJECTS[1]], unacked=50)
    groups[SUBJECTS[2], "billing"] = behind(ends[SUBJECTS[2]])
    text = page(ends, groups)
    assert len(text) < 700_000
    lines = text.splitlines()
    assert 'qmq_broker_subjects{broker_group="g1"} 10001.0' in lines
    shown = [line for line in lines if line.startswith("qmq_broker_subject_messages_total{")]
    assert len(shown) == SHOWN and any("DEAD_RETRY" in line for line in shown)
    assert any(SUBJECTS[-1] in line for line in shown) and not any(SUBJECTS[0] in line for line in shown)
    assert sum(line.startswith("qmq_broker_lag_messages{") for line in lines) == SHOWN
    named = 'broker_group="g1",consumer_group="billing",subject='
    assert f'qmq_broker_lag_messages{{{named}"{SUBJECTS[0]}"}} 993.0' in lines
    assert f'qmq_broker_unacked_messages{{{named}"{SUBJECTS[1]}"}} 50.0' in lines
    assert SUBJECTS[2] not in text, "a group that has acked everything"


def test_configured_subjects_are_always_shown():
    ends = {name: 1000 + number for number, name in enumerate(SUBJECTS)}
    groups = {(name, "billing"): behind(ends[name] - 5) for name in SUBJECTS}
    lines = page(ends, groups, always=(SUBJECTS[3], f"{SUBJECTS[0][:-3]}99*")).splitlines()
    for name in ("qmq_broker_subject_messages_total", "qmq_broker_lag_messages"):
        shown = [line for line in lines if line.startswith(name)]
        assert sum(SUBJECTS[3] in line for line in shown) == 1
        assert sum(f"{SUBJECTS[0][:-3]}99" in line for line in shown) == 10
