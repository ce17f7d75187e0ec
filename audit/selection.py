"""Core. What is asked of a log's table: options and the filters that Spark pushes down, as bounds for a reader.

Bounds only narrow what is read. Spark applies its filters again to what comes, so a filter that is not understood here
costs time, not truth. `subject`, `since` and `until`, which are options, are exact: a frame has one subject and time.

Which parts of a log a table has to read: segments are passed over by their index and by their times.

A closed segment has an index file that says where each subject's messages lie in it (`qmq.log.index`): of messages of
named subjects, only those places are read. Of a time, the first frames of a segment and of the next one tell: what was
stored in it lies between the two, give or take `CLOCK_MS`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

from pyspark.sql.datasource import EqualTo, Filter, GreaterThan, GreaterThanOrEqual, In, LessThan, LessThanOrEqual

from qmq.audit.frame_order import AHEAD_MS_MAX
from qmq.audit.walk import HEADER_BYTES_MAX
from qmq.errors import CorruptFrame
from qmq.log.frame import Frame, FrameKind, decode_header
from qmq.log.index import ClosedIndex

ANY_MAX = 1 << 63
"""Above every offset, sequence and time."""


class WrongOption(ValueError):
    """An option of the data source that says nothing; correct it."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """`[begin, end)`."""

    begin: int = 0
    end: int = ANY_MAX

    def cut(self, begin: int = 0, end: int = ANY_MAX) -> Bounds:
        return Bounds(max(self.begin, begin), min(self.end, end))

    def meets(self, begin: int, end: int) -> bool:
        """Return whether something of `[begin, end)` lies within."""
        return begin < self.end and end > self.begin


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which frames are wanted; everything by default. `texts` stand in the encoding of each message that is wanted."""

    subjects: frozenset[str] | None = None
    offsets: Bounds = Bounds()
    times: Bounds = Bounds()
    sequences: Bounds = Bounds()
    texts: tuple[bytes, ...] = ()

    def takes(self, frame: Frame) -> bool:
        """Return whether a frame may hold what is wanted, by its header."""
        if self.subjects is not None and frame.subject not in self.subjects:
            return False
        first = frame.first_sequence
        return (
            self.offsets.begin <= frame.offset < self.offsets.end
            and self.times.begin <= frame.timestamp_ms < self.times.end
            and (frame.kind != FrameKind.MESSAGES or self.sequences.meets(first, first + frame.count))
        )

    def only(self, subjects: Iterable[str]) -> Wanted:
        names = frozenset(subjects)
        return replace(self, subjects=names if self.subjects is None else names & self.subjects)


def from_options(options: Mapping[str, str]) -> Wanted:
    """Read the options `subject` (several with commas), `since`, `until` and `contains`; raises WrongOption."""
    wanted = Wanted()
    if subject := options.get("subject"):
        wanted = wanted.only(name.strip() for name in subject.split(","))
    begin, end = moment_ms(options, "since", 0), moment_ms(options, "until", ANY_MAX)
    texts = tuple(encoded(text) for text in options.get("contains", "").split("\n") if text)
    return replace(wanted, times=Bounds(begin, end), texts=texts)


def moment_ms(options: Mapping[str, str], name: str, default: int) -> int:
    """Read a time: ISO 8601, in UTC if it names no zone, or milliseconds since 1970."""
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
    """Return a text as it stands in a message: behind its length (qmq.codec)."""
    data = text.encode()
    return min(len(data), 0xFFFF).to_bytes(2, "big") + data


def narrow(wanted: Wanted, filters: Iterable[Filter], *, of_messages: bool) -> Wanted:
    """Return `wanted` within what the filters say together. `of_messages`: of the table of messages."""
    for one in filters:
        if not isinstance(one, EqualTo | In | GreaterThan | GreaterThanOrEqual | LessThan | LessThanOrEqual):
            continue
        if len(one.attribute) != 1:
            continue
        wanted = _narrow(wanted, one.attribute[0], one, of_messages)
    return wanted


def _narrow(wanted: Wanted, column: str, one: Any, of_messages: bool) -> Wanted:
    if column == "subject" and isinstance(one, EqualTo | In):
        return wanted.only([one.value] if isinstance(one, EqualTo) else one.value)
    if column == "id" and isinstance(one, EqualTo) and of_messages:
        return replace(wanted, texts=(*wanted.texts, encoded(one.value)))
    if isinstance(one, In):
        return wanted
    match column:
        case "offset":
            return replace(wanted, offsets=wanted.offsets.cut(*_bounds_of(one)))
        case "timestamp_ms":
            return replace(wanted, times=wanted.times.cut(*_bounds_of(one)))
        case "sequence" if of_messages:
            return replace(wanted, sequences=wanted.sequences.cut(*_bounds_of(one)))
    return wanted


def _bounds_of(one: Any) -> tuple[int, int]:
    match one:
        case EqualTo():
            return one.value, one.value + 1
        case GreaterThan():
            return one.value + 1, ANY_MAX
        case GreaterThanOrEqual():
            return one.value, ANY_MAX
        case LessThan():
            return 0, one.value
        case _:
            return 0, one.value + 1


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
