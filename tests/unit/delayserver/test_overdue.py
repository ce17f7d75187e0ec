"""Core. Overdue messages are counted wherever they wait, with their age."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np

from qmq.delayserver.dispatching import SUBJECTS_MAX, Overdue, Part
from qmq.delayserver.pending_queue import PendingQueue
from qmq.delayserver.schedule import RECORD
from tests.unit.delayserver.world import a_group


@dataclass
class Batch:
    subject: str
    group: str
    count: int
    oldest_ms: int


def queue(subject, *dues):
    made = PendingQueue(subject)
    records = np.zeros(len(dues), RECORD)
    records["due"], records["number"] = dues, range(len(dues))
    made.put(records, (), lambda label: None)
    return made


def test_overdue_counts_wheel_queue_and_flights():
    batches = [Batch("a", "g1", 5, 10), Batch("a", "g2", 1, 30), Batch("b", "g1", 2, 40), Batch("b", "g1", 0, 0)]
    found = Overdue.of([queue("a", 20, 25), queue("c", 35)], batches, 100, 50)
    assert found == Overdue(
        111, 10, {"a": Part(8, 10), "c": Part(1, 35), "b": Part(2, 40)}, {"g1": Part(7, 10), "g2": Part(1, 30)}
    )


def test_message_on_the_wheel_may_be_the_oldest():
    assert Overdue.of([queue("a", 20)], [], 3, 5).oldest_ms == 5
    assert Overdue.of([queue("a", 20)], [], 0, 5).oldest_ms == 20, "that is not due yet"
    assert Overdue.of([], [], 0, None) == Overdue(0, None, {}, {})


def test_longest_waiting_subjects_are_named():
    found = Overdue.of([queue(f"s{at}", 1000 - at) for at in range(100)], [], 0, None)
    assert list(found.subjects) == [f"s{at}" for at in range(99, 99 - SUBJECTS_MAX, -1)]
    assert found.messages == 100


def test_removed_messages_do_not_count():
    pending = queue("a", 1, 2, 3)
    pending.remove(np.array([1], np.uint64))
    assert Overdue.of([pending], [], 0, None).messages == 2


def test_stats_show_age_of_a_subject_without_a_group():
    copies, producer = a_group()
    copies.senders.routeless.add("nowhere")
    producer.delayed(copies.now_ms + 500, "m1", "m2", subject="nowhere")
    producer.delayed(copies.now_ms + 500, "m3", subject="s")
    copies.run(3_500)
    stats = copies.a.master.stats()
    assert stats["overdue_messages"] == stats["waiting_messages"] == 2
    ((messages, age_ms, why),) = [stats["overdue_subjects"].pop("nowhere")]
    assert (messages, why, age_ms) == (2, "none is there", 3_000) and stats["overdue_ms"] == age_ms
    assert not stats["overdue_subjects"] and not stats["overdue_groups"]


def test_stats_show_age_of_a_group_without_answer():
    copies, producer = a_group(slow=True)
    producer.delayed(copies.now_ms + 500, "m1", "m2")
    copies.run(2_500)
    assert copies.a.master.stats()["overdue_groups"] == {"g1": (2, 2_000)}
    copies.senders.answer()
    copies.run(100)
    stats = copies.a.master.stats()
    assert (stats["overdue_messages"], stats["overdue_ms"], stats["overdue_groups"]) == (0, 0, {})


def test_excess_of_due_messages_is_logged_once(caplog):
    copies, producer = a_group(loaded_messages_max=1000)
    copies.senders.routeless.add("s")
    for page in range(6):
        producer.delayed(copies.now_ms, *(f"m{page}-{i}" for i in range(200)))
        copies.settle()
    with caplog.at_level(logging.WARNING):
        copies.run(2_000)
    assert sum("due messages pile up" in record.message for record in caplog.records) == 1
