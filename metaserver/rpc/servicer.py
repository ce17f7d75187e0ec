"""Shell. The gRPC service of the metaserver: brokers register and beat, clients watch routes."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import grpc
from sqlalchemy.exc import SQLAlchemyError

from metaserver.access import Access
from metaserver.liveness import PlaceTaken
from metaserver.metrics import Metrics
from metaserver.model import Broker, BrokerKey
from metaserver.registry import Registry, now_ms
from metaserver.rpc import convert
from metaserver.rpc.tokens import TokenRpc
from qmq.errors import CallError, MissingRight, OperatorError, QmqError
from qmq.proto import qmq_pb2 as pb
from qmq.proto.qmq_pb2_grpc import MetaserverServicer
from qmq.rights import CONSUME, PRODUCE
from qmq.rpc_access import caller
from qmq.subjects import check_name

log = logging.getLogger("qmq.metaserver")

REPEAT_S = 1.0
"""A route that could not be stored is tried again so often, while its watch lasts."""
REMEMBERED_MAX = 10_000

Context = Any
"""grpc.aio.ServicerContext; grpcio comes without types."""


class MetaserverRpc(TokenRpc, MetaserverServicer):  # type: ignore[misc]
    """Created by main, once. Each stream is a task of the gRPC server and ends with its connection."""

    def __init__(
        self, registry: Registry, access: Access, metrics: Metrics, *,
        watch_subjects_max: int,
    ) -> None:  # fmt: skip
        self._registry = registry
        self._access = access
        self._metrics = metrics
        self._watch_subjects_max = watch_subjects_max
        self._logged: set[str] = set()
        self._version = time.time_ns() // 1_000_000

    # -- brokers --------------------------------------------------------------------------------------------------

    async def Register(self, request: pb.BrokerIdentity, context: Context) -> pb.Assignment:
        key = BrokerKey(request.hostname, request.serve_port)
        try:
            caller().require_group(_known_group(self._registry, key))
            broker = await self._registry.register(convert.broker_from_identity(request))
            if request.broker_group not in ("", broker.group):
                raise OperatorError(f"{key} belongs to {broker.group}, not to {request.broker_group}")
        except QmqError as error:
            self._metrics.registrations.labels(_known_group(self._registry, key), "refused").inc()
            self._log_once(f"registration refused broker={str(key)[:200]!r} reason={error}")
            await context.abort(_status(error), str(error))
            raise  # abort has raised already
        except SQLAlchemyError as error:
            self._log_once(f"registration not stored broker={key} reason={type(error).__name__}")
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the metaserver's database does not answer; repeat soon")
            raise
        self._metrics.registrations.labels(broker.group, "accepted").inc()
        log.info("broker registered broker=%s broker_group=%s role=%s", key, broker.group, broker.role.name)
        assignment = convert.assignment_for(self._registry.directory, key)
        if assignment is None:
            text = f"{key} was replaced at this moment; register again"
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, text)
        assert assignment is not None  # abort raises
        return assignment

    async def Heartbeat(
        self, requests: AsyncIterator[pb.BrokerState], context: Context
    ) -> AsyncIterator[pb.Assignment]:
        first = await anext(aiter(requests), None)
        if first is None:
            return
        broker, session = await self._join(first, context)
        with self._registry.changes.watch() as wake:
            reader = asyncio.create_task(self._read_beats(broker.key, session, first, requests, wake))
            try:
                sent: pb.Assignment | None = None
                while not reader.done():
                    wake.clear()
                    assignment = convert.assignment_for(self._registry.directory, broker.key)
                    if assignment is None:
                        text = f"{broker.key} has no place in a group any more; register again to learn what to do"
                        await context.abort(grpc.StatusCode.FAILED_PRECONDITION, text)
                    elif assignment != sent:
                        sent = assignment
                        yield assignment
                    await wake.wait()
                if reader.done() and not reader.cancelled() and reader.exception() is None and reader.result():
                    await context.abort(grpc.StatusCode.ABORTED, f"a newer heartbeat stream of {broker.key} took over")
            finally:
                reader.cancel()
                self._registry.leave(broker.key, session)
                self._metrics.disconnects.labels(broker.group).inc()
                log.info("heartbeats ended broker=%s broker_group=%s", broker.key, broker.group)

    async def _join(self, first: pb.BrokerState, context: Context) -> tuple[Broker, int]:
        key = BrokerKey(first.hostname, first.serve_port)
        broker = self._registry.directory.find(key)
        if broker is None or not first.incarnation or broker.incarnation != first.incarnation:
            text = f"{str(key)[:200]}, incarnation {first.incarnation[:100]!r}, is not registered; call Register first"
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, text)
        assert broker is not None  # abort raises
        try:
            return broker, self._registry.liveness.join(key, first.incarnation, now_ms=now_ms())
        except PlaceTaken as error:
            self._log_once(f"heartbeats refused broker={key} reason={error}")
            await context.abort(_status(error), str(error))
            raise

    async def _read_beats(
        self, key: BrokerKey, session: int, first: pb.BrokerState, requests: AsyncIterator[pb.BrokerState],
        wake: asyncio.Event,
    ) -> bool:  # fmt: skip
        """Take in heartbeats until the stream ends; True: because a newer stream took over."""
        message: pb.BrokerState | None = first
        try:
            while message is not None:
                state = convert.state_from_message(message)
                if not self._registry.beat(key, session, state):
                    return True
                await self._note(key, state)
                message = await anext(aiter(requests), None)
            return False
        finally:
            wake.set()

    async def _note(self, key: BrokerKey, said: Any) -> None:
        broker = self._registry.directory.find(key)
        if broker is None:
            return
        group = self._registry.directory.groups[broker.group]
        self._metrics.heartbeats.labels(group.name).inc()
        if said.term > group.term:
            self._log_once(
                f"broker knows a newer term than the database broker={key} broker_group={group.name} term={said.term} "
                f"stored_term={group.term}: was the database restored from an old copy?"
            )
        try:
            await self._registry.note_completeness(group, said)
        except Exception as error:  # the database is away: the next heartbeat says it again
            self._log_once(f"heartbeat not stored broker_group={group.name} reason={error}")

    # -- clients --------------------------------------------------------------------------------------------------

    async def WatchRoutes(
        self, requests: AsyncIterator[pb.RouteRequest], context: Context
    ) -> AsyncIterator[pb.RouteUpdate]:
        subjects: dict[str, None] = {}
        sent: dict[str, pb.SubjectRoute] = {}
        first = await anext(aiter(requests), None)
        if first is None:
            return
        may = partial(caller().require_subject, PRODUCE if first.produces else CONSUME)
        self._metrics.watches.inc()
        with self._registry.changes.watch() as wake:
            self._take(first, subjects)
            asked = asyncio.Event()  # every request is answered, if only by "nothing changed"
            asked.set()
            reader = asyncio.create_task(self._read_requests(requests, subjects, asked, wake))
            try:
                while True:
                    if len(subjects) > self._watch_subjects_max:
                        text = f"one watch takes {self._watch_subjects_max} subjects at most; open another one"
                        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, text)
                    wake.clear()
                    owes_answer = asked.is_set()
                    asked.clear()
                    routes, again = await self._changed_routes(list(subjects), sent, may)
                    if routes or owes_answer:
                        self._version += 1
                        self._metrics.route_updates.inc(len(routes))
                        yield pb.RouteUpdate(version=self._version, routes=routes)
                    await _wait(wake, REPEAT_S if again else None)
            finally:
                reader.cancel()
                self._metrics.watches.dec()

    async def _read_requests(
        self, requests: AsyncIterator[pb.RouteRequest], subjects: dict[str, None], asked: asyncio.Event,
        wake: asyncio.Event,
    ) -> None:  # fmt: skip
        async for request in requests:
            self._take(request, subjects)
            asked.set()
            wake.set()

    def _take(self, request: pb.RouteRequest, subjects: dict[str, None]) -> None:
        self._metrics.route_requests.inc()
        subjects.update(dict.fromkeys(request.subjects))

    async def _changed_routes(
        self, subjects: list[str], sent: dict[str, pb.SubjectRoute], may: Callable[[str], None]
    ) -> tuple[list[pb.SubjectRoute], bool]:
        """Return the routes that differ from what was sent, and whether one failed and should be tried again."""
        changed, again = [], False
        for subject in subjects:
            try:
                route = await self._route(subject, may)
            except Exception as error:  # the database is away: known routes go on, a new one is tried again
                self._log_once(f"route not stored subject={subject!r} reason={error}")
                route, again = pb.SubjectRoute(subject=subject, refused="the route cannot be stored now"), True
            if sent.get(subject) != route:
                sent[subject] = route
                changed.append(route)
        return changed, again

    async def _route(self, subject: str, may: Callable[[str], None]) -> pb.SubjectRoute:
        try:
            check_name("subject", subject)
            may(subject)
        except (CallError, MissingRight) as error:
            self._log_once(f"subject refused subject={subject[:200]!r} reason={error}")
            return pb.SubjectRoute(subject=subject, refused=str(error))
        groups = await self._registry.route(subject)
        if not groups:
            return pb.SubjectRoute(subject=subject, refused="there is no broker group yet; AddBroker adds one")
        return convert.route_message(subject, groups)

    # -- both -----------------------------------------------------------------------------------------------------

    def _log_once(self, line: str) -> None:
        if line not in self._logged:
            if len(self._logged) >= REMEMBERED_MAX:
                self._logged.clear()
            self._logged.add(line)
            log.warning("%s", line)


def _status(error: QmqError) -> grpc.StatusCode:
    if isinstance(error, MissingRight):
        return grpc.StatusCode.PERMISSION_DENIED
    if isinstance(error, PlaceTaken):
        return grpc.StatusCode.ALREADY_EXISTS
    if isinstance(error, OperatorError):
        return grpc.StatusCode.FAILED_PRECONDITION
    return grpc.StatusCode.INVALID_ARGUMENT


def _known_group(registry: Registry, key: BrokerKey) -> str:
    broker = registry.directory.find(key)
    return broker.group if broker else ""


async def _wait(wake: asyncio.Event, timeout_s: float | None) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await wake.wait()
    except TimeoutError:
        pass
