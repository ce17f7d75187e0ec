"""Core. Recurring schedules: put, delete and list requests, and the work when a schedule is due.

When a template leaves the wheel, one frame writes both its occurrence, an ordinary delayed message due now, and the
template again, due at its next time. A crash or a swap leaves both or neither, so each occurrence is sent once and the
next one exists. Of missed occurrences only the latest is sent: an outage of any length costs at most one message per
schedule.

Requests are handled one after another, each when the schedule has filed the previous one's frames. So a name of a
subject never has two templates.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from qmq.delayserver.decisions import Counters, Decisions, Recurrence
from qmq.delayserver.schedule import RECORD, DamagedSchedule, Schedule, id_hash
from qmq.delayserver.schedule.record import Messages, Records, read_messages
from qmq.delayserver.settings import DelaySettings
from qmq.delayserver.templates import ID_PREFIX, LABEL, Template, new_template, read_template
from qmq.delayserver.upkeep import ScheduleFiler
from qmq.errors import (
    CorruptFrame,
    InvalidMessage,
    InvalidRequest,
    LogError,
    NotMaster,
    NotServed,
    Overloaded,
    QmqError,
)
from qmq.remoting import commands
from qmq.remoting.commands import Recur, RecurAction, RecurringSchedule
from qmq.remoting.packet import Packet
from qmq.replication.mastership import Mastership
from qmq.replication.ports import Link
from qmq.subjects import check_subject

log = logging.getLogger(__name__)

FIRED_AT_ONCE = 100
"""Templates fired together, on a thread: about 10 ms of its time."""
FIRED_BYTES = 1 << 20
REST_MS = 1000
"""Retry pause of a template while its occurrence cannot be written."""
UNREADABLE_MS = 300_000
"""Retry pause of a template that this machine cannot read: its time zone may be installed by then."""
AGAIN_MS = 50
"""Pause before a search is repeated."""
REQUESTS_MAX = 1000
"""Requests waiting at the same time."""


class _Firing(NamedTuple):
    """Firing of a due template: the occurrence at `at_ms`, and the next due time."""

    template: Template
    at_ms: int
    skipped: int
    next_ms: int


class _Asked(NamedTuple):
    """A waiting request. `template`: the schedule to put; None for a delete or a list."""

    recur: Recur
    template: Template | None
    link: Link
    packet: Packet


class _Waiting:
    """Due template that has not fired yet."""

    __slots__ = ("record", "next_ms", "is_unreadable")

    def __init__(self, record: Any) -> None:
        self.record = record
        self.next_ms = 0
        self.is_unreadable = False


class _Found(NamedTuple):
    """Template that was pending when the search ran."""

    record: Any
    template: Template

    @property
    def schedule(self) -> RecurringSchedule:
        return self.template.due(int(self.record["due"]))


class _Looked(NamedTuple):
    """Number of a subject's templates, and the requested ones."""

    count: int  # type: ignore[assignment]  # shadows tuple.count
    found: list[_Found]


class Recurring:
    """Handler of recurring schedules. Made by the master; ends with the mastership. `not_recurring` takes due messages
    that have the label by mistake.
    """

    def __init__(
        self,
        mastership: Mastership,
        filing: ScheduleFiler,
        decisions: Decisions,
        counters: Counters,
        settings: DelaySettings,
        not_recurring: Callable[[Records], None],
    ) -> None:
        self._mastership = mastership
        self._filing = filing
        self._decisions = decisions
        self._counters = counters
        self._settings = settings
        self._not_recurring = not_recurring
        self._due: dict[int, _Waiting] = {}
        """By number of the template."""
        self._is_firing = self._is_looking = False
        self._asked: deque[_Asked] = deque()
        self._look_end = 0
        self._look_ms = 0
        """Offset that must be filed, and time that must pass, before the next search."""

    # Due templates.

    def due(self, records: Records) -> None:
        """Add due templates."""
        for record in records:
            self._due.setdefault(int(record["number"]), _Waiting(record))

    def remove(self, numbers: npt.NDArray[np.uint64]) -> None:
        """Remove templates that were deleted or replaced."""
        if self._due:
            for number in numbers.tolist():
                self._due.pop(number, None)

    def forget(self) -> None:
        """Forget due templates: a rebuilt schedule delivers them again."""
        self._due.clear()

    @property
    def waiting(self) -> int:
        """Due templates that have not fired, without unreadable ones."""
        return sum(not template.is_unreadable for template in self._due.values())

    @property
    def is_idle(self) -> bool:
        """Whether no template is due and no request waits."""
        return not (self._due or self._asked)

    def go_on(self, now_ms: int) -> None:
        """Fire due templates, and search for the next request. `now_ms` is monotonic."""
        if self._due and not self._is_firing:
            ready = [
                template
                for template in self._due.values()
                if template.next_ms <= now_ms and self._is_safe(template.record)
            ]
            if ready:
                sizes = accumulate(int(template.record["size"]) for template in ready[:FIRED_AT_ONCE])
                self._fire(ready[: max(1, sum(size <= FIRED_BYTES for size in sizes))])
        if self._asked and not self._is_looking and now_ms >= self._look_ms and self._filing.reaches(self._look_end):
            self._look()

    def _is_safe(self, record: Any) -> bool:
        """Return whether a template may fire. Without a slave it must follow from frames on both copies (P3)."""
        return not self._mastership.gate.too_few_in_sync or bool(self._decisions.is_with_both(np.array([record])).all())

    def _fire(self, ready: Sequence[_Waiting]) -> None:
        message_log, now_ms = self._mastership.log, self._mastership.retry_ms()
        records = np.array([template.record for template in ready])
        wanted, dues = Messages.of(records), records["due"].tolist()
        subjects = [self._filing.schedule.subjects[subject] for subject in records["subject"].tolist()]
        self._is_firing = True

        def job() -> list[_Firing | QmqError]:
            messages = read_messages(message_log, wanted)
            return [_firing(*values, now_ms) for values in zip(messages, subjects, dues)]

        def done(result: list[_Firing | QmqError] | LogError) -> None:
            self._is_firing = False
            if isinstance(result, LogError):
                self._not_read(ready, result)
            else:
                self._fired(ready, result)

        self._mastership.host.read(job, done)

    def _not_read(self, ready: Sequence[_Waiting], error: LogError) -> None:
        """Report damage: the copy is repaired, then the templates are retried."""
        if isinstance(error, CorruptFrame):
            self._mastership.found_damage(error)
        log.error("recurring schedules not read count=%d: %s", len(ready), error)
        self._rest(ready, REST_MS)

    def _rest(self, waiting: Sequence[_Waiting], ms: int) -> None:
        for template in waiting:
            template.next_ms = self._mastership.host.monotonic_ms() + ms

    def _fired(self, ready: Sequence[_Waiting], firings: Sequence[_Firing | QmqError]) -> None:
        """Write one frame of occurrences per subject."""
        by_subject: dict[str, list[tuple[Any, _Firing]]] = {}
        for template, firing in zip(ready, firings):
            number = int(template.record["number"])
            if self._due.get(number) is not template or self._decisions.names(number):
                self._due.pop(number, None)  # deleted or replaced meanwhile
            elif isinstance(firing, InvalidMessage):
                del self._due[number]
                self._not_recurring(np.array([template.record]))
            elif isinstance(firing, QmqError):
                template.is_unreadable = True
                log.error("recurring schedule cannot continue; delete it, or put it again: %s", firing)
                self._rest([template], UNREADABLE_MS)
            elif not (self._mastership.may_progress and self._is_safe(template.record)):
                self._rest([template], REST_MS)
            else:
                del self._due[number]
                by_subject.setdefault(firing.template.subject, []).append((template.record, firing))
        for subject, due in by_subject.items():
            self._write(subject, due)

    def _write(self, subject: str, due: Sequence[tuple[Any, _Firing]]) -> None:
        recurrences = []
        for _, (template, at_ms, skipped, next_ms) in due:
            occurrence = template.occurrence(at_ms, skipped)
            recurrences.append(Recurrence(template.message, next_ms, occurrence, template.occurrence_label()))
            self._counters.skipped_occurrences += skipped
            if skipped:
                log.warning(
                    "recurring schedule skips missed occurrences subject=%s name=%s occurrences=%d",
                    subject,
                    template.name,
                    skipped,
                )
        self._decisions.recur(subject, np.array([record for record, _ in due]), recurrences)
        self._counters.recurred_messages += len(due)

    # Requests.

    def request(self, link: Link, packet: Packet) -> None:
        """Queue a put, delete or list; raises QmqError for requests that can be refused at once."""
        mastership, recur = self._mastership, commands.decode_recur(packet.body)
        check_subject(recur.subject)
        mastership.check_may_progress()
        self._check_deletes(recur)
        if len(self._asked) >= REQUESTS_MAX:
            raise Overloaded(f"{REQUESTS_MAX} requests about recurring schedules wait already")
        template = None
        if recur.action is RecurAction.PUT:
            template = new_template(recur, message_bytes_max=self._settings.message_bytes_max)
        self._asked.append(_Asked(recur, template, link, packet._replace(body=memoryview(b""))))
        mastership.host.pass_soon()

    def _check_deletes(self, recur: Recur) -> None:
        """Raise if an operator's mark forbids a delete of schedules of the subject."""
        if recur.action is RecurAction.DELETE:
            self._mastership.readonly.check_change(self._mastership.group, recur.subject)

    def _look(self) -> None:
        """Search for the templates of the first request."""
        mastership, schedule, asked = self._mastership, self._filing.schedule, self._asked[0]
        look, message_log = schedule.pending_labelled(asked.recur.subject, LABEL), mastership.log
        filed_end, self._is_looking = schedule.filed_end, True

        def job() -> _Looked:
            records = look()
            count = len(records)
            if asked.recur.name:
                records = records[records["id_hash"] == id_hash(ID_PREFIX + asked.recur.name)]
            messages = read_messages(message_log, Messages.of(records))
            return _Looked(count, list(_templates(records, messages, asked.recur.subject)))

        def done(result: _Looked | LogError) -> None:
            self._is_looking = False
            if not self._asked or self._asked[0] is not asked:
                return  # the mastership has ended
            try:
                is_late = filed_end < self._decisions.templates_end(asked.recur.subject)
                if self._is_vain(schedule, result) or is_late or schedule is not self._filing.schedule:
                    self._again()
                elif isinstance(result, LogError):
                    raise NotServed("this copy is damaged and being repaired; repeat in a moment")
                else:
                    self._decide(asked, result)
            except QmqError as error:
                asked.link.refuse(asked.packet, error)
                self._next()

        mastership.host.read(job, done)

    def _is_vain(self, schedule: Schedule, result: _Looked | LogError) -> bool:
        """Return whether the search must be repeated: the log or the schedule changed meanwhile."""
        if isinstance(result, DamagedSchedule):
            self._filing.rebuild_damaged(schedule, result)
        elif isinstance(result, CorruptFrame):
            if result.offset < self._mastership.log.start:
                return True  # carried, and its segment was deleted
            self._mastership.found_damage(result)
        return False

    def _again(self) -> None:
        self._look_end = self._mastership.log.end
        self._look_ms = self._mastership.host.monotonic_ms() + AGAIN_MS
        self._mastership.host.pass_soon()

    def _next(self) -> None:
        self._asked.popleft()
        self._look_end = self._mastership.log.end
        self._look_ms = 0
        self._mastership.host.pass_soon()

    def _decide(self, asked: _Asked, looked: _Looked) -> None:
        """Handle a request; its templates have not changed since the search. Raises QmqError."""
        recur = asked.recur
        self._mastership.check_may_progress()
        self._check_deletes(recur)
        named = [template for template in looked.found if recur.name in ("", template.template.name)]
        if recur.action is RecurAction.LIST:
            body = commands.encode_recurring(sorted(template.schedule for template in named))
            self._mastership.answer_when_safe(asked.link, asked.packet, body)
            self._next()
        elif recur.action is RecurAction.DELETE:
            self._delete(asked, named)
        else:
            self._put(asked, named, looked.count)

    def _is_about_to_fire(self, found: _Found) -> bool:
        """Return whether a template is due and its occurrence is not written: it must fire before it is changed or
        deleted.
        """
        waiting = self._due.get(int(found.record["number"]))
        if waiting is not None and waiting.is_unreadable:
            return False
        return bool(int(found.record["due"]) <= self._mastership.retry_ms())

    def _delete(self, asked: _Asked, named: Sequence[_Found]) -> None:
        if any(map(self._is_about_to_fire, named)):
            self._again()
            return
        if named:
            self._decisions.cancel(asked.recur.subject, _records(named))
        self._answer(asked, [template.schedule for template in named])

    def _put(self, asked: _Asked, named: Sequence[_Found], count: int) -> None:
        """Put a schedule, unless the same one exists: applications repeat the put at each start, even while writes are
        refused.
        """
        mastership, template, subject = self._mastership, asked.template, asked.recur.subject
        assert template is not None
        if len(named) == 1 and named[0].template.is_same_as(template) and self._is_safe(named[0].record):
            mastership.answer_when_safe(asked.link, asked.packet, commands.encode_recurring([named[0].schedule]))
            self._next()
            return
        mastership.readonly.check(mastership.group, subject)
        if not named and count >= self._settings.recurring_max:
            raise InvalidRequest(
                f"{subject!r} has {count} recurring schedules, and may have no more (recurring_max): delete some, or "
                "let one of them send the messages of several"
            )
        if any(map(self._is_about_to_fire, named)):
            self._again()
            return
        due_ms = template.cron().next_ms(mastership.retry_ms())
        if named[1:]:
            self._decisions.cancel(subject, _records(named[1:]))
        self._decisions.template(subject, _records(named[:1]), template.message, due_ms)
        self._answer(asked, [template.due(due_ms)])

    def _answer(self, asked: _Asked, schedules: Sequence[RecurringSchedule]) -> None:
        """Answer when both disks have everything written so far."""
        body = commands.encode_recurring(schedules)

        def answer(error: QmqError | None) -> None:
            if error is None:
                asked.link.answer(asked.packet, body)
            else:
                asked.link.refuse(asked.packet, error)

        self._mastership.gate.stored(self._mastership.log.end, answer)
        self._next()

    def step_down(self) -> None:
        """End the mastership: refuse all requests; the next master has all written frames."""
        while self._asked:
            asked = self._asked.popleft()
            asked.link.refuse(
                asked.packet, NotMaster(f"{self._mastership.group} has a newer master: fetch the route again")
            )
        self._due.clear()


def _firing(message: bytes, subject: str, due_ms: int, now_ms: int) -> _Firing | QmqError:
    """Compute the occurrence of a template. Runs on a thread."""
    try:
        template = read_template(message, subject)
        cron = template.cron()
        at_ms, skipped = cron.latest(due_ms, now_ms)
        return _Firing(template, at_ms, skipped, cron.next_ms(max(at_ms, now_ms)))
    except (InvalidMessage, InvalidRequest) as error:
        return error


def _templates(records: Records, messages: Sequence[bytes], subject: str) -> Iterator[_Found]:
    for record, message in zip(records, messages):
        try:
            yield _Found(record, read_template(message, subject))
        except InvalidMessage:
            continue  # it has the label by mistake


def _records(found: Sequence[_Found]) -> Records:
    return np.array([template.record for template in found], RECORD)
