"""Core. Acknowledgement gate: raises the high watermark and answers the requests that wait for it.

Made by a master for one mastership; used on its loop.

Keeps I1.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from qmq.errors import BrokenInvariant, QmqError
from qmq.replication.identity import Point
from qmq.types import Epoch

Answer = Callable[[QmqError | None], None]
"""Callback, called once: with None when the frames are safe, or with an error if this mastership ends before."""


class _Progress(NamedTuple):
    end: int
    data_end: int
    answer: Answer


@dataclass(slots=True)
class AckGate:
    """Answers of a master that wait until `min_copies` disks, the master's included, have their frames.

    `too_few_in_sync` is true while fewer copies are in sync. Then no new message is acknowledged (P3). Progress on
    messages below the high watermark is then answered as soon as the master's own disk has it, and the answer is marked
    so.
    """

    epoch: Epoch
    min_copies: int = 2
    high_watermark: int = 0
    """Offset below which frames are fsynced on `min_copies` copies; never decreases (I6)."""
    counts_from: int = 0
    """End of this mastership's epoch frame. Frames of older epochs are acknowledged only with it: until then, a copy
    that lacks them may still be promoted (Raft, figure 8).
    """
    flushed_end: int = 0
    """Offset below which the master's own disk has every frame."""
    matched_end: int = 0
    """Offset below which enough slaves fsynced all frames, with the master's chain there; 0 with too few slaves."""
    flushed_chain: int | None = None
    """Chain at `flushed_end`; None at first if the mastership begins while a write is under way."""
    matched_chain: int = 0
    high_chain: int | None = None
    """Chain at the high watermark, or None if this mastership has not raised it yet."""
    too_few_in_sync: bool = True
    _matched: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Slave in sync -> its matched end and the chain there."""
    _stored: deque[tuple[int, Answer]] = field(default_factory=deque)
    _progress: deque[_Progress] = field(default_factory=deque)

    def stored(self, end: int, answer: Answer) -> None:
        """Call `answer` when enough disks have all before `end`, which may be below the ends of earlier calls."""
        if end <= self.high_watermark:  # earlier calls may wait for a slave without limit
            answer(None)
            return
        self._stored.append((end, answer))

    def progress(self, end: int, data_end: int, answer: Answer) -> None:
        """Call `answer` when the progress frame before `end` and the messages before `data_end` are safe."""
        waiting = _Progress(max(end, self._progress[-1].end) if self._progress else end, data_end, answer)
        if self._is_safe(waiting):  # at once: no later frame may come to call it
            answer(None)
            return
        self._progress.append(waiting)

    def _is_safe(self, waiting: _Progress) -> bool:
        if waiting.end <= self.high_watermark:
            return True
        return self.too_few_in_sync and waiting.end <= self.flushed_end and waiting.data_end <= self.high_watermark

    def flushed(self, end: int, chain: int) -> None:
        """Record the master's fsync of everything before `end`, where its chain is `chain`."""
        if end >= self.flushed_end:
            self.flushed_end = end
            self.flushed_chain = chain
        self._release()

    def confirmed(self, end: int, chain: int, slave: str = "") -> None:
        """Record a slave's fsync; the caller has checked epoch and chain (qmq.replication.follower)."""
        if end >= self._matched[slave][0]:
            self._matched[slave] = end, chain
        self._rank()

    def slave_gone(self, slave: str = "") -> None:
        """Forget a slave's matched end: it must match again after it returns."""
        self._matched.pop(slave, None)
        self._rank()

    def slave_matched(self, end: int, chain: int, slave: str = "") -> None:
        """Record that a slave's log equals the master's up to `end`, and count the slave from now on."""
        self._matched[slave] = end, chain
        self._rank()

    def _rank(self) -> None:
        """Compute `matched_end`: with the slaves sorted by matched end, highest first, it is that of the last slave
        needed.
        """
        needed = self.min_copies - 1
        self.too_few_in_sync = len(self._matched) < needed
        if self.too_few_in_sync:
            self.matched_end = 0
        else:
            self.matched_end, self.matched_chain = sorted(self._matched.values(), reverse=True)[needed - 1]
        self._release()

    def begins(self, high_watermark: int) -> None:
        """Begin the mastership. Frames restored by slaves may state a higher watermark than the master's disk."""
        self.high_watermark = max(self.high_watermark, high_watermark)

    @property
    def point(self) -> Point | None:
        """The acknowledged point, or None if this mastership has acknowledged nothing yet."""
        return None if self.high_chain is None else Point(self.epoch, self.high_watermark, self.high_chain)

    @property
    def waiting(self) -> int:
        return len(self._stored) + len(self._progress)

    def refuse_unsafe(self, error: QmqError) -> None:
        """Answer requests for messages above the high watermark with `error`."""
        unsafe = [waiting for waiting in self._progress if waiting.data_end > self.high_watermark]
        self._progress = deque(waiting for waiting in self._progress if waiting.data_end <= self.high_watermark)
        for waiting in unsafe:
            waiting.answer(error)

    def abandon(self, *, stored: QmqError, progress: QmqError) -> None:
        """End the mastership: answer all waiting requests."""
        stored_answers, self._stored = self._stored, deque()
        progress_answers, self._progress = self._progress, deque()
        for _, answer in stored_answers:
            answer(stored)
        for waiting in progress_answers:
            waiting.answer(progress)

    def _release(self) -> None:
        safe = min(self.flushed_end, self.matched_end)
        if safe > self.high_watermark and safe >= self.counts_from:
            self.high_watermark = safe
            self.high_chain = self.flushed_chain if self.flushed_end <= self.matched_end else self.matched_chain
        high = self.high_watermark
        if high > self.flushed_end > 0:
            raise BrokenInvariant("I6: the high watermark is beyond the flushed end of this copy")
        stored, progress = self._stored, self._progress
        while stored and stored[0][0] <= high:
            stored.popleft()[1](None)
        while progress and progress[0].end <= high:
            progress.popleft().answer(None)
        if self.too_few_in_sync:
            ready: list[_Progress] = []
            self._progress = deque()
            for waiting in progress:
                (ready if self._is_safe(waiting) else self._progress).append(waiting)
            for waiting in ready:
                waiting.answer(None)
