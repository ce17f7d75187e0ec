"""Core. Who waits for whom among what is due, and for how long."""

from __future__ import annotations

from delayserver import dispatching
from qmq.client.numbered import NotStored
from qmq.codec import encode_labels, label_of
from qmq.errors import MessageTooLarge, NotServed
from qmq.log.frame import FLAG_LABELLED, FLAG_ORDERED
from tests.unit.delayserver.test_races import a_pair
from tests.unit.delayserver.world import HOUR_MS, delayed


def keyed(producer, due_ms, keys):
    """Send messages, id -> order key or None."""
    messages = [delayed("s", id, due_ms) for id in keys]
    labels = encode_labels([label_of((), key) for key in keys.values()])
    return producer.produce_raw(messages, after=labels, flags=FLAG_LABELLED | FLAG_ORDERED)


def ids(pair):
    return [attempt[3] for attempt in pair.senders.attempts]


def test_batches_that_are_refused_at_once_are_one_failure_however_many_they_are(monkeypatch):
    monkeypatch.setattr(dispatching, "BATCH_MESSAGES_MAX", 5)
    pair, producer = a_pair(slow=True)
    producer.delayed(pair.now_ms, *(f"m{i}" for i in range(100)))
    pair.run(100)
    assert len(pair.senders.waiting) == 20
    while pair.senders.waiting:
        pair.senders.answer(NotStored(NotServed("not now")))
    for _ in range(3):
        pair.run(100)
        while pair.senders.waiting:
            pair.senders.answer()
    assert len(pair.senders.delivered()) == 100


def test_an_outage_makes_the_rest_longer_and_not_what_waits_meanwhile(monkeypatch):
    monkeypatch.setattr(dispatching, "BATCH_MESSAGES_MAX", 5)
    pair, producer = a_pair(slow=True)
    producer.delayed(pair.now_ms, *(f"m{i}" for i in range(100)))
    for _ in range(60):  # six seconds
        pair.run(100)
        while pair.senders.waiting:
            pair.senders.answer(NotStored(NotServed("not now")))
    tried = len(pair.senders.attempts)
    assert tried < 60
    pair.run(dispatching.REST_MS[-1])
    while pair.senders.waiting:
        pair.senders.answer()
        pair.run(100)
    assert len(pair.senders.delivered()) == 100


def test_order_keys_that_wait_for_their_group_are_not_looked_through_again_and_again():
    pair, producer = a_pair("g1", "g2")
    home, calls = pair.senders.home, []
    pair.senders.home = lambda subject, label: calls.append(label) or home(subject, label)
    pair.senders.up["g1"] = False
    for page in range(5):
        keyed(producer, pair.now_ms, {f"m{page}-{i}": f"k{page}-{i}" for i in range(200)})
    pair.run(5_000)
    left = 1000 - len(pair.senders.delivered())
    assert 300 < left < 700 and len(calls) <= 2 * 1000
    pair.senders.up["g1"] = True
    pair.run(1_000)
    assert len(pair.senders.delivered()) == 1000


def test_order_keys_follow_their_route_when_it_changes():
    pair, producer = a_pair("g1", "g2")
    pair.senders.up.update(g1=False, g2=False)
    keyed(producer, pair.now_ms, {f"m{i}": f"k{i % 7}" for i in range(50)})
    pair.run(500)
    pair.senders.up = {"g3": True}
    pair.run(1_000)
    assert {attempt[0] for attempt in pair.senders.attempts} == {"g3"}
    assert pair.senders.delivered() == [f"m{i}" for i in range(50)]


def test_subject_that_waits_for_room_gets_it_before_the_one_that_filled_it(monkeypatch):
    monkeypatch.setattr(dispatching, "BATCH_MESSAGES_MAX", 5)
    monkeypatch.setattr(dispatching, "IN_FLIGHT_MAX", 10)
    pair, producer = a_pair(slow=True)
    producer.delayed(pair.now_ms, *(f"hot{i}" for i in range(200)), subject="hot")
    pair.settle()
    pair.run(100)
    producer.delayed(pair.now_ms, "calm", subject="calm")
    pair.settle()
    assert len(pair.senders.waiting) == 2
    for _ in range(3):  # answers come, and no time goes by
        pair.senders.answer()
        pair.settle()
    assert ["calm"] in ids(pair)


def test_message_that_is_larger_than_its_group_takes_is_tried_much_later_and_holds_up_no_other():
    pair, producer = a_pair()
    send = pair.senders.send

    def too_small(group, batch, done):
        if sum(map(len, batch.blocks)) > 500:
            pair.senders.attempts.append((group, batch.producer, batch.number, ["large"]))
            done(NotStored(MessageTooLarge("more than g1 takes in one request")))
        else:
            send(group, batch, done)

    pair.senders.send, pair.senders.room = too_small, lambda name: 500
    producer.delayed(pair.now_ms - 1, "large", size=900)
    producer.delayed(pair.now_ms, "small")
    pair.run(60_000, step_ms=1_000)
    assert pair.senders.delivered() == ["small"] and ids(pair).count(["large"]) == 1
    pair.senders.send = send
    pair.run(300_000, step_ms=1_000)
    assert pair.senders.delivered() == ["small", "large"] and pair.a.filing.schedule.pending_messages == 0


def test_batch_that_waited_to_be_sent_is_repeated_as_long_as_any_other():
    pair, producer = a_pair("g1", "g2", unknown_ms=2_000)
    pair.senders.in_flight = lambda name: {"g1": 0, "g2": 1}[name]
    pair.senders.mute.add("g1")
    producer.delayed(pair.now_ms, "m")
    while not pair.a.host.reads:
        assert pair.a.host.turn() or pair.a.host.fsync() or pair.to_slave() or pair.b.host.turn() or (
            pair.b.host.fsync() or pair.to_master()
        )
    pair.a.host.clock_ms += 5_000  # its disk is slow
    pair.settle()
    pair.run(1_000)
    assert {attempt[0] for attempt in pair.senders.attempts} == {"g1"}
    pair.run(5_000)
    assert {attempt[0] for attempt in pair.senders.attempts} == {"g1", "g2"}


def test_what_was_given_up_does_not_go_to_the_same_group_along_with_order_keys():
    """What is free of keys keeps away from it: it may be stored there already."""
    pair, producer = a_pair("g1", "g2", unknown_ms=2_000)
    pair.senders.home = lambda subject, label: "g1"
    pair.senders.in_flight = lambda name: {"g1": 0, "g2": 1}[name]
    pair.senders.mute.add("g1")
    producer.delayed(pair.now_ms, "free")
    pair.run(1_000)
    pair.senders.room = lambda name: 0 if name == "g2" else 1 << 20
    while pair.a.filing.schedule.in_flight:
        pair.run(100)  # until it is given up; g2 has no room
    pair.senders.mute.clear()
    keyed(producer, pair.now_ms - HOUR_MS, {"k1": "k", "with": None})
    pair.run(1_000)
    assert ids(pair)[-1] == ["k1"]


def test_no_more_is_planned_for_a_group_than_it_has_room_for(monkeypatch):
    monkeypatch.setattr(dispatching, "BATCH_MESSAGES_MAX", 1)
    pair, producer = a_pair(slow=True)
    pair.senders.room = lambda name: max(0, 3_000 - 500 * len(pair.senders.waiting))
    producer.delayed(pair.now_ms, *(f"m{i}" for i in range(50)), size=400)
    pair.run(100)
    assert 5 <= len(pair.senders.attempts) <= 7
    while pair.senders.waiting:
        pair.senders.answer()
        pair.settle()
    assert len(pair.senders.delivered()) == 50
