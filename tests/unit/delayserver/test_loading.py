"""Core. Due messages leave the wheel in order and in time, however large it is."""

from __future__ import annotations

import pytest

from qmq.delayserver.schedule import schedule as schedule_module
from tests.unit.delayserver.world import HOUR_MS, a_group


def numbers(copies):
    return [int(id[1:]) for id in copies.senders.delivered()]


def test_messages_due_in_an_outage_are_sent_in_order(monkeypatch):
    monkeypatch.setattr(schedule_module, "READ_ROWS", 4)
    copies, producer = a_group()
    begin_ms = copies.now_ms
    for at in range(1, 41):
        producer.delayed(begin_ms + 1_000 + at * 7 % 41, f"m{at * 7 % 41}")
    copies.settle()
    copies.a.host.clock_ms += 5_000
    copies.restart()
    copies.run(1_000)
    assert numbers(copies) == list(range(1, 41))


@pytest.mark.slow
def test_full_wheel_keeps_the_earliest_messages(monkeypatch):
    monkeypatch.setattr(schedule_module, "READ_ROWS", 4)
    copies, producer = a_group(loaded_messages_max=20)
    begin_ms = copies.now_ms
    for at in range(100, 0, -1):
        producer.delayed(begin_ms + 2_000 * at, f"m{at}")
    copies.settle()
    copies.restart()
    for at in range(1, 101):
        copies.run(begin_ms + 2_000 * at + 200 - copies.now_ms)
        assert numbers(copies) == list(range(1, at + 1))
        assert len(copies.a.master.wheel) <= 24
    assert copies.a.filing.schedule.pending_messages == 0


@pytest.mark.slow
def test_full_wheel_accepts_earlier_messages(monkeypatch):
    monkeypatch.setattr(schedule_module, "READ_ROWS", 4)
    copies, producer = a_group(loaded_messages_max=20)
    begin_ms = copies.now_ms
    for at in range(100, 0, -1):
        producer.delayed(begin_ms + 2_000 * at, f"m{at}")
        copies.settle()
        assert len(copies.a.master.wheel) <= 24
    assert producer.rescheduled("m90", begin_ms + 1_000) == "rescheduled"
    copies.run(205_000, step_ms=500)
    assert numbers(copies) == [90, *(at for at in range(1, 101) if at != 90)]


def test_messages_of_one_moment_exceed_the_wheel():
    copies, producer = a_group(loaded_messages_max=20)
    due_ms = copies.now_ms + 5_000
    for at in range(100):
        producer.delayed(due_ms, f"m{at}")
    producer.delayed(due_ms + 1_000, "m100")
    copies.settle()
    copies.restart()
    copies.run(10_000)
    assert sorted(numbers(copies)) == list(range(101))


def test_many_messages_of_one_moment_load_once(caplog):
    copies, producer = a_group(loaded_messages_max=20)
    due_ms = copies.now_ms + 60_000
    producer.delayed(due_ms, "m0")
    for at in range(1, 101):
        producer.delayed(due_ms + 1_000, f"m{at}")
    copies.settle()
    copies.restart()
    copies.run(70_000, step_ms=1_000)
    assert sorted(numbers(copies)) == list(range(101))
    assert sum("loading again" in record.message for record in caplog.records) <= 3


def test_route_is_requested_before_messages_are_due():
    copies, producer = a_group()
    watched = []
    copies.senders.watch = watched.append
    producer.delayed(copies.now_ms + 5 * 60_000, "m0", subject="soon")
    producer.delayed(copies.now_ms + 5 * HOUR_MS, "m1", subject="later")
    copies.run(200)
    assert watched == ["soon"]
    copies.run(5 * HOUR_MS - 5 * 60_000, step_ms=10_000)
    assert watched == ["soon", "later"] and numbers(copies) == [0]
    copies.swap(2)
    copies.run(100)
    assert watched == ["soon", "later", "later"]
