"""Core. Frames parsed many at a time equal those parsed one by one, up to the first invalid one."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any
from zlib import crc32

import pytest

from qmq.audit import facts
from qmq.audit.facts import Gathering, PieceFacts
from qmq.audit.frame_order import FrameOrder
from qmq.audit.headers import no_messages, whole_frames
from qmq.audit.walk import Window
from qmq.errors import CorruptFrame
from qmq.log.frame import NO_CHAIN, Frame, FrameKind, check_body, decode_header, encode_header, subject_field
from qmq.types import Epoch
from tests.unit.audit.logs import BEGIN_MS

Change = dict[str, Any]


def log_of(frames: int = 40, subjects: int = 1, **changed: Change) -> bytes:
    """Return a log with frames of one message, of each subject in turn. `changed`: fields to replace in a frame, with
    valid CRCs.
    """
    data, chain, sequences = b"", NO_CHAIN, [0] * subjects
    for number in range(frames):
        turn = number % subjects
        fields: Change = {
            "kind": FrameKind.MESSAGES if number else FrameKind.EPOCH,
            "flags": 0,
            "subject": f"order.changed{turn}" if number else "",
            "count": min(number, 1),
            "epoch": Epoch(1, 1),
            "offset": len(data),
            "high_watermark": len(data),
            "timestamp_ms": BEGIN_MS + 100_000 * number,
            "first_sequence": sequences[turn],
            "producer": 7,
            "batch": number,
            "previous_chain": chain,
            "body": b"%08d" % number * 4,
        } | changed.get(f"at_{number}", {})
        body = fields.pop("body")
        field = subject_field(fields["subject"])
        head, frame = encode_header(field=field, body_bytes=len(body), body_crc=crc32(body), **fields)
        data, chain, sequences[turn] = data + head + body, frame.chain, frame.first_sequence + frame.count
    return data


def one_by_one(data: bytes, chain: int | None, *, without_messages: bool = False) -> list[Frame]:
    found: list[Frame] = []
    at = 0
    try:
        while at < len(data):
            frame = decode_header(data, at, at, chain)
            if frame.end > len(data):
                break
            if frame.kind != FrameKind.MESSAGES or not without_messages:
                check_body(frame, data[at + frame.body_at : frame.end])
            found.append(frame)
            at, chain = frame.end, frame.chain
    except CorruptFrame:
        pass
    return found


def same(data: bytes, chain: int | None = NO_CHAIN) -> int:
    found = whole_frames(memoryview(data), 0, len(data), chain)
    assert found == one_by_one(data, chain)
    only = whole_frames(memoryview(data), 0, len(data), chain, bodies=no_messages)
    assert only == one_by_one(data, chain, without_messages=True)
    return len(found)


def test_bulk_parser_equals_decode_header_under_damage() -> None:
    data, rng = log_of(), Random(3)
    assert same(data) == same(data, None) == 40
    for at in [*range(2 * 136), *(rng.randrange(len(data)) for _ in range(200))]:
        changed = bytearray(data)
        changed[at] ^= 1 << rng.randrange(8)
        assert same(bytes(changed)) < 40
    for _ in range(100):
        assert same(data[: rng.randrange(len(data))]) < 40


@pytest.mark.parametrize(
    "change",
    [
        {"previous_chain": 5},
        {"offset": 8},
        {"kind": 11},
        {"body": b"four"},
    ],
    ids=["another chain", "another offset", "an unknown kind", "a body of another size"],
)
def test_invalid_frame_with_valid_checksums_is_rejected(change: Change) -> None:
    assert same(log_of(at_20=change)) == 20


def test_frames_behind_the_end_are_not_taken() -> None:
    data = log_of()
    frames = one_by_one(data, NO_CHAIN)
    assert whole_frames(memoryview(data), 0, frames[10].offset, NO_CHAIN) == frames[:10]
    assert whole_frames(memoryview(data)[frames[3].offset :], frames[3].offset, len(data), None) == frames[3:]


def gathered(data: bytes) -> PieceFacts:
    gathering = Gathering(BEGIN_MS + 10_000_000)
    gathering.take(Window(0, memoryview(data), one_by_one(data, None)))
    return gathering.facts()


WRONG: dict[str, tuple[str, Change]] = {
    "a watermark behind its frame": ("watermark", {"high_watermark": 1 << 40}),
    "a watermark that goes back": ("watermark", {"high_watermark": 8}),
    "a time to come": ("time", {"timestamp_ms": BEGIN_MS + 20_000_000}),
    "a time that goes back": ("time", {"timestamp_ms": BEGIN_MS}),
    "a gap": ("sequence", {"first_sequence": 77}),
    "an epoch nobody began": ("epoch_frame", {"epoch": Epoch(2, 1)}),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize(("at", "subjects"), [(2, 1), (30, 1), (59, 1), (5, 3), (59, 3)])
def test_problem_among_many_frames_equals_that_of_one(
    name: str, at: int, subjects: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, change = WRONG[name]
    data = log_of(60, subjects, **{f"at_{at}": change})
    found = gathered(data)
    monkeypatch.setattr(facts, "ALIKE_MIN", 1 << 30)
    assert found == gathered(data)
    assert kind in {problem["what"] for problem in found.problems}


@pytest.mark.parametrize("subjects", [1, 2, 50])
def test_valid_frames_are_taken_at_once(subjects: int, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    take: Callable[[FrameOrder, list[Frame]], bool] = FrameOrder.take
    monkeypatch.setattr(FrameOrder, "take", lambda line, frames: taken.append(len(frames)) or take(line, frames))
    data = log_of(200, subjects)
    found = gathered(data)
    monkeypatch.setattr(facts, "ALIKE_MIN", 1 << 30)
    assert found == gathered(data)
    assert taken == [198] and len({hour for _, hours in found.subjects.values() for hour in hours}) == 6
