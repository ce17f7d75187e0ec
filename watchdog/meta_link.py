"""Shell. A watchdog's requests to the metaserver: its lease, its databases, the callers of tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeVar

import grpc
import grpc.aio

from qmq.access import token_metadata
from qmq.control_plane import META_CHANNEL_OPTIONS, find_metaserver
from qmq.errors import AccessError, NotServed, cause_of
from qmq.proto import qmq_pb2 as pb
from qmq.proto.qmq_pb2_grpc import MetaserverStub
from qmq.rights import Caller, Scope, TokenRole
from qmq.sql_drivers import registered, tls_of
from qmq.types import Endpoint
from qmq.watchdog.lease import LeaseRequest, LeaseRow
from qmq.watchdog.settings import Source, WatchdogSettings

WATCHDOGS = "watchdog/"
"""Prefix of the names of watchdogs' leases; the room follows."""
ANSWER_S = 3.0

T = TypeVar("T")


def sources_of(rows: Iterable[pb.Source]) -> tuple[list[Source], dict[str, str]]:
    """Return the usable databases, and {url: reason} of the others."""
    sources, problems = [], {}
    for row in rows:
        url, query = registered(row.url)
        try:
            if row.problem:
                raise ValueError(row.problem)
            sources.append(Source(url, row.user, row.password, row.table, row.rate, row.age_s * 1000, tls_of(query)))
        except ValueError as error:
            problems[url] = str(error)
    return sources, problems


class MetaLink:
    """Connection to the metaserver, made by main, for the loop. Requests without a timely answer raise NotServed."""

    def __init__(self, settings: WatchdogSettings) -> None:
        self._settings = settings
        self._channel: grpc.aio.Channel | None = None
        self._stub: Any = None

    async def hold(self, node: str, address: str, request: LeaseRequest, *, patience_ms: int) -> LeaseRow:
        """Keep or take the lease; return the resulting row."""
        asked = pb.LeaseRequest(node=node, address=address, take=request.take, term=request.term, beat=request.beat)
        return await self._lease(asked, min(ANSWER_S, patience_ms / 1000))

    async def release(self, node: str) -> None:
        await self._lease(pb.LeaseRequest(node=node, release=True))

    async def _lease(self, request: pb.LeaseRequest, answer_s: float = ANSWER_S) -> LeaseRow:
        request.name = WATCHDOGS + self._settings.room
        answer = await self._ask(lambda stub, more: stub.HoldLease(request, **more), answer_s)
        return LeaseRow(answer.node, answer.term, answer.beat)

    async def sources(self) -> tuple[list[Source], dict[str, str]]:
        """Return the databases of this room, and {url: reason} of the unusable ones."""
        question = pb.SourcesQuestion(room=self._settings.room)
        answer = await self._ask(lambda stub, more: stub.ListSources(question, **more))
        return sources_of(answer.sources)

    async def caller_of(self, token: str) -> Caller:
        """Return the caller of a token; raise AccessError."""
        question = pb.TokenQuestion(token=token)
        answer = await self._ask(lambda stub, more: stub.CheckToken(question, **more))
        return Caller(answer.name, TokenRole(answer.role), Scope(tuple(answer.subjects), tuple(answer.groups)))

    async def masters(self, subject: str) -> list[tuple[str, str]]:
        """Return the broker groups of a subject, each with the control address of its master."""

        async def route(stub: Any, more: dict[str, Any]) -> Any:
            stream = stub.WatchRoutes(metadata=more["metadata"])
            try:
                await stream.write(pb.RouteRequest(subjects=[subject], app="watchdog", client_id="watchdog"))
                return await stream.read()
            finally:
                stream.cancel()

        update = await self._ask(route)
        groups = [] if update is grpc.aio.EOF else [group for route in update.routes for group in route.groups]
        if any(not group.HasField("master") for group in groups):
            raise NotServed("a broker group of its subject has no master now")
        return [(group.broker_group, str(Endpoint(group.master.ip, group.master.control_port))) for group in groups]

    async def _ask(self, question: Callable[[Any, dict[str, Any]], Awaitable[T]], answer_s: float = ANSWER_S) -> T:
        """Ask the metaserver. Raise NotServed without a timely answer, and AccessError for an unknown token."""
        more = {"metadata": token_metadata(self._settings.token), "timeout": answer_s}
        try:
            async with asyncio.timeout(answer_s):
                if self._stub is None:
                    await self._connect()
                return await question(self._stub, more)
        except grpc.aio.AioRpcError as error:
            code, details = error.code(), str(error.details())
            if code == grpc.StatusCode.NOT_FOUND:
                raise AccessError(details) from None
            if code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
                raise NotServed(f"the metaserver does not accept the watchdog's token: {details}") from None
            await self.close()  # the next request finds the metaserver anew
            raise NotServed(f"the metaserver does not answer: {details}") from None
        except (OSError, ValueError, TimeoutError, grpc.aio.UsageError) as error:
            await self.close()
            raise NotServed(f"the metaserver does not answer: {cause_of(error)}") from None
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            # Another request closed the connection; this task was not cancelled.
            raise NotServed("the connection to the metaserver was closed meanwhile") from None

    async def _connect(self) -> None:
        address = await asyncio.to_thread(find_metaserver, self._settings.metaserver, timeout_s=ANSWER_S)
        if self._stub is None:
            self._channel = grpc.aio.insecure_channel(address, options=META_CHANNEL_OPTIONS)
            self._stub = MetaserverStub(self._channel)

    async def close(self) -> None:
        channel = self._channel
        self._channel = None
        self._stub = None
        if channel is not None:
            await channel.close()
