"""The medium below a copy's file system: what is on it now, and what becomes of it that no call of the system does."""

from __future__ import annotations

from random import Random

from qmq.log.disk import BLOCK_BYTES
from qmq.log.memory_disk import ROOT, Inode
from tests.simulation.system import SimulatedSystem


class Medium:
    """Belongs to a machine, not to a process: it outlives crashes. Names are those of the disk above it."""

    def __init__(self, system: SimulatedSystem) -> None:
        self.system = system
        self.flipped: list[tuple[str, int]] = []
        """(file, byte) of every bit flipped."""

    def durable_file(self, name: str) -> Inode | None:
        return self.system.durable_file(f"{ROOT}/{name}")

    def log_files(self) -> list[str]:
        """Return those that have something on the medium."""
        at = len(ROOT) + 1
        names = sorted(path[at:] for path, inode in self.system.entries.items() if inode is not None)
        return [name for name in names if name.startswith("log/") and self.file_bytes(name)]

    def file_bytes(self, name: str) -> int:
        """Return how long the file is on the medium."""
        file = self.durable_file(name)
        return file.durable_size if file else 0

    def flip(self, name: str, bit: int) -> None:
        self.system.flip(f"{ROOT}/{name}", bit)
        self.flipped.append((name, bit // 8))

    def flip_some(self, rng: Random, flushed_end: int | None) -> bool:
        """Flip one bit of the log, below what was fsynced; return whether there was any."""
        if not (names := self.log_files()):
            return False
        name = rng.choice(names)
        size = self.file_bytes(name)
        if name.endswith(".log"):
            base = int(name[4:24])
            size = min(size, max((base + size if flushed_end is None else flushed_end) - base, 0))
            if size and rng.random() < 0.3:
                low = max(size - 200, 0)
                self.flip(name, 8 * rng.randrange(low, size) + rng.randrange(8))
                return True
        if size:
            self.flip(name, rng.randrange(8 * size))
        return bool(size)

    def go_bad(self, name: str, block: int) -> None:
        """A block cannot be read any more, until it is written. One that is only reserved is never read."""
        inode = self.system.entries[f"{ROOT}/{name}"]
        assert inode is not None
        begin, end = block * BLOCK_BYTES, min((block + 1) * BLOCK_BYTES, len(inode.data))
        if begin < end:
            self.system.bad.setdefault(inode, set()).add(block)
            self.flipped.extend((name, byte) for byte in range(begin, end))

    def go_bad_somewhere(self, rng: Random) -> bool:
        if names := self.log_files():
            name = rng.choice(names)
            self.go_bad(name, rng.randrange(-(-self.file_bytes(name) // BLOCK_BYTES)))
        return bool(names)

    def image(self) -> Medium:
        """Return what a backup of the machine would hold: all that survives a power cut right now."""
        image = Medium(SimulatedSystem(Random(0)))
        image.put_back(self)
        image.system.crash()
        return image

    def put_back(self, image: Medium) -> None:
        """Replace everything by an older image, in which bits may be flipped that were mended since."""
        self.system.copy_from(image.system)
        self.system.bad.clear()
        self.flipped = list(image.flipped)

    def wipe(self) -> None:
        self.put_back(Medium(SimulatedSystem(Random(0))))
