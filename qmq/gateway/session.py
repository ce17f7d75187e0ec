"""Shell. Session of a client in a consumer group: a consumer and puller of the native protocol, and its deliveries.

    request                       session
    pull, stream                  opens it; its messages get a handle and a lease
    ack, nack, dead-letter        decides messages, and waits until a broker has stored that
    none within the lease         the message is nacked, so it goes to any consumer, and counts as an attempt
    none for `session_idle_s`     without undecided messages the session ends; prefetched messages go back
    DELETE, or the process stops  ends it; undecided messages go back at once

A stream sends its messages as server-sent events:

    : keep-alive          a comment, while there is no message
    id: HANDLE            a message; its handle is also in the data
    event: message
    data: {JSON}
    event: error          the stream ends
    data: {"error": {…}}
"""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal, NamedTuple, TypeVar

from fastapi import Request

from qmq.client.consumer import Consumer
from qmq.client.puller import Puller
from qmq.client.received import ReceivedMessage
from qmq.errors import InvalidMessage, NotServed, QmqError
from qmq.gateway.deliveries import Decision, Deliveries, Delivery
from qmq.gateway.metrics import Metrics
from qmq.gateway.models import Delivered, Result, delivered_of
from qmq.gateway.outcomes import Code, HttpError, Refused, error_of
from qmq.gateway.settings import GatewaySettings
from qmq.logs import retrieve_error

JOIN_S = 3.0
"""Time for a new session to connect, in addition to the wait of a pull."""
HOST_CHARS = 30

Outcome = Literal["stored", "renewed", "gone", "decided", "unknown"]


class Place(NamedTuple):
    """Client in a consumer group of a subject. A token has at most one session for it."""

    subject: str
    group: str
    client: str


@dataclass(frozen=True, slots=True)
class SessionTerms:
    """Terms of a session; see `Consumer.pull`."""

    start: Literal["latest", "earliest"] | datetime = "latest"
    tags: tuple[str, ...] = ()
    tag_mode: Literal["any", "all"] = "any"
    retries_max: int = 32
    retry_delay_s: float = 5.0


class Session:
    """Session of one place. Made for the place's first request; ends with `close`. Used on the gateway's loop.

    Raises:
        CallError: a name or another argument is not valid.
    """

    def __init__(self, place: Place, terms: SessionTerms, token: str, settings: GatewaySettings, metrics: Metrics):
        self.id = secrets.token_hex(12)
        self.place = place
        self.terms = terms
        self.deliveries: Deliveries[ReceivedMessage] = Deliveries(self.id)
        self._settings = settings
        self._metrics = metrics
        self._clock = asyncio.get_running_loop().time
        self._users = self._pulling = 0
        self.used_s = self._clock()
        self._has_room = asyncio.Event()
        self._is_closed = False
        self.has_ended = False
        """Whether the subscription ended with an error. Then the next request opens another session."""
        consumer = Consumer(
            metaserver=settings.metaserver,
            app=settings.app,
            token=token,
            consumer_id=f"{place.client}@{socket.gethostname()[:HOST_CHARS]}-{secrets.token_hex(4)}",
            drain_s=settings.stop_s,
        )
        self._puller: Puller = consumer.pull(
            place.subject,
            group=place.group,
            tags=terms.tags,
            tag_mode=terms.tag_mode,
            start=terms.start,
            retries_max=terms.retries_max,
            retry_delay=terms.retry_delay_s,
            prefetch_messages=settings.prefetch_messages,
        )

    async def open(self) -> None:
        await self._puller.__aenter__()

    async def close(self) -> None:
        """Send decisions; undecided messages return to the group. Calls of `pull` end with ClientClosed."""
        if self._is_closed:
            return
        self._is_closed = True
        self._has_room.set()
        with suppress(QmqError):
            await self._puller.__aexit__(None, None, None)

    def __enter__(self) -> Session:
        self._users += 1
        return self

    def __exit__(self, *_: object) -> None:
        self._users -= 1
        self.used_s = self._clock()

    def is_idle(self, now_s: float) -> bool:
        """Return whether the session can end without harm."""
        if self._users:
            return False
        return self.has_ended or (not self.deliveries and now_s - self.used_s >= self._settings.session_idle_s)

    @property
    def trouble(self) -> str:
        return self._puller.trouble

    def room(self, most: int) -> int:
        """Return how many messages may be delivered before others are decided, up to `most`."""
        return max(0, min(most, self._settings.unacked_max) - len(self.deliveries) - self._pulling)

    async def wait_for_room(self) -> None:
        """Wait until a message is decided, or its lease ends."""
        self._has_room.clear()
        await self._has_room.wait()

    async def pull(self, count: int, *, wait_s: float, lease_s: float) -> list[Delivered]:
        """Return up to `count` messages; without any, wait up to `wait_s` for the first one. A cancellation loses none.

        Raises:
            Refused: too many messages are undecided.
            QmqError: no broker group is connected, or the session has ended.
        """
        if (room := min(count, self.room(self._settings.unacked_max))) <= 0:
            most = self._settings.unacked_max
            raise Refused(Code.LIMIT, f"the session has {most} undecided messages, its limit")
        self._pulling += room
        try:
            async with asyncio.timeout(wait_s + JOIN_S):
                messages = await self._puller.pull(room, timeout=wait_s)
        except TimeoutError:
            if self._puller.cut_off:
                raise NotServed(f"no broker group is connected: {self.trouble}") from None
            messages = []
        except NotServed:
            raise
        except QmqError:
            self.has_ended = True
            raise
        finally:
            self._pulling -= room
        return [shown for message in messages if (shown := self._deliver(message, lease_s)) is not None]

    def _deliver(self, message: ReceivedMessage, lease_s: float) -> Delivered | None:
        try:
            handle = self.deliveries.add(message, self._clock() + lease_s)
            shown = delivered_of(message, handle, lease_s)
        except InvalidMessage as error:  # bytes of a foreign producer: in the end a dead letter, as with a handler
            self.deliveries.decide(handle, Decision.NACK)
            message.nack_nowait(str(error))
            return None
        self._metrics.delivered.inc()
        return shown

    async def decide(
        self, handles: Sequence[str], decision: Decision, reason: str = "", delay_s: float | None = None
    ) -> list[Result]:
        """Decide messages and wait until brokers have stored the decisions. The first decision on a message counts.

        Raises:
            InvalidRequest: the delay is too long. Nothing was decided.
        """
        found = {handle: delivery for handle in handles if (delivery := self._found(handle)) is not None}
        for handle, delivery in found.items():
            if delivery.decision is None and delivery.message is not None:
                _apply(delivery.message, decision, reason, delay_s)
                self.deliveries.decide(handle, decision)
        self._has_room.set()
        decided = {handle: delivery for handle, delivery in found.items() if delivery.decision is decision}
        waiting = [delivery.message for delivery in decided.values() if delivery.message is not None]
        with suppress(TimeoutError, QmqError):
            async with asyncio.timeout(self._settings.send_s):
                await self._puller.flush(waiting)
        results = [
            Result(handle=handle, outcome=self._outcome(handle, found.get(handle), decision)) for handle in handles
        ]
        for result in results:
            self._metrics.decisions.labels(decision, result.outcome).inc()
        return results

    def _found(self, handle: str) -> Delivery[ReceivedMessage] | None:
        """Return a delivery, or None if its handle is gone."""
        delivery = self.deliveries.find(handle)
        if delivery is not None and delivery.message is not None and delivery.message.is_dropped:
            return None
        return delivery

    def _outcome(self, handle: str, delivery: Delivery[ReceivedMessage] | None, decision: Decision) -> Outcome:
        if delivery is None:
            return "gone"
        if delivery.decision is not decision:
            return "decided"
        if (message := delivery.message) is None or message.is_settled:
            self.deliveries.stored(handle)
            return "stored"
        return "gone" if message.is_dropped else "unknown"

    async def renew(self, handles: Sequence[str], lease_s: float) -> list[Result]:
        """Begin the leases of undecided messages anew."""
        results = []
        for handle in handles:
            delivery = self._found(handle)
            outcome: Outcome = "gone" if delivery is None else "decided" if delivery.decision else "renewed"
            if outcome == "renewed":
                self.deliveries.renew(handle, self._clock() + lease_s)
            results.append(Result(handle=handle, outcome=outcome))
        return results

    def expire(self, now_s: float) -> None:
        """Return the messages whose lease has ended to the group."""
        for message in self.deliveries.expired(now_s):
            self._metrics.expired.inc()
            self._has_room.set()
            if not message.is_dropped:
                message.nack_nowait(
                    f"client {self.place.client} of the gateway did not decide within its lease", delay=0
                )


def _apply(message: ReceivedMessage, decision: Decision, reason: str, delay_s: float | None) -> None:
    match decision:
        case Decision.ACK:
            message.ack_nowait()
        case Decision.NACK:
            message.nack_nowait(reason, delay=delay_s)
        case Decision.DEAD_LETTER:
            message.dead_letter_nowait(reason)


T = TypeVar("T")

EVENT_STREAM = "text/event-stream"
_KEEP_ALIVE = ": keep-alive\n\n"


class ClientLeft(Exception):
    """Exception: the client closed its connection, so nothing can be sent."""


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`, which is cancelled when the client leaves.

    Raises:
        ClientLeft: the client left first.
    """
    task, gone = asyncio.create_task(work), asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        gone.cancel()
        if not task.done():
            task.add_done_callback(retrieve_error)  # its client has left, so nothing else reads the error
            task.cancel()
            await asyncio.wait({task})
    if task.cancelled():
        raise ClientLeft
    return task.result()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def events(session: Session, *, unacked_max: int, lease_s: float, keep_alive_s: float) -> AsyncIterator[str]:
    """Yield events; pause at `unacked_max` undecided messages of the session, and while the client reads nothing."""
    yield _KEEP_ALIVE
    try:
        with session:
            while True:
                if session.room(unacked_max):
                    # One at a time, so that after a broken stream at most one message waits for the end of its lease.
                    messages = await session.pull(1, wait_s=keep_alive_s, lease_s=lease_s)
                    for message in messages:
                        yield f"id: {message.handle}\nevent: message\ndata: {message.model_dump_json()}\n\n"
                    if messages:
                        continue
                else:
                    with suppress(TimeoutError):
                        async with asyncio.timeout(keep_alive_s):
                            await session.wait_for_room()
                            continue
                yield _KEEP_ALIVE
    except Refused as refused:
        yield _failed(refused.error)
    except QmqError as error:
        yield _failed(error_of(error))


def _failed(error: HttpError) -> str:
    return f"event: error\ndata: {json.dumps({'error': error.as_json()})}\n\n"
