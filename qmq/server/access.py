"""Shell. Finds out whose token somebody shows: the broker's own at once, others by asking the metaserver."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Protocol

import grpc
import grpc.aio

from qmq.control_plane import META_CHANNEL_OPTIONS, find_metaserver
from qmq.errors import AccessError, NotServed, cause_of
from qmq.proto import qmq_pb2 as pb
from qmq.proto.qmq_pb2_grpc import MetaserverStub
from qmq.rations import NewSubjects, SentBytes
from qmq.replication.settings import CopySettings
from qmq.rights import Caller, Scope, TokenRole
from qmq.server.tokens import Known, TokenCache

log = logging.getLogger(__name__)

ASK_S = 2.0
"""Less than what a connection has to say who it is."""
REVIEW_S = 5.0
"""How often the tokens of open connections are looked at: those revoked or expired end within this and the answer's
validity, less than a minute."""
REVIEWED_AT_ONCE = 100
"""A metaserver that hangs costs each question its whole time; one after the other, the last would wait for minutes."""
CLUSTER = Caller("cluster", TokenRole.CLUSTER)


class Guest(Protocol):
    """A connection that a token opened."""

    def turn_out(self, reason: str) -> None:
        """Its token is not valid any more."""


class Access:
    """Made by main; `run` returns when it is cancelled. Used on the loop."""

    def __init__(self, settings: CopySettings) -> None:
        self._settings = settings
        self._cache = TokenCache(settings.token)
        self._asking: dict[str, asyncio.Task[Known]] = {}
        self._guests: dict[str, set[Guest]] = {}
        self._stub: MetaserverStub | None = None
        self._channel: grpc.aio.Channel | None = None
        bounds = settings.new_subjects_per_minute, settings.new_subjects_max
        self.new_subjects, self.new_groups = NewSubjects(*bounds), NewSubjects(*bounds, "consumer groups")
        self.sent = SentBytes(settings.token_bytes_per_s) if settings.token_bytes_per_s else None

    def own(self, token: str) -> Caller | None:
        """The caller, if it shows this broker's own token."""
        return CLUSTER if self._cache.is_own(token) else None

    async def check(self, token: str) -> Caller:
        """Say whose token it is.

        Raises:
            AccessError: it is missing, or the metaserver does not know it.
            NotServed: it is new here, and the metaserver cannot be asked.
        """
        if not token:
            raise AccessError("the API token is missing")
        if self._cache.is_own(token):
            return CLUSTER
        known = self._cache.fresh(token, now_ms=_now_ms())
        if known is None:
            try:
                known = await self._ask_once(token)
            except NotServed as error:
                if (caller := self._cache.fallback(token, now_ms=_now_ms())) is None:
                    raise NotServed(f"this token is new here, and cannot be checked: {error}") from None
                return caller
        if known.caller is None:
            raise AccessError(known.reason)
        return known.caller

    def entered(self, token: str, guest: Guest) -> None:
        """Turn this connection out once its token is revoked or expires."""
        if not self._cache.is_own(token):
            self._guests.setdefault(token, set()).add(guest)

    def connections_of(self, token: str) -> int:
        """Return how many connections a token has opened; of the broker's own, 0."""
        return len(self._guests.get(token, ()))

    def left(self, token: str, guest: Guest) -> None:
        guests = self._guests.get(token, set())
        guests.discard(guest)
        if not guests:
            self._guests.pop(token, None)

    async def run(self) -> None:
        """Look again, and again, at the tokens of open connections."""
        try:
            while True:
                await asyncio.sleep(REVIEW_S)
                tokens = list(self._guests)
                for begin in range(0, len(tokens), REVIEWED_AT_ONCE):
                    await asyncio.gather(*map(self._review, tokens[begin : begin + REVIEWED_AT_ONCE]))
        finally:
            await self._disconnect()

    async def _review(self, token: str) -> None:
        try:
            await self.check(token)
        except AccessError as error:
            for guest in list(self._guests.get(token, ())):
                guest.turn_out(str(error))
        except NotServed as error:  # nobody to ask, and it has expired
            for guest in list(self._guests.get(token, ())):
                guest.turn_out(f"the token has expired, or {error}")

    async def _ask_once(self, token: str) -> Known:
        """Many connections with one token ask one question."""
        if (task := self._asking.get(token)) is None:
            task = self._asking[token] = asyncio.ensure_future(self._ask(token))
            task.add_done_callback(lambda _: self._asking.pop(token, None))
        return await asyncio.shield(task)

    async def _ask(self, token: str) -> Known:
        stub = self._stub
        try:
            async with asyncio.timeout(ASK_S):
                stub = stub or await self._connect()
                metadata = (("x-api-token", self._settings.token),)
                answer = await stub.CheckToken(pb.TokenQuestion(token=token), metadata=metadata)
            caller = Caller(answer.name, TokenRole(answer.role), Scope(tuple(answer.subjects), tuple(answer.groups)))
        except grpc.aio.AioRpcError as error:
            if error.code() == grpc.StatusCode.NOT_FOUND:
                return self._cache.refused(token, str(error.details()), now_ms=_now_ms())
            await self._drop(stub)  # the next question goes to whoever answers at the address then
            raise NotServed(f"the metaserver does not answer: {error.details()}") from None
        except (TimeoutError, OSError, ValueError) as error:
            await self._drop(stub)
            raise NotServed(f"the metaserver does not answer: {cause_of(error)}") from None
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            # Another question closed the connection. Nobody cancelled us, and who waits must not think so of himself.
            raise NotServed("the connection to the metaserver was closed meanwhile") from None
        return self._cache.accepted(
            token, caller, valid_ms=answer.valid_ms, expires_in_ms=answer.expires_in_ms, now_ms=_now_ms()
        )

    async def _connect(self) -> MetaserverStub:
        address = await asyncio.to_thread(find_metaserver, self._settings.metaserver, timeout_s=ASK_S)
        if self._stub is None:
            self._channel = grpc.aio.insecure_channel(address, options=META_CHANNEL_OPTIONS)
            self._stub = MetaserverStub(self._channel)
        return self._stub

    async def _drop(self, failed: MetaserverStub | None) -> None:
        """Close a connection that gave no answer, unless that was done already."""
        if failed is not None and failed is self._stub:
            await self._disconnect()

    async def _disconnect(self) -> None:
        channel, self._channel, self._stub = self._channel, None, None
        if channel is not None:
            await channel.close()


def _now_ms() -> int:
    return time.monotonic_ns() // 1_000_000
