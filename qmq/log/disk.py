"""Shell. The disk as the log sees it: a port, and its real implementation.

Names are relative to one data directory, with `/` between folders. All calls block; the log's owner runs those that
may take long on a thread. An error of the disk is DiskFailed: whoever gets it ends the process as fenced, because
after a failed write or fsync nobody knows what the file holds (I15). A block that cannot be read is no such error: it
is read as UNREADABLE, which no CRC matches, so it is found and mended as any other damage is.

`qmq.log.memory_disk` has the other two implementations: one in memory, one that is faulty on purpose.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from qmq.codec import Buffer
from qmq.errors import DiskFailed
from qmq.log.page_cache import PageCache

log = logging.getLogger(__name__)

COLD_READ_BYTES = 64 * 1024
"""Smaller reads are headers and snapshots; whether they stay in the cache does not matter."""
BLOCK_BYTES = 4096
UNREADABLE = b"\xde" * BLOCK_BYTES
"""What a block that the disk cannot read is read as. Not zeros: those would look like the end of the log."""
UNREADABLE_BLOCKS_MAX = 256
"""More of them in one read, a MiB, are no bad spot: the disk fails."""
OPEN_FILES_MAX = 512
"""More are closed, the one that is open longest first, and opened again when they are needed."""
_MEDIUM_ERRORS = frozenset({errno.EIO, errno.ENODATA, errno.EILSEQ})
_IOV_MAX = 1024
"""Linux takes at most this many buffers in one pwritev."""


class Disk(Protocol):
    """What a log needs of a disk. `put` is atomic and durable; `write` is neither until `sync`."""

    def names(self, folder: str) -> list[str]:
        """Return the names of the files in `folder`, sorted; none if there is no such folder."""

    def has(self, name: str) -> bool:
        """Return whether there is a file of this name."""

    def size(self, name: str) -> int:
        """Return the bytes of the file, 0 if there is none."""

    def look_again(self, name: str) -> None:
        """Let the next read open the file by its name: it may be another one by now, or gone."""

    def used(self, name: str) -> int:
        """Return the size without what was only reserved at the end; all zeros behind it, maybe some before it."""

    def read(self, name: str, offset: int, size: int) -> bytes:
        """Return up to `size` bytes from `offset`; fewer only at the end of the file. Bad blocks come as UNREADABLE."""

    def map(self, name: str) -> Buffer:
        """Return the whole of a file that never changes again; nothing if there is none, or it has bad blocks."""

    def create(self, name: str, size: int, *, lasting: bool = True) -> None:
        """Make a file of `size` zeros, durably; an empty one, which grows, on a disk that is nearly full.

        Not `lasting`: its name is only durable after a `put` into the same folder. That costs no fsync of its own.
        """

    def write(self, name: str, offset: int, buffers: Sequence[Buffer]) -> None:
        """Write the buffers one behind the other at `offset`."""

    def sync(self, name: str) -> None:
        """Return when everything written to the file will survive a power cut."""

    def truncate(self, name: str, size: int) -> None:
        """Cut the file to `size` bytes, durably."""

    def put(self, name: str, data: Buffer) -> None:
        """Replace the file by `data`, or make it: after a crash there is the old file or the new one, whole."""

    def move(self, name: str, to: str) -> None:
        """Rename, durably."""

    def remove(self, name: str) -> None:
        """Delete, durably; nothing happens if there is no such file."""

    def free_bytes(self) -> int:
        """Return how many bytes are still to be had."""


class _Descriptor:
    """An open file. It is closed when the last reader lets go of it, not while one still reads: its number would soon
    stand for another file."""

    __slots__ = ("fd",)

    def __init__(self, path: Path, flags: int) -> None:
        self.fd = -1
        self.fd = os.open(path, flags | os.O_RDWR, 0o644)

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)


class RealDisk:
    """Files below one directory. Reads and writes may run on different threads; one writer at a time per file."""

    def __init__(self, root: Path, *, cached_bytes: int | None = 256 << 20) -> None:
        """`cached_bytes`: the newest bytes written that stay in the system's memory (qmq.log.page_cache); None: the
        system decides."""
        self._root = root
        self._cache = PageCache(cached_bytes) if cached_bytes is not None else None
        self._written: dict[str, tuple[int, int]] = {}
        self._descriptors: dict[str, _Descriptor] = {}
        root.mkdir(parents=True, exist_ok=True)

    def close(self) -> None:
        self._descriptors.clear()

    def names(self, folder: str) -> list[str]:
        path = self._root / folder
        return sorted(entry.name for entry in path.iterdir() if entry.is_file()) if path.is_dir() else []

    def has(self, name: str) -> bool:
        return (self._root / name).is_file()

    def size(self, name: str) -> int:
        try:
            return (self._root / name).stat().st_size
        except FileNotFoundError:
            return 0

    def look_again(self, name: str) -> None:
        self._forget(name)

    def used(self, name: str) -> int:
        # A restart read 1 GiB of zeros behind 28 MB of log: 3.0 of its 3.1 s. The file system knows where data ends.
        if not (size := self.size(name)):
            return 0
        with failing(name):
            file, used = self._open(name), 0
            while used < size:
                try:
                    used = os.lseek(file.fd, os.lseek(file.fd, used, os.SEEK_DATA), os.SEEK_HOLE)
                except OSError as error:
                    if error.errno == errno.ENXIO:  # nothing but a hole up to the end
                        return used
                    raise
        return used

    def read(self, name: str, offset: int, size: int) -> bytes:
        with failing(name):
            try:
                file = self._open(name)
            except FileNotFoundError:
                return b""
            data = read_over_bad_blocks(file.fd, name, offset, size)
        if size >= COLD_READ_BYTES and self._cache is not None:
            self._cache.was_read(file, offset, offset + len(data))
        return data

    def map(self, name: str) -> Buffer:
        if not (size := self.size(name)):
            return b""
        with failing(name), open(self._root / name, "rb") as file:
            if _has_bad_blocks(file.fileno(), size):
                return b""  # whoever touches one of a mapped file is killed (SIGBUS)
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))

    def create(self, name: str, size: int, *, lasting: bool = True) -> None:
        with failing(name):
            self._forget(name)
            path = self._root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            file = self._descriptors[name] = _Descriptor(path, os.O_CREAT | os.O_TRUNC)
            self._close_some()
            # A nearly full disk keeps its rest for what must go on: a segment that grows with its frames of progress
            # needs a part of it, one that is reserved ahead would take all, or find too little and end the process.
            if size and self.free_bytes() >= 2 * size:
                os.posix_fallocate(file.fd, 0, size)
            if lasting:
                os.fsync(file.fd)
                self._sync_folders(path)

    def write(self, name: str, offset: int, buffers: Sequence[Buffer]) -> None:
        with failing(name):
            file = self._open(name)
            if self._cache is not None:
                self._written[name] = (self._written.get(name, (offset, 0))[0], offset + sum(map(len, buffers)))
            for begin in range(0, len(buffers), _IOV_MAX):
                some = buffers[begin : begin + _IOV_MAX]
                total = sum(map(len, some))
                written = os.pwritev(file.fd, some, offset)
                while written < total:  # a signal or a nearly full disk cut it short: the rest, or its error
                    written += os.pwrite(file.fd, b"".join(some)[written:], offset + written)
                offset += total

    def sync(self, name: str) -> None:
        with failing(name):
            file = self._open(name)
            os.fdatasync(file.fd)
            if self._cache is not None and (written := self._written.pop(name, None)) is not None:
                self._cache.synced(file, *written)

    def truncate(self, name: str, size: int) -> None:
        with failing(name):
            file = self._open(name)
            os.ftruncate(file.fd, size)
            os.fsync(file.fd)

    def put(self, name: str, data: Buffer) -> None:
        with failing(name):
            path = self._root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            beside = path.with_name(path.name + ".new")
            with open(beside, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            self._forget(name)  # a descriptor of the file that was there before would still read that one
            os.replace(beside, path)
            self._sync_folders(path)

    def move(self, name: str, to: str) -> None:
        with failing(name):
            self._forget(name)
            (self._root / to).parent.mkdir(parents=True, exist_ok=True)
            os.rename(self._root / name, self._root / to)
            self._sync_folders(self._root / to)
            self._sync_folders(self._root / name)

    def remove(self, name: str) -> None:
        with failing(name):
            self._forget(name)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._root / name)
                self._sync_folders(self._root / name)

    def free_bytes(self) -> int:
        status = os.statvfs(self._root)
        return status.f_bavail * status.f_frsize

    def _open(self, name: str) -> _Descriptor:
        file = self._descriptors.get(name)
        if file is None:
            file = self._descriptors.setdefault(name, _Descriptor(self._root / name, 0))
            self._close_some()
        return file

    def _close_some(self) -> None:
        """A delay server has two files per segment of its schedule: 35,000 for two years of hours."""
        while len(self._descriptors) > OPEN_FILES_MAX:
            with contextlib.suppress(KeyError, StopIteration, RuntimeError):  # another thread does it
                self._descriptors.pop(next(iter(self._descriptors)), None)

    def _forget(self, name: str) -> None:
        self._descriptors.pop(name, None)

    def _sync_folders(self, path: Path) -> None:
        """Make a name durable: fsync its folder and those above it, up to the data directory."""
        for folder in path.parents:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            if folder == self._root:
                break


def read_over_bad_blocks(fd: int, name: str, offset: int, size: int) -> bytes:
    """Read until `size` bytes are there or the file ends; go over blocks that cannot be read.

    Raises:
        OSError: the file cannot be read at all.
    """
    data, end, wanted, bad = b"", offset + size, size, 0
    while (at := offset + len(data)) < end:
        try:
            more = os.pread(fd, wanted, at)
        except OSError as error:
            block_end = min(at - at % BLOCK_BYTES + BLOCK_BYTES, end)
            if error.errno not in _MEDIUM_ERRORS or bad == UNREADABLE_BLOCKS_MAX:
                raise
            if at + wanted > block_end:  # one of several blocks: which?
                wanted = block_end - at
                continue
            bad += 1
            more = UNREADABLE[: max(min(block_end, os.fstat(fd).st_size) - at, 0)]
            log.error("disk cannot read file=%s offset=%d bytes=%d: %s", name, at, len(more), error)
        if not more:
            break
        data += more
        wanted = end - at - len(more)
    return data


def _has_bad_blocks(fd: int, size: int) -> bool:
    at = 0
    try:
        while at < size and (read := len(os.pread(fd, 1 << 20, at))):
            at += read
    except OSError as error:
        if error.errno not in _MEDIUM_ERRORS:
            raise
        return True
    return False


@contextlib.contextmanager
def failing(name: str) -> Iterator[None]:
    """Turn an error of the system about a file into DiskFailed."""
    try:
        yield
    except OSError as error:
        raise DiskFailed(f"{name}: {error}") from error
