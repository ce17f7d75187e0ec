"""Core. Consumption: who gets which messages next, and what an ack means.

Made by a master when it takes office. All progress is frames of the message log (qmq.log.fold); what lives here is
only about connections: subscriptions, pulls that wait, leases.

A subscription hands out first what its consumer has pulled before and not acked, from the pull sequence on that the
consumer says it does not hold; then what consumers that left have returned; then new messages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import NamedTuple

from broker.ports import Link
from broker.skipped import Gap, Skipped
from qmq.errors import InvalidAck, Overloaded, SubscriptionReplaced, UnknownSubscription, require
from qmq.log import MessageLog
from qmq.log.fold import Consumer, Group
from qmq.log.index import FrameRef
from qmq.log.progress import Entry
from qmq.remoting.commands import Ack, Pull
from qmq.remoting.packet import Packet
from qmq.subjects import check_name

PULLS_IN_FLIGHT_MAX = 64
"""Per subscription; more are refused, so that one consumer cannot fill the broker's memory."""
PULL_BYTES_MAX = 8 << 20
PULL_MESSAGES_MAX = 10_000
UNACKED_MESSAGES_MAX = 200_000
"""Per consumer; at the limit its pulls wait for its acks."""


class WaitingPull(NamedTuple):
    link: Link
    packet: Packet
    pull: Pull
    deadline_ms: int


@dataclass(eq=False, slots=True)
class Subscription:
    id: int
    link: Link
    subject: str
    group: str
    consumer: str
    resend: int
    """First pull sequence that this connection was not given."""
    waiting: deque[WaitingPull] = field(default_factory=deque)
    in_flight: int = 0
    owed: deque[Callable[[], bool]] = field(default_factory=deque)
    """Answers under way, oldest first; each sends itself once it can, and says whether it did."""
    is_over: bool = False
    """Whether its group was moved: nothing that was handed out before counts any more."""

    @property
    def key(self) -> tuple[str, str, str]:
        """(subject, consumer group, consumer)"""
        return self.subject, self.group, self.consumer

    def answer_in_order(self) -> None:
        """Send what can be sent. A consumer takes a later pull sequence as the end of the earlier ones: an answer that
        overtook another, whose bytes are still being read, would make it drop those messages and ack them."""
        while self.owed and self.owed[0]():
            self.owed.popleft()


class Part(NamedTuple):
    """Messages `[begin, end)`, by sequence, of one frame, numbered from `pull_sequence` on."""

    pull_sequence: int
    begin: int
    end: int
    ref: FrameRef


class HandOut(NamedTuple):
    """What a pull is answered with. `entries` go into a pull frame; none if all of it was pulled before.

    Without parts there is nothing to answer with: all of it is gone, as `gaps` say.
    """

    parts: list[Part]
    entries: list[Entry]
    gaps: list[Gap]

    @property
    def data_end(self) -> int:
        return max(part.ref.offset + part.ref.length for part in self.parts)


class Consumption:
    """Subscriptions of a broker and what each may have next. Used on the loop only; ends with the reign."""

    def __init__(self, log: MessageLog, *, lease_ms: int, now_ms: int) -> None:
        self._log = log
        self._lease_ms = lease_ms
        self._next_id = 1
        self._by_link: dict[Link, dict[int, Subscription]] = {}
        self._by_consumer: dict[tuple[str, str, str], Subscription] = {}
        self._waiting: dict[str, dict[Subscription, None]] = {}
        self.skipped = Skipped()
        self._seen = {
            (subject, name, consumer): now_ms
            for (subject, name), group in log.state.groups.items()
            for consumer in group.consumers
        }

    # Subscriptions and leases.

    def subscribe(
        self, link: Link, *, subject: str, group: str, consumer: str, held_end: int, now_ms: int
    ) -> Subscription:
        """Begin to serve `consumer` on this connection; an older connection of it is served no more.

        Raises:
            InvalidAck: what the consumer holds was not handed out in this history, or given to others. It must forget
                it, or what this history handed out in its place would never reach it.
        """
        for what, name in (("subject", subject), ("consumer group", group), ("consumer id", consumer)):
            check_name(what, name)
        key = (subject, group, consumer)
        self._check_held(*key, held_end)
        subscription = Subscription(self._next_id, link, subject, group, consumer, held_end)
        self._next_id += 1
        if (older := self._by_consumer.get(key)) is not None:
            for waiting in older.waiting:
                older.link.refuse(waiting.packet, SubscriptionReplaced(f"another connection consumes as {consumer}"))
            self._stop_waiting(older)
            if older.link is link:
                del self._by_link[link][older.id]
        self._by_consumer[key] = subscription
        self._by_link.setdefault(link, {})[subscription.id] = subscription
        self._seen[key] = now_ms
        return subscription

    def _check_held(self, subject: str, name: str, consumer: str, held_end: int) -> None:
        """A master that is deposed and does not know it hands out what is safe, as the next one does with other
        numbers. Within a reign they are dense: so what is held up to `held_end` ends inside what this history handed
        out, or before all that is un-acked in it. Who left, or whose group was moved, holds nothing any more.
        """
        group = self._log.state.groups.get((subject, name), Group(position=0))
        known = group.consumers.get(consumer)
        if known is None:
            if held_end:
                raise InvalidAck(f"what {consumer} held was given back, or its group was moved; begin anew")
            return
        below = [entry for entry in known.unacked if entry[0] < held_end]
        in_doubt = bool(below) and below[-1][0] + below[-1][2] < held_end
        if in_doubt or held_end > self._log.state.next_pull(group, consumer):
            raise InvalidAck(f"{consumer} holds messages up to {held_end} of a master that was deposed; begin anew")

    def find(self, link: Link, id: int, now_ms: int) -> Subscription:
        """Return the connection's subscription and renew its lease."""
        subscription = self._by_link.get(link, {}).get(id)
        if subscription is None:
            raise UnknownSubscription(f"this connection has no subscription {id}; subscribe again")
        key = subscription.key
        if self._by_consumer.get(key) is not subscription:
            raise SubscriptionReplaced(f"another connection consumes {subscription.subject} as {subscription.consumer}")
        self._seen[key] = now_ms
        return subscription

    def heartbeat(self, link: Link, now_ms: int) -> None:
        for subscription in self._by_link.get(link, {}).values():
            if self._by_consumer.get(subscription.key) is subscription:  # not for the one that took its place
                self._seen[subscription.key] = now_ms

    def forget(self, subscription: Subscription) -> None:
        """Serve this subscription no more; its consumer's lease goes on."""
        self._by_link.get(subscription.link, {}).pop(subscription.id, None)
        if self._by_consumer.get(subscription.key) is subscription:
            del self._by_consumer[subscription.key]
        self._stop_waiting(subscription)

    def link_lost(self, link: Link) -> None:
        for subscription in list(self._by_link.get(link, {}).values()):
            self.forget(subscription)
        self._by_link.pop(link, None)

    def move(self, subject: str, group: str) -> None:
        """The group begins elsewhere: its consumers forget what they hold, and subscribe again."""
        for subscription in [one for one in self._by_consumer.values() if one.key[:2] == (subject, group)]:
            for waiting in subscription.waiting:
                subscription.link.refuse(waiting.packet, moved(group))
            subscription.is_over = True
            self.forget(subscription)
        for key in [key for key in self._seen if key[:2] == (subject, group)]:
            self.left(*key)

    def expired(self, now_ms: int) -> list[tuple[str, str, str]]:
        """Return (subject, group, consumer) of those whose lease ended; the caller writes down that they left."""
        gone = [key for key, seen_ms in self._seen.items() if now_ms - seen_ms > self._lease_ms]
        for key in gone:
            self.left(*key)
        return [key for key in gone if self._consumer(*key) is not None]

    def left(self, subject: str, group: str, consumer: str) -> None:
        self._seen.pop((subject, group, consumer), None)
        self.skipped.forget((subject, group, consumer))

    def _consumer(self, subject: str, group: str, consumer: str) -> Consumer | None:
        known = self._log.state.groups.get((subject, group))
        return known.consumers.get(consumer) if known else None

    @property
    def connected(self) -> Collection[Subscription]:
        """One for each consumer that has a connection."""
        return self._by_consumer.values()

    # Pulls that wait.

    def wait(self, subscription: Subscription, waiting: WaitingPull) -> None:
        if len(subscription.waiting) + subscription.in_flight >= PULLS_IN_FLIGHT_MAX:
            raise Overloaded(f"more than {PULLS_IN_FLIGHT_MAX} pulls of one subscription at a time")
        subscription.waiting.append(waiting)
        self._waiting.setdefault(subscription.subject, {})[subscription] = None

    def _stop_waiting(self, subscription: Subscription) -> None:
        subscription.waiting.clear()
        waiting = self._waiting.get(subscription.subject)
        if waiting is not None:
            waiting.pop(subscription, None)
            if not waiting:
                del self._waiting[subscription.subject]

    def waiting_on(self, subject: str) -> list[Subscription]:
        """Return the subscriptions with pulls that wait on `subject`, the one served longest ago first."""
        return list(self._waiting.get(subject, ()))

    def all_waiting(self) -> list[Subscription]:
        return [subscription for waiting in list(self._waiting.values()) for subscription in list(waiting)]

    def take_waiting(self, subscription: Subscription) -> WaitingPull:
        """Remove the oldest pull that waits, and put the subscription behind the others of its subject."""
        waiting = subscription.waiting.popleft()
        turns = self._waiting[subscription.subject]
        del turns[subscription]
        if subscription.waiting:
            turns[subscription] = None
        elif not turns:
            del self._waiting[subscription.subject]
        return waiting

    def overdue(self, now_ms: int) -> list[WaitingPull]:
        """Take away and return the pulls whose time is over; they are answered with NO_MESSAGE."""
        over = []
        for subscription in self.all_waiting():
            late = [waiting for waiting in subscription.waiting if waiting.deadline_ms <= now_ms]
            if late:
                over += late
                kept = [waiting for waiting in subscription.waiting if waiting.deadline_ms > now_ms]
                self._stop_waiting(subscription)
                for waiting in kept:
                    self.wait(subscription, waiting)
        return over

    # What is handed out.

    def hand_out(self, subscription: Subscription, pull: Pull, data_limit: int) -> HandOut | None:
        """Choose what this pull gets now; None if there is nothing.

        Args:
            data_limit: only messages whose frame ends at or before this offset. While the slave is missing, that is
                the high watermark.

        The caller writes `entries` as a pull frame before it answers, and moves `subscription.resend` behind them.
        """
        group = self._log.state.groups[subscription.subject, subscription.group]
        messages_max = min(pull.messages_max, PULL_MESSAGES_MAX)
        bytes_max = min(pull.bytes_max, PULL_BYTES_MAX)
        require(messages_max > 0, "a pull that asks for nothing is refused before it waits")
        cut = _Budget(messages_max, bytes_max, data_limit)
        consumer = group.consumers.get(subscription.consumer)
        if consumer is not None and subscription.resend < consumer.next_pull:
            found = self._unacked(subscription, consumer, cut)
            if found:
                return _hand_out(found, [])
            if cut.is_stopped:
                return None
            subscription.resend = consumer.next_pull
        if consumer is not None and consumer.unacked_messages >= UNACKED_MESSAGES_MAX:
            return None
        return self._fresh(subscription, group, cut)

    def _unacked(self, subscription: Subscription, consumer: Consumer, cut: _Budget) -> list[Part | Gap]:
        parts: list[Part | Gap] = []
        for pull_sequence, sequence, messages in consumer.unacked:
            skip = max(subscription.resend - pull_sequence, 0)
            if skip >= messages:
                continue
            parts += self._parts(subscription, sequence + skip, sequence + messages, pull_sequence + skip, cut)
            if cut.is_stopped:
                break
        return parts

    def _fresh(self, subscription: Subscription, group: Group, cut: _Budget) -> HandOut | None:
        state = self._log.state
        pull_sequence = state.next_pull(group, subscription.consumer)
        parts: list[Part | Gap] = []
        end = state.next_sequence.get(subscription.subject, 0)
        for sequence, messages in [*group.returned, (group.position, end - group.position)]:
            found = self._parts(subscription, sequence, sequence + messages, pull_sequence, cut)
            parts += found
            if found:
                pull_sequence = found[-1].pull_sequence + found[-1].end - found[-1].begin
            if cut.is_stopped:
                break
        if not parts:
            return None
        entries: list[Entry] = []
        for part in parts:
            if entries and entries[-1][1] + entries[-1][2] == part.begin and not _is_border(group, part.begin):
                entries[-1] = (entries[-1][0], entries[-1][1], entries[-1][2] + part.end - part.begin)
            else:
                entries.append((part.pull_sequence, part.begin, part.end - part.begin))
        return _hand_out(parts, entries)

    def _parts(
        self, subscription: Subscription, begin: int, end: int, pull_sequence: int, cut: _Budget
    ) -> list[Part | Gap]:
        """Cut sequences `[begin, end)` into parts of frames, as far as the budget and the limit allow."""
        parts: list[Part | Gap] = []
        while begin < end and not cut.is_stopped:
            refs = self._log.frames(subscription.subject, begin, min(cut.messages, 256) or 1)
            first = min(refs[0].begin if refs else end, end)
            if first > begin:  # retention took what this group had not acked: go on behind it
                parts.append(Gap(pull_sequence, begin, first))
                pull_sequence, begin = pull_sequence + first - begin, first
            for ref in refs:
                if begin >= end or cut.is_stopped:
                    break
                last = begin + cut.allows(ref, min(end, ref.end) - begin)
                if last == begin:
                    break
                parts.append(Part(pull_sequence, begin, last, ref))
                pull_sequence, begin = pull_sequence + last - begin, last
        return parts

    def note_skipped(self, subscription: Subscription, gaps: list[Gap]) -> None:
        """Count messages that this subscription went over because they are gone."""
        consumer = self._consumer(*subscription.key)
        if gaps:
            self.skipped.note(subscription.key, gaps, consumer.acked_end if consumer else 0)

    def check_ack(self, subscription: Subscription, ack: Ack) -> bool:
        """Return whether the ack brings something new; raises InvalidAck."""
        consumer = self._consumer(subscription.subject, subscription.group, subscription.consumer)
        return (consumer or Consumer()).check_ack(ack.begin, ack.end)


def moved(group: str) -> InvalidAck:
    """What a consumer is told that holds messages from before."""
    return InvalidAck(f"an operator moved {group}; begin anew")


def _hand_out(found: list[Part | Gap], entries: list[Entry]) -> HandOut:
    parts = [part for part in found if isinstance(part, Part)]
    return HandOut(parts, entries, [gap for gap in found if isinstance(gap, Gap)])


def _is_border(group: Group, sequence: int) -> bool:
    """Return whether a new range begins here: what was returned is taken from one entry at a time."""
    return sequence == group.position or any(entry[0] == sequence for entry in group.returned)


@dataclass(slots=True)
class _Budget:
    """What a pull may still get. The first message always fits, however large it is."""

    messages: int
    bytes: int
    data_limit: int
    is_untouched: bool = True
    is_stopped: bool = False

    def allows(self, ref: FrameRef, wanted: int) -> int:
        """Return how many of `wanted` messages of the frame fit, by their mean size, and spend them."""
        if ref.offset + ref.length > self.data_limit:
            self.is_stopped = True
            return 0
        mean = ref.length / (ref.end - ref.begin)
        fitting = max(int(self.bytes / mean), 0)  # the first message may have overdrawn the budget
        taken = min(wanted, self.messages, max(fitting, 1) if self.is_untouched else fitting)
        self.is_stopped = taken < wanted
        self.messages -= taken
        self.bytes -= int(mean * taken)
        self.is_untouched = self.is_untouched and not taken
        return taken
