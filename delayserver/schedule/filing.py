"""Core. What each frame of the log does to the schedule.

What a frame says about messages that do not pend is ignored: when the schedule is made again from a later start of the
log, frames may speak of messages before it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from qmq.codec import Buffer
from qmq.delayserver.schedule.book import Book, InFlight, Located
from qmq.delayserver.schedule.record import DUE_MAX_MS, Numbers, Records, State, join, no_records, read_batch
from qmq.delayserver.schedule.segment import Segment
from qmq.log.delays import PLACE_BYTES, Outcome, batch_begin, decode_dispatch, decode_settled
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
    old = _located(book, frame, *_places(body, frame.count, 0))
    book.change(old.records[old.pending], State.MOVED)
    is_over = old.found & ~old.pending
    return Filed(added=_add(book, records[~is_over]), done=old.records[old.pending])


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
    numbers, dues = _places(body, frame.count, len(body) - PLACE_BYTES * frame.count)
    records = _planned(book, key, numbers)
    if records is None:
        located = book.locate(numbers, dues)
        records = located.records[located.pending]
    if not len(records):
        return Filed()  # nothing of it pends, so nothing waits for its outcome
    parts = list(book.timeline.split(records))
    book.change_parts(records, parts, State.IN_FLIGHT)
    book.in_flight[key] = InFlight(*key, group, frame.subject, records, parts)
    return Filed()


def _located(book: Book, frame: Frame, numbers: Numbers, dues: Numbers) -> Located:
    """Look up messages, unless whoever wrote the frame said which they are."""
    records = _planned(book, (0, frame.offset), numbers)
    if records is None:
        return book.locate(numbers, dues)
    return Located(records, np.ones(len(records), np.bool_), np.zeros(len(records), np.uint8))


def _planned(book: Book, key: tuple[int, int], numbers: Numbers) -> Records | None:
    """Return what was said before about this dispatch, if that is still so."""
    records = book.planned.pop(key, None)
    if records is None or not np.array_equal(records["number"], numbers):
        return None
    for segment, part in book.timeline.split(records):
        if segment.states_of(part["row"]).any():  # not all pend
            return None
    return records


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
    located = _located(book, frame, *_places(body, frame.count, 0))
    records = located.records[located.pending]
    book.change(records, State.CANCELLED)
    return Filed(done=records)


def _places(body: Buffer, count: int, at: int) -> tuple[Numbers, Numbers]:
    """Return numbers and due times; of a message that is named twice, the second time as one that nobody knows.

    The layout is that of qmq.log.delays, which would make a list of pairs. Raises ValueError: the body is too short.
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
