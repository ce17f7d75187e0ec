"""Core. What clients and the nemesis write down: one record a line. Times are seconds of CLOCK_MONOTONIC.

A record of what is about to happen is written before it happens, one of what has happened afterwards, and both are in
the file before anything else goes on. So a process that is killed leaves an open end, never a gap.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, get_args

STORED, REFUSED, UNKNOWN = "stored", "refused", "unknown"
"""Outcomes of a message that was sent."""
DONE, RETRY, DEAD = "done", "retry", "dead"
"""What an application decides about a message that it was given: an ack, a nack, a dead letter."""
KILLED, LEFT = "killed", "left"
MARKED, SLAVE_STOPPED = "marked readonly", "slave stopped"
"""Kinds of windows that a rule reads; those of consumers begin with `OF_CONSUMERS`."""
OF_CONSUMERS = "consumer "


class Sending(NamedTuple):
    """A message is about to be sent. `sender` sends one call after the other, in the order of these records."""

    at: float
    sender: str
    subject: str
    id: str
    order_key: str
    tags: list[str]
    content: int
    """Checksum of everything that must arrive."""


class Sent(NamedTuple):
    """Its outcome; broker group and sequence only if it is stored."""

    at: float
    id: str
    outcome: str
    broker_group: str
    sequence: int


class Joined(NamedTuple):
    """A consumer begins to consume. `consumer` names one life of one process; `concurrency` 1 means: one by one."""

    at: float
    consumer: str
    subject: str
    group: str
    concurrency: int
    tags: list[str]
    """It asks for messages with any of these; none: for all."""


class Got(NamedTuple):
    """The application is given a message, its `number` among those of the consumer."""

    at: float
    consumer: str
    number: int
    subject: str
    group: str
    broker_group: str
    sequence: int
    pull_sequence: int
    times: int
    id: str
    content: int


class Decided(NamedTuple):
    """The application decided; the broker has not heard of it yet."""

    at: float
    consumer: str
    number: int
    decision: str


class Kept(NamedTuple):
    """The broker has confirmed these decisions."""

    at: float
    consumer: str
    numbers: list[int]


class Position(NamedTuple):
    """A broker told a consumer what it counts as settled. `begins`: the consumer had said that it holds nothing."""

    at: float
    consumer: str
    subject: str
    group: str
    broker_group: str
    acked_end: int
    begins: bool


class Stalled(NamedTuple):
    """The consumer's process stood still."""

    begin: float
    end: float
    consumer: str


class Gone(NamedTuple):
    """The consumer is about to be killed, or to leave in an orderly way."""

    at: float
    consumer: str
    how: str


class Fault(NamedTuple):
    """What the nemesis did to a broker group ("": to all); `end` is when the cluster was well again.

    `loses`: a copy of the log was given up that may have been the only one with the newest decisions. Messages are
    never on one copy alone; decisions are, while the slave is missing.
    """

    begin: float
    end: float
    name: str
    broker_group: str
    loses: bool


class Window(NamedTuple):
    """Time in which something held for a broker group, or for the clients (""); it excuses nothing.

    `MARKED` lasts from when the mark is known everywhere to its removal. In `SLAVE_STOPPED` the only slave of the group
    executes no instruction, so it stores nothing.
    """

    begin: float
    end: float
    kind: str
    broker_group: str


class MasterChanged(NamedTuple):
    """A consumer heard of another master. Nothing is excused by it; it helps whoever reads a finding."""

    at: float
    consumer: str
    broker_group: str
    term: int


class DeadLetter(NamedTuple):
    """At the end a dead letter was found, of the message `sequence` of `subject` in `group`."""

    at: float
    subject: str
    group: str
    broker_group: str
    sequence: int
    id: str
    times: int


Record = (
    Sending
    | Sent
    | Joined
    | Got
    | Decided
    | Kept
    | Position
    | Stalled
    | Gone
    | Fault
    | Window
    | MasterChanged
    | DeadLetter
)
_KINDS: dict[str, Any] = {kind.__name__: kind for kind in get_args(Record)}
_encode = json.JSONEncoder(separators=(",", ":")).encode


def line_of(record: Record) -> str:
    """Return a record as a line of JSON: its kind, then its fields."""
    return f"{_encode((type(record).__name__, *record))}\n"


def records_of(lines: Iterable[str]) -> Iterator[Record]:
    """Yield the records of a file; its last line may be torn by a kill. Of equal strings one is kept: memory is what
    bounds the length of a history that can be judged."""
    for line in lines:
        if line.endswith("\n"):
            kind, *fields = json.loads(line)
            yield _KINDS[kind](*[sys.intern(field) if type(field) is str else field for field in fields])
