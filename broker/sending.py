"""Core. Sends what was written down: each answer waits for the high watermark and for its bytes, then leaves."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from qmq.broker.bodies import Bodies
from qmq.broker.choosing import Chosen
from qmq.broker.consume import Subscription, WaitingPull
from qmq.broker.counters import Counters
from qmq.broker.passes import DELIVERY_BYTES, OWED_BYTES_MAX, Passes
from qmq.broker.pull_answer import PullAnswer
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
        self, mastership: Mastership, counters: Counters, passes: Passes, writable_again: Callable[[Link], None]
    ) -> None:
        self._mastership, self._counters, self._passes = mastership, counters, passes
        self._writable_again = writable_again
        self._bodies = Bodies(mastership.log, mastership.host)

    def begin(self, subscription: Subscription, waiting: WaitingPull, chosen: Chosen) -> None:
        """Answer a pull with what was written down for it, once that is safe and its bytes are at hand."""
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
