"""Core. A producer's unresolved messages: those that wait, per subject, and the batches sent to each broker group.

What waits in a producer: a queue per subject, and one per subject and broker group for messages in order.

A message with an order key waits in the *lane* of the broker group that its key belongs to. A lane has one batch under
way at a time, which goes nowhere else, so that a retry is never overtaken. When the broker groups of a subject change,
its lanes are filled anew, once nothing of them is under way any more.

A producer's batches that a broker group may have: their numbers, what is in flight, what must be repeated."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from qmq.client.batch import (
    BATCH_BYTES_MAX,
    BATCH_LIFE,
    BATCH_MESSAGES_MAX,
    Answer,
    Batch,
    BatchEvent,
    BatchLife,
    BatchState,
    OnReceipt,
    Outcome,
    refused,
    unstored,
    with_labels,
)
from qmq.client.routes import group_of_key
from qmq.codec import join_batch
from qmq.errors import QmqError, QueueFull
from qmq.states import TRANSITIONS_KEPT, Transition

SHARES = 8
"""A queue may be this many times as long as what is free: one that does not move leaves a ninth to the others."""


class Backlog:
    """How much waits in all queues of a producer, and how much more one of them may take.

    One queue alone has the room of `messages_max` and `bytes_max`. With others it has less, and it never has all:
    subjects that no broker takes leave room for those that move.
    """

    def __init__(self, messages_max: int, bytes_max: int) -> None:
        self.messages_max = messages_max
        self.bytes_max = bytes_max
        self.messages = self.bytes = 0
        self.waiters: list[Callable[[], None]] = []
        """Called once when something moved: a batch left a queue, was resolved, or was given up."""

    def has_room(self, queue: SubjectQueue, size: int) -> bool:
        """Say whether `queue` may take one more message of `size` bytes; if nothing waits at all, of any size."""
        messages, waiting = len(queue.waiting) + 1, queue.waiting_bytes + size
        if messages + SHARES * (self.messages + 1) > (SHARES + 1) * self.messages_max:
            return False
        return not self.messages or waiting + SHARES * (self.bytes + size) <= (SHARES + 1) * self.bytes_max

    def moved(self) -> None:
        waiters, self.waiters = self.waiters, []
        for wake in waiters:
            wake()

    def full(self) -> QueueFull:
        bounds = f"queue_messages_max {self.messages_max}, queue_bytes_max {self.bytes_max}"
        return QueueFull(f"{self.messages} messages wait already, {self.bytes} bytes ({bounds})")


class QueuedMessage(NamedTuple):
    """One message that was sent alone and waits for a batch."""

    data: bytes
    id: str
    deadline_ms: int
    done: OnReceipt
    label: int = 0


class SubjectQueue:
    """What waits to be sent for one subject: whole batches first, then single messages, which gather to batches.

    `group`: the only broker group that may have it, "" if the key of the messages has none yet; None: any may.
    """

    def __init__(self, subject: str, backlog: Backlog, group: str | None = None) -> None:
        self.subject = subject
        self.group = group
        self.ready: deque[Batch] = deque()
        self.waiting: deque[QueuedMessage] = deque()
        self.waiting_bytes = 0
        self.under_way: list[QueuedMessage] | None = None
        """A lane's messages of which no other may get ahead."""
        self._backlog = backlog
        self._has_labels = False
        self._batches_made = 0

    def __bool__(self) -> bool:
        return bool(self.ready or self.waiting)

    def add(self, message: QueuedMessage) -> None:
        size, backlog = len(message.data), self._backlog
        self.waiting.append(message)
        self.waiting_bytes += size
        backlog.messages += 1
        backlog.bytes += size
        if message.label:
            self._has_labels = True

    def add_batch(self, batch: Batch) -> None:
        self._batches_made += 1
        batch.order = (self._batches_made,)
        self.ready.append(batch)

    def put_back(self, *batches: Batch) -> None:
        """Queue batches again that a group refused, where they were: before those that were made later."""
        if self.under_way is not None:
            self.waiting.extendleft(reversed(self.under_way))
            self._count(len(self.under_way), sum(len(message.data) for message in self.under_way))
            self.under_way = None
            return
        for batch in batches:
            at = next((at for at, other in enumerate(self.ready) if other.order > batch.order), len(self.ready))
            self.ready.insert(at, batch)

    def first_deadline_ms(self) -> int | None:
        """Return when the first of what waits has to be refused; None if nothing waits."""
        deadlines = [kind[0].deadline_ms for kind in (self.ready, self.waiting) if kind]
        return min(deadlines, default=None)

    def next_bytes(self) -> int:
        """Return the size of the smallest body that could be sent next."""
        return self.ready[0].body_bytes if self.ready else len(self.waiting[0].data) + 32

    def next_batch(self, bytes_max: int) -> Batch:
        """Take the next batch of at most `bytes_max`; if even the first message is larger, that message alone."""
        if self.ready:
            return self.ready.popleft()
        taken = self._take(bytes_max)
        labels = [message.label for message in taken] if self._has_labels else ()

        def resolved(batch: Batch) -> None:
            self.under_way = None
            for position, message in enumerate(taken):
                message.done(batch.receipt(position))

        blocks, flags = with_labels(join_batch([message.data for message in taken]), labels)
        batch = Batch(self.subject, [message.id for message in taken], blocks, taken[0].deadline_ms, resolved, flags)
        self._batches_made += 1
        batch.order = (self._batches_made,)
        if self.group is not None:
            self.under_way = taken
        return batch

    def _take(self, bytes_max: int) -> list[QueuedMessage]:
        taken: list[QueuedMessage] = []
        each, size = (12, 32) if self._has_labels else (4, 16)
        while self.waiting and len(taken) < BATCH_MESSAGES_MAX:
            size += len(self.waiting[0].data) + each
            if taken and size > bytes_max:
                break
            taken.append(self.waiting.popleft())
        self._count(-len(taken), -sum(len(message.data) for message in taken))
        return taken

    def expire(self, now_ms: int, error: QmqError) -> None:
        """Refuse what waited past its deadline; none of it was sent. What is sent again when that is told is not looked
        at in the same call: a callback that repeats each refused message would never let it end."""
        for _ in range(len(self.ready)):
            if not self.ready or self.ready[0].deadline_ms > now_ms:
                break
            self.ready.popleft().resolve(refused("", error))
        for _ in range(len(self.waiting)):
            if not self.waiting or self.waiting[0].deadline_ms > now_ms:
                break
            message = self.waiting.popleft()
            self._count(-1, -len(message.data))
            message.done(unstored(Outcome.REFUSED, message.id, self.subject, "", error))

    def take_all(self) -> Iterable[QueuedMessage]:
        """Take every single message out."""
        taken, self.waiting = self.waiting, deque()
        self._count(-len(taken), -self.waiting_bytes)
        return taken

    def _count(self, messages: int, size: int) -> None:
        self.waiting_bytes += size
        self._backlog.messages += messages
        self._backlog.bytes += size


class Lanes:
    """What waits of one subject's messages with an order key. Made by a producer when the first one comes."""

    def __init__(self, subject: str, backlog: Backlog) -> None:
        self._subject = subject
        self._backlog = backlog
        self._lanes: dict[str, SubjectQueue] = {}
        self._unplaced = SubjectQueue(subject, backlog, "")
        self._groups: tuple[str, ...] = ()
        self._wanted: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[SubjectQueue]:
        yield from self._lanes.values()
        yield self._unplaced

    def lane(self, label: int) -> SubjectQueue:
        """Return where the next message with this label waits."""
        if self.are_moving or not self._groups:
            return self._unplaced
        return self._lanes[group_of_key(label >> 32, self._groups)]

    @property
    def are_moving(self) -> bool:
        """Whether nothing may be sent until all that is under way has its outcome: keys are about to change groups."""
        return self._groups != self._wanted

    def set_groups(self, groups: Iterable[str]) -> None:
        """The subject has these broker groups, readonly ones included. Without any, keys stay where they were."""
        self._wanted = tuple(sorted(groups)) or self._groups
        self.move()

    def move(self) -> bool:
        """Fill the lanes anew if that is due and nothing is under way; return whether it was done."""
        if not self.are_moving or any(lane.under_way is not None for lane in self._lanes.values()):
            return False
        # A key's messages lie in one lane, those that came since the change behind them: so their order is kept.
        waiting = [message for queue in self for message in queue.take_all()]
        self._groups = self._wanted
        self._lanes = {group: SubjectQueue(self._subject, self._backlog, group) for group in self._groups}
        for message in waiting:
            self.lane(message.label).add(message)
        return True


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
