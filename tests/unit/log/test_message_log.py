"""Core. Appending, reading, cutting and seeding a message log."""

from __future__ import annotations

import json

import pytest

from qmq.errors import BrokenInvariant, CorruptFrame, DiskFailed
from qmq.log import message_log, segments, stored
from qmq.log.disk import PageCache
from qmq.log.frame import Frame, FrameKind, decode_frames
from qmq.log.recovery import LogHealth
from qmq.log.repair import repair
from qmq.log.retention import RetentionDecision, encode_retention
from qmq.log.segments import index_name, log_name, snapshot_name
from qmq.subjects import NAME_BYTES_MAX, check_subject, dead_letter_subject
from qmq.types import Epoch
from tests.support.effort import every
from tests.unit.log.logs import Copy


def report_of(copy: Copy, name: str) -> dict:
    name = name.replace(".bytes", ".json")
    return json.loads(copy.disk.read(name, 0, copy.disk.size(name)))


def test_frame_above_the_size_limit_is_refused(monkeypatch):
    copy = Copy.begun()
    end = copy.log.end
    monkeypatch.setattr(message_log, "FRAME_BYTES_MAX", 1_000)
    with pytest.raises(BrokenInvariant, match="1000 bytes"):
        copy.messages("large", size=2_000)
    assert copy.log.end == end and copy.messages("small").offset == end


def test_cut_frames_are_kept_in_quarantine():
    copy = Copy.begun()
    kept = copy.messages("kept")
    copy.messages("x", "y")
    copy.messages("without properties: its bytes end with zeros", size=0)
    copy.flush()
    bytes_before = copy.whole()[kept.end :]
    name = copy.log.cut(kept.end, "conflict")
    assert report_of(copy, name)["message_ids"] == ["x", "y", "without properties: its bytes end with zeros"]
    assert copy.disk.read(name, 0, copy.disk.size(name)) == bytes_before.rstrip(b"\0")


@pytest.mark.parametrize("tail_bytes", [0, 1 << 20])
def test_offset_within_a_frame_has_no_chain(tail_bytes):
    copy = Copy.filled(60, tail_bytes=tail_bytes)
    copy.messages("not flushed")
    for offset in range(8, copy.log.end, 8 * every(5)):
        assert not copy.log.chain_is(offset, 1), offset
    assert not copy.log.chain_is(copy.log.end + 8, 1)


def test_chain_before_a_damaged_frame_is_known():
    """Otherwise a replaced tail that is damaged could never be cut (seed 1724)."""
    copy = Copy.filled(60, tail_bytes=0)
    for ref in copy.log.frames("s1", 7, 3):
        base = max(base for base in copy.log.bases if base <= ref.offset)
        chain = copy.log.stored.read(base, ref.offset, 1 << 20).chain if base < ref.offset else None
        copy.flip(ref.offset + 20)
        if chain is not None:
            assert copy.log.chain_is(ref.offset, chain)
        assert not copy.log.chain_is(ref.offset, 1)
        copy.flip(ref.offset + 20)


def test_zeros_behind_a_segment_are_ignored():
    """A crash may leave a part of the reserved bytes."""
    copy = Copy.filled(60, tail_bytes=0)
    first, second = copy.log.bases[1], copy.log.bases[2]
    whole = copy.whole()
    name = f"log/{first:020d}.log"
    copy.disk.write(name, copy.disk.size(name), [bytes(80)])
    assert copy.whole() == whole
    begin, end = second - 40, second + 40
    assert copy.log.stored.read_bytes(begin, end) == whole[begin - copy.log.start : end - copy.log.start]


READERS = {
    "frames": lambda log, ref: log.stored.read(ref.offset, log.end, 1),
    "bodies": lambda log, ref: log.stored.read_bodies([ref]),
    "labels": lambda log, ref: log.stored.read_labels([ref]),
    "bytes": lambda log, ref: log.stored.read_bytes(ref.offset, ref.offset + ref.length),
    "timestamp": lambda log, ref: log.timestamp_at(ref.offset),
}


@pytest.mark.parametrize("what", READERS)
def test_reading_a_dropped_segment_is_a_corrupt_frame(what):
    """A failed disk would end the process. Reads run on threads, some time after the lookup."""
    copy = Copy.filled(40, tail_bytes=0)
    (ref,) = copy.log.frames("s0", 0, 1)
    copy.drop_oldest_segment()
    assert ref.offset < copy.log.start
    with pytest.raises(CorruptFrame) as found:
        READERS[what](copy.log, ref)
    assert found.value.offset == ref.offset


def test_frames_below_the_retained_start_are_skipped(monkeypatch):
    copy = Copy.begun()
    while len(copy.log.bases) < 5:
        copy.messages("m", size=10)
        copy.flush()
    log, asked, look_up = copy.log, [], copy.log._consume_log.frames
    monkeypatch.setattr(log._consume_log, "frames", lambda *args: asked.append(args) or look_up(*args))
    everything = look_up("s", 0, 1_000)
    for start in (log.bases[3], everything[7].offset, everything[-1].offset):
        log.state.kept.start = start
        kept = [ref for ref in everything if ref.offset >= start]
        assert log.frames("s", 0, 1) == kept[:1] and log.frames("s", 0, 1_000) == kept
        assert log.frames("s", kept[0].begin, 1) == kept[:1]
    log.state.kept.start = log.bases[3]
    asked.clear()
    log.frames("s", 0, 1)
    assert len(asked) == 2
    log.state.kept.start = log.end
    assert log.frames("s", 0, 1) == []


def test_intact_bytes_end_before_damage():
    copy = Copy.filled(3, tail_bytes=0)
    bad = copy.messages("bad")
    copy.flush()
    copy.disk.flip(f"log/{0:020d}.log", 8 * bad.end - 1)
    assert copy.log.stored.read_intact(0, copy.log.end, 1 << 20) == copy.whole()[: bad.offset]
    with pytest.raises(CorruptFrame, match="wrong body CRC"):
        copy.log.stored.read_intact(bad.offset, copy.log.end, 1 << 20)


def test_frames_of_one_packet_are_separate_tail_entries():
    """A promoted slave ships and delivers them one by one."""
    master, slave = Copy(), Copy()
    frames = [master.begin_epoch(), *(master.messages(id) for id in "abc")]
    master.flush()
    whole, first = master.whole(), frames[0].end
    slave.log.append_frames(0, memoryview(whole)[:first])
    slave.log.append_frames(first, memoryview(whole)[first:])
    for frame in frames:
        buffers, end, chain = slave.log.tail_frames(frame.offset, 1)
        assert (b"".join(buffers), end, chain) == (whole[frame.offset : frame.end], frame.end, frame.chain)
    slave.flush()
    assert slave.whole() == whole
    with pytest.raises(CorruptFrame, match="this log ends at"):
        slave.log.append_frames(first, memoryview(whole)[first:])


def test_first_kept_sequence_of_a_subject():
    copy = Copy.filled(60)
    base = copy.log.bases[2]
    first = next(ref.begin for ref in copy.log.frames("s1", 0, 60) if ref.offset >= base)
    assert 0 < first == copy.log.first_kept("s1", base) and copy.log.first_kept("s1", 0) == 0
    assert copy.log.first_kept("nobody wrote to it", base) == 0
    copy.messages("a", subject="only before")
    copy.fill(60)
    assert copy.log.first_kept("only before", copy.log.bases[-1]) == 1


def test_adjacent_bodies_are_read_together(monkeypatch):
    copy = Copy.begun(tail_bytes=0)
    for id, subject in (("a", "s"), ("b", "s"), ("c", "s"), ("x", "t"), ("d", "s")):
        copy.messages(id, subject=subject)
    copy.flush()
    refs, read, read_raw = copy.log.frames("s", 0, 9), [], stored.read_raw
    monkeypatch.setattr(stored, "read_raw", lambda *args: read.append(args[2:]) or read_raw(*args))
    assert [frame.offset for frame, _ in copy.log.stored.read_bodies(refs)] == [ref.offset for ref in refs]
    ends = [ref.offset + ref.length for ref in refs]
    assert read == [(refs[0].offset, ends[2]), (refs[3].offset, ends[3])]
    for some in (refs[:3], refs[1:3]):
        read.clear()
        assert len(copy.log.stored.read_bodies(some)) == len(some) and read == [(some[0].offset, ends[2])]


def a_log(*sizes: int, subject: str = "s", segment_bytes: int = 1 << 20) -> tuple[Copy, list[Frame]]:
    """Return a log with frames of these sizes in one segment."""
    copy = Copy(segment_bytes=segment_bytes, tail_bytes=0)
    frames = [copy.begin_epoch(), *(copy.messages(f"m{i}", size=size, subject=subject) for i, size in enumerate(sizes))]
    copy.flush()
    return copy, frames


@pytest.mark.parametrize("bytes_max", [1, 120, 1000, 5000, 30_000, 1 << 20])
@pytest.mark.parametrize("at", range(5))
def test_chunk_has_the_requested_bytes_or_one_frame(at, bytes_max):
    """A part of a header does not show the frame's length, so at least the longest header is read."""
    copy, frames = a_log(20, 20_000, 20, 20_000, 20)
    begin = frames[at].offset
    most = bytes_max if bytes_max >= frames[at].body_at else segments.HEADER_BYTES_MAX
    whole, sizes = copy.whole(), copy.read_sizes()
    for end in (frame.end for frame in frames[at:]):
        sizes.clear()
        chunk = copy.log.stored.read(begin, end, bytes_max)
        assert max(sizes) <= min(end - begin, max(most, frames[at].end - begin)), "bytes behind it were read"
        inside = [frame for frame in frames if begin <= frame.offset and frame.end <= min(end, begin + most)]
        assert chunk.frames == (inside or [frames[at]]) and chunk.chain == chunk.frames[-1].chain
        assert (chunk.begin, chunk.end) == (begin, chunk.frames[-1].end)
        assert chunk.data == whole[begin : chunk.end]


def test_longest_header_is_read_and_found():
    """A log can read every frame that can be encoded; names are checked elsewhere."""
    copy, frames = a_log(0, 0, 0, subject="x" * 65_529)
    for at, frame in enumerate(frames):
        assert copy.log.stored.read(frame.offset, copy.log.end, 1).frames == [frame]
        assert copy.log.stored.next_frame(frame.offset) == frame.offset
        assert copy.log.stored.next_frame(frame.offset + 8) == (
            frames[at + 1].offset if frame is not frames[-1] else None
        )


def test_next_frame_behind_the_smallest_damage():
    """Frames begin at multiples of 8."""
    copy, frames = a_log(20, 20)
    assert segments.frame_behind(copy.disk, [0], frames[1].offset - 8) == frames[1].offset
    assert segments.frame_behind(copy.disk, [0], frames[1].offset) == frames[2].offset
    assert segments.frame_behind(copy.disk, [0], frames[2].offset) is None


def test_search_without_result_reads_once():
    copy, frames = a_log(20, 20)
    sizes = copy.read_sizes()
    assert copy.log.stored.next_frame(frames[-1].offset + 8) is None
    assert sizes == [copy.log.end - frames[-1].offset - 8]


def test_raw_range_spans_segments():
    copy = Copy.filled(12, segment_bytes=700, tail_bytes=0)
    whole, borders = copy.whole(), [*copy.log.bases, copy.log.end]
    around = sorted({max(border + by, 0) for border in borders for by in (-9, -1, 0, 1, 9)})
    for begin in around:
        for end in around:
            assert segments.read_raw(copy.disk, copy.log.bases, begin, end) == whole[begin:end]
            if begin < copy.log.end:
                assert copy.log.stored.read_bytes(begin, end) == whole[begin:end]
    assert segments.read_raw(copy.disk, [], 0, 9) == b""
    copy.drop_oldest_segment()
    assert segments.read_raw(copy.disk, copy.log.bases, 0, copy.log.end) == whole[copy.log.start :]


@pytest.mark.parametrize("who", ["master", "slave"])
def test_tail_returns_whole_frames(who):
    master, slave = Copy(), Copy()
    frames = [master.begin_epoch(), *(master.messages(id, size=size) for id, size in (("a", 20), ("b", 500), ("c", 0)))]
    master.flush()
    whole = master.whole()
    slave.log.append_frames(0, memoryview(whole))
    log = (master if who == "master" else slave).log
    for at, frame in enumerate(frames):
        found, body = log.tail_body(frame.offset)
        assert found == frame and bytes(body) == whole[frame.offset + frame.body_at : frame.end]
        for last in frames[at:]:
            size = last.end - frame.offset
            for bytes_max in (size, size + 87):  # less than a frame more
                buffers, end, chain = log.tail_frames(frame.offset, bytes_max)
                assert b"".join(buffers) == whole[frame.offset : last.end] and (end, chain) == (last.end, last.chain)
        buffers, end, _ = log.tail_frames(frame.offset, 1)
        assert (len(b"".join(buffers)), end) == (frame.end - frame.offset, frame.end), "at least one"
    for nowhere in (8, log.end):
        assert log.tail_body(nowhere) is None and log.tail_frames(nowhere, 1) is None


@pytest.mark.parametrize("too_few", [0, 1])
def test_tail_size_counts_entry_overhead(too_few):
    size = 160 + message_log.TAIL_ENTRY_BYTES
    copy = Copy.begun(tail_bytes=5 * size - too_few)
    frames = [copy.messages(f"{i}", size=20) for i in range(10)]
    assert {frame.end - frame.offset for frame in frames} == {160}
    copy.flush()
    kept = [frame for frame in frames if copy.log.tail_body(frame.offset) is not None]
    assert kept == frames[too_few - 5 :]
    copy.messages("m", size=20)
    copy.flush()
    assert copy.log.tail_body(kept[0].offset) is None and copy.log.tail_body(kept[1].offset) is not None


def test_segments_roll_at_the_exact_size():
    copy = Copy(segment_bytes=120 + 160 + 160)
    epoch, small = copy.begin_epoch(), [copy.messages(f"{i}", size=20) for i in range(3)]
    assert (epoch.end, copy.log.bases) == (120, [0, small[2].offset])
    large = [copy.messages(f"l{i}", size=5000) for i in range(2)]
    copy.messages("m", size=20)
    copy.flush()
    assert copy.log.bases == [0, small[2].offset, large[0].offset, large[1].offset, large[1].end]
    assert copy.reopen().end == copy.log.end and copy.log.state.next_sequence == {"s": 6}
    alone = Copy(segment_bytes=100)
    first = alone.begin_epoch()
    assert alone.log.bases == [0] and alone.messages("a").offset == alone.log.bases[1] == first.end


def test_timestamp_of_each_frame():
    copy = Copy(tail_bytes=0)
    frames = [copy.begin_epoch()]
    for i in range(60):
        frames.append(copy.messages(f"m{i}", timestamp_ms=1000 + i))
        if i != 59:
            copy.flush()
    for frame in frames:
        assert copy.log.timestamp_at(frame.offset) == frame.timestamp_ms
    assert copy.log.timestamp_at(copy.log.end) == frames[-1].timestamp_ms


def test_start_chain_comes_from_the_snapshot():
    copy = Copy(tail_bytes=0)
    assert copy.log.stored.start_chain() == 0
    copy.begin_epoch()
    copy.fill(60)
    assert copy.log.stored.start_chain() == 0 and copy.log.stored.seed_start()[:2] == (0, 0)
    copy.drop_oldest_segment()
    base, chain, snapshot = copy.log.stored.seed_start()
    assert base == copy.log.start and copy.log.stored.start_chain() == chain != 0 and copy.log.chain_is(base, chain)
    assert copy.disk.read(snapshot_name(base), 0, 1 << 20) == snapshot
    copy.disk.flip(snapshot_name(base), 100)
    assert copy.log.stored.seed_start()[0] == copy.log.bases[1]
    for base in copy.log.bases:
        copy.disk.remove(snapshot_name(base))
    with pytest.raises(CorruptFrame, match="no snapshot"):
        copy.log.stored.seed_start()


def test_derived_files_are_returned_as_stored():
    copy = Copy.filled(60)
    base = copy.log.bases[1]
    index, snapshot = (copy.disk.read(name(base), 0, 1 << 20) for name in (index_name, snapshot_name))
    assert index and snapshot and copy.log.stored.derived_files(base) == (index, snapshot)
    assert copy.log.stored.derived_files(base, index_only=True) == (index, b"")
    copy.disk.remove(index_name(base))
    assert copy.log.stored.derived_files(base) == (b"", snapshot) and copy.log.stored.derived_files(8) == (b"", b"")


def test_look_again_checks_closed_segments_only():
    copy = Copy()
    copy.log.stored.look_again(0)
    copy.log.stored.check_newest()
    copy.begin_epoch()
    copy.log.stored.check_newest()
    copy.fill(60)
    for base in copy.log.bases:
        copy.log.stored.look_again(base)
    copy.disk.remove(log_name(copy.log.bases[-1]))
    copy.log.stored.look_again(copy.log.bases[-1])
    for closed in (copy.log.bases[1], copy.log.bases[-2]):
        copy.disk.remove(log_name(closed))
        copy.log.stored.look_again(closed - 8)
        with pytest.raises(CorruptFrame, match="its file is gone"):
            copy.log.stored.look_again(closed)


def test_unwritten_frames_go_to_quarantine():
    for change in ("cut", "set aside", "seed"):
        copy = Copy.begun()
        kept = copy.messages("kept")
        copy.flush()
        copy.messages("not written")
        other = Copy.filled(60)
        other.drop_oldest_segment()
        base, _, snapshot = other.log.stored.seed_start()
        if change == "cut":
            copy.log.cut(kept.end, "test")
        elif change == "set aside":
            copy.log.set_aside("test")
        else:
            copy.log.seed(base, snapshot, "test")
        assert copy.log.is_idle and copy.log.end == copy.log.flushed_end == {"cut": kept.end, "seed": base}.get(
            change, 0
        )
        kept_aside = [name for name in copy.disk.all_names() if name.startswith("quarantine/")]
        assert any(b"not written" in copy.disk.read(name, 0, 1 << 20) for name in kept_aside)
        assert copy.log.is_tail_cut == (change != "cut")


def test_snapshot_of_another_base_is_refused():
    copy, other = Copy.filled(60), Copy.filled(60)
    copy.messages("not written")
    before, snapshot = copy.image(), other.disk.read(snapshot_name(other.log.bases[1]), 0, 1 << 20)
    for wrong in (snapshot, snapshot[:-1]):
        with pytest.raises(CorruptFrame):
            copy.log.seed(other.log.bases[2], wrong, "test")
    assert copy.image() == before and not copy.log.is_idle


@pytest.mark.parametrize("where", ["before", "at", "behind"])
def test_seeded_copy_lacks_the_bytes_before_its_snapshot(where):
    copy, other = Copy(), Copy.filled(60)
    base = other.log.bases[2]
    start = {"before": 0, "at": base, "behind": base + 8}[where]
    copy.log.seed(base, other.disk.read(snapshot_name(base), 0, 1 << 20), "test", start=start)
    assert copy.log.end == base and copy.log.bases == ([0, base] if where == "before" else [base])
    assert (copy.log.damage and copy.log.damage[:2]) == ((0, base) if where == "before" else None)
    assert copy.disk.size(log_name(base)) == copy.segment_bytes and "damaged" not in "".join(copy.disk.all_names())
    copy.log.append_frames(base, memoryview(other.whole()[base:]))
    copy.flush()
    if where == "before":
        repair(copy.log, other.whole()[:base])
    assert copy.log.damage is None and copy.whole() == other.whole()[copy.log.start :]


def test_cuts_at_both_ends_of_the_log():
    copy = Copy.filled(60)
    copy.drop_oldest_segment()
    before, end = copy.image(), copy.log.end
    for behind in (end, end + 8):
        assert copy.log.cut(behind, "test") is None
    assert copy.image() == before and copy.disk.names("quarantine") == []
    start, chain = copy.log.start, copy.log.stored.start_chain()
    assert copy.log.cut(start, "test") is not None
    assert (copy.log.bases, copy.log.start, copy.log.end, copy.log.chain) == ([start], start, start, chain)
    copy.fill(60)
    assert copy.reopen().state == copy.log.state and copy.log.bases[0] == start
    for base in copy.log.bases[1:]:
        assert copy.log.frames("s0", 0, 1000) and copy.disk.size(log_name(base))


def test_cut_removes_the_index_of_its_segment():
    """The segment may close again, at the same offset."""
    copy = Copy.filled(60)
    base, following = copy.log.bases[1:3]
    cut_at = copy.log.stored.read(base, following, 1 << 20).frames[2].offset
    copy.log.cut(cut_at, "test")
    assert copy.disk.size(index_name(base)) == 0
    copy.fill(60, name="n")
    refs = [ref for subject in ("s0", "s1", "s2") for ref in copy.reopen().frames(subject, 0, 1000)]
    frames = [frame for frame, _ in decode_frames(copy.whole(), 0, 0) if frame.kind == FrameKind.MESSAGES]
    assert sorted(ref.offset for ref in refs) == [frame.offset for frame in frames]


def test_check_readable_stops_at_the_offset():
    copy = Copy(tail_bytes=0)
    copy.log.stored.check_readable(0)
    copy.begin_epoch()
    copy.fill(60)
    copy.drop_oldest_segment()
    frames = copy.log.stored.read(copy.log.start, copy.log.end, 1 << 20).frames
    bad = frames[5]
    copy.disk.flip(log_name(copy.log.start), 8 * (bad.offset - copy.log.start + 50))
    for fine in (0, *(frame.offset for frame in frames[:5])):
        copy.log.stored.check_readable(fine)
    for offset in (bad.offset, frames[6].offset):
        with pytest.raises(CorruptFrame) as found:
            copy.log.stored.check_readable(offset)
        assert found.value.offset == bad.offset
    copy.log.stored.check_readable(copy.log.end)


def test_each_set_aside_log_has_its_own_folder():
    copy = Copy()
    for _ in range(3):
        copy.begin_epoch()
        copy.log.set_aside("test")
    folders = {name.split("/")[1] for name in copy.disk.all_names() if name.startswith("quarantine/")}
    assert folders == {f"{0:020d}-{120:020d}-test-{n}" for n in range(3)}


def test_commit_writes_once_per_segment():
    copy = Copy.begun(segment_bytes=700)
    for i in range(6):
        copy.messages(f"m{i}", size=100)
    commit, (first, second) = copy.log.take_commit(), copy.log.bases[:2]
    ends = [*copy.log.bases[1:], copy.log.end]
    assert (commit.bytes, commit.end, commit.chain) == (copy.log.end, copy.log.end, copy.log.chain)
    writes = [step for step in commit.steps if hasattr(step, "buffers")]
    assert [(step.base, step.offset) for step in writes] == [(base, base) for base in copy.log.bases]
    assert [step.base + sum(map(len, step.buffers)) for step in writes] == ends and len(ends) > 1
    assert len(commit.steps) == 2 * len(writes) - 1 and first < second
    copy.log.perform(commit)
    copy.log.flushed(commit)
    copy.messages("b")
    commit = copy.log.take_commit()
    assert commit.bytes == copy.log.end - ends[-1]


def test_cut_tail_mark_stays_until_matched():
    copy = Copy.filled(3, tail_bytes=0)
    copy.disk.truncate(log_name(0), copy.log.end - 50)
    for log in (copy.reopen(), copy.reopen()):
        assert log.is_tail_cut and log.health.state is LogHealth.TAIL_CUT
    for _ in range(2):
        copy.log.tail_is_whole()
        assert not copy.log.is_tail_cut and copy.log.health.state is LogHealth.WHOLE
    assert copy.reopen().health.state is LogHealth.WHOLE
    copy.log.damaged_at(CorruptFrame(0, "test"))
    copy.log.tail_is_whole()
    assert copy.log.health.state is LogHealth.DAMAGED


def test_large_frame_fits_an_empty_seeded_segment():
    copy, other = Copy(segment_bytes=100), Copy.filled(60)
    other.drop_oldest_segment()
    base, _, snapshot = other.log.stored.seed_start()
    copy.log.seed(base, snapshot, "test")
    copy.log.append_frames(base, memoryview(other.whole()))
    copy.flush()
    assert copy.log.bases == sorted({base, *copy.log.bases}) and copy.whole() == other.whole()
    assert copy.reopen().end == other.log.end


def test_page_cache_sees_all_committed_bytes(monkeypatch):
    """Otherwise the last bytes of a closed segment stay cached for ever."""
    sizes = []
    monkeypatch.setattr(PageCache, "synced", lambda self, file, begin, end: sizes.append(end - begin))
    copy = Copy.begun(segment_bytes=700)
    for i in range(30):
        copy.messages(f"m{i}", size=100)
        if i % 7 == 0:
            copy.flush()
    copy.flush()
    assert len(copy.log.bases) > 3 and sum(sizes) == copy.log.end


def test_unflushed_frames_are_not_read_from_disk():
    copy = Copy()
    flushed = copy.begin_epoch()
    copy.flush()
    copy.messages("written")
    commit = copy.log.take_commit()
    copy.log.perform(commit)
    assert (
        copy.log.stored.read(0, commit.end, 1 << 20).end
        == len(copy.log.stored.read_intact(0, commit.end, 1 << 20))
        == flushed.end
    )
    assert len(copy.log.stored.read_bytes(0, commit.end)) == flushed.end
    copy.log.flushed(commit)
    assert (
        copy.log.stored.read(0, commit.end, 1 << 20).end
        == len(copy.log.stored.read_intact(0, commit.end, 1 << 20))
        == commit.end
    )
    assert copy.log.stored.read_bytes(0, commit.end) == copy.whole()


def test_closed_index_stays_in_memory_until_stored():
    copy = Copy.begun(segment_bytes=700, tail_bytes=0)
    first = copy.log.take_commit()
    frames = [copy.messages(f"m{i}", size=100) for i in range(6)]
    copy.log.perform(first)
    copy.log.flushed(first)
    closed = copy.log.bases[0]
    assert [ref.offset for ref in copy.log.frames("s", 0, 9)] == [frame.offset for frame in frames]
    copy.flush()
    whole = copy.disk.read(index_name(closed), 0, 1 << 20)
    copy.disk.remove(index_name(closed))
    assert [ref.offset for ref in copy.log.frames("s", 0, 9)] == [frame.offset for frame in frames]
    assert copy.disk.read(index_name(closed), 0, 1 << 20) == whole, "it was searched on disk"


def test_interrupted_seeding_leaves_a_consistent_log():
    other = Copy.filled(60)
    base = other.log.bases[2]
    snapshot, calls = other.disk.read(snapshot_name(base), 0, 1 << 20), 0
    while True:
        calls += 1
        copy = Copy.begun()
        end = copy.messages("own").end
        copy.flush()
        copy.disk.fail_after(calls)
        try:
            copy.log.seed(base, snapshot, "test", start=0)
            break
        except DiskFailed:
            copy.disk.heal()
        copy.disk.crash()
        copy.disk.reopen()
        log = copy.reopen()
        assert log.end in (0, end, base) and (log.is_tail_cut or log.end == end), calls
        assert (log.damage and log.damage[:2]) == ((0, base) if log.end == base else None), calls
    assert calls > 20 and copy.log.damage[:2] == (0, base)


@pytest.mark.parametrize(("start", "acknowledged", "may_go"), [(0, 1, 1), (-8, 1, 0), (8, 1, 1), (0, 0, 0)])
def test_oldest_segment_may_go_after_acknowledged_retention(start, acknowledged, may_go):
    copy = Copy.begun()
    assert not copy.log.oldest_may_go
    copy.fill(60)
    assert not copy.log.oldest_may_go
    while len(copy.log.bases) > 2:
        copy.drop_oldest_segment()
    kept = RetentionDecision(copy.log.bases[1] + start, "", {}, {})
    decided = copy.append(FrameKind.RETENTION, "", encode_retention(kept))
    copy.messages("m", high_watermark=decided.end if acknowledged else decided.offset)
    assert copy.log.oldest_may_go is bool(may_go)


def test_only_segment_stays():
    copy = Copy.filled(5, segment_bytes=1 << 20)
    decided = copy.append(FrameKind.RETENTION, "", encode_retention(RetentionDecision(copy.log.end - 8, "", {}, {})))
    copy.messages("m", high_watermark=decided.end)
    assert not copy.log.oldest_may_go


def test_any_frame_is_read_in_one_call():
    copy = Copy.begun(segment_bytes=30_000, tail_bytes=0)
    for i in range(12):
        copy.messages(f"m{i}", size=20_000 if i % 3 else 100)
    copy.flush()
    whole, sizes = copy.whole(), copy.read_sizes()
    frames = [frame for frame, _ in decode_frames(whole, 0, 0)]
    assert len(copy.log.bases) > 5
    for frame in frames:
        size = frame.end - frame.offset
        stop = min([base for base in copy.log.bases if base > frame.offset], default=copy.log.end)
        for bytes_max, reads in ((size, 1), (size - 1, 2), (1 << 20, 1)):
            sizes.clear()
            chunk = copy.log.stored.read(frame.offset, copy.log.end, bytes_max)
            assert chunk.frames[0] == frame and chunk.data == whole[frame.offset : chunk.end]
            assert len(sizes) == reads and max(sizes) <= max(size, min(bytes_max, stop - frame.offset))
            sizes.clear()
            assert copy.log.stored.read_intact(frame.offset, copy.log.end, bytes_max) == chunk.data
            assert len(sizes) == 2 * reads - 1 and sizes[0] == min(bytes_max, stop - frame.offset)


def test_next_frame_before_the_log_is_its_first():
    copy = Copy(tail_bytes=0)
    assert copy.log.stored.next_frame(0) is None
    copy.begin_epoch()
    copy.fill(60)
    copy.drop_oldest_segment()
    assert copy.log.stored.next_frame(0) == copy.log.start == copy.log.stored.next_frame(copy.log.start - 8)


def test_unflushed_frames_stay_in_the_tail():
    """The disk may lack them: shipping them from disk would send older bytes."""
    copy = Copy(tail_bytes=0)
    flushed = copy.begin_epoch()
    commit = copy.log.take_commit()
    copy.log.perform(commit)
    waiting = copy.messages("a")
    copy.log.flushed(commit)
    assert copy.log.tail_frames(flushed.offset, 1 << 20) is None
    assert copy.log.tail_frames(waiting.offset, 1 << 20) is not None


def test_damaged_header_is_found_with_few_reads():
    copy, frames = a_log(*[20_000] * 40)
    copy.disk.flip(log_name(0), 8 * (frames[3].offset + 88))  # its subject
    sizes = copy.read_sizes()
    with pytest.raises(CorruptFrame, match="wrong header CRC"):
        copy.log.stored.read(frames[3].offset, copy.log.end, 1)
    assert sum(sizes) <= 1 + 2 * segments.HEADER_BYTES_MAX


def test_longest_subject_name_is_read_whole():
    """Headers are read in one piece of a fixed size, and names are bounded, also derived ones."""
    subject = check_subject(dead_letter_subject("ü" * (NAME_BYTES_MAX // 2), "g" * NAME_BYTES_MAX))
    copy = Copy.begun(tail_bytes=0)
    frame = copy.messages("m0", subject=subject, timestamp_ms=7)
    copy.messages("m1", subject=subject)
    copy.flush()
    log = copy.reopen()
    assert (
        len(frame.subject.encode()) == len("%DEAD_RETRY%%") + 2 * NAME_BYTES_MAX and log.timestamp_at(frame.offset) == 7
    )
    (epoch,) = log.stored.read(0, frame.offset, 1 << 20).frames
    assert log.chain_is(frame.offset, epoch.chain) and not log.chain_is(frame.offset, 1)
    assert [list(labels) for labels in log.stored.read_labels(log.frames(subject, 0, 9))] == [[], []]


def test_cut_report_lists_ids_across_other_frames():
    copy = Copy()
    kept = copy.begin_epoch()
    copy.messages("a")
    copy.begin_epoch(Epoch(1, 2))
    copy.messages("b")
    copy.flush()
    end = copy.log.end
    report = report_of(copy, copy.log.cut(kept.end, "conflict"))
    assert report["message_ids"] == ["a", "b"] and (report["begin"], report["why"]) == (kept.end, "conflict")
    assert end - 8 < report["end"] <= end
