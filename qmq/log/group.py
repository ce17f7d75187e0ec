"""Core. Progress of a consumer group: what of its messages is delivered, to whom, and what waits for the next delivery.

Part of the fold (qmq.log.fold), which alone changes it. The states of one message are a table: qmq.log.message_life.

Keeps I21.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import itemgetter
from typing import NamedTuple

from qmq import ranges
from qmq.errors import InvalidAck
from qmq.log.message_life import MessageState
from qmq.log.requeued import Requeued, RequeuedRange
from qmq.ranges import Range

MASTERSHIP_BITS = 32
"""A pull sequence's upper bits are the mastership's epoch, so that a late ack never hits other messages (W2, W13).

A count of masterships would not do: two histories that part may have as many, and a master alone delivers messages.
"""

_PULL = itemgetter(0)


class UnackedRange(NamedTuple):
    """Messages that a consumer has: `count` of them, from the sequence `first` on, numbered from `pull` on."""

    pull: int
    first: int
    count: int  # type: ignore[assignment]  # shadows tuple.count
    attempts: int
    """Deliveries that count, this one included."""
    suspected: int = 0
    """Deliveries to a consumer that vanished, which nobody can say to have begun with them."""

    @property
    def pull_end(self) -> int:
        return self.pull + self.count

    @property
    def end(self) -> int:
        return self.first + self.count

    @property
    def deliveries(self) -> int:
        """How often they were delivered, whatever counts."""
        return self.attempts + self.suspected

    def part(self, begin: int, end: int) -> UnackedRange:
        """Return what lies in the pull sequences `[begin, end)`, which overlap it."""
        pull = max(self.pull, begin)
        return self._replace(pull=pull, first=self.first + pull - self.pull, count=min(self.pull_end, end) - pull)


@dataclass(slots=True)
class Consumer:
    """Progress of one consumer. `unacked` ascends by pull sequence."""

    next_pull: int = 0
    unacked: list[UnackedRange] = field(default_factory=list)
    mastership_ends: list[int] = field(default_factory=list)
    """Where the numbers end that each mastership gave out, as far as any of them may be un-acked."""

    @property
    def acked_end(self) -> int:
        """Below this pull sequence everything is settled. It never goes back."""
        return self.unacked[0].pull if self.unacked else self.next_pull

    @property
    def unacked_messages(self) -> int:
        return sum(one.count for one in self.unacked)

    def has_as_many_as(self, limit: int) -> bool:
        """Return whether that many messages are un-acked; nearly always without counting them."""
        return self.next_pull - self.acked_end >= limit and self.unacked_messages >= limit

    def deliver(self, new: UnackedRange) -> None:
        """Note that messages were delivered, behind all others."""
        ends = self.mastership_ends
        if not ends or ends[-1] - 1 >> MASTERSHIP_BITS != new.pull >> MASTERSHIP_BITS:
            self.mastership_ends = ends = [end for end in ends if end > self.acked_end]
            ends.append(0)
        self.next_pull = ends[-1] = new.pull + new.count
        unacked = self.unacked
        if unacked:
            pull, first, count, attempts, suspected = unacked[-1]
            if (pull + count, first + count, attempts, suspected) == (new.pull, new.first, *new[3:]):
                unacked[-1] = UnackedRange(pull, first, count + new.count, attempts, suspected)
                return
        unacked.append(new)

    def delivered_more_than(self, limit: int) -> list[Range]:
        """Return the ranges of pull sequences that were delivered more often; 0 is no limit."""
        return [(one.pull, one.pull_end) for one in self.unacked if limit and one.deliveries > limit]

    def unacked_below(self, end: int, limit: int) -> list[Range]:
        """Return the un-acked pull sequences below `end` but those that were delivered more often than `limit`."""
        found: list[Range] = []
        for one in self.unacked:
            if one.pull >= end:
                break
            if not limit or one.deliveries <= limit:
                ranges.add(found, one.pull, min(end, one.pull_end))
        return found

    def was_given(self, end: int) -> bool:
        """Return whether this history gave out all numbers below `end`, which its mastership ends with, or settled
        them."""
        mastership = end - 1 >> MASTERSHIP_BITS
        return end <= self.acked_end or any(
            end <= given and given - 1 >> MASTERSHIP_BITS == mastership for given in self.mastership_ends
        )

    def unacked_in(self, begin: int, end: int) -> list[Range]:
        """Return which parts of pull sequences `[begin, end)` are not settled yet.

        Raises:
            InvalidAck: the range is empty, or was not delivered.
        """
        self.check_given(begin, end)
        found: list[Range] = []
        for one in self.overlapping(begin, end):
            ranges.add(found, max(begin, one.pull), min(end, one.pull_end))
        return found

    def check_given(self, begin: int, end: int) -> None:
        """Raise InvalidAck if the range is empty, or was not delivered."""
        if not begin < end:
            raise InvalidAck(f"[{begin}, {end}) is empty")
        if end > self.next_pull:
            raise InvalidAck(f"[{begin}, {end}) ends past {self.next_pull}, the next pull sequence to deliver")

    def overlapping(self, begin: int, end: int) -> Iterator[UnackedRange]:
        """Yield the whole ranges that lie at least partly in pull sequences `[begin, end)`."""
        unacked = self.unacked
        for at in range(self._find(begin), len(unacked)):
            if unacked[at].pull >= end:
                return
            yield unacked[at]

    def take(self, begin: int, end: int) -> list[UnackedRange]:
        """Let go of pull sequences `[begin, end)`; return what that was."""
        taken: list[UnackedRange] = []
        kept: list[UnackedRange] = []
        start = at = self._find(begin)
        while at < len(self.unacked) and self.unacked[at].pull < end:
            one = self.unacked[at]
            taken.append(one.part(begin, end))
            if begin > one.pull:
                kept.append(one.part(one.pull, begin))
            if end < one.pull_end:
                kept.append(one.part(end, one.pull_end))
            at += 1
        self.unacked[start:at] = kept
        return taken

    def range_of(self, pull_sequence: int) -> UnackedRange:
        """Return the range that an un-acked pull sequence is in."""
        return self.unacked[self._find(pull_sequence)]

    def _find(self, begin: int) -> int:
        """Return the place of the first range that ends behind `begin`."""
        at = bisect_right(self.unacked, begin, key=_PULL) - 1
        return at + (at < 0 or self.unacked[at].pull_end <= begin)


@dataclass(slots=True)
class Group:
    """A group's progress on one subject."""

    position: int
    floor: int = 0
    """First pull sequence that was given to none of the consumers that left."""
    requeued: Requeued = field(default_factory=Requeued)
    """Messages before `position` that no consumer has now."""
    consumers: dict[str, Consumer] = field(default_factory=dict)
    is_broadcast: bool = False
    """It is one consumer's own, which gets all messages."""
    left_ms: int = 0
    """When the group began, or the last consumer left."""
    began: int = 0
    """Offset of the frame that put the group where it began, the first time or by moving it."""

    def requeue(self, taken: UnackedRange, *, due_ms: int = 0, attempts: int, suspected: int) -> None:
        """Let messages wait for whoever gets them next."""
        self.requeued.add(RequeuedRange(taken.first, taken.count, attempts, due_ms, suspected))

    def unconsumed(self, end: int) -> list[Range]:
        """Return what the group has not acked of a subject that ends at sequence `end`; in no order."""
        found = [(one.first, one.end) for one in self.requeued]
        for consumer in self.consumers.values():
            found += [(one.first, one.end) for one in consumer.unacked]
        return [*found, (self.position, end)] if self.position < end else found

    def first_unconsumed(self, end: int) -> int | None:
        """Return the first sequence of `unconsumed`, without listing all; None if there is none."""
        firsts = [one.first for consumer in self.consumers.values() for one in consumer.unacked]
        if (requeued := self.requeued.first) is not None:
            firsts.append(requeued)
        return min([*firsts, self.position] if self.position < end else firsts, default=None)

    def state_of(self, sequence: int) -> MessageState:
        """Return where in its life a stored message is; one that is dead is acked here."""
        if sequence >= self.position:
            return MessageState.NEW
        if self.requeued.overlapping(sequence, sequence + 1):
            return MessageState.REQUEUED
        unacked = (one for consumer in self.consumers.values() for one in consumer.unacked)
        is_delivered = any(one.first <= sequence < one.end for one in unacked)
        return MessageState.DELIVERED if is_delivered else MessageState.ACKED
