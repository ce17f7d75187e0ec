"""Shell. Nights with a ledger: verified bytes are trusted only as far as they were read."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from qmq.audit.report import as_markdown
from qmq.audit.results import Result
from qmq.ledger import PROVEN, Entry, Ledger, Piece
from qmq.log.frame import FrameKind
from qmq.log.retention import RetentionDecision, encode_retention
from qmq.types import Epoch
from tests.unit.audit.logs import LogWriter
from tests.unit.audit.test_walk import change, flip
from tests.unit.audit.without_spark import COPIES, audit, named

Plant = Callable[[LogWriter], object]
KEPT, FIRST = 12, 30
"""Frames before a retention frame, and frames of the first night."""


def write(
    folder: Path,
    frames: int,
    *,
    at: int = -1,
    plant: Plant | None = None,
    kept: int = 0,
    copies: Sequence[str] = COPIES,
) -> LogWriter:
    """Write both copies; earlier frames stay the same, byte for byte. `plant`: changes before frame `at`."""
    for copy in copies:
        shutil.rmtree(folder / copy, ignore_errors=True)
        log = LogWriter.begun(folder / copy, segment_bytes=4_000, epoch=Epoch(2, 1))
        for number in range(frames):
            log.timestamp_ms += 1_000
            if number == at and plant is not None:
                plant(log)
            log.batch("order.changed", 4)
            if number == KEPT:
                body = encode_retention(RetentionDecision(kept, "age" if kept else "", {}, {}))
                log.frame(FrameKind.RETENTION, "", body)
        log.close()
    return log


def night(folder: Path, copies: Sequence[str] = COPIES) -> Result:
    result = audit(folder, copies, ledger=Ledger(folder / "ledger"), piece_bytes=2_048)
    assert result.unreadable is None
    return result


def lines(folder: Path) -> list[bytes]:
    return (folder / "ledger" / "g1.jsonl").read_bytes().splitlines(keepends=True)


def other(field: str, change: Callable[[Any], Any]) -> Plant:
    """Return the plant that changes this field of the frames from here on."""
    return lambda log: setattr(log, field, change(getattr(log, field)))


@pytest.mark.parametrize(
    "what, plant",
    [
        ("chain", other("chain", lambda chain: chain ^ 1)),
        ("epoch", other("epoch", lambda _: Epoch(1, 9))),
        ("epoch_frame", other("epoch", lambda _: Epoch(3, 1))),
        ("time", other("timestamp_ms", lambda ms: ms - 3_600_000)),
    ],
    ids=["chain", "older epoch", "newer epoch", "time"],
)
def test_first_new_frame_must_continue_the_verified_chain(tmp_path: Path, what: str, plant: Plant) -> None:
    """End of the last night, on both copies alike."""
    write(tmp_path, FIRST)
    verified = night(tmp_path).watermark
    # The high watermark is the offset of the last frame, which is the first one of the next night.
    log = write(tmp_path, FIRST + 10, at=FIRST - 1, plant=plant)
    assert verified in [frame.offset for frame in log.frames]
    result = night(tmp_path)
    assert result.begin == verified
    assert named(result) == {(what, "both", verified)}


def test_damage_after_the_verified_point_is_found(tmp_path: Path) -> None:
    write(tmp_path, FIRST)
    verified = night(tmp_path).watermark
    log = write(tmp_path, FIRST + 10)
    for copy in COPIES:
        change(tmp_path / copy, verified, bytes(200))
    result = night(tmp_path)
    (row,) = result.findings
    assert named(result) == {("damaged", "both", verified)}
    assert row["end"] in [frame.offset for frame in log.frames]


def test_restored_unread_bytes_are_read(tmp_path: Path) -> None:
    """In the first night, only the slave had applied retention."""
    log = write(tmp_path, FIRST, kept=4_304)
    bases = sorted((tmp_path / "slave" / "log").glob("*.log"))
    aside = tmp_path / "aside"
    bases[0].rename(aside)
    assert night(tmp_path).start == int(bases[1].stem)
    aside.rename(bases[0])
    for copy in COPIES:
        flip(tmp_path / copy, log.frames[2].end - 30)
    result = night(tmp_path)
    assert (result.start, result.begin) == (0, 0)
    assert named(result) == {("damaged", "both", log.frames[2].offset)}


def test_each_rewritten_copy_is_a_finding(tmp_path: Path) -> None:
    three = (*COPIES, "slave2")
    write(tmp_path, FIRST, copies=three)
    night(tmp_path, three)
    last = Ledger(tmp_path / "ledger").entries("g1")[-1].frame
    write(tmp_path, FIRST + 5, at=3, plant=other("chain", lambda chain: chain ^ 1), copies=three[1:])
    rewritten = {(copy, at) for what, copy, at in named(night(tmp_path, three)) if what == "rewritten"}
    assert rewritten == {("slave", last), ("slave2", last)}


def test_report_separates_earlier_nights_bytes(tmp_path: Path) -> None:
    write(tmp_path, FIRST)
    first = night(tmp_path)
    assert f"Every byte of [0, {first.watermark}) was read" in as_markdown([first], 1.0)
    write(tmp_path, FIRST + 10)
    second = night(tmp_path)
    report, again = as_markdown([second], 1.0), sum(piece.bytes for piece in second.again)
    assert f"Every byte of [{first.watermark}, {second.watermark}) was read" in report
    assert 0 < again < first.watermark and f"the {again} bytes that were read again, are unchanged" in report


def test_findings_are_reported_without_a_writable_ledger(tmp_path: Path) -> None:
    log = write(tmp_path, FIRST)
    flip(tmp_path / "slave", log.frames[9].end - 30)
    (tmp_path / "ledger").write_text("a file")
    result = audit(tmp_path, ledger=Ledger(tmp_path / "ledger"))
    assert result.status == 2 and "the ledger cannot be written" in str(result.unreadable)
    assert ("damaged", "slave", log.frames[9].offset) in named(result)
    assert "| damaged | slave |" in as_markdown([result], 1.0)


ORDERS = {
    "the later one ends first": "0ba",
    "the earlier one ends first": "0ab",
    "the first line once more": "0ab0",
    "all lines twice": "0ab0ab",
    "one line twice": "0aab",
}


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS.keys())
def test_concurrent_runs_and_duplicate_lines_are_no_findings(tmp_path: Path, order: str) -> None:
    """Two runs continued from the same point, each up to the log's end at that time."""
    ledger = tmp_path / "ledger" / "g1.jsonl"
    write(tmp_path, FIRST)
    night(tmp_path)
    written = {"0": lines(tmp_path)[0]}
    for run, frames in (("a", FIRST + 3), ("b", FIRST + 12)):
        ledger.write_bytes(written["0"])
        write(tmp_path, frames)
        night(tmp_path)
        written[run] = lines(tmp_path)[1]
    ledger.write_bytes(b"".join(written[run] for run in order))
    for more in (20, 30, 40):
        write(tmp_path, FIRST + more)
        assert (night(tmp_path).found, Ledger(ledger.parent).entries("g1")[-1].verdict) == ({}, PROVEN)


def test_segments_missing_without_retention_are_a_finding(tmp_path: Path) -> None:
    """On both copies, whether read before or not, and only once."""
    log = write(tmp_path, FIRST)
    assert night(tmp_path).found == {}
    write(tmp_path, FIRST + 10)
    second = sorted(int(path.stem) for path in log.folder.glob("*.log"))[1]
    for copy in COPIES:
        (tmp_path / copy / "log" / f"{0:020d}.log").unlink()
    result = night(tmp_path)
    assert result.begin > result.start == second
    assert named(result) == {("retention", "both", second)}
    assert night(tmp_path).found == {}
    shutil.rmtree(tmp_path / "ledger")
    assert named(night(tmp_path)) == {("retention", "both", second)}


def test_segments_released_by_retention_are_not_missed(tmp_path: Path) -> None:
    log = write(tmp_path, FIRST)
    second = sorted(int(path.stem) for path in log.folder.glob("*.log"))[1]
    write(tmp_path, FIRST, kept=second)
    assert night(tmp_path).found == {}
    write(tmp_path, FIRST + 10, kept=second)
    for copy in COPIES:
        (tmp_path / copy / "log" / f"{0:020d}.log").unlink()
    assert night(tmp_path).found == {}


def test_damaged_last_verified_frame_is_damage(tmp_path: Path) -> None:
    write(tmp_path, FIRST)
    verified = night(tmp_path).watermark
    log = write(tmp_path, FIRST + 10)
    last = next(frame for frame in log.frames if frame.end == verified)
    flip(tmp_path / "slave", last.offset + 40)
    assert named(night(tmp_path)) == {("damaged", "slave", last.offset)}
    base = max(int(path.stem) for path in log.folder.glob("*.log") if int(path.stem) <= last.offset)
    (tmp_path / "slave" / "log" / f"{base:020d}.log").unlink()
    assert named(night(tmp_path)) == {("damaged", "slave", base)}


@pytest.mark.parametrize("has_ledger", [True, False])
def test_missing_beginning_without_retention_is_a_finding(tmp_path: Path, has_ledger: bool) -> None:
    log = write(tmp_path, FIRST)
    if has_ledger:
        assert night(tmp_path).found == {}
        write(tmp_path, FIRST + 10)
    second = sorted(int(path.stem) for path in log.folder.glob("*.log"))[1]
    (tmp_path / "slave" / "log" / f"{0:020d}.log").unlink()
    for _ in range(2):  # until it is whole again
        assert named(night(tmp_path)) == {("retention", "slave", second)}


def test_late_retention_of_one_copy_is_no_finding(tmp_path: Path) -> None:
    log = write(tmp_path, FIRST)
    second = sorted(int(path.stem) for path in log.folder.glob("*.log"))[1]
    write(tmp_path, FIRST, kept=second)
    (tmp_path / "slave" / "log" / f"{0:020d}.log").unlink()
    assert night(tmp_path).found == {}


def cut_off(folder: Path, log: LogWriter, end: int) -> None:
    """Cut the slave's log before the frame that ends at `end`."""
    at = next(frame.offset for frame in log.frames if frame.end == end)
    for path in sorted((folder / "slave" / "log").glob("*.log")):
        base = int(path.stem)
        if base >= at:
            path.unlink()
        elif base + path.stat().st_size > at:
            path.write_bytes(path.read_bytes()[: at - base])


def test_copy_below_the_verified_point_is_not_proven(tmp_path: Path) -> None:
    """Only a part of the old bytes is read again, which need not include the end."""
    log = write(tmp_path, FIRST)
    verified = night(tmp_path).watermark
    cut_off(tmp_path, log, verified)
    result = audit(tmp_path, ledger=Ledger(tmp_path / "ledger"), piece_bytes=2_048, share=1_000)
    assert result.status == 1
    assert [row["copy"] for row in result.findings] == ["slave"]
    assert 0 < result.begin < result.logs["slave"].end, "no more is read than what tells"
    assert Ledger(tmp_path / "ledger").entries("g1")[-1].verified == 0


@pytest.mark.parametrize("number", range(1, FIRST, 3))
def test_cut_copy_lacks_only_the_cut(tmp_path: Path, number: int) -> None:
    log = write(tmp_path, FIRST)
    night(tmp_path)
    cut_off(tmp_path, log, log.frames[number].end)
    assert {row["copy"] for row in night(tmp_path).findings} == {"slave"}
    write(tmp_path, FIRST + 5)
    assert night(tmp_path).found == {}


def test_log_beginning_in_the_anchor_is_read_whole(tmp_path: Path) -> None:
    """The ledger is another log's: none of its frames can be found."""
    start = 4_304
    write(tmp_path, FIRST, kept=start)
    for copy in COPIES:
        (tmp_path / copy / "log" / f"{0:020d}.log").unlink()
    piece = Piece(0, start + 8, start + 8, "c0f")
    other = Entry("r1", 1, "g1", PROVEN, verified=start + 8, chain="00aa", frame=start - 8, pieces=[piece])
    Ledger(tmp_path / "ledger").append(other)
    result = night(tmp_path)
    assert (result.start, result.begin) == (start, start)


def test_later_retention_does_not_affect_reread_frames(tmp_path: Path) -> None:
    """Everything is read once more, as the last verified frame is damaged."""

    def keep(log: LogWriter) -> None:
        body = encode_retention(RetentionDecision(96, "age", {}, {}))
        log.frame(FrameKind.RETENTION, "", body)

    write(tmp_path, FIRST, at=KEPT + 5, plant=keep)
    first = night(tmp_path)
    assert (first.found, Ledger(tmp_path / "ledger").known("g1").kept) == ({}, 96)
    log = write(tmp_path, FIRST + 10, at=KEPT + 5, plant=keep)
    last = next(frame for frame in log.frames if frame.end == first.watermark)
    flip(tmp_path / "slave", last.offset + 40)
    assert named(night(tmp_path)) == {("damaged", "slave", last.offset)}


def test_shared_damage_is_repeated_every_night(tmp_path: Path) -> None:
    """It is one finding; the bytes before the new ones stay unverified."""
    log = write(tmp_path, FIRST)
    frame = log.frames[FIRST // 2]
    for copy in COPIES:
        flip(tmp_path / copy, frame.end - 30)
    assert named(night(tmp_path)) == {("damaged", "both", frame.offset)}
    sentence = f"on both copies alike, not repeated here: damaged at {frame.offset}."
    silent = audit(tmp_path, ledger=Ledger(tmp_path / "ledger"), piece_bytes=2_048, share=1_000)
    assert (silent.found, [row["offset"] for row in silent.wrong_before]) == ({}, [frame.offset])
    assert sentence in as_markdown([silent], 1.0)
    # After a repair, the night that reads it again forgets it.
    for copy in COPIES:
        flip(tmp_path / copy, frame.end - 30)
    nights = [night(tmp_path) for _ in range(10)]
    assert [night.found for night in nights] == [{}] * 10
    assert sentence in as_markdown([nights[0]], 1.0) and sentence not in as_markdown([nights[-1]], 1.0)


def test_missing_beginning_is_reported_once(tmp_path: Path) -> None:
    log = write(tmp_path, FIRST)
    second = sorted(int(path.stem) for path in log.folder.glob("*.log"))[1]
    for copy in COPIES:
        (tmp_path / copy / "log" / f"{0:020d}.log").unlink()
    first = night(tmp_path)
    assert named(first) == {("retention", "both", second)}
    last = next(frame for frame in log.frames if frame.end == first.watermark)
    flip(tmp_path / "slave", last.offset + 40)
    assert named(night(tmp_path)) == {("damaged", "slave", last.offset)}
