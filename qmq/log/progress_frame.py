"""Core. Bodies of pull, ack, nack, position and epoch frames: progress of consumer groups.

One layout for all but epoch (integers little-endian), padded with zeros to a multiple of 8:

    0         u16 bytes of the group g, u16 bytes of the consumer c, u32 entries n
    8         n x (u64, u64, u64)
    8 + 24n   g bytes group, c bytes consumer, UTF-8

    frame      consumer   entries
    pull       yes        n x (first pull sequence, first sequence, messages): delivered to this consumer
                              (PASSED, first sequence, messages): skipped for good, not delivered
                              (DEFERRED, first sequence, messages): skipped for now, requeued
                              (EXPIRED, first sequence, messages): skipped for good, expired
                              (OVERFLOWED, first sequence, messages): skipped for good, too many waited
    pull       yes        none: this consumer exists and has no messages; or changes its filter from here on
    ack        yes        n x (begin, end, settled): pull sequences, half-open, done; settled is 0, EXPIRED if no
                              handler got them, or DEAD if dead letters of them are stored
    nack       yes        n x (begin, end, due): pull sequences, half-open, requeued until due (ms; 0: now;
                              NOT_BEGUN: now, and this delivery does not count)
    position   no         1 x (position, broadcast, began): the group starts at this sequence; broadcast is 1 or 0; it
                              gets all messages since it began in the cluster (ms; 0: unknown, or it was moved)
    position   no         none: the group is deleted
    position   yes        1 x (departure, 0, 0): this consumer left, its unacked messages are requeued
                              departure SUSPECTED: and then n x (begin, end, 0): pull sequences that it had begun

An epoch frame's body is JSON: the new master and the reason.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

from qmq.codec import Buffer

_HEAD = struct.Struct("<HHI")
_ENTRY = struct.Struct("<QQQ")

Entry = tuple[int, int, int]
PASSED, DEFERRED, EXPIRED, OVERFLOWED = (1 << 64) - 1, (1 << 64) - 2, (1 << 64) - 3, (1 << 64) - 4
"""Values in place of a pull sequence: the messages are not delivered."""
DEAD = (1 << 64) - 5
"""Value of `settled` in an ack. Logs of version 0.2 and earlier have 0 there."""
NUMBERS_END = OVERFLOWED
"""Bound of pull sequences: all are below."""
NOT_BEGUN = (1 << 64) - 1
"""Value in place of a due time."""


class Departure(IntEnum):
    """Ways in which a consumer leaves, which decide the deliveries that count."""

    VANISHED = 0
    """It vanished, and never reported begun messages: all deliveries count."""
    NONE_BEGUN = 1
    """It has begun none of its unacked messages: no delivery counts."""
    SUSPECTED = 2
    """It vanished, and reported begun messages: deliveries of these count. The others are suspected from now on."""


class Progress(NamedTuple):
    group: str
    consumer: str
    entries: tuple[Entry, ...]


def encode_progress(group: str, consumer: str, entries: tuple[Entry, ...] | list[Entry]) -> bytes:
    names = (group.encode(), consumer.encode())
    body = b"".join(
        (_HEAD.pack(len(names[0]), len(names[1]), len(entries)), *(_ENTRY.pack(*entry) for entry in entries), *names)
    )
    return body + bytes(-len(body) % 8)


def decode_progress(body: Buffer) -> Progress:
    """Read a body after its CRC was checked; raises ValueError if its lengths do not fit."""
    try:
        group_bytes, consumer_bytes, count = _HEAD.unpack_from(body)
        at = _HEAD.size + _ENTRY.size * count
        entries = tuple(_ENTRY.iter_unpack(body[_HEAD.size : at]))
    except struct.error as error:
        raise ValueError(f"not the body of a progress frame: {error}") from None
    if at + group_bytes + consumer_bytes > len(body):
        raise ValueError("a name ends past the body of a progress frame")
    group = str(body[at : at + group_bytes], "utf-8")
    consumer = str(body[at + group_bytes : at + group_bytes + consumer_bytes], "utf-8")
    return Progress(group, consumer, entries)
