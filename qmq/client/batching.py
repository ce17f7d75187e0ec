"""Core. How messages become batches, what an answer means for a batch, and what the receipts say.

A batch gets a number of the broker group that it is sent to. The group remembers the last 64 numbers of each producer
and answers a repeated one with the receipt of the first time, so the rule that keeps a message from being stored twice:

    attempt ended with          and no attempt before was doubtful     and one was
    stored                      stored                                 stored
    OutcomeUnknown, lost link   doubtful from now on: repeat the same bytes with the same number to the same group
    AskAnotherBroker            another group, with a number of that   repeat to the same group
    CallError, AccessError      refused                                unknown: the first attempt may have been stored
    anything else               doubtful from now on
    the deadline                refused                                unknown
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from enum import Enum, StrEnum
from functools import reduce
from typing import NamedTuple, overload
from zlib import crc32

from qmq.codec import join_batch, slice_batch
from qmq.errors import AccessError, AskAnotherBroker, CallError, QmqError
from qmq.remoting.commands import Produced
from qmq.types import Durability

BATCH_MESSAGES_MAX = 1_000
"""Measured with 100-byte messages: below 500 the cost per packet shows, above 1,000 only latency grows."""
BATCH_BYTES_MAX = 1 << 20
NUMBERS_SPAN_MAX = 64
"""A group remembers this many numbers of a producer; an older one could not be repeated safely."""
PRODUCE_OVERHEAD_BYTES = 256
"""Packet header, request header and subject are less than this."""


class Outcome(StrEnum):
    """What became of a message."""

    STORED = "stored"
    """Kept as `durability` says."""
    REFUSED = "refused"
    """Not stored, for `reason`; it may be sent again."""
    UNKNOWN = "unknown"
    """Maybe stored. Sent again, with the same id, it may be there twice."""


class Receipt(NamedTuple):
    """What a producer learns about one message.

    `sequence` is its place among the messages of its subject in `broker_group`; -1 if it is not known to be stored.
    """

    outcome: Outcome
    message_id: str
    subject: str
    broker_group: str
    sequence: int
    durability: Durability | None
    reason: str = ""

    @property
    def is_stored(self) -> bool:
        return self.outcome is Outcome.STORED


class Result(NamedTuple):
    """What became of a batch; `refused`: positions of messages that the broker refused on their own, and why."""

    outcome: Outcome
    broker_group: str
    first_sequence: int
    durability: Durability | None
    reason: str
    refused: dict[int, str]


Done = Callable[[Receipt], None]


class Batch:
    """Messages of one subject that travel together; `blocks`, back to back, are the body of the request.

    Made by a producer; ends when `result` is set.
    """

    __slots__ = (
        "subject", "ids", "blocks", "body_bytes", "crc", "deadline_ms", "on_resolved",
        "order", "number", "doubtful", "result", "halves",
    )  # fmt: skip

    def __init__(
        self, subject: str, ids: Sequence[str], blocks: Sequence[bytes], deadline_ms: int,
        on_resolved: Callable[[Batch], None],
    ) -> None:  # fmt: skip
        self.subject = subject
        self.ids = ids
        self.blocks = blocks
        self.body_bytes = sum(map(len, blocks))
        self.crc = reduce(lambda crc, block: crc32(block, crc), blocks, 0)
        self.deadline_ms = deadline_ms
        self.on_resolved = on_resolved
        self.order: tuple[int, ...] = ()
        self.number = 0
        self.doubtful = False
        self.result: Result | None = None
        self.halves: tuple[Batch, Batch] | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def resolve(self, result: Result) -> None:
        self.result = result
        self.blocks = ()  # receipts live as long as the caller likes; the bytes need not
        self.on_resolved(self)

    def split(self) -> tuple[Batch, Batch]:
        """Cut a batch that was never sent into two; it is resolved when both are."""
        middle, body = len(self.ids) // 2, b"".join(self.blocks)

        def half(begin: int, end: int) -> Batch:
            blocks = [slice_batch(body, len(self.ids), begin, end)]
            return Batch(self.subject, self.ids[begin:end], blocks, self.deadline_ms, self._half_resolved)

        self.halves = half(0, middle), half(middle, len(self.ids))
        self.halves[0].order, self.halves[1].order = (*self.order, 0), (*self.order, 1)
        self.blocks = ()
        return self.halves

    def _half_resolved(self, _: Batch) -> None:
        if self.is_resolved:
            self.on_resolved(self)

    @property
    def is_resolved(self) -> bool:
        return all(half.is_resolved for half in self.halves) if self.halves else self.result is not None

    def receipt(self, position: int) -> Receipt:
        """Return what became of the message at `position`; the batch is resolved."""
        if self.halves:
            first, second = self.halves
            return first.receipt(position) if position < len(first) else second.receipt(position - len(first))
        assert self.result is not None
        outcome, group, first_sequence, durability, reason, refused = self.result
        if outcome is not Outcome.STORED:
            return Receipt(outcome, self.ids[position], self.subject, group, -1, None, reason)
        if refused:
            if position in refused:
                return Receipt(Outcome.REFUSED, self.ids[position], self.subject, group, -1, None, refused[position])
            first_sequence -= sum(1 for other in refused if other < position)
        return Receipt(outcome, self.ids[position], self.subject, group, first_sequence + position, durability)

    def count(self, outcome: Outcome) -> int:
        """Count the messages with `outcome`, without making receipts."""
        if self.halves:
            return sum(half.count(outcome) for half in self.halves)
        assert self.result is not None
        refused = len(self.result.refused)
        if outcome is self.result.outcome:
            return len(self.ids) - refused
        return refused if outcome is Outcome.REFUSED else 0


def stored(group: str, produced: Produced) -> Result:
    return Result(
        Outcome.STORED, group, produced.first_sequence, Durability(produced.durability), "", dict(produced.refused)
    )


def not_stored(outcome: Outcome, group: str, reason: str) -> Result:
    return Result(outcome, group, -1, None, reason, {})


class Next(Enum):
    """What to do with a batch after an attempt failed."""

    REPEAT = "the same number and bytes, to the same group"
    MOVE = "another group, with a number of that group"
    REFUSED = "final: not stored"
    UNKNOWN = "final: maybe stored"


def after_error(batch: Batch, error: QmqError) -> Next:
    """Apply the table above; marks the batch as doubtful where it says so."""
    if isinstance(error, AskAnotherBroker):  # the only answer that says "nothing was stored, another may take it"
        return Next.REPEAT if batch.doubtful else Next.MOVE
    if isinstance(error, CallError | AccessError):
        return Next.UNKNOWN if batch.doubtful else Next.REFUSED
    batch.doubtful = True
    return Next.REPEAT


class Limits(NamedTuple):
    """What a broker's welcome allows on a connection."""

    packet_bytes_max: int
    window_bytes: int


class GroupBatches:
    """A producer's batches that carry a number of one broker group, from admission to result.

    Numbers ascend from 1. The oldest unresolved and the newest are never more than 63 apart, so that each can be
    repeated. After a lost connection all that was in flight is doubtful and goes first on the next one, in order.
    """

    def __init__(self, in_flight_max: int) -> None:
        self._in_flight_max = in_flight_max
        self._next_number = 1
        self._unresolved: dict[int, Batch] = {}  # ascending, because numbers are given in order
        self._in_flight: set[int] = set()
        self._bytes_in_flight = 0
        self.limits = Limits(1 << 30, 1 << 30)

    @property
    def load(self) -> int:
        return len(self._in_flight)

    @property
    def has_repeats(self) -> bool:
        return len(self._in_flight) < len(self._unresolved)

    def unresolved(self) -> list[Batch]:
        return list(self._unresolved.values())

    def room_bytes(self) -> int:
        """Return how large the body of a new batch may be now; 0 if no batch can be taken."""
        if len(self._unresolved) >= self._in_flight_max or self.has_repeats:
            return 0
        if self._unresolved and self._next_number - next(iter(self._unresolved)) >= NUMBERS_SPAN_MAX:
            return 0
        return max(0, self._idle_room_bytes() - self._bytes_in_flight)

    def _idle_room_bytes(self) -> int:
        return min(self.limits.window_bytes, self.limits.packet_bytes_max - PRODUCE_OVERHEAD_BYTES)

    def never_fits(self, body_bytes: int) -> bool:
        """Say whether a body is too large even for an idle connection."""
        return body_bytes > self._idle_room_bytes()

    def admit(self, batch: Batch) -> None:
        """Give a batch the next number and count it as in flight."""
        batch.number = self._next_number
        self._next_number += 1
        self._unresolved[batch.number] = batch
        self._sent(batch)

    def _sent(self, batch: Batch) -> None:
        self._in_flight.add(batch.number)
        self._bytes_in_flight += batch.body_bytes

    def next_repeat(self) -> Batch | None:
        """Return the oldest batch that must be sent again, if the window has room for it; count it as in flight."""
        for number, batch in self._unresolved.items():
            if number not in self._in_flight:
                if self._in_flight and self._bytes_in_flight + batch.body_bytes > self.limits.window_bytes:
                    return None
                self._sent(batch)
                return batch
        return None

    def returned(self, batch: Batch) -> None:
        """An attempt ended; the batch is not in flight any more."""
        if batch.number in self._in_flight:
            self._in_flight.remove(batch.number)
            self._bytes_in_flight -= batch.body_bytes

    def release(self, batch: Batch) -> None:
        """The batch is resolved or goes to another group; its number is used up."""
        self.returned(batch)
        self._unresolved.pop(batch.number, None)

    def connection_lost(self) -> None:
        """Nobody will answer what is in flight: each of these may be stored or not."""
        for number in self._in_flight:
            self._unresolved[number].doubtful = True
        self._in_flight.clear()
        self._bytes_in_flight = 0

    def expired(self, now_ms: int) -> list[Batch]:
        return [batch for batch in self._unresolved.values() if batch.deadline_ms <= now_ms]


class Waiting(NamedTuple):
    """One message that was sent alone and waits for a batch."""

    data: bytes
    id: str
    deadline_ms: int
    done: Done


class SubjectQueue:
    """What waits to be sent for one subject: whole batches first, then single messages, which gather to batches."""

    def __init__(self, subject: str) -> None:
        self.subject = subject
        self.ready: deque[Batch] = deque()
        self.waiting: deque[Waiting] = deque()
        self.waiting_bytes = 0
        self._batches_made = 0

    def __bool__(self) -> bool:
        return bool(self.ready or self.waiting)

    def add(self, one: Waiting) -> None:
        self.waiting.append(one)
        self.waiting_bytes += len(one.data)

    def add_batch(self, batch: Batch) -> None:
        self._batches_made += 1
        batch.order = (self._batches_made,)
        self.ready.append(batch)

    def put_back(self, *batches: Batch) -> None:
        """Queue batches again that a group refused, where they were: before those that were made later."""
        for batch in batches:
            at = next((at for at, other in enumerate(self.ready) if other.order > batch.order), len(self.ready))
            self.ready.insert(at, batch)

    def next_bytes(self) -> int:
        """Return the size of the smallest body that could be sent next."""
        return self.ready[0].body_bytes if self.ready else len(self.waiting[0].data) + 16

    def next_batch(self, bytes_max: int) -> Batch:
        """Take the next batch of at most `bytes_max`; if even the first message is larger, that message alone."""
        if self.ready:
            return self.ready.popleft()
        taken: list[Waiting] = []
        size = 16
        while self.waiting and len(taken) < BATCH_MESSAGES_MAX:
            size += len(self.waiting[0].data) + 4
            if taken and size > bytes_max:
                break
            taken.append(self.waiting.popleft())
        self.waiting_bytes -= sum(len(one.data) for one in taken)

        def resolved(batch: Batch) -> None:
            for position, one in enumerate(taken):
                one.done(batch.receipt(position))

        batch = Batch(
            self.subject, [one.id for one in taken], [join_batch([one.data for one in taken])],
            taken[0].deadline_ms, resolved,
        )  # fmt: skip
        self._batches_made += 1
        batch.order = (self._batches_made,)
        return batch

    def expire(self, now_ms: int, reason: str) -> None:
        """Refuse what waited past its deadline; nothing here was ever in doubt."""
        while self.ready and self.ready[0].deadline_ms <= now_ms:
            self.ready.popleft().resolve(not_stored(Outcome.REFUSED, "", reason))
        while self.waiting and self.waiting[0].deadline_ms <= now_ms:
            one = self.waiting.popleft()
            self.waiting_bytes -= len(one.data)
            one.done(Receipt(Outcome.REFUSED, one.id, self.subject, "", -1, None, reason))


class MessageIds:
    """Makes message ids: `prefix` is unique to a producer, a counter does the rest."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.made = 0

    def __iter__(self) -> MessageIds:
        return self

    def __next__(self) -> str:
        self.made += 1
        return f"{self.prefix}{self.made}"


class Receipts(Sequence[Receipt]):
    """The receipts of `send_many`, in the order of its messages.

    They are kept as one result per batch and made when they are looked at: a million of them cost 30 kB, not 300 MB,
    and a producer that only counts never makes one.
    """

    def __init__(self) -> None:
        self._ends: list[int] = []
        self._parts: list[Batch | list[Callable[[], Receipt]]] = []

    def add(self, part: Batch | list[Callable[[], Receipt]]) -> None:
        """Append a batch, or receipts of messages that went different ways."""
        self._ends.append(len(self) + len(part))
        self._parts.append(part)

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
