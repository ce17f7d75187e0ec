"""Core. Hands over what was written down: each answer waits for the high watermark and for its bytes, then leaves."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from qmq.broker.bodies import Bodies
from qmq.broker.consume import Subscription, WaitingPull
from qmq.broker.counters import Counters
from qmq.broker.hand_out import HandOut
from qmq.broker.pull_answer import PullAnswer
from qmq.broker.turns import HAND_OUT_BYTES, OWED_BYTES_MAX, Turns
from qmq.codec import Buffer
from qmq.errors import CorruptFrame, LogError
from qmq.log.frame import Frame
from qmq.log.index import FrameRef
from qmq.replication.mastership import Mastership
from qmq.replication.ports import Link


class Sending:
    """Made by the delivery; ends with the mastership. `writable_again` is called when a connection that was owed too
    much
    may have answers again."""

    def __init__(
        self, mastership: Mastership, counters: Counters, turns: Turns, writable_again: Callable[[Link], None]
    ) -> None:
        self._mastership, self._counters, self._turns = mastership, counters, turns
        self._writable_again = writable_again
        self._bodies = Bodies(mastership.log, mastership.host)

    def begin(self, subscription: Subscription, waiting: WaitingPull, hand_out: HandOut) -> None:
        """Answer a pull with what was written down for it, once that is safe and its bytes are at hand."""
        mastership = self._mastership
        subscription.in_flight += 1
        self._counters.pulled_messages += sum(part.end - part.begin for part in hand_out.parts)
        answer = PullAnswer(subscription, waiting.packet, hand_out, mastership.gate, self._settled)
        subscription.link.owed_bytes += answer.bytes
        self._turns.spend(HAND_OUT_BYTES + answer.bytes)
        subscription.owed.append(answer.send)
        missing: dict[int, FrameRef] = {}
        for part in hand_out.parts:
            offset = part.ref.offset
            if (found := hand_out.bodies.get(offset) or self._bodies.at_hand(offset)) is not None:
                answer.bodies[offset] = found
            else:
                missing[offset] = part.ref
        if missing:
            answer.is_read = False
            self._bodies.read([missing[offset] for offset in sorted(missing)], partial(self._bodies_read, answer))
        mastership.gate.progress(mastership.log.end, hand_out.data_end, answer.safe)
        mastership.gate.release_now()

    def _settled(self, link: Link, size: int) -> None:
        """An answer left, or will not; pulls of the same connection may have waited for that."""
        if link.owed_bytes >= OWED_BYTES_MAX > link.owed_bytes - size:
            self._writable_again(link)
        link.owed_bytes -= size

    def _bodies_read(self, answer: PullAnswer, bodies: list[tuple[Frame, Buffer]] | LogError) -> None:
        if isinstance(bodies, CorruptFrame):
            # The messages stay un-acked; the consumer asks again after the repair.
            self._mastership.found_damage(bodies)
            answer.subscription.link.close("this copy is damaged there and is being repaired; ask again")
        elif isinstance(bodies, LogError):
            raise bodies
        else:
            answer.read(bodies)
