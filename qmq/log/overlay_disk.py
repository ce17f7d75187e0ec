"""Shell. Overlay disk: a data directory that is only read; changes stay in memory.

With it, the log's own recovery can run on a directory that must not change: of a lost broker, on a readonly mount, in a
backup. Cuts and repairs exist for this reader only.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

from qmq.codec import Buffer
from qmq.errors import DiskFailed
from qmq.log.disk import failing, read_over_bad_blocks
from qmq.log.system import System


class OverlayDisk:
    """Files below one directory, with changes kept in memory. Used on one thread."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._changed: dict[str, bytes | None] = {}
        """Name -> present contents; None for a removed or moved file."""
        self._cut: dict[str, int] = {}
        """Name -> bytes that it was truncated to."""

    def names(self, folder: str) -> list[str]:
        path = self._root / folder
        names = {entry.name for entry in path.iterdir() if entry.is_file()} if path.is_dir() else set()
        for name, data in self._changed.items():
            parent, _, last = name.rpartition("/")
            if parent == folder:
                (names.discard if data is None else names.add)(last)
        return sorted(names)

    def has(self, name: str) -> bool:
        return self._changed[name] is not None if name in self._changed else (self._root / name).is_file()

    def size(self, name: str) -> int:
        if name in self._changed:
            return len(self._changed[name] or b"")
        try:
            size = (self._root / name).stat().st_size
        except FileNotFoundError:
            return 0
        return min(size, self._cut.get(name, size))

    def look_again(self, name: str) -> None:
        """Do nothing: no file stays open."""

    def is_lost(self, name: str) -> bool:
        return False

    def used(self, name: str) -> int:
        if name in self._changed or not (size := self.size(name)):
            return self.size(name)
        with failing(name), open(self._root / name, "rb") as file:
            used = 0
            while used < size:
                try:
                    used = os.lseek(file.fileno(), os.lseek(file.fileno(), used, os.SEEK_DATA), os.SEEK_HOLE)
                except OSError as error:
                    return used if error.errno == errno.ENXIO else size  # a hole up to the end, or a file without holes
            return min(used, size)

    def read(self, name: str, offset: int, size: int) -> bytes:
        if name in self._changed:
            return (self._changed[name] or b"")[offset : offset + size]
        size = min(size, self.size(name) - offset)
        if size <= 0:
            return b""
        with failing(name), open(self._root / name, "rb") as file:
            return read_over_bad_blocks(System(), file.fileno(), name, offset, size)

    def map(self, name: str) -> Buffer:
        return self.read(name, 0, self.size(name))

    def create(self, name: str, size: int, *, lasting: bool = True) -> None:
        self.put(name, b"")

    def write(self, name: str, offset: int, buffers: Sequence[Buffer]) -> None:
        raise DiskFailed(f"{name}: this directory is only read")

    def sync(self, name: str) -> None:
        """Do nothing: changes are in memory."""

    def truncate(self, name: str, size: int) -> None:
        if name in self._changed:
            self.put(name, self.read(name, 0, size))
        else:
            self._cut[name] = size

    def put(self, name: str, data: Buffer) -> None:
        self._changed[name] = bytes(data)

    def move(self, name: str, to: str) -> None:
        self.remove(name)  # to quarantine, which no reader opens

    def remove(self, name: str) -> None:
        self._changed[name] = None

    def free_bytes(self) -> int:
        return 0
