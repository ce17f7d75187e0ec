"""Shell. Keeps a watch on the metaserver's routes, through restarts of the metaserver and networks that block gRPC.

`GET {metaserver}/meta/address` names the gRPC endpoint; a stream of `WatchRoutes` then brings the routes of the
subjects that were named and every change of them. A new stream, at whichever metaserver, says which versions the
client uses and brings those alone that differ. What was taken over is confirmed, so that an operator knows when
nobody uses an old route any more. As long as there is no stream, routes are polled over HTTP, while gRPC is tried
again and again. While no metaserver answers at all, the last known routes stay in use. A forked process cannot use
gRPC if its parent did: it polls from the beginning.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio

from qmq.client import route_poll
from qmq.client.routing import GroupRoute, SubjectRoute
from qmq.control_plane import CHANNEL_OPTIONS, find_metaserver, grpc_begins, has_grpc
from qmq.errors import AccessError
from qmq.proto import qmq_pb2 as pb
from qmq.proto.qmq_pb2_grpc import MetaserverStub
from qmq.types import Endpoint, GroupKind

log = logging.getLogger(__name__)

HTTP_TIMEOUT_S = 3.0
RETRY_S_MIN, RETRY_S_MAX = 0.1, 3.0
ANSWER_TIMEOUT_S = 5.0
"""A request for routes that is not answered by then went to a metaserver that is gone without a word. Or to one to
which all clients came back at once: so after each failure the next answer has twice the time, up to a minute."""
ANSWER_TIMEOUT_S_MAX = 60.0
CONFIRM_WITHIN_S = 1.0
"""Routes that were taken over are confirmed after a random part of this: a change may reach 20,000 clients, and what
the first ones confirm must not stand in the way of telling the others."""
POLL_AFTER_S = 4.0
"""A restarted metaserver, or another one, is found over gRPC within a second or two, by thousands of clients at once
within a few. Who still has no stream then, or half as much later, polls."""
POLL_S = 5.0
REFRESH_S = 5.0
"""A broker that stays away is missed with every attempt to connect, by all of its clients."""


class RouteWatch:
    """The watch of one producer or consumer. `run` is its one task; `on_routes` is called on the event loop.

    Args:
        kind: of the groups that its routes list. DELAY: all groups of delay servers, for whichever subject.
    """

    def __init__(
        self, *, metaserver: str, token: str, app: str, client_id: str, produces: bool,
        on_routes: Callable[[list[SubjectRoute]], None], kind: GroupKind = GroupKind.NORMAL,
    ) -> None:  # fmt: skip
        self._metaserver = metaserver.rstrip("/") if "://" in metaserver else f"http://{metaserver.rstrip('/')}"
        self._token = token
        self._app, self._client_id, self._produces, self._kind = app, client_id, produces, kind
        self._on_routes = on_routes
        self._subjects: dict[str, None] = {}
        self._wanted: list[str] = []
        self._held: dict[str, int] = {}
        """Versions of the routes in use."""
        self._unconfirmed: dict[str, int] = {}
        self._confirming: asyncio.TimerHandle | None = None
        """Until it is time to confirm them."""
        self._ask_now, self._poll_now = asyncio.Event(), asyncio.Event()
        self._asked_at: float | None = None
        self._refreshed_at = -REFRESH_S
        self._streams = False
        self._stream_moved = asyncio.Event()
        """Set when `_streams` changes."""
        self.refused: AccessError | None = None
        """Set while the metaserver does not accept the token."""

    def watch(self, subject: str) -> None:
        """Watch one more subject."""
        if subject not in self._subjects:
            self._subjects[subject] = None
            self._wanted.append(subject)
            self._ask_now.set()
            self._poll_now.set()

    def refresh(self) -> None:
        """Ask for all routes again: something showed that they are old. Seldom: the metaserver tells of changes."""
        now_s = asyncio.get_running_loop().time()
        if self._asked_at is None and self._subjects and now_s - self._refreshed_at >= REFRESH_S:
            self._refreshed_at = now_s
            self._wanted = list(self._subjects)
            self._ask_now.set()

    async def run(self) -> None:
        """Watch until cancelled."""
        if not has_grpc():
            await self._poll_without_stream(is_polling=True)
        grpc_begins()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._stream_always())
            tasks.create_task(self._poll_without_stream())

    def _take(self, routes: list[SubjectRoute]) -> None:
        """Hand routes on; from now on they are in use. A refusal is no route: what was in use before stays so."""
        self.refused = None
        self._on_routes(routes)
        taken = {route.subject: route.version for route in routes if not route.refused}
        self._held |= taken
        self._unconfirmed |= taken
        if taken and self._confirming is None:
            wait_s = random.uniform(0.0, CONFIRM_WITHIN_S)
            self._confirming = asyncio.get_running_loop().call_later(wait_s, self._confirm)

    def _confirm(self) -> None:
        self._confirming = None
        self._ask_now.set()

    # Over gRPC.

    async def _stream_always(self) -> None:
        failures = 0
        while True:
            try:
                async with grpc.aio.insecure_channel(await self._address(), options=CHANNEL_OPTIONS) as channel:
                    answer_s = min(ANSWER_TIMEOUT_S * 2 ** min(failures, 10), ANSWER_TIMEOUT_S_MAX)
                    async for update in self._updates(channel, answer_s):
                        failures = 0
                        self._set_streams(True)
                        self._take([_route(route) for route in update.routes])
                reason = "the metaserver ended the watch"
            except grpc.aio.AioRpcError as error:
                reason = f"{error.code().name} {error.details()}"
                if error.code() in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
                    self.refused = AccessError(f"the metaserver does not accept the token: {error.details()}")
            except (OSError, ValueError, TimeoutError) as error:
                reason = str(error) or "no answer in time"
            self._asked_at = None
            self._set_streams(False)
            if failures == 0:
                log.warning("route watch interrupted metaserver=%s reason=%s", self._metaserver, reason)
            wait_s = min(RETRY_S_MIN * 2 ** min(failures, 10), RETRY_S_MAX)
            failures += 1
            await asyncio.sleep(wait_s * random.uniform(0.5, 1.0))

    async def _updates(self, channel: grpc.aio.Channel, answer_s: float) -> AsyncIterator[Any]:
        """Yield the metaserver's updates; raises TimeoutError if it leaves a request unanswered for so long."""
        is_over = asyncio.Event()
        requests = self._requests(is_over)
        stream = MetaserverStub(channel).WatchRoutes(requests, metadata=(("x-api-token", self._token),))
        read = None
        try:
            while True:
                read = asyncio.ensure_future(stream.read())
                while not read.done():
                    await asyncio.wait([read], timeout=answer_s / 2)
                    asked_at = self._asked_at
                    if not read.done() and asked_at and asyncio.get_running_loop().time() - asked_at > answer_s:
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
            # Of a stream that the other end ended, grpc goes on to ask for requests; they are meant for the next one.
            is_over.set()
            self._ask_now.set()

    async def _requests(self, is_over: asyncio.Event) -> AsyncIterator[Any]:
        """Yield what to say on a new stream: all subjects, with what is in use of them; later those that are added or
        asked for again, and, when it is time for that, what is in use by now."""
        self._wanted, self._unconfirmed = list(self._subjects), {}
        while not is_over.is_set():
            self._ask_now.clear()  # first: who asks while grpc writes, at the yield, is heard on the next turn
            if self._wanted or (self._unconfirmed and self._confirming is None):
                subjects, self._wanted = self._wanted, []
                held, self._unconfirmed = self._unconfirmed, {}
                held |= {subject: self._held[subject] for subject in subjects if subject in self._held}
                if subjects:
                    self._asked_at = asyncio.get_running_loop().time()
                yield pb.RouteRequest(
                    subjects=subjects, app=self._app, client_id=self._client_id, produces=self._produces, held=held,
                    kind=self._kind,
                )  # fmt: skip
            await self._ask_now.wait()

    async def _address(self) -> str:
        """Ask where the gRPC endpoint is; raises OSError or ValueError."""
        return await asyncio.to_thread(find_metaserver, self._metaserver, timeout_s=HTTP_TIMEOUT_S)

    def _set_streams(self, streams: bool) -> None:
        if streams != self._streams:
            self._streams = streams
            self._stream_moved.set()

    # Over HTTP.

    async def _poll_without_stream(self, *, is_polling: bool = False) -> None:
        """Poll as long as there is no stream, but not for the moment that a new one takes."""
        while True:
            self._stream_moved.clear()
            if self._streams:
                if is_polling:
                    log.info("routes come over gRPC again metaserver=%s", self._metaserver)
                    is_polling = False
                await self._stream_moved.wait()
                continue
            if not self._subjects:
                await self._poll_now.wait()
            self._poll_now.clear()
            if not is_polling:
                is_polling = not await _set_within(self._stream_moved, POLL_AFTER_S * random.uniform(1.0, 1.5))
                continue
            await self._poll()
            waits = [asyncio.ensure_future(event.wait()) for event in (self._stream_moved, self._poll_now)]
            await asyncio.wait(waits, timeout=POLL_S * random.uniform(0.8, 1.2), return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()

    async def _poll(self) -> None:
        """Ask over HTTP once. If nobody answers, the routes in use stay."""
        try:
            routes = await asyncio.to_thread(
                route_poll.poll, self._metaserver, list(self._subjects), dict(self._held), token=self._token,
                app=self._app, client_id=self._client_id, produces=self._produces, kind=self._kind,
                timeout_s=HTTP_TIMEOUT_S,
            )  # fmt: skip
        except AccessError as error:
            self.refused = error
        except (OSError, ValueError) as error:
            log.debug("routes not polled metaserver=%s reason=%s", self._metaserver, error)
        else:
            self.refused = None
            if routes and not self._streams:  # else they are older than what the stream brought
                self._take(routes)
                self._wanted = list(self._subjects)  # a stream that is being opened was told of other versions


async def _set_within(event: asyncio.Event, seconds: float) -> bool:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True


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
        route.version,
    )
