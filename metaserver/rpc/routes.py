"""Shell. The gRPC methods of clients that watch routes, and of metaservers that ask each other about them.

Updates are sent as the bytes that the hub wrote: protobuf would write the same route again for each client.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from qmq.errors import InvalidRequest
from qmq.metaserver.observability.metrics import Metrics
from qmq.metaserver.routes.hub import RouteHubs, TooManyWatches, WatchHub
from qmq.metaserver.rpc.brokers import Visits
from qmq.proto import qmq_pb2 as pb
from qmq.rpc_access import caller

SERVICE = "qmq.Metaserver"

Context = Any
"""grpc.aio.ServicerContext; grpcio comes without types."""


class RouteRpc:
    """Part of the metaserver's service. A stream is one task, which reads; the hub writes."""

    _hubs: RouteHubs
    _metrics: Metrics
    visits: Visits

    async def WatchRoutes(self, requests: object, context: Context) -> None:
        """Serve a client until it leaves. Takes and gives bytes, see `add_route_methods`."""
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
                    if request.subjects:  # else it only says what it holds
                        await hub.ask(watch, request.subjects, request.held)
                    request = None  # 20,000 of them would take 25 MB while their clients say nothing
                    request = await _read(context)
                await asyncio.Event().wait()  # it asks no more and goes on listening
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


async def _read(context: Context) -> pb.RouteRequest | None:
    """The next request; None: the client asks no more."""
    data = await context.read()
    if data is grpc.aio.EOF:
        return None
    try:
        return pb.RouteRequest.FromString(data)
    except DecodeError:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "this is no RouteRequest")
        raise  # abort has raised already


def add_route_methods(routes: RouteRpc, server: Any) -> None:
    """Let `server` call WatchRoutes with bytes. After the generated function, whose entry this one replaces."""
    handler = grpc.stream_stream_rpc_method_handler(routes.WatchRoutes)
    server.add_registered_method_handlers(SERVICE, {"WatchRoutes": handler})
