"""Core. The master of a broker group: it stores what producers send, hands it to consumers, and ships all to its slave.

One produce: `_produce` checks and appends a frame, the turn's end ships it to the slave and starts the fsync, and the
gate answers when both disks have it (design, section 4).

A master that was just assigned does not write before its slave has matched: what it lost, it takes back first. Only
one that restarts with a whole log may go on without, after `slave_wait_ms`.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from zlib import crc32

from broker.consume import Consumption, HandOut, Subscription, WaitingPull
from broker.ports import Host, Link
from broker.readonly import Readonly, Reason
from broker.settings import BrokerSettings
from qmq.codec import Buffer, check_batch, join_batch, slice_batch, split_batch
from qmq.errors import (
    CorruptFrame,
    Diverged,
    ErrorCode,
    Fenced,
    InvalidRequest,
    LogError,
    NotMaster,
    NotServed,
    OutcomeUnknown,
    Overloaded,
    QmqError,
)  # fmt: skip
from qmq.log import MessageLog
from qmq.log.frame import FLAG_ALONE, Frame, FrameKind
from qmq.log.progress import Entry, encode_office, encode_progress
from qmq.remoting import commands
from qmq.remoting.commands import Command, Confirmation, Produced
from qmq.remoting.packet import Packet
from qmq.replication.ack_gate import AckGate, Answer
from qmq.replication.agreement import Action, Hello, agree
from qmq.replication.identity import IdentityFile
from qmq.replication.shipper import Shipper
from qmq.subjects import check_name
from qmq.types import Durability, Epoch

log = logging.getLogger(__name__)

CAUGHT_UP_BYTES = 8 << 20
"""So close to the log's end, a slave that joins counts: the rest is under way within milliseconds."""


PRODUCE_MS_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 5000)


@dataclass(slots=True)
class Counters:
    """What a master did, for metrics."""

    produce_ms_counts: list[int] = field(default_factory=lambda: [0] * (len(PRODUCE_MS_BUCKETS) + 1))
    """Batches acknowledged, by time from arrival; the last place is for those slower than every bucket."""
    produce_ms_sum: int = 0
    produced_messages: int = 0
    produced_bytes: int = 0
    repeated_batches: int = 0
    refused_messages: int = 0
    pulled_messages: int = 0
    acked_messages: int = 0
    returned_consumers: int = 0


class Master:
    """One reign. Made by the node when it is assigned; used on its loop; `resign` ends it."""

    def __init__(
        self, *, group: str, message_log: MessageLog, host: Host, identity: IdentityFile, settings: BrokerSettings,
        term: int, counters: Counters, boot_above: int = 0,
    ) -> None:  # fmt: skip
        self._group, self._log, self._host = group, message_log, host
        self._identity, self._settings = identity, settings
        last = message_log.state.epoch  # our file may have forgotten what our log knows
        self.epoch = identity.next_boot(term, above=max(boot_above, last.boot if last.term == term else 0))
        self.gate = AckGate(
            self.epoch, flushed_end=message_log.flushed_end,
            # Frames may tell of more than our own disk has: they came from a master that was ahead of us.
            high_watermark=min(message_log.state.high_watermark, message_log.flushed_end),
        )  # fmt: skip
        self.readonly = Readonly()
        self.readonly.change(Reason.SLAVE_DOWN, True)
        self.consumption = Consumption(message_log, lease_ms=settings.lease_ms, now_ms=host.monotonic_ms())
        self.in_office = False
        self.fenced_by: Epoch | None = None
        self.counters = counters
        self._must_match = message_log.is_empty or message_log.is_tail_cut or not identity.value.complete
        self._began_ms = host.monotonic_ms()
        self._slave: Shipper | None = None
        self._giver: Link | None = None
        self._held_bytes: dict[Link, int] = {}
        self._woken: dict[str, None] = {}
        self._oldest_unconfirmed: tuple[int, int] | None = None
        self._ticked_ms = self._began_ms
        self._handlers: dict[int, Callable[[Link, Packet], None]] = {
            Command.PRODUCE: self._produce,
            Command.SUBSCRIBE: self._subscribe,
            Command.PULL: self._pull,
            Command.ACK: self._ack,
            Command.HEARTBEAT: self._heartbeat,
            Command.UNSUBSCRIBE: self._unsubscribe,
            Command.HELLO: self._hello,
            Command.CONFIRM: self._confirm,
            Command.FRAMES: self._take_back,
            Command.SNAPSHOT: self._take_back_snapshot,
        }

    # What the node tells us.

    def packet_received(self, link: Link, packet: Packet) -> None:
        """Handle one request; errors are answered. LogError passes: the node decides what becomes of the reign."""
        handler = self._handlers.get(packet.code)
        if handler is None:
            link.answer(packet, f"unknown command {packet.code}".encode(), code=ErrorCode.UNKNOWN_COMMAND)
            return
        try:
            handler(link, packet)
        except LogError:
            raise
        except QmqError as error:
            link.refuse(packet, error)

    def link_lost(self, link: Link) -> None:
        self.consumption.link_lost(link)
        self._held_bytes.pop(link, None)
        if self._giver is link:
            self._giver = None
        if self._slave is not None and self._slave.link is link:
            self._slave = None
            self.gate.slave_gone()
            self.readonly.change(Reason.SLAVE_DOWN, True)
            log.warning("slave lost group=%s peer=%s: the group is readonly", self._group, link.peer)

    def writable_again(self, link: Link) -> None:
        if self._slave is not None and self._slave.link is link:
            self._slave.ship()
        else:
            self._serve(self.consumption.all_waiting())

    def end_of_turn(self) -> None:
        """Everything received by now was handled: wake pulls, ship to the slave, start the fsync, in this order."""
        if self._woken:
            woken, self._woken = self._woken, {}
            for subject in woken:
                self._serve(self.consumption.waiting_on(subject))
        if self._slave is not None:
            self._slave.ship()

    def committed(self, end: int, chain: int) -> None:
        """Our disk has everything before `end`."""
        self.gate.flushed(end)
        if self._giver is not None:
            confirmation = Confirmation(self.epoch, end, chain)
            self._giver.tell(Command.CONFIRM, commands.encode_confirmation(confirmation))
        if self._slave is not None:
            self._slave.ship()

    def tick(self, now_ms: int) -> None:
        """Called about every 100 ms: leases, deadlines, the slave's lag."""
        elapsed_ms, self._ticked_ms = now_ms - self._ticked_ms, now_ms
        for waiting in self.consumption.overdue(now_ms):
            waiting.link.answer(waiting.packet, code=ErrorCode.NO_MESSAGE)
        if self._slave is not None:
            self._slave.allow(elapsed_ms)
            self._slave.ship()
        self._check_lag(now_ms)
        if not self.in_office:
            if not self._must_match and self._giver is None and now_ms - self._began_ms >= self._settings.slave_wait_ms:
                self._take_office("went on without its slave")
        elif Reason.DRAINING not in self.readonly:
            for subject, group, consumer in self.consumption.expired(now_ms):
                self._consumer_leaves(subject, group, consumer, None)

    def resign(self) -> None:
        """The reign is over: whoever waits asks the next master, and repeats what may be stored."""
        another = NotMaster(f"{self._group} has another master now")
        unknown = OutcomeUnknown(f"the reign {self.epoch} of {self._group} ended; repeat the same batch")
        self.gate.abandon(stored=unknown, progress=another)
        for subscription in self.consumption.all_waiting():
            while subscription.waiting:
                waiting = self.consumption.take_waiting(subscription)
                subscription.link.refuse(waiting.packet, another)
        if self._slave is not None:
            self._slave.link.close("the reign is over")
            self._slave = None

    # State for heartbeats and readers.

    @property
    def matched_end(self) -> int:
        return self.gate.matched_end

    @property
    def is_drained(self) -> bool:
        """Whether the slave has everything, so that roles can be swapped."""
        return self.in_office and not self.gate.alone and self.gate.high_watermark == self._log.end

    @property
    def shipped_end(self) -> int | None:
        """Offset from which the slave still needs the log; None without a slave."""
        return self._slave.confirmed_end if self._slave is not None else None

    # Producing.

    def _produce(self, link: Link, packet: Packet) -> None:
        self._check_in_office()
        produce = commands.decode_produce(packet.body)
        state = self._log.state
        if (stored := state.repeated(produce.producer, produce.batch)) is not None:
            self._answer_repeated(link, packet, produce, stored.first_sequence, stored.stored, stored.end)
            return
        if produce.producer and state.is_forgotten(produce.producer, produce.batch):
            raise OutcomeUnknown(f"batch {produce.batch} is too old to tell whether it was stored")
        if produce.subject not in state.next_sequence:
            check_name("subject", produce.subject)
        self.readonly.check(self._group, produce.subject)
        self._check_window(link, len(packet.body))
        body, count, crc, refused = self._storable(produce)
        if not count:
            self.counters.refused_messages += len(refused)
            link.answer(packet, commands.encode_produced(Produced(0, 0, Durability.FSYNC, refused)))
            return
        frame = self._append_messages(produce, body, count, crc)
        produced = Produced(frame.first_sequence, count, Durability.FSYNC, refused)
        self._hold(link, packet, frame.end, commands.encode_produced(produced))

    def _storable(self, produce: commands.Produce) -> tuple[Buffer, int, int, list[tuple[int, str]]]:
        """Return (body, messages, CRC, refused): without what cannot be stored; batch-mates are kept (W7, W22)."""
        check = check_batch(produce.body, produce.count, self._settings.message_bytes_max)
        if not check.refused:
            return produce.body, produce.count, produce.crc, []
        bad = {position for position, _ in check.refused}
        split = enumerate(split_batch(produce.body, produce.count))
        messages = [bytes(message) for position, message in split if position not in bad]
        body = join_batch(messages) if messages else b""
        return body, len(messages), crc32(body), check.refused

    def _append_messages(self, produce: commands.Produce, body: Buffer, count: int, crc: int) -> Frame:
        subject = produce.subject
        first_sequence = self._log.state.next_sequence.get(subject, 0)
        frame = self._log.append(
            FrameKind.MESSAGES, subject, body, body_crc=crc, epoch=self.epoch, count=count,
            high_watermark=self.gate.high_watermark, timestamp_ms=self._host.now_ms(),
            first_sequence=first_sequence, producer=produce.producer, batch=produce.batch,
        )  # fmt: skip
        self._woken[subject] = None
        self.counters.produced_messages += count
        self.counters.produced_bytes += len(body)
        self._host.turn_soon()
        return frame

    def _answer_repeated(
        self, link: Link, packet: Packet, produce: commands.Produce, first_sequence: int, stored: int, end: int
    ) -> None:
        refused = check_batch(produce.body, produce.count, self._settings.message_bytes_max).refused
        self.counters.repeated_batches += 1
        answer = commands.encode_produced(Produced(first_sequence, stored, Durability.FSYNC, refused))
        self.gate.stored(end, _answering(link, packet, answer))
        self.gate.release_now()

    def _hold(self, link: Link, packet: Packet, end: int, answer: bytes) -> None:
        """Answer a produce when both disks have it."""
        size = len(packet.body)
        held = self._held_bytes
        held[link] = held.get(link, 0) + size
        began_ms = self._host.monotonic_ms()

        def release(error: QmqError | None) -> None:
            if link in held:
                held[link] -= size
            if error is not None:
                link.refuse(packet, error)
                return
            link.answer(packet, answer)
            took_ms = self._host.monotonic_ms() - began_ms
            self.counters.produce_ms_counts[bisect_left(PRODUCE_MS_BUCKETS, took_ms)] += 1
            self.counters.produce_ms_sum += took_ms

        self.gate.stored(end, release)

    def _check_window(self, link: Link, size: int) -> None:
        held = self._held_bytes.get(link, 0)
        if held and held + size > self._settings.window_bytes:
            raise Overloaded(f"this connection has {held} un-acknowledged bytes; wait for answers")

    def _check_in_office(self) -> None:
        if Reason.FENCED in self.readonly:
            raise NotMaster(f"{self._group} has a newer master: fetch the route again")
        if not self.in_office:
            raise NotServed(f"the master of {self._group} waits for its slave before it goes on")

    # Consuming.

    def _may_progress(self) -> None:
        self._check_in_office()
        if Reason.DRAINING in self.readonly:
            raise NotServed(f"the roles of {self._group} are being swapped; ask again in a moment")

    def _append_progress(self, kind: FrameKind, subject: str, group: str, consumer: str, entries: list[Entry]) -> Frame:
        body = encode_progress(group, consumer, entries)
        self._host.turn_soon()
        return self._log.append(
            kind, subject, body, body_crc=crc32(body), epoch=self.epoch, high_watermark=self.gate.high_watermark,
            timestamp_ms=self._host.now_ms(), flags=FLAG_ALONE if self.gate.alone else 0,
        )  # fmt: skip

    def _subscribe(self, link: Link, packet: Packet) -> None:
        self._may_progress()
        f = commands.decode_json(packet.body, subject=str, group=str, consumer=str, start=str, held_end=int)
        if f["start"] not in ("latest", "earliest"):
            raise InvalidRequest(f"start is 'latest' or 'earliest', not {f['start']!r}")
        subject, group, consumer = f["subject"], f["group"], f["consumer"]
        subscription = self.consumption.subscribe(
            link, subject=subject, group=group, consumer=consumer, held_end=f["held_end"],
            now_ms=self._host.monotonic_ms(),
        )  # fmt: skip
        state = self._log.state
        if (subject, group) not in state.groups:
            # The position of a new group is written down at once, or a restart would move it (W8).
            position = state.next_sequence.get(subject, 0) if f["start"] == "latest" else 0
            self._append_progress(FrameKind.POSITION, subject, group, "", [(position, 0, 0)])
        known = state.groups[subject, group].consumers.get(consumer)
        answer = commands.encode_json(
            subscription=subscription.id, acked_end=known.acked_end if known else 0, lease_ms=self._settings.lease_ms
        )
        self.gate.progress(self._log.end, 0, _answering(link, packet, answer))
        self.gate.release_now()

    def _pull(self, link: Link, packet: Packet) -> None:
        self._may_progress()
        pull = commands.decode_pull(packet.body)
        now_ms = self._host.monotonic_ms()
        subscription = self.consumption.find(link, pull.subscription, now_ms)
        waiting = WaitingPull(link, packet, pull, now_ms + pull.timeout_ms)
        self.consumption.wait(subscription, waiting)
        self._serve([subscription])
        if not pull.timeout_ms and waiting in subscription.waiting:
            for over in self.consumption.overdue(now_ms):
                over.link.answer(over.packet, code=ErrorCode.NO_MESSAGE)

    def _serve(self, subscriptions: list[Subscription]) -> None:
        """Answer pulls that wait, each subscription in its turn, as long as there is something for it."""
        if not self.in_office or Reason.DRAINING in self.readonly or Reason.FENCED in self.readonly:
            return
        limit = self.gate.high_watermark if self.gate.alone else self._log.end
        for subscription in subscriptions:
            while subscription.waiting and subscription.link.writable:
                try:
                    hand_out = self.consumption.hand_out(subscription, subscription.waiting[0].pull, limit)
                except CorruptFrame as problem:  # an index had to be made again, and its segment is damaged
                    self.found_damage(problem)
                    return
                if hand_out is None:
                    break
                self._hand_over(subscription, self.consumption.take_waiting(subscription), hand_out)

    def _hand_over(self, subscription: Subscription, waiting: WaitingPull, hand_out: HandOut) -> None:
        """Write down who gets what, and send it when that is safe and the bytes are at hand, whichever is later."""
        if hand_out.entries:
            self._append_progress(
                FrameKind.PULL, subscription.subject, subscription.group, subscription.consumer, hand_out.entries
            )
        last = hand_out.parts[-1]
        subscription.resend = last.pull_sequence + last.end - last.begin
        subscription.in_flight += 1
        self.counters.pulled_messages += sum(part.end - part.begin for part in hand_out.parts)
        answer = _PullAnswer(subscription, waiting.packet, hand_out, self.gate)
        subscription.owed.append(answer.send)
        bodies = [self._log.tail_body(part.ref.offset) for part in hand_out.parts]
        answer.bodies = {found[0].offset: found for found in bodies if found is not None}
        # Only these are surely on disk: what the tail has may not be written yet.
        if refs := [part.ref for part, found in zip(hand_out.parts, bodies) if found is None]:
            answer.is_read = False
            self._host.read(partial(self._log.read_bodies, refs), partial(self._bodies_read, answer))
        self.gate.progress(self._log.end, hand_out.data_end, answer.safe)
        self.gate.release_now()

    def _bodies_read(self, answer: _PullAnswer, bodies: list[tuple[Frame, Buffer]] | LogError) -> None:
        if isinstance(bodies, CorruptFrame):
            # The messages stay un-acked; the consumer asks again after the repair.
            self.found_damage(bodies)
            answer.subscription.link.close("this copy is damaged there and is being repaired; ask again")
        elif isinstance(bodies, LogError):
            raise bodies
        else:
            answer.read(bodies)

    def found_damage(self, problem: CorruptFrame) -> None:
        """A frame that was whole once cannot be read any more: readonly until it is repaired (P6)."""
        if problem.offset < self._log.start:
            return  # it was not damaged: retention took it while it was being read
        self.readonly.change(Reason.CORRUPT, True)
        self._log.damaged_at(problem.offset, problem.reason)
        log.error("log damaged group=%s offset=%d reason=%s", self._group, problem.offset, problem.reason)

    def repaired(self) -> None:
        """The damaged range was fetched from the other copy."""
        self.readonly.change(Reason.CORRUPT, False)

    def resume(self) -> None:
        """The roles were not swapped after all."""
        self.readonly.change(Reason.DRAINING, False)
        self._serve(self.consumption.all_waiting())

    def _ack(self, link: Link, packet: Packet) -> None:
        self._may_progress()
        ack = commands.decode_ack(packet.body)
        subscription = self.consumption.find(link, ack.subscription, self._host.monotonic_ms())
        if self.consumption.check_ack(subscription, ack):
            entries = [(ack.begin, ack.end, 0)]
            self._append_progress(
                FrameKind.ACK, subscription.subject, subscription.group, subscription.consumer, entries
            )
            self.counters.acked_messages += ack.end - ack.begin
            self._serve([subscription])  # it may have waited at its limit of un-acked messages
        answer = commands.encode_acked(ack.end)
        self.gate.progress(self._log.end, 0, _answering(link, packet, answer))
        self.gate.release_now()

    def _heartbeat(self, link: Link, packet: Packet) -> None:
        self.consumption.heartbeat(link, self._host.monotonic_ms())
        link.answer(packet)

    def _unsubscribe(self, link: Link, packet: Packet) -> None:
        self._may_progress()
        f = commands.decode_json(packet.body, subscription=int)
        subscription = self.consumption.find(link, f["subscription"], self._host.monotonic_ms())
        for waiting in subscription.waiting:
            link.answer(waiting.packet, code=ErrorCode.NO_MESSAGE)
        self.consumption.forget(subscription)
        key = (subscription.subject, subscription.group, subscription.consumer)
        self.consumption.left(*key)
        if subscription.consumer in self._log.state.groups[key[:2]].consumers:
            self._consumer_leaves(*key, _answering(link, packet, b""))
        else:
            link.answer(packet)

    def _consumer_leaves(
        self, subject: str, group: str, consumer: str, answer: Answer | None
    ) -> None:
        """What the consumer did not ack goes back to its group; others get it next (W1)."""
        self._append_progress(FrameKind.POSITION, subject, group, consumer, [])
        self._woken[subject] = None
        self.counters.returned_consumers += 1
        if answer is not None:
            self.gate.progress(self._log.end, 0, answer)

    # The slave.

    def _hello(self, link: Link, packet: Packet) -> None:
        hello = Hello.decode(packet.body)
        if hello.group != self._group or hello.incarnation == self._identity.value.incarnation:
            raise InvalidRequest(f"this is the master of {self._group}; you are of {hello.group!r}, or myself")
        try:
            agreement = agree(hello, self._log, self.epoch, in_office=self.in_office)
        except Fenced:
            self._fenced_by(hello)
            raise
        except CorruptFrame as problem:
            self.found_damage(problem)
            raise
        except Diverged as error:
            self._diverged(link, error)
            link.refuse(packet, error)
            return
        log.info(
            "slave says hello group=%s peer=%s end=%d: %s from %d",
            self._group, link.peer, hello.end, agreement.action.value, agreement.offset,
        )  # fmt: skip
        if self._slave is not None:  # until it has matched again, it counts for nothing (W14)
            older, self._slave = self._slave.link, None
            self.gate.slave_gone()
            if older is not link:
                older.close("a newer connection of the slave replaces this one")
        self._giver = link if agreement.action == Action.GIVE else None
        link.answer(packet, agreement.encode())
        if agreement.action == Action.GIVE:
            return
        self._slave = Shipper(
            self._log, link, self._host.read, begin=agreement.offset, chain=agreement.chain,
            bytes_per_s=self._settings.catch_up_bytes_per_s, found_damage=self.found_damage,
        )  # fmt: skip
        if agreement.action == Action.SEED:
            self._slave.seed()
        if not self.in_office:
            self._take_office("its slave matched")
        self._check_lag(self._host.monotonic_ms())
        self._host.turn_soon()

    def _take_office(self, why: str) -> None:
        """Write the epoch frame: from here on this reign's bytes are its own."""
        self.in_office = True
        self._identity.completed(True)
        self._log.tail_is_whole()
        body = encode_office(broker=self._identity.value.incarnation, why=why)
        self._log.append(
            FrameKind.EPOCH, "", body, body_crc=crc32(body), epoch=self.epoch,
            high_watermark=self.gate.high_watermark, timestamp_ms=self._host.now_ms(),
        )  # fmt: skip
        log.info("master in office group=%s epoch=%s offset=%d: %s", self._group, self.epoch, self._log.end, why)
        self._host.turn_soon()

    def _confirm(self, link: Link, packet: Packet) -> None:
        confirmation: Confirmation = commands.decode_confirmation(packet.body)
        slave = self._slave
        if slave is None or slave.link is not link or confirmation.epoch != self.epoch:
            link.close("a confirmation of another link or epoch proves nothing here")
            return
        try:
            slave.confirm(confirmation.matched_end, confirmation.chain)
        except Diverged as error:
            self._diverged(link, error)
            return
        if not self.gate.alone:
            self.gate.confirmed(confirmation.matched_end)
        elif self._is_caught_up(confirmation.matched_end):
            self.gate.slave_matched(confirmation.matched_end)
            self._serve(self.consumption.all_waiting())
            log.info("slave matched group=%s peer=%s end=%d", self._group, link.peer, confirmation.matched_end)
        self._check_lag(self._host.monotonic_ms())
        slave.ship()

    def _is_caught_up(self, confirmed_end: int) -> bool:
        """Whether a slave that joins may count: before that it would only hold up consumers (W14)."""
        return confirmed_end >= self.gate.high_watermark and self._log.end - confirmed_end <= CAUGHT_UP_BYTES

    def _take_back(self, link: Link, packet: Packet) -> None:
        """Frames that we lost and the slave still has."""
        if link is not self._giver or self.in_office:
            link.close("nobody asked for these frames")
            return
        offset, data = commands.split_offset(packet.body)
        self._log.append_frames(offset, data)
        self._host.turn_soon()

    def _take_back_snapshot(self, link: Link, packet: Packet) -> None:
        if link is not self._giver or self.in_office or not self._log.is_empty:
            link.close("nobody asked for this snapshot")
            return
        base, snapshot = commands.split_offset(packet.body)
        self._log.seed(base, snapshot, "taken-back")
        confirmation = Confirmation(self.epoch, base, self._log.chain)
        link.tell(Command.CONFIRM, commands.encode_confirmation(confirmation))

    def _diverged(self, link: Link, error: Diverged) -> None:
        self.readonly.change(Reason.DIVERGED, True)
        log.critical("copies differ group=%s peer=%s: %s", self._group, link.peer, error)
        link.close(str(error))

    def _fenced_by(self, hello: Hello) -> None:
        self.readonly.change(Reason.FENCED, True)
        self.fenced_by = hello.known
        log.warning("master fenced group=%s epoch=%s by=%s", self._group, self.epoch, hello.known)

    def _check_lag(self, now_ms: int) -> None:
        """Readonly while the slave is missing or too far behind, in bytes or in time."""
        self.readonly.change(Reason.SLAVE_DOWN, self._slave is None)
        if self.gate.alone or self._slave is None:
            self._oldest_unconfirmed = None
            self.readonly.change(Reason.SLAVE_LAG, self._slave is not None)
            return
        behind = self._log.end - self.gate.matched_end
        if self._oldest_unconfirmed is None or self._oldest_unconfirmed[0] <= self.gate.matched_end:
            self._oldest_unconfirmed = (self._log.end, now_ms) if behind else None
        age_ms = now_ms - self._oldest_unconfirmed[1] if self._oldest_unconfirmed else 0
        is_late = behind > self._settings.slave_lag_bytes_max or age_ms > self._settings.slave_lag_ms_max
        if self.readonly.change(Reason.SLAVE_LAG, is_late) and is_late:
            log.warning("slave lags group=%s bytes=%d age_ms=%d: the group is readonly", self._group, behind, age_ms)
        if age_ms > 2 * self._settings.slave_lag_ms_max:
            self._slave.link.close("no confirmation for too long: consumers go on without this slave")


def _answering(link: Link, packet: Packet, body: bytes) -> Answer:
    def answer(error: QmqError | None) -> None:
        if error is None:
            link.answer(packet, body)
        else:
            link.refuse(packet, error)

    return answer


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
            self.subscription.link.refuse(self.packet, error)
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

