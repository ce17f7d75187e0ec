"""Core. Answers to pulls: frames read once for all, cut only for small pulls, sent in the order of pull sequences."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace

import pytest

from qmq.broker import answers
from qmq.broker.answers import Bodies
from qmq.errors import CorruptFrame, LogError
from qmq.log.index import FrameRef
from tests.unit.broker.world import Client, Group, a_group

FRAMES, MESSAGES = 6, 4


@pytest.fixture
def group():
    """Return a group with frames of four messages each, none of them in memory."""
    group, client = a_group(tail_bytes=0, segment_bytes=1 << 20)
    for frame in range(FRAMES):
        client.store(*[f"m{frame * MESSAGES + at}" for at in range(MESSAGES)])
    return group


def test_frame_is_read_once_for_concurrent_pulls(group):
    reader, other = group.subscribed("one", group="one"), group.subscribed("other", group="other")
    first, second, third = reader.pull(most=2), reader.pull(most=2), other.pull(most=3)
    reads = group.a.host.reads
    assert len(reads) == 1, "three pulls of one frame"
    group.settle()
    assert [reader.ids(first), reader.ids(second)] == [["m0", "m1"], ["m2", "m3"]]
    assert other.ids(third) == ["m0", "m1", "m2"]
    late = group.subscribed("late", group="late").pull(most=4)
    assert not reads and late, "it is still in memory"


def test_answer_waits_for_both_of_its_frames(group):
    reader, other = group.subscribed("one", group="one"), group.subscribed("other", group="other")
    first, both = reader.pull(most=4), other.pull(most=8)
    reads, group.a.host.reads = group.a.host.reads, deque()
    group.settle()
    assert len(reads) == 2 and not reader.answered(first) and not other.answered(both)
    group.a.host.reads.append(reads.pop())
    group.settle()
    assert not other.answered(both)
    group.a.host.reads.append(reads.pop())
    group.settle()
    assert reader.ids(first) == ["m0", "m1", "m2", "m3"]
    assert other.ids(both) == [f"m{n}" for n in range(8)]


def test_pulls_of_a_damaged_frame_lose_their_connection(group):
    reader, other, healthy = (group.subscribed(name, group=name) for name in ("one", "other", "healthy"))
    (ref,) = group.a.log.frames("s", 0, 1)
    pulls = [(reader, reader.pull(most=4)), (other, other.pull(most=4))]
    group.a.flip(ref.offset + ref.length - 8)
    group.settle()
    assert not any(client.answered(opaque) for client, opaque in pulls)
    assert not reader.link.is_open and not other.link.is_open and healthy.link.is_open
    assert group.a.log.damage is not None and not group.a.node.writable


class Reads:
    """Log of frames of these sizes, by offset, none in its tail, and the host that reads them."""

    def __init__(self, *sizes: int) -> None:
        self.sizes, self.under_way, self.done = sizes, [], []
        self.stored = self
        self.bodies = Bodies(self, self)

    def tail_body(self, offset):
        return None

    def read_bodies(self, refs):
        return [(SimpleNamespace(offset=ref.offset), bytes(self.sizes[ref.offset])) for ref in refs]

    def read(self, job, done):
        self.under_way.append((job, done))

    def ask(self, *offsets: int) -> None:
        self.bodies.read([FrameRef(offset, offset + 1, offset, 1) for offset in offsets], self.done.append)

    def finish(self, error: LogError | None = None) -> None:
        job, done = self.under_way.pop(0)
        done(job() if error is None else error)

    @property
    def at_hand(self) -> list[int]:
        return [offset for offset in range(len(self.sizes)) if offset in self.bodies._kept]


def test_recently_used_frames_stay_cached(monkeypatch):
    monkeypatch.setattr(answers, "KEPT_BYTES", 100)
    reads = Reads(40, 60, 1, 100, 101)
    reads.ask(0, 1)
    reads.finish()
    assert reads.at_hand == [0, 1]
    for _ in range(2):
        found = reads.bodies.at_hand(0)
        assert found is not None and len(found[1]) == 40
    for offset, left in ((2, [0, 2]), (3, [3]), (4, [])):
        reads.ask(offset)
        reads.finish()
        assert reads.at_hand == left


def test_failed_read_is_reported_once_per_answer():
    reads, error = Reads(1, 1, 1), CorruptFrame(0, "flipped")
    reads.ask(0)
    reads.ask(1)
    reads.ask(0, 1, 2)
    assert len(reads.under_way) == 3, "each frame is read once"
    reads.finish(error)
    assert reads.done == [error, error]
    reads.finish()
    assert len(reads.done) == 3 and [frame.offset for frame, _ in reads.done[2]] == [1]
    reads.finish(error)
    assert len(reads.done) == 3
    reads.ask(0)
    reads.finish()
    assert len(reads.done) == 4, "it can be asked for again"


def test_disk_failure_while_reading_bodies_ends_the_process(group):
    group.subscribed("one", group="one").pull(most=4)
    _, done = group.a.host.reads.popleft()
    with pytest.raises(LogError):
        done(LogError("the disk is gone"))


def held_back_reads() -> tuple[Group, Client, list[int]]:
    """Return a client with three pulls of one message each; their frames are being read from disk."""
    group = Group.made(tail_bytes=0).start()
    client = group.client()
    for number in range(3):
        client.store(f"m{number}")
    client.store("other", subject="other")
    client.join()
    pulls = [client.pull(most=1, timeout_ms=1_000) for _ in range(3)]
    group.a.host.holds_reads = True
    group.settle()
    group.a.host.holds_reads = False
    assert len(group.a.host.reads) == 3, "all three are read from disk"
    return group, client, pulls


@pytest.mark.parametrize("turns", [0, 1, 2], ids=["in order", "last first", "middle first"])
def test_overtaking_reads_do_not_reorder_answers(turns):
    group, client, pulls = held_back_reads()
    before = len(client.link.order)
    group.a.host.reads.rotate(turns)
    group.settle()
    assert client.link.order[before:] == pulls
    assert [client.pulled(pull)[0][2] for pull in pulls] == ["m0", "m1", "m2"]


def test_answer_from_memory_waits_for_earlier_ones():
    group, client, pulls = held_back_reads()
    group.a.host.holds_reads = True
    later = client.pull(most=1, timeout_ms=1_000)
    client.store("m3")
    assert not client.answered(later), "its messages come after those that are still being read"
    group.a.host.holds_reads = False
    group.settle()
    assert client.link.order[-4:] == [*pulls, later]


def test_answer_waits_for_its_frames_on_both_copies():
    group = Group.made().start()
    client = group.client()
    client.produce("m0")
    client.join()
    pull = client.pull()
    (subscription,) = group.a.master.subscriptions
    group.a.host.settle()
    assert not client.answered(pull) and subscription.in_flight == 1 and client.link.owed_bytes > 0
    group.settle()
    assert client.pulled(pull)[0][2] == "m0" and subscription.in_flight == client.link.owed_bytes == 0


def test_safe_answer_releases_no_unsafe_one():
    group = Group.made().start()
    client = group.client()
    client.produce("m0", "m1")
    client.join()
    first = client.pull(most=1)
    group.a.host.settle()
    while group.to_slave():
        group.b.host.settle()
    second = client.pull(most=1)
    group.a.host.settle()
    while group.to_master():
        pass
    assert client.answered(first) and not client.answered(second)
    group.settle()
    assert [client.pulled(pull)[0][2] for pull in (first, second)] == ["m0", "m1"]
