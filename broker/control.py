"""Shell. The broker's gRPC port: state and swap for the metaserver, consumers and messages for operators, the log
for repair and Spark."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import grpc
import grpc.aio

from broker import progress
from broker.browsing import Browsing
from broker.meta_link import state_message
from broker.service import Service
from broker.settings import BrokerSettings
from broker.tokens import CONTROL_ROLES
from qmq.control_plane import SERVER_OPTIONS
from qmq.errors import CallError, CorruptFrame, DiskFailed, MissingRight, NotServed, OperatorError, QmqError
from qmq.proto import qmq_pb2 as pb
from qmq.proto.qmq_pb2_grpc import BrokerServicer, add_BrokerServicer_to_server
from qmq.rights import CONSUME, Caller
from qmq.rpc_access import RpcDoor, caller

log = logging.getLogger(__name__)

CHUNK_BYTES = 2 << 20
POLL_S = 0.005
GROUPS_AT_A_TIME = 200
"""Groups whose progress is looked up in one go: about 2 ms in which nobody else is served."""
SAFE_S = 10.0


class Control(BrokerServicer):  # type: ignore[misc]  # generated code has no types
    """Made by main; its server ends with the process."""

    def __init__(self, service: Service, settings: BrokerSettings) -> None:
        self._service, self._settings = service, settings
        self._browsing = Browsing(service)
        self._loop = asyncio.get_running_loop()

    async def serve(self) -> None:
        server = grpc.aio.server(
            interceptors=[RpcDoor(CONTROL_ROLES, self._check, _refused)],
            options=SERVER_OPTIONS,
        )
        add_BrokerServicer_to_server(self, server)
        address = f"{self._settings.ip}:{self._settings.control_port}"
        try:
            server.add_insecure_port(address)
        except RuntimeError as error:
            raise NotServed(f"cannot listen on {address}: {error}; stop what uses it, or set another port") from None
        await server.start()
        try:
            await server.wait_for_termination()
        finally:
            await server.stop(0)

    async def _check(self, token: str) -> Caller:
        caller = await self._service.access.check(token)
        caller.require_group(self._service.node.group)
        return caller

    async def ReplicaStatus(self, request: pb.Nothing, context: Any) -> pb.BrokerState:
        return state_message(self._service, self._settings)

    async def PrepareSwap(self, request: pb.PrepareSwapRequest, context: Any) -> pb.BrokerState:
        node = self._service.node
        try:
            node.prepare_swap(request.term, request.hold_ms)
            async with asyncio.timeout(request.timeout_ms / 1000):
                while node.master is None or not node.master.is_drained:
                    await asyncio.sleep(POLL_S)
        except OperatorError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        except TimeoutError:
            node.cancel_swap()
            text = f"the slave did not get everything within {request.timeout_ms} ms; nothing was changed"
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, text)
        return state_message(self._service, self._settings)

    async def CancelSwap(self, request: pb.Nothing, context: Any) -> pb.BrokerState:
        self._service.node.cancel_swap()
        return state_message(self._service, self._settings)

    async def Consumers(self, request: pb.ConsumersRequest, context: Any) -> pb.ConsumersAnswer:
        """FAILED_PRECONDITION: not the master, or its log cannot be read."""
        node, groups = self._service.node, []
        try:
            subscriptions = node.acting_master().subscriptions
            found = progress.of_groups(node.log, subscriptions, subject=request.subject, group=request.group)
            for number, one in enumerate(found):
                groups.append(one)
                if number % GROUPS_AT_A_TIME == GROUPS_AT_A_TIME - 1:
                    await asyncio.sleep(0)  # others want to be served meanwhile
            oldest_ms = await asyncio.to_thread(self._timestamps, [one.oldest_offset for one in groups])
        except CorruptFrame as problem:
            await self._being_repaired(problem, context)
        except QmqError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        return pb.ConsumersAnswer(groups=map(_group_message, groups, oldest_ms))

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

    async def _being_repaired(self, problem: CorruptFrame, context: Any) -> None:
        self._service.guarded(partial(self._service.node.found_damage, problem))
        await context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"{problem}; it is being repaired, ask again")

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

    async def ResetOffset(self, request: pb.ResetOffsetRequest, context: Any) -> pb.ResetOffsetAnswer:
        """FAILED_PRECONDITION: refused, nothing changed. DEADLINE_EXCEEDED, UNAVAILABLE: it may or may not stay."""
        reset, safe = None, self._loop.create_future()

        def move() -> None:
            nonlocal reset
            reset = self._service.node.acting_master().move_group(
                request.subject, request.group, request.to, request.value, dry_run=request.dry_run,
                answer=lambda error: None if safe.done() else safe.set_result(error),
            )  # fmt: skip

        try:
            self._service.guarded(move)
        except QmqError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        assert reset is not None
        if not request.dry_run:
            await self._wait_until_safe(safe, context)
            log.warning(
                "group moved subject=%s consumer_group=%s before=%d after=%d skipped=%d repeated=%d",
                request.subject, request.group, *reset,
            )  # fmt: skip
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

    async def DescribeLog(self, request: pb.Nothing, context: Any) -> pb.LogDescription:
        node = self._service.node
        state = state_message(self._service, self._settings)
        return pb.LogDescription(
            broker_group=node.group, role=state.role, term=state.term, boot=state.boot, log_start=node.log.start,
            log_end=node.log.flushed_end, high_watermark=state.high_watermark, segments=node.log.bases,
            start_chain=await asyncio.to_thread(node.log.start_chain),
        )  # fmt: skip

    async def ReadLog(self, request: pb.ReadLogRequest, context: Any) -> AsyncIterator[pb.LogChunk]:
        """Stream frames as they are stored. Bytes that are damaged are sent as they are too: the reader names them.

        PERMISSION_DENIED: the token is limited to some subjects, and these are frames of all.
        """
        if not caller().scope.all_subjects:
            text = f"token {caller().name!r} is limited to some subjects; the log holds those of all"
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, text)
        message_log, positions, me = self._service.node.log, self._service.reader_positions, object()
        end = min(request.end, message_log.flushed_end)
        at = await asyncio.to_thread(message_log.next_frame, max(request.begin, message_log.start))
        positions[me] = request.begin
        try:
            while at is not None and at < end:
                positions[me] = at
                data = await asyncio.to_thread(self._chunk, at)
                if not data:
                    break  # it was cut meanwhile
                yield pb.LogChunk(offset=at, data=data)
                at += len(data)
        finally:
            del positions[me]

    def _chunk(self, at: int) -> bytes:
        message_log = self._service.node.log
        try:
            return message_log.read(at, message_log.flushed_end, CHUNK_BYTES).data
        except CorruptFrame as problem:
            self._loop.call_soon_threadsafe(self._service.guarded, partial(self._service.node.found_damage, problem))
            return message_log.read_damaged(at)


def _group_message(one: progress.GroupProgress, oldest_ms: int) -> pb.GroupProgress:
    consumers = [
        pb.ConsumerProgress(
            consumer=consumer.consumer, connected=bool(consumer.peer), unacked=consumer.unacked, peer=consumer.peer
        )
        for consumer in one.consumers
    ]
    return pb.GroupProgress(
        subject=one.subject, group=one.group, first_sequence=one.first_sequence, next_sequence=one.next_sequence,
        position=one.position, returned=one.returned, lag=one.lag, oldest_ms=oldest_ms, consumers=consumers,
    )  # fmt: skip


def _refused(method: str, peer: str, reason: str) -> None:
    log.warning("control call refused method=%s peer=%s: %s", method[:50], peer.rpartition(":")[0], reason)
