"""Core. Tags and labels: rules, readings, and bounds of the cache."""

from __future__ import annotations

from array import array
from types import SimpleNamespace

import pytest

from qmq.broker import labels
from qmq.broker.labels import (
    ENTRY_BYTES,
    NO_LABELS,
    LabelCache,
    LabelsRead,
    TagRule,
    labels_of,
    read_labels_of,
    tag_words,
)
from qmq.codec import encode_labels, encode_message, join_batch, label_of, split_batch
from qmq.log.frame import FLAG_LABELLED, FrameKind
from qmq.log.index import FrameRef
from qmq.message import Message
from tests.unit.broker.world import id_of
from tests.unit.log.logs import Copy

LONG = b"x" * 300


def string(data: bytes) -> bytes:
    return len(data).to_bytes(2, "big") + data


def encoded(*tags: bytes, flags: int = 4) -> bytes:
    """Encode a message up to its tags."""
    times = bytes(16)
    return bytes([flags]) + times + string(LONG) + string(LONG) + bytes([len(tags)]) + b"".join(map(string, tags))


@pytest.mark.parametrize("tags", [(), (b"a",), (LONG, b"b", b"")])
def test_cut_messages_have_no_tags(tags):
    message = encoded(*tags)
    for size in range(len(message) + 9):
        found = tag_words((message + bytes(9))[:size])
        assert tuple(found) == (tags if size >= len(message) else ()), size


@pytest.mark.parametrize(("flags", "expected"), [(0, ()), (3, ()), (7, (b"a",))])
def test_only_flagged_messages_have_tags(flags, expected):
    assert tuple(tag_words(encoded(b"a", flags=flags))) == expected


@pytest.mark.parametrize(
    ("asked", "is_all", "expected"),
    [
        (["a", "b"], False, [True, True, True, False]),
        (["a", "b"], True, [False, False, True, False]),
        (["a"], True, [True, False, True, False]),
    ],
)
def test_rule_matches_any_or_all_words(asked, is_all, expected):
    rule = TagRule.of(asked, is_all=is_all)
    assert [rule.matches(encoded(*tags)) for tags in ((b"a",), (b"b",), (b"a", b"b", b"c"), (b"c",))] == expected


def test_equivalent_rules_are_equal():
    assert TagRule.of(["a"], is_all=True) == TagRule.of(["a"], is_all=False)
    assert TagRule.of(["a", "b"], is_all=True) == TagRule.of(["b", "a"], is_all=True)
    assert TagRule.of(["a", "b"], is_all=True) != TagRule.of(["a", "b"], is_all=False)
    assert TagRule.of([], is_all=True) is None


PAY, CANCEL = frozenset({"pay"}), frozenset({"cancel"})
RULE = TagRule.of(PAY, is_all=False)


def stored(*frames: list[frozenset[str]], labelled: bool = True) -> tuple[Copy, list[FrameRef]]:
    """Return a log with these batches, none in its tail; messages are named m<sequence>."""
    copy = Copy.begun(tail_bytes=0)
    for tags in frames:
        first = copy.log.state.next_sequence.get("s", 0)
        some = [Message("s", tags=one, id=f"m{first + at}") for at, one in enumerate(tags)]
        body = join_batch([encode_message(message, 0) for message in some])
        body += encode_labels([label_of(tag, None) for tag in tags]) if labelled else b""
        flags = FLAG_LABELLED if labelled else 0
        copy.append(FrameKind.MESSAGES, "s", body, count=len(tags), first_sequence=first, flags=flags)
        copy.flush()
    return copy, copy.log.frames("s", 0, len(frames))


def ids(read: LabelsRead) -> dict[int, list[str]]:
    """Return, by the frame's first sequence, the ids of its messages; empty if left out."""
    return {
        frame.first_sequence: [id_of(bytes(data)) if data else "" for data in split_batch(body, frame.count)]
        for frame, body in read.bodies.values()
    }


BATCHES = [PAY, CANCEL, PAY], [CANCEL], [PAY, PAY], [CANCEL, PAY]


@pytest.mark.parametrize("labelled", [True, False], ids=["labelled", "unlabelled"])
def test_reading_returns_labels_and_matches(labelled):
    copy, refs = stored(*BATCHES, labelled=labelled)
    read = read_labels_of(copy.log, refs, RULE)
    there = {0: ["m0", "", "m2"], 4: ["m4", "m5"], 6: ["", "m7"]}
    assert ids(read) == (there if labelled else there | {3: [""]}) and read.rule == RULE
    batches = [array("Q", [label_of(tag, None) for tag in tags]) if labelled else NO_LABELS for tags in BATCHES]
    assert read.labels == dict(zip((ref.offset for ref in refs), batches, strict=True))
    assert read.bodies[refs[2].offset] == copy.log.stored.read_bodies([refs[2]])[0], (
        "all of it matches: it stays as it is"
    )
    assert len(read.bodies[refs[0].offset][1]) < refs[0].length - 100, "what does not match costs no memory"


def test_without_tags_no_body_is_read():
    copy, refs = stored(*BATCHES)
    read = read_labels_of(copy.log, refs, None)
    assert len(read.labels) == 4 and read.bodies == {} and read.rule is None


@pytest.mark.parametrize(("room", "expected"), [(-1, [0]), (0, [0, 4]), (1, [0, 4])])
def test_reading_is_bounded_in_bytes(monkeypatch, room, expected):
    copy, refs = stored(*BATCHES)
    monkeypatch.setattr(labels, "READ_BYTES_MAX", refs[0].length + refs[2].length + room)
    assert list(ids(read_labels_of(copy.log, refs, RULE))) == expected
    monkeypatch.setattr(labels, "READ_BYTES_MAX", 1)
    assert list(ids(read_labels_of(copy.log, refs[2:], RULE))) == [4]


def test_damaged_labels_are_none():
    frame = SimpleNamespace(flags=FLAG_LABELLED, count=1)
    whole = encode_labels([7])
    assert labels_of(frame, whole) == array("Q", [7])
    assert labels_of(frame, whole[:-1] + b"?") == NO_LABELS
    assert labels_of(SimpleNamespace(flags=0, count=1), whole) == NO_LABELS


TEN = array("Q", range(10))
COST = 8 * len(TEN) + ENTRY_BYTES


def cache(monkeypatch, *, label_bytes: int = 0, body_bytes: int = 0) -> LabelCache:
    monkeypatch.setattr(labels, "LABEL_BYTES_MAX", label_bytes)
    monkeypatch.setattr(labels, "BODY_BYTES_MAX", body_bytes)
    return LabelCache(SimpleNamespace(tail_body=lambda offset: None))


def took(made: LabelCache, *offsets: int) -> None:
    made.add(LabelsRead(None, dict.fromkeys(offsets, TEN), {}))


def kept(made: LabelCache) -> list[int]:
    return [offset for offset in range(9) if made.labels(FrameRef(0, 10, offset, 0)) is not None]


@pytest.mark.parametrize(("room", "expected"), [(0, [1, 3]), (-1, [3])])
def test_least_recently_used_leave_first(monkeypatch, room, expected):
    made = cache(monkeypatch, label_bytes=2 * COST + room)
    took(made, 1)
    took(made, 2)
    assert made.labels(FrameRef(0, 10, 1, 0)) == (TEN if room == 0 else None)
    took(made, 3)
    assert kept(made) == expected


def test_last_reading_stays_however_large(monkeypatch):
    made = cache(monkeypatch, label_bytes=2 * COST)
    took(made, 1)
    took(made, 2, 3, 4)
    assert kept(made) == [2, 3, 4]
    took(made, 5)
    assert kept(made) == [4, 5]


def test_frame_read_again_counts_once(monkeypatch):
    made = cache(monkeypatch, label_bytes=2 * COST)
    for _ in range(5):
        took(made, 1)
    took(made, 2)
    assert kept(made) == [1, 2]


def test_bodies_are_cached_per_rule(monkeypatch):
    other, made = TagRule.of(CANCEL, is_all=False), cache(monkeypatch, body_bytes=100)
    body = SimpleNamespace(), bytes(50)
    for offset in range(3):
        made.add(LabelsRead(RULE, {}, {offset: body}))
    refs = [FrameRef(0, 1, offset, 0) for offset in range(3)]
    assert [made.body(ref, RULE) for ref in refs] == [None, body, body]
    assert [made.body(ref, other) for ref in refs] == [None] * 3
