"""Core. What is due comes off the wheel in order and in time, however little fits on it, in whatever order it came."""

from __future__ import annotations

from delayserver.schedule import schedule as schedule_module
from tests.unit.delayserver.test_master import restart
from tests.unit.delayserver.test_races import a_pair
from tests.unit.delayserver.world import HOUR_MS


def numbers(pair):
    return [int(id[1:]) for id in pair.senders.delivered()]


def test_what_came_due_during_an_outage_is_sent_in_the_order_of_its_due_times(monkeypatch):
    monkeypatch.setattr(schedule_module, "READ_ROWS", 4)
    pair, producer = a_pair()
    begin_ms = pair.now_ms
    for at in range(1, 41):
        producer.delayed(begin_ms + 1_000 + at * 7 % 41, f"m{at * 7 % 41}")
    pair.settle()
    pair.a.host.clock_ms += 5_000
    restart(pair)
    pair.run(1_000)
    assert numbers(pair) == list(range(1, 41))


def test_full_wheel_keeps_what_is_due_first(monkeypatch):
    monkeypatch.setattr(schedule_module, "READ_ROWS", 4)
    pair, producer = a_pair(loaded_messages_max=20)
    begin_ms = pair.now_ms
    for at in range(100, 0, -1):
        producer.delayed(begin_ms + 2_000 * at, f"m{at}")
    pair.settle()
    restart(pair)
    for at in range(1, 101):
        pair.run(begin_ms + 2_000 * at + 200 - pair.now_ms)
        assert numbers(pair) == list(range(1, at + 1))
        assert len(pair.a.master.wheel) <= 24
    assert pair.a.filing.schedule.pending_messages == 0


def test_full_wheel_is_full_of_messages_that_are_filed_while_it_is_in_use_too(monkeypatch):
    monkeypatch.setattr(schedule_module, "READ_ROWS", 4)
    pair, producer = a_pair(loaded_messages_max=20)
    begin_ms = pair.now_ms
    for at in range(100, 0, -1):
        producer.delayed(begin_ms + 2_000 * at, f"m{at}")
        pair.settle()
        assert len(pair.a.master.wheel) <= 24
    moved = producer.reschedule("m90", begin_ms + 1_000)
    pair.settle()
    assert producer.fate(moved) == "rescheduled"
    pair.run(205_000, step_ms=500)
    assert numbers(pair) == [90, *(at for at in range(1, 101) if at != 90)]


def test_more_messages_of_one_moment_than_fit_are_sent_all_the_same():
    pair, producer = a_pair(loaded_messages_max=20)
    due_ms = pair.now_ms + 5_000
    for at in range(100):
        producer.delayed(due_ms, f"m{at}")
    producer.delayed(due_ms + 1_000, "m100")
    pair.settle()
    restart(pair)
    pair.run(10_000)
    assert sorted(numbers(pair)) == list(range(101))


def test_route_of_a_subject_is_known_before_something_of_it_is_due():
    pair, producer = a_pair()
    watched = []
    pair.senders.watch = watched.append
    producer.delayed(pair.now_ms + 5 * 60_000, "m0", subject="soon")
    producer.delayed(pair.now_ms + 5 * HOUR_MS, "m1", subject="later")
    pair.run(200)
    assert watched == ["soon"]
    pair.run(5 * HOUR_MS - 5 * 60_000, step_ms=10_000)
    assert watched == ["soon", "later"] and numbers(pair) == [0]
    pair.swap(2)
    pair.run(100)
    assert watched == ["soon", "later", "later"]
