"""Core. Progress of a consumer group: delivered messages with their consumers, and messages to be delivered again.

Part of the fold (qmq.log.fold), which alone changes it. The states of one message in the group are a table, `LIFE`:

    state       place in the group's state                                          fields in use
    NEW         at or behind `Group.position`                                       none
    DELIVERED   in an `UnackedRange` of one `Consumer`                              pull, attempts, suspected
    REQUEUED    in a `RequeuedRange` of the group                                   attempts, suspected, due_ms
    ACKED       before the position, and in no range                                none
    DEAD        as ACKED; a copy is in the group's dead-letter subject              none here; the copy's properties

A message is in one state only. Each event is a progress frame. The fold rejects an event that the table lacks; a log
with such an event is damaged. An operator's move of a group begins it anew: all messages are NEW or ACKED.

`attempts` rises with each delivery. It is lowered again if the consumer leaves, drains or vanishes without having begun
with the message. If the consumer vanished, `suspected` rises instead, because the message may have been the cause.

Keeps I21.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from operator import itemgetter
from typing import NamedTuple

from qmq import ranges
from qmq.errors import InvalidAck
from qmq.log.requeued import Requeued, RequeuedRange
from qmq.ranges import Range
from qmq.states import TransitionTable

MASTERSHIP_BITS = 32
"""A pull sequence's upper bits are the mastership's epoch, so a late ack never hits other messages (W2, W13).

A count of masterships would not suffice: two histories that part may have equal counts, and a lone master delivers
messages.
"""

_PULL = itemgetter(0)


class MessageState(Enum):
    NEW = auto()
    DELIVERED = auto()
    REQUEUED = auto()
    ACKED = auto()
    DEAD = auto()


class MessageEvent(Enum):
    DELIVER = auto()
    """a pull frame numbers it for a consumer"""
    PASS_OVER = auto()
    """a pull frame skips it for good: filtered out, deleted by retention, expired, or too many wait"""
    DEFER = auto()
    """a pull frame skips it for now: an earlier message of its order key is not settled"""
    ACK = auto()
    NACK = auto()
    """it is delivered again after a delay; this delivery counts, unless it was not begun"""
    LEAVE = auto()
    """its consumer left or vanished"""
    GIVE_UP = auto()
    """a copy is a dead letter, and its ack follows"""


_S, _E = MessageState, MessageEvent

LIFE = TransitionTable(
    MessageState.NEW,
    {
        (_S.NEW, _E.DELIVER): _S.DELIVERED,
        (_S.NEW, _E.PASS_OVER): _S.ACKED,
        (_S.NEW, _E.DEFER): _S.REQUEUED,
        (_S.DELIVERED, _E.ACK): _S.ACKED,
        (_S.DELIVERED, _E.NACK): _S.REQUEUED,
        (_S.DELIVERED, _E.LEAVE): _S.REQUEUED,
        (_S.DELIVERED, _E.GIVE_UP): _S.DEAD,
        (_S.REQUEUED, _E.DELIVER): _S.DELIVERED,
        (_S.REQUEUED, _E.PASS_OVER): _S.ACKED,
        (_S.REQUEUED, _E.DEFER): _S.REQUEUED,
    },
)


class UnackedRange(NamedTuple):
    """Messages that a consumer has: `count` of them, from sequence `first` and pull sequence `pull` on."""

    pull: int
    first: int
    count: int  # type: ignore[assignment]  # shadows tuple.count
    attempts: int
    """Deliveries that count, this one included."""
    suspected: int = 0
    """Deliveries to consumers that vanished, of which it is unknown whether a handler began."""

    @property
    def pull_end(self) -> int:
        return self.pull + self.count

    @property
    def end(self) -> int:
        return self.first + self.count

    @property
    def deliveries(self) -> int:
        """Number of deliveries, counted or not."""
        return self.attempts + self.suspected

    def part(self, begin: int, end: int) -> UnackedRange:
        """Return the part of this range in pull sequences `[begin, end)`, which overlap it."""
        pull = max(self.pull, begin)
        return self._replace(pull=pull, first=self.first + pull - self.pull, count=min(self.pull_end, end) - pull)


@dataclass(slots=True)
class Consumer:
    """Progress of one consumer. `unacked` ascends by pull sequence."""

    next_pull: int = 0
    unacked: list[UnackedRange] = field(default_factory=list)
    mastership_ends: list[int] = field(default_factory=list)
    """End of the pull sequences of each mastership that may have unacked ones."""

    @property
    def acked_end(self) -> int:
        """Pull sequence below which everything is settled. It only grows."""
        return self.unacked[0].pull if self.unacked else self.next_pull

    @property
    def unacked_messages(self) -> int:
        return sum(span.count for span in self.unacked)

    def has_as_many_as(self, limit: int) -> bool:
        """Return whether at least `limit` messages are unacked, mostly without counting them."""
        return self.next_pull - self.acked_end >= limit and self.unacked_messages >= limit

    def deliver(self, new: UnackedRange) -> None:
        """Add delivered messages, behind all others."""
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
        """Return the ranges of pull sequences with more deliveries than `limit`; 0 means no limit."""
        return [(span.pull, span.pull_end) for span in self.unacked if limit and span.deliveries > limit]

    def unacked_below(self, end: int, limit: int) -> list[Range]:
        """Return the unacked pull sequences below `end` with at most `limit` deliveries."""
        found: list[Range] = []
        for span in self.unacked:
            if span.pull >= end:
                break
            if not limit or span.deliveries <= limit:
                ranges.add(found, span.pull, min(end, span.pull_end))
        return found

    def was_given(self, end: int) -> bool:
        """Return whether this history delivered or settled all pull sequences below `end`, within the mastership of
        `end`.
        """
        mastership = end - 1 >> MASTERSHIP_BITS
        return end <= self.acked_end or any(
            end <= given and given - 1 >> MASTERSHIP_BITS == mastership for given in self.mastership_ends
        )

    def unacked_in(self, begin: int, end: int) -> list[Range]:
        """Return the parts of pull sequences `[begin, end)` that are not settled yet.

        Raises:
            InvalidAck: the range is empty, or was not delivered.
        """
        self.check_given(begin, end)
        found: list[Range] = []
        for span in self.overlapping(begin, end):
            ranges.add(found, max(begin, span.pull), min(end, span.pull_end))
        return found

    def check_given(self, begin: int, end: int) -> None:
        """Raise InvalidAck if the range is empty, or was not delivered."""
        if not begin < end:
            raise InvalidAck(f"[{begin}, {end}) is empty")
        if end > self.next_pull:
            raise InvalidAck(f"[{begin}, {end}) ends past {self.next_pull}, the next pull sequence to deliver")

    def overlapping(self, begin: int, end: int) -> Iterator[UnackedRange]:
        """Yield the whole ranges that overlap pull sequences `[begin, end)`."""
        unacked = self.unacked
        for at in range(self._find(begin), len(unacked)):
            if unacked[at].pull >= end:
                return
            yield unacked[at]

    def take(self, begin: int, end: int) -> list[UnackedRange]:
        """Remove pull sequences `[begin, end)` from the unacked ones; return the removed ranges."""
        taken: list[UnackedRange] = []
        kept: list[UnackedRange] = []
        start = at = self._find(begin)
        while at < len(self.unacked) and self.unacked[at].pull < end:
            span = self.unacked[at]
            taken.append(span.part(begin, end))
            if begin > span.pull:
                kept.append(span.part(span.pull, begin))
            if end < span.pull_end:
                kept.append(span.part(end, span.pull_end))
            at += 1
        self.unacked[start:at] = kept
        return taken

    def range_of(self, pull_sequence: int) -> UnackedRange:
        """Return the range of an unacked pull sequence."""
        return self.unacked[self._find(pull_sequence)]

    def _find(self, begin: int) -> int:
        """Return the index of the first range that ends behind `begin`."""
        at = bisect_right(self.unacked, begin, key=_PULL) - 1
        return at + (at < 0 or self.unacked[at].pull_end <= begin)


@dataclass(slots=True)
class Group:
    """A group's progress on one subject."""

    position: int
    floor: int = 0
    """First pull sequence above those delivered to departed consumers."""
    requeued: Requeued = field(default_factory=Requeued)
    """Messages before `position` that wait to be delivered again."""
    consumers: dict[str, Consumer] = field(default_factory=dict)
    is_broadcast: bool = False
    """Whether this is the group of one broadcast consumer, which gets all messages."""
    left_ms: int = 0
    """Time at which the group began, or its last consumer left."""
    began: int = 0
    """Offset of the position frame that began or moved the group."""

    def requeue(self, taken: UnackedRange, *, due_ms: int = 0, attempts: int, suspected: int) -> None:
        """Requeue messages for the next consumer."""
        self.requeued.add(RequeuedRange(taken.first, taken.count, attempts, due_ms, suspected))

    def unconsumed(self, end: int) -> list[Range]:
        """Return the ranges not acked of a subject that ends at sequence `end`; in no order."""
        found = [(span.first, span.end) for span in self.requeued]
        for consumer in self.consumers.values():
            found += [(span.first, span.end) for span in consumer.unacked]
        return [*found, (self.position, end)] if self.position < end else found

    def first_unconsumed(self, end: int) -> int | None:
        """Return the first sequence of `unconsumed(end)`, without a list of all; None if there is none."""
        firsts = [span.first for consumer in self.consumers.values() for span in consumer.unacked]
        if (requeued := self.requeued.first) is not None:
            firsts.append(requeued)
        return min([*firsts, self.position] if self.position < end else firsts, default=None)

    def state_of(self, sequence: int) -> MessageState:
        """Return the state of a stored message; a dead one counts as ACKED here."""
        if sequence >= self.position:
            return MessageState.NEW
        if self.requeued.overlapping(sequence, sequence + 1):
            return MessageState.REQUEUED
        unacked = (span for consumer in self.consumers.values() for span in consumer.unacked)
        is_delivered = any(span.first <= sequence < span.end for span in unacked)
        return MessageState.DELIVERED if is_delivered else MessageState.ACKED
