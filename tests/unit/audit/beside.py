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
"""Changes the files beside the segment at an offset; returns the kind of the finding."""


def bases_of(data: Path) -> list[int]:
    return sorted(int(path.stem) for path in (data / "log").glob("*.log"))


def _change_state(data: Path, base: int, change: Callable[[State], object]) -> str:
    path = data / "log" / f"{base:020d}.snap"
    state = decode_snapshot(path.read_bytes())
    change(state)
    path.write_bytes(encode_snapshot(state))
    return "snapshot"


def other_position(data: Path, base: int) -> str:
    def change(state: State) -> None:
        state.groups[A, "g"].position -= 5

    return _change_state(data, base, change)


def other_end_of_a_subject(data: Path, base: int) -> str:
    return _change_state(data, base, lambda state: state.next_sequence.update({B: state.next_sequence[B] + 1}))


def forgotten_producers(data: Path, base: int) -> str:
    return _change_state(data, base, lambda state: state.producers.clear())


def other_chain(data: Path, base: int) -> str:
    def change(state: State) -> None:
        state.chain ^= 1

    return _change_state(data, base, change)


def damaged_snapshot(data: Path, base: int) -> str:
    path = data / "log" / f"{base:020d}.snap"
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    return "snapshot"


def _write_index(data: Path, base: int, *, end: int | None = None, leave_out: int = -1) -> str:
    ends = dict(pairwise(bases_of(data)))
    index = SegmentIndex(base)
    messages = [frame for at, frame, _ in read_frames(data) if at == base and frame.kind == FrameKind.MESSAGES]
    for number, frame in enumerate(messages):
        if number != leave_out:
            index.add(frame)
    (data / "log" / f"{base:020d}.idx").write_bytes(index.encode(end or ends[base]))
    return "index"


def frame_left_out(data: Path, base: int) -> str:
    return _write_index(data, base, leave_out=3)


def damaged_index(data: Path, base: int) -> str:
    path = data / "log" / f"{base:020d}.idx"
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)
    return "index"


def index_of_another(data: Path, base: int) -> str:
    bases = bases_of(data)
    other = data / "log" / f"{bases[bases.index(base) + 1]:020d}.idx"
    (data / "log" / f"{base:020d}.idx").write_bytes(other.read_bytes())
    return "index"


WRONG: dict[str, Plant] = {
    "another position": other_position,
    "another end": other_end_of_a_subject,
    "producers": forgotten_producers,
    "another chain": other_chain,
    "a damaged snapshot": damaged_snapshot,
    "a frame left out": frame_left_out,
    "a damaged index": damaged_index,
    "another's index": index_of_another,
}


def no_snapshot(data: Path, base: int) -> str:
    (data / "log" / f"{base:020d}.snap").unlink()
    return ""


def no_index(data: Path, base: int) -> str:
    (data / "log" / f"{base:020d}.idx").unlink()
    return ""


def snapshot_of_before(data: Path, base: int) -> str:
    """Brokers do not start from a snapshot of another place."""
    bases = bases_of(data)
    older = data / "log" / f"{bases[bases.index(base) - 1]:020d}.snap"
    (data / "log" / f"{base:020d}.snap").write_bytes(older.read_bytes())
    return ""


def snapshot_of_an_older_version(data: Path, base: int) -> str:
    """An earlier version stored less: true, but incomplete."""
    forgotten_producers(data, base)
    path = data / "log" / f"{base:020d}.snap"
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
    "no snapshot": no_snapshot,
    "no index": no_index,
    "a snapshot of before": snapshot_of_before,
    "a snapshot of version 3": snapshot_of_an_older_version,
    "an index of before": index_of_a_segment_that_has_grown,
}
