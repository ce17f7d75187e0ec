"""Core. Delayed messages as bytes: due time in the encoding, intake check, reading from the log by number."""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from qmq.codec import DUE_AT, FLAG_DELAYED, Buffer
from qmq.crc import crc32
from qmq.errors import CorruptFrame
from qmq.log import MessageLog
from qmq.server.producing import check_messages

_DUE = struct.Struct(">q")
DAY_MS = 86_400_000


def dues_of(data: Buffer, begins: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the due time of each message that begins at `data[begins[i]]`."""
    text = np.frombuffer(data, np.uint8)
    places = begins[:, None] + np.arange(DUE_AT, DUE_AT + 8)
    return np.ascontiguousarray(text[places]).view(">i8").ravel().astype(np.int64)


def with_due(message: bytes, due_ms: int) -> bytes:
    """Return the message with another due time."""
    return message[:DUE_AT] + _DUE.pack(due_ms) + message[DUE_AT + 8 :]


def check_delayed(
    batch: Buffer, count: int, *, message_bytes_max: int, now_ms: int, longest_ms: int
) -> list[tuple[int, str]]:
    """Check a batch as brokers do, and that each message has a due time at most `longest_ms` from now.

    Returns (position, fault) of each wrong message.

    Raises:
        InvalidRequest: the end offsets are invalid, so the batch cannot be stored.
    """
    wrong = dict(check_messages(batch, count, message_bytes_max))
    data_at = 4 * (count + 1)
    data, bounds = memoryview(batch)[data_at:], np.frombuffer(batch, "<u4", count + 1).astype(np.int64)
    whole = np.flatnonzero(np.diff(bounds) >= DUE_AT + 8)
    begins = bounds[whole]
    dues = dues_of(data, begins)
    delayed = np.frombuffer(data, np.uint8)[begins] & FLAG_DELAYED != 0
    for at in np.nonzero(~delayed | (dues > now_ms + longest_ms) | (dues < 0))[0].tolist():
        wrong.setdefault(int(whole[at]), _fault(bool(delayed[at]), int(dues[at]), now_ms, longest_ms))
    return sorted(wrong.items())


def _fault(is_delayed: bool, due_ms: int, now_ms: int, longest_ms: int) -> str:
    if not is_delayed:
        return "it has no due time; send it to a broker, or with a delay"
    if due_ms < 0:
        return f"due time {due_ms} is before 1970"
    most = f"{longest_ms / DAY_MS:g} (delay_days_max)"
    return f"due in {(due_ms - now_ms) / DAY_MS:.1f} days; this delay server takes at most {most}"


Records = npt.NDArray[Any]
"""Entries of the schedule (delayserver.schedule.record)."""

GAP_BYTES = 16 * 1024
"""Messages closer than this are read together."""


class Messages(NamedTuple):
    """Messages to read, as plain values: a thread may use them."""

    numbers: list[int]
    sizes: list[int]
    crcs: list[int]

    @classmethod
    def of(cls, records: Records) -> Messages:
        return cls(records["number"].tolist(), records["size"].tolist(), records["crc"].tolist())


def read_messages(message_log: MessageLog, wanted: Messages) -> list[bytes]:
    """Return the bytes of each message, in the requested order. Blocks; may run on a thread.

    Raises:
        CorruptFrame: this copy is damaged there.
    """
    found: dict[int, bytes] = {}
    order = sorted(range(len(wanted.numbers)), key=wanted.numbers.__getitem__)
    at = 0
    while at < len(order):
        begin = wanted.numbers[order[at]]
        stop, end = at, begin
        while stop < len(order) and wanted.numbers[order[stop]] - end <= GAP_BYTES:
            end = wanted.numbers[order[stop]] + wanted.sizes[order[stop]]
            stop += 1
        data = message_log.stored.read_bytes(begin, end)
        for place in order[at:stop]:
            number = wanted.numbers[place]
            message = data[number - begin : number - begin + wanted.sizes[place]]
            if crc32(message) != wanted.crcs[place]:
                message_log.stored.check_readable(number)
                raise CorruptFrame(number, "the message is not the one that was scheduled")
            found[place] = message
        at = stop
    return [found[place] for place in range(len(order))]
