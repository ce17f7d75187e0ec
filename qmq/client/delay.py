"""Shell. Delayed messages of a producer: due time, cancel, reschedule, and recurring schedules.

When a delayed message is due, by which key its sender may take it back, and what became of that.
Asks delay groups to take a delayed message back, or to send it at another time.

Both may be asked twice, so a lost answer is asked for again, at the group's next master too. Only a receipt says
which group has a message: without one, all groups are asked, and "unknown" is an answer only when all of them gave it.

Recurring schedules, as a producer puts, deletes and lists them.

A schedule lies in one delay group. Which one, its name says; it stays there as long as that group has it, whatever
groups come and go. So putting one begins by asking all groups: one that does not answer may have it.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Coroutine, Iterable
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from functools import partial
from hashlib import blake2b
from typing import NamedTuple, TypedDict, TypeVar

from qmq.client.batch import Receipt
from qmq.client.sender import Sender
from qmq.codec import delayed_encoder, encode_message, with_properties
from qmq.errors import AccessError, BrokerReadOnly, CallError, InvalidMessage, InvalidRequest, NotServed, QmqError
from qmq.message import DELAY_KEY, Message
from qmq.plain import plain
from qmq.remoting import commands
from qmq.remoting.commands import (
    DELAY_KEY_BYTES_MAX,
    Cancel,
    Command,
    DelayState,
    Recur,
    RecurAction,
    RecurringSchedule,
    Reschedule,
)

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MS = timedelta(milliseconds=1)
DUE_MS_MAX = (datetime.max.replace(tzinfo=UTC) - _EPOCH) // _MS
"""The end of the year 9999. How far off a due time may be is for the delay server to say."""


class Delay(NamedTuple):
    """`due_ms` since 1970 UTC; `key`, if its sender gave one."""

    due_ms: int
    key: str | None

    @property
    def at(self) -> datetime:
        return _EPOCH + self.due_ms * _MS

    def encode(self, message: Message, now_ms: int) -> bytes:
        """Encode a message with its due time and key; raises InvalidMessage."""
        data = delayed_encoder(message.subject, now_ms, self.due_ms)(message)
        return data if self.key is None else with_properties(data, {DELAY_KEY: self.key})


class DelayArguments(TypedDict, total=False):
    """What `Producer.send` and its siblings take, for those that pass it on."""

    delay: float | timedelta | None
    at: datetime | None
    key: str | None


class DelayOutcome(StrEnum):
    """What became of the wish to take a delayed message back, or to send it at another time."""

    CANCELLED = "cancelled"
    """It is not sent. Also if an earlier call has cancelled it."""
    RESCHEDULED = "rescheduled"
    """It is due at the new time."""
    SENT = "sent"
    """Too late: it was given to a broker, or is on its way there. Nothing was changed."""
    UNKNOWN = "unknown"
    """No delay server has such a message, or it was sent or cancelled so long ago that it is forgotten."""


def delay_of(delay: float | timedelta | None, at: datetime | None, key: str | None, *, now_ms: int) -> Delay:
    """Read the arguments of a call.

    Raises:
        InvalidRequest: says which of them is wrong, and what to write instead.
    """
    due_ms = due_of_call(delay, at, now_ms=now_ms)
    return Delay(due_ms, None if key is None else check_key(key))


def due_of_call(delay: float | timedelta | None, at: datetime | None, *, now_ms: int) -> int:
    """Return when a message is due; raises InvalidRequest."""
    if (delay is None) == (at is None):
        raise InvalidRequest("a delayed message has delay= (seconds, or a timedelta) or at= (a datetime), one of them")
    if at is not None:
        return _moment(at)
    if isinstance(delay, timedelta):
        delay = delay.total_seconds()
    if not isinstance(delay, int | float) or isinstance(delay, bool) or not 0 <= delay < math.inf:
        raise InvalidRequest(f"a delay is 0 seconds or more, or a timedelta; not {delay!r}")
    if now_ms + delay * 1000 > DUE_MS_MAX:
        raise InvalidRequest(f"a delay of {delay} s ends after the year 9999")
    return now_ms + math.ceil(delay * 1000)


def _moment(at: datetime) -> int:
    if not isinstance(at, datetime):
        raise InvalidRequest(f"at is a datetime with its time zone, not {type(at).__name__}")
    if at.utcoffset() is None:
        raise InvalidRequest(
            f"at={at} has no time zone, so it names no moment: write at.astimezone() if it is this "
            "computer's local time, at.replace(tzinfo=…) if it is another, or datetime.now(UTC) + timedelta(…)"
        )
    return -((_EPOCH - at) // _MS)  # rounded up: never early


def check_key(key: str) -> str:
    """Return a key for cancelling if it is one; raises InvalidRequest."""
    if not isinstance(key, str) or not 0 < len(key.encode("utf-8", "replace")) <= DELAY_KEY_BYTES_MAX:
        raise InvalidRequest(f"a key for cancelling is a word of 1 to {DELAY_KEY_BYTES_MAX} bytes, not {key!r:.50}")
    return plain(key)


class Wanted(NamedTuple):
    """Which messages of a subject a call means: the one of an id, or those of a key; the other is "".

    `group`: the delay group that has it, "" if any may; `due_ms`: about when it is due, 0 if that is not known.
    """

    subject: str
    id: str
    key: str
    group: str = ""
    due_ms: int = 0


def wanted(receipt: Receipt | None, subject: str | None, id: str | None, key: str | None) -> Wanted:
    """Read which message is meant.

    Raises:
        InvalidRequest: the arguments name none, or more than one way; or the message was not delayed.
    """
    if receipt is not None:
        if (subject, id, key) != (None, None, None):
            raise InvalidRequest("a receipt names its message: give it alone, or subject= and id= or key=")
        if receipt.due_ms is None:
            raise InvalidRequest(f"message {receipt.message_id} was not delayed: it was sent at once")
        group = receipt.broker_group if receipt.is_stored else ""  # else some group may have it
        return Wanted(receipt.subject, receipt.message_id, "", group, receipt.due_ms)
    if not subject or bool(id) == bool(key):
        raise InvalidRequest("give the receipt, or subject= and one of id= and key=")
    return Wanted(plain(subject), plain(id) or "", check_key(key) if key else "")


_BEST = (DelayState.RESCHEDULED, DelayState.CANCELLED, DelayState.SENT, DelayState.UNKNOWN)
"""What one group did counts more than what another one does not know."""


def outcome_of(one: Wanted, states: Iterable[DelayState], silent: Iterable[Exception]) -> DelayOutcome:
    """Join what delay groups answered, and the errors of those that did not.

    Raises:
        CallError: what a group refused for good.
        Exception: a group that may have the message gave no answer; its error says why.
    """
    errors = list(silent)
    best = min(states, key=_BEST.index, default=DelayState.UNKNOWN)
    if errors and (not one.id or best is DelayState.UNKNOWN):  # of an id there is one message, of a key maybe many
        raise next((error for error in errors if isinstance(error, CallError)), errors[0])
    return DelayOutcome(best.value)


A = TypeVar("A")
Ask = Callable[[str, int], Coroutine[None, None, A]]
"""Asks one group, until a deadline in ms."""


async def cancel_message(sender: Sender, one: Wanted, *, timeout_ms: int, answer_timeout_s: float) -> DelayOutcome:
    """Take a message back; raises what `outcome_of` raises."""
    body = commands.encode_cancel(
        Cancel(one.subject, [one.id] if one.id else [], [one.key] if one.key else [], one.due_ms)
    )

    def read(answer: memoryview) -> DelayState:
        ids, keys = commands.decode_cancelled(answer)
        return (ids + keys)[0]

    ask = partial(ask_group, sender, Command.CANCEL, body, read, answer_timeout_s)
    return await _ask_all(sender, one, ask, sender.now_ms() + timeout_ms)


async def reschedule_message(
    sender: Sender, one: Wanted, due_ms: int, *, timeout_ms: int, answer_timeout_s: float
) -> DelayOutcome:
    """Send a message at another time; raises what `outcome_of` raises."""
    body = commands.encode_reschedule(Reschedule(one.subject, one.id, one.key, due_ms))
    ask = partial(ask_group, sender, Command.RESCHEDULE, body, commands.decode_rescheduled, answer_timeout_s)
    return await _ask_all(sender, one, ask, sender.now_ms() + timeout_ms)


async def _ask_all(sender: Sender, one: Wanted, ask: Ask[DelayState], deadline_ms: int) -> DelayOutcome:
    groups = [one.group] if one.group else await sender.groups(one.subject, deadline_ms)
    states, silent = await ask_groups(groups, ask, deadline_ms)
    return outcome_of(one, list(states.values()), silent)


async def ask_groups(groups: Iterable[str], ask: Ask[A], deadline_ms: int) -> tuple[dict[str, A], list[QmqError]]:
    """Ask several groups at once; return the answer of each that gave one, and the errors of the others."""
    names = list(groups)
    answers = await asyncio.gather(*(ask(group, deadline_ms) for group in names), return_exceptions=True)
    found, errors = {}, []
    for group, answer in zip(names, answers):
        if isinstance(answer, QmqError):
            errors.append(answer)
        elif isinstance(answer, BaseException):
            raise answer
        else:
            found[group] = answer
    return found, errors


async def ask_group(
    sender: Sender,
    command: Command,
    body: bytes,
    read: Callable[[memoryview], A],
    answer_timeout_s: float,
    group: str,
    deadline_ms: int,
    *,
    final: tuple[type[QmqError], ...] = (CallError, AccessError),
) -> A:
    """Ask one group until it answers; raises its refusal if that is `final`, or NotServed after the deadline."""
    why = ""
    while (left_ms := deadline_ms - sender.now_ms()) > 0:
        connection = sender.connection(group)
        if connection is None:
            await sender.wait()
            continue
        try:
            async with asyncio.timeout(min(left_ms / 1000, answer_timeout_s)):
                return read(await connection.request(command, body))
        except final:
            raise
        except TimeoutError:
            why = "no answer in time"
            connection.close(why)
        except QmqError as error:
            why = str(error)
            sender.complain(group, error)
    raise NotServed(f"delay group {group} did not answer: {sender.complaint(group) or why or 'no connection'}")


Schedules = list[RecurringSchedule]
_FINAL = (CallError, AccessError, BrokerReadOnly)


def schedule_request(message: Message, *, name: str, cron: str, timezone: str, owner: str) -> Recur:
    """Say what is to be sent, and when.

    Raises:
        InvalidRequest, InvalidName, InvalidMessage: it can never be sent as it is.
    """
    for what, text in (("name", name), ("cron", cron), ("timezone", timezone), ("owner", owner)):
        if not isinstance(text, str) or not text:
            raise InvalidRequest(f"{what} of a recurring schedule is a word, not {text!r:.50}")
    name, cron, timezone, owner = map(plain, (name, cron, timezone, owner))
    if message.id is not None:
        raise InvalidMessage("each occurrence of a recurring schedule gets an id of its own: give the message none")
    copy = Message(
        message.subject,
        message.properties,
        tags=message.tags,
        id=name,
        order_key=message.order_key,
        retries_max=message.retries_max,
        expires_after=message.expires_after,
    )
    data = encode_message(copy, time.time_ns() // 1_000_000)
    return Recur(RecurAction.PUT, copy.subject, name, owner, cron, timezone, data)


async def put_schedule(sender: Sender, recur: Recur, *, timeout_ms: int, answer_timeout_s: float) -> RecurringSchedule:
    """Store a schedule in the group that has one of this name, else in one that takes it; raises QmqError."""
    deadline_ms = sender.now_ms() + timeout_ms
    asking = partial(_asking, sender, answer_timeout_s=answer_timeout_s)
    groups = await sender.groups(recur.subject, deadline_ms)
    known = await _all(groups, asking(Recur(RecurAction.LIST, recur.subject)), deadline_ms)
    order = sorted(groups, key=partial(_rank, recur))
    holders = [group for group in order if any(one.name == recur.name for one in known[group])]
    if holders:
        (schedule,) = await asking(recur)(holders[0], deadline_ms)
        await _all(holders[1:], asking(recur._replace(action=RecurAction.DELETE)), deadline_ms)
        return schedule
    return await _put_anew(asking(recur, final=_FINAL), order, deadline_ms)


async def _put_anew(ask: Ask[Schedules], order: list[str], deadline_ms: int) -> RecurringSchedule:
    """Store it in the first group that takes new messages."""
    error: QmqError = NotServed("there is no delay group")
    for group in order:
        try:
            (schedule,) = await ask(group, deadline_ms)
            return schedule
        except BrokerReadOnly as refusal:
            error = refusal
    raise error


async def delete_schedule(sender: Sender, subject: str, name: str, *, timeout_ms: int, answer_timeout_s: float) -> bool:
    """Delete a schedule from whichever group has it; return whether one had. Raises QmqError."""
    if not name:
        raise InvalidRequest("say which recurring schedule: it has a name")
    deadline_ms = sender.now_ms() + timeout_ms
    subject, name = plain(subject), plain(name)
    ask = _asking(sender, Recur(RecurAction.DELETE, subject, name), answer_timeout_s=answer_timeout_s)
    answers = await _all(await sender.groups(subject, deadline_ms), ask, deadline_ms)
    return any(answers.values())


async def list_schedules(sender: Sender, subject: str, *, timeout_ms: int, answer_timeout_s: float) -> Schedules:
    """Return the schedules of a subject, by name; raises QmqError."""
    deadline_ms = sender.now_ms() + timeout_ms
    subject = plain(subject)
    ask = _asking(sender, Recur(RecurAction.LIST, subject), answer_timeout_s=answer_timeout_s)
    answers = await _all(await sender.groups(subject, deadline_ms), ask, deadline_ms)
    return sorted(one for schedules in answers.values() for one in schedules)


def _asking(
    sender: Sender,
    recur: Recur,
    *,
    answer_timeout_s: float,
    final: tuple[type[QmqError], ...] = (CallError, AccessError),
) -> Ask[Schedules]:
    body = commands.encode_recur(recur)
    return partial(ask_group, sender, Command.RECUR, body, commands.decode_recurring, answer_timeout_s, final=final)


async def _all(groups: list[str], ask: Ask[Schedules], deadline_ms: int) -> dict[str, Schedules]:
    """Ask all these groups; raises the error of one that does not answer: only it knows what it has."""
    answers, errors = await ask_groups(groups, ask, deadline_ms)
    if errors:
        raise next((error for error in errors if isinstance(error, CallError)), errors[0])
    return answers


def _rank(recur: Recur, group: str) -> bytes:
    """Order the groups for a name, in the same way at every client: two that put it at once choose the same one."""
    return blake2b(f"{recur.subject}\0{recur.name}\0{group}".encode(), digest_size=8).digest()
