"""A disk that fails in the middle of a call, and can be asked what would survive a power cut right now."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import NamedTuple

from qmq.codec import Buffer
from qmq.errors import DiskFailed
from qmq.log.memory_disk import FaultyDisk
from qmq.log.segments import log_name


class Image(NamedTuple):
    """A disk at some moment."""

    files: dict[str, bytes]
    flipped: list[tuple[str, int]]


class SimulatedDisk(FaultyDisk):
    """Belongs to a machine, not to a process: it outlives crashes."""

    def __init__(self, rng: Random) -> None:
        super().__init__()
        self._rng = rng
        self.flipped: list[tuple[str, int]] = []
        """(file, byte) of every bit flipped."""

    def write(self, name: str, offset: int, buffers: Sequence[Buffer]) -> None:
        try:
            super().write(name, offset, buffers)
        except DiskFailed:  # part of it may have been written before the error
            data = b"".join(buffers)
            part = data[: self._rng.randrange(len(data) + 1)]
            if part and name in self._files:
                super(FaultyDisk, self).write(name, offset, [part])
            raise

    def durable(self, bases: list[int], begin: int, end: int) -> bytes:
        """Return bytes `[begin, end)` of the log that would survive a power cut."""
        parts = []
        for i, base in enumerate(bases):
            stop = bases[i + 1] if i + 1 < len(bases) else end
            first, last = max(begin, base), min(end, stop)
            if first < last:
                file = self._files.get(log_name(base))
                parts.append(file.durable[first - base : last - base] if file else b"")
        return b"".join(parts)

    def log_files(self) -> list[str]:
        return sorted(name for name in self._files if name.startswith("log/"))

    def file_bytes(self, name: str) -> int:
        return len(self._files[name].durable)

    def flip(self, name: str, bit: int) -> None:
        super().flip(name, bit)
        self.flipped.append((name, bit // 8))

    def is_flipped(self, bases: list[int], begin: int, end: int) -> bool:
        """Whether a bit of the log's `[begin, end)` was ever flipped here."""
        where = {log_name(base): base for base in bases}
        return any(name in where and begin <= where[name] + byte < end for name, byte in self.flipped)

    def image(self) -> Image:
        """Return what a backup of the machine would hold: all that survives a power cut right now."""
        return Image({name: bytes(file.durable) for name, file in self._files.items()}, list(self.flipped))

    def put_back(self, image: Image) -> None:
        """Replace everything by an older image, in which bits may be flipped that were mended since."""
        self._files.clear()
        for name, data in image.files.items():
            self.put(name, data)
        self.flipped = list(image.flipped)

    def wipe(self) -> None:
        self._files.clear()
        self.flipped.clear()
