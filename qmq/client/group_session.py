"""Shell. Session of a consumer with one broker group: receives messages of one subject and sends decisions, over
reconnects.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import pairwise, repeat
from typing import NamedTuple, Protocol

from qmq.client.batch import OnReceipt, Receipt
from qmq.client.blocked_loop import MONITOR, id_of
from qmq.client.link import Link
from qmq.client.received import ReceivedMessage, UnackedPiece
from qmq.client.session_life import (
    Closed,
    Facts,
    Resting,
    SessionEvent,
    SessionLife,
    SessionState,
    Subscribed,
    Subscribing,
    Unsubscribed,
    Urgency,
)
from qmq.client.terms import BROKER_DELAY_S_MAX, RetryPolicy, Terms, worn_out
from qmq.client.unacked import Refusal, SentAck, SentNack, Unacked
from qmq.codec import batch_ends, without_body
from qmq.errors import (
    AccessError,
    CallError,
    ClientClosed,
    InvalidAck,
    InvalidMessage,
    NotServed,
    PostponesTooMuch,
    QmqError,
    UnknownSubscription,
)
from qmq.log.frame import FLAG_ORDERED
from qmq.logs import bounded
from qmq.message import EXPIRES_AFTER, RETRIES_MAX
from qmq.message_sizes import LARGE_BYTES_MIN
from qmq.remoting import commands
from qmq.remoting.commands import Ack, Command, Nack, Piece, Pull, Verdict
from qmq.states import Transition
from qmq.subjects import is_dead_letter_subject

log = bounded(__name__)

PULLS_IN_FLIGHT = 4
"""Number of pulls that divide a session's share of the prefetch: one is handled, one waits, two are in flight."""
ACK_WAIT_S = 0.004
"""Delay of an ack, to send several at once. An ack needs an fsync on both copies, and new messages wait behind that."""
SWEEP_S = 1.0
"""Longest wait of a done message for the rest of its piece. One ack per piece is less work, but after a crash unacked
messages are delivered again.
"""
REQUESTS_IN_FLIGHT = 4
"""Limit of acks without an answer, and of nacks without one."""
PULL_TIMEOUT_MS = 10_000, 30_000
"""Range of the time that a broker holds an empty pull; it answers earlier with the first message. Random per pull:
pulls of a thousand subjects that ended at the same moment delayed all messages by a tenth of a second.
"""
RETRY_S_MIN, RETRY_S_MAX = 0.1, 2.0
CARRY_S_MIN = 10.0
"""A retry that the broker does not store waits in the consumer if it is due sooner than this."""
CARRY_AGAIN_S = 60.0
"""Pause after a delay group did not store a message, because a right or the group is missing."""
FAR_TOO_MANY = 2
"""Waiting messages above this multiple of the current share are released."""
MANY_TIMES = 5
"""Deliveries of a message above which a warning is logged."""

FOR_GROUP = "qmq_consumerGroupName"
"""QMQ's property that sends a message to one group of a subject. Other groups skip the message."""
_FOR_GROUP, _RETRIES_MAX, _EXPIRES_AFTER = FOR_GROUP.encode(), RETRIES_MAX.encode(), EXPIRES_AFTER.encode()
_OF_CONSUMERS = b"qmq_consumer"
"""Common prefix of the two properties that a consumer checks on first delivery: one search finds both."""


class Parcel:
    """Messages of one piece that wait to be taken; `at` is the next one."""

    __slots__ = ("messages", "at", "session", "size")

    def __init__(self, messages: list[ReceivedMessage], session: GroupSession, size: int) -> None:
        self.messages: list[ReceivedMessage] = messages
        self.session: GroupSession = session
        self.size: int = size
        self.at: int = 0

    @property
    def waiting(self) -> int:
        """Number of messages not taken."""
        return len(self.messages) - self.at


class SessionOwner(Protocol):
    """Subscription of a session."""

    terms: Terms
    prefetch_messages: int
    """Current limit of messages that wait here or are requested."""
    is_closing: bool

    @property
    def sessions_count(self) -> int: ...

    def leased(self, lease_ms: int) -> None: ...

    def arrived(self, parcel: Parcel) -> None: ...

    def drop(self) -> None: ...

    def settled(self) -> None: ...

    def defer(self, message: ReceivedMessage, delay_s: float, done: OnReceipt) -> None: ...

    def failed(self, error: QmqError) -> None: ...

    def route_is_old(self) -> None: ...


class GroupSession:
    """Session with one broker group. Made by the subscription; used on its event loop; never blocks.

    Answers to requests of an earlier state (before a reconnect or reset) are ignored. `joins` is set for a broker group
    that joined the subject while the consumer ran.
    """

    def __init__(self, owner: SessionOwner, link: Link, source: str, *, joins: bool = False) -> None:
        self._owner = owner
        self._link = link
        self.source = source
        self.policy: RetryPolicy = owner.terms.policy
        self.group: str = owner.terms.group
        self.unacked: Unacked = Unacked()
        self.buffered: int = 0
        self.buffered_bytes: int = 0
        self._times_released = 0
        self.is_mailbox: bool = source != owner.terms.subject
        # The cluster stores no start of an ephemeral consumer: on a group that joins, it starts at the first message.
        self._from_first = self.is_mailbox or (joins and owner.terms.ephemeral)
        self._may_expire = not is_dead_letter_subject(source)  # an expired dead letter would become a dead letter again
        self._pulls_max = 1 if self.is_mailbox else PULLS_IN_FLIGHT
        self._ack_wait_s = 0.0 if owner.terms.most_once else ACK_WAIT_S  # pulls wait for each ack
        self._life = SessionLife()
        self._is_new = True
        """Whether no SUBSCRIBE was answered yet. Then unacked messages under this consumer id belong to an earlier
        process.
        """
        self._defers_from = 0.0
        """Time of the next request to a delay group, by the loop's clock."""
        self._urgent: set[Urgency] = set()
        self._send_timer: asyncio.TimerHandle | None = None
        self._sweep_timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()

    # Subscribing.

    @property
    def trouble(self) -> str:
        """Reason why the session is not subscribed."""
        return f"{self._link.broker_group}: {self._link.failure or 'subscribing'}"

    @property
    def is_subscribed(self) -> bool:
        return isinstance(self._life.now, Subscribed)

    @property
    def lease_ms(self) -> int:
        return self._life.now.lease_ms if isinstance(self._life.now, Subscribed) else 0

    @property
    def _takes_begins(self) -> bool:
        """Whether the broker supports BEGIN and NOT_BEGUN."""
        return isinstance(self._life.now, Subscribed) and self._life.now.takes_begins

    @property
    def _subscription(self) -> int | None:
        return self._life.now.subscription if isinstance(self._life.now, Subscribed) else None

    @property
    def history(self) -> list[Transition]:
        """Last transitions, oldest first."""
        return list(self._life.history)

    def opened(self) -> None:
        """Subscribe on a new connection."""
        self._subscribe(failures=0)

    def lost(self) -> None:
        """Forget the requests in flight on a lost connection."""
        if self._life.state is not SessionState.CLOSED:
            self._enter(SessionEvent.LOST, Unsubscribed())

    def drain(self) -> None:
        """Pull no more. Decisions are still sent."""
        if self._life.may(SessionEvent.STOPPED):
            self._enter(SessionEvent.STOPPED, self._life.now)

    def unsubscribe(self) -> asyncio.Future[memoryview] | None:
        """Unsubscribe, which returns undecided messages to the group; return the answer to wait for, or None without a
        connection.
        """
        connection, subscription = self._link.connection, self._subscription
        if self._life.state is not SessionState.CLOSED:
            self._enter(SessionEvent.CLOSED, Closed())
        self.unacked.drop()
        if connection is None or subscription is None:
            return None
        return connection.request(Command.UNSUBSCRIBE, commands.encode_json(subscription=subscription))

    def _enter(self, event: SessionEvent, now: Facts) -> None:
        self._life.enter(event, now, at_ms=int(self._loop.time() * 1000))

    def _subscribe(self, *, failures: int) -> None:
        """Subscribe, unless the session is closed or drained."""
        is_over = self._life.state is SessionState.CLOSED or (self._owner.is_closing and not self.unacked.messages)
        if self._link.connection is None or is_over:
            return
        self._enter(SessionEvent.ASKED, Subscribing(failures))
        terms = self._owner.terms
        is_plain = not self.is_mailbox  # all messages of a mailbox are for this group
        body = commands.encode_subscribe(
            subject=self.source,
            group=terms.group,
            consumer=terms.consumer,
            held_end=self.unacked.held_end,
            is_new=self._is_new,
            start="earliest" if self._from_first else terms.start,
            since_ms=terms.since_ms,
            broadcast=terms.broadcast,
            deliveries_max=terms.policy.backstop,
            tags=terms.tags if is_plain else (),
            tag_mode=terms.tag_mode,
            begins=True,
            exclusive_ms=terms.exclusive_ms,
            ephemeral=terms.ephemeral,
        )
        self._request(Command.SUBSCRIBE, body, self._subscribed)

    def _request(self, command: Command, body: bytes, then: Callable[[memoryview], None]) -> None:
        self._ask(command, body, partial(self._answered, self._life.now, command, then))

    def _ask(self, command: Command, body: bytes, answered: Callable[[memoryview | QmqError], None]) -> None:
        connection = self._link.connection
        assert connection is not None
        connection.ask(answered, command, body)

    def _answered(
        self, asked: Facts, command: Command, then: Callable[[memoryview], None], answer: memoryview | QmqError
    ) -> None:
        if asked is not self._life.now:
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
            elif isinstance(fatal, AccessError) and self._link.has_old_token:
                self._link.drop(f"the token's file has another one: {fatal}")
            else:
                self._owner.failed(fatal)
        except QmqError as retryable:
            name = self._link.broker_group
            log.info(
                "request refused for now, subscribing again group=%s command=%s error=%s", name, command.name, retryable
            )
            self._owner.route_is_old()
            self._retry()

    def _retry(self) -> None:
        """Subscribe again after a pause, and keep the messages."""
        failures = self._life.now.failures if isinstance(self._life.now, Subscribing) else 0
        wait_s = min(RETRY_S_MIN * 2 ** min(failures, 10), RETRY_S_MAX)
        resting = Resting(failures + 1)
        self._enter(SessionEvent.REFUSED, resting)
        self._loop.call_later(wait_s, self._rested, resting)

    def _rested(self, resting: Resting) -> None:
        if self._life.now is resting:
            self._enter(SessionEvent.RESTED, Unsubscribed())
            self._subscribe(failures=resting.failures)

    def _reset(self, refusal: InvalidAck) -> None:
        """Drop all messages, because the broker does not count the acked ones as delivered to this consumer, and
        subscribe again. The broker delivers the messages again.
        """
        log.warning(
            "ack refused, messages are delivered again subject=%s group=%s broker_group=%s error=%s",
            self.source,
            self._owner.terms.group,
            self._link.broker_group,
            refusal,
        )
        self._enter(SessionEvent.RESET, Unsubscribed())
        self.unacked.drop()
        self.unacked = Unacked()
        self._is_new = True
        self._owner.drop()
        self._subscribe(failures=0)
        self._owner.settled()

    def _subscribed(self, body: memoryview) -> None:
        fields = commands.decode_json(body, subscription=int, acked_end=int, lease_ms=int, unacked=list)
        here = Subscribed(
            fields["subscription"],
            fields["lease_ms"],
            takes_begins=fields.get("begins") is True,
            takes_expired=fields.get("expires") is True,
            takes_worn_out=fields.get("worn_out") is True,
        )
        self._enter(SessionEvent.ACCEPTED, here)
        if self._owner.is_closing:
            self.drain()
        self._owner.leased(self.lease_ms)
        self._is_new = False
        self.unacked.subscribed(fields["acked_end"], [(begin, end) for begin, end in fields["unacked"]])
        self._urgent.add(Urgency.SWEEP)
        self._send()
        self.fill()
        self._owner.settled()

    # Pulling.

    def fill(self) -> None:
        """Pull as many messages as there is room for."""
        here = self._life.now
        if not isinstance(here, Subscribed) or self._life.state is SessionState.DRAINING:
            return
        terms = self._owner.terms
        pulls, messages = self._share()
        size = max(1, terms.prefetch_bytes // (self._owner.sessions_count * PULLS_IN_FLIGHT))
        while self._life.now is here and here.pulls < pulls and self._has_room(here.pulls, pulls, messages, size):
            wanted = min(messages, terms.unacked_max - self.unacked.messages - here.asked)
            self._note_full(self.unacked.messages >= terms.unacked_max)
            if wanted <= 0:
                return
            here.pulls += 1
            here.asked += wanted
            pull = Pull(here.subscription, wanted, size, random.randint(*PULL_TIMEOUT_MS))
            pulled = partial(self._pulled, here, wanted, self._times_released)
            self._request(Command.PULL, commands.encode_pull(pull), pulled)

    def _share(self) -> tuple[int, int]:
        """Return the number of pulls for this session's share of the prefetch, and the messages of each."""
        share = max(1, self._owner.prefetch_messages // self._owner.sessions_count)
        return min(self._pulls_max, share), max(1, share // PULLS_IN_FLIGHT)

    def _has_room(self, under_way: int, pulls: int, messages: int, size: int) -> bool:
        """Return whether one more pull of this size fits into the session's share of `pulls`; the first may
        exceed it.
        """
        messages_max, bytes_max = pulls * messages, pulls * size
        if under_way:
            coming = under_way + 1
            return (
                self.buffered + coming * messages <= messages_max and self.buffered_bytes + coming * size <= bytes_max
            )
        return self.buffered < messages_max and self.buffered_bytes < bytes_max

    def _note_full(self, is_full: bool) -> None:
        if not is_full:
            self._urgent.discard(Urgency.FULL)
        elif Urgency.FULL not in self._urgent:
            self._urgent.add(Urgency.FULL)
            log.warning(
                "too many unacked messages, pulling stops subject=%s group=%s unacked=%d",
                self.source,
                self._owner.terms.group,
                self.unacked.messages,
            )

    def _pulled(self, here: Subscribed, asked: int, times_released: int, body: memoryview) -> None:
        here.pulls -= 1
        here.asked -= asked
        is_late = times_released != self._times_released
        for run in _runs(commands.decode_pulled(body)):
            self._received(run, is_late=is_late)
        if is_late:
            self._send()
        self.fill()

    def _received(self, run: list[Piece], *, is_late: bool) -> None:
        """Make messages of a run of pieces, and pass them to the subscription.

        This takes about 0.5 µs per message, without decoding, and 3 µs per piece. Tags, and producers that send single
        messages, make pieces of one message; work per piece instead of per run would cost 20 µs each.

        Args:
            is_late: whether messages were released after this pull was sent. Then the new messages are released too,
                because they would overtake those.
        """
        sequences, encoded, searched, size = _cut(run)  # first, so that unreadable pieces leave no trace
        times = run[0].times
        held = self.unacked.received(run[0].pull_sequence, len(encoded), times, self, self._link.broker_group)
        if held is None:
            return
        part, skipped = held
        part.suspected = bool(run[0].flags & commands.FLAG_SUSPECTED)
        del sequences[:skipped], encoded[:skipped]
        if any(piece.flags & FLAG_ORDERED for piece in run):
            self._urgent.add(Urgency.ORDERED)
        subject = repeat(self._owner.terms.subject)
        messages = list(map(ReceivedMessage, subject, sequences, encoded, repeat(part), range(len(encoded))))
        if times > MANY_TIMES:
            log.warning(
                "messages are delivered often subject=%s group=%s broker_group=%s sequence=%d messages=%d times=%d",
                self.source,
                self._owner.terms.group,
                part.broker_group,
                sequences[0],
                len(messages),
                times,
            )
        if any(_OF_CONSUMERS in data for data in searched):  # a fifteenth of a message's time: add no other such search
            if any(_FOR_GROUP in data for data in searched):
                messages = self._keep_own_messages(part, messages)
            part.may_expire = self._may_expire and any(_EXPIRES_AFTER in data for data in searched)
        has_limits = times > 1 and any(_RETRIES_MAX in data for data in searched)
        part.is_uneven = self.is_mailbox or has_limits
        if times > 1 and not self._owner.terms.most_once:
            if times > self.policy.deliveries_max or has_limits:
                messages = self._without_worn_out(part, messages)
        if messages:
            self.buffered += len(messages)
            self.buffered_bytes += size
            parcel = Parcel(messages, self, size)
            if not (is_late and self.release(parcel)):
                self._owner.arrived(parcel)

    def _keep_own_messages(self, piece: UnackedPiece, messages: list[ReceivedMessage]) -> list[ReceivedMessage]:
        """Ack messages for another group; return the others."""
        kept = []
        for message in messages:
            try:
                is_own = message.get(FOR_GROUP, self._owner.terms.group) == self._owner.terms.group
            except QmqError:  # the handler's access raises the same error
                is_own = True
            if is_own:
                kept.append(message)
            else:
                piece.mark(message._at)
                self.done(piece)
        return kept

    def _without_worn_out(self, piece: UnackedPiece, messages: list[ReceivedMessage]) -> list[ReceivedMessage]:
        """Make dead letters of messages above their delivery limit or the group's; return the others."""
        rest, here = [], self._life.now
        takes_worn_out = isinstance(here, Subscribed) and here.takes_worn_out
        for message in messages:
            if (decision := worn_out(message, self.policy)) is None:
                rest.append(message)
                continue
            decision = MONITOR.explained(message, decision)
            log.warning(
                "message is a dead letter subject=%s group=%s id=%s sequence=%d broker_group=%s times=%d reason=%s",
                self.source,
                self.group,
                id_of(message),
                message.sequence,
                message.broker_group,
                message.times,
                decision.reason,
            )
            verdict = decision.verdict if takes_worn_out else Verdict.DEAD_LETTER
            self.nack(piece, message._at, delay_s=0.0, verdict=verdict, reason=decision.reason)
        return rest

    def taken(self, parcel: Parcel) -> None:
        """Free the room of a parcel after all its messages were taken."""
        self.buffered -= len(parcel.messages)
        self.buffered_bytes -= parcel.size
        self.fill()

    def excess(self, waiting: int) -> int:
        """Return how many of `waiting` messages are above this session's share; 0 if they are below `FAR_TOO_MANY`
        shares.
        """
        pulls, messages = self._share()
        wanted = pulls * messages
        return waiting - wanted if self._takes_begins and waiting > FAR_TOO_MANY * wanted else 0

    def release(self, parcel: Parcel, *, kept: int = 0) -> bool:
        """Return the untaken messages of a parcel to the broker, except the first `kept`; return False if the broker
        does not accept NOT_BEGUN.
        """
        if not self._takes_begins:
            return False
        end = parcel.at + kept
        for message in parcel.messages[end:]:
            self.not_begun(message)
        rest = parcel.messages[parcel.at : end]
        size = sum(len(message._data) for message in rest)
        self.buffered -= len(parcel.messages) - kept
        self.buffered_bytes -= parcel.size - size
        parcel.messages, parcel.at, parcel.size = rest, 0, size
        return True

    def released(self) -> None:
        """Send the released messages before the next pull, so the broker delivers them in order."""
        self._times_released += 1
        self._send()
        self.fill()

    # Deciding.

    def not_begun(self, message: ReceivedMessage) -> None:
        """Return a message to the group without counting this delivery."""
        verdict = Verdict.NOT_BEGUN if self._takes_begins else Verdict.RETRY
        self.nack(message._piece, message._at, delay_s=0.0, verdict=verdict, reason="")

    def expired(self, message: ReceivedMessage) -> None:
        """Report a message that expired before a handler began."""
        here, piece = self._life.now, message._piece
        if isinstance(here, Subscribed) and here.takes_expired:
            self.nack(piece, message._at, delay_s=0.0, verdict=Verdict.EXPIRED, reason="expired")
        else:
            message._done()

    def begin(self, piece: UnackedPiece, at: int) -> asyncio.Future[memoryview] | None:
        """Announce that a handler begins with this message; return the answer to wait for, or None without a
        connection.

        Earlier decisions are sent first, all of them, however many are without an answer. Otherwise messages whose acks
        are lost in a crash of this handler would count as begun too, each time.
        """
        self._urgent.add(Urgency.SWEEP)
        self._send(in_flight_max=None)
        connection, here = self._link.connection, self._life.now
        if connection is None or not isinstance(here, Subscribed) or not here.takes_begins or piece.is_dropped:
            return None
        pull_sequence = piece.begin + at
        begun = Ack(here.subscription, [(pull_sequence, pull_sequence + 1)])
        return connection.request(Command.BEGIN, commands.encode_ack(begun))

    def on_loop(self, call: Callable[[], None]) -> None:
        """Run `call` now, or on the event loop when called from another thread."""
        if threading.get_ident() == self._thread:
            call()
            return
        try:
            self._loop.call_soon_threadsafe(call)
        except RuntimeError:
            raise ClientClosed("the consumer's event loop has ended; the message is delivered again") from None

    def done(self, piece: UnackedPiece) -> None:
        """Schedule an ack for a marked message; messages marked soon after share it."""
        if self._send_timer is None:
            self._send_timer = self._loop.call_later(self._ack_wait_s, self._send)
            if self._sweep_timer is None:
                self._sweep_timer = self._loop.call_later(SWEEP_S, self._sweep)

    def nack(
        self,
        piece: UnackedPiece,
        at: int,
        *,
        delay_s: float,
        verdict: Verdict,
        reason: str,
        message: ReceivedMessage | None = None,
    ) -> None:
        """Have a message delivered again in `delay_s`, or apply another verdict."""
        due_ms = int((self._loop.time() + delay_s) * 1000)
        self.unacked.nack(Refusal(piece, at, due_ms, verdict, reason, message if delay_s else None))
        self.done(piece)

    def defer(self, message: ReceivedMessage, *, delay_s: float, reason: str) -> None:
        """Have a message delivered again after more than a day, by a delay group."""
        piece, at = message._piece, message._at
        if not piece.is_dropped and piece.refuse(at):
            self._owner.defer(message, delay_s, partial(self._deferred, piece, at, delay_s, reason))

    def _deferred(self, piece: UnackedPiece, at: int, delay_s: float, reason: str, receipt: Receipt) -> None:
        """Ack a message that a delay group has stored; otherwise have its broker retry it after the longest delay."""
        if piece.is_dropped:
            return
        if receipt.is_stored:
            piece.done_after_all(at)
        else:
            log.error(
                "delayed retry not stored, retried in a day delay_days=%.1f subject=%s group=%s id=%s error=%s",
                delay_s / 86_400,
                self.source,
                self.group,
                receipt.message_id,
                receipt.reason,
            )
            due_ms = int((self._loop.time() + BROKER_DELAY_S_MAX) * 1000)
            self.unacked.queue_nack(Refusal(piece, at, due_ms, Verdict.RETRY, reason))
        self.done(piece)

    def _carry(self, nack: SentNack) -> bool:
        """Send retries that the broker does not store to a delay group; return whether `nack` has no others. Without
        this, many retries would keep new messages from the group.
        """
        now_s = self._loop.time()
        if now_s < self._defers_from or self._owner.terms.mailbox is None:
            return False
        late = [refusal for refusal in nack.refusals if refusal.due_ms > (now_s + CARRY_S_MIN) * 1000]
        moved = [(refusal, message) for refusal in late if (message := refusal.message) and _may_be_moved(message)]
        self.unacked.withdraw(nack, [refusal for refusal, _ in moved])
        for refusal, message in moved:
            self._owner.defer(message, refusal.due_ms / 1000 - now_s, partial(self._carried, refusal))
        return not nack.refusals

    def _carried(self, refusal: Refusal, receipt: Receipt) -> None:
        """Ack a message that a delay group has stored; otherwise send its nack to the broker again."""
        if refusal.piece.is_dropped:
            return
        if receipt.is_stored:
            refusal.piece.done_after_all(refusal.at)
        else:
            self._defers_from = self._loop.time() + CARRY_AGAIN_S
            log.warning(
                "delayed retry not stored by a delay group, the consumer keeps it subject=%s group=%s id=%s error=%s",
                self.source,
                self.group,
                receipt.message_id,
                receipt.reason,
            )
            self.unacked.queue_nack(refusal)
        self.done(refusal.piece)

    def flush(self) -> None:
        """Send every decision from now on, also inside pieces with undecided messages."""
        self._urgent.add(Urgency.FLUSH)
        self._send()

    def stop_flushing(self) -> None:
        self._urgent.discard(Urgency.FLUSH)

    def _sweep(self) -> None:
        self._sweep_timer = None
        self._urgent.add(Urgency.SWEEP)
        self._send()

    def _send(self, in_flight_max: int | None = REQUESTS_IN_FLIGHT) -> None:
        """Send acks, then nacks. Brokers never refuse acks temporarily, and nacked messages are delivered later anyway.

        Args:
            in_flight_max: limit of acks without an answer, and of nacks without one; None for no limit.
        """
        self._send_timer = None
        here, unacked = self._life.now, self.unacked
        if not isinstance(here, Subscribed):
            return
        while self._life.now is here and (in_flight_max is None or here.acks < in_flight_max):
            if (ack := unacked.next_ack(everything=bool(self._urgent))) is None:
                self._urgent.discard(Urgency.SWEEP)
                break
            here.acks += 1
            body = commands.encode_ack(Ack(here.subscription, ack.ranges))
            self._request(Command.ACK, body, partial(self._acked, ack))
        while self._life.now is here and (in_flight_max is None or here.nacks < in_flight_max):
            if (nack := unacked.next_nack(int(self._loop.time() * 1000))) is None:
                break
            here.nacks += 1
            body = commands.encode_nack(Nack(here.subscription, nack.entries, nack.reason))
            self._ask(Command.NACK, body, partial(self._nack_answered, here, nack))

    def _acked(self, ack: SentAck, _: memoryview) -> None:
        if isinstance(self._life.now, Subscribed):
            self._life.now.acks -= 1
        self.unacked.acked(ack)
        self._went_on()

    def _nack_answered(self, here: Subscribed, nack: SentNack, answer: memoryview | QmqError) -> None:
        """Handle the answer to a nack.

        A master without a slave in sync stores no dead letters, and a broker stores a limited number of delayed
        retries. Such refused nacks wait; all other decisions continue.
        """
        if here is self._life.now and isinstance(answer, NotServed):
            here.nacks -= 1
            if not (isinstance(answer, PostponesTooMuch) and self._carry(nack)):
                self._loop.call_later(RETRY_S_MAX, self._nack_again, here, nack)
            self._send()
        else:
            self._answered(here, Command.NACK, partial(self._nacked, here, nack), answer)

    def _nack_again(self, here: Subscribed, nack: SentNack) -> None:
        if here is self._life.now:
            self.unacked.requeue_nack(nack)
            self._send()

    def _nacked(self, here: Subscribed, nack: SentNack, _: memoryview) -> None:
        here.nacks -= 1
        self.unacked.nacked(nack)
        self._went_on()

    def _went_on(self) -> None:
        self._send()
        self.fill()
        self._owner.settled()


def _may_be_moved(message: ReceivedMessage) -> bool:
    """Return whether a message has no order key, so that no later message waits for it."""
    try:
        return message.order_key is None
    except InvalidMessage:  # bytes of a foreign producer
        return False


def _runs(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Yield runs of pieces with consecutive pull sequences, equal numbers of deliveries, and equal suspicion."""
    run: list[Piece] = []
    for piece in pieces:
        if run and (
            (piece.pull_sequence, piece.times) != (run[-1].pull_sequence + run[-1].count, run[-1].times)
            or (piece.flags ^ run[-1].flags) & commands.FLAG_SUSPECTED
        ):
            yield run
            run = []
        run.append(piece)
    if run:
        yield run


class _Cut(NamedTuple):
    """Messages of a run. `searched` contains all their properties; bodies of large messages are not searched."""

    sequences: list[int]
    encoded: list[bytes]
    searched: list[bytes]
    bytes: int


def _cut(run: list[Piece]) -> _Cut:
    """Return the messages of a run; raises InvalidRequest."""
    sequences: list[int] = []
    encoded: list[bytes] = []
    searched: list[bytes] = []
    size = 0
    for piece in run:
        ends = batch_ends(piece.body, piece.count)
        begin = 4 * len(ends)
        data = bytes(piece.body[begin : begin + ends[-1]])  # no padding: a lone message is not copied again
        messages = [data[begin:end] for begin, end in pairwise(ends)]
        searched += [data] if len(data) < LARGE_BYTES_MIN * piece.count else map(without_body, messages)
        encoded += messages
        sequences += range(piece.sequence, piece.sequence + piece.count)
        size += len(data)
    return _Cut(sequences, encoded, searched, size)
