"""Shell. Recurring schedules, as a producer puts, deletes and lists them.

A schedule lies in one delay group. Which one, its name says; it stays there as long as that group has it, whatever
groups come and go. So putting one begins by asking all groups: one that does not answer may have it.
"""

from __future__ import annotations

import time
from functools import partial
from hashlib import blake2b

from qmq.client.recalling import Ask, ask_group, ask_groups
from qmq.client.sender import Sender
from qmq.codec import encode_message
from qmq.errors import AccessError, BrokerReadOnly, CallError, InvalidMessage, InvalidRequest, NotServed, QmqError
from qmq.message import Message
from qmq.plain import plain
from qmq.remoting import commands
from qmq.remoting.commands import Command, Recur, RecurAction, RecurringSchedule

Schedules = list[RecurringSchedule]
_FINAL = (CallError, AccessError, BrokerReadOnly)


def to_put(message: Message, *, name: str, cron: str, timezone: str, owner: str) -> Recur:
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


async def put(sender: Sender, recur: Recur, *, timeout_ms: int, answer_timeout_s: float) -> RecurringSchedule:
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


async def delete(sender: Sender, subject: str, name: str, *, timeout_ms: int, answer_timeout_s: float) -> bool:
    """Delete a schedule from whichever group has it; return whether one had. Raises QmqError."""
    if not name:
        raise InvalidRequest("say which recurring schedule: it has a name")
    deadline_ms = sender.now_ms() + timeout_ms
    subject, name = plain(subject), plain(name)
    ask = _asking(sender, Recur(RecurAction.DELETE, subject, name), answer_timeout_s=answer_timeout_s)
    answers = await _all(await sender.groups(subject, deadline_ms), ask, deadline_ms)
    return any(answers.values())


async def list_all(sender: Sender, subject: str, *, timeout_ms: int, answer_timeout_s: float) -> Schedules:
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
