"""Shell. Keeps a watch on the metaserver's routes, through restarts of the metaserver.

`GET {metaserver}/meta/address` names the gRPC endpoint; a stream of `WatchRoutes` then brings the routes of the
subjects that were named and every change of them. While the metaserver is down the last known routes stay in use.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio

from qmq.client.routing import GroupRoute, SubjectRoute
from qmq.control_plane import CHANNEL_OPTIONS, find_metaserver
from qmq.errors import AccessError
from qmq.proto import qmq_pb2 as pb
from qmq.proto.qmq_pb2_grpc import MetaserverStub
from qmq.types import Endpoint

log = logging.getLogger(__name__)

HTTP_TIMEOUT_S = 3.0
RETRY_S_MIN, RETRY_S_MAX = 0.1, 3.0
ANSWER_TIMEOUT_S = 5.0
"""A request for routes that is not answered by then went to a metaserver that is gone without a word."""


class RouteWatch:
    """The watch of one producer or consumer. `run` is its one task; `on_routes` is called on the event loop."""

    def __init__(
        self, *, metaserver: str, token: str, app: str, client_id: str, produces: bool,
        on_routes: Callable[[list[SubjectRoute]], None],
    ) -> None:  # fmt: skip
        self._metaserver = metaserver.rstrip("/") if "://" in metaserver else f"http://{metaserver.rstrip('/')}"
        self._token = token
        self._app, self._client_id, self._produces = app, client_id, produces
        self._on_routes = on_routes
        self._subjects: dict[str, None] = {}
        self._wanted: list[str] = []
        self._wake = asyncio.Event()
        self._asked_at: float | None = None
        self.refused: AccessError | None = None
        """Set while the metaserver does not accept the token."""

    def watch(self, subject: str) -> None:
        """Watch one more subject."""
        if subject not in self._subjects:
            self._subjects[subject] = None
            self._wanted.append(subject)
            self._wake.set()

    def refresh(self) -> None:
        """Ask for all routes again: something showed that they are old."""
        if self._asked_at is None and self._subjects:
            self._wanted = list(self._subjects)
            self._wake.set()

    async def run(self) -> None:
        """Watch until cancelled."""
        failures = 0
        while True:
            try:
                async with grpc.aio.insecure_channel(await self._address(), options=CHANNEL_OPTIONS) as channel:
                    async for update in self._updates(channel):
                        failures, self.refused = 0, None
                        self._on_routes([_route(route) for route in update.routes])
                reason = "the metaserver ended the watch"
            except grpc.aio.AioRpcError as error:
                reason = f"{error.code().name} {error.details()}"
                if error.code() in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
                    self.refused = AccessError(f"the metaserver does not accept the token: {error.details()}")
            except (OSError, ValueError, TimeoutError) as error:
                reason = str(error) or "no answer in time"
            self._asked_at = None
            if failures == 0:
                log.warning("route watch interrupted metaserver=%s reason=%s", self._metaserver, reason)
            wait_s = min(RETRY_S_MIN * 2 ** min(failures, 10), RETRY_S_MAX)
            failures += 1
            await asyncio.sleep(wait_s * random.uniform(0.5, 1.0))

    async def _updates(self, channel: grpc.aio.Channel) -> AsyncIterator[Any]:
        """Yield the metaserver's updates; raises TimeoutError if it leaves a request unanswered."""
        stream = MetaserverStub(channel).WatchRoutes(self._requests(), metadata=(("x-api-token", self._token),))
        read = None
        try:
            while True:
                read = asyncio.ensure_future(stream.read())
                while not read.done():
                    await asyncio.wait([read], timeout=ANSWER_TIMEOUT_S / 2)
                    asked_at = self._asked_at
                    if not read.done() and asked_at and asyncio.get_running_loop().time() - asked_at > ANSWER_TIMEOUT_S:
                        raise TimeoutError("the metaserver does not answer")
                update = read.result()
                if update is grpc.aio.EOF:
                    return
                self._asked_at = None
                yield update
        finally:
            if read is not None:
                read.cancel()
            stream.cancel()

    async def _requests(self) -> AsyncIterator[Any]:
        """Yield what to ask on a new stream: all subjects, later those that are added or asked for again."""
        self._wanted = list(self._subjects)
        while True:
            if self._wanted:
                subjects, self._wanted = self._wanted, []
                self._asked_at = asyncio.get_running_loop().time()
                yield pb.RouteRequest(
                    subjects=subjects, app=self._app, client_id=self._client_id, produces=self._produces
                )
            self._wake.clear()
            await self._wake.wait()

    async def _address(self) -> str:
        """Ask where the gRPC endpoint is; raises OSError or ValueError."""
        return await asyncio.to_thread(find_metaserver, self._metaserver, timeout_s=HTTP_TIMEOUT_S)


def _route(route: Any) -> SubjectRoute:
    return SubjectRoute(
        route.subject,
        tuple(
            GroupRoute(
                group.broker_group,
                Endpoint(group.master.ip, group.master.serve_port) if group.HasField("master") else None,
                group.writable,
                group.term,
            )
            for group in route.groups
        ),
        route.refused,
    )
