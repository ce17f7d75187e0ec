"""Core. Progress and moves of consumer groups: written on both copies, and old acks do not count."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from qmq.broker import positions
from qmq.errors import ErrorCode, NotMaster, NotServed, OperatorError
from qmq.log.fold import State
from qmq.log.index import FrameRef
from qmq.replication.readonly import Reason
from tests.unit.broker.world import Group, a_group

BIG = 1 << 62


def move(group: Group, to: str, value: int = 0, *, consumers: str = "g", dry_run: bool = False, settles: bool = True):
    """Return the change and the list of answers."""
    answers: list[object] = []
    reset = group.a.node.acting_master().move_group("s", consumers, to, value, dry_run=dry_run, answer=answers.append)
    if settles:
        group.settle()
    return reset, answers


def test_moved_group_gets_messages_of_its_new_position():
    for to, value, expected in (
        ("earliest", 0, [f"m{i}" for i in range(6)]),
        ("latest", 0, []),
        ("sequence", 4, ["m4", "m5"]),
        ("sequence", 6, []),
    ):
        group, client = a_group()
        client.produce(*[f"m{i}" for i in range(6)])
        consumer = group.subscribed("c")
        assert consumer.take(most=3) == ["m0", "m1", "m2"]
        _, answers = move(group, to, value)
        assert answers == [None]
        assert group.subscribed("c").take() == expected, (to, value)


def test_move_reports_skipped_and_repeated_messages():
    group, client = a_group()
    client.produce(*[f"m{i}" for i in range(10)])
    consumer = group.subscribed("c")
    consumer.take(most=6)
    first = consumer.first
    consumer.done(consumer.ack(first, first + 4))
    assert move(group, "sequence", 2, dry_run=True)[0] == positions.Reset(6, 2, skipped=0, repeated=2)
    assert move(group, "sequence", 5, dry_run=True)[0] == positions.Reset(6, 5, skipped=1, repeated=0)
    assert move(group, "latest", dry_run=True)[0] == positions.Reset(6, 10, skipped=6, repeated=0)


def test_deleted_messages_are_neither_skipped_nor_repeated():
    group, client = a_group()
    for number in range(5):
        client.store(f"m{number}")
    group.subscribed("c")
    group.a.log.state.kept.start = group.a.log.frames("s", 2, 1)[0].offset
    assert move(group, "earliest", dry_run=True)[0] == positions.Reset(0, 2, skipped=0, repeated=0)
    assert move(group, "sequence", 4, dry_run=True)[0] == positions.Reset(0, 4, skipped=2, repeated=0)


def test_time_search_in_a_deleted_log_ends():
    state, looks = State(next_sequence={"s": 9}), [[FrameRef(3, 4, 88, 8)]]
    log = SimpleNamespace(state=state, frames=lambda *_: looks.pop() if looks else [])
    assert positions.first_since(log, "s", 5) == 3


@pytest.mark.parametrize("change", ["restart of both", "swap"])
def test_moved_group_stays_where_it_is(change):
    """W19."""
    group, client = a_group()
    client.produce("m0", "m1", "m2")
    consumer = group.subscribed("c")
    assert consumer.take() == ["m0", "m1", "m2"]
    move(group, "sequence", 1)
    if change == "swap":
        group.swap(2)
    else:
        group.cut()
        group.a.crash()
        group.b.crash()
        group.start()
    group.settle()
    assert group.subscribed("c").take() == ["m1", "m2"]


def test_damage_found_during_a_move_is_reported():
    group, client = a_group(tail_bytes=0)
    for number in range(3):
        client.store(f"m{number}")
    group.subscribed("c")
    group.a.flip(group.a.log.frames("s", 1, 1)[0].offset)
    with pytest.raises(NotServed, match="damaged"):
        move(group, "time", 1)
    assert group.a.log.damage is not None and not group.a.node.writable


def test_counters_of_a_group_survive_a_move():
    group, _ = a_group()
    group.subscribed("c")
    group.a.master.skipped["s", "g"] = 3
    move(group, "latest")
    assert group.a.master.skipped == {("s", "g"): 3}


@pytest.mark.parametrize("held", ["waiting", "under way", "held"])
def test_connected_consumers_begin_anew(held):
    """Waiting pulls and pulls under way are refused; other consumers get the error with their next request."""
    group, client = a_group()
    consumer = group.subscribed("c")
    if held == "waiting":
        pull = consumer.pull(timeout_ms=60_000)
        group.settle()
    else:
        client.store("m0", "m1")
        pull = consumer.pull()
        if held == "held":
            group.settle()
    move(group, "earliest")
    begin = group.a.log.state.epoch.term
    if held == "held":
        begin = consumer.pulled(pull)[0][0]
        late = consumer.ack(begin, begin + 2)
        assert consumer.code(late) == ErrorCode.UNKNOWN_SUBSCRIPTION
    else:
        assert consumer.code(pull) == ErrorCode.INVALID_ACK
    again = consumer.subscribe("c", held_end=begin + 2)
    assert consumer.code(again) == ErrorCode.INVALID_ACK, "what it holds counts no more"
    if held != "waiting":
        assert group.subscribed("c").take() == ["m0", "m1"]


def test_move_refuses_all_pulls_under_way():
    group, client = a_group()
    client.produce("m0", "m1")
    consumer = group.subscribed("c")
    pulls = [consumer.pull(most=1) for _ in range(2)]
    move(group, "earliest")
    assert [consumer.code(pull) for pull in pulls] == [ErrorCode.INVALID_ACK] * 2
    assert consumer.link.owed_bytes == 0


def test_other_groups_and_subjects_are_not_touched():
    group, client = a_group()
    client.produce("m0")
    other = group.subscribed("o", group="other")
    waiting_elsewhere = other.pull(timeout_ms=60_000)
    group.subscribed("c")
    before = group.a.log.state.groups["s", "other"]
    move(group, "latest")
    assert group.a.log.state.groups["s", "other"] is before
    assert other.code(waiting_elsewhere) == ErrorCode.SUCCESS


def test_moved_broadcast_group_stays_a_broadcast():
    group, _ = a_group()
    group.subscribed("host", group="host", broadcast=True)
    move(group, "latest", consumers="host")
    assert group.a.log.state.groups["s", "host"].is_broadcast


def test_readonly_group_can_be_moved():
    group, client = a_group()
    client.produce("m0")
    group.subscribed("c")
    group.a.master.readonly.change(Reason.OPERATOR, True)
    assert move(group, "latest")[1] == [None]


def test_refused_move_changes_nothing():
    group, client = a_group()
    client.produce("m0", "m1")
    group.subscribed("c")
    end = group.a.log.end
    for to, value, consumers, why in (
        ("earliest", 0, "nobody", "never subscribed"),
        ("sequence", 3, "g", "beyond its end, 2"),
        ("yesterday", 0, "g", "earliest, latest, sequence, time"),
    ):
        with pytest.raises(OperatorError, match=why):
            move(group, to, value, consumers=consumers)
    group.cut()
    with pytest.raises(OperatorError, match="slave of g1 is missing"):
        move(group, "earliest")
    with pytest.raises(NotMaster):
        group.b.node.acting_master()
    assert group.a.log.end == end


def test_move_waits_for_the_swap():
    group, _ = a_group()
    group.subscribed("c")
    group.a.node.changes.prepare_swap(1, hold_ms=1_000)
    with pytest.raises(NotServed, match="swapped"):
        move(group, "latest")


def test_time_search_covers_segments_and_tail():
    group, client = a_group(tail_bytes=0)
    stored_ms = []
    for n in range(40):
        group.a.host.clock_ms += 1_000
        stored_ms.append(group.a.host.now_ms())
        client.produce(f"m{n}", f"m{n} too", size=200)
        client.produce(f"o{n}", subject="other")
        if n < 39:
            group.settle()
    log = group.a.log
    assert len(log.bases) > 3
    for n in (0, 1, 7, 20, 38, 39):
        assert positions.first_since(log, "s", stored_ms[n]) == 2 * n
        assert positions.first_since(log, "s", stored_ms[n] + 1) == 2 * n + 2
    assert positions.first_since(log, "s", 0) == 0
    assert positions.first_since(log, "s", BIG) == 80
    assert positions.first_since(log, "unknown", 5) == 0


def test_group_moves_back_to_the_oldest_kept_message():
    group, client = a_group()
    group.subscribed("c")
    while len(group.a.log.bases) < 3:
        client.store("m", size=800)
    group.a.drop_oldest_segment()
    first, _ = positions.sequences_kept(group.a.log, "s")
    assert first > 0
    for to in ("earliest", "sequence", "time"):
        assert move(group, to, dry_run=True)[0].after == first
