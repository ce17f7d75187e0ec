"""Core. Browsing stored messages: results, order, bounds."""

from __future__ import annotations

from random import Random

import pytest

from qmq.broker import browse
from qmq.broker.browse import Bodies, Browse, Filter, visible_end
from qmq.broker.positions import borders
from qmq.codec import encode_message, join_batch, with_properties
from qmq.errors import InvalidName, InvalidRequest
from qmq.log.frame import FrameKind
from qmq.message import CONTENT_ENCODING, Message
from qmq.zstd import BLOCK_BYTES
from tests.unit.log.logs import Copy

END = 1 << 63


def add(copy: Copy, *messages: Message, timestamp_ms: int = 5):
    """Append one batch, and make it durable."""
    return append(copy, messages[0].subject, [encode_message(message, 77) for message in messages], timestamp_ms)


def append(copy: Copy, subject: str, messages: list[bytes], timestamp_ms: int = 5):
    first = copy.log.state.next_sequence.get(subject, 0)
    frame = copy.append(
        FrameKind.MESSAGES,
        subject,
        join_batch(messages),
        count=len(messages),
        first_sequence=first,
        timestamp_ms=timestamp_ms,
    )
    copy.flush()
    return frame


def order(id: str, tags=(), subject: str = "s", **properties) -> Message:
    return Message(subject, properties, tags=tags, id=id)


def step(call: Browse) -> None:
    """Take one step, as the broker does: frames in the tail are not read from disk."""
    refs = call.next_frames()
    in_tail = {ref.offset: found for ref in refs if (found := call.log.tail_body(ref.offset)) is not None}
    read = {
        frame.offset: (frame, body)
        for frame, body in call.log.stored.read_bodies([r for r in refs if r.offset not in in_tail])
    }
    for _ in call.look_through([(in_tail | read)[ref.offset] for ref in refs]):
        pass


def look(copy: Copy, begin: int = 0, end: int = END, *, limit: int | None = None, **options) -> Browse:
    """Run one call to its end."""
    call = Browse(copy.log, "s", copy.log.end if limit is None else limit, begin, end, **options)
    while not call.is_over:
        step(call)
    return call


def all_ids(copy: Copy, **options) -> list[str]:
    """Repeat calls until nothing is left."""
    found, begin, end = [], 0, END
    while begin < end:
        call = look(copy, begin, end, **options)
        found += [message.id for message in call.found]
        begin, end = call.begin, call.end
    return found


def test_message_is_shown_with_its_place():
    copy = Copy.begun()
    add(copy, order("m0"))
    frame = add(copy, order("m1"), order("m2", ["b", "a"], orderNo=7, paid=True), timestamp_ms=1_234)
    shown = look(copy).found[2]
    assert (shown.sequence, shown.offset, shown.stored_ms, shown.created_ms) == (2, frame.offset, 1_234, 77)
    assert (shown.id, shown.tags, shown.properties) == (
        "m2",
        ("a", "b"),
        {"orderNo": "7", "paid": "true", "qmq_types": "ib"},
    )
    assert shown.bytes == len(encode_message(order("m2", ["b", "a"], orderNo=7, paid=True), 77)) and not shown.problem


def test_requested_part_of_each_body_is_returned():
    copy = Copy.begun()
    packed = b"\x28" * 500_000
    add(copy, Message("s", {}, body=b"0123456789", id="m0"), Message("s", {}, body=b"", id="m1"), order("m2"))
    encoded = with_properties(encode_message(Message("s", {}, body=packed, id="m3"), 77), {CONTENT_ENCODING: "zstd"})
    append(copy, "s", [encoded])
    sizes = [10, 0, None, len(packed)]
    for bodies, expected in (
        (Bodies(), [b"", b"", b"", b""]),
        (Bodies(0, 4), [b"0123", b"", b"", packed[:BLOCK_BYTES]]),
        (Bodies(8, 1 << 40), [b"89", b"", b"", packed[8:]]),
        (Bodies(1 << 62, 4), [b"", b"", b"", b""]),
    ):
        found = look(copy, bodies=bodies).found
        assert [message.body_bytes for message in found] == sizes and [message.body for message in found] == expected


def test_unsent_bodies_leave_room_for_more_messages(monkeypatch):
    copy = Copy.begun()
    for at in range(5):
        add(copy, Message("s", {}, body=bytes(3_000), id=f"m{at}"))
    monkeypatch.setattr(browse, "ANSWER_BYTES_MAX", 3_500)
    monkeypatch.setattr(browse, "BODY_BYTES_MAX", 2_000)
    assert len(look(copy).found) == 5 and len(look(copy, bodies=Bodies(0, 100)).found) == 5
    whole = look(copy, bodies=Bodies(0, 9_000))
    assert [len(message.body) for message in whole.found] == [2_000] and whole.begin == 1
    assert all_ids(copy, bodies=Bodies(0, 9_000)) == [f"m{at}" for at in range(5)]


@pytest.mark.parametrize("newest_first", [False, True], ids=["oldest first", "newest first"])
@pytest.mark.parametrize("tail_bytes", [0, 1 << 20], ids=["from disk", "from memory"])
@pytest.mark.parametrize("seed", range(8))
def test_repeated_calls_show_each_message_once(newest_first, tail_bytes, seed, monkeypatch):
    rng, copy = Random(seed), Copy.begun(tail_bytes=tail_bytes)
    monkeypatch.setattr(browse, "STEP_FRAMES", rng.choice([1, 2, 7]))
    monkeypatch.setattr(browse, "STEP_BYTES", rng.choice([1, 500, 1 << 20]))
    ids = []
    for _ in range(40):
        batch = [f"m{len(ids) + at}" for at in range(rng.randint(1, 6))]
        ids += batch
        add(copy, *[order(id, text="x" * rng.randrange(80)) for id in batch])
        add(copy, order("other", subject="t"))
    assert len(copy.log.bases) > 3
    expected = ids[::-1] if newest_first else ids
    assert all_ids(copy, newest_first=newest_first, messages_max=rng.choice([1, 3, 1_000])) == expected


@pytest.mark.parametrize("newest_first", [False, True], ids=["oldest first", "newest first"])
def test_browse_keeps_to_its_range(newest_first):
    copy = Copy.begun()
    for at in range(5):
        add(copy, *[order(f"m{at * 4 + i}") for i in range(4)])
    shown = look(copy, 3, 9, newest_first=newest_first).found
    expected = range(3, 9)
    assert [message.sequence for message in shown] == list(reversed(expected) if newest_first else expected)
    assert look(copy, 20, 30).found == [] and look(copy, 9, 3).found == []


def test_frames_without_the_filter_are_not_decoded(monkeypatch):
    copy, split, taken_apart = Copy.begun(), browse.split_batch, []
    for at in range(5):
        add(copy, order(f"a{at}"), order(f"b{at}"))
    monkeypatch.setattr(browse, "split_batch", lambda body, count: taken_apart.append(count) or split(body, count))
    assert [message.id for message in look(copy, wanted=Filter("b3")).found] == ["b3"] and taken_apart == [2]


def test_nothing_above_the_high_watermark_is_shown():
    copy = Copy.begun()
    frames = [add(copy, order(f"m{at}"), order(f"n{at}")) for at in range(9)]
    for at, frame in enumerate(frames):
        for limit in (frame.end, frame.end + 7):
            assert visible_end(copy.log, "s", limit) == 2 * at + 2
            assert len(look(copy, limit=limit).found) == 2 * at + 2
            assert look(copy, limit=limit, newest_first=True, messages_max=1).found[0].id == f"n{at}"
    assert look(copy, limit=frames[0].end - 1).found == []


@pytest.mark.parametrize(
    "wanted, expected",
    [
        (Filter(id="m1"), ["m1"]),
        (Filter(id="m"), []),
        (Filter(tags=frozenset({"paid"})), ["m1", "m2"]),
        (Filter(tags=frozenset({"paid", "late"})), ["m2"]),
        (Filter(properties={"no": "1"}), ["m0", "m2"]),
        (Filter(properties={"no": "1", "to": "x"}), ["m2"]),
        (Filter(properties={"no": ""}), []),
        (Filter(id="m2", tags=frozenset({"late"}), properties={"to": "x"}), ["m2"]),
        (Filter(id="m2", tags=frozenset({"early"})), []),
        (Filter(properties={"text": "y" * 40_000}), []),
        (Filter(properties={"text": "y" * 70_000}), []),
        (Filter(properties={"no": "1\ud800"}), []),
    ],
)
def test_matching_messages_are_found(wanted, expected):
    copy = Copy.begun()
    add(copy, order("m0", no=1), order("m1", ["paid"], no=11, text="no1"))
    add(copy, order("m2", ["paid", "late"], no=1, to="x"), order("m3", ["unpaid"], to="x", text="\0\x02no\0\x011"))
    assert all_ids(copy, wanted=wanted) == expected


def test_property_text_matches_no_id_or_tag():
    copy = Copy.begun()
    add(copy, order("m0", text="\0\x02m1\0\x04paid"), order("m1"), order("m2", ["paid"]))
    assert all_ids(copy, wanted=Filter(id="m1")) == ["m1"]
    assert all_ids(copy, wanted=Filter(tags=frozenset({"paid"}))) == ["m2"]


def test_answer_is_bounded_in_bytes(monkeypatch):
    monkeypatch.setattr(browse, "ANSWER_BYTES_MAX", 600)
    copy = Copy.begun()
    add(copy, order("big", text="x" * 900), *[order(f"m{at}", text="x" * 100) for at in range(9)])
    first = look(copy)
    assert [message.id for message in first.found] == ["big"]
    second = look(copy, first.begin, first.end)
    assert 0 < len(second.found) < 9 and sum(message.bytes for message in second.found) <= 600
    assert len(all_ids(copy)) == len(all_ids(copy, newest_first=True)) == 10


@pytest.mark.parametrize(("room", "expected"), [(0, 2), (-1, 1), (1, 2)])
def test_answer_is_filled_to_the_byte(monkeypatch, room, expected):
    copy = Copy.begun()
    add(copy, *[order(f"m{at}") for at in range(4)])
    monkeypatch.setattr(browse, "ANSWER_BYTES_MAX", 2 * len(encode_message(order("m0"), 77)) + room)
    assert len(look(copy).found) == expected


def test_browse_skips_messages_deleted_by_retention():
    copy = Copy.begun(tail_bytes=0)
    while len(copy.log.bases) < 4:
        add(copy, order(f"m{copy.log.state.next_sequence.get('s', 0)}", text="x" * 200))
    count = copy.log.state.next_sequence["s"]
    behind = Browse(copy.log, "s", copy.log.end, 0, END)
    copy.drop_oldest_segment()
    first = copy.log.frames("s", 0, 1)[0].begin
    while not behind.is_over:
        step(behind)
    assert [message.sequence for message in behind.found] == list(range(first, count)) and first > 0
    for end in (1, first):
        gone = Browse(copy.log, "s", copy.log.end, 0, end)
        assert gone.is_over and (gone.begin, gone.end) == (first, first)


def of_one_size(count: int) -> tuple[Copy, int]:
    """Return a log with this number of frames of one message, and their lengths."""
    copy = Copy.begun()
    for at in range(count):
        add(copy, order(f"m{at}"))
    return copy, copy.log.frames("s", 0, 1)[0].length


def test_browse_ends_when_retention_deletes_the_rest():
    copy, _ = of_one_size(8)
    call, search = Browse(copy.log, "s", copy.log.end, 2, END), borders(copy.log, "s")
    ref = next(search)
    copy.log.state.kept.start = copy.log.end
    assert call.next_frames() == [] and call.is_over and (call.begin, call.end) == (8, 8)
    with pytest.raises(StopIteration) as found:
        search.send(True)
    assert found.value.value == ref.end == 5


@pytest.mark.parametrize(
    ("frames", "room", "expected"), [(9, 0, 2), (9, -1, 1), (9, 1, 2), (9, -1_000, 1), (1, 0, 1), (3, 1_000, 3)]
)
def test_step_is_bounded_in_frames_and_bytes(monkeypatch, frames, room, expected):
    copy, size = of_one_size(6)
    monkeypatch.setattr(browse, "STEP_FRAMES", frames)
    monkeypatch.setattr(browse, "STEP_BYTES", 2 * size + room)
    oldest, newest = (Browse(copy.log, "s", copy.log.end, 0, END, newest_first=first) for first in (False, True))
    assert [ref.begin for ref in oldest.next_frames()] == list(range(expected))
    assert [ref.begin for ref in newest.next_frames()] == list(range(6 - expected, 6))


def test_undecodable_message_is_shown_with_the_reason():
    copy = Copy.begun()
    body = join_batch([b"\xff" * 40, encode_message(order("m1"), 0)])
    copy.append(FrameKind.MESSAGES, "s", body, count=2, first_sequence=0)
    copy.flush()
    bad, good = look(copy).found
    assert bad.problem and not bad.id and bad.bytes == 40 and good.id == "m1"
    assert all_ids(copy, wanted=Filter(id="m1")) == ["m1"]


def test_unknown_subjects_are_empty_and_illegal_ones_refused():
    copy = Copy.begun()
    assert look(copy).found == []
    with pytest.raises(InvalidName):
        Browse(copy.log, "a/b", copy.log.end, 0, END)
    for most in (0, browse.MESSAGES_MAX + 1):
        with pytest.raises(InvalidRequest, match="Request 1 to 1000"):
            look(copy, messages_max=most)


@pytest.mark.parametrize("newest_first", [False, True], ids=["oldest first", "newest first"])
def test_step_searches_all_frames_it_read(newest_first):
    copy = Copy.begun()
    for at in range(5):
        add(copy, order(f"a{at}"), order(f"b{at}"))
    call = Browse(copy.log, "s", copy.log.end, 1, 9, newest_first=newest_first, wanted=Filter("b3"))
    step(call)
    assert call.is_over and [found.sequence for found in call.found] == [7]
    assert (call.begin, call.end) == ((1, 1) if newest_first else (9, 9))


def pauses(copy: Copy, frames: int) -> int:
    call = Browse(copy.log, "s", copy.log.end, 0, END)
    refs = call.next_frames()[:frames]
    return len(list(call.look_through([copy.log.tail_body(ref.offset) for ref in refs])))


def test_search_pauses_after_its_bytes(monkeypatch):
    copy = Copy.begun()
    add(copy, order("m0", text="x" * 8))
    add(copy, order("m1", text=""))
    long, short = (len(copy.log.tail_body(ref.offset)[1]) for ref in copy.log.frames("s", 0, 2))
    assert long == short + 8
    monkeypatch.setattr(browse, "MESSAGE_COST", 100)
    counts = []
    for frames, most in ((1, long + 101), (1, long + 100), (1, long), (2, short + 101), (2, short + 100)):
        monkeypatch.setattr(browse, "PAUSE_BYTES", most)
        counts.append(pauses(copy, frames))
    assert counts == [0, 1, 2, 1, 2]
