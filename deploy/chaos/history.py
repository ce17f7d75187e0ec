"""Core. What happened during a run, as the clients and the nemesis saw it. Times are seconds of CLOCK_MONOTONIC."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

STORED, REFUSED, UNKNOWN = "stored", "refused", "unknown"


class Sent(NamedTuple):
    """One message and its receipt. `sender` sends one call after the other, so its messages have an order."""

    id: str
    subject: str
    sender: str
    begun: float
    done: float
    outcome: str
    group: str = ""
    sequence: int = -1


class Delivered(NamedTuple):
    """One message handed to an application. `started`: when the process of this consumer began."""

    id: str
    subject: str
    group: str
    sequence: int
    consumer: str
    started: float
    at: float


class Acked(NamedTuple):
    """The broker answered the ack of this message."""

    id: str
    at: float


class Fault(NamedTuple):
    """What the nemesis did; `end` is when the cluster was well again."""

    name: str
    group: str
    begin: float
    end: float


@dataclass
class History:
    lease_s: float = 2.0
    """Of consumers: what they hold comes again when they were silent for so long."""
    sent: list[Sent] = field(default_factory=list)
    delivered: list[Delivered] = field(default_factory=list)
    acked: list[Acked] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    marked: list[Fault] = field(default_factory=list)
    """Times in which a group was marked readonly: from when the mark should be everywhere to its removal."""
    slave_stopped: list[Fault] = field(default_factory=list)
    """Times in which a group's only slave ran no instruction, hence stored nothing."""

    def acknowledged_alone(self) -> Iterator[tuple[Sent, Fault]]:
        """Yield messages that were sent and acknowledged while the slave of their group was stopped."""
        for stop in self.slave_stopped:
            for message in self.sent:
                if (
                    message.outcome == STORED
                    and message.group == stop.group
                    and stop.begin < message.begun < message.done < stop.end
                ):
                    yield message, stop

    def read_consumer(self, lines: Iterable[str]) -> None:
        """Add what a consumer process wrote down; its last line may be torn by a kill."""
        for line in lines:
            match line.split(" ") if line.endswith("\n") else []:
                case ["D", id, subject, group, sequence, consumer, started, at]:
                    self.delivered.append(
                        Delivered(id, subject, group, int(sequence), consumer, float(started), float(at))
                    )
                case ["A", id, at]:
                    self.acked.append(Acked(id, float(at)))
