"""Shell. Calls of the metaserver to a broker's control port."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc

from qmq.access import Token, token_metadata, token_text
from qmq.control_plane import CHANNEL_OPTIONS
from qmq.errors import AccessError, CallError, InvalidRequest, NotServed, OperatorError, QmqError
from qmq.metaserver.cluster.group_starts import Asked
from qmq.metaserver.model import Broker, ReplicaState
from qmq.metaserver.rpc.convert import state_from_message
from qmq.proto import qmq_pb2 as pb
from qmq.proto.qmq_pb2_grpc import BrokerStub
from qmq.redrive.dead_letters import DeadLetters, Destination, Master
from qmq.types import Endpoint

_SILENT = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED})
"""No answer, or not in time."""
_REFUSALS = frozenset(
    {
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.UNIMPLEMENTED,
    }
)
"""Refusals before any change. After another failure the broker may have carried out the call."""


class Brokers:
    """Calls brokers with the cluster's token. Created by main; a connection lasts one call.

    Every method raises OperatorError when the broker refuses (nothing changed there) and NotServed without an answer in
    time.
    """

    def __init__(self, token: Token, *, timeout_ms: int) -> None:
        self._token = token
        self._timeout_ms = timeout_ms

    async def replica_status(self, broker: Broker) -> ReplicaState:
        async with self._stub(broker) as (stub, metadata):
            call = stub.ReplicaStatus(pb.Nothing(), **metadata, timeout=self._timeout_ms / 1000)
            return await self._ask(broker, call)

    async def rates(self, broker: Broker) -> pb.RatesAnswer:
        """Return a master's rates of the last ten minutes."""
        async with self._stub(broker) as (stub, metadata):
            call = stub.Rates(pb.Nothing(), **metadata, timeout=self._timeout_ms / 1000)
            answer: pb.RatesAnswer = await self._call(broker, call)
            return answer

    async def settings(self, broker: Broker) -> dict[str, str]:
        """Return the settings of a broker, without secrets."""
        async with self._stub(broker) as (stub, metadata):
            call = stub.Settings(pb.Nothing(), **metadata, timeout=self._timeout_ms / 1000)
            return dict(sorted((await self._call(broker, call)).settings.items()))

    async def prepare_swap(
        self, broker: Broker, *, term: int, hold_ms: int, timeout_ms: int, target: str = "", promised_term: int = 0
    ) -> ReplicaState:
        """Make a master readonly until the slave with the incarnation `target` (empty: its only one) has everything.

        The master then promises to be no master of a term older than `promised_term`.
        """
        request = pb.PrepareSwapRequest(
            term=term, hold_ms=hold_ms, timeout_ms=timeout_ms, target=target, promised_term=promised_term
        )
        limit = (timeout_ms + self._timeout_ms) / 1000
        async with self._stub(broker) as (stub, metadata):
            return await self._ask(broker, stub.PrepareSwap(request, **metadata, timeout=limit))

    async def cancel_swap(self, broker: Broker) -> ReplicaState:
        async with self._stub(broker) as (stub, metadata):
            call = stub.CancelSwap(pb.Nothing(), **metadata, timeout=self._timeout_ms / 1000)
            return await self._ask(broker, call)

    async def prepare_failover(
        self,
        broker: Broker,
        *,
        term: int,
        hold_ms: int,
        silent_ms: int,
        promised_term: int = 0,
        master_gone: bool = False,
    ) -> ReplicaState:
        """Make a slave leave its master for a while, and return its state; it refuses while connected to its master.

        With `promised_term` it never follows a master of an older term again; `master_gone` is as in `promotion.Facts`.
        """
        request = pb.PrepareFailoverRequest(
            term=term, hold_ms=hold_ms, silent_ms=silent_ms, promised_term=promised_term, master_gone=master_gone
        )
        async with self._stub(broker) as (stub, metadata):
            call = stub.PrepareFailover(request, **metadata, timeout=self._timeout_ms / 1000)
            return await self._ask(broker, call)

    async def consumers(
        self,
        broker: Broker,
        *,
        subject: str = "",
        group: str = "",
        behind_max: int = 0,
        known: Iterable[pb.KnownGroup] = (),
        unused_before_ms: int = 0,
    ) -> pb.ConsumersAnswer:
        """Return the progress of a master's consumer groups; empty: all. `behind_max`: so many, the largest lag first.

        Groups that are `known` count where they have no position yet. With `unused_before_ms`: only those without a
        consumer since before that time.
        """
        request = pb.ConsumersRequest(
            subject=subject, group=group, behind_max=behind_max, known=known, unused_before_ms=unused_before_ms
        )
        async with self._stub(broker) as (stub, metadata):
            call = stub.Consumers(request, **metadata, timeout=self._timeout_ms / 1000)
            answer: pb.ConsumersAnswer = await self._call(broker, call)
            return answer

    async def mark_groups(self, broker: Broker, mark: str, groups: Sequence[Asked]) -> list[bool]:
        """Make a master note the ends of new consumer groups' subjects; return which groups have a position there."""
        request = pb.MarkGroupsRequest(mark=mark, groups=[pb.NewGroup(**group._asdict()) for group in groups])
        async with self._stub(broker) as (stub, metadata):
            call = stub.MarkGroups(request, **metadata, timeout=self._timeout_ms / 1000)
            answer: pb.MarkGroupsAnswer = await self._call(broker, call)
            return list(answer.known)

    async def reset_offset(self, broker: Broker, request: pb.ResetOffsetRequest) -> pb.ResetOffsetAnswer:
        """Move a consumer group's position at a master; it answers when both copies have it."""
        async with self._stub(broker) as (stub, metadata):
            call = stub.ResetOffset(request, **metadata, timeout=self._timeout_ms / 1000)
            answer: pb.ResetOffsetAnswer = await self._call(broker, call, silent=lambda code: code not in _REFUSALS)
            return answer

    async def dead_letters(
        self, broker: Broker, *, subject: str, group: str, to: str = "", at: Sequence[Broker] = (), source: str = ""
    ) -> DeadLetters:
        """Subscribe to a consumer group's dead letters at a master; close the returned session.

        Args:
            to: the subject that receives them in place of their group.
            at: the masters that serve it.
            source: the subject that an operator chose for them, if any.
        """
        way = Destination.of(to, [_master(master) for master in at], broker.group) if to else None
        try:
            return await DeadLetters.open(_master(broker), token_text(self._token), subject, group, way, source)
        except (AccessError, CallError) as error:
            raise OperatorError(f"{broker.group} refused: {error}") from error
        except QmqError as error:
            raise NotServed(f"{broker.group}: {error}") from error

    async def browse(self, broker: Broker, request: pb.BrowseRequest) -> pb.BrowseAnswer:
        """Return stored messages of a master."""
        async with self._stub(broker) as (stub, metadata):
            call = stub.Browse(request, **metadata, timeout=self._timeout_ms / 1000)
            answer: pb.BrowseAnswer = await self._call(broker, call)
            return answer

    async def delay_stats(self, broker: Broker, request: pb.DelayStatsRequest) -> pb.DelayStatsAnswer:
        """Return the pending messages of a delay master."""
        async with self._stub(broker) as (stub, metadata):
            call = stub.DelayStats(request, **metadata, timeout=self._timeout_ms / 1000)
            answer: pb.DelayStatsAnswer = await self._call(broker, call)
            return answer

    async def list_delayed(self, broker: Broker, request: pb.ListDelayedRequest) -> pb.ListDelayedAnswer:
        async with self._stub(broker) as (stub, metadata):
            call = stub.ListDelayed(request, **metadata, timeout=self._timeout_ms / 1000)
            answer: pb.ListDelayedAnswer = await self._call(broker, call)
            return answer

    async def cancel_delayed(self, broker: Broker, request: pb.CancelDelayedRequest) -> pb.CancelDelayedAnswer:
        """Cancel messages at a master; it answers when both copies have it."""
        async with self._stub(broker) as (stub, metadata):
            call = stub.CancelDelayed(request, **metadata, timeout=self._timeout_ms / 1000)
            answer: pb.CancelDelayedAnswer = await self._call(broker, call, silent=lambda code: code not in _REFUSALS)
            return answer

    async def quarantine(self, broker: Broker, request: pb.QuarantineRequest) -> pb.QuarantineAnswer:
        """List a copy's quarantined files, or delete some."""
        async with self._stub(broker) as (stub, metadata):
            call = stub.Quarantine(request, **metadata, timeout=self._timeout_ms / 1000)
            answer: pb.QuarantineAnswer = await self._call(broker, call)
            return answer

    @asynccontextmanager
    async def _stub(self, broker: Broker) -> AsyncIterator[tuple[Any, dict[str, Any]]]:
        async with grpc.aio.insecure_channel(_control(broker), options=CHANNEL_OPTIONS) as channel:
            yield BrokerStub(channel), {"metadata": token_metadata(self._token)}

    async def _ask(self, broker: Broker, call: Any) -> ReplicaState:
        answer = await self._call(broker, call)
        try:
            return state_from_message(answer)
        except InvalidRequest as error:
            raise OperatorError(f"{broker.key} ({broker.part.name} of {broker.group}) is no broker: {error}") from None

    async def _call(
        self, broker: Broker, call: Any, *, silent: Callable[[grpc.StatusCode], bool] = _SILENT.__contains__
    ) -> Any:
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            text = f"{broker.key} ({broker.part.name} of {broker.group})"
            if silent(error.code()):
                where = _control(broker)
                raise NotServed(f"{text} did not answer at {where}: {error.details() or error.code().name}") from error
            raise OperatorError(f"{text} refused: {error.details()}") from error


def _control(broker: Broker) -> str:
    return str(Endpoint(broker.ip, broker.control_port))


def _master(broker: Broker) -> Master:
    return Master(broker.group, broker.ip, broker.serve_port, broker.control_port)
