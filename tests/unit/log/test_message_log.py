"""Core. Appending, reading, cutting and seeding one copy of a message log."""

from __future__ import annotations

import json

import pytest

from qmq.errors import CorruptFrame
from qmq.log import message_log
from tests.support.effort import every
from tests.unit.log.logs import Copy


def report_of(copy: Copy, name: str) -> dict:
    name = name.replace(".bytes", ".json")
    return json.loads(copy.disk.read(name, 0, copy.disk.size(name)))


@pytest.mark.parametrize("which", range(1, 5))
def test_log_is_cut_at_the_border_of_a_segment(which):
    copy = Copy()
    copy.begin_epoch()
    copy.fill(60)
    base, bases = copy.log.bases[which], copy.log.bases[:which]
    chain = copy.log.state.chain
    copy.log.cut(base, "conflict")
    assert (copy.log.end, copy.log.bases) == (base, bases)
    assert copy.log.chain != chain
    copy.messages("after the cut")
    copy.flush()
    assert copy.reopen().state.chain == copy.log.chain and copy.log.end > base


def test_what_is_cut_goes_to_quarantine_with_the_ids_of_its_messages():
    copy = Copy()
    copy.begin_epoch()
    kept = copy.messages("kept")
    copy.messages("x", "y")
    copy.messages("without properties: its bytes end with zeros", size=0)
    copy.flush()
    bytes_before = copy.whole()[kept.end :]
    name = copy.log.cut(kept.end, "conflict")
    assert report_of(copy, name)["message_ids"] == ["x", "y", "without properties: its bytes end with zeros"]
    assert copy.disk.read(name, 0, copy.disk.size(name)) == bytes_before.rstrip(b"\0")


def test_segment_that_lost_its_end_is_corrupt_not_endless():
    copy = Copy(tail_bytes=0)
    copy.begin_epoch()
    copy.fill(60)
    base = copy.log.bases[1]
    copy.disk.truncate(f"log/{base:020d}.log", 10)
    with pytest.raises(CorruptFrame):
        copy.log.read(base, copy.log.end, 1000)


@pytest.mark.parametrize("tail_bytes", [0, 1 << 20])
def test_offset_within_a_frame_is_no_border_and_no_damage(tail_bytes):
    copy = Copy(tail_bytes=tail_bytes)
    copy.begin_epoch()
    copy.fill(60)
    copy.messages("not flushed")
    for offset in range(8, copy.log.end, 8 * every(5)):
        assert not copy.log.chain_is(offset, 1), offset
    assert not copy.log.chain_is(copy.log.end + 8, 1)


def test_damage_is_found_before_another_copy_is_accused_of_being_different():
    copy = Copy(tail_bytes=0)
    copy.begin_epoch()
    copy.fill(60)
    ref = copy.log.frames("s1", 7, 1)[0]
    base = max(base for base in copy.log.bases if base <= ref.offset)
    copy.disk.flip(f"log/{base:020d}.log", 8 * (ref.offset - base + 50))
    with pytest.raises(CorruptFrame) as found:
        copy.log.check_readable(ref.offset)
    assert found.value.offset == ref.offset


def test_chain_before_a_damaged_frame_is_still_known():
    """Or a tail that another history replaced, and that rotted before it was cut, could never be cut (seed 1724)."""
    copy = Copy(tail_bytes=0)
    copy.begin_epoch()
    copy.fill(60)
    for ref in copy.log.frames("s1", 7, 3):
        base = max(base for base in copy.log.bases if base <= ref.offset)
        chain = copy.log.read(base, ref.offset, 1 << 20).chain if base < ref.offset else None
        copy.disk.flip(f"log/{base:020d}.log", 8 * (ref.offset - base + 20))
        if chain is not None:
            assert copy.log.chain_is(ref.offset, chain)
        assert not copy.log.chain_is(ref.offset, 1)
        copy.disk.flip(f"log/{base:020d}.log", 8 * (ref.offset - base + 20))


def test_segment_with_zeros_behind_its_end_reads_as_one_without():
    """A crash may leave some of what was reserved for it."""
    copy = Copy(tail_bytes=0)
    copy.begin_epoch()
    copy.fill(60)
    first, second = copy.log.bases[1], copy.log.bases[2]
    whole = copy.whole()
    name = f"log/{first:020d}.log"
    copy.disk.write(name, copy.disk.size(name), [bytes(80)])
    assert copy.whole() == whole
    begin, end = second - 40, second + 40
    assert copy.log.read_bytes(begin, end) == whole[begin - copy.log.start : end - copy.log.start]


READERS = {
    "frames": lambda log, ref: log.read(ref.offset, log.end, 1),
    "bodies": lambda log, ref: log.read_bodies([ref]),
    "labels": lambda log, ref: log.read_labels([ref]),
    "bytes": lambda log, ref: log.read_bytes(ref.offset, ref.offset + ref.length),
    "timestamp": lambda log, ref: log.timestamp_at(ref.offset),
}


@pytest.mark.parametrize("what", READERS)
def test_reader_whose_segment_was_dropped_meanwhile_finds_no_frame_and_no_failing_disk(what):
    """The process would end at that. Reads happen on threads, after somebody looked up where."""
    copy = Copy(tail_bytes=0)
    copy.begin_epoch()
    copy.fill(40)
    (ref,) = copy.log.frames("s0", 0, 1)
    copy.log.drop_oldest_segment()
    assert ref.offset < copy.log.start
    with pytest.raises(CorruptFrame) as found:
        READERS[what](copy.log, ref)
    assert found.value.offset == ref.offset


def test_what_retention_gave_up_is_passed_over_at_once_while_its_files_are_still_there(monkeypatch):
    copy = Copy()
    copy.begin_epoch()
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


def test_frame_that_is_not_flushed_stays_in_the_tail_however_small_that_is():
    """The disk may not have it yet: who ships it to a slave would read what was there before."""
    copy = Copy(tail_bytes=0)
    flushed = copy.begin_epoch()
    commit = copy.log.take_commit()
    copy.log.perform(commit)
    waiting = copy.messages("a")
    copy.log.flushed(commit)
    assert copy.log.tail_frames(flushed.offset, 1 << 20) is None
    assert copy.log.tail_frames(waiting.offset, 1 << 20) is not None


@pytest.mark.parametrize("bytes_max", [1, 300, 2048, 1 << 20])
def test_bytes_that_are_passed_on_are_those_that_are_read(bytes_max):
    """Whole frames, never over the end of a segment, at least one."""
    copy = Copy(tail_bytes=0)
    copy.begin_epoch()
    copy.fill(30)
    at = 0
    while at < copy.log.end:
        data = copy.log.read_intact(at, copy.log.end, bytes_max)
        assert data == copy.log.read(at, copy.log.end, bytes_max).data
        at += len(data)
    assert at == copy.log.end


def test_what_is_passed_on_ends_at_damage_and_does_not_begin_there():
    copy = Copy(tail_bytes=0)
    copy.begin_epoch()
    copy.fill(3)
    bad = copy.messages("bad")
    copy.flush()
    copy.disk.flip(f"log/{0:020d}.log", 8 * bad.end - 1)
    assert copy.log.read_intact(0, copy.log.end, 1 << 20) == copy.whole()[: bad.offset]
    with pytest.raises(CorruptFrame, match="wrong body CRC"):
        copy.log.read_intact(bad.offset, copy.log.end, 1 << 20)


def test_frames_that_came_in_one_packet_are_kept_each_by_itself():
    """A slave that becomes the master ships and delivers them one by one."""
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


def test_a_subject_begins_with_its_first_message_that_is_left_or_with_the_next_one():
    copy = Copy()
    copy.begin_epoch()
    copy.fill(60)
    base = copy.log.bases[2]
    first = next(ref.begin for ref in copy.log.frames("s1", 0, 60) if ref.offset >= base)
    assert 0 < first == copy.log.first_kept("s1", base) and copy.log.first_kept("s1", 0) == 0
    assert copy.log.first_kept("nobody wrote to it", base) == 0
    copy.messages("a", subject="only before")
    copy.fill(60)
    assert copy.log.first_kept("only before", copy.log.bases[-1]) == 1


def test_bodies_of_neighbours_are_read_at_one_go(monkeypatch):
    copy = Copy(tail_bytes=0)
    copy.begin_epoch()
    for id, subject in (("a", "s"), ("b", "s"), ("c", "s"), ("x", "t"), ("d", "s")):
        copy.messages(id, subject=subject)
    copy.flush()
    refs, read, read_raw = copy.log.frames("s", 0, 9), [], message_log.read_raw
    monkeypatch.setattr(message_log, "read_raw", lambda *args: read.append(args[2:]) or read_raw(*args))
    assert [frame.offset for frame, _ in copy.log.read_bodies(refs)] == [ref.offset for ref in refs]
    ends = [ref.offset + ref.length for ref in refs]
    assert read == [(refs[0].offset, ends[2]), (refs[3].offset, ends[3])]
