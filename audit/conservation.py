"""Core. Conservation of messages: each message of a consumer group is in exactly one state.

    stored = acked + dead + in flight + requeued + passed + expired + overflowed + never delivered

Acked, dead, passed-over, expired and overflowed messages are summed from the frames that settle them. Messages in
flight, requeued, or not delivered yet come from the final state of the fold. A message in no state, or in two, breaks
the equation.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from typing import Any, NamedTuple

from qmq.audit.findings import HOUR_MS
from qmq.log.frame import Frame, FrameKind
from qmq.log.group import Consumer, Group
from qmq.log.progress_frame import DEAD, EXPIRED, OVERFLOWED, PASSED, Progress

STATES = ("acked", "dead", "in_flight", "requeued", "passed", "expired", "overflowed", "never")
WITHOUT_A_CONSUMER = {PASSED: "passed", EXPIRED: "expired", OVERFLOWED: "overflowed"}
SETTLED = {EXPIRED: "expired", DEAD: "dead"}
CLOCKS_MS = 60_000
"""Maximum difference between clocks of brokers and metaservers."""
ENTRIES_MAX = 10_000
"""Above this number of ranges of one group, adjacent ones are joined."""


class Range(NamedTuple):
    """Messages `[begin, end)` of one state."""

    begin: int
    end: int
    state: str


class Account:
    """Settled messages of one consumer group."""

    def __init__(self, begin: int) -> None:
        self.begin = begin
        """First message that counts: where the group began, or where it was moved to."""
        self.began_ms = 0
        """Time when the group began in the cluster; 0 if unknown, or if it was moved."""
        self.nacked = 0
        self._settled: list[Range] = []
        self._joined = ENTRIES_MAX

    def take(self, frame: Frame, progress: Progress, group: Group | None) -> None:
        """Take a progress frame before the fold does."""
        if frame.kind == FrameKind.POSITION and progress.entries and not progress.consumer:
            (self.begin, _, self.began_ms) = progress.entries[0]
            self._settled = []
            self.nacked = 0
        elif frame.kind == FrameKind.PULL:
            for number, sequence, messages in progress.entries:
                if (state := WITHOUT_A_CONSUMER.get(number)) is not None:
                    self._settle(sequence, sequence + messages, state)
        elif group is not None and (consumer := group.consumers.get(progress.consumer)) is not None:
            for begin, end, settled in progress.entries:
                for low, high in _unacked_messages(consumer, begin, end):
                    if frame.kind == FrameKind.ACK:
                        self._settle(low, high, SETTLED.get(settled, "acked"))
                    elif frame.kind == FrameKind.NACK:
                        self.nacked += high - low

    def _settle(self, begin: int, end: int, state: str) -> None:
        last = self._settled[-1] if self._settled else None
        if last is not None and last.end == begin and last.state == state:
            self._settled[-1] = Range(last.begin, end, state)
            return
        self._settled.append(Range(begin, end, state))
        if len(self._settled) > self._joined:
            self._settled = list(_joined(sorted(self._settled)))
            self._joined = max(ENTRIES_MAX, 2 * len(self._settled))

    def ranges(self, group: Group, first: int, end: int) -> list[Range]:
        """Return the ranges of messages from `first` on with their state, in order.

        Ranges overlap or leave gaps if the equation is broken.
        """
        begin = max(self.begin, first)
        found = [*self._settled, Range(group.position, end, "never")]
        found += [Range(requeued.first, requeued.end, "requeued") for requeued in group.requeued]
        for consumer in group.consumers.values():
            found += [Range(unacked.first, unacked.end, "in_flight") for unacked in consumer.unacked]
        cut = (Range(max(low, begin), min(high, end), state) for low, high, state in found)
        return list(_joined(sorted(part for part in cut if part.begin < part.end)))


def _unacked_messages(consumer: Consumer, begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield the message ranges that a consumer has unacked under these pull sequences."""
    for unacked in consumer.unacked:
        low, high = max(begin, unacked.pull), min(end, unacked.pull_end)
        if low < high:
            yield unacked.first + low - unacked.pull, unacked.first + high - unacked.pull


def _joined(ranges: list[Range]) -> Iterator[Range]:
    last: Range | None = None
    for part in ranges:
        if last is not None and last.end == part.begin and last.state == part.state:
            last = Range(last.begin, part.end, last.state)
            continue
        if last is not None:
            yield last
        last = part
    if last is not None:
        yield last


def broken_at(ranges: list[Range], begin: int, end: int) -> tuple[int, str] | None:
    """Return (sequence, problem) of the first message in no state or in two; None if there is none."""
    at = begin
    for part in ranges:
        if part.begin > at:
            return at, "in no state"
        if part.begin < at:
            return part.begin, f"{part.state} and something else"
        at = part.end
    return None if at >= end else (at, "in no state")


def skipped_at(account: Account, hours: list[tuple[int, int]]) -> int | None:
    """Return the last message before the group's position if the group lost it, else None.

    It is lost if its hour began after the group had begun in the cluster. None also if that time is unknown.

    Args:
        hours: as of `per_hour`.
    """
    at = bisect_right(hours, (account.begin - 1, 1 << 63)) - 1
    lost = account.begin > 0 and account.began_ms > 0 and at >= 0
    return account.begin - 1 if lost and hours[at][1] * HOUR_MS > account.began_ms + CLOCKS_MS else None


def per_hour(ranges: list[Range], begin: int, end: int, hours: list[tuple[int, int]]) -> Iterator[dict[str, Any]]:
    """Yield {hour, stored, each state} of the messages `[begin, end)`.

    Args:
        hours: (first sequence, hour of storing) in order.
    """
    if begin >= end:
        return
    firsts = [first for first, _ in hours]
    cuts = sorted({begin, end, *(first for first in firsts if begin < first < end)})
    totals: dict[int, dict[str, Any]] = {}
    for low, high in zip(cuts, cuts[1:]):
        at = bisect_right(firsts, low) - 1
        hour = hours[max(at, 0)][1] if hours else 0
        row = totals.setdefault(hour, {"hour": hour, "stored": 0} | dict.fromkeys(STATES, 0))
        row["stored"] += high - low
        for part in ranges:
            row[part.state] += max(0, min(high, part.end) - max(low, part.begin))
    yield from (totals[hour] for hour in sorted(totals))
