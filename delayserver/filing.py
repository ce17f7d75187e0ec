"""Core. The schedule follows the log: frame by frame, from memory, or from disk after a restart.

A master files what is on its own disk, a slave what lies below the high watermark, which nothing ever cuts. If a master
that filed more is cut when it becomes a slave, its schedule is made anew from its log; that is rare, and nobody waits
for a slave's schedule. One that is damaged, or behind the log's start, is made anew as well. So is one with what went
with a segment that was given up: nobody could read these messages, and batches would wait for them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from qmq.codec import Buffer
from qmq.delayserver.schedule import DamagedSchedule, Filed, Flush, Schedule
from qmq.errors import CorruptFrame, LogError
from qmq.log import MessageLog
from qmq.log.frame import Frame
from qmq.log.segments import Chunk
from qmq.replication.ports import QUIET_MS, Host

log = logging.getLogger(__name__)

PASS_BYTES = 1 << 20
PASS_MESSAGES = 4_000
"""Frames filed at a time, up to either: about 10 ms in which nobody else is served. A frame that dispatches messages
names each with 16 bytes, and a slave looks each up: a mebibyte of these took a twentieth of a second, in which it
confirmed nothing."""
READ_BYTES = 4 << 20


class Filing:
    """Made by main; used on the loop.

    Args:
        make: opens the schedule for a log that starts at this offset; `discard`: deletes its files.
    """

    def __init__(
        self,
        message_log: MessageLog,
        host: Host,
        *,
        make: Callable[[int], Schedule],
        discard: Callable[[], None],
        found_damage: Callable[[CorruptFrame], None],
    ) -> None:
        self._log, self._host, self._found_damage = message_log, host, found_damage
        self._make, self._discard = make, discard
        self.schedule = make(message_log.start)
        self.told: Callable[[Filed], None] | None = None
        """Called with what each frame changed."""
        self.anew: Callable[[], None] | None = None
        """Called when the schedule is another one, which begins to follow."""
        self.is_reading = self._is_flushing = False
        self._why_anew = ""
        """Why the schedule is to be made anew as soon as nothing is written."""
        self._log_start = -1
        """Where the log began when it was last looked whether all is in it that pends."""

    def reaches(self, end: int) -> bool:
        """Return whether all frames before `end` are filed, and nothing else: what was cut is forgotten before."""
        return bool(self.schedule.filed_end >= end) and not self._is_held_up

    @property
    def is_waiting(self) -> bool:
        """Whether nothing can be filed just now: a read is out, a flush before the schedule is made anew, a repair."""
        return self._is_held_up or self._log.damage is not None

    @property
    def _is_held_up(self) -> bool:
        """Whether a read is out, or a flush before the schedule is made anew."""
        return self.is_reading or bool(self._why_anew)

    def quiet_ms(self) -> int:
        """Return for how long a slave has nothing to file, unless something comes."""
        return QUIET_MS if self.reaches(self.known_end) else 0

    @property
    def known_end(self) -> int:
        """What a slave may file up to: nothing cuts what was acknowledged."""
        known = min(self._log.state.high_watermark, self._log.flushed_end)
        return max(known, self.schedule.filed_end)

    def go_on(self, end: int) -> None:
        """File frames before `end`, as many as one pass allows; call again while `reaches` says no."""
        message_log, filed_end = self._log, self.schedule.filed_end
        if self.is_waiting:
            return
        if message_log.start != self._log_start:
            self._log_start = message_log.start
            if self.schedule.pending_from() < message_log.start:
                self.start_anew(f"messages pend that were given up with the log before {message_log.start}")
                return
        if filed_end == end:
            return
        if not self._is_our_history(filed_end):
            self.start_anew(f"it had {filed_end}, the log begins at {message_log.start}")
            return
        stop, messages = min(end, filed_end + PASS_BYTES), 0
        while filed_end < stop and messages < PASS_MESSAGES:
            entry = message_log.tail_body(filed_end)
            if entry is None:
                self._read(min(end, message_log.flushed_end))
                return
            if not self._file(*entry):
                return
            filed_end = entry[0].end
            messages += entry[0].count

    def _is_our_history(self, filed_end: int) -> bool:
        log = self._log
        if not log.start <= filed_end <= log.end:
            return False
        return filed_end == log.start or log.chain_is(filed_end, self.schedule.filed_chain)

    def is_damaged(self, schedule: Schedule, problem: DamagedSchedule) -> None:
        """A question to a schedule met damage. What asked one that was replaced meanwhile found its files deleted."""
        if schedule is self.schedule:
            self.start_anew(str(problem))

    def start_anew(self, why: str) -> None:
        """Make the schedule from the log, from its first frame on, once nobody writes into its files."""
        if self._is_flushing:
            self._why_anew = why
            return
        log.warning("schedule is made anew from the log: %s", why)
        self._why_anew = ""
        self._discard()
        self.schedule = self._make(self._log.start)
        if self.anew is not None:
            self.anew()
        self._host.pass_soon()

    def _file(self, frame: Frame, body: Buffer) -> bool:
        """File one frame; return False if a file of the schedule that had to be read is damaged."""
        try:
            filed = self.schedule.file(frame, body)
        except DamagedSchedule as problem:
            self.start_anew(str(problem))
            return False
        if self.told is not None:
            self.told(filed)
        return True

    def _read(self, end: int) -> None:
        """What is not in memory any more is read from disk, a few MiB at a time."""
        message_log, schedule, begin = self._log, self.schedule, self.schedule.filed_end
        if begin >= end:
            return  # on its way to disk
        self.is_reading = True

        def done(result: Chunk | LogError) -> None:
            self.is_reading = False
            if isinstance(result, CorruptFrame):
                self._found_damage(result)
            elif not isinstance(result, LogError) and schedule is self.schedule and begin == schedule.filed_end:
                data = memoryview(result.data)
                for frame in result.frames:
                    body = data[frame.offset - begin + frame.body_at : frame.end - begin]
                    if not self._file(frame, body):
                        break
            self._host.pass_soon()

        self._host.read(lambda: message_log.stored.read(begin, end, READ_BYTES), done)

    def keep(self, now_ms: int) -> None:
        """Write down what was filed, now and then."""
        if self._is_flushing:
            return
        schedule = self.schedule
        if (flush := schedule.take_flush(now_ms)) is not None:
            self._is_flushing = True
            self._host.read(flush.perform, lambda result: self._flushed(schedule, flush, result))

    def _flushed(self, schedule: Schedule, flush: Flush, result: object) -> None:
        self._is_flushing = False
        if isinstance(result, DamagedSchedule) or self._why_anew:
            self.start_anew(self._why_anew or str(result))
        elif isinstance(result, LogError):
            raise result  # the disk failed
        elif schedule is self.schedule:
            schedule.flushed(flush)

    def stop(self, now_ms: int) -> None:
        """Write down everything that was filed, so that a restart need not file it again. Blocks."""
        if not self._is_flushing and (flush := self.schedule.take_flush(now_ms, stop=True)) is not None:
            flush.perform()
