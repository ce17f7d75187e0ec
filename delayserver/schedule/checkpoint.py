"""Core. The checkpoint: what the schedule knows in memory at one place of the log, in one file.

It is replaced whole, after everything that it counts in the other files is on disk. After a restart those files count
as far as it says, and the frames from `filed_end` on are filed again. All integers little-endian:

    0     u32  CRC-32 of the rest
    4     u32  magic "QDC1"
    8     u32  bytes j
    12    j    JSON: filed_end, filed_chain, subjects, a list per segment, a list per dispatch in flight, lengths
    12+j       u64 first numbers of all blocks, records of all tails, u64 marks of all tails, records in flight,
               counts per (u64 hour, u64 subject, u64 messages), counts per (u64 stretch, u64 messages)
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qmq.codec import Buffer
from qmq.crc import crc32
from qmq.delayserver.schedule.counting import Counts
from qmq.delayserver.schedule.record import RECORD, Numbers, Records

_MAGIC = b"QDC1"
FOLDER = "segments"
NAME = f"{FOLDER}/checkpoint"
"""Beside the files that it counts on: when it is durable, so are their names."""


@dataclass(frozen=True, slots=True)
class SavedSegment:
    begin_ms: int
    end_ms: int
    name: str
    written: int
    marks_bytes: int
    undone: int
    firsts: Numbers
    tail: Records
    marks: Numbers


@dataclass(frozen=True, slots=True)
class SavedDispatch:
    producer: int
    batch: int
    group: str
    subject: str
    records: Records


@dataclass(frozen=True, slots=True)
class Checkpoint:
    filed_end: int
    filed_chain: int
    subjects: list[str]
    segments: list[SavedSegment]
    in_flight: list[SavedDispatch]
    counts: Counts

    def encode(self) -> bytes:
        hours = [(hour, *entry) for hour, subjects in self.counts.hours.items() for entry in subjects.items()]
        head = {
            "filed_end": self.filed_end,
            "filed_chain": self.filed_chain,
            "subjects": self.subjects,
            "messages": self.counts.messages,
            "bytes": self.counts.bytes,
            "hours": len(hours),
            "stretches": len(self.counts.stretches),
            "segments": [
                [
                    s.begin_ms,
                    s.end_ms,
                    s.name,
                    s.written,
                    s.marks_bytes,
                    s.undone,
                    len(s.firsts),
                    len(s.tail),
                    len(s.marks),
                ]
                for s in self.segments
            ],
            "in_flight": [[d.producer, d.batch, d.group, d.subject, len(d.records)] for d in self.in_flight],
        }
        text = json.dumps(head).encode()
        rest = b"".join(
            (
                _MAGIC,
                len(text).to_bytes(4, "little"),
                text,
                _joined((s.firsts for s in self.segments), np.uint64),
                _joined((s.tail for s in self.segments), RECORD),
                _joined((s.marks for s in self.segments), np.uint64),
                _joined((d.records for d in self.in_flight), RECORD),
                np.array(hours, np.uint64).tobytes(),
                np.array(list(self.counts.stretches.items()), np.uint64).tobytes(),
            )
        )
        return crc32(rest).to_bytes(4, "little") + rest


def _joined(arrays: Iterable[NDArray[Any]], dtype: Any) -> bytes:
    return np.concatenate([np.empty(0, dtype), *arrays]).tobytes()


class _Reader:
    """Yields one array after the other."""

    def __init__(self, data: Buffer, at: int) -> None:
        self._data, self._at = data, at

    def take(self, count: int, dtype: Any) -> NDArray[Any]:
        array: NDArray[Any] = np.frombuffer(self._data, dtype, count, self._at).copy()
        self._at += array.nbytes
        return array

    def split(self, counts: Sequence[int], dtype: Any) -> list[NDArray[Any]]:
        """Each with room of its own, so that none keeps all the others in memory."""
        return [self.take(count, dtype) for count in counts]


def decode_checkpoint(data: Buffer) -> Checkpoint:
    """Raises ValueError if it is damaged: the schedule is made again from the log."""
    if len(data) < 12 or crc32(memoryview(data)[4:]) != int.from_bytes(data[:4], "little") or data[4:8] != _MAGIC:
        raise ValueError("the checkpoint does not match its CRC")
    begin = 12 + int.from_bytes(data[8:12], "little")
    head = json.loads(bytes(data[12:begin]))
    reader, rows = _Reader(data, begin), head["segments"]
    firsts = reader.split([row[6] for row in rows], np.uint64)
    tails = reader.split([row[7] for row in rows], RECORD)
    marks = reader.split([row[8] for row in rows], np.uint64)
    flying = reader.split([row[4] for row in head["in_flight"]], RECORD)
    counts = Counts()
    counts.messages, counts.bytes = head["messages"], head["bytes"]
    for hour, subject, messages in reader.take(3 * head["hours"], np.uint64).reshape(-1, 3).tolist():
        counts.hours[hour][subject] = messages
    counts.stretches = dict(reader.take(2 * head["stretches"], np.uint64).reshape(-1, 2).tolist())
    dispatches = zip(head["in_flight"], flying, strict=True)
    return Checkpoint(
        head["filed_end"],
        head["filed_chain"],
        head["subjects"],
        [SavedSegment(*row[:6], *arrays) for row, *arrays in zip(rows, firsts, tails, marks, strict=True)],
        [SavedDispatch(producer, batch, group, subject, r) for (producer, batch, group, subject, _), r in dispatches],
        counts,
    )
