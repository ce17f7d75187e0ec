"""Core. Retention of a log: both copies and three clocks must agree."""

from __future__ import annotations

from dataclasses import replace

import pytest

from qmq.broker import retention
from qmq.errors import ErrorCode
from qmq.log.frame import FrameKind
from qmq.log.retention import RetentionDecision, decode_retention, encode_retention
from qmq.operator_limits import OF_SUBJECT, OperatorLimits
from qmq.replication.clocks import READING_MS_MAX
from qmq.replication.retention import HOUR_MS
from qmq.types import Role
from tests.unit.broker.world import SETTINGS, Client, Group
from tests.unit.log.logs import Copy

DAY_MS = 24 * HOUR_MS
YEAR_MS = 400 * DAY_MS


def a_group(**changes) -> Group:
    """Return a group with some 20 closed segments with recorded times; no group consumes them."""
    group = Group.made(**changes).start()
    produce(group)
    group.look_after_logs()
    assert len(group.a.log.bases) > 10
    return group


def produce(group: Group) -> None:
    client = group.client()
    for i in range(80):
        client.store(*(f"m{i}-{j}" for j in range(10)), size=50)


def days_pass(group: Group, days: float) -> None:
    for broker in (group.a, group.b):
        broker.host.clock_ms += int(days * DAY_MS)


def consume_nothing(group: Group) -> Client:
    """Let a consumer group have some messages unacked and some requeued; the rest is not delivered."""
    client = group.client()
    client.join(start="earliest")
    pulled = client.pull(most=50)
    group.settle()
    first = client.pulled(pulled)[0][0]
    client.done(client.nack(first, first + 10, delay_ms=DAY_MS))
    return client


def kept(group: Group) -> set[int]:
    return {group.a.log.start, group.b.log.start}


def test_one_frame_deletes_on_both_copies():
    group = a_group()
    days_pass(group, 2.9)
    assert group.look_after_logs() == 0
    days_pass(group, 0.2)
    assert group.look_after_logs() > 10
    assert len(kept(group)) == 1 and kept(group) != {0}
    frames = group.a.log.stored.read(group.a.log.start, group.a.log.end, 1 << 20)
    [decision] = [
        decode_retention(frames.data[f.offset + f.body_at - frames.begin : f.end - frames.begin])
        for f in frames.frames
        if f.kind == FrameKind.RETENTION and f.timestamp_ms > 1_700_000_000_000 + 3 * DAY_MS
    ][:1]
    assert decision == RetentionDecision(group.a.log.start, "age", {"metaserver": 0, "slave": 0}, {})


def test_quiet_slave_that_deletes_stays_in_sync(caplog):
    """The slave confirmed its end with another chain, and counted as diverged."""
    group = a_group()
    link = group.at_master
    days_pass(group, 4)
    assert group.look_after_logs() > 10
    group.settle()
    assert group.at_master is link and link.is_open and group.a.node.writable
    assert "copies differ" not in caplog.text


def test_retention_keeps_the_acknowledged_chain():
    """The stored point had another chain: both copies then seemed to lack acknowledged frames."""
    group = a_group()
    days_pass(group, 4)
    group.hear_clocks()
    group.a.node.decide_retention(group.a.keeper)
    group.a.host.settle()
    group.a.drop_oldest_segment()  # before the slave confirms the last frame, which acknowledges it
    group.settle()
    group.a.node.tick()
    point = group.a.node.identity.points.own
    assert (point.end, point.chain) == (group.a.log.end, group.a.log.chain)


@pytest.mark.parametrize("whose", ["master", "slave", "metaserver"])
@pytest.mark.parametrize("skew_ms", [YEAR_MS, -YEAR_MS, 11_000, -11_000])
def test_one_wrong_clock_deletes_nothing(whose, skew_ms, caplog):
    group = a_group(retention_hours=0.001)
    days_pass(group, 1)
    group.a.host.wall_skew_ms += skew_ms if whose == "master" else 0
    group.b.host.wall_skew_ms += skew_ms if whose == "slave" else 0
    assert group.look_after_logs(metaserver_skew_ms=skew_ms if whose == "metaserver" else 0) == 0
    assert kept(group) == {0} and "clocks disagree group=g1" in caplog.text
    group.a.host.wall_skew_ms = group.b.host.wall_skew_ms = 0
    assert group.look_after_logs() > 10 and "clocks agree again" in caplog.text


def test_promoted_slave_with_a_wrong_clock_deletes_nothing():
    group = a_group()
    consume_nothing(group)
    group.b.host.wall_skew_ms = YEAR_MS
    group.swap(2)
    group.client().produce("next")
    group.settle()
    assert group.look_after_logs() == 0 and kept(group) == {0}


@pytest.mark.parametrize("skew_ms", [YEAR_MS, -YEAR_MS])
def test_frame_times_of_a_wrong_clock_do_not_count(skew_ms):
    """The clock wrote a whole log: for 400 days nothing would be deleted, or everything at once."""
    group = Group.made().start()
    group.a.host.wall_skew_ms = skew_ms
    client = group.client()
    for i in range(40):
        client.store(f"wrong{i}", size=500)
    group.look_after_logs()
    group.a.host.wall_skew_ms = 0
    assert group.look_after_logs() == 0
    days_pass(group, 2.9)
    assert group.look_after_logs() == 0 and kept(group) == {0}
    days_pass(group, 0.2)
    assert group.look_after_logs() > 10


def test_clock_jump_is_noticed_before_the_next_heartbeat():
    group = a_group()
    group.hear_clocks()
    group.a.host.wall_skew_ms = YEAR_MS
    group.a.node.decide_retention(group.a.keeper)
    group.settle()
    assert group.a.log.state.kept.start == 0


@pytest.mark.parametrize("missing", ["metaserver", "slave"])
def test_decision_needs_all_three_clocks(missing):
    group = a_group()
    days_pass(group, 9)
    group.hear_clocks()
    del group.a.node.clocks._readings[missing]
    group.a.node.decide_retention(group.a.keeper)
    assert group.a.log.state.kept.start == 0
    group.hear_clocks()
    group.a.host.clock_ms += READING_MS_MAX + 1  # the readings are too old by now
    group.a.node.decide_retention(group.a.keeper)
    assert group.a.log.state.kept.start == 0
    group.hear_clocks()
    group.a.node.decide_retention(group.a.keeper)
    assert group.a.log.state.kept.start > 0


def test_master_alone_decides_nothing():
    group = a_group()
    group.hear_clocks()
    group.cut()
    days_pass(group, 9)
    for broker in (group.a, group.b):
        broker.node.record_metaserver_clock(broker.host.now_ms())
        broker.node.clocks.record("slave", broker.host.now_ms(), monotonic_ms=broker.host.monotonic_ms())
        broker.node.decide_retention(broker.keeper)
    assert group.a.log.state.kept.start == 0


def test_no_copy_deletes_before_the_decision_is_acknowledged():
    group = a_group()
    days_pass(group, 9)
    group.hear_clocks()
    group.a.node.decide_retention(group.a.keeper)
    group.a.host.settle()  # on the master's disk alone
    assert group.a.log.state.kept.start > 0 and not group.a.node.oldest_may_go(group.a.keeper, ())
    assert not group.a.log.frames("s", 0, 1)[0].offset < group.a.log.state.kept.start, "to readers it is gone"
    end = group.a.log.end
    group.a.node.decide_retention(group.a.keeper)
    assert group.a.log.end == end, "one decision at a time"
    group.settle()
    assert group.b.log.state.kept.start > 0 and not group.b.node.oldest_may_go(group.b.keeper, ())
    assert group.look_after_logs() > 10, "the next frame says that it is acknowledged"


def test_segment_waits_for_its_reader():
    group = a_group()
    days_pass(group, 9)
    group.hear_clocks()
    for _ in range(2):
        group.a.node.decide_retention(group.a.keeper)
        group.settle()
    node, end = group.a.node, group.a.log.bases[1]
    assert node.oldest_may_go(group.a.keeper, [end]) and not node.oldest_may_go(group.a.keeper, [end - 1])


def test_unconsumed_messages_stay():
    group = a_group()
    client = consume_nothing(group)
    days_pass(group, 365)
    group.hear_clocks()
    assert group.look_after_logs() == 0 and kept(group) == {0}
    assert group.a.keeper.holder == ("s", "g") and group.a.keeper.held_bytes > 0
    client.pull(most=1000)
    group.settle()
    assert group.look_after_logs() == 0, "requeued and in flight"


@pytest.mark.parametrize("limit", [{"retention_bytes": 100_000, "retention_hours": 1e9}, {"unconsumed_hours": 100}])
def test_unconsumed_messages_are_dropped_only_as_set(limit, caplog):
    group = a_group(unconsumed="drop", **limit)
    consume_nothing(group)
    days_pass(group, 4)
    assert group.look_after_logs() == 0
    if "unconsumed_hours" in limit:
        days_pass(group, 1)
    else:
        produce(group)
    assert group.look_after_logs() > 10
    lost = group.a.log.frames("s", 0, 1)[0].begin
    assert lost > 400 and f"messages dropped unconsumed subject=s consumer_group=g messages={lost}" in caplog.text
    for broker in (group.a, group.b):
        assert broker.log.state.kept.unconsumed == {("s", "g"): lost}
        broker.crash()
        assert broker.log.state.kept.unconsumed == {("s", "g"): lost}


def test_dropped_messages_block_no_group_and_no_producer():
    group = a_group(unconsumed="drop", retention_bytes=100_000)
    consume_nothing(group)
    produce(group)
    assert group.look_after_logs() > 10
    left = 1_600 - group.a.log.frames("s", 0, 1)[0].begin
    outcomes = []
    for most in (left, left + 1):
        group.a.assign(Role.MASTER, limits=(OperatorLimits("s", OF_SUBJECT, messages_max=most),))
        producer = group.client()
        outcomes.append((producer, producer.produce("m")))
        group.settle()
    (full, refused), (other, stored) = outcomes
    assert full.code(refused) == ErrorCode.SUBJECT_FULL and other.receipt(stored).stored == 1


def test_group_begun_after_the_decision_starts_behind_it():
    group = a_group()
    days_pass(group, 9)
    group.hear_clocks()
    group.a.node.decide_retention(group.a.keeper)
    group.settle()
    consume_nothing(group)
    position = group.a.log.state.kept.start
    assert group.look_after_logs() > 0
    client = group.client("other")
    client.join("c2")
    assert group.a.log.state.kept.unconsumed == {} and group.a.master.skipped == {}
    assert group.a.log.start == position


def test_oldest_segment_waits_for_the_next_on_disk():
    group = Group.made().start()
    client, log = group.client(), group.a.log
    while len(log.bases) == 1:
        client.produce("m", size=500)
        if len(log.bases) == 1:
            group.settle()
    log.state.kept.start, log.state.kept.decided_end = log.bases[1], 0
    assert log.bases[1] == log.flushed_end and not group.a.node.oldest_may_go(group.a.keeper, ())
    group.settle()
    client.store("its high watermark covers the segment")
    assert group.a.node.oldest_may_go(group.a.keeper, ())
    log.drop_oldest_segment()
    client.store("m")
    group.a.crash()
    assert group.a.log.damage is None and group.a.log.end == group.b.log.end


def test_needs_are_searched_only_for_due_segments(monkeypatch):
    """100,000 groups times all segments, every ten seconds, blocked the loop for minutes."""
    copy = Copy.filled(40, tail_bytes=0)
    keeper, looked = retention.Retention(replace(SETTINGS, unconsumed="drop")), []
    frames = copy.log.frames
    monkeypatch.setattr(copy.log, "frames", lambda *args: looked.append(args[0]) or frames(*args), raising=False)
    for subject, position in (("s0", copy.log.state.next_sequence["s0"]), ("s1", 0)):
        copy.progress(FrameKind.POSITION, "", (position, 0, 0), subject=subject)
    copy.append(FrameKind.RETENTION, "", encode_retention(RetentionDecision(0, "", {}, {})), timestamp_ms=5)
    copy.flush()
    assert keeper.due(copy.log, 5 + HOUR_MS) is None and not looked
    assert keeper.due(copy.log, 5 + 73 * HOUR_MS) is None and set(looked) == {"s1"}
    looked.clear()
    keeper.due(copy.log, 5 + 73 * HOUR_MS)
    assert looked == ["s1"], "who held it before is asked first"
    due = keeper.due(copy.log, 5 + 169 * HOUR_MS)
    assert due is not None and due.unconsumed.keys() == {("s1", "g")}


def a_log() -> Copy:
    """Return a log of many old segments, with two groups at its begin."""
    copy = Copy.filled(60)
    for name in ("g", "h"):
        copy.progress(FrameKind.POSITION, "", (0, 0, 0), subject="s0", group=name)
    copy.append(FrameKind.RETENTION, "", encode_retention(RetentionDecision(0, "", {}, {})), timestamp_ms=5)
    copy.flush()
    assert len(copy.log.bases) > 5
    return copy


def consumed(copy: Copy, name: str, offset: int) -> int:
    """Let a group consume everything before the first message at or behind this offset; return that message's place."""
    ref = next(ref for ref in copy.log.frames("s0", 0, 1_000) if ref.offset >= offset)
    copy.log.state.groups["s0", name].position = ref.begin
    return ref.offset


LATE_MS = 5 + 73 * HOUR_MS


def test_slowest_group_holds_the_log(caplog):
    copy, keeper = a_log(), retention.Retention(SETTINGS)
    assert (keeper.held_bytes, keeper.holder) == (0, None)
    bases = copy.log.bases
    consumed(copy, "h", copy.log.bases[4])
    assert bases[2] <= consumed(copy, "g", bases[2]) < bases[3]
    assert keeper.due(copy.log, LATE_MS) == (bases[2], "age", {})
    assert (keeper.held_bytes, keeper.holder) == (bases[-1] - bases[2], ("s0", "g"))
    assert f"kept past retention subject=s0 consumer_group=g bytes={keeper.held_bytes}" in caplog.text
    consumed(copy, "g", bases[3])
    assert keeper.due(copy.log, LATE_MS) == (bases[3], "age", {}) and keeper.holder == ("s0", "g")
    consumed(copy, "g", bases[-2])
    assert keeper.due(copy.log, LATE_MS) == (bases[4], "age", {}) and keeper.holder == ("s0", "h")
    del copy.log.state.groups["s0", "h"]
    assert keeper.due(copy.log, LATE_MS) == (bases[-2], "age", {}) and keeper.holder == ("s0", "g")
    assert len(caplog.records) == 1, "it is said when it begins"
    copy.messages("new", subject="s0")
    copy.log.state.groups["s0", "g"].position = copy.log.state.next_sequence["s0"] - 1
    assert keeper.due(copy.log, LATE_MS) == (bases[-1], "age", {})
    assert (keeper.held_bytes, keeper.holder) == (0, None), "what it lacks is not due"


def test_last_holder_is_checked_first():
    copy, keeper = a_log(), retention.Retention(SETTINGS)
    bases, looks, frames = copy.log.bases, [], copy.log.frames
    copy.log.frames = lambda *args: looks.append(args) or frames(*args)
    for _ in range(2):
        assert keeper.due(copy.log, LATE_MS) is None and keeper.holder == ("s0", "g")
    assert len(looks) == 3, "both at first, then the one"
    at = next(at for at, base in enumerate(bases) if at and any(ref.offset == base for ref in frames("s0", 0, 99)))
    copy.log.state.kept.start = bases[at - 1]
    consumed(copy, "g", bases[at])
    assert bases[at - 1] <= consumed(copy, "h", bases[at - 1]) < bases[at]
    assert keeper.due(copy.log, LATE_MS) is None and keeper.holder == ("s0", "h")


def test_unconsumed_messages_drop_at_the_set_age():
    copy, keeper = a_log(), retention.Retention(replace(SETTINGS, unconsumed="drop", unconsumed_hours=100))
    assert keeper.due(copy.log, 5 + 100 * HOUR_MS) is None
    due = keeper.due(copy.log, 6 + 100 * HOUR_MS)
    assert due is not None and due.start == copy.log.bases[-1]


def test_segment_before_the_needed_one_is_deleted():
    copy, keeper = a_log(), retention.Retention(SETTINGS)
    base = next(base for base in copy.log.bases[1:] if any(ref.offset == base for ref in copy.log.frames("s0", 0, 99)))
    for name in "gh":
        assert consumed(copy, name, base) == base
    assert retention.lost_by(copy.log, base) == {}
    assert keeper.due(copy.log, LATE_MS) == (base, "age", {})


def test_lost_messages_are_the_unconsumed_deleted_ones():
    copy = a_log()
    bases, end = copy.log.bases, copy.log.state.next_sequence["s0"]
    first, second = (copy.log.first_kept("s0", base) for base in bases[2:4])
    consumed(copy, "h", bases[2])
    assert retention.lost_by(copy.log, bases[2]) == {("s0", "g"): first}
    assert retention.lost_by(copy.log, bases[3]) == {("s0", "g"): second, ("s0", "h"): second - first}
    copy.log.state.kept.start = bases[2]
    assert retention.lost_by(copy.log, bases[3]) == {("s0", name): second - first for name in "gh"}
    for name in "gh":
        copy.log.state.groups["s0", name].position = end
    assert retention.lost_by(copy.log, bases[3]) == {}
