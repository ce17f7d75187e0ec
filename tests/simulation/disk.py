"""The disk that ships, on a file system that fails at any call, and tells what would survive a power cut right now."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from random import Random

from qmq.log.memory_disk import MemoryDisk
from qmq.log.segments import log_name, segment_bases
from tests.simulation.medium import Medium
from tests.simulation.system import SimulatedSystem


class SimulatedDisk(Medium, MemoryDisk):
    """Belongs to a machine, not to a process: it outlives crashes."""

    def __init__(self, rng: Random) -> None:
        MemoryDisk.__init__(self, SimulatedSystem(rng))
        self.flipped = []
        self._bases: list[int] = []
        self._bases_at = -1

    def bases(self) -> list[int]:
        """Return the segments that are there. After each commit somebody asks; few change a name."""
        if self._bases_at != self.system.namings:
            self._bases_at, self._bases = self.system.namings, segment_bases(self)
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
