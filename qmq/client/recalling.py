"""Shell. Asks delay groups to take a delayed message back, or to send it at another time.

Both may be asked twice, so a lost answer is asked for again, at the group's next master too. Only a receipt says
which group has a message: without one, all groups are asked, and "unknown" is an answer only when all of them gave it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from functools import partial
from typing import TypeVar

from qmq.client.delaying import DelayOutcome, Wanted, outcome_of
from qmq.client.sender import Sender
from qmq.errors import AccessError, CallError, NotServed, QmqError
from qmq.remoting import commands
from qmq.remoting.commands import Cancel, Command, DelayState, Reschedule

A = TypeVar("A")
Ask = Callable[[str, int], Coroutine[None, None, A]]
"""Asks one group, until a deadline in ms."""


async def cancel(sender: Sender, one: Wanted, *, timeout_ms: int, answer_timeout_s: float) -> DelayOutcome:
    """Take a message back; raises what `outcome_of` raises."""
    body = commands.encode_cancel(
        Cancel(one.subject, [one.id] if one.id else [], [one.key] if one.key else [], one.due_ms)
    )

    def read(answer: memoryview) -> DelayState:
        ids, keys = commands.decode_cancelled(answer)
        return (ids + keys)[0]

    ask = partial(ask_group, sender, Command.CANCEL, body, read, answer_timeout_s)
    return await _ask_all(sender, one, ask, sender.now_ms() + timeout_ms)


async def reschedule(
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
