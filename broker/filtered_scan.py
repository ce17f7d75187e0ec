"""Core. One decision on what a pull gets, message by message: first what came back and is due, then what is new.

Keeps I23.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from qmq.broker.choosing import FRAMES_AT_ONCE, Budget, Chosen, Part
from qmq.broker.consume import Subscription
from qmq.broker.group_filter import PASSED_MS, GroupFilter
from qmq.broker.key_making import frames_of, made_again
from qmq.broker.keys import Keys
from qmq.broker.labels import ENDS, NO_LABELS, Body, LabelCache
from qmq.broker.tags import TagRule
from qmq.log import MessageLog
from qmq.log.group import Group
from qmq.log.index import FrameRef
from qmq.log.progress_frame import DEFERRED, NUMBERS_END, PASSED, Entry
from qmq.log.requeued import RequeuedRange

LOOKS_AHEAD = 20_000
"""Messages whose labels are read at once, at most one frame more."""
LOOKS_AT_ONCE = 1_000
"""Messages of a frame, so that a pull of a few does not look through all of a large one."""
LOOKS_PER_BODY = 10
"""What it counts for to read a message's tags, against a look at its label."""
LOOKS_PER_DEAD = 10
"""What a range counts for that was delivered too often: of 100,000 that lie scattered, the fold takes one in 50 us."""
DEFERRED_MESSAGES_MAX = 50_000
"""Per group; a group with so many messages behind busy keys gets nothing new until a key is free."""
PASSED_MESSAGES = 10_000
"""After so many it is written down at once that they did not match."""
NEW = -1
"""In place of how often a message was delivered before: it was not even passed over."""
READ_FRAMES = 512
"""Frames whose labels are read at once."""


class Wanted(NamedTuple):
    """What has to be read before the scan can go on."""

    refs: list[FrameRef]
    rule: TagRule | None
    """Bodies are wanted where the labels say that something may match it."""


class FilteredScan:
    """Made for one pull. It changes its group's keys: what it decides is written down, or the filter given up."""

    def __init__(
        self,
        message_log: MessageLog,
        label_cache: LabelCache,
        group_filter: GroupFilter,
        subscription: Subscription,
        cut: Budget,
        made: Chosen,
        *,
        now_ms: int,
        looks: int,
    ) -> None:
        self._log, self._label_cache, self._group_filter, self._subscription = (
            message_log,
            label_cache,
            group_filter,
            subscription,
        )
        self._subject, self._rule = subscription.subject, subscription.rule
        self._cut, self._made, self._now_ms = cut, made, now_ms
        state = message_log.state
        self._group: Group = state.groups[subscription.subject, subscription.group]
        self._ordered_from = state.ordered.get(subscription.subject)
        self._pull_sequence = state.next_pull(self._group, subscription.consumer)
        self._entries: list[Entry] = []
        self._is_border = True
        """Whether the next entry is one of its own: it comes from another place of the group's progress."""
        self.looks = looks
        """Messages that may still be looked at."""
        self.wanted: Wanted | None = None
        self._passed: list[tuple[int, int]] = []
        """What came back and is over now, as far as it did not free its keys yet."""
        self._suspected = 0
        """Of what is decided now: see `RequeuedRange`."""
        self._piece_end = 0
        """Where the range of what came back ends that is decided now."""
        self._looked_to = 0
        """Where looking at messages of a frame ended, if not at the end of what was to be looked at."""

    @property
    def _is_over(self) -> bool:
        return self._cut.is_stopped or self.looks <= 0 or self.wanted is not None

    def go(self) -> None:
        """Decide, as far as what is known goes; `wanted` says what is missing."""
        if missing := made_again(self._group_filter, self._log, self._label_cache):
            self.wanted = Wanted(missing, None)
            return
        self._group_filter.catch_up(self._group)
        self._returned()
        self._new()
        self._made.entries += self._entries

    # What came back.

    def _returned(self) -> None:
        group_filter, done_end = self._group_filter, 0
        left: list[tuple[int, int]] = []
        while not self._is_over and (ready := group_filter.pop_ready(self._now_ms)) is not None:
            begin, end = max(ready[0], done_end), ready[1]
            for one in self._group.requeued.overlapping(begin, end):
                if one.due_ms > self._now_ms:
                    group_filter.note(one.first, one.end, one.due_ms)
                elif (reached := self._piece(one)) < one.end:
                    left.append((reached, one.end))
            done_end = max(done_end, end)
        for first, last in left:
            group_filter.note(first, last, 0)

    def _piece(self, one: RequeuedRange) -> int:
        """Decide on requeued messages of one range; return where it stopped."""
        begin, end, times, self._suspected = one.first, one.end, one.attempts, one.suspected
        self._piece_end = end
        limit, at, self._is_border = self._subscription.deliveries_max, begin, True
        if limit and one.deliveries >= limit and not self._is_over:
            self.looks -= LOOKS_PER_DEAD
            self._made.dead.append((self._pull_sequence, self._pull_sequence + end - begin))
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

    # What is new.

    def _new(self) -> None:
        group, group_filter = self._group, self._group_filter
        written, self._is_border, self._suspected = len(self._entries), True, 0
        at, end = group.position, self._log.state.next_sequence.get(self._subject, 0)
        if group_filter.seen_rule == self._rule and group_filter.seen_end > at:
            self._pass(at, group_filter.seen_end)
            at = group_filter.seen_end
        skipped = self._made.skipped
        while at < end and not self._is_over:
            at = self._over_gap(at, end)
            if at == end or (ref := self._frame(at)) is None:
                break
            at = self._look(ref, at, min(end, ref.end), NEW)
        is_mere = len(self._entries) == 1 and not written and self._entries[0][0] == PASSED
        if is_mere and self._made.skipped == skipped and self._may_wait(self._entries[0][2]):
            self._entries.clear()
            group_filter.seen_rule, group_filter.seen_end = self._rule, at
            group_filter.seen_ms = group_filter.seen_ms or self._now_ms
        else:
            group_filter.seen_ms = 0

    def _may_wait(self, messages: int) -> bool:
        """Whether it need not be written down yet that so many messages were passed over."""
        since_ms = self._group_filter.seen_ms or self._now_ms
        return messages < PASSED_MESSAGES and 0 <= self._now_ms - since_ms < PASSED_MS

    # What becomes of messages of one frame.

    def _look(self, ref: FrameRef, begin: int, end: int, times: int) -> int:
        """Decide on these, all new or all delivered `times` times before; return where it stopped."""
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
        """Return the places of messages that match, found one by one; None: the body is needed for that."""
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
                self._made.bodies[frame.offset] = body
                yield place

    def _choose(
        self, ref: FrameRef, begin: int, end: int, times: int, places: Iterator[int], labels: array[int]
    ) -> int:
        """Deliver or defer the messages at `places`, pass over the others; return where it stopped.

        What came back has the key that it holds: its labels are not needed.
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
                    self._cut.is_stopped = True
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
        """Read this frame, and some that will be looked at next."""
        following: Iterable[FrameRef]
        if times == NEW:
            following = self._log.frames(self._subject, ref.end, READ_FRAMES - 1)
        else:
            ranges = [(ref.end, self._piece_end), *self._group_filter.soon_ready(READ_FRAMES - 1)]
            following = (one for begin, end in ranges for one in frames_of(self._log, self._subject, begin, end))
        refs, messages = {ref.offset: ref}, 0
        for one in following:
            if one.offset in refs:
                continue  # several ranges lie in it
            if not self._label_cache.is_on_disk(one) or messages > LOOKS_AHEAD or len(refs) == READ_FRAMES:
                break
            refs[one.offset] = one
            messages += one.end - one.begin
        self.wanted = Wanted([refs[offset] for offset in sorted(refs)], self._rule)

    # Putting it together.

    def _frame(self, at: int) -> FrameRef | None:
        """Return the frame that holds `at`, which is there; None: it may not leave yet."""
        ref = self._cut.frame_at(self._log, self._subject, at)
        assert ref is not None
        if ref.offset + ref.length > self._cut.data_limit:
            self._cut.is_stopped = True
            return None
        return ref

    def _over_gap(self, at: int, end: int) -> int:
        """Go over messages that retention took; return the first one behind them."""
        ref = self._cut.frame_at(self._log, self._subject, at, min(end - at, FRAMES_AT_ONCE))
        first = min(ref.begin, end) if ref else end
        if first > at:
            self._pass(at, first)
            self._made.skipped += first - at
        return max(at, first)

    def _take_run(self, ref: FrameRef, begin: int, end: int, times: int) -> int:
        """Deliver as many of these as fit; return where they end."""
        last = begin + self._cut.allows(ref, end - begin)
        if last > begin:
            self._part(ref, begin, last, times)
        return last

    def _part(self, ref: FrameRef, begin: int, end: int, times: int) -> None:
        parts = self._made.parts
        last = parts[-1] if parts else None
        times = max(times, 0) + 1
        part = Part(self._pull_sequence, begin, end, ref, times, self._suspected)
        if last is not None and last.end == begin and last[3:] == part[3:]:
            parts[-1] = last._replace(end=end)
        else:
            parts.append(part)
        self._number(begin, end)

    def _number(self, begin: int, end: int) -> None:
        """Give messages to the consumer under its next numbers."""
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
            if is_alike:  # and so it continues the last one: of a place nothing is left out
                entries[-1] = last[0], last[1], last[2] + messages
                return
        entries.append((kind, sequence, messages))
        self._is_border = False
