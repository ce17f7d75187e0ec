"""Core. Bodies of the frames of a delay server's log: plans of dispatches and their outcomes.

A message's *number* is the offset in the log of its first byte. All integers little-endian:

    carry      n x (u64 number, u64 due) of the messages that these replace (number 0: of none), then a batch and maybe
               its labels, as in a messages frame: messages written again under new numbers
    dispatch   u16 g, g bytes broker group, zeros up to a multiple of 8, n x (u64 number, u64 due): messages produced
               to that group as one batch, under the producer id and batch number in the frame's header
    settled    n x (u64 producer id, u64 batch number, u64 outcome): outcomes of dispatches
    cancel     n x (u64 number, u64 due): messages that are not sent any more

A dispatch is on both disks before its batch is sent. After a crash or a swap the same messages are sent again under the
same numbers to the same group, which stores them once (P2).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from enum import IntEnum
from itertools import chain

from qmq.codec import Buffer

SCHEDULE_FOLDER = "schedule"
"""Folder of a delay server's schedule, beside its log: no broker has one."""
_LENGTH = struct.Struct("<H")
PLACE_BYTES = 16

Place = tuple[int, int]
"""(number, due time in ms): a message's place in the log, and its segment of the schedule."""


class Outcome(IntEnum):
    STORED = 0
    NOT_STORED = 1
    """The dispatch's messages are due again."""


Settlement = tuple[int, int, int]
"""(producer id, batch number, outcome)"""


def encode_places(places: Sequence[Place]) -> bytes:
    return struct.pack(f"<{2 * len(places)}Q", *chain.from_iterable(places))


def decode_places(body: Buffer, count: int, at: int = 0) -> list[Place]:
    """Read `count` places from `body[at:]`; raises ValueError if there are fewer."""
    try:
        flat = struct.unpack_from(f"<{2 * count}Q", body, at)
    except struct.error as error:
        raise ValueError(f"no {count} places: {error}") from None
    return list(zip(flat[::2], flat[1::2], strict=True))


def encode_dispatch(group: str, places: bytes) -> bytes:
    """Encode the body of a dispatch; `places` come from `encode_places`."""
    name = group.encode()
    head = _LENGTH.pack(len(name)) + name
    return head + bytes(-len(head) % 8) + places


def decode_dispatch(body: Buffer, count: int) -> tuple[str, list[Place]]:
    """Return the broker group and the messages of a dispatch; raises ValueError."""
    try:
        (length,) = _LENGTH.unpack_from(body)
        group = str(memoryview(body)[2 : 2 + length], "utf-8")
    except (struct.error, UnicodeDecodeError) as error:
        raise ValueError(f"not the body of a dispatch: {error}") from None
    head = 2 + length
    return group, decode_places(body, count, head + -head % 8)


def encode_settled(settled: Iterable[Settlement]) -> bytes:
    flat = list(chain.from_iterable(settled))
    return struct.pack(f"<{len(flat)}Q", *flat)


def decode_settled(body: Buffer, count: int) -> list[Settlement]:
    """Return the settlements in `body`; raises ValueError if it is too short."""
    try:
        flat = struct.unpack_from(f"<{3 * count}Q", body)
    except struct.error as error:
        raise ValueError(f"no {count} outcomes: {error}") from None
    return list(zip(flat[::3], flat[1::3], flat[2::3], strict=True))


def batch_begin(count: int, is_carry: bool) -> int:
    """Return the offset of the batch within the body of a messages frame or a carry."""
    return PLACE_BYTES * count if is_carry else 0
