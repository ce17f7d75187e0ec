"""Core. How long a delay server keeps its log: nothing in it may pend any more.

What still pends in the oldest segment, when that is old or the log is large, is carried: written again at the end. That
is done only while less than half of the log pends, so that a log of long delays is not copied in vain.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np

from delayserver.counters import Counters
from delayserver.decisions import Decisions
from delayserver.filing import Filing
from delayserver.messages import Messages, Records, read_messages
from delayserver.schedule import DamagedSchedule, Schedule, State
from delayserver.settings import DelaySettings
from qmq.errors import CorruptFrame, LogError
from qmq.log import MessageLog
from qmq.replication.reign import Reign

log = logging.getLogger(__name__)

HOUR_MS = 3_600_000
BORDER_BYTES = 4 << 20
"""The schedule knows so exactly where in the log something pends: a little more is carried."""
CARRIED_MESSAGES = 2000
CARRIED_BYTES = 1 << 20
"""Carried at a time, ten times a second: producers notice 10 MB/s hardly."""
CARRY_MS = 100


def is_old(message_log: MessageLog, settings: DelaySettings, now_ms: int) -> bool:
    """Return whether the oldest segment may go as far as age and size are concerned.

    Raises:
        CorruptFrame: this copy is damaged.
    """
    if len(message_log.bases) < 2:
        return False
    if message_log.end - message_log.start > settings.retention_bytes:
        return True
    return now_ms - message_log.timestamp_at(message_log.bases[1]) > settings.retention_hours * HOUR_MS


class Keeping:
    """Made by main; asked by the service (`qmq.server.service.Keeper`), on master and slave."""

    def __init__(self, filing: Callable[[], Filing], settings: DelaySettings) -> None:
        self._filing, self._settings = filing, settings

        self._done: tuple[Schedule, int, int] | None = None
        """(schedule, end of the oldest segment, what was filed when it was first seen that all in it is done)"""

    def may_drop(self, message_log: MessageLog, now_ms: int) -> bool:
        """Return whether all in the oldest segment is done by what both copies have: what a master alone wrote may be
        cut, and then these messages pend again.

        Raises:
            CorruptFrame: this copy is damaged.
        """
        schedule, end = self._filing().schedule, message_log.bases[1]
        if schedule.filed_end < end or schedule.pending_from() < end:
            return False
        if self._done is None or self._done[0] is not schedule or self._done[1] != end:
            self._done = schedule, end, schedule.filed_end
        return self._done[2] <= message_log.state.high_watermark and is_old(message_log, self._settings, now_ms)

    def dropped(self, message_log: MessageLog) -> None:
        """Nothing in it was needed."""


class Carrying:
    """Made by the master; ends with the reign."""

    def __init__(
        self, reign: Reign, filing: Filing, decisions: Decisions, counters: Counters, settings: DelaySettings
    ) -> None:
        self._reign, self._filing, self._decisions = reign, filing, decisions
        self._counters, self._settings = counters, settings
        self._left: Records | None = None
        self._is_looking = False
        self._next_ms = 0

    def go_on(self, now_ms: int) -> None:
        """Carry some messages, if the oldest segment is old. `now_ms` is monotonic."""
        if self._is_looking or now_ms < self._next_ms:
            return
        self._next_ms = now_ms + CARRY_MS
        if self._left is not None and len(self._left):
            self._carry()
        elif self._is_due():
            self._look()
        else:
            self._next_ms = now_ms + 50 * CARRY_MS

    def _is_due(self) -> bool:
        reign, message_log, schedule = self._reign, self._reign.log, self._filing.schedule
        try:
            if not is_old(message_log, self._settings, reign.host.now_ms()):
                return False
        except CorruptFrame as problem:
            reign.found_damage(problem)
            return False
        return bool(
            schedule.pending_from() < message_log.bases[1]
            and 2 * schedule.pending_bytes < message_log.end - message_log.start
        )  # fmt: skip

    def _look(self) -> None:
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

        self._reign.host.read(schedule.pending_below(self._reign.log.bases[1] + BORDER_BYTES), done)

    def _carry(self) -> None:
        """Read the next ones; they are written when they were read, unless something became of them meanwhile."""
        assert self._left is not None
        fits = max(1, int(np.searchsorted(np.cumsum(self._left["size"][:CARRIED_MESSAGES]), CARRIED_BYTES)))
        some, self._left = self._left[:fits], self._left[fits:]
        schedule, message_log, wanted = self._filing.schedule, self._reign.log, Messages.of(some)
        self._is_looking = True

        def done(result: list[bytes] | LogError) -> None:
            self._is_looking = False
            if isinstance(result, CorruptFrame):
                self._reign.found_damage(result)
            elif isinstance(result, LogError) or schedule is not self._filing.schedule:
                return
            elif self._reign.may_progress:
                try:
                    self._write(some, result)
                except DamagedSchedule as problem:
                    self._filing.is_damaged(schedule, problem)

        self._reign.host.read(lambda: read_messages(message_log, wanted), done)

    def _write(self, records: Records, messages: list[bytes]) -> None:
        schedule = self._filing.schedule
        by_subject: dict[int, list[int]] = {}
        for at, record in enumerate(records):
            if not self._decisions.names(int(record["number"])) and schedule.state_of(record) == State.PENDING:
                by_subject.setdefault(int(record["subject"]), []).append(at)
        for subject, places in by_subject.items():
            self._decisions.carry(schedule.subjects[subject], records[places], [messages[at] for at in places])
            self._counters.carried_messages += len(places)

    def forget(self) -> None:
        """The schedule is another one."""
        self._left = None
