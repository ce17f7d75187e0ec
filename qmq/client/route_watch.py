"""Shell. Watch on the metaserver's routes, over restarts of the metaserver and networks that block gRPC.

`GET {metaserver}/meta/address`, at the first metaserver that answers, returns a gRPC endpoint. A `WatchRoutes` stream
then brings the routes of the requested subjects and all their changes. A new stream, at any metaserver, states the
versions in use and brings only routes that differ. The client confirms routes in use, so operators see when no client
uses an old one. Without a stream, routes are polled over HTTP while gRPC is retried. Without any metaserver, the last
routes stay in use. A process that must not use gRPC (qmq.grpc_forks) always polls.

A process may use 100,000 subjects: requests and updates are bounded, and above `KEPT` routes unused ones are forgotten.
A subject that the metaserver refuses is requested again; the others stay watched.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, TypeVar
from urllib.error import HTTPError
from urllib.parse import urlencode

import grpc
import grpc.aio

from qmq.access import Token, TokenFile, token_text
from qmq.client.routes import GroupRoute, SubjectRoute
from qmq.control_plane import META_CHANNEL_OPTIONS, find_metaserver, first_answer, get, metaserver_urls
from qmq.errors import AccessError, MissingRight, QmqError
from qmq.grpc_forks import HAS_HANDLERS, grpc_begins, why_no_grpc
from qmq.logs import bounded, retrieve_error
from qmq.proto import qmq_pb2 as pb
from qmq.proto.qmq_pb2_grpc import MetaserverStub
from qmq.types import Endpoint, GroupKind

log = bounded(__name__)

V = TypeVar("V")

HTTP_TIMEOUT_S = 3.0
RETRY_S_MIN, RETRY_S_MAX = 0.1, 3.0
redirect: Callable[[str], str] | None = None
"""Replaces the metaserver's address of each new watch; `qmq.testing` sets it while an application is under test."""

ANSWER_TIMEOUT_S = 5.0
"""Time for an answer to a request for routes, after which the metaserver counts as gone. It doubles with each failure,
up to a minute: all clients may have reconnected to one metaserver at the same time.
"""
ANSWER_TIMEOUT_S_MAX = 60.0
CONFIRM_WITHIN_S = 1.0
"""Routes are confirmed after a random part of this. A change may reach 20,000 clients, and the first confirmations must
not delay the updates of the others.
"""
POLL_AFTER_S = 4.0
"""Time without a stream until a client polls; up to half of it is added at random. Thousands of clients find another
metaserver over gRPC within a few seconds.
"""
POLL_S = 5.0
REFRESH_S = 5.0
"""Shortest interval of refreshes: all clients of a lost broker refresh with every attempt to connect."""
REQUEST_SUBJECTS_MAX = 2_000
"""Names of 100 bytes with their versions are 430 kB then; a metaserver accepts 4 MiB."""
REPEAT_S = 10.0
"""Interval of requests for refused subjects."""
KEPT = 10_000
"""Number of routes that are never forgotten, to continue without a metaserver."""
IDLE_S = 300.0
"""Time without use, or up to twice that, after which a route above `KEPT` is forgotten."""
TROUBLE_S = 10.0
"""Age from which a failure is reported: a stream is replaced within a second or two."""
REJECTED_S = 5.0
"""Duration of rejections after which the client's calls fail with the error. A new token reaches all metaservers within
a second or two.
"""


NO_ROUTE_YET = "the metaserver has sent no route yet"


class RouteWatch:
    """Route watch of one producer or consumer. `run` is its task; it calls its owner on the event loop.

    Args:
        on_idle: forgets idle subjects and returns those it has forgotten; None keeps all.
        on_rejected: called repeatedly with the error while the token is rejected for good: the metaservers have
            rejected it for a while, and its file holds no other token.
        kind: broker groups, or DELAY for all delay groups of any subject.
    """

    def __init__(
        self,
        *,
        metaserver: str,
        token: Token,
        app: str,
        client_id: str,
        produces: bool,
        on_routes: Callable[[list[SubjectRoute]], None],
        on_idle: Callable[[set[str]], Iterable[str]] | None = None,
        on_rejected: Callable[[AccessError], None] | None = None,
        kind: GroupKind = GroupKind.NORMAL,
    ) -> None:
        urls = metaserver_urls(metaserver)
        self._metaserver = urls if redirect is None else redirect(urls)
        self._token = token
        self._app = app
        self._client_id = client_id
        self._produces = produces
        self._kind = kind
        self._on_routes = on_routes
        self._on_idle = on_idle
        self._on_rejected = on_rejected
        self._subjects: dict[str, None] = {}
        self._used: set[str] = set()
        """Subjects used since routes were last forgotten."""
        self._wanted: dict[str, None] = {}
        self._forgotten: dict[str, None] = {}
        """Forgotten subjects that the metaserver still watches for this stream."""
        self.refusals: dict[str, str] = {}
        """Reasons of the metaserver's refusals, by subject; the next route of a subject removes its reason."""
        self._held: dict[str, int] = {}
        """Versions of the routes in use."""
        self._unconfirmed: dict[str, int] = {}
        self._confirming: asyncio.TimerHandle | None = None
        """Timer of the next confirmation."""
        self._ask_now = asyncio.Event()
        self._poll_now = asyncio.Event()
        self._asked_at: float | None = None
        self._refreshed_at = -REFRESH_S
        self._streams = self._polls = False
        self._stream_moved = asyncio.Event()
        """Set when `_streams` changes."""
        self._failure = ""
        self._failed_at = 0.0
        """`_failure` is the reason why there is neither a stream nor an answered poll; this is its time."""
        self.refused: AccessError | None = None
        """Set while the metaserver rejects the token."""
        self._refused_at = 0.0
        self._is_doubted = False
        """Whether a new stream must be opened because a broker rejected the token."""
        self._doubted_at = -REPEAT_S

    def watch(self, subject: str) -> None:
        """Watch a subject, or mark it as used: unused ones may be forgotten."""
        self._used.add(subject)
        if subject not in self._subjects:
            self._subjects[subject] = self._wanted[subject] = None
            self._ask_now.set()
            self._poll_now.set()

    def forget(self, subjects: Iterable[str]) -> None:
        """Stop watching these subjects."""
        for subject in subjects:
            if subject in self._subjects:
                del self._subjects[subject]
                self._forgotten[subject] = None
                for known in (self._wanted, self._held, self._unconfirmed, self.refusals):
                    known.pop(subject, None)
        self._ask_now.set()

    def is_known(self, subject: str) -> bool:
        """Return whether the metaserver has sent a route of the subject, perhaps without broker groups."""
        return subject in self._held

    @property
    def trouble(self) -> str:
        """Reason why routes are out of date for ten seconds or more; "" while they are current."""
        if self._streams or self._polls or not self._failure:
            return ""
        is_long = asyncio.get_running_loop().time() - self._failed_at >= TROUBLE_S
        return self._failure if is_long else ""

    @property
    def silence(self) -> str:
        """Reason, with the metaserver's address, why no routes come now; "" while they come."""
        if self._streams or self._polls or not self._failure:
            return ""
        return f"the metaserver at {self._metaserver} sent no route: {self._failure}"

    @property
    def rejected(self) -> AccessError | None:
        """Error while the token is rejected for good, or None."""
        if self.refused is None or asyncio.get_running_loop().time() - self._refused_at < REJECTED_S:
            return None
        return self.refused

    def link_failed(self, error: QmqError) -> None:
        """Request all routes again. If a broker rejects the token, open the stream again: the metaserver decides."""
        now_s = asyncio.get_running_loop().time()
        is_of_token = isinstance(error, AccessError) and not isinstance(error, MissingRight)
        if is_of_token and now_s - self._doubted_at >= REPEAT_S:
            self._is_doubted, self._doubted_at = True, now_s
            self._poll_now.set()
        self.refresh()

    def refresh(self) -> None:
        """Request all routes again, after a sign that they are old. Rarely needed: the metaserver sends changes."""
        now_s = asyncio.get_running_loop().time()
        if self._asked_at is None and self._subjects and now_s - self._refreshed_at >= REFRESH_S:
            self._refreshed_at = now_s
            self._wanted = dict(self._subjects)
            self._ask_now.set()
            self._poll_now.set()

    async def run(self) -> None:
        """Watch until cancelled."""
        reason = why_no_grpc()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._tend())
            tasks.create_task(self._poll_without_stream(is_polling=bool(reason)))
            if reason:
                level = logging.WARNING if HAS_HANDLERS else logging.INFO  # forked workers are many
                log.log(level, "routes are polled every %d s: %s", POLL_S, reason)
            else:
                grpc_begins()
                tasks.create_task(self._stream_always())

    async def _tend(self) -> None:
        """Request refused subjects again, and forget idle ones."""
        loop = asyncio.get_running_loop()
        forget_at = loop.time() + IDLE_S
        while True:
            await asyncio.sleep(min(REPEAT_S, IDLE_S))
            if self.refusals:
                self._wanted |= dict.fromkeys(self.refusals)
                self._ask_now.set()
            if loop.time() >= forget_at:
                forget_at = loop.time() + IDLE_S
                self._forget_idle()

    def _forget_idle(self) -> None:
        used, self._used = self._used, set()
        surplus = len(self._subjects) - KEPT
        if surplus > 0 and self._on_idle is not None:
            idle = islice((subject for subject in self._subjects if subject not in used), surplus)
            self.forget(self._on_idle(set(idle)))

    def _take(self, routes: list[SubjectRoute]) -> None:
        """Pass routes to the owner; they are in use from now on. A refusal keeps the route in use."""
        self.refused = None
        routes = [route for route in routes if route.subject in self._subjects]  # otherwise it was forgotten meanwhile
        self._note_refusals(routes)
        self._on_routes(routes)
        taken = {route.subject: route.version for route in routes if not route.refused}
        self._held |= taken
        self._unconfirmed |= taken
        if taken and self._confirming is None:
            wait_s = random.uniform(0.0, CONFIRM_WITHIN_S)
            self._confirming = asyncio.get_running_loop().call_later(wait_s, self._confirm)

    def _note_refusals(self, routes: list[SubjectRoute]) -> None:
        was_well = not self.refusals
        for route in routes:
            if route.refused:
                self.refusals[route.subject] = route.refused
            else:
                self.refusals.pop(route.subject, None)
        if was_well and self.refusals:
            subject, reason = next(iter(self.refusals.items()))
            log.info(
                "routes refused metaserver=%s subjects=%d first=%s reason=%s",
                self._metaserver,
                len(self.refusals),
                subject,
                reason,
            )

    def _confirm(self) -> None:
        self._confirming = None
        self._ask_now.set()

    # Over gRPC.

    async def _stream_always(self) -> None:
        failures = 0
        while True:
            token = token_text(self._token)
            try:
                async with grpc.aio.insecure_channel(await self._address(), options=META_CHANNEL_OPTIONS) as channel:
                    answer_s = min(ANSWER_TIMEOUT_S * 2 ** min(failures, 10), ANSWER_TIMEOUT_S_MAX)
                    async for update in self._updates(channel, token, answer_s):
                        failures = 0
                        self._set_streams(True)
                        self._take([_route_from_proto(route) for route in update.routes])
                reason = "the metaserver ended the watch"
            except grpc.aio.AioRpcError as error:
                reason = f"{error.code().name} {error.details()}"
                if error.code() in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
                    self._refused_by(AccessError(f"the metaserver rejects the token: {error.details()}"), token)
            except (OSError, ValueError, TimeoutError) as error:
                reason = str(error) or "no answer in time"
            self._asked_at = None
            self._set_streams(False)
            self._failed(reason)
            if failures == 0 and self.refused is None:
                log.warning("route watch interrupted metaserver=%s reason=%s", self._metaserver, reason)
            wait_s = min(RETRY_S_MIN * 2 ** min(failures, 10), RETRY_S_MAX)
            failures += 1
            await asyncio.sleep(wait_s * random.uniform(0.5, 1.0))

    async def _updates(self, channel: grpc.aio.Channel, token: str, answer_s: float) -> AsyncIterator[Any]:
        """Yield the metaserver's updates; raises TimeoutError if a request gets no answer within `answer_s`."""
        is_over = asyncio.Event()
        requests = self._requests(is_over)
        stream = MetaserverStub(channel).WatchRoutes(requests, metadata=(("x-api-token", token),))
        self._is_doubted = False
        read = None
        try:
            while True:
                read = asyncio.ensure_future(stream.read())
                # A read may fail at the moment in which it is cancelled.
                read.add_done_callback(retrieve_error)
                while not read.done():
                    await asyncio.wait([read], timeout=answer_s / 2)
                    asked_at = self._asked_at
                    if not read.done() and asked_at and asyncio.get_running_loop().time() - asked_at > answer_s:
                        raise TimeoutError("the metaserver does not answer")
                    if self._is_doubted:
                        raise TimeoutError("a broker rejects the token")
                update = read.result()
                if update is grpc.aio.EOF:
                    return
                self._asked_at = None
                yield update
        finally:
            if read is not None:
                read.cancel()
            stream.cancel()
            # grpc keeps requesting for a stream that the metaserver ended; these requests belong to the next one.
            is_over.set()
            self._ask_now.set()

    async def _requests(self, is_over: asyncio.Event) -> AsyncIterator[Any]:
        """Yield the requests of a stream: first all subjects with their versions in use, later changed subjects and
        confirmations.
        """
        self._wanted = dict(self._subjects)
        self._unconfirmed = {}
        self._forgotten = {}
        while not is_over.is_set():
            self._ask_now.clear()  # first, so that a change during the yield is found in the next pass
            if self._wanted or self._forgotten or (self._unconfirmed and self._confirming is None):
                yield self._next_request()
            else:
                await self._ask_now.wait()

    def _next_request(self) -> Any:
        forgotten = _pop(self._forgotten)
        subjects = (
            _pop(self._wanted) if not self._forgotten else {}
        )  # a subject that is watched again was forgotten first
        held = _pop(self._unconfirmed) | {name: self._held[name] for name in subjects if name in self._held}
        if subjects:
            self._asked_at = asyncio.get_running_loop().time()
        return pb.RouteRequest(
            subjects=subjects,
            app=self._app,
            client_id=self._client_id,
            produces=self._produces,
            held=held,
            kind=self._kind,
            forgotten=forgotten,
        )

    async def _address(self) -> str:
        """Return the gRPC endpoint; raises OSError or ValueError."""
        return await asyncio.to_thread(find_metaserver, self._metaserver, timeout_s=HTTP_TIMEOUT_S)

    def _refused_by(self, error: AccessError, token: str) -> None:
        """Record and log that `token` is rejected, unless its file holds another token now."""
        if token_text(self._token) != token:
            self.refused = None
            return
        now_s = asyncio.get_running_loop().time()
        if self.refused is None:
            self._refused_at = now_s
        if isinstance(self._token, TokenFile):
            error = AccessError(f"{error}; put a valid token into {self._token.path}")
        self.refused = error
        log.error("%s metaserver=%s", error, self._metaserver)
        if self.rejected is not None and self._on_rejected is not None:
            self._on_rejected(error)

    def _failed(self, reason: str) -> None:
        if not self._failure:
            self._failed_at = asyncio.get_running_loop().time()
        self._failure = reason

    def _set_streams(self, streams: bool) -> None:
        if streams:
            self._failure = ""
            self._polls = False
        if streams != self._streams:
            self._streams = streams
            self._stream_moved.set()

    # Over HTTP.

    async def _poll_without_stream(self, *, is_polling: bool = False) -> None:
        """Poll while there is no stream, after a pause in which a new one may come."""
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
        """Poll once. Without an answer, the routes in use stay."""
        token = token_text(self._token)
        try:
            routes = await asyncio.to_thread(
                poll,
                self._metaserver,
                list(self._subjects),
                dict(self._held),
                token=token,
                app=self._app,
                client_id=self._client_id,
                produces=self._produces,
                kind=self._kind,
                timeout_s=HTTP_TIMEOUT_S,
            )
        except AccessError as error:
            self._refused_by(error, token)
            self._polls = False
            self._failed(str(error))
        except (OSError, ValueError) as error:
            log.debug("routes not polled metaserver=%s reason=%s", self._metaserver, error)
            self._polls = False
            self._failed(str(error))
        else:
            self.refused = None
            self._polls = True
            self._failure = ""
            if routes and not self._streams:  # otherwise they are older than the stream's
                self._take(routes)
                self._wanted = dict(self._subjects)  # a stream that is being opened stated other versions


def _pop(known: dict[str, V]) -> dict[str, V]:
    """Take out the first entries, up to the limit of one request."""
    taken = dict(islice(known.items(), REQUEST_SUBJECTS_MAX))
    for subject in taken:
        del known[subject]
    return taken


async def _set_within(event: asyncio.Event, seconds: float) -> bool:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True


def _route_from_proto(route: Any) -> SubjectRoute:
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


SUBJECTS_PER_REQUEST = 40
"""Names of 100 bytes, escaped, with their versions, stay below the 64 KiB that servers accept as an address."""
ANSWER_BYTES_MAX = 64 << 20


def poll(
    metaserver: str,
    subjects: Sequence[str],
    held: Mapping[str, int],
    *,
    token: str,
    app: str,
    client_id: str,
    produces: bool,
    timeout_s: float,
    kind: GroupKind = GroupKind.NORMAL,
) -> list[SubjectRoute]:
    """Return the routes of `subjects` that differ from the versions `held`; blocks.

    Raises:
        OSError: there is no answer.
        ValueError: the answer is not a metaserver's.
        AccessError: the token is rejected.
    """
    routes: list[SubjectRoute] = []
    for begin in range(0, len(subjects), SUBJECTS_PER_REQUEST):
        names = subjects[begin : begin + SUBJECTS_PER_REQUEST]
        words = [("app", app), ("clientId", client_id), ("produces", "true" if produces else "false")]
        words += [("kind", kind.name)] if kind != GroupKind.NORMAL else []
        words += [("subject", name) for name in names]
        words += [("held", f"{name}:{held[name]:016x}") for name in names if name in held]
        routes += first_answer(metaserver, partial(_ask, urlencode(words), token, timeout_s))
    return routes


def _ask(words: str, token: str, timeout_s: float, url: str) -> list[SubjectRoute]:
    return _parse(
        _read(urllib.request.Request(f"{url}/meta/routes?{words}", headers={"X-Api-Token": token}), timeout_s)
    )


def _read(request: urllib.request.Request, timeout_s: float) -> bytes:
    try:
        return get(request, timeout_s=timeout_s, bytes_max=ANSWER_BYTES_MAX)
    except HTTPError as error:
        with error:
            text = error.read(1000).decode("utf-8", "replace")
        if error.code in (401, 403):
            raise AccessError(f"the metaserver rejects the token: {_reason(text)}") from None
        raise


def _reason(text: str) -> str:
    """Return the message of the metaserver's error, or the whole text of a proxy's."""
    try:
        return str(json.loads(text)["error"]["message"])
    except (KeyError, TypeError, ValueError):
        return text.strip()


def _parse(data: bytes) -> list[SubjectRoute]:
    try:
        return [_route_from_json(route) for route in json.loads(data)["routes"]]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"the answer is not a metaserver's: {error!r}") from None


def _route_from_json(route: Any) -> SubjectRoute:
    return SubjectRoute(
        str(route["subject"]),
        tuple(
            GroupRoute(
                str(group["brokerGroup"]),
                Endpoint(str(group["master"]["ip"]), int(group["master"]["servePort"])),
                group["writable"] is True,
                int(group["term"]),
            )
            for group in route["groups"]
        ),
        str(route["refused"]),
        int(route["version"], 16),
    )
