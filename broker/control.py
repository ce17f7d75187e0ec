"""Shell. The broker's gRPC port: what every process of a group answers, and consumers and messages for operators."""

from __future__ import annotations

import asyncio
import heapq
import logging
from typing import Any

import grpc
import grpc.aio

from qmq.broker import progress
from qmq.broker.beginning import Begin
from qmq.broker.browsing import Browsing
from qmq.broker.causes import Cause
from qmq.broker.master import BrokerMaster
from qmq.broker.settings import BrokerSettings
from qmq.errors import CallError, CorruptFrame, DiskFailed, MissingRight, QmqError
from qmq.proto import qmq_pb2 as pb
from qmq.rights import CONSUME
from qmq.rpc_access import caller
from qmq.server.control import CopyControl, Samples
from qmq.server.service import Service

log = logging.getLogger(__name__)

GROUPS_AT_A_TIME = 200
"""Groups whose progress is looked up in one go: about 2 ms in which nobody else is served."""
SAFE_S = 10.0


class Control(CopyControl[BrokerMaster]):
    """Made by main; its server ends with the process."""

    def __init__(self, service: Service[BrokerMaster], settings: BrokerSettings, samples: Samples) -> None:
        super().__init__(service, settings, samples)
        self._browsing = Browsing(service)

    async def Consumers(self, request: pb.ConsumersRequest, context: Any) -> pb.ConsumersAnswer:
        """FAILED_PRECONDITION: not the master, or its log cannot be read."""
        node, groups = self._service.node, list[progress.GroupProgress]()
        try:
            master = node.acting_master()
            keys = {(one.subject, one.group): _begin(one.begin) for one in request.known}
            lacking = {key: master.begins_at(key, at) for key, at in keys.items() if key not in node.log.state.groups}
            found = progress.of_groups(
                node.log, master.subscriptions, subject=request.subject, group=request.group, lacking=lacking
            )
            for number, one in enumerate(found):
                if one.lag or one.dead_letters or not request.behind_max:
                    groups.append(one)
                if number % GROUPS_AT_A_TIME == GROUPS_AT_A_TIME - 1:
                    await asyncio.sleep(0)  # others want to be served meanwhile
            if request.behind_max:
                groups = heapq.nlargest(request.behind_max, groups, key=lambda one: (one.lag, one.dead_letters))
            causes = [master.causes.of((one.subject, one.group)) for one in groups]
            oldest_ms = await asyncio.to_thread(self._timestamps, [one.oldest_offset for one in groups])
        except CorruptFrame as problem:
            await self._being_repaired(problem, context)
        except QmqError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        return pb.ConsumersAnswer(groups=map(_group_message, groups, oldest_ms, causes))

    def _timestamps(self, offsets: list[int | None]) -> list[int]:
        message_log, found = self._service.node.log, []
        for offset in offsets:
            try:
                found.append(0 if offset is None else message_log.timestamp_at(offset))
            except CorruptFrame:
                if offset is not None and offset >= message_log.start:
                    raise
                found.append(0)  # retention took it meanwhile
        return found

    async def Browse(self, request: pb.BrowseRequest, context: Any) -> pb.BrowseAnswer:
        """PERMISSION_DENIED: the token may not consume from the subject. Others: see qmq.proto."""
        answer = pb.BrowseAnswer()
        try:
            caller().require_subject(CONSUME, request.subject)
            answer = await self._browsing.answer(request)
        except DiskFailed as error:
            self._service.fail(error)
        except CorruptFrame as problem:
            await self._being_repaired(problem, context)
        except MissingRight as error:
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, str(error))
        except CallError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except QmqError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        return answer

    async def MarkGroups(self, request: pb.MarkGroupsRequest, context: Any) -> pb.MarkGroupsAnswer:
        keys, known = [(one.subject, one.group) for one in request.groups], list[bool]()
        try:
            known = self._service.node.acting_master().mark_groups(request.mark, keys)
        except QmqError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        return pb.MarkGroupsAnswer(known=known)

    async def ResetOffset(self, request: pb.ResetOffsetRequest, context: Any) -> pb.ResetOffsetAnswer:
        """FAILED_PRECONDITION: refused, nothing changed. DEADLINE_EXCEEDED, UNAVAILABLE: it may or may not stay."""
        reset, safe = None, self._loop.create_future()

        def move() -> None:
            nonlocal reset
            reset = self._service.node.acting_master().move_group(
                request.subject,
                request.group,
                request.to,
                request.value,
                dry_run=request.dry_run,
                begin=_begin(request.begin) if request.HasField("begin") else None,
                answer=lambda error: None if safe.done() else safe.set_result(error),
            )

        try:
            self._service.guarded(move)
        except QmqError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        assert reset is not None
        if not request.dry_run:
            await self._wait_until_safe(safe, context)
            log.warning(
                "group moved subject=%s consumer_group=%s before=%d after=%d skipped=%d repeated=%d",
                request.subject,
                request.group,
                *reset,
            )
        return pb.ResetOffsetAnswer(
            before=reset.before, after=reset.after, skipped=reset.skipped, repeated=reset.repeated
        )

    async def _wait_until_safe(self, safe: asyncio.Future[QmqError | None], context: Any) -> None:
        try:
            error = await asyncio.wait_for(safe, SAFE_S)
        except TimeoutError:
            text = f"the slave did not confirm it within {SAFE_S:.0f} s: look at Consumers before you repeat it"
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, text)
        if error is not None:
            text = "the master changed before both copies knew it: look at Consumers before you repeat it"
            await context.abort(grpc.StatusCode.UNAVAILABLE, text)


def _begin(message: pb.GroupBegin) -> Begin:
    return Begin(message.since_ms, message.mark, message.began_ms)


def _group_message(one: progress.GroupProgress, oldest_ms: int, causes: list[Cause]) -> pb.GroupProgress:
    consumers = [
        pb.ConsumerProgress(
            consumer=consumer.consumer, connected=bool(consumer.peer), unacked=consumer.unacked, peer=consumer.peer
        )
        for consumer in one.consumers
    ]
    return pb.GroupProgress(
        subject=one.subject,
        group=one.group,
        first_sequence=one.first_sequence,
        next_sequence=one.next_sequence,
        position=one.position,
        returned=one.returned,
        lag=one.lag,
        oldest_ms=oldest_ms,
        consumers=consumers,
        causes=causes,
        dead_letters=one.dead_letters,
    )
