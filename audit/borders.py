"""Core. Whether the pieces of a copy continue each other: bytes, chain, epoch, high watermark and time."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from qmq.audit.kinds import Kind
from qmq.audit.line import Line
from qmq.errors import CorruptFrame
from qmq.log.frame import Frame, FrameKind, decode_header
from qmq.types import Epoch

NO_FRAME = "no frame stands here"


class Borders:
    """Takes the `piece` facts of a copy in order.

    Args:
        until_ms: no frame was written later than that.
        begins: where reading began: what lies before was not read, and nothing is known of it.
    """

    def __init__(self, until_ms: int, begins: Collection[int]) -> None:
        self._until_ms, self._begins = until_ms, frozenset(begins)
        self._end: int | None = None
        self._chain = 0
        self._line = Line(until_ms)

    def judge(self, row: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Take a piece; yield what is wrong where it begins, as rows of findings."""
        first = decode_header(row["header"], 0, row["offset"], None)
        if row["piece"] in self._begins:
            self._end, self._line = None, Line(self._until_ms)
            if row["offset"] == 0 and first.kind != FrameKind.EPOCH:
                yield _finding(row, first, Kind.EPOCH_FRAME, f"epoch {first.epoch} does not begin with its epoch frame")
        elif self._end is not None:
            yield from self._continues(row, first)
        self._end, self._chain = row["end"], row["chain"]
        self._line = Line(
            self._until_ms,
            max(self._line.epoch, Epoch(row["first"], row["last"])),
            max(self._line.watermark, row["value"]),
            row["total"],
        )
        self._line.last_epoch = Epoch(*map(int, row["text"].split(".")))

    def _continues(self, row: dict[str, Any], first: Frame) -> Iterator[dict[str, Any]]:
        if row["offset"] != self._end:
            finding = _finding(row, first, Kind.DAMAGED, NO_FRAME)
            yield finding | {"offset": self._end, "end": row["offset"], "subject": None, "sequence": None}
            self._line.lost()
            return
        try:
            decode_header(row["header"], 0, row["offset"], self._chain)
        except CorruptFrame as error:
            yield _finding(row, first, Kind.CHAIN, error.reason)
        for problem in self._line.check(first):
            if problem.what != Kind.TIME or first.timestamp_ms <= self._until_ms:  # that was seen within the piece
                if problem.what != Kind.WATERMARK or first.high_watermark <= first.offset:
                    yield _finding(row, first, problem.what, problem.reason)


def _finding(row: dict[str, Any], frame: Frame, what: Kind, text: str) -> dict[str, Any]:
    sequence = frame.first_sequence if frame.kind == FrameKind.MESSAGES else None
    return {
        "what": what,
        "copy": "",
        "offset": frame.offset,
        "end": frame.end,
        "subject": frame.subject or None,
        "sequence": sequence,
        "id": None,
        "text": text,
    }
