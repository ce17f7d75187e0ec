"""Core. Index and snapshot beside a segment must follow from the log.

A snapshot is the state at its segment's base. The brokers' own fold, applied to one snapshot and the frames after it,
must yield the next snapshot. In a log that begins at 0, the first state is empty. Each segment is folded by itself,
from its own snapshot, by any task.

Brokers ignore or rebuild a missing file, an index of a segment that has grown, and a snapshot of another place or
version. Those mislead no reader and are no findings.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from qmq.audit.findings import FindingKind, JudgeRow, finding
from qmq.audit.headers import no_messages, whole_frames
from qmq.audit.walk import HEADER_BYTES_MAX, NOTHING, Storage
from qmq.codec import Buffer
from qmq.errors import CorruptFrame
from qmq.log.fold import State, apply, decode_snapshot, is_current_snapshot
from qmq.log.frame import HEADER_BYTES, Frame, FrameKind, check_body, decode_header
from qmq.log.index import ClosedIndex, SegmentIndex

HEADERS_BYTES, HEADERS_BYTES_MAX = 32 << 10, 1 << 20
"""Read size; the larger one where frames are small. Messages are not needed, so bodies of large frames are skipped."""
FRAMES_AT_ONCE = 8
"""If so many frames fit into a read, they are parsed together."""
_DAMAGE = (ValueError, LookupError, TypeError, zlib.error)
"""Exceptions of decoding an invalid snapshot."""
_NO_LOG = (CorruptFrame, ValueError, LookupError, OSError, OverflowError, RecursionError, struct.error)
"""Exceptions of reading and folding damaged frames, and of writing their index."""
_FIELDS = (
    "chain",
    "high_watermark",
    "timestamp_ms",
    "epochs",
    "next_sequence",
    "groups",
    "producers",
    "ordered",
    "kept",
    "retry_ms",
)


class Wrong(NamedTuple):
    """A file of the segment at `base` that does not follow from the log.

    `since`: base of the snapshot it was compared with. If that snapshot is itself wrong, this is no finding.
    """

    what: FindingKind
    base: int
    text: str
    since: int | None = None


@dataclass(frozen=True, slots=True)
class _Folded:
    """Result of folding the segment `[begin, end)` from the snapshot `start`."""

    start: bytes
    begin: int
    end: int
    index: bytes
    state: State | None


def check_segment(
    copies: Mapping[str, Storage], bases: Mapping[str, Sequence[int]], base: int
) -> Iterator[tuple[str, Wrong]]:
    """Yield (copy, problem) of the segment at `base`: of its index, and of the next snapshot.

    `bases` of each copy: offsets of its segments, ascending, then the end of the last one.
    """
    known: list[_Folded] = []
    for name, copy in copies.items():
        if base in bases[name]:
            at = bases[name].index(base)
            for wrong in _check(copy, bases[name][at:], at == 0, known):
                yield name, wrong


def _check(copy: Storage, bases: Sequence[int], is_first: bool, known: list[_Folded]) -> Iterator[Wrong]:
    """Check one copy, up to the next snapshot that a broker can start from."""
    beside = copy.derived(bases[0])
    start = beside.snapshot
    if is_first and bases[0] == 0:
        state: State | None = State()
    else:
        state, problem = read_snapshot(start, bases[0])
        if state is None and not is_first and not _is_of_other_version(start):
            return  # the check of an earlier segment covers this one
        if problem is not None:
            yield problem
    since = bases[0]
    for begin, end in pairwise(bases):
        after = copy.derived(end)
        if beside == after == NOTHING:
            return  # a broker that does not send these files lacks all of them: the whole log would be folded here
        found, problem = read_snapshot(after.snapshot, end)
        folded = next(
            (folded_before for folded_before in known if _is_same(folded_before, start, begin, end, found)), None
        )
        if folded is None:
            try:
                index = _fold(copy, begin, end, state)
            except _NO_LOG:
                return  # damage of the log itself is reported elsewhere
            folded = _Folded(start, begin, end, index, state)
            known.append(folded)
        yield from _of_index(beside.index, folded)
        if problem is not None:
            yield problem
        if found is not None and folded.state is not None and (fields := _different(found, folded.state)):
            text = f"its {fields} differ from the log after the snapshot at {since}"
            yield Wrong(FindingKind.SNAPSHOT, end, text, since)
        if found is not None or _is_of_other_version(after.snapshot):
            return
        beside = after


def _is_same(folded: _Folded, start: bytes, begin: int, end: int, found: State | None) -> bool:
    """Return whether this copy, with the state `found` at `end`, has the log already folded: equal chains prove it."""
    here = folded.start, folded.begin, folded.end
    return here == (start, begin, end) and None not in (found, folded.state) and found.chain == folded.state.chain  # type: ignore[union-attr]


def _fold(copy: Storage, begin: int, end: int, state: State | None) -> bytes:
    """Fold a segment into `state` and return its index. Raise CorruptFrame, ValueError, LookupError, OSError."""
    index = SegmentIndex(begin)
    for frame, body in _frames(copy, begin, end, state):
        if state is not None:
            apply(state, frame, body)
        if frame.kind == FrameKind.MESSAGES:
            index.add(frame)
    return index.encode(end)


def _frames(copy: Storage, begin: int, end: int, state: State | None) -> Iterator[tuple[Frame, Buffer]]:
    """Yield the frames of a segment with their bodies; messages frames without."""
    at, size, data = begin, HEADERS_BYTES, memoryview(b"")
    while at < end:
        chain = state.chain if state is not None else None
        if len(data) < HEADER_BYTES_MAX:
            data = memoryview(copy.window(at, min(size, end - at)))
        frame = decode_header(data, 0, at, chain)
        found = []
        if FRAMES_AT_ONCE * (frame.end - at) <= len(data):
            found = whole_frames(data, at, end, chain, bodies=no_messages)
        # After a large frame the next one is read alone, after small ones more at once.
        size = min(4 * size, HEADERS_BYTES_MAX) if found else HEADERS_BYTES
        if not found:
            if frame.kind != FrameKind.MESSAGES:
                if frame.end - at > len(data):
                    data = memoryview(copy.window(at, frame.end - at))
                check_body(frame, data[frame.body_at : frame.end - at])
            found = [frame]
        for frame in found:
            body = data[frame.offset - at + frame.body_at : frame.end - at]
            yield frame, memoryview(b"") if frame.kind == FrameKind.MESSAGES else body
        data, at = data[found[-1].end - at :], found[-1].end
    if at != end:
        raise CorruptFrame(at, f"a frame continues past the segment's end at {end}")


def _of_index(data: bytes, due: _Folded) -> Iterator[Wrong]:
    if not data or data == due.index:
        return
    try:
        end = ClosedIndex(data, due.begin).end
    except ValueError as error:
        yield Wrong(FindingKind.INDEX, due.begin, str(error))
        return
    if end == due.end:
        yield Wrong(FindingKind.INDEX, due.begin, "it names other frames than its segment has")


def _is_of_other_version(snapshot: bytes) -> bool:
    """Return whether a snapshot has another version. Such a snapshot may be true but incomplete, so it is not
    compared."""
    return bool(snapshot) and not is_current_snapshot(snapshot)


def read_snapshot(snapshot: bytes, base: int) -> tuple[State | None, Wrong | None]:
    """Return the state that a broker of this version starts from, or None; and the damage of the snapshot, or None."""
    if not snapshot or _is_of_other_version(snapshot):
        return None, None
    try:
        state = decode_snapshot(snapshot)
    except _DAMAGE as error:
        return None, Wrong(FindingKind.SNAPSHOT, base, str(error))
    return state if state.end == base else None, None


def _different(found: State, due: State) -> str:
    """Return the names of the fields in which the states differ."""
    return ", ".join(name for name in _FIELDS if getattr(found, name) != getattr(due, name))


class DerivedFilesJudge:
    """Judge of one copy: drops problems that were found from a wrong snapshot."""

    def __init__(self) -> None:
        self._wrong: set[int] = set()
        """Bases of wrong snapshots."""

    def take(self, piece: int, wrong: Wrong, /) -> Iterator[JudgeRow]:
        """Take a problem that the check of the segment at `piece` found."""
        if wrong.since not in self._wrong:
            yield finding(wrong.what, wrong.text, offset=wrong.base)
        if wrong.what is FindingKind.SNAPSHOT:
            self._wrong.add(wrong.base)

    def finish(self) -> Iterable[JudgeRow]:
        return ()


assert HEADERS_BYTES > HEADER_BYTES_MAX > HEADER_BYTES
