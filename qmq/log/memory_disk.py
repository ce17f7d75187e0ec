"""Shell. The disk that ships, on a file system in memory: for tests and simulators."""

from __future__ import annotations

from pathlib import Path
from random import Random

from qmq.log.disk import RealDisk
from qmq.log.memory_system import MemorySystem

ROOT = "/data"


class MemoryDisk(RealDisk):
    """A disk that forgets on `crash` what was not synced, and can be told to fail."""

    def __init__(self, system: MemorySystem | None = None) -> None:
        self.system = system or MemorySystem()
        super().__init__(Path(ROOT), system=self.system)

    @property
    def calls(self) -> int:
        """How many calls of the system changed something, or were refused to."""
        return self.system.calls

    def fail_after(self, calls: int) -> None:
        """Refuse the system's call after so many more that change something, and all that follow."""
        self.system.fail_at = self.system.calls + calls

    def heal(self) -> None:
        self.system.heal()

    def all_names(self) -> list[str]:
        """Return the names of all files, sorted."""
        at = len(ROOT) + 1
        return sorted(path[at:] for path, inode in self.system.entries.items() if inode is not None)

    def reopen(self) -> None:
        """Begin as another process does, after one that was killed."""
        self.close()
        super().__init__(Path(ROOT), system=self.system)

    def crash(self, rng: Random | None = None) -> None:
        """Lose power. Without `rng` everything unsynced is gone; with it, any part of it may have reached the disk."""
        self.close()
        self.system.crash(rng)

    def flip(self, name: str, bit: int) -> None:
        """Damage one bit of a file."""
        self.system.flip(f"{ROOT}/{name}", bit)

    def copy(self) -> MemoryDisk:
        """Return an image of what is durable and written now."""
        image = MemoryDisk()
        image.system.copy_from(self.system)
        return image

    def put_back(self, image: MemoryDisk) -> None:
        """Have the files of an image, and no others."""
        self.close()
        self.system.copy_from(image.system)
