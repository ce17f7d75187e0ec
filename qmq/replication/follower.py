"""Core. A master's view of one slave, from hello to loss.

A slave counts in IN_SYNC and LAGGING only: then its confirmations raise the high watermark. The group is readonly while
too few slaves are IN_SYNC. Facts of a state are in its class (`Restoring`, …).

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
    UNFILLED = auto()  # connected; it has to be filled, and an operator has to allow that
    RESTORING = auto()  # it sends frames that this master's disk lost; the mastership has not begun
    CATCHING_UP = auto()  # it receives frames; it has not matched yet
    IN_SYNC = auto()
    LAGGING = auto()  # behind by too many bytes, or for too long
    DIVERGED = auto()  # its log is not ours; its connection is closed; a person has to look


class FollowerEvent(Enum):
    FOLLOWS = auto()  # hello agreed: it follows, from an offset or a snapshot
    RESTORES = auto()  # hello agreed: it has more of the same history
    WAITS = auto()  # hello agreed: it is not filled yet
    MATCHED = auto()  # it has all that is acknowledged, and nearly all else
    FELL_BEHIND = auto()
    CAUGHT_UP = auto()
    PARTED = auto()  # its hello or its confirmation contradicts our log
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
    """`fill_id`: filling to be allowed."""

    link: Link
    fill_id: str


@dataclass(slots=True, eq=False)
class Restoring:
    """`begin`: offset from which it sends. `hello`: its hello."""

    link: Link
    begin: int
    hello: Hello


@dataclass(slots=True, eq=False)
class Connected:
    """Common facts of CATCHING_UP, IN_SYNC and LAGGING. `incarnation`: of the slave's data directory."""

    shipper: Shipper
    incarnation: str


@dataclass(slots=True, eq=False)
class CatchingUp(Connected):
    fill_id: str = ""
    """Id of its present filling; empty: it continues where its log ended."""


@dataclass(slots=True, eq=False)
class InSync(Connected):
    """Facts of IN_SYNC and LAGGING."""

    noted_end: int = 0
    """A log end, noted when the slave confirmed the one noted before; `noted_ms`: time of that."""
    noted_ms: int = 0
    point_sent: Point | None = None
    """Newest acknowledged point sent to it."""


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
    """States of the slave in one mastership. Made with its `SlaveWatch`, which moves it."""

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
"""A slave that joins counts this close to the log's end: the rest arrives within milliseconds."""


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
        """Its log differs from ours, and it has not matched since."""
        self.is_disk_full = False
        self.shared_end: int | None = None
        """End of the common part at its last hello; None: no hello yet, or its log was empty."""
        self.owner = ""
        """Its broker, hostname:serve_port; of an older version, its incarnation."""
        self.frame_bytes_max = FRAME_BYTES_MAX
        """Longest body of a frame that it reads."""
        self.instance = ""
        """Instance of the process that got the last answer to a hello."""

    @property
    def confirmed_end(self) -> int | None:
        """Offset from which the slave still needs the log; None: it is not connected."""
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
        """Whether its log was compared with ours, and it sends us nothing."""
        return self.follower.connected is not None or self.follower.unfilled is not None

    def _enter(self, event: FollowerEvent, now: Facts) -> None:
        """Move the slave's state and its dependants. A slave that counts does so until it gets another shipper, or
        none.
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
                self._compare(hello)  # the mastership does not begin without it
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
        """Begin the agreed action: the slave restores our log, waits to be filled, or receives frames."""
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
        """Raise Diverged if we, or another slave, may have confirmed our frames from `offset` on."""
        slaves, points, message_log = self._slaves, self._identity.points, self._mastership.log
        kept_end = points.keeps(message_log, restored_from=slaves.restored_from if is_ahead else None)
        text = f"the copies differ from offset {offset} on; the slave confirmed its frames up to {hello.kept_end}, "
        if kept_end > offset:
            raise Diverged(f"{text}the master its own up to {kept_end}")
        if not is_ahead and not slaves.may_yield(offset):
            raise Diverged(f"{text}and another slave may have confirmed the master's")

    def _is_to_wait(self, hello: Hello, agreement: Agreement) -> bool:
        """Whether it would have to be filled and may not. A slave with all acknowledged frames only catches up."""
        is_filling = self._is_filling(hello, agreement)
        return is_filling and not self._slaves.fill_orders.may_begin(hello.fill_id)

    def _is_filling(self, hello: Hello, agreement: Agreement) -> bool:
        is_partial = hello.would_be_filled or (bool(hello.fill_id) and agreement.action == Action.SEED)
        return is_partial and agreement.offset < self._mastership.gate.high_watermark

    def _wait(self, link: Link, packet: Packet, agreement: Agreement, fill_id: str) -> None:
        """Send nothing to it until it may be filled. It does not count, and delays nothing."""
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
        """Make it send another hello if it waits and may be filled now, or is being filled and must stop."""
        now = self.follower.now
        if isinstance(now, Unfilled) and orders.may_begin(now.fill_id):
            self.drop("the slave may be filled now; connect again")
        elif isinstance(now, CatchingUp) and orders.is_cancelled(now.fill_id):
            self.drop("CancelSync stops the filling")

    def _compare(self, hello: Hello) -> None:
        """Check that our log has the acknowledged point that the slave remembers."""
        mastership, points = self._mastership, self._identity.points
        if hello.point is not None and is_lacking(mastership.log, hello.point):
            log_lacking(mastership.log, mastership.group, hello.point, "the slave")
            points.rolled_back(hello.point)
            self._slaves.lacks(hello.point)

    def _check_refill(self, lacks: Point, hello: Hello, agreement: Agreement) -> None:
        """Raise CopyRolledBack if the slave lacks the acknowledged point as well. Its further frames are not taken
        then: an older master may have written them alone, and they would contradict the copy that has the point.
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
        """Stop counting the slave. With too few left, consumers continue below the high watermark, and pulls that were
        given more ask again.
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
        """Whether a slave that joins may count: earlier it would only delay consumers."""
        mastership = self._mastership
        return confirmed_end >= mastership.gate.high_watermark and mastership.log.end - confirmed_end <= CAUGHT_UP_BYTES

    def restore(self, packet: Packet) -> None:
        """Append frames that we lost and the slave still has."""
        offset, data = commands.split_offset(packet.body)
        self._mastership.log.append_frames(offset, data)
        self._mastership.host.pass_soon()

    def is_restoring(self, link: Link) -> bool:
        restoring = self.follower.restoring
        return restoring is not None and restoring.link is link and not self._mastership.has_begun

    def drop(self, why: str) -> None:
        """Close its connection, if any: it sends another hello."""
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

    def tell(self, point: Point) -> None:
        """Send the acknowledged point, if the slave confirmed it: it remembers it outside its log."""
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
