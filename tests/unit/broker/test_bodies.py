"""Frames on their way from the disk to answers: read once for all, and cut only where a pull would get too little."""

from __future__ import annotations

from collections import deque

import pytest

from qmq.log.segments import log_name
from tests.unit.broker.test_produce import a_group

FRAMES, MESSAGES = 6, 4


@pytest.fixture
def group():
    """A group whose log has some frames of four messages each, none of them in memory."""
    group, client = a_group(tail_bytes=0, segment_bytes=1 << 20)
    for frame in range(FRAMES):
        client.produce(*[f"m{frame * MESSAGES + at}" for at in range(MESSAGES)])
        group.settle()
    return group


def ids(client, opaque):
    return [id for *_, id in client.pulled(opaque)]


def test_a_frame_is_read_once_for_all_that_want_it_at_the_same_time(group):
    one, other = group.subscribed("one", group="one"), group.subscribed("other", group="other")
    first, second, third = one.pull(most=2), one.pull(most=2), other.pull(most=3)
    reads = group.a.host.reads
    assert len(reads) == 1, "three pulls of one frame"
    group.settle()
    assert [ids(one, first), ids(one, second)] == [["m0", "m1"], ["m2", "m3"]]
    assert ids(other, third) == ["m0", "m1", "m2"]
    late = group.subscribed("late", group="late").pull(most=4)
    assert not reads and late, "it is still in memory"


def test_who_wants_a_frame_and_one_more_waits_for_both(group):
    one, other = group.subscribed("one", group="one"), group.subscribed("other", group="other")
    first, both = one.pull(most=4), other.pull(most=8)
    reads, group.a.host.reads = group.a.host.reads, deque()
    group.settle()
    assert len(reads) == 2 and not one.answered(first) and not other.answered(both)
    group.a.host.reads.append(reads.pop())
    group.settle()
    assert not other.answered(both)
    group.a.host.reads.append(reads.pop())
    group.settle()
    assert ids(one, first) == ["m0", "m1", "m2", "m3"]
    assert ids(other, both) == [f"m{n}" for n in range(8)]


def test_all_that_wait_for_a_damaged_frame_ask_again(group):
    one, other, healthy = (group.subscribed(name, group=name) for name in ("one", "other", "healthy"))
    (ref,) = group.a.log.frames("s", 0, 1)
    pulls = [(one, one.pull(most=4)), (other, other.pull(most=4))]
    group.a.disk.flip(log_name(0), 8 * (ref.offset + ref.length - 8))
    group.settle()
    assert not any(client.answered(opaque) for client, opaque in pulls)
    assert not one.link.is_open and not other.link.is_open and healthy.link.is_open


@pytest.mark.parametrize(
    "most, sizes",
    [(4, [4, 4, 4]), (5, [4, 4, 4]), (9, [8, 8, 8]), (3, [3, 3, 2, 3]), (1, [1, 1, 1]), (20, [20, 4]), (100, [24])],
)
def test_a_frame_is_cut_only_for_a_pull_that_would_get_less_than_half(group, most, sizes):
    client = group.subscribed("c", group="c")
    got = []
    for _ in sizes:
        opaque = client.pull(most=most)
        group.settle()
        got.append(len(client.pulled(opaque)))
    assert got == sizes
