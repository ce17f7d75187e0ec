"""Core. Subscriptions of connections: terms, leases, and waiting pulls.

Made by a master when its mastership begins. Progress is stored as frames of the message log (qmq.log.fold); this state
concerns connections only. `broker.choice` decides which messages a pull gets.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any, NamedTuple

from qmq import ranges
from qmq.broker.labels import TagRule
from qmq.codec import TAGS_MAX
from qmq.dead_letters import PRUNER
from qmq.errors import InvalidAck, InvalidRequest, Overloaded, SubscriptionReplaced, UnknownSubscription
from qmq.log import MessageLog
from qmq.log.group import Consumer
from qmq.log.progress_frame import NOT_BEGUN, Departure, Entry
from qmq.ranges import Range
from qmq.remoting import commands
from qmq.remoting.commands import Pull
from qmq.remoting.packet import Packet
from qmq.replication.ports import QUIET_MS, Link
from qmq.subjects import check_name, check_subject, is_dead_letter_subject


def read_terms(packet: Packet) -> dict[str, Any]:
    """Decode and check a SUBSCRIBE; raises InvalidRequest or InvalidName."""
    f = commands.decode_json(
        packet.body,
        subject=str,
        group=str,
        consumer=str,
        start=str,
        since_ms=int,
        broadcast=bool,
        held_end=int,
        is_new=bool,
        deliveries_max=int,
        tags=list,
        tag_mode=str,
    )
    check_subject(f["subject"])
    check_name("consumer group", f["group"])
    check_name("consumer id", f["consumer"])
    if f["start"] not in ("latest", "earliest", "since"):
        raise InvalidRequest(f"start is 'latest', 'earliest' or 'since', not {f['start']!r}")
    if f["tag_mode"] not in ("any", "all"):
        raise InvalidRequest(f"tag_mode is 'any' or 'all', not {f['tag_mode']!r}")
    if len(f["tags"]) > TAGS_MAX or not all(_is_word(tag) for tag in f["tags"]):
        raise InvalidRequest(f"tags are at most {TAGS_MAX} words")
    if min(f["deliveries_max"], f["held_end"], f["since_ms"]) < 0:
        raise InvalidRequest("deliveries_max, held_end and since_ms are 0 or more")
    f["ephemeral"] = f.get("ephemeral") is True
    f["begins"] = f.get("begins") is True
    f["exclusive_ms"] = since_ms if isinstance(since_ms := f.get("exclusive_ms", 0), int) else 0
    if is_dead_letter_subject(f["subject"]):
        f["deliveries_max"] = 0
    return f


def _is_word(tag: object) -> bool:
    return isinstance(tag, str) and tag != "" and not any("\ud800" <= letter <= "\udfff" for letter in tag)


NAMES_MAX = 100
"""Consumers of one group on one connection; clients have one. Each takes 2 KB and 12 us a tick."""
PULLS_IN_FLIGHT_MAX = 64
"""Per subscription; more are refused, so one consumer cannot fill the broker's memory."""

CHECKED_WITHIN_MS = 30_000
"""An ended subscription stays in memory no longer than this, however long its pulls would have waited."""
LOOKS_IN_LEASE = 4
"""Consumers send three heartbeats per lease, so one late heartbeat does not end it."""
NEVER_MS = NOT_BEGUN
"""Later than all times; a message that was not begun is due at once."""
LOOKING_MS = 1_000
"""Time that a pull waits past its deadline while a scan for it is unfinished."""


def _count_down(counter: Counter[Any], key: object) -> None:
    counter[key] -= 1
    if not counter[key]:
        del counter[key]


def _replaced(consumer: str) -> SubscriptionReplaced:
    return SubscriptionReplaced(f"another connection uses consumer_id {consumer!r}; give each consumer its own")


class WaitingPull(NamedTuple):
    """PULL without an answer. `deadline_ms`: by the monotonic clock of the host."""

    link: Link
    packet: Packet
    pull: Pull
    deadline_ms: int


@dataclass(eq=False, slots=True)
class Subscription:
    """Subscription of one consumer on one connection."""

    id: int
    link: Link
    subject: str
    group: str
    consumer: str
    resend: int
    """First pull sequence that this connection has not got."""
    deliveries_max: int = 0
    """Deliveries of a message before it becomes a dead letter; 0: no limit."""
    begins: bool = False
    """Whether its client reports which suspected messages it begins with."""
    rule: TagRule | None = None
    """Filter by tags; None: every message."""
    exclusive_ms: int = 0
    """When it asked to be the exclusive consumer: the earliest one gets all messages. 0: it shares them."""
    waiting: deque[WaitingPull] = field(default_factory=deque)
    in_flight: int = 0
    owed: deque[Callable[[], bool]] = field(default_factory=deque)
    """Pending answers, oldest first; each sends itself once it can, and returns whether it did."""
    noted_ms: int | None = None
    """When its waiting pulls are next checked for their deadline."""
    over: InvalidAck | None = None
    """Why earlier deliveries do not count any more: the group was moved, or the lease ended."""
    key: tuple[str, str, str] = field(init=False)
    """(subject, consumer group, consumer)"""

    def __post_init__(self) -> None:
        self.key = self.subject, self.group, self.consumer

    def answer_in_order(self) -> None:
        """Send the answers that are ready, in order. A consumer takes a later pull sequence as the end of the earlier
        ones: it would drop and ack the messages of an answer that was overtaken.
        """
        while self.owed and self.owed[0]():
            self.owed.popleft()


class Subscriptions:
    """Subscriptions, leases and waiting pulls of a broker. Used on the loop only; ends with the mastership."""

    def __init__(self, log: MessageLog, *, lease_ms: int, now_ms: int) -> None:
        self._log = log
        self._lease_ms = lease_ms
        self._ticked_ms = now_ms
        self._next_id = 1
        self._by_link: dict[Link, dict[int, Subscription]] = {}
        self._names: Counter[tuple[Link, tuple[str, str]]] = Counter()
        """(connection, group) -> subscriptions."""
        self._tokens: Counter[str] = Counter()
        """Token's name -> subscriptions."""
        self._by_consumer: dict[tuple[str, str, str], Subscription] = {}
        self._by_group: dict[tuple[str, str], dict[Subscription, None]] = {}
        """(subject, group) -> its subscriptions."""
        self._exclusive: dict[Subscription, None] = {}
        self._waiting: dict[str, dict[str, dict[Subscription, None]]] = {}
        """Subject -> group -> subscriptions with waiting pulls, the one served longest ago first."""
        self._deadlines: list[tuple[int, int, Subscription]] = []
        """Heap of (ms, id, subscription), one for each with waiting pulls: a tick costs nothing with a thousand
        subjects.
        """
        self.skipped: dict[tuple[str, str], int] = {}
        """(subject, consumer group) -> messages that retention deleted before the group acked them."""
        self._due: list[tuple[int, str, str]] = []
        """(ms of `Mastership.retry_ms`, subject, group): when requeued messages are due, soonest first."""
        self._soonest: dict[tuple[str, str], int] = {}
        """(subject, group) -> its valid entry in `_due`, one per group."""
        self._silent: set[tuple[str, str, str]] = set()
        """(subject, group, consumer) of clients that do not report which messages they begin with."""
        self._begun: dict[tuple[str, str, str], list[Range]] = {}
        """Pull sequences of suspected messages that consumers reported to this master as begun."""
        self._seen: dict[tuple[str, str, str], int] = {}
        """(subject, group, consumer) -> begin of its lease, in ms of the host's monotonic clock."""

    def begin_mastership(self, now_ms: int) -> None:
        """Begin the mastership: start leases of all consumers in the log, and schedule their retries."""
        for (subject, name), group in self._log.state.groups.items():
            self.note_due(subject, name, group.requeued.next_due_ms(0))
            for consumer in group.consumers:
                self._seen[subject, name, consumer] = now_ms

    # Subscriptions and leases.

    def subscribe(
        self,
        link: Link,
        *,
        subject: str,
        group: str,
        consumer: str,
        held_end: int,
        now_ms: int,
        deliveries_max: int = 0,
        begins: bool = False,
        rule: TagRule | None = None,
        exclusive_ms: int = 0,
    ) -> Subscription:
        """Serve `consumer` on this connection; its older connection is not served any more.

        Raises:
            InvalidAck: the consumer has messages not delivered in this history, or given to others. It must
                forget them, or messages with the same pull sequences would never reach it.
            Overloaded: the connection has too many consumers of this group, or the token too many subscriptions.
        """
        key = (subject, group, consumer)
        if key not in self._by_consumer:
            self._check_room(link, group, self._names[link, key[:2]])
        self._check_held_end(*key, held_end)
        subscription = Subscription(
            self._next_id, link, subject, group, consumer, held_end, deliveries_max, begins, rule, exclusive_ms
        )
        self._next_id += 1
        if (older := self._by_consumer.get(key)) is not None:
            for waiting in older.waiting:
                older.link.refuse(waiting.packet, _replaced(consumer))
            self._stop_waiting(older)
            if older.link is link:
                self._unlink(older)
            self._leave_group(older)
        self._by_consumer[key] = subscription
        self._by_group.setdefault(key[:2], {})[subscription] = None
        if exclusive_ms:
            self._exclusive[subscription] = None
        self._by_link.setdefault(link, {})[subscription.id] = subscription
        self._names[link, key[:2]] += 1
        self._tokens[link.ration.holder] += 1
        self._seen[key] = now_ms
        return subscription

    def _check_room(self, link: Link, group: str, names: int) -> None:
        if names >= NAMES_MAX:
            raise Overloaded(f"this connection has {NAMES_MAX} consumers of group {group!r}; use further connections")
        holder, most, limit = link.ration.holder, link.ration.subscriptions_max, "token_subscriptions_max"
        if self._tokens[holder] >= most:
            raise Overloaded(
                f"clients of token {holder!r} have {most:,} subscriptions here, and may have no more ({limit})",
                limit,
            )

    def _check_held_end(self, subject: str, name: str, consumer: str, held_end: int) -> None:
        """Raise InvalidAck unless the log has all that the consumer has. A deposed master may have delivered safe
        messages under other pull sequences than the next master. A consumer that left, or whose group was moved, has no
        unacked messages.
        """
        known = self.consumer(subject, name, consumer)
        if known is None:
            if held_end:
                raise InvalidAck(f"the messages of {consumer} were requeued, or its group was moved; subscribe again")
        elif not known.was_given(held_end):
            raise InvalidAck(f"{consumer} has messages up to {held_end} of a former master; subscribe again")

    def find(self, link: Link, id: int, now_ms: int) -> Subscription:
        """Return the connection's subscription and renew its lease."""
        subscription = self._by_link.get(link, {}).get(id)
        if subscription is None:
            raise UnknownSubscription(f"this connection has no subscription {id}; subscribe again")
        key = subscription.key
        if self._by_consumer.get(key) is not subscription:
            raise _replaced(subscription.consumer)
        self._seen[key] = now_ms
        return subscription

    def heartbeat(self, link: Link, now_ms: int) -> None:
        for subscription in self._by_link.get(link, {}).values():
            if self._by_consumer.get(subscription.key) is subscription:  # not for a replaced subscription
                self._seen[subscription.key] = now_ms

    def forget(self, subscription: Subscription) -> None:
        """Stop serving this subscription; its consumer's lease continues."""
        self._unlink(subscription)
        if self._by_consumer.get(subscription.key) is subscription:
            del self._by_consumer[subscription.key]
            self._leave_group(subscription)
        self._stop_waiting(subscription)

    def _unlink(self, subscription: Subscription) -> None:
        link, key = subscription.link, subscription.key[:2]
        if self._by_link.get(link, {}).pop(subscription.id, None) is not None:
            _count_down(self._tokens, link.ration.holder)
            _count_down(self._names, (link, key))

    def _leave_group(self, subscription: Subscription) -> None:
        self._exclusive.pop(subscription, None)
        group = self._by_group[subscription.key[:2]]
        del group[subscription]
        if not group:
            del self._by_group[subscription.key[:2]]

    def link_lost(self, link: Link) -> None:
        for subscription in list(self._by_link.get(link, {}).values()):
            self.forget(subscription)
        self._by_link.pop(link, None)

    def move(self, subject: str, group: str) -> None:
        """End the group's subscriptions: its consumers drop their messages and subscribe again."""
        for subscription in [other for other in self._by_consumer.values() if other.key[:2] == (subject, group)]:
            self._end(subscription, InvalidAck(f"an operator moved {group}; subscribe again"))
        for key in [key for key in self._seen if key[:2] == (subject, group)]:
            self.left(*key)

    def _end(self, subscription: Subscription, why: InvalidAck) -> None:
        """End a subscription after its messages went to others: its later acks must fail."""
        for waiting in subscription.waiting:
            subscription.link.refuse(waiting.packet, why)
        subscription.over = why
        self.forget(subscription)

    def ticked(self, now_ms: int) -> None:
        """Count at most a quarter of a lease from one tick to the next.

        A longer gap means that this process stood still: it was stopped, or its virtual machine was moved. The
        consumers' heartbeats wait in its sockets, and all leases would end before they are read.
        """
        stood_still_ms = now_ms - self._ticked_ms - self._lease_ms // LOOKS_IN_LEASE
        self._ticked_ms = now_ms
        if stood_still_ms > 0:
            for key, seen_ms in self._seen.items():
                self._seen[key] = min(seen_ms + stood_still_ms, now_ms)

    def quiet_ms(self, now_ms: int) -> int:
        """Return for how long no pull is overdue, no lease ends, and no tick is needed."""
        looks_ms = self._lease_ms // LOOKS_IN_LEASE
        if looks_ms <= 2 * QUIET_MS:
            return 0
        lease_end_ms = min(self._seen.values(), default=now_ms) + self._lease_ms
        overdue_ms = self._deadlines[0][0] if self._deadlines else now_ms + QUIET_MS
        return max(0, min(QUIET_MS, lease_end_ms - now_ms, overdue_ms - now_ms))

    def expired(self, now_ms: int) -> list[tuple[str, str, str]]:
        """Return (subject, group, consumer) of ended leases; the caller writes their departure.

        Consumers that are still connected must subscribe again: their waiting pulls would get messages without a lease.
        """
        gone = [key for key, seen_ms in self._seen.items() if now_ms - seen_ms > self._lease_ms]
        for key in gone:
            if (subscription := self._by_consumer.get(key)) is not None:
                silent_s = self._lease_ms / 1000
                error = InvalidAck(
                    f"no packet arrived from {subscription.consumer} for a lease, {silent_s:g} s; subscribe again"
                )
                self._end(subscription, error)
            self.left(*key)
        return [key for key in gone if self.consumer(*key) is not None]

    def left(self, subject: str, group: str, consumer: str) -> None:
        """Forget a lease. The consumer's reports count until its departure is written, if the log has the
        consumer.
        """
        key = (subject, group, consumer)
        self._seen.pop(key, None)
        if self.consumer(*key) is None:
            self._forget_reports(key)

    def _forget_reports(self, key: tuple[str, str, str]) -> None:
        self._begun.pop(key, None)
        self._silent.discard(key)

    def note_reporting(self, subscription: Subscription) -> None:
        """Note whether the client's reports decide which messages count if the consumer vanishes."""
        (self._silent.discard if subscription.begins else self._silent.add)(subscription.key)

    def begin(self, subscription: Subscription, begun: list[Range]) -> None:
        """Note that the consumer begins with these pull sequences; it may vanish the next moment."""
        key = subscription.key
        settled = [(0, (self.consumer(*key) or Consumer()).acked_end)]  # else this would grow
        self._begun[key] = ranges.difference(ranges.union([*self._begun.get(key, ()), *begun]), settled)

    def departure(self, key: tuple[str, str, str], *, begun_none: bool) -> list[Entry]:
        """Return the entries that record a consumer's departure, and forget its reports.

        A new master has no reports yet: it records a suspected departure, and counts no attempts.
        """
        begun, is_silent = self._begun.get(key, []), key in self._silent
        self._forget_reports(key)
        if begun_none or is_silent:
            return [(Departure.NONE_BEGUN if begun_none else Departure.VANISHED, 0, 0)]
        subject, group, name = key
        unacked = [
            (span.pull, span.pull_end) for span in self._log.state.groups[subject, group].consumers[name].unacked
        ]
        counted = ranges.difference(unacked, ranges.difference(unacked, begun))
        return [(Departure.SUSPECTED, 0, 0), *((begin, end, 0) for begin, end in counted)]

    def consumer(self, subject: str, group: str, consumer: str) -> Consumer | None:
        known = self._log.state.groups.get((subject, group))
        return known.consumers.get(consumer) if known else None

    def connected_to(self, subject: str, group: str) -> list[Subscription]:
        """Return the group's consumers that have a connection."""
        return list(self._by_group.get((subject, group), {}))

    def has_its_turn(self, subscription: Subscription, is_offline: Callable[[Subscription], bool]) -> bool:
        """Return whether an exclusive subscription may get messages of its group now.

        It must have asked first, by the consumers' clocks: so all broker groups choose the same one. And no other
        consumer of the group may have unacked messages: the former one may still be at work.
        """
        subject, group = subscription.key[:2]
        others = self._by_group[subject, group]
        began = subscription.exclusive_ms, subscription.consumer
        if any(
            0 < other.exclusive_ms and (other.exclusive_ms, other.consumer) < began and not is_offline(other)
            for other in others
        ):
            return False
        consumers = self._log.state.groups[subject, group].consumers.items()
        return not any(consumer.unacked for name, consumer in consumers if name not in (subscription.consumer, PRUNER))

    @property
    def exclusive_waiting(self) -> list[Subscription]:
        """Exclusive subscriptions with waiting pulls: it may be their turn now."""
        return [subscription for subscription in self._exclusive if subscription.waiting]

    @property
    def connected(self) -> Collection[Subscription]:
        """One subscription for each consumer with a connection."""
        return self._by_consumer.values()

    # Waiting pulls.

    def wait(self, subscription: Subscription, waiting: WaitingPull, now_ms: int) -> None:
        """Queue a pull. Raises Overloaded: the subscription has too many."""
        if len(subscription.waiting) + subscription.in_flight >= PULLS_IN_FLIGHT_MAX:
            raise Overloaded(f"more than {PULLS_IN_FLIGHT_MAX} pulls of one subscription at a time")
        subscription.waiting.append(waiting)
        self._waiting.setdefault(subscription.subject, {}).setdefault(subscription.group, {})[subscription] = None
        if subscription.noted_ms is None or waiting.deadline_ms < subscription.noted_ms:
            self._look_at(subscription, waiting.deadline_ms, now_ms)

    def _look_at(self, subscription: Subscription, deadline_ms: int, now_ms: int) -> None:
        subscription.noted_ms = min(deadline_ms, now_ms + CHECKED_WITHIN_MS)
        heappush(self._deadlines, (subscription.noted_ms, subscription.id, subscription))

    def _stop_waiting(self, subscription: Subscription) -> None:
        subscription.waiting.clear()
        self._leave_queue(subscription)

    def _leave_queue(self, subscription: Subscription) -> None:
        subject, group = subscription.subject, subscription.group
        groups = self._waiting.get(subject, {})
        if subscription in (waiting := groups.get(group, {})):
            del waiting[subscription]
            if not waiting:
                del groups[group]
            if not groups:
                del self._waiting[subject]

    def groups_waiting_on(self, subject: str) -> list[tuple[str, str]]:
        """Return (subject, group) of each group with waiting pulls on `subject`."""
        return [(subject, group) for group in self._waiting.get(subject, ())]

    def waiting_in(self, subject: str, group: str) -> list[Subscription]:
        """Return the group's subscriptions with waiting pulls, the one served longest ago first."""
        return list(self._waiting.get(subject, {}).get(group, ()))

    def all_waiting(self) -> list[Subscription]:
        return [
            subscription for groups in self._waiting.values() for waiting in groups.values() for subscription in waiting
        ]

    def waiting_at(self, link: Link) -> list[Subscription]:
        """Return the connection's subscriptions with waiting pulls."""
        return [subscription for subscription in self._by_link.get(link, {}).values() if subscription.waiting]

    def take_waiting(self, subscription: Subscription) -> WaitingPull:
        """Take the oldest waiting pull, and move the subscription behind the others of its group."""
        waiting = subscription.waiting.popleft()
        self._leave_queue(subscription)
        if subscription.waiting:
            self._waiting.setdefault(subscription.subject, {}).setdefault(subscription.group, {})[subscription] = None
        return waiting

    def give_up(self, subscription: Subscription, waiting: WaitingPull) -> None:
        """Remove a pull that is answered without messages."""
        subscription.waiting.remove(waiting)
        if not subscription.waiting:
            self._leave_queue(subscription)

    def overdue(self, now_ms: int, is_looking: Callable[[Subscription], bool]) -> list[WaitingPull]:
        """Take and return the pulls past their deadline; the caller answers them with NO_MESSAGE.

        Pulls with an unfinished scan (`is_looking`) wait a little longer: a pull with a short timeout would never get
        the result.
        """
        over: list[WaitingPull] = []
        while self._deadlines and self._deadlines[0][0] <= now_ms:
            noted_ms, _, subscription = heappop(self._deadlines)
            if noted_ms != subscription.noted_ms:
                continue  # a pull with an earlier deadline was noted later
            subscription.noted_ms = None
            late_ms = now_ms - (LOOKING_MS if is_looking(subscription) else 0)
            for waiting in [waiting for waiting in subscription.waiting if waiting.deadline_ms <= late_ms]:
                self.give_up(subscription, waiting)
                over.append(waiting)
            if subscription.waiting:
                soonest_ms = min(waiting.deadline_ms for waiting in subscription.waiting)
                self._look_at(subscription, max(soonest_ms, now_ms + 1), now_ms)
        return over

    # Requeued messages.

    def note_due(self, subject: str, group: str, due_ms: int | None) -> None:
        """Note when the first requeued message of a group is due; None: it has none."""
        key = (subject, group)
        if due_ms and due_ms < self._soonest.get(key, NEVER_MS):
            self._soonest[key] = due_ms
            heappush(self._due, (due_ms, *key))

    def due_in_ms(self, now_ms: int) -> int:
        """Return for how long no requeued message is due."""
        return max(0, min(QUIET_MS, self._due[0][0] - now_ms)) if self._due else QUIET_MS

    def due(self, now_ms: int) -> list[str]:
        """Take and return the subjects with requeued messages that may be due."""
        subjects: dict[str, None] = {}
        while self._due and self._due[0][0] <= now_ms:
            due_ms, *key = heappop(self._due)
            subject, group = key
            if self._soonest.get((subject, group)) != due_ms:
                continue  # an earlier time was noted later
            del self._soonest[subject, group]
            subjects[subject] = None
            if (known := self._log.state.groups.get((subject, group))) is not None:
                self.note_due(subject, group, known.requeued.next_due_ms(now_ms))
        return list(subjects)

    def note_skipped(self, subject: str, group: str, messages: int) -> None:
        """Count messages that were deleted before the group got them."""
        self.skipped[subject, group] = self.skipped.get((subject, group), 0) + messages
