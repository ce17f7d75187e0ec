"""Laws of a delay group (I11), besides those of any two copies.

Two results are legal and surprising. A dispatch of unknown outcome may be given up: its messages may be stored a second
time in another group, and a later cancel may succeed. And a dispatch that a master planned alone, on one disk, is
unknown to the next master: its messages may be sent again, and a later cancel may succeed. An outcome that such a
master wrote alone, and that is cut, is unknown too.
"""

from __future__ import annotations

from collections import defaultdict, deque
from typing import TYPE_CHECKING

from qmq.client.batch import NumberedBatch
from qmq.codec import Buffer, decode_envelope, split_batch
from qmq.log.delay_frames import Outcome, decode_dispatch, decode_settled
from qmq.log.frame import Frame, FrameKind
from qmq.remoting.commands import Produced
from qmq.replication.clocks import DEAD_BAND_MS, METASERVER, SLAVE
from qmq.types import Epoch
from tests.simulation.cores.oracle import Oracle
from tests.simulation.cores.watched_log import WatchedLog
from tests.simulation.events import Events, Violation

if TYPE_CHECKING:
    from tests.simulation.cores.machine import Process
    from tests.simulation.delay.brokers import Key
    from tests.simulation.delay.clients import Question
    from tests.simulation.delay.machine import DelayProcess

RECENT = 400
BEGIN_MS = 1_700_000_000_000
HEARD_MS = 3_000
"""Age at which older clock readings are forgotten: READING_MS_MAX and WINDOW_MS, and some."""


class DelayOracle(Oracle):
    """Made per seed. Raises Violation."""

    def __init__(self, events: Events, unknown_ms: int) -> None:
        super().__init__(events)
        self.unknown_ms = unknown_ms
        self.dues: dict[str, set[int]] = {}
        """Id -> possible due times: as sent, and as rescheduled if that may have worked."""
        self.asked: set[str] = set()
        self.asked_again: set[str] = set()
        self.recent: deque[str] = deque(maxlen=RECENT)
        """Newest acknowledged ids."""
        self.cancelled: dict[str, int] = {}
        self.answered_sent: set[str] = set()
        self.places: dict[str, list[Key]] = defaultdict(list)
        """Id -> where it was stored, each batch once."""
        self.tried: dict[str, dict[Key, None]] = defaultdict(dict)
        self.unknown: set[Key] = set()
        """Attempted batches, except those with one attempt, rejected."""
        self._reported_stored: dict[tuple[int, int], list[tuple[int, int]]] = {}
        """(end, chain) of a frame -> (producer id, number) of batches that it reports as stored."""
        self._known_stored: set[tuple[int, int]] = set()
        """(producer id, number) of batches that a frame on both copies reports as stored."""
        self._given_up: dict[tuple[int, int], tuple[int, Epoch]] = {}
        """(producer id, number) of batches settled as not stored -> (time, epoch)."""
        self.alone: set[str] = set()
        """Messages that a master without a slave sent before both copies had the plan."""
        self.refused_later: set[str] = set()
        self.plans: dict[tuple[int, int], tuple[Frame, str, list[tuple[int, int]]]] = {}
        self._contents: dict[Key, list[str]] = {}

    # Reports of logs.

    def check_frame(self, log: WatchedLog, frame: Frame, body: Buffer) -> None:
        super().check_frame(log, frame, body)
        if frame.kind == FrameKind.DISPATCH:
            group, places = decode_dispatch(body, frame.count)
            if (frame.producer, frame.batch) not in self.plans:
                self._check_clocks(log.owner, frame, max(due_ms for _, due_ms in places))
            self.plans[frame.producer, frame.batch] = (frame, group, places)
        elif frame.kind == FrameKind.SETTLED:
            for producer, number, outcome in decode_settled(body, frame.count):
                if outcome == Outcome.STORED:
                    reported = self._reported_stored.setdefault((frame.end, frame.chain), [])
                    reported.append((producer, number))
                else:
                    self._given_up.setdefault((producer, number), (self._events.now_ms, frame.epoch))

    def _commit(self, process: Process, high: int, epoch: Epoch) -> None:
        """Note outcomes that both copies have. One that a single copy has may be cut."""
        super()._commit(process, high, epoch)
        log, safe = process.log, self.committed.end
        for end, chain in [place for place in self._reported_stored if place[0] <= safe]:
            reported = self._reported_stored.pop((end, chain))
            known = log.chain_at(end)
            if known == chain or (known is None and log.hides(end)):
                self._known_stored.update(reported)

    def _check_clocks(self, owner: str, frame: Frame, due_ms: int) -> None:
        """Check that a planned batch is due by two clocks of three, if the master has all readings."""
        machine, other = sorted(self.machines, key=lambda machine: machine.name != owner)
        process = machine.process
        if process is None or process.node.master is None or frame.epoch != process.node.master.epoch:
            return
        now_ms = self._events.now_ms
        if not {METASERVER, SLAVE} <= process.node.clocks_ahead_ms().keys() or other.skewed_ms + HEARD_MS > now_ms:
            return
        clocks = sorted(BEGIN_MS + now_ms + skew_ms for skew_ms in (0, machine.wall_skew_ms, other.wall_skew_ms))
        self._events.count("planned by three clocks")
        if machine.wall_skew_ms:
            self._events.count("planned by two other clocks")
        if due_ms - clocks[1] > DEAD_BAND_MS:
            raise Violation(f"I11: {owner} sends {due_ms - clocks[1]} ms early by two clocks of three")

    def check_process(self, process: DelayProcess) -> None:
        super().check_process(process)
        master = process.node.master
        if master is not None and master.gate.too_few_in_sync:
            process.alone_end = process.log.end

    # Reports of clients.

    def acknowledged(self, batch: tuple[int, int], subject: str, ids: list[str], produced: Produced) -> None:
        super().acknowledged(batch, subject, ids, produced)
        self.recent.extend(id for id in ids if id in self.acked)

    def question_answered(self, question: Question, fate: str) -> None:
        """Check and note the answer to a cancel or reschedule."""
        id = question.id
        if fate == "cancelled":
            if question.due_ms and id not in self.asked_again:
                raise Violation(f"I11: {id} is cancelled without an order")
            self.cancelled.setdefault(id, self._events.now_ms)
            if id not in self.alone and not all(map(self._has_unknown_outcome, self.places[id])):
                raise Violation(f"I11: {id} is answered as cancelled, and was stored")
        elif fate == "rescheduled":
            if id not in self.asked_again:
                self.dues[id] = {question.due_ms}
        elif fate == "sent":
            if id in self.cancelled:
                raise Violation(f"I11: {id} is answered as sent, and was cancelled")
            self.answered_sent.add(id)
        elif question.was_known and not self.tried[id] and question.attempts == 1:
            raise Violation(f"I11: {id} is answered as unknown, and was acknowledged and not sent")

    # Reports of senders.

    def attempting(self, process: DelayProcess, group: str, batch: NumberedBatch) -> bool:
        """Check a batch that a delay server sends now; return whether it is the first attempt."""
        master, key = process.node.master, (group, batch.producer, batch.number)
        if master is None or not master.has_begun:
            raise Violation(f"I11: {process.name} sends although it is no master")
        frame, planned, places = self.plans[batch.producer, batch.number]
        body = b"".join(batch.blocks)
        messages = [bytes(message) for message in split_batch(body, batch.count)]
        ids = [decode_envelope(message).id for message in messages]
        if planned != group:
            raise Violation(f"I11: {process.name} sends a batch to {group} that is planned for {planned}")
        if self._contents.setdefault(key, ids) != ids or len(ids) != len(places):
            raise Violation(f"I11: batch {key} was {self._contents[key]}, and is {ids}")
        is_first = key not in self.tried[ids[0]]
        self._check_plan(process, frame, places, ids)
        dues = [int.from_bytes(message[9:17], "big") for message in messages]
        for id, due_ms in zip(ids, dues, strict=True):
            if due_ms > frame.timestamp_ms:
                raise Violation(f"I11: {id} is sent {due_ms - frame.timestamp_ms} ms before it is due")
            if due_ms not in self.dues[id] and id not in self.refused_later and id not in self.alone:
                raise Violation(f"I11: {id} is sent for an old due time")
            if id in self.cancelled and id not in self.alone:
                raise Violation(f"I11: {id}, which is cancelled, is sent")
            self.tried[id][key] = None
        return is_first

    def _check_plan(self, process: DelayProcess, frame: Frame, places: list[tuple[int, int]], ids: list[str]) -> None:
        master, log = process.node.master, process.log
        # No later mastership wrote frames that both copies have.
        may_be_committed = frame.end <= self.committed.end and frame.epoch <= self.committed.epoch
        if may_be_committed and self._has_committed(log):
            return
        gate = master.gate
        was_alone = frame.end <= process.alone_end
        if was_alone and frame.end <= log.flushed_end and all(number < gate.high_watermark for number, _ in places):
            self._events.count("sent by a master alone")
            self.alone.update(ids)
            return
        raise Violation(f"I11: {process.name} sends the plan at {frame.offset} before it is safe")

    # Reports of broker groups.

    def stored(self, id: str, key: Key) -> None:
        places = self.places[id]
        if id in self.cancelled and id not in self.alone and not self._has_unknown_outcome(key):
            raise Violation(f"I11: {id}, which is cancelled, is stored")
        if places and not self._may_repeat(id, key):
            raise Violation(f"I11: {id} is stored as {key} and was as {places}, and its outcome was known")
        if places:
            self._events.count("stored twice")
        places.append(key)

    def _may_repeat(self, id: str, key: Key) -> bool:
        if id in self.alone or id in self.refused_later:
            return True
        return all(self._may_be_both(other, key) for other in self.places[id])

    def _may_be_both(self, other: Key, key: Key) -> bool:
        """Whether one of two batches with the same message was given up: the earlier one, unless it arrives late.

        The same group gets the message again only from a mastership without that outcome, or long after.
        """
        if not self._has_unknown_outcome(other) and key[1:] not in self._given_up:
            return False
        if other[0] != key[0]:
            return True
        first, second = sorted((other, key), key=lambda batch: self.plans[batch[1:]][0].offset)
        given_up_ms, epoch = self._given_up.get(first[1:], (self._events.now_ms, None))
        return self.plans[second[1:]][0].epoch != epoch or self._events.now_ms - given_up_ms >= self.unknown_ms

    def _has_unknown_outcome(self, key: Key) -> bool:
        """Whether some master may not have the outcome of this batch."""
        return key in self.unknown and key[1:] not in self._known_stored

    # Checks at the end.

    def check_sent(self) -> None:
        for id in self.acked:
            if id in self.cancelled or self.places[id]:
                continue
            raise Violation(f"I11: {id} was acknowledged and is stored nowhere; sent as {list(self.tried[id])}")
        for id in self.answered_sent:
            if not self.places[id] and id not in self.cancelled:
                raise Violation(f"I11: {id} is answered as sent, and is stored nowhere")
