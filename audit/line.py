"""Core. What must hold from one frame's header to the next: epochs, the high watermark, times."""

from __future__ import annotations

from collections.abc import Iterator

from qmq.audit.kinds import Kind
from qmq.audit.walk import Problem
from qmq.log.frame import Frame, FrameKind
from qmq.types import NO_EPOCH, Epoch

BACK_MS_MAX = 60_000
"""A clock that is corrected goes back by less within one mastership."""
AHEAD_MS_MAX = 300_000
"""So far a broker's clock may be ahead of the audit's."""
FOREVER_MS = 1 << 62
_OTHER_CLOCK = frozenset({FrameKind.NACK, FrameKind.DISPATCH, FrameKind.RETENTION})
"""Their times are by other clocks: the mastership's own, which nobody sets, and what several clocks agreed on."""


class Line:
    """Follows the frames of one copy in order; made per piece, and once for their borders.

    `until_ms`: no frame was written later than that.
    """

    __slots__ = ("epoch", "last_epoch", "watermark", "time_ms", "_until_ms", "_before_ms", "_timed")

    def __init__(
        self, until_ms: int = FOREVER_MS, epoch: Epoch = NO_EPOCH, watermark: int = 0, time_ms: int = 0
    ) -> None:
        self.epoch, self.watermark, self.time_ms = epoch, watermark, time_ms
        self._until_ms = until_ms
        self.last_epoch = epoch
        """Of the last frame, which may be an older one."""
        self._before_ms = time_ms
        self._timed: Frame | None = None
        """The frame that `time_ms` is of; `_before_ms` is the time before it."""

    def check(self, frame: Frame) -> Iterator[Problem]:
        """Take the next frame; yield what is wrong with it, or with the one before it."""
        if frame.epoch != self.last_epoch:
            yield from self._new_epoch(frame)
        if frame.high_watermark > frame.offset:
            yield _problem(frame, Kind.WATERMARK, f"it states {frame.high_watermark}, which lies behind it")
        elif frame.high_watermark < self.watermark:
            text = f"it states {frame.high_watermark}, a frame before it {self.watermark}"
            yield _problem(frame, Kind.WATERMARK, text)
        else:
            self.watermark = frame.high_watermark
        if frame.kind not in _OTHER_CLOCK:
            yield from self._time(frame)

    def lost(self) -> None:
        """Frames are unknown here: the next one may begin an epoch whose epoch frame is among them."""
        self.last_epoch = self.epoch = NO_EPOCH
        self.time_ms, self._before_ms, self._timed = 0, 0, None

    def _new_epoch(self, frame: Frame) -> Iterator[Problem]:
        self.last_epoch = frame.epoch
        if frame.epoch < self.epoch:
            yield _problem(frame, Kind.EPOCH, f"epoch {frame.epoch} after epoch {self.epoch}")
        elif frame.epoch > self.epoch:
            if self.epoch != NO_EPOCH and frame.kind != FrameKind.EPOCH:
                yield _problem(frame, Kind.EPOCH_FRAME, f"epoch {frame.epoch} does not begin with its epoch frame")
            self.epoch = frame.epoch
            self.time_ms, self._before_ms, self._timed = 0, 0, None

    def _time(self, frame: Frame) -> Iterator[Problem]:
        now_ms = frame.timestamp_ms
        if now_ms > self._until_ms:
            ahead_s = (now_ms - self._until_ms) // 1000
            yield _problem(frame, Kind.TIME, f"its time is more than {ahead_s} s ahead of the audit's clock")
            return
        if now_ms >= self.time_ms - BACK_MS_MAX:
            self._before_ms, self.time_ms, self._timed = self.time_ms, now_ms, frame
            return
        if self._timed is not None and self._before_ms and now_ms >= self._before_ms - BACK_MS_MAX:
            text = f"its time is {(self.time_ms - now_ms) // 1000} s ahead of the next frame's"
            yield _problem(self._timed, Kind.TIME, text)
        else:
            yield _problem(frame, Kind.TIME, f"its time is {(self.time_ms - now_ms) // 1000} s before the last frame's")
        self.time_ms, self._timed = now_ms, frame


def _problem(frame: Frame, what: Kind, text: str) -> Problem:
    sequence = frame.first_sequence if frame.kind == FrameKind.MESSAGES else None
    return Problem(frame.offset, frame.end, text, frame.subject or None, sequence, what)
