"""Core. Check of all messages of a window at once: encoding, subject, labels, tags, ids and dead letters.

A window has thousands of messages. Decoding each took as long as the rest of the audit together. So numpy reads one
field of all messages at a time, and only invalid messages are decoded alone, for the reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from hashlib import blake2b, sha256
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from qmq.audit.dead_letters import DeadLetter, dead_letter_of
from qmq.audit.findings import FindingKind
from qmq.audit.headers import TIME_MS_MAX
from qmq.audit.walk import Problem, Window
from qmq.codec import (
    FLAG_BODY,
    FLAG_TAGS,
    ID_BYTES_MAX,
    MESSAGE_BYTES_MIN,
    decode_envelope,
    decode_labels,
    decode_properties,
    label_of,
)
from qmq.crc import crc32
from qmq.errors import QmqError
from qmq.log.frame import FLAG_DEAD, FLAG_LABELLED, FLAG_ORDERED, HEADER_BYTES, Frame
from qmq.message import ORDER_KEY
from qmq.subjects import DEAD_LETTER, is_dead_letter_subject, parse_derived, real_subject, retry_subject

Ints = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]
Bytes = npt.NDArray[np.uint8]

SUBJECT_AT = 17
"""Position of a message's subject length (`qmq.codec`)."""
CREATED_AT = 1
"""Position of a message's creation time."""
CREATED_AHEAD_MS_MAX = 86_400_000
"""More than any difference of producers' clocks."""
CONTENT_BYTES = 8
"""Leading bytes of a message's SHA-256, as producers write them (`qmq.client.journal`)."""
KEY = np.frombuffer(ORDER_KEY.encode(), np.uint8)
STORED = np.dtype([("key", "<i8"), ("frame", "<u4"), ("place", "<u4")])
"""A batch or id that may be stored only once: hash of its name, place of its frame in the window, index in the frame.
"""
TAGGED = np.dtype([("sequence", "<i8"), ("tags", "<u4")])
"""A message with tags, and their hash; messages without tags count as 0 and are not listed."""


def _weights() -> Words:
    """Return fixed odd numbers: two names share a hash only by chance, once in 2^64."""
    raw = b"".join(blake2b(bytes([at]), digest_size=8).digest() for at in range(ID_BYTES_MAX + 2))
    return np.frombuffer(raw, "<u8").copy() | np.uint64(1)


WEIGHTS = _weights()
MASKS = np.array([(1 << 8 * size) - 1 for size in range(9)], np.uint64)
"""Mask of the first bytes of eight, by their number."""


class Fields(NamedTuple):
    """Places of the fields of each message in a window; meaningless where not `whole`."""

    whole: npt.NDArray[np.bool_]
    subject_at: Ints
    subject_bytes: Ints
    id_at: Ints
    id_bytes: Ints
    tags_at: Ints
    tags_end: Ints
    properties_end: Ints
    """The body, if any, is behind them."""
    key_at: Ints
    key_bytes: Ints
    """-1 without an order key."""


class Messages:
    """Messages of some frames of a window. `begins` and `ends` are their places in it, frame by frame."""

    def __init__(self, window: Window, frames: Sequence[Frame], begins: Ints, ends: Ints) -> None:
        self._window = window
        self._frames = frames
        self._begins = begins
        self._ends = ends
        self._data: Bytes = np.frombuffer(window.data, np.uint8)
        counts = np.fromiter((frame.count for frame in frames), np.int64, len(frames))
        self._of = np.repeat(np.arange(len(frames)), counts)
        self._first = np.cumsum(counts) - counts
        self._frame_at = np.fromiter((frame.offset - window.offset for frame in frames), np.int64, len(frames))
        self._eights: Words | None = None
        self._lengths: list[Ints] = []
        """Places of the two-byte lengths of all texts, also of invalid messages."""
        self.fields = self._parse()

    def problems(self) -> Iterator[Problem]:
        """Yield messages that do not decode, messages of another subject, and wrong labels."""
        dead = [number for number, frame in enumerate(self._frames) if frame.flags & FLAG_DEAD]
        copies = {letter.offset for letter in self.letters()} if dead else set()
        bad = set(np.flatnonzero(~self.fields.whole).tolist()) | set(self._invalid_texts())
        for at in sorted(bad):
            yield self._undecodable(at)
        for at in np.flatnonzero(self.fields.whole & ~self._same_subject()).tolist():
            frame = self._frames[self._of[at]]
            subject = self._text(self.fields.subject_at, self.fields.subject_bytes, at)
            if frame.offset not in copies and subject not in subjects_of(frame.subject):
                yield self._problem(at, FindingKind.FOREIGN, f"a message of {subject} in a frame of {frame.subject}")
        for number in dead:
            if self._frames[number].offset not in copies:
                text = "its frame is flagged as a dead letter, and it is no broker's copy of a message"
                yield self._problem(int(self._first[number]), FindingKind.DEAD_UNFOUNDED, text)
        yield from self._wrong_labels()
        yield from self._created_ahead()

    def stored(self) -> tuple[bytes, bytes]:
        """Return the batches, and the message ids of their producer, each as STORED."""
        of = [0 if frame.flags & FLAG_DEAD else _salt(frame.producer, frame.subject) for frame in self._frames]
        salts = np.array(of, np.uint64)
        frames = np.flatnonzero(salts)
        producers = np.array([frame.producer for frame in self._frames], np.uint64)[frames]
        batches = np.array([frame.batch for frame in self._frames], np.uint64)[frames]
        numbered = np.zeros(len(frames), STORED)
        numbered["key"] = _mix(producers * WEIGHTS[0] + batches * WEIGHTS[1]).view(np.int64)
        numbered["frame"] = self._frame_at[frames]
        rows = np.flatnonzero(self.fields.whole & (salts[self._of] != 0))
        named = np.zeros(len(rows), STORED)
        named["key"] = _mix(self._hash(self.fields.id_at, self.fields.id_bytes, rows) + salts[self._of[rows]]).view(
            np.int64
        )
        named["frame"] = self._frame_at[self._of[rows]]
        named["place"] = rows - self._first[self._of[rows]]
        return numbered.tobytes(), named.tobytes()

    def tagged(self) -> Iterator[tuple[str, int, bytes]]:
        """Yield (subject, offset of its first frame, TAGGED) of subjects with tagged messages."""
        fields = self.fields
        rows = np.flatnonzero(fields.whole & (fields.tags_end > fields.tags_at + 1))
        if not len(rows):
            return
        found = np.zeros(len(rows), TAGGED)
        firsts = np.array([frame.first_sequence for frame in self._frames], np.int64)
        found["sequence"] = firsts[self._of[rows]] + rows - self._first[self._of[rows]]
        found["tags"] = [
            crc32(self._data[at:end].data) | 1 for at, end in zip(fields.tags_at[rows], fields.tags_end[rows])
        ]
        names = [self._frames[at].subject for at in self._of[rows]]
        order: dict[str, list[int]] = {}
        for at, name in enumerate(names):
            order.setdefault(name, []).append(at)
        for name, places in order.items():
            yield name, self._frames[self._of[rows[places[0]]]].offset, found[places].tobytes()

    def letters(self) -> Iterator[DeadLetter]:
        """Yield the dead letters made by brokers, one per frame."""
        for number, frame in enumerate(self._frames):
            if (frame.flags & FLAG_DEAD or frame.subject.startswith(DEAD_LETTER)) and frame.count == 1:
                if (letter := dead_letter_of(frame, self._message(int(self._first[number])))) is not None:
                    yield letter

    def contents(self) -> Iterator[tuple[Frame, list[str | None], bytes]]:
        """Yield each frame with its messages' ids, None without one, and CONTENT_BYTES of their SHA-256."""
        fields, data = self.fields, self._window.data
        places = zip(fields.whole.tolist(), fields.id_at.tolist(), (fields.id_at + fields.id_bytes).tolist())
        ids = [
            str(data[begin:end], "utf-8", "replace") if whole else id_or_none(self._message(at))
            for at, (whole, begin, end) in enumerate(places)
        ]
        bounds = zip(self._begins.tolist(), self._ends.tolist())
        hashes = [sha256(data[begin:end]).digest()[:CONTENT_BYTES] for begin, end in bounds]
        for frame, first in zip(self._frames, self._first.tolist()):
            behind = first + frame.count
            yield frame, ids[first:behind], b"".join(hashes[first:behind])

    # Reading fields.

    def _u16(self, at: Ints) -> Ints:
        data, last = self._data, len(self._data) - 2
        at = np.minimum(at, last)
        return data[at].astype(np.int64) << 8 | data[at + 1]

    def _parse(self) -> Fields:
        """Locate the fields of all messages, one field of all of them at a time."""
        data, begins, ends = self._data, self._begins, self._ends
        last = len(data) - 1
        whole = ends - begins >= MESSAGE_BYTES_MIN
        subject_at = begins + SUBJECT_AT + 2
        subject_bytes = self._u16(begins + SUBJECT_AT)
        at = subject_at + subject_bytes
        id_at, id_bytes = at + 2, self._u16(at)
        at = id_at + id_bytes
        tags_at = at
        is_tagged = data[np.minimum(begins, last)] & FLAG_TAGS != 0
        left = np.where(is_tagged, data[np.minimum(at, last)], 0).astype(np.int64)
        at = at + is_tagged
        while left.any():
            self._lengths.append(at[left > 0])
            at = np.where(left > 0, at + 2 + self._u16(at), at)
            left = np.maximum(left - 1, 0)
        tags_end = at
        length = self._u16(at) << 16 | self._u16(at + 2)
        at = at + 4
        stop = at + length
        has_body = data[np.minimum(begins, last)] & FLAG_BODY != 0
        whole &= (at <= ends) & (length < 1 << 31) & (stop <= ends) & (has_body | (stop == ends))
        key_at, key_bytes = self._walk_properties(whole, at, stop)
        return Fields(whole, subject_at, subject_bytes, id_at, id_bytes, tags_at, tags_end, stop, key_at, key_bytes)

    def _walk_properties(self, whole: npt.NDArray[np.bool_], at: Ints, stop: Ints) -> tuple[Ints, Ints]:
        """Step through the properties of all messages at once; return the places of the order keys."""
        key_at, key_bytes = np.zeros_like(at), np.full_like(at, -1)
        rows = np.flatnonzero(whole & (at < stop))
        at = at[rows]
        while len(rows):
            name_bytes = self._u16(at)
            value_at = at + 2 + name_bytes
            value_bytes = self._u16(value_at)
            end = value_at + 2 + value_bytes
            fits = end <= stop[rows]
            whole[rows[~fits]] = False
            self._lengths += [at[fits], value_at[fits]]
            maybe = np.flatnonzero(fits & (name_bytes == len(KEY)))
            is_key = (self._data[at[maybe][:, None] + 2 + np.arange(len(KEY))] == KEY).all(1)
            keyed = maybe[is_key]
            key_at[rows[keyed]], key_bytes[rows[keyed]] = value_at[keyed] + 2, value_bytes[keyed]
            more = np.flatnonzero(fits & (end < stop[rows]))
            rows, at = rows[more], end[more]
        return key_at, key_bytes

    def _invalid_texts(self) -> Iterator[int]:
        """Yield the messages with invalid UTF-8: all texts of the window are decoded at once."""
        octets = bytearray(self._window.data)
        text = np.frombuffer(octets, np.uint8)
        begins, fields = self._begins, self.fields
        for at in np.flatnonzero(~fields.whole).tolist():
            text[begins[at] : self._ends[at]] = 0
        behind = np.append(0, self._ends[np.append(self._first[1:], len(begins)) - 1])
        gaps = begins[self._first] - behind[:-1]
        for gap in np.unique(gaps).tolist():
            text[behind[:-1][gaps == gap][:, None] + np.arange(gap)] = 0
        text[behind[-1] :] = 0
        rows = np.flatnonzero(fields.whole)
        text[begins[rows][:, None] + np.arange(SUBJECT_AT + 2)] = 0
        text[fields.tags_end[rows][:, None] + np.arange(4)] = 0
        tagged = rows[fields.tags_end[rows] > fields.tags_at[rows]]
        text[fields.tags_at[tagged]] = 0
        for places in (fields.id_at[rows] - 2, *self._lengths):
            inside = places[places < len(text) - 1]
            text[inside] = text[inside + 1] = 0
        if octets.isascii():  # bodies, too, so they need not be left out one by one
            return
        bodies = rows[fields.properties_end[rows] < self._ends[rows]]
        for begin, end in zip(fields.properties_end[bodies].tolist(), self._ends[bodies].tolist()):
            text[begin:end] = 0
        try:
            octets.decode()
        except UnicodeDecodeError:
            yield from (at for at in rows.tolist() if decode_error(self._message(at)) is not None)

    # Judging.

    def _same_subject(self) -> npt.NDArray[np.bool_]:
        """Return which messages have their frame's subject, byte for byte."""
        fields, data = self.fields, self._data
        field_at = self._frame_at + HEADER_BYTES
        sizes = data[self._frame_at + 6].astype(np.int64) | data[self._frame_at + 7].astype(np.int64) << 8
        same = fields.whole & (fields.subject_bytes == sizes[self._of])
        for size in np.unique(fields.subject_bytes[same]).tolist():
            rows = np.flatnonzero(same & (fields.subject_bytes == size))
            ours, theirs = fields.subject_at[rows], field_at[self._of[rows]]
            for begin in range(0, size, 8):
                other = (self._words(ours + begin) ^ self._words(theirs + begin)) & MASKS[min(8, size - begin)]
                same[rows[other != 0]] = False
        return np.asarray(same)

    def _wrong_labels(self) -> Iterator[Problem]:
        fields = self.fields
        for number, frame in enumerate(self._frames):
            if not frame.flags & (FLAG_LABELLED | FLAG_ORDERED):
                continue
            labels = decode_labels(self._window.body(frame), frame.count) if frame.flags & FLAG_LABELLED else ()
            first = int(self._first[number])
            keyed = next((at for at, label in enumerate(labels, first) if label >> 32), None)
            if keyed is not None and not frame.flags & FLAG_ORDERED:
                yield self._problem(
                    keyed, FindingKind.LABELS, "it has an order key, and its frame is not flagged as ordered"
                )
            elif keyed is None and frame.flags & FLAG_ORDERED:
                text = "its frame is flagged as ordered, and none of its messages has an order key"
                yield self._problem(first, FindingKind.LABELS, text)
            for at, label in enumerate(labels, first):
                if not fields.whole[at]:
                    continue
                tags = bytes(self._data[fields.tags_at[at] : fields.tags_end[at]])
                key = None if fields.key_bytes[at] < 0 else self._text(fields.key_at, fields.key_bytes, at)
                if label != (due := _label(tags, key)):
                    text = f"its label is {label:#x}, that of its tags and order key {due:#x}"
                    yield self._problem(at, FindingKind.LABELS, text)

    def _created_ahead(self) -> Iterator[Problem]:
        """Yield the first message of each frame that was created long after it was stored, by its own time."""
        rows = np.flatnonzero(self.fields.whole)
        created = self._words(self._begins[rows] + CREATED_AT).byteswap().view(np.int64)
        stored = np.array([frame.timestamp_ms for frame in self._frames], np.int64)[self._of[rows]]
        ahead = np.flatnonzero((created > np.minimum(stored, TIME_MS_MAX) + CREATED_AHEAD_MS_MAX) & (stored >= 0))
        for at in ahead[np.unique(self._of[rows[ahead]], return_index=True)[1]].tolist():
            text = (
                f"it was created {(int(created[at]) - int(stored[at])) // 1000} s after it was stored, by its own time"
            )
            yield self._problem(int(rows[at]), FindingKind.TIME, text)

    def _hash(self, begins: Ints, sizes: Ints, rows: Ints) -> Words:
        """Return a hash of each text, in a few array operations."""
        if not len(rows):
            return np.zeros(0, np.uint64)
        begins, sizes = begins[rows], sizes[rows]
        found: Words = WEIGHTS[-1] * sizes.astype(np.uint64)
        for number in range((min(int(sizes.max()), ID_BYTES_MAX) + 7) // 8):
            at, left = begins + 8 * number, sizes - 8 * number
            words = self._words(np.where(left > 0, at, 0)) & MASKS[np.clip(left, 0, 8)]
            found += np.where(left > 0, _mix(words ^ WEIGHTS[number]) * WEIGHTS[number], 0)
        return found

    def _words(self, at: Ints) -> Words:
        """Return the eight bytes at each place, padded with zeros after the end."""
        if self._eights is None:
            padded = np.append(self._data, np.zeros(8, np.uint8))
            self._eights = np.ndarray(len(self._data), "<u8", padded, strides=(1,))
        return self._eights[at]

    def _undecodable(self, at: int) -> Problem:
        frame = self._frames[self._of[at]]
        reason = decode_error(self._message(at)) or "it is no message"
        sequence = frame.first_sequence + at - int(self._first[self._of[at]])
        identity = id_or_none(self._message(at))
        return Problem(frame.offset, frame.end, reason, frame.subject, sequence, FindingKind.UNDECODABLE, identity)

    def _problem(self, at: int, what: FindingKind, reason: str) -> Problem:
        frame = self._frames[self._of[at]]
        sequence = frame.first_sequence + at - int(self._first[self._of[at]])
        identity = self._text(self.fields.id_at, self.fields.id_bytes, at)
        return Problem(frame.offset, frame.end, reason, frame.subject, sequence, what, identity)

    def _message(self, at: int) -> bytes:
        return bytes(self._window.data[self._begins[at] : self._ends[at]])

    def _text(self, begins: Ints, sizes: Ints, at: int) -> str:
        begin = int(begins[at])
        return str(self._window.data[begin : begin + int(sizes[at])], "utf-8", "replace")


def _mix(words: Words) -> Words:
    """Spread a difference of a few bits over all bits (the end of MurmurHash3)."""
    words = (words ^ words >> np.uint64(33)) * np.uint64(0xFF51AFD7ED558CCD)
    words = (words ^ words >> np.uint64(33)) * np.uint64(0xC4CEB9FE1A85EC53)
    return words ^ words >> np.uint64(33)


@lru_cache(4096)
def _salt(producer: int, subject: str) -> int:
    """Return a salt that separates ids by producer and subject.

    0 for frames without a producer's own numbers, such as dead letters, which carry those of their originals.
    """
    if not producer or is_dead_letter_subject(subject):
        return 0
    return (producer * 0x9E3779B97F4A7C15 + crc32(subject.encode()) * 0xD6E8FEB86659FD93) & (1 << 64) - 1 or 1


@lru_cache(4096)
def subjects_of(subject: str) -> frozenset[str]:
    """Return the subjects allowed in a frame's messages: a copy for a group keeps its original's subject."""
    derived = parse_derived(subject)
    mailbox = {retry_subject(derived.real, derived.group)} if derived else set()
    return frozenset({subject, real_subject(subject)} | mailbox)


@lru_cache(4096)
def _label(tags: bytes, key: str | None) -> int:
    """Return the label of a message with this encoded tag section and order key."""
    words, at = [], 1
    while at < len(tags):
        end = at + 2 + int.from_bytes(tags[at : at + 2], "big")
        words.append(tags[at + 2 : end].decode("utf-8", "replace"))
        at = end
    return label_of(words, key)


def decode_error(message: bytes) -> str | None:
    """Return the reason why a message does not decode, or None."""
    try:
        decode_envelope(message)
        decode_properties(message)
    except QmqError as error:
        return str(error)
    return None


def id_or_none(message: bytes) -> str | None:
    try:
        return decode_envelope(message).id
    except QmqError:
        return None
