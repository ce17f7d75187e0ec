"""Core. Selection of a log's frames from options, and the extents of the log to read for it.

The options `subject`, `since` and `until` are exact: a frame has one subject and one time. `sequences` and `contains`
select whole frames.

Segments are skipped by their index and by their times. A closed segment has an index file with the places of each
subject's messages (`qmq.log.index`); a selection by subject reads only those places. The times of a segment lie between
the first frame of this segment and of the next, give or take `CLOCK_MS`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from typing import NamedTuple

from qmq.audit.frame_order import AHEAD_MS_MAX
from qmq.audit.walk import HEADER_BYTES_MAX, Storage
from qmq.errors import CorruptFrame
from qmq.log.frame import Frame, FrameKind, decode_header
from qmq.log.index import ClosedIndex

ANY_MAX = 1 << 63
"""Above all offsets, sequences and times."""


class WrongOption(ValueError):
    """An option of the data source is invalid; correct it."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Half-open range `[begin, end)`."""

    begin: int = 0
    end: int = ANY_MAX

    def meets(self, begin: int, end: int) -> bool:
        """Return whether `[begin, end)` overlaps this range."""
        return begin < self.end and end > self.begin


@dataclass(frozen=True, slots=True)
class Selection:
    """Selection of frames; all by default. A selected message contains all `texts` in its encoding.

    `properties`: names of the properties to decode; None: all.
    """

    subjects: frozenset[str] | None = None
    times: Bounds = Bounds()
    sequences: Bounds = Bounds()
    texts: tuple[bytes, ...] = ()
    properties: frozenset[str] | None = None

    def matches(self, frame: Frame) -> bool:
        """Return whether a frame may hold selected messages, by its header."""
        if self.subjects is not None and frame.subject not in self.subjects:
            return False
        first = frame.first_sequence
        return self.times.begin <= frame.timestamp_ms < self.times.end and (
            frame.kind != FrameKind.MESSAGES or self.sequences.meets(first, first + frame.count)
        )


def selection_of(options: Mapping[str, str]) -> Selection:
    """Parse the options `subject`, `since`, `until`, `sequences`, `contains` and `properties`; raise WrongOption."""
    sequences = Bounds(*range_option(options["sequences"], "sequences")) if options.get("sequences") else Bounds()
    return Selection(
        _names_option(options, "subject"),
        Bounds(time_option_ms(options, "since", 0), time_option_ms(options, "until", ANY_MAX)),
        sequences,
        tuple(encoded(text) for text in options.get("contains", "").split("\n") if text),
        _names_option(options, "properties"),
    )


def _names_option(options: Mapping[str, str], name: str) -> frozenset[str] | None:
    """Parse names with commas, or with line ends if one has a comma; None without any."""
    text = options.get(name, "")
    return frozenset(filter(None, map(str.strip, text.split("\n" if "\n" in text else ",")))) or None


def range_option(text: str, name: str) -> tuple[int, int]:
    """Parse `begin-end`, half-open."""
    begin, _, end = text.strip().partition("-")
    if not (begin.isdigit() and end.isdigit() and int(begin) < int(end)):
        raise WrongOption(f"option '{name}' has {text!r}, not a half-open range as 100-200")
    return int(begin), int(end)


def time_option_ms(options: Mapping[str, str], name: str, default: int) -> int:
    """Parse a time option: ISO 8601, in UTC unless it names a zone, or milliseconds since 1970."""
    if not (text := options.get(name, "")):
        return default
    if text.isdigit():
        return int(text)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise WrongOption(f"option '{name}' is {text!r}, not a time as 2026-01-31T12:00:00Z") from None
    return round((moment if moment.tzinfo else datetime.fromisoformat(text + "+00:00")).timestamp() * 1000)


def encoded(text: str) -> bytes:
    """Return a text as a message encodes it: length, then bytes (`qmq.codec`)."""
    data = text.encode()
    return min(len(data), 0xFFFF).to_bytes(2, "big") + data


PIECE_BYTES = 64 << 20
"""Log bytes per task."""
CLOCK_MS = AHEAD_MS_MAX
"""Bound on the differences between brokers' clocks; a larger one is a finding (`time`)."""
GAP_BYTES = 256 << 10
"""Frames closer than this are read at once: reading 256 KiB takes no longer than starting a new read."""
FRAMES_AT_ONCE = 1 << 40
"""All frames of a subject in a segment."""


class Extent(NamedTuple):
    """Frames that begin in `[begin, end)`. `is_start`: a frame begins at `begin`. `chain`: chain of the frame
    before."""

    begin: int
    end: int
    is_start: bool = False
    chain: int | None = None


class Plan(NamedTuple):
    """A log before the read: its range, the chain at its start, and its segments' bases."""

    start: int
    end: int
    chain: int | None
    bases: Sequence[int]


def extents(
    copy: Storage,
    log: Plan,
    selection: Selection,
    ranges: Iterable[tuple[int, int]],
    *,
    grid: int,
    by_index: bool,
    on_frames: bool = False,
) -> Iterator[Extent]:
    """Yield the extents to read of `ranges`, in order; each ends at a multiple of `grid` or after a frame.

    `by_index`: messages are read, so indexes apply. `on_frames`: each range begins with a frame.
    """
    for begin, end in ranges:
        bounds = Bounds(max(begin, log.start), min(end, log.end))
        for base, until in pairwise([*log.bases, log.end]):
            low, high = max(base, bounds.begin), min(until, bounds.end)
            if low >= high or not _is_of_time(copy, base, until, log, selection.times):
                continue
            index = copy.index(base) if by_index and selection.subjects is not None and until in log.bases else None
            if index is not None and index.end == until:
                yield from _indexed(index, selection, Bounds(low, high))
            else:
                yield from _split(low, high, grid, log, exact=on_frames and low == begin)


def segments_since(copy: Storage, log: Plan, since_ms: int) -> Iterator[tuple[int, int]]:
    """Yield the segments that may hold frames stored at `since_ms` or later, as `[begin, end)`."""
    for base, until in pairwise([*log.bases, log.end]):
        if _is_of_time(copy, base, until, log, Bounds(since_ms)):
            yield max(base, log.start), until


def _is_of_time(copy: Storage, base: int, until: int, log: Plan, times: Bounds) -> bool:
    if times == Bounds():
        return True
    first, last = _time_at(copy, base), _time_at(copy, until) if until < log.end else None
    earliest = first - CLOCK_MS if first is not None else 0
    latest = last + CLOCK_MS if last is not None else times.end
    return times.meets(earliest, latest + 1)


def _time_at(copy: Storage, offset: int) -> int | None:
    try:
        return decode_header(copy.frame(offset, HEADER_BYTES_MAX), 0, offset, None).timestamp_ms
    except (CorruptFrame, OSError):
        return None


def _indexed(index: ClosedIndex, selection: Selection, bounds: Bounds) -> Iterator[Extent]:
    """Yield the extents of the selected subjects' frames in one segment; close neighbours are one extent."""
    places = [
        (ref.offset, ref.offset + ref.length)
        for subject in selection.subjects or ()
        for ref in index.frames(subject, selection.sequences.begin, FRAMES_AT_ONCE)
        if ref.begin < selection.sequences.end and bounds.begin <= ref.offset < bounds.end
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
    """Split a range at the multiples of `grid`. A frame begins at its start if that is the log's start, or if
    `exact`."""
    for at, until in split_range(begin, end, grid):
        is_log_start = at == log.start
        yield Extent(at, until, is_log_start or (exact and at == begin), log.chain if is_log_start else None)


def split_range(begin: int, end: int, grid: int) -> Iterator[tuple[int, int]]:
    """Split `[begin, end)` at the multiples of `grid`, so that all copies are split at the same offsets."""
    while begin < end:
        until = min(end, (begin // grid + 1) * grid)
        yield begin, until
        begin = until


def parts(found: Iterable[Extent], size: int) -> Iterator[tuple[Extent, ...]]:
    """Join extents into parts of about `size` bytes; one task reads a part."""
    gathered: list[Extent] = []
    total = 0
    for extent in found:
        if gathered and total + extent.end - extent.begin > size:
            yield tuple(gathered)
            gathered, total = [], 0
        gathered.append(extent)
        total += extent.end - extent.begin
    if gathered:
        yield tuple(gathered)
