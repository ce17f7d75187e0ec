"""Core. Upkeep of the schedule and the log: filing frames, rebuilding the schedule, carrying old messages.

A master files frames that are on its own disk. A slave files frames below the high watermark, which are never cut. If a
master that filed more is cut when it becomes a slave, its schedule is rebuilt from its log. That is rare, and a slave's
schedule is not urgent. A schedule that is damaged or behind the log's start is rebuilt too. So is one with messages of
a log segment that was given up: they could never be read, and batches would wait for them.

A log segment may be deleted when none of its messages pends. Messages that still pend in the oldest segment, when that
is old or the log is large, are carried: written again at the end. Carrying stops while half of the log or more pends,
so a log of long delays is not copied in vain.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np

from qmq.codec import Buffer
from qmq.delayserver.decisions import Counters, Decisions
from qmq.delayserver.schedule import DamagedSchedule, Filed, Flush, Schedule, State
from qmq.delayserver.schedule.record import Messages, Records, read_messages
from qmq.delayserver.settings import DelaySettings
from qmq.errors import CorruptFrame, LogError
from qmq.log import MessageLog
from qmq.log.frame import Frame
from qmq.log.segments import Chunk
from qmq.replication.mastership import Mastership
from qmq.replication.ports import QUIET_MS, Host
from qmq.replication.retention import Due, old_segments

log = logging.getLogger(__name__)

PASS_BYTES = 1 << 20
PASS_MESSAGES = 4_000
"""Limits of frames filed without a pause: about 10 ms in which the loop serves nothing else. A dispatch frame has 16
bytes per message, and a slave looks each up: a mebibyte of them blocked its confirmations for 50 ms.
"""
READ_BYTES = 4 << 20


class ScheduleFiler:
    """Filer of log frames into the schedule, which it also flushes. Made by main; used on the loop.

    Args:
        make: opens the schedule for a log that starts at this offset.
        discard: deletes the schedule's files.
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
        self._log = message_log
        self._host = host
        self._found_damage = found_damage
        self._make = make
        self._discard = discard
        self.schedule = make(message_log.start)
        self.on_filed: Callable[[Filed], None] | None = None
        """Called with the changes of each frame."""
        self.on_rebuilt: Callable[[], None] | None = None
        """Called after the schedule was replaced."""
        self.is_reading = self._is_flushing = False
        self._rebuild_reason = ""
        """Reason to rebuild the schedule after the current flush; empty without one."""
        self._log_start = -1
        """Start of the log at the last check for pending messages before it."""

    def reaches(self, end: int) -> bool:
        """Return whether exactly the frames before `end` are filed."""
        return bool(self.schedule.filed_end >= end) and not self._is_held_up

    @property
    def is_waiting(self) -> bool:
        """Whether filing is blocked by a read, by a flush before a rebuild, or by a repair."""
        return self._is_held_up or self._log.damage is not None

    @property
    def _is_held_up(self) -> bool:
        """Whether filing is blocked by a read, or by a flush before a rebuild."""
        return self.is_reading or bool(self._rebuild_reason)

    def quiet_ms(self) -> int:
        """Return for how long a slave has nothing to file unless a frame comes in."""
        return QUIET_MS if self.reaches(self.known_end) else 0

    @property
    def known_end(self) -> int:
        """Offset up to which a slave may file: acknowledged frames are never cut."""
        known = min(self._log.state.high_watermark, self._log.flushed_end)
        return max(known, self.schedule.filed_end)

    def go_on(self, end: int) -> None:
        """File frames before `end`, as many as one pass allows; call again until `reaches` is true."""
        message_log, filed_end = self._log, self.schedule.filed_end
        if self.is_waiting:
            return
        if message_log.start != self._log_start:
            self._log_start = message_log.start
            if self.schedule.pending_from() < message_log.start:
                self.rebuild(f"messages pend that were given up with the log before {message_log.start}")
                return
        if filed_end == end:
            return
        if not self._is_our_history(filed_end):
            self.rebuild(
                f"its end, {filed_end}, is not in the history of this log, which begins at {message_log.start}"
            )
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

    def rebuild_damaged(self, schedule: Schedule, problem: DamagedSchedule) -> None:
        """Rebuild a schedule that a search found damaged, unless it and its files were replaced meanwhile."""
        if schedule is self.schedule:
            self.rebuild(str(problem))

    def rebuild(self, why: str) -> None:
        """Rebuild the schedule from the first frame of the log, once no flush is running."""
        if self._is_flushing:
            self._rebuild_reason = why
            return
        log.warning("schedule is rebuilt from the log: %s", why)
        self._rebuild_reason = ""
        self._discard()
        self.schedule = self._make(self._log.start)
        if self.on_rebuilt is not None:
            self.on_rebuilt()
        self._host.pass_soon()

    def _file(self, frame: Frame, body: Buffer) -> bool:
        """File one frame; return False if a file of the schedule is damaged."""
        try:
            filed = self.schedule.file(frame, body)
        except DamagedSchedule as problem:
            self.rebuild(str(problem))
            return False
        if self.on_filed is not None:
            self.on_filed(filed)
        return True

    def _read(self, end: int) -> None:
        """Read frames that are no longer in memory, a few MiB at a time."""
        message_log, schedule, begin = self._log, self.schedule, self.schedule.filed_end
        if begin >= end:
            return  # not written yet
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
        """Start a flush if enough has changed."""
        if self._is_flushing:
            return
        schedule = self.schedule
        if (flush := schedule.take_flush(now_ms)) is not None:
            self._is_flushing = True
            self._host.read(flush.perform, lambda result: self._flushed(schedule, flush, result))

    def _flushed(self, schedule: Schedule, flush: Flush, result: object) -> None:
        self._is_flushing = False
        if isinstance(result, DamagedSchedule) or self._rebuild_reason:
            self.rebuild(self._rebuild_reason or str(result))
        elif isinstance(result, LogError):
            raise result  # the disk failed
        elif schedule is self.schedule:
            schedule.flushed(flush)

    def stop(self, now_ms: int) -> None:
        """Flush everything, so that a restart need not file it again. Blocks."""
        if not self._is_flushing and (flush := self.schedule.take_flush(now_ms, stop=True)) is not None:
            flush.perform()


BORDER_BYTES = 4 << 20
"""Resolution of the schedule's position of pending messages: a little more is carried."""
CARRIED_MESSAGES = 2000
CARRIED_BYTES = 1 << 20
"""Carried at a time, ten times a second: producers hardly notice 10 MB/s."""
CARRY_MS = 100


class DelayRetention:
    """Retention of a delay server's log. Made by main; called by the service every few seconds, on master and slave."""

    def __init__(self, filing: Callable[[], ScheduleFiler], settings: DelaySettings) -> None:
        self._filing = filing
        self._settings = settings

    def due(self, message_log: MessageLog, now_ms: int) -> Due | None:
        """Return the end of the segments that are old and done. The frames that settled them precede the retention
        frame, so nothing is deleted because of a frame that may still be cut.
        """
        due, done_end = None, -1
        for _, end, rule in old_segments(message_log, self._settings, now_ms):
            done_end = self.used_from(message_log) if done_end < 0 else done_end
            if end > done_end:
                break
            due = Due(end, rule, {})
        return due

    def used_from(self, message_log: MessageLog) -> int:
        """Return the first offset that this copy still needs: a master sends pending messages from there."""
        return self._filing().schedule.pending_from()


class Carrier:
    """Carrier of old pending messages. Made by the master; ends with the mastership."""

    def __init__(
        self,
        mastership: Mastership,
        filing: ScheduleFiler,
        decisions: Decisions,
        counters: Counters,
        settings: DelaySettings,
    ) -> None:
        self._mastership = mastership
        self._filing = filing
        self._decisions = decisions
        self._counters = counters
        self._settings = settings
        self._left: Records | None = None
        self._is_looking = False
        self._next_ms = 0

    @property
    def is_idle(self) -> bool:
        """Whether nothing is left to carry."""
        return not self._is_looking and (self._left is None or not len(self._left))

    def go_on(self, now_ms: int) -> None:
        """Carry some messages if the oldest segment is old. `now_ms` is monotonic."""
        if self._is_looking or now_ms < self._next_ms:
            return
        self._next_ms = now_ms + CARRY_MS
        if self._left is not None and len(self._left):
            self._carry()
        elif (end := self._due_end()) is not None:
            self._look(end)
        else:
            self._next_ms = now_ms + 50 * CARRY_MS

    def _due_end(self) -> int | None:
        """Return the end of the oldest segment if its messages must be carried, else None."""
        message_log, schedule = self._mastership.log, self._filing.schedule
        oldest = next(old_segments(message_log, self._settings, self._mastership.host.now_ms()), None)
        if oldest is None or schedule.pending_from() >= oldest[1]:
            return None
        return oldest[1] if 2 * schedule.pending_bytes < message_log.end - message_log.start else None

    def _look(self, end: int) -> None:
        schedule = self._filing.schedule
        self._is_looking = True

        def done(result: Records | LogError) -> None:
            self._is_looking = False
            if schedule is not self._filing.schedule:
                return
            if isinstance(result, DamagedSchedule):
                self._filing.rebuild_damaged(schedule, result)
            elif not isinstance(result, LogError):
                self._left = result

        self._mastership.host.read(schedule.pending_below(end + BORDER_BYTES), done)

    def _carry(self) -> None:
        """Read the next messages; once read, those that still pend are written again."""
        assert self._left is not None
        fits = max(1, int(np.searchsorted(np.cumsum(self._left["size"][:CARRIED_MESSAGES]), CARRIED_BYTES)))
        some, self._left = self._left[:fits], self._left[fits:]
        schedule, message_log, wanted = self._filing.schedule, self._mastership.log, Messages.of(some)
        self._is_looking = True

        def done(result: list[bytes] | LogError) -> None:
            self._is_looking = False
            if isinstance(result, CorruptFrame):
                self._mastership.found_damage(result)
            elif isinstance(result, LogError) or schedule is not self._filing.schedule:
                return
            elif self._mastership.may_progress:
                try:
                    self._write(some, result)
                except DamagedSchedule as problem:
                    self._filing.rebuild_damaged(schedule, problem)

        self._mastership.host.read(lambda: read_messages(message_log, wanted), done)

    def _write(self, records: Records, messages: list[bytes]) -> None:
        schedule = self._filing.schedule
        by_subject: dict[int, list[int]] = {}
        states = schedule.states_of(records)
        for at, (number, subject) in enumerate(zip(records["number"].tolist(), records["subject"].tolist())):
            if not self._decisions.names(number) and states.get(number) == State.PENDING:
                by_subject.setdefault(subject, []).append(at)
        for subject, places in by_subject.items():
            self._decisions.carry(schedule.subjects[subject], records[places], [messages[at] for at in places])
            self._counters.carried_messages += len(places)

    def forget(self) -> None:
        """Forget the list: the schedule was replaced."""
        self._left = None
