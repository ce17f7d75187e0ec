"""Core. Races on one message: cancel, reschedule, dispatch and refusal at the same moment."""

from __future__ import annotations

import pytest

from qmq.client.batch import NotStored, Stored
from qmq.delayserver.cancellation import DECIDED_AT_ONCE
from qmq.errors import ErrorCode, NotServed
from qmq.log.frame import FrameKind
from qmq.log.recovery import Damage
from qmq.replication.readonly import Reason
from qmq.types import Role
from tests.unit.delayserver.world import HOUR_MS, Producer, a_group


@pytest.mark.parametrize("how", ["cancel", "reschedule"])
def test_message_due_during_its_cancel_is_not_sent(how):
    copies, producer = a_group()
    producer.delayed(copies.now_ms + 1_000, "m")
    copies.run(900)
    asked = producer.cancel("m") if how == "cancel" else producer.reschedule("m", copies.now_ms + HOUR_MS)
    while copies.a.host.do_read():
        pass
    copies.a.host.clock_ms += 200
    copies.a.node.master.beat()
    copies.a.host.turn()
    copies.settle()
    assert (producer.fates(asked) if how == "cancel" else [producer.fate(asked)]) == [
        "cancelled" if how == "cancel" else "rescheduled"
    ]
    copies.run(2_000)
    assert copies.senders.attempts == []


def test_shared_cancels_are_few_bounded_frames():
    copies, producer = a_group(tail_bytes=1 << 22)
    ids = [f"m{i}" for i in range(1_000)]
    for begin in range(0, 1_000, 100):
        producer.delayed(copies.now_ms + HOUR_MS, *ids[begin : begin + 100])
    copies.run(200)
    frames, host, counters = len(list(kinds_of(copies.a))), copies.a.host, copies.a.counters
    asked = [producer.cancel(id) for id in ids]
    before, steps = counters.cancelled_messages, []
    while host.turn() or host.fsync() or host.do_read():
        steps.append(counters.cancelled_messages - before)
        before = counters.cancelled_messages
    assert sum(steps) == 1_000 and max(steps) <= DECIDED_AT_ONCE // 2
    written = list(kinds_of(copies.a))[frames:]
    assert set(written) == {FrameKind.CANCEL} and len(written) <= 12
    copies.settle()
    assert [producer.fates(opaque) for opaque in asked] == [["cancelled"]] * 1_000


@pytest.mark.parametrize("order", ["cancel first", "reschedule first"])
def test_cancel_and_reschedule_may_share_a_search(order):
    copies, producer = a_group()
    producer.delayed(copies.now_ms + HOUR_MS, "m", "another")
    copies.run(200)
    producer.cancel("another")  # the two that follow share the next search

    def cancel():
        return producer.cancel("m")

    def reschedule():
        return producer.reschedule("m", copies.now_ms + 1_000)

    if order == "cancel first":
        cancelled, moved = cancel(), reschedule()
    else:
        moved, cancelled = reschedule(), cancel()
    copies.settle()
    fate = "cancelled" if order == "cancel first" else "rescheduled"
    assert (producer.fates(cancelled), producer.fate(moved)) == (["cancelled"], fate)
    copies.run(3_000)
    assert copies.senders.attempts == []


def kinds_of(server):
    return (frame.kind for frame in server.log.stored.read(server.log.start, server.log.end, 1 << 22).frames)


def test_repeated_cancel_of_a_refused_message_agrees():
    copies, producer = a_group()
    copies.senders.refusing["bad"] = "too large"
    producer.delayed(copies.now_ms, "bad")
    copies.run(1_000)
    for _ in range(2):
        assert producer.cancelled("bad") == ["cancelled"]


def test_nothing_is_written_while_roles_are_swapped():
    copies, producer = a_group(slow=True)
    producer.delayed(copies.now_ms, "bad", "good")
    copies.run(300)
    copies.a.node.changes.prepare_swap(1, 10_000)
    end = copies.a.log.end
    copies.senders.answer(Stored(0, 1, [(0, "too large")]))
    copies.settle()
    assert copies.a.log.end == end
    copies.a.node.changes.cancel_swap()
    copies.settle()
    assert copies.a.log.end > end and copies.a.filing.schedule.pending_messages == 1


def test_fenced_master_sends_no_planned_batch():
    copies, producer = a_group()
    producer.delayed(copies.now_ms + 1_000, "m")
    copies.run(900)
    copies.a.host.clock_ms += 200
    copies.a.node.master.beat()
    copies.a.host.turn()
    copies.a.node.master.readonly.change(Reason.FENCED, True)
    copies.settle()
    assert copies.senders.attempts == []
    copies.swap(2)
    copies.run(1_000)
    assert copies.senders.delivered() == ["m"]


def test_rebuilt_schedule_keeps_settled_batches_settled():
    copies, producer = a_group("g1", "g2", slow=True)
    producer.delayed(copies.now_ms, "m")
    copies.run(300)
    first = copies.senders.waiting[0][0]
    copies.senders.answer(NotStored(NotServed("not now")))
    copies.a.filing.rebuild("lost")
    copies.run(1_000)
    assert first not in copies.senders.attempts[1:]
    while copies.senders.waiting:
        copies.senders.answer()
        copies.run(1_000)
    assert copies.senders.delivered() == ["m"] and copies.a.filing.schedule.pending_messages == 0


def test_order_key_waits_for_its_open_batch():
    copies, producer = a_group("g1", slow=True)
    producer.keyed(copies.now_ms, {"m1": "k"})
    copies.run(200)
    producer.delayed(copies.now_ms, "free")
    copies.run(200)
    first = copies.senders.waiting.pop(0)
    copies.senders.answer()  # of the message without a key
    producer.keyed(copies.now_ms, {"m2": "k"})
    copies.run(500)
    assert copies.senders.batches() == [["m1"], ["free"]]
    first[2](first[1])
    copies.run(500)
    assert copies.senders.batches() == [["m1"], ["free"], ["m2"]]


def test_order_survives_refusals_and_swaps():
    copies, producer = a_group("g1", slow=True)
    producer.keyed(copies.now_ms, {"m1": "k"})
    copies.run(200)
    producer.keyed(copies.now_ms, {"m2": "k"})
    copies.run(200)
    copies.senders.answer(NotStored(NotServed("not now")))
    copies.run(500)
    batches = copies.senders.batches()
    assert batches[0] == ["m1"] and batches[1] in (["m1"], ["m1", "m2"])
    copies.swap(2)
    Producer(copies.b).keyed(copies.now_ms, {"m3": "k"})
    copies.run(500)
    assert copies.senders.batches()[-1] == copies.senders.batches()[1], (
        "the next one waits for what the former master sent"
    )


def test_absent_group_delays_only_its_keys():
    copies, producer = a_group("g1", "g2")
    copies.senders.home = lambda subject, label: "g1"
    copies.senders.up["g1"] = False
    producer.keyed(copies.now_ms, {"m1": "k", "m2": None, "m3": "k", "m4": None})
    copies.run(500)
    assert copies.senders.delivered() == ["m2", "m4"]


def test_ordered_batch_of_unknown_outcome_is_repeated():
    copies, producer = a_group("g1", "g2", unknown_ms=1_000)
    copies.senders.home = lambda subject, label: "g1"
    copies.senders.mute.add("g1")
    producer.keyed(copies.now_ms, {"m1": "k"})
    copies.run(10_000)
    assert len({attempt[:3] for attempt in copies.senders.attempts}) == 1
    copies.senders.mute.clear()
    copies.run(10_000)
    assert copies.senders.delivered() == ["m1"]


def test_damaged_master_waits_for_repair_idle():
    copies, producer = a_group()
    producer.delayed(copies.now_ms + HOUR_MS, "m")
    copies.a.host.settle()
    producer.delayed(copies.now_ms + HOUR_MS, "n")
    copies.a.log.damage = Damage(0, copies.a.log.end, "a bit was flipped")
    for _ in range(20):
        copies.a.host.fsync() or copies.a.host.turn()
    assert not copies.a.host.pass_is_due and copies.a.filing.schedule.filed_end < copies.a.log.flushed_end


def test_master_alone_deletes_no_segments():
    copies, producer = a_group(retention_hours=0.001, segment_bytes=1 << 14)
    for i in range(30):
        producer.delayed(copies.now_ms, f"m{i}", size=900)
    copies.settle()
    copies.cut()
    for _ in range(20):
        copies.a.host.clock_ms += 1_000
        copies.a.node.tick()
        copies.a.beat()
        copies.a.host.settle()
    assert len(copies.senders.delivered()) == 30 and copies.a.filing.schedule.pending_messages == 0
    assert len(copies.a.log.bases) > 1 and copies.look_after_logs() == 0
    copies.connect()
    copies.run(5_000)
    producer.delayed(copies.now_ms, "next")
    copies.run(1_000)
    copies.look_after_logs()
    copies.run(10_000)
    assert copies.look_after_logs() > 0


@pytest.mark.parametrize("what", ["cancel", "carry"])
@pytest.mark.parametrize("next_role", ["slave", "master"])
def test_replaced_master_writes_nothing_more(what, next_role):
    copies, producer = a_group(retention_hours=1)
    for i in range(80):
        producer.delayed(copies.now_ms + 99 * HOUR_MS, "m" if i == 0 else f"m{i}", size=900)
        producer.delayed(copies.now_ms, f"x{i}", size=900)
        producer.delayed(copies.now_ms, f"y{i}", size=900)
    copies.run(500)
    copies.look_after_logs()
    host, log = copies.a.host, copies.a.log
    if what == "cancel":
        asked = producer.cancel("m")
    else:
        for server in (copies.a, copies.b):
            server.host.clock_ms += 2 * HOUR_MS
        for _ in range(100):
            host.clock_ms += 100
            copies.a.beat()
            host.turn()
            if copies.a.master._carrying._left is not None:
                break
            host.settle()
    assert host.reads
    if next_role == "slave":
        copies.a.assign(Role.SLAVE, 2)
    else:
        copies.a.assign(Role.MASTER, 2)
    end = log.end
    while host.do_read():
        pass
    assert log.end == end
    if what == "cancel":
        assert producer.code(asked) == ErrorCode.NOT_MASTER


def test_concurrent_questions_share_a_search():
    """A search for one key takes as long as for many; due messages must not wait behind searches."""
    copies, producer = a_group()
    for at in range(20):
        producer.delayed(copies.now_ms + (1 + at) * HOUR_MS, f"m{at}", key=f"k{at}")
    producer.delayed(copies.now_ms + HOUR_MS, "other", key="k0", subject="t")
    copies.run(200)
    now_ms, looks = copies.now_ms, []
    find = copies.a.filing.schedule.find
    copies.a.filing.schedule.find = lambda *args, **named: looks.append(args) or find(*args, **named)
    asked = [producer.cancel(keys=[f"k{at}"]) for at in range(10)]
    moved = [producer.reschedule(f"m{at}", now_ms + 500) for at in range(8, 12)]
    both = producer.cancel("m12", "m1", due_ms=now_ms + 13 * HOUR_MS)
    nobody = producer.cancel("m0", keys=["k3"], subject="t"), producer.cancel("m0", subject="unheard of")
    assert len(copies.a.host.reads) == 1
    copies.settle()
    assert [producer.fates(opaque) for opaque in asked] == [["cancelled"]] * 10
    assert [producer.fate(opaque) for opaque in moved] == ["cancelled"] * 2 + ["rescheduled"] * 2
    assert [producer.fates(opaque) for opaque in (both, *nobody)] == [["cancelled"] * 2, ["unknown"] * 2, ["unknown"]]
    assert len(looks) <= 5
    copies.run(2_000)
    assert sorted(copies.senders.delivered()) == ["m10", "m11"]
    copies.run(30 * HOUR_MS, step_ms=600_000)
    assert sorted(copies.senders.delivered()) == sorted(["other", *(f"m{at}" for at in (10, 11, *range(13, 20)))])


def test_questions_are_refused_when_the_mastership_ends():
    copies, producer = a_group()
    producer.delayed(copies.now_ms + HOUR_MS, "m", "n")
    copies.run(200)
    asked = producer.cancel("m"), producer.cancel("n")
    copies.a.assign(Role.SLAVE, 2)
    copies.a.host.settle()
    assert [producer.code(opaque) for opaque in asked] == [ErrorCode.NOT_MASTER] * 2


@pytest.mark.slow
@pytest.mark.parametrize("how", ["cancel", "reschedule"])
def test_search_follows_a_message_carried_meanwhile(how):
    """Searching a large schedule takes seconds; its results are read after that."""
    copies, producer = a_group(retention_hours=1, segment_bytes=1 << 20)
    due_ms = copies.now_ms + 50 * HOUR_MS
    producer.delayed(due_ms, "m", "other")
    copies.run(1_000)
    asked = producer.cancel("m") if how == "cancel" else producer.reschedule("m", due_ms + HOUR_MS)
    look = copies.a.host.reads.pop()
    copies.outlive_segments(producer)
    assert copies.a.log.start > 0 and copies.a.filing.schedule.pending_messages == 2
    copies.a.host.reads.append(look)
    copies.settle()
    copies.run(1_000)
    fates = producer.fates(asked) if how == "cancel" else [producer.fate(asked)]
    assert fates == ["cancelled" if how == "cancel" else "rescheduled"]
    copies.senders.stored.clear()
    copies.run(due_ms + HOUR_MS // 2 - copies.now_ms, step_ms=600_000)
    assert copies.senders.delivered() == ["other"]
