"""Core. Age of the oldest unacked message of a group: after changes, from disk, and within bounds."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from qmq.broker import group_status
from qmq.broker.group_status import Backlog, Backlogs
from qmq.errors import CorruptFrame, DiskFailed
from qmq.log.group import Consumer as Progress
from qmq.log.group import Group as LogGroup
from qmq.log.group import UnackedRange
from qmq.log.requeued import Requeued, RequeuedRange
from qmq.log.segments import log_name
from tests.unit.broker.world import Client, Group

KEY = ("s", "g")


def a_group(**settings) -> tuple[Group, Client]:
    group = Group.made(**settings).start()
    client = group.client()
    client.join()
    return group, client


def looked(group: Group, ms: int = 100) -> dict[tuple[str, str], int]:
    """Return the ages after a tick."""
    group.wait(ms)
    group.a.wait(0)
    group.a.node.tick()
    group.settle()
    return group.a.master.backlogs.ages_ms(group.a.host.now_ms())


def test_age_is_that_of_the_oldest_message():
    group, client = a_group()
    assert looked(group) == {}
    client.store("m0")
    assert looked(group, 4_000) == {KEY: 4_000}, "not delivered"
    client.produce("m1")
    first = client.pull(most=1)
    group.settle()
    assert looked(group, 1_000) == {KEY: 5_000}, "delivered"
    pull_sequence = client.pulled(first)[0][0]
    client.done(client.nack(pull_sequence, pull_sequence + 1, delay_ms=60_000))
    assert looked(group, 1_000) == {KEY: 6_000}, "requeued"


def test_ack_moves_the_age_to_the_next_message():
    group, client = a_group()
    client.store("m0")
    looked(group, 3_000)
    client.produce("m1")
    first = client.pull(most=2)
    group.settle()
    (pull_sequence, *_), *_ = client.pulled(first)
    client.done(client.ack(pull_sequence, pull_sequence + 1))
    assert looked(group, 500) == {KEY: 500}
    client.done(client.ack(pull_sequence + 1, pull_sequence + 2))
    assert looked(group) == {}


def test_age_is_read_from_disk():
    group, client = a_group(tail_bytes=0)
    client.store("m0")
    assert looked(group, 2_000) == {KEY: 2_000}
    clock_ms = group.a.host.clock_ms
    group.a.crash()
    group.a.host.clock_ms = clock_ms
    group.start()
    assert looked(group)[KEY] > 2_000


def test_ages_are_read_a_few_at_a_time(monkeypatch):
    monkeypatch.setattr(group_status, "READ_AT_ONCE", 2)
    group, client = a_group()
    for number in range(5):
        name = f"s{number}"
        client.produce("m", subject=name)
        client.subscribe(subject=name, start="earliest")
    group.settle()
    group.a.node.tick()
    assert len(group.a.host.reads) == 1
    found = [len(looked(group)) for _ in range(3)]
    assert found == [4, 5, 5]


def test_oldest_ages_are_shown(monkeypatch):
    monkeypatch.setattr(group_status, "AGES_MAX", 2)
    group, client = a_group(metrics_subjects=("s4",))
    for number in range(5):
        name = f"s{number}"
        client.produce("m", subject=name)
        client.join(subject=name, start="earliest")
        group.a.wait(1_000)
    assert {subject for subject, _ in looked(group)} == {"s0", "s1", "s4"}


def test_damage_found_during_backlog_scan_is_reported(monkeypatch):
    group, client = a_group(tail_bytes=0)
    client.store("m0")
    (ref,) = group.a.log.frames("s", 0, 1)
    group.a.disk.flip(log_name(0), 8 * ref.offset)

    def fails(*_):
        raise CorruptFrame(ref.offset, "an index had to be made again")

    monkeypatch.setattr(group_status.Backlogs, "look", fails)
    group.a.wait(100)
    assert group.a.log.damage is not None and not group.a.node.writable


def test_backlog_counts_waiting_and_delivered_messages():
    consumers = {
        "c1": Progress(9, [UnackedRange(0, 1, 2, 1), UnackedRange(5, 6, 1, 1)]),
        "c2": Progress(4, [UnackedRange(3, 9, 4, 1)]),
    }
    group = LogGroup(20, requeued=Requeued([RequeuedRange(3, 2, 1, 0)]), consumers=consumers)
    assert Backlog.of(group, 25) == Backlog(5 + 2, 3 + 4) and Backlog.of(group, 20) == Backlog(2, 7)


class World:
    """Groups of a log whose messages were stored at ten times their sequence."""

    def __init__(self, positions: dict[str, int], always: tuple[str, ...] = ()) -> None:
        self.groups = {(subject, "g"): LogGroup(position) for subject, position in positions.items()}
        state = SimpleNamespace(groups=self.groups, next_sequence=dict.fromkeys(positions, 100))
        self.reads, self.damage, self.frames = [], [], []

        def frames(subject, sequence, most):
            self.frames.append((subject, sequence, most))
            return [SimpleNamespace(offset=sequence)]

        log = SimpleNamespace(state=state, frames=frames, timestamp_at=lambda offset: 10 * offset)
        host = SimpleNamespace(read=lambda job, done: self.reads.append((job, done)))
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
