"""Shell. A broker on a disk with bad blocks, listed in a file BAD_BLOCKS beside its settings.

The system calls fail as on Linux. A read stops before a bad block, and raises EIO if it begins in one. A write that
covers a bad block makes it good; a write of a part of one fails, as the block would have to be read. A cut drops the
bad blocks behind it.
"""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

from qmq.broker.main import main

BAD_BLOCKS = "bad blocks"
BLOCK = 4096


class BadBlocks:
    """Lines `<file> <block>`; a block made good leaves the file, also for the next start."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._pread, self._pwritev, self._ftruncate = os.pread, os.pwritev, os.ftruncate
        os.pread, os.pwritev, os.ftruncate = self.pread, self.pwritev, self.ftruncate

    def pread(self, fd: int, size: int, offset: int) -> bytes:
        end = min(offset + size, os.fstat(fd).st_size)  # 0 for files of the kernel, which are read all the same
        met = [block for block in self._of(fd) if block * BLOCK < end and offset < (block + 1) * BLOCK]
        if met and met[0] * BLOCK <= offset:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return self._pread(fd, met[0] * BLOCK - offset if met else size, offset)

    def pwritev(self, fd: int, buffers: list[bytes], offset: int) -> int:
        end, size = offset + sum(map(len, buffers)), os.fstat(fd).st_size
        met = [block for block in self._of(fd) if block * BLOCK < end and offset < (block + 1) * BLOCK]
        if any(block * BLOCK < size and (block * BLOCK < offset or end < (block + 1) * BLOCK) for block in met):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        self._are_good(fd, met)
        return self._pwritev(fd, buffers, offset)

    def ftruncate(self, fd: int, size: int) -> None:
        if size % BLOCK and size // BLOCK in self._of(fd):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        self._are_good(fd, [block for block in self._of(fd) if block * BLOCK >= size])
        self._ftruncate(fd, size)

    def _of(self, fd: int) -> list[int]:
        if not self._file.exists():
            return []
        name = os.readlink(f"/proc/self/fd/{fd}")
        lines = (line.rpartition(" ") for line in self._file.read_text().splitlines())
        return sorted(int(block) for path, _, block in lines if path == name)

    def _are_good(self, fd: int, blocks: list[int]) -> None:
        if blocks:
            good = {f"{os.readlink(f'/proc/self/fd/{fd}')} {block}" for block in blocks}
            lines = [line for line in self._file.read_text().splitlines() if line not in good]
            beside = self._file.with_suffix(".new")
            beside.write_text("".join(f"{line}\n" for line in lines))
            beside.replace(self._file)  # atomic, as the test reads it


if __name__ == "__main__":
    BadBlocks(Path(sys.argv[sys.argv.index("--config") + 1]).with_name(BAD_BLOCKS))
    sys.exit(main())
