"""Core. What each frame of the log does to the schedule.

What a frame says about messages that do not pend is ignored: when the schedule is made again from a later start of the
log, frames may speak of messages before it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from qmq.codec import Buffer
from qmq.delayserver.schedule.book import Book, InFlight
from qmq.delayserver.schedule.record import DUE_MAX_MS, Numbers, Records, State, join, no_records, read_batch
from qmq.delayserver.schedule.segment import Segment
from qmq.log.delay_frames import PLACE_BYTES, Outcome, batch_begin, decode_dispatch, decode_settled
from qmq.log.frame import Frame, FrameKind


@dataclass(slots=True)
class Filed:
    """What a frame changed for a wheel.

    `added`: messages of segments that are loaded; others come when those are. `done`: cancelled or moved.
    `settled`: dispatches that are over.
    """

    added: Records = field(default_factory=no_records)
    done: Records = field(default_factory=no_records)
    settled: list[tuple[InFlight, Outcome]] = field(default_factory=list)


def file_frame(book: Book, frame: Frame, body: Buffer) -> Filed:
    """Take the frame at `filed_end`.

    Raises:
        ValueError: the body makes no sense; a frame of a checked log always does.
        DamagedSchedule: a file that had to be read.
    """
    if frame.offset != book.filed_end:
        raise ValueError(f"the frame at {frame.offset} does not continue a schedule that ends at {book.filed_end}")
    file = _KINDS.get(frame.kind)
    filed = file(book, frame, body) if file else Filed()
    book.filed_end, book.filed_chain = frame.end, frame.chain
    return filed


def _messages(book: Book, frame: Frame, body: Buffer) -> Filed:
    return Filed(added=_add(book, read_batch(frame, body, 0, book.position(frame.subject))))


def _carry(book: Book, frame: Frame, body: Buffer) -> Filed:
    """Messages in place of others. Of one that was dispatched or cancelled meanwhile there must not be a second."""
    records = read_batch(frame, body, batch_begin(frame.count, True), book.position(frame.subject))
    if (planned := _planned(book, (0, frame.offset), body, frame.count, 0)) is not None:
        book.change_parts(*planned, State.MOVED)
        return Filed(added=_add(book, records), done=planned.records)
    old = book.locate(*_places(body, frame.count, 0))
    moved, is_over = old.records[old.pending], old.found & ~old.pending
    book.change(moved, State.MOVED)
    return Filed(added=_add(book, records[~is_over]), done=moved)


def _add(book: Book, records: Records) -> Records:
    """File messages; return those that go on the wheel at once."""
    if not book.loaded_until_ms:
        book.add(records)
        return no_records()
    book.open_for(records)
    soon = records["due"] < book.open_until_ms
    if soon.all():
        return book.place(records)
    placed = book.place(records[soon])
    book.add(records[~soon])
    return placed


def _dispatch(book: Book, frame: Frame, body: Buffer) -> Filed:
    key = (frame.producer, frame.batch)
    group, _ = decode_dispatch(body, 0)
    records, parts = _pending(book, key, body, frame.count, len(body) - PLACE_BYTES * frame.count)
    if not len(records):
        return Filed()  # nothing of it pends, so nothing waits for its outcome
    book.change_parts(records, parts, State.IN_FLIGHT)
    book.in_flight[key] = InFlight(*key, group, frame.subject, records, parts)
    return Filed()


class _Pending(NamedTuple):
    """Messages that pend, and the same by segment."""

    records: Records
    parts: list[tuple[Segment, Records]]


def _pending(book: Book, key: tuple[int, int], body: Buffer, count: int, at: int) -> _Pending:
    """Look up which of the messages pend that a frame names at `body[at:]`, unless its writer said which they are."""
    if (planned := _planned(book, key, body, count, at)) is not None:
        return planned
    located = book.locate(*_places(body, count, at))
    records = located.records[located.pending]
    return _Pending(records, list(book.timeline.split(records)))


def _planned(book: Book, key: tuple[int, int], body: Buffer, count: int, at: int) -> _Pending | None:
    """Return what was said before about this frame, if that is still so."""
    records = book.planned.pop(key, None)
    if records is None or len(records) != count:
        return None
    numbers = np.frombuffer(body, "<u8", 2 * count, at)[::2].tolist()
    if records["number"].tolist() != numbers or len(set(numbers)) < count:
        return None
    parts = list(book.timeline.split(records))
    return _Pending(records, parts) if all(segment.all_pend(part["row"]) for segment, part in parts) else None


def _settled(book: Book, frame: Frame, body: Buffer) -> Filed:
    filed, added = Filed(), list[Records]()
    for producer, batch, outcome in decode_settled(body, frame.count):
        dispatch = book.in_flight.pop((producer, batch), None)
        if dispatch is None:
            continue
        filed.settled.append((dispatch, Outcome(outcome)))
        if outcome == Outcome.STORED:
            book.change_parts(dispatch.records, dispatch.parts, State.SENT)
        else:
            book.change_parts(dispatch.records, dispatch.parts, State.PENDING)
            added += _on_wheel(dispatch.parts)
    filed.added = book.before_horizon(join(added))
    return filed


def _on_wheel(dispatched: list[tuple[Segment, Records]]) -> list[Records]:
    """Return those that no piece will bring any more."""
    parts = []
    for segment, part in dispatched:
        if (loading := segment.loading) is not None:
            parts.append(part[loading.has(part)])
    return parts


def _cancel(book: Book, frame: Frame, body: Buffer) -> Filed:
    records, parts = _pending(book, (0, frame.offset), body, frame.count, 0)
    book.change_parts(records, parts, State.CANCELLED)
    return Filed(done=records)


def _places(body: Buffer, count: int, at: int) -> tuple[Numbers, Numbers]:
    """Return numbers and due times; of a message that is named twice, the second time as one that nobody knows.

    The layout is that of qmq.log.delay_frames, which would make a list of pairs. Raises ValueError: the body is short.
    """
    both = np.frombuffer(body, "<u8", 2 * count, at).reshape(-1, 2)
    numbers, dues = both[:, 0].copy(), np.minimum(both[:, 1], np.uint64(DUE_MAX_MS))
    if len(set(numbers.tolist())) < len(numbers):
        first = np.zeros(len(numbers), np.bool_)
        first[np.unique(numbers, return_index=True)[1]] = True
        numbers[~first] = 0
    return numbers, dues


_KINDS: dict[int, Callable[[Book, Frame, Buffer], Filed]] = {
    FrameKind.MESSAGES: _messages,
    FrameKind.CARRY: _carry,
    FrameKind.DISPATCH: _dispatch,
    FrameKind.SETTLED: _settled,
    FrameKind.CANCEL: _cancel,
}
