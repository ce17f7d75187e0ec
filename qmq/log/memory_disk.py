"""Shell. The shipped disk on a file system in memory that forgets, tears and refuses writes: for tests and simulators.

`crash` keeps durable changes, and by chance some of the others:

- bytes of a file: durable after its fsync; otherwise any subset of the writes since, each maybe torn
- name of a file: durable after an fsync of its folder, for each new, renamed and deleted one; otherwise by chance
- a rename happens as a whole or not at all; a file without any name is gone

From changing call number `fail_at` on, the system refuses every change, because its process is about to be killed.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from random import Random
from typing import Final

from qmq.codec import Buffer
from qmq.log.disk import RealDisk
from qmq.log.system import System

ROOT = "/data"


class MemoryDisk(RealDisk):
    """A disk that forgets unsynced changes on `crash`, and fails on demand."""

    def __init__(self, system: MemorySystem | None = None) -> None:
        self.system = system or MemorySystem()
        super().__init__(Path(ROOT), system=self.system)

    @property
    def calls(self) -> int:
        """Calls that changed something, or were refused."""
        return self.system.calls

    def fail_after(self, calls: int) -> None:
        """Refuse the changing call after the next `calls`, and all that follow."""
        self.system.fail_at = self.system.calls + calls

    def heal(self) -> None:
        self.system.heal()

    def all_names(self) -> list[str]:
        """Return the names of all files, sorted."""
        at = len(ROOT) + 1
        return sorted(path[at:] for path, inode in self.system.entries.items() if inode is not None)

    def reopen(self) -> None:
        """Begin as the next process does, after one that was killed."""
        self.close()
        super().__init__(Path(ROOT), system=self.system)

    def crash(self, rng: Random | None = None) -> None:
        """Lose power. Without `rng` all unsynced changes are gone; with it, some may have reached the disk."""
        self.close()
        self.system.crash(rng)

    def flip(self, name: str, bit: int) -> None:
        """Damage one bit of a file."""
        self.system.flip(f"{ROOT}/{name}", bit)

    def copy(self) -> MemoryDisk:
        """Return an image of the present contents, durable and written."""
        image = MemoryDisk()
        image.system.copy_from(self.system)
        return image

    def put_back(self, image: MemoryDisk) -> None:
        """Replace all files by those of an image."""
        self.close()
        self.system.copy_from(image.system)


class Inode:
    """File: its bytes for readers, and its bytes on the disk. Bytes of `size` behind `data` are reserved zeros."""

    __slots__ = ("data", "durable", "durable_size", "size", "unsynced")

    def __init__(self) -> None:
        self.data = bytearray()
        self.durable = bytearray()
        self.size = self.durable_size = 0
        self.unsynced: list[tuple[int, bytes | None]] = []
        """Writes since the last fsync, in order. A write without bytes cuts or extends the file to that size."""

    def change(self, offset: int, written: bytes | None) -> None:
        self.unsynced.append((offset, written))
        self.size = _apply(self.data, self.size, offset, written)

    def sync(self) -> None:
        for offset, written in self.unsynced:
            self.keep(offset, written)
        self.unsynced.clear()

    def keep(self, offset: int, written: bytes | None) -> None:
        """Apply a change to the disk."""
        self.durable_size = _apply(self.durable, self.durable_size, offset, written)

    def forget(self) -> None:
        """Drop all changes that are not on the disk."""
        self.data = bytearray(self.durable)
        self.size = self.durable_size
        self.unsynced.clear()

    def read(self, begin: int, end: int) -> bytes:
        end = min(end, self.size)
        return bytes(memoryview(self.data)[begin:end]).ljust(max(end - begin, 0), b"\0")

    def copy(self) -> Inode:
        copied = Inode()
        copied.data, copied.durable = bytearray(self.data), bytearray(self.durable)
        copied.size, copied.durable_size, copied.unsynced = self.size, self.durable_size, list(self.unsynced)
        return copied


def _apply(data: bytearray, size: int, offset: int, written: bytes | None) -> int:
    if written is None:
        del data[offset:]
        return offset
    if len(data) < offset:
        data.extend(bytes(offset - len(data)))
    data[offset : offset + len(written)] = written
    return max(size, len(data))


FOLDER: Final = None
"""Entry of a name that is a folder's."""
GONE: Final = False
"""Entry of a deleted name."""
Entry = Inode | None
Change = tuple[tuple[str, Inode | None | bool], ...]
"""Change of one or more names that happens as a whole."""


class MemorySystem(System):
    """Calls of an operating system with all files in memory. Used on one thread."""

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {"/": FOLDER}
        self._durable: dict[str, Entry] = {"/": FOLDER}
        self._changes: list[Change] = []
        """Changes of names since the last fsync of their folder."""
        self._open: dict[int, Inode | str] = {}
        self._opened = 2
        self.calls = 0
        """Calls that changed something, or were refused."""
        self.fail_at: int | None = None
        """Number of the first call that is refused."""

    def heal(self) -> None:
        self.fail_at = None

    def may(self, call: str, path: str, fd: int = -1) -> None:
        """Count a call that changes something. Raises OSError if it is refused."""
        self.calls += 1
        if self.fail_at is not None and self.calls >= self.fail_at:
            raise _error(errno.EIO, path or str(fd))

    # Calls of the system.

    def open(self, path: str, flags: int) -> int:
        if path not in self.entries:
            if not flags & os.O_CREAT or _parent(path) not in self.entries:
                raise _error(errno.ENOENT, path)
            self.may("open", path)
            self._rename((path, Inode()))
        inode = self.entries[path]
        if inode is not FOLDER and flags & os.O_TRUNC and inode.size:
            self.may("open", path)
            inode.change(0, None)
        self._opened += 1
        self._open[self._opened] = path if inode is FOLDER else inode
        return self._opened

    def close(self, fd: int) -> None:
        self._open.pop(fd, None)  # a killed process has no open files

    def file(self, fd: int) -> Inode:
        file = self._open.get(fd, "")
        if isinstance(file, str):
            raise _error(errno.EISDIR if file else errno.EBADF, file)
        return file

    def pread(self, fd: int, size: int, at: int) -> bytes:
        if at < 0:
            raise _error(errno.EINVAL, str(at))
        return self.file(fd).read(at, at + size)

    def pwritev(self, fd: int, buffers: Sequence[Buffer], at: int) -> int:
        file = self.file(fd)
        self.may("write", "", fd)
        data = b"".join(buffers)
        file.change(at, data)
        return len(data)

    def reserve(self, fd: int, size: int) -> None:
        file = self.file(fd)
        self.may("reserve", "", fd)
        if size > file.size:
            file.change(size, None)

    def truncate(self, fd: int, size: int) -> None:
        file = self.file(fd)
        self.may("truncate", "", fd)
        file.change(size, None)

    def fsync(self, fd: int) -> None:
        file = self._open[fd]
        self.may("fsync", file if isinstance(file, str) else "", fd)
        if isinstance(file, str):
            self._sync_folder(file)
        else:
            file.sync()

    def fdatasync(self, fd: int) -> None:
        file = self.file(fd)
        self.may("fdatasync", "", fd)
        file.sync()

    def seek(self, fd: int, at: int, whence: int) -> int:
        file = self.file(fd)
        if at >= min(len(file.data), file.size):
            raise _error(errno.ENXIO, str(at))
        return at if whence == os.SEEK_DATA else len(file.data)

    def drop_cached(self, fd: int, begin: int, end: int) -> None:
        """Restore the disk's contents, as if the file were read anew, because no writer is left."""
        if not (file := self.file(fd)).unsynced:
            file.forget()

    def map(self, fd: int) -> Buffer:
        file = self.file(fd)
        return memoryview(file.read(0, file.size))

    def open_size(self, fd: int) -> int:
        return self.file(fd).size

    def is_named(self, fd: int, path: str) -> bool:
        return self.entries.get(path) is self.file(fd)

    def size(self, path: str) -> int | None:
        inode = self.entries.get(path)
        return None if inode is None else inode.size

    def names(self, folder: str) -> list[str]:
        prefix, at = f"{folder}/", len(folder) + 1
        inside = [path[at:] for path, entry in self.entries.items() if entry is not FOLDER and path.startswith(prefix)]
        return [name for name in inside if "/" not in name]

    def folders(self, folder: str) -> list[str]:
        inside = [path for path, entry in self.entries.items() if entry is FOLDER and path != "/"]
        return sorted(path.rpartition("/")[2] for path in inside if _parent(path) == folder)

    def mkdir(self, path: str) -> None:
        if path in self.entries:
            raise _error(errno.EEXIST, path)
        if _parent(path) not in self.entries:
            raise _error(errno.ENOENT, path)
        self.may("mkdir", path)
        self._rename((path, FOLDER))

    def rename(self, path: str, to: str) -> None:
        if path not in self.entries or _parent(to) not in self.entries:
            raise _error(errno.ENOENT, path)
        self.may("rename", path)
        self._rename((path, GONE), (to, self.entries[path]))

    def unlink(self, path: str) -> None:
        if path not in self.entries:
            raise _error(errno.ENOENT, path)
        self.may("unlink", path)
        self._rename((path, GONE))

    def free_bytes(self, folder: str) -> int:
        return 1 << 40

    def _rename(self, *change: tuple[str, Inode | None | bool]) -> None:
        self._changes.append(change)
        _name(self.entries, change)

    # Contents of the disk.

    def _sync_folder(self, folder: str) -> None:
        """Make the changes of a folder's names durable, together with earlier changes of the same names, so that no
        rename is torn.
        """
        wanted: set[str] = set()
        kept: list[Change] = []
        rest: list[Change] = []
        for change in reversed(self._changes):
            names = {path for path, _ in change}
            if wanted & names or any(_parent(path) == folder for path in names):
                wanted |= names
                kept.append(change)
            else:
                rest.append(change)
        for change in reversed(kept):
            _name(self._durable, change)
        self._changes = rest[::-1]

    def durable_file(self, path: str) -> Inode | None:
        """Return the file of this name after a crash that keeps only durable changes, or None."""
        return self._durable[path] if self._is_reachable(path) else None

    def _is_reachable(self, path: str) -> bool:
        while path != "/":
            if path not in self._durable:
                return False
            path = _parent(path)
        return True

    def crash(self, rng: Random | None = None) -> None:
        """Lose power. Without `rng` all unsynced changes are gone; with it, some may have reached the disk."""
        if rng is not None:
            self._keep_some_names(rng)
        self._changes.clear()
        self._open.clear()
        files = {id(inode): inode for inode in self._durable.values() if inode is not None}
        for inode in files.values():
            if rng is not None:
                for offset, written in inode.unsynced:
                    for part in self.survivors(rng, offset, written):
                        inode.keep(*part)
            inode.forget()
        self.entries = {path: entry for path, entry in self._durable.items() if self._is_reachable(path)}
        self._durable = dict(self.entries)

    def _keep_some_names(self, rng: Random) -> None:
        chance = rng.choice((0.0, 0.5, 1.0))
        wanted: set[str] = set()
        kept: list[Change] = []
        for change in reversed(self._changes):
            names = {path for path, _ in change}
            if wanted & names or rng.random() < chance:
                wanted |= names
                kept.append(change)
        for change in reversed(kept):
            _name(self._durable, change)

    def survivors(self, rng: Random, offset: int, written: bytes | None) -> Iterable[tuple[int, bytes | None]]:
        """Return the part of an unsynced write that reached the disk: all, nothing, or its first bytes."""
        fate = rng.random()
        if fate < 0.4:
            return [(offset, written)]
        if fate < 0.6 and written:
            return [(offset, written[: rng.randrange(len(written) + 1)])]
        return []

    def flip(self, path: str, bit: int) -> None:
        """Damage one bit of a file, read or on the disk."""
        inode = self.entries[path]
        assert inode is not None
        for data in (inode.data, inode.durable):
            data.extend(bytes(max(bit // 8 + 1 - len(data), 0)))
            data[bit // 8] ^= 1 << (bit % 8)
        inode.size, inode.durable_size = max(inode.size, len(inode.data)), max(inode.durable_size, len(inode.durable))

    def copy_from(self, other: MemorySystem) -> None:
        """Copy the present files of `other`, with nothing open."""
        copies: dict[int, Entry] = {}

        def copied(inode: Entry) -> Entry:
            return copies.setdefault(id(inode), inode and inode.copy())

        self.entries = {path: copied(inode) for path, inode in other.entries.items()}
        self._durable = {path: copied(inode) for path, inode in other._durable.items()}
        self._changes = [
            tuple((path, content if content is GONE else copied(content)) for path, content in change)  # type: ignore[arg-type]
            for change in other._changes
        ]
        self._open.clear()


def _name(entries: dict[str, Entry], change: Change) -> None:
    for path, content in change:
        if isinstance(content, bool):
            entries.pop(path, None)
        else:
            entries[path] = content


def _parent(path: str) -> str:
    return path.rpartition("/")[0] or "/"


def _error(number: int, path: str) -> OSError:
    return OSError(number, os.strerror(number), path)
