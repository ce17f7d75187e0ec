"""Core. Rules from one frame's header to the next, within a piece and across borders: chain, epoch, watermark, time."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from qmq.audit.findings import FindingKind
from qmq.audit.walk import Problem, problem_of
from qmq.errors import CorruptFrame
from qmq.log.frame import Frame, FrameKind, decode_header
from qmq.types import NO_EPOCH, Epoch

BACK_MS_MAX = 60_000
"""Maximum step back of the time within one mastership: clock corrections are smaller."""
AHEAD_MS_MAX = 300_000
"""Maximum lead of a broker's clock over the audit's."""
FOREVER_MS = 1 << 62
STILL_MS, STILL_FRAMES = 300_000, 8
"""A high watermark that stands still for longer, over more messages frames, is a finding: a master accepts produces
only while its slaves follow. After a slave's return, a few messages may precede the first rise.
"""
_OTHER_CLOCK = frozenset({FrameKind.NACK, FrameKind.DISPATCH, FrameKind.RETENTION})
"""Kinds with the time of another clock. It is the mastership's own clock, which is never set, or the agreement of
several clocks, which is not ahead of all of them.
"""


@dataclass(frozen=True, slots=True)
class Uncovered:
    """The first messages frame that no later watermark covers.

    `frames`: messages frames from it on; `last_ms`: time of the last one; `watermark`: the latest one stated.
    """

    first: Frame
    watermark: int
    last_ms: int
    frames: int = 1

    @property
    def is_still(self) -> bool:
        return self.frames >= STILL_FRAMES and self.last_ms > self.first.timestamp_ms + STILL_MS

    def and_then(self, more: Uncovered) -> Uncovered:
        """Return this frame with those of a later period; `more` alone if a watermark there covers this frame."""
        if more.watermark >= self.first.end:
            return more
        return replace(more, first=self.first, frames=self.frames + more.frames)


@dataclass(slots=True)
class FrameOrder:
    """Check of the headers of one copy in order; one per piece, joined at the borders.

    Args:
        until_ms: upper bound of all frames' times.
        begins: whether the piece before may still decide about the first time of this piece.
    """

    until_ms: int = FOREVER_MS
    begins: bool = False
    epoch: Epoch = NO_EPOCH
    last_epoch: Epoch = NO_EPOCH
    """Epoch of the last frame, which may be older than `epoch`."""
    watermark: int = 0
    time_ms: int = 0
    doubted: tuple[Frame, Frame] | None = None
    """The piece's first frame with a time, and the next one: one of them is wrong, and the piece before decides which.
    """
    uncovered: Uncovered | None = None
    head: Uncovered | None = None
    """First uncovered frame of this piece, once a later frame has covered it. The period may begin in an earlier piece.
    """
    past_standstills: list[Uncovered] = field(default_factory=list)
    """Further frames at which the watermark stood still for long, before it moved on."""
    _before_ms: int = 0
    _timed: Frame | None = None
    """The frame with time `time_ms`; `_before_ms` is the time before it."""

    def after(self, before: FrameOrder) -> FrameOrder:
        """Return the state at the end of this piece, given the state `before` at its beginning."""
        return replace(
            self,
            begins=False,
            epoch=max(before.epoch, self.epoch),
            watermark=max(before.watermark, self.watermark),
            uncovered=self.uncovered_since(before.uncovered),
            head=None,
            past_standstills=[],
            _before_ms=self._before_ms or (before._before_ms if self.begins else 0),
        )

    def uncovered_since(self, before: Uncovered | None) -> Uncovered | None:
        """Return the first uncovered frame at the end of this piece, given the one at its beginning."""
        if before is None or self.head is not None:
            return self.uncovered
        if self.uncovered is None:
            return before if self.watermark < before.first.end else None
        return before.and_then(self.uncovered)

    def standstills(self, before: Uncovered | None) -> list[Uncovered]:
        """Return the frames at which the watermark stood still for long, each in the piece that shows it first."""
        found = self.past_standstills.copy()
        first = self.head or self.uncovered
        if first is not None:
            first = first if before is None else before.and_then(first)
            if first.is_still and not (before is not None and first.first is before.first and before.is_still):
                found.append(first)
        if self.head is not None and self.uncovered is not None and self.uncovered.is_still:
            found.append(self.uncovered)
        return found

    def check(self, frame: Frame) -> Iterator[Problem]:
        """Take the next frame; yield its problems, or those of the frame before it."""
        if frame.epoch != self.last_epoch:
            yield from self._new_epoch(frame)
        if frame.high_watermark > frame.offset:
            yield problem_of(frame, FindingKind.WATERMARK, f"it states {frame.high_watermark}, which lies behind it")
        elif frame.high_watermark < self.watermark:
            text = f"it states {frame.high_watermark}, a frame before it {self.watermark}"
            yield problem_of(frame, FindingKind.WATERMARK, text)
        else:
            self.watermark = frame.high_watermark
        if frame.kind == FrameKind.MESSAGES:
            self._cover(frame, frame, 1)
        if frame.kind not in _OTHER_CLOCK:
            yield from self._time(frame)
        elif frame.kind == FrameKind.RETENTION and frame.timestamp_ms > self.until_ms:
            yield self._ahead(frame)

    def take(self, frames: Sequence[Frame]) -> bool:
        """Take messages frames of the current epoch at once; return False and take none if one is wrong."""
        watermarks = np.array([self.watermark, *(frame.high_watermark for frame in frames)], np.uint64)
        offsets = np.array([frame.offset for frame in frames], np.uint64)
        times = np.array([self.time_ms, *(frame.timestamp_ms for frame in frames)], np.int64)
        if (watermarks[1:] > offsets).any() or (watermarks[1:] < watermarks[:-1]).any():
            return False
        if (times[1:] > self.until_ms).any() or (times[1:] < times[:-1] - BACK_MS_MAX).any():
            return False
        self.watermark = frames[-1].high_watermark
        self._cover(frames[0], frames[-1], len(frames))
        self._timed = frames[-1]
        self._before_ms = int(times[-2])
        self.time_ms = int(times[-1])
        return True

    def _cover(self, first: Frame, last: Frame, frames: int) -> None:
        """Take messages frames; the last one states the watermark."""
        known = self.uncovered
        if known is not None and self.watermark < known.first.end:
            self.uncovered = Uncovered(known.first, self.watermark, last.timestamp_ms, known.frames + frames)
            return
        self._end_uncovered()
        since = first if self.watermark < first.end else last
        self.uncovered = Uncovered(since, self.watermark, last.timestamp_ms, frames if since is first else 1)

    def _end_uncovered(self) -> None:
        if self.head is None:
            self.head = self.uncovered
        elif self.uncovered is not None and self.uncovered.is_still:
            self.past_standstills.append(self.uncovered)
        self.uncovered = None

    def forget(self) -> None:
        """Forget epoch and times: frames are missing, so the next one may begin an epoch without its epoch frame."""
        self.last_epoch = self.epoch = NO_EPOCH
        self._end_uncovered()
        self._forget_times()

    def _forget_times(self) -> None:
        self.time_ms = 0
        self._before_ms = 0
        self._timed = None
        self.begins = False

    def _new_epoch(self, frame: Frame) -> Iterator[Problem]:
        self.last_epoch = frame.epoch
        if frame.epoch < self.epoch:
            yield problem_of(frame, FindingKind.EPOCH, f"epoch {frame.epoch} after epoch {self.epoch}")
        elif frame.epoch > self.epoch:
            if self.epoch != NO_EPOCH:
                if frame.kind != FrameKind.EPOCH:
                    yield problem_of(
                        frame, FindingKind.EPOCH_FRAME, f"epoch {frame.epoch} does not begin with its epoch frame"
                    )
                self._forget_times()
                self._end_uncovered()
            self.epoch = frame.epoch

    def _ahead(self, frame: Frame) -> Problem:
        ahead_s = (frame.timestamp_ms - self.until_ms) // 1000
        return problem_of(frame, FindingKind.TIME, f"its time is more than {ahead_s} s ahead of the audit's clock")

    def _time(self, frame: Frame) -> Iterator[Problem]:
        """Check a frame's time. If it is too far back, the time before the last one decides which one is wrong."""
        now_ms = frame.timestamp_ms
        if now_ms > self.until_ms:
            yield self._ahead(frame)
            return
        if now_ms >= self.time_ms - BACK_MS_MAX:
            self._before_ms = self.time_ms
            self.time_ms = now_ms
            self._timed = frame
            return
        if self._timed is not None and self._before_ms and now_ms >= self._before_ms - BACK_MS_MAX:
            text = f"its time is {(self.time_ms - now_ms) // 1000} s ahead of the next frame's"
            yield problem_of(self._timed, FindingKind.TIME, text)
        elif self._timed is not None and self.begins and not self._before_ms and self.doubted is None:
            self.doubted = self._timed, frame
        else:
            yield problem_of(
                frame, FindingKind.TIME, f"its time is {(self.time_ms - now_ms) // 1000} s before the last frame's"
            )
        self.time_ms = now_ms
        self._timed = frame


NO_FRAME = "no frame stands here"


class PieceBorders:
    """Rules at the borders of a copy's pieces; takes their `piece` facts in order.

    Args:
        until_ms: upper bound of all frames' times.
        begins: offsets where reading began; the bytes before were not read.
        before: last frame verified by an earlier run, if reading continues after it.
    """

    def __init__(self, until_ms: int, begins: Collection[int], before: Frame | None = None) -> None:
        self._until_ms = until_ms
        self._begins = frozenset(begins)
        self._before = before
        self._end: int | None = None
        self._chain = 0
        self._frame_order = FrameOrder(until_ms)

    def enter(self, piece: int) -> None:
        """Begin a piece."""
        if piece not in self._begins:
            return
        self._frame_order = FrameOrder(self._until_ms)
        self._end = None
        if self._before is not None and piece == self._before.end:
            for _ in self._frame_order.check(self._before):
                """An earlier run has reported its problems."""
            self._end = piece
            self._chain = self._before.chain

    def judge(self, row: dict[str, Any]) -> Iterator[Problem]:
        """Take the frames of a piece; yield problems at its beginning, or at the end of the piece before."""
        first, frame_order = decode_header(row["header"], 0, row["offset"], None), row["frame_order"]
        is_next = self._end in (None, row["offset"]) and frame_order.epoch <= self._frame_order.epoch
        uncovered = self._frame_order.uncovered if is_next else None
        if row["offset"] == 0 and first.kind != FrameKind.EPOCH:
            yield problem_of(first, FindingKind.EPOCH_FRAME, f"epoch {first.epoch} does not begin with its epoch frame")
        if self._end is not None:
            yield from self._continues(row, first)
        yield from self._frame_order.check(first)
        for frame in frame_order.doubted or ():
            if frame.offset != first.offset:
                yield from (problem for problem in self._frame_order.check(frame) if problem.what is FindingKind.TIME)
        self._frame_order.uncovered = uncovered  # the first frame counts in its own piece
        for standstill in frame_order.standstills(uncovered):
            seconds = (standstill.last_ms - standstill.first.timestamp_ms) // 1000
            text = f"{standstill.frames - 1} messages frames of {seconds} s after it state no watermark behind it"
            yield problem_of(standstill.first, FindingKind.WATERMARK, text)
        self._end = row["end"]
        self._chain = row["chain"]
        self._frame_order = frame_order.after(self._frame_order)

    def _continues(self, row: dict[str, Any], first: Frame) -> Iterator[Problem]:
        if row["offset"] != self._end:
            yield Problem(self._end or 0, row["offset"], NO_FRAME)
            self._frame_order.forget()
            return
        try:
            decode_header(row["header"], 0, row["offset"], self._chain)
        except CorruptFrame as error:
            yield problem_of(first, FindingKind.CHAIN, error.reason)
