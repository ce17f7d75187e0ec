"""Shell. Brings a subscription's messages from one broker group and carries its acks there, over reconnects."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import Protocol

from qmq.client.holding import HeldPiece, Holding, ReceivedMessage
from qmq.client.link import Link
from qmq.codec import batch_ends
from qmq.errors import AccessError, CallError, InvalidAck, QmqError, UnknownSubscription
from qmq.remoting import commands
from qmq.remoting.commands import Ack, Command, Piece, Pull

log = logging.getLogger(__name__)

PULLS_IN_FLIGHT = 4
"""A feed's share of the prefetch is asked for in so many pulls: one is worked on, one waits, two are on their way."""
ACK_WAIT_S = 0.004
"""An ack is an fsync on both copies, which messages wait behind: one per message would double them."""
ACKS_IN_FLIGHT = 4
PULL_TIMEOUT_MS = 10_000
"""How long a broker holds a pull while there is nothing. Only a bound: it answers as soon as there is."""
RETRY_S_MIN, RETRY_S_MAX = 0.1, 2.0


@dataclass(frozen=True, slots=True)
class Terms:
    """What a subscription asks for; `prefetch_*` bound what is on its way or waits, `unacked_max` what is not acked."""

    subject: str
    group: str
    consumer: str
    start: str
    prefetch_messages: int
    prefetch_bytes: int
    unacked_max: int


class Parcel:
    """Messages of one piece that wait to be taken; `at` is the next one."""

    __slots__ = ("messages", "at", "feed", "size")

    def __init__(self, messages: list[ReceivedMessage], feed: Feed | None, size: int) -> None:
        self.messages, self.feed, self.size = messages, feed, size
        self.at = 0


class FeedOwner(Protocol):
    """The subscription that a feed belongs to."""

    terms: Terms

    @property
    def feeds_count(self) -> int: ...

    def arrived(self, parcel: Parcel) -> None: ...

    def drop(self) -> None: ...

    def settled(self) -> None: ...

    def failed(self, error: QmqError) -> None: ...

    def route_is_old(self) -> None: ...


class Feed:
    """One subscription at one broker group. Made by the subscription; used on its event loop; never blocks.

    Answers that belong to an earlier subscription (before a reconnect, or a reset) carry an old `turn` and are ignored.
    """

    def __init__(self, owner: FeedOwner, link: Link) -> None:
        self._owner, self._link = owner, link
        self.holding = Holding()
        self.lease_ms = 0
        self.buffered = self.buffered_bytes = 0
        self._subscription: int | None = None
        self._turn = 0
        self._pulls = self._acks = 0
        self._ack_scheduled = self._is_full = self._stopped = False
        self._failures = 0

    # Subscribing.

    @property
    def is_subscribed(self) -> bool:
        return self._subscription is not None

    def opened(self) -> None:
        """The link has a connection."""
        self._failures = 0
        self._subscribe()

    def lost(self) -> None:
        """The link lost its connection; answers to what was in flight will never come."""
        self._turn += 1
        self._subscription = None
        self._pulls = self._acks = 0

    def stop_pulling(self) -> None:
        self._stopped = True

    def unsubscribe(self) -> asyncio.Future[memoryview] | None:
        """Give back what is not acked; return the answer to wait for, None if the broker cannot be told."""
        connection, subscription = self._link.connection, self._subscription
        self.lost()
        if connection is None or subscription is None:
            return None
        return connection.request(Command.UNSUBSCRIBE, commands.encode_json(subscription=subscription))

    def _subscribe(self) -> None:
        self.lost()
        connection = self._link.connection
        if connection is None or self._stopped:
            return
        terms = self._owner.terms
        body = commands.encode_json(
            subject=terms.subject, group=terms.group, consumer=terms.consumer, start=terms.start,
            held_end=self.holding.held_end,
        )  # fmt: skip
        self._request(Command.SUBSCRIBE, body, self._subscribed)

    def _request(self, command: Command, body: bytes, then: Callable[[memoryview], None]) -> None:
        connection = self._link.connection
        assert connection is not None
        connection.ask(partial(self._answered, self._turn, command, then), command, body)

    def _answered(
        self, turn: int, command: Command, then: Callable[[memoryview], None], answer: memoryview | QmqError
    ) -> None:
        if turn != self._turn:
            return
        try:
            if isinstance(answer, QmqError):
                raise answer
            then(answer)
        except UnknownSubscription:
            self._retry()
        except InvalidAck as refusal:
            self._reset(refusal)
        except (CallError, AccessError) as fatal:
            if fatal is not answer:
                self._link.drop(f"unreadable answer to {command.name}: {fatal}")
            else:
                self._owner.failed(fatal)
        except QmqError as retryable:
            name = self._link.broker_group
            log.info("broker answers later group=%s command=%s error=%s", name, command.name, retryable)
            self._owner.route_is_old()
            self._retry()

    def _retry(self) -> None:
        """Subscribe again after a while; what is held stays held."""
        self.lost()
        wait_s = min(RETRY_S_MIN * 2 ** min(self._failures, 10), RETRY_S_MAX)
        self._failures += 1
        asyncio.get_running_loop().call_later(wait_s, self._subscribe_unless, self._turn)

    def _subscribe_unless(self, turn: int) -> None:
        if turn == self._turn:
            self._subscribe()

    def _reset(self, refusal: InvalidAck) -> None:
        """The broker does not know that we hold what we acked: forget all of it, and take what it hands out now."""
        log.warning(
            "ack refused, messages come again subject=%s group=%s broker_group=%s error=%s",
            self._owner.terms.subject, self._owner.terms.group, self._link.broker_group, refusal,
        )  # fmt: skip
        self.lost()
        self.holding.drop()
        self.holding = Holding()
        self._owner.drop()
        self._subscribe()

    def _subscribed(self, body: memoryview) -> None:
        fields = commands.decode_json(body, subscription=int, acked_end=int, lease_ms=int)
        self._subscription, self.lease_ms = fields["subscription"], fields["lease_ms"]
        self._failures = 0
        self.holding.subscribed(fields["acked_end"])
        self._send_acks()
        self.fill()

    # Pulling.

    def fill(self) -> None:
        """Ask for as much as there is room for."""
        if self._subscription is None or self._stopped:
            return
        terms, feeds = self._owner.terms, self._owner.feeds_count
        messages = max(1, terms.prefetch_messages // (feeds * PULLS_IN_FLIGHT))
        size = max(1, terms.prefetch_bytes // (feeds * PULLS_IN_FLIGHT))
        while self._subscription is not None and self._pulls < PULLS_IN_FLIGHT:
            if self._pulls and (
                self.buffered + (self._pulls + 1) * messages > PULLS_IN_FLIGHT * messages
                or self.buffered_bytes + (self._pulls + 1) * size > PULLS_IN_FLIGHT * size
            ):
                return
            if self.buffered >= messages * PULLS_IN_FLIGHT or self.buffered_bytes >= size * PULLS_IN_FLIGHT:
                return
            if self._has_too_many():
                return
            self._pulls += 1
            pull = Pull(self._subscription, messages, size, PULL_TIMEOUT_MS)
            self._request(Command.PULL, commands.encode_pull(pull), self._pulled)

    def _has_too_many(self) -> bool:
        is_full = self.holding.held >= self._owner.terms.unacked_max
        if is_full and not self._is_full:
            log.warning(
                "too many messages are not acked, pulling stops subject=%s group=%s unacked=%d",
                self._owner.terms.subject, self._owner.terms.group, self.holding.held,
            )  # fmt: skip
        self._is_full = is_full
        return is_full

    def _pulled(self, body: memoryview) -> None:
        self._pulls -= 1
        for piece in commands.decode_pulled(body):
            self._received(piece)
        self.fill()

    def _received(self, piece: Piece) -> None:
        """Make messages of a piece. About 0.5 µs each: nothing is decoded, and no call per message but the object."""
        held = self.holding.received(piece.pull_sequence, piece.count, self, self._link.broker_group)
        if held is None:
            return
        part, skipped = held
        ends = batch_ends(piece.body, piece.count)
        data = bytes(piece.body[4 * len(ends) :])
        begins = ends[skipped:-1]
        encoded = [data[begin:end] for begin, end in zip(begins, ends[skipped + 1 :])]
        sequences: Iterable[int] = range(piece.sequence + skipped, piece.sequence + piece.count)
        subject = repeat(self._owner.terms.subject)
        messages = list(map(ReceivedMessage, subject, sequences, encoded, repeat(part), range(len(encoded))))
        self.buffered += len(messages)
        self.buffered_bytes += len(data)
        self._owner.arrived(Parcel(messages, self, len(data)))

    def taken(self, parcel: Parcel) -> None:
        """All messages of a parcel were taken."""
        self.buffered -= len(parcel.messages)
        self.buffered_bytes -= parcel.size
        self.fill()

    # Acking.

    def done(self, piece: HeldPiece) -> None:
        """Something was marked; what is marked within the next moments goes in one ack."""
        if not self._ack_scheduled:
            self._ack_scheduled = True
            asyncio.get_running_loop().call_later(ACK_WAIT_S, self._send_acks)

    def _send_acks(self) -> None:
        self._ack_scheduled = False
        while self._subscription is not None and self._acks < ACKS_IN_FLIGHT and (ack := self.holding.next_ack()):
            self._acks += 1
            self._request(Command.ACK, commands.encode_ack(Ack(self._subscription, *ack)), partial(self._acked, ack[1]))
        if self._is_full:
            self.fill()

    def _acked(self, end: int, _: memoryview) -> None:
        self._acks -= 1
        self.holding.acked(end)
        self._send_acks()
        self._owner.settled()
