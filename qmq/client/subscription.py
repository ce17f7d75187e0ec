"""Shell. Subscription of a consumer group to a subject: messages from all broker groups in one buffer.

Each broker group has two sources: the subject, and the group's mailbox, a retry subject of its own.

Retries that are due later than brokers store them go to a delay group, as a copy with the mailbox as its subject. The
message is acked once the copy is stored. The copy has the same id and content, and the number of deliveries. If an
answer is lost, message and copy may both be delivered.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Collection
from contextlib import suppress

from qmq.client.backlog import QueuedMessage
from qmq.client.batch import OnReceipt, Outcome, unstored
from qmq.client.group_session import GroupSession, Parcel
from qmq.client.link import Link
from qmq.client.received import ReceivedMessage
from qmq.client.route_watch import NO_ROUTE_YET, TROUBLE_S, RouteWatch
from qmq.client.sender import Sender
from qmq.client.terms import Terms
from qmq.codec import decode_envelope, delayed_copy
from qmq.errors import InvalidMessage, QmqError
from qmq.logs import bounded
from qmq.message import EXPIRES_AFTER, TIMES
from qmq.remoting.commands import Verdict

log = bounded(__name__)

UNSUBSCRIBE_TIMEOUT_S = 2.0


class Subscription:
    """Subscription of a listener or puller, used on its event loop until `close`.

    Args:
        on_leased: called with the lease, in ms, that a broker group gives.
        on_failed: called when the subscription ends with an `error`.
    """

    def __init__(
        self,
        terms: Terms,
        watch: RouteWatch,
        delayed_retries: DelayedRetries,
        on_leased: Callable[[int], None],
        on_failed: Callable[[], None],
    ) -> None:
        self.terms = terms
        self.prefetch_messages: int = terms.prefetch_messages
        """Current limit of messages that wait here or are requested; a listener changes it."""
        self.error: QmqError | None = None
        """Reason of the end: another process uses the consumer id, or the broker rejects a name."""
        self.is_closing: bool = False
        self.arrived_messages: int = 0
        """Number of messages received so far."""
        self.on_waiting: Callable[[], None] | None = None
        """Called when messages arrive in an empty buffer."""
        self.on_empty: Callable[[], None] | None = None
        """Called when the buffer is empty, and at the end."""
        self._watch = watch
        self._delayed_retries = delayed_retries
        self._on_leased = on_leased
        self._on_failed = on_failed
        self._sessions: dict[tuple[str, str], GroupSession] = {}
        self._parcels: deque[Parcel] = deque()
        self._takers: deque[asyncio.Future[None]] = deque()
        self._behind: set[asyncio.Future[None]] = set()
        """Workers that wait for listeners of higher priority."""
        self._settlers: list[asyncio.Future[None]] = []
        self._loop = asyncio.get_running_loop()
        self.joined_s: float = 0.0
        """Time of the last subscribe at a broker group; 0 before the first one."""
        self._left_s = 0.0
        """Time of the last loss of a connection."""

    # Called by the connections.

    def open_session(self, link: Link, *, joins: bool = False) -> None:
        """Open the sessions with a broker group, if there are none.

        Args:
            joins: the broker group was not in the first route of the subject.
        """
        for source in (self.terms.subject, self.terms.mailbox):
            key = (link.broker_group, source or "")
            if source is not None and key not in self._sessions:
                self._sessions[key] = GroupSession(self, link, source, joins=joins)
                if link.is_open:
                    self._sessions[key].opened()

    def link_opened(self, link: Link) -> None:
        for session in self._sessions_of(link.broker_group):
            session.opened()

    def link_lost(self, link: Link) -> None:
        self._left_s = self._loop.time()
        for session in self._sessions_of(link.broker_group):
            session.lost()

    def lease_ms(self, broker_group: str) -> int | None:
        """Return the shortest lease of a broker group's sessions; None without a subscription there."""
        return min(
            (session.lease_ms for session in self._sessions_of(broker_group) if session.is_subscribed), default=None
        )

    def _sessions_of(self, broker_group: str) -> list[GroupSession]:
        return [session for (name, _), session in self._sessions.items() if name == broker_group]

    # Connections.

    @property
    def trouble(self) -> str:
        """Reasons why messages of some or all broker groups do not come now; "" while all are connected."""
        sessions = [session for (_, source), session in list(self._sessions.items()) if source == self.terms.subject]
        if not sessions and not self._watch.is_known(self.terms.subject):
            return self._watch.refusals.get(self.terms.subject) or self._watch.silence or NO_ROUTE_YET
        return "; ".join(session.trouble for session in sessions if not session.is_subscribed)

    @property
    def is_cut_off(self) -> bool:
        """Whether no broker group is connected. A subject without broker groups has none to connect to."""
        return bool(self.trouble) and not any(session.is_subscribed for session in list(self._sessions.values()))

    @property
    def cut_off(self) -> str:
        """Reason why no broker group is connected: since the start, or for ten seconds; "" otherwise."""
        is_short = self.joined_s > 0 and self._loop.time() - self._left_s < TROUBLE_S
        return "" if is_short or not self.is_cut_off else self.trouble

    # Called by sessions.

    @property
    def sessions_count(self) -> int:
        """Number of sessions that share the prefetch. Mailboxes are nearly always empty and not counted."""
        return sum(source == self.terms.subject for _, source in self._sessions)

    def leased(self, lease_ms: int) -> None:
        self.joined_s = self._loop.time()
        self._on_leased(lease_ms)

    def arrived(self, parcel: Parcel) -> None:
        if self.is_closing and parcel.session.release(parcel):
            return
        self._parcels.append(parcel)
        self.arrived_messages += len(parcel.messages)
        self._wake(len(parcel.messages))
        if self.on_waiting is not None and len(self._parcels) == 1:
            self.on_waiting()

    def drop(self) -> None:
        """Forget waiting messages that a session dropped; they are delivered again."""
        dropped = [parcel for parcel in self._parcels if parcel.messages[0].is_dropped]
        self._parcels = deque(parcel for parcel in self._parcels if not parcel.messages[0].is_dropped)
        for parcel in dropped:
            parcel.session.taken(parcel)
        self._removed()

    def settled(self) -> None:
        """Wake the calls that wait for stored decisions."""
        waiting, self._settlers = self._settlers, []
        for future in waiting:
            if not future.done():
                future.set_result(None)

    def defer(self, message: ReceivedMessage, delay_s: float, done: OnReceipt) -> None:
        mailbox = self.terms.mailbox
        assert mailbox is not None  # its policy allows no such delay
        self._delayed_retries.defer(message, mailbox, time.time_ns() // 1_000_000 + int(delay_s * 1000), done)

    def failed(self, error: QmqError) -> None:
        self.error = self.error or error
        self.stop()
        self.settled()
        self._on_failed()

    def route_is_old(self) -> None:
        self._watch.refresh()

    # Taking messages.

    def next_message(self) -> ReceivedMessage | None:
        """Return the next message in the buffer, or None."""
        return self._parcels[0].messages[self._parcels[0].at] if self._parcels else None

    def take(
        self, messages_max: int, *, with_most: Callable[[ReceivedMessage], int] | None = None
    ) -> list[ReceivedMessage]:
        """Take up to `messages_max` messages from the buffer; a suspected one alone.

        Args:
            with_most: returns the size limit of a call with a given message. The taken messages then have equal numbers
                of deliveries.
        """
        taken: list[ReceivedMessage] = []
        while self._parcels and len(taken) < messages_max:
            parcel = self._parcels[0]
            piece = parcel.messages[parcel.at]._piece
            if with_most and taken and piece.times != taken[0]._piece.times:
                break
            if piece.suspected:
                if taken:
                    break
                messages_max = 1
            end = min(len(parcel.messages), parcel.at + messages_max - len(taken))
            if with_most and piece.is_uneven:
                messages_max = min(messages_max, with_most(parcel.messages[parcel.at]))
                if len(taken) >= messages_max:
                    break
                end = parcel.at + 1
            some = parcel.messages[parcel.at : end]
            taken += [message for message in some if not is_over(message)] if piece.may_expire else some
            self._took(parcel, end)
        return taken

    def take_one(self) -> ReceivedMessage | None:
        while self._parcels:
            parcel = self._parcels[0]
            message = parcel.messages[parcel.at]
            self._took(parcel, parcel.at + 1)
            if not is_over(message):
                return message
        return None

    def _took(self, parcel: Parcel, end: int) -> None:
        parcel.at = end
        if end == len(parcel.messages):
            self._parcels.popleft()
            parcel.session.taken(parcel)
            self._removed()

    def _removed(self) -> None:
        if not self._parcels and self.on_empty is not None:
            self.on_empty()

    async def wait(self) -> None:
        """Wait until there may be a message, or the subscription ends."""
        if self._parcels or self.is_closing:
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._takers.append(future)
        try:
            await future
        except asyncio.CancelledError:
            if not future.cancelled():
                self._wake(1)  # the message it was woken for is still here
            elif future in self._takers:  # otherwise cancelled waits would pile up until a message comes
                self._takers.remove(future)
            raise

    async def wait_for_others(self) -> None:
        """Wait until `go_on` or `wake_all` is called, or the subscription ends."""
        if self.is_closing:
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._behind.add(future)
        try:
            await future
        finally:
            self._behind.discard(future)

    def go_on(self) -> None:
        """Wake the workers that wait for higher priorities."""
        for future in self._behind:
            if not future.done():
                future.set_result(None)

    async def confirmed(self, messages: list[ReceivedMessage]) -> list[ReceivedMessage]:
        """Ack messages; return those with a stored ack. The others may be delivered again.

        Returns no message if the subscription ends: its acks may be stored, although the messages were not handled.
        """
        for message in messages:
            message._done()
        while self.error is None and any(not (message.is_dropped or message.is_settled) for message in messages):
            await self.progress()
        return [message for message in messages if message.is_settled]

    async def progress(self) -> None:
        """Wait until a broker has stored another decision, or the subscription fails."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._settlers.append(future)
        try:
            await future
        except asyncio.CancelledError:
            if future in self._settlers:
                self._settlers.remove(future)
            raise

    def wake_all(self) -> None:
        """Wake all workers, to check whether they should continue."""
        self._wake(len(self._takers))
        self.go_on()

    # Buffer.

    @property
    def waiting_messages(self) -> int:
        """Number of messages in the buffer."""
        here = sum(session.buffered for session in list(self._sessions.values()))
        with suppress(IndexError):  # taken meanwhile, seen from another thread
            return here - self._parcels[0].at
        return 0

    def lag_s(self, now_s: float) -> float:
        """Return the age of the next waiting message since it was created or due, by the producer's clock; 0 if none
        waits. May be called from any thread.
        """
        with suppress(IndexError, InvalidMessage):  # taken meanwhile, or bytes of a foreign producer
            if (message := self.next_message()) is not None:
                _, created_ms, *_ = decode_envelope(message._data)
                return max(0.0, now_s - max(created_ms, message.due_ms or 0) / 1000)
        return 0.0

    def release_excess(self) -> None:
        """Release the newest messages of sessions far above their share, as never delivered.

        A broker group delivers one message of an order key at a time, so none is overtaken.
        """
        waiting: Counter[GroupSession] = Counter()
        for parcel in self._parcels:
            waiting[parcel.session] += parcel.waiting
        kept = {session: count - excess for session, count in waiting.items() if (excess := session.excess(count))}
        parcels: deque[Parcel] = deque()
        for parcel in self._parcels:
            session = parcel.session
            if session in kept:
                rest = min(kept[session], parcel.waiting)
                kept[session] -= rest
                if rest < parcel.waiting:
                    session.release(parcel, kept=rest)
            if parcel.waiting:
                parcels.append(parcel)
        self._parcels = parcels
        for session in kept:
            session.released()
        self._removed()

    def _wake(self, count: int) -> None:
        while self._takers and count:
            future = self._takers.popleft()
            if not future.done():
                future.set_result(None)
                count -= 1

    # Ending.

    def stop(self) -> None:
        """Pull no more, wake all workers, and release the messages in the buffer."""
        self.is_closing = True
        for session in self._sessions.values():
            session.drain()
        if self.error is None:
            self._parcels = deque(parcel for parcel in self._parcels if not parcel.session.release(parcel))
        self.wake_all()
        if self.on_empty is not None:
            self.on_empty()

    @property
    def taken_open(self) -> int:
        """Number of messages that were taken and are not decided."""
        return sum(session.unacked.open for session in list(self._sessions.values())) - self.waiting_messages

    async def flush(self, messages: Collection[ReceivedMessage] | None = None) -> None:
        """Wait until brokers have stored all decisions, or those on `messages` that are not dropped."""

        def are_stored() -> bool:
            if messages is not None:
                return all(message.is_settled or message.is_dropped for message in messages)
            return all(session.unacked.is_settled for session in self._sessions.values())

        try:
            while self.error is None and not are_stored():
                for session in self._sessions.values():
                    session.flush()
                await self.progress()
        finally:
            if not self.is_closing:
                for session in self._sessions.values():
                    session.stop_flushing()

    async def close(self, flush_s: float) -> None:
        """Send decisions for up to `flush_s`, then release the rest: taken messages count as delivered."""
        self.stop()
        untaken = {parcel.messages[parcel.at]._piece: parcel.messages[parcel.at]._at for parcel in self._parcels}
        for session in self._sessions.values():
            for piece, at in session.unacked.begun(untaken):
                session.nack(piece, at, delay_s=0.0, verdict=Verdict.RETRY, reason="the consumer left")
        try:
            async with asyncio.timeout(flush_s):
                await self.flush()
        except TimeoutError:
            pass  # these messages are delivered again, to any consumer
        answers = [answer for session in self._sessions.values() if (answer := session.unsubscribe())]
        self._parcels.clear()
        self.settled()  # calls that wait for acks return: no broker will store them
        if answers:
            await asyncio.wait(answers, timeout=UNSUBSCRIBE_TIMEOUT_S)
            for answer in answers:
                if answer.done():
                    answer.exception()


def is_over(message: ReceivedMessage) -> bool:
    """Return whether a message has expired, and report that to its broker."""
    if not (message._piece.may_expire and message.has_expired(time.time_ns() // 1_000_000)):
        return False
    message._piece.acker.expired(message)
    return True


TIMEOUT_MS = 10_000
"""Time for a delay group to store a copy; after it, the broker stores the retry for its longest delay."""


class DelayedRetries:
    """Retries that delay groups store. Made with a consumer's connections; used on their event loop; ends with `stop`.

    Args:
        make_sender: makes the sender to delay groups, for the first such retry.
    """

    def __init__(self, make_sender: Callable[[], Sender]) -> None:
        self._make_sender = make_sender
        self._sender: Sender | None = None

    def defer(self, message: ReceivedMessage, mailbox: str, due_ms: int, done: OnReceipt) -> None:
        """Send a copy of a message that is due at `due_ms`; `done` gets the receipt of the copy."""
        if self._sender is None:
            self._sender = self._make_sender()
            self._sender.start()
        sender, id = self._sender, ""
        try:
            id = str(message.id)
            own = {TIMES: str(message.times + 1)}
            if (expires_ms := message.expires_ms) is not None:  # the expiry does not begin anew when the copy is due
                own[EXPIRES_AFTER] = str(max(0, expires_ms - due_ms))
            data = delayed_copy(message._data, due_ms, own)
            sender.add(sender.queue(mailbox), QueuedMessage(data, id, sender.now_ms() + TIMEOUT_MS, done))
        except QmqError as error:
            done(unstored(Outcome.REFUSED, id, mailbox, "", error))

    async def stop(self) -> None:
        if self._sender is not None:
            await self._sender.stop()
