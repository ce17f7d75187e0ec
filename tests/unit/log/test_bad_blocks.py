"""Shell. Unreadable blocks of the disk: the rest is read, they are damage, and writing repairs them."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from qmq.errors import CorruptFrame, DiskFailed
from qmq.log import RealDisk
from qmq.log.disk import BLOCK_BYTES, UNREADABLE, UNREADABLE_BLOCKS_MAX
from qmq.log.frame import decode_frames
from qmq.log.memory_disk import MemoryDisk, MemorySystem
from qmq.log.repair import repair
from qmq.log.segments import log_name
from tests.integration.broker_on_a_disk_with_bad_blocks import BadBlocks
from tests.unit.log.logs import Copy


@pytest.fixture
def bad(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Make a block of a file of the disk at tmp_path / "d" bad."""
    for call in (os.pread, os.pwritev, os.ftruncate):
        monkeypatch.setattr(os, call.__name__, call)  # restored at the end
    listed = tmp_path / "bad blocks"
    BadBlocks(listed)

    def add(name: str, *blocks: int) -> None:
        with listed.open("a") as file:
            file.writelines(f"{(tmp_path / 'd' / name).resolve()} {block}\n" for block in blocks)

    return add


@pytest.fixture
def disk(tmp_path: Path) -> RealDisk:
    return RealDisk(tmp_path / "d")


def test_bad_block_reads_as_unreadable(disk, bad):
    data = os.urandom(3 * BLOCK_BYTES + 100)
    disk.put("f", data)
    bad("f", 1, 3)
    expected = data[:BLOCK_BYTES] + UNREADABLE + data[2 * BLOCK_BYTES : 3 * BLOCK_BYTES] + UNREADABLE[:100]
    assert disk.read("f", 0, 1 << 20) == expected
    for begin, size in ((10, 20), (4000, 200), (5000, 100), (8000, 5000), (12_300, 5000), (1 << 20, 5)):
        assert disk.read("f", begin, size) == expected[begin : begin + size]


def test_too_many_bad_blocks_are_a_failed_disk(disk, bad):
    disk.put("f", bytes(BLOCK_BYTES * (UNREADABLE_BLOCKS_MAX + 1)))
    bad("f", *range(UNREADABLE_BLOCKS_MAX))
    assert disk.read("f", 0, 1 << 30) == UNREADABLE * UNREADABLE_BLOCKS_MAX + bytes(BLOCK_BYTES)
    bad("f", UNREADABLE_BLOCKS_MAX)
    with pytest.raises(DiskFailed, match="Input/output error"):
        disk.read("f", 0, 1 << 30)


def test_other_read_errors_end_the_process(disk, monkeypatch):
    disk.put("f", b"data")

    def refused(*_):
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))

    monkeypatch.setattr(os, "pread", refused)
    for call in (lambda: disk.read("f", 0, 4), lambda: disk.map("f")):
        with pytest.raises(DiskFailed):
            call()


def test_file_with_a_bad_block_is_not_mapped(disk, bad):
    disk.put("f", bytes(3 * BLOCK_BYTES))
    assert len(disk.map("f")) == 3 * BLOCK_BYTES
    bad("f", 2)
    assert not disk.map("f")


def a_copy(disk: RealDisk) -> tuple[Copy, Copy]:
    """Return two equal copies, the first on a real disk."""
    copies = Copy(disk, segment_bytes=20_000, tail_bytes=0), Copy(segment_bytes=20_000)
    for copy in copies:
        copy.begin_epoch()
        for i in range(60):
            copy.messages(f"m{i}", size=900)
            copy.flush()
    assert len(copies[0].log.bases) > 3 and copies[0].log.chain == copies[1].log.chain
    return copies


def repair_from(copy: Copy, other: Copy) -> None:
    damage = copy.log.damage
    assert damage is not None
    data = b""
    while damage.begin + len(data) < damage.end:
        data += other.log.stored.read(damage.begin + len(data), other.log.end, 1).data
    repair(copy.log, data)


@pytest.mark.parametrize("where", ["first", "middle", "last"])
def test_bad_block_of_a_closed_segment_is_repaired(disk, bad, where):
    copy, other = a_copy(disk)
    base, following = copy.log.bases[1:3]
    block = {"first": 0, "middle": 2, "last": (following - base - 1) // BLOCK_BYTES}[where]
    bad(log_name(base), block)
    frames = [frame for frame, _ in decode_frames(other.whole(), 0, 0) if frame.offset >= base]
    offset = next(frame.offset for frame in frames if frame.end > base + block * BLOCK_BYTES)
    assert copy.log.stored.is_damaged(CorruptFrame(offset, "unreadable"))
    copy.log.damaged_at(CorruptFrame(offset, "unreadable"))
    repair_from(copy, other)
    assert copy.log.damage is None and copy.whole() == other.whole()
    assert disk.size(log_name(base)) == following - base


def test_bad_block_at_the_end_cuts_the_tail(disk, bad):
    """Zeros in its place would look like the end of the log and hide the loss."""
    copy, _ = a_copy(disk)
    newest = copy.log.bases[-1]
    end, last = copy.log.end, (copy.log.end - newest - 1) // BLOCK_BYTES
    bad(log_name(newest), *range(max(last, 0), last + 2))
    log = copy.reopen()
    assert log.damage is None and log.end < end and log.is_tail_cut
    copy.messages("goes on")
    copy.flush()


@pytest.mark.parametrize("blocks", [(1,), (1, 3)])
def test_failed_read_is_retried_block_by_block(blocks):
    """Most systems return the bytes before the bad block; some do not."""

    class Strict(MemorySystem):
        def pread(self, fd, size, at):
            if any(at < (block + 1) * BLOCK_BYTES and block * BLOCK_BYTES < at + size for block in blocks):
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return super().pread(fd, size, at)

    disk, data = MemoryDisk(Strict()), os.urandom(5 * BLOCK_BYTES + 100)
    disk.put("f", data)
    expected = b"".join(
        UNREADABLE if block in blocks else data[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES] for block in range(6)
    )
    for begin, size in ((0, 1 << 20), (10, 20), (4000, 200), (4096, 8192), (8000, 300), (8000, 5000), (12_300, 5000)):
        assert disk.read("f", begin, size) == expected[begin : begin + size]
