"""Core. Indexes of closed segments: derived, small, rebuilt when missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from qmq.errors import CorruptFrame
from qmq.log import RealDisk
from qmq.log import index as consume_log
from qmq.log.index import ClosedIndex, FrameRef, SegmentIndex
from qmq.log.segments import index_name, segment_at
from qmq.types import Epoch
from tests.property.test_frame import frame_of
from tests.support.effort import IS_QUICK
from tests.unit.log.logs import Copy

SUBJECTS = 10_000 if IS_QUICK else 100_000


def places(copy: Copy) -> dict[str, list]:
    return {subject: copy.log.frames(subject, 0, 1_000) for subject in ("s0", "s1", "s2", "nobody's")}


BASE = 4096
COUNTS = {"b": (2,), "a": (1, 3, 1), "größe": (1, 1, 1, 5), "bb": (4, 1), "": (1,)}
"""subject -> message counts of its frames"""


def an_index() -> tuple[SegmentIndex, dict[str, list[FrameRef]]]:
    """Return an index of frames of several subjects in turn, and the frames it should find."""
    index, refs, offset = SegmentIndex(BASE), {subject: [] for subject in COUNTS}, BASE
    for turn in range(4):
        for at, (subject, counts) in enumerate(COUNTS.items()):
            if turn < len(counts):
                begin = 10 * at + sum(counts[:turn])
                fields = {"offset": offset, "count": counts[turn], "first_sequence": begin}
                _, frame = frame_of(subject, bytes(8 * turn), previous_chain=0, **fields)
                index.add(frame)
                refs[subject].append(FrameRef(begin, begin + counts[turn], offset, frame.end - offset))
                offset = frame.end
    return index, refs


def test_closed_index_equals_the_open_one():
    index, refs = an_index()
    closed = ClosedIndex(index.encode(1 << 20), BASE)
    assert (closed.base, closed.end) == (BASE, 1 << 20)
    for lookup in (index, closed):
        for subject in (*COUNTS, "aa", "c", "\U00010000"):
            wanted = refs.get(subject, [])
            assert lookup.first_sequence(subject) == (wanted[0].begin if wanted else None)
            for sequence in range(60):
                behind = [ref for ref in wanted if ref.end > sequence]
                assert [lookup.frames(subject, sequence, most) for most in (1, 2, 9)] == [
                    behind[:1],
                    behind[:2],
                    behind,
                ]


def test_index_of_a_segment_without_messages():
    closed = ClosedIndex(SegmentIndex(BASE).encode(BASE + 8), BASE)
    assert (closed.end, closed.first_sequence("a"), closed.frames("a", 0, 9)) == (BASE + 8, None, [])


def test_damaged_index_is_refused():
    whole = an_index()[0].encode(1 << 20)
    damaged = [whole[:size] for size in range(len(whole))]
    damaged += [whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :] for at in range(len(whole))]
    for data, base in [*((content, BASE) for content in damaged), (whole, BASE + 8)]:
        with pytest.raises(ValueError, match="index"):
            ClosedIndex(data, base)


def test_segment_at_an_offset():
    assert [segment_at([8, 24, 32], offset) for offset in (8, 23, 24, 31, 32, 99)] == [8, 8, 24, 24, 32, 32]
    with pytest.raises(CorruptFrame, match="the log begins behind it"):
        segment_at([8, 24], 7)


@pytest.mark.parametrize("damage", ["missing", "empty", "flipped", "another segment's", "of a shorter one"])
@pytest.mark.parametrize("reopened", [False, True])
def test_damaged_or_missing_index_is_rebuilt(tmp_path: Path, damage: str, reopened: bool):
    disk = RealDisk(tmp_path)
    copy = Copy.begun(disk, tail_bytes=0)
    copy.fill(12)
    copy.begin_epoch(Epoch(1, 2))
    copy.fill(48)
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
    elif damage == "of a shorter one":
        path.write_bytes(SegmentIndex(base).encode(next_base - 8))
    else:
        path.write_bytes((tmp_path / f"log/{next_base:020d}.idx").read_bytes())
    if reopened:
        copy.reopen()
    assert places(copy) == wanted
    assert path.read_bytes() == whole
    disk.close()


def test_segments_of_a_subject_are_searched_once(monkeypatch):
    copy, looked, look = Copy.filled(60, tail_bytes=0), [], ClosedIndex.first_sequence
    monkeypatch.setattr(
        ClosedIndex, "first_sequence", lambda self, subject: looked.append(subject) or look(self, subject)
    )
    assert copy.log.frames("s1", 0, 5) == copy.log.frames("s1", 0, 5)
    assert looked == ["s1"] * (len(copy.log.bases) - 1)
    monkeypatch.setattr(consume_log, "CHAPTERS_MAX", 2)
    found = [copy.log.frames(subject, 0, 1_000) for subject in ("s0", "s1", "s2")]
    assert len(copy.log._consume_log._chapters) <= 2
    assert [copy.log.frames(subject, 0, 1_000) for subject in ("s0", "s1", "s2")] == found


def test_lookup_reads_only_needed_segments(monkeypatch):
    copy, looked, look = Copy.filled(60, tail_bytes=0), [], ClosedIndex.frames
    monkeypatch.setattr(ClosedIndex, "frames", lambda self, *asked: looked.append(self.base) or look(self, *asked))
    begin = copy.log._consume_log.newest.first_sequence("s1")
    assert len(copy.log.frames("s1", begin, 9)) == 20 - begin and looked == []
    assert len(copy.log.frames("s1", 0, 1)) == 1 and looked == copy.log.bases[:1]
    looked.clear()
    assert len(copy.log.frames("s1", begin - 1, 9)) == 21 - begin and len(looked) == 1


def test_rebuilt_index_is_stored():
    copy = Copy.filled(60, tail_bytes=0)
    base = copy.log.bases[1]
    copy.disk.remove(index_name(base))
    copy.log.frames("s1", 0, 1_000)
    assert copy.disk.has(index_name(base)), "it was rebuilt"
    assert set(copy.log._consume_log._closed) == set(copy.log.bases[:-1])
    copy.drop_oldest_segment()
    assert set(copy.log._consume_log._closed) == set(copy.log.bases[:-1])


def test_hundred_thousand_subjects_share_index_files():
    copy = Copy.begun(segment_bytes=42 * SUBJECTS, tail_bytes=0)
    for i in range(SUBJECTS):
        copy.messages("m", subject=f"subject {i}", size=0)
        if i % 10_000 == 0:
            copy.flush()
    copy.flush()
    assert len(copy.log.bases) > 3 and len(copy.disk.names("log")) <= 3 * len(copy.log.bases)
    for i in (0, 7, SUBJECTS // 2, SUBJECTS - 1):
        ((frame, _),) = copy.log.stored.read_bodies(copy.log.frames(f"subject {i}", 0, 10))
        assert (frame.subject, frame.first_sequence, frame.count) == (f"subject {i}", 0, 1)
