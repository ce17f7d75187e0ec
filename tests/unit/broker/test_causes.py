"""Core. Causes that stop or slow a consumer group; a healthy group has none."""

from __future__ import annotations

import logging

import pytest

from qmq.broker import group_status
from qmq.broker.group_status import CAUSES, Cause, Facts
from qmq.broker.service_queue import OWED_BYTES_MAX
from qmq.log.group import Group as Progress
from qmq.tools.findings import GROUP_CAUSES
from qmq.types import Role
from tests.unit.broker.world import Client, Group

KEY = ("s", "g")


def a_group(*ids: str) -> tuple[Group, Client]:
    group = Group.made().start()
    client = group.subscribed("c")
    if ids:
        client.produce(*ids)
    group.settle()
    return group, client


def of(group: Group) -> list[Cause]:
    return group.a.master.causes.of(KEY)


def test_healthy_group_has_no_cause():
    group, client = a_group()
    assert of(group) == []
    client.pull(timeout_ms=60_000)
    client.store("m0")
    assert of(group) == []
    assert group.a.master.causes.of(("s", "another")) == []


def test_consumers_without_pulls_have_the_prefetch_cause():
    group, client = a_group("m0")
    assert of(group) == [Cause.PREFETCH]
    client.lost()
    assert of(group) == [Cause.NO_CONSUMER]


def test_absent_broadcast_consumer_has_its_own_cause():
    """Each process that listens to a broadcast leaves a group behind, unless it always uses the same id."""
    group, _ = a_group("m0")
    one = group.subscribed("host-1", group="host-1", broadcast=True)
    assert group.a.master.causes.of(("s", "host-1")) == [Cause.PREFETCH]
    one.lost()
    assert group.a.master.causes.of(("s", "host-1")) == [Cause.AWAY]


def test_offline_cause_is_logged_once_and_ends(monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(group_status.log, "warning", lambda text, *values: said.append(text % values))
    group, client = a_group("m0")
    client.pull(timeout_ms=60_000)
    group.settle()
    client.produce("m1")
    group.a.assign(Role.MASTER, offline=(("s", "g", "*"),))
    client.pull(timeout_ms=60_000)
    group.settle()
    client.produce("m2")
    group.a.wait(1_000)
    assert Cause.OFFLINE in of(group)
    assert group.a.master.causes.found[KEY] == of(group)
    assert sum("cause=offline subject=s consumer_group=g" in line for line in said) == 1
    group.a.assign(Role.MASTER)
    group.a.wait(1_000)
    assert Cause.OFFLINE not in of(group) and KEY not in group.a.master.causes.found


def test_postponed_messages_have_the_cause_later():
    group, client = a_group("m0")
    pull = client.pull()
    group.settle()
    number = client.pulled(pull)[0][0]
    client.nack(number, number + 1, delay_ms=60_000)
    client.pull(timeout_ms=60_000)
    group.settle()
    assert of(group) == [Cause.LATER]
    group.a.node.changes.prepare_swap(1, hold_ms=1_000)
    assert of(group) == [Cause.MASTER, Cause.LATER]


def test_due_requeued_messages_wait_for_a_pull():
    group, client = a_group("m0")
    client.take()
    number = client.first
    client.done(client.nack(number, number + 1))
    assert of(group) == [Cause.PREFETCH]


def test_unacked_limit_is_a_cause(monkeypatch):
    monkeypatch.setattr(group_status, "UNACKED_MESSAGES_MAX", 1)
    group, client = a_group("m0", "m1")
    client.pull(most=1)
    group.settle()
    assert Cause.UNACKED in of(group)


class _Link:
    def __init__(self, *, writable: bool = True, owed_bytes: int = 0) -> None:
        self.writable, self.owed_bytes = writable, owed_bytes


class _Subscription:
    def __init__(self, link, *, waits=True):
        self.link, self.waiting = link, [object()] if waits else []


def facts(**changed) -> Facts:
    plain = Facts(
        Progress(0),
        [_Subscription(_Link())],
        lambda one: False,
        may_progress=True,
        has_slave=True,
        is_slowed=False,
        is_handed_on=False,
        is_looking=False,
        is_ordered=False,
        new=1,
        due=0,
    )
    return plain._replace(**changed)


@pytest.mark.parametrize(
    ("cause", "changed"),
    [
        (Cause.MASTER, {"may_progress": False}),
        (Cause.NO_SLAVE, {"has_slave": False}),
        (Cause.NOT_READ, {"connected": [_Subscription(_Link(writable=False))]}),
        (Cause.NOT_READ, {"connected": [_Subscription(_Link(owed_bytes=OWED_BYTES_MAX))]}),
        (Cause.RATE, {"is_slowed": True}),
        (Cause.EXCLUSIVE, {"is_handed_on": True}),
        (Cause.FILTER, {"is_looking": True}),
        (Cause.ORDER_KEY, {"is_ordered": True}),
    ],
)
def test_single_cause_is_named_alone(cause, changed):
    assert group_status.causes(facts(**changed)) == [cause]
    assert group_status.causes(facts(**changed, new=0)) == [], "nobody waits for anything"


@pytest.mark.parametrize(("changed", "kept"), [({"may_progress": False}, 2), ({"is_slowed": True}, 4)])
def test_kept_causes_are_bounded(monkeypatch, changed, kept):
    monkeypatch.setattr(group_status, "NAMED_MAX", 2)
    looked = group_status.Causes(lambda key: facts(**changed))
    looked.look([("s", str(number)) for number in range(6)], 0)
    assert len(looked.found) == kept


@pytest.mark.parametrize(
    "connected",
    [
        [_Subscription(_Link(owed_bytes=OWED_BYTES_MAX - 1))],
        [_Subscription(_Link(writable=False)), _Subscription(_Link())],
    ],
    ids=["it reads on", "another one does"],
)
def test_one_reading_consumer_is_enough(connected):
    assert group_status.causes(facts(connected=connected)) == []


def test_offline_or_idle_consumers_do_not_count_as_unread():
    off, idle = _Subscription(_Link(writable=False)), _Subscription(_Link(writable=False), waits=False)
    reads = _Subscription(_Link())
    assert group_status.causes(facts(connected=[off], is_offline=lambda one: one is off)) == [Cause.OFFLINE]
    assert group_status.causes(facts(connected=[idle, reads])) == []
    stuck, content = _Subscription(_Link(writable=False)), _Subscription(_Link(), waits=False)
    assert group_status.causes(facts(connected=[stuck, content])) == [Cause.NOT_READ]


def test_groups_are_checked_once_per_round(monkeypatch):
    monkeypatch.setattr(group_status, "LOOKED_AT_ONCE", 2)
    looked, groups = group_status.Causes(lambda key: None), [("s", name) for name in "abcde"]
    rounds = [looked.look(groups, 0) for _ in range(4)]
    assert rounds == [groups[:2], groups[2:4], groups[4:], groups[:2]]
    assert [looked.look(["another"], 0), looked.look(["another"], 0)] == [groups[2:4], groups[4:]], (
        "of a round that began"
    )
    assert looked.look([], 0) == [] and looked.look(groups[:1], 0) == groups[:1]


def test_forgotten_group_has_no_cause():
    looked = group_status.Causes(lambda key: facts(has_slave=False))
    looked.look([KEY, ("s", "another")], 0)
    looked.forget(KEY)
    assert list(looked.found) == list(looked._to_log) == [("s", "another")]


def test_alarm_is_logged_at_each_begin(caplog):
    now: dict[str, object] = {"is_slowed": True}
    looked = group_status.Causes(lambda key: facts(**now))
    counts = []
    for changed in ({}, {"has_slave": False}, {"is_slowed": False}, {"has_slave": True}, {"is_slowed": True}):
        now |= changed
        looked.look([KEY], 0)
        looked.look([], 0)
        counts.append(len(caplog.records))
        assert looked.found.get(KEY, []) == looked.of(KEY)
    assert counts == [1, 1, 1, 1, 2]


def test_lasting_cause_is_logged_once(caplog):
    caplog.set_level(logging.INFO)
    now: dict[str, object] = {"has_slave": False}
    looked = group_status.Causes(lambda key: facts(**now))

    def said(at_ms: int, **changed: object) -> list[str]:
        now.update(changed)
        caplog.clear()
        looked.look([KEY], at_ms)
        looked.look([], at_ms)
        return [record.getMessage().partition(":")[0] for record in caplog.records]

    line = "groups wait cause=no_slave groups=1 first=g of s"
    assert said(1_000) == said(1_000 + group_status.LASTS_MS - 1) == []
    assert said(1_000 + group_status.LASTS_MS) == [line]
    assert said(9_000_000) == said(9_000_001, has_slave=True) == said(9_000_002, has_slave=False) == []
    assert said(9_000_001 + group_status.LASTS_MS) == [], "it began anew"
    assert said(9_000_002 + group_status.LASTS_MS) == [line]
    assert said(9_500_000, is_slowed=True) == ["group is stopped cause=rate subject=s consumer_group=g"]
    assert not looked._to_log


def test_common_cause_is_one_log_line(caplog):
    caplog.set_level(logging.INFO)
    looked = group_status.Causes(lambda key: facts(has_slave=False))
    groups = [("s", f"g{number}") for number in range(5)]
    for at_ms in (0, group_status.LASTS_MS):
        looked.look(groups, at_ms)
        looked.look([], at_ms)
    [record] = caplog.records
    assert "cause=no_slave groups=5 first=g0 of s, g1 of s, g2 of s: " in record.getMessage()


def test_every_cause_is_defined_and_alarms_have_advice():
    assert list(CAUSES) == list(Cause)
    assert {str(cause) for cause, rule in CAUSES.items() if rule.is_alarm} == set(GROUP_CAUSES)
