"""Core. Status of consumer groups: causes that stop or slow them, ages and sizes of their backlogs."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

from qmq.broker import group_status
from qmq.broker.answers import OWED_BYTES_MAX
from qmq.broker.group_status import CAUSES, Backlog, Backlogs, Cause, Facts
from qmq.errors import CorruptFrame, DiskFailed
from qmq.log.group import Consumer as LogConsumer
from qmq.log.group import Group as LogGroup
from qmq.log.group import UnackedRange
from qmq.log.requeued import Requeued, RequeuedRange
from qmq.tools.findings import GROUP_CAUSES
from qmq.types import Role
from tests.unit.broker.world import Client, Group

KEY = ("s", "g")


def consuming(*ids: str, **settings) -> tuple[Group, Client]:
    """Return a group, and a consumer to which these messages are not delivered yet."""
    group = Group.made(**settings).start()
    client = group.subscribed("c")
    if ids:
        client.store(*ids)
    return group, client


# Causes.


def causes(group: Group) -> list[Cause]:
    return group.a.master.causes.of(KEY)


def test_healthy_group_has_no_cause():
    group, client = consuming()
    assert causes(group) == []
    client.pull(timeout_ms=60_000)
    client.store("m0")
    assert causes(group) == group.a.master.causes.of(("s", "another")) == []


def test_causes_follow_the_consumers():
    group, client = consuming("m0")
    host = group.subscribed("host-1", group="host-1", broadcast=True)
    assert causes(group) == group.a.master.causes.of(("s", "host-1")) == [Cause.PREFETCH], "no pull waits"
    client.take()
    client.nacked("m0", delay_ms=60_000)
    client.pull(timeout_ms=60_000)
    group.settle()
    assert causes(group) == [Cause.LATER]
    group.a.node.changes.prepare_swap(1, hold_ms=1_000)
    assert causes(group) == [Cause.MASTER, Cause.LATER]
    group.a.node.changes.cancel_swap()
    for consumer in (client, host):
        consumer.lost()
    assert causes(group) == [Cause.NO_CONSUMER, Cause.LATER]
    assert group.a.master.causes.of(("s", "host-1")) == [Cause.AWAY], "an absent process that listens to a broadcast"


def test_due_requeued_messages_wait_for_a_pull():
    group, client = consuming("m0")
    client.take()
    client.nacked("m0")
    assert causes(group) == [Cause.PREFETCH]


def test_unacked_limit_is_a_cause(monkeypatch):
    monkeypatch.setattr(group_status, "UNACKED_MESSAGES_MAX", 1)
    group, client = consuming("m0", "m1")
    client.take(most=1)
    assert Cause.UNACKED in causes(group)


def test_offline_cause_is_logged_once_and_ends(monkeypatch):
    lines: list[str] = []
    monkeypatch.setattr(group_status.log, "warning", lambda text, *values: lines.append(text % values))
    group, client = consuming("m0")
    group.a.assign(Role.MASTER, offline=(("s", "g", "*"),))
    client.pull(timeout_ms=60_000)
    client.store("m1")
    group.a.wait(1_000)
    assert Cause.OFFLINE in causes(group) and group.a.master.causes.found[KEY] == causes(group)
    assert sum("cause=offline subject=s consumer_group=g" in line for line in lines) == 1
    group.a.assign(Role.MASTER)
    group.a.wait(1_000)
    assert Cause.OFFLINE not in causes(group) and KEY not in group.a.master.causes.found


class _Link:
    def __init__(self, *, writable: bool = True, owed_bytes: int = 0) -> None:
        self.writable, self.owed_bytes = writable, owed_bytes


class _Subscription:
    def __init__(self, link, *, waits=True):
        self.link, self.waiting = link, [object()] if waits else []


def facts(**changed) -> Facts:
    plain = Facts(
        LogGroup(0),
        [_Subscription(_Link())],
        lambda consumer: False,
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
    assert group_status.causes(facts(connected=[off], is_offline=lambda consumer: consumer is off)) == [Cause.OFFLINE]
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

    def logged_at(at_ms: int, **changed: object) -> list[str]:
        now.update(changed)
        caplog.clear()
        looked.look([KEY], at_ms)
        looked.look([], at_ms)
        return [record.getMessage().partition(":")[0] for record in caplog.records]

    line = "groups wait cause=no_slave groups=1 first=g of s"
    assert logged_at(1_000) == logged_at(1_000 + group_status.LOGGED_AFTER_MS - 1) == []
    assert logged_at(1_000 + group_status.LOGGED_AFTER_MS) == [line]
    assert logged_at(9_000_000) == logged_at(9_000_001, has_slave=True) == logged_at(9_000_002, has_slave=False) == []
    assert logged_at(9_000_001 + group_status.LOGGED_AFTER_MS) == [], "it began anew"
    assert logged_at(9_000_002 + group_status.LOGGED_AFTER_MS) == [line]
    assert logged_at(9_500_000, is_slowed=True) == ["group is stopped cause=rate subject=s consumer_group=g"]
    assert not looked._to_log


def test_common_cause_is_one_log_line(caplog):
    caplog.set_level(logging.INFO)
    looked = group_status.Causes(lambda key: facts(has_slave=False))
    groups = [("s", f"g{number}") for number in range(5)]
    for at_ms in (0, group_status.LOGGED_AFTER_MS):
        looked.look(groups, at_ms)
        looked.look([], at_ms)
    [record] = caplog.records
    assert "cause=no_slave groups=5 first=g0 of s, g1 of s, g2 of s: " in record.getMessage()


def test_every_cause_is_defined_and_alarms_have_advice():
    assert list(CAUSES) == list(Cause)
    assert {str(cause) for cause, rule in CAUSES.items() if rule.is_alarm} == set(GROUP_CAUSES)


# Ages and sizes of backlogs.


def ages(group: Group, ms: int = 100) -> dict[tuple[str, str], int]:
    """Return the ages after this time and a tick."""
    group.wait(ms)
    group.a.node.tick()
    group.settle()
    return group.a.master.backlogs.ages_ms(group.a.host.now_ms())


def test_age_is_that_of_the_oldest_message():
    group, client = consuming()
    assert ages(group) == {}
    client.store("m0")
    assert ages(group, 4_000) == {KEY: 4_000}, "not delivered"
    client.produce("m1")
    client.take(most=1)
    assert ages(group, 1_000) == {KEY: 5_000}, "delivered"
    client.nacked("m0")
    assert ages(group, 1_000) == {KEY: 6_000}, "requeued"
    client.take()
    client.acked("m0")
    assert ages(group, 1_000) == {KEY: 3_000}, "the next message"
    client.acked("m1")
    assert ages(group) == {}


@pytest.mark.parametrize("bound", ["READ_AT_ONCE", "AGES_MAX"])
def test_read_and_shown_ages_are_bounded(monkeypatch, bound):
    monkeypatch.setattr(group_status, bound, 2)
    group, client = consuming(metrics_subjects=("s4",))
    client.leave()
    for number in range(5):
        client.produce("m", subject=f"s{number}")
        client.join(subject=f"s{number}")
        if bound == "AGES_MAX":
            group.a.wait(1_000)
    if bound == "AGES_MAX":
        assert {subject for subject, _ in ages(group)} == {"s0", "s1", "s4"}, "the oldest, and chosen subjects"
        return
    group.a.node.tick()
    assert len(group.a.host.reads) == 1
    assert [len(ages(group)) for _ in range(3)] == [4, 5, 5]


def test_damage_found_during_backlog_scan_is_reported(monkeypatch):
    group, _ = consuming("m0", tail_bytes=0)
    (ref,) = group.a.log.frames("s", 0, 1)
    group.a.flip(ref.offset)

    def fails(*_):
        raise CorruptFrame(ref.offset, "an index had to be made again")

    monkeypatch.setattr(group_status.Backlogs, "look", fails)
    group.a.wait(100)
    assert group.a.log.damage is not None and not group.a.node.writable


def test_backlog_counts_waiting_and_delivered_messages():
    consumers = {
        "c1": LogConsumer(9, [UnackedRange(0, 1, 2, 1), UnackedRange(5, 6, 1, 1)]),
        "c2": LogConsumer(4, [UnackedRange(3, 9, 4, 1)]),
    }
    group = LogGroup(20, requeued=Requeued([RequeuedRange(3, 2, 1, 0)]), consumers=consumers)
    assert Backlog.of(group, 25) == Backlog(5 + 2, 3 + 4) and Backlog.of(group, 20) == Backlog(2, 7)


class World:
    """Groups of a log that stored each message at ten times its sequence."""

    def __init__(self, positions: dict[str, int], always: tuple[str, ...] = ()) -> None:
        self.groups = {(subject, "g"): LogGroup(position) for subject, position in positions.items()}
        state = SimpleNamespace(groups=self.groups, next_sequence=dict.fromkeys(positions, 100))
        self.reads, self.damage, self.frames = [], [], []

        def frames(subject, sequence, most):
            self.frames.append((subject, sequence, most))
            return [SimpleNamespace(offset=sequence)]

        log = SimpleNamespace(state=state, frames=frames, timestamp_at=lambda offset: 10 * offset)
        host = SimpleNamespace(read=lambda job, done: self.reads.append((job, done)), now_ms=lambda: 0)
        mastership = SimpleNamespace(log=log, host=host, found_damage=self.damage.append)
        self.log, self.backlogs = log, Backlogs(mastership, always)

    def look(self) -> None:
        self.backlogs.look(list(self.groups))

    def read(self) -> None:
        job, done = self.reads.pop()
        done(job())


def test_largest_and_chosen_backlogs_are_shown():
    world = World({"a": 90, "b": 50, "c": 70, "d": 99, "e": 100}, always=("d*",))
    world.look()
    assert world.backlogs.largest(2) == {("b", "g"): (50, 0), ("c", "g"): (30, 0), ("d", "g"): (1, 0)}
    assert len(world.backlogs.largest(9)) == 4, "who has all of it has no backlog"


def test_age_is_read_once_per_oldest_message():
    world = World({"a": 7})
    world.look()
    world.look()
    assert len(world.reads) == 1 and world.frames == [("a", 7, 1)]
    world.read()
    world.look()
    assert not world.reads and world.backlogs.ages_ms(100) == {("a", "g"): 30}
    assert world.backlogs.ages_ms(60) == {("a", "g"): 0}, "the clock went back"
    world.groups["a", "g"].position = 8
    world.look()
    world.read()
    assert world.backlogs.ages_ms(100) == {("a", "g"): 20}


def first_unacked(group: Group, ms: int) -> dict[tuple[str, str], int]:
    """Return the times of the first unacked deliveries after this time and a tick."""
    ages(group, ms)
    return group.a.master.backlogs.first_unacked_ms(group.a.host.now_ms())


def test_hung_message_ages_while_others_are_acked():
    group, client = consuming()
    for n in range(4):
        client.store(f"m{n}")
    assert first_unacked(group, 1_000) == {}, "nothing is delivered"
    client.take()
    assert first_unacked(group, 1_000) == {KEY: 0}, "first seen"
    for n in range(1, 4):
        client.acked(f"m{n}")
        assert first_unacked(group, 1_000) == {KEY: n * 1_000}
    client.nacked("m0")
    client.take()
    assert first_unacked(group, 1_000) == {KEY: 0}, "another delivery"
    client.acked("m0")
    assert first_unacked(group, 1_000) == {}


def test_copy_for_another_thread_is_unchanged():
    world = World({"a": 7})
    world.look()
    world.read()
    twin = world.backlogs.copy()
    world.backlogs.forget(("a", "g"))
    assert twin.ages_ms(100) and twin.largest(1) and not world.backlogs.ages_ms(100) and not world.backlogs.largest(1)


@pytest.mark.parametrize("is_forgotten", [False, True], ids=["acked", "forgotten"])
def test_group_without_backlog_has_no_age(is_forgotten):
    world = World({"a": 7, "b": 8})
    world.look()
    if is_forgotten:
        keys = list(world.groups)
        del world.groups["a", "g"]
        world.backlogs.look(keys)
    else:
        world.groups["a", "g"].position = 100
        world.look()
    world.read()
    assert world.backlogs.ages_ms(100) == {("b", "g"): 20} and list(world.backlogs.largest(9)) == [("b", "g")]


def test_damaged_timestamp_is_reported_others_keep_ages():
    world, problem = World({"a": 7, "b": 8}), CorruptFrame(7, "test")
    timestamp_at = world.log.timestamp_at

    def fails(offset):
        if offset == 7:
            raise problem
        return timestamp_at(offset)

    world.log.timestamp_at = fails
    world.look()
    world.read()
    assert world.damage == [problem] and world.backlogs.ages_ms(100) == {("b", "g"): 20}
    world.look()
    _, done = world.reads.pop()
    done(problem)
    assert world.damage == [problem] * 2
    world.look()
    _, done = world.reads.pop()
    with pytest.raises(DiskFailed):
        done(DiskFailed("test"))


def test_backlog_without_frames_is_not_read():
    world = World({"a": 7})
    world.log.frames = lambda *_: []
    world.look()
    assert not world.reads and world.backlogs.largest(1)


def test_subject_without_messages_has_no_backlog():
    world = World({"a": 0})
    world.log.state.next_sequence.clear()
    world.look()
    assert not world.reads and not world.backlogs.largest(1)
