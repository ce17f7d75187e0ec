"""Shell. The walk over one copy, on real files: every frame once, and every damage reported without stopping."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from qmq.audit.copies import CannotRead, PathCopy
from qmq.audit.selection import split_range
from qmq.audit.walk import Problem, Walk
from tests.unit.audit.logs import LogWriter


def write(data: Path, *, frames: int = 30, segment_bytes: int = 8_000) -> LogWriter:
    log = LogWriter.begun(data, segment_bytes=segment_bytes, preallocate=4096)
    for _ in range(frames):
        log.batch("order.changed", 4)
    log.close()
    return log


class BadSector(PathCopy):
    """A copy on a disk with a bad sector: a read stops before it, or fails if it begins in it."""

    bad = range(0)

    def window(self, offset: int, size: int) -> bytes:
        if offset in self.bad:
            raise OSError(5, "Input/output error")
        return super().window(offset, min(size, max(self.bad.start - offset, 0) or size))


def walk(data: Path, begin: int = 0, end: int | None = None, bad: range = range(0)) -> tuple[list[int], list[Problem]]:
    with closing(BadSector(data)) as copy:
        end = copy.describe().end if end is None else end
        copy.bad = bad
        windows = list(Walk(copy, begin, end, is_start=begin == 0).windows())
    frames = [frame.offset for window in windows for frame in window.frames]
    return frames, [problem for window in windows for problem in window.problems]


def change(data: Path, offset: int, new: bytes) -> None:
    """Overwrite bytes at an offset of the log."""
    files = sorted((data / "log").glob("*.log"))
    path = [file for file in files if int(file.stem) <= offset][-1]
    content = bytearray(path.read_bytes())
    at = offset - int(path.stem)
    content[at : at + len(new)] = new
    path.write_bytes(content)


def flip(data: Path, offset: int) -> None:
    path = [file for file in sorted((data / "log").glob("*.log")) if int(file.stem) <= offset][-1]
    change(data, offset, bytes([path.read_bytes()[offset - int(path.stem)] ^ 4]))


def test_end_follows_the_last_frame(tmp_path: Path) -> None:
    log = write(tmp_path)
    copy = PathCopy(tmp_path)
    assert copy.describe() == (0, log.end, log.frames[-1].high_watermark, 0, copy.describe().segments, 0, ())
    assert len(copy.describe().segments) > 2
    copy.close()


def test_torn_tail_is_counted(tmp_path: Path) -> None:
    log = write(tmp_path)
    flip(tmp_path, log.frames[-1].end - 20)
    copy = PathCopy(tmp_path)
    last = log.frames[-1]
    assert copy.describe().end == last.offset
    assert 0 < copy.describe().torn_bytes <= last.end - last.offset
    copy.close()


@pytest.mark.parametrize("grid", [256, 1000, 4096, 1 << 20])
def test_pieces_hold_every_frame_once(tmp_path: Path, grid: int) -> None:
    log = write(tmp_path)
    found: list[int] = []
    for begin, end in split_range(0, log.end, grid):
        frames, problems = walk(tmp_path, begin, end)
        assert problems == [], f"piece at {begin}"
        found += frames
    assert found == [frame.offset for frame in log.frames]


@pytest.mark.parametrize("at", range(0, 200, 7))
def test_walk_continues_behind_a_flipped_byte(tmp_path: Path, at: int) -> None:
    log = write(tmp_path)
    broken = log.frames[7]
    flip(tmp_path, broken.offset + at)
    frames, problems = walk(tmp_path)
    assert [(p.offset, p.end) for p in problems] == [(broken.offset, broken.end)]
    assert set(frames) >= {frame.offset for frame in log.frames if frame is not broken}


def test_erased_range_is_reported_exactly(tmp_path: Path) -> None:
    log = write(tmp_path)
    first, last = log.frames[4], log.frames[6]
    change(tmp_path, first.offset, bytes(last.end - first.offset))
    frames, problems = walk(tmp_path)
    assert problems == [Problem(first.offset, last.end, "no magic number")]
    assert frames == [frame.offset for frame in log.frames if not first.offset <= frame.offset < last.end]


def test_short_file_is_reported_to_the_next_segment(tmp_path: Path) -> None:
    log = write(tmp_path)
    first, second = sorted((tmp_path / "log").glob("*.log"))[:2]
    cut = log.frames[3]
    first.write_bytes(first.read_bytes()[: cut.offset])
    frames, problems = walk(tmp_path)
    assert problems == [Problem(cut.offset, int(second.stem), "nothing is stored here")]
    assert frames[:3] == [frame.offset for frame in log.frames[:3]]
    assert frames[3:] == [frame.offset for frame in log.frames if frame.offset >= int(second.stem)]


def test_frame_larger_than_a_window_is_read_whole(tmp_path: Path) -> None:
    log = LogWriter(tmp_path)
    log.batch("small", 1)
    log.messages("large", [bytes(5 << 20), bytes(1000)])
    log.batch("small", 1)
    log.close()
    assert walk(tmp_path) == ([frame.offset for frame in log.frames], [])


@pytest.mark.parametrize("messages", [4, 40])
def test_unreadable_sector_damages_its_range_only(tmp_path: Path, messages: int) -> None:
    log = LogWriter(tmp_path)
    while log.end < 300_000:
        log.batch("order.changed", messages)
    log.close()
    broken = next(frame for frame in log.frames if frame.offset > 100_000)
    bad = range(broken.end - 200, broken.end - 200 + 4096)
    frames, problems = walk(tmp_path, bad=bad)
    assert "cannot be read: Input/output error" in {problem.reason for problem in problems}
    assert min(p.offset for p in problems) <= bad.start < max(p.end for p in problems)
    assert frames[-1] == log.frames[-1].offset


def test_unreadable_segment_start_is_a_problem(tmp_path: Path) -> None:
    log = write(tmp_path, frames=900, segment_bytes=100_000)
    second = int(sorted((tmp_path / "log").glob("*.log"))[1].stem)
    frames, problems = walk(tmp_path, second, bad=range(second, second + 4096))
    assert min(p.offset for p in problems) == second
    assert {problem.reason for problem in problems} == {"cannot be read: Input/output error"}
    assert frames[-1] == log.frames[-1].offset


def test_directory_without_a_log_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(CannotRead, match="no segment"):
        PathCopy(tmp_path)
    with pytest.raises(CannotRead, match="No such file"):
        PathCopy(tmp_path / "nothing")
