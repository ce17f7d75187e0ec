"""Shell. Calls of the operating system that a disk makes; `qmq.log.memory_disk` replaces them."""

from __future__ import annotations

import ctypes
import mmap
import os
import stat
import weakref
from collections.abc import Sequence

from qmq.codec import Buffer
from qmq.descriptors import opening

FILE_MODE, FOLDER_MODE = 0o640, 0o750
"""Modes of new files and folders: for the user of the process, and for readers in its group, such as a backup."""

_libc = ctypes.CDLL(None, use_errno=True)
_mmap = _libc.mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
_munmap = _libc.munmap
_munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_MAP_FAILED = ctypes.c_void_p(-1).value


class System:
    """Calls of the operating system. Each method is one call and raises OSError on failure. Paths are absolute or
    relative to the process. A call that needs a descriptor waits for one.
    """

    def open(self, path: str, flags: int) -> int:
        return opening(lambda: os.open(path, flags, FILE_MODE))

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
        """Map the file without `mmap.mmap`, which holds a descriptor for each mapped file."""
        size = os.fstat(fd).st_size
        at = _mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
        if at == _MAP_FAILED:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        mapped = (ctypes.c_ubyte * size).from_address(at)
        weakref.finalize(mapped, _munmap, at, size).atexit = False
        return memoryview(mapped).cast("B").toreadonly()

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
            with opening(lambda: os.scandir(folder)) as entries:
                return [entry.name for entry in entries if entry.is_file()]
        except (FileNotFoundError, NotADirectoryError):
            return []

    def folders(self, folder: str) -> list[str]:
        """Return the names of the subfolders."""
        with opening(lambda: os.scandir(folder)) as entries:
            return [entry.name for entry in entries if entry.is_dir()]

    def mkdir(self, path: str) -> None:
        os.mkdir(path, FOLDER_MODE)

    def rename(self, path: str, to: str) -> None:
        os.rename(path, to)

    def unlink(self, path: str) -> None:
        os.unlink(path)

    def free_bytes(self, folder: str) -> int:
        status = os.statvfs(folder)
        return status.f_bavail * status.f_frsize
