"""Core. What happens to a message at the very moment at which something else happens to it."""

from __future__ import annotations

import pytest

from qmq.client.numbered import NotStored, Stored
from qmq.codec import encode_labels, label_of
from qmq.errors import ErrorCode, NotServed
from qmq.log.frame import FLAG_LABELLED, FLAG_ORDERED
from qmq.log.recovery import Damage
from qmq.replication.readonly import Reason
from qmq.types import Role
from tests.unit.delayserver.world import HOUR_MS, Pair, Producer, Senders, delayed


class SlowSenders(Senders):
    """Broker groups whose answers a test gives."""

    def __init__(self, *groups):
        super().__init__(*groups)
        self.waiting = []

    def send(self, group, batch, done):
        answers = []
        super().send(group, batch, answers.append)
        self.waiting.append((self.attempts[-1], answers[0], done))

    def answer(self, answer=None):
        """Answer the oldest attempt."""
        attempt, stored, done = self.waiting.pop(0)
        if answer is not None:
            del self.stored[attempt[:3]]
        done(answer or stored)


def a_pair(*groups, slow=False, **changes):
    pair = Pair.made(*groups, **changes)
    if slow:
        senders = SlowSenders(*groups)
        pair.a.senders = pair.b.senders = senders
    pair.start()
    pair.run(100)
    return pair, Producer(pair.a)


@pytest.mark.parametrize("how", ["cancel", "reschedule"])
def test_message_that_comes_due_while_its_cancel_is_written_is_not_sent(how):
    pair, producer = a_pair()
    producer.delayed(pair.now_ms + 1_000, "m")
    pair.run(900)
    asked = producer.cancel("m") if how == "cancel" else producer.reschedule("m", pair.now_ms + HOUR_MS)
    while pair.a.host.do_read():
        pass
    pair.a.host.clock_ms += 200
    pair.a.node.master.beat()
    pair.a.host.turn()
    pair.settle()
    assert (producer.fates(asked) if how == "cancel" else [producer.fate(asked)]) == [
        "cancelled" if how == "cancel" else "rescheduled"
    ]
    pair.run(2_000)
    assert pair.senders.attempts == []


def test_cancels_of_a_message_at_the_same_moment_are_all_told_that_it_is_cancelled():
    pair, producer = a_pair()
    producer.delayed(pair.now_ms + HOUR_MS, "m")
    pair.run(200)
    asked = [producer.cancel("m") for _ in range(3)]
    pair.settle()
    assert [producer.fates(one) for one in asked] == [["cancelled"]] * 3


def test_cancel_of_a_message_that_is_being_rescheduled_finds_it_at_its_new_place():
    pair, producer = a_pair()
    producer.delayed(pair.now_ms + HOUR_MS, "m")
    pair.run(200)
    moved, cancelled = producer.reschedule("m", pair.now_ms + 1_000), producer.cancel("m")
    pair.settle()
    assert (producer.fate(moved), producer.fates(cancelled)) == ("rescheduled", ["cancelled"])
    pair.run(3_000)
    assert pair.senders.attempts == []


def test_cancel_of_a_message_that_a_broker_refused_is_told_the_same_when_it_is_repeated():
    pair, producer = a_pair()
    pair.senders.refusing["bad"] = "too large"
    producer.delayed(pair.now_ms, "bad")
    pair.run(1_000)
    for _ in range(2):
        asked = producer.cancel("bad")
        pair.settle()
        assert producer.fates(asked) == ["cancelled"]


def test_nothing_is_written_while_roles_are_swapped():
    pair, producer = a_pair(slow=True)
    producer.delayed(pair.now_ms, "bad", "good")
    pair.run(300)
    pair.a.node.prepare_swap(1, 10_000)
    end = pair.a.log.end
    pair.senders.answer(Stored(0, 1, [(0, "too large")]))
    pair.settle()
    assert pair.a.log.end == end
    pair.a.node.cancel_swap()
    pair.settle()
    assert pair.a.log.end > end and pair.a.filing.schedule.pending_messages == 1


def test_master_that_is_fenced_sends_nothing_that_it_planned_before():
    pair, producer = a_pair()
    producer.delayed(pair.now_ms + 1_000, "m")
    pair.run(900)
    pair.a.host.clock_ms += 200
    pair.a.node.master.beat()
    pair.a.host.turn()
    pair.a.node.master.readonly.change(Reason.FENCED, True)
    pair.settle()
    assert pair.senders.attempts == []
    pair.swap(2)
    pair.run(1_000)
    assert pair.senders.delivered() == ["m"]


def test_schedule_that_is_made_anew_does_not_bring_back_a_batch_that_was_settled_just_now():
    pair, producer = a_pair("g1", "g2", slow=True)
    producer.delayed(pair.now_ms, "m")
    pair.run(300)
    first = pair.senders.waiting[0][0]
    pair.senders.answer(NotStored(NotServed("not now")))
    pair.a.filing.start_anew("lost")
    pair.run(1_000)
    assert first not in pair.senders.attempts[1:]
    while pair.senders.waiting:
        pair.senders.answer()
        pair.run(1_000)
    assert pair.senders.delivered() == ["m"] and pair.a.filing.schedule.pending_messages == 0


def keyed(producer, due_ms, **keys):
    messages = [delayed("s", id, due_ms) for id in keys]
    labels = encode_labels([label_of((), key) for key in keys.values()])
    return producer.produce_raw(messages, after=labels, flags=FLAG_LABELLED | FLAG_ORDERED)


def ids(pair):
    return [attempt[3] for attempt in pair.senders.attempts]


def test_order_key_waits_for_its_open_batch_although_others_are_stored_meanwhile():
    pair, producer = a_pair("g1", slow=True)
    keyed(producer, pair.now_ms, m1="k")
    pair.run(200)
    producer.delayed(pair.now_ms, "free")
    pair.run(200)
    first = pair.senders.waiting.pop(0)
    pair.senders.answer()  # of the free one
    keyed(producer, pair.now_ms, m2="k")
    pair.run(500)
    assert ids(pair) == [["m1"], ["free"]]
    first[2](first[1])
    pair.run(500)
    assert ids(pair) == [["m1"], ["free"], ["m2"]]


def test_order_key_keeps_its_order_when_its_batch_is_refused_and_over_a_swap():
    pair, producer = a_pair("g1", slow=True)
    keyed(producer, pair.now_ms, m1="k")
    pair.run(200)
    keyed(producer, pair.now_ms, m2="k")
    pair.run(200)
    pair.senders.answer(NotStored(NotServed("not now")))
    pair.run(500)
    assert ids(pair)[0] == ["m1"] and ids(pair)[1] in (["m1"], ["m1", "m2"])
    pair.swap(2)
    keyed(Producer(pair.b), pair.now_ms, m3="k")
    pair.run(500)
    assert ids(pair)[-1] == ids(pair)[1], "the next one waits for what the former master sent"


def test_order_keys_whose_group_is_away_hold_up_no_message_without_one():
    pair, producer = a_pair("g1", "g2")
    pair.senders.home = lambda subject, label: "g1"
    pair.senders.up["g1"] = False
    keyed(producer, pair.now_ms, m1="k", m2=None, m3="k", m4=None)
    pair.run(500)
    assert pair.senders.delivered() == ["m2", "m4"]


def test_message_of_an_order_key_in_doubt_is_repeated_and_not_given_to_its_group_anew():
    pair, producer = a_pair("g1", "g2", unknown_ms=1_000)
    pair.senders.home = lambda subject, label: "g1"
    pair.senders.mute.add("g1")
    keyed(producer, pair.now_ms, m1="k")
    pair.run(10_000)
    assert len({attempt[:3] for attempt in pair.senders.attempts}) == 1
    pair.senders.mute.clear()
    pair.run(10_000)
    assert pair.senders.delivered() == ["m1"]


def test_batch_in_doubt_goes_to_another_group_in_the_end_and_not_to_the_same_one_anew():
    pair, producer = a_pair("g1", "g2", unknown_ms=2_000)
    pair.senders.mute.add("g1")
    pair.senders.in_flight = lambda name: {"g1": 0, "g2": 1}[name]
    producer.delayed(pair.now_ms, "m")
    pair.run(15_000)
    assert {attempt[0] for attempt in pair.senders.attempts} == {"g1", "g2"}
    assert len({attempt[:3] for attempt in pair.senders.attempts}) == 2


def test_master_whose_log_is_damaged_waits_for_its_repair_without_turning_in_circles():
    pair, producer = a_pair()
    producer.delayed(pair.now_ms + HOUR_MS, "m")
    pair.a.host.settle()
    producer.delayed(pair.now_ms + HOUR_MS, "n")
    pair.a.log.damage = Damage(0, pair.a.log.end, "a bit was flipped")
    for _ in range(20):
        pair.a.host.fsync() or pair.a.host.turn()
    assert not pair.a.host.turn_is_due and pair.a.filing.schedule.filed_end < pair.a.log.flushed_end


def test_master_alone_drops_nothing_that_pends_by_what_the_slave_has():
    pair, producer = a_pair(retention_hours=0.001, segment_bytes=1 << 14)
    for i in range(30):
        producer.delayed(pair.now_ms, f"m{i}", size=900)
    pair.settle()
    pair.cut()
    for _ in range(20):
        pair.a.host.clock_ms += 1_000
        pair.a.node.tick()
        pair.a.beat()
        pair.a.host.settle()
    assert len(pair.senders.delivered()) == 30 and pair.a.filing.schedule.pending_messages == 0
    assert len(pair.a.log.bases) > 1 and not pair.a.keeping.may_drop(pair.a.log, pair.a.host.now_ms())
    pair.connect()
    pair.run(5_000)
    producer.delayed(pair.now_ms, "next")
    pair.run(1_000)
    assert pair.a.keeping.may_drop(pair.a.log, pair.a.host.now_ms())


@pytest.mark.parametrize("what", ["cancel", "carry"])
@pytest.mark.parametrize("next_role", ["slave", "master"])
def test_master_that_was_replaced_by_force_writes_nothing_more(what, next_role):
    pair, producer = a_pair(retention_hours=1)
    for i in range(80):
        producer.delayed(pair.now_ms + 99 * HOUR_MS, "m" if i == 0 else f"m{i}", size=900)
        producer.delayed(pair.now_ms, f"x{i}", size=900)
        producer.delayed(pair.now_ms, f"y{i}", size=900)
    pair.run(500)
    host, log = pair.a.host, pair.a.log
    if what == "cancel":
        asked = producer.cancel("m")
    else:
        for server in (pair.a, pair.b):
            server.host.clock_ms += 2 * HOUR_MS
        for _ in range(100):
            host.clock_ms += 100
            pair.a.beat()
            host.turn()
            if pair.a.master._carrying._left is not None:
                break
            host.settle()
    assert host.reads
    if next_role == "slave":
        pair.a.assign(Role.SLAVE, 2)
    else:
        pair.a.assign(Role.MASTER, 2)
    end = log.end
    while host.do_read():
        pass
    assert log.end == end
    if what == "cancel":
        assert producer.code(asked) == ErrorCode.NOT_MASTER


def test_questions_that_come_together_are_looked_for_together():
    """To look for one key takes as long as for many; what is due must not wait behind such looks."""
    pair, producer = a_pair()
    for at in range(20):
        producer.delayed(pair.now_ms + (1 + at) * HOUR_MS, f"m{at}", key=f"k{at}")
    producer.delayed(pair.now_ms + HOUR_MS, "other", key="k0", subject="t")
    pair.run(200)
    now_ms, looks = pair.now_ms, []
    find = pair.a.filing.schedule.find
    pair.a.filing.schedule.find = lambda *args, **named: looks.append(args) or find(*args, **named)
    asked = [producer.cancel(keys=[f"k{at}"]) for at in range(10)]
    moved = [producer.reschedule(f"m{at}", now_ms + 500) for at in range(8, 12)]
    both = producer.cancel("m12", "m1", due_ms=now_ms + 13 * HOUR_MS)
    nobody = producer.cancel("m0", keys=["k3"], subject="t"), producer.cancel("m0", subject="unheard of")
    assert len(pair.a.host.reads) == 1
    pair.settle()
    assert [producer.fates(one) for one in asked] == [["cancelled"]] * 10
    assert [producer.fate(one) for one in moved] == ["cancelled"] * 2 + ["rescheduled"] * 2
    assert [producer.fates(one) for one in (both, *nobody)] == [["cancelled"] * 2, ["unknown"] * 2, ["unknown"]]
    assert len(looks) <= 5
    pair.run(2_000)
    assert sorted(pair.senders.delivered()) == ["m10", "m11"]
    pair.run(30 * HOUR_MS, step_ms=600_000)
    assert sorted(pair.senders.delivered()) == sorted(["other", *(f"m{at}" for at in (10, 11, *range(13, 20)))])


def test_questions_that_wait_when_a_reign_ends_are_told_so():
    pair, producer = a_pair()
    producer.delayed(pair.now_ms + HOUR_MS, "m", "n")
    pair.run(200)
    asked = producer.cancel("m"), producer.cancel("n")
    pair.a.assign(Role.SLAVE, 2)
    pair.a.host.settle()
    assert [producer.code(one) for one in asked] == [ErrorCode.NOT_MASTER] * 2
