"""Core. Due messages above the limit stay on disk, block no others, and are sent once."""

from __future__ import annotations

from collections import deque
from random import Random

import numpy as np
import pytest

from qmq.delayserver import pending_queue
from qmq.delayserver.pending_queue import Leftovers, PendingQueue, _count_max
from qmq.delayserver.schedule import RECORD
from qmq.delayserver.schedule.record import no_records
from qmq.delayserver.schedule.search import PendingOf
from tests.unit.broker.world import FakeHost
from tests.unit.delayserver.world import HOUR_MS, a_group

MOST = 100


def put(copies, producer, count, *, subject, at_ms=0, name=""):
    """Send this number of messages due now, some at a time; return their ids."""
    ids = [f"{name or subject}-{at}" for at in range(count)]
    for begin in range(0, count, 50):
        producer.delayed(copies.now_ms + at_ms, *ids[begin : begin + 50], subject=subject)
        copies.run(100)
    return ids


def in_memory(copies):
    stats = copies.a.master.stats()
    return stats["waiting_messages"] - stats["due_on_disk_messages"] + stats["loaded_messages"]


@pytest.mark.parametrize(
    ("counts", "most", "level"),
    [
        pytest.param([1000], 100, 100, id="one queue"),
        pytest.param([1000, 1000], 100, 50, id="two that are equal"),
        pytest.param([10, 1000], 100, 90, id="a short one is left as it is"),
        pytest.param([10, 20, 1000, 30], 100, 40, id="the long one gets what the short ones leave"),
        pytest.param([2] * 100, 100, 1, id="many short ones"),
        pytest.param([1] * 100, 50, 1, id="never down to nothing"),
    ],
)
def test_longest_queues_are_cut(counts, most, level):
    assert _count_max(np.array(counts), most) == level


def test_undeliverable_subject_uses_bounded_memory():
    copies, producer = a_group(loaded_messages_max=MOST)
    copies.senders.routeless.add("stuck")
    stuck = put(copies, producer, 2_000, subject="stuck")
    assert in_memory(copies) <= MOST
    stats = copies.a.master.stats()
    assert stats["overdue_messages"] == stats["waiting_messages"] == 2_000
    assert stats["overdue_subjects"]["stuck"][0] == 2_000
    others = put(copies, producer, 200, subject="others")
    assert copies.senders.delivered() == others, "a subject that can be sent waits for none that cannot"
    copies.senders.routeless.clear()
    while copies.a.master.stats()["waiting_messages"]:
        copies.run(1_000)
        assert in_memory(copies) <= MOST
    assert copies.senders.delivered() == others + stuck, "each once, in the order in which they came due"
    assert copies.a.master.stats()["due_on_disk_messages"] == 0


def test_leftover_can_be_cancelled_and_rescheduled():
    copies, producer = a_group(loaded_messages_max=MOST)
    copies.senders.routeless.add("s")
    ids = put(copies, producer, 500, subject="s")
    cancelled = producer.cancel(*ids[400:450])
    moved = producer.reschedule(ids[499], copies.now_ms + HOUR_MS)
    copies.run(1_000)
    assert producer.fates(cancelled) == ["cancelled"] * 50 and producer.fate(moved) == "rescheduled"
    assert copies.a.master.stats()["waiting_messages"] == 449
    copies.senders.routeless.clear()
    copies.run(30_000, step_ms=500)
    assert sorted(copies.senders.delivered()) == sorted(ids[:400] + ids[450:499])
    copies.run(HOUR_MS, step_ms=60_000)
    assert copies.senders.delivered()[-1] == ids[499]


class SlowReads:
    """Reads of leftover pages that end when a test releases them; other reads run at once."""

    def __init__(self, rng, monkeypatch):
        self._rng = rng
        self._held = deque()
        monkeypatch.setattr(FakeHost, "read", lambda host, job, done: self._read(host, job, done))

    def _read(self, host, job, done):
        if not isinstance(job, PendingOf):
            host.reads.append((job, done))
        elif self._rng.random() < 0.5:
            found = job()
            self._held.append((lambda: found, done))
        else:
            self._held.append((job, done))

    def release(self):
        if self._held:
            job, done = self._held.popleft()
            done(job())


@pytest.mark.parametrize("seed", range(12))
def test_each_message_is_sent_once_with_leftovers(seed, monkeypatch):
    rng = Random(seed)
    reads = SlowReads(rng, monkeypatch)
    monkeypatch.setattr(pending_queue, "BACK_MAX", rng.choice((3, 20, 1000)))
    copies, producer = a_group("g1", "g2", loaded_messages_max=rng.choice((20, 80)))
    names, sent, cancels = ["a", "b", "c"], list[str](), list[tuple[str, int]]()
    for step in range(40):
        subject = rng.choice(names)
        match rng.choice(("put", "put", "late", "cancel", "move", "block", "free", "group", "restart")):
            case "put" | "late" as how:
                late_ms = -rng.randrange(1, 5_000) if how == "late" else rng.randrange(3_000)
                sent += put(copies, producer, rng.randrange(1, 40), subject=subject, at_ms=late_ms, name=f"{step}")
            case "cancel" if sent:
                id = rng.choice(sent)
                cancels += [(id, producer.cancel(id, subject=name)) for name in names]
            case "move" if sent:
                producer.reschedule(rng.choice(sent), copies.now_ms + rng.randrange(5_000), subject=subject)
            case "block":
                copies.senders.routeless.add(subject)
            case "free":
                copies.senders.routeless.discard(subject)
            case "group":
                copies.senders.up["g1"] = not copies.senders.up["g1"]
            case "restart" if step % 4 == 0:
                copies.restart()
                producer = type(producer)(copies.a)
        if rng.random() < 0.5:
            reads.release()
        copies.run(rng.choice((100, 100, 1_500)))
    copies.senders.routeless.clear()
    copies.senders.up["g1"] = True
    for _ in range(400):
        reads.release()
        copies.run(500, step_ms=500)
        if not copies.a.filing.schedule.pending_messages:
            break
    assert copies.a.filing.schedule.pending_messages == 0
    assert copies.a.master.stats()["due_on_disk_messages"] == 0
    delivered = sorted(copies.senders.delivered())
    assert delivered == sorted(set(delivered)), "none twice"
    assert set(sent) - set(delivered) <= {id for id, _ in cancels}, "none lost"


class World:
    """Leftovers alone: a schedule with scripted results, and one queue per subject."""

    def __init__(self, most):
        self.found = no_records()
        self.asked = []
        self.named = set()
        self.queues = {}
        self.schedule = self
        self.leftovers = Leftovers(self, self, self, most, lambda subject: self.queues[subject].count)

    def pending_of(self, begins, end_ms, most):
        self.asked.append(begins)
        return lambda: self.found[:most]

    def pending_among(self, records):
        return records

    def not_named(self, records):
        return records[[number not in self.named for number in records["number"].tolist()]]

    def read(self, job, done):
        self.done = lambda: done(job())

    def pass_soon(self):
        pass

    def due(self, subject, *dues):
        """Take these off the wheel; return those that go into the queue."""
        records = self.leftovers.arrived(subject, records_of(subject, *dues))
        queue = self.queues.setdefault(subject, PendingQueue(str(subject)))
        if len(records):
            queue.put(records, (), lambda label: None)
        self.leftovers.make_room(self.queues.items())
        return records["due"].tolist()

    def send(self, subject):
        """Empty the queue."""
        self.queues[subject] = PendingQueue(str(subject))
        self.leftovers.ran_low(subject, 0)

    def go_on(self):
        back = self.leftovers.go_on(1_000, all_taken=True)
        return [(int(one["subject"]), int(one["due"])) for one in back]


def records_of(subject, *dues):
    records = np.zeros(len(dues), RECORD)
    records["due"], records["subject"] = dues, subject
    records["number"] = records["due"] + 10_000 * subject
    return records


def two_cut_subjects():
    """Everything of subject 1 from 15 on is on disk, and of subject 2 from 115 on."""
    world = World(20)
    world.due(1, *range(10, 40))
    world.due(2, *range(110, 140))
    begins = {subject: begin for subject, _, begin in world.leftovers.parts()}
    for subject in (1, 2):
        world.send(subject)
    world.go_on()
    assert world.asked == [{1: (begins[1], begins[1] + 10_000), 2: (begins[2], begins[2] + 20_000)}]
    return world, begins


def test_page_moves_only_the_subjects_it_reached():
    world, begins = two_cut_subjects()
    world.found = records_of(1, *range(begins[1], begins[1] + 5))
    world.done()
    assert [due for _, due in world.go_on()] == list(range(begins[1], begins[1] + 5))
    assert world.due(2, begins[2] - 1) == [begins[2] - 1], "what lies before is in memory"
    assert world.due(2, begins[2]) == [] and world.due(1, begins[1] + 4) == [begins[1] + 4]


def test_messages_off_the_wheel_during_a_read_return_once():
    world, begins = two_cut_subjects()
    world.found = records_of(1, begins[1], begins[1] + 1)
    assert world.due(1, begins[1] + 1, begins[1] + 2) == []
    world.done()
    assert world.go_on() == [(1, begins[1]), (1, begins[1] + 1), (1, begins[1] + 2)]
    assert world.leftovers.is_empty


def test_decided_messages_do_not_return():
    world, begins = two_cut_subjects()
    world.found = records_of(1, begins[1], begins[1] + 1)
    world.done()
    world.named = {begins[1] + 10_000}
    assert world.go_on() == [(1, begins[1] + 1)]


def test_leftovers_return_after_the_wheel_is_empty():
    world, begins = two_cut_subjects()
    world.found = records_of(1, begins[1])
    world.done()
    assert not len(world.leftovers.go_on(1_000, all_taken=False))
    assert world.go_on() == [(1, begins[1])]
