"""Shell. Check of tokens: the broker's own token at once, others by the metaserver."""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import grpc
import grpc.aio

from qmq.access import Token, token_metadata, token_text
from qmq.control_plane import META_CHANNEL_OPTIONS, find_metaserver
from qmq.errors import AccessError, InvalidRequest, NotServed, cause_of
from qmq.logs import shielded
from qmq.proto import qmq_pb2 as pb
from qmq.proto.qmq_pb2_grpc import MetaserverStub
from qmq.rations import NewProducers, NewSubjects, SentBytes, TokenGroups
from qmq.remoting import commands
from qmq.remoting.commands import Command
from qmq.remoting.packet import Packet
from qmq.replication.settings import CopySettings
from qmq.rights import CONSUME, PRODUCE, Caller, Scope, TokenRole

log = logging.getLogger(__name__)

ASK_S = 2.0
"""Less than the time for a login."""
REVIEW_S = 5.0
"""Interval of the checks of open connections' tokens. A connection with a revoked or expired token ends within this
interval and the answer's validity, less than a minute.
"""
REVIEWED_AT_ONCE = 100
"""Number of tokens that are checked at the same time. With a hanging metaserver each check takes its whole timeout, so
one after the other would take minutes.
"""
CLUSTER = Caller("cluster", TokenRole.CLUSTER)


class Guest(Protocol):
    """Connection that a token opened."""

    def revoke(self, reason: str) -> None:
        """Close the connection, because its token is not valid any more."""


class Access:
    """Check of a process's tokens. Made by main; `run` returns when it is cancelled. Used on the loop."""

    def __init__(self, settings: CopySettings) -> None:
        self._settings = settings
        self._cache = TokenCache(settings.token)
        self._asking: dict[str, asyncio.Task[Known]] = {}
        self._guests: dict[str, set[Guest]] = {}
        self._stub: MetaserverStub | None = None
        self._channel: grpc.aio.Channel | None = None
        self.new_subjects = NewSubjects(settings.new_subjects_per_minute, settings.new_subjects_max)
        self.groups = TokenGroups(settings.new_subjects_per_minute, settings.token_groups_max)
        self.producers = NewProducers(settings.new_producers_per_minute)
        self.sent = SentBytes(settings.token_bytes_per_s) if settings.token_bytes_per_s else None

    def own(self, token: str) -> Caller | None:
        """Return the caller if `token` is the broker's own, or None."""
        return CLUSTER if self._cache.is_own(token) else None

    async def check(self, token: str) -> Caller:
        """Return the caller of a token.

        Raises:
            AccessError: the token is missing, or unknown to the metaserver.
            NotServed: the token is new here, and no metaserver answers.
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
        """Register a connection, to be closed once its token is revoked or expires."""
        if not self._cache.is_own(token):
            self._guests.setdefault(token, set()).add(guest)

    def connections_of(self, token: str) -> int:
        """Return the number of connections of a token; 0 for the broker's own."""
        return len(self._guests.get(token, ()))

    def left(self, token: str, guest: Guest) -> None:
        guests = self._guests.get(token, set())
        guests.discard(guest)
        if not guests:
            self._guests.pop(token, None)

    async def run(self) -> None:
        """Check the tokens of open connections again and again."""
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
                guest.revoke(str(error))
        except NotServed as error:  # no metaserver answers, and the known answer has expired
            for guest in list(self._guests.get(token, ())):
                guest.revoke(f"the token has expired, or {error}")

    async def _ask_once(self, token: str) -> Known:
        """Check a token at the metaserver, once for all connections that wait for the same token."""
        if (task := self._asking.get(token)) is None:
            task = self._asking[token] = asyncio.ensure_future(self._ask(token))
            task.add_done_callback(lambda _: self._asking.pop(token, None))
        return await shielded(task)

    async def _ask(self, token: str) -> Known:
        stub = self._stub
        try:
            async with asyncio.timeout(ASK_S):
                stub = stub or await self._connect()
                metadata = token_metadata(self._settings.token)
                answer = await stub.CheckToken(pb.TokenQuestion(token=token), metadata=metadata)
            caller = Caller(answer.name, TokenRole(answer.role), Scope(tuple(answer.subjects), tuple(answer.groups)))
        except grpc.aio.AioRpcError as error:
            if error.code() == grpc.StatusCode.NOT_FOUND:
                return self._cache.refused(token, str(error.details()), now_ms=_now_ms())
            await self._drop(stub)  # the next check looks the address up again
            raise NotServed(f"the metaserver does not answer: {error.details()}") from None
        except (TimeoutError, OSError, ValueError) as error:
            await self._drop(stub)
            raise NotServed(f"the metaserver does not answer: {cause_of(error)}") from None
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            # Another question closed the connection: this task was not cancelled, and must not appear so.
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
        """Close a connection without an answer, unless another task did."""
        if failed is not None and failed is self._stub:
            await self._disconnect()

    async def _disconnect(self) -> None:
        channel, self._channel, self._stub = self._channel, None, None
        if channel is not None:
            await channel.close()


def _now_ms() -> int:
    return time.monotonic_ns() // 1_000_000


REFUSED_MS = 5000
"""Time before a rejected token is checked again."""
KNOWN_MAX = 10_000
SUBJECTS_MAX = 10_000
"""Limit of a connection's remembered subjects; other subjects are checked again for each batch."""

_WRITING = frozenset({Command.PRODUCE, Command.RECUR})
"""Commands that carry a message, which may create a subject."""
_OF_PRODUCERS = frozenset({Command.CANCEL, Command.RESCHEDULE})
"""Commands about delayed messages, for clients that may send them."""

CONTROL_ROLES: Mapping[str, frozenset[TokenRole]] = {
    "ReplicaStatus": frozenset({TokenRole.OPERATOR, TokenRole.BROKER}),
    "Rates": frozenset({TokenRole.OPERATOR}),
    "Settings": frozenset({TokenRole.OPERATOR}),
    "DescribeLog": frozenset({TokenRole.OPERATOR, TokenRole.BROKER}),
    "ReadLog": frozenset({TokenRole.OPERATOR, TokenRole.BROKER}),
    "ReadDerived": frozenset({TokenRole.OPERATOR}),
    "HoldLog": frozenset({TokenRole.OPERATOR}),
    "Consumers": frozenset({TokenRole.OPERATOR}),
    "DelayStats": frozenset({TokenRole.OPERATOR}),
    "ListDelayed": frozenset({TokenRole.OPERATOR}),
    "CancelDelayed": frozenset({TokenRole.CLUSTER}),
    "Quarantine": frozenset({TokenRole.CLUSTER}),
    "Browse": frozenset({TokenRole.OPERATOR, TokenRole.CLIENT}),
    "PrepareSwap": frozenset({TokenRole.CLUSTER}),
    "CancelSwap": frozenset({TokenRole.CLUSTER}),
    "PrepareFailover": frozenset({TokenRole.CLUSTER}),
    "ResetOffset": frozenset({TokenRole.CLUSTER}),
    "MarkGroups": frozenset({TokenRole.CLUSTER}),
}
"""Method of the control port -> roles of which a caller needs one. Only metaservers may change anything."""


@dataclass(frozen=True, slots=True)
class Known:
    """Facts about one token. `caller` is None if the metaserver refused the token, for `reason`."""

    caller: Caller | None
    fresh_until_ms: int
    expires_ms: int = 0
    """0 for no expiry."""
    reason: str = ""

    def is_expired(self, now_ms: int) -> bool:
        return bool(self.expires_ms) and now_ms >= self.expires_ms


class TokenCache:
    """Cache of known tokens. Used on the loop. Times are of a monotonic clock."""

    def __init__(self, own_token: Token) -> None:
        self._own = own_token
        self._known: dict[str, Known] = {}

    def is_own(self, token: str) -> bool:
        """Return whether this is the broker's own token, the key of the installation."""
        return hmac.compare_digest(token.encode("utf-8", "surrogatepass"), token_text(self._own).encode())

    def fresh(self, token: str, *, now_ms: int) -> Known | None:
        """Return the facts about a token if they are fresh enough to use without the metaserver, or None."""
        known = self._known.get(token)
        return known if known and now_ms < known.fresh_until_ms and not known.is_expired(now_ms) else None

    def fallback(self, token: str, *, now_ms: int) -> Caller | None:
        """Return the caller to assume while no metaserver answers, or None."""
        known = self._known.get(token)
        return known.caller if known and not known.is_expired(now_ms) else None

    def accepted(self, token: str, caller: Caller, *, valid_ms: int, expires_in_ms: int, now_ms: int) -> Known:
        expires_ms = now_ms + expires_in_ms if expires_in_ms else 0
        return self._learn(token, Known(caller, now_ms + valid_ms, expires_ms))

    def refused(self, token: str, reason: str, *, now_ms: int) -> Known:
        return self._learn(token, Known(None, now_ms + REFUSED_MS, reason=reason))

    def _learn(self, token: str, known: Known) -> Known:
        if token not in self._known and len(self._known) >= KNOWN_MAX:
            self._known = {text: kept for text, kept in self._known.items() if kept.caller is not None}
            if len(self._known) >= KNOWN_MAX:
                del self._known[next(iter(self._known))]  # the oldest
        self._known[token] = known
        return known


class Limits:
    """Rights and limits of a client's connection. A subject seen before costs one look-up per batch."""

    def __init__(self, caller: Caller, ration: NewSubjects, sent: SentBytes | None = None) -> None:
        self._caller = caller
        self._ration = ration
        self._sent = sent
        self._produced: set[bytes] = set()

    def check(self, packet: Packet, known_subjects: Mapping[str, object], *, now_ms: int) -> None:
        """Raise MissingRight for a subject out of scope, Overloaded for too many new subjects or too many bytes."""
        if packet.code in _WRITING:
            self._check_subject(_written_subject(packet), known_subjects, now_ms)
        elif packet.code == Command.SUBSCRIBE:
            subject = commands.decode_json(packet.body, subject=str)["subject"]
            self._caller.require_subject(CONSUME, subject)
        elif packet.code in _OF_PRODUCERS:
            self._caller.require_subject(PRODUCE, commands.decode_json(packet.body, subject=str)["subject"])
        if self._sent is not None and packet.code in _WRITING:
            self._sent.take(self._caller, len(packet.body), now_ms=now_ms)
        elif self._sent is not None and packet.code == Command.RESCHEDULE:
            self._sent.take(self._caller, 0, now_ms=now_ms)  # the search counts the messages that it writes anew

    def _check_subject(self, name: bytes, known_subjects: Mapping[str, object], now_ms: int) -> None:
        if name in self._produced:
            return
        try:
            subject = name.decode()
        except UnicodeDecodeError as error:
            raise InvalidRequest(f"not a PRODUCE: {error}") from None
        self._caller.require_subject(PRODUCE, subject)
        if subject not in known_subjects and not self._ration.allow(self._caller, 1, now_ms=now_ms):
            raise self._ration.why_not(self._caller)
        if len(self._produced) >= SUBJECTS_MAX:
            self._produced.clear()
        self._produced.add(name)


def _written_subject(packet: Packet) -> bytes:
    if packet.code == Command.PRODUCE:
        return commands.produced_subject(packet.body)
    return str(commands.decode_json(packet.body, subject=str)["subject"]).encode()


def check_client(caller: Caller, group: str) -> None:
    """Raise MissingRight unless a client with this token may use the broker group."""
    caller.require_role(TokenRole.CLIENT)
    caller.require_group(group)


def check_broker(caller: Caller, group: str) -> None:
    """Raise MissingRight unless another broker of the group may hold this token."""
    caller.require_role(TokenRole.BROKER)
    caller.require_group(group)
