"""Shell. gRPC port of a broker or delay server: state and swaps for the metaserver, the log for repair and Spark."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any, Generic, NamedTuple

import grpc
import grpc.aio

from qmq.control_plane import SERVER_OPTIONS
from qmq.errors import CorruptFrame, NotServed, OperatorError
from qmq.log.segments import segment_at
from qmq.process_metrics import process_figures
from qmq.proto import qmq_pb2 as pb
from qmq.proto.qmq_pb2_grpc import BrokerServicer, add_BrokerServicer_to_server
from qmq.replication.copy_report import messages_above
from qmq.replication.settings import CopySettings
from qmq.rights import Caller
from qmq.rpc_access import RpcAcceptor, caller
from qmq.server.access import CONTROL_ROLES
from qmq.server.meta_link import state_message
from qmq.server.service import M, Service
from qmq.settings import shown
from qmq.types import Endpoint

log = logging.getLogger(__name__)

CHUNK_BYTES = 512 << 10
POLL_S = 0.005
FLUSHED_S = 1.0
"""Time to store the state before a failover. A copy that takes longer must not be promoted."""


class CopyControl(BrokerServicer, Generic[M]):  # type: ignore[misc]  # generated code has no types
    """Control methods shared by brokers and delay servers. Made by main; its server ends with the process."""

    def __init__(self, service: Service[M], settings: CopySettings, samples: Samples) -> None:
        self._service = service
        self._settings = settings
        self._samples = samples
        self._loop = asyncio.get_running_loop()
        self._pace = Pace(settings.read_log_bytes_per_s)
        self._repairs_pace = Pace(settings.catch_up_bytes_per_s)

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register the methods on `server`."""
        add_BrokerServicer_to_server(self, server)

    async def serve(self) -> None:
        server = grpc.aio.server(
            interceptors=[RpcAcceptor(CONTROL_ROLES, self._check, _refused)],
            options=[*SERVER_OPTIONS, ("grpc.max_allowed_incoming_connections", self._service.bounds.control)],
        )
        self.add_to(server)
        address = str(Endpoint(self._settings.listen_on, self._settings.control_port))
        try:
            server.add_insecure_port(address)
        except RuntimeError as error:
            raise NotServed(
                f"cannot listen on {address}: {error}; stop its user, or set another port or bind"
            ) from None
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
        state, node = state_message(self._service, self._settings), self._service.node
        if node.parted_at is not None:
            above = await asyncio.to_thread(messages_above, node.log, node.parted_at, ids_max=0)
            ranges = [pb.SequenceRange(subject=name, first=at[0], last=at[1]) for name, at in above["subjects"].items()]
            state.parted.CopyFrom(pb.PartedTail(offset=node.parted_at, messages=ranges))
        return state

    async def Quarantine(self, request: pb.QuarantineRequest, context: Any) -> pb.QuarantineAnswer:
        keeper = self._service.quarantine
        if request.cleared:
            parts = await asyncio.to_thread(keeper.clear, list(request.cleared))
            names = ", ".join(part.name for part in parts)
            log.warning("quarantine cleared group=%s parts=%s", self._service.node.group, names)
            self._service.state_changed.set()
        else:
            parts = await asyncio.to_thread(keeper.all)
        return pb.QuarantineAnswer(
            parts=[
                pb.KeptPart(
                    name=part.name,
                    begin=part.begin,
                    end=part.end,
                    why=part.why,
                    bytes=part.bytes,
                    messages=part.messages,
                    evidence=part.is_evidence,
                )
                for part in parts
            ],
            bytes_max=keeper.limit,
        )

    async def Rates(self, request: pb.Nothing, context: Any) -> pb.RatesAnswer:
        return pb.RatesAnswer(
            samples=[pb.RateSample(**sample._asdict()) for sample in self._samples.all()],
            process=process_figures(self._settings.data),
        )

    async def Settings(self, request: pb.Nothing, context: Any) -> pb.SettingsAnswer:
        return pb.SettingsAnswer(settings=shown(self._settings))

    async def PrepareSwap(self, request: pb.PrepareSwapRequest, context: Any) -> pb.BrokerState:
        node, guarded = self._service.node, self._service.guarded
        try:
            guarded(partial(node.changes.prepare_swap, request.term, request.hold_ms, target=request.target))
            async with asyncio.timeout(request.timeout_ms / 1000):
                while node.master is None or not node.master.is_drained_to(request.target):
                    await asyncio.sleep(POLL_S)
            if request.promised_term:
                guarded(partial(node.changes.promise_swap, request.promised_term, target=request.target))
        except OperatorError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        except TimeoutError:
            guarded(node.changes.cancel_swap)
            text = f"the slave did not get everything within {request.timeout_ms} ms; nothing was changed"
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, text)
        return state_message(self._service, self._settings)

    async def CancelSwap(self, request: pb.Nothing, context: Any) -> pb.BrokerState:
        self._service.guarded(self._service.node.changes.cancel_swap)
        return state_message(self._service, self._settings)

    async def PrepareFailover(self, request: pb.PrepareFailoverRequest, context: Any) -> pb.BrokerState:
        node = self._service.node
        prepare = partial(
            node.changes.prepare_failover,
            request.term,
            hold_ms=request.hold_ms,
            silent_ms=request.silent_ms,
            packet_age_ms=self._service.master_packet_age_ms(),
            promised_term=request.promised_term,
            master_gone=request.master_gone,
        )
        try:
            self._service.guarded(prepare)
            if request.promised_term:  # the reported frames must outlive a power cut, as the promise does
                async with asyncio.timeout(FLUSHED_S):
                    while not node.log.is_idle:
                        await asyncio.sleep(POLL_S)
        except TimeoutError:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "its disk does not finish a write")
        except OperatorError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        return state_message(self._service, self._settings)

    async def _being_repaired(self, problem: CorruptFrame, context: Any) -> None:
        self._service.guarded(partial(self._service.node.found_damage, problem))
        await context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"{problem}; it is being repaired, ask again")

    async def DescribeLog(self, request: pb.Nothing, context: Any) -> pb.LogDescription:
        node = self._service.node
        state = state_message(self._service, self._settings)
        return pb.LogDescription(
            broker_group=node.group,
            role=state.role,
            term=state.term,
            boot=state.boot,
            log_start=node.log.start,
            log_end=node.log.flushed_end,
            high_watermark=state.high_watermark,
            segments=node.log.bases,
            damaged=[
                pb.DamagedRange(begin=damage.begin, end=damage.end, reason=damage.reason) for damage in node.log.damaged
            ],
            start_chain=await asyncio.to_thread(node.log.stored.start_chain),
        )

    async def ReadLog(self, request: pb.ReadLogRequest, context: Any) -> AsyncIterator[pb.LogChunk]:
        """Stream frames as stored, damaged bytes included; the reader reports the damage. Closed segments are read from
        the files that now have their names.

        Readers share `read_log_bytes_per_s`, except copies under repair, because their group waits for them.

        PERMISSION_DENIED: the token is limited to some subjects, and the frames are of all subjects.
        """
        await _require_all_subjects(context)
        message_log, positions, me = self._service.node.log, self._service.reader_positions, object()
        pace = self._repairs_pace if request.for_repair else self._pace
        end = min(request.end, message_log.flushed_end)
        at = await asyncio.to_thread(self._first_frame, request.begin)
        positions[me] = request.begin
        try:
            while at is not None and at < end:
                positions[me] = at
                data = await asyncio.to_thread(self._chunk, at, end)
                if not data:  # its file is gone, or was cut meanwhile
                    at = await asyncio.to_thread(message_log.stored.next_frame, at + 8)
                    continue
                await asyncio.sleep(pace.wait_s(len(data), self._loop.time()))
                yield pb.LogChunk(offset=at, data=data)
                at += len(data)
        finally:
            del positions[me]

    async def ReadDerived(self, request: pb.ReadDerivedRequest, context: Any) -> AsyncIterator[pb.DerivedPart]:
        """Stream index and snapshot of a segment, as ReadLog streams frames. PERMISSION_DENIED: see ReadLog."""
        await _require_all_subjects(context)
        read = partial(self._service.node.log.stored.derived_files, request.base, index_only=request.index_only)
        index, snapshot = await asyncio.to_thread(read)
        for at in range(0, max(len(index), len(snapshot)), CHUNK_BYTES):
            part = pb.DerivedPart(index=index[at : at + CHUNK_BYTES], snapshot=snapshot[at : at + CHUNK_BYTES])
            await asyncio.sleep(self._pace.wait_s(len(part.index) + len(part.snapshot), self._loop.time()))
            yield part

    async def HoldLog(self, request: pb.Nothing, context: Any) -> AsyncIterator[pb.Nothing]:
        """Stop retention while the call lasts and the disk has room. PERMISSION_DENIED: see ReadLog."""
        await _require_all_subjects(context)
        holders, me = self._service.log_holders, object()
        holders.add(me)
        try:
            yield pb.Nothing()
            await asyncio.Event().wait()  # until the caller ends the call
        finally:
            holders.remove(me)

    def _first_frame(self, begin: int) -> int | None:
        message_log = self._service.node.log
        begin = max(begin, message_log.start)
        try:
            message_log.stored.look_again(begin)
        except CorruptFrame as problem:
            self._found(problem)
        return message_log.stored.next_frame(begin)

    def _chunk(self, at: int, end: int) -> bytes:
        """Read the frames that begin in `[at, end)`. No more, because a reader may want only the original of one dead
        letter.
        """
        message_log = self._service.node.log
        try:
            if segment_at(message_log.bases, at) == at:
                message_log.stored.look_again(at)
            return message_log.stored.read_intact(at, message_log.flushed_end, min(CHUNK_BYTES, end - at))
        except CorruptFrame as problem:
            self._found(problem)
            return message_log.stored.read_damaged(at)

    def _found(self, problem: CorruptFrame) -> None:
        self._loop.call_soon_threadsafe(self._service.guarded, partial(self._service.node.found_damage, problem))


async def _require_all_subjects(context: Any) -> None:
    if not caller().scope.all_subjects:
        text = f"token {caller().name!r} is limited to some subjects; the log holds those of all"
        await context.abort(grpc.StatusCode.PERMISSION_DENIED, text)


def _refused(method: str, peer: str, reason: str) -> None:
    log.warning("control call refused method=%s peer=%s: %s", method[:50], peer, reason)


SAMPLE_S = 5.0
SAMPLES_MAX = 121


class Sample(NamedTuple):
    """Number of messages since the process began, at a time in ms since 1970 UTC."""

    at_ms: int
    taken: int
    delivered: int
    acked: int


class Samples:
    """Samples of this copy's rates: every 5 s, kept for ten minutes, for any metaserver to show. Made by main.

    Args:
        read: messages taken, delivered and acked so far.
    """

    def __init__(self, read: Callable[[], tuple[int, int, int]]) -> None:
        self._read = read
        self._kept: deque[Sample] = deque(maxlen=SAMPLES_MAX)

    async def run(self) -> None:
        while True:
            self._kept.append(self._now())
            await asyncio.sleep(SAMPLE_S)

    def all(self) -> list[Sample]:
        """Return the samples, oldest first, and a new one at the end."""
        return [*self._kept, self._now()]

    def _now(self) -> Sample:
        return Sample(time.time_ns() // 1_000_000, *self._read())


class Pace:
    """Rate that several readers share. Each read begins after the time that all earlier bytes take at this rate."""

    def __init__(self, bytes_per_s: int) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_s = 0.0

    def wait_s(self, size: int, now_s: float) -> float:
        """Return the wait before `size` bytes may be sent, and count these bytes."""
        begin_s = max(self._free_s, now_s)
        self._free_s = begin_s + size / self._bytes_per_s
        return begin_s - now_s
