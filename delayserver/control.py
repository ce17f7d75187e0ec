"""Shell. gRPC control port of a delay server: the calls of every copy, and delayed messages for operators."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import grpc
import grpc.aio

from qmq.codec import decode_envelope, decode_properties
from qmq.delayserver.master import DelayMaster
from qmq.delayserver.schedule import DamagedSchedule
from qmq.delayserver.schedule.record import Messages, Records, read_messages
from qmq.delayserver.settings import DelaySettings
from qmq.delayserver.templates import read_template
from qmq.delayserver.upkeep import ScheduleFiler
from qmq.errors import CallError, CorruptFrame, InvalidMessage, LogError, QmqError
from qmq.log import MessageLog
from qmq.message import DELAY_KEY
from qmq.proto import qmq_pb2 as pb
from qmq.remoting.commands import DelayState
from qmq.server.control import CopyControl, Samples
from qmq.server.service import Service

log = logging.getLogger(__name__)

LISTED, LISTED_MAX = 100, 1000
NAMED_MAX = 10_000
"""Messages that one call may cancel."""
HOURS_MS_MAX = 3 * 366 * 24 * 3_600_000
"""Hours that one answer may count: 26,000 numbers."""
FOREVER_MS = 1 << 62
SAFE_S = 10.0

T = TypeVar("T")


class DelayControl(CopyControl[DelayMaster]):
    """gRPC service of a delay server. Made by main; its server ends with the process."""

    def __init__(
        self, service: Service[DelayMaster], settings: DelaySettings, filing: ScheduleFiler, samples: Samples
    ) -> None:
        super().__init__(service, settings, samples)
        self._filing = filing

    async def DelayStats(self, request: pb.DelayStatsRequest, context: Any) -> pb.DelayStatsAnswer:
        if request.end_ms - request.begin_ms > HOURS_MS_MAX:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the range is longer than three years; request less")
        stats = await self._answered(context, self._stats)
        hours: dict[int, int] = {}
        if request.begin_ms < request.end_ms:
            hours = self._filing.schedule.counts(request.begin_ms, request.end_ms, request.subject or None)
        return pb.DelayStatsAnswer(
            pending_messages=stats["pending_messages"],
            pending_bytes=stats["pending_bytes"],
            loaded_messages=stats["loaded_messages"],
            waiting_messages=stats["waiting_messages"],
            in_flight_messages=sum(stats["in_flight"].values()),
            in_flight=stats["in_flight"],
            next_due_ms=stats["next_due_ms"] or 0,
            clock_off_ms=stats["clock_off_ms"],
            waiting=[
                pb.WaitingSubject(subject=name, messages=count, why=why, age_ms=age_ms)
                for name, (count, age_ms, why) in stats["overdue_subjects"].items()
            ],
            due_messages=stats["overdue_messages"],
            due_age_ms=stats["overdue_ms"],
            hours=[pb.HourCount(begin_ms=begin, messages=hours[begin]) for begin in sorted(hours)],
        )

    async def _stats(self) -> dict[str, Any]:
        return self._service.node.acting_master().stats()

    async def ListDelayed(self, request: pb.ListDelayedRequest, context: Any) -> pb.ListDelayedAnswer:
        most = min(request.messages_max or LISTED, LISTED_MAX)
        records = await self._answered(context, lambda: self._listed(request, most + 1))
        shown = records[:most]
        subjects = [self._filing.schedule.subjects[int(index)] for index in shown["subject"]]
        messages = await self._answered(context, lambda: self._messages(shown))
        read = _schedule if request.recurring else _message
        return pb.ListDelayedAnswer(messages=map(read, subjects, shown, messages), more=len(records) > most)

    async def _listed(self, request: pb.ListDelayedRequest, most: int) -> Records:
        found: asyncio.Future[Records] = self._loop.create_future()
        after = (request.after_due_ms, request.after_number) if request.after_number else None
        begin_ms, end_ms = max(request.begin_ms, 0), request.end_ms or FOREVER_MS
        master, subject = self._service.node.acting_master(), request.subject or None
        if request.recurring:
            master.list_recurring(subject, most, lambda result: _settle(found, result))
        else:
            master.list(begin_ms, end_ms, subject, most, after, lambda result: _settle(found, result))
        return await found

    async def _messages(self, records: Records) -> list[bytes]:
        message_log, wanted = self._service.node.log, Messages.of(records)
        return await asyncio.to_thread(_read_kept, message_log, wanted)

    async def CancelDelayed(self, request: pb.CancelDelayedRequest, context: Any) -> pb.CancelDelayedAnswer:
        """Cancel messages by id or key. DEADLINE_EXCEEDED: the outcome is unknown; repeat the call."""
        ids, keys = list(request.ids), list(request.keys)
        if not 0 < len(ids) + len(keys) <= NAMED_MAX:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"name 1 to {NAMED_MAX} messages by id or key")
        states = await self._answered(context, lambda: self._cancel(request.subject, ids, keys, request.due_ms))
        log.warning(
            "delayed messages cancelled by an operator subject=%s named=%d cancelled=%d",
            request.subject,
            len(states),
            states.count(DelayState.CANCELLED),
        )
        return pb.CancelDelayedAnswer(ids=states[: len(ids)], keys=states[len(ids) :])

    async def _cancel(self, subject: str, ids: list[str], keys: list[str], due_ms: int) -> list[DelayState]:
        safe: asyncio.Future[list[DelayState]] = self._loop.create_future()
        master = self._service.node.acting_master()
        self._service.guarded(lambda: master.cancel(subject, ids, keys, due_ms, lambda states: _settle(safe, states)))
        return await asyncio.wait_for(safe, SAFE_S)

    async def _answered(self, context: Any, ask: Callable[[], Awaitable[T]]) -> T:
        """Await an answer, and translate errors to gRPC statuses."""
        try:
            return await ask()
        except CorruptFrame as problem:
            await self._being_repaired(problem, context)
        except DamagedSchedule as problem:
            text = f"{problem}; the schedule is being rebuilt, repeat the call"
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, text)
        except TimeoutError:
            text = f"the slave did not confirm the request within {SAFE_S:.0f} s; repeat it to learn the outcome"
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, text)
        except CallError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except QmqError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        raise AssertionError("abort has raised")


def _settle(future: asyncio.Future[T], result: T | QmqError | LogError) -> None:
    if future.done():
        return
    if isinstance(result, QmqError | LogError):
        future.set_exception(result)
    else:
        future.set_result(result)


def _read_kept(message_log: MessageLog, wanted: Messages) -> list[bytes]:
    """Read messages; a message that was deleted since it was listed is empty. Blocks; runs on a thread."""
    try:
        return read_messages(message_log, wanted)
    except CorruptFrame:
        if min(wanted.numbers, default=0) >= message_log.start:
            raise
    found = []
    for number, size, crc in zip(*wanted, strict=True):
        alone = Messages([number], [size], [crc])
        found.append(read_messages(message_log, alone)[0] if number >= message_log.start else b"")
    return found


def _message(subject: str, record: Any, message: bytes) -> pb.DelayedMessage:
    shown = pb.DelayedMessage(
        subject=subject, due_ms=int(record["due"]), number=int(record["number"]), bytes=int(record["size"])
    )
    try:
        envelope = decode_envelope(message)
        shown.id, shown.created_ms = envelope.id, envelope.created_ms
        shown.key = str(decode_properties(message).get(DELAY_KEY, ""))
    except InvalidMessage as error:
        shown.problem = (
            str(error) if message else "the message was written to another place meanwhile; repeat the request"
        )
    return shown


def _schedule(subject: str, record: Any, message: bytes) -> pb.DelayedMessage:
    shown = _message(subject, record, message)
    try:
        template = read_template(message, subject)
    except InvalidMessage:
        return shown  # wrong label, or carried meanwhile: `problem` states which
    shown.schedule.name, shown.schedule.owner = template.name, template.owner
    shown.schedule.cron, shown.schedule.timezone = template.expression, template.timezone
    return shown
