"""Core. How long a delay server keeps its log: nothing in it may pend any more.

What still pends in the oldest segment, when that is old or the log is large, is carried: written again at the end. That
is done only while less than half of the log pends, so that a log of long delays is not copied in vain.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np

from qmq.delayserver.counters import Counters
from qmq.delayserver.decisions import Decisions
from qmq.delayserver.filing import Filing
from qmq.delayserver.messages import Messages, Records, read_messages
from qmq.delayserver.schedule import DamagedSchedule, State
from qmq.delayserver.settings import DelaySettings
from qmq.errors import CorruptFrame, LogError
from qmq.log import MessageLog
from qmq.replication.mastership import Mastership
from qmq.replication.retention import Due, old_segments

log = logging.getLogger(__name__)

BORDER_BYTES = 4 << 20
"""The schedule knows so exactly where in the log something pends: a little more is carried."""
CARRIED_MESSAGES = 2000
CARRIED_BYTES = 1 << 20
"""Carried at a time, ten times a second: producers notice 10 MB/s hardly."""
CARRY_MS = 100


class Keeping:
    """Made by main; asked by the service every few seconds, on master and slave."""

    def __init__(self, filing: Callable[[], Filing], settings: DelaySettings) -> None:
        self._filing, self._settings = filing, settings

    def due(self, message_log: MessageLog, now_ms: int) -> Due | None:
        """Return up to where all is old and done. What made it so stands in the log before the frame that says it, so
        nothing is deleted because of what may still be cut."""
        due, done_end = None, -1
        for _, end, rule in old_segments(message_log, self._settings, now_ms):
            done_end = self.used_from(message_log) if done_end < 0 else done_end
            if end > done_end:
                break
            due = Due(end, rule, {})
        return due

    def used_from(self, message_log: MessageLog) -> int:
        """A copy files its log for itself, and a master sends what pends from it."""
        return self._filing().schedule.pending_from()


class Carrying:
    """Made by the master; ends with the mastership."""

    def __init__(
        self, mastership: Mastership, filing: Filing, decisions: Decisions, counters: Counters, settings: DelaySettings
    ) -> None:
        self._mastership, self._filing, self._decisions = mastership, filing, decisions
        self._counters, self._settings = counters, settings
        self._left: Records | None = None
        self._is_looking = False
        self._next_ms = 0

    @property
    def is_idle(self) -> bool:
        """Whether nothing was found that has to be carried."""
        return not self._is_looking and (self._left is None or not len(self._left))

    def go_on(self, now_ms: int) -> None:
        """Carry some messages, if the oldest segment is old. `now_ms` is monotonic."""
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
        """Return the end of the oldest segment, if it is old and its messages are to be carried."""
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
                self._filing.is_damaged(schedule, result)
            elif not isinstance(result, LogError):
                self._left = result

        self._mastership.host.read(schedule.pending_below(end + BORDER_BYTES), done)

    def _carry(self) -> None:
        """Read the next ones; they are written when they were read, unless something became of them meanwhile."""
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
                    self._filing.is_damaged(schedule, problem)

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
        """The schedule is another one."""
        self._left = None
