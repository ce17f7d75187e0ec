"""Core. Records of clients and nemesis, a line of JSON each. Times are seconds of CLOCK_MONOTONIC.

A process writes an intent before the action and a result after it, each to the file before it continues. A killed
process leaves an open entry, never a gap.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, get_args

STORED, REFUSED, UNKNOWN = "stored", "refused", "unknown"
"""Outcomes of a message that was sent."""
DONE, RETRY, DEAD = "done", "retry", "dead"
"""Decisions of an application about a message: ack, nack, dead letter."""
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
    """Outcome of a sent message; broker group and sequence only if it is stored."""

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
    """Requested tags; a message with any of them is delivered. None: all messages."""


class Got(NamedTuple):
    """Delivery of a message to the application; `number` counts the consumer's deliveries."""

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
    """The application's decision, before the broker received it."""

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
    """The acked position in a broker's answer. `begins`: the consumer had subscribed with nothing unacked."""

    at: float
    consumer: str
    subject: str
    group: str
    broker_group: str
    acked_end: int
    begins: bool


class Stalled(NamedTuple):
    """Pause of the consumer's process."""

    begin: float
    end: float
    consumer: str


class Gone(NamedTuple):
    """The consumer is about to be killed, or to leave in an orderly way."""

    at: float
    consumer: str
    how: str


class Fault(NamedTuple):
    """Fault of a broker group ("": of all); `end` is the time when the cluster had recovered.

    `loses`: the only copy with the newest decisions may be lost. Messages are always on two copies; decisions are on
    one while the slave is missing.
    """

    begin: float
    end: float
    name: str
    broker_group: str
    loses: bool


class Window(NamedTuple):
    """Time in which a state held for a broker group, or for the clients (""); it excuses nothing.

    `MARKED` begins when the mark has reached all clients and ends with its removal. In `SLAVE_STOPPED` the group's only
    slave executes no instruction, so it stores nothing.
    """

    begin: float
    end: float
    kind: str
    broker_group: str


class MasterChanged(NamedTuple):
    """A consumer's event of a new master. It excuses nothing; it helps the reader of a finding."""

    at: float
    consumer: str
    broker_group: str
    term: int


class DeadLetter(NamedTuple):
    """Dead letter found at the end, of the message `sequence` of `subject` in `group`."""

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
    """Yield the records of a file; a kill may have torn its last line. Equal strings share memory, which would else
    limit the length of a history.
    """
    for line in lines:
        if line.endswith("\n"):
            kind, *fields = json.loads(line)
            yield _KINDS[kind](*[sys.intern(field) if type(field) is str else field for field in fields])
