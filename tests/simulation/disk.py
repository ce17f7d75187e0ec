"""The shipped disk on a simulated file system that fails at any call, and a medium that loses and corrupts bytes."""

from __future__ import annotations

import errno
import os
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from random import Random

from qmq.codec import Buffer
from qmq.log.disk import BLOCK_BYTES
from qmq.log.memory_disk import ROOT, Inode, MemoryDisk, MemorySystem
from qmq.log.segments import log_name, segment_bases

SECTOR_BYTES = 512
SHORT_WRITES = 0.02
"""Probability that a write is short and reports so."""
GROWING = frozenset({"open", "write", "reserve", "mkdir", "rename"})
"""Calls that need space."""


class SimulatedSystem(MemorySystem):
    """File system with calls that fail, are cut short or pretend, by the seed."""

    def __init__(self, rng: Random) -> None:
        super().__init__()
        self._rng = rng
        self.fails_once_at: int | None = None
        """The call that fails, alone; those after it succeed."""
        self.is_full = False
        self.is_lying = False
        """Whether fsyncs report bytes as durable that are not."""
        self._lied: dict[Inode, tuple[bytes, int]] = {}
        """File -> its durable bytes and size, while the disk lies."""
        self.forgot_synced = False
        """Whether the last crash took bytes that an fsync had reported as durable."""
        self.namings = 0
        """Number of changes of names."""
        self.bad: dict[Inode, set[int]] = {}
        """Blocks of a file that cannot be read."""

    def copy_from(self, other: MemorySystem) -> None:
        super().copy_from(other)
        self.namings += 1

    def _rename(self, *change: tuple[str, Inode | None | bool]) -> None:
        super()._rename(*change)
        self.namings += 1

    def heal(self) -> None:
        super().heal()
        self.fails_once_at = None
        self.is_full = False
        self.is_lying = False

    def may(self, call: str, path: str, fd: int = -1) -> None:
        super().may(call, path, fd)
        if self.fails_once_at is not None and self.calls >= self.fails_once_at:
            self.fails_once_at = None
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        if self.is_full and call in GROWING:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    def pread(self, fd: int, size: int, at: int) -> bytes:
        if self.bad:
            size = min(size, max(self.open_size(fd) - at, 0))
            if met := self._bad_blocks(fd, at, at + size):
                if met[0] * BLOCK_BYTES <= at:
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
                size = met[0] * BLOCK_BYTES - at
        return super().pread(fd, size, at)

    def pwritev(self, fd: int, buffers: Sequence[Buffer], at: int) -> int:
        data = b"".join(buffers)
        if self.bad:
            self._write_over_bad_blocks(fd, at, at + len(data))
        if len(data) > 1 and self._rng.random() < SHORT_WRITES:
            data = data[: self._rng.randrange(1, len(data))]
        try:
            return super().pwritev(fd, [data], at)
        except OSError:  # part of it may have been written before the error
            if part := data[: self._rng.randrange(len(data) + 1)]:
                self.file(fd).change(at, part)
            raise

    def truncate(self, fd: int, size: int) -> None:
        met = self._bad_blocks(fd, size, self.open_size(fd)) if self.bad else []
        if met and met[0] * BLOCK_BYTES < size:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        super().truncate(fd, size)
        self._are_good(fd, met)

    def _bad_blocks(self, fd: int, begin: int, end: int) -> list[int]:
        bad = self.bad.get(self.file(fd), set())
        return [block for block in range(begin // BLOCK_BYTES, -(-end // BLOCK_BYTES)) if block in bad]

    def _write_over_bad_blocks(self, fd: int, begin: int, end: int) -> None:
        """A block that is covered is good again; any other would have to be read first."""
        met, size = self._bad_blocks(fd, begin, end), self.open_size(fd)
        if any(block * BLOCK_BYTES < begin or end < min((block + 1) * BLOCK_BYTES, size) for block in met):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        self._are_good(fd, met)

    def _are_good(self, fd: int, blocks: list[int]) -> None:
        if blocks:
            self.bad[self.file(fd)].difference_update(blocks)

    def fsync(self, fd: int) -> None:
        try:
            super().fsync(fd)
        except OSError:
            self._lose_written(fd)
            raise
        self._lied.pop(self._open[fd], None)

    def fdatasync(self, fd: int) -> None:
        file = self.file(fd)
        if self.is_lying and file.unsynced:
            self._lied.setdefault(file, (bytes(file.durable), file.durable_size))
        elif not self.is_lying:
            self._lied.pop(file, None)
        try:
            super().fdatasync(fd)
        except OSError:
            self._lose_written(fd)
            raise

    def _lose_written(self, fd: int) -> None:
        """Linux drops pages that it could not write: readers still see them, and the next fsync succeeds."""
        file = self._open[fd]
        if self.fail_at is None and isinstance(file, Inode):
            for offset, written in file.unsynced:
                for part in self.survivors(self._rng, offset, written) if written else [(offset, written)]:
                    file.keep(*part)
            file.unsynced.clear()

    def survivors(self, rng: Random, offset: int, written: bytes | None) -> Iterable[tuple[int, bytes | None]]:
        """Cut the power: also lose any subset of a write's sectors."""
        if not written or rng.random() < 0.7:
            return super().survivors(rng, offset, written)
        begins = [0, *range(-offset % SECTOR_BYTES or SECTOR_BYTES, len(written), SECTOR_BYTES), len(written)]
        pairs = zip(begins, begins[1:], strict=False)
        return [(offset + begin, written[begin:end]) for begin, end in pairs if rng.random() < 0.5]

    def keep_lied_bytes(self) -> None:
        """Make everything durable that was reported as durable."""
        self._lied.clear()

    def crash(self, rng: Random | None = None) -> None:
        self.forgot_synced = False
        for file, (durable, size) in self._lied.items():
            self.forgot_synced |= file.durable != durable
            file.durable, file.durable_size = bytearray(durable), size
        self._lied.clear()
        super().crash(rng)
        self.namings += 1
        for file, blocks in self.bad.items():
            blocks.intersection_update(range(-(-len(file.data) // BLOCK_BYTES)))


class Medium:
    """Content of a machine's disk, which outlives processes. Names are those of the disk above it."""

    def __init__(self, system: SimulatedSystem) -> None:
        self.system = system
        self.flipped: list[tuple[str, int]] = []
        """(file, byte) of every bit flipped."""

    def durable_file(self, name: str) -> Inode | None:
        return self.system.durable_file(f"{ROOT}/{name}")

    def log_files(self) -> list[str]:
        """Return the files of the log that are not empty on the medium."""
        at = len(ROOT) + 1
        names = sorted(path[at:] for path, inode in self.system.entries.items() if inode is not None)
        return [name for name in names if name.startswith("log/") and self.file_bytes(name)]

    def file_bytes(self, name: str) -> int:
        """Return the file's length on the medium."""
        file = self.durable_file(name)
        return file.durable_size if file else 0

    def flip(self, name: str, bit: int) -> None:
        self.system.flip(f"{ROOT}/{name}", bit)
        self.flipped.append((name, bit // 8))

    def flip_some(self, rng: Random, flushed_end: int | None) -> bool:
        """Flip one bit of the log below the flushed end; return whether there was one."""
        if not (names := self.log_files()):
            return False
        name = rng.choice(names)
        size = self.file_bytes(name)
        if name.endswith(".log"):
            base = int(name[4:24])
            size = min(size, max((base + size if flushed_end is None else flushed_end) - base, 0))
            if size and rng.random() < 0.3:
                low = max(size - 200, 0)
                self.flip(name, 8 * rng.randrange(low, size) + rng.randrange(8))
                return True
        if size:
            self.flip(name, rng.randrange(8 * size))
        return bool(size)

    def go_bad(self, name: str, block: int) -> None:
        """Make a block unreadable until it is written. A block that is only reserved is never read."""
        inode = self.system.entries[f"{ROOT}/{name}"]
        begin, end = block * BLOCK_BYTES, min((block + 1) * BLOCK_BYTES, len(inode.data))
        if begin < end:
            self.system.bad.setdefault(inode, set()).add(block)
            self.flipped.extend((name, byte) for byte in range(begin, end))

    def go_bad_somewhere(self, rng: Random) -> bool:
        if names := self.log_files():
            name = rng.choice(names)
            self.go_bad(name, rng.randrange(-(-self.file_bytes(name) // BLOCK_BYTES)))
        return bool(names)

    def image(self) -> Medium:
        """Return the content of a backup of the machine: all that survives a power cut right now."""
        image = Medium(SimulatedSystem(Random(0)))
        image.put_back(self)
        image.system.crash()
        return image

    def put_back(self, image: Medium) -> None:
        """Replace everything by an older image, with the bits that were flipped in it."""
        self.system.copy_from(image.system)
        self.system.bad.clear()
        self.flipped = list(image.flipped)

    def wipe(self) -> None:
        self.put_back(Medium(SimulatedSystem(Random(0))))


class SimulatedDisk(Medium, MemoryDisk):
    """Disk of a machine, which outlives processes."""

    def __init__(self, rng: Random) -> None:
        MemoryDisk.__init__(self, SimulatedSystem(rng))
        self.flipped = []
        self._bases: list[int] = []
        self._bases_at = -1

    def bases(self) -> list[int]:
        """Return the bases of the segments. Cached, as every commit asks for them and few change a name."""
        if self._bases_at != self.system.namings:
            self._bases_at = self.system.namings
            self._bases = segment_bases(self)
        return self._bases

    def durable(self, bases: list[int], begin: int, end: int) -> bytes:
        """Return bytes `[begin, end)` of the log that would survive a power cut."""
        parts = []
        for i in range(max(bisect_right(bases, begin) - 1, 0), bisect_left(bases, end)):
            base = bases[i]
            stop = bases[i + 1] if i + 1 < len(bases) else end
            first, last = max(begin, base), min(end, stop)
            if first < last:
                file = self.durable_file(log_name(base))
                parts.append(bytes(file.durable[first - base : last - base]) if file else b"")
        return b"".join(parts)

    def is_flipped(self, bases: list[int], begin: int, end: int) -> bool:
        """Whether a bit of the log's `[begin, end)` was ever flipped here."""
        where = {log_name(base): base for base in bases}
        return any(name in where and begin <= where[name] + byte < end for name, byte in self.flipped)

    def put_back(self, image: Medium) -> None:
        self.close()
        Medium.put_back(self, image)
