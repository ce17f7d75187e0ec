"""Core. Dispatch of due messages: planned in the log, sent once the plan is safe, settled by the answer.

`due` puts messages into the pending queue of their subject. `go_on` plans a batch of them for a broker group: a
dispatch frame. When both disks have that frame and the messages were read, the batch is sent, and its answer becomes a
settled frame. The schedule, which follows the log, then drops the messages or makes them due again.

A batch of unknown outcome is repeated to its group under its numbers (qmq.client.batch). Subjects do not wait for each
other: one without a route, or whose groups refuse, delays no other.

Keeps I11.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from qmq.client.batch import (
    BATCH_LIFE,
    Answer,
    BatchEvent,
    BatchLife,
    BatchSender,
    BatchState,
    NotStored,
    NumberedBatch,
    Stored,
)
from qmq.codec import encode_labels, join_batch, split_batch
from qmq.crc import crc32
from qmq.delayserver.decisions import LATENESS_MS_BUCKETS, Counters, Decisions
from qmq.delayserver.messages import Messages, Records, read_messages
from qmq.delayserver.overdue import Overdue, Part
from qmq.delayserver.pending_queue import FREE, KEY_SHIFT, FairShares, Fits, Leftovers, PendingQueue, Piece, keys_of
from qmq.errors import CorruptFrame, InvalidMessage, LogError, QmqError
from qmq.log.delay_frames import Outcome, Settlement
from qmq.log.frame import label_flags
from qmq.replication.mastership import Mastership
from qmq.replication.readonly import Reason
from qmq.states import TRANSITIONS_KEPT, Transition

log = logging.getLogger(__name__)

BATCH_MESSAGES_MAX = 500
BATCH_BYTES_MAX = 512 * 1024
IN_FLIGHT_MAX = 5_000
"""Messages in flight to one broker group: the most that other messages wait for. The rest stays in its queue at 50
bytes each. A group that stopped keeps its messages, and takes no other group's room.
"""
LANES = 16
"""Producer ids per broker group, shared by subjects. A batch without outcome delays one sixteenth of them."""
SPAN_MAX = 48
"""Distance of a lane's newest batch number from its oldest open one. A broker remembers 64 (qmq.log.fold)."""
REFUSED_MS = 300_000
"""When a refused message is tried again."""
REST_MS = (50, 100, 200, 500, 1000, 2000, 5000)
"""Pauses of a subject after consecutive failures, and of a batch of unknown outcome before it is repeated."""
LOOK_MS = 50
"""Pause of a subject that found no group; longer if many do, so that searching takes a third of the time."""
LOOKS_PER_MS = 50
LOOKS_MAX = 1000
"""Subjects that search for a group in one pass: 5 to 10 ms in which the loop serves nothing else."""
PASS_MESSAGES = 5000
"""Planned in one pass: 20 ms. Then the loop handles answers, intake and newly due messages."""
QUANTUM = 512 * 1024
"""Credit of a subject per round: about a full batch. A message costs its bytes and MESSAGE_COST."""
MESSAGE_COST = 1024
"""Planning, reading, sending and settling a message of 200 bytes takes five times as long as copying its bytes."""


class _Batch:
    """Messages of one subject in flight to one broker group, under fixed numbers."""

    __slots__ = (
        "producer",
        "number",
        "subject",
        "group",
        "records",
        "oldest_ms",
        "end",
        "is_safe",
        "life",
        "numbered",
        "tries",
        "next_ms",
        "sent_ms",
        "unsent_bytes",
    )

    def __init__(
        self, producer: int, number: int, subject: str, group: str, records: Records, end: int, life: BatchLife
    ) -> None:
        self.producer = producer
        self.number = number
        self.subject = subject
        self.group = group
        self.records = records
        self.end = end
        self.oldest_ms = int(records["due"].min()) if len(records) else 0
        """`end`: offset of the log; everything before it must be safe before the batch is sent."""
        self.is_safe = False
        self.life = life
        self.numbered: NumberedBatch | None = None
        self.tries = 0
        self.next_ms = 0
        self.sent_ms: int | None = None
        """When this mastership first sent it."""
        self.unsent_bytes = 0
        """Bytes that are reserved at its group and not sent yet."""

    @property
    def key(self) -> tuple[int, int]:
        return self.producer, self.number

    @property
    def count(self) -> int:
        return len(self.records)

    @property
    def is_ordered(self) -> bool:
        """Whether it has messages with order keys."""
        return bool(keys_of(self.records).any())


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
        self._counters = counters
        self._subject_name = subject_name
        self._planned = planned
        self._unknown_ms = unknown_ms
        self.history: deque[Transition] = deque(maxlen=TRANSITIONS_KEPT)
        """The last transitions of its batches."""
        self.open: dict[tuple[int, int], _Batch] = {}
        """Planned and unsettled batches, by producer id and number."""
        self._queues: dict[int, PendingQueue] = {}
        self._named: dict[str, PendingQueue] = {}
        self.leftovers = leftovers(lambda subject: self._queues[subject].count)
        self._shares = FairShares[int](QUANTUM)
        """Subjects with a non-empty queue, the next one first."""
        self._lanes: dict[int, dict[int, None]] = {}
        """Producer id -> its open numbers, ascending."""
        self._next: dict[int, int] = {}
        self._producers: dict[tuple[str, int], int] = {}
        self._ordered: dict[tuple[str, str], set[tuple[int, int]]] = {}
        """(subject, group) -> batches with order keys that block the next one: open, or not stored and not filed."""
        self._began_ms = mastership.host.now_ms()
        self._settled: list[Settlement] = []
        self._refused_messages: list[tuple[str, Records, bytes]] = []
        self._retry: dict[_Batch, None] = {}
        self._crowded: dict[str, dict[int, None]] = {}
        """Broker group -> subjects that found no room there, the longest-waiting first."""
        self._in_flight_of: dict[str, int] = {}
        """Broker group -> messages in open batches."""
        self._unsent_bytes_of: dict[str, int] = {}
        self._is_over = False

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
        """Take messages out of their queues: they were cancelled, or moved."""
        for subject in np.unique(records["subject"]).tolist():
            rest = self.leftovers.gone(subject, records)
            if subject in self._shares:
                queue = self._queues[subject]
                queue.remove(rest["number"])
                if not queue.count:
                    self._shares.leave(subject)
                self.leftovers.ran_low(subject, queue.count)

    def resume(self, producer: int, number: int, subject: str, group: str, records: Records) -> None:
        """Resume a batch that an earlier mastership planned and did not settle: it may be stored already."""
        mastership = self._mastership
        batch = _Batch(producer, number, subject, group, records, mastership.log.end, self._life())
        batch.life.on(BatchEvent.ADOPTED)
        self._senders.watch(subject)
        self._opened(batch)
        self._when_safe(batch)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is due, in flight, or to be written."""
        return self.leftovers.is_empty and not (
            len(self._shares) or self.open or self._settled or self._refused_messages
        )

    @property
    def waiting(self) -> int:
        """Messages that are due and not planned."""
        return sum(self._queues[subject].waiting for subject in self._shares) + self.leftovers.messages

    @property
    def in_flight(self) -> dict[str, int]:
        """Messages in flight, by broker group."""
        return {group: count for group, count in self._in_flight_of.items() if count}

    def why_not(self, subject: str) -> str:
        """Return why no broker group takes messages of the subject; empty if one does."""
        return "" if self._senders.groups(subject) else self._senders.why_not(subject)

    def overdue(self, on_wheel: int, first_on_wheel_ms: int | None) -> Overdue:
        """Return the due and unsent messages; see `Overdue.of`."""
        queues = (self._queues[subject] for subject in self._shares)
        on_disk = [(self._queues[subject].subject, Part(*part)) for subject, *part in self.leftovers.parts()]
        return Overdue.of(queues, self.open.values(), on_wheel, first_on_wheel_ms, on_disk)

    # Planning.

    def go_on(self, now_ms: int) -> None:
        """Write outcomes, repeat batches that may be stored, and plan new ones. `now_ms` is monotonic."""
        self._write_settled()
        for batch in [batch for batch in self._retry if batch.next_ms <= now_ms]:
            del self._retry[batch]
            self._send(batch)
        self._plan_fairly(now_ms)

    def _plan_fairly(self, now_ms: int) -> None:
        """Let all subjects that can send take turns until none can, or the pass is long enough."""
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
            records = self._plan_what_can_go(queue, now_ms)
            if records is None:
                self._cannot_go(subject, queue, now_ms)
                break
            planned += len(records)
            self._shares.spend(subject, 1 + _bytes(records) + MESSAGE_COST * len(records))
            if queue.failures:  # a single batch tests whether the group works again
                queue.looks_ms = now_ms + REST_MS[min(queue.failures, len(REST_MS) - 1)]
        if not queue.count:
            self._shares.leave(subject)
        self.leftovers.ran_low(subject, queue.count)
        return planned

    def _cannot_go(self, subject: int, queue: PendingQueue, now_ms: int) -> None:
        """Pause a subject for which no group has room."""
        queue.looks_ms = now_ms + LOOK_MS + len(self._shares) // LOOKS_PER_MS
        if groups := self._senders.groups(queue.subject):
            for group in groups:
                if not self._has_room(group, queue):
                    self._crowded.setdefault(group, {})[subject] = None
        elif not queue.complained and not self._mastership.gate.too_few_in_sync:
            queue.complained = True
            log.warning("no broker group takes subject=%s: %s", queue.subject, self._senders.why_not(queue.subject))

    def _plan_what_can_go(self, queue: PendingQueue, now_ms: int) -> Records | None:
        """Plan one batch; return its messages, maybe none, or None if no group takes any of the queue now."""
        queue.know(self._senders.sharers(queue.subject), partial(self._senders.home, queue.subject))
        free = self._any_group(queue, now_ms)
        homes = [home if self._takes_keys(queue, home) else None for home in queue.homes]
        if free is None and not any(homes):
            return None
        for at, piece in enumerate(queue.pieces):
            group, fits = self._choose(queue, piece, free, homes, now_ms)
            if group is None:
                continue
            chosen = queue.take(at, self._cut(group, piece.records, fits))
            queue.complained = False
            if len(chosen := self._decisions.not_named(chosen)):  # others were cancelled or moved just now
                self._write(queue, group, chosen)
            return chosen
        return None

    def _choose(
        self, queue: PendingQueue, piece: Piece, free: str | None, homes: list[str | None], now_ms: int
    ) -> tuple[str | None, Fits]:
        """Return the group of the first message that can go now, and which messages can join it.

        Args:
            free: the group for messages without order key, or None.
            homes: for each home of order keys, the group itself, or None if it takes nothing now.
        """
        can_go: Fits = np.array([*(home is not None for home in homes), free is not None])[piece.homes]
        if self._mastership.gate.too_few_in_sync:  # continue only with messages that both copies have
            can_go &= self._decisions.is_with_both(piece.records)
        can_go &= piece.records["due"] <= self._mastership.retry_ms()  # not so if a wrong clock stepped back
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
            if avoided.get(name, 0) <= now_ms and self._has_room(name, queue)
        ]
        return min(names, key=self._senders.in_flight, default=None)

    def _takes_keys(self, queue: PendingQueue, home: str | None) -> bool:
        """Return whether this group takes messages with order keys now: none of the subject are in flight there."""
        if home is None or self._ordered.get((queue.subject, home)):
            return False
        return home in self._senders.groups(queue.subject) and self._has_room(home, queue)

    def _cut(self, group: str, records: Records, fits: Fits) -> npt.NDArray[np.intp]:
        """Return the places of the messages in the next batch."""
        places = np.flatnonzero(fits)[:BATCH_MESSAGES_MAX]
        sizes = np.cumsum(records["size"][places].astype(np.int64) + 16)
        most = max(min(BATCH_BYTES_MAX, self._room(group)), int(sizes[0]))
        return places[: int(np.searchsorted(sizes, most, "right"))]

    def _has_room(self, group: str, queue: PendingQueue) -> bool:
        """Return whether a group takes another batch, and a number is free for it."""
        if self._in_flight_of.get(group, 0) >= IN_FLIGHT_MAX or not self._room(group):
            return False
        producer = self._producer(group, queue.subject)
        numbers = self._lanes.get(producer)
        return not numbers or self._next[producer] - next(iter(numbers)) < SPAN_MAX

    def _room(self, group: str) -> int:
        """Return how many bytes a group takes now, besides planned and unsent ones."""
        return max(0, self._senders.room(group) - self._unsent_bytes_of.get(group, 0))

    def _no_longer_unsent(self, batch: _Batch) -> None:
        if batch.unsent_bytes:
            self._unsent_bytes_of[batch.group] -= batch.unsent_bytes
            batch.unsent_bytes = 0

    def _producer(self, group: str, subject: str) -> int:
        """Return the producer id of a lane, unique to this mastership, so its numbers begin with 1.

        The epoch alone is not unique: a restored disk uses it again. A broker group would then take new messages for
        the batch that had their number, and they would count as sent.
        """
        mastership, lane = self._mastership, crc32(subject.encode()) % LANES
        producer = self._producers.get((group, lane))
        if producer is None:
            epoch = f"{mastership.epoch.term}/{mastership.epoch.boot}/{self._began_ms}"
            name = f"{mastership.group}/{epoch}/{group}/{lane}"
            digest = blake2b(name.encode(), digest_size=8).digest()
            producer = self._producers[group, lane] = int.from_bytes(digest, "little") or 1
        return producer

    def _write(self, queue: PendingQueue, group: str, records: Records) -> None:
        """Write the plan; the batch is sent once that is safe."""
        producer = self._producer(group, queue.subject)
        number = self._next[producer] = self._next.get(producer, 0) + 1
        frame = self._decisions.dispatch(queue.subject, group, records, producer=producer, batch=number)
        self._planned(producer, number, records)
        batch = _Batch(producer, number, queue.subject, group, records, frame.end, self._life())
        batch.unsent_bytes = _bytes(records) + 16 * len(records)
        self._unsent_bytes_of[group] = self._unsent_bytes_of.get(group, 0) + batch.unsent_bytes
        self._opened(batch)
        self._when_safe(batch)

    def _life(self) -> BatchLife:
        return BatchLife(BATCH_LIFE, self.history)

    def _opened(self, batch: _Batch) -> None:
        self.open[batch.key] = batch
        if batch.is_ordered:
            self._ordered.setdefault((batch.subject, batch.group), set()).add(batch.key)
        self._lanes.setdefault(batch.producer, {})[batch.number] = None
        self._next[batch.producer] = max(self._next.get(batch.producer, 0), batch.number)
        self._in_flight_of[batch.group] = self._in_flight_of.get(batch.group, 0) + len(batch.records)

    # Sending.

    def _when_safe(self, batch: _Batch) -> None:
        """Send the batch when both copies have its plan. Without a slave, messages that both copies have go on.
        Messages of this copy alone become due again (P3), unless an earlier mastership may have sent them.
        """

        def answer(error: QmqError | None) -> None:
            if self._is_over:
                return
            if error is None:
                batch.is_safe = True
                self._read(batch)  # this disk has everything now
            elif batch.life.may_be_stored:
                self._later(batch)
            else:
                batch.life.on(BatchEvent.GAVE_UP)
                self._settle(batch, Outcome.NOT_STORED, self._mastership.host.monotonic_ms())

        data_end = self._decisions.data_end(batch.records) if len(batch.records) else 0
        self._mastership.gate.progress(batch.end, data_end, answer)

    def _read(self, batch: _Batch) -> None:
        message_log, numbers = self._mastership.log, Messages.of(batch.records)

        def done(result: list[bytes] | LogError) -> None:
            if self._is_over:
                return
            if isinstance(result, LogError):
                self._not_read(batch, result)
                return
            batch.numbered = _numbered(batch, result)
            self._send(batch)

        self._mastership.host.read(lambda: read_messages(message_log, numbers), done)

    def _not_read(self, batch: _Batch, error: LogError) -> None:
        """Report damage: the copy is repaired, then the batch is retried."""
        if isinstance(error, CorruptFrame):
            self._mastership.found_damage(error)
        log.error("messages not read subject=%s messages=%d: %s", batch.subject, len(batch.records), error)
        self._later(batch)

    def _later(self, batch: _Batch) -> None:
        batch.next_ms = self._mastership.host.monotonic_ms() + REST_MS[min(batch.tries, len(REST_MS) - 1)]
        batch.tries += 1
        self._retry[batch] = None

    def _send(self, batch: _Batch) -> None:
        if Reason.FENCED in self._mastership.readonly:
            return  # the next master has this plan, or plans these messages itself
        if not batch.is_safe:
            self._when_safe(batch)  # the slave was missing
        elif batch.numbered is None:
            self._read(batch)  # an earlier read failed
        else:
            if batch.sent_ms is None:
                batch.sent_ms = self._mastership.host.monotonic_ms()
            self._no_longer_unsent(batch)
            batch.life.on(BatchEvent.SENT)
            self._senders.send(batch.group, batch.numbered, lambda answer: self._answered(batch, answer))

    def _answered(self, batch: _Batch, answer: Answer) -> None:
        if self._is_over or batch.key not in self.open:
            return
        now_ms = self._mastership.host.monotonic_ms()
        self._mastership.host.pass_soon()
        state = batch.life.on(answer)
        if isinstance(answer, Stored):
            if answer.refused:
                self._refused(batch, answer.refused)
            self._settle(batch, Outcome.STORED, now_ms)
        elif isinstance(answer, NotStored) and state is BatchState.NOT_STORED:
            if self._is_at_fault(batch, answer):
                self._refused(batch, [(0, str(answer.error))])
                self._settle(batch, Outcome.STORED, now_ms)
                return
            log.warning("batch not stored subject=%s group=%s: %s", batch.subject, batch.group, answer.error)
            self._counters.not_stored_batches += 1
            self._settle(batch, Outcome.NOT_STORED, now_ms)
        else:
            why = str(answer.error) if isinstance(answer, NotStored) else answer.reason
            self._is_unknown(batch, why)

    def _is_at_fault(self, batch: _Batch, answer: NotStored) -> bool:
        """Return whether its only message would be refused in any batch."""
        return len(batch.records) == 1 and isinstance(answer.error, InvalidMessage)

    def _is_unknown(self, batch: _Batch, why: str) -> None:
        """Repeat the batch at its group; after a long time let its messages go elsewhere, at the risk of duplicates."""
        now_ms = self._mastership.host.monotonic_ms()
        self._counters.unknown_answers += 1
        if batch.sent_ms is not None and now_ms - batch.sent_ms >= self._unknown_ms and self._may_go_elsewhere(batch):
            log.warning(
                "batch of unknown outcome is given up subject=%s group=%s messages=%d: %s",
                batch.subject,
                batch.group,
                len(batch.records),
                why,
            )
            batch.life.on(BatchEvent.GAVE_UP)
            self._settle(batch, Outcome.NOT_STORED, now_ms)
            if (queue := self._named.get(batch.subject)) is not None:
                queue.avoided[batch.group] = now_ms + self._unknown_ms
            return
        self._later(batch)

    def _may_go_elsewhere(self, batch: _Batch) -> bool:
        """Return whether another group takes these messages. The same group would store them twice under new
        numbers.
        """
        if batch.is_ordered:
            keys = np.unique(keys_of(batch.records)).tolist()
            homes = {self._senders.home(batch.subject, key << KEY_SHIFT) for key in keys if key}
            return batch.group not in homes and None not in homes
        return bool(set(self._senders.groups(batch.subject)) - {batch.group})

    # Settling.

    def _settle(self, batch: _Batch, outcome: Outcome, now_ms: int) -> None:
        del self.open[batch.key]
        numbers = self._lanes[batch.producer]
        del numbers[batch.number]
        self._in_flight_of[batch.group] -= len(batch.records)
        self._retry.pop(batch, None)
        self._no_longer_unsent(batch)
        self._settled.append((batch.producer, batch.number, outcome))
        self._mastership.host.pass_soon()
        if (queue := self._named.get(batch.subject)) is not None:
            if outcome is Outcome.STORED:
                if queue.failures:
                    queue.failures = queue.rests_until_ms = queue.looks_ms = 0
            elif queue.rests_until_ms <= now_ms:  # batches that fail together are one failure
                queue.rests_until_ms = now_ms + REST_MS[min(queue.failures, len(REST_MS) - 1)]
                queue.failures += 1
        self._wake_next(batch.group)
        if outcome is Outcome.STORED:
            self._count(batch)
            self.filed(batch.subject, batch.group, batch.key)

    def _wake_next(self, group: str) -> None:
        """Give free room to the longest-waiting subject."""
        crowd = self._crowded.get(group)
        while crowd:
            subject = next(iter(crowd))
            del crowd[subject]
            if subject in self._shares:
                self._queues[subject].looks_ms = 0
                return

    def filed(self, subject: str, group: str, key: tuple[int, int]) -> None:
        """Unblock order keys: the schedule has filed the batch as settled, and made messages that were not stored due
        again.
        """
        waiting = self._ordered.get((subject, group))
        if waiting is not None and key not in self.open:
            waiting.discard(key)
            if not waiting:
                del self._ordered[subject, group]
                if (queue := self._named.get(subject)) is not None:
                    queue.looks_ms = 0

    def _count(self, batch: _Batch) -> None:
        counters = self._counters
        counters.sent_batches += 1
        counters.sent_messages += len(batch.records)
        late_ms = np.maximum(0, self._mastership.retry_ms() - batch.records["due"].astype(np.int64))
        places = np.searchsorted(LATENESS_MS_BUCKETS, late_ms)
        for place, count in enumerate(np.bincount(places, minlength=len(counters.lateness_ms_counts)).tolist()):
            counters.lateness_ms_counts[place] += count
        counters.lateness_ms_sum += int(late_ms.sum())

    def _refused(self, batch: _Batch, refused: Sequence[tuple[int, str]]) -> None:
        """Keep messages that a broker refuses as they are: an operator may raise its limits."""
        assert batch.numbered is not None
        messages = [bytes(message) for message in split_batch(batch.numbered.blocks[0], len(batch.records))]
        for position, reason in refused:
            log.error("message refused by a broker subject=%s group=%s: %s", batch.subject, batch.group, reason)
            self._counters.refused_messages_later += 1
            record = batch.records[position : position + 1]
            self._refused_messages.append((batch.subject, record, messages[position]))

    def _write_settled(self) -> None:
        refused, self._refused_messages = self._refused_messages, []
        for subject, record, message in refused:
            self._decisions.carry(
                subject, record, [message], [self._mastership.retry_ms() + REFUSED_MS], replaces=False
            )
        if self._settled:
            settled, self._settled = self._settled, []
            self._decisions.settle(settled)

    def step_down(self) -> None:
        """End the mastership; the next master resumes the open batches."""
        self._is_over = True

    def forget_queues(self) -> None:
        """Empty all queues: due messages come again from a rebuilt schedule."""
        self._shares.clear()
        self._queues.clear()
        self._named.clear()
        self.leftovers.forget()
        self._crowded.clear()


def _bytes(records: Records) -> int:
    return int(records["size"].sum(dtype=np.int64))


def _numbered(batch: _Batch, messages: list[bytes]) -> NumberedBatch:
    body, labels, flags = join_batch(messages), batch.records["label"].tolist(), 0
    if any(labels):
        body, flags = body + encode_labels(labels), label_flags(labels)
    return NumberedBatch(batch.producer, batch.number, batch.subject, len(messages), crc32(body), flags, (body,))
