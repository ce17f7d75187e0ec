"""Shell. The calls of the operating system that a disk makes; `qmq.log.memory_disk` replaces them."""

from __future__ import annotations

import mmap
import os
import stat
from collections.abc import Sequence

from qmq.codec import Buffer


class System:
    """Each method is one call and raises OSError on failure. Paths are absolute or relative to the process."""

    def open(self, path: str, flags: int) -> int:
        return os.open(path, flags, 0o644)

    def close(self, fd: int) -> None:
        os.close(fd)

    def pread(self, fd: int, size: int, at: int) -> bytes:
        return os.pread(fd, size, at)

    def pwritev(self, fd: int, buffers: Sequence[Buffer], at: int) -> int:
        return os.pwritev(fd, buffers, at)

    def reserve(self, fd: int, size: int) -> None:
        os.posix_fallocate(fd, 0, size)

    def truncate(self, fd: int, size: int) -> None:
        os.ftruncate(fd, size)

    def fsync(self, fd: int) -> None:
        os.fsync(fd)

    def fdatasync(self, fd: int) -> None:
        os.fdatasync(fd)

    def seek(self, fd: int, at: int, whence: int) -> int:
        return os.lseek(fd, at, whence)

    def drop_cached(self, fd: int, begin: int, end: int) -> None:
        os.posix_fadvise(fd, begin, end - begin, os.POSIX_FADV_DONTNEED)

    def map(self, fd: int) -> Buffer:
        return memoryview(mmap.mmap(fd, 0, access=mmap.ACCESS_READ))

    def open_size(self, fd: int) -> int:
        return os.fstat(fd).st_size

    def is_named(self, fd: int, path: str) -> bool:
        """Return whether the open file has this name."""
        try:
            return os.path.samestat(os.stat(path), os.fstat(fd))
        except (FileNotFoundError, NotADirectoryError):
            return False

    def size(self, path: str) -> int | None:
        """Return the bytes of the file; None if it is missing."""
        try:
            status = os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return status.st_size if stat.S_ISREG(status.st_mode) else None

    def names(self, folder: str) -> list[str]:
        """Return the names of the files in the folder; none if it is missing."""
        try:
            with os.scandir(folder) as entries:
                return [entry.name for entry in entries if entry.is_file()]
        except (FileNotFoundError, NotADirectoryError):
            return []

    def folders(self, folder: str) -> list[str]:
        """Return the names of the subfolders."""
        with os.scandir(folder) as entries:
            return [entry.name for entry in entries if entry.is_dir()]

    def mkdir(self, path: str) -> None:
        os.mkdir(path)

    def rename(self, path: str, to: str) -> None:
        os.rename(path, to)

    def unlink(self, path: str) -> None:
        os.unlink(path)

    def free_bytes(self, folder: str) -> int:
        status = os.statvfs(folder)
        return status.f_bavail * status.f_frsize
