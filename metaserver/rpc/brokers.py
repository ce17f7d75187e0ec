"""Shell. The gRPC methods of brokers: registration, and heartbeats that are answered with assignments."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc

from qmq.errors import InvalidRequest, MissingRight, NotServed, QmqError
from qmq.logs import retrieve_error
from qmq.metaserver.cluster.liveness import PlaceTaken
from qmq.metaserver.cluster.registration import Ask
from qmq.metaserver.cluster.registry import Registry
from qmq.metaserver.model import Broker, BrokerKey, Directory, ReplicaState
from qmq.metaserver.observability.metrics import Metrics
from qmq.metaserver.roles import failover, rules
from qmq.metaserver.rpc import convert
from qmq.metaserver.rpc.access import Visits
from qmq.metaserver.storage.database import DatabaseAway
from qmq.proto import qmq_pb2 as pb
from qmq.rpc_access import caller, status_of
from qmq.types import Role

log = logging.getLogger("qmq.metaserver")

REMEMBERED_MAX = 10_000
STOPPING = "this metaserver stops; ask /meta/address for another one"

Context = Any
"""grpc.aio.ServicerContext; grpcio has no types."""


class BrokerRpc:
    """Part of the metaserver's service. Each stream is a task of the gRPC server and ends with its connection."""

    _registry: Registry
    _metrics: Metrics
    _ask: Ask
    _logged: set[str]
    visits: Visits

    async def Register(self, request: pb.BrokerIdentity, context: Context) -> pb.Assignment:
        key = BrokerKey(request.hostname, request.serve_port)
        try:
            broker = await self._register(request, key)
        except QmqError as error:
            self._metrics.registrations.labels(_known_group(self._registry, key), "refused").inc()
            self._log_once(f"registration refused broker={str(key)[:200]!r} reason={error}")
            await context.abort(_status(error), str(error))
            raise  # abort has raised already
        self._metrics.registrations.labels(broker.group, "accepted").inc()
        log.info("broker registered broker=%s broker_group=%s role=%s", key, broker.group, broker.part.name)
        assignment = convert.assignment_for(self._registry.directory, key)
        if assignment is None or not _is_of(self._registry.directory.find(key), request):
            text = f"{key} was replaced at this moment; register again"
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, text)
        assert assignment is not None  # abort raises
        try:
            points = await self._registry.points_of(
                broker.group, must_be_read=request.begins and _leads_several(assignment)
            )
        except DatabaseAway as error:
            await context.abort(_status(error), str(error))
            raise
        assignment.points.extend(convert.point_message(point) for point in points.by_incarnation.values())
        assignment.loss_accepted_term = points.loss_accepted_term
        return assignment

    async def _register(self, request: pb.BrokerIdentity, key: BrokerKey) -> Broker:
        if self._registry.is_stopping:
            raise NotServed(STOPPING)
        caller().require_group(_known_group(self._registry, key))
        if (known := self._registry.directory.find(key)) is not None:
            rules.check_group(known, request.broker_group)  # before it claims the place: a rejected broker is not up
        broker = await self._registry.registration.register(
            convert.broker_from_identity(request), self._ask, term=max(request.term, 0)
        )
        caller().require_group(broker.group)
        if request.begins:
            await failover.begin_term_at_start(self._registry, broker)
        return broker

    async def Heartbeat(
        self, requests: AsyncIterator[pb.BrokerState], context: Context
    ) -> AsyncIterator[pb.Assignment]:
        first = await anext(aiter(requests), None)
        if first is None:
            return
        broker, session = await self._join(first, context)
        with self._registry.mirror.directory_changes.watch(broker.key) as wake, self.visits.open(context):
            reader = asyncio.create_task(self._read_beats(broker.key, session, first, requests, wake))
            reader.add_done_callback(retrieve_error)
            try:
                seen: Directory | None = None
                assignment: pb.Assignment | None = None
                while not reader.done():
                    wake.clear()
                    sent = assignment
                    if seen is not self._registry.directory:
                        seen = self._registry.directory
                        assignment = self._part_of(broker, seen)
                    if self._registry.is_stopping:
                        await context.abort(grpc.StatusCode.UNAVAILABLE, STOPPING)
                    elif assignment is None:
                        text = f"{broker.key} has no place in a group any more, or not with this data directory"
                        await context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"{text}; register again")
                    yield _with_clock(assignment if assignment != sent else None)
                    await wake.wait()
                if reader.cancelled():
                    return
                if isinstance(error := reader.exception(), InvalidRequest):
                    self._log_once(f"heartbeats refused broker={broker.key} reason={error}")
                    await context.abort(_status(error), str(error))
                elif error is None and reader.result():
                    text = f"a newer heartbeat stream of {broker.key} replaced this one"
                    await context.abort(grpc.StatusCode.ABORTED, text)
            finally:
                reader.cancel()
                self._registry.leave(broker.key, session)
                self._metrics.disconnects.labels(broker.group).inc()
                log.info("heartbeats ended broker=%s broker_group=%s", broker.key, broker.group)

    async def _join(self, first: pb.BrokerState, context: Context) -> tuple[Broker, str]:
        key = BrokerKey(first.hostname, first.serve_port)
        broker = self._registry.directory.find(key)
        if broker is None or not first.incarnation or not _is_of(broker, first):
            text = f"{str(key)[:200]}, incarnation {first.incarnation[:100]!r}, is not registered; call Register first"
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, text)
        assert broker is not None  # abort raises
        try:
            caller().require_group(broker.group)
            return broker, self._registry.join(key, first.incarnation)
        except (PlaceTaken, MissingRight) as error:
            self._log_once(f"heartbeats refused broker={key} reason={error}")
            await context.abort(_status(error), str(error))
            raise

    def _part_of(self, broker: Broker, directory: Directory) -> pb.Assignment | None:
        """Return the assignment of a broker with a stream; None: it must register again.

        A slave also registers again after its row was restored from before its registration: it would count as down
        despite its heartbeats. A master would be rejected, so it continues, and an operator decides.
        """
        row = directory.find(broker.key)
        if row is not None and row.instance not in ("", broker.instance):
            return None  # another process got its role since
        if (
            row is not None
            and row.incarnation != broker.incarnation
            and (row.role == Role.SLAVE or not row.incarnation)
        ):
            return None
        return convert.assignment_for(directory, broker.key)

    async def _read_beats(
        self,
        key: BrokerKey,
        session: str,
        first: pb.BrokerState,
        requests: AsyncIterator[pb.BrokerState],
        wake: asyncio.Event,
    ) -> bool:
        """Process heartbeats until the stream ends; True: a newer stream replaced it."""
        beats = self._metrics.heartbeats.labels(_known_group(self._registry, key))
        heartbeat, state = first, _state(first, first)
        try:
            while self._registry.beat(key, session, state):
                beats.inc()
                wake.set()  # each heartbeat is answered, with the clock
                message = await anext(aiter(requests), None)
                if message is None:
                    return False
                if message != heartbeat:
                    heartbeat, state = message, _state(message, first)
            return True
        finally:
            wake.set()

    def _log_once(self, line: str) -> None:
        if line not in self._logged:
            if len(self._logged) >= REMEMBERED_MAX:
                self._logged.clear()
            self._logged.add(line)
            log.warning("%s", line)


def _is_of(broker: Broker | None, process: pb.BrokerIdentity | pb.BrokerState) -> bool:
    """Return whether a row names this data directory, at this place."""
    return broker is not None and (broker.incarnation, broker.instance) == (process.incarnation, process.instance)


def _state(message: pb.BrokerState, first: pb.BrokerState) -> ReplicaState:
    """Return the state in a heartbeat of the stream that began with `first`.

    Raises:
        InvalidRequest: no broker sends this, or no database can store it. Points of all groups are stored in one
            statement, which one invalid point would block.
    """
    if message.incarnation != first.incarnation:
        raise InvalidRequest(
            "a heartbeat stream belongs to one data directory; open another stream for another directory"
        )
    return convert.state_from_message(message)


def _leads_several(assignment: pb.Assignment) -> bool:
    return assignment.role == Role.MASTER and len(assignment.slaves) > 1


def _with_clock(assignment: pb.Assignment | None) -> pb.Assignment:
    """Return a reply with the clock; without an assignment the earlier one stays."""
    message = pb.Assignment(clock_ms=time.time_ns() // 1_000_000)
    if assignment is not None:
        message.MergeFrom(assignment)
    return message


def _status(error: QmqError) -> grpc.StatusCode:
    return grpc.StatusCode.ALREADY_EXISTS if isinstance(error, PlaceTaken) else status_of(error)


def _known_group(registry: Registry, key: BrokerKey) -> str:
    broker = registry.directory.find(key)
    return broker.group if broker else ""
