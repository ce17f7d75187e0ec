"""Core. Message-by-message choice for a pull: filters by the consumer's tags and by order keys.

For a subscription without tags, of a subject without order keys, `broker.choice` decides on ranges alone. Here each
message is looked at in order: first requeued messages that are due, then new ones. Each gets one of these decisions:

    delivered    it matches, and no earlier message of its key is unsettled
    passed       it does not match, or was deleted: settled for the group
    deferred     it matches, and its key is busy: it is requeued behind the others of its key
    stopped at   the pull is full; or bytes have to be read first, and the pull waits for them

One pull frame records all decisions. The state in memory (`broker.group_filter`) follows from the fold and the labels.
A new master makes it again: it reads the labels of the group's unsettled messages before it delivers more.

Keeps I23.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from qmq.broker.choice import FRAMES_AT_ONCE, Budget, Chosen, Part
from qmq.broker.group_filter import PASSED_MS, GroupFilter, Keys, frames_of, restore_keys, sequences_unacked
from qmq.broker.labels import ENDS, NO_LABELS, Body, LabelCache, LabelsRead, TagRule, read_labels_of
from qmq.broker.subscriptions import Subscription
from qmq.dead_letters import PRUNER
from qmq.errors import LogError
from qmq.log import MessageLog
from qmq.log.frame import FrameKind
from qmq.log.group import Consumer, Group
from qmq.log.index import FrameRef
from qmq.log.progress_frame import DEFERRED, EXPIRED, NUMBERS_END, OVERFLOWED, PASSED, Entry
from qmq.log.requeued import RequeuedRange

if TYPE_CHECKING:
    from qmq.broker.serving import ServiceQueue

log = logging.getLogger(__name__)

LOOKS_AHEAD = 20_000
"""Messages per read of labels, exceeded by at most one frame."""
LOOKS_AT_ONCE = 1_000
"""Messages of one frame looked at in one step, so a pull of a few does not scan a large frame."""
LOOKS_PER_BODY = 10
"""Cost of reading a message's tags, in label checks."""
LOOKS_PER_DEAD = 10
"""Cost of a range that reached the delivery limit: with 100,000 scattered ranges the fold takes 50 µs for each."""
DEFERRED_MESSAGES_MAX = 50_000
"""Per group. At the limit it gets no new messages until a key is free."""
PASSED_MESSAGES = 10_000
"""After so many non-matching messages the position is written at once."""
NEW = -1
"""Stands for the delivery count of a message that is new to the group."""
READ_FRAMES = 512
"""Frames per read of labels."""


class MissingFrames(NamedTuple):
    """Frames that have to be read before the scan can continue."""

    refs: list[FrameRef]
    rule: TagRule | None
    """Read bodies of frames with labels that may match this rule."""


class FilteredScan:
    """Scan for one pull. It changes its group's keys: the caller writes its decisions, or drops the filter."""

    def __init__(
        self,
        message_log: MessageLog,
        label_cache: LabelCache,
        group_filter: GroupFilter,
        subscription: Subscription,
        budget: Budget,
        chosen: Chosen,
        *,
        now_ms: int,
        looks: int,
    ) -> None:
        self._log = message_log
        self._label_cache = label_cache
        self._group_filter = group_filter
        self._subscription = subscription
        self._subject = subscription.subject
        self._rule = subscription.rule
        self._budget = budget
        self._chosen = chosen
        self._now_ms = now_ms
        state = message_log.state
        self._group: Group = state.groups[subscription.subject, subscription.group]
        self._ordered_from = state.ordered.get(subscription.subject)
        self._pull_sequence = state.next_pull(self._group, subscription.consumer)
        self._entries: list[Entry] = []
        self._is_border = True
        """Whether the next entry must not extend the last one: it comes from another place of the group's progress."""
        self.looks = looks
        """Label checks that are left."""
        self.wanted: MissingFrames | None = None
        self._passed: list[tuple[int, int]] = []
        """Requeued messages that were passed over and still hold their keys."""
        self._suspected = 0
        """Suspicions of the current range: see `RequeuedRange`."""
        self._range_end = 0
        """End of the requeued range in progress."""
        self._looked_to = 0
        """Where the search of a frame ended early."""

    @property
    def _is_over(self) -> bool:
        return self._budget.is_stopped or self.looks <= 0 or self.wanted is not None

    def go(self) -> None:
        """Decide until the pull is full or bytes are missing; `wanted` then holds the missing frames."""
        if missing := restore_keys(self._group_filter, self._log, self._label_cache):
            self.wanted = MissingFrames(missing, None)
            return
        self._group_filter.catch_up(self._group)
        self._scan_requeued()
        self._scan_new()
        self._chosen.entries += self._entries

    # Requeued messages.

    def _scan_requeued(self) -> None:
        group_filter, done_end = self._group_filter, 0
        left: list[tuple[int, int]] = []
        while not self._is_over and (ready := group_filter.pop_ready(self._now_ms)) is not None:
            begin, end = max(ready[0], done_end), ready[1]
            for span in self._group.requeued.overlapping(begin, end):
                if span.due_ms > self._now_ms:
                    group_filter.note(span.first, span.end, span.due_ms)
                elif (reached := self._scan_range(span)) < span.end:
                    left.append((reached, span.end))
            done_end = max(done_end, end)
        for first, last in left:
            group_filter.note(first, last, 0)

    def _scan_range(self, span: RequeuedRange) -> int:
        """Decide about the requeued messages of one range; return where the scan stopped."""
        begin, end, times, self._suspected = span.first, span.end, span.attempts, span.suspected
        self._range_end = end
        limit, at, self._is_border = self._subscription.deliveries_max, begin, True
        if limit and span.deliveries >= limit and not self._is_over:
            self.looks -= LOOKS_PER_DEAD
            self._chosen.dead.append((self._pull_sequence, self._pull_sequence + end - begin))
            self._number(begin, end)
            return end
        while at < end and not self._is_over:
            at = self._over_gap(at, end)
            if at == end or (ref := self._frame(at)) is None:
                break
            at = self._look(ref, at, min(end, ref.end), times)
        for sequence, passed_end in self._passed:
            self._group_filter.settle(self._group, sequence, passed_end)
        self._passed.clear()
        return at

    # New messages.

    def _scan_new(self) -> None:
        """Decide about new messages, from the group's position or the end of an unwritten scan on."""
        group, group_filter = self._group, self._group_filter
        written, self._is_border, self._suspected = len(self._entries), True, 0
        at, end = group.position, self._log.state.next_sequence.get(self._subject, 0)
        if group_filter.seen_rule == self._rule and group_filter.seen_end > at:
            self._pass(at, group_filter.seen_end)
            at = group_filter.seen_end
        skipped = self._chosen.skipped
        while at < end and not self._is_over:
            at = self._over_gap(at, end)
            if at == end or (ref := self._frame(at)) is None:
                break
            at = self._look(ref, at, min(end, ref.end), NEW)
        is_only_passed = len(self._entries) == 1 and not written and self._entries[0][0] == PASSED
        if is_only_passed and self._chosen.skipped == skipped and self._may_wait(self._entries[0][2]):
            self._entries.clear()
            group_filter.seen_rule, group_filter.seen_end = self._rule, at
            group_filter.seen_ms = group_filter.seen_ms or self._now_ms
        else:
            group_filter.seen_ms = 0

    def _may_wait(self, messages: int) -> bool:
        """Return whether writing the position past non-matching messages can wait."""
        since_ms = self._group_filter.seen_ms or self._now_ms
        return messages < PASSED_MESSAGES and 0 <= self._now_ms - since_ms < PASSED_MS

    # Messages of one frame.

    def _look(self, ref: FrameRef, begin: int, end: int, times: int) -> int:
        """Decide about messages of a frame, all new or all delivered `times` times; return where the scan stopped."""
        end = min(end, begin + LOOKS_AT_ONCE)
        is_keyed = times == NEW and self._ordered_from is not None and end > self._ordered_from
        labels: array[int] | None = NO_LABELS
        if self._rule is not None or is_keyed:
            labels = self._label_cache.labels(ref)
        if labels is None:
            self._want(ref, times)
            return begin
        if self._rule is None and not labels:
            return self._take_run(ref, begin, end, times)
        places: Iterator[int] | None = iter(range(begin - ref.begin, end - ref.begin))
        if self._rule is not None:
            places = self._matching(ref, labels, begin, end)
        if places is None:
            self._want(ref, times)
            return begin
        reached = self._choose(ref, begin, end, times, places, labels if is_keyed else NO_LABELS)
        self.looks -= reached - begin
        return reached

    def _matching(self, ref: FrameRef, labels: array[int], begin: int, end: int) -> Iterator[int] | None:
        """Return an iterator over the places of matching messages; None if the body has to be read first."""
        rule = self._rule
        assert rule is not None
        first, last = begin - ref.begin, end - ref.begin
        places: Sequence[int] = rule.candidates(labels, first, last) if labels else range(first, last)
        if not places:
            return iter(())
        body = self._label_cache.body(ref, rule)
        return None if body is None else self._verified(rule, body, places)

    def _verified(self, rule: TagRule, body: Body, places: Sequence[int]) -> Iterator[int]:
        frame, data = body
        view, base = memoryview(data), 4 * (frame.count + 1)
        for place in places:
            if self.looks <= 0:
                self._looked_to = frame.first_sequence + place
                return
            self.looks -= LOOKS_PER_BODY
            at, to = ENDS.unpack_from(view, 4 * place)
            if rule.matches(bytes(view[base + at : base + to])):
                self._chosen.bodies[frame.offset] = body
                yield place

    def _choose(
        self, ref: FrameRef, begin: int, end: int, times: int, places: Iterator[int], labels: array[int]
    ) -> int:
        """Deliver or defer the messages at `places`, pass over the others; return where the scan stopped.

        Requeued messages already hold their keys: their labels are not needed.
        """
        keys, at, self._looked_to = self._keys, begin, end
        for place in places:
            sequence = ref.begin + place
            if sequence > at:
                self._pass(at, sequence)
                at = sequence
            key = labels[place] >> 32 if labels else 0
            if keys.is_busy(key):
                if keys.deferred >= DEFERRED_MESSAGES_MAX:
                    self._budget.is_stopped = True
                    return at
                keys.defer(key, sequence)
                self._enter(DEFERRED, sequence, 1)
            elif not self._take_run(ref, sequence, sequence + 1, times) > sequence:
                return at
            elif key:
                keys.hold(key, sequence)
            at = sequence + 1
            if self._is_over:
                return at
        if self._looked_to > at:
            self._pass(at, self._looked_to)
        return max(at, self._looked_to)

    @property
    def _keys(self) -> Keys:
        keys = self._group_filter.keys
        assert keys is not None
        return keys

    def _want(self, ref: FrameRef, times: int) -> None:
        """Request this frame and some that the scan needs next."""
        following: Iterable[FrameRef]
        if times == NEW:
            following = self._log.frames(self._subject, ref.end, READ_FRAMES - 1)
        else:
            ranges = [(ref.end, self._range_end), *self._group_filter.soon_ready(READ_FRAMES - 1)]
            following = (frame for begin, end in ranges for frame in frames_of(self._log, self._subject, begin, end))
        refs, messages = {ref.offset: ref}, 0
        for span in following:
            if span.offset in refs:
                continue  # several ranges lie in it
            if not self._label_cache.is_on_disk(span) or messages > LOOKS_AHEAD or len(refs) == READ_FRAMES:
                break
            refs[span.offset] = span
            messages += span.end - span.begin
        self.wanted = MissingFrames([refs[offset] for offset in sorted(refs)], self._rule)

    # Parts and entries.

    def _frame(self, at: int) -> FrameRef | None:
        """Return the frame that holds `at`, or None if it may not be delivered yet."""
        ref = self._budget.frame_at(self._log, self._subject, at)
        assert ref is not None
        if ref.offset + ref.length > self._budget.data_limit:
            self._budget.is_stopped = True
            return None
        return ref

    def _over_gap(self, at: int, end: int) -> int:
        """Pass over messages that retention deleted; return the first one after them."""
        ref = self._budget.frame_at(self._log, self._subject, at, min(end - at, FRAMES_AT_ONCE))
        first = min(ref.begin, end) if ref else end
        if first > at:
            self._pass(at, first)
            self._chosen.skipped += first - at
        return max(at, first)

    def _take_run(self, ref: FrameRef, begin: int, end: int, times: int) -> int:
        """Deliver as many of these messages as fit; return where they end."""
        last = begin + self._budget.allows(ref, end - begin)
        if last > begin:
            self._part(ref, begin, last, times)
        return last

    def _part(self, ref: FrameRef, begin: int, end: int, times: int) -> None:
        parts = self._chosen.parts
        last = parts[-1] if parts else None
        times = max(times, 0) + 1
        part = Part(self._pull_sequence, begin, end, ref, times, self._suspected)
        if last is not None and last.end == begin and last[3:] == part[3:]:
            parts[-1] = last._replace(end=end)
        else:
            parts.append(part)
        self._number(begin, end)

    def _number(self, begin: int, end: int) -> None:
        """Number messages with the consumer's next pull sequences."""
        self._enter(self._pull_sequence, begin, end - begin)
        self._pull_sequence += end - begin

    def _pass(self, begin: int, end: int) -> None:
        self._passed.append((begin, end))
        self._enter(PASSED, begin, end - begin)

    def _enter(self, kind: int, sequence: int, messages: int) -> None:
        entries = self._entries
        if not self._is_border:
            last = entries[-1]
            is_alike = last[0] == kind if kind >= NUMBERS_END else last[0] < NUMBERS_END
            if is_alike:  # entries of one place leave out no message, so this one continues the last one
                entries[-1] = last[0], last[1], last[2] + messages
                return
        entries.append((kind, sequence, messages))
        self._is_border = False


class Reading(NamedTuple):
    """Bytes that a group's pulls wait for; `job` may run on a thread."""

    subject: str
    group: str
    job: Callable[[], LabelsRead]


class Filters:
    """Filters of all groups of a broker. Made by `broker.serving`; ends with the mastership. `connected` returns the
    subscriptions with a connection.
    """

    def __init__(
        self, message_log: MessageLog, connected: Callable[[], Iterable[Subscription]], passes: ServiceQueue
    ) -> None:
        self._log = message_log
        self._connected = connected
        self._passes = passes
        self._label_cache = LabelCache(message_log)
        self._filters: dict[tuple[str, str], GroupFilter] = {}
        self._asked: dict[tuple[str, str], TagRule | None] = {}
        """Rule of the last SUBSCRIBE, per group."""
        self._rules: dict[tuple[str, str], dict[str, TagRule | None]] = {}
        """Rule of each consumer at its last delivery, by group, until it leaves."""
        self._warned: set[tuple[str, str]] = set()
        self._readings: list[Reading] = []
        self.unfinished: dict[str, None] = {}
        """Subjects with more messages to scan in another pass."""

    def concerns(self, subscription: Subscription) -> bool:
        """Return whether the messages of a subscription have to be chosen one by one."""
        return subscription.rule is not None or subscription.subject in self._log.state.ordered

    def is_looking(self, subscription: Subscription) -> bool:
        """Return whether the scan for a subscription is unfinished."""
        group_filter = self._filters.get(subscription.key[:2])
        return group_filter is not None and (group_filter.is_reading or subscription.subject in self.unfinished)

    def joined(self, subscription: Subscription) -> None:
        """Warn if consumers of one group ask for different tags: that is most likely a mistake."""
        key = subscription.key[:2]
        before, self._asked[key] = self._asked.get(key, subscription.rule), subscription.rule
        if before == subscription.rule or key in self._warned:
            return
        if any(other.rule != subscription.rule for other in self._connected() if other.key[:2] == key):
            self._warned.add(key)
            log.warning(
                "consumers of one group use different tags subject=%s group=%s consumer=%s: messages passed "
                "over by one of them are settled for all",
                *subscription.key,
            )

    def asks_for_others(self, subscription: Subscription) -> bool:
        """Return whether this consumer's rule changed since its last delivery."""
        rules = self._rules.get(subscription.key[:2])
        return rules is not None and rules.get(subscription.consumer, subscription.rule) != subscription.rule

    def delivered(self, subscription: Subscription) -> None:
        """Note that a pull of this consumer was written."""
        key, consumer = subscription.key[:2], subscription.consumer
        if consumer in self._log.state.groups[key].consumers:  # so a frame will record its departure
            self._rules.setdefault(key, {})[consumer] = subscription.rule

    def choose(self, subscription: Subscription, now_ms: int, budget: Budget, chosen: Chosen) -> None:
        """Add to `chosen` the messages of this subscription; the caller writes them at once."""
        key = subscription.key[:2]
        group_filter = self._filters.setdefault(key, GroupFilter(*key))
        if group_filter.is_reading or group_filter.rests(now_ms):
            return
        if group_filter.is_idle(subscription.rule, self._log.end, budget.data_limit, now_ms):
            return
        group_filter.idle_at = None
        scan = FilteredScan(
            self._log,
            self._label_cache,
            group_filter,
            subscription,
            budget,
            chosen,
            now_ms=now_ms,
            looks=self._passes.looks_left,
        )
        try:
            scan.go()
        except BaseException:
            del self._filters[key]  # an unfinished scan must not change the keys
            raise
        self._passes.looks_left = scan.looks
        if scan.wanted is not None:
            group_filter.is_reading = True
            self._readings.append(Reading(*key, partial(read_labels_of, self._log, *scan.wanted)))
        elif scan.looks <= 0:
            self.unfinished[subscription.subject] = None
        else:  # the pull frame of a scan that found messages moves the log end, so the group is not idle then
            group_filter.idle_at = subscription.rule, self._log.end, budget.data_limit

    def changing(self, kind: FrameKind, key: tuple[str, str, str], entries: list[Entry]) -> None:
        """Note the messages whose state is about to change by a progress frame."""
        if not key[2] and not entries:  # the group is forgotten
            self._asked.pop(key[:2], None)
            self._warned.discard(key[:2])
        if kind == FrameKind.POSITION:
            if not key[2]:
                self._rules.pop(key[:2], None)
            elif key[:2] in self._rules:
                self._rules[key[:2]].pop(key[2], None)
        group_filter = self._filters.get(key[:2])
        if group_filter is None:
            return
        if not key[2] or (kind == FrameKind.POSITION and key[2] == PRUNER):
            # The group is moved or forgotten; or it gets messages back from the pruner, which ignored order keys.
            del self._filters[key[:2]]
            return
        group = self._log.state.groups[key[:2]]
        if kind == FrameKind.PULL:
            # A scan keeps its own record; expired and overflowed messages free their keys here.
            if entries and entries[0][0] in (EXPIRED, OVERFLOWED):
                group_filter.catch_up(group)
                group_filter.changing += [
                    (first, first + count) for _, first, count in entries if first < group.position
                ]
            return
        group_filter.catch_up(group)
        consumer = group.consumers.get(key[2], Consumer())
        ranges = [(0, consumer.next_pull)] if kind == FrameKind.POSITION else [entry[:2] for entry in entries]
        group_filter.changing += [held for begin, end in ranges for held in sequences_unacked(consumer, begin, end)]

    # Readings, and later passes.

    def take_readings(self) -> list[Reading]:
        """Take and return the pending readings; each result goes to `was_read`."""
        readings, self._readings = self._readings, []
        return readings

    def was_read(self, reading: Reading, found: LabelsRead | LogError) -> None:
        """Store the result of a reading; the caller serves the waiting pulls."""
        group_filter = self._filters.get((reading.subject, reading.group))
        if group_filter is not None:
            group_filter.is_reading = False
            group_filter.has_failed = isinstance(found, LogError)
        if not isinstance(found, LogError):
            self._label_cache.add(found)
            if group_filter is not None and group_filter.keys is None:
                group_filter.labels_before.update(found.labels)

    @property
    def has_unwritten(self) -> bool:
        """Whether some group will be overdue."""
        return any(group_filter.will_be_overdue for group_filter in self._filters.values())

    def overdue(self, now_ms: int) -> list[str]:
        """Return the subjects of overdue groups: a position was not written for a while, or a failed reading is due
        again.
        """
        return [group_filter.subject for group_filter in self._filters.values() if group_filter.is_overdue(now_ms)]
