"""Shell. The gRPC service of the metaserver: routes of clients, watchdogs' leases and databases, tokens.

Methods for brokers are in `rpc.brokers`.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import replace
from operator import methodcaller
from typing import Any, Protocol

import grpc
from google.protobuf.message import DecodeError

from qmq.errors import (
    AccessError,
    InvalidRequest,
    NotServed,
    OperatorError,
    QmqError,
)
from qmq.metaserver.access import Access
from qmq.metaserver.actions.context import Vault
from qmq.metaserver.cluster.group_starts import Begin, NewGroup, begin_at, new_row, to_store
from qmq.metaserver.cluster.registration import Ask
from qmq.metaserver.cluster.registry import Registry
from qmq.metaserver.model import WATCHDOGS, Broker, ConsumerGroupRow, DataSource, LeaseRow
from qmq.metaserver.observability.metrics import Metrics
from qmq.metaserver.routes.hub import RouteHubs, TooManyWatches, WatchHub
from qmq.metaserver.rpc.access import Visits, wall_ms
from qmq.metaserver.rpc.brokers import BrokerRpc
from qmq.metaserver.storage.database import Database
from qmq.proto import qmq_pb2 as pb
from qmq.proto.qmq_pb2_grpc import MetaserverServicer
from qmq.rpc_access import caller, status_of
from qmq.subjects import check_name, check_subject, real_subject
from qmq.types import Endpoint

TRIES = 5
"""An attempt fails when another metaserver stores one of the groups meanwhile."""

Key = tuple[str, str]


class Marks(Protocol):
    """Part of `Brokers`: makes a master note ends of subjects; returns which groups have a position.

    Raises QmqError.
    """

    async def mark_groups(self, broker: Broker, mark: str, groups: Sequence[NewGroup]) -> list[bool]: ...


class ConsumerGroups:
    """New consumer groups. Made by main."""

    def __init__(self, registry: Registry, database: Database, brokers: Marks) -> None:
        self._registry = registry
        self._database = database
        self._brokers = brokers

    async def begin(self, broker_group: str, groups: Sequence[NewGroup]) -> list[Begin]:
        """Return the begin of each group on a broker group; store groups that are new in the cluster.

        Raises:
            NotServed, CommitUnknown: the database cannot be read or written now. Repeat.
        """
        keys = [group.key for group in groups]
        checked: set[Key] = set()
        for _ in range(TRIES):
            rows = await self._database.read(lambda repository: repository.consumer_groups(keys))
            missing = [group for group in to_store(groups, rows, now_ms=wall_ms()) if group.key not in checked]
            if not missing:
                return [begin_at(rows[key], broker_group) for key in keys]
            new = await self._new_rows(broker_group, missing, rows)
            checked |= {group.key for group in missing if group.key in rows}
            if new:
                replaced = [rows[row.key] for row in new if row.key in rows]
                store = methodcaller("store_consumer_groups", new, replaced)
                await self._database.write(store)
        raise NotServed("other metaservers store the same consumer groups at this moment; repeat")

    async def _new_rows(
        self, broker_group: str, missing: Sequence[NewGroup], rows: Mapping[Key, ConsumerGroupRow]
    ) -> list[ConsumerGroupRow]:
        """Return rows for the missing groups. First the masters of the subjects' routes note the mark, so it is older
        than the rows.
        """
        now_ms, mark = wall_ms(), secrets.token_hex(8)
        members = {group.key: self._members(group.subject, broker_group) for group in missing}
        names = sorted({name for route in members.values() for name in route})
        parts = [[group for group in missing if name in members[group.key]] for name in names]
        answers = await asyncio.gather(*map(self._ask, names, [mark] * len(names), parts))
        silent = {name for name, known in zip(names, answers, strict=True) if known is None}
        known = {key for answer in answers for key in answer or ()}
        return [
            new_row(group, members[group.key], is_known=group.key in known, mark=mark, now_ms=now_ms)
            for group in missing
            # A possibly stale row stays if a broker group has a position, or did not answer.
            if group.key not in rows or not (group.key in known or members[group.key] & silent)
        ]

    def _members(self, subject: str, broker_group: str) -> frozenset[str]:
        route = self._registry.find(real_subject(subject))
        return frozenset((*(route.groups if route else ()), broker_group))

    async def _ask(self, name: str, mark: str, groups: Sequence[NewGroup]) -> set[Key] | None:
        """Return the groups with a position at a broker group; None: it does not answer, and the groups begin there by
        time.
        """
        group = self._registry.directory.groups.get(name)
        if group is None or group.master is None or not self._registry.may_be_up(group.master):
            return None
        try:
            known = await self._brokers.mark_groups(group.master, mark, groups)
        except QmqError:
            return None
        return {new_group.key for new_group, is_known in zip(groups, known, strict=False) if is_known}


def _new_group(group: pb.NewGroup) -> NewGroup:
    check_subject(group.subject)
    check_name("consumer group", group.group)
    return NewGroup(group.subject, group.group, group.latest, max(group.since_ms, 0), group.broadcast)


SERVICE = "qmq.Metaserver"
ONLINE = 0
ANSWER_VALID_MS = 20_000
"""Time for which a broker caches an answer: a revocation takes effect there within a minute."""

Context = Any
"""grpc.aio.ServicerContext; grpcio has no types."""


class Hold(Protocol):
    """Keeps, takes or releases a lease; see `Upkeep.hold_lease`."""

    def __call__(self, wish: LeaseRow, *, take: bool, release: bool) -> Awaitable[LeaseRow]: ...


class MetaserverRpc(BrokerRpc, MetaserverServicer):  # type: ignore[misc]
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
                caller=replace(caller(), peer=str(Endpoint.of_peer(context.peer()))),
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

    async def BeginGroups(self, request: pb.BeginGroupsRequest, context: Any) -> pb.BeginGroupsAnswer:
        try:
            caller().require_group(request.broker_group)
            groups = [_new_group(group) for group in request.groups]
            begins = await self._consumer_groups.begin(request.broker_group, groups)
        except QmqError as error:
            await context.abort(status_of(error), str(error))
            raise  # abort has raised already
        return pb.BeginGroupsAnswer(begins=[pb.GroupBegin(**begin._asdict()) for begin in begins])

    async def HoldLease(self, request: pb.LeaseRequest, context: Any) -> pb.Lease:
        try:
            check_name("room", request.name.removeprefix(WATCHDOGS))
            check_name("node", request.node)
            wish = LeaseRow(request.name, request.node, request.term, request.beat, request.address)
            row = await self._hold(wish, take=request.take, release=request.release)
        except QmqError as error:
            await context.abort(status_of(error), str(error))
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
            holder, expires_ms = self._access.look_up(request.token, now_ms=now_ms)
        except (AccessError, NotServed) as error:
            is_lost = isinstance(error, NotServed)
            await context.abort(grpc.StatusCode.UNAVAILABLE if is_lost else grpc.StatusCode.NOT_FOUND, str(error))
            raise  # abort has raised already
        left_ms = expires_ms - now_ms if expires_ms else 0
        return pb.TokenAnswer(
            name=holder.name,
            role=holder.role,
            subjects=holder.scope.subjects,
            groups=holder.scope.groups,
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
