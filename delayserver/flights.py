"""Core. Batches in flight: each plan is sent once it is safe, repeated until its outcome is known, and settled.

A batch has a lane: producer id and number. When both disks have its dispatch frame and the messages were read, it is
sent, and its answer becomes a settled frame. A batch of unknown outcome is repeated to its group under its numbers
(qmq.client.batch).

Keeps I11.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np

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
from qmq.delayserver.pending_queue import KEY_SHIFT, keys_of
from qmq.delayserver.schedule import InFlight
from qmq.delayserver.schedule.record import Messages, Records, read_messages
from qmq.errors import CorruptFrame, InvalidMessage, LogError, QmqError
from qmq.log.delay_frames import Outcome, Settlement
from qmq.log.frame import label_flags
from qmq.replication.mastership import Mastership
from qmq.replication.readonly import Reason
from qmq.states import TRANSITIONS_KEPT, Transition

if TYPE_CHECKING:
    from qmq.delayserver.dispatching import Dispatcher

log = logging.getLogger(__name__)

IN_FLIGHT_MAX = 5_000
"""Messages in flight to one broker group; no message waits behind more. The rest stays in its queue at 50 bytes each. A
group that stopped keeps its messages, and takes no other group's room.
"""
LANES = 16
"""Producer ids per broker group, shared by subjects. A batch without outcome delays one sixteenth of them."""
SPAN_MAX = 48
"""Distance of a lane's newest batch number from its oldest open one. A broker remembers 64 (qmq.log.fold)."""
REFUSED_MS = 300_000
"""When a refused message is tried again."""
REST_MS = (50, 100, 200, 500, 1000, 2000, 5000)
"""Pauses of a subject after consecutive failures, and of a batch of unknown outcome before it is repeated."""


@dataclass(slots=True, eq=False)
class Flight:
    """Messages of one subject in flight to one broker group, under fixed numbers."""

    producer: int
    number: int
    subject: str
    group: str
    records: Records
    end: int
    """Offset of the log; everything before it must be safe before the batch is sent."""
    life: BatchLife
    is_safe: bool = False
    numbered: NumberedBatch | None = None
    tries: int = 0
    next_ms: int = 0
    sent_ms: int | None = None
    """When this mastership first sent it."""
    unsent_bytes: int = 0
    """Bytes that are reserved at its group and not sent yet."""
    oldest_ms: int = field(init=False)
    """Earliest due time."""

    def __post_init__(self) -> None:
        self.oldest_ms = int(self.records["due"].min()) if len(self.records) else 0

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


class Flights:
    """Batches in flight. Made by the dispatcher; ends with the mastership.

    Args:
        planned: receives numbers and messages of each batch, which saves a look-up when its frame is filed.
    """

    def __init__(
        self,
        mastership: Mastership,
        senders: BatchSender,
        decisions: Decisions,
        counters: Counters,
        planned: Callable[[int, int, Records], None],
        unknown_ms: int,
        planner: Dispatcher,
    ) -> None:
        self._mastership = mastership
        self._senders = senders
        self._decisions = decisions
        self._counters = counters
        self._planned = planned
        self._unknown_ms = unknown_ms
        self._planner = planner
        self.history: deque[Transition] = deque(maxlen=TRANSITIONS_KEPT)
        """The last transitions of its batches."""
        self.open: dict[tuple[int, int], Flight] = {}
        """Planned and unsettled batches, by producer id and number."""
        self._lanes: dict[int, dict[int, None]] = {}
        """Producer id -> its open numbers, ascending."""
        self._next: dict[int, int] = {}
        self._producers: dict[tuple[str, int], int] = {}
        self._ordered: dict[tuple[str, str], set[tuple[int, int]]] = {}
        """(subject, group) -> batches with order keys that block the next one: open, or not stored and not filed."""
        self._began_ms = mastership.host.now_ms()
        self._settled: list[Settlement] = []
        self._refused_messages: list[tuple[str, Records, bytes]] = []
        self._retry: dict[Flight, None] = {}
        self._in_flight_of: dict[str, int] = {}
        """Broker group -> messages in open batches."""
        self._unsent_bytes_of: dict[str, int] = {}
        self._is_over = False

    @property
    def is_idle(self) -> bool:
        """Whether nothing is in flight, or to be written."""
        return not (self.open or self._settled or self._refused_messages)

    @property
    def in_flight(self) -> dict[str, int]:
        """Messages in flight, by broker group."""
        return {group: count for group, count in self._in_flight_of.items() if count}

    def go_on(self, now_ms: int) -> None:
        """Write outcomes, and repeat batches that may be stored. `now_ms` is monotonic."""
        self._write_settled()
        for batch in [batch for batch in self._retry if batch.next_ms <= now_ms]:
            del self._retry[batch]
            self._send(batch)

    def is_blocked(self, subject: str, group: str) -> bool:
        """Return whether messages of the subject with order keys are in flight there: the next ones wait."""
        return (subject, group) in self._ordered

    def has_room(self, group: str, subject: str) -> bool:
        """Return whether a group takes another batch, and a number is free for it."""
        if self._in_flight_of.get(group, 0) >= IN_FLIGHT_MAX or not self.room(group):
            return False
        producer = self._producer(group, subject)
        numbers = self._lanes.get(producer)
        return not numbers or self._next[producer] - next(iter(numbers)) < SPAN_MAX

    def room(self, group: str) -> int:
        """Return how many bytes a group takes now, besides planned and unsent ones."""
        return max(0, self._senders.room(group) - self._unsent_bytes_of.get(group, 0))

    def _release_room(self, batch: Flight) -> None:
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

    def begin(self, subject: str, group: str, records: Records) -> None:
        """Write the plan; the batch is sent once that is safe."""
        producer = self._producer(group, subject)
        number = self._next[producer] = self._next.get(producer, 0) + 1
        frame = self._decisions.dispatch(subject, group, records, producer=producer, batch=number)
        self._planned(producer, number, records)
        batch = Flight(producer, number, subject, group, records, frame.end, self._life())
        batch.unsent_bytes = bytes_of(records) + 16 * len(records)
        self._unsent_bytes_of[group] = self._unsent_bytes_of.get(group, 0) + batch.unsent_bytes
        self._opened(batch)
        self._when_safe(batch)

    def resume(self, known: InFlight) -> None:
        """Resume a batch that an earlier mastership planned and did not settle: it may be stored already."""
        mastership = self._mastership
        batch = Flight(
            known.producer, known.batch, known.subject, known.group, known.records, mastership.log.end, self._life()
        )
        batch.life.on(BatchEvent.ADOPTED)
        self._senders.watch(known.subject)
        self._opened(batch)
        self._when_safe(batch)

    def _life(self) -> BatchLife:
        return BatchLife(BATCH_LIFE, self.history)

    def _opened(self, batch: Flight) -> None:
        self.open[batch.key] = batch
        if batch.is_ordered:
            self._ordered.setdefault((batch.subject, batch.group), set()).add(batch.key)
        self._lanes.setdefault(batch.producer, {})[batch.number] = None
        self._next[batch.producer] = max(self._next.get(batch.producer, 0), batch.number)
        self._in_flight_of[batch.group] = self._in_flight_of.get(batch.group, 0) + len(batch.records)

    # Sending.

    def _when_safe(self, batch: Flight) -> None:
        """Send the batch when both copies have its plan. Without a slave, messages that both copies have are sent.
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

    def _read(self, batch: Flight) -> None:
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

    def _not_read(self, batch: Flight, error: LogError) -> None:
        """Report damage: the copy is repaired, then the batch is retried."""
        if isinstance(error, CorruptFrame):
            self._mastership.found_damage(error)
        log.error("messages not read subject=%s messages=%d: %s", batch.subject, len(batch.records), error)
        self._later(batch)

    def _later(self, batch: Flight) -> None:
        batch.next_ms = self._mastership.host.monotonic_ms() + REST_MS[min(batch.tries, len(REST_MS) - 1)]
        batch.tries += 1
        self._retry[batch] = None

    def _send(self, batch: Flight) -> None:
        if Reason.FENCED in self._mastership.readonly:
            return  # the next master has this plan, or plans these messages itself
        if not batch.is_safe:
            self._when_safe(batch)  # the slave was missing
        elif batch.numbered is None:
            self._read(batch)  # an earlier read failed
        else:
            if batch.sent_ms is None:
                batch.sent_ms = self._mastership.host.monotonic_ms()
            self._release_room(batch)
            batch.life.on(BatchEvent.SENT)
            self._senders.send(batch.group, batch.numbered, lambda answer: self._answered(batch, answer))

    def _answered(self, batch: Flight, answer: Answer) -> None:
        """Settle a batch by its answer, or repeat it if its outcome is unknown."""
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
            self._repeat_or_give_up(batch, why)

    def _is_at_fault(self, batch: Flight, answer: NotStored) -> bool:
        """Return whether the batch has a single message, which would be refused in any batch."""
        return len(batch.records) == 1 and isinstance(answer.error, InvalidMessage)

    def _repeat_or_give_up(self, batch: Flight, why: str) -> None:
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
            self._planner.avoid(batch.subject, batch.group, now_ms + self._unknown_ms)
            return
        self._later(batch)

    def _may_go_elsewhere(self, batch: Flight) -> bool:
        """Return whether another group takes these messages. The same group would store them twice under new
        numbers.
        """
        if batch.is_ordered:
            keys = np.unique(keys_of(batch.records)).tolist()
            homes = {self._senders.home(batch.subject, key << KEY_SHIFT) for key in keys if key}
            return batch.group not in homes and None not in homes
        return bool(set(self._senders.groups(batch.subject)) - {batch.group})

    # Settling.

    def _settle(self, batch: Flight, outcome: Outcome, now_ms: int) -> None:
        del self.open[batch.key]
        numbers = self._lanes[batch.producer]
        del numbers[batch.number]
        self._in_flight_of[batch.group] -= len(batch.records)
        self._retry.pop(batch, None)
        self._release_room(batch)
        self._settled.append((batch.producer, batch.number, outcome))
        self._mastership.host.pass_soon()
        self._planner.settled(batch.subject, batch.group, outcome, now_ms)
        if outcome is Outcome.STORED:
            self._count(batch)
            self.filed(batch.subject, batch.group, batch.key)

    def filed(self, subject: str, group: str, key: tuple[int, int]) -> None:
        """Unblock order keys: the schedule has filed the batch as settled, and made messages that were not stored due
        again.
        """
        waiting = self._ordered.get((subject, group))
        if waiting is not None and key not in self.open:
            waiting.discard(key)
            if not waiting:
                del self._ordered[subject, group]
                self._planner.unblocked(subject)

    def _count(self, batch: Flight) -> None:
        counters = self._counters
        counters.sent_batches += 1
        counters.sent_messages += len(batch.records)
        late_ms = np.maximum(0, self._mastership.retry_ms() - batch.records["due"].astype(np.int64))
        places = np.searchsorted(LATENESS_MS_BUCKETS, late_ms)
        for place, count in enumerate(np.bincount(places, minlength=len(counters.lateness_ms_counts)).tolist()):
            counters.lateness_ms_counts[place] += count
        counters.lateness_ms_sum += int(late_ms.sum())

    def _refused(self, batch: Flight, refused: Sequence[tuple[int, str]]) -> None:
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


def bytes_of(records: Records) -> int:
    return int(records["size"].sum(dtype=np.int64))


def _numbered(batch: Flight, messages: list[bytes]) -> NumberedBatch:
    body, labels, flags = join_batch(messages), batch.records["label"].tolist(), 0
    if any(labels):
        body, flags = body + encode_labels(labels), label_flags(labels)
    return NumberedBatch(batch.producer, batch.number, batch.subject, len(messages), crc32(body), flags, (body,))
