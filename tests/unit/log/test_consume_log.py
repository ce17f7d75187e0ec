"""Core. The consume log finds each sequence in its segment, before and after the index is on disk."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from qmq.log.index import ConsumeLog, FrameRef, SegmentIndex
from qmq.log.memory_disk import MemoryDisk
from qmq.log.segments import index_name
from tests.property.test_frame import frame_of

BASE = 4096
SEGMENTS = [{"a": (2, 1)}, {"b": (1,), "a": (3,)}, {"b": (2, 2, 1)}, {}, {"b": (1,)}, {"a": (1,)}]
"""Per segment: subject -> message counts of its frames."""


class World:
    """A consume log, and the frames it should find."""

    def __init__(self) -> None:
        self.disk, self.bases = MemoryDisk(), [BASE]
        self.log = ConsumeLog(self.disk, self.bases, SegmentIndex(BASE))
        self.end, self.refs = BASE, {"a": [], "b": []}
        self.files: dict[int, bytes] = {}

    def grow(self) -> Iterator[None]:
        """Append the segments, one frame at a time."""
        for number, subjects in enumerate(SEGMENTS):
            if number:
                self.roll()
                yield
            for subject, counts in subjects.items():
                for count in counts:
                    self.add(subject, count)
                    yield

    def add(self, subject: str, count: int) -> None:
        begin = self.refs[subject][-1].end if self.refs[subject] else 0
        fields = {"offset": self.end, "count": count, "first_sequence": begin}
        _, frame = frame_of(subject, b"", previous_chain=0, **fields)
        self.log.newest.add(frame)
        self.refs[subject].append(FrameRef(begin, begin + count, self.end, frame.end - self.end))
        self.end = frame.end

    def roll(self) -> None:
        if self.end == self.bases[-1]:
            self.end += 8  # of frames other than messages
        base = self.bases[-1]
        self.files[base] = self.log.roll(base, self.end)
        self.bases.append(self.end)

    def write(self) -> None:
        for base, data in self.files.items():
            self.disk.put(index_name(base), data)
            self.log.rolled(base)

    def drop(self) -> None:
        base = self.bases.pop(0)
        self.log.drop(base)
        self.disk.remove(index_name(base))
        self.refs = {name: [ref for ref in refs if ref.offset >= self.bases[0]] for name, refs in self.refs.items()}

    def check(self) -> None:
        for subject, refs in self.refs.items():
            for sequence in range(12):
                behind = [ref for ref in refs if ref.end > sequence]
                for most in (1, 2, 3, 9):
                    assert self.log.frames(subject, sequence, most) == behind[:most]
            for base in self.bases:
                firsts = [ref.begin for ref in refs if ref.offset >= base]
                assert self.log.first_sequence(subject, base) == (firsts[0] if firsts else None)
        assert (self.log.frames("c", 0, 9), self.log.first_sequence("c", BASE)) == ([], None)


def test_consume_log_finds_frames_over_its_lifetime():
    world = World()
    for _ in world.grow():
        world.check()
    world.write()
    world.check()
    while len(world.bases) > 1:
        world.drop()
        world.check()


def test_index_files_are_mapped_once(monkeypatch: pytest.MonkeyPatch):
    world, mapped, put, look = World(), [], [], MemoryDisk.map
    list(world.grow())
    world.write()
    monkeypatch.setattr(MemoryDisk, "map", lambda self, name: mapped.append(name) or look(self, name))
    monkeypatch.setattr(MemoryDisk, "put", lambda self, name, data: put.append(name))
    for _ in range(3):
        for subject in world.refs:
            world.log.frames(subject, 0, 9)
    assert mapped == [index_name(base) for base in world.bases[:-1]] and put == []
    assert set(world.log._chapters) == set(world.refs)
