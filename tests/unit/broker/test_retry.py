"""Core. Retries: requeued messages are due later, counted, given to any consumer, and block no others."""

from __future__ import annotations

import pytest

from qmq.broker import group_status
from qmq.errors import ErrorCode
from qmq.log.frame import FrameKind
from qmq.log.group import UnackedRange
from qmq.log.progress_frame import Departure
from qmq.remoting import commands
from qmq.remoting.commands import Command, Nack, NackEntry, Verdict
from tests.unit.broker.world import Client, Group


def delivered(*ids: str, **settings) -> tuple[Group, Client]:
    """Return a group, and a consumer that has these messages unacked, in one batch."""
    group = Group.made(**settings).start()
    client = group.client()
    client.produce(*ids)
    client.join()
    assert client.take() == list(ids)
    return group, client


def test_nacked_message_returns_to_any_consumer_when_due():
    group, client = delivered("m0", "m1")
    client.nacked("m0", delay_ms=5_000)
    other = group.subscribed("c2")
    waiting = other.pull(timeout_ms=60_000)
    group.wait(4_999)
    assert not other.answered(waiting)
    group.wait(1)
    assert other.ids(waiting) == ["m0"] and other.times(waiting) == [2]
    other.nacked("m0")
    assert client.take() == ["m0"] and client.times(client.last_pull) == [3]
    assert client.first > group.progress.consumers["c1"].unacked[0].pull, "it has a new pull sequence"


def test_deliveries_count_over_consumers_and_swaps():
    """A message that is always abandoned becomes a dead letter (in QMQ it never does)."""
    group, client = delivered("m0")
    client.leave()
    client.join()
    assert client.take() == ["m0"] and client.times(client.last_pull) == [1], "it was returned before its handler began"
    client.nacked("m0")
    client.take()
    assert client.times(client.last_pull) == [2]
    group.swap(2)
    late = group.subscribed("c1")
    late.take()
    assert late.times(late.last_pull) == [3], "a new process of the same name: its predecessor began the message"


def test_repeated_ack_or_nack_changes_nothing():
    group, client = delivered("m0", "m1", "m2")
    first = client.first
    client.nacked("m1", delay_ms=1_000)
    client.acked("m0")
    end = group.a.log.end
    for again in (client.nack(first + 1, first + 2, delay_ms=9_000), client.ack_ranges((first, first + 2))):
        assert commands.decode_acked(memoryview(client.done(again))) == first + 2
    assert group.a.log.end == end


def test_undelivered_messages_cannot_be_settled():
    group, client = delivered("m0")
    client.store("m1")
    first = client.first
    for opaque in (
        client.ack(first, first + 2),
        client.nack(first + 1, first + 2),
        client.nack(first, first + 5, dead=True),
    ):
        assert client.outcome(opaque) == ErrorCode.INVALID_ACK
    assert group.progress.consumers["c1"].unacked == [UnackedRange(first, 0, 1, 1)]


def test_group_at_the_postpone_limit_gets_new_messages(monkeypatch, caplog):
    """Above 100,000 ranges a group got nothing new, up to a day, without a log line."""
    monkeypatch.setattr(group_status, "REQUEUED_RANGES_MAX", 2)
    group, client = delivered("m0", "m1")
    client.nacked("m0", delay_ms=1_000)  # different due times, or they would become one range
    client.nacked("m1", delay_ms=2_000)
    client.store("m2", "m3", "m4")
    assert client.take() == ["m2", "m3", "m4"]
    third = client.first
    now = NackEntry(third, third + 1, 0, Verdict.RETRY)
    later = NackEntry(third + 1, third + 2, 3_000, Verdict.RETRY)
    for entries in ([later], [now, later]):
        nack = commands.encode_nack(Nack(client.last_subscription, entries, ""))
        assert client.outcome(client.send(Command.NACK, nack)) == ErrorCode.POSTPONES_TOO_MUCH
    group.a.wait(500)
    lines = [record.message for record in caplog.records if "cause=postponed" in record.message]
    assert len(lines) == 1 and "subject=s consumer_group=g" in lines[0]
    assert "postponed" in group.a.master.causes.of(("s", "g"))
    client.done(client.nack(third + 1, third + 2))
    group.a.wait(1_000)
    assert client.take() == ["m0", "m3"], "a nack without delay is accepted"
    client.done(client.nack(third, third + 1, delay_ms=3_000))
    assert len(group.progress.requeued) == 2, "there is room again"


@pytest.mark.parametrize("skew_ms", [-86_400_000, 86_400_000], ids=["behind", "ahead"])
def test_wrong_clock_moves_no_retry(skew_ms):
    """Neither a clock set during the mastership, nor one that differs from the former master's."""
    group, client = delivered("m0", "m1")
    client.nacked("m0", delay_ms=5_000)
    group.a.host.wall_skew_ms = skew_ms
    client.nacked("m1", delay_ms=5_000)
    assert client.take() == []
    group.a.wait(5_000)
    assert client.take() == ["m0", "m1"]
    client.nacked("m0", "m1", delay_ms=5_000)
    group.b.host.wall_skew_ms = -skew_ms
    group.swap(2)
    other = group.subscribed("c2")
    waiting = other.pull(timeout_ms=60_000)
    group.wait(5_001)
    assert other.ids(waiting) == ["m0", "m1"], "never later than its delay"


def test_frames_record_progress():
    group, client = delivered("m0", "m1")
    first = client.first
    client.acked("m0")
    client.nacked("m1", delay_ms=1_000)
    due_ms = group.a.host.now_ms() + 1_000
    group.a.node.acting_master().move_group("s", "g", "latest", 0, dry_run=False, answer=lambda _: None)
    client.join("host1", group="host1", broadcast=True, start="latest")
    client.done(client.leave())
    frames = group.frames(FrameKind.POSITION, FrameKind.PULL, FrameKind.ACK, FrameKind.NACK)
    assert {frame.subject for frame, _ in frames} == {"s"}
    assert [(frame.kind, progress) for frame, progress in frames] == [
        (FrameKind.POSITION, ("g", "", ((0, 0, 0),))),
        (FrameKind.PULL, ("g", "c1", ((first, 0, 2),))),
        (FrameKind.ACK, ("g", "c1", ((first, first + 1, 0),))),
        (FrameKind.NACK, ("g", "c1", ((first + 1, first + 2, due_ms),))),
        (FrameKind.POSITION, ("g", "", ((2, 0, 0),))),
        (FrameKind.POSITION, ("host1", "", ((2, 1, 0),))),
        (FrameKind.PULL, ("host1", "host1", ())),
        (FrameKind.POSITION, ("host1", "host1", ((Departure.NONE_BEGUN, 0, 0),))),
    ]


def test_consumer_actions_are_counted():
    group, client = delivered("m0", "m1", "m2", "m3", "m4")
    first = client.first
    client.ack_ranges((first, first + 1), (first + 2, first + 4))
    client.nack(first, first + 2)
    client.done(client.leave())
    assert group.subscribed("c2").take() == ["m1", "m4"]
    done = group.a.counters
    assert (done.pulled_messages, done.acked_messages, done.returned_consumers) == (7, 3, 1)


# Broadcast consumers that stay away.


def listening(**settings) -> tuple[Group, Client]:
    """Return a group with agreeing clocks, and the broadcast consumer host1."""
    group = Group.made(lease_ms=30_000, broadcast_forget_hours=1.0, **settings).start()
    group.clocks_agree()
    return group, group.subscribed("host1", group="host1", broadcast=True, start="latest")


def is_forgotten(group: Group) -> bool:
    return ("s", "host1") not in group.a.log.state.groups


def listened_for(group: Group, client: Client, seconds: int) -> None:
    """Let time pass with heartbeats of the consumer, and without messages."""
    for _ in range(seconds // 20):
        group.a.wait(20_000)
        client.heartbeat()
        group.wait(1)
    group.connect()  # the slave was silent all the time
    group.settle()


def test_absent_broadcast_consumer_is_forgotten():
    """W20: QMQ never removes the progress of one."""
    group, client = listening()
    other = group.subscribed("c1")
    other.store("m0")
    assert client.take() == ["m0"]
    client.lost()
    group.wait(7_500, times=500)
    assert list(group.a.log.state.groups) == [("s", "g")]
    assert group.b.log.state.groups.keys() == group.a.log.state.groups.keys()


@pytest.mark.parametrize(("away_ms", "expected"), [(3_600_000, False), (3_600_001, True)])
def test_absence_is_checked_once_a_minute(away_ms, expected):
    group, client = listening()
    client.done(client.leave())
    group.a.stand_still(away_ms)
    assert is_forgotten(group) is expected
    group.a.stand_still(59_999)
    assert is_forgotten(group) is expected
    group.a.stand_still(1)
    assert is_forgotten(group)


@pytest.mark.parametrize("disagrees", [True, False], ids=["another clock disagrees", "no other clock"])
def test_wrong_clock_forgets_no_broadcast_consumer(disagrees):
    """A forgotten consumer would begin at the end when it returns, and miss messages stored meanwhile."""
    group = Group.made(broadcast_forget_hours=1.0).start()
    client = group.subscribed("host1", group="host1", broadcast=True)
    client.done(client.leave())
    if disagrees:
        group.clocks_agree()
    group.a.host.wall_skew_ms = 7_200_000
    group.a.stand_still(60_000)
    assert not is_forgotten(group)
    group.clocks_agree()  # the other clock was wrong
    group.a.stand_still(1)
    assert is_forgotten(group)


@pytest.mark.parametrize("how", ["unsubscribes", "vanishes", "is swapped"])
def test_absence_begins_when_the_consumer_leaves(how):
    """The consumer only listened until then: nothing was delivered to it."""
    group, client = listening()
    listened_for(group, client, 4_000)
    if how == "is swapped":
        group.client().store("while it was away")
        group.b.host.clock_ms = group.a.host.clock_ms
        group.swap(2)
        group.a.wait(1_000)
    else:
        if how == "unsubscribes":
            client.leave()
        client.lost()
        group.wait(7_500, times=20)
        group.agree()
        group.client().store("while it was away")
    again = group.subscribed("host1", group="host1", broadcast=True, start="latest")
    assert again.take() == ["while it was away"]


def test_forgotten_groups_leave_no_state_in_memory():
    group = Group.made(broadcast_forget_hours=0.01).start()
    group.clocks_agree()
    client = group.client()
    for number in range(3):
        client.subscribe(f"c{number}", group=f"c{number}", broadcast=True, tags=["pay"])
    client.store("m0")
    group.a.master._delivery.consumption.note_skipped("s", "c0", 1)
    client.lost()
    group.wait(1_000, times=200)
    master = group.a.master
    assert not group.a.log.state.groups and not master._delivery.serving.filters._asked
    assert not master.backlogs.ages_ms(group.a.host.now_ms()) and not master.causes.found and not master.skipped
