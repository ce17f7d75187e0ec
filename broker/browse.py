"""Core. Browsing: search of a subject's stored messages for operators, without a consumer group and without progress.

One browse is many small steps. `next_frames` runs on the loop and returns the frames to read; `look_through` searches
them on any thread and pauses often. Filters are byte strings that an encoded message must contain, so most frames are
passed over without decoding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from qmq.broker.positions import border, sequences_kept
from qmq.codec import Buffer, decode_envelope, decode_properties, has_body, split_batch, without_body
from qmq.errors import InvalidMessage, InvalidRequest
from qmq.log import MessageLog
from qmq.log.frame import Frame
from qmq.log.index import FrameRef
from qmq.message import CONTENT_ENCODING
from qmq.message_sizes import LARGE_BYTES_MIN
from qmq.subjects import check_subject
from qmq.zstd import BLOCK_BYTES

MESSAGES_MAX, MESSAGES_DEFAULT = 1_000, 100
ANSWER_BYTES_MAX = 1 << 20
"""Encoded messages of one answer, without the parts of bodies that are not sent. The first message always fits."""
BODY_BYTES_MAX = 4 << 20
"""Part of one body in one answer."""
STEP_FRAMES, STEP_BYTES = 256, 4 << 20
"""Frames read in one step, and their bytes."""
PAUSE_BYTES, MESSAGE_COST = 512 << 10, 8 << 10
"""Bytes searched between pauses, and the cost of one message in searched bytes. No other thread runs during a search:
half a millisecond with pauses, five without.
"""


class Filter(NamedTuple):
    """Filter of a browse: messages must match all of its parts. An empty filter matches every message."""

    id: str = ""
    tags: frozenset[str] = frozenset()
    properties: Mapping[str, str] = {}

    def needles(self) -> list[bytes]:
        """Return the byte strings that the encoding of each matching message contains."""
        properties = [_string(name) + _string(value) for name, value in self.properties.items()]
        return [*([_string(self.id)] if self.id else []), *properties, *map(_string, self.tags)]


class Bodies(NamedTuple):
    """Part of each body to return: `bytes_max` bytes from `begin` on, as it is stored."""

    begin: int = 0
    bytes_max: int = 0


class Found(NamedTuple):
    """One stored message. `offset` is that of its frame; `problem` holds the decoding error, if any.

    `body_bytes` is the size of its stored body, None without one; `body` holds the requested part.
    """

    sequence: int
    offset: int
    stored_ms: int
    bytes: int
    created_ms: int = 0
    id: str = ""
    tags: tuple[str, ...] = ()
    properties: Mapping[str, str] = {}
    problem: str = ""
    body_bytes: int | None = None
    body: Buffer = b""


def visible_end(log: MessageLog, subject: str, limit: int) -> int:
    """Return the end of the messages of `subject` in frames that end at or before the offset `limit`."""
    return border(log, subject, lambda ref: ref.offset + ref.length <= limit)


@dataclass(slots=True)
class Browse:
    """One browse of sequences `[begin, end)` of a subject; afterwards the range holds the part not searched yet.

    Args:
        limit: high watermark; messages behind it are not shown.
    """

    log: MessageLog
    subject: str
    limit: int
    begin: int
    end: int
    newest_first: bool = False
    wanted: Filter = Filter()
    messages_max: int = MESSAGES_DEFAULT
    bodies: Bodies = Bodies()
    found: list[Found] = field(default_factory=list)
    _bytes: int = 0
    _is_full: bool = False

    def __post_init__(self) -> None:
        check_subject(self.subject)
        if not 0 < self.messages_max <= MESSAGES_MAX:
            raise InvalidRequest(f"{self.messages_max} messages requested. Request 1 to {MESSAGES_MAX}.")
        first, _ = sequences_kept(self.log, self.subject)
        self.begin = max(self.begin, first)
        self.end = max(min(self.end, visible_end(self.log, self.subject, self.limit)), self.begin)

    @property
    def is_over(self) -> bool:
        """Whether the range is searched, or the answer is full."""
        return self.begin >= self.end or self._is_full

    def next_frames(self) -> list[FrameRef]:
        """Return the next frames to read, by offset; none if retention deleted the rest."""
        begin = max(self.begin, self.end - STEP_FRAMES) if self.newest_first else self.begin
        refs = [ref for ref in self.log.frames(self.subject, begin, STEP_FRAMES) if ref.begin < self.end]
        if not refs:
            self.begin = self.end
        ahead = refs[::-1] if self.newest_first else refs
        size = taken = 0
        for ref in ahead:
            size += ref.length
            if taken and size > STEP_BYTES:
                break
            taken += 1
        return sorted(ahead[:taken])

    def look_through(self, frames: list[tuple[Frame, Buffer]]) -> Iterator[None]:
        """Collect matching messages of frames until the answer is full; yield where the thread should pause."""
        needles, cost = self.wanted.needles(), 0
        for frame, body in reversed(frames) if self.newest_first else frames:
            for spent in self._look_into(frame, body, needles):
                cost += spent
                if cost >= PAUSE_BYTES:
                    cost = 0
                    yield
            if self._is_full:
                return

    def _look_into(self, frame: Frame, body: Buffer, needles: list[bytes]) -> Iterator[int]:
        """Search the messages of one frame until the answer is full; yield the cost of each step.

        A frame with large bodies is not searched as a whole, because no other thread runs meanwhile. Its messages are
        searched one by one, without their bodies.
        """
        first = frame.first_sequence
        low, high = max(self.begin, first), min(self.end, first + frame.count)
        is_large = len(body) >= LARGE_BYTES_MIN * frame.count
        yield 0 if is_large else len(body)
        if is_large or _has_all(bytes(body), needles):
            messages = list(split_batch(body, frame.count))
            for sequence in reversed(range(low, high)) if self.newest_first else range(low, high):
                if not self._take(frame, sequence, messages[sequence - first], needles):
                    return
                yield MESSAGE_COST
        if self.newest_first:
            self.end = min(self.end, low)
        else:
            self.begin = max(self.begin, high)

    def _take(self, frame: Frame, sequence: int, message: Buffer, needles: list[bytes]) -> bool:
        """Add a message if it matches; return whether there is room for another."""
        data = without_body(message)
        if _has_all(data, needles):
            found = _decode(frame, sequence, data)._replace(bytes=len(message))
            if _is_wanted(found, self.wanted):
                found = _with_body(found, message, len(data), self.bodies)
                size = len(data) + len(found.body)
                if self.found and self._bytes + size > ANSWER_BYTES_MAX:
                    self._is_full = True
                    return False
                self.found.append(found)
                self._bytes += size
        if self.newest_first:
            self.end = sequence
        else:
            self.begin = sequence + 1
        self._is_full = len(self.found) >= self.messages_max
        return not self._is_full


def _has_all(data: bytes, needles: list[bytes]) -> bool:
    return all(needle in data for needle in needles)


def _string(text: str) -> bytes:
    """Encode a string as in a QMQ message: length and UTF-8. A string too long to be in any message never matches."""
    data = text.encode("utf-8", "surrogatepass")
    return min(len(data), 0xFFFF).to_bytes(2, "big") + data


def _decode(frame: Frame, sequence: int, data: bytes) -> Found:
    found = Found(sequence, frame.offset, frame.timestamp_ms, len(data))
    try:
        envelope = decode_envelope(data)
        properties = decode_properties(data)
    except InvalidMessage as error:
        return found._replace(problem=str(error))
    return found._replace(
        created_ms=envelope.created_ms, id=envelope.id, tags=tuple(sorted(envelope.tags)), properties=properties
    )


def _with_body(found: Found, message: Buffer, begin: int, bodies: Bodies) -> Found:
    """Add the wanted part of the body, which begins at `begin` of the message."""
    if found.problem or not has_body(message):
        return found
    most = bodies.bytes_max
    if most and CONTENT_ENCODING in found.properties:
        most = max(most, BLOCK_BYTES)
    at = begin + bodies.begin
    part = bytes(message[at : at + min(most, BODY_BYTES_MAX)])
    return found._replace(body_bytes=len(message) - begin, body=part)


def _is_wanted(found: Found, wanted: Filter) -> bool:
    return (
        wanted.id in ("", found.id)
        and wanted.tags <= set(found.tags)
        and wanted.properties.items() <= found.properties.items()
    )
