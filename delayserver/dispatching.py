"""Core. Planning of due messages: which go next, to which broker group, in which batch.

`due` puts messages into the pending queue of their subject. `go_on` plans a batch of them for a broker group, and
`delayserver.flights` sends it. The schedule, which follows the log, then drops the messages or makes them due again.

Subjects do not wait for each other: one without a route, or with groups that refuse, delays no other. `Overdue` counts
the messages that are due and not sent.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial
from heapq import nsmallest
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from qmq.client.batch import BatchSender
from qmq.delayserver.decisions import Counters, Decisions
from qmq.delayserver.flights import REST_MS, Flight, Flights, bytes_of
from qmq.delayserver.pending_queue import FREE, FairShares, Fits, Leftovers, PendingQueue, Piece
from qmq.delayserver.schedule.record import Records
from qmq.log.delay_frames import Outcome
from qmq.replication.mastership import Mastership

log = logging.getLogger(__name__)

BATCH_MESSAGES_MAX = 500
BATCH_BYTES_MAX = 512 * 1024
LOOK_MS = 50
"""Pause of a subject that found no group; longer with many subjects, so that searching takes a third of the time."""
LOOKS_PER_MS = 50
LOOKS_MAX = 1000
"""Subjects that search for a group in one pass: 5 to 10 ms in which the loop serves nothing else."""
PASS_MESSAGES = 5000
"""Planned in one pass: 20 ms. Then the loop handles answers, intake and newly due messages."""
QUANTUM = 512 * 1024
"""Credit of a subject per round: about a full batch. A message costs its bytes and MESSAGE_COST."""
MESSAGE_COST = 1024
"""Planning, reading, sending and settling a message of 200 bytes takes five times as long as copying its bytes."""

SUBJECTS_MAX = 20
"""Subjects that are listed, the longest-waiting ones. Each is a metric series, and there may be 100,000 subjects."""


class Part(NamedTuple):
    """Number of overdue messages, and the earliest due time of them."""

    messages: int
    oldest_ms: int

    def with_more(self, messages: int, oldest_ms: int) -> Part:
        return Part(self.messages + messages, min(self.oldest_ms, oldest_ms))


class Overdue(NamedTuple):
    """Messages that are due and not sent, in all, by subject and by broker group.

    A message counts from its due time until a broker group has stored it: on the wheel, in its subject's queue, on
    disk, or in flight. So every backlog shows here, of any cause. `oldest_ms`: the earliest due time of all, None if
    there are none; `subjects`: at most SUBJECTS_MAX.
    """

    messages: int
    oldest_ms: int | None
    subjects: dict[str, Part]
    groups: dict[str, Part]

    @classmethod
    def of(
        cls,
        queues: Iterable[PendingQueue],
        in_flight: Iterable[Flight],
        on_wheel: int,
        first_on_wheel_ms: int | None,
        on_disk: Iterable[tuple[str, Part]] = (),
    ) -> Overdue:
        """Count overdue messages.

        Args:
            on_disk: overdue messages that are on disk only, by subject.
            on_wheel: overdue messages on the wheel; `first_on_wheel_ms`: their earliest due time.
        """
        subjects, groups = dict[str, Part](), dict[str, Part]()
        for queue in queues:
            if queue.waiting:
                subjects[queue.subject] = Part(queue.waiting, queue.oldest_ms)
        for name, part in on_disk:
            _add(subjects, name, part)
        for batch in in_flight:
            _add(subjects, batch.subject, Part(batch.count, batch.oldest_ms))
            _add(groups, batch.group, Part(batch.count, batch.oldest_ms))
        named = nsmallest(SUBJECTS_MAX, subjects.items(), key=lambda item: (item[1].oldest_ms, -item[1].messages))
        oldest = [part.oldest_ms for _, part in named[:1]]
        if on_wheel and first_on_wheel_ms is not None:
            oldest.append(first_on_wheel_ms)
        messages = sum(part.messages for part in subjects.values()) + on_wheel
        return cls(messages, min(oldest, default=None), dict(named), groups)


def _add(parts: dict[str, Part], name: str, part: Part) -> None:
    if part.messages:
        known = parts.get(name)
        parts[name] = known.with_more(*part) if known else part


class Dispatcher:
    """Dispatcher of due messages. Made by the master; ends with the mastership.

    Args:
        subject_name: returns the name of a record's subject.
        planned: receives numbers and messages of each batch, which saves a look-up when its frame is filed.
        leftovers: makes the `Leftovers`, given a function that returns the length of a subject's queue.
    """

    def __init__(
        self,
        mastership: Mastership,
        senders: BatchSender,
        decisions: Decisions,
        counters: Counters,
        subject_name: Callable[[int], str],
        planned: Callable[[int, int, Records], None],
        unknown_ms: int,
        leftovers: Callable[[Callable[[int], int]], Leftovers],
    ) -> None:
        self._mastership = mastership
        self._senders = senders
        self._decisions = decisions
        self._subject_name = subject_name
        self.flights = Flights(mastership, senders, decisions, counters, planned, unknown_ms, self)
        self._queues: dict[int, PendingQueue] = {}
        self._named: dict[str, PendingQueue] = {}
        self.leftovers = leftovers(lambda subject: self._queues[subject].count)
        self._shares = FairShares[int](QUANTUM)
        """Subjects with a non-empty queue, the next one first."""
        self._crowded: dict[str, dict[int, None]] = {}
        """Broker group -> subjects that found no room there, the longest-waiting first."""

    # Intake.

    def expect(self, records: Records) -> None:
        """Request the routes of messages that are due soon."""
        for subject in np.unique(records["subject"]).tolist():
            self._queue(subject)

    def due(self, records: Records) -> None:
        """Put messages into their queues, the earliest first. Messages that an unfiled frame decides about are left out
        when a batch is planned.
        """
        subjects = records["subject"]
        if (subjects == subjects[0]).all():
            self._put(int(subjects[0]), records)
        else:
            self._put_all(records, subjects)
        self.leftovers.make_room((subject, self._queues[subject]) for subject in self._shares)

    def _put_all(self, records: Records, subjects: npt.NDArray[np.uint32]) -> None:
        order = np.argsort(subjects, kind="stable")
        ordered = records.take(order)
        borders = np.flatnonzero(np.diff(ordered["subject"])) + 1
        for piece in np.split(ordered, borders):
            # A copy of a few does not keep the others in memory.
            self._put(int(piece["subject"][0]), piece if 8 * len(piece) > len(ordered) else piece.copy())

    def _queue(self, subject: int) -> PendingQueue:
        queue = self._queues.get(subject)
        if queue is None:
            queue = self._queues[subject] = PendingQueue(self._subject_name(subject))
            self._named[queue.subject] = queue
            self._senders.watch(queue.subject)
        return queue

    def _put(self, subject: int, records: Records) -> None:
        queue = self._queue(subject)
        if not len(records := self.leftovers.arrived(subject, records)):
            return
        queue.put(records, self._senders.sharers(queue.subject), partial(self._senders.home, queue.subject))
        self._shares.join(subject)

    def remove(self, records: Records) -> None:
        """Remove messages from their queues: they were cancelled, or moved."""
        for subject in np.unique(records["subject"]).tolist():
            rest = self.leftovers.gone(subject, records)
            if subject in self._shares:
                queue = self._queues[subject]
                queue.remove(rest["number"])
                if not queue.count:
                    self._shares.leave(subject)
                self.leftovers.ran_low(subject, queue.count)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is due, in flight, or to be written."""
        return self.leftovers.is_empty and self.flights.is_idle and not len(self._shares)

    @property
    def waiting(self) -> int:
        """Messages that are due and not planned."""
        return sum(self._queues[subject].waiting for subject in self._shares) + self.leftovers.messages

    def why_not(self, subject: str) -> str:
        """Return why no broker group accepts messages of the subject; empty if one does."""
        return "" if self._senders.groups(subject) else self._senders.why_not(subject)

    def overdue(self, on_wheel: int, first_on_wheel_ms: int | None) -> Overdue:
        """Return the due and unsent messages; see `Overdue.of`."""
        queues = (self._queues[subject] for subject in self._shares)
        on_disk = [(self._queues[subject].subject, Part(*part)) for subject, *part in self.leftovers.parts()]
        return Overdue.of(queues, self.flights.open.values(), on_wheel, first_on_wheel_ms, on_disk)

    # Planning.

    def go_on(self, now_ms: int) -> None:
        """Plan batches: subjects take turns until none can send, or the pass is long enough. `now_ms` is monotonic."""
        self.flights.go_on(now_ms)
        queues, looks, planned = self._queues, 0, 0
        if not self._shares:
            return
        able = [
            subject
            for subject in self._shares
            if queues[subject].rests_until_ms <= now_ms and queues[subject].looks_ms <= now_ms
        ]
        for subject in self._shares.rounds(able):
            if looks == LOOKS_MAX or planned >= PASS_MESSAGES:
                self._mastership.host.pass_soon()
                return
            looks += 1
            planned += self._spend(subject, queues[subject], now_ms)

    def _spend(self, subject: int, queue: PendingQueue, now_ms: int) -> int:
        """Plan batches of a subject within its credit; return the number of messages."""
        planned = 0
        while queue.count and queue.looks_ms <= now_ms and self._shares.has_credit(subject):
            records = self._plan_batch(queue, now_ms)
            if records is None:
                self._pause(subject, queue, now_ms)
                break
            planned += len(records)
            self._shares.spend(subject, 1 + bytes_of(records) + MESSAGE_COST * len(records))
            if queue.failures:  # a single batch tests whether the group works again
                queue.looks_ms = now_ms + REST_MS[min(queue.failures, len(REST_MS) - 1)]
        if not queue.count:
            self._shares.leave(subject)
        self.leftovers.ran_low(subject, queue.count)
        return planned

    def _pause(self, subject: int, queue: PendingQueue, now_ms: int) -> None:
        """Pause a subject for which no group has room."""
        queue.looks_ms = now_ms + LOOK_MS + len(self._shares) // LOOKS_PER_MS
        if groups := self._senders.groups(queue.subject):
            for group in groups:
                if not self.flights.has_room(group, queue.subject):
                    self._crowded.setdefault(group, {})[subject] = None
        elif not queue.has_warned and not self._mastership.gate.too_few_in_sync:
            queue.has_warned = True
            log.warning("no broker group accepts subject=%s: %s", queue.subject, self._senders.why_not(queue.subject))

    def _plan_batch(self, queue: PendingQueue, now_ms: int) -> Records | None:
        """Plan one batch; return its messages, maybe none, or None if no group accepts any of the queue now."""
        queue.refresh_homes(self._senders.sharers(queue.subject), partial(self._senders.home, queue.subject))
        free = self._any_group(queue, now_ms)
        homes = [home if self._takes_keys(queue, home) else None for home in queue.homes]
        if free is None and not any(homes):
            return None
        for at, piece in enumerate(queue.pieces):
            group, fits = self._choose(queue, piece, free, homes, now_ms)
            if group is None:
                continue
            chosen = queue.take(at, self._cut(group, piece.records, fits))
            queue.has_warned = False
            if len(chosen := self._decisions.not_named(chosen)):  # others were cancelled or moved just now
                self.flights.begin(queue.subject, group, chosen)
            return chosen
        return None

    def _choose(
        self, queue: PendingQueue, piece: Piece, free: str | None, homes: list[str | None], now_ms: int
    ) -> tuple[str | None, Fits]:
        """Return the group of the first message that can go now, and which messages can join it.

        Args:
            free: the group for messages without order key, or None.
            homes: for each home of order keys, the group itself, or None if it accepts nothing now.
        """
        can_go: Fits = np.array([*(home is not None for home in homes), free is not None])[piece.homes]
        if self._mastership.gate.too_few_in_sync:  # continue only with messages that both copies have
            can_go &= self._decisions.is_with_both(piece.records)
        can_go &= piece.records["due"] <= self._mastership.retry_ms()  # a wrong clock may have stepped back
        if not can_go.any():
            return None, can_go
        first = int(piece.homes[int(np.argmax(can_go))])
        group = free if first == FREE else homes[first]
        assert group is not None
        joins = np.array([*(home == group for home in homes), queue.avoided.get(group, 0) <= now_ms])
        return group, can_go & joins[piece.homes]

    def _any_group(self, queue: PendingQueue, now_ms: int) -> str | None:
        avoided = queue.avoided
        names = [
            name
            for name in self._senders.groups(queue.subject)
            if avoided.get(name, 0) <= now_ms and self.flights.has_room(name, queue.subject)
        ]
        return min(names, key=self._senders.in_flight, default=None)

    def _takes_keys(self, queue: PendingQueue, home: str | None) -> bool:
        """Return whether this group accepts messages with order keys now: none of the subject are in flight there."""
        if home is None or self.flights.is_blocked(queue.subject, home):
            return False
        return home in self._senders.groups(queue.subject) and self.flights.has_room(home, queue.subject)

    def _cut(self, group: str, records: Records, fits: Fits) -> npt.NDArray[np.intp]:
        """Return the places of the messages in the next batch."""
        places = np.flatnonzero(fits)[:BATCH_MESSAGES_MAX]
        sizes = np.cumsum(records["size"][places].astype(np.int64) + 16)
        most = max(min(BATCH_BYTES_MAX, self.flights.room(group)), int(sizes[0]))
        return places[: int(np.searchsorted(sizes, most, "right"))]

    # Batches that ended.

    def settled(self, subject: str, group: str, outcome: Outcome, now_ms: int) -> None:
        """Use the room of a batch that ended; rest a subject if its batch was not stored."""
        if (queue := self._named.get(subject)) is not None:
            if outcome is Outcome.STORED:
                if queue.failures:
                    queue.failures = queue.rests_until_ms = queue.looks_ms = 0
            elif queue.rests_until_ms <= now_ms:  # batches that fail together are one failure
                queue.rests_until_ms = now_ms + REST_MS[min(queue.failures, len(REST_MS) - 1)]
                queue.failures += 1
        self._wake_next(group)

    def _wake_next(self, group: str) -> None:
        """Give free room to the longest-waiting subject."""
        crowd = self._crowded.get(group)
        while crowd:
            subject = next(iter(crowd))
            del crowd[subject]
            if subject in self._shares:
                self._queues[subject].looks_ms = 0
                return

    def avoid(self, subject: str, group: str, until_ms: int) -> None:
        """Plan no messages of the subject for this group until then: an earlier batch may be stored there."""
        if (queue := self._named.get(subject)) is not None:
            queue.avoided[group] = until_ms

    def unblocked(self, subject: str) -> None:
        """Look at the subject again: its messages with order keys may go."""
        if (queue := self._named.get(subject)) is not None:
            queue.looks_ms = 0

    def forget_queues(self) -> None:
        """Empty all queues: due messages come again from a rebuilt schedule."""
        self._shares.clear()
        self._queues.clear()
        self._named.clear()
        self.leftovers.forget()
        self._crowded.clear()
