"""Core. Answers to pulls: each waits for the high watermark and for its bytes, then leaves in order.

A frame is read once for all answers that need it at about the same time. A listener asks for a quarter of a large batch
at a time, in several pulls; consumer groups that read the same backlog are often close together. Reading and checking
the frame for each pull was a third of a master's cost per message.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from qmq.broker.choice import Chosen
from qmq.broker.subscriptions import Subscription, WaitingPull
from qmq.codec import Buffer, labels_bytes, slice_batch
from qmq.crc import crc32
from qmq.errors import CorruptFrame, LogError, QmqError
from qmq.log import MessageLog
from qmq.log.frame import FLAG_DEAD, FLAG_LABELLED, FLAG_NO_SLAVE_IN_SYNC, FLAG_ORDERED, Frame
from qmq.log.index import FrameRef
from qmq.remoting import commands
from qmq.remoting.commands import FLAG_IS_DEAD, FLAG_SUSPECTED
from qmq.remoting.packet import Packet
from qmq.replication.ack_gate import AckGate
from qmq.replication.mastership import Mastership
from qmq.replication.ports import Host, Link
from qmq.server.producing import ProduceCounters

if TYPE_CHECKING:
    from qmq.broker.serving import ServiceQueue


@dataclass(slots=True)
class Counters(ProduceCounters):
    """Counts of one process for its metrics; they outlive masterships."""

    pulled_messages: int = 0
    acked_messages: int = 0
    dead_letters: Counter[tuple[str, str]] = field(default_factory=Counter)
    """By the group's real subject and its name, whichever subject stores the dead letters."""
    returned_consumers: int = 0


DELIVERY_BYTES = 48 << 10
"""Cost of a delivery besides its bytes: progress frame, answer, bookkeeping."""
OWED_BYTES_MAX = 16 << 20
"""Unsent answers of one connection; at the limit its pulls wait. A connection that reads nothing costs this much memory
and its socket buffer, however much it pulls.
"""
KEPT_BYTES = 16 << 20
"""Cache of the frames read last. A log only grows during a mastership, so cached frames stay valid."""

Found = list[tuple[Frame, Buffer]]


class _MissingFrames:
    """Frames of one answer that are not in memory."""

    __slots__ = ("found", "_missing", "_done")

    def __init__(self, missing: int, done: Callable[[Found | LogError], None]) -> None:
        self.found: Found = []
        self._missing = missing
        self._done = done

    def take(self, frame: Frame, body: Buffer) -> None:
        self.found.append((frame, body))
        if len(self.found) == self._missing:
            self._done(self.found)

    def fail(self, error: LogError) -> None:
        if self._missing:
            self._missing = 0
            self._done(error)


class Bodies:
    """Cache and reader of frames. Made by the delivery; ends with the mastership."""

    def __init__(self, log: MessageLog, host: Host) -> None:
        self._log = log
        self._host = host
        self._waiting: dict[int, list[_MissingFrames]] = {}
        """Offset of a frame that is being read -> answers that need it."""
        self._kept: dict[int, tuple[Frame, Buffer]] = {}
        """By offset, least recently used first."""
        self._kept_bytes = 0

    def at_hand(self, offset: int) -> tuple[Frame, Buffer] | None:
        """Return the messages frame at `offset` and its body, if it is in memory."""
        if (found := self._kept.pop(offset, None)) is not None:
            self._kept[offset] = found
            return found
        return self._log.tail_body(offset)

    def read(self, refs: list[FrameRef], done: Callable[[Found | LogError], None]) -> None:
        """Read frames that are not in memory. They are on disk: only frames in the tail may be unwritten.

        `done` is called once, with all frames in any order, or with the first error.
        """
        missing = _MissingFrames(len(refs), done)
        new = [ref for ref in refs if ref.offset not in self._waiting]
        for ref in refs:
            self._waiting.setdefault(ref.offset, []).append(missing)
        if new:
            self._host.read(partial(self._log.stored.read_bodies, new), partial(self._were_read, new))

    def _were_read(self, refs: list[FrameRef], found: Found | LogError) -> None:
        answers_of = [self._waiting.pop(ref.offset) for ref in refs]
        if isinstance(found, LogError):
            for answer in dict.fromkeys(answer for answers in answers_of for answer in answers):
                answer.fail(found)
            return
        for (frame, body), answers in zip(found, answers_of, strict=True):
            self._keep(frame, body)
            for answer in answers:
                answer.take(frame, body)

    def _keep(self, frame: Frame, body: Buffer) -> None:
        kept = self._kept
        kept[frame.offset] = frame, body
        self._kept_bytes += len(body)
        while self._kept_bytes > KEPT_BYTES:
            self._kept_bytes -= len(kept.pop(next(iter(kept)))[1])


class PullAnswer:
    """Answer to one pull. It is sent once the messages are on enough copies and their bytes were read."""

    __slots__ = (
        "subscription",
        "packet",
        "chosen",
        "bytes",
        "bodies",
        "is_read",
        "_gate",
        "_settled",
        "_flags",
        "_is_safe",
        "_is_over",
    )

    def __init__(
        self,
        subscription: Subscription,
        packet: Packet,
        chosen: Chosen,
        gate: AckGate,
        settled: Callable[[Link, int], None],
    ) -> None:
        self.subscription = subscription
        self.packet = packet
        self.chosen = chosen
        self.bytes = chosen.bytes()
        """Approximate size."""
        self.bodies: dict[int, tuple[Frame, Buffer]] = {}
        self.is_read = True
        self._gate = gate
        self._settled = settled
        self._flags = 0
        self._is_safe = self._is_over = False

    def safe(self, error: QmqError | None) -> None:
        """Note that the pull frame is on enough copies; refuse the pull if that failed."""
        if error is not None:
            subscription = self.subscription
            subscription.link.refuse(self.packet, error)
            subscription.in_flight -= 1
            subscription.resend = min(subscription.resend, self.chosen.parts[0].pull_sequence)
            self._settled(subscription.link, self.bytes)
            self._is_over = True
        # The state at this moment: a slave that connects while the bytes are being read has not confirmed the pull.
        self._flags = FLAG_NO_SLAVE_IN_SYNC if self._gate.too_few_in_sync else 0
        self._is_safe = True
        self.subscription.answer_in_order()

    def read(self, bodies: list[tuple[Frame, Buffer]]) -> None:
        """Add the frames that were not in memory."""
        self.bodies.update((found[0].offset, found) for found in bodies)
        self.is_read = True
        self.subscription.answer_in_order()

    def send(self) -> bool:
        """Send the answer if it is safe and read; return whether nothing more is owed."""
        if self._is_over:
            return True
        if not self._is_safe or not self.is_read:
            return False
        self.subscription.in_flight -= 1
        self._settled(self.subscription.link, self.bytes)
        if self.subscription.over is not None:
            self.subscription.link.refuse(self.packet, self.subscription.over)
            return True
        buffers: list[Buffer] = []
        for part in self.chosen.parts:
            frame, body = self.bodies[part.ref.offset]
            crc, begin, count = frame.body_crc, frame.first_sequence, part.end - part.begin
            if count != frame.count:
                body = slice_batch(body, frame.count, part.begin - begin, part.end - begin)
                crc = crc32(body)
            elif frame.flags & FLAG_LABELLED:
                body = memoryview(body)[: len(body) - labels_bytes(frame.count)]
                crc = crc32(body)
            place = part.pull_sequence, part.begin, count
            flags = self._flags | frame.flags & FLAG_ORDERED | (FLAG_IS_DEAD if frame.flags & FLAG_DEAD else 0)
            times = part.attempts
            if part.suspected and self.subscription.begins:
                flags |= FLAG_SUSPECTED
            else:
                times += part.suspected
            buffers += (commands.piece_header(*place, len(body), crc, flags, times), body)
        self.subscription.link.answer(self.packet, *buffers)
        return True


class AnswerSender:
    """Sender of pull answers. Made by the delivery; ends with the mastership. `writable_again` is called when the
    unsent answers of a connection fall below OWED_BYTES_MAX.
    """

    def __init__(
        self, mastership: Mastership, counters: Counters, passes: ServiceQueue, writable_again: Callable[[Link], None]
    ) -> None:
        self._mastership = mastership
        self._counters = counters
        self._passes = passes
        self._writable_again = writable_again
        self._bodies = Bodies(mastership.log, mastership.host)

    def begin(self, subscription: Subscription, waiting: WaitingPull, chosen: Chosen) -> None:
        """Answer a pull with the messages chosen for it, once that is safe and their bytes are read."""
        mastership = self._mastership
        subscription.in_flight += 1
        self._counters.pulled_messages += sum(part.end - part.begin for part in chosen.parts)
        answer = PullAnswer(subscription, waiting.packet, chosen, mastership.gate, self._settled)
        subscription.link.owed_bytes += answer.bytes
        self._passes.spend(DELIVERY_BYTES + answer.bytes)
        subscription.owed.append(answer.send)
        missing: dict[int, FrameRef] = {}
        for part in chosen.parts:
            offset = part.ref.offset
            if (found := chosen.bodies.get(offset) or self._bodies.at_hand(offset)) is not None:
                answer.bodies[offset] = found
            else:
                missing[offset] = part.ref
        if missing:
            answer.is_read = False
            self._bodies.read([missing[offset] for offset in sorted(missing)], partial(self._bodies_read, answer))
        mastership.gate.progress(mastership.log.end, chosen.data_end, answer.safe)

    def _settled(self, link: Link, size: int) -> None:
        """Subtract an answer that was sent or dropped; other pulls of the connection may be waiting for its room."""
        if link.owed_bytes >= OWED_BYTES_MAX > link.owed_bytes - size:
            self._writable_again(link)
        link.owed_bytes -= size

    def _bodies_read(self, answer: PullAnswer, bodies: list[tuple[Frame, Buffer]] | LogError) -> None:
        if isinstance(bodies, CorruptFrame):
            # The messages stay unacked; the consumer pulls again after the repair.
            self._mastership.found_damage(bodies)
            answer.subscription.link.close("this copy is damaged and is being repaired; repeat the request")
        elif isinstance(bodies, LogError):
            raise bodies
        else:
            answer.read(bodies)
