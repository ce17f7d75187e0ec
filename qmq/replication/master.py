"""Core. Master of a broker group, for one mastership: it writes the log and ships it to the slaves.

Its subclasses, `broker.master` and `delayserver.master`, answer clients. All share the mastership:

    clients ──── subclass ────┐
                              ├── qmq.replication.mastership: log, epoch, gate, reasons for readonly
    slaves ── quorum ─────────┘

The end of a pass ships new frames to the slaves and starts the fsync; the gate answers when enough disks have them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from qmq.errors import CorruptFrame, ErrorCode, IllegalTransition, LogError, NotMaster, OutcomeUnknown, QmqError
from qmq.log import MessageLog
from qmq.log.frame import FrameKind
from qmq.log.retention import encode_retention
from qmq.remoting.commands import Command
from qmq.remoting.packet import Packet
from qmq.replication.ack_gate import AckGate
from qmq.replication.assignment import Assignment
from qmq.replication.clocks import METASERVER, Clocks
from qmq.replication.identity import IdentityFile
from qmq.replication.mastership import NEVER, Mastership, Readonly
from qmq.replication.ports import QUIET_MS, Host, Link
from qmq.replication.quorum import Slaves
from qmq.replication.readonly import Reason
from qmq.replication.retention import Keeper, decide
from qmq.replication.settings import CopySettings
from qmq.types import Epoch

log = logging.getLogger(__name__)

Handler = Callable[[Link, Packet], None]


@dataclass(frozen=True, slots=True)
class Promotion:
    """Arguments of a master, from the node that promotes it."""

    group: str
    term: int
    log: MessageLog
    host: Host
    identity: IdentityFile
    settings: CopySettings
    boot_above: int
    clocks: Clocks
    """Readings of other clocks."""
    is_failover: bool = False
    """Whether the old master is gone and this copy was in sync until then, so that it need not wait for a slave."""
    slaves: int = 1
    """Number of slaves in the metaserver's row."""
    min_copies: int = 2
    rejoin_wait_ms: int = 0
    """Time to wait for each slave that was in sync before this process began."""


class Master:
    """One mastership. Made by the node when it is assigned; used on its loop; `step_down` ends it."""

    def __init__(self, promotion: Promotion) -> None:
        message_log, term = promotion.log, promotion.term
        last = message_log.state.epoch  # the identity file may have lost an epoch that the log has
        above = max(promotion.boot_above, last.boot if last.term == term else 0)
        epoch = promotion.identity.next_boot(term, above=above)
        gate = AckGate(
            epoch,
            min_copies=max(2, promotion.min_copies),
            counts_from=NEVER,
            flushed_end=message_log.flushed_end,
            flushed_chain=message_log.chain if message_log.flushed_end == message_log.end else None,
            high_watermark=promotion.identity.points.high_watermark(message_log),
        )
        self._mastership = Mastership(promotion.group, epoch, message_log, promotion.host, promotion.settings, gate)
        self.readonly.change(Reason.CORRUPT, message_log.damage is not None)
        wait_ms = 0 if promotion.is_failover else promotion.settings.slave_wait_ms
        self.slaves = Slaves(
            self._mastership,
            promotion.identity,
            self.go_on,
            wait_ms=wait_ms,
            count=promotion.slaves,
            rejoin_wait_ms=promotion.rejoin_wait_ms,
        )
        self._noted_end = self._noted_ms = 0
        """Log end at `_noted_ms`, the time when the disk had the end noted before."""
        self._handlers: dict[int, Handler] = {
            Command.HELLO: self.slaves.hello,
            Command.CONFIRM: self.slaves.confirm,
            Command.FRAMES: self.slaves.restore,
            Command.SNAPSHOT: self.slaves.restore_snapshot,
        }

    # Subclasses extend these, and call them.

    def go_on(self) -> None:
        """Resume requests that waited until a slave matched or a swap ended."""

    def link_lost(self, link: Link) -> None:
        self.slaves.link_lost(link)

    def writable_again(self, link: Link) -> None:
        self.slaves.writable_again(link)

    def end_of_pass(self) -> None:
        """Ship new frames, after all received packets were handled and before the node starts the fsync."""
        self.slaves.ship()

    def committed(self, end: int, chain: int) -> None:
        """Record that the master's disk has everything before `end`."""
        self._mastership.gate.flushed(end, chain)
        self.slaves.committed(end, chain)

    def quiet_ms(self) -> int:
        """Return the time without deadlines unless something happens; 0 if deadlines are near.

        Positive only with enough slaves in sync, none behind, and nothing under way to a disk or client.
        """
        mastership = self._mastership
        is_quiet = mastership.has_begun and self.slaves.are_fully_matched and not mastership.gate.waiting
        return QUIET_MS if is_quiet else 0

    def tick(self, now_ms: int) -> None:
        """Check deadlines, the slaves' lag and the lag of the master's disk. Called about every 100 ms."""
        self.slaves.tick(now_ms)
        self._check_own_disk(now_ms)

    def _check_own_disk(self, now_ms: int) -> None:
        """Set readonly while the disk does not finish: nothing is acknowledged then, even if slaves confirm."""
        message_log = self._mastership.log
        if self._noted_end <= message_log.flushed_end:
            self._noted_end = message_log.end
            self._noted_ms = now_ms
        age_ms = now_ms - self._noted_ms
        is_late = age_ms > self._mastership.settings.slave_lag_ms_max
        if self.readonly.change(Reason.DISK_LATE, is_late) and is_late:
            log.error("disk late group=%s age_ms=%d: the group is readonly", self._mastership.group, age_ms)

    def step_down(self) -> None:
        """End the mastership. Waiting requests get an error: the next master may store them again. Reads under way are
        dropped: this mastership writes no more.
        """
        self.readonly.change(Reason.FENCED, True)
        self._mastership.gate.abandon(stored=self._unknown(), progress=self._another_master())
        self.slaves.step_down()

    def apply_operator_settings(self, assignment: Assignment) -> None:
        """Apply the operators' readonly marks and fill orders, and the list of slaves that were in sync."""
        self.readonly.mark_subjects(frozenset(assignment.readonly_subjects))
        self.slaves.apply_orders(assignment.fill_orders, frozenset(assignment.awaited))

    def packet_received(self, link: Link, packet: Packet) -> None:
        """Handle one request, and answer errors. LogError passes to the node, which decides about the mastership."""
        handler = self._handlers.get(packet.code)
        if handler is None:
            link.answer(packet, f"unknown command {packet.code}".encode(), code=ErrorCode.UNKNOWN_COMMAND)
            return
        try:
            handler(link, packet)
        except (LogError, IllegalTransition):
            raise
        except QmqError as error:
            link.refuse(packet, error)

    def found_damage(self, problem: CorruptFrame) -> None:
        self._mastership.found_damage(problem)

    def repaired(self) -> None:
        """Resume after the damaged range was fetched from the other copy."""
        self.readonly.change(Reason.CORRUPT, False)

    def resume(self) -> None:
        """Resume after a swap that did not happen."""
        self.readonly.change(Reason.DRAINING, False)
        self.go_on()

    def decide_retention(self, keeper: Keeper, clocks: Clocks) -> None:
        """Append a retention frame, if a deletion is due, all clocks agree and enough slaves are in sync.

        Raises:
            CorruptFrame: this copy is damaged.
        """
        mastership, message_log, now_ms = self._mastership, self._mastership.log, self._mastership.host.now_ms()
        ahead_ms = clocks.ahead_ms(now_ms=now_ms, monotonic_ms=mastership.host.monotonic_ms())
        asked_of = {METASERVER, *map(self.slaves.clock, self.slaves.in_sync)}
        is_agreed = asked_of <= ahead_ms.keys() and not clocks.disagreement(ahead_ms)
        if not mastership.may_progress or self.gate.too_few_in_sync or not is_agreed:
            return
        asked = {clock: ahead_ms[clock] for clock in sorted(asked_of)}
        decision = decide(message_log, keeper, now_ms=now_ms, ahead_ms=asked, high_watermark=self.gate.high_watermark)
        if decision is None:
            return
        if decision.rule:
            log.info("deletion decided group=%s before=%d rule=%s", mastership.group, decision.start, decision.rule)
        for (subject, consumer_group), messages in decision.unconsumed.items():
            text = "messages dropped unconsumed subject=%s consumer_group=%s messages=%d"
            log.error(text, subject, consumer_group, messages)
        mastership.append(FrameKind.RETENTION, "", encode_retention(decision))

    def _another_master(self) -> NotMaster:
        return NotMaster(f"{self._mastership.group} has another master now")

    def _unknown(self) -> OutcomeUnknown:
        return OutcomeUnknown(f"the mastership {self.epoch} of {self._mastership.group} ended; repeat the same batch")

    @property
    def epoch(self) -> Epoch:
        return self._mastership.epoch

    @property
    def gate(self) -> AckGate:
        return self._mastership.gate

    @property
    def readonly(self) -> Readonly:
        return self._mastership.readonly

    @property
    def has_begun(self) -> bool:
        return self._mastership.has_begun

    @property
    def fenced_by(self) -> Epoch | None:
        """Newer epoch, reported by a slave, or None."""
        return self.slaves.fenced_by

    @property
    def yields_from(self) -> int | None:
        """Offset from which this master's frames contradict frames that a slave confirmed, or None."""
        return self.slaves.yields_from

    @property
    def in_sync(self) -> tuple[str, ...]:
        """Incarnations of the slaves in sync."""
        return tuple(watch.incarnation for watch in self.slaves.in_sync)

    def is_drained_to(self, target: str) -> bool:
        """Return whether the slave with this incarnation (any slave, if empty) has everything."""
        end, gate = self._mastership.log.end, self.gate
        has_all = any(watch.confirmed_end == end for watch in self.slaves.in_sync if target in ("", watch.incarnation))
        return self.has_begun and not gate.too_few_in_sync and gate.high_watermark == end and has_all

    @property
    def shipped_end(self) -> int | None:
        """Offset from which a slave still needs the log; None without a slave."""
        return self.slaves.confirmed_end
