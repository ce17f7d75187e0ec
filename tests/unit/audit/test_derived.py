"""Core. Indexes and snapshots beside segments are compared with the log, for each copy by itself."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest

from qmq.audit.copies import PathCopy
from qmq.audit.derived import DerivedFilesJudge, check_segment
from qmq.audit.walk import NOTHING, Derived
from qmq.errors import CorruptFrame
from qmq.log.frame import FrameKind, decode_frames, encode_json_body
from tests.unit.audit.beside import LEGAL, WRONG, bases_of
from tests.unit.audit.forged import A, forged, write_world
from tests.unit.audit.logs import LogWriter
from tests.unit.audit.test_walk import flip

Found = set[tuple[str, str, int]]
"""(copy, kind, segment)"""


class InChunks(PathCopy):
    """Returns whole frames and more than requested, as a broker does; `given`: the bytes."""

    given = 0

    def window(self, offset: int, size: int) -> bytes:
        data, end = super().window(offset, max(size, 1 << 20)), offset
        with suppress(CorruptFrame):
            for frame, _ in decode_frames(data, offset, None):
                end = frame.end
                if end - offset >= max(size, 8192):
                    break
        self.given += end - offset
        return data[: end - offset]


def found(folder: Path, *names: str) -> Found:
    """Check every segment of the copies, as an audit's tasks do."""
    copies = {name: PathCopy(folder / name) for name in names}
    bases = {name: copy.bases for name, copy in copies.items()}
    judges = {name: DerivedFilesJudge() for name in names}
    rows: Found = set()
    try:
        for base in sorted({base for of in bases.values() for base in of}):
            for name, wrong in check_segment(copies, bases, base):
                rows |= {(name, judged.row["what"], judged.row["offset"]) for judged in judges[name].take(base, wrong)}
    finally:
        for copy in copies.values():
            copy.close()
    return rows


def worlds(folder: Path) -> None:
    write_world(folder / "master")
    write_world(folder / "slave")


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("copy", ["master", "slave"])
def test_wrong_derived_files_are_found_by_segment(tmp_path: Path, name: str, copy: str) -> None:
    worlds(tmp_path)
    base = bases_of(tmp_path / copy)[2]
    kind = WRONG[name](tmp_path / copy, base)
    assert found(tmp_path, "master", "slave") == {(copy, kind, base)}


def test_bytes_after_a_large_frame_are_used(tmp_path: Path) -> None:
    log = LogWriter.begun(tmp_path, segment_bytes=200_000)
    while len(log.frames) < 200:
        log.batch("s", 1, size=1900)
        log.frame(FrameKind.EPOCH, "", encode_json_body(who="b1" * 3000, why="test"))
    log.close()
    copy = InChunks(tmp_path)
    bases = copy.bases[:2]
    (tmp_path / "log" / f"{0:020d}.idx").write_bytes(b"x")
    assert list(check_segment({"master": copy}, {"master": bases}, 0))
    assert copy.given < bases[1] + 8192
    copy.close()


def test_files_wrong_on_both_copies_are_found(tmp_path: Path) -> None:
    worlds(tmp_path)
    base = bases_of(tmp_path / "master")[3]
    for copy in ("master", "slave"):
        WRONG["another position"](tmp_path / copy, base)
    assert found(tmp_path, "master", "slave") == {(copy, "snapshot", base) for copy in ("master", "slave")}


@pytest.mark.parametrize("name", LEGAL)
def test_files_that_brokers_ignore_are_no_finding(tmp_path: Path, name: str) -> None:
    worlds(tmp_path)
    LEGAL[name](tmp_path / "slave", bases_of(tmp_path / "slave")[2])
    assert found(tmp_path, "master", "slave") == set()


def test_missing_snapshot_is_bridged_from_the_one_before(tmp_path: Path) -> None:
    worlds(tmp_path)
    bases = bases_of(tmp_path / "slave")
    LEGAL["no snapshot"](tmp_path / "slave", bases[2])
    wrong = {
        (WRONG["a frame left out"](tmp_path / "slave", bases[2]), bases[2]),
        (WRONG["another position"](tmp_path / "slave", bases[3]), bases[3]),
    }
    assert found(tmp_path, "master", "slave") == {("slave", *problem) for problem in wrong}


def test_consequences_of_a_wrong_snapshot_are_no_findings(tmp_path: Path) -> None:
    """A broker that starts from it writes consistent snapshots; otherwise the next one contradicts it."""
    worlds(tmp_path)
    bases = bases_of(tmp_path / "slave")
    WRONG["another end"](tmp_path / "slave", bases[2])
    WRONG["another position"](tmp_path / "slave", bases[4])
    assert found(tmp_path, "slave") == {("slave", "snapshot", bases[2]), ("slave", "snapshot", bases[4])}


def test_each_copy_is_judged_by_its_own_log(tmp_path: Path) -> None:
    worlds(tmp_path)
    with forged(tmp_path / "slave") as frames:
        frame = next(frame for frame in frames if frame.subject == A and frame.first_sequence == 100)
        frame.batch += 1_000_000
    assert found(tmp_path, "master", "slave") == set()


def test_shortened_log_is_judged_from_its_first_snapshot(tmp_path: Path) -> None:
    worlds(tmp_path)
    bases = bases_of(tmp_path / "slave")
    for path in (tmp_path / "slave" / "log").glob(f"{0:020d}.*"):
        path.unlink()
    WRONG["another position"](tmp_path / "slave", bases[2])
    assert found(tmp_path, "master", "slave") == {("slave", "snapshot", bases[2])}
    WRONG["a damaged snapshot"](tmp_path / "slave", bases[1])
    assert ("slave", "snapshot", bases[1]) in found(tmp_path, "master", "slave")


def test_log_damage_is_no_finding_about_derived_files(tmp_path: Path) -> None:
    worlds(tmp_path)
    flip(tmp_path / "slave", bases_of(tmp_path / "slave")[2] + 150)
    assert found(tmp_path, "master", "slave") == set()


@pytest.mark.parametrize("is_cut", [False, True], ids=["from 0", "retention has cut it"])
def test_log_is_not_folded_without_derived_files(tmp_path: Path, is_cut: bool) -> None:
    """The whole log would be folded by one task."""

    class OfAnEarlierVersion(PathCopy):
        def derived(self, base: int) -> Derived:
            return NOTHING

        def window(self, offset: int, size: int) -> bytes:
            raise AssertionError(f"read at {offset}")

    write_world(tmp_path)
    copy = OfAnEarlierVersion(tmp_path)
    bases = copy.bases[is_cut:]
    assert [wrong for base in bases for wrong in check_segment({"master": copy}, {"master": bases}, base)] == []


def test_snapshot_after_a_segment_without_index_is_judged(tmp_path: Path) -> None:
    write_world(tmp_path / "slave")
    bases = bases_of(tmp_path / "slave")
    LEGAL["no index"](tmp_path / "slave", bases[0])
    WRONG["another position"](tmp_path / "slave", bases[1])
    assert found(tmp_path, "slave") == {("slave", "snapshot", bases[1])}
