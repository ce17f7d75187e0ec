"""Core. Tables of a walk over part of a log: messages, frames, consumers' progress, or delays.

A range that does not parse, or a message that does not decode, is a row with only `problem` and its place set.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from functools import partial
from itertools import repeat
from typing import Any

import pyarrow as pa

from qmq.audit.conservation import SETTLED, WITHOUT_A_CONSUMER
from qmq.audit.headers import NUMBER_MAX, TIME_MS_MAX
from qmq.audit.selection import Selection
from qmq.audit.walk import Walk, Window
from qmq.codec import (
    check_batch,
    decode_envelope,
    decode_properties,
    due_of,
    has_body,
    labels_bytes,
    pick_properties,
    properties_span,
    split_batch,
)
from qmq.errors import CorruptFrame, QmqError
from qmq.log.delay_frames import Outcome, batch_begin, decode_dispatch, decode_places, decode_settled
from qmq.log.frame import DELAYS, FLAG_LABELLED, PROGRESS, Frame, FrameKind
from qmq.log.progress_frame import (
    DEFERRED,
    NOT_BEGUN,
    Departure,
    Entry,
    decode_progress,
)
from qmq.message import CONTENT_TYPE
from qmq.message_sizes import FRAME_BYTES_MAX

ROWS_MAX, BYTES_MAX = 65_536, 8 << 20
"""Bounds of one batch sent to Spark."""

MOMENT = pa.timestamp("us", "UTC")
_AT = [
    ("broker_group", pa.string()),
    ("offset", pa.int64()),
    ("term", pa.int64()),
    ("boot", pa.int64()),
    ("stored_at", MOMENT),
    ("subject", pa.string()),
]
MESSAGES = pa.schema(
    [
        *_AT,
        ("sequence", pa.int64()),
        ("message", pa.binary()),
        ("id", pa.string()),
        ("tags", pa.list_(pa.string())),
        ("created_at", MOMENT),
        ("properties", pa.map_(pa.string(), pa.string())),
        ("body", pa.binary()),
        ("content_type", pa.string()),
        ("producer", pa.string()),
        ("batch", pa.int64()),
        ("problem", pa.string()),
    ]
)
FRAMES = pa.schema(
    [
        *_AT,
        ("end", pa.int64()),
        ("kind", pa.int32()),
        ("flags", pa.int32()),
        ("first_sequence", pa.int64()),
        ("count", pa.int64()),
        ("high_watermark", pa.int64()),
        ("producer", pa.string()),
        ("batch", pa.int64()),
        ("chain", pa.string()),
        ("body_crc", pa.int64()),
        ("body_bytes", pa.int64()),
        ("problem", pa.string()),
    ]
)
PROGRESS_ROWS = pa.schema(
    [
        *_AT,
        ("event", pa.string()),
        ("consumer_group", pa.string()),
        ("consumer", pa.string()),
        ("pull", pa.int64()),
        ("sequence", pa.int64()),
        ("messages", pa.int64()),
        ("due_at", MOMENT),
        ("problem", pa.string()),
    ]
)
DELAY_ROWS = pa.schema(
    [
        *_AT,
        ("event", pa.string()),
        ("number", pa.int64()),
        ("due_at", MOMENT),
        ("target", pa.string()),
        ("producer", pa.string()),
        ("batch", pa.int64()),
        ("problem", pa.string()),
    ]
)
SCHEMAS = {"messages": MESSAGES, "frames": FRAMES, "progress": PROGRESS_ROWS, "delays": DELAY_ROWS}
_DECODED = ("id", "tags", "created_at", "properties", "content_type", "body")
_OF_ENVELOPE = ("id", "tags", "created_at")
_OF_PROPERTIES = ("properties", "content_type")

Values = Mapping[str, Any]
EventsOf = Callable[[Frame, memoryview], Iterator[dict[str, Any]]]
Lists = Mapping[str, Iterable[Any]]


class _Columns:
    """Rows collected as columns, and returned as Arrow batches of bounded size."""

    def __init__(self, schema: pa.Schema, names: Iterable[str], *, is_strict: bool) -> None:
        self._schema = pa.schema([schema.field(name) for name in names])
        self._is_strict = is_strict
        self._clear()

    def _clear(self) -> None:
        self._columns: dict[str, list[Any]] = {name: [] for name in self._schema.names}
        self._rows = self._bytes = 0

    def add(self, rows: int, shared: Values, lists: Lists, size: int = 0) -> None:
        """Add rows of `size` bytes. `shared` columns have one value; columns in neither mapping are null.

        Raises:
            CorruptFrame: a row has a problem, and the table is strict.
        """
        if self._is_strict:
            for problem in (shared.get("problem"), *lists.get("problem", ())):
                if problem is not None:
                    raise CorruptFrame(shared["offset"], problem)
        for name, column in self._columns.items():
            if name in lists:
                column.extend(lists[name])
            else:
                column.extend(repeat(shared.get(name), rows))
        self._rows += rows
        self._bytes += size

    @property
    def is_full(self) -> bool:
        return self._rows >= ROWS_MAX or self._bytes >= BYTES_MAX

    def take(self) -> Iterator[pa.RecordBatch]:
        """Yield the collected rows, if any."""
        if self._rows:
            arrays = [pa.array(self._columns[field.name], field.type) for field in self._schema]
            yield pa.RecordBatch.from_arrays(arrays, schema=self._schema)
        self._clear()


def table_batches(
    walk: Walk, table: str, columns: Iterable[str], selection: Selection, shared: Values, *, is_strict: bool = False
) -> Iterator[pa.RecordBatch]:
    """Return the rows of a table of SCHEMAS with the named `columns`; only these are decoded.

    `shared`: columns with one value for all rows.

    Raises:
        CorruptFrame: a range is damaged, and the table `is_strict`.
    """
    names = list(columns)
    found = _Columns(SCHEMAS[table], names, is_strict=is_strict)
    for window in walk.windows():
        if table == "messages":
            _messages(window, found, frozenset(names), selection, shared)
        elif table == "frames":
            _frames(window, found, selection, shared)
        elif table == "progress":
            _events(window, found, PROGRESS, _progress, selection, shared)
        else:
            _events(window, found, _OF_DELAYS, _decisions, selection, shared)
        if found.is_full:
            yield from found.take()
    yield from found.take()


def _at(frame: Frame, shared: Values) -> dict[str, Any]:
    return {
        **shared,
        "offset": frame.offset,
        "term": frame.epoch.term,
        "boot": frame.epoch.boot,
        "stored_at": _moment(frame.timestamp_ms),
        "subject": frame.subject,
        "producer": f"{frame.producer:016x}",
        "batch": frame.batch - (1 << 64) if frame.batch >> 63 else frame.batch,
    }


def _damage(window: Window, found: _Columns, shared: Values) -> None:
    for problem in window.problems:
        found.add(1, {**shared, "offset": problem.offset, "subject": problem.subject, "problem": problem.reason}, {})


def _messages(window: Window, found: _Columns, names: frozenset[str], selection: Selection, shared: Values) -> None:
    decodes = not names.isdisjoint(_DECODED)
    _damage(window, found, shared)
    for frame in window.frames:
        if frame.kind != FrameKind.MESSAGES or frame.offset in window.damaged or not selection.matches(frame):
            continue
        at = _at(frame, shared)
        try:
            batch = window.batch(frame)
            check_batch(batch, frame.count, FRAME_BYTES_MAX)
        except (QmqError, ValueError) as error:
            found.add(1, at | {"problem": str(error)}, {})
            continue
        if selection.texts:
            body = bytes(batch)
            if not all(text in body for text in selection.texts):
                continue
        lists: dict[str, Iterable[Any]] = {"sequence": range(frame.first_sequence, frame.first_sequence + frame.count)}
        if decodes or "message" in names:
            messages = [bytes(view) for view in split_batch(batch, frame.count)]
            lists["message"] = messages
            if decodes:
                lists |= _decoded(messages, names, selection.properties)
        found.add(frame.count, at, lists, len(batch))


def _decoded(messages: list[bytes], names: frozenset[str], properties: frozenset[str] | None) -> dict[str, list[Any]]:
    """Return the columns `names` of _DECODED, and `problem`. `properties`: names of those to read; None: all."""
    reads_envelope = not names.isdisjoint(_OF_ENVELOPE)
    texts_of = _reader_of_properties(names, properties)
    rows: list[tuple[Any, ...]] = []
    for message in messages:
        try:
            identity, tags, moment = _envelope(message) if reads_envelope else (None, None, None)
            texts = texts_of(message)
            body = message[properties_span(message)[1] :] if "body" in names and has_body(message) else None
        except QmqError as error:
            rows.append((*(None for _ in _DECODED), str(error)))
            continue
        content_type = texts.get(CONTENT_TYPE)
        if properties is not None and CONTENT_TYPE not in properties:
            texts.pop(CONTENT_TYPE, None)
        rows.append((identity, tags, moment, list(texts.items()), content_type, body, None))
    return dict(zip((*_DECODED, "problem"), map(list, zip(*rows, strict=True)), strict=True))


def _envelope(message: bytes) -> tuple[str, list[str], int]:
    envelope = decode_envelope(message)
    return envelope.id, sorted(envelope.tags), _moment(envelope.created_ms)


def _reader_of_properties(
    names: frozenset[str], properties: frozenset[str] | None
) -> Callable[[bytes], dict[str, str]]:
    if names.isdisjoint(_OF_PROPERTIES):
        return lambda message: {}
    if properties is None:
        return decode_properties
    picked = properties | ({CONTENT_TYPE} if "content_type" in names else set())
    return partial(pick_properties, wanted={name.encode(): name for name in picked})


def _frames(window: Window, found: _Columns, selection: Selection, shared: Values) -> None:
    reasons: dict[int, list[str]] = {}
    for problem in window.problems:
        reasons.setdefault(problem.offset, []).append(problem.reason)
    known = {frame.offset for frame in window.frames}
    for problem in window.problems:
        if problem.offset not in known:
            found.add(1, {**shared, "offset": problem.offset, "end": problem.end, "problem": problem.reason}, {})
    for frame in window.frames:
        if selection.matches(frame):
            more = {
                "end": frame.end,
                "kind": frame.kind,
                "flags": frame.flags,
                "first_sequence": frame.first_sequence,
                "count": frame.count,
                "high_watermark": frame.high_watermark,
                "chain": f"{frame.chain:016x}",
                "body_crc": frame.body_crc,
                "body_bytes": frame.body_bytes,
                "problem": "; ".join(reasons.get(frame.offset, [])) or None,
            }
            found.add(1, _at(frame, shared) | more, {})


def _events(
    window: Window, found: _Columns, kinds: Container[int], events_of: EventsOf, selection: Selection, shared: Values
) -> None:
    """Add a row for each event of the frames of these kinds."""
    _damage(window, found, shared)
    for frame in window.frames:
        if frame.kind not in kinds or frame.offset in window.damaged or not selection.matches(frame):
            continue
        at = _at(frame, shared)
        try:
            events = list(events_of(frame, window.body(frame)))
        except (QmqError, ValueError) as error:
            found.add(1, at | {"problem": str(error)}, {})
            continue
        names = {name for event in events for name in event}
        found.add(len(events), at, {name: [event.get(name, at.get(name)) for event in events] for name in names})


def _progress(frame: Frame, body: memoryview) -> Iterator[dict[str, Any]]:
    """Yield the events of a progress frame (`qmq.log.progress_frame`)."""
    progress = decode_progress(body)
    of = {"consumer_group": progress.group, "consumer": progress.consumer or None}
    for event in _entries(frame.kind, progress.consumer, progress.entries):
        yield of | event


_WITHOUT_A_CONSUMER = WITHOUT_A_CONSUMER | {DEFERRED: "deferred"}


def _entries(kind: int, consumer: str, entries: tuple[Entry, ...]) -> Iterator[dict[str, Any]]:
    if kind == FrameKind.POSITION:
        yield _moved(consumer, entries)
        return
    if kind == FrameKind.PULL and not entries:
        yield {"event": "joined"}
    for first, two, three in entries:
        if kind == FrameKind.PULL:
            event = _WITHOUT_A_CONSUMER.get(first, "pull")
            yield {"event": event, "pull": first if event == "pull" else None, "sequence": two, "messages": three}
        elif kind == FrameKind.ACK:
            yield {"event": SETTLED.get(three, "ack"), "pull": first, "messages": two - first}
        else:
            due_at = None if three == NOT_BEGUN else _moment(three)
            yield {"event": "nack", "pull": first, "messages": two - first, "due_at": due_at}


def _moved(consumer: str, entries: tuple[Entry, ...]) -> dict[str, Any]:
    if consumer:
        vanished = not entries or entries[0][0] != Departure.NONE_BEGUN
        return {"event": "vanished" if vanished else "left"}
    return {"event": "position", "sequence": entries[0][0]} if entries else {"event": "forgotten"}


_OF_DELAYS = DELAYS | {FrameKind.MESSAGES}


def _decisions(frame: Frame, body: memoryview) -> Iterator[dict[str, Any]]:
    """Yield the events of a delay server's frame, one per message or batch (`qmq.log.delay_frames`)."""
    if frame.kind == FrameKind.DISPATCH:
        group, places = decode_dispatch(body, frame.count)
        for number, due_ms in places:
            yield {"event": "planned", "number": _number(number), "due_at": _moment(due_ms), "target": group}
    elif frame.kind == FrameKind.SETTLED:
        for producer, batch, outcome in decode_settled(body, frame.count):
            event = "stored" if outcome == Outcome.STORED else "not_stored"
            yield {"event": event, "producer": f"{producer:016x}", "batch": batch - (1 << 64 if batch >> 63 else 0)}
    elif frame.kind == FrameKind.CANCEL:
        yield from ({"event": "cancelled", "number": _number(at)} for at, _ in decode_places(body, frame.count))
    else:
        is_carry = frame.kind == FrameKind.CARRY
        if is_carry:
            yield from (
                {"event": "replaced", "number": _number(at)} for at, _ in decode_places(body, frame.count) if at
            )
        yield from _taken_messages(frame, body, batch_begin(frame.count, is_carry))


def _taken_messages(frame: Frame, body: memoryview, begin: int) -> Iterator[dict[str, Any]]:
    """Yield each message taken by a delay server; its number is its offset."""
    end = len(body) - (labels_bytes(frame.count) if frame.flags & FLAG_LABELLED else 0)
    ends, _ = check_batch(body[begin:end], frame.count, FRAME_BYTES_MAX)
    data = begin + 4 * len(ends)
    for at in ends[:-1]:
        number, due_ms = frame.offset + frame.body_at + data + at, due_of(body[data + at :])
        if due_ms is not None:
            yield {"event": "taken", "number": number, "due_at": _moment(due_ms)}


def _number(stated: int) -> int:
    return min(stated, NUMBER_MAX)


def _moment(stated_ms: int) -> int:
    """Return a stated time in microseconds, within the years that Spark and Python represent."""
    return max(0, min(stated_ms, TIME_MS_MAX)) * 1000
