"""Core. A producer's unresolved messages: queues of waiting messages, and the batches sent to each broker group.

Each subject has a queue. A message with an order key waits in the *lane* of the broker group that its key belongs to. A
lane has one batch in flight at a time, which goes to no other group, so a retry is never overtaken. When the broker
groups of a subject change, its lanes are refilled after the batches in flight have their outcomes.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, Protocol, TypeAlias

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
    Result,
    refused,
    unstored,
    with_labels,
)
from qmq.client.routes import group_of_key
from qmq.codec import batch_blocks
from qmq.errors import MessageTooLarge, QmqError, QueueFull
from qmq.states import TRANSITIONS_KEPT, Transition

SHARES = 8
"""Limit of one queue, as a multiple of the free room. A stuck queue thus leaves a ninth of the room to the others."""


class Place(Protocol):
    """Place of a call in a line: an `asyncio.Future`, which is done once the call is the first."""

    def done(self) -> bool: ...

    def set_result(self, result: None, /) -> None: ...


Line: TypeAlias = deque[Place]
"""Calls that wait for room in a queue, in the order of the calls. Without a line a new call could overtake a woken one
that does not run yet, and messages of one order key or one transaction would change places.
"""


class Backlog:
    """Total size of a producer's queues, and the room left for each of them.

    A lone queue may grow to `messages_max` and `bytes_max`. Beside others its limit is lower and leaves some room, so
    subjects without a writable broker group do not block the rest.
    """

    def __init__(self, messages_max: int, bytes_max: int) -> None:
        self.messages_max = messages_max
        self.bytes_max = bytes_max
        self.messages = self.bytes = 0
        self.waiters: list[Callable[[], None]] = []
        """Called once on progress: a batch left a queue, was resolved, or was given up."""
        self.entering: dict[tuple[str, int], Line] = {}
        """Calls that wait for room for a message with an order key, by subject and key."""
        self.outcomes: dict[Outcome, int] = dict.fromkeys(Outcome, 0)
        """Number of messages by outcome, for `qmq.client.numbers`."""
        self.repeats = 0
        """Number of batches that were sent again, to the same group or to another one."""

    def resolve(self, batch: Batch, result: Result) -> None:
        """Resolve a batch and count its messages."""
        self.outcomes[result.outcome] += len(batch.ids) - len(result.refused)
        self.outcomes[Outcome.REFUSED] += len(result.refused)
        batch.resolve(result)

    def count_refused(self) -> None:
        """Count a message that was refused without a batch."""
        self.outcomes[Outcome.REFUSED] += 1

    def has_room(self, queue: SubjectQueue, size: int, label: int = 0) -> bool:
        """Return whether `queue` has room for a message of `size` bytes; an empty backlog takes any size.

        Args:
            label: label of the message. There is no room while an earlier message of its order key still waits for
                room.
        """
        if self.entering and (queue.subject, label >> 32) in self.entering:
            return False
        messages, waiting = len(queue.waiting) + 1, queue.waiting_bytes + size
        if messages + SHARES * (self.messages + 1) > (SHARES + 1) * self.messages_max:
            return False
        return not self.messages or waiting + SHARES * (self.bytes + size) <= (SHARES + 1) * self.bytes_max

    def wake_waiters(self) -> None:
        waiters, self.waiters = self.waiters, []
        for wake in waiters:
            wake()

    def full(self) -> QueueFull:
        bounds = f"queue_messages_max {self.messages_max}, queue_bytes_max {self.bytes_max}"
        return QueueFull(f"{self.messages} messages are waiting, {self.bytes} bytes ({bounds})")


class QueuedMessage(NamedTuple):
    """One message that was sent alone and waits for a batch."""

    data: bytes
    id: str
    deadline_ms: int
    done: OnReceipt
    label: int = 0


class SubjectQueue:
    """Queue of one subject: whole batches first, then single messages, from which batches are made.

    `group` is the broker group of a lane, "" while the lane has none; None allows any group.
    """

    def __init__(self, subject: str, backlog: Backlog, group: str | None = None) -> None:
        self.subject = subject
        self.group = group
        self.ready: deque[Batch] = deque()
        self.entering: Line = deque()
        """Calls that wait for room for a whole batch."""
        self.waiting: deque[QueuedMessage] = deque()
        self.waiting_bytes: int = 0
        self.under_way: list[QueuedMessage] | None = None
        """Messages of the lane's batch in flight, which no other message may overtake."""
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
        """Return batches that a group refused to their place, before those made later."""
        if self.under_way is not None:
            self.waiting.extendleft(reversed(self.under_way))
            self._count(len(self.under_way), sum(len(message.data) for message in self.under_way))
            self.under_way = None
            return
        for batch in batches:
            at = next((at for at, other in enumerate(self.ready) if other.order > batch.order), len(self.ready))
            self.ready.insert(at, batch)

    def first_deadline_ms(self) -> int | None:
        """Return the earliest deadline in the queue, or None."""
        deadlines = [kind[0].deadline_ms for kind in (self.ready, self.waiting) if kind]
        return min(deadlines, default=None)

    def next_bytes(self) -> int:
        """Return the size of the smallest body that could be sent next."""
        return self.ready[0].body_bytes if self.ready else len(self.waiting[0].data) + 32

    def next_batch(self, bytes_max: int) -> Batch:
        """Take the next batch of at most `bytes_max`; a first message larger than that is taken alone."""
        if self.ready:
            return self.ready.popleft()
        taken = self._take(bytes_max)
        labels = [message.label for message in taken] if self._has_labels else ()

        def resolved(batch: Batch) -> None:
            self.under_way = None
            for position, message in enumerate(taken):
                message.done(batch.receipt(position))

        blocks, flags = with_labels(batch_blocks([message.data for message in taken]), labels)
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
        """Refuse the messages past their deadline; none of them was sent. Messages that callbacks add meanwhile are
        left for the next call: a callback that repeats each refused message would keep this loop going.
        """
        for _ in range(len(self.ready)):
            if not self.ready or self.ready[0].deadline_ms > now_ms:
                break
            self._backlog.resolve(self.ready.popleft(), refused("", error))
        for _ in range(len(self.waiting)):
            if not self.waiting or self.waiting[0].deadline_ms > now_ms:
                break
            message = self.waiting.popleft()
            self._count(-1, -len(message.data))
            self._backlog.count_refused()
            message.done(unstored(Outcome.REFUSED, message.id, self.subject, "", error))

    def take_all(self) -> Iterable[QueuedMessage]:
        """Take all single messages out."""
        taken, self.waiting = self.waiting, deque()
        self._count(-len(taken), -self.waiting_bytes)
        return taken

    def _count(self, messages: int, size: int) -> None:
        self.waiting_bytes += size
        self._backlog.messages += messages
        self._backlog.bytes += size


class Lanes:
    """Lanes of one subject. Made by a producer for the subject's first message with an order key."""

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
        """Return the lane of the next message with this label."""
        if self.are_moving or not self._groups:
            return self._unplaced
        return self._lanes[group_of_key(label >> 32, self._groups)]

    @property
    def are_moving(self) -> bool:
        """Whether keys are about to change groups: nothing is sent until the batches in flight have their outcomes."""
        return self._groups != self._wanted

    def set_groups(self, groups: Iterable[str]) -> None:
        """Set the subject's broker groups, readonly ones included. An empty list leaves the keys in their lanes."""
        self._wanted = tuple(sorted(groups)) or self._groups
        self.move()

    def move(self) -> bool:
        """Refill the lanes if that is due and no batch is in flight; return whether this happened."""
        if not self.are_moving or any(lane.under_way is not None for lane in self._lanes.values()):
            return False
        # All messages of a key are in one lane, newer ones behind, so this keeps their order.
        waiting = [message for queue in self for message in queue.take_all()]
        self._groups = self._wanted
        self._lanes = {group: SubjectQueue(self._subject, self._backlog, group) for group in self._groups}
        for message in waiting:
            self.lane(message.label).add(message)
        return True


NUMBERS_SPAN_MAX = 64
"""A group remembers this many numbers of a producer; an older one cannot be repeated safely."""
PRODUCE_OVERHEAD_BYTES = 256
"""Upper bound of packet header, request header and subject."""


class SendOrder:
    """Order in which a producer's waiting queues send. Made by the sender; used on its loop.

    A waiting queue is active while some broker group may take from it. A crowded queue found no room in its groups and
    is active again after one of their answers, because checking 20,000 queues at each answer would be too slow. All
    other queues wait for a route, or for the outcome of their batch in flight.
    """

    def __init__(self) -> None:
        self.waiting: dict[SubjectQueue, None] = {}
        """Queues that are not empty."""
        self.active: OrderedDict[SubjectQueue, None] = OrderedDict()
        """Next queue first. Not a dict: to find its first entry, a dict steps over all entries that were deleted before
        it.
        """
        self._crowded: dict[str, OrderedDict[SubjectQueue, None]] = {}
        """Crowded queues by broker group, longest waiting first."""
        self._to_expire: list[SubjectQueue] = []
        """Queues whose deadlines are checked next."""

    def note(self, queue: SubjectQueue, *, is_active: bool) -> None:
        """Record that a queue has messages; an active queue keeps its place."""
        self.waiting[queue] = None
        if is_active:
            self.active[queue] = None
        else:
            self.active.pop(queue, None)

    def remove(self, queue: SubjectQueue) -> None:
        self.active.pop(queue, None)
        self.waiting.pop(queue, None)

    def clear(self) -> None:
        self.waiting.clear()
        self.active.clear()
        self._crowded.clear()

    def crowd(self, queue: SubjectQueue, groups: Iterable[str]) -> None:
        """Take a queue out of the order until one of `groups` has room."""
        del self.active[queue]
        for name in groups:
            self._crowded.setdefault(name, OrderedDict())[queue] = None

    def take_crowd(self, name: str, count: int) -> Iterator[SubjectQueue]:
        """Yield up to `count` waiting queues that found no room in the group `name`; the caller notes each."""
        crowd = self._crowded.get(name)
        while crowd and count:
            queue, _ = crowd.popitem(last=False)
            if queue in self.waiting and queue not in self.active:
                yield queue
                count -= 1

    def take_to_expire(self, count: int) -> Iterator[SubjectQueue]:
        """Yield up to `count` waiting queues for a check of their deadlines, all queues in turn."""
        for _ in range(min(count, len(self.waiting))):
            if not self._to_expire:
                self._to_expire = list(self.waiting)
            if (queue := self._to_expire.pop()) in self.waiting:
                yield queue
            if not self.waiting:
                return


class Limits(NamedTuple):
    """Limits of a connection, from the broker's welcome."""

    packet_bytes_max: int
    window_bytes: int

    @property
    def batch_bytes_max(self) -> int:
        """Largest batch that an idle connection takes."""
        return min(self.window_bytes, self.packet_bytes_max - PRODUCE_OVERHEAD_BYTES)

    def exceeded(self, batch_bytes: int, group: str) -> MessageTooLarge:
        """Return the error for a batch of one message above the limit."""
        return MessageTooLarge(
            f"{batch_bytes} bytes exceed the request limit of {group}, {self.batch_bytes_max}: send less, or raise "
            "packet_bytes_max and window_bytes of its brokers"
        )


class GroupBatches:
    """Numbered batches of one broker group, from admission to result.

    Numbers ascend from 1. The oldest unresolved and the newest one are at most 63 apart, so each can be repeated.
    Batches of unknown outcome are repeated first, in order.
    """

    def __init__(self, in_flight_max: int) -> None:
        self._in_flight_max = in_flight_max
        self._of_subject: dict[str, int] = {}
        """Number of unresolved batches of each subject."""
        self._next_number = 1
        self._unresolved: dict[int, Batch] = {}  # ascending, because numbers are given in order
        self._bytes_in_flight = 0
        self.history: deque[Transition] = deque(maxlen=TRANSITIONS_KEPT)
        """Last transitions of all its batches."""
        self.load: int = 0
        """Number of batches in flight."""
        self.limits: Limits = Limits(1 << 30, 1 << 30)
        self.batch_bytes_max: int = BATCH_BYTES_MAX
        """Size limit of a new batch: the size with the lowest cost per message, or less while the broker advises less,
        as it does to a quiet client.
        """

    @property
    def has_any(self) -> bool:
        return bool(self._unresolved)

    @property
    def has_repeats(self) -> bool:
        return self.load < len(self._unresolved)

    def unresolved(self) -> list[Batch]:
        return list(self._unresolved.values())

    def room_bytes(self, subject: str | None = None) -> int:
        """Return the size limit of a new batch's body; 0 if no batch fits, of this or any subject.

        Waiting messages form larger batches, but only within their subject, so each subject has a limit of its own.
        With one common limit of 16, a thousand subjects of one message per second would wait a second for each other
        once an answer takes 20 ms.
        """
        if self.has_repeats:
            return 0
        if subject is not None and self._of_subject.get(subject, 0) >= self._in_flight_max:
            return 0
        if self._unresolved and self._next_number - next(iter(self._unresolved)) >= NUMBERS_SPAN_MAX:
            return 0
        return max(0, self.limits.batch_bytes_max - self._bytes_in_flight)

    def advised(self, batch_bytes: int) -> None:
        """Set the batch size that an answer advises; 0 advises none."""
        self.batch_bytes_max = min(batch_bytes or BATCH_BYTES_MAX, BATCH_BYTES_MAX)

    def never_fits(self, body_bytes: int) -> bool:
        """Return whether a body is too large even for an idle connection."""
        return body_bytes > self.limits.batch_bytes_max

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
        """Return the oldest batch to repeat, if the window has room for it; count it as in flight."""
        for batch in self._unresolved.values():
            if not batch.life.is_in_flight:
                if self.load and self._bytes_in_flight + batch.body_bytes > self.limits.window_bytes:
                    return None
                self._sent(batch)
                return batch
        return None

    def answered(self, batch: Batch, answer: Answer | type[Answer]) -> BatchState:
        """Record the answer to a batch's attempt, which ends it; return the batch's new state."""
        self.load -= 1
        self._bytes_in_flight -= batch.body_bytes
        return batch.life.on(answer)

    def give_up(self, batch: Batch) -> None:
        """Give up a batch at its deadline."""
        if batch.life.is_in_flight:
            self.load -= 1
            self._bytes_in_flight -= batch.body_bytes
        batch.life.on(BatchEvent.GAVE_UP)

    def release(self, batch: Batch) -> None:
        """Forget a batch that is resolved or goes to another group; its number is used up. Does nothing for a batch
        without a number of this group.
        """
        if self._unresolved.get(batch.number) is not batch:
            return
        del self._unresolved[batch.number]
        left = self._of_subject.pop(batch.subject) - 1
        if left:
            self._of_subject[batch.subject] = left

    def expired(self, now_ms: int) -> list[Batch]:
        return [batch for batch in self._unresolved.values() if batch.deadline_ms <= now_ms]
