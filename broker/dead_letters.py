"""Core. Dead letters: messages that a group could not handle, stored again where operators find them.

The copy goes to `%DEAD_RETRY%subject%group`, or to the subject that an operator chose, in the same log. Its properties
describe its fate (qmq.dead_letters), and the ack of the original follows it in the log. The copy's batch number is the
original's sequence: if the process ends between copy and ack, the next master does not store a second copy.

Keeps I22.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from qmq.broker.answers import Counters
from qmq.broker.labels import labels_of
from qmq.broker.subscriptions import Subscriptions
from qmq.codec import Buffer, decode_properties, encode_labels, join_batch, slice_batch, split_batch, without_body
from qmq.crc import crc32
from qmq.dead_letters import delivered, earlier_deliveries, letters_producer, with_fate
from qmq.errors import CorruptFrame, InvalidAck, InvalidMessage, LogError, NotServed, QmqError
from qmq.log.fold import BATCHES_PER_PRODUCER, StoredBatch
from qmq.log.frame import FLAG_DEAD, Frame, FrameKind, label_flags
from qmq.log.index import FrameRef
from qmq.log.progress_frame import DEAD
from qmq.message import TIMES
from qmq.operator_limits import OperatorLimits, dead_letter_subjects
from qmq.replication.ack_gate import Answer
from qmq.replication.mastership import Mastership
from qmq.subjects import dead_letter_subject, real_subject

if TYPE_CHECKING:
    from qmq.broker.serving import ServiceQueue

Key = tuple[str, str, str]

READ_BYTES = 4 << 20
"""Frames read at once; a larger one is read alone."""
READ_FRAMES = 64
COPIES_PER_ACK = BATCHES_PER_PRODUCER
"""A new master finds at most so many copies without an ack behind them."""


class DeadRange(NamedTuple):
    """Pull sequences `[begin, end)` to make dead. `is_begun`: a handler may have begun, so this delivery counts."""

    begin: int
    end: int
    is_begun: bool


@dataclass(eq=False, slots=True)
class _DeadLetterJob:
    """Pull sequences of one consumer that become dead letters."""

    key: Key
    ranges: deque[DeadRange]
    reason: str | None
    answer: Answer | None
    is_reading: bool = False
    rests: bool = False
    """Whether the job waits for the repair of a part that this copy cannot read."""


class DeadLetters:
    """Writer of dead letters. Made by `broker.serving`; ends with the mastership. `wake(subject)` is called when a
    subject got messages.
    """

    def __init__(
        self,
        mastership: Mastership,
        counters: Counters,
        consumption: Subscriptions,
        passes: ServiceQueue,
        wake: Callable[[str], None],
    ) -> None:
        self._mastership = mastership
        self._counters = counters
        self._passes = passes
        self._consumption = consumption
        self._wake = wake
        self._jobs: deque[_DeadLetterJob] = deque()
        self.chosen: dict[tuple[str, str], str] = {}
        """Subjects that operators chose, by (subject, consumer group)."""
        self._former: dict[int, dict[int, StoredBatch]] = {}
        """Copies from before this mastership, by producer: some may have no ack behind them."""

    def limit(self, limits: Iterable[OperatorLimits]) -> None:
        """Replace all operators' limits."""
        self.chosen = dead_letter_subjects(limits)

    def make_dead(self, key: Key, ranges: Iterable[DeadRange], reason: str | None, answer: Answer | None) -> None:
        """Make dead letters of the messages that the consumer `key` still has among these pull sequences; then call
        `answer`. Without a reason, the reason is the number of deliveries.
        """
        same = (job for job in self._jobs if job.key == key and job.answer is None) if answer is None else iter(())
        if (job := next(same, None)) is None:
            job = _DeadLetterJob(key, deque(ranges), reason, answer)
            self._jobs.append(job)
        else:  # each new connection of the consumer finds the same ones while the slave is missing
            known = set(job.ranges)
            job.ranges += [range_ for range_ in ranges if range_ not in known]
        self._go_on(job)

    @property
    def has_any(self) -> bool:
        """Whether messages are waiting to become dead letters."""
        return bool(self._jobs)

    def go_on(self) -> None:
        """Continue work that waited for the next pass, for the slave, or for the end of a swap."""
        is_damaged = self._mastership.log.damage is not None
        for job in list(self._jobs):
            job.rests = job.rests and is_damaged
            self._go_on(job)

    def step_down(self, error: QmqError) -> None:
        """End the mastership: unfinished messages stay unacked and are the next master's."""
        jobs, self._jobs = self._jobs, deque()
        for job in jobs:
            if job.answer is not None:
                job.answer(error)

    def _go_on(self, job: _DeadLetterJob) -> None:
        while job.ranges and not job.is_reading and not job.rests and self._may_store():
            if self._passes.copies_left <= 0:
                self._mastership.host.pass_soon()
                return
            self._step(job)
        if not job.ranges and job in self._jobs:
            self._jobs.remove(job)
            if job.answer is not None:
                job.answer(None)

    def _may_store(self) -> bool:
        """Return whether copies may be stored. Only the current master stores dead letters, and never on one copy
        alone.
        """
        return self._mastership.may_progress and not self._mastership.gate.too_few_in_sync

    def _step(self, job: _DeadLetterJob) -> None:
        """Store the messages of the next few frames; read the frames first if they are not in memory."""
        mastership, log, (subject, group, _) = self._mastership, self._mastership.log, job.key
        if letters_producer(subject, group) not in self._former:
            self._settle_former(subject, group)
        found = self._first_unacked(job)
        if found is None:
            self._passes.copies_left -= 1
            job.ranges.popleft()
            return
        sequence, messages = found
        try:
            refs = [ref for ref in log.frames(subject, sequence, READ_FRAMES) if ref.begin < sequence + messages]
        except CorruptFrame as problem:
            self._damaged(job, problem)
            return
        if not refs or refs[0].begin > sequence:
            gone = refs[0].begin - sequence if refs else messages
            self._settle(job, gone, 0)
            self._consumption.note_skipped(subject, group, gone)
            return
        refs = _few(refs)
        bodies = [log.tail_body(ref.offset) for ref in refs]
        if all(found is not None for found in bodies):
            self._store(job, [found for found in bodies if found is not None])
            return
        job.is_reading = True
        mastership.host.read(partial(log.stored.read_bodies, refs), partial(self._read, job))

    def _read(self, job: _DeadLetterJob, bodies: list[tuple[Frame, Buffer]] | LogError) -> None:
        job.is_reading = False
        if job not in self._jobs:
            return  # the mastership has ended
        if isinstance(bodies, CorruptFrame):
            self._damaged(job, bodies)
            return
        if isinstance(bodies, LogError):
            raise bodies
        if self._may_store():
            self._store(job, bodies)
        self._go_on(job)

    def _damaged(self, job: _DeadLetterJob, problem: CorruptFrame) -> None:
        """Report damage. The messages stay unacked. A job with a request ends; any other continues after the repair."""
        self._mastership.found_damage(problem)
        if job.answer is None:
            job.rests = True
            return
        job.ranges.clear()
        self._jobs.remove(job)
        job.answer(NotServed("this copy is damaged and is being repaired; repeat the request"))

    def _first_unacked(self, job: _DeadLetterJob) -> tuple[int, int] | None:
        """Return (sequence, messages) that the consumer still has at the beginning of the first range, or None."""
        if (consumer := self._consumption.consumer(*job.key)) is None:
            return None
        begin, end, is_begun = job.ranges[0]
        try:
            consumer.check_given(begin, end)
        except InvalidAck:
            return None  # it left, and these pull sequences now mean other messages
        first = next(consumer.overlapping(begin, end), None)  # stops at the first: up to 200,000 may lie scattered
        if first is None:
            return None
        held = first.part(begin, end)
        job.ranges[0] = DeadRange(held.pull, end, is_begun)
        return held.first, held.count

    def _store(self, job: _DeadLetterJob, bodies: list[tuple[Frame, Buffer]]) -> None:
        """Store copies of the messages in these frames that are still unacked, and ack the originals."""
        for frame, body in bodies:
            while (found := self._first_unacked(job) if job.ranges else None) is not None:
                sequence, messages = found
                begin = sequence - frame.first_sequence
                if begin >= frame.count:
                    break  # in the next frame
                end = min(begin + min(messages, self._passes.copies_left, COPIES_PER_ACK), frame.count)
                if not 0 <= begin < end:
                    return  # settled meanwhile, or the pass is over: look again
                cut = body if end - begin == frame.count else slice_batch(body, frame.count, begin, end)
                labels = labels_of(frame, body)[begin:end]
                for at, data in enumerate(split_batch(cut, end - begin)):
                    self._copy(job, sequence + at, data, labels[at : at + 1])
                self._passes.copies_left -= end - begin
                self._settle(job, end - begin, DEAD)

    def _copy(self, job: _DeadLetterJob, sequence: int, data: Buffer, labels: Sequence[int]) -> None:
        """Store the copy of one message; `labels` holds its own label, if it has one."""
        mastership, (subject, group, _) = self._mastership, job.key
        state, producer = mastership.log.state, letters_producer(subject, group)
        stored = self._former[producer].get(sequence)
        if stored is not None and stored.end > state.groups[subject, group].began:
            return  # a copy from before the group was moved may be handled already: store a new one
        owner = real_subject(subject), group
        chosen = self.chosen.get(owner)
        copy = with_fate(data, *self._times_and_reason(job, data), sequence, owner if chosen else None)
        if chosen and copy != data:  # consumers of that subject may filter by tags and order keys
            name, flags = chosen, FLAG_DEAD | (label_flags(labels) if labels else 0)
            body = join_batch([copy]) + (encode_labels(labels) if labels else b"")
        else:  # also copies that consumers of the chosen subject could not decode
            name, flags, body = dead_letter_subject(subject, group), 0, join_batch([copy])
        mastership.log.append(
            FrameKind.MESSAGES,
            name,
            body,
            body_crc=crc32(body),
            epoch=mastership.epoch,
            flags=flags,
            count=1,
            high_watermark=mastership.gate.high_watermark,
            timestamp_ms=mastership.host.now_ms(),
            first_sequence=state.next_sequence.get(name, 0),
            producer=producer,
            batch=sequence,
        )
        self._counters.dead_letters[owner] += 1
        self._wake(name)
        mastership.host.pass_soon()

    def _times_and_reason(self, job: _DeadLetterJob, data: Buffer) -> tuple[int, str]:
        """Return `message.times` of the last delivery that a handler may have begun, and the reason."""
        (subject, _, _), consumer = job.key, self._consumption.consumer(*job.key)
        assert consumer is not None  # it has the copied messages unacked
        held, is_begun = consumer.range_of(job.ranges[0].begin), job.ranges[0].is_begun
        times = held.attempts - (not is_begun)
        if subject != real_subject(subject):
            times += _times_before(data)
        if job.reason is not None:
            return times, job.reason
        suspected = f" (suspected: {held.suspected})" if held.suspected else ""
        return times, f"{delivered(times)}{suspected}, and never acked"

    def _settle_former(self, subject: str, group: str) -> None:
        """Ack messages with dead-letter copies that are older than this mastership and have no ack behind them.

        New copies push older ones out of the fold's window. This master remembers those; the next one could not.
        """
        state, producer = self._mastership.log.state, letters_producer(subject, group)
        progress = state.groups.get((subject, group))
        if progress is None:
            return
        former = self._former[producer] = dict(state.producers.get(producer, {}))
        stored = sorted(sequence for sequence, batch in former.items() if batch.end > progress.began)
        for name, consumer in list(progress.consumers.items()):
            pulls = [
                span.pull + at - span.first for span in consumer.unacked for at in stored if span.first <= at < span.end
            ]
            entries = [(pull, pull + 1, DEAD) for pull in pulls]
            if entries:
                self._mastership.append_progress(FrameKind.ACK, (subject, group, name), entries)

    def _settle(self, job: _DeadLetterJob, messages: int, settled: int) -> None:
        """Ack the first messages of the first range; `settled` is DEAD if dead letters of them are stored."""
        begin, end, _ = job.ranges[0]
        self._mastership.append_progress(FrameKind.ACK, job.key, [(begin, begin + messages, settled)])
        if begin + messages == end:  # the next range may be in the same frame; `_first_unacked` finds its rest
            job.ranges.popleft()


def _times_before(data: Buffer) -> int:
    """Return the deliveries of a mailbox's message before it came there."""
    try:
        return earlier_deliveries(decode_properties(without_body(data)).get(TIMES, ""))
    except InvalidMessage:  # bytes of a foreign producer
        return 0


def _few(refs: list[FrameRef]) -> list[FrameRef]:
    """Return as many of the first frames as one reading takes."""
    size = 0
    for at, ref in enumerate(refs):
        size += ref.length
        if at and size > READ_BYTES:
            return refs[:at]
    return refs
