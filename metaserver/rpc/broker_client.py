"""Shell. Calls of the metaserver to a broker's control port."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import grpc
from google.protobuf.message import Message

from qmq.access import Token, token_metadata, token_text
from qmq.control_plane import CHANNEL_OPTIONS
from qmq.errors import AccessError, CallError, InvalidRequest, NotServed, OperatorError, QmqError
from qmq.metaserver.cluster.group_starts import NewGroup
from qmq.metaserver.model import Broker, ReplicaState
from qmq.metaserver.rpc.convert import state_from_message
from qmq.proto import qmq_pb2 as pb
from qmq.proto.qmq_pb2_grpc import BrokerStub
from qmq.redrive.dead_letters import DeadLetters, Destination, Master
from qmq.types import Endpoint

A = TypeVar("A", bound=Message)

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
        return await self._ask(broker, "ReplicaStatus", pb.Nothing())

    async def rates(self, broker: Broker) -> pb.RatesAnswer:
        """Return a master's rates of the last ten minutes."""
        return await self._call(broker, "Rates", pb.Nothing(), pb.RatesAnswer)

    async def settings(self, broker: Broker) -> dict[str, str]:
        """Return the settings of a broker, without secrets."""
        answer = await self._call(broker, "Settings", pb.Nothing(), pb.SettingsAnswer)
        return dict(sorted(answer.settings.items()))

    async def prepare_swap(
        self, broker: Broker, *, term: int, hold_ms: int, timeout_ms: int, target: str = "", promised_term: int = 0
    ) -> ReplicaState:
        """Make a master readonly until the slave with the incarnation `target` (empty: its only one) has everything.

        The master then promises to be no master of a term older than `promised_term`.
        """
        request = pb.PrepareSwapRequest(
            term=term, hold_ms=hold_ms, timeout_ms=timeout_ms, target=target, promised_term=promised_term
        )
        return await self._ask(broker, "PrepareSwap", request, more_ms=timeout_ms)

    async def cancel_swap(self, broker: Broker) -> ReplicaState:
        return await self._ask(broker, "CancelSwap", pb.Nothing())

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
        return await self._ask(broker, "PrepareFailover", request)

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
        """Return the progress of a master's consumer groups.

        Args:
            subject, group: only these; empty: all.
            behind_max: at most so many groups, the largest lag first; 0: all.
            known: groups that count where they have no position yet.
            unused_before_ms: only groups without a consumer since before that time; 0: all.
        """
        request = pb.ConsumersRequest(
            subject=subject, group=group, behind_max=behind_max, known=known, unused_before_ms=unused_before_ms
        )
        return await self._call(broker, "Consumers", request, pb.ConsumersAnswer)

    async def mark_groups(self, broker: Broker, mark: str, groups: Sequence[NewGroup]) -> list[bool]:
        """Make a master note the ends of new consumer groups' subjects; return which groups have a position there."""
        request = pb.MarkGroupsRequest(mark=mark, groups=[pb.NewGroup(**group._asdict()) for group in groups])
        return list((await self._call(broker, "MarkGroups", request, pb.MarkGroupsAnswer)).known)

    async def reset_offset(self, broker: Broker, request: pb.ResetOffsetRequest) -> pb.ResetOffsetAnswer:
        """Move a consumer group's position at a master; it answers when both copies have it."""
        return await self._call(broker, "ResetOffset", request, pb.ResetOffsetAnswer, silent=_is_unknown)

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
        return await self._call(broker, "Browse", request, pb.BrowseAnswer)

    async def delay_stats(self, broker: Broker, request: pb.DelayStatsRequest) -> pb.DelayStatsAnswer:
        """Return the pending messages of a delay master."""
        return await self._call(broker, "DelayStats", request, pb.DelayStatsAnswer)

    async def list_delayed(self, broker: Broker, request: pb.ListDelayedRequest) -> pb.ListDelayedAnswer:
        return await self._call(broker, "ListDelayed", request, pb.ListDelayedAnswer)

    async def cancel_delayed(self, broker: Broker, request: pb.CancelDelayedRequest) -> pb.CancelDelayedAnswer:
        """Cancel messages at a master; it answers when both copies have it."""
        return await self._call(broker, "CancelDelayed", request, pb.CancelDelayedAnswer, silent=_is_unknown)

    async def quarantine(self, broker: Broker, request: pb.QuarantineRequest) -> pb.QuarantineAnswer:
        """List a copy's quarantined files, or delete some."""
        return await self._call(broker, "Quarantine", request, pb.QuarantineAnswer)

    async def _ask(self, broker: Broker, method: str, request: Message, *, more_ms: int = 0) -> ReplicaState:
        """Call a method that answers with the broker's state."""
        answer = await self._call(broker, method, request, pb.BrokerState, more_ms=more_ms)
        try:
            return state_from_message(answer)
        except InvalidRequest as error:
            raise OperatorError(f"{broker.key} ({broker.part.name} of {broker.group}) is no broker: {error}") from None

    async def _call(
        self,
        broker: Broker,
        method: str,
        request: Message,
        answer_type: type[A],
        *,
        more_ms: int = 0,
        silent: Callable[[grpc.StatusCode], bool] = _SILENT.__contains__,
    ) -> A:
        """Call a method of a broker's service, over a connection of its own.

        Args:
            more_ms: time that the method may take beyond the usual limit.
            silent: returns whether a status means that the broker did not answer.
        """
        limit_s = (self._timeout_ms + more_ms) / 1000
        async with grpc.aio.insecure_channel(_control(broker), options=CHANNEL_OPTIONS) as channel:
            call = getattr(BrokerStub(channel), method)
            try:
                answer = await call(request, metadata=token_metadata(self._token), timeout=limit_s)
            except grpc.aio.AioRpcError as error:
                text = f"{broker.key} ({broker.part.name} of {broker.group})"
                if silent(error.code()):
                    why = error.details() or error.code().name
                    raise NotServed(f"{text} did not answer at {_control(broker)}: {why}") from error
                raise OperatorError(f"{text} refused: {error.details()}") from error
        assert isinstance(answer, answer_type), "the stub decodes it"
        return answer


def _is_unknown(code: grpc.StatusCode) -> bool:
    """Return whether a change may have been made despite this status."""
    return code not in _REFUSALS


def _control(broker: Broker) -> str:
    return str(Endpoint(broker.ip, broker.control_port))


def _master(broker: Broker) -> Master:
    return Master(broker.group, broker.ip, broker.serve_port, broker.control_port)
