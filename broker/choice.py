"""Core. Messages of a pull: redelivered ones of its consumer, requeued ones of the group, then new ones.

The choice needs the fold and the index alone. `broker.serving` writes it to the log before the messages leave.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from qmq.broker.subscriptions import Subscription
from qmq.codec import Buffer
from qmq.errors import require
from qmq.log import MessageLog
from qmq.log.frame import Frame
from qmq.log.group import Consumer, Group
from qmq.log.index import FrameRef
from qmq.log.progress_frame import PASSED, Entry
from qmq.remoting.commands import Pull

PULL_BYTES_MAX = 8 << 20
PULL_MESSAGES_MAX = 10_000
UNACKED_MESSAGES_MAX = 200_000
"""Per consumer; at the limit its pulls wait for its acks."""
FRAMES_AT_ONCE = 256
FRAMES_AT_FIRST = 4
"""Frames looked up for a pull at first; each further look-up takes twice as many. Looking up 256 at once took a sixth
of the master's time while a backlog was read: a pull nearly always fits into the first two.
"""


class Part(NamedTuple):
    """Messages `[begin, end)` of one frame, by sequence, with pull sequences from `pull_sequence` on."""

    pull_sequence: int
    begin: int
    end: int
    ref: FrameRef
    attempts: int
    """Counted deliveries, this one included."""
    suspected: int = 0
    """Deliveries to consumers that vanished without reporting that they had begun."""


@dataclass(slots=True)
class Chosen:
    """Messages for one pull, and the progress to write before they leave. May be empty."""

    parts: list[Part] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    """Entries of the pull frame."""
    gone: list[tuple[int, int]] = field(default_factory=list)
    """Pull sequences of unacked messages that retention deleted; no consumer can ack them."""
    dead: list[tuple[int, int]] = field(default_factory=list)
    """Pull sequences that reached the delivery limit: they become dead letters instead of being delivered again."""
    skipped: int = 0
    """Messages that retention deleted before the group acked them."""
    bodies: dict[int, tuple[Frame, Buffer]] = field(default_factory=dict)
    """Frames that were read for this choice, by offset."""

    @property
    def data_end(self) -> int:
        return max(part.ref.offset + part.ref.length for part in self.parts)

    def bytes(self) -> int:
        """Return the approximate size of the answer."""
        return sum(part.ref.length * (part.end - part.begin) // (part.ref.end - part.ref.begin) for part in self.parts)

    @property
    def pull_ends(self) -> list[int]:
        """Ends of the pull sequences that are answered, gone and dead, as far as there are any."""
        ends = [kind[-1][1] for kind in (self.gone, self.dead) if kind]
        if self.parts:
            last = self.parts[-1]
            ends.append(last.pull_sequence + last.end - last.begin)
        return ends

    @property
    def is_empty(self) -> bool:
        return not (self.parts or self.entries or self.gone or self.dead)


def choose(
    log: MessageLog,
    subscription: Subscription,
    pull: Pull,
    *,
    data_limit: int,
    now_ms: int,
    single: Callable[[Budget, Chosen], None] | None = None,
) -> Chosen | None:
    """Return the messages for a pull, or None if there are none.

    Args:
        data_limit: deliver only frames that end at or before this offset; the high watermark while no slave is in sync.
        now_ms: `Mastership.retry_ms`, the clock of retries.
        single: replaces `Choice.deliver` if each message needs a decision of its own (broker.filtered_scan).

    The caller writes the choice to the log before it answers, and moves `subscription.resend` past it.
    """
    require(pull.messages_max > 0, "a pull that asks for nothing is refused before it waits")
    group = log.state.groups[subscription.subject, subscription.group]
    consumer = group.consumers.get(subscription.consumer)
    choice = Choice(log, subscription, pull, data_limit)
    if consumer is not None and subscription.resend < consumer.next_pull:
        choice.redeliver(consumer)
    is_full = consumer is not None and consumer.has_as_many_as(UNACKED_MESSAGES_MAX)
    if choice.chosen.is_empty and not choice.is_over and not is_full:
        if single is not None:
            single(choice.budget, choice.chosen)
        else:
            choice.deliver(group, now_ms)
    return None if choice.chosen.is_empty else choice.chosen


class Choice:
    """One decision in progress."""

    def __init__(self, log: MessageLog, subscription: Subscription, pull: Pull, data_limit: int) -> None:
        self._log = log
        self._subscription = subscription
        self.budget = Budget(min(pull.messages_max, PULL_MESSAGES_MAX), min(pull.bytes_max, PULL_BYTES_MAX), data_limit)
        self.chosen = Chosen()

    @property
    def is_over(self) -> bool:
        """Whether the choice has ended: the pull is full, or the next frame may not be delivered yet."""
        return self.budget.is_stopped

    def redeliver(self, consumer: Consumer) -> None:
        """Redeliver the consumer's unacked messages, from the first pull sequence that this connection did not get."""
        limit, chosen = self._subscription.deliveries_max, self.chosen
        for span in consumer.overlapping(self._subscription.resend, consumer.next_pull):
            if limit and span.deliveries > limit:
                chosen.dead.append((span.pull, span.pull_end))
                continue
            at, end, ahead = (
                max(self._subscription.resend - span.pull, 0) + span.first,
                span.end,
                span.pull - span.first,
            )
            while at < end and not self.is_over:
                part, at_next = self._next(at, end, at + ahead, span.attempts, span.suspected)
                if part is None and at_next > at:
                    chosen.gone.append((at + ahead, at_next + ahead))
                    chosen.skipped += at_next - at
                at = at_next
            if self.is_over:
                return

    def deliver(self, group: Group, now_ms: int) -> None:
        """Deliver the group's messages: requeued ones that are due, then new ones."""
        state, subscription, limit = self._log.state, self._subscription, self._subscription.deliveries_max
        pull_sequence = state.next_pull(group, subscription.consumer)
        for span in group.requeued.due(now_ms, self.budget.messages):
            if limit and span.deliveries >= limit:
                self.chosen.entries.append((pull_sequence, span.first, span.count))
                self.chosen.dead.append((pull_sequence, pull_sequence + span.count))
                pull_sequence += span.count
                continue
            pull_sequence = self._deliver_range(span.first, span.end, pull_sequence, span.attempts + 1, span.suspected)
            if self.is_over:
                return
        self._deliver_range(group.position, state.next_sequence.get(subscription.subject, 0), pull_sequence, 1)

    def _deliver_range(self, begin: int, end: int, pull_sequence: int, attempts: int, suspected: int = 0) -> int:
        """Deliver sequences `[begin, end)` within budget and limit; return the next pull sequence."""
        entries, at = self.chosen.entries, begin
        while at < end and not self.is_over:
            part, at_next = self._next(at, end, pull_sequence, attempts, suspected)
            if part is not None:
                if at > begin and entries[-1][0] != PASSED:
                    number, first, count = entries[-1]
                    entries[-1] = number, first, count + at_next - at
                else:
                    entries.append((pull_sequence, at, at_next - at))
                pull_sequence += at_next - at
            elif at_next > at:
                entries.append((PASSED, at, at_next - at))
                self.chosen.skipped += at_next - at
            at = at_next
        return pull_sequence

    def _next(self, begin: int, end: int, pull_sequence: int, attempts: int, suspected: int) -> tuple[Part | None, int]:
        """Add the next part of `[begin, end)`; return it and the begin of the rest.

        The part is None if retention deleted the messages before the returned begin, or if nothing more fits.
        """
        ref = self.budget.frame_at(self._log, self._subscription.subject, begin)
        if ref is None or ref.begin > begin:
            return None, min(ref.begin, end) if ref else end
        last = begin + self.budget.allows(ref, min(end, ref.end) - begin)
        if last == begin:
            return None, begin
        part = Part(pull_sequence, begin, last, ref, attempts, suspected)
        self.chosen.parts.append(part)
        return part, last


class Budget:
    """Room that is left in a pull. The first message always fits, however large it is.

    A frame is cut only for a pull that is less than half full. A cut frame is read twice, and each part is copied and
    gets a CRC of its own. A consumer that pulled about one frame at a time would pay for each message three times.
    """

    __slots__ = (
        "messages",
        "bytes",
        "data_limit",
        "is_untouched",
        "is_stopped",
        "_messages_half",
        "_bytes_half",
        "_refs",
        "_ahead",
    )

    def __init__(self, messages: int, bytes_max: int, data_limit: int) -> None:
        self.messages = messages
        self.bytes = bytes_max
        self.data_limit = data_limit
        self.is_untouched = True
        self.is_stopped = False
        self._messages_half = messages // 2
        self._bytes_half = bytes_max // 2
        self._refs: list[FrameRef] = []
        """Frames looked up ahead, the next one last."""
        self._ahead = FRAMES_AT_FIRST

    def frame_at(self, log: MessageLog, subject: str, sequence: int, most: int = FRAMES_AT_ONCE) -> FrameRef | None:
        """Return the frame that holds `sequence`, or the next one after it; look up at most `most` frames."""
        refs = self._refs
        while refs and refs[-1].end <= sequence:
            refs.pop()
        if not refs or refs[-1].begin > sequence:  # others may lie before it
            self._refs = refs = log.frames(subject, sequence, min(self.messages, most, self._ahead))[::-1]
            self._ahead = min(2 * self._ahead, FRAMES_AT_ONCE)
        return refs[-1] if refs else None

    def allows(self, ref: FrameRef, wanted: int) -> int:
        """Return how many of `wanted` messages of the frame fit, by their mean size, and spend them."""
        if ref.offset + ref.length > self.data_limit:
            self.is_stopped = True
            return 0
        mean = ref.length / (ref.end - ref.begin)
        fitting = max(int(self.bytes / mean), 0)  # the first message may have overdrawn the budget
        taken = min(wanted, self.messages, max(fitting, 1) if self.is_untouched else fitting)
        is_half_full = self.messages <= self._messages_half or self.bytes <= self._bytes_half
        if taken < wanted and is_half_full and not self.is_untouched:
            taken = 0
        self.is_stopped = taken < wanted or taken == self.messages
        self.messages -= taken
        self.bytes -= int(mean * taken)
        self.is_untouched = not taken  # not read after the budget stopped
        return taken
