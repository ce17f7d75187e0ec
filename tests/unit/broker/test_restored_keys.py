"""Core. Order keys restored from unsettled messages equal those of a message-by-message search."""

from __future__ import annotations

from itertools import groupby
from random import Random

import pytest

from qmq.broker.group_filter import GroupFilter, frames_of, restore_keys
from qmq.broker.labels import LabelCache, read_labels_of
from qmq.codec import encode_labels, encode_message, join_batch, label_of
from qmq.log.frame import FLAG_LABELLED, FLAG_ORDERED, FrameKind
from qmq.log.group import Consumer, Group, UnackedRange
from qmq.log.requeued import Requeued, RequeuedRange
from qmq.message import Message
from tests.unit.log.logs import Copy


def stored(copy: Copy, keys: list[str | None], *, labelled: bool) -> None:
    """Append one batch with these order keys."""
    first = copy.log.state.next_sequence.get("s", 0)
    body, flags = join_batch([encode_message(Message("s", id=f"m{first + at}"), 0) for at in range(len(keys))]), 0
    if labelled:
        body += encode_labels([label_of((), key) for key in keys])
        flags = FLAG_LABELLED | (FLAG_ORDERED if any(keys) else 0)
    copy.append(FrameKind.MESSAGES, "s", body, count=len(keys), first_sequence=first, flags=flags)
    copy.flush()


def a_log(rng: Random) -> tuple[Copy, list[int]]:
    """Return a log, and the key of each message, 0 without one; retention may have deleted some."""
    copy, keys = Copy(tail_bytes=rng.choice([0, 1 << 20]), segment_bytes=1 << 16), list[str | None]()
    copy.begin_epoch()
    for _ in range(8):
        labelled = rng.random() < 0.7
        some = [rng.choice([None, "a", "b", "c"]) if labelled else None for _ in range(rng.randint(1, 4))]
        stored(copy, some, labelled=labelled)
        keys += some
    refs = copy.log.frames("s", 0, 8)
    copy.log.state.kept.start = refs[rng.choice([0, 0, 1, 2])].offset
    first = copy.log.frames("s", 0, 1)[0].begin
    return copy, [label_of((), key) >> 32 if at >= first else 0 for at, key in enumerate(keys)]


def runs_of(places: list[int]) -> list[tuple[int, int]]:
    """Return ranges (first, count) of these places."""
    runs = [[at for _, at in run] for _, run in groupby(enumerate(places), lambda pair: pair[1] - pair[0])]
    return [(run[0], len(run)) for run in runs]


@pytest.mark.parametrize("seed", range(40))
def test_restored_keys_equal_a_full_search(seed):
    rng = Random(seed)
    copy, keys = a_log(rng)
    whose = [rng.choice(["c1", "c2", "due", "later", "settled"]) for _ in keys]
    group, pull = Group(len(keys)), 0
    for name in ("c1", "c2"):
        group.consumers[name] = consumer = Consumer()
        for first, count in runs_of([at for at, holder in enumerate(whose) if holder == name]):
            consumer.unacked.append(UnackedRange(pull, first, count, 1))
            pull += count + 1
    group.requeued = Requeued()
    for name, due_ms in (("due", 0), ("later", 9_000)):
        for first, count in runs_of([at for at, holder in enumerate(whose) if holder == name]):
            group.requeued.add(RequeuedRange(first, count, 1, due_ms))
    copy.log.state.groups["s", "g"] = group

    group_filter, cache = GroupFilter("s", "g"), LabelCache(copy.log)
    while missing := restore_keys(group_filter, copy.log, cache):
        assert group_filter.keys is None and missing == sorted(missing, key=lambda ref: ref.offset)
        assert all(any(holder != "settled" for holder in whose[ref.begin : ref.end]) for ref in missing)
        assert not group_filter.labels_before, "they are asked for once"
        assert all(copy.log.tail_body(ref.offset) is None for ref in missing)
        group_filter.labels_before |= read_labels_of(copy.log, missing, None).labels
    made = group_filter.keys
    assert restore_keys(group_filter, copy.log, cache) == [] and group_filter.keys is made
    assert not group_filter.labels_before

    lines: dict[int, list[int]] = {}
    ready = []
    for at, key in enumerate(keys):
        if key and whose[at] in ("c1", "c2"):
            lines.setdefault(key, [at])
    for at, key in enumerate(keys):
        if whose[at] in ("due", "later"):
            if key and key in lines:
                lines[key].append(at)
                continue
            if key:
                lines[key] = [at]
            ready.append((at, whose[at]))
    now = [(at, "due") for begin, end in until_empty(group_filter, 0) for at in range(begin, end)]
    then = [(at, "later") for begin, end in until_empty(group_filter, 9_000) for at in range(begin, end)]
    assert sorted(now + then) == ready
    assert group_filter.keys.deferred == sum(len(line) - 1 for line in lines.values())
    assert len(group_filter.keys) == len(lines)
    for at, key in enumerate(keys):
        if key and whose[at] in ("c1", "c2") and lines[key][0] != at:
            assert made.settled(at) is None and made.is_busy(key), "another one that is delivered holds its key"
    for line in lines.values():
        assert [group_filter.keys.settled(at) for at in line] == [*line[1:], None]


def test_labels_before_the_first_key_are_not_read():
    copy = Copy.begun(tail_bytes=0)
    for some in ([None, None], [None], ["a", "b"]):
        stored(copy, some, labelled=some[0] is not None)
    waiting = Requeued([RequeuedRange(0, 3, 1, 0)])
    copy.log.state.groups["s", "g"] = Group(5, requeued=waiting)
    group_filter = GroupFilter("s", "g")
    assert restore_keys(group_filter, copy.log, LabelCache(copy.log)) == []
    assert until_empty(group_filter, 0) == [(0, 3)]


def until_empty(group_filter: GroupFilter, now_ms: int) -> list[tuple[int, int]]:
    found = []
    while (ready := group_filter.pop_ready(now_ms)) is not None:
        found.append(ready)
    return found


@pytest.mark.parametrize(
    ("begin", "end", "expected"), [(0, 2, [0]), (1, 3, [0, 2]), (2, 6, [2, 4]), (3, 99, [2, 4, 6])]
)
def test_frames_of_a_range_overlap_it(monkeypatch, begin, end, expected):
    copy = Copy.begun()
    for _ in range(4):
        stored(copy, [None, None], labelled=False)
    monkeypatch.setattr("qmq.broker.group_filter.FRAMES_AT_ONCE", 1)
    assert [ref.begin for ref in frames_of(copy.log, "s", begin, end)] == expected
    assert list(frames_of(copy.log, "s", 8, 9)) == list(frames_of(copy.log, "s", 3, 3)) == []
