"""Core. Which parts of a log a table has to read: segments are passed over by their index and by their times.

A closed segment has an index file that says where each subject's messages lie in it (`qmq.log.index`): of messages of
named subjects, only those places are read. Of a time, the first frames of a segment and of the next one tell: what was
stored in it lies between the two, give or take `CLOCK_MS`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple, Protocol

from qmq.audit.line import AHEAD_MS_MAX
from qmq.audit.walk import HEADER_BYTES_MAX
from qmq.audit.wanted import Bounds, Wanted
from qmq.errors import CorruptFrame
from qmq.log.frame import decode_header
from qmq.log.index import ClosedIndex

PIECE_BYTES = 64 << 20
"""Of log, per task."""
CLOCK_MS = AHEAD_MS_MAX
"""Brokers' clocks differ by less, and are set back by less: what does not is a finding of the audit (`time`)."""
GAP_BYTES = 256 << 10
"""Frames that lie no further apart are read at one go: to read 256 KiB takes no longer than to begin again behind."""
FRAMES_AT_ONCE = 1 << 40
"""All frames of a subject in a segment."""


class Extent(NamedTuple):
    """Frames that begin in `[begin, end)`. If it `is_start`, one stands at `begin`; `chain` is the one before it."""

    begin: int
    end: int
    is_start: bool = False
    chain: int | None = None


class Segments(Protocol):
    """What a copy tells of its segments."""

    def frame(self, offset: int, size: int) -> bytes: ...

    def index(self, base: int) -> ClosedIndex | None:
        """Return the index of the closed segment at `base`; None if there is none that is whole."""


class Plan(NamedTuple):
    """What is known of a log before it is read: its range, the chain at its start, its segments' bases."""

    start: int
    end: int
    chain: int | None
    bases: Sequence[int]


def extents(
    copy: Segments,
    log: Plan,
    wanted: Wanted,
    ranges: Iterable[tuple[int, int]],
    *,
    grid: int,
    by_index: bool,
    on_frames: bool = False,
) -> Iterator[Extent]:
    """Yield what is to be read of `ranges`, in order, in parts that end at multiples of `grid` or behind a frame.

    `by_index`: messages are asked for, which is what indexes know of. `on_frames`: each range begins with a frame.
    """
    for begin, end in ranges:
        bounds = wanted.offsets.cut(max(begin, log.start), min(end, log.end))
        for base, until in pairwise([*log.bases, log.end]):
            low, high = max(base, bounds.begin), min(until, bounds.end)
            if low >= high or not _is_of_time(copy, base, until, log, wanted.times):
                continue
            index = copy.index(base) if by_index and wanted.subjects is not None and until in log.bases else None
            if index is not None and index.end == until:
                yield from _indexed(index, wanted, Bounds(low, high))
            else:
                yield from _split(low, high, grid, log, exact=on_frames and low == begin)


def _is_of_time(copy: Segments, base: int, until: int, log: Plan, times: Bounds) -> bool:
    if times == Bounds():
        return True
    first, last = _time_at(copy, base), _time_at(copy, until) if until < log.end else None
    earliest = first - CLOCK_MS if first is not None else 0
    latest = last + CLOCK_MS if last is not None else times.end
    return times.meets(earliest, latest + 1)


def _time_at(copy: Segments, offset: int) -> int | None:
    try:
        return decode_header(copy.frame(offset, HEADER_BYTES_MAX), 0, offset, None).timestamp_ms
    except (CorruptFrame, OSError):
        return None


def _indexed(index: ClosedIndex, wanted: Wanted, bounds: Bounds) -> Iterator[Extent]:
    """Yield the places of the wanted subjects' frames in one segment, neighbours together."""
    places = [
        (ref.offset, ref.offset + ref.length)
        for subject in wanted.subjects or ()
        for ref in index.frames(subject, wanted.sequences.begin, FRAMES_AT_ONCE)
        if ref.begin < wanted.sequences.end and bounds.begin <= ref.offset < bounds.end
    ]
    begin = end = -1
    for low, high in sorted(places):
        if end >= 0 and low - end <= GAP_BYTES:
            end = high
            continue
        if end >= 0:
            yield Extent(begin, end, True)
        begin, end = low, high
    if end >= 0:
        yield Extent(begin, end, True)


def _split(begin: int, end: int, grid: int, log: Plan, *, exact: bool) -> Iterator[Extent]:
    """Split a range at the multiples of `grid`; a frame stands at its beginning if it is the log's or `exact`."""
    for at, until in split_range(begin, end, grid):
        is_log_start = at == log.start
        yield Extent(at, until, is_log_start or (exact and at == begin), log.chain if is_log_start else None)


def split_range(begin: int, end: int, grid: int) -> Iterator[tuple[int, int]]:
    """Split `[begin, end)` at the multiples of `grid`, so that both copies are split at the same offsets."""
    while begin < end:
        until = min(end, (begin // grid + 1) * grid)
        yield begin, until
        begin = until


def parts(found: Iterable[Extent], size: int) -> Iterator[tuple[Extent, ...]]:
    """Put extents together, up to about `size` bytes each: one task reads a part."""
    gathered: list[Extent] = []
    total = 0
    for one in found:
        if gathered and total + one.end - one.begin > size:
            yield tuple(gathered)
            gathered, total = [], 0
        gathered.append(one)
        total += one.end - one.begin
    if gathered:
        yield tuple(gathered)
