"""Core. Serving of waiting pulls: which consumer is next, how much one pass of the loop may do, and what a pull gets.

The pull served longest ago comes first. `broker.choice` and `broker.filtered_scan` choose its messages, a pull frame
records them, and `broker.answers` sends them once that is safe. A pass ends when its budget is spent, even if pulls
still wait; the loop then reads its sockets before the next pass. So a backlog, a group of many consumers or a consumer
with many pulls delays the others by at most one pass.

Operators limit service in two ways. A rate fills a bucket of messages for a group, up to the amount of BURST_S. A group
with an empty bucket is served again from the next tick on. Messages of the group's retry subject count too. Consumers
that are switched off stay subscribed and keep their unacked messages, but get no new ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import TypeAlias

from qmq.broker.answers import OWED_BYTES_MAX, AnswerSender, Counters
from qmq.broker.choice import Chosen, choose
from qmq.broker.dead_letters import DeadLetters, DeadRange
from qmq.broker.filtered_scan import Filters, Reading
from qmq.broker.labels import LabelsRead
from qmq.broker.subscriptions import Subscription, Subscriptions
from qmq.errors import CorruptFrame, ErrorCode, LogError
from qmq.log.frame import FrameKind
from qmq.operator_limits import OperatorLimits
from qmq.remoting.commands import Pull
from qmq.replication.mastership import Mastership
from qmq.replication.ports import Link
from qmq.subjects import RETRY, parse_derived, real_subject

PASS_BYTES = 1 << 20
"""Bytes delivered in a pass. With four times as much, a group beside a large backlog waited 1.5 times as long."""
TRY_BYTES = 4 << 10
"""Cost of a look-up, with or without a result: 256 of them fill a pass."""
LOOKS_PER_PASS = 20_000
"""Messages looked at one by one, over all groups: about 2 ms."""
COPIES_PER_PASS = 500
"""A consumer may give up 200,000 messages at once; others are served between passes."""
Entry: TypeAlias = Subscription | tuple[str, str]
"""One consumer; or (subject, group): the consumer of it that was served longest ago."""


class ServiceQueue:
    """Queue of consumers to serve, with the budgets of a pass. Ends with the mastership."""

    def __init__(self) -> None:
        self._queue: dict[Entry, None] = {}
        self.begin()

    def begin(self) -> None:
        """Renew the budgets of a pass."""
        self._left = PASS_BYTES
        self.looks_left = LOOKS_PER_PASS
        self.copies_left = COPIES_PER_PASS
        """Dead letters that this pass may still store."""

    @property
    def has_time(self) -> bool:
        """Whether this pass may continue."""
        return self._left > 0

    @property
    def is_empty(self) -> bool:
        return not self._queue

    def add(self, entry: Entry) -> None:
        """Append to the queue, unless it is in it."""
        self._queue.setdefault(entry)

    def spend(self, size: int) -> None:
        self._left -= size

    def next(self) -> Entry | None:
        """Take and return the next entry; None if the queue is empty or the pass is over."""
        if not self._queue or self._left <= 0:
            return None
        entry = next(iter(self._queue))
        del self._queue[entry]
        return entry


ANY = "*"


class OfflineRules:
    """Switched-off consumers, as rules (subject, consumer group, consumer); `*` matches all. A rule for a subject
    covers its retry and dead-letter subjects too.
    """

    def __init__(self, rules: Iterable[tuple[str, str, str]] = ()) -> None:
        self._rules = frozenset(rules)

    def __contains__(self, key: tuple[str, str, str]) -> bool:
        rules, (subject, group, consumer) = self._rules, key
        if not rules:
            return False
        subjects = (subject, real_subject(subject), ANY)
        return any(rule in rules for rule in product(subjects, (group, ANY), (consumer, ANY)))


BURST_S = 0.2
"""Two ticks: with one, a late tick would lower the rate."""
DRY_MS = 2_000
"""How long a group counts as slowed after its bucket was empty; at one message a second it is empty each second."""

Key = tuple[str, str]


@dataclass(slots=True)
class _Bucket:
    """Token bucket of one group's rate: a token is a message."""

    per_second: int
    filled_ms: int
    tokens: float = 1.0
    dry_ms: int | None = None
    """When it was last found empty."""


class Rates:
    """Buckets of all groups with a rate. Ends with the mastership. `now_ms` never jumps."""

    def __init__(self) -> None:
        self._buckets: dict[Key, _Bucket] = {}
        self._dry: dict[Key, None] = {}
        """(requested subject, consumer group) with an empty bucket since the last tick."""

    def limit(self, limits: dict[Key, OperatorLimits], now_ms: int) -> None:
        """Replace all limits; the bucket of an unchanged rate stays."""
        known, self._buckets = self._buckets, {}
        for key, rate in limits.items():
            if rate.per_second:
                before = known.get(key)
                if before is None or before.per_second != rate.per_second:
                    before = _Bucket(rate.per_second, now_ms)
                self._buckets[key] = before

    def allows(self, key: Key, now_ms: int) -> int | None:
        """Return how many messages the group may get now; None: no limit."""
        if not self._buckets or (bucket := self._of(key)) is None:
            return None
        room = 1 + bucket.per_second * BURST_S
        bucket.tokens = min(room, bucket.tokens + (now_ms - bucket.filled_ms) * bucket.per_second / 1000)
        bucket.filled_ms = now_ms
        if bucket.tokens < 1:
            bucket.dry_ms = now_ms
            self._dry[key] = None
        return int(max(bucket.tokens, 0))

    def spend(self, key: Key, messages: int) -> None:
        if self._buckets and (bucket := self._of(key)) is not None:
            bucket.tokens -= messages

    @property
    def has_dry(self) -> bool:
        """Whether the next tick has groups to serve again."""
        return bool(self._dry)

    def take_dry(self) -> list[Key]:
        """Take and return the groups that found their bucket empty; the caller serves them again."""
        dry, self._dry = self._dry, {}
        return list(dry)

    def is_slowed(self, key: Key, now_ms: int) -> bool:
        """Return whether a rate holds back messages of the group now."""
        bucket = self._of(key)
        return bucket is not None and bucket.dry_ms is not None and now_ms - bucket.dry_ms < DRY_MS

    def _of(self, key: Key) -> _Bucket | None:
        subject, group = key
        derived = parse_derived(subject)
        return self._buckets.get((derived.real, group) if derived and derived.kind == RETRY else key)


class Serving:
    """Service of a master's waiting pulls. Made by the delivery; ends with the mastership."""

    def __init__(self, mastership: Mastership, counters: Counters, subscriptions: Subscriptions) -> None:
        self._mastership = mastership
        self._subscriptions = subscriptions
        self._queue = ServiceQueue()
        self._woken: dict[str, None] = {}
        """Subjects with new or requeued messages."""
        self.dead_letters = DeadLetters(mastership, counters, subscriptions, self._queue, self.wake)
        self.filters = Filters(mastership.log, lambda: subscriptions.connected, self._queue)
        self._answers = AnswerSender(mastership, counters, self._queue, self.writable_again)
        self._offline = OfflineRules()
        self.rates = Rates()

    def wake(self, subject: str) -> None:
        """Mark a subject that got new or requeued messages: waiting pulls are served at the end of the pass."""
        self._woken[subject] = None

    def serve_all(self) -> None:
        """Serve every waiting pull again."""
        self.enqueue(self._subscriptions.all_waiting())

    def writable_again(self, link: Link) -> None:
        """Serve the pulls of a connection that accepts answers again."""
        self.enqueue(self._subscriptions.waiting_at(link))

    def limit(self, limits: dict[tuple[str, str], OperatorLimits], offline: Iterable[tuple[str, str, str]]) -> None:
        """Replace operators' rates and the list of switched-off consumers, then serve the others."""
        self.rates.limit(limits, self._mastership.host.monotonic_ms())
        self._offline = OfflineRules(offline)
        self.serve_all()

    def enqueue(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            self._queue.add(entry)
        self._mastership.host.pass_soon()

    def run_pass(self) -> None:
        """Serve waiting pulls at the end of a pass of the loop, within its budget."""
        queue, unfinished = self._queue, self.filters.unfinished
        has_more_letters = queue.copies_left <= 0
        queue.begin()
        if has_more_letters:
            self.dead_letters.go_on()
        woken, self._woken = self._woken | unfinished, {}
        unfinished.clear()
        for subject in woken:
            for key in self._subscriptions.groups_waiting_on(subject):
                queue.add(key)
        while (entry := queue.next()) is not None:
            if self._take_turn(entry):
                queue.add(entry)
        if not queue.is_empty:
            self._mastership.host.pass_soon()

    def _take_turn(self, entry: Entry) -> bool:
        """Serve one pull; return whether there may be more for the same group or consumer."""
        if isinstance(entry, Subscription):
            return self._serve_or_answer(entry)
        for subscription in self._subscriptions.waiting_in(*entry):
            if self._serve(subscription):
                # Otherwise each message would try 199 of 200 consumers of a group in vain.
                return self._may_have_more(*entry)
        return False

    def _may_have_more(self, subject: str, name: str) -> bool:
        state = self._mastership.log.state
        group = state.groups[subject, name]
        return bool(group.requeued) or group.position < state.next_sequence[subject]

    def offer(self, subscription: Subscription) -> None:
        """Serve a subscription now, or in a later pass if this one has spent its budget."""
        while self._queue.has_time:
            if not self._serve_or_answer(subscription):
                return
        self.enqueue([subscription])

    def _serve_or_answer(self, subscription: Subscription) -> bool:
        """Serve a subscription; if there is nothing for it, answer its pulls that do not wait."""
        if self._serve(subscription):
            return True
        if self.filters.is_looking(subscription):
            return False
        for waiting in [waiting for waiting in subscription.waiting if not waiting.pull.timeout_ms]:
            self._subscriptions.give_up(subscription, waiting)
            waiting.link.answer(waiting.packet, code=ErrorCode.NO_MESSAGE)
        return False

    def _serve(self, subscription: Subscription) -> bool:
        """Answer the oldest waiting pull if there are messages for it; return whether there were."""
        if not subscription.waiting or not self._mastership.may_progress or subscription.key in self._offline:
            return False
        if subscription.exclusive_ms and not self._subscriptions.has_its_turn(subscription, self.is_offline):
            return False
        key = subscription.key[:2]
        while (pull := self._next_pull(subscription)) is not None:
            if (allowed := self.rates.allows(key, self._mastership.host.monotonic_ms())) is not None:
                if not allowed:
                    return False
                pull = pull._replace(messages_max=min(pull.messages_max, allowed))
            chosen = self._choose(subscription, pull)
            if chosen is None:
                return False
            self._write_down(subscription, chosen)
            if chosen.parts:
                self.rates.spend(key, sum(part.end - part.begin for part in chosen.parts))
                self._answers.begin(subscription, self._subscriptions.take_waiting(subscription), chosen)
                return True
        return False

    def _next_pull(self, subscription: Subscription) -> Pull | None:
        """Return the oldest pull that may be answered. Overdue pulls get NO_MESSAGE first, and cost no message."""
        link, now_ms = subscription.link, self._mastership.host.monotonic_ms()
        while subscription.waiting and link.writable and link.owed_bytes < OWED_BYTES_MAX:
            waiting = subscription.waiting[0]
            if not waiting.pull.timeout_ms or waiting.deadline_ms > now_ms:
                return waiting.pull
            self._subscriptions.take_waiting(subscription)
            link.answer(waiting.packet, code=ErrorCode.NO_MESSAGE)
        return None

    def _choose(self, subscription: Subscription, pull: Pull) -> Chosen | None:
        mastership = self._mastership
        self._queue.spend(TRY_BYTES)
        limit = mastership.gate.high_watermark if mastership.gate.too_few_in_sync else mastership.log.end
        now_ms, single = mastership.retry_ms(), None
        if self.filters.concerns(subscription):
            single = partial(self.filters.choose, subscription, now_ms)
        try:
            return choose(mastership.log, subscription, pull, data_limit=limit, now_ms=now_ms, single=single)
        except CorruptFrame as problem:  # an index is rebuilt, and its segment is damaged
            mastership.found_damage(problem)
            return None
        finally:
            if single is not None:
                self._read_on()

    def _read_on(self) -> None:
        """Start the readings that filtered pulls wait for."""
        if self.filters.unfinished:
            self._mastership.host.pass_soon()
        for reading in self.filters.take_readings():
            self._mastership.host.read(reading.job, partial(self._was_read, reading))

    def _was_read(self, reading: Reading, found: LabelsRead | LogError) -> None:
        self.filters.was_read(reading, found)
        if isinstance(found, CorruptFrame):  # or retention deleted it; waiting pulls are served soon in either case
            self._mastership.found_damage(found)
        elif isinstance(found, LogError):
            raise found
        else:
            self.enqueue(self._subscriptions.waiting_in(reading.subject, reading.group))

    def _write_down(self, subscription: Subscription, chosen: Chosen) -> None:
        mastership = self._mastership
        if chosen.entries:
            if self.filters.asks_for_others(subscription):
                # Otherwise the log would not show why a redelivery was skipped.
                mastership.append_progress(FrameKind.PULL, subscription.key, [])
            mastership.append_progress(FrameKind.PULL, subscription.key, chosen.entries)
            self.filters.delivered(subscription)
        if chosen.gone:  # else each returning consumer would search for them and count them again
            mastership.append_progress(FrameKind.ACK, subscription.key, [(begin, end, 0) for begin, end in chosen.gone])
        if chosen.skipped:
            self._subscriptions.note_skipped(subscription.subject, subscription.group, chosen.skipped)
        subscription.resend = max([subscription.resend, *chosen.pull_ends])
        if chosen.dead:
            self.make_dead(subscription, chosen.dead)

    def make_dead(self, subscription: Subscription, dead: list[tuple[int, int]]) -> None:
        """Make dead letters of messages above the delivery limit, which are not sent to the consumer."""
        self.dead_letters.make_dead(subscription.key, [DeadRange(*range_, False) for range_ in dead], None, None)

    def is_offline(self, subscription: Subscription) -> bool:
        return subscription.key in self._offline
