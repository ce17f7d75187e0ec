"""Core. A numbered batch until its outcome is known: one life for producer, delay server and watchdog.

A batch has a number of one broker group, which remembers the last 64 numbers of each producer and answers a repeated
one as it did the first time. So a batch is sent under one number to one group until it is known whether that stored it:

    QUEUED  (begins here)
        SENT       -> IN_FLIGHT
        TAKEN_OVER -> OUTCOME_UNKNOWN
        GAVE_UP    -> NOT_STORED
    IN_FLIGHT
        Stored     -> STORED
        NotStored  -> NOT_STORED
        Unknown    -> OUTCOME_UNKNOWN
        GAVE_UP    -> GIVEN_UP
    OUTCOME_UNKNOWN
        SENT       -> REPEATED
        GAVE_UP    -> GIVEN_UP
    REPEATED
        Stored     -> STORED
        NotStored  -> OUTCOME_UNKNOWN
        Unknown    -> OUTCOME_UNKNOWN
        GAVE_UP    -> GIVEN_UP
    STORED
    NOT_STORED
    GIVEN_UP

What follows is its owner's rule: a batch that is not stored may go to another group under a number of that group, be
refused, or wait; one given up may be stored, and what it holds is sent again twice at worst.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import NamedTuple, Protocol

from qmq.codec import Buffer
from qmq.errors import AccessError, AskAnotherBroker, CallError, QmqError, SubjectFull
from qmq.states import Machine, TransitionTable


class NumberedBatch(NamedTuple):
    """Messages of one subject; `blocks`, back to back, are the body of a PRODUCE, with its labels if `flags` say so.

    `crc`: CRC-32 of the body. The same (producer, number) must stand for the same messages for ever.
    """

    producer: int
    number: int
    subject: str
    count: int  # type: ignore[assignment]  # shadows tuple.count
    crc: int
    flags: int
    blocks: Sequence[Buffer]


class Stored(NamedTuple):
    """Fsynced on enough copies, now or by an earlier attempt.

    `refused`: (position, reason) of messages that the group never takes as they are; all others are stored.
    """

    first_sequence: int
    stored: int
    refused: list[tuple[int, str]]


class NotStored(NamedTuple):
    """This attempt stored nothing. `error` says whose fault it is: a `CallError` is the batch's, others pass."""

    error: QmqError


class Unknown(NamedTuple):
    """This attempt may have stored the batch: repeat the same one to the same group."""

    reason: str


Answer = Stored | NotStored | Unknown
"""How one attempt ended. It says nothing about the attempts before, unless it is `Stored`."""
Done = Callable[[Answer], None]


def answer_of(error: QmqError) -> NotStored | Unknown:
    """Say what an error proves about its attempt; neither a refusal nor a fault of the batch: nothing."""
    if isinstance(error, AskAnotherBroker | CallError | AccessError | SubjectFull):
        return NotStored(error)
    return Unknown(str(error))


class BatchState(Enum):
    QUEUED = auto()  # no attempt was made
    IN_FLIGHT = auto()  # the first attempt has no answer yet
    OUTCOME_UNKNOWN = auto()  # an attempt may have stored it; it is to be repeated
    REPEATED = auto()  # in flight again; only `Stored` says anything about the attempts before
    STORED = auto()
    NOT_STORED = auto()
    GIVEN_UP = auto()  # no attempt said in time whether it is stored


class BatchEvent(Enum):
    """What happens to a batch besides the answers to its attempts."""

    SENT = auto()
    TAKEN_OVER = auto()  # its owner had it from an earlier one, which may have sent it
    GAVE_UP = auto()  # its time is over


BATCH_LIFE = TransitionTable(
    BatchState.QUEUED,
    {
        (BatchState.QUEUED, BatchEvent.SENT): BatchState.IN_FLIGHT,
        (BatchState.QUEUED, BatchEvent.TAKEN_OVER): BatchState.OUTCOME_UNKNOWN,
        (BatchState.QUEUED, BatchEvent.GAVE_UP): BatchState.NOT_STORED,
        (BatchState.IN_FLIGHT, Stored): BatchState.STORED,
        (BatchState.IN_FLIGHT, NotStored): BatchState.NOT_STORED,
        (BatchState.IN_FLIGHT, Unknown): BatchState.OUTCOME_UNKNOWN,
        (BatchState.IN_FLIGHT, BatchEvent.GAVE_UP): BatchState.GIVEN_UP,
        (BatchState.OUTCOME_UNKNOWN, BatchEvent.SENT): BatchState.REPEATED,
        (BatchState.OUTCOME_UNKNOWN, BatchEvent.GAVE_UP): BatchState.GIVEN_UP,
        (BatchState.REPEATED, Stored): BatchState.STORED,
        (BatchState.REPEATED, NotStored): BatchState.OUTCOME_UNKNOWN,
        (BatchState.REPEATED, Unknown): BatchState.OUTCOME_UNKNOWN,
        (BatchState.REPEATED, BatchEvent.GAVE_UP): BatchState.GIVEN_UP,
    },
)


class BatchLife(Machine[BatchState]):
    """The life of one batch under one number. Made by its owner, with the history that all its batches share."""

    __slots__ = ()

    @property
    def may_be_stored(self) -> bool:
        """Whether an attempt before may have stored it: it may go nowhere else."""
        return self.state is BatchState.OUTCOME_UNKNOWN or self.state is BatchState.REPEATED

    @property
    def is_in_flight(self) -> bool:
        return self.state is BatchState.IN_FLIGHT or self.state is BatchState.REPEATED


class BatchSender(Protocol):
    """The way of numbered batches to the broker groups; `qmq.client.numbered.NumberedSender` is the real one."""

    def watch(self, subject: str) -> None: ...

    def groups(self, subject: str) -> list[str]: ...

    def home(self, subject: str, label: int) -> str | None: ...

    def sharers(self, subject: str) -> Sequence[str]: ...

    def is_usable(self, name: str) -> bool: ...

    def is_any_usable(self) -> bool: ...

    def room(self, name: str) -> int: ...

    def in_flight(self, name: str) -> int: ...

    def why_not(self, subject: str) -> str: ...

    def send(self, group: str, batch: NumberedBatch, done: Done) -> None: ...
