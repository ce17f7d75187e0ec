"""Core. A master's view of one slave, from hello to loss.

A slave counts only in IN_SYNC and LAGGING: there its confirmations raise the high watermark. The group is readonly
while too few slaves are IN_SYNC. Facts of a state are in its class (`Restoring`, …).

`SlaveWatch` is the master's side of the link: it agrees where the logs match, ships frames, counts confirmations, and
watches the lag. A slave counts once it has matched and nearly caught up (W14).

Keeps I20.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import TYPE_CHECKING

from qmq.errors import CopyRolledBack, CorruptFrame, Diverged, Fenced, NotServed
from qmq.message_sizes import FRAME_BYTES_MAX
from qmq.remoting import commands
from qmq.remoting.commands import Command, Confirmation
from qmq.remoting.packet import Packet
from qmq.replication.agreement import Action, Agreement, Hello, Yield, agree
from qmq.replication.assignment import FillOrders
from qmq.replication.identity import IdentityFile, Point, is_lacking, log_lacking
from qmq.replication.mastership import Mastership
from qmq.replication.ports import Link
from qmq.replication.shipper import Shipper
from qmq.states import Life, TransitionTable

if TYPE_CHECKING:
    from qmq.replication.quorum import Slaves

log = logging.getLogger(__name__)


class FollowerState(Enum):
    ABSENT = auto()  # no connection, or no agreed hello on it
    UNFILLED = auto()  # connected; it must be filled, which an operator must allow first
    RESTORING = auto()  # it sends frames that this master's disk lost; the mastership has not begun
    CATCHING_UP = auto()  # it receives frames; it has not matched yet
    IN_SYNC = auto()
    LAGGING = auto()  # behind by too many bytes, or for too long
    DIVERGED = auto()  # its log contradicts the master's; its connection is closed; an operator must decide


class FollowerEvent(Enum):
    FOLLOWS = auto()  # hello agreed: it follows, from an offset or a snapshot
    RESTORES = auto()  # hello agreed: it has more of the same history
    WAITS = auto()  # hello agreed: it is not filled yet
    MATCHED = auto()  # it has all acknowledged frames, and nearly all others
    FELL_BEHIND = auto()
    CAUGHT_UP = auto()
    PARTED = auto()  # its hello or its confirmation contradicts the master's log
    LOST = auto()  # its connection was lost, or the mastership ended


_S, _E = FollowerState, FollowerEvent

FOLLOWER = TransitionTable(
    FollowerState.ABSENT,
    {
        (_S.ABSENT, _E.FOLLOWS): _S.CATCHING_UP,
        (_S.ABSENT, _E.RESTORES): _S.RESTORING,
        (_S.ABSENT, _E.WAITS): _S.UNFILLED,
        (_S.ABSENT, _E.PARTED): _S.DIVERGED,
        (_S.UNFILLED, _E.FOLLOWS): _S.CATCHING_UP,
        (_S.UNFILLED, _E.RESTORES): _S.RESTORING,
        (_S.UNFILLED, _E.WAITS): _S.UNFILLED,
        (_S.UNFILLED, _E.PARTED): _S.DIVERGED,
        (_S.UNFILLED, _E.LOST): _S.ABSENT,
        (_S.RESTORING, _E.FOLLOWS): _S.CATCHING_UP,
        (_S.RESTORING, _E.RESTORES): _S.RESTORING,
        (_S.RESTORING, _E.WAITS): _S.UNFILLED,
        (_S.RESTORING, _E.PARTED): _S.DIVERGED,
        (_S.RESTORING, _E.LOST): _S.ABSENT,
        (_S.CATCHING_UP, _E.MATCHED): _S.IN_SYNC,
        (_S.CATCHING_UP, _E.FOLLOWS): _S.CATCHING_UP,
        (_S.CATCHING_UP, _E.WAITS): _S.UNFILLED,
        (_S.CATCHING_UP, _E.PARTED): _S.DIVERGED,
        (_S.CATCHING_UP, _E.LOST): _S.ABSENT,
        (_S.IN_SYNC, _E.FELL_BEHIND): _S.LAGGING,
        (_S.IN_SYNC, _E.FOLLOWS): _S.CATCHING_UP,
        (_S.IN_SYNC, _E.WAITS): _S.UNFILLED,
        (_S.IN_SYNC, _E.PARTED): _S.DIVERGED,
        (_S.IN_SYNC, _E.LOST): _S.ABSENT,
        (_S.LAGGING, _E.CAUGHT_UP): _S.IN_SYNC,
        (_S.LAGGING, _E.FOLLOWS): _S.CATCHING_UP,
        (_S.LAGGING, _E.WAITS): _S.UNFILLED,
        (_S.LAGGING, _E.PARTED): _S.DIVERGED,
        (_S.LAGGING, _E.LOST): _S.ABSENT,
        (_S.DIVERGED, _E.FOLLOWS): _S.CATCHING_UP,
        (_S.DIVERGED, _E.RESTORES): _S.RESTORING,
        (_S.DIVERGED, _E.WAITS): _S.UNFILLED,
        (_S.DIVERGED, _E.PARTED): _S.DIVERGED,
    },
)


@dataclass(slots=True, eq=False)
class Absent:
    pass


@dataclass(slots=True, eq=False)
class Unfilled:
    """Facts of UNFILLED. `fill_id`: filling that waits for permission."""

    link: Link
    fill_id: str


@dataclass(slots=True, eq=False)
class Restoring:
    """Facts of RESTORING. `begin`: offset from which the slave sends. `hello`: the slave's hello."""

    link: Link
    begin: int
    hello: Hello


@dataclass(slots=True, eq=False)
class Connected:
    """Common facts of CATCHING_UP, IN_SYNC and LAGGING. `incarnation`: id of the slave's data directory."""

    shipper: Shipper
    incarnation: str


@dataclass(slots=True, eq=False)
class CatchingUp(Connected):
    fill_id: str = ""
    """Id of the slave's present filling; empty if the slave continues where its log ended."""


@dataclass(slots=True, eq=False)
class InSync(Connected):
    """Facts of IN_SYNC and LAGGING."""

    noted_end: int = 0
    """Log end at `noted_ms`, the time when the slave confirmed the end noted before."""
    noted_ms: int = 0
    point_sent: Point | None = None
    """Newest acknowledged point sent to the slave."""


@dataclass(slots=True, eq=False)
class Parted:
    pass


Facts = Absent | Unfilled | Restoring | CatchingUp | InSync | Parted

_FACTS: dict[FollowerState, type[Facts]] = {
    FollowerState.ABSENT: Absent,
    FollowerState.UNFILLED: Unfilled,
    FollowerState.RESTORING: Restoring,
    FollowerState.CATCHING_UP: CatchingUp,
    FollowerState.IN_SYNC: InSync,
    FollowerState.LAGGING: InSync,
    FollowerState.DIVERGED: Parted,
}


class Follower(Life[FollowerState, Facts]):
    """States of a slave in one mastership. Made by its `SlaveWatch`, which enters its states."""

    __slots__ = ("connected", "in_sync", "restoring", "unfilled")

    def __init__(self) -> None:
        super().__init__(FOLLOWER, _FACTS, Absent())
        self.connected: Connected | None = None
        """The slave that receives frames, or None."""
        self.in_sync: InSync | None = None
        """The slave that counts, or None."""
        self.restoring: Restoring | None = None
        """The slave that sends frames this master lost, or None."""
        self.unfilled: Unfilled | None = None
        """The slave that waits to be filled, or None."""

    def enter(self, event: object, now: Facts, *, at_ms: int) -> FollowerState:
        after = super().enter(event, now, at_ms=at_ms)
        self.connected = now if isinstance(now, Connected) else None
        self.in_sync = now if isinstance(now, InSync) else None
        self.restoring = now if isinstance(now, Restoring) else None
        self.unfilled = now if isinstance(now, Unfilled) else None
        return after


CAUGHT_UP_BYTES = 8 << 20
"""A joining slave counts once it lacks at most these bytes, which arrive within milliseconds."""


class SlaveWatch:
    """One slave of a mastership, over all its connections. Made by `Slaves`; ends with the mastership."""

    def __init__(self, name: str, mastership: Mastership, identity: IdentityFile, slaves: Slaves) -> None:
        self.name = name
        self._mastership = mastership
        self._identity = identity
        self._slaves = slaves
        self._ticked_ms = mastership.host.monotonic_ms()
        self.follower = Follower()
        self.has_parted = False
        """Whether the slave's log differed from the master's, and has not matched since."""
        self.is_disk_full = False
        self.shared_end: int | None = None
        """End of the part common to both logs at the last hello; None before it, or if the slave's log was empty."""
        self.owner = ""
        """The slave's broker, hostname:serve_port; its incarnation if it is of an older version."""
        self.frame_bytes_max = FRAME_BYTES_MAX
        """Longest body of a frame that the slave reads."""
        self.instance = ""
        """Instance of the process that got the last answer to a hello."""

    @property
    def confirmed_end(self) -> int | None:
        """Offset from which the slave still needs the log, or None without a connection."""
        slave = self.follower.connected
        return None if slave is None else slave.shipper.confirmed_end

    @property
    def incarnation(self) -> str:
        """Incarnation of the connected slave's data directory."""
        slave = self.follower.connected
        assert slave is not None
        return slave.incarnation

    @property
    def is_fully_matched(self) -> bool:
        """Whether the slave confirmed the whole log and was sent the acknowledged point."""
        slave, mastership = self.follower.in_sync, self._mastership
        if slave is None:
            return False
        return slave.shipper.confirmed_end == mastership.log.end and mastership.gate.point == slave.point_sent

    @property
    def is_compared(self) -> bool:
        """Whether the slave's log was compared with the master's, and the slave restores nothing."""
        return self.follower.connected is not None or self.follower.unfilled is not None

    def _enter(self, event: FollowerEvent, now: Facts) -> None:
        """Enter a state and update all that depends on it. A slave that counts does so until it gets another shipper,
        or none.
        """
        before = self.follower.connected
        self.follower.enter(event, now, at_ms=self._mastership.host.monotonic_ms())
        slave = self.follower.connected
        self._slaves.changed()
        if before is not None and (slave is None or slave.shipper is not before.shipper):
            self._without_slave()

    def hello(self, link: Link, packet: Packet, hello: Hello) -> None:
        mastership, points = self._mastership, self._identity.points
        is_another = self._link not in (None, link) and hello.instance != self.instance
        if is_another and hello.known <= mastership.epoch:  # a newer epoch fences this master instead
            log.critical("another process of the slave refused group=%s peer=%s", mastership.group, link.peer)
            raise NotServed(
                f"another process with this copy is the slave of {mastership.group} already; one of the two may run on "
                "a copy of the other's directory. Stop one of them"
            )
        self.owner = hello.owner or hello.incarnation
        self.frame_bytes_max = hello.frame_bytes_max
        self.instance = hello.instance
        is_ahead = hello.is_ahead_of(mastership.log.state.epoch)
        parted_at: int | None = None
        try:
            agreement = agree(hello, mastership.log, mastership.epoch, has_begun=mastership.has_begun, point=points.own)
            self.shared_end = agreement.offset if hello.end else None
            if isinstance(agreement, Yield):
                parted_at = agreement.offset
                self._check_yield(parted_at, hello, is_ahead=is_ahead)
        except Fenced:
            self._slaves.fenced(hello.known)
            raise
        except CorruptFrame as problem:
            mastership.found_damage(problem)
            raise
        except Diverged as error:
            if is_ahead:
                self._compare(hello)  # the mastership must not begin without the point
            if parted_at is not None:
                link.push(Command.PARTED, commands.offset_header(parted_at))
            link.refuse(packet, error)
            self._diverged(link, error)
            return
        self._compare(hello)
        if isinstance(agreement, Yield):
            self._slaves.yields(agreement.offset)
            raise CopyRolledBack(
                f"this master's frames from offset {agreement.offset} on contradict frames that the slave confirmed; "
                "it cuts them. Connect again"
            )
        if agreement.action == Action.RESTORE and self._slaves.is_restoring_from(self, hello):
            raise NotServed("this master restores its log from another slave; connect again")
        if points.lacks is not None:
            self._check_refill(points.lacks, hello, agreement)
        self._answer(link, packet, hello, agreement)

    def _answer(self, link: Link, packet: Packet, hello: Hello, agreement: Agreement) -> None:
        """Begin the agreed action: the slave restores the master's log, waits to be filled, or receives frames."""
        text = "slave connected group=%s peer=%s end=%d: %s from %d"
        log.info(text, self._mastership.group, link.peer, hello.end, agreement.action.value, agreement.offset)
        older = self._link
        if agreement.action == Action.RESTORE:
            self._slaves.holds(hello.end)
            self._enter(FollowerEvent.RESTORES, Restoring(link, agreement.offset, hello))
            link.answer(packet, agreement.encode())
        elif self._is_to_wait(hello, agreement):
            self._wait(link, packet, agreement, hello.fill_id)
        else:
            self._ship_to(link, packet, agreement, hello)
        if older is not None and older is not link:
            older.close("a newer connection of the slave replaces this one")

    def _check_yield(self, offset: int, hello: Hello, *, is_ahead: bool) -> None:
        """Raise Diverged if this copy, or another slave, may have confirmed the master's frames from `offset` on."""
        slaves, points, message_log = self._slaves, self._identity.points, self._mastership.log
        kept_end = points.keeps(message_log, restored_from=slaves.restored_from if is_ahead else None)
        text = f"the copies differ from offset {offset} on; the slave confirmed its frames up to {hello.kept_end}, "
        if kept_end > offset:
            raise Diverged(f"{text}the master its own up to {kept_end}")
        if not is_ahead and not slaves.may_yield(offset):
            raise Diverged(f"{text}and another slave may have confirmed the master's")

    def _is_to_wait(self, hello: Hello, agreement: Agreement) -> bool:
        """Return whether the slave must be filled and may not. A slave with all acknowledged frames only catches up."""
        is_filling = self._is_filling(hello, agreement)
        return is_filling and not self._slaves.fill_orders.may_begin(hello.fill_id)

    def _is_filling(self, hello: Hello, agreement: Agreement) -> bool:
        is_partial = hello.would_be_filled or (bool(hello.fill_id) and agreement.action == Action.SEED)
        return is_partial and agreement.offset < self._mastership.gate.high_watermark

    def _wait(self, link: Link, packet: Packet, agreement: Agreement, fill_id: str) -> None:
        """Answer WAIT: the slave gets no frames until it may be filled. It does not count, and delays nothing."""
        self._enter(FollowerEvent.WAITS, Unfilled(link, fill_id))
        link.answer(packet, replace(agreement, action=Action.WAIT).encode())
        log.warning("slave is not filled group=%s slave=%s: SyncReplica allows it", self._mastership.group, self.owner)
        self._slaves.compared()

    @property
    def _link(self) -> Link | None:
        """The slave's connection, or None."""
        now = self.follower.now
        if isinstance(now, Unfilled | Restoring):
            return now.link
        return now.shipper.link if isinstance(now, Connected) else None

    def apply_orders(self, orders: FillOrders) -> None:
        """Make the slave send another hello if it waits and may be filled now, or is being filled and must stop."""
        now = self.follower.now
        if isinstance(now, Unfilled) and orders.may_begin(now.fill_id):
            self.drop("the slave may be filled now; connect again")
        elif isinstance(now, CatchingUp) and orders.is_cancelled(now.fill_id):
            self.drop("CancelSync stops the filling")

    def _compare(self, hello: Hello) -> None:
        """Check that the master's log has the acknowledged point that the slave remembers."""
        mastership, points = self._mastership, self._identity.points
        if hello.point is not None and is_lacking(mastership.log, hello.point):
            log_lacking(mastership.log, mastership.group, hello.point, "the slave")
            points.rolled_back(hello.point)
            self._slaves.lacks(hello.point)

    def _check_refill(self, lacks: Point, hello: Hello, agreement: Agreement) -> None:
        """Raise CopyRolledBack if the slave lacks the acknowledged point as well. Then its further frames are not
        restored: an older master may have written them alone, and they would contradict the copy that has the point.
        """
        is_restoring = agreement.action == Action.RESTORE
        if is_restoring and hello.has(lacks):
            return
        if is_restoring or is_lacking(self._mastership.log, lacks):
            raise CopyRolledBack(
                f"this master and the slave lack acknowledged frames up to {lacks}. Start the copy that has them"
            )
        self._identity.points.refilled()

    def _without_slave(self) -> None:
        """Stop counting the slave. If too few are left, consumers continue below the high watermark, and pulls with
        messages above it are refused and repeated.
        """
        gate = self._mastership.gate
        gate.slave_gone(self.name)
        if gate.too_few_in_sync:
            text = f"a slave of {self._mastership.group} is missing: only messages on enough copies are delivered"
            gate.refuse_unsafe(NotServed(text))

    def _ship_to(self, link: Link, packet: Packet, agreement: Agreement, hello: Hello) -> None:
        mastership = self._mastership
        shipper = Shipper(
            mastership.log,
            link,
            mastership.host.read,
            begin=agreement.offset,
            chain=agreement.chain,
            bytes_per_s=mastership.settings.catch_up_bytes_per_s,
            found_damage=mastership.found_damage,
        )
        fill_id = hello.fill_id if self._is_filling(hello, agreement) else ""
        self._enter(FollowerEvent.FOLLOWS, CatchingUp(shipper, hello.incarnation, fill_id))
        link.answer(packet, agreement.encode())
        if agreement.action == Action.SEED:
            shipper.seed()
        self._slaves.compared()
        mastership.host.pass_soon()

    def confirm(self, link: Link, packet: Packet) -> None:
        mastership, slave = self._mastership, self.follower.connected
        confirmation: Confirmation = commands.decode_confirmation(packet.body)
        assert slave is not None
        if confirmation.epoch != mastership.epoch:
            link.close("the confirmation is of another epoch")
            return
        try:
            slave.shipper.confirm(confirmation.matched_end, confirmation.chain)
        except Diverged as error:
            self._diverged(link, error)
            return
        self._slaves.holds(confirmation.matched_end)
        if isinstance(slave, InSync):
            mastership.gate.confirmed(confirmation.matched_end, confirmation.chain, self.name)
        elif self._is_caught_up(confirmation.matched_end):
            self.has_parted = False
            self._enter(FollowerEvent.MATCHED, InSync(slave.shipper, slave.incarnation))
            mastership.gate.slave_matched(confirmation.matched_end, confirmation.chain, self.name)
            self._slaves.matched()
            log.info("slave matched group=%s peer=%s end=%d", mastership.group, link.peer, confirmation.matched_end)
        self._check_lag(mastership.host.monotonic_ms())
        slave.shipper.ship()

    def _is_caught_up(self, confirmed_end: int) -> bool:
        """Return whether a joining slave may count. If it counted earlier, it would only delay consumers."""
        mastership = self._mastership
        return confirmed_end >= mastership.gate.high_watermark and mastership.log.end - confirmed_end <= CAUGHT_UP_BYTES

    def restore(self, packet: Packet) -> None:
        """Append frames that the master lost and the slave still has."""
        offset, data = commands.split_offset(packet.body)
        self._mastership.log.append_frames(offset, data)
        self._mastership.host.pass_soon()

    def is_restoring(self, link: Link) -> bool:
        restoring = self.follower.restoring
        return restoring is not None and restoring.link is link and not self._mastership.has_begun

    def drop(self, why: str) -> None:
        """Close the slave's connection, if any; the slave sends another hello."""
        if (link := self._link) is not None:
            self._enter(FollowerEvent.LOST, Absent())
            link.close(why)

    def link_lost(self, link: Link) -> None:
        if link is self._link:
            self._enter(FollowerEvent.LOST, Absent())
            too_few = ": the group is readonly" if self._mastership.gate.too_few_in_sync else ""
            log.warning("slave lost group=%s peer=%s%s", self._mastership.group, link.peer, too_few)

    def tick(self, now_ms: int) -> None:
        elapsed_ms, self._ticked_ms = now_ms - self._ticked_ms, now_ms
        if (slave := self.follower.connected) is not None:
            slave.shipper.allow(elapsed_ms)
            slave.shipper.ship()
        self._check_lag(now_ms)

    def send_point(self, point: Point) -> None:
        """Send the acknowledged point, if the slave confirmed it; the slave stores it outside its log."""
        slave = self.follower.in_sync
        if slave is not None and point != slave.point_sent and slave.shipper.confirmed_end >= point.end:
            slave.point_sent = point
            confirmation = Confirmation(point.epoch, point.end, point.chain)
            slave.shipper.link.push(Command.ACKNOWLEDGED, commands.encode_confirmation(confirmation))

    def confirm_restored(self, end: int, chain: int) -> None:
        slave = self.follower.restoring
        if slave is not None and end > slave.begin:  # frames of an earlier link do not count
            confirmation = Confirmation(self._mastership.epoch, end, chain)
            slave.link.push(Command.CONFIRM, commands.encode_confirmation(confirmation))

    def _diverged(self, link: Link, error: Diverged) -> None:
        self.has_parted = True
        self._enter(FollowerEvent.PARTED, Parted())
        log.critical("copies differ group=%s peer=%s: %s", self._mastership.group, link.peer, error)
        link.close(str(error))

    def _check_lag(self, now_ms: int) -> None:
        """Move the slave between IN_SYNC and LAGGING by its lag in bytes and time."""
        mastership, settings, slave = self._mastership, self._mastership.settings, self.follower.in_sync
        if slave is None:
            return
        confirmed_end = slave.shipper.confirmed_end
        behind = mastership.log.end - confirmed_end
        if slave.noted_end <= confirmed_end:
            slave.noted_end, slave.noted_ms = mastership.log.end, now_ms
        age_ms = now_ms - slave.noted_ms
        is_late = behind > settings.slave_lag_bytes_max or age_ms > settings.slave_lag_ms_max
        if is_late and self.follower.state is FollowerState.IN_SYNC:
            self._enter(FollowerEvent.FELL_BEHIND, slave)
            log.warning("slave lags group=%s slave=%s bytes=%d age_ms=%d", mastership.group, self.owner, behind, age_ms)
        elif not is_late and self.follower.state is FollowerState.LAGGING:
            self._enter(FollowerEvent.CAUGHT_UP, slave)
        if age_ms > 2 * settings.slave_lag_ms_max:
            slave.shipper.link.close("no confirmation for too long: consumers continue without this slave")
