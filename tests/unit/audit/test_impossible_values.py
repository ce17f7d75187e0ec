"""Shell. A frame with impossible values and valid CRCs and chain is a finding, and ends no audit."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest

from qmq.audit.data_source import TableReader
from qmq.audit.headers import NUMBER_MAX
from qmq.audit.report import as_markdown
from qmq.codec import encode_message, join_batch
from qmq.log.delay_frames import encode_dispatch, encode_places
from qmq.log.frame import FrameKind
from qmq.log.retention import RetentionDecision, encode_retention
from qmq.message import Message
from tests.unit.audit.divergences import TEN_YEARS_MS, frame_of, in_place_of, nth
from tests.unit.audit.forged import A, Draft, forged, write_world
from tests.unit.audit.logs import LogWriter
from tests.unit.audit.without_spark import COPIES, audit, named

KEPT, ALL_KEPT = RetentionDecision(1 << 70, "", {}, {}), RetentionDecision(0, "", {}, {})
Wrong = Callable[[list[Draft]], Draft]


def header(**fields: int) -> Wrong:
    def change(frames: list[Draft]) -> Draft:
        frame = frame_of(frames, A, 25)
        for name, value in fields.items():
            setattr(frame, name, value)
        return frame

    return change


def retention(body: bytes, later_ms: int = 0) -> Wrong:
    def add(frames: list[Draft]) -> Draft:
        at = frames.index(frame_of(frames, A, 25))
        of = nth(frames, FrameKind.POSITION, A, 0)
        frame = in_place_of(frames[at], of, kind=FrameKind.RETENTION, subject="", body=body + b" " * (-len(body) % 8))
        frame.timestamp_ms += later_ms
        frames.insert(at, frame)
        return frame

    return add


@pytest.mark.parametrize(
    "what, wrong",
    [
        pytest.param("time", header(timestamp_ms=1 << 62), id="a time after all years"),
        pytest.param("time", header(timestamp_ms=-(1 << 63)), id="a time before all years"),
        pytest.param("damaged", header(first_sequence=1 << 63), id="a sequence beyond all"),
        pytest.param("damaged", header(high_watermark=(1 << 64) - 1), id="a watermark beyond all"),
        pytest.param("retention", retention(b'{"start": Infinity, "unconsumed": []}'), id="kept from no number"),
        pytest.param("retention", retention(b"[" * 5000), id="lists in lists"),
        pytest.param("retention", retention(encode_retention(KEPT)), id="kept from 2^70"),
        pytest.param("time", retention(encode_retention(ALL_KEPT), TEN_YEARS_MS), id="clocks of a decade ahead"),
    ],
)
def test_frame_that_no_broker_writes_is_named(tmp_path: Path, what: str, wrong: Wrong) -> None:
    for copy in COPIES:
        write_world(tmp_path / copy, rounds=4)
        with forged(tmp_path / copy) as frames:
            frame = wrong(frames)
    result = audit(tmp_path)
    assert result.unreadable is None
    assert (what, "both", frame.at) in named(result)
    assert "findings" in as_markdown([result], 1.0)


def test_impossible_due_time_is_a_row_and_finding(tmp_path: Path) -> None:
    for copy in COPIES:
        log = LogWriter.begun(tmp_path / copy)
        log.frame(FrameKind.DISPATCH, "s", encode_dispatch("g1", encode_places([(1 << 63, (1 << 64) - 1)])), count=1)
        log.batch("s", 1)
        log.close()
    reader = TableReader({"path": str(tmp_path / "slave"), "rows": "delays"}, ["event", "number", "due_at"])
    (row,) = [row for part in reader.partitions() for batch in reader.read(part) for row in batch.to_pylist()]
    assert row == {"event": "planned", "number": NUMBER_MAX, "due_at": datetime(9999, 12, 31, 23, 59, 59, 999_000, UTC)}
    assert [(row["what"], row["sequence"]) for row in audit(tmp_path).findings] == [("early", NUMBER_MAX)]


@pytest.mark.parametrize(
    "what, message",
    [
        pytest.param("undecodable", encode_message(Message("s", {"text": "x"}, id="m1"), 1)[:-3], id="cut"),
        pytest.param("foreign", encode_message(Message("t", {"text": "x"}, id="m1"), 1), id="of another subject"),
    ],
)
def test_rewritten_delayed_message_counts_for_its_subject(tmp_path: Path, what: str, message: bytes) -> None:
    whole = encode_message(Message("s", {"text": "x"}, id="m0"), 1)
    for copy in COPIES:
        log = LogWriter.begun(tmp_path / copy)
        frame = log.frame(FrameKind.CARRY, "s", encode_places([(0, 1), (0, 1)]) + join_batch([whole, message]), count=2)
        log.batch("s", 1)
        log.close()
    (row,) = audit(tmp_path).findings
    number = frame.offset + frame.body_at + 2 * 16 + 4 * 3 + len(whole)
    assert (row["what"], row["copy"], row["offset"], row["sequence"]) == (what, "both", frame.offset, number)
