"""Shell. The gRPC service of the metaserver: routes of clients, watchdogs' leases and databases, tokens.

Methods for brokers and for consumer groups are in `rpc.brokers` and `rpc.consumer_groups`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import replace
from typing import Any, Protocol

import grpc
from google.protobuf.message import DecodeError

from qmq.errors import AccessError, InvalidName, InvalidRequest, NotServed, OperatorError, QmqError
from qmq.metaserver.access import Access, UnknownToken
from qmq.metaserver.actions.desk import Vault
from qmq.metaserver.cluster.registration import Ask
from qmq.metaserver.cluster.registry import Registry
from qmq.metaserver.model import WATCHDOGS, DataSource, LeaseRow
from qmq.metaserver.observability.metrics import Metrics
from qmq.metaserver.routes.hub import RouteHubs, TooManyWatches, WatchHub
from qmq.metaserver.rpc.access import Visits, wall_ms
from qmq.metaserver.rpc.brokers import BrokerRpc
from qmq.metaserver.rpc.consumer_groups import ConsumerGroupRpc, ConsumerGroups
from qmq.metaserver.storage.database import Database
from qmq.proto import qmq_pb2 as pb
from qmq.proto.qmq_pb2_grpc import MetaserverServicer
from qmq.rpc_access import caller
from qmq.subjects import check_name

SERVICE = "qmq.Metaserver"
ONLINE = 0
ANSWER_VALID_MS = 20_000
"""Time for which a broker caches an answer: a revocation takes effect there within a minute."""

Context = Any
"""grpc.aio.ServicerContext; grpcio has no types."""


class Hold(Protocol):
    """Keeps, takes or releases a lease; see `Upkeep.hold_lease`."""

    def __call__(self, wish: LeaseRow, *, take: bool, release: bool) -> Awaitable[LeaseRow]: ...


class MetaserverRpc(BrokerRpc, ConsumerGroupRpc, MetaserverServicer):  # type: ignore[misc]
    """The service. Created by main, once.

    Args:
        ask: queries a broker.
        hold: keeps, takes or releases a watchdog's lease.
    """

    def __init__(
        self,
        registry: Registry,
        hubs: RouteHubs,
        access: Access,
        metrics: Metrics,
        ask: Ask,
        hold: Hold,
        database: Database,
        vault: Vault,
        consumer_groups: ConsumerGroups,
    ) -> None:
        self._registry = registry
        self._hubs = hubs
        self._access = access
        self._metrics = metrics
        self._database = database
        self._vault = vault
        self._consumer_groups = consumer_groups
        self._ask = ask
        self._hold = hold
        self._logged: set[str] = set()
        self._sources: tuple[int, list[DataSource]] = (-1, [])
        """Data sources, with the directory's version before they were read."""
        self.visits = Visits(access)

    async def WatchRoutes(self, requests: object, context: Context) -> None:
        """Serve a client until it leaves. Receives and sends bytes, see `add_route_methods`.

        The stream is one task, which reads; the hub writes.
        """
        request = await _read(context)
        if request is None:
            return
        hub = await self._hub_of(request.kind, context)
        try:
            watch = hub.join(
                app=request.app[:100],
                client_id=request.client_id[:100],
                produces=request.produces,
                caller=replace(caller(), peer=str(context.peer())),
                send=context.write,
                looks_only=request.looks_only,
            )
        except TooManyWatches as error:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
            raise  # abort has raised already
        try:
            with self.visits.open(context):
                while request is not None:
                    self._metrics.route_requests.inc()
                    hub.confirm(watch, request.held)
                    hub.forget(watch, request.forgotten)
                    if request.subjects:  # without subjects it only confirms versions
                        await hub.ask(watch, request.subjects, request.held)
                    request = None  # 20,000 requests would take 25 MB while their clients are silent
                    request = await _read(context)
                await asyncio.Event().wait()  # the client has closed its side, and still receives
        finally:
            hub.leave(watch)

    async def _hub_of(self, kind: int, context: Context) -> WatchHub:
        try:
            return self._hubs.of(kind)
        except InvalidRequest as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            raise  # abort has raised already

    async def CountOldRoutes(self, request: pb.OldRoutesQuestion, context: Context) -> pb.OldRoutesAnswer:
        return pb.OldRoutesAnswer(**self._hubs.old_routes(request.broker_group, request.subject)._asdict())

    async def HoldLease(self, request: pb.LeaseRequest, context: Any) -> pb.Lease:
        try:
            check_name("room", request.name.removeprefix(WATCHDOGS))
            check_name("node", request.node)
            wish = LeaseRow(request.name, request.node, request.term, request.beat, request.address)
            row = await self._hold(wish, take=request.take, release=request.release)
        except QmqError as error:
            await context.abort(_lease_status(error), str(error))
            raise  # abort has raised already
        return pb.Lease(node=row.node, term=row.term, beat=row.beat, address=row.address)

    async def ListSources(self, request: pb.SourcesQuestion, context: Any) -> pb.SourceList:
        try:
            sources = await self._read_sources()
        except NotServed as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
            raise  # abort has raised already
        wanted = [source for source in sources if source.status == ONLINE and source.room == request.room]
        return pb.SourceList(sources=map(self._source, wanted))

    async def _read_sources(self) -> list[DataSource]:
        """Return the data sources, read again only after a change: watchdogs ask every few seconds."""
        version = self._registry.directory.version
        if not self._database.is_up or self._sources[0] != version:
            self._sources = version, await self._database.read(lambda repository: repository.data_sources())
        return self._sources[1]

    def _source(self, source: DataSource) -> pb.Source:
        try:
            password, problem = self._vault.decrypt(source.password) if source.password else "", ""
        except OperatorError as error:
            password, problem = "", str(error)
        return pb.Source(
            url=source.url,
            user=source.user_name,
            password=password,
            table=source.table,
            rate=source.rate,
            age_s=source.age_s,
            problem=problem,
        )

    async def CheckToken(self, request: pb.TokenQuestion, context: Any) -> pb.TokenAnswer:
        now_ms = wall_ms()
        try:
            who, expires_ms = self._access.look_up(request.token, now_ms=now_ms)
        except AccessError as error:
            lost = self._database.set_aside_because if isinstance(error, UnknownToken) else ""
            await context.abort(grpc.StatusCode.UNAVAILABLE if lost else grpc.StatusCode.NOT_FOUND, lost or str(error))
            raise  # abort has raised already
        left_ms = expires_ms - now_ms if expires_ms else 0
        return pb.TokenAnswer(
            name=who.name,
            role=who.role,
            subjects=who.scope.subjects,
            groups=who.scope.groups,
            valid_ms=min(ANSWER_VALID_MS, left_ms) if expires_ms else ANSWER_VALID_MS,
            expires_in_ms=left_ms,
        )


async def _read(context: Context) -> pb.RouteRequest | None:
    """Return the next request; None: the client sends no more."""
    data = await context.read()
    if data is grpc.aio.EOF:
        return None
    try:
        return pb.RouteRequest.FromString(data)
    except DecodeError:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "this is no RouteRequest")
        raise  # abort has raised already


def add_route_methods(service: MetaserverRpc, server: Any) -> None:
    """Register WatchRoutes with bytes, after the generated function, whose entry this replaces.

    The hub has encoded each route once; protobuf would encode it again for each client.
    """
    handler = grpc.stream_stream_rpc_method_handler(service.WatchRoutes)
    server.add_registered_method_handlers(SERVICE, {"WatchRoutes": handler})


def _lease_status(error: QmqError) -> grpc.StatusCode:
    return grpc.StatusCode.INVALID_ARGUMENT if isinstance(error, InvalidName) else grpc.StatusCode.UNAVAILABLE
