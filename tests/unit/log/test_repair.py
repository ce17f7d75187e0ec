"""Core. Damage is found, reported and repaired from the other copy; nothing else changes (P6)."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest

from qmq.errors import BrokenInvariant, CorruptFrame, DiskFailed, Diverged, ForeignSegment
from qmq.log import quarantine, segments
from qmq.log.disk import BLOCK_BYTES
from qmq.log.fold import State, encode_snapshot
from qmq.log.frame import decode_frames
from qmq.log.memory_disk import MemoryDisk
from qmq.log.recovery import LogHealth
from qmq.log.repair import repair
from qmq.types import Epoch
from tests.unit.log.logs import Copy


def frame_offsets(copy: Copy, base: int) -> list[int]:
    refs = [ref for subject in ("s0", "s1", "s2") for ref in copy.log.frames(subject, 0, 1_000)]
    return sorted(ref.offset for ref in refs if ref.offset >= base)


def others(copy: Copy, begin: int, end: int) -> bytes:
    return copy.log.stored.read(begin, copy.log.end, end - begin).data


@pytest.mark.parametrize("which", [0, 1, -2])
@pytest.mark.parametrize("more", [0, 300], ids=["exactly", "with frames behind"])
def test_damage_met_by_a_restart_is_repaired(which, more):
    copy, other = Copy.filled(60, tail_bytes=0), Copy.filled(60, tail_bytes=0)
    offset = frame_offsets(copy, copy.log.bases[-1])[which]
    state = copy.log.state
    copy.flip(offset + 120)
    log = copy.reopen()
    assert log.damage is not None and (log.damage.begin, log.end) == (offset, offset)
    with pytest.raises(BrokenInvariant):
        copy.messages("nothing is written behind damage")
    repair(log, others(other, offset, log.damage.end + more))
    assert log.damage is None and log.state == state and copy.image() == other.image()
    assert copy.reopen().state == state


def test_quarantine_names_are_not_reused():
    disk = MemoryDisk()
    names = [quarantine.keep_bytes(disk, begin, data, "test") for begin, data in ((0, b"other"), (8, b"first"))]
    for suffix in (".bytes", ".json"):
        disk.remove(names[0].replace(".bytes", suffix))
    assert disk.read(quarantine.keep_bytes(disk, 8, b"again", "test"), 0, 5) == b"again"
    assert disk.read(names[1], 0, 5) == b"first"


def test_equal_bytes_are_kept_once():
    """A bad block is repaired repeatedly; the disk would fill."""
    disk = MemoryDisk()
    name = quarantine.keep_bytes(disk, 8, b"first", "test")
    disk.remove(name.replace(".bytes", ".json"))  # the power failed before the report was written
    kept = [quarantine.keep_bytes(disk, 8, data, "test") for data in (b"first", b"other", b"first", b"other")]
    assert kept[0] == kept[2] == name and kept[1] == kept[3] != name
    assert len(disk.names("quarantine")) == 4 and disk.has(name.replace(".bytes", ".json"))


@pytest.mark.parametrize("is_damaged", [True, False])
def test_cut_at_damage_marks_the_tail(is_damaged):
    """Later frames may have been acknowledged, so as a master it waits for its slave."""
    copy = Copy.filled(60, tail_bytes=0)
    offset = frame_offsets(copy, copy.log.bases[-1])[0]
    if is_damaged:
        copy.flip(offset + 120)
        copy.reopen()
    copy.log.cut(offset, "test")
    assert copy.log.end == offset and copy.log.damage is None
    assert copy.log.is_tail_cut == is_damaged == copy.reopen().is_tail_cut


def test_verify_opens_the_named_file():
    """An open descriptor still reads an unlinked file."""
    copy = Copy.filled(60, tail_bytes=0)
    base = copy.log.bases[0]
    assert copy.log.stored.verify(base, base, None, 1 << 20)[0] == copy.log.bases[1]
    copy.disk.system.unlink(copy.disk._path(f"log/{base:020d}.log"))
    assert copy.log.stored.read(base, copy.log.end, 1).frames
    with pytest.raises(CorruptFrame):
        copy.log.stored.verify(base, base, None, 1 << 20)


def test_missing_file_is_found_by_its_name():
    copy = Copy.filled(60, tail_bytes=0)
    first, newest = copy.log.bases[0], copy.log.bases[-1]
    copy.log.stored.read(first, copy.log.end, 1)  # opens it
    for base in (first, newest):
        copy.disk.system.unlink(copy.disk._path(f"log/{base:020d}.log"))
    assert copy.log.stored.read(first, copy.log.end, 1).frames, "an open descriptor still reads"
    with pytest.raises(CorruptFrame, match="its file is gone"):
        copy.log.stored.look_again(first + 8)
    with pytest.raises(CorruptFrame):
        copy.log.stored.read(first, copy.log.end, 1)
    copy.log.stored.look_again(newest)
    with pytest.raises(DiskFailed, match="taken away"):
        copy.log.stored.check_newest()


@pytest.mark.parametrize("place", [0.1, 0.5, 0.8])
def test_damage_is_repaired_while_the_log_grows(place):
    copy, other = Copy.filled(60, tail_bytes=0), Copy.filled(60, tail_bytes=0)
    offset = frame_offsets(copy, 0)[int(60 * place)]
    copy.flip(offset + 120)
    with pytest.raises(CorruptFrame) as found:
        copy.log.stored.read_bodies([ref for s in ("s0", "s1", "s2") for ref in copy.log.frames(s, 0, 1_000)])
    assert found.value.offset == offset
    copy.log.damaged_at(found.value)
    copy.messages("meanwhile")
    copy.flush()
    other.messages("meanwhile")
    other.flush()
    end = copy.log.damage.end
    assert copy.log.damage.begin == offset < end
    repair(copy.log, others(other, offset, end))
    assert copy.log.damage is None and copy.image() == other.image()
    assert copy.reopen().state == other.log.state


@pytest.mark.parametrize("at_run_time", [False, True])
def test_frames_that_do_not_join_are_refused(at_run_time):
    copy, stranger = Copy.filled(60, tail_bytes=0), Copy.filled(60, size=99, tail_bytes=0)
    offset = frame_offsets(copy, copy.log.bases[-1])[1]
    copy.flip(offset + 120)
    if at_run_time:
        copy.log.damaged_at(CorruptFrame(offset, "test"))
    else:
        copy.reopen()
    image, found = copy.image(), copy.log.damage
    there = min(o for o in frame_offsets(stranger, 0) if o >= offset)
    for wrong in (others(stranger, there, there + 500), b"", bytes(400), b"rubbish" * 100):
        with pytest.raises((Diverged, CorruptFrame)):
            repair(copy.log, wrong)
    assert copy.image() == image and copy.log.damage == found


def test_foreign_frames_within_the_damage_are_refused():
    """No following frame proves the history; the chain before them does."""
    copy, other, stranger = (Copy.filled(60, name=name, tail_bytes=0) for name in "mmn")
    first, second, third = frame_offsets(copy, 0)[20:23]
    assert frame_offsets(stranger, 0) == frame_offsets(copy, 0)
    copy.flip(first + 120)
    copy.flip(second + 8)  # in its header, so no frame begins there
    copy.log.damaged_at(CorruptFrame(first, "test"))
    image, found = copy.image(), copy.log.damage
    assert found[:2] == (first, third)
    with pytest.raises(Diverged):
        repair(copy.log, others(stranger, first, second))
    assert copy.image() == image and copy.log.damage == found
    repair(copy.log, others(other, first, second))
    assert copy.log.damage[:2] == (second, third)


def test_damaged_bytes_are_kept_with_a_report():
    copy, other = Copy.filled(60, tail_bytes=0), Copy.filled(60, tail_bytes=0)
    offset = frame_offsets(copy, 0)[20]
    copy.flip(offset + 120)
    copy.log.damaged_at(CorruptFrame(offset, "test"))
    end = copy.log.damage.end
    repair(copy.log, others(other, offset, end))
    (data, report) = sorted(copy.disk.names("quarantine"))
    kept = copy.disk.read(f"quarantine/{data}", 0, 1 << 20)
    content = json.loads(copy.disk.read(f"quarantine/{report}", 0, 1 << 20))
    good = others(other, offset, end)
    assert sum((a ^ b).bit_count() for a, b in zip(kept, good)) == 1
    assert (content["begin"], content["why"]) == (offset, "damaged")


@pytest.mark.parametrize("subject", ["x" * 300, "a/b", "a\nb", ""])
def test_log_accepts_any_subject_name(subject):
    """W7: names are checked before. A log with such a frame still indexes, rolls and recovers."""
    copy = Copy.begun(tail_bytes=0)
    copy.messages("m", subject=subject)
    copy.fill(60)
    (ref,) = copy.reopen().frames(subject, 0, 10)
    assert copy.log.stored.read_bodies([ref])[0][0].subject == subject
    assert all("/" not in name and len(name) < 40 for name in copy.disk.names("log"))


def test_next_frame_is_found_over_several_reads(monkeypatch):
    monkeypatch.setattr(segments, "CHUNK_BYTES", 4096)
    copy = Copy.begun(segment_bytes=1 << 20)
    large, behind = copy.messages(*"abcdef", size=20_000), copy.messages("g")
    copy.flush()
    assert segments.next_frame(copy.disk, [0], large.offset + 8) == behind.offset
    assert segments.next_frame(copy.disk, [0], behind.offset + 8) is None


@pytest.mark.parametrize(("size", "bytes_max"), [(100, 4096), (20_000, 10 * 20_000)])
def test_next_frame_search_reads_little(size, bytes_max):
    """Readers of single frames give their offsets; behind damage, the next frame is near."""
    copy = Copy.begun(segment_bytes=8 << 20)
    frames = [copy.messages("m", size=size) for _ in range(100)]
    copy.flush()
    sizes = copy.read_sizes()
    assert segments.next_frame(copy.disk, [0], frames[0].offset) == frames[0].offset
    assert sum(sizes) <= 4096
    assert segments.next_frame(copy.disk, [0], frames[0].offset + 8) == frames[1].offset
    assert sum(sizes) <= 4096 + bytes_max


@pytest.mark.parametrize(("behind", "is_known"), [(-1, False), (0, False), (1, True)])
def test_damage_below_the_high_watermark_may_be_acknowledged(behind, is_known):
    """A frame that begins at the high watermark was not acknowledged."""
    copy = Copy.begun(MemoryDisk(), tail_bytes=0)
    copy.messages("a", size=100)
    offset = copy.log.end
    copy.messages("b", size=100)
    copy.messages("c", size=100, high_watermark=offset + behind)
    copy.flush()
    copy.flip(offset + 120)
    log = copy.reopen()
    assert log.damage is not None and log.damage.begin == offset
    assert log.stored.may_be_acknowledged(log.damage, log.state.high_watermark) is is_known


def test_newest_segment_is_not_verified():
    copy = Copy.filled(10, tail_bytes=0)
    newest = copy.log.bases[-1]
    with pytest.raises(CorruptFrame, match="went meanwhile"):
        copy.log.stored.verify(newest, newest, None, 1 << 20)


def verify(copy: Copy, base: int) -> None:
    at, chain, is_whole = base, None, False
    while not is_whole:
        at, chain, is_whole = copy.log.stored.verify(base, at, chain, 500)


@pytest.mark.parametrize("common", [1, 12], ids=["from its begin", "from its middle"])
def test_foreign_segment_is_repaired(common):
    """An older file was restored, or two were exchanged: each frame is valid, but the segment does not join."""
    copy, other, stranger = (Copy.filled(common, tail_bytes=0) for _ in range(3))
    for written, name in ((copy, "m"), (other, "m"), (stranger, "x")):
        written.fill(60, name=name)
    base, end = copy.log.bases[1:3]
    assert stranger.log.bases == copy.log.bases and base < stranger.log.end
    size = copy.disk.size(f"log/{base:020d}.log")
    theirs = stranger.disk.read(f"log/{base:020d}.log", 0, size)
    assert theirs != copy.disk.read(f"log/{base:020d}.log", 0, size)
    copy.disk.write(f"log/{base:020d}.log", 0, [theirs])
    for right in copy.log.bases[:-1]:
        if right != base:
            verify(copy, right)
    with pytest.raises(ForeignSegment) as found:
        verify(copy, base)
    assert (found.value.offset, found.value.end) == (base, end) and copy.log.stored.is_damaged(found.value)
    copy.log.damaged_at(found.value)
    repair(copy.log, others(other, base, end))
    assert copy.log.damage is None and copy.image() == other.image()
    verify(copy, base)
    assert theirs.rstrip(b"\0") in [
        copy.disk.read(f"quarantine/{name}", 0, size) for name in copy.disk.names("quarantine")
    ]


def test_is_damaged_outside_the_log_is_false():
    copy = Copy.filled(60, tail_bytes=0)
    copy.drop_oldest_segment()
    copy.messages("not flushed")
    log, start, end = copy.log, copy.log.start, copy.log.flushed_end
    problem = {offset: CorruptFrame(offset, "test") for offset in (0, start, end - 8, end)}
    assert [log.stored.is_damaged(problem[offset]) for offset in (0, start, end - 8, end)] == [
        False,
        False,
        True,
        False,
    ]
    copy.flip(start + 120)
    assert log.stored.is_damaged(problem[start])
    first, second, third = log.bases[:3]
    foreign = [ForeignSegment(first, second), ForeignSegment(first, third), ForeignSegment(0, first)]
    assert [log.stored.is_damaged(segment) for segment in foreign] == [True, False, False]


def test_damage_met_by_several_readers():
    copy, other = Copy.filled(60, tail_bytes=0), Copy.filled(60, tail_bytes=0)
    first, second, behind = (frame_offsets(copy, 0)[at] for at in (10, 20, 21))
    for offset in (first, second):
        copy.flip(offset + 120)
    for offset in (second, first, second, first):
        copy.log.damaged_at(CorruptFrame(offset, "test"))
    assert [bad.begin for bad in copy.log.damaged] == [second, first]
    assert copy.log.damage == (second, behind, "test") and copy.log.health.is_of(copy.log.damage)
    repair(copy.log, others(other, second, behind))
    assert copy.log.damage is None and copy.log.health.is_of(None)
    copy.log.damaged_at(CorruptFrame(second, "test"))
    assert [bad.begin for bad in copy.log.damaged] == [second, first, second], "it came back"
    assert copy.log.damage.begin == second


@pytest.mark.parametrize("segments_damaged", [1, 2, 3])
def test_damage_of_several_segments_is_repaired_in_pieces(segments_damaged):
    """The other copy's pieces end anywhere; one may hold frames of two segments."""
    copy, other = Copy.filled(60, tail_bytes=0), Copy.filled(60, tail_bytes=0)
    bases = copy.log.bases
    begin, end = frame_offsets(copy, bases[1])[2], bases[1 + segments_damaged]
    for base, following in pairwise(bases[1 : 2 + segments_damaged]):
        copy.disk.truncate(segments.log_name(base), max(begin - base, 0))
        copy.disk.write(segments.log_name(base), following - base, [bytes(5000)])  # a crash may leave some zeros
    copy.log.damaged_at(CorruptFrame(begin, "test"))
    copy.log.damage = copy.log.damage._replace(end=end)
    whole = other.whole()
    ends = [frame for frame in frame_offsets(other, begin) if begin < frame <= end]
    for stop in (ends[1], ends[-3], end):
        assert copy.log.damage[:2] == (begin, end)
        repair(copy.log, whole[begin:stop])
        begin = stop
    assert copy.log.damage is None and copy.whole() == whole
    sizes = [
        (disk.size(name), name) for disk in (copy.disk, other.disk) for name in map("log/{:020d}.log".format, bases)
    ]
    assert sizes[: len(bases)] == sizes[len(bases) :]


@pytest.mark.parametrize("is_cut", [True, False])
def test_dropped_segment_ends_its_damage(is_cut):
    copy = Copy.filled(60, tail_bytes=0)
    if is_cut:
        copy.log.cut(copy.log.end - 8, "test")
        copy.disk.put(segments.TAIL_CUT, b"test")
    second = copy.log.bases[1]
    for offset, is_over in ((second, False), (second - 8, True)):
        again = Copy(copy.disk.copy(), tail_bytes=0)
        again.log.damaged_at(CorruptFrame(offset, "test"))
        again.drop_oldest_segment()
        assert again.log.start == second and (again.log.damage is None) == is_over
        assert again.log.health.is_of(again.log.damage) and again.log.is_tail_cut == is_cut
        if is_over:
            assert (again.log.health.state is LogHealth.TAIL_CUT) == is_cut


def test_high_watermark_is_searched_behind_all_damage():
    """Any frame of any segment may state it."""
    for behind, is_known in ((-8, False), (0, False), (8, True)):
        copy = Copy.begun(MemoryDisk(), segment_bytes=700, tail_bytes=0)
        copy.messages("a", size=100)
        offset = copy.log.end
        watermarks = [0, 0, 0, *[offset] * 6]
        second = [copy.messages(f"m{i}", size=100, high_watermark=end) for i, end in enumerate(watermarks)][4].offset
        copy.messages("b", size=100, high_watermark=offset + behind)
        copy.messages("c", size=100)
        copy.flush()
        for bad in (offset, second):
            copy.flip(bad + 120)
        for base in copy.log.bases[1:]:
            copy.disk.remove(segments.snapshot_name(base))
        log = copy.reopen()
        assert log.health.is_unreplayed and log.damage.begin == offset and log.state.high_watermark == 0, (
            "not replayed yet"
        )
        assert log.stored.may_be_acknowledged(log.damage, log.state.high_watermark) is is_known


def test_damaged_bytes_end_at_the_next_frame():
    copy = Copy.filled(60, tail_bytes=0)
    whole, (first, behind, *_, last) = copy.whole(), frame_offsets(copy, 0)
    assert copy.log.stored.read_damaged(first) == whole[first:behind]
    assert copy.log.stored.read_damaged(last) == whole[last:]


@pytest.mark.parametrize("is_only", [True, False])
@pytest.mark.parametrize("is_bad", [True, False])
def test_only_segment_without_snapshot_rolls(is_only, is_bad):
    copy = Copy.filled(60, tail_bytes=0)
    while len(copy.log.bases) > (1 if is_only else 2):
        copy.drop_oldest_segment()
    if is_bad:
        for base in copy.log.bases:
            copy.disk.flip(segments.snapshot_name(base), 100)
    segments_before, rolls = len(copy.log.bases), is_only and is_bad
    assert copy.log.roll_if_no_snapshot() is rolls
    copy.messages("a", size=0)
    assert len(copy.log.bases) == segments_before + rolls
    copy.messages("b", size=0)
    assert len(copy.log.bases) == segments_before + rolls, "once"


def test_put_snapshot_accepts_only_its_segment():
    copy, other = Copy.filled(60, tail_bytes=0), Copy.filled(60, tail_bytes=0)
    base, chain, _ = other.log.stored.verify(0, 0, None, 1 << 20)
    snapshot = other.disk.read(segments.snapshot_name(base), 0, 1 << 20)
    copy.disk.remove(segments.snapshot_name(base))
    frame = other.log.stored.read(base, other.log.end, 1).frames[0]
    for wrong in ((base, chain + 1), (base + 8, chain), (frame.end, frame.chain)):
        copy.log.put_snapshot(*wrong, snapshot)
        assert not copy.disk.has(segments.snapshot_name(wrong[0]))
    copy.log.put_snapshot(base, chain, snapshot)
    assert copy.image() == other.image()


def test_state_before_a_lost_snapshot():
    copy = Copy.filled(60, tail_bytes=0)
    zero, first, second, third, *_, closed, newest = copy.log.bases
    names = {base: segments.snapshot_name(base) for base in copy.log.bases}
    for base in (zero, first, newest, first + 8):
        assert copy.log.stored.state_before_lost_snapshot(base) is None, (
            "its snapshot is whole, or no segment ends there"
        )
    for base in (first, third):
        copy.disk.flip(names[base], 100)
    copy.disk.remove(names[zero])
    state, end = copy.log.stored.state_before_lost_snapshot(zero)
    assert (state, end) == (State(), first)
    copy.log.stored.fold_on(state, end, 500)
    while state.end < end:
        copy.log.stored.fold_on(state, end, 500)
    assert encode_snapshot(state) == Copy.filled(60, tail_bytes=0).disk.read(names[first], 0, 1 << 20)
    assert copy.log.stored.state_before_lost_snapshot(first) is None, "it begins without a snapshot"
    state, end = copy.log.stored.state_before_lost_snapshot(second)
    assert (state.end, end) == (second, third)
    state.chain += 1
    with pytest.raises(CorruptFrame, match="another history"):
        copy.log.stored.fold_on(state, end, 500)
    copy.disk.flip(names[newest], 100)
    assert copy.log.stored.state_before_lost_snapshot(closed)[1] == newest
    copy = Copy.filled(60, tail_bytes=0)
    while copy.log.bases[-1] == newest:
        copy.flush()
        copy.messages("n", size=100)
    assert copy.log.bases[-1] == copy.log.flushed_end
    assert copy.log.stored.state_before_lost_snapshot(newest) is None, "it is not written yet"


def test_segment_without_frames_does_not_roll():
    copy, other = Copy(), Copy.filled(60, tail_bytes=0)
    other.drop_oldest_segment()
    base, _, snapshot = other.log.stored.seed_start()
    copy.log.seed(base, snapshot, "test")
    copy.disk.remove(segments.snapshot_name(base))
    assert not copy.log.roll_if_no_snapshot()


def test_offset_0_needs_no_snapshot():
    copy = Copy.filled(3, tail_bytes=0)
    copy.disk.remove(segments.snapshot_name(0))
    assert not copy.log.roll_if_no_snapshot() and copy.log.stored.start_chain() == 0
    first, second = copy.log.stored.read(0, copy.log.end, 1 << 20).frames[:2]
    copy.flip(second.offset + 8)
    assert copy.log.chain_is(second.offset, first.chain)


def test_verify_finds_a_foreign_frame():
    copy, stranger = (Copy.filled(60, name=name, tail_bytes=0) for name in "mn")
    base, following = copy.log.bases[1:3]
    frames = copy.log.stored.read(base, following, 1 << 20).frames
    for bad in frames[1:]:
        again = Copy(copy.disk.copy(), tail_bytes=0)
        theirs = stranger.whole()[bad.offset : bad.end]
        again.disk.write(segments.log_name(base), bad.offset - base, [theirs])
        for bytes_max in (1 << 20, bad.end - bad.offset):
            with pytest.raises(CorruptFrame) as found:
                at, chain, is_whole = base, None, False
                while not is_whole:
                    at, chain, is_whole = again.log.stored.verify(base, at, chain, bytes_max)
            assert type(found.value) is CorruptFrame and found.value.offset in (bad.offset, bad.end), bytes_max


@pytest.mark.parametrize("at_run_time", [False, True])
@pytest.mark.parametrize("which", [20, -1])
def test_repair_writes_only_the_damage(at_run_time, which):
    copy, other = Copy.filled(60, tail_bytes=0), Copy.filled(60, tail_bytes=0)
    other.messages("the other copy is ahead")
    other.flush()
    offset, *behind = frame_offsets(copy, 0)[which:]
    end = behind[0] if behind else copy.log.end
    copy.flip(offset + 120)
    if at_run_time or behind:
        copy.log.damaged_at(CorruptFrame(offset, "test"))
    else:
        copy.messages("behind it")
        copy.flush()
        copy.reopen()
    written, write = [], copy.disk.write
    copy.disk.write = lambda name, at, buffers: written.append(sum(map(len, buffers))) or write(name, at, buffers)
    repair(copy.log, others(other, offset, other.log.end))
    assert copy.log.damage is None and written == [end - offset]


def test_foreign_frames_behind_damage_are_repaired_in_turn():
    """Recovery stops at the first damage; frames behind it prove nothing about frames before it."""
    copy, other, stranger = (Copy.filled(60, name=name, tail_bytes=0) for name in "mmn")
    newest = copy.log.bases[-1]
    first, second, *_ = frame_offsets(copy, newest)
    copy.disk.write(segments.log_name(newest), second - newest, [stranger.whole()[second:]])
    copy.flip(first + 120)
    log = copy.reopen()
    assert log.damage[:2] == (first, second)
    for _ in range(20):
        if log.damage is not None:
            repair(log, other.whole()[log.damage.begin : log.damage.end])
    if log.is_tail_cut:
        log.append_frames(log.end, memoryview(other.whole()[log.end :]))
        copy.flush()
    assert log.damage is None and copy.whole() == other.whole()


def test_repair_stops_at_a_frame_crossing_segments():
    """That frame fits in no place. It was written repeatedly, and a disk with a bad block there refused each time."""
    copy, other = Copy.filled(1, tail_bytes=0), Copy.filled(1, tail_bytes=0)
    for written, size in ((copy, 100), (other, 133)):
        parted = written.log.end
        written.fill(60, size=size)
    border, *behind = copy.log.bases[1:]
    copy.disk.write(segments.log_name(0), parted, [b"\xde" * (border - parted)])
    for base in (border, *behind):
        copy.disk.remove(segments.snapshot_name(base))
    log, whole = copy.reopen(), copy.disk.read(segments.log_name(border), 0, 1 << 20)
    assert log.damage[:2] == (parted, border) and log.health.is_unreplayed
    crossing = next(at for at, end in pairwise(frame_offsets(other, parted)) if at < border < end)
    repair(log, others(other, parted, other.log.end))
    assert log.damage[:2] == (crossing, border) and log.end == crossing
    image = copy.image()
    with pytest.raises(Diverged):
        repair(log, others(other, crossing, other.log.end))
    assert copy.image() == image and copy.disk.read(segments.log_name(border), 0, 1 << 20) == whole
    log.cut(crossing, "another history")
    log.append_frames(crossing, memoryview(other.whole()[crossing:]))
    copy.flush()
    assert log.damage is None and copy.whole() == other.whole()


def test_unsynced_repair_survives_a_power_cut():
    """The next process used to read and count it from memory alone (seed 579416)."""

    def killed(name):
        raise KeyboardInterrupt

    copy, other = Copy.filled(60, tail_bytes=0), Copy.filled(60, tail_bytes=0)
    offset, end = frame_offsets(copy, 0)[10:12]
    copy.flip(offset + 120)
    copy.log.damaged_at(CorruptFrame(offset, "test"))
    copy.disk.sync = killed
    with pytest.raises(KeyboardInterrupt):
        repair(copy.log, others(other, offset, end))
    del copy.disk.sync
    copy.disk.reopen()
    assert copy.reopen().damage is None and copy.whole() == other.whole()
    copy.disk.crash()
    copy.disk.reopen()
    assert copy.reopen().damage is None and copy.whole() == other.whole()


@pytest.mark.parametrize("which", range(4))
def test_repair_writes_its_last_block_whole(which):
    copy = Copy.filled(60, size=900, segment_bytes=20_000, tail_bytes=0)
    base, following = copy.log.bases[1:3]
    frames, whole = copy.log.stored.read(base, following, 1 << 20).frames, copy.whole()
    begin, stop, end = frames[which].offset, frames[which].end, frames[which + 4].offset
    copy.log.damaged_at(CorruptFrame(begin, "test"))
    copy.log.damage = copy.log.damage._replace(end=end)
    written, write = [], copy.disk.write
    copy.disk.write = lambda name, at, data: written.append((at, at + sum(map(len, data)))) or write(name, at, data)
    repair(copy.log, whole[begin:stop])
    block_end = -(-(stop - base) // BLOCK_BYTES) * BLOCK_BYTES
    assert written == [(begin - base, min(block_end, end - base))] and copy.log.damage[:2] == (stop, end)
    repair(copy.log, whole[stop:end])
    assert copy.log.damage is None and copy.whole() == whole


@pytest.mark.parametrize("is_all", [False, True], ids=["the other copy ends within it", "the other copy has all"])
@pytest.mark.parametrize("has_snapshot", [True, False], ids=["", "and the snapshot of its segment"])
def test_damage_extends_back_to_its_begin(has_snapshot, is_all):
    """An unreadable block can only be written whole (seeds 7138, 4009)."""
    copy, other = Copy.filled(60, tail_bytes=0), Copy.filled(60, tail_bytes=0)
    base, following = copy.log.bases[1:3]
    offsets = [offset for offset in frame_offsets(copy, base) if offset < following]
    for offset in offsets[1:] if has_snapshot else offsets:
        copy.flip(offset)
    if not has_snapshot:
        copy.disk.put(segments.snapshot_name(base), b"")
    copy.log.damaged_at(CorruptFrame(offsets[3], "met here"))
    begin, theirs_end = offsets[1] if has_snapshot else base, following if is_all else offsets[-2]
    with pytest.raises(Diverged):
        repair(copy.log, others(other, offsets[3], theirs_end))
    assert copy.log.damage[:2] == (begin, following)
    repair(copy.log, others(other, begin, theirs_end))
    assert (copy.log.damage is None) if is_all else copy.log.damage[:2] == (theirs_end, following)
    assert copy.log.stored.read_bytes(base, theirs_end) == other.log.stored.read_bytes(base, theirs_end)


def test_frames_that_miss_the_following_chain_are_refused():
    copy, stranger = Copy.filled(20, tail_bytes=0), Copy.filled(20, tail_bytes=0)
    for written, name in ((copy, "m"), (stranger, "n")):
        written.fill(40, name=name)
    offset, end = [at for at in frame_offsets(copy, 0) if copy.whole()[at:] != stranger.whole()[at:]][20:22]
    assert copy.whole()[:offset] == stranger.whole()[:offset]
    copy.flip(offset + 120)
    copy.log.damaged_at(CorruptFrame(offset, "test"))
    with pytest.raises(Diverged):
        repair(copy.log, others(stranger, offset, end))


def test_repair_ends_at_another_epoch():
    """A slave could not cut its tail there while the end of the common frames was unreadable, and waited for ever (seed
    554384).
    """
    copy, other = Copy.filled(10, tail_bytes=0), Copy.filled(10, tail_bytes=0)
    for written in (copy, other):
        written.begin_epoch(Epoch(1, 2))
        written.fill(10)
    parted = copy.log.end
    for written, term in ((copy, 2), (other, 3)):
        written.begin_epoch(Epoch(term, 1))
        written.fill(20, name=f"of term {term}")
    begin, end = frame_offsets(copy, 0)[7], frame_offsets(copy, parted)[3]
    for frame, _ in decode_frames(copy.whole()[begin:end], begin, None):
        copy.flip(frame.offset)
    copy.log.damaged_at(CorruptFrame(begin, "test"))
    assert copy.log.damage[:2] == (begin, end) and begin < parted < end
    assert not copy.log.chain_is(parted, other.log.state.epochs[-1].chain)
    repair(copy.log, other.whole()[begin:])
    assert copy.log.damage[:2] == (parted, end)
    image = copy.image()
    with pytest.raises(Diverged):
        repair(copy.log, other.whole()[parted:])
    assert copy.image() == image
    assert copy.log.chain_is(parted, other.log.state.epochs[-1].chain)
    copy.log.cut(parted, "conflict")
    copy.log.append_frames(parted, memoryview(other.whole()[parted:]))
    copy.flush()
    assert copy.log.damage is None and copy.whole() == other.whole()
