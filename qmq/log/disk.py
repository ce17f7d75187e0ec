"""Shell. Disk of a log: the port, and its only durable implementation.

Names are relative to one data directory, with `/` between folders. All calls block; slow ones run on a thread. A failed
call raises DiskFailed. The process must exit: after a failed write or fsync the file's contents are undefined (I15). A
block that cannot be read raises no error. It is returned as UNREADABLE, which matches no CRC, so it is repaired as any
other damage.

Tests and simulators run `RealDisk` on the file system in memory of `qmq.log.memory_disk`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import secrets
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol

from qmq import descriptors
from qmq.codec import Buffer
from qmq.errors import DiskFailed, QmqError
from qmq.log.system import System

log = logging.getLogger(__name__)

COLD_READ_BYTES = 64 * 1024
"""Smaller reads, of headers and snapshots, may stay in the page cache: they take little of it."""
BLOCK_BYTES = 4096
UNREADABLE = b"\xde" * BLOCK_BYTES
"""Contents of a block that the disk cannot read. Not zeros: those would look like the end of the log."""
UNREADABLE_BLOCKS_MAX = 256
"""Unreadable blocks in one read, 1 MiB, above which the disk itself has failed."""
OPEN_FILES_MAX, OPEN_FILES_PART = 512, 16
"""Limit of open files, as a number and as a part of the limit of descriptors. Above it, the file that has been open
longest is closed, and opened again on its next use. A process has up to two disks.
"""
WHOLE_FILE = 0, 1 << 62
REMOVED = "removed"
SWEPT_BYTES, SWEPT_SHARE, SWEEP_S = 4 << 20, 256, 0.05
"""Bytes of removed files that are freed at once, or this share of them if that is more; seconds between two pieces.
Measured (`python -m benchmarks.removal`): unlinking 1 GiB took 266 ms, and an fsync of a neighbour up to 83 ms, longest
where the file system discards freed blocks. In pieces: 5 ms and 4 ms.
"""
_MEDIUM_ERRORS = frozenset({errno.EIO, errno.ENODATA, errno.EILSEQ})
PIECE_BYTES = 1 << 20
"""Bytes of one trial read."""
_IOV_MAX = 1024
"""Linux takes at most this many buffers in one pwritev."""


class Disk(Protocol):
    """Port of a disk, as a log uses it. `put` is atomic and durable; `write` is neither until `sync`."""

    def names(self, folder: str) -> list[str]:
        """Return the names of the files in `folder`, sorted; none if there is no such folder."""

    def has(self, name: str) -> bool:
        """Return whether there is a file of this name."""

    def size(self, name: str) -> int:
        """Return the bytes of the file, 0 if there is none."""

    def look_again(self, name: str) -> None:
        """Let the next read open the file by its name, because it may be replaced or gone by now."""

    def is_lost(self, name: str) -> bool:
        """Return whether the open file has lost this name, which is gone or names another file."""

    def used(self, name: str) -> int:
        """Return the size without the space reserved at the end. The rest is zeros; some zeros may precede it."""

    def read(self, name: str, offset: int, size: int) -> bytes:
        """Return up to `size` bytes from `offset`; fewer only at the end of the file. Bad blocks come as UNREADABLE."""

    def map(self, name: str) -> Buffer:
        """Return the whole content of a file that never changes again; empty if it is missing or has bad blocks."""

    def create(self, name: str, size: int, *, lasting: bool = True) -> None:
        """Make a file of `size` zeros, durably. On a nearly full disk, make an empty file, which grows.

        Without `lasting`, the name becomes durable with the next `put` into the same folder, which saves an fsync.
        """

    def write(self, name: str, offset: int, buffers: Sequence[Buffer]) -> None:
        """Write the buffers one after the other at `offset`."""

    def sync(self, name: str) -> None:
        """Make all writes to the file durable: after this they survive a power cut."""

    def truncate(self, name: str, size: int) -> None:
        """Cut the file to `size` bytes, durably."""

    def put(self, name: str, data: Buffer) -> None:
        """Replace or make the file with `data`. A crash leaves the old file or the new one, whole."""

    def move(self, name: str, to: str) -> None:
        """Rename a file, durably."""

    def remove(self, name: str) -> None:
        """Delete a file, durably; no error if it is missing."""

    def free_bytes(self) -> int:
        """Return the bytes of free space."""


class _Descriptor:
    """Open file. It is closed when its last reader releases it. If it were closed earlier, its descriptor could be
    reused for another file.
    """

    __slots__ = ("_system", "fd")

    def __init__(self, system: System, fd: int) -> None:
        self._system = system
        self.fd = fd

    def __del__(self) -> None:
        self._system.close(self.fd)


STEP_BYTES = 8 << 20
"""Ranges are dropped in steps of this size, because a call per commit would cost more than it saves."""


class _Range(NamedTuple):
    file: _Descriptor
    begin: int
    end: int


class PageCache:
    """Newest part of a disk's files in the system's page cache. Made by the disk; `synced` runs on the writing thread.

    Written and fsynced bytes stay in the page cache until another program needs the memory. A log broker would fill a
    machine with pages without readers, evict the pages of other programs, and pay for a fresh page per 4 KiB. In a
    virtual machine whose host reclaims unused memory, that is 1.7 to 2 µs per KiB, two thirds of a broker's time. So
    bytes more than `keep_bytes` behind the end are dropped. Measured, 1 KiB messages through master and slave: 190,000
    to 250,000/s without, 290,000 to 355,000/s with it. Readers further behind read from the disk, and leave nothing in
    the cache.
    """

    def __init__(self, system: System, keep_bytes: int) -> None:
        self._system = system
        self._keep_bytes = keep_bytes
        self._ranges: deque[_Range] = deque()
        self._bytes = 0

    def synced(self, file: _Descriptor, begin: int, end: int) -> None:
        """Drop cached pages too far behind `[begin, end)`, which is written and fsynced."""
        self._bytes += end - begin
        last = self._ranges[-1] if self._ranges else None
        if last is not None and last.file is file and last.end == begin and last.end - last.begin < STEP_BYTES:
            self._ranges[-1] = _Range(file, last.begin, end)
        else:
            self._ranges.append(_Range(file, begin, end))
        while self._bytes > self._keep_bytes + STEP_BYTES and len(self._ranges) > 1:
            oldest = self._ranges.popleft()
            self._bytes -= oldest.end - oldest.begin
            self._drop(oldest)

    def was_read(self, file: _Descriptor, begin: int, end: int) -> None:
        """Drop `[begin, end)` after a read, unless it belongs to the newest part."""
        ranges = self._ranges
        try:
            is_new = any(kept.file is file and kept.begin < end and begin < kept.end for kept in ranges)
        except RuntimeError:  # the writing thread changed the ranges; pages that stay do no harm
            return
        if not is_new:
            self._drop(_Range(file, begin, end))

    def _drop(self, gone: _Range) -> None:
        self._system.drop_cached(gone.file.fd, gone.begin, gone.end)


class RealDisk:
    """Files below one directory. Reads and writes may run on different threads; one writer at a time per file."""

    def __init__(self, root: Path, *, cached_bytes: int | None = 256 << 20, system: System | None = None) -> None:
        """Make the disk. `cached_bytes` newest bytes stay in the page cache; with None the system decides."""
        self._root = str(root)
        self._system = system or System()
        self._cache = PageCache(self._system, cached_bytes) if cached_bytes is not None else None
        self._written: dict[str, tuple[int, int]] = {}
        self._descriptors: dict[str, _Descriptor] = {}
        self._open_max = min(OPEN_FILES_MAX, max(1, descriptors.limit() // OPEN_FILES_PART))
        self._mapped: set[str] = set()
        """Mapped files, which are never cut, because an access to a missing page of one kills the process."""
        with failing(self._root):
            self._make_folder(self._root)
            self._sync_all_folders()

    def close(self) -> None:
        self._descriptors.clear()

    def names(self, folder: str) -> list[str]:
        return sorted(self._system.names(self._path(folder)))

    def folders(self, folder: str) -> list[str]:
        """Return the names of the folders in it; none if the folder is missing."""
        with contextlib.suppress(FileNotFoundError):
            return sorted(self._system.folders(self._path(folder)))
        return []

    def has(self, name: str) -> bool:
        return self._system.size(self._path(name)) is not None

    def size(self, name: str) -> int:
        return self._system.size(self._path(name)) or 0

    def look_again(self, name: str) -> None:
        self._forget(name)

    def is_lost(self, name: str) -> bool:
        with failing(name):
            file = self._descriptors.get(name)
            is_lost = file is not None and not self._system.is_named(file.fd, self._path(name))
        return is_lost and self._descriptors.get(name) is file  # otherwise this process has just removed it

    def used(self, name: str) -> int:
        # A restart read 1 GiB of zeros behind 28 MB of log: 3.0 of its 3.1 s. The file system keeps the end of data.
        if not self.has(name):
            return 0
        with failing(name):
            file, used = self._open(name), 0
            try:
                while True:
                    data = self._system.seek(file.fd, used, os.SEEK_DATA)
                    used = self._system.seek(file.fd, data, os.SEEK_HOLE)
            except OSError as error:
                if error.errno != errno.ENXIO:  # a hole up to the end
                    raise
        return used

    def read(self, name: str, offset: int, size: int) -> bytes:
        with failing(name):
            try:
                file = self._open(name)
            except FileNotFoundError:
                return b""
            data = read_over_bad_blocks(self._system, file.fd, name, offset, size)
        if size >= COLD_READ_BYTES and self._cache is not None:
            self._cache.was_read(file, offset, offset + len(data))
        return data

    def map(self, name: str) -> Buffer:
        if not self.size(name):
            return b""
        with failing(name):
            file = self._descriptor(self._path(name))
            if _has_bad_blocks(self._system, file.fd):
                return b""  # an access to a bad block of a mapped file kills the process (SIGBUS)
            self._mapped.add(name)
            return self._system.map(file.fd)

    def create(self, name: str, size: int, *, lasting: bool = True) -> None:
        with failing(name):
            path = self._path(name)
            self._make_folder(_folder_of(path))
            file = self._descriptors[name] = self._descriptor(path, os.O_CREAT | os.O_TRUNC)
            self._close_some()
            # On a nearly full disk a segment grows with its frames. Reserving it ahead would take the space that
            # consumers' progress needs, or find too little and end the process.
            if size and self.free_bytes() >= 2 * size:
                self._system.reserve(file.fd, size)
            if lasting:
                self._system.fsync(file.fd)
                self._sync_folders(path)

    def write(self, name: str, offset: int, buffers: Sequence[Buffer]) -> None:
        with failing(name):
            file, (begin, _) = self._open(name), self._written.get(name, (offset, offset))
            self._written[name] = begin, offset + sum(map(len, buffers))
            self._write_all(file, offset, buffers)

    def _write_all(self, file: _Descriptor, offset: int, buffers: Sequence[Buffer]) -> None:
        for begin in range(0, len(buffers), _IOV_MAX):
            some = buffers[begin : begin + _IOV_MAX]
            total = sum(map(len, some))
            written = self._system.pwritev(file.fd, some, offset)
            while written < total:  # a signal or a nearly full disk cut the write short
                written += self._system.pwritev(file.fd, [b"".join(some)[written:]], offset + written)
            offset += total

    def sync(self, name: str) -> None:
        with failing(name):
            file = self._open(name)
            self._sync(file, self._system.fdatasync)
            written = self._written.pop(name, None)
            if written is not None and self._cache is not None:
                self._cache.synced(file, *written)

    def _sync(self, file: _Descriptor, call: Callable[[int], None]) -> None:
        """Fsync a file, and drop its cached pages if that fails. Linux marks pages that it could not write as clean:
        readers still see them in memory, and the next fsync succeeds. A process started soon after would confirm them.
        """
        try:
            call(file.fd)
        except OSError:
            self._system.drop_cached(file.fd, *WHOLE_FILE)
            raise

    def truncate(self, name: str, size: int) -> None:
        with failing(name):
            file = self._open(name)
            self._system.truncate(file.fd, size)
            self._sync(file, self._system.fsync)

    def put(self, name: str, data: Buffer) -> None:
        with failing(name):
            path = self._path(name)
            self._make_folder(_folder_of(path))
            beside = f"{path}.new"
            file = self._descriptor(beside, os.O_CREAT | os.O_TRUNC)
            self._write_all(file, 0, [data])
            self._system.fsync(file.fd)
            self._system.rename(beside, path)
            self._forget(name)  # an open descriptor would still read the replaced file
            self._sync_folders(path)

    def move(self, name: str, to: str) -> None:
        with failing(name):
            self._forget(name)
            path, to_path = self._path(name), self._path(to)
            self._make_folder(_folder_of(to_path))
            self._sync_folders(to_path)  # otherwise the old name may be gone before the new name is durable
            self._system.rename(path, to_path)
            self._forget(name)  # another thread may have opened it meanwhile
            self._sync_folders(to_path)
            self._sync_folders(path)

    def remove(self, name: str) -> None:
        with failing(name):
            self._forget(name)
            with contextlib.suppress(FileNotFoundError):
                path = self._path(name)
                if self.size(name) <= SWEPT_BYTES or name in self._mapped:
                    self._system.unlink(path)
                    self._mapped.discard(name)
                else:  # `sweep` does the rest
                    aside = self._path(f"{REMOVED}/{name.replace('/', '-')}")
                    self._make_folder(_folder_of(aside))
                    self._system.rename(path, aside)
                self._forget(name)  # another thread may have opened it meanwhile
                self._sync_folders(path)

    def sweep(self) -> bool:
        """Free a piece of the removed large files; return whether there was any."""
        files = [(name, self.size(f"{REMOVED}/{name}")) for name in self.names(REMOVED)]
        if not files:
            return False
        name, size = files[0]
        left = size - max(SWEPT_BYTES, sum(size for _, size in files) // SWEPT_SHARE)
        with failing(name), contextlib.suppress(FileNotFoundError):  # another process may delete it to make room
            path = self._path(f"{REMOVED}/{name}")
            if left > 0:
                file = self._descriptor(path)
                self._system.truncate(file.fd, left)
            else:
                self._system.unlink(path)
        return True

    def free_bytes(self) -> int:
        return self._system.free_bytes(self._root)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _descriptor(self, path: str, flags: int = 0) -> _Descriptor:
        return _Descriptor(self._system, self._system.open(path, flags | os.O_RDWR))

    def _open(self, name: str) -> _Descriptor:
        file = self._descriptors.get(name)
        if file is None:
            file = self._descriptors.setdefault(name, self._descriptor(self._path(name)))
            self._close_some()
        return file

    def _close_some(self) -> None:
        """Close files above the limit. A delay server has two files per segment of its schedule: 35,000 for two years
        of hours.
        """
        while len(self._descriptors) > self._open_max:
            with contextlib.suppress(KeyError, StopIteration, RuntimeError):  # another thread makes it
                self._descriptors.pop(next(iter(self._descriptors)), None)

    def _forget(self, name: str) -> None:
        self._descriptors.pop(name, None)

    def _make_folder(self, folder: str) -> None:
        """Make a folder and its missing parents."""
        try:
            self._system.mkdir(folder)
        except FileExistsError:
            pass
        except FileNotFoundError:
            self._make_folder(_folder_of(folder))
            self._system.mkdir(folder)

    def _sync_folders(self, path: str) -> None:
        """Make a name durable: fsync its folder and its parents, up to the data directory."""
        while path != self._root:
            path = _folder_of(path)
            self._sync_folder(path)

    def _sync_all_folders(self) -> None:
        """Make existing names durable: an earlier process may have been killed before that, or just made the root."""
        try:
            self._sync_folder(_folder_of(self._root))
        except OSError as error:  # the parent belongs to another user, or its file system has no such fsync
            if error.errno not in (errno.EACCES, errno.EPERM, errno.EINVAL):
                raise
        self._sync_tree(self._root)

    def _sync_tree(self, folder: str) -> None:
        with contextlib.suppress(PermissionError):  # it is lost+found
            self._sync_folder(folder)
            for name in self._system.folders(folder):
                self._sync_tree(f"{folder}/{name}")

    def _sync_folder(self, folder: str) -> None:
        descriptor = self._system.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            self._system.fsync(descriptor)
        finally:
            self._system.close(descriptor)


def _folder_of(path: str) -> str:
    above, slash, _ = path.rpartition("/")
    return above or slash or "."


def read_over_bad_blocks(system: System, fd: int, name: str, offset: int, size: int) -> bytes:
    """Read until `size` bytes are there or the file ends; bad blocks come as UNREADABLE.

    Raises:
        OSError: the file cannot be read at all.
    """
    data, end, wanted, bad = b"", offset + size, size, 0
    while (at := offset + len(data)) < end:
        try:
            more = system.pread(fd, wanted, at)
        except OSError as error:
            block_end = min(at - at % BLOCK_BYTES + BLOCK_BYTES, end)
            if error.errno not in _MEDIUM_ERRORS or bad == UNREADABLE_BLOCKS_MAX:
                raise
            if at + wanted > block_end:  # one of these blocks is bad: find it
                wanted = block_end - at
                continue
            bad += 1
            more = UNREADABLE[: max(min(block_end, system.open_size(fd)) - at, 0)]
            log.error("disk cannot read file=%s offset=%d bytes=%d: %s", name, at, len(more), error)
        if not more:
            break
        data += more
        wanted = end - at - len(more)
    return data


def _has_bad_blocks(system: System, fd: int) -> bool:
    at = 0
    try:
        while read := len(system.pread(fd, PIECE_BYTES, at)):
            at += read
    except OSError as error:
        if error.errno not in _MEDIUM_ERRORS:
            raise
        return True
    return False


@contextlib.contextmanager
def failing(name: str) -> Iterator[None]:
    """Turn a system error about a file into DiskFailed."""
    try:
        yield
    except OSError as error:
        raise DiskFailed(f"{name}: {error}") from error


BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""Random id of the kernel's present run."""


@contextmanager
def one_process(data: Path, name: str) -> Iterator[str]:
    """Hold the directory's lock and yield the directory's instance. Two processes on one directory would destroy it.

    Raises:
        QmqError: another `name` holds the lock.
    """
    with open(data / "lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise QmqError(f"another {name} runs on {data}; stop it first") from None
        yield _instance(file)


def _instance(lock: IO[Any]) -> str:
    """Return a name of this directory at this place, valid until the machine restarts.

    A process that restarts on its directory has the same instance, and the lock proves that its predecessor has ended.
    A copy of the directory has another instance: its lock is another file, or the kernel has another boot id.
    """
    try:
        kernel = BOOT_ID.read_text().strip()
    except OSError:  # not on Linux: each start counts as another place
        kernel = secrets.token_hex(16)
    found = os.fstat(lock.fileno())
    return blake2b(f"{kernel} {found.st_dev} {found.st_ino}".encode(), digest_size=8).hexdigest()
