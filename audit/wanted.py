"""Core. What is asked of a log's table: options and the filters that Spark pushes down, as bounds for a reader.

Bounds only narrow what is read. Spark applies its filters again to what comes, so a filter that is not understood here
costs time, not truth. `subject`, `since` and `until`, which are options, are exact: a frame has one subject and time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from pyspark.sql.datasource import EqualTo, Filter, GreaterThan, GreaterThanOrEqual, In, LessThan, LessThanOrEqual

from qmq.log.frame import Frame, FrameKind

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
