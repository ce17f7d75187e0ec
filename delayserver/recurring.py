"""Core. Recurring schedules: put, deleted, listed; and what happens when one is due.

A template that comes off the wheel is read; then one frame says both: its occurrence, which is a delayed message like
any other, due now, and the template again, due at its next time, in place of itself. A crash or a swap leaves both or
none of it, so each occurrence is sent once, and the next one exists. Of occurrences that were missed, the latest is
sent: however long nobody was there, a schedule never sends more than one message for it.

Requests are handled one after the other, each when the schedule has what the one before has written; so one name of a
subject never means two templates.
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
from qmq.delayserver.messages import Messages, Records, read_messages
from qmq.delayserver.schedule import RECORD, DamagedSchedule, Schedule, id_hash
from qmq.delayserver.settings import DelaySettings
from qmq.delayserver.templates import ID_PREFIX, LABEL, Template, new_template, read_template
from qmq.delayserver.upkeep import Filing
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
"""Templates read and put forward together, on a thread: about 10 ms of its time."""
FIRED_BYTES = 1 << 20
REST_MS = 1000
"""When a template is tried again whose occurrence cannot be written now."""
UNREADABLE_MS = 300_000
"""When one is tried again that this machine cannot read: its time zone may be installed by then."""
AGAIN_MS = 50
REQUESTS_MAX = 1000
"""That wait at the same time."""


class _Firing(NamedTuple):
    """What a template that is due says: the occurrence at `at_ms`, and when it is due next."""

    template: Template
    at_ms: int
    skipped: int
    next_ms: int


class _Asked(NamedTuple):
    recur: Recur
    template: Template | None
    link: Link
    packet: Packet


class _Waiting:
    """A template that is due and not put forward yet."""

    __slots__ = ("record", "next_ms", "is_unreadable")

    def __init__(self, record: Any) -> None:
        self.record, self.next_ms, self.is_unreadable = record, 0, False


class _Found(NamedTuple):
    """A template that pends, or did when it was looked for."""

    record: Any
    template: Template

    @property
    def schedule(self) -> RecurringSchedule:
        return self.template.due(int(self.record["due"]))


class _Looked(NamedTuple):
    """How many templates a subject has; those that were asked for."""

    count: int  # type: ignore[assignment]  # shadows tuple.count
    found: list[_Found]


class Recurring:
    """Made by the master; ends with the mastership. `not_recurring` takes what is due and has the label by mistake."""

    def __init__(
        self,
        mastership: Mastership,
        filing: Filing,
        decisions: Decisions,
        counters: Counters,
        settings: DelaySettings,
        not_recurring: Callable[[Records], None],
    ) -> None:
        self._mastership, self._filing, self._decisions, self._counters = mastership, filing, decisions, counters
        self._settings, self._not_recurring = settings, not_recurring
        self._due: dict[int, _Waiting] = {}
        """By number of the template."""
        self._is_firing = self._is_looking = False
        self._asked: deque[_Asked] = deque()
        self._look_end, self._look_ms = 0, 0
        """What has to be filed, and how late it has to be, before the next look."""

    # When one is due.

    def due(self, records: Records) -> None:
        """Take templates that are due."""
        for record in records:
            self._due.setdefault(int(record["number"]), _Waiting(record))

    def remove(self, numbers: npt.NDArray[np.uint64]) -> None:
        """They were deleted, or others stand in their place."""
        if self._due:
            for number in numbers.tolist():
                self._due.pop(number, None)

    def forget(self) -> None:
        """The schedule is another one; what is due comes again."""
        self._due.clear()

    @property
    def waiting(self) -> int:
        """Templates that are due and not put forward yet, but for those that this machine cannot read."""
        return sum(not one.is_unreadable for one in self._due.values())

    @property
    def is_idle(self) -> bool:
        """Whether nothing is due or asked."""
        return not (self._due or self._asked)

    def go_on(self, now_ms: int) -> None:
        """Put forward what is due, and look for what was asked. `now_ms` is monotonic."""
        if self._due and not self._is_firing:
            ready = [one for one in self._due.values() if one.next_ms <= now_ms and self._is_safe(one.record)]
            if ready:
                sizes = accumulate(int(one.record["size"]) for one in ready[:FIRED_AT_ONCE])
                self._fire(ready[: max(1, sum(size <= FIRED_BYTES for size in sizes))])
        if self._asked and not self._is_looking and now_ms >= self._look_ms and self._filing.reaches(self._look_end):
            self._look()

    def _is_safe(self, record: Any) -> bool:
        """Without a slave, what follows from what both copies had goes on; what only we have has to wait (P3)."""
        return not self._mastership.gate.too_few_in_sync or bool(self._decisions.is_with_both(np.array([record])).all())

    def _fire(self, ready: Sequence[_Waiting]) -> None:
        message_log, now_ms = self._mastership.log, self._mastership.retry_ms()
        records = np.array([one.record for one in ready])
        wanted, dues = Messages.of(records), records["due"].tolist()
        subjects = [self._filing.schedule.subjects[subject] for subject in records["subject"].tolist()]
        self._is_firing = True

        def job() -> list[_Firing | QmqError]:
            messages = read_messages(message_log, wanted)
            return [_firing(*one, now_ms) for one in zip(messages, subjects, dues)]

        def done(result: list[_Firing | QmqError] | LogError) -> None:
            self._is_firing = False
            if isinstance(result, LogError):
                self._not_read(ready, result)
            else:
                self._fired(ready, result)

        self._mastership.host.read(job, done)

    def _not_read(self, ready: Sequence[_Waiting], error: LogError) -> None:
        """Our copy is damaged there: it is repaired from the other one, then these go on."""
        if isinstance(error, CorruptFrame):
            self._mastership.found_damage(error)
        log.error("recurring schedules not read count=%d: %s", len(ready), error)
        self._rest(ready, REST_MS)

    def _rest(self, waiting: Sequence[_Waiting], ms: int) -> None:
        for one in waiting:
            one.next_ms = self._mastership.host.monotonic_ms() + ms

    def _fired(self, ready: Sequence[_Waiting], firings: Sequence[_Firing | QmqError]) -> None:
        """Write down what may be written: a frame per subject."""
        by_subject: dict[str, list[tuple[Any, _Firing]]] = {}
        for one, firing in zip(ready, firings):
            number = int(one.record["number"])
            if self._due.get(number) is not one or self._decisions.names(number):
                self._due.pop(number, None)  # deleted or replaced meanwhile
            elif isinstance(firing, InvalidMessage):
                del self._due[number]
                self._not_recurring(np.array([one.record]))
            elif isinstance(firing, QmqError):
                one.is_unreadable = True
                log.error("recurring schedule cannot go on; delete it, or put it anew: %s", firing)
                self._rest([one], UNREADABLE_MS)
            elif not (self._mastership.may_progress and self._is_safe(one.record)):
                self._rest([one], REST_MS)
            else:
                del self._due[number]
                by_subject.setdefault(firing.template.subject, []).append((one.record, firing))
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
                    "recurring schedule skips what was missed subject=%s name=%s occurrences=%d",
                    subject,
                    template.name,
                    skipped,
                )
        self._decisions.recur(subject, np.array([record for record, _ in due]), recurrences)
        self._counters.recurred_messages += len(due)

    # Requests.

    def request(self, link: Link, packet: Packet) -> None:
        """Put, delete or list; raises QmqError for what can be refused at once."""
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
        """What an operator marked takes nothing new; but one may take schedules out of it."""
        if recur.action is RecurAction.DELETE:
            self._mastership.readonly.check_change(self._mastership.group, recur.subject)

    def _look(self) -> None:
        """Find the templates of the subject that is asked about."""
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
                return  # the mastership is over
            try:
                is_late = filed_end < self._decisions.templates_end(asked.recur.subject)
                if self._is_vain(schedule, result) or is_late or schedule is not self._filing.schedule:
                    self._again()
                elif isinstance(result, LogError):
                    raise NotServed("this copy is damaged and being repaired; ask again in a moment")
                else:
                    self._decide(asked, result)
            except QmqError as error:
                asked.link.refuse(asked.packet, error)
                self._next()

        mastership.host.read(job, done)

    def _is_vain(self, schedule: Schedule, result: _Looked | LogError) -> bool:
        """Return whether what was found has to be looked for again, as it was changed meanwhile."""
        if isinstance(result, DamagedSchedule):
            self._filing.is_damaged(schedule, result)
        elif isinstance(result, CorruptFrame):
            if result.offset < self._mastership.log.start:
                return True  # carried, and its segment went
            self._mastership.found_damage(result)
        return False

    def _again(self) -> None:
        self._look_end = self._mastership.log.end
        self._look_ms = self._mastership.host.monotonic_ms() + AGAIN_MS
        self._mastership.host.pass_soon()

    def _next(self) -> None:
        self._asked.popleft()
        self._look_end, self._look_ms = self._mastership.log.end, 0
        self._mastership.host.pass_soon()

    def _decide(self, asked: _Asked, looked: _Looked) -> None:
        """Nothing has changed these templates since they were looked for; raises QmqError."""
        recur = asked.recur
        self._mastership.check_may_progress()
        self._check_deletes(recur)
        named = [one for one in looked.found if recur.name in ("", one.template.name)]
        if recur.action is RecurAction.LIST:
            body = commands.encode_recurring(sorted(one.schedule for one in named))
            self._mastership.answer_when_safe(asked.link, asked.packet, body)
            self._next()
        elif recur.action is RecurAction.DELETE:
            self._delete(asked, named)
        else:
            self._put(asked, named, looked.count)

    def _is_about_to_fire(self, found: _Found) -> bool:
        """Return whether it is due, and what it sends is not written down yet: that comes before it changes or goes."""
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
        self._answer(asked, [one.schedule for one in named])

    def _put(self, asked: _Asked, named: Sequence[_Found], count: int) -> None:
        """Put it, unless it is there: applications put the same as they start, also while nobody may write."""
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
                "let one of them send what several do"
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
        """Answer when both disks have everything written by now."""
        body = commands.encode_recurring(schedules)

        def answer(error: QmqError | None) -> None:
            if error is None:
                asked.link.answer(asked.packet, body)
            else:
                asked.link.refuse(asked.packet, error)

        self._mastership.gate.stored(self._mastership.log.end, answer)
        self._next()

    def step_down(self) -> None:
        """The mastership is over; the next master has all that was written."""
        while self._asked:
            asked = self._asked.popleft()
            asked.link.refuse(
                asked.packet, NotMaster(f"{self._mastership.group} has a newer master: fetch the route again")
            )
        self._due.clear()


def _firing(message: bytes, subject: str, due_ms: int, now_ms: int) -> _Firing | QmqError:
    """Say what is to be sent by now. Runs on a thread."""
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
    return np.array([one.record for one in found], RECORD)
