"""Core. Dispatch order: which due messages wait for which, and for how long."""

from __future__ import annotations

import pytest

from qmq.client.batch import NotStored
from qmq.delayserver import dispatching, flights, upkeep
from qmq.errors import MessageTooLarge, NotServed
from qmq.log.frame import FrameKind
from tests.unit.delayserver.world import HOUR_MS, a_group


def test_batches_refused_together_are_one_failure(monkeypatch):
    monkeypatch.setattr(dispatching, "BATCH_MESSAGES_MAX", 5)
    copies, producer = a_group(slow=True)
    producer.delayed(copies.now_ms, *(f"m{i}" for i in range(100)))
    copies.run(100)
    assert len(copies.senders.waiting) == 20
    while copies.senders.waiting:
        copies.senders.answer(NotStored(NotServed("not now")))
    for _ in range(3):
        copies.run(100)
        while copies.senders.waiting:
            copies.senders.answer()
    assert len(copies.senders.delivered()) == 100


def test_outage_lengthens_pauses_not_waiting_messages(monkeypatch):
    monkeypatch.setattr(dispatching, "BATCH_MESSAGES_MAX", 5)
    copies, producer = a_group(slow=True)
    producer.delayed(copies.now_ms, *(f"m{i}" for i in range(100)))
    for _ in range(60):  # six seconds
        copies.run(100)
        while copies.senders.waiting:
            copies.senders.answer(NotStored(NotServed("not now")))
    tried = len(copies.senders.attempts)
    assert tried < 60
    copies.run(flights.REST_MS[-1])
    while copies.senders.waiting:
        copies.senders.answer()
        copies.run(100)
    assert len(copies.senders.delivered()) == 100


def test_waiting_order_keys_cost_linear_time():
    copies, producer = a_group("g1", "g2")
    home, calls = copies.senders.home, []
    copies.senders.home = lambda subject, label: calls.append(label) or home(subject, label)
    copies.senders.up["g1"] = False
    for page in range(5):
        producer.keyed(copies.now_ms, {f"m{page}-{i}": f"k{page}-{i}" for i in range(200)})
    copies.run(5_000)
    left = 1000 - len(copies.senders.delivered())
    assert 300 < left < 700 and len(calls) <= 2 * 1000
    copies.senders.up["g1"] = True
    copies.run(1_000)
    assert len(copies.senders.delivered()) == 1000


def test_order_keys_follow_their_route_when_it_changes():
    copies, producer = a_group("g1", "g2")
    copies.senders.up.update(g1=False, g2=False)
    producer.keyed(copies.now_ms, {f"m{i}": f"k{i % 7}" for i in range(50)})
    copies.run(500)
    copies.senders.up = {"g3": True}
    copies.run(1_000)
    assert {attempt[0] for attempt in copies.senders.attempts} == {"g3"}
    assert copies.senders.delivered() == [f"m{i}" for i in range(50)]


def test_waiting_subject_gets_free_room_first(monkeypatch):
    monkeypatch.setattr(dispatching, "BATCH_MESSAGES_MAX", 5)
    monkeypatch.setattr(flights, "IN_FLIGHT_MAX", 10)
    copies, producer = a_group(slow=True)
    producer.delayed(copies.now_ms, *(f"hot{i}" for i in range(200)), subject="hot")
    copies.settle()
    copies.run(100)
    producer.delayed(copies.now_ms, "calm", subject="calm")
    copies.settle()
    assert len(copies.senders.waiting) == 2
    for _ in range(3):  # answers arrive, and no time passes
        copies.senders.answer()
        copies.settle()
    assert ["calm"] in copies.senders.batches()


def test_oversized_message_delays_no_other():
    copies, producer = a_group()
    send = copies.senders.send

    def too_small(group, batch, done):
        if sum(map(len, batch.blocks)) > 500:
            copies.senders.attempts.append((group, batch.producer, batch.number, ["large"]))
            done(NotStored(MessageTooLarge("more than g1 takes in one request")))
        else:
            send(group, batch, done)

    copies.senders.send, copies.senders.room = too_small, lambda name: 500
    producer.delayed(copies.now_ms - 1, "large", size=900)
    producer.delayed(copies.now_ms, "small")
    copies.run(60_000, step_ms=1_000)
    assert copies.senders.delivered() == ["small"] and copies.senders.batches().count(["large"]) == 1
    copies.senders.send = send
    copies.run(300_000, step_ms=1_000)
    assert copies.senders.delivered() == ["small", "large"] and copies.a.filing.schedule.pending_messages == 0


def test_late_batch_is_repeated_as_long_as_others():
    copies, producer = a_group("g1", "g2", unknown_ms=2_000)
    copies.senders.in_flight = lambda name: {"g1": 0, "g2": 1}[name]
    copies.senders.mute.add("g1")
    producer.delayed(copies.now_ms, "m")
    while not copies.a.host.reads:
        assert (
            copies.a.host.turn()
            or copies.a.host.fsync()
            or copies.to_slave()
            or copies.b.host.turn()
            or (copies.b.host.fsync() or copies.to_master())
        )
    copies.a.host.clock_ms += 5_000  # its disk is slow
    copies.settle()
    copies.run(1_000)
    assert {attempt[0] for attempt in copies.senders.attempts} == {"g1"}
    copies.run(5_000)
    assert {attempt[0] for attempt in copies.senders.attempts} == {"g1", "g2"}
    assert len({attempt[:3] for attempt in copies.senders.attempts}) == 2, "repeated under the same number"


def test_batch_of_unknown_outcome_stays_at_the_only_group():
    """Under another number the group would store it twice."""
    copies, producer = a_group(unknown_ms=2_000)
    copies.senders.mute.add("g1")
    producer.delayed(copies.now_ms, "m")
    copies.run(15_000)
    assert len(copies.senders.attempts) > 2 and len({attempt[:3] for attempt in copies.senders.attempts}) == 1


def test_given_up_batch_avoids_its_group_despite_keys():
    """Messages without keys avoid the group: they may be stored there already."""
    copies, producer = a_group("g1", "g2", unknown_ms=2_000)
    copies.senders.home = lambda subject, label: "g1"
    copies.senders.in_flight = lambda name: {"g1": 0, "g2": 1}[name]
    copies.senders.mute.add("g1")
    producer.delayed(copies.now_ms, "free")
    copies.run(1_000)
    copies.senders.room = lambda name: 0 if name == "g2" else 1 << 20
    while copies.a.filing.schedule.in_flight:
        copies.run(100)  # until it is given up; g2 has no room
    copies.senders.mute.clear()
    producer.keyed(copies.now_ms - HOUR_MS, {"k1": "k", "with": None})
    copies.run(1_000)
    assert copies.senders.batches()[-1] == ["k1"]


def test_plans_fit_the_groups_room(monkeypatch):
    monkeypatch.setattr(dispatching, "BATCH_MESSAGES_MAX", 1)
    copies, producer = a_group(slow=True)
    copies.senders.room = lambda name: max(0, 3_000 - 500 * len(copies.senders.waiting))
    producer.delayed(copies.now_ms, *(f"m{i}" for i in range(50)), size=400)
    copies.run(100)
    assert 5 <= len(copies.senders.attempts) <= 7
    while copies.senders.waiting:
        copies.senders.answer()
        copies.settle()
    assert len(copies.senders.delivered()) == 50


@pytest.mark.slow
def test_burst_of_one_subject_delays_no_other():
    copies, producer = a_group()
    due_ms = copies.now_ms + 2_000
    for page in range(60):
        producer.delayed(due_ms, *(f"hot{page}-{i}" for i in range(200)), subject="hot")
        copies.settle()
    producer.delayed(due_ms + 1, "calm", subject="calm")
    copies.settle()
    copies.run(2_800, step_ms=700)
    place = copies.senders.batches().index(["calm"])
    assert place <= 2, f"{sum(map(len, copies.senders.batches()[:place]))} messages of another subject went before it"
    assert len(copies.senders.delivered()) == 12_001


def test_slave_confirms_between_filing_steps(monkeypatch):
    """Filing looks each message up. A mebibyte of such frames names 65,000, and delayed confirmations."""
    monkeypatch.setattr(upkeep, "PASS_MESSAGES", 100)
    monkeypatch.setattr(dispatching, "BATCH_MESSAGES_MAX", 50)
    copies, producer = a_group(tail_bytes=1 << 22)
    producer.delayed(copies.now_ms + 1_000, *(f"m{at}" for at in range(500)))
    copies.run(100)
    slave, pieces = copies.b.filing, [0]
    go_on, file = slave.go_on, slave.schedule.file

    def noted(end):
        pieces.append(0)
        go_on(end)

    def counted(frame, body):
        pieces[-1] += frame.count if frame.kind == FrameKind.DISPATCH else 0
        return file(frame, body)

    monkeypatch.setattr(slave, "go_on", noted)
    monkeypatch.setattr(slave.schedule, "file", counted)
    copies.run(3_000)
    producer.delayed(copies.now_ms + HOUR_MS, "what follows says what was safe")
    copies.run(3_000)
    assert len(copies.senders.delivered()) == 500
    assert sum(pieces) == 500 and max(pieces) < 100 + 50
