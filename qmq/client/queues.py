"""Core. What waits in a producer: a queue per subject, and one per subject and broker group for messages in order.

A message with an order key waits in the *lane* of the broker group that its key belongs to. A lane has one batch under
way at a time, which goes nowhere else, so that a retry is never overtaken. When the broker groups of a subject change,
its lanes are filled anew, once nothing of them is under way any more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from qmq.client.batching import BATCH_MESSAGES_MAX, Batch, Done, Outcome, refused, unstored, with_labels
from qmq.client.routing import group_of_key
from qmq.codec import join_batch
from qmq.errors import QmqError, QueueFull

SHARES = 8
"""A queue may be this many times as long as what is free: one that does not move leaves a ninth to the others."""


class Backlog:
    """How much waits in all queues of a producer, and how much more one of them may take.

    One queue alone has the room of `messages_max` and `bytes_max`. With others it has less, and it never has all:
    subjects that no broker takes leave room for those that move.
    """

    def __init__(self, messages_max: int, bytes_max: int) -> None:
        self._messages_max, self._bytes_max = messages_max, bytes_max
        self.messages = self.bytes = 0
        self.waiters: list[Callable[[], None]] = []
        """Called once when something moved: a batch left a queue, was resolved, or was given up."""

    def has_room(self, queue: SubjectQueue, size: int) -> bool:
        """Say whether `queue` may take one more message of `size` bytes; if nothing waits at all, of any size."""
        messages, waiting = len(queue.waiting) + 1, queue.waiting_bytes + size
        if messages + SHARES * (self.messages + 1) > (SHARES + 1) * self._messages_max:
            return False
        return not self.messages or waiting + SHARES * (self.bytes + size) <= (SHARES + 1) * self._bytes_max

    def moved(self) -> None:
        waiters, self.waiters = self.waiters, []
        for wake in waiters:
            wake()

    def full(self) -> QueueFull:
        bounds = f"queue_messages_max {self._messages_max}, queue_bytes_max {self._bytes_max}"
        return QueueFull(f"{self.messages} messages wait already, {self.bytes} bytes ({bounds})")


class Waiting(NamedTuple):
    """One message that was sent alone and waits for a batch."""

    data: bytes
    id: str
    deadline_ms: int
    done: Done
    label: int = 0


class SubjectQueue:
    """What waits to be sent for one subject: whole batches first, then single messages, which gather to batches.

    `group`: the only broker group that may have it, "" if the key of the messages has none yet; None: any may.
    """

    def __init__(self, subject: str, backlog: Backlog, group: str | None = None) -> None:
        self.subject, self.group = subject, group
        self.ready: deque[Batch] = deque()
        self.waiting: deque[Waiting] = deque()
        self.waiting_bytes = 0
        self.under_way: list[Waiting] | None = None
        """A lane's messages of which no other may get ahead."""
        self._backlog = backlog
        self._has_labels = False
        self._batches_made = 0

    def __bool__(self) -> bool:
        return bool(self.ready or self.waiting)

    def add(self, one: Waiting) -> None:
        size, backlog = len(one.data), self._backlog
        self.waiting.append(one)
        self.waiting_bytes += size
        backlog.messages += 1
        backlog.bytes += size
        if one.label:
            self._has_labels = True

    def add_batch(self, batch: Batch) -> None:
        self._batches_made += 1
        batch.order = (self._batches_made,)
        self.ready.append(batch)

    def put_back(self, *batches: Batch) -> None:
        """Queue batches again that a group refused, where they were: before those that were made later."""
        if self.under_way is not None:
            self.waiting.extendleft(reversed(self.under_way))
            self._count(len(self.under_way), sum(len(one.data) for one in self.under_way))
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
        labels = [one.label for one in taken] if self._has_labels else ()

        def resolved(batch: Batch) -> None:
            self.under_way = None
            for position, one in enumerate(taken):
                one.done(batch.receipt(position))

        blocks, flags = with_labels(join_batch([one.data for one in taken]), labels)
        batch = Batch(self.subject, [one.id for one in taken], blocks, taken[0].deadline_ms, resolved, flags)
        self._batches_made += 1
        batch.order = (self._batches_made,)
        if self.group is not None:
            self.under_way = taken
        return batch

    def _take(self, bytes_max: int) -> list[Waiting]:
        taken: list[Waiting] = []
        each, size = (12, 32) if self._has_labels else (4, 16)
        while self.waiting and len(taken) < BATCH_MESSAGES_MAX:
            size += len(self.waiting[0].data) + each
            if taken and size > bytes_max:
                break
            taken.append(self.waiting.popleft())
        self._count(-len(taken), -sum(len(one.data) for one in taken))
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
            one = self.waiting.popleft()
            self._count(-1, -len(one.data))
            one.done(unstored(Outcome.REFUSED, one.id, self.subject, "", error))

    def take_all(self) -> Iterable[Waiting]:
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
        self._subject, self._backlog = subject, backlog
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
        waiting = [one for queue in self for one in queue.take_all()]
        self._groups = self._wanted
        self._lanes = {group: SubjectQueue(self._subject, self._backlog, group) for group in self._groups}
        for one in waiting:
            self.lane(one.label).add(one)
        return True
