"""Core. A delay group from end to end, without a world: taken, kept, sent once when due, over crashes and swaps."""

from __future__ import annotations

import pytest

from qmq.errors import ErrorCode
from tests.unit.delayserver.world import HOUR_MS, Pair, Producer


def a_pair(*groups, **changes):
    pair = Pair.made(*groups, **changes)
    pair.start()
    pair.run(100)
    return pair, Producer(pair.a)


def test_message_is_sent_when_it_is_due_and_not_before():
    pair, producer = a_pair()
    due_ms = pair.now_ms + 2_000
    asked = producer.delayed(due_ms, "m")
    pair.settle()
    assert producer.receipt(asked).stored == 1
    while pair.now_ms < due_ms - 100:
        pair.run(100)
        assert pair.senders.delivered() == []
    pair.run(300)
    assert pair.senders.delivered() == ["m"]
    assert pair.a.filing.schedule.pending_messages == 0 and not pair.a.filing.schedule.in_flight


def test_message_whose_time_has_passed_is_sent_at_once():
    pair, producer = a_pair()
    producer.delayed(pair.now_ms - HOUR_MS, "m")
    pair.run(200)
    assert pair.senders.delivered() == ["m"]


def test_message_that_is_not_delayed_or_too_far_away_is_refused_on_its_own():
    pair, producer = a_pair(delay_days_max=1)
    from tests.unit.broker.world import message
    from tests.unit.delayserver.world import delayed

    asked = producer.produce_raw(
        [message("s", "now"), delayed("s", "far", pair.now_ms + 25 * HOUR_MS), delayed("s", "ok", pair.now_ms)]
    )
    pair.run(200)
    receipt = producer.receipt(asked)
    assert receipt.stored == 1
    assert ["does not say when" in receipt.refused[0][1], "at most 1" in receipt.refused[1][1]] == [True, True]
    assert pair.senders.delivered() == ["ok"]


@pytest.mark.parametrize("how", ["crash", "swap"])
def test_what_pends_survives_and_is_sent_once(how):
    pair, producer = a_pair()
    due_ms = pair.now_ms + 5_000
    producer.delayed(due_ms, *(f"m{i}" for i in range(50)))
    producer.delayed(due_ms + 3 * HOUR_MS, *(f"late{i}" for i in range(50)))
    pair.run(200)
    if how == "crash":
        restart(pair)
    else:
        pair.swap(2)
    pair.run(6_000)
    assert sorted(pair.senders.delivered()) == sorted(f"m{i}" for i in range(50))
    pair.run(3 * HOUR_MS, step_ms=60_000)
    assert len(pair.senders.delivered()) == len(set(pair.senders.delivered())) == 100


def restart(pair):
    """The master's machine loses power, and its disk what was not fsynced; it comes back."""
    pair.cut()
    clock_ms = pair.a.host.clock_ms
    pair.a.crash()
    pair.a.host.clock_ms = clock_ms
    pair.a.assign(*(0, 1))
    pair.connect()
    pair.settle()
    pair.run(100)


def test_dispatch_without_outcome_is_repeated_under_its_numbers_after_a_swap():
    """P2 stores it once: the next master sends exactly the same batch to the same group."""
    pair, producer = a_pair("g1", "g2")
    pair.senders.mute |= {"g1", "g2"}
    producer.delayed(pair.now_ms, "a", "b", "c")
    pair.run(300)
    first = pair.senders.attempts[0]
    pair.swap(2)
    pair.senders.mute.clear()
    pair.run(2_000)
    assert pair.senders.attempts[-1] == first
    assert pair.senders.delivered() == ["a", "b", "c"]


def test_dead_group_and_subject_without_route_hold_up_nothing_else():
    pair, producer = a_pair("g1", "g2")
    pair.senders.up["g1"] = False
    pair.senders.routeless.add("lost")
    for i in range(20):
        producer.delayed(pair.now_ms, f"l{i}", subject="lost")
        producer.delayed(pair.now_ms, f"m{i}")
    pair.run(300)
    assert sorted(pair.senders.delivered()) == sorted(f"m{i}" for i in range(20))
    pair.senders.routeless.clear()
    pair.run(1_000)
    assert len(pair.senders.delivered()) == 40


def test_certain_refusal_lets_the_messages_go_to_another_group():
    pair, producer = a_pair("g1")
    pair.senders.up["g1"] = True
    producer.delayed(pair.now_ms + 500, "m")
    pair.run(200)
    pair.senders.room = lambda name: 1 << 20  # it seems to be there
    pair.senders.groups = lambda subject: ["g1"]
    pair.senders.up["g1"] = False
    pair.run(1_000)
    assert pair.senders.attempts and pair.a.counters.not_stored_batches
    pair.senders.up["g1"] = True
    pair.run(10_000)
    assert pair.senders.delivered() == ["m"]


def test_message_that_a_broker_never_takes_stays_and_is_tried_again_later():
    pair, producer = a_pair()
    pair.senders.refusing["bad"] = "too large"
    producer.delayed(pair.now_ms, "good", "bad")
    pair.run(1_000)
    assert pair.senders.delivered() == ["good"] and pair.a.filing.schedule.pending_messages == 1
    pair.senders.refusing.clear()
    pair.senders.stored.clear()
    pair.run(310_000, step_ms=1_000)
    assert pair.senders.delivered() == ["bad"] and pair.a.filing.schedule.pending_messages == 0


# Cancelling.


def test_cancel_says_what_is_true_and_nothing_cancelled_is_sent():
    pair, producer = a_pair()
    producer.delayed(pair.now_ms, "sent")
    producer.delayed(pair.now_ms + 1_000, "c1", "stays")
    producer.delayed(pair.now_ms + 30 * HOUR_MS, "c2", key="order-1")
    pair.run(300)
    asked = producer.cancel("sent", "c1", "never was", keys=["order-1", "order-2"])
    pair.settle()
    assert producer.fates(asked) == ["sent", "cancelled", "unknown", "cancelled", "unknown"]
    again = producer.cancel("c1", keys=["order-1"])
    pair.settle()
    assert producer.fates(again) == ["cancelled", "cancelled"]
    pair.run(40 * HOUR_MS, step_ms=600_000)
    assert pair.senders.delivered() == ["sent", "stays"]


def test_message_that_is_planned_counts_as_sent_although_its_group_does_not_answer():
    pair, producer = a_pair()
    pair.senders.mute.add("g1")
    producer.delayed(pair.now_ms, "m")
    pair.run(300)
    asked = producer.cancel("m")
    pair.settle()
    assert producer.fates(asked) == ["sent"]


def test_cancel_is_answered_when_both_disks_have_it_and_refused_without_a_slave():
    pair, producer = a_pair()
    producer.delayed(pair.now_ms + HOUR_MS, "m")
    pair.run(200)
    asked = producer.cancel("m")
    pair.a.host.settle()
    assert not producer.answered(asked)
    pair.settle()
    assert producer.fates(asked) == ["cancelled"]
    pair.cut()
    asked = producer.cancel("m")
    pair.a.host.settle()
    assert producer.code(asked) == ErrorCode.READ_ONLY


def test_rescheduled_message_is_sent_at_its_new_time_alone():
    pair, producer = a_pair()
    begin_ms = pair.now_ms
    producer.delayed(begin_ms + 1_000, "later")
    producer.delayed(begin_ms + 5 * HOUR_MS, "sooner")
    pair.run(200)
    asked = producer.reschedule("later", begin_ms + 2 * HOUR_MS), producer.reschedule("sooner", begin_ms + 1_500)
    pair.settle()
    assert [producer.fate(one) for one in asked] == ["rescheduled", "rescheduled"]
    pair.run(3_000)
    assert pair.senders.delivered() == ["sooner"]
    pair.swap(2)
    pair.run(6 * HOUR_MS, step_ms=60_000)
    assert pair.senders.delivered() == ["sooner", "later"]


def test_cancel_finds_a_message_that_is_written_elsewhere_while_it_is_looked_for():
    """The look sees it as moved, and does not see where to."""
    pair, producer = a_pair()
    due_ms, host = pair.now_ms + 5 * HOUR_MS, pair.a.host
    producer.delayed(due_ms, "m", "x")
    pair.run(200)
    producer.cancel("x")  # from now on states are kept for this segment
    pair.run(200)
    moved, cancelled = producer.reschedule("m", due_ms + 30 * HOUR_MS), producer.cancel("m")
    host.do_read()
    while host.turn() or host.fsync():
        pass  # it is filed at its new place before the second look is made
    pair.settle()
    pair.run(300)
    assert (producer.fate(moved), producer.fates(cancelled)) == ("rescheduled", ["cancelled"])
    pair.run(40 * HOUR_MS, step_ms=600_000)
    assert pair.senders.delivered() == []


# Retention.


def test_what_pends_is_carried_before_the_log_lets_it_go_and_a_new_copy_has_it():
    """QMQ's slave never gets messages that are older than its message log."""
    pair, producer = a_pair(retention_hours=1, segment_bytes=1 << 20)
    due_ms = pair.now_ms + 50 * HOUR_MS
    producer.delayed(due_ms, *(f"m{i}" for i in range(20)))
    for hour in range(1, 6):
        for _ in range(40):
            producer.delayed(pair.now_ms, *(f"x{hour}" for _ in range(60)), size=900)
            pair.run(100)
        pair.run(HOUR_MS, step_ms=60_000)
        pair.a.drop(), pair.b.drop()
    assert pair.a.log.start > 0 and pair.b.log.start > 0, "the segments that had them are gone"
    pair.cut()
    pair.b.disk, pair.b.shelf = type(pair.b.disk)(), type(pair.b.shelf)()
    clock_ms = pair.b.host.clock_ms
    pair.b.start()
    pair.b.host.clock_ms = clock_ms
    pair.b.assign(1, 1)
    pair.connect()
    pair.run(2_000)
    pair.swap(2)
    pair.senders.stored.clear()
    pair.run(60 * HOUR_MS, step_ms=600_000)
    assert sorted(pair.senders.delivered()) == sorted(f"m{i}" for i in range(20))


# Clocks.


@pytest.mark.parametrize("jump_ms", [24 * HOUR_MS, -24 * HOUR_MS])
def test_clock_that_jumps_makes_no_message_early_or_late_and_is_alarmed(jump_ms, caplog):
    pair, producer = a_pair()
    due_at = pair.a.host.clock_ms + 10_000
    producer.delayed(pair.now_ms + 10_000, "m")
    pair.run(200)
    pair.a.host.wall_skew_ms = jump_ms
    while pair.a.host.clock_ms < due_at - 200:
        pair.run(100)
    assert pair.senders.delivered() == [] and "clock jumped" in caplog.text
    pair.run(400)
    assert pair.senders.delivered() == ["m"] and pair.a.master.clock_off_ms == jump_ms
