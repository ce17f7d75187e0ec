"""Core. The answer to a pull, on its way: it waits for the high watermark and for its bytes, then leaves in order."""

from __future__ import annotations

from collections.abc import Callable

from qmq.broker.choosing import Chosen
from qmq.broker.consume import Subscription
from qmq.codec import Buffer, labels_bytes, slice_batch
from qmq.crc import crc32
from qmq.errors import QmqError
from qmq.log.frame import FLAG_DEAD, FLAG_LABELLED, FLAG_NO_SLAVE_IN_SYNC, FLAG_ORDERED, Frame
from qmq.remoting import commands
from qmq.remoting.commands import FLAG_IS_DEAD, FLAG_SUSPECTED
from qmq.remoting.packet import Packet
from qmq.replication.ack_gate import AckGate
from qmq.replication.ports import Link


class PullAnswer:
    """An answer to a pull that waits for two things: that it is safe, and that its bytes were read."""

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
        self.subscription, self.packet, self.chosen = subscription, packet, chosen
        self.bytes = chosen.bytes()
        """About how many it will have."""
        self.bodies: dict[int, tuple[Frame, Buffer]] = {}
        self.is_read = True
        self._gate, self._settled, self._flags = gate, settled, 0
        self._is_safe = self._is_over = False

    def safe(self, error: QmqError | None) -> None:
        if error is not None:
            subscription = self.subscription
            subscription.link.refuse(self.packet, error)
            subscription.in_flight -= 1
            subscription.resend = min(subscription.resend, self.chosen.parts[0].pull_sequence)
            self._settled(subscription.link, self.bytes)
            self._is_over = True
        # As of now: a slave that comes while the bytes are still being read has not confirmed the pull by that.
        self._flags = FLAG_NO_SLAVE_IN_SYNC if self._gate.too_few_in_sync else 0
        self._is_safe = True
        self.subscription.answer_in_order()

    def read(self, bodies: list[tuple[Frame, Buffer]]) -> None:
        self.bodies.update((found[0].offset, found) for found in bodies)
        self.is_read = True
        self.subscription.answer_in_order()

    def send(self) -> bool:
        """Send it if it is safe and read; return whether nothing is owed any more."""
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
