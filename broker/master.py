"""Core. Master of a broker group, for one mastership: it stores messages of producers and delivers them to consumers.

producers ── qmq.server.producing ──────────────┐
consumers ── broker.delivery, broker.serving ───┼── qmq.replication.mastership: log, epoch, gate, readonly reasons
slaves ───── qmq.replication.master ────────────┘
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from qmq.broker import positions
from qmq.broker.answers import Counters
from qmq.broker.delivery import Delivery
from qmq.broker.group_status import Backlogs, Causes, Key
from qmq.broker.positions import Ask, Begin
from qmq.broker.settings import BrokerSettings
from qmq.broker.subscriptions import Subscription
from qmq.remoting.commands import Command
from qmq.replication.ack_gate import Answer
from qmq.replication.assignment import Assignment
from qmq.replication.master import Master, Promotion
from qmq.replication.ports import Link
from qmq.server.producing import Producing


class BrokerMaster(Master):
    """One mastership. Made by the node; `counters` outlives it.

    Args:
        ask: requests the begin of a consumer group from the cluster; None if this broker group is the whole cluster.
    """

    def __init__(
        self, promotion: Promotion, settings: BrokerSettings, counters: Counters, ask: Ask | None = None
    ) -> None:
        super().__init__(promotion)
        self._delivery = Delivery(self._mastership, settings, counters, promotion.clocks, ask)
        producing = Producing(
            self._mastership, counters, wake=self._delivery.serving.wake, check_room=self._delivery.pruning.check_room
        )
        self._handlers |= {
            Command.PRODUCE: producing.produce,
            Command.SUBSCRIBE: self._delivery.subscribe,
            Command.PULL: self._delivery.pull,
            Command.ACK: self._delivery.ack,
            Command.NACK: self._delivery.nack,
            Command.BEGIN: self._delivery.begin,
            Command.HEARTBEAT: self._delivery.heartbeat,
            Command.UNSUBSCRIBE: self._delivery.unsubscribe,
        }

    def go_on(self) -> None:
        self._delivery.serving.serve_all()

    def link_lost(self, link: Link) -> None:
        self._delivery.consumption.link_lost(link)
        super().link_lost(link)

    def writable_again(self, link: Link) -> None:
        super().writable_again(link)
        self._delivery.serving.writable_again(link)

    def end_of_pass(self) -> None:
        """Serve pulls before frames are shipped: one confirmation then covers messages and pull frames."""
        self._delivery.serving.run_pass()
        super().end_of_pass()

    def quiet_ms(self) -> int:
        return min(super().quiet_ms(), self._delivery.quiet_ms())

    def tick(self, now_ms: int) -> None:
        """Check deadlines, the slave's lag, leases and retries; called about every 100 ms."""
        self._delivery.answer_overdue(now_ms)
        super().tick(now_ms)
        self._delivery.tick(now_ms)

    def step_down(self) -> None:
        super().step_down()
        self._delivery.step_down(self._another_master())

    def apply_operator_settings(self, assignment: Assignment) -> None:
        """Apply operators' readonly marks, switched-off consumers and limits."""
        super().apply_operator_settings(assignment)
        self._delivery.apply_operator_settings(limits=assignment.limits, offline=assignment.offline)

    def mark_groups(self, mark: str, keys: Iterable[Key]) -> list[bool]:
        """Note where subjects end now, for MarkGroups; return which consumer groups have a position."""
        self._mastership.check_may_progress()
        return self._delivery.beginning.note(mark, keys)

    def begins_at(self, key: Key, begin: Begin) -> int:
        """Return where a consumer group without a position begins."""
        return self._delivery.begins_at(key, begin)

    def move_group(
        self,
        subject: str,
        group: str,
        to: str,
        value: int,
        *,
        dry_run: bool,
        answer: Answer,
        begin: Begin | None = None,
    ) -> positions.Reset:
        """Move a group, for ResetOffset: see `Delivery.move_group`."""
        return self._delivery.move_group(subject, group, to, value, dry_run=dry_run, answer=answer, begin=begin)

    @property
    def subscriptions(self) -> Collection[Subscription]:
        return self._delivery.consumption.connected

    def connected_to(self, subject: str, group: str) -> list[Subscription]:
        """Return the connected consumers of a group."""
        return self._delivery.consumption.connected_to(subject, group)

    def unused_since_ms(self, key: Key) -> int:
        """Return since when a group has no consumer: see `Delivery.unused_since_ms`."""
        return self._delivery.unused_since_ms(key)

    @property
    def chosen_dead_letters(self) -> Collection[Key]:
        """Groups with a chosen subject for their dead letters."""
        return self._delivery.serving.dead_letters.chosen

    @property
    def causes(self) -> Causes:
        """Causes that stop or slow consumer groups."""
        return self._delivery.causes

    @property
    def expired(self) -> dict[tuple[str, str], int]:
        """Expired messages per (subject, consumer group)."""
        return self._delivery.pruning.expired

    @property
    def backlogs(self) -> Backlogs:
        """Backlogs of consumer groups."""
        return self._delivery.backlogs

    @property
    def overflowed(self) -> dict[tuple[str, str], int]:
        """Messages given up because too many waited, per (subject, consumer group)."""
        return self._delivery.pruning.overflowed

    @property
    def skipped(self) -> dict[tuple[str, str], int]:
        """Messages that retention deleted before the group acked them, per (subject, consumer group)."""
        return self._delivery.consumption.skipped
