"""Core. Limits of a subject: age, messages and bytes that may wait for each of its consumer groups.

Once a second each group of a limited subject is checked, with or without consumers, so unconsumed messages do not pin
the log. Expired messages, new or requeued, are given up by a pull frame with that reason. If the subject sets so, they
become dead letters: a pseudo consumer with a reserved name gets them, and they are stored as its dead letters.

A group's waiting messages are those not delivered and those requeued. At the limit, of messages or of bytes, the oldest
messages are given up or producers are refused, as the subject sets. No producer is refused because of an absent
broadcast consumer.

A message's age counts from its storage, by the master's clock. Nothing expires while another clock disagrees with it.

Bytes are counted through the consume log: each frame once when it arrives and once when the group has passed it, a few
milliseconds per tick. After a start, or when a group was moved, the count begins at the group's position and grows tick
by tick up to the subject's end. Requeued messages are summed again when they changed, the oldest ranges of them. Bytes
that are not counted yet count as zero. The rest of a partly consumed frame is estimated.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from qmq.broker import positions
from qmq.broker.dead_letters import DeadLetters, DeadRange
from qmq.dead_letters import PRUNER
from qmq.errors import CorruptFrame, SubjectFull
from qmq.log import MessageLog
from qmq.log.frame import FrameKind
from qmq.log.group import Consumer, Group
from qmq.log.index import FrameRef
from qmq.log.progress_frame import EXPIRED, OVERFLOWED
from qmq.log.requeued import Requeued
from qmq.operator_limits import OF_SUBJECT, OperatorLimits
from qmq.replication.clocks import Clocks
from qmq.replication.mastership import Mastership
from qmq.subjects import is_dead_letter_subject, real_subject

log = logging.getLogger(__name__)

FRAMES_PER_TICK = 4_000
"""About 10 ms, ten times a second: enough for 20,000 batches a second of limited subjects."""
FRAMES_PER_LOOK_UP = 2_000
RANGES_SUMMED = 1_000
"""Requeued ranges of a group that are summed, the oldest ones."""
REQUEUED_FRAMES = 2_000
"""Frames of these ranges at most; with the look-ups, half of the scan of a tick."""
SCANNED_PER_TICK = 12_000
"""Frames scanned for requeued messages and for overflow: at most 30 ms of a tick."""
SCANNED_AT_ONCE = 100
LOOK_UP = 3
"""Cost of a look-up, in scanned frames."""

Key = tuple[str, str]


@dataclass(slots=True)
class _Counted:
    """Whole frames with the sequences [begin, end), and their bytes."""

    begin: int
    end: int
    bytes: int = 0


@dataclass(slots=True)
class _Summed:
    """Bytes of `requeued`, valid for this count of its changes and this start of the log."""

    requeued: Requeued
    changes: int
    start: int
    bytes: int


class Lengths:
    """Byte counts of waiting messages. Made by `SubjectLimits`; ends with the mastership."""

    def __init__(self, log: MessageLog) -> None:
        self._log = log
        self._counted: dict[Key, _Counted] = {}
        self._summed: dict[Key, _Summed] = {}
        self._unfinished: dict[Key, None] = {}
        """Counts that have not reached the subject's end, the most recently continued last."""
        self._left = FRAMES_PER_TICK
        self._scan_left = SCANNED_PER_TICK

    @property
    def has_unfinished(self) -> bool:
        return bool(self._unfinished)

    @property
    def is_spent(self) -> bool:
        """Whether less of this tick is left than one look-up may need."""
        return self._scan_left < SCANNED_PER_TICK // 2

    def new_tick(self) -> None:
        """Continue unfinished counts.

        Raises:
            CorruptFrame: this copy is damaged.
        """
        self._left = FRAMES_PER_TICK
        self._scan_left = SCANNED_PER_TICK
        for key in list(self._unfinished):
            if self._left <= 0:
                return
            if (group := self._log.state.groups.get(key)) is None:
                self.forget(key)
            else:
                self._new(key, group.position)

    def forget(self, key: Key) -> None:
        for known in (self._counted, self._summed, self._unfinished):
            known.pop(key, None)

    def waiting(self, key: Key, group: Group) -> int:
        """Return the bytes that wait for a group: messages not delivered, and requeued ones.

        Raises:
            CorruptFrame: this copy is damaged.
        """
        return self._new(key, group.position) + self._requeued(key, group.requeued)

    def covering(self, subject: str, ranges: Iterable[tuple[int, int]], size: int) -> int:
        """Return how many of the first messages of these ranges, (first, count), make up `size` bytes; fewer if a
        tick's budget of frames ends before.

        Raises:
            CorruptFrame: this copy is damaged.
        """
        messages = 0
        for gone, kept, ref in self._parts(subject, ranges):
            messages += gone
            if ref is not None and (part := _part(ref, kept)) >= size:
                return messages - (-size * (ref.end - ref.begin) // ref.length)
            messages, size = messages + kept, size - (part if ref is not None else 0)
        return messages

    def _requeued(self, key: Key, requeued: Requeued) -> int:
        start, summed = self._log.state.kept.start, self._summed.get(key)
        if summed is not None and summed.requeued is requeued:
            if (summed.changes, summed.start) == (requeued.changes, start):
                return summed.bytes
        if self.is_spent or requeued.first is None:
            return 0
        first_kept = self._look_up(key[0], requeued.first, 1)
        ranges = requeued.overlapping(first_kept[0].begin, 1 << 63, RANGES_SUMMED) if first_kept else []
        parts = self._parts(key[0], ((range_.first, range_.count) for range_ in ranges))
        size = sum(_part(ref, kept) for _, kept, ref in islice(parts, REQUEUED_FRAMES) if ref is not None)
        self._summed[key] = _Summed(requeued, requeued.changes, start, size)
        return size

    def _parts(self, subject: str, ranges: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int, FrameRef | None]]:
        """Yield the parts of these ranges in order: messages deleted by retention, then messages in the frame, and the
        frame; None if there is no frame any more.
        """
        refs: deque[FrameRef] = deque()
        for at, count in ranges:
            end = at + count
            while at < end:
                while refs and refs[0].end <= at:
                    refs.popleft()
                if not refs:
                    if self._scan_left <= 0:
                        return
                    refs.extend(self._look_up(subject, at, min(SCANNED_AT_ONCE, count)))
                begin = min(max(refs[0].begin, at), end) if refs else end
                stop = min(refs[0].end, end) if begin < end else end
                yield begin - at, stop - begin, refs[0] if begin < end else None
                at = stop

    def _look_up(self, subject: str, sequence: int, most: int) -> list[FrameRef]:
        refs = self._log.frames(subject, sequence, most)
        self._scan_left -= LOOK_UP + len(refs)
        return refs

    def _new(self, key: Key, position: int) -> int:
        """Continue the count of the bytes not delivered to a group; return the bytes counted so far."""
        self._unfinished.pop(key, None)
        end = self._log.state.next_sequence.get(key[0], 0)
        refs = self._log.frames(key[0], position, 1) if position < end else []
        if not refs:
            return 0
        first, counted = refs[0], self._counted.get(key)
        if counted is None or not counted.begin <= first.begin <= counted.end:
            counted = self._counted[key] = _Counted(first.begin, first.begin)
        if not self._leave(key[0], counted, first.begin):
            self._unfinished[key] = None
            return 0
        while counted.end < end and self._left > 0:
            refs = self._take(key[0], counted.end)
            counted.bytes += sum(ref.length for ref in refs)
            counted.end = refs[-1].end
        if counted.end < end:
            self._unfinished[key] = None
        return counted.bytes - _part(first, max(position - first.begin, 0))

    def _leave(self, subject: str, counted: _Counted, begin: int) -> bool:
        """Subtract the frames before `begin`; return whether that is finished."""
        while counted.begin < begin and self._left > 0:
            refs = self._take(subject, counted.begin)
            if refs[0].begin != counted.begin:  # retention deleted counted frames
                counted.begin, counted.end, counted.bytes = begin, begin, 0
                return True
            gone = [ref for ref in refs if ref.begin < begin]
            counted.bytes -= sum(ref.length for ref in gone)
            counted.begin = gone[-1].end
        return counted.begin == begin

    def _take(self, subject: str, sequence: int) -> list[FrameRef]:
        refs = self._log.frames(subject, sequence, min(FRAMES_PER_LOOK_UP, self._left))
        self._left -= len(refs)
        return refs


def _part(ref: FrameRef, messages: int) -> int:
    return ref.length * messages // (ref.end - ref.begin)


PRUNE_EVERY_MS = 1_000
SUBJECTS_AT_ONCE = 50
"""Limited subjects checked in a tick, at most a few milliseconds; with more than 500, a round exceeds a second."""
RANGES_AT_ONCE = 1_000
"""Requeued ranges of a group given up at once: one frame, folded in less than a millisecond."""
EXPIRED_AT_ONCE = 5_000
"""Expired messages of a group waiting to become dead letters: ten passes of the loop."""
REASON = "expired"


class SubjectLimits:
    """Enforcer of the subjects' limits. Made by `broker.delivery`; ends with the mastership. `wake(subject)` is called
    when a group advanced.
    """

    def __init__(
        self, mastership: Mastership, clocks: Clocks, dead_letters: DeadLetters, wake: Callable[[str], None]
    ) -> None:
        self._mastership = mastership
        self._clocks = clocks
        self._dead_letters = dead_letters
        self._wake = wake
        self._limits: dict[str, OperatorLimits] = {}
        self._groups: dict[str, dict[str, None]] = {}
        """Subject -> its consumer groups: finds those of a few limited subjects among 100,000."""
        self._lengths = Lengths(mastership.log)
        self._pruned_ms = 0
        self._left: deque[str] = deque()
        """Subjects still to be checked in this round."""
        self.expired: dict[Key, int] = {}
        """(subject, consumer group) -> expired messages."""
        self.overflowed: dict[Key, int] = {}
        """(subject, consumer group) -> messages given up because too many waited."""

    def begin_mastership(self) -> None:
        """Begin the mastership with the groups in the log."""
        for subject, name in self._mastership.log.state.groups:
            self._groups.setdefault(subject, {})[name] = None

    def limit(self, limits: dict[Key, OperatorLimits]) -> None:
        self._limits = {subject: limit for (subject, group), limit in limits.items() if group == OF_SUBJECT}

    def changing(self, key: Key, *, is_known: bool) -> None:
        """Follow a group that begins, is moved, or is about to be forgotten."""
        subject, name = key
        if is_known:
            self._groups.setdefault(subject, {})[name] = None
        else:
            self._groups.get(subject, {}).pop(name, None)
            self.expired.pop(key, None)
            self.overflowed.pop(key, None)
            self._lengths.forget(key)

    def expired_die(self, subject: str) -> bool:
        """Return whether expired messages become dead letters; a retry subject follows its real subject."""
        limits = self._limits.get(real_subject(subject))
        return limits is not None and limits.expired_die and not is_dead_letter_subject(subject)

    def note_expired(self, key: Key, messages: int) -> None:
        """Count expired messages of a group; the first time is logged."""
        if key not in self.expired:
            log.warning("messages expire subject=%s consumer_group=%s", *key)
        self.expired[key] = self.expired.get(key, 0) + messages

    def due_in_ms(self, now_ms: int) -> int:
        """Return for how long no check is due."""
        if self._left or self._lengths.has_unfinished:
            return 0
        return max(0, self._pruned_ms + PRUNE_EVERY_MS - now_ms) if self._limits else PRUNE_EVERY_MS

    def tick(self, now_ms: int) -> None:
        """Give up expired and overflowing messages. `now_ms` never jumps."""
        try:
            self._lengths.new_tick()
        except CorruptFrame as problem:
            self._mastership.found_damage(problem)
        if not self._left and now_ms - self._pruned_ms >= PRUNE_EVERY_MS:
            self._pruned_ms, self._left = now_ms, deque(self._limits)
        for _ in range(min(SUBJECTS_AT_ONCE, len(self._left))):
            if self._lengths.is_spent:
                return
            subject = self._left.popleft()
            limits = self._limits.get(subject)
            if limits is None or subject not in self._groups:
                continue
            if limits.drops_oldest:
                self._overflow(subject, limits)
            if limits.expires_after_s and self.clock_is_right():
                try:
                    self._expire(subject, limits)
                except CorruptFrame as problem:
                    self._mastership.found_damage(problem)

    def check_room(self, subject: str) -> None:
        """Raise SubjectFull if a consumer group is at its limit of waiting messages or bytes."""
        limits = self._limits.get(subject)
        if limits is None or limits.drops_oldest or not (limits.messages_max or limits.bytes_max):
            return
        state = self._mastership.log.state
        end = state.next_sequence.get(subject, 0)
        for name in self._groups.get(subject, ()):
            group = state.groups[subject, name]
            if group.is_broadcast:
                continue
            if limits.messages_max and (waiting := _waiting(group, end)) >= limits.messages_max:
                waiting -= self._gone(subject, group)
                self._check_room(waiting, limits.messages_max, "messages", subject, name)
            if limits.bytes_max:
                self._check_room(self._bytes((subject, name), group), limits.bytes_max, "bytes", subject, name)

    def _check_room(self, waiting: int, most: int, unit: str, subject: str, name: str) -> None:
        if waiting >= most:
            raise SubjectFull(
                f"{waiting:,} {unit} of {subject} wait for {name} at {self._mastership.group}, and "
                f"{most:,} may (SetLimits --{unit}Max)",
                f"{unit}Max",
                subject,
            )

    def _bytes(self, key: Key, group: Group) -> int:
        try:
            return self._lengths.waiting(key, group)
        except CorruptFrame as problem:
            self._mastership.found_damage(problem)
            return 0

    def _covering(self, subject: str, ranges: Iterable[tuple[int, int]], size: int) -> int:
        try:
            return self._lengths.covering(subject, ranges, size)
        except CorruptFrame as problem:
            self._mastership.found_damage(problem)
            return 0

    def _gone(self, subject: str, group: Group) -> int:
        """Return how many of the waiting messages retention has deleted."""
        try:
            first, _ = positions.sequences_kept(self._mastership.log, subject)
        except CorruptFrame as problem:
            self._mastership.found_damage(problem)
            return 0
        return max(first - group.position, 0) + group.requeued.messages_before(first)

    def _overflow(self, subject: str, limits: OperatorLimits) -> None:
        state = self._mastership.log.state
        end = state.next_sequence.get(subject, 0)
        for name in list(self._groups[subject]):
            group = state.groups[subject, name]
            waiting = _waiting(group, end)
            too_many = waiting - limits.messages_max if limits.messages_max else 0
            if limits.bytes_max and (size := self._bytes((subject, name), group) - limits.bytes_max) > 0:
                too_many = max(too_many, self._covering(subject, _oldest(group, waiting), size))
            if messages := self._give_up((subject, name), OVERFLOWED, _oldest(group, too_many)):
                if (subject, name) not in self.overflowed:
                    log.warning(
                        "messages overflow subject=%s consumer_group=%s: more waited than the limit", subject, name
                    )
                self.overflowed[subject, name] = self.overflowed.get((subject, name), 0) + messages

    def _give_up(self, key: Key, why: int, ranges: Iterable[tuple[int, int]]) -> int:
        """Give up (first, count) ranges of a group; return the number of messages."""
        entries = [(why, first, count) for first, count in ranges]
        if entries:
            self._mastership.append_progress(FrameKind.PULL, (*key, PRUNER), entries)
            self._wake(key[0])
        return sum(count for _, _, count in entries)

    def clock_is_right(self) -> bool:
        """Return whether another clock reported, and none disagrees with this one: nothing expires otherwise."""
        host = self._mastership.host
        ahead_ms = self._clocks.ahead_ms(now_ms=host.now_ms(), monotonic_ms=host.monotonic_ms())
        return bool(ahead_ms) and not self._clocks.disagreement(ahead_ms)

    def _expire(self, subject: str, limits: OperatorLimits) -> None:
        mastership = self._mastership
        since_ms = mastership.host.now_ms() - 1000 * limits.expires_after_s
        if not self._is_oldest_before(subject, since_ms):
            return
        end = positions.first_since(mastership.log, subject, since_ms)
        for name in list(self._groups[subject]):
            group = mastership.log.state.groups[subject, name]
            if limits.expired_die:
                self._make_dead(subject, name, group, end)
            elif messages := self._give_up((subject, name), EXPIRED, _before(group, end)):
                self.note_expired((subject, name), messages)

    def _is_oldest_before(self, subject: str, since_ms: int) -> bool:
        """Return whether the oldest waiting message was stored before `since_ms`; a search would cost twenty times as
        much.
        """
        message_log = self._mastership.log
        groups = [message_log.state.groups[subject, name] for name in self._groups[subject]]
        firsts = [group.position if group.requeued.first is None else group.requeued.first for group in groups]
        refs = message_log.frames(subject, min(firsts), 1) if firsts else []
        return bool(refs) and message_log.timestamp_at(refs[0].offset) < since_ms

    def _make_dead(self, subject: str, name: str, group: Group, end: int) -> None:
        """Deliver expired messages to the pruner, which makes dead letters of them; no more than it can soon handle."""
        mastership, key = self._mastership, (subject, name, PRUNER)
        room = EXPIRED_AT_ONCE - group.consumers.get(PRUNER, Consumer()).unacked_messages
        pull_sequence, entries = mastership.log.state.next_pull(group, PRUNER), []
        for first, count in _before(group, end):
            if (taken := min(count, room)) <= 0:
                break
            entries.append((pull_sequence, first, taken))
            pull_sequence, room = pull_sequence + taken, room - taken
        if entries:
            mastership.append_progress(FrameKind.PULL, key, entries)
            self.note_expired(key[:2], sum(count for _, _, count in entries))
            dead = [DeadRange(pull, pull + count, False) for pull, _, count in entries]
            self._dead_letters.make_dead(key, dead, REASON, None)


def _before(group: Group, end: int) -> Iterator[tuple[int, int]]:
    """Yield (first, count) of the group's messages before sequence `end`: requeued ranges, then new ones."""
    for span in group.requeued.before(end, RANGES_AT_ONCE):
        yield span.first, span.count
    if group.position < end:
        yield group.position, end - group.position


def _waiting(group: Group, end: int) -> int:
    """Return how many messages wait for a group of a subject that ends at sequence `end`."""
    return end - group.position + group.requeued.messages


def _oldest(group: Group, messages: int) -> Iterator[tuple[int, int]]:
    """Yield (first, count) of the oldest `messages` that wait for the group, as far as one frame holds them."""
    for span in group.requeued.before(group.position, RANGES_AT_ONCE):
        if messages <= 0:
            return
        yield span.first, min(span.count, messages)
        messages -= span.count
    if messages > 0 and len(group.requeued) <= RANGES_AT_ONCE:  # else older ones are requeued and go first
        yield group.position, messages
