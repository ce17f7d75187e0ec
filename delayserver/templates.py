"""Core. Templates of recurring schedules, their cron expressions, and the messages they send.

A template is a pending message of its subject, due at its next occurrence; nothing else about it is stored. Its
reserved properties (qmq.message: RECUR_…) hold name, owner, cron expression and time zone. Its label, `LABEL`, marks it
without decoding: no other message has it, for 10 tags set at most 10 bits of 32.

An occurrence is the same message with an id of its own, created and due at that time, with the label of its tags and
order key. Its id is made of subject, name and time: a consumer that handles each id once handles each occurrence once,
even if two delay groups have the same schedule.

A cron expression has five fields, read by the wall clock of a time zone; cronsim evaluates it on a calendar without
time zones. Changes to and from summer time are handled here, as in Debian's cron:

    fixed      neither minute nor hour begins with `*` ("30 2 * * *"): once for each wall-clock time that matches. A
               time that the clock skips is due right after the gap; of one that it shows twice, the first counts.
    repeated   minute or hour begins with `*` ("*/10 * * * *"): whenever the clock shows a time that matches. The hour
               that is skipped has none; the hour that comes twice has them twice.

So an occurrence is a moment, the next one does not depend on the start of the search, and moments only ascend.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from hashlib import blake2b
from itertools import islice
from typing import NamedTuple
from zoneinfo import ZoneInfo

from cronsim import CronSim, CronSimError

from qmq.codec import FLAG_DELAYED, decode_envelope, decode_properties, join_batch, label_of, with_properties
from qmq.errors import InvalidMessage, InvalidRequest, MessageTooLarge
from qmq.message import DELAY_KEY, ORDER_KEY, RECUR_CRON, RECUR_NAME, RECUR_OWNER, RECUR_SKIPPED, RECUR_ZONE
from qmq.message_sizes import RECURRING_BYTES_MAX
from qmq.remoting.commands import RECUR_NAME_BYTES_MAX, Recur, RecurringSchedule
from qmq.server.producing import check_messages
from qmq.subjects import NAME_BYTES_MAX, check_name

EXPRESSION_CHARS_MAX = 200
SKIPPED_MAX = 1000
"""Limit of the count of missed occurrences."""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_BEGIN = datetime(2000, 1, 1)
_DAY, _SECOND, _MS = timedelta(days=1), timedelta(seconds=1), timedelta(milliseconds=1)
_WINDOWS_DAYS = (1 / 24, 1, 8, 32, 366)
_OF_A_MACHINE = ("localtime", "posixrules")
"""Names of files that mean another zone on each machine."""


class Cron:
    """Cron expression in a time zone; immutable, usable on any thread."""

    def __init__(self, expression: str, timezone: str) -> None:
        """Check both arguments; raises InvalidRequest, which names the fault."""
        self.expression = expression
        self.timezone = timezone
        self._zone = zone_of(timezone)
        fields = expression.split()
        if len(expression) > EXPRESSION_CHARS_MAX or len(fields) != 5:
            raise InvalidRequest(
                f"cron expression {expression[:EXPRESSION_CHARS_MAX]!r} has {len(fields)} fields: write five, "
                "minute hour day-of-month month day-of-week, for instance '0 8 * * MON-FRI'"
            )
        try:
            CronSim(expression, _BEGIN)
        except (CronSimError, AssertionError, TypeError, ValueError) as error:
            raise InvalidRequest(f"cron expression {expression!r}: {error or 'it is invalid'}") from None
        self._is_fixed = not (fields[0].startswith("*") or fields[1].startswith("*"))

    def next_ms(self, after_ms: int) -> int:
        """Return the first occurrence after a moment; raises InvalidRequest if there is none in 50 years."""
        for moment in self._after(after_ms):
            return moment
        raise InvalidRequest(f"cron expression {self.expression!r} is never due: no such day in 50 years")

    def latest(self, due_ms: int, now_ms: int) -> tuple[int, int]:
        """Return the last occurrence up to `now_ms`, and how many are skipped: those before it from `due_ms` on, which
        is an occurrence.

        The count ends at `SKIPPED_MAX`.
        """
        last, missed = due_ms, 0
        for moment in islice(self._after(due_ms), SKIPPED_MAX):
            if moment > now_ms:
                return last, missed
            last, missed = moment, missed + 1
        return max(last, self._last(now_ms)), missed

    def _last(self, now_ms: int) -> int:
        """Search back over growing windows: few steps, however long the outage was."""
        for days in _WINDOWS_DAYS:
            last = 0
            for moment in self._after(now_ms - int(days * 86_400_000)):
                if moment > now_ms:
                    break
                last = moment
            if last:
                return last
        return 0

    def _after(self, after_ms: int) -> Iterator[int]:
        after = _EPOCH + after_ms * _MS
        moments = self._fixed(after) if self._is_fixed else self._repeated(after)
        return ((moment - _EPOCH) // _MS for moment in moments)

    def _fixed(self, after: datetime) -> Iterator[datetime]:
        """Yield one moment for each wall-clock time that matches."""
        last = after
        for wall in CronSim(self.expression, self._wall(after)):
            moment = self._moment(wall)
            if moment > last:  # else it is the second showing of an hour, or the end of the same gap
                last = moment
                yield moment

    def _moment(self, wall: datetime) -> datetime:
        """Return when the clock first shows this time; if it skips it, the moment of the skip."""
        moment = wall.replace(tzinfo=self._zone, fold=0).astimezone(UTC)
        if self._wall(moment) == wall:
            return moment
        earlier = wall.replace(tzinfo=self._zone, fold=1).astimezone(UTC)
        return self._change(earlier, moment) or moment

    def _repeated(self, after: datetime) -> Iterator[datetime]:
        """Yield each moment at which the clock shows a time that matches, across changes of its offset."""
        at, wall, is_over = after, self._wall(after), False
        while not is_over:
            offset, is_over = self._offset(at), True
            for shown in CronSim(self.expression, wall):
                moment, near = shown.replace(tzinfo=UTC) - offset, at + 2 * _DAY
                change = self._change(at, min(moment, near))
                if change is not None:  # from the change on, the clock shows other times
                    at, wall, is_over = change, self._wall(change) - _SECOND, False
                    break
                if moment > near:  # the days before it show no such time at any offset
                    at, is_over = moment - _DAY, False
                    wall = self._wall(at)
                    break
                at = moment
                yield moment

    # Wall clock.

    def _wall(self, moment: datetime) -> datetime:
        return moment.astimezone(self._zone).replace(tzinfo=None, fold=0)

    def _offset(self, moment: datetime) -> timedelta:
        return moment.astimezone(self._zone).utcoffset() or timedelta()

    def _change(self, begin: datetime, end: datetime) -> datetime | None:
        """Return the first moment in (begin, end] with another offset than `begin`, to the second; None if there is
        none.
        """
        offset, low = self._offset(begin), begin
        while low < end:
            high = min(low + _DAY, end)
            if self._offset(high) != offset:
                break
            low = high
        else:
            return None
        while high - low > _SECOND:
            middle = low + (high - low) // 2
            low, high = (low, middle) if self._offset(middle) != offset else (middle, high)
        return high.replace(microsecond=0)


def zone_of(name: str) -> ZoneInfo:
    """Return a time zone by its name in the IANA database; raises InvalidRequest."""
    try:
        if name in _OF_A_MACHINE:
            raise ValueError
        return ZoneInfo(name)
    except (ValueError, OSError, KeyError):  # ZoneInfoNotFoundError is a KeyError
        raise InvalidRequest(
            f"time zone {name[:100]!r} is unknown here: write 'UTC', or a name such as 'Europe/Berlin'"
        ) from None


LABEL = (1 << 32) - 1
"""Label of templates: the bits of all tags, and no order key."""
ID_PREFIX = "recurring:"
"""Prefix of a template's id, before its name, so that a cancel by id can delete it."""
_TIMES = struct.Struct(">qq")
_LENGTH = struct.Struct(">H")
_SUBJECT_AT = 17


class Template(NamedTuple):
    """Recurring schedule, parsed from its message."""

    subject: str
    name: str
    owner: str
    expression: str
    timezone: str
    message: bytes

    def cron(self) -> Cron:
        """Return the cron expression; raises InvalidRequest if this machine lacks its time zone or cannot parse it."""
        return Cron(self.expression, self.timezone)

    def due(self, due_ms: int) -> RecurringSchedule:
        return RecurringSchedule(self.subject, self.name, self.owner, self.expression, self.timezone, due_ms)

    def is_same_as(self, other: Template) -> bool:
        """Return whether both send the same message at the same times; creation times do not count."""
        return self.message[_SUBJECT_AT:] == other.message[_SUBJECT_AT:]

    def occurrence(self, at_ms: int, skipped: int) -> bytes:
        """Return the message of the occurrence at `at_ms`, with the number of occurrences skipped before it."""
        message = _with_id(self.message, occurrence_id(self.subject, self.name, at_ms))
        message = message[:1] + _TIMES.pack(at_ms, at_ms) + message[_SUBJECT_AT:]
        return with_properties(message, {RECUR_SKIPPED: str(skipped)}) if skipped else message

    def occurrence_label(self) -> int:
        envelope = decode_envelope(self.message)
        return label_of(envelope.tags, decode_properties(self.message).get(ORDER_KEY))


def new_template(recur: Recur, *, message_bytes_max: int) -> Template:
    """Build the template of a put request.

    Raises:
        InvalidName, InvalidRequest, InvalidMessage: the fault, and the remedy.
    """
    check_name("name of a recurring schedule", recur.name)
    _check_length("name of a recurring schedule", recur.name, RECUR_NAME_BYTES_MAX)
    check_name("owner of a recurring schedule", recur.owner)
    _check_length("owner of a recurring schedule", recur.owner, NAME_BYTES_MAX)
    Cron(recur.cron, recur.timezone)
    if (envelope := decode_envelope(recur.message)).subject != recur.subject:
        raise InvalidMessage(f"the message is of subject {envelope.subject!r}, not {recur.subject!r}")
    if DELAY_KEY in decode_properties(recur.message):
        raise InvalidMessage("the message of a recurring schedule has no key for cancelling: delete it by its name")
    own = {RECUR_NAME: recur.name, RECUR_OWNER: recur.owner, RECUR_CRON: recur.cron, RECUR_ZONE: recur.timezone}
    message = with_properties(_with_id(recur.message, ID_PREFIX + recur.name), own)
    message = bytes((message[0] | FLAG_DELAYED,)) + message[1:]
    template = Template(recur.subject, recur.name, recur.owner, recur.cron, recur.timezone, message)
    occurrence = template.occurrence(0, SKIPPED_MAX)
    most = min(message_bytes_max, RECURRING_BYTES_MAX)
    if (size := len(occurrence)) > most:
        why = "(message_bytes_max)" if most == message_bytes_max else "for a recurring schedule: shorten its message"
        raise MessageTooLarge(f"an occurrence has {size} bytes, more than {most} {why}")
    for _, fault in check_messages(join_batch([occurrence]), 1, message_bytes_max):
        # Among the faults are too many tags, which could set every bit of LABEL.
        raise InvalidMessage(f"brokers would refuse its occurrences: {fault}")
    return template


def read_template(message: bytes, subject: str) -> Template:
    """Parse a template of `subject` from its stored message; raises InvalidMessage if it is none.

    The subject must match: otherwise a producer of one subject could send occurrences to any other.
    """
    envelope = decode_envelope(message)
    if envelope.subject != subject:
        raise InvalidMessage(f"the message is of subject {envelope.subject[:50]!r}, not {subject!r}")
    found = decode_properties(message)
    name, owner, expression, zone = (
        found.get(property, "") for property in (RECUR_NAME, RECUR_OWNER, RECUR_CRON, RECUR_ZONE)
    )
    if not (name and owner and expression and zone):
        raise InvalidMessage("the message is no recurring schedule")
    return Template(envelope.subject, name, owner, expression, zone, message)


def occurrence_id(subject: str, name: str, at_ms: int) -> str:
    """Return the id of an occurrence: readable, at most 98 bytes."""
    at = (_EPOCH + timedelta(milliseconds=at_ms)).isoformat(timespec="milliseconds").removesuffix("+00:00")
    return f"{name}@{at}Z.{blake2b(subject.encode(), digest_size=6).hexdigest()}"


def _check_length(noun: str, text: str, most: int) -> None:
    if len(text.encode()) > most:
        raise InvalidRequest(f"{noun} {text[:20]!r}… is longer than {most} bytes")


def _with_id(message: bytes, id: str) -> bytes:
    """Return the message with another id."""
    (length,) = _LENGTH.unpack_from(message, _SUBJECT_AT)
    at = _SUBJECT_AT + 2 + length
    (length,) = _LENGTH.unpack_from(message, at)
    data = id.encode()
    return message[:at] + _LENGTH.pack(len(data)) + data + message[at + 2 + length :]
