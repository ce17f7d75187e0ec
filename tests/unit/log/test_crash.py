"""Core. A workload of all operations, stopped before every disk call; a crash keeps any part of the unsynced bytes."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import pytest

from qmq.errors import CorruptFrame, DiskFailed
from qmq.log.fold import State, decode_snapshot
from qmq.log.memory_disk import MemoryDisk
from qmq.log.repair import repair
from qmq.log.segments import read_raw, segment_bases, snapshot_name
from qmq.types import Epoch
from tests.support.effort import every
from tests.unit.log.logs import Copy, fold_of

SEGMENT_BYTES = 1024


class ShatteringDisk(MemoryDisk):
    """A disk that writes in pieces of 64 bytes, of which a crash keeps any."""

    def write(self, name, offset, buffers):
        data = b"".join(buffers)
        for at in range(0, len(data), 64):
            super().write(name, offset + at, [data[at : at + 64]])


@dataclass
class Truth:
    """Permitted contents of a recovered log."""

    bytes: bytes = b""
    """The whole history from offset 0; a crash may lose its end, behind `safe`."""
    safe: int = 0
    start: int = 0
    """Retention deletes, or begins to delete, the bytes before it."""
    whole_from: int = 0
    """Bits were flipped or segments dropped before this offset."""
    other: bytes | None = None
    """The bytes of the log that seeds this one, from `other_start` on."""
    other_start: int = 0


def append(copy: Copy, truth: Truth, *ids: str) -> None:
    begin = copy.log.end
    if ids:
        copy.messages(*ids, size=90)
    else:
        copy.begin_epoch()
    buffers, _, _ = copy.log.tail_frames(begin, 1 << 20)
    truth.bytes += b"".join(buffers)
    assert len(truth.bytes) == copy.log.end


def flush(copy: Copy, truth: Truth) -> None:
    copy.flush()
    truth.safe = copy.log.flushed_end


def run(copy: Copy, truth: Truth) -> None:
    """Append, roll in one commit and in many, cut, continue, damage, repair, drop."""
    append(copy, truth)
    for i in range(9):
        append(copy, truth, f"a{i}")
        if i % 3 != 1:
            flush(copy, truth)
    for i in range(12):
        append(copy, truth, f"b{i}")
    flush(copy, truth)
    for to in (copy.log.bases[-1], copy.log.frames("s", 6, 1)[0].offset):
        truth.safe = min(truth.safe, to)
        copy.log.cut(to, "conflict")
        truth.bytes, truth.safe = truth.bytes[:to], to
        copy.epoch = Epoch(1, copy.epoch.boot + 1)
        append(copy, truth)
        for i in range(4):
            append(copy, truth, f"c{to}-{i}")
        flush(copy, truth)
    append(copy, truth, "d")
    flush(copy, truth)
    damaged = copy.log.frames("s", 1, 1)[0].offset
    whole = read_raw(copy.disk, copy.log.bases, damaged, copy.log.bases[1])
    truth.whole_from = copy.log.bases[1]
    copy.disk.flip(f"log/{copy.log.bases[0]:020d}.log", 8 * (damaged + 100))
    with pytest.raises(CorruptFrame) as found:
        copy.log.stored.read(damaged, copy.log.end, 100)
    copy.log.damaged_at(found.value)
    repair(copy.log, whole)
    truth.start = copy.log.bases[1]
    copy.drop_oldest_segment()
    append(copy, truth, "e")
    flush(copy, truth)


def seed(copy: Copy, truth: Truth) -> None:
    """Set this copy aside and seed it from a copy far ahead."""
    other = Copy(segment_bytes=SEGMENT_BYTES)
    other.begin_epoch(Epoch(2, 1))
    other.fill(30)
    base, _, snapshot = other.log.stored.seed_start()
    while base < 2 * SEGMENT_BYTES:
        other.drop_oldest_segment()
        base, _, snapshot = other.log.stored.seed_start()
    copy.flush()
    truth.other, truth.other_start = other.whole(), base
    copy.log.seed(base, snapshot, "seeded")
    copy.log.append_frames(base, memoryview(other.whole()))
    copy.flush()


def check(disk: MemoryDisk, truth: Truth) -> None:
    first = Copy(disk, segment_bytes=SEGMENT_BYTES)
    log, image, files = first.log, first.image(), sorted(disk.names("quarantine"))
    if log.damage is not None:
        assert isinstance(disk, ShatteringDisk), "a torn tail is no damage"
        assert log.damage.begin == log.end < log.damage.end
    whole_from = max(log.start, truth.whole_from)
    held = read_raw(disk, log.bases, whole_from, log.end)
    if truth.other is None:
        assert log.start in (0, truth.start) and log.end >= truth.safe, "flushed frames are missing"
        assert held == truth.bytes[whole_from : log.end], "unknown frames appear"
    else:
        assert held in (truth.bytes[whole_from : log.end], truth.other[: log.end - truth.other_start])
    if log.bases:
        state = decode_snapshot(disk.read(snapshot_name(log.bases[-1]), 0, 1 << 20)) if log.bases[-1] else State()
        tail = read_raw(disk, segment_bases(disk), log.bases[-1], log.end)
        if log.damage is None:
            assert fold_of(tail, state) == log.state, "the state follows from the frames"
    again = first.reopen()
    assert (again.state, again.damage, again.bases) == (log.state, log.damage, log.bases)
    assert (first.image(), sorted(disk.names("quarantine"))) == (image, files), "recover twice is recover once"
    if again.damage is None:
        first.epoch = Epoch(9, 9)
        end = again.end
        first.messages("after the crash")
        first.flush()
        again = first.reopen()
        assert again.end > end and again.damage is None, "cut frames come back (W5)"


def crashed(steps, disk: MemoryDisk, at: int, rng: Random | None) -> Truth:
    truth, copy = Truth(), Copy(disk, segment_bytes=SEGMENT_BYTES)
    disk.fail_after(at)
    try:
        for step in steps:
            step(copy, truth)
    except DiskFailed:
        pass
    disk.heal()
    disk.crash(rng)
    return truth


def calls_of(steps) -> int:
    disk, truth = MemoryDisk(), Truth()
    copy = Copy(disk, segment_bytes=SEGMENT_BYTES)
    before = disk.calls
    for step in steps:
        step(copy, truth)
    return disk.calls - before


@pytest.mark.parametrize("steps", [[run], [run, seed]], ids=["appending, cutting, repairing", "seeding"])
@pytest.mark.parametrize("kind", [MemoryDisk, ShatteringDisk])
def test_crash_at_any_disk_call_keeps_flushed_frames(steps, kind):
    calls = calls_of(steps)
    assert calls > 60
    for at in range(1, calls + 2, every(9)):
        for luck in (None, 1, 2):
            disk = kind()
            truth = crashed(steps, disk, at, None if luck is None else Random(at * 10 + luck))
            try:
                check(disk, truth)
            except Exception as problem:
                raise AssertionError(f"crash before call {at} of {calls}, luck {luck}: {problem}") from problem
