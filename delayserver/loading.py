"""Core. The next segments of the schedule come onto the wheel, piece by piece, before anything in them is due.

What is filed or cancelled meanwhile comes from the schedule by itself, as soon as it is asked for a segment's first
piece.
"""

from __future__ import annotations

import logging

from delayserver.filing import Filing
from delayserver.messages import Records
from delayserver.schedule import DamagedSchedule
from delayserver.settings import DelaySettings
from delayserver.wheel import Wheel
from qmq.errors import LogError
from qmq.replication.ports import Host

log = logging.getLogger(__name__)


class Loading:
    """Made by the master, for one wheel and one schedule."""

    def __init__(self, filing: Filing, wheel: Wheel, host: Host, settings: DelaySettings) -> None:
        self._filing, self._schedule, self._wheel, self._host = filing, filing.schedule, wheel, host
        self._ahead_ms = int(settings.load_ahead_minutes * 60_000)
        self._most = settings.loaded_messages_max
        self._is_reading = False
        self._is_full = False

    def go_on(self, now_ms: int) -> None:
        """Load one piece more, if there is one to load and room for it. `now_ms` is the reign's clock."""
        if self._is_reading or self._filing.schedule is not self._schedule:
            return
        is_full = len(self._wheel) >= self._most and (self._wheel.next_due_ms or 0) <= now_ms + self._ahead_ms
        if is_full != self._is_full:
            self._is_full = is_full
            log.warning("wheel is %s messages=%d", "full" if is_full else "loading again", len(self._wheel))
        if is_full or (piece := self._schedule.next_piece(now_ms + self._ahead_ms)) is None:
            return
        self._is_reading = True

        def done(result: Records | LogError) -> None:
            self._is_reading = False
            try:
                if isinstance(result, LogError):
                    raise result
                self._wheel.add(self._schedule.handed(piece, result))
            except DamagedSchedule as problem:
                if self._filing.schedule is self._schedule:
                    self._filing.start_anew(str(problem))
            self._host.turn_soon()

        self._host.read(piece.read, done)
