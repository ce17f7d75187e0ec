"""Core. Messages of a pull: redelivered ones of its consumer, requeued ones of the group, then new ones.

Decided on the fold and the index alone; `broker.delivery` writes the decision down before anything leaves.
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
"""Frames looked up for a pull, twice as many each further time. To look 256 up at once was a sixth of the master's time
when a backlog was read: nearly always the first or second of them is all that a pull has room for."""


class Part(NamedTuple):
    """Messages `[begin, end)`, by sequence, of one frame, numbered from `pull_sequence` on."""

    pull_sequence: int
    begin: int
    end: int
    ref: FrameRef
    attempts: int
    """Deliveries that count, this one included."""
    suspected: int = 0
    """Deliveries to consumers that vanished, without having said that they had begun."""


@dataclass(slots=True)
class Chosen:
    """What a pull is answered with, and what must be written down for that. There may be nothing to answer with."""

    parts: list[Part] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    """For a pull frame."""
    gone: list[tuple[int, int]] = field(default_factory=list)
    """Pull sequences of un-acked messages that retention took: nobody will ever ack them."""
    dead: list[tuple[int, int]] = field(default_factory=list)
    """Pull sequences that were delivered too often: they become dead letters instead of leaving once more."""
    skipped: int = 0
    """Messages that the group never acked and that retention took."""
    bodies: dict[int, tuple[Frame, Buffer]] = field(default_factory=dict)
    """By offset: frames that had to be read to choose."""

    @property
    def data_end(self) -> int:
        return max(part.ref.offset + part.ref.length for part in self.parts)

    def bytes(self) -> int:
        """Add up about how many the answer will have."""
        return sum(part.ref.length * (part.end - part.begin) // (part.ref.end - part.ref.begin) for part in self.parts)

    @property
    def pull_ends(self) -> list[int]:
        """Where the pull sequences end that are answered, gone and dead, of those that there are."""
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
    """Choose what a pull gets now; None if there is nothing.

    Args:
        data_limit: only messages whose frame ends at or before this offset. While the slave is missing, that is the
            high watermark.
        now_ms: of `Mastership.retry_ms`, by which retries become due.
        single: what chooses in place of `Choice.more` if it depends on each message what becomes of it
            (broker.filtered_scan).

    The caller writes everything down before it answers, and moves `subscription.resend` behind it.
    """
    require(pull.messages_max > 0, "a pull that asks for nothing is refused before it waits")
    group = log.state.groups[subscription.subject, subscription.group]
    consumer = group.consumers.get(subscription.consumer)
    choice = Choice(log, subscription, pull, data_limit)
    if consumer is not None and subscription.resend < consumer.next_pull:
        choice.again(consumer)
    is_full = consumer is not None and consumer.has_as_many_as(UNACKED_MESSAGES_MAX)
    if choice.made.is_empty and not choice.is_over and not is_full:
        if single is not None:
            single(choice.cut, choice.made)
        else:
            choice.more(group, now_ms)
    return None if choice.made.is_empty else choice.made


class Choice:
    """One decision, as it is made."""

    def __init__(self, log: MessageLog, subscription: Subscription, pull: Pull, data_limit: int) -> None:
        self._log, self._subscription = log, subscription
        self.cut = Budget(min(pull.messages_max, PULL_MESSAGES_MAX), min(pull.bytes_max, PULL_BYTES_MAX), data_limit)
        self.made = Chosen()

    @property
    def is_over(self) -> bool:
        """Whether the pull gets no more, though there may be more."""
        return self.cut.is_stopped

    def again(self, consumer: Consumer) -> None:
        """Deliver what the consumer has, from the pull sequence on that this connection was not given."""
        limit, made = self._subscription.deliveries_max, self.made
        for one in consumer.overlapping(self._subscription.resend, consumer.next_pull):
            if limit and one.deliveries > limit:
                made.dead.append((one.pull, one.pull_end))
                continue
            at, end, ahead = max(self._subscription.resend - one.pull, 0) + one.first, one.end, one.pull - one.first
            while at < end and not self.is_over:
                part, at_next = self._next(at, end, at + ahead, one.attempts, one.suspected)
                if part is None and at_next > at:
                    made.gone.append((at + ahead, at_next + ahead))
                    made.skipped += at_next - at
                at = at_next
            if self.is_over:
                return

    def more(self, group: Group, now_ms: int) -> None:
        """Deliver what the group has to give: what came back and is due, then what is new."""
        state, subscription, limit = self._log.state, self._subscription, self._subscription.deliveries_max
        pull_sequence = state.next_pull(group, subscription.consumer)
        for one in group.requeued.due(now_ms, self.cut.messages):
            if limit and one.deliveries >= limit:
                self.made.entries.append((pull_sequence, one.first, one.count))
                self.made.dead.append((pull_sequence, pull_sequence + one.count))
                pull_sequence += one.count
                continue
            pull_sequence = self._give(one.first, one.end, pull_sequence, one.attempts + 1, one.suspected)
            if self.is_over:
                return
        self._give(group.position, state.next_sequence.get(subscription.subject, 0), pull_sequence, 1)

    def _give(self, begin: int, end: int, pull_sequence: int, attempts: int, suspected: int = 0) -> int:
        """Deliver sequences `[begin, end)`, as far as budget and limit allow; return the next pull sequence."""
        entries, at = self.made.entries, begin
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
                self.made.skipped += at_next - at
            at = at_next
        return pull_sequence

    def _next(self, begin: int, end: int, pull_sequence: int, attempts: int, suspected: int) -> tuple[Part | None, int]:
        """Add the next part of `[begin, end)`; return it, and where the one behind it begins.

        None: what lies before that is gone, because retention took it; or nothing more fits.
        """
        ref = self.cut.frame_at(self._log, self._subscription.subject, begin)
        if ref is None or ref.begin > begin:
            return None, min(ref.begin, end) if ref else end
        last = begin + self.cut.allows(ref, min(end, ref.end) - begin)
        if last == begin:
            return None, begin
        part = Part(pull_sequence, begin, last, ref, attempts, suspected)
        self.made.parts.append(part)
        return part, last


class Budget:
    """What a pull may still get. The first message always fits, however large it is.

    A frame is cut only for a pull that has less than half of what it asked for. What is cut is read twice, and gets a
    copy and a CRC of its own each time; so who pulls about a frame's size at a time would pay for each message thrice.
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
        self.messages, self.bytes, self.data_limit = messages, bytes_max, data_limit
        self.is_untouched, self.is_stopped = True, False
        self._messages_half, self._bytes_half = messages // 2, bytes_max // 2
        self._refs: list[FrameRef] = []
        """Frames looked up ahead, the next one last."""
        self._ahead = FRAMES_AT_FIRST

    def frame_at(self, log: MessageLog, subject: str, sequence: int, most: int = FRAMES_AT_ONCE) -> FrameRef | None:
        """Return the frame that holds `sequence`, or the next one behind it; look up to `most` of them up."""
        refs = self._refs
        while refs and refs[-1].end <= sequence:
            refs.pop()
        if not refs or refs[-1].begin > sequence:  # perhaps there are others before it
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
        self.is_untouched = not taken  # once it is stopped, nobody asks
        return taken
