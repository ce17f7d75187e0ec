"""Shell. Clients of the native protocol, one set per token: a producer, sessions of consumers, kept outcomes.

The clients use the caller's own token, so its rights and limits apply at the broker.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from hashlib import sha256

from qmq.client.batch import Outcome, Receipt, unstored
from qmq.client.producer import Producer
from qmq.errors import OutcomeUnknown, QmqError
from qmq.gateway.deliveries import Key, RepeatDiffers, Repeats, session_of
from qmq.gateway.metrics import Metrics
from qmq.gateway.models import MessageIn
from qmq.gateway.outcomes import Code, Refused
from qmq.gateway.session import Place, Session, SessionTerms
from qmq.gateway.settings import GatewaySettings
from qmq.logs import shielded

TICK_S = 0.5
"""Interval of checks for ended leases and idle sessions."""

Kept = asyncio.Future[Receipt]


class TokenClients:
    """Clients of one token. `users` counts the requests that use them."""

    def __init__(self, token: str, settings: GatewaySettings, metrics: Metrics) -> None:
        self.users = 0
        self.used_s = asyncio.get_running_loop().time()
        self.sessions: dict[str, Session] = {}
        self._places: dict[Place, Session] = {}
        self._token = token
        self._settings = settings
        self._metrics = metrics
        self._clock = asyncio.get_running_loop().time
        self._repeats: Repeats[Kept] = Repeats(keep_s=settings.repeat_s, keys_max=settings.repeats_max)
        self._producer: Producer | None = None

    # Sending.

    async def send(self, subject: str, messages: Sequence[MessageIn], key: str | None) -> list[tuple[Receipt, bool]]:
        """Send messages; return the receipt of each, and whether it is that of an earlier request.

        With a key, a message that is stored or on its way is not sent again. A message that was refused, or has an
        unknown outcome, is sent again with the same id.

        Raises:
            Refused: the key was used for another message.
        """
        kept: dict[int, Kept] = {}
        fresh: dict[int, Kept] = {}
        loop = asyncio.get_running_loop()
        for at, given in enumerate(messages):
            earlier = self._earlier(subject, key, at, given)
            if earlier is not None:
                kept[at] = earlier
        for at, given in enumerate(messages):
            if at not in kept:
                fresh[at] = loop.create_future()
                if key is not None:
                    self._repeats.keep((subject, key, at), given.fingerprint(), fresh[at], self._clock())
        many = len(messages) > 1
        ids = {at: None if key is None else f"{key}.{at}" if many else key for at in fresh}
        try:
            await self._send_all(subject, {at: messages[at] for at in fresh}, ids, fresh)
        finally:
            for at, future in fresh.items():
                _resolve(future, _cancelled(subject, ids[at]))  # the producer continues
                if key is not None and future.result().outcome is not Outcome.STORED:
                    self._repeats.forget((subject, key, at))
        receipts = [(await shielded((kept | fresh)[at]), at in kept) for at in range(len(messages))]
        for receipt, is_repeat in receipts:
            self._metrics.repeats.inc() if is_repeat else self._metrics.sent.labels(receipt.outcome).inc()
        return receipts

    def _earlier(self, subject: str, key: str | None, at: int, given: MessageIn) -> Kept | None:
        if key is None:
            return None
        place: Key = subject, key, at
        try:
            return self._repeats.find(place, given.fingerprint(), self._clock())
        except RepeatDiffers:
            text = f"Idempotency-Key {key!r} was used for another message of {subject!r}"
            raise Refused(Code.REPEAT_DIFFERS, text) from None

    async def _send_all(
        self, subject: str, messages: dict[int, MessageIn], ids: dict[int, str | None], receipts: dict[int, Kept]
    ) -> None:
        """Send messages without a delay together, in their order, and the others one by one."""
        producer = await self._open_producer()
        at_once = [at for at, given in messages.items() if not given.is_delayed]

        async def send_many() -> None:
            found = await producer.send_many(messages[at].message(subject, ids[at]) for at in at_once)
            for at, receipt in zip(at_once, found):
                _resolve(receipts[at], receipt)

        async def send(at: int, given: MessageIn) -> None:
            try:
                message = given.message(subject, ids[at])
                receipt = await producer.send(message, delay=given.delay_s, at=given.at, key=given.key)
            except QmqError as error:
                receipt = unstored(Outcome.REFUSED, ids[at] or given.id or "", subject, "", error)
            _resolve(receipts[at], receipt)

        later = [send(at, given) for at, given in messages.items() if given.is_delayed]
        await asyncio.gather(*([send_many()] if at_once else ()), *later)

    async def _open_producer(self) -> Producer:
        if self._producer is None:
            settings = self._settings
            self._producer = Producer(
                metaserver=settings.metaserver, app=settings.app, token=self._token, timeout_s=settings.send_s
            )
            await self._producer.__aenter__()
        return self._producer

    # Consuming.

    async def session(self, place: Place, terms: SessionTerms, *, is_full: bool) -> Session:
        """Return the session of a place, opened by its first request.

        Args:
            is_full: whether the gateway has no room for another session.

        Raises:
            Refused: the session has other terms, or there are too many sessions.
            CallError: a name or another argument is not valid.
        """
        if (session := self._places.get(place)) is not None and session.has_ended:
            await self.end(session)
        if (session := self._places.get(place)) is not None:
            session.used_s = self._clock()
            if session.terms != terms:
                raise Refused(Code.OTHER_TERMS, f"client {place.client} has a session with other parameters here")
            return session
        if is_full or len(self.sessions) >= self._settings.token_sessions_max:
            holder = "the gateway" if is_full else "this token"
            raise Refused(Code.LIMIT, f"{holder} has as many sessions as its limit allows")
        session = Session(place, terms, self._token, self._settings, self._metrics)
        self._places[place] = self.sessions[session.id] = session
        await session.open()
        return session

    def find(self, handles: Iterable[str], subject: str, group: str) -> dict[str, Session | None]:
        """Return the session of each handle, or None if it has ended, or belongs to another token, subject or group."""
        found: dict[str, Session | None] = {}
        for handle in handles:
            session = self.sessions.get(session_of(handle))
            is_here = session is not None and session.place[:2] == (subject, group)
            found[handle] = session if is_here else None
        return found

    def find_place(self, place: Place) -> Session | None:
        return self._places.get(place)

    def end(self, session: Session) -> Coroutine[None, None, None]:
        """Remove a session, so that no request finds it any more; return the work that ends it."""
        if self.sessions.pop(session.id, None) is not None:
            del self._places[session.place]
        return session.close()

    def is_idle(self, now_s: float) -> bool:
        return not self.users and not self.sessions and now_s - self.used_s >= self._settings.repeat_s

    async def close(self) -> None:
        await asyncio.gather(*map(self.end, list(self.sessions.values())))
        if self._producer is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._settings.stop_s):
                    await self._producer.close()


class Clients:
    """Clients of all tokens, those unused for longest first. Made by main; used on its loop."""

    def __init__(self, settings: GatewaySettings, metrics: Metrics) -> None:
        self._settings = settings
        self._metrics = metrics
        self._tokens: OrderedDict[bytes, TokenClients] = OrderedDict()
        self._ending: set[asyncio.Task[None]] = set()
        self.is_stopping = False
        metrics.observe(self)

    @contextmanager
    def of(self, token: str) -> Iterator[TokenClients]:
        """Use the clients of a token.

        Raises:
            Refused: the gateway stops, or all sets of clients are in use.
        """
        if self.is_stopping:
            raise Refused(Code.NOT_SERVED, "the gateway stops", {"Connection": "close"})
        key = sha256(token.encode()).digest()
        if (clients := self._tokens.get(key)) is None:
            if len(self._tokens) >= self._settings.tokens_max:
                self._make_room()
            clients = self._tokens[key] = TokenClients(token, self._settings, self._metrics)
        self._tokens.move_to_end(key)
        clients.users += 1
        try:
            yield clients
        finally:
            clients.users -= 1
            clients.used_s = asyncio.get_running_loop().time()

    @property
    def tokens(self) -> int:
        return len(self._tokens)

    @property
    def sessions(self) -> list[Session]:
        return [session for clients in self._tokens.values() for session in clients.sessions.values()]

    @property
    def is_full(self) -> bool:
        return sum(len(clients.sessions) for clients in self._tokens.values()) >= self._settings.sessions_max

    def _make_room(self) -> None:
        unused = (key for key, clients in self._tokens.items() if not clients.users and not clients.sessions)
        if (key := next(unused, None)) is None:
            raise Refused(Code.LIMIT, "the gateway has clients of as many tokens as its limit allows")
        self._end(self._tokens.pop(key).close())

    def _end(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def run(self) -> None:
        """End leases, idle sessions and unused clients, until cancelled."""
        clock = asyncio.get_running_loop().time
        while True:
            await asyncio.sleep(TICK_S)
            self.tick(clock())

    def tick(self, now_s: float) -> None:
        for key, clients in list(self._tokens.items()):
            for session in list(clients.sessions.values()):
                session.expire(now_s)
                if session.is_idle(now_s):
                    self._end(clients.end(session))
            if clients.is_idle(now_s):
                del self._tokens[key]
                self._end(clients.close())

    async def close(self) -> None:
        """Refuse further requests, return undecided messages, and wait for the outcomes of sent ones."""
        self.is_stopping = True
        await asyncio.gather(*(clients.close() for clients in self._tokens.values()), *self._ending)
        self._tokens.clear()


def _resolve(future: Kept, receipt: Receipt) -> None:
    if not future.done():
        future.set_result(receipt)


def _cancelled(subject: str, id: str | None) -> Receipt:
    error = OutcomeUnknown("the request ended before its outcome was known")
    return unstored(Outcome.UNKNOWN, id or "", subject, "", error)
