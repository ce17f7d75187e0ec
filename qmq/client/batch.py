"""Core. Batches of messages, from their number to their receipts.

A batch is sent under a number of one broker group. The group remembers the last 64 numbers of each producer and returns
the first answer to a repeated one. So a batch keeps its number and group until its outcome is known:

    QUEUED  (begins here)
        SENT       -> IN_FLIGHT
        ADOPTED -> OUTCOME_UNKNOWN
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

The owner decides the next step. A batch that is not stored may go to another group under a number of that group, be
refused, or wait. A batch that was given up may be stored; sending its messages again duplicates them at worst.
Producers, delay servers and watchdogs share this table.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from enum import Enum, StrEnum, auto
from functools import reduce
from typing import NamedTuple, Protocol, overload

from qmq.codec import Buffer, decode_labels, encode_labels, slice_batch
from qmq.crc import crc32
from qmq.errors import AccessError, AskAnotherBroker, CallError, InvalidMessage, OutcomeUnknown, QmqError, SubjectFull
from qmq.log.frame import label_flags
from qmq.remoting.commands import Produced
from qmq.states import Machine, TransitionTable
from qmq.types import Durability

BATCH_MESSAGES_MAX = 1_000
"""Measured with 100-byte messages: below 500 the cost per packet shows, above 1,000 only latency grows."""
BATCH_BYTES_MAX = 1 << 20


class Outcome(StrEnum):
    """Outcome of sending a message."""

    STORED = "stored"
    """Stored with the receipt's `durability`."""
    REFUSED = "refused"
    """Not stored, for `reason`; it may be sent again."""
    UNKNOWN = "unknown"
    """Possibly stored. Sending it again, with the same id, may duplicate it."""


class Receipt(NamedTuple):
    """Outcome of one message for its producer.

    `sequence` counts the messages of the subject in `broker_group`; -1 if the message is not known to be stored.
    `error` is the reason for that: its class determines the remedy (qmq.errors), `reason` is its text. `due_ms` is the
    due time of a delayed message, in ms since 1970 UTC; a stored one waits in the delay group `broker_group`.
    """

    outcome: Outcome
    message_id: str
    subject: str
    broker_group: str
    sequence: int
    durability: Durability | None
    reason: str = ""
    error: QmqError | None = None
    due_ms: int | None = None

    @property
    def is_stored(self) -> bool:
        return self.outcome is Outcome.STORED

    def check(self) -> Receipt:
        """Return this receipt if the message is stored; otherwise raise its error."""
        if self.error is not None:
            raise self.error
        return self


def unstored(
    outcome: Outcome, message_id: str, subject: str, group: str, error: QmqError, due_ms: int | None = None
) -> Receipt:
    """Return the receipt of a message that is not known to be stored."""
    return Receipt(outcome, message_id, subject, group, -1, None, str(error), error, due_ms)


class Result(NamedTuple):
    """Outcome of a batch; `refused` maps positions of messages that the broker refused to the reason."""

    outcome: Outcome
    broker_group: str
    first_sequence: int
    durability: Durability | None
    error: QmqError | None
    refused: dict[int, str]


OnReceipt = Callable[[Receipt], object]
"""Callback that gets a receipt. If it returns an awaitable, that is awaited (qmq.client.handler)."""


class Batch:
    """Messages of one subject in one produce request, owned by a producer until `result` is set.

    `blocks`, concatenated, are the request's body. `flags` state whether labels follow the messages in the body.
    `due_ms` is the common due time of a delayed `send_many`. `life` exists once the batch has a `number`.
    """

    __slots__ = (
        "subject",
        "ids",
        "blocks",
        "flags",
        "body_bytes",
        "crc",
        "deadline_ms",
        "on_resolved",
        "order",
        "number",
        "life",
        "result",
        "halves",
        "due_ms",
    )

    def __init__(
        self,
        subject: str,
        ids: Sequence[str],
        blocks: Sequence[bytes],
        deadline_ms: int,
        on_resolved: Callable[[Batch], None],
        flags: int = 0,
        due_ms: int | None = None,
    ) -> None:
        self.subject: str = subject
        self.due_ms: int | None = due_ms
        self.ids: Sequence[str] = ids
        self.blocks: Sequence[bytes] = blocks
        self.flags: int = flags
        self.body_bytes: int = sum(map(len, blocks))
        self.crc: int = reduce(lambda crc, block: crc32(block, crc), blocks, 0)
        self.deadline_ms: int = deadline_ms
        self.on_resolved: Callable[[Batch], None] = on_resolved
        self.order: tuple[int, ...] = ()
        self.number: int = 0
        self.life: BatchLife
        self.result: Result | None = None
        self.halves: tuple[Batch, Batch] | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def resolve(self, result: Result) -> None:
        self.result = result
        self.blocks = ()  # receipts live as long as the caller keeps them; the bytes need not
        self.on_resolved(self)

    def split(self) -> tuple[Batch, Batch]:
        """Cut a batch that was never sent into two halves; it is resolved when both are."""
        count, body = len(self.ids), b"".join(self.blocks)
        labels = decode_labels(body, count) if self.flags else None

        def half(begin: int, end: int) -> Batch:
            blocks, flags = with_labels([slice_batch(body, count, begin, end)], labels[begin:end] if labels else ())
            ids, resolved = self.ids[begin:end], self._half_resolved
            return Batch(self.subject, ids, blocks, self.deadline_ms, resolved, flags, self.due_ms)

        self.halves = half(0, count // 2), half(count // 2, count)
        self.halves[0].order, self.halves[1].order = (*self.order, 0), (*self.order, 1)
        self.blocks = ()
        return self.halves

    def _half_resolved(self, _: Batch) -> None:
        if self.is_resolved:
            self.on_resolved(self)

    @property
    def is_resolved(self) -> bool:
        return all(half.is_resolved for half in self.halves) if self.halves else self.result is not None

    @property
    def was_answered(self) -> bool:
        """Whether a broker reported the outcome; the batch is resolved."""
        if self.halves:
            return all(half.was_answered for half in self.halves)
        assert self.result is not None
        return self.result.broker_group != "" and self.result.outcome is not Outcome.UNKNOWN

    def receipt(self, position: int) -> Receipt:
        """Return the receipt of the message at `position`; the batch is resolved."""
        if self.halves:
            first, second = self.halves
            return first.receipt(position) if position < len(first) else second.receipt(position - len(first))
        assert self.result is not None
        outcome, group, first_sequence, durability, error, refused = self.result
        if error is not None:
            return unstored(outcome, self.ids[position], self.subject, group, error, self.due_ms)
        if refused:
            if position in refused:
                why = InvalidMessage(refused[position])
                return unstored(Outcome.REFUSED, self.ids[position], self.subject, group, why, self.due_ms)
            first_sequence -= sum(1 for other in refused if other < position)
        id, sequence = self.ids[position], first_sequence + position
        return Receipt(outcome, id, self.subject, group, sequence, durability, due_ms=self.due_ms)

    def count(self, outcome: Outcome) -> int:
        """Count the messages with `outcome`, without making receipts."""
        if self.halves:
            return sum(half.count(outcome) for half in self.halves)
        assert self.result is not None
        refused = len(self.result.refused)
        if outcome is self.result.outcome:
            return len(self.ids) - refused
        return refused if outcome is Outcome.REFUSED else 0


def with_labels(batch: list[bytes], labels: Sequence[int]) -> tuple[list[bytes], int]:
    """Return the blocks and flags of a request: those of the batch, and its labels unless all are 0."""
    if not any(labels):
        return batch, 0
    return [*batch, encode_labels(labels)], label_flags(labels)


def stored(group: str, produced: Produced) -> Result:
    return Result(
        Outcome.STORED, group, produced.first_sequence, Durability(produced.durability), None, dict(produced.refused)
    )


def refused(group: str, error: QmqError) -> Result:
    return Result(Outcome.REFUSED, group, -1, None, error, {})


def unknown(group: str, reason: str) -> Result:
    return Result(Outcome.UNKNOWN, group, -1, None, OutcomeUnknown(reason), {})


class MessageIds:
    """Iterator of message ids: `prefix`, unique to a producer, and a counter."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.made: int = 0

    def __iter__(self) -> MessageIds:
        return self

    def __next__(self) -> str:
        self.made += 1
        return f"{self.prefix}{self.made}"


class Receipts(Sequence[Receipt]):
    """Receipts of `send_many`, in the order of the messages.

    One result is stored per batch, and receipts are made on access: a million of them take 30 kB, not 300 MB. Counting
    makes none.
    """

    def __init__(self) -> None:
        self._ends: list[int] = []
        self._parts: list[Batch | list[Callable[[], Receipt]]] = []

    def add(self, part: Batch | list[Callable[[], Receipt]]) -> None:
        """Append a batch, or receipts of messages from different batches."""
        self._ends.append(len(self) + len(part))
        self._parts.append(part)

    def extend(self, others: Receipts) -> None:
        """Append the receipts of messages that were sent after these."""
        for part in others._parts:
            self.add(part)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @overload
    def __getitem__(self, index: int) -> Receipt: ...

    @overload
    def __getitem__(self, index: slice) -> list[Receipt]: ...

    def __getitem__(self, index: int | slice) -> Receipt | list[Receipt]:
        if isinstance(index, slice):
            return [self[position] for position in range(*index.indices(len(self)))]
        position = index if index >= 0 else index + len(self)
        if not 0 <= position < len(self):
            raise IndexError(index)
        at = bisect_right(self._ends, position)
        return _receipt(self._parts[at], position - (self._ends[at - 1] if at else 0))

    def __iter__(self) -> Iterator[Receipt]:
        for part in self._parts:
            for position in range(len(part)):
                yield _receipt(part, position)

    def count_of(self, outcome: Outcome) -> int:
        """Count the receipts with `outcome` without making all of them."""
        return sum(
            part.count(outcome) if isinstance(part, Batch) else sum(1 for make in part if make().outcome is outcome)
            for part in self._parts
        )

    @property
    def all_stored(self) -> bool:
        return self.count_of(Outcome.STORED) == len(self)


def _receipt(part: Batch | list[Callable[[], Receipt]], position: int) -> Receipt:
    return part.receipt(position) if isinstance(part, Batch) else part[position]()


class NumberedBatch(NamedTuple):
    """Messages of one subject with a stored number; `blocks`, concatenated, are the body of a PRODUCE.

    `flags` state whether labels follow the messages in the body; `crc` is the CRC-32 of the body. A (producer, number)
    pair must always stand for the same messages.
    """

    producer: int
    number: int
    subject: str
    count: int  # type: ignore[assignment]  # shadows tuple.count
    crc: int
    flags: int
    blocks: Sequence[Buffer]


class Stored(NamedTuple):
    """Answer: fsynced on enough copies, now or by an earlier attempt.

    `refused` lists (position, reason) of messages that the group will never store; all others are stored.
    """

    first_sequence: int
    stored: int
    refused: list[tuple[int, str]]


class NotStored(NamedTuple):
    """Answer: this attempt stored nothing. A `CallError` is caused by the batch; other errors are temporary."""

    error: QmqError


class Unknown(NamedTuple):
    """No answer: this attempt may have stored the batch. Repeat it unchanged, to the same group."""

    reason: str


Answer = Stored | NotStored | Unknown
"""Result of one attempt. Only `Stored` also settles the attempts before it."""
OnAnswer = Callable[[Answer], None]


def answer_of(error: QmqError) -> NotStored | Unknown:
    """Return the answer that an error implies: NotStored for refusals and faults of the batch, otherwise Unknown."""
    if isinstance(error, AskAnotherBroker | CallError | AccessError | SubjectFull):
        return NotStored(error)
    return Unknown(str(error))


class BatchState(Enum):
    QUEUED = auto()  # no attempt was made
    IN_FLIGHT = auto()  # the first attempt has no answer yet
    OUTCOME_UNKNOWN = auto()  # an attempt may have stored it; to be repeated
    REPEATED = auto()  # in flight again; only `Stored` settles the attempts before
    STORED = auto()
    NOT_STORED = auto()
    GIVEN_UP = auto()  # the time ended without a known outcome


class BatchEvent(Enum):
    """Events of a batch besides the answers to its attempts."""

    SENT = auto()
    ADOPTED = auto()  # an earlier process may have sent it
    GAVE_UP = auto()  # its time ended


BATCH_LIFE = TransitionTable(
    BatchState.QUEUED,
    {
        (BatchState.QUEUED, BatchEvent.SENT): BatchState.IN_FLIGHT,
        (BatchState.QUEUED, BatchEvent.ADOPTED): BatchState.OUTCOME_UNKNOWN,
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
    """State machine of one batch under one number; all batches of an owner share a history."""

    __slots__ = ()

    @property
    def may_be_stored(self) -> bool:
        """Whether an earlier attempt may have stored it, so no other group may get it."""
        return self.state is BatchState.OUTCOME_UNKNOWN or self.state is BatchState.REPEATED

    @property
    def is_in_flight(self) -> bool:
        return self.state is BatchState.IN_FLIGHT or self.state is BatchState.REPEATED


class BatchSender(Protocol):
    """Interface of `qmq.client.numbered_sender.NumberedSender`, for the schedulers that use it."""

    def watch(self, subject: str) -> None: ...

    def groups(self, subject: str) -> list[str]: ...

    def home(self, subject: str, label: int) -> str | None: ...

    def sharers(self, subject: str) -> Sequence[str]: ...

    def is_usable(self, name: str) -> bool: ...

    def is_any_usable(self) -> bool: ...

    def room(self, name: str) -> int: ...

    def in_flight(self, name: str) -> int: ...

    def why_not(self, subject: str) -> str: ...

    def send(self, group: str, batch: NumberedBatch, done: OnAnswer) -> None: ...
