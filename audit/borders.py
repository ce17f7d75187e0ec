"""Core. Whether the pieces of a copy continue each other: bytes, chain, epoch, high watermark and time."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from qmq.audit.kinds import Kind
from qmq.audit.line import Line
from qmq.audit.walk import Problem, problem_of
from qmq.errors import CorruptFrame
from qmq.log.frame import Frame, FrameKind, decode_header

NO_FRAME = "no frame stands here"


class Borders:
    """Takes the `piece` facts of a copy in order.

    Args:
        until_ms: no frame was written later than that.
        begins: where reading began: what lies before was not read, and nothing is known of it.
        before: the last frame that an earlier run verified, if reading goes on behind it.
    """

    def __init__(self, until_ms: int, begins: Collection[int], before: Frame | None = None) -> None:
        self._until_ms, self._begins, self._before = until_ms, frozenset(begins), before
        self._end: int | None = None
        self._chain = 0
        self._line = Line(until_ms)

    def enter(self, piece: int) -> None:
        """A piece begins."""
        if piece not in self._begins:
            return
        self._line, self._end = Line(self._until_ms), None
        if self._before is not None and piece == self._before.end:
            for _ in self._line.check(self._before):
                """Whoever read it has said so."""
            self._end, self._chain = piece, self._before.chain

    def judge(self, row: dict[str, Any]) -> Iterator[Problem]:
        """Take the frames of a piece; yield what is wrong where they begin, or where those before it end."""
        first, line = decode_header(row["header"], 0, row["offset"], None), row["line"]
        if row["offset"] == 0 and first.kind != FrameKind.EPOCH:
            yield problem_of(first, Kind.EPOCH_FRAME, f"epoch {first.epoch} does not begin with its epoch frame")
        if self._end is not None:
            yield from self._continues(row, first)
        yield from self._line.check(first)
        for frame in line.doubted or ():
            if frame.offset != first.offset:
                yield from (problem for problem in self._line.check(frame) if problem.what is Kind.TIME)
        self._end, self._chain, self._line = row["end"], row["chain"], line.behind(self._line)

    def _continues(self, row: dict[str, Any], first: Frame) -> Iterator[Problem]:
        if row["offset"] != self._end:
            yield Problem(self._end or 0, row["offset"], NO_FRAME)
            self._line.lost()
            return
        try:
            decode_header(row["header"], 0, row["offset"], self._chain)
        except CorruptFrame as error:
            yield problem_of(first, Kind.CHAIN, error.reason)
