"""Core. History of a run: messages with their outcomes, deliveries with their decisions, faults and windows."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from qmq.deploy.chaos.records import (
    SLAVE_STOPPED,
    STORED,
    UNKNOWN,
    DeadLetter,
    Decided,
    Fault,
    Gone,
    Got,
    Joined,
    Kept,
    MasterChanged,
    Position,
    Record,
    Sending,
    Sent,
    Stalled,
    Window,
)

CAUSE_S = 10.0
"""Longest time of a message in a consumer's buffer. A fault in this time before the delivery explains its
redelivery.
"""


class Place(NamedTuple):
    """Place of a message."""

    subject: str
    broker_group: str
    sequence: int


class Track(NamedTuple):
    """One consumer group's way through one subject in one broker group."""

    subject: str
    group: str
    broker_group: str


@dataclass(slots=True, eq=False)
class SentMessage:
    """A message and its outcome; without a record of the outcome, it is unknown."""

    sending: Sending
    sent: Sent | None = None

    @property
    def outcome(self) -> str:
        return UNKNOWN if self.sent is None else self.sent.outcome

    @property
    def place(self) -> Place:
        assert self.sent is not None
        return Place(self.sending.subject, self.sent.broker_group, self.sent.sequence)

    def __str__(self) -> str:
        return f"{self.sending}, {self.sent or 'no outcome'}"


@dataclass(slots=True, eq=False)
class Delivery:
    """Delivery of a message to an application."""

    got: Got
    decided: Decided | None = None
    kept_at: float | None = None

    @property
    def is_kept(self) -> bool:
        return self.kept_at is not None

    def __str__(self) -> str:
        kept = "not confirmed" if self.kept_at is None else f"confirmed at {self.kept_at:.3f}"
        return f"{self.got}, {self.decided or 'not decided'}, {kept}"


@dataclass
class History:
    """Records of one run, by message, consumer and broker group."""

    messages: dict[str, SentMessage] = field(default_factory=dict)
    deliveries: dict[Track, dict[int, list[Delivery]]] = field(default_factory=lambda: defaultdict(dict))
    """By sequence; of each, in the order of the broker, see `_rank`."""
    by_consumer: dict[str, dict[int, Delivery]] = field(default_factory=lambda: defaultdict(dict))
    joined: list[Joined] = field(default_factory=list)
    positions: list[Position] = field(default_factory=list)
    dead: dict[Track, dict[int, list[DeadLetter]]] = field(default_factory=lambda: defaultdict(dict))
    faults: list[Fault] = field(default_factory=list)
    windows: list[Window] = field(default_factory=list)
    masters: list[MasterChanged] = field(default_factory=list)
    sent_twice: list[str] = field(default_factory=list)
    _gone: dict[str, Gone] = field(default_factory=dict)
    """By consumer: the begin of its end."""
    _gone_at: dict[str, float] = field(default_factory=dict)
    """By consumer: when it had ended; a consumer that leaves beside a broker's fault takes many seconds."""
    _stalls: dict[str, list[Stalled]] = field(default_factory=lambda: defaultdict(list))

    def read(self, records: Iterable[Record]) -> None:
        """Add the records of one file in their order: a delivery precedes its decision."""
        for record in records:
            match record:
                case Sending():
                    if record.id in self.messages:
                        self.sent_twice.append(record.id)
                    self.messages[record.id] = SentMessage(record)
                case Sent():
                    self.messages[record.id].sent = record
                case Got():
                    self._got(record)
                case Decided():
                    self.by_consumer[record.consumer][record.number].decided = record
                case Kept():
                    for number in record.numbers:
                        self._kept(self.by_consumer[record.consumer][number], record.at)
                case Joined():
                    self.joined.append(record)
                case Position():
                    self.positions.append(record)
                case Stalled():
                    self._stalls[record.consumer].append(record)
                case Gone():
                    self._gone[record.consumer] = min(record, self._gone.get(record.consumer, record))
                    self._gone_at[record.consumer] = max(record.at, self._gone_at.get(record.consumer, record.at))
                case Fault():
                    self.faults.append(record)
                case Window():
                    self.windows.append(record)
                case MasterChanged():
                    self.masters.append(record)
                case DeadLetter():
                    track = Track(record.subject, record.group, record.broker_group)
                    self.dead[track].setdefault(record.sequence, []).append(record)

    def _got(self, got: Got) -> None:
        delivery = Delivery(got)
        self.by_consumer[got.consumer][got.number] = delivery
        others = self.deliveries[_track(got)].setdefault(got.sequence, [])
        others.insert(bisect_right(others, _rank(delivery), key=_rank), delivery)

    def _kept(self, delivery: Delivery, at: float) -> None:
        delivery.kept_at = at
        self.deliveries[_track(delivery.got)][delivery.got.sequence].sort(key=_rank)

    def sent_within(self, kind: str) -> Iterator[tuple[SentMessage, Window]]:
        """Yield messages that were sent and acknowledged within a window of their broker group."""
        for window in self.windows:
            for message in self.messages.values() if window.kind == kind else ():
                sending, sent = message.sending, message.sent
                if sent is None or sent.outcome != STORED or sent.broker_group != window.broker_group:
                    continue
                if window.begin < sending.at < sent.at < window.end:
                    yield message, window

    def acknowledged_by_one_copy(self) -> Iterator[tuple[SentMessage, Window]]:
        """Yield messages that were acknowledged while the slave of their broker group was stopped."""
        return self.sent_within(SLAVE_STOPPED)

    @property
    def got(self) -> Iterator[Delivery]:
        for deliveries in self.by_consumer.values():
            yield from deliveries.values()

    @property
    def consumer_faults(self) -> list[str]:
        """Faults of consumers: killed, left, stalled."""
        return [gone.how for gone in self._gone.values()] + [
            "stalled" for stalls in self._stalls.values() for _ in stalls
        ]

    @property
    def groups(self) -> dict[tuple[str, str], frozenset[str]]:
        """Selected tags by (subject, group)."""
        return {(member.subject, member.group): frozenset(member.tags) for member in self.joined}

    def cause(self, delivery: Delivery, before: float) -> str | None:
        """Return the cause of a redelivery without a nack, until `before`; None if there is none."""
        got = delivery.got
        if (gone := self._gone.get(got.consumer)) and gone.at <= before:
            return f"consumer {gone.how}"
        since = got.at - CAUSE_S
        if any(stall.begin <= before and stall.end >= since for stall in self._stalls[got.consumer]):
            return "consumer stalled"
        for fault in self.faults:
            if fault.broker_group in ("", got.broker_group) and fault.begin <= before and fault.end >= since:
                return fault.name
        return None

    def was_left(self, subject: str, group: str, at: float) -> bool:
        """Return whether a consumer of the group was leaving at `at`, or left or vanished shortly before; messages it
        had not begun have no order.
        """
        members = {member.consumer for member in self.joined if (member.subject, member.group) == (subject, group)}
        return any(
            gone.at <= at <= self._gone_at[name] + 2 * CAUSE_S for name, gone in self._gone.items() if name in members
        )

    def may_have_lost(self, broker_group: str, begin: float, end: float) -> bool:
        """Return whether a decision of the master within `begin..end` may be lost with its only copy."""
        return any(
            fault.loses and fault.broker_group in ("", broker_group) and fault.begin <= end and fault.end >= begin
            for fault in self.faults
        )


def _track(got: Got) -> Track:
    return Track(got.subject, got.group, got.broker_group)


def _rank(delivery: Delivery) -> tuple[int, bool, float]:
    """Return the broker's order of deliveries. A consumer that lost its lease unnoticed may begin a message late, with
    the attempt number of its successor; the broker confirms only the successor's decision.
    """
    return delivery.got.times, delivery.kept_at is not None, delivery.got.at
