"""Shell. Delayed messages of a producer: due time, cancel, reschedule, and recurring schedules.

Cancel and reschedule are idempotent, so a request without an answer is repeated, also at the delay group's next master.
Only a receipt names the delay group of a message. Without a receipt all delay groups get the request, and UNKNOWN is
the outcome only when all of them return it.

A recurring schedule is stored in one delay group and stays there when groups are added or removed. Storing one begins
with a list request to all groups and fails if one does not answer, because that one may hold the schedule.
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
"""End of the year 9999. Delay servers have a lower limit of their own."""

A = TypeVar("A")
Ask = Callable[[str, int], Coroutine[None, None, A]]
"""Sends one request to a delay group and returns its answer, until a deadline in ms."""
Schedules = list[RecurringSchedule]
_FINAL = (CallError, AccessError)
"""Errors that a repeated request would return again."""


class Delay(NamedTuple):
    """Due time of a message, in ms since 1970 UTC, and the key for cancelling it."""

    due_ms: int
    key: str | None

    @property
    def at(self) -> datetime:
        return _EPOCH + self.due_ms * _MS

    def encode(self, message: Message, now_ms: int, compress_bytes_min: int | None = None) -> bytes:
        """Encode a message with its due time and key; raises InvalidMessage."""
        data = delayed_encoder(message.subject, now_ms, self.due_ms, compress_bytes_min)(message)
        return data if self.key is None else with_properties(data, {DELAY_KEY: self.key})


class DelayArguments(TypedDict, total=False):
    """Delay arguments of `Producer.send`, for functions that pass them on."""

    delay: float | timedelta | None
    at: datetime | None
    key: str | None


class DelayOutcome(StrEnum):
    """Result of cancelling or rescheduling a delayed message."""

    CANCELLED = "cancelled"
    """The message is not sent, by this call or by an earlier one."""
    RESCHEDULED = "rescheduled"
    """The message is due at the new time."""
    SENT = "sent"
    """Too late: a broker has the message, or it is on its way there. Nothing was changed."""
    UNKNOWN = "unknown"
    """No delay server has this message. It may have been sent or cancelled long ago."""


def delay_of(delay: float | timedelta | None, at: datetime | None, key: str | None, *, now_ms: int) -> Delay:
    """Return the checked delay of a call; raises InvalidRequest."""
    due_ms = due_of_call(delay, at, now_ms=now_ms)
    return Delay(due_ms, None if key is None else check_key(key))


def due_of_call(delay: float | timedelta | None, at: datetime | None, *, now_ms: int) -> int:
    """Return the due time of a call, in ms since 1970 UTC; raises InvalidRequest."""
    if (delay is None) == (at is None):
        raise InvalidRequest("a delayed message needs one of delay= (seconds or a timedelta) and at= (a datetime)")
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
            f"at={at} has no time zone: write at.astimezone() for this computer's local time, at.replace(tzinfo=…) "
            "for another zone, or datetime.now(UTC) + timedelta(…)"
        )
    return -((_EPOCH - at) // _MS)  # rounded up: never early


def check_key(key: str) -> str:
    """Return the key for cancelling; raises InvalidRequest."""
    is_text = isinstance(key, str) and bool(key.strip())
    if not is_text or len(key.encode("utf-8", "replace")) > DELAY_KEY_BYTES_MAX:
        raise InvalidRequest(
            f"a key for cancelling is a str, not blank, of 1 to {DELAY_KEY_BYTES_MAX} bytes, not {key!r:.50}"
        )
    return plain(key)


class Target(NamedTuple):
    """Delayed messages that a call selects: one by id, or all with a key; the other field is "".

    `group` is the delay group of the message, "" if not known; `due_ms` the expected due time, 0 if not known.
    """

    subject: str
    id: str
    key: str
    group: str = ""
    due_ms: int = 0


def target_of(receipt: Receipt | None, subject: str | None, id: str | None, key: str | None) -> Target:
    """Return the target of a call.

    Raises:
        InvalidRequest: the arguments select no message or select it twice, or the message was not delayed.
    """
    if receipt is not None:
        if (subject, id, key) != (None, None, None):
            raise InvalidRequest("a receipt selects its message: give it alone, or subject= and id= or key=")
        if receipt.due_ms is None:
            raise InvalidRequest(f"message {receipt.message_id} was sent without delay")
        group = receipt.broker_group if receipt.is_stored else ""  # else any group may have it
        return Target(receipt.subject, receipt.message_id, "", group, receipt.due_ms)
    if not subject or bool(id) == bool(key):
        raise InvalidRequest("give the receipt, or subject= and one of id= and key=")
    return Target(plain(subject), plain(id) or "", check_key(key) if key else "")


_BEST = (DelayState.RESCHEDULED, DelayState.CANCELLED, DelayState.SENT, DelayState.UNKNOWN)
"""Order of precedence when delay groups return different states."""


def outcome_of(target: Target, states: Iterable[DelayState], errors: Iterable[Exception]) -> DelayOutcome:
    """Return the outcome of a call from the answers of the delay groups.

    Args:
        errors: one error for each group without an answer.

    Raises:
        CallError: a group refused the request for good.
        Exception: a group that may have the message gave no answer.
    """
    missing = list(errors)
    best = min(states, key=_BEST.index, default=DelayState.UNKNOWN)
    if missing and (not target.id or best is DelayState.UNKNOWN):  # an id has one message, a key may have many
        raise next((error for error in missing if isinstance(error, CallError)), missing[0])
    return DelayOutcome(best.value)


def schedule_request(message: Message, *, name: str, cron: str, timezone: str, owner: str) -> Recur:
    """Return the request that stores a recurring schedule.

    Raises:
        InvalidRequest, InvalidName, InvalidMessage: an argument or the message is not valid.
    """
    for noun, text in (("name", name), ("cron", cron), ("timezone", timezone), ("owner", owner)):
        if not isinstance(text, str) or not text.strip():
            raise InvalidRequest(f"{noun} of a recurring schedule is a str that is not blank, not {text!r:.50}")
    name, cron, timezone, owner = map(plain, (name, cron, timezone, owner))
    if message.id is not None:
        raise InvalidMessage(
            "each occurrence of a recurring schedule gets an id of its own: leave out the message's id"
        )
    copy = Message(
        message.subject,
        message.properties,
        body=message.body,
        content_type=message.content_type,
        tags=message.tags,
        id=name,
        order_key=message.order_key,
        retries_max=message.retries_max,
        expires_after=message.expires_after,
    )
    data = encode_message(copy, time.time_ns() // 1_000_000)
    return Recur(RecurAction.PUT, copy.subject, name, owner, cron, timezone, data)


class DelayGroups:
    """Requests of one call to the delay groups.

    Args:
        sender: the producer's sender to delay groups.
        timeout_ms: for the whole call.
        answer_timeout_s: for one answer; then the connection is closed and the request repeated.
    """

    def __init__(self, sender: Sender, *, timeout_ms: int, answer_timeout_s: float) -> None:
        self._sender = sender
        self._answer_timeout_s = answer_timeout_s
        self._deadline_ms = sender.now_ms() + timeout_ms

    async def cancel(self, target: Target) -> DelayOutcome:
        """Cancel messages; raises the errors of `outcome_of`."""
        ids, keys = [target.id] if target.id else [], [target.key] if target.key else []

        def read(answer: memoryview) -> DelayState:
            of_ids, of_keys = commands.decode_cancelled(answer)
            return (of_ids + of_keys)[0]

        body = commands.encode_cancel(Cancel(target.subject, ids, keys, target.due_ms))
        return await self._change(target, partial(self._ask, Command.CANCEL, body, read))

    async def reschedule(self, target: Target, due_ms: int) -> DelayOutcome:
        """Give messages another due time; raises the errors of `outcome_of`."""
        body = commands.encode_reschedule(Reschedule(target.subject, target.id, target.key, due_ms))
        return await self._change(target, partial(self._ask, Command.RESCHEDULE, body, commands.decode_rescheduled))

    async def _change(self, target: Target, ask: Ask[DelayState]) -> DelayOutcome:
        groups = [target.group] if target.group else await self._sender.groups(target.subject, self._deadline_ms)
        states, errors = await self._ask_each(groups, ask)
        return outcome_of(target, states.values(), errors)

    async def put_schedule(self, recur: Recur) -> RecurringSchedule:
        """Store a schedule in the group that holds its name, else in one that is writable; raises QmqError."""
        groups = await self._sender.groups(recur.subject, self._deadline_ms)
        known = await self._all(groups, self._asking(Recur(RecurAction.LIST, recur.subject)))
        order = sorted(groups, key=partial(_rank, recur))
        holders = [group for group in order if any(schedule.name == recur.name for schedule in known[group])]
        if not holders:
            return await self._put_new(recur, order)
        (schedule,) = await self._asking(recur)(holders[0], self._deadline_ms)
        await self._all(holders[1:], self._asking(recur._replace(action=RecurAction.DELETE)))
        return schedule

    async def _put_new(self, recur: Recur, order: list[str]) -> RecurringSchedule:
        """Store a schedule in the first group that is writable."""
        ask = self._asking(recur, final=(*_FINAL, BrokerReadOnly))
        error: QmqError = NotServed("there is no delay group")
        for group in order:
            try:
                (schedule,) = await ask(group, self._deadline_ms)
                return schedule
            except BrokerReadOnly as refusal:
                error = refusal
        raise error

    async def delete_schedule(self, subject: str, name: str) -> bool:
        """Delete a schedule from every group; return whether one held it. Raises QmqError."""
        if not name:
            raise InvalidRequest("name of the recurring schedule is missing")
        subject, name = plain(subject), plain(name)
        groups = await self._sender.groups(subject, self._deadline_ms)
        answers = await self._all(groups, self._asking(Recur(RecurAction.DELETE, subject, name)))
        return any(answers.values())

    async def list_schedules(self, subject: str) -> Schedules:
        """Return the schedules of a subject, by name; raises QmqError."""
        subject = plain(subject)
        groups = await self._sender.groups(subject, self._deadline_ms)
        answers = await self._all(groups, self._asking(Recur(RecurAction.LIST, subject)))
        return sorted(schedule for schedules in answers.values() for schedule in schedules)

    def _asking(self, recur: Recur, *, final: tuple[type[QmqError], ...] = _FINAL) -> Ask[Schedules]:
        body = commands.encode_recur(recur)
        return partial(self._ask, Command.RECUR, body, commands.decode_recurring, final=final)

    async def _all(self, groups: list[str], ask: Ask[Schedules]) -> dict[str, Schedules]:
        """Return the answer of every group; raises the error of a group without an answer."""
        answers, errors = await self._ask_each(groups, ask)
        if errors:
            raise next((error for error in errors if isinstance(error, CallError)), errors[0])
        return answers

    async def _ask_each(self, groups: Iterable[str], ask: Ask[A]) -> tuple[dict[str, A], list[QmqError]]:
        """Send a request to several groups at once; return the answers by group, and the errors of the others."""
        names = list(groups)
        answers = await asyncio.gather(*(ask(group, self._deadline_ms) for group in names), return_exceptions=True)
        found, errors = {}, []
        for group, answer in zip(names, answers):
            if isinstance(answer, QmqError):
                errors.append(answer)
            elif isinstance(answer, BaseException):
                raise answer
            else:
                found[group] = answer
        return found, errors

    async def _ask(
        self,
        command: Command,
        body: bytes,
        read: Callable[[memoryview], A],
        group: str,
        deadline_ms: int,
        *,
        final: tuple[type[QmqError], ...] = _FINAL,
    ) -> A:
        """Repeat a request to one group until it answers; raises an error of `final`, or NotServed at the deadline."""
        sender, reason = self._sender, ""
        while (left_ms := deadline_ms - sender.now_ms()) > 0:
            connection = sender.connection(group)
            if connection is None:
                await sender.wait()
                continue
            try:
                async with asyncio.timeout(min(left_ms / 1000, self._answer_timeout_s)):
                    return read(await connection.request(command, body))
            except final:
                raise
            except TimeoutError:
                reason = "no answer in time"
                connection.close(reason)
            except QmqError as error:
                reason = str(error)
                sender.report_failure(group, error)
        raise NotServed(f"delay group {group} did not answer: {sender.rest_reason(group) or reason or 'no connection'}")


def _rank(recur: Recur, group: str) -> bytes:
    """Return the sort key of a group for a schedule: clients that store it at the same time choose the same group."""
    return blake2b(f"{recur.subject}\0{recur.name}\0{group}".encode(), digest_size=8).digest()
