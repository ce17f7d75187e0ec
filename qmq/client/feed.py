"""Shell. Brings messages of one subject from one broker group and carries decisions there, over reconnects."""

from __future__ import annotations

import asyncio
import logging
import random
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import pairwise, repeat
from typing import Protocol

from qmq.client.batching import Done, Receipt
from qmq.client.holding import HeldPiece, Holding, Refusal, SentAck, SentNack
from qmq.client.link import Link
from qmq.client.received import ReceivedMessage
from qmq.client.retrying import BROKER_DELAY_S_MAX, worn_out
from qmq.client.terms import Terms
from qmq.codec import batch_ends
from qmq.errors import AccessError, CallError, ClientClosed, InvalidAck, NotServed, QmqError, UnknownSubscription
from qmq.log.frame import FLAG_ORDERED
from qmq.message import RETRIES_MAX
from qmq.remoting import commands
from qmq.remoting.commands import Ack, Command, Nack, Piece, Pull, Verdict

log = logging.getLogger(__name__)

PULLS_IN_FLIGHT = 4
"""A feed's share of the prefetch is asked for in so many pulls: one is worked on, one waits, two are on their way."""
ACK_WAIT_S = 0.004
"""An ack is an fsync on both copies, which messages wait behind: one per message would double them."""
SWEEP_S = 1.0
"""How long a message that is done may wait for others of its piece: one ack for the whole piece is less work for all,
but after a crash, what was not acked comes again."""
REQUESTS_IN_FLIGHT = 4
"""Acks, and nacks, that wait for their answer."""
PULL_TIMEOUT_MS = 10_000, 30_000
"""How long a broker holds a pull while there is nothing, each pull a time of its own. Only a bound: it answers as soon
as there is. Pulls of a thousand subjects that ended in the same moment held up all messages for a tenth of a second."""
RETRY_S_MIN, RETRY_S_MAX = 0.1, 2.0
MANY_TIMES = 5
"""Somebody should look at what was handed over more often than this."""

FOR_GROUP = "qmq_consumerGroupName"
"""QMQ's way to send a message to one group of a subject. The others take it as done."""
_FOR_GROUP, _RETRIES_MAX = FOR_GROUP.encode(), RETRIES_MAX.encode()


class Parcel:
    """Messages that are held as one piece and wait to be taken; `at` is the next one."""

    __slots__ = ("messages", "at", "feed", "size")

    def __init__(self, messages: list[ReceivedMessage], feed: Feed, size: int) -> None:
        self.messages, self.feed, self.size = messages, feed, size
        self.at = 0


class FeedOwner(Protocol):
    """The subscription that a feed belongs to."""

    terms: Terms

    @property
    def feeds_count(self) -> int: ...

    def leased(self, lease_ms: int) -> None: ...

    def arrived(self, parcel: Parcel) -> None: ...

    def drop(self) -> None: ...

    def settled(self) -> None: ...

    def defer(self, message: ReceivedMessage, delay_s: float, done: Done) -> None: ...

    def failed(self, error: QmqError) -> None: ...

    def route_is_old(self) -> None: ...


class Feed:
    """One subscription at one broker group. Made by the subscription; used on its event loop; never blocks.

    Answers that belong to an earlier subscription (before a reconnect, or a reset) carry an old `turn` and are ignored.
    """

    def __init__(self, owner: FeedOwner, link: Link, source: str) -> None:
        self._owner, self._link, self.source = owner, link, source
        self.policy, self.group = owner.terms.policy, owner.terms.group
        self.holding = Holding()
        self.lease_ms = 0
        self.buffered = self.buffered_bytes = 0
        self.is_mailbox = source != owner.terms.subject
        self._pulls_max = 1 if self.is_mailbox else PULLS_IN_FLIGHT
        self._ack_wait_s = 0.0 if owner.terms.most_once else ACK_WAIT_S  # there, somebody waits for each
        self._subscription: int | None = None
        self._is_new = True
        """No broker has answered a SUBSCRIBE yet: whatever our name has un-acked is of an earlier process."""
        self._turn = 0
        self._pulls = self._asked = self._acks = self._nacks = 0
        self._send_scheduled = self._sweep_scheduled = self._flushes = False
        self._sweeps = False
        """Everything that is done is to be acked, as soon as requests may be sent."""
        self._is_full = self._stopped = self._closed = False
        self._is_ordered = False
        """Whether messages with an order key came: the next ones of their keys wait for each decision."""
        self._failures = 0
        self._loop, self._thread = asyncio.get_running_loop(), threading.get_ident()

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
        self._pulls = self._asked = self._acks = self._nacks = 0

    def stop_pulling(self) -> None:
        self._stopped = True

    def unsubscribe(self) -> asyncio.Future[memoryview] | None:
        """Give back what is not decided; return the answer to wait for, None if the broker cannot be told."""
        connection, subscription = self._link.connection, self._subscription
        self.lost()
        self._closed = True
        self.holding.drop()
        if connection is None or subscription is None:
            return None
        return connection.request(Command.UNSUBSCRIBE, commands.encode_json(subscription=subscription))

    def _subscribe(self) -> None:
        self.lost()
        if self._link.connection is None or self._closed or (self._stopped and not self.holding.held):
            return
        terms = self._owner.terms
        is_plain = not self.is_mailbox  # what is in the mailbox is for this group, whatever it is
        body = commands.encode_subscribe(
            subject=self.source, group=terms.group, consumer=terms.consumer, held_end=self.holding.held_end,
            is_new=self._is_new,
            start=terms.start if is_plain else "earliest", since_ms=terms.since_ms, broadcast=terms.broadcast,
            deliveries_max=terms.policy.backstop, tags=terms.tags if is_plain else (),
            tag_mode=terms.tag_mode,
        )  # fmt: skip
        self._request(Command.SUBSCRIBE, body, self._subscribed)

    def _request(self, command: Command, body: bytes, then: Callable[[memoryview], None]) -> None:
        self._ask(command, body, partial(self._answered, self._turn, command, then))

    def _ask(self, command: Command, body: bytes, answered: Callable[[memoryview | QmqError], None]) -> None:
        connection = self._link.connection
        assert connection is not None
        connection.ask(answered, command, body)

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
            self.source, self._owner.terms.group, self._link.broker_group, refusal,
        )  # fmt: skip
        self.lost()
        self.holding.drop()
        self.holding, self._is_new = Holding(), True
        self._owner.drop()
        self._subscribe()
        self._owner.settled()

    def _subscribed(self, body: memoryview) -> None:
        fields = commands.decode_json(body, subscription=int, acked_end=int, lease_ms=int, unacked=list)
        self._subscription, self.lease_ms = fields["subscription"], fields["lease_ms"]
        self._owner.leased(self.lease_ms)
        self._is_new = False
        self._failures = 0
        self.holding.subscribed(fields["acked_end"], [(begin, end) for begin, end in fields["unacked"]])
        self._sweeps = True
        self._send()
        self.fill()
        self._owner.settled()

    # Pulling.

    def fill(self) -> None:
        """Ask for as much as there is room for."""
        if self._subscription is None or self._stopped:
            return
        terms, feeds = self._owner.terms, self._owner.feeds_count
        share = max(1, terms.prefetch_messages // feeds)
        pulls = min(self._pulls_max, share)
        messages = max(1, share // PULLS_IN_FLIGHT)
        size = max(1, terms.prefetch_bytes // (feeds * PULLS_IN_FLIGHT))
        while self._subscription is not None and self._pulls < pulls and self._has_room(pulls, messages, size):
            wanted = min(messages, terms.unacked_max - self.holding.held - self._asked)
            self._note_full(self.holding.held >= terms.unacked_max)
            if wanted <= 0:
                return
            self._pulls += 1
            self._asked += wanted
            pull = Pull(self._subscription, wanted, size, random.randint(*PULL_TIMEOUT_MS))
            self._request(Command.PULL, commands.encode_pull(pull), partial(self._pulled, wanted))

    def _has_room(self, pulls: int, messages: int, size: int) -> bool:
        """Whether one more pull of so much fits into this feed's share, which is so many of them; the first may go over
        it by itself."""
        messages_max, bytes_max = pulls * messages, pulls * size
        if self._pulls:
            coming = self._pulls + 1
            return (
                self.buffered + coming * messages <= messages_max and self.buffered_bytes + coming * size <= bytes_max
            )
        return self.buffered < messages_max and self.buffered_bytes < bytes_max

    def _note_full(self, is_full: bool) -> None:
        if is_full and not self._is_full:
            log.warning(
                "too many messages are not acked, pulling stops subject=%s group=%s unacked=%d",
                self.source, self._owner.terms.group, self.holding.held,
            )  # fmt: skip
        self._is_full = is_full

    def _pulled(self, asked: int, body: memoryview) -> None:
        self._pulls -= 1
        self._asked -= asked
        for run in _runs(commands.decode_pulled(body)):
            self._received(run)
        self.fill()

    def _received(self, run: list[Piece]) -> None:
        """Make messages of pieces that are held as one.

        About 0.5 µs each: nothing is decoded, and no call per message but the object. And about 3 µs for each piece:
        nothing here is done per piece that can be done for all. Tags, and producers that send one by one, make pieces
        of one message, of which each would cost 20 µs by itself.
        """
        sequences, encoded, batches = _cut(run)  # first: nothing is held of what cannot be read
        times = run[0].times
        held = self.holding.received(run[0].pull_sequence, len(encoded), times, self, self._link.broker_group)
        if held is None:
            return
        part, skipped = held
        del sequences[:skipped], encoded[:skipped]
        self._is_ordered = self._is_ordered or any(piece.flags & FLAG_ORDERED for piece in run)
        subject = repeat(self._owner.terms.subject)
        messages = list(map(ReceivedMessage, subject, sequences, encoded, repeat(part), range(len(encoded))))
        if times > MANY_TIMES:
            log.warning(
                "messages come again and again subject=%s group=%s broker_group=%s sequence=%d messages=%d times=%d",
                self.source, self._owner.terms.group, part.broker_group, sequences[0], len(messages), times,
            )  # fmt: skip
        if any(_FOR_GROUP in data for data in batches):  # a fifteenth of all that a message costs: no such search more
            messages = self._without_those_of_others(part, messages)
        if times > 1 and not self._owner.terms.most_once:
            if times > self.policy.deliveries_max or any(_RETRIES_MAX in data for data in batches):
                messages = self._without_worn_out(part, messages)
        if messages:
            size = sum(map(len, batches))
            self.buffered += len(messages)
            self.buffered_bytes += size
            self._owner.arrived(Parcel(messages, self, size))

    def _without_those_of_others(self, piece: HeldPiece, messages: list[ReceivedMessage]) -> list[ReceivedMessage]:
        """Take as done what names another group as its receiver."""
        mine = []
        for message in messages:
            try:
                is_mine = message.get(FOR_GROUP, self._owner.terms.group) == self._owner.terms.group
            except QmqError:  # its handler will find out
                is_mine = True
            if is_mine:
                mine.append(message)
            else:
                piece.mark(message._at)
                self.done(piece)
        return mine

    def _without_worn_out(self, piece: HeldPiece, messages: list[ReceivedMessage]) -> list[ReceivedMessage]:
        """Make dead letters of what was handed over too often, by the message's own limit or by the group's."""
        rest = []
        for message in messages:
            if (decision := worn_out(message, self.policy)) is None:
                rest.append(message)
                continue
            log.warning(
                "message is a dead letter subject=%s group=%s sequence=%d broker_group=%s times=%d reason=%s",
                self.source, self.group, message.sequence, message.broker_group, message.times, decision.reason,
            )  # fmt: skip
            self.nack(piece, message._at, delay_s=0.0, verdict=decision.verdict, reason=decision.reason)
        return rest

    def taken(self, parcel: Parcel) -> None:
        """All messages of a parcel were taken."""
        self.buffered -= len(parcel.messages)
        self.buffered_bytes -= parcel.size
        self.fill()

    # Deciding.

    def on_loop(self, call: Callable[[], None]) -> None:
        """Call now, or on the event loop if this is another thread."""
        if threading.get_ident() == self._thread:
            call()
            return
        try:
            self._loop.call_soon_threadsafe(call)
        except RuntimeError:
            raise ClientClosed("the consumer's event loop has ended; the message comes again") from None

    def done(self, piece: HeldPiece) -> None:
        """Something was marked; what is marked within the next moments goes in one ack."""
        if not self._send_scheduled:
            self._send_scheduled = True
            self._loop.call_later(self._ack_wait_s, self._send)
            if not self._sweep_scheduled:
                self._sweep_scheduled = True
                self._loop.call_later(SWEEP_S, self._sweep)

    def nack(self, piece: HeldPiece, at: int, *, delay_s: float, verdict: Verdict, reason: str) -> None:
        """Hand this message over again in `delay_s`, or never."""
        due_ms = int((self._loop.time() + delay_s) * 1000)
        self.holding.nack(Refusal(piece, at, due_ms, verdict, reason))
        self.done(piece)

    def defer(self, message: ReceivedMessage, *, delay_s: float, reason: str) -> None:
        """Have this message come again in more than a day, which a broker does not keep."""
        piece, at = message._piece, message._at
        if not piece.is_dropped and piece.refuse(at):
            self._owner.defer(message, delay_s, partial(self._deferred, piece, at, delay_s, reason))

    def _deferred(self, piece: HeldPiece, at: int, delay_s: float, reason: str, receipt: Receipt) -> None:
        """A delay group has a copy, and the message is done; or the broker keeps it for as long as it can."""
        if piece.is_dropped:
            return
        if receipt.is_stored:
            piece.done_after_all(at)
        else:
            log.error(
                "retry in %.1f days cannot be kept, message comes again in a day subject=%s group=%s id=%s error=%s",
                delay_s / 86_400, self.source, self.group, receipt.message_id, receipt.reason,
            )  # fmt: skip
            due_ms = int((self._loop.time() + BROKER_DELAY_S_MAX) * 1000)
            self.holding.tell(Refusal(piece, at, due_ms, Verdict.RETRY, reason))
        self.done(piece)

    def flush(self) -> None:
        """From now on send every decision, also those amid messages that are not decided."""
        self._flushes = True
        self._send()

    def stop_flushing(self) -> None:
        self._flushes = False

    def _sweep(self) -> None:
        self._sweep_scheduled = False
        self._sweeps = True
        self._send()

    def _send(self) -> None:
        """Send acks and nacks. First acks: they never wait for long, and what failed comes later anyway.

        Everything that is done is acked where somebody waits for it: the next message of a key, or the next pull.
        """
        self._send_scheduled = False
        holding = self.holding
        everything = self._sweeps or self._flushes or self._is_ordered or self._is_full
        while self._subscription is not None and self._acks < REQUESTS_IN_FLIGHT:
            if (ack := holding.next_ack(everything=everything)) is None:
                self._sweeps = False
                break
            self._acks += 1
            self._request(
                Command.ACK, commands.encode_ack(Ack(self._subscription, ack.ranges)), partial(self._acked, ack)
            )
        while self._subscription is not None and self._nacks < REQUESTS_IN_FLIGHT:
            if (nack := holding.next_nack(int(self._loop.time() * 1000))) is None:
                break
            self._nacks += 1
            body = commands.encode_nack(Nack(self._subscription, nack.entries, nack.reason))
            self._ask(Command.NACK, body, partial(self._nack_answered, self._turn, nack))

    def _acked(self, ack: SentAck, _: memoryview) -> None:
        self._acks -= 1
        self.holding.acked(ack)
        self._went_on()

    def _nack_answered(self, turn: int, nack: SentNack, answer: memoryview | QmqError) -> None:
        """While its slave is missing a master stores no dead letters: these wait, and everything else goes on."""
        if turn == self._turn and isinstance(answer, NotServed):
            self._nacks -= 1
            self._loop.call_later(RETRY_S_MAX, self._nack_again, turn, nack)
            self._send()
        else:
            self._answered(turn, Command.NACK, partial(self._nacked, nack), answer)

    def _nack_again(self, turn: int, nack: SentNack) -> None:
        if turn == self._turn:
            self.holding.put_off(nack)
            self._send()

    def _nacked(self, nack: SentNack, _: memoryview) -> None:
        self._nacks -= 1
        self.holding.nacked(nack)
        self._went_on()

    def _went_on(self) -> None:
        self._send()
        self.fill()
        self._owner.settled()


def _runs(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Yield pieces that can be held as one: numbered one after the other, handed out equally often."""
    run: list[Piece] = []
    for piece in pieces:
        if run and (piece.pull_sequence, piece.times) != (run[-1].pull_sequence + run[-1].count, run[-1].times):
            yield run
            run = []
        run.append(piece)
    if run:
        yield run


def _cut(run: list[Piece]) -> tuple[list[int], list[bytes], list[bytes]]:
    """Return sequence and bytes of each message, and the bytes of each batch; raises InvalidRequest."""
    sequences: list[int] = []
    encoded: list[bytes] = []
    batches: list[bytes] = []
    for piece in run:
        ends = batch_ends(piece.body, piece.count)
        batches.append(data := bytes(piece.body[4 * len(ends) :]))
        encoded += [data[begin:end] for begin, end in pairwise(ends)]
        sequences += range(piece.sequence, piece.sequence + piece.count)
    return sequences, encoded, batches
