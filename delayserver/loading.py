"""Core. The next segments of the schedule come onto the wheel, piece by piece, before anything in them is due.

What is filed or cancelled meanwhile comes from the schedule by itself, as soon as it is asked for a segment's first
piece. Pieces come in the order of the log: nothing goes off the wheel before all is loaded that is due earlier.

When more is loaded than may be, what is due last is dropped again, and left by the schedule from then on. It comes when
most of the rest is gone: then the segments are read once more.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from qmq.delayserver.filing import Filing
from qmq.delayserver.messages import Records
from qmq.delayserver.schedule import DamagedSchedule
from qmq.delayserver.settings import DelaySettings
from qmq.delayserver.wheel import Wheel
from qmq.errors import LogError
from qmq.replication.ports import Host

log = logging.getLogger(__name__)


class Loading:
    """Made by the master, for one wheel and one schedule. `loaded` is told of each piece."""

    def __init__(
        self, filing: Filing, wheel: Wheel, host: Host, settings: DelaySettings, loaded: Callable[[Records], None]
    ) -> None:
        self._loaded = loaded
        self._filing, self._schedule, self._wheel, self._host = filing, filing.schedule, wheel, host
        self._ahead_ms = int(settings.load_ahead_minutes * 60_000)
        self._most = self._full = settings.loaded_messages_max
        """`_full`: when some are dropped. More than may be, if most of them are due at one moment."""
        self._left_from_ms = self._kept_until_ms = 0
        """What is due from when on was dropped last; what is due before is not dropped any more."""
        self._is_reading = False
        self.taken_ms = 0
        """What is due by then was taken, or is next."""

    def take(self, now_ms: int, most: int) -> Records:
        """Take what is due off the wheel, the earliest first, as far as everything is loaded that is due before."""
        due_ms = min(now_ms, self._schedule.loaded_until_ms - 1)
        self.taken_ms = max(self.taken_ms, due_ms)  # a clock that was wrong may have stepped back
        return self._wheel.take(due_ms, most)

    @property
    def due(self) -> int:
        """Messages that are due and still on the wheel."""
        return self._wheel.due(self.taken_ms)

    @property
    def all_taken(self) -> bool:
        """Whether none of them is."""
        next_ms = self._wheel.next_due_ms
        return next_ms is None or next_ms > self.taken_ms

    @property
    def is_idle(self) -> bool:
        """Whether all is loaded that is to be by now."""
        return not self._is_reading

    def go_on(self, now_ms: int) -> None:
        """Load one piece more, if there is one to load and room for it. `now_ms` is the mastership's clock."""
        if self._filing.schedule is not self._schedule:
            return
        if self._wheel.rows > self._full:
            self._drop()
        if self._is_reading:
            return
        piece = self._schedule.next_piece(now_ms + self._ahead_ms)
        if piece is None:
            if self._wheel.rows <= self._most // 4 and self._schedule.go_further():
                log.warning("wheel is loading again messages=%d", len(self._wheel))
                self._full = self._most
                self._kept_until_ms = self._left_from_ms + 1  # else many of one moment come and go for ever
                self._host.pass_soon()
            return
        self._is_reading = True

        def done(result: Records | LogError) -> None:
            self._is_reading = False
            try:
                if isinstance(result, LogError):
                    raise result
                records = self._schedule.handed(piece, result)
                self._wheel.add(records)
                self._loaded(records)
            except DamagedSchedule as problem:
                self._filing.is_damaged(self._schedule, problem)
            self._host.pass_soon()

        self._host.read(piece.read, done)

    def _drop(self) -> None:
        """Drop a quarter, so that this is rare; nothing that is due already, and no moment for the second time."""
        count = len(self._wheel)
        kept_until_ms = max(self.taken_ms + 1, self._kept_until_ms)
        self._left_from_ms = self._wheel.cut(self._most // 4 * 3, kept_until_ms)
        self._schedule.leave(self._left_from_ms)
        self._full = max(self._most, len(self._wheel) + self._most // 4)
        log.warning("wheel is full messages=%d left for later=%d", count, count - len(self._wheel))
