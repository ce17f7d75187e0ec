"""A file system in memory that fails at any call, as the seed has it."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Sequence
from random import Random

from qmq.codec import Buffer
from qmq.log.disk import BLOCK_BYTES
from qmq.log.memory_disk import Inode, MemorySystem

SECTOR_BYTES = 512
SHORT_WRITES = 0.02
"""How often a write writes less than it was asked to, and says so."""
GROWING = frozenset({"open", "write", "reserve", "mkdir", "rename"})
"""Calls that need space."""


class SimulatedSystem(MemorySystem):
    """A file system whose calls are refused, cut short or only pretended, as the seed has it."""

    def __init__(self, rng: Random) -> None:
        super().__init__()
        self._rng = rng
        self.fails_once_at: int | None = None
        """The call that fails, alone; those after it succeed."""
        self.is_full = False
        self.is_lying = False
        """Whether data is said to be on the disk that is not."""
        self._lied: dict[Inode, tuple[bytes, int]] = {}
        """What of a file is on the disk in truth."""
        self.forgot_synced = False
        """Whether the last crash took what an fsync was said to have kept."""
        self.namings = 0
        """How often a name came to mean something else."""
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
        self.fails_once_at, self.is_full, self.is_lying = None, False, False

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
        """A block that is covered is good again; one that is not would have to be read."""
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
        self._lied.pop(self._open[fd], None)  # type: ignore[call-overload]

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
        """Linux gives up what it could not write: readers still see it, and the next fsync has nothing to do."""
        file = self._open[fd]
        if self.fail_at is None and isinstance(file, Inode):
            for offset, written in file.unsynced:
                for part in self.survivors(self._rng, offset, written) if written else [(offset, written)]:
                    file.keep(*part)
            file.unsynced.clear()

    def survivors(self, rng: Random, offset: int, written: bytes | None) -> Iterable[tuple[int, bytes | None]]:
        """Besides what others lose, any subset of a write's sectors."""
        if not written or rng.random() < 0.7:
            return super().survivors(rng, offset, written)
        begins = [0, *range(-offset % SECTOR_BYTES or SECTOR_BYTES, len(written), SECTOR_BYTES), len(written)]
        pairs = zip(begins, begins[1:], strict=False)
        return [(offset + begin, written[begin:end]) for begin, end in pairs if rng.random() < 0.5]

    def told_the_truth(self) -> None:
        """What was said to be on the disk got there by now."""
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
