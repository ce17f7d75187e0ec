"""Core. The consume log of closed segments: derived, small, made again when it is missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from qmq.log import RealDisk, consume_log
from qmq.log.index import ClosedIndex
from tests.support.effort import IS_QUICK
from tests.unit.log.logs import Copy

SUBJECTS = 10_000 if IS_QUICK else 100_000


def places(copy: Copy) -> dict[str, list]:
    return {subject: copy.log.frames(subject, 0, 1_000) for subject in ("s0", "s1", "s2", "nobody's")}


@pytest.mark.parametrize("damage", ["missing", "empty", "flipped", "another segment's"])
@pytest.mark.parametrize("reopened", [False, True])
def test_index_that_is_damaged_or_missing_is_made_again(tmp_path: Path, damage: str, reopened: bool):
    disk = RealDisk(tmp_path)
    copy = Copy(disk, tail_bytes=0)
    copy.begin_epoch()
    copy.fill(60)
    wanted, base, next_base = places(copy), copy.log.bases[1], copy.log.bases[2]
    copy.reopen()
    path = tmp_path / f"log/{base:020d}.idx"
    whole = path.read_bytes()
    if damage == "missing":
        path.unlink()
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "flipped":
        path.write_bytes(whole[:50] + bytes([whole[50] ^ 4]) + whole[51:])
    else:
        path.write_bytes((tmp_path / f"log/{next_base:020d}.idx").read_bytes())
    if reopened:
        copy.reopen()
    assert places(copy) == wanted
    assert path.read_bytes() == whole
    disk.close()


def test_segments_that_have_messages_of_a_subject_are_looked_for_once(monkeypatch):
    copy, looked, look = Copy(tail_bytes=0), [], ClosedIndex.first_sequence
    copy.begin_epoch()
    copy.fill(60)
    monkeypatch.setattr(
        ClosedIndex, "first_sequence", lambda self, subject: looked.append(subject) or look(self, subject)
    )
    assert copy.log.frames("s1", 0, 5) == copy.log.frames("s1", 0, 5)
    assert looked == ["s1"] * (len(copy.log.bases) - 1)
    monkeypatch.setattr(consume_log, "CHAPTERS_MAX", 2)
    found = [copy.log.frames(subject, 0, 1_000) for subject in ("s0", "s1", "s2")]
    assert len(copy.log._consume_log._chapters) <= 2
    assert [copy.log.frames(subject, 0, 1_000) for subject in ("s0", "s1", "s2")] == found


def test_hundred_thousand_subjects_need_no_more_files_than_one():
    copy = Copy(segment_bytes=42 * SUBJECTS, tail_bytes=0)
    copy.begin_epoch()
    for i in range(SUBJECTS):
        copy.messages("m", subject=f"subject {i}", size=0)
        if i % 10_000 == 0:
            copy.flush()
    copy.flush()
    assert len(copy.log.bases) > 3 and len(copy.disk.names("log")) <= 3 * len(copy.log.bases)
    for i in (0, 7, SUBJECTS // 2, SUBJECTS - 1):
        ((frame, _),) = copy.log.read_bodies(copy.log.frames(f"subject {i}", 0, 10))
        assert (frame.subject, frame.first_sequence, frame.count) == (f"subject {i}", 0, 1)
