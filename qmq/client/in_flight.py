"""Core. A producer's batches that a broker group may have: their numbers, what is in flight, what must be repeated."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from qmq.client.batch_life import BATCH_LIFE, Answer, BatchEvent, BatchLife, BatchState
from qmq.client.batching import BATCH_BYTES_MAX, Batch
from qmq.states import TRANSITIONS_KEPT, Transition

NUMBERS_SPAN_MAX = 64
"""A group remembers this many numbers of a producer; an older one could not be repeated safely."""
PRODUCE_OVERHEAD_BYTES = 256
"""Packet header, request header and subject are less than this."""


class Limits(NamedTuple):
    """What a broker's welcome allows on a connection."""

    packet_bytes_max: int
    window_bytes: int


class GroupBatches:
    """A producer's batches that carry a number of one broker group, from admission to result.

    Numbers ascend from 1. The oldest unresolved and the newest are never more than 63 apart, so that each can be
    repeated. Those whose outcome is unknown go first, in order.
    """

    def __init__(self, in_flight_max: int) -> None:
        self._in_flight_max = in_flight_max
        self._of_subject: dict[str, int] = {}
        """Unresolved batches of each subject."""
        self._next_number = 1
        self._unresolved: dict[int, Batch] = {}  # ascending, because numbers are given in order
        self._bytes_in_flight = 0
        self.history: deque[Transition] = deque(maxlen=TRANSITIONS_KEPT)
        """The last transitions of all its batches."""
        self.load = 0
        """How many are in flight."""
        self.limits = Limits(1 << 30, 1 << 30)
        self.batch_bytes_max = BATCH_BYTES_MAX
        """How large a new batch is made: as large as costs least per message, or less while its broker says so, as
        a quiet client produces there."""

    @property
    def has_any(self) -> bool:
        return bool(self._unresolved)

    @property
    def has_repeats(self) -> bool:
        return self.load < len(self._unresolved)

    def unresolved(self) -> list[Batch]:
        return list(self._unresolved.values())

    def room_bytes(self, subject: str | None = None) -> int:
        """Return how large the body of a new batch may be now; 0 if no batch can be taken, of this or any subject.

        What waits for room gathers to larger batches, but only within its subject. So each subject has its own limit:
        a thousand subjects of one message per second, 16 of them under way, would wait for each other for a second as
        soon as an answer takes 20 ms.
        """
        if self.has_repeats:
            return 0
        if subject is not None and self._of_subject.get(subject, 0) >= self._in_flight_max:
            return 0
        if self._unresolved and self._next_number - next(iter(self._unresolved)) >= NUMBERS_SPAN_MAX:
            return 0
        return max(0, self._idle_room_bytes() - self._bytes_in_flight)

    def advised(self, batch_bytes: int) -> None:
        """Take what an answer says of the size of batches; 0: nothing."""
        self.batch_bytes_max = min(batch_bytes or BATCH_BYTES_MAX, BATCH_BYTES_MAX)

    def _idle_room_bytes(self) -> int:
        return min(self.limits.window_bytes, self.limits.packet_bytes_max - PRODUCE_OVERHEAD_BYTES)

    def never_fits(self, body_bytes: int) -> bool:
        """Say whether a body is too large even for an idle connection."""
        return body_bytes > self._idle_room_bytes()

    def admit(self, batch: Batch) -> None:
        """Give a batch the next number and count it as in flight."""
        batch.number, batch.life = self._next_number, BatchLife(BATCH_LIFE, self.history)
        self._next_number += 1
        self._unresolved[batch.number] = batch
        self._of_subject[batch.subject] = self._of_subject.get(batch.subject, 0) + 1
        self._sent(batch)

    def _sent(self, batch: Batch) -> None:
        batch.life.on(BatchEvent.SENT)
        self.load += 1
        self._bytes_in_flight += batch.body_bytes

    def next_repeat(self) -> Batch | None:
        """Return the oldest batch that must be sent again, if the window has room for it; count it as in flight."""
        for batch in self._unresolved.values():
            if not batch.life.is_in_flight:
                if self.load and self._bytes_in_flight + batch.body_bytes > self.limits.window_bytes:
                    return None
                self._sent(batch)
                return batch
        return None

    def answered(self, batch: Batch, answer: Answer | type[Answer]) -> BatchState:
        """An attempt ended; the batch is not in flight any more. Return what is known of it."""
        self.load -= 1
        self._bytes_in_flight -= batch.body_bytes
        return batch.life.on(answer)

    def give_up(self, batch: Batch) -> None:
        """A batch has no outcome in time."""
        if batch.life.is_in_flight:
            self.load -= 1
            self._bytes_in_flight -= batch.body_bytes
        batch.life.on(BatchEvent.GAVE_UP)

    def release(self, batch: Batch) -> None:
        """A batch that is not in flight is resolved or goes to another group; its number is used up. One that this
        group never had may carry a number of another group."""
        if self._unresolved.get(batch.number) is not batch:
            return
        del self._unresolved[batch.number]
        left = self._of_subject.pop(batch.subject) - 1
        if left:
            self._of_subject[batch.subject] = left

    def expired(self, now_ms: int) -> list[Batch]:
        return [batch for batch in self._unresolved.values() if batch.deadline_ms <= now_ms]
