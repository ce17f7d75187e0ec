"""Shell. A page for Prometheus stays small, however many subjects and consumer groups there are."""

from __future__ import annotations

from types import SimpleNamespace

from prometheus_client import CollectorRegistry, generate_latest

from qmq.broker.backlogs import Backlogs
from qmq.broker.metrics import BrokerCollector
from qmq.log.group import Consumer, Group, UnackedRange
from qmq.server.metrics import largest

SHOWN = 2000
SUBJECTS = [f"business.unit.orders.changed.{number:05d}" for number in range(10_000)]


def test_the_largest_are_shown_in_their_order():
    assert largest([("a", 1), ("b", 3), ("c", 2), ("d", 3)], 3) == [("b", 3), ("c", 2), ("d", 3)]
    assert largest([("a", 1), ("b", 3)], 2) == [("a", 1), ("b", 3)]
    assert largest([("a", 1), ("b", 1)], 1) == [("a", 1)], "of equals, the first"
    assert largest([("a", 1)], 0) == []


def page(ends, groups, always=()):
    state = SimpleNamespace(next_sequence=ends, groups=groups)
    log = SimpleNamespace(state=state, frames=lambda *_: [])
    backlogs = Backlogs(SimpleNamespace(log=log, host=None), always)
    backlogs.look(groups)
    master = SimpleNamespace(backlogs=backlogs)
    service = SimpleNamespace(node=SimpleNamespace(group="g1", log=log, master=master))
    settings = SimpleNamespace(metrics_subjects_max=SHOWN, metrics_subjects=always)
    collector = BrokerCollector(service, None, None, None, settings)
    collector.collect = lambda: [*collector._subjects(ends), *collector._lags()]
    registry = CollectorRegistry()
    registry.register(collector)
    return generate_latest(registry).decode()


def behind(position, unacked=0):
    held = [UnackedRange(0, position - unacked, unacked, 1)] if unacked else []
    return Group(position, consumers={"c": Consumer(unacked, held)})


def test_ten_thousand_subjects_and_groups_are_less_than_a_megabyte_and_nothing_that_matters_is_left_out():
    ends = {name: 1000 + number for number, name in enumerate(SUBJECTS)} | {"%DEAD_RETRY%a%billing": 1}
    groups = {(name, "billing"): behind(ends[name] - 5) for name in SUBJECTS}
    groups[SUBJECTS[0], "billing"] = behind(7)
    groups[SUBJECTS[1], "billing"] = behind(ends[SUBJECTS[1]], unacked=50)
    groups[SUBJECTS[2], "billing"] = behind(ends[SUBJECTS[2]])
    text = page(ends, groups)
    assert len(text) < 700_000
    lines = text.splitlines()
    assert 'qmq_broker_subjects{broker_group="g1"} 10001.0' in lines
    assert 'qmq_broker_consumer_groups{broker_group="g1"} 10000.0' in lines
    shown = [line for line in lines if line.startswith("qmq_broker_subject_messages_total{")]
    assert len(shown) == SHOWN and any("DEAD_RETRY" in line for line in shown)
    assert any(SUBJECTS[-1] in line for line in shown) and not any(SUBJECTS[0] in line for line in shown)
    assert sum(line.startswith("qmq_broker_lag_messages{") for line in lines) == SHOWN
    named = 'broker_group="g1",consumer_group="billing",subject='
    assert f'qmq_broker_lag_messages{{{named}"{SUBJECTS[0]}"}} 993.0' in lines
    assert f'qmq_broker_unacked_messages{{{named}"{SUBJECTS[1]}"}} 50.0' in lines
    assert SUBJECTS[2] not in text, "a group that has acked everything"


def test_subjects_that_are_named_are_shown_whatever_they_have():
    ends = {name: 1000 + number for number, name in enumerate(SUBJECTS)}
    groups = {(name, "billing"): behind(ends[name] - 5) for name in SUBJECTS}
    lines = page(ends, groups, always=(SUBJECTS[3], f"{SUBJECTS[0][:-3]}99*")).splitlines()
    for name in ("qmq_broker_subject_messages_total", "qmq_broker_lag_messages"):
        shown = [line for line in lines if line.startswith(name)]
        assert sum(SUBJECTS[3] in line for line in shown) == 1
        assert sum(f"{SUBJECTS[0][:-3]}99" in line for line in shown) == 10
