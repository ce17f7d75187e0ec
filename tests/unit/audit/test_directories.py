"""Shell. Files beside a broker's log define the expected contents of a directory.

Missing files are not taken for retention, nor a cut log for a shorter one.
"""

from __future__ import annotations

import os
import resource
from contextlib import closing
from itertools import count, islice
from pathlib import Path
from typing import Any

import pytest

from qmq.audit.copies import CannotRead, PathCopy
from qmq.audit.places import Change
from qmq.crc import encode_checked
from qmq.log.manifest import encode_manifest
from qmq.types import Epoch
from tests.unit.audit.beside import bases_of
from tests.unit.audit.divergences import MOVED, WITHOUT_A_COMMAND, Plant
from tests.unit.audit.forged import A, forged, write_world
from tests.unit.audit.logs import LogWriter
from tests.unit.audit.test_walk import change
from tests.unit.audit.without_spark import COPIES, audit, named


def write(folder: Path, **points: Any) -> LogWriter:
    """Write both copies with their manifests, and `points` as brokers store acknowledged points."""
    for copy in COPIES:
        log = LogWriter.begun(folder / copy, segment_bytes=4_000, epoch=Epoch(2, 1))
        for _ in range(30):
            log.batch("order.changed", 4)
        log.close()
        (log.folder / "manifest").write_bytes(encode_manifest(bases_of(folder / copy)))
        if points:
            (folder / copy / "points.json").write_bytes(encode_checked({"life": 0} | points))
    return log


def remove(data: Path, base: int) -> None:
    (data / "log" / f"{base:020d}.log").unlink()


@pytest.mark.parametrize("number", [0, 2], ids=["the oldest", "one between"])
@pytest.mark.parametrize("copies", [("slave",), COPIES], ids=["on one copy", "on both"])
def test_listed_segment_that_is_gone_is_damage(tmp_path: Path, copies: tuple[str, ...], number: int) -> None:
    write(tmp_path)
    base = bases_of(tmp_path / "slave")[number]
    for copy in copies:
        remove(tmp_path / copy, base)
    result = audit(tmp_path)
    assert (result.unreadable, result.start) == (None, 0)
    assert named(result) == {("damaged", "both" if copies == COPIES else "slave", base)}


def test_newest_segment_missing_on_both_is_damage(tmp_path: Path) -> None:
    write(tmp_path)
    newest = bases_of(tmp_path / "slave")[-1]
    for copy in COPIES:
        remove(tmp_path / copy, newest)
    assert named(audit(tmp_path)) == {("damaged", copy, newest) for copy in COPIES}


def test_damaged_manifest_is_ignored(tmp_path: Path) -> None:
    write(tmp_path)
    for copy in COPIES:
        (tmp_path / copy / "log" / "manifest").write_text("{}")
    assert audit(tmp_path).status == 0


def test_acknowledged_point_is_due_in_an_idle_log(tmp_path: Path) -> None:
    stated = write(tmp_path / "without").frames[-1].offset
    assert audit(tmp_path / "without").watermark == stated
    log = write(tmp_path)
    write(tmp_path / "with", own=[2, 1, log.end, log.chain])
    result = audit(tmp_path / "with")
    assert (result.status, result.watermark) == (0, log.end) and stated < log.end


def test_both_logs_below_the_acknowledged_point_lack_it(tmp_path: Path) -> None:
    log = write(tmp_path / "elsewhere")
    write(tmp_path, own=[2, 1, log.end, log.chain])
    last = next(frame for frame in log.frames if frame.offset >= bases_of(tmp_path / "slave")[-1])
    for copy in COPIES:
        change(tmp_path / copy, last.offset, bytes(log.end - last.offset))
    result = audit(tmp_path)
    assert {(row["what"], row["copy"]) for row in result.findings} == {("unread", copy) for copy in COPIES}


@pytest.mark.parametrize("copy", [{"life": 1}, None], ids=["of a log before this one", "damaged"])
def test_point_of_another_life_is_not_due(tmp_path: Path, copy: dict[str, int] | None) -> None:
    write(tmp_path, own=[2, 1, 1 << 40, 7])
    for name in COPIES:
        if copy is not None:
            (tmp_path / name / "copy.json").write_bytes(encode_checked(copy))
        else:
            (tmp_path / name / "points.json").write_text('{"crc": 1}')
    assert audit(tmp_path).status == 0


def test_log_of_many_segments_is_read_whole(tmp_path):
    """A shell allows 1,024 open files, and a log of 1 TiB has as many segments."""
    (tmp_path / "log").mkdir()
    for number in range(80):
        (tmp_path / "log" / f"{number * 4096:020d}.log").touch()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = {int(name) for name in os.listdir("/proc/self/fd")}
    lowest = next(islice((number for number in count() if number not in used), 16, None))
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        with closing(PathCopy(tmp_path)) as copy:
            assert len(list(copy.files())) == 80
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("plant", MOVED.values(), ids=MOVED.keys())
def test_one_frame_is_named_without_its_consequences(tmp_path: Path, plant: Plant) -> None:
    for copy in COPIES:
        write_world(tmp_path / copy, rounds=20)
    with forged(tmp_path / "slave") as frames:
        expected = plant(frames)
    result = audit(tmp_path)
    assert result.unreadable is None
    assert named(result) == {(what, "slave", frame.at) for what, frame, _ in expected}


@pytest.mark.parametrize("plant", WITHOUT_A_COMMAND.values(), ids=WITHOUT_A_COMMAND.keys())
def test_moved_group_needs_a_command_in_the_trail(tmp_path: Path, plant: Plant) -> None:
    for copy in COPIES:
        write_world(tmp_path / copy, rounds=20)
        with forged(tmp_path / copy) as frames:
            expected = plant(frames)
    (at_ms,) = {frame.timestamp_ms for _, frame, _ in expected}
    found = {(what, "both", frame.at) for what, frame, _ in expected}
    other = Change(at_ms, A, "f"), Change(at_ms - 2 * 86_400_000, A, "g"), Change(at_ms + 3_600_000, A, "g")
    assert named(audit(tmp_path, trail=lambda: other)) == found
    assert named(audit(tmp_path, trail=lambda: [Change(at_ms - 5_000, A, "g")])) == named(audit(tmp_path)) == set()


def test_moved_group_names_the_copy_that_moved_it(tmp_path: Path) -> None:
    for copy in COPIES:
        write_world(tmp_path / copy, rounds=4)
    with forged(tmp_path / "slave") as frames:
        ((what, frame, _),) = WITHOUT_A_COMMAND["a group forgotten"](frames)
    result = audit(tmp_path, trail=list)
    assert [(row["what"], row["copy"], row["offset"]) for row in result.findings] == [(what, "slave", frame.at)]


def test_unreadable_trail_is_a_note(tmp_path: Path) -> None:
    for copy in COPIES:
        write_world(tmp_path / copy, rounds=4)
        with forged(tmp_path / copy) as frames:
            WITHOUT_A_COMMAND["a group forgotten"](frames)

    def trail() -> list[Change]:
        raise CannotRead("403")

    result = audit(tmp_path, trail=trail)
    assert (result.unreadable, result.findings) == (None, [])
    assert "moved consumer groups are not compared with the audit trail: 403" in result.notes
