"""Core. The master of a broker group, for one reign: it stores what producers send, hands it to consumers, and ships
all of it to its slave.

    producer ── broker.producing ──┐
    consumer ── broker.delivery ───┼── broker.reign: log, epoch, gate, reasons for readonly
    slave ───── broker.slave_watch ┘

One produce: it is checked and appended, the turn's end ships it to the slave and starts the fsync, and the gate answers
when both disks have it (design, section 4).
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from broker import progress
from broker.assignment import Assignment
from broker.consume import Subscription
from broker.delivery import Delivery
from broker.ports import Host, Link
from broker.producing import Producing
from broker.readonly import Readonly, Reason
from broker.reign import Counters, Reign
from broker.settings import BrokerSettings
from broker.slave_watch import SlaveWatch
from qmq.errors import CorruptFrame, ErrorCode, LogError, NotMaster, OutcomeUnknown, QmqError
from qmq.log import MessageLog
from qmq.remoting.commands import Command
from qmq.remoting.packet import Packet
from qmq.replication.ack_gate import AckGate, Answer
from qmq.replication.identity import IdentityFile
from qmq.types import Epoch


class Master:
    """One reign. Made by the node when it is assigned; used on its loop; `resign` ends it."""

    def __init__(
        self, *, group: str, message_log: MessageLog, host: Host, identity: IdentityFile, settings: BrokerSettings,
        term: int, counters: Counters, boot_above: int = 0,
    ) -> None:  # fmt: skip
        last = message_log.state.epoch  # our file may have forgotten what our log knows
        epoch = identity.next_boot(term, above=max(boot_above, last.boot if last.term == term else 0))
        gate = AckGate(
            epoch, flushed_end=message_log.flushed_end,
            # Frames may tell of more than our own disk has: they came from a master that was ahead of us.
            high_watermark=min(message_log.state.high_watermark, message_log.flushed_end),
        )  # fmt: skip
        self._reign = Reign(group, epoch, message_log, host, settings, gate, counters)
        self._delivery = Delivery(self._reign)
        self._producing = Producing(self._reign, self._delivery.wake)
        self._slave_watch = SlaveWatch(self._reign, identity, self._delivery.serve_all)
        self._handlers: dict[int, Callable[[Link, Packet], None]] = {
            Command.PRODUCE: self._producing.produce,
            Command.SUBSCRIBE: self._delivery.subscribe,
            Command.PULL: self._delivery.pull,
            Command.ACK: self._delivery.ack,
            Command.NACK: self._delivery.nack,
            Command.HEARTBEAT: self._delivery.heartbeat,
            Command.UNSUBSCRIBE: self._delivery.unsubscribe,
            Command.HELLO: self._slave_watch.hello,
            Command.CONFIRM: self._slave_watch.confirm,
            Command.FRAMES: self._slave_watch.take_back,
            Command.SNAPSHOT: self._slave_watch.take_back_snapshot,
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
        self._delivery.consumption.link_lost(link)
        self._slave_watch.link_lost(link)

    def writable_again(self, link: Link) -> None:
        if self._slave_watch.is_slave(link):
            self._slave_watch.ship()
        else:
            self._delivery.writable_again(link)

    def end_of_turn(self) -> None:
        """Everything received by now was handled: wake pulls, ship to the slave; the node starts the fsync next."""
        self._delivery.take_turns()
        self._slave_watch.ship()

    def committed(self, end: int, chain: int) -> None:
        """Our disk has everything before `end`."""
        self._reign.gate.flushed(end)
        self._slave_watch.committed(end, chain)

    def tick(self, now_ms: int) -> None:
        """Called about every 100 ms: deadlines, the slave's lag, leases, retries."""
        self._delivery.answer_overdue(now_ms)
        self._slave_watch.tick(now_ms)
        self._delivery.tick(now_ms)

    def resign(self) -> None:
        """The reign is over: whoever waits asks the next master, and repeats what may be stored."""
        another = NotMaster(f"{self._reign.group} has another master now")
        unknown = OutcomeUnknown(f"the reign {self.epoch} of {self._reign.group} ended; repeat the same batch")
        self._reign.gate.abandon(stored=unknown, progress=another)
        self._delivery.resign(another)
        self._slave_watch.resign()

    def heed_operators(self, assignment: Assignment) -> None:
        """Take over what operators marked readonly and switched off."""
        self.readonly.mark_subjects(frozenset(assignment.readonly_subjects))
        self._delivery.switch_off(assignment.offline)

    def move_group(
        self, subject: str, group: str, to: str, value: int, *, dry_run: bool, answer: Answer
    ) -> progress.Reset:
        """ResetOffset: see `Delivery.move_group`."""
        return self._delivery.move_group(subject, group, to, value, dry_run=dry_run, answer=answer)

    def found_damage(self, problem: CorruptFrame) -> None:
        self._reign.found_damage(problem)

    def repaired(self) -> None:
        """The damaged range was fetched from the other copy."""
        self.readonly.change(Reason.CORRUPT, False)

    def resume(self) -> None:
        """The roles were not swapped after all."""
        self.readonly.change(Reason.DRAINING, False)
        self._delivery.serve_all()

    # State for heartbeats, metrics and retention.

    @property
    def epoch(self) -> Epoch:
        return self._reign.epoch

    @property
    def gate(self) -> AckGate:
        return self._reign.gate

    @property
    def readonly(self) -> Readonly:
        return self._reign.readonly

    @property
    def in_office(self) -> bool:
        return self._reign.in_office

    @property
    def fenced_by(self) -> Epoch | None:
        """The newer epoch that the slave told us of."""
        return self._slave_watch.fenced_by

    @property
    def in_step_with(self) -> str:
        """Incarnation of the slave whose copy has all that is acknowledged; empty: none has."""
        return self._slave_watch.in_step_with

    @property
    def is_drained(self) -> bool:
        """Whether the slave has everything, so that roles can be swapped."""
        gate = self.gate
        return self.in_office and not gate.alone and gate.high_watermark == self._reign.log.end

    @property
    def shipped_end(self) -> int | None:
        """Offset from which the slave still needs the log; None without a slave."""
        return self._slave_watch.confirmed_end

    @property
    def subscriptions(self) -> Collection[Subscription]:
        return self._delivery.consumption.connected

    @property
    def skipped(self) -> dict[tuple[str, str], int]:
        """Messages that retention took before the group acked them, per (subject, consumer group)."""
        return self._delivery.consumption.skipped
