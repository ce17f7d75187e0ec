"""Core. Messages by number: read from the log where they lie, and checked before anybody gets them."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy.typing as npt

from qmq.crc import crc32
from qmq.errors import CorruptFrame
from qmq.log import MessageLog

Records = npt.NDArray[Any]
"""Entries of the schedule (delayserver.schedule.record)."""

GAP_BYTES = 16 * 1024
"""Messages that lie closer together are read in one go."""


class Messages(NamedTuple):
    """Which messages to read: plain values, so that the job that reads them may run on a thread."""

    numbers: list[int]
    sizes: list[int]
    crcs: list[int]

    @classmethod
    def of(cls, records: Records) -> Messages:
        return cls(records["number"].tolist(), records["size"].tolist(), records["crc"].tolist())


def read_messages(message_log: MessageLog, wanted: Messages) -> list[bytes]:
    """Return the bytes of each message, in the order asked for. Blocks; may run on a thread.

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
