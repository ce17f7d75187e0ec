"""Core. A master's part towards consumers: write down who gets what, hand it over when that is safe, take acks.

Which messages a pull gets is decided in `broker.consume`; here it becomes frames and answers.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from zlib import crc32

from broker import progress
from broker.consume import Consumption, HandOut, Subscription, WaitingPull, moved
from broker.offline import Offline
from broker.ports import Link
from broker.reign import Reign, answering
from qmq.codec import Buffer, slice_batch
from qmq.errors import CorruptFrame, ErrorCode, InvalidRequest, LogError, NotServed, OperatorError, QmqError
from qmq.log.frame import FLAG_ALONE, Frame, FrameKind
from qmq.remoting import commands
from qmq.remoting.packet import Packet
from qmq.replication.ack_gate import AckGate, Answer


class Delivery:
    """Made by the master; ends with the reign."""

    def __init__(self, reign: Reign) -> None:
        self._reign = reign
        self.consumption = Consumption(
            reign.log, lease_ms=reign.settings.lease_ms, now_ms=reign.host.monotonic_ms()
        )
        self._woken: dict[str, None] = {}
        self._offline = Offline()

    # Requests.

    def subscribe(self, link: Link, packet: Packet) -> None:
        reign = self._reign
        reign.check_may_progress()
        f = commands.decode_json(packet.body, subject=str, group=str, consumer=str, start=str, held_end=int)
        if f["start"] not in ("latest", "earliest"):
            raise InvalidRequest(f"start is 'latest' or 'earliest', not {f['start']!r}")
        subject, group, consumer = f["subject"], f["group"], f["consumer"]
        subscription = self.consumption.subscribe(
            link, subject=subject, group=group, consumer=consumer, held_end=f["held_end"],
            now_ms=reign.host.monotonic_ms(),
        )  # fmt: skip
        state = reign.log.state
        if (subject, group) not in state.groups:
            # The position of a new group is written down at once, or a restart would move it (W8).
            latest = state.next_sequence.get(subject, 0)
            refs = reign.log.frames(subject, 0, 1) if f["start"] == "earliest" else []
            position = refs[0].begin if refs else latest
            reign.append_progress(FrameKind.POSITION, (subject, group, ""), [(position, 0, 0)])
        known = state.groups[subject, group].consumers.get(consumer)
        answer = commands.encode_json(
            subscription=subscription.id, acked_end=known.acked_end if known else 0, lease_ms=reign.settings.lease_ms
        )
        reign.answer_when_safe(link, packet, answer)

    def pull(self, link: Link, packet: Packet) -> None:
        reign = self._reign
        reign.check_may_progress()
        pull = commands.decode_pull(packet.body)
        if not pull.messages_max:
            raise InvalidRequest("a pull asks for at least one message")
        now_ms = reign.host.monotonic_ms()
        subscription = self.consumption.find(link, pull.subscription, now_ms)
        waiting = WaitingPull(link, packet, pull, now_ms + pull.timeout_ms)
        self.consumption.wait(subscription, waiting)
        self._serve([subscription])
        if not pull.timeout_ms and waiting in subscription.waiting:
            self.answer_overdue(now_ms)

    def ack(self, link: Link, packet: Packet) -> None:
        reign = self._reign
        reign.check_may_progress()
        ack = commands.decode_ack(packet.body)
        subscription = self.consumption.find(link, ack.subscription, reign.host.monotonic_ms())
        if self.consumption.check_ack(subscription, ack):
            reign.append_progress(FrameKind.ACK, subscription.key, [(ack.begin, ack.end, 0)])
            reign.counters.acked_messages += ack.end - ack.begin
            self._serve([subscription])  # it may have waited at its limit of un-acked messages
        reign.answer_when_safe(link, packet, commands.encode_acked(ack.end))

    def move_group(
        self, subject: str, group: str, to: str, value: int, *, dry_run: bool, answer: Answer
    ) -> progress.Reset:
        """Let `group` go on elsewhere on `subject`; `answer` is called once both copies know it.

        Messages that the group had acked are only kept by age: the slave may have dropped some that are still here, and
        if it becomes the master before the group has them, they are skipped, and counted so.

        Raises:
            OperatorError, NotServed, NotMaster: that cannot be done now; says why. Nothing changed.
        """
        reign = self._reign
        reign.check_may_progress()
        try:
            reset = progress.plan_reset(reign.log, subject, group, to, value)
        except CorruptFrame as problem:
            reign.found_damage(problem)
            raise NotServed("this copy is damaged where it had to be read, and is being repaired; ask again") from None
        if reign.gate.alone:
            # Consumers would act on it at once, and a master that never heard of it would undo it.
            raise OperatorError(f"the slave of {reign.group} is missing and would not know it: start it first")
        if not dry_run:
            reign.append_progress(FrameKind.POSITION, (subject, group, ""), [(reset.after, 0, 0)])
            self.consumption.move(subject, group)
            reign.gate.stored(reign.log.end, answer)
        return reset

    def heartbeat(self, link: Link, packet: Packet) -> None:
        self.consumption.heartbeat(link, self._reign.host.monotonic_ms())
        link.answer(packet)

    def unsubscribe(self, link: Link, packet: Packet) -> None:
        reign = self._reign
        reign.check_may_progress()
        f = commands.decode_json(packet.body, subscription=int)
        subscription = self.consumption.find(link, f["subscription"], reign.host.monotonic_ms())
        for waiting in subscription.waiting:
            link.answer(waiting.packet, code=ErrorCode.NO_MESSAGE)
        self.consumption.forget(subscription)
        self.consumption.left(*subscription.key)
        if subscription.consumer in reign.log.state.groups[subscription.subject, subscription.group].consumers:
            self._consumer_leaves(subscription.key, answering(link, packet, b""))
        else:
            link.answer(packet)

    # Events.

    def wake(self, subject: str) -> None:
        """Messages of `subject` came or came back; at the end of the turn those who wait for them are served."""
        self._woken[subject] = None

    def serve_woken(self) -> None:
        if self._woken:
            woken, self._woken = self._woken, {}
            for subject in woken:
                self._serve(self.consumption.waiting_on(subject))

    def serve_all(self) -> None:
        self._serve(self.consumption.all_waiting())

    def switch_off(self, rules: Iterable[tuple[str, str, str]]) -> None:
        """From now on hand nothing to these consumers; who is not among them any more is served at once."""
        self._offline = Offline(rules)
        self.serve_all()

    def answer_overdue(self, now_ms: int) -> None:
        for waiting in self.consumption.overdue(now_ms):
            waiting.link.answer(waiting.packet, code=ErrorCode.NO_MESSAGE)

    def end_leases(self, now_ms: int) -> None:
        for key in self.consumption.expired(now_ms):
            self._consumer_leaves(key, None)

    def resign(self, error: QmqError) -> None:
        """The reign is over: whoever waits asks the next master."""
        for subscription in self.consumption.all_waiting():
            while subscription.waiting:
                waiting = self.consumption.take_waiting(subscription)
                subscription.link.refuse(waiting.packet, error)

    # Handing over.

    def _serve(self, subscriptions: list[Subscription]) -> None:
        """Answer pulls that wait, each subscription in its turn, as long as there is something for it."""
        reign = self._reign
        if not reign.may_progress:
            return
        limit = reign.gate.high_watermark if reign.gate.alone else reign.log.end
        for subscription in subscriptions:
            if subscription.key in self._offline:
                continue
            while subscription.waiting and subscription.link.writable:
                try:
                    hand_out = self.consumption.hand_out(subscription, subscription.waiting[0].pull, limit)
                except CorruptFrame as problem:  # an index had to be made again, and its segment is damaged
                    reign.found_damage(problem)
                    return
                if hand_out is None:
                    break
                if not hand_out.parts:
                    self._skip(subscription, hand_out)
                    continue
                self._hand_over(subscription, self.consumption.take_waiting(subscription), hand_out)

    def _skip(self, subscription: Subscription, hand_out: HandOut) -> None:
        """Write down that all of this is gone, or it would be looked for and counted again by every pull."""
        reign = self._reign
        if hand_out.entries:
            reign.append_progress(FrameKind.PULL, subscription.key, hand_out.entries)
        self.consumption.note_skipped(subscription, hand_out.gaps)
        begin, subscription.resend = hand_out.gaps[0].pull_sequence, hand_out.gaps[-1].pull_end
        consumer = reign.log.state.groups[subscription.subject, subscription.group].consumers[subscription.consumer]
        if consumer.unacked[0][0] == begin:  # else its next ack reaches over them
            reign.append_progress(FrameKind.ACK, subscription.key, [(begin, subscription.resend, 0)])

    def _hand_over(self, subscription: Subscription, waiting: WaitingPull, hand_out: HandOut) -> None:
        """Write down who gets what, and send it when that is safe and the bytes are at hand, whichever is later."""
        reign = self._reign
        if hand_out.entries:
            reign.append_progress(FrameKind.PULL, subscription.key, hand_out.entries)
        self.consumption.note_skipped(subscription, hand_out.gaps)
        last = hand_out.parts[-1]
        subscription.resend = last.pull_sequence + last.end - last.begin
        subscription.in_flight += 1
        reign.counters.pulled_messages += sum(part.end - part.begin for part in hand_out.parts)
        answer = _PullAnswer(subscription, waiting.packet, hand_out, reign.gate)
        subscription.owed.append(answer.send)
        bodies = [reign.log.tail_body(part.ref.offset) for part in hand_out.parts]
        answer.bodies = {found[0].offset: found for found in bodies if found is not None}
        # Only these are surely on disk: what the tail has may not be written yet.
        if refs := [part.ref for part, found in zip(hand_out.parts, bodies, strict=True) if found is None]:
            answer.is_read = False
            reign.host.read(partial(reign.log.read_bodies, refs), partial(self._bodies_read, answer))
        reign.gate.progress(reign.log.end, hand_out.data_end, answer.safe)
        reign.gate.release_now()

    def _bodies_read(self, answer: _PullAnswer, bodies: list[tuple[Frame, Buffer]] | LogError) -> None:
        if isinstance(bodies, CorruptFrame):
            # The messages stay un-acked; the consumer asks again after the repair.
            self._reign.found_damage(bodies)
            answer.subscription.link.close("this copy is damaged there and is being repaired; ask again")
        elif isinstance(bodies, LogError):
            raise bodies
        else:
            answer.read(bodies)

    def _consumer_leaves(self, key: tuple[str, str, str], answer: Answer | None) -> None:
        """What the consumer did not ack goes back to its group; others get it next (W1)."""
        reign = self._reign
        reign.append_progress(FrameKind.POSITION, key, [])
        self.wake(key[0])
        reign.counters.returned_consumers += 1
        if answer is not None:
            reign.gate.progress(reign.log.end, 0, answer)


class _PullAnswer:
    """An answer to a pull that waits for two things: that it is safe, and that its bytes were read."""

    __slots__ = ("subscription", "packet", "hand_out", "bodies", "is_read", "_gate", "_is_safe", "_is_over")

    def __init__(self, subscription: Subscription, packet: Packet, hand_out: HandOut, gate: AckGate) -> None:
        self.subscription, self.packet, self.hand_out = subscription, packet, hand_out
        self.bodies: dict[int, tuple[Frame, Buffer]] = {}
        self.is_read = True
        self._gate, self._is_safe, self._is_over = gate, False, False

    def safe(self, error: QmqError | None) -> None:
        if error is not None:
            subscription = self.subscription
            subscription.link.refuse(self.packet, error)
            subscription.in_flight -= 1
            subscription.resend = min(subscription.resend, self.hand_out.parts[0].pull_sequence)
            self._is_over = True
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
        if self.subscription.is_over:
            self.subscription.link.refuse(self.packet, moved(self.subscription.group))
            return True
        flags = FLAG_ALONE if self._gate.alone else 0
        buffers: list[Buffer] = []
        for part in self.hand_out.parts:
            frame, body = self.bodies[part.ref.offset]
            crc, begin = frame.body_crc, frame.first_sequence
            if part.begin != begin or part.end != begin + frame.count:
                body = slice_batch(body, frame.count, part.begin - begin, part.end - begin)
                crc = crc32(body)
            count = part.end - part.begin
            buffers += (commands.piece_header(part.pull_sequence, part.begin, count, len(body), crc, flags), body)
        self.subscription.link.answer(self.packet, *buffers)
        return True

