"""Core. Two disks for tests and the simulator: one in memory, one that loses, tears, flips and refuses on purpose.

`MemoryDisk` keeps, per file, what is durable and what is only written. `crash` forgets what was not synced: with a
random source, it keeps any subset of the unsynced writes, one of them torn at any byte, as a real disk may.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from qmq.codec import Buffer
from qmq.errors import DiskFailed


class _File:
    __slots__ = ("data", "durable", "unsynced")

    def __init__(self, data: bytes = b"") -> None:
        self.data = bytearray(data)
        self.durable = bytes(data)
        self.unsynced: list[tuple[int, bytes]] = []


class MemoryDisk:
    """A disk that forgets on `crash` what was not synced."""

    def __init__(self) -> None:
        self._files: dict[str, _File] = {}

    def names(self, folder: str) -> list[str]:
        prefix = folder + "/"
        inside = [name[len(prefix) :] for name in self._files if name.startswith(prefix)]
        return sorted(name for name in inside if "/" not in name)

    def has(self, name: str) -> bool:
        return name in self._files

    def size(self, name: str) -> int:
        file = self._files.get(name)
        return len(file.data) if file else 0

    def look_again(self, name: str) -> None:
        """A name is a file here."""

    def used(self, name: str) -> int:
        return self.size(name)

    def read(self, name: str, offset: int, size: int) -> bytes:
        if offset < 0:
            raise DiskFailed(f"{name}: nothing can be read at {offset}")
        file = self._files.get(name)
        return bytes(file.data[offset : offset + size]) if file else b""

    def map(self, name: str) -> Buffer:
        return self.read(name, 0, self.size(name))

    def create(self, name: str, size: int, *, lasting: bool = True) -> None:
        self._files[name] = _File(bytes(size))

    def write(self, name: str, offset: int, buffers: Sequence[Buffer]) -> None:
        data = b"".join(buffers)
        file = self._files[name]
        if len(file.data) < offset:
            file.data.extend(bytes(offset - len(file.data)))
        file.data[offset : offset + len(data)] = data
        file.unsynced.append((offset, data))

    def sync(self, name: str) -> None:
        file = self._files[name]
        file.durable = bytes(file.data)
        file.unsynced.clear()

    def truncate(self, name: str, size: int) -> None:
        file = self._files[name]
        del file.data[size:]
        self.sync(name)

    def put(self, name: str, data: Buffer) -> None:
        self._files[name] = _File(bytes(data))

    def move(self, name: str, to: str) -> None:
        self._files[to] = self._files.pop(name)

    def remove(self, name: str) -> None:
        self._files.pop(name, None)

    def free_bytes(self) -> int:
        return 1 << 40

    def crash(self, rng: Random | None = None) -> None:
        """Lose power. Without `rng` everything unsynced is gone; with it, any part of it may have reached the disk."""
        for file in self._files.values():
            data = bytearray(file.durable)
            for offset, written in file.unsynced:
                fate = rng.random() if rng else 1.0
                if fate < 0.4:
                    kept = written
                elif fate < 0.6 and rng:
                    kept = written[: rng.randrange(len(written) + 1)]
                else:
                    continue
                if len(data) < offset:
                    data.extend(bytes(offset - len(data)))
                data[offset : offset + len(kept)] = kept
            file.data, file.durable = data, bytes(data)
            file.unsynced.clear()

    def flip(self, name: str, bit: int) -> None:
        """Damage one bit of what is durable."""
        file = self._files[name]
        file.data[bit // 8] ^= 1 << (bit % 8)
        file.durable = bytes(file.data)

    def copy(self) -> MemoryDisk:
        """Return an image of what is durable and written now."""
        image = MemoryDisk()
        for name, file in self._files.items():
            image._files[name] = copied = _File()
            copied.data, copied.durable = bytearray(file.data), file.durable
            copied.unsynced = list(file.unsynced)
        return image


class FaultyDisk(MemoryDisk):
    """A memory disk whose next calls fail: `refuse("sync")` makes the next sync raise, and all that follow."""

    def __init__(self) -> None:
        super().__init__()
        self._refused: set[str] = set()
        self.calls = 0
        self.fail_at: int | None = None

    def refuse(self, *operations: str) -> None:
        self._refused.update(operations)

    def heal(self) -> None:
        self._refused.clear()
        self.fail_at = None

    def _may(self, operation: str, name: str) -> None:
        self.calls += 1
        if operation in self._refused or (self.fail_at is not None and self.calls >= self.fail_at):
            raise DiskFailed(f"{name}: {operation} refused")

    def create(self, name: str, size: int, *, lasting: bool = True) -> None:
        self._may("create", name)
        super().create(name, size, lasting=lasting)

    def write(self, name: str, offset: int, buffers: Sequence[Buffer]) -> None:
        self._may("write", name)
        super().write(name, offset, buffers)

    def sync(self, name: str) -> None:
        self._may("sync", name)
        super().sync(name)

    def truncate(self, name: str, size: int) -> None:
        self._may("truncate", name)
        super().truncate(name, size)

    def put(self, name: str, data: Buffer) -> None:
        self._may("put", name)
        super().put(name, data)

    def move(self, name: str, to: str) -> None:
        self._may("move", name)
        super().move(name, to)

    def remove(self, name: str) -> None:
        self._may("remove", name)
        super().remove(name)
