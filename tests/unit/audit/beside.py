"""Shell. Planted faults in the files beside segments, each with a valid CRC unless the CRC is the fault; and harmless
deviations.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from zlib import crc32

from qmq.log.fold import State, decode_snapshot, encode_snapshot
from qmq.log.frame import FrameKind
from qmq.log.index import SegmentIndex
from tests.unit.audit.forged import A, B, read_frames

Plant = Callable[[Path, int], str]
"""Changes the files beside the segment at an offset; returns the kind of the finding, "" for a harmless change."""


def bases_of(data: Path) -> list[int]:
    return sorted(int(path.stem) for path in (data / "log").glob("*.log"))


def _beside(data: Path, base: int, suffix: str) -> Path:
    return data / "log" / f"{base:020d}.{suffix}"


def _state(change: Callable[[State], object]) -> Plant:
    def plant(data: Path, base: int) -> str:
        path = _beside(data, base, "snap")
        state = decode_snapshot(path.read_bytes())
        change(state)
        path.write_bytes(encode_snapshot(state))
        return "snapshot"

    return plant


def _other_position(state: State) -> None:
    state.groups[A, "g"].position -= 5


def _other_chain(state: State) -> None:
    state.chain ^= 1


def _flipped(suffix: str, at: int, kind: str) -> Plant:
    def plant(data: Path, base: int) -> str:
        path = _beside(data, base, suffix)
        content = bytearray(path.read_bytes())
        content[at] ^= 1
        path.write_bytes(content)
        return kind

    return plant


def _of_another(suffix: str, step: int, kind: str) -> Plant:
    """Put the file of another segment, so many further on, in the place."""

    def plant(data: Path, base: int) -> str:
        bases = bases_of(data)
        other = bases[bases.index(base) + step]
        _beside(data, base, suffix).write_bytes(_beside(data, other, suffix).read_bytes())
        return kind

    return plant


def _gone(suffix: str) -> Plant:
    def plant(data: Path, base: int) -> str:
        _beside(data, base, suffix).unlink()
        return ""

    return plant


def _write_index(data: Path, base: int, *, end: int | None = None, leave_out: int = -1) -> str:
    ends = dict(pairwise(bases_of(data)))
    index = SegmentIndex(base)
    messages = [frame for at, frame, _ in read_frames(data) if at == base and frame.kind == FrameKind.MESSAGES]
    for number, frame in enumerate(messages):
        if number != leave_out:
            index.add(frame)
    _beside(data, base, "idx").write_bytes(index.encode(end or ends[base]))
    return "index"


forgotten_producers = _state(lambda state: state.producers.clear())

WRONG: dict[str, Plant] = {
    "another position": _state(_other_position),
    "another end": _state(lambda state: state.next_sequence.update({B: state.next_sequence[B] + 1})),
    "producers": forgotten_producers,
    "another chain": _state(_other_chain),
    "a damaged snapshot": _flipped("snap", -3, "snapshot"),
    "a frame left out": lambda data, base: _write_index(data, base, leave_out=3),
    "a damaged index": _flipped("idx", 100, "index"),
    "another's index": _of_another("idx", 1, "index"),
}


def snapshot_of_an_older_version(data: Path, base: int) -> str:
    """An earlier version stored less: true, but incomplete."""
    forgotten_producers(data, base)
    path = _beside(data, base, "snap")
    packed = (3).to_bytes(4, "little") + path.read_bytes()[8:]
    path.write_bytes(crc32(packed).to_bytes(4, "little") + packed)
    return ""


def index_of_a_segment_that_has_grown(data: Path, base: int) -> str:
    """The next segment's file was gone and came back as a part of this one: brokers rebuild the index when they read
    it.
    """
    _write_index(data, base, end=base + 1_000)
    return ""


LEGAL: dict[str, Plant] = {
    "no snapshot": _gone("snap"),
    "no index": _gone("idx"),
    "a snapshot of before": _of_another("snap", -1, ""),  # brokers do not start from a snapshot of another place
    "a snapshot of version 3": snapshot_of_an_older_version,
    "an index of before": index_of_a_segment_that_has_grown,
}
