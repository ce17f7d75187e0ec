"""Core. A master's part towards its slave: agree where both logs match, ship, count confirmations, watch the lag.

The states of the slave are a table, `qmq.replication.follower`; it counts for nothing until it has matched and nearly
caught up (W14). Before the mastership begins, the slave restores what the master lost; then the master writes its epoch
frame, and from there on its bytes are its own. If it wrote without a slave what is in the way of what its slave
confirmed, the mastership ends: the node cuts that, and begins another one.

Keeps I20.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from qmq.errors import CopyRolledBack, CorruptFrame, Diverged, Fenced, InvalidRequest, NotServed
from qmq.log.frame import FrameKind, encode_json_body
from qmq.remoting import commands
from qmq.remoting.commands import Command, Confirmation
from qmq.remoting.packet import Packet
from qmq.replication.agreement import Action, Agreement, Hello, Yield, agree
from qmq.replication.follower import (
    Absent,
    CatchingUp,
    Facts,
    Follower,
    FollowerEvent,
    FollowerState,
    InSync,
    Parted,
    Restoring,
)  # fmt: skip
from qmq.replication.identity import IdentityFile
from qmq.replication.mastership import Mastership
from qmq.replication.points import Point, is_lacking
from qmq.replication.ports import Link
from qmq.replication.readonly import Reason
from qmq.replication.shipper import Shipper
from qmq.types import Epoch

log = logging.getLogger(__name__)

CAUGHT_UP_BYTES = 8 << 20
"""So close to the log's end, a slave that joins counts: the rest is under way within milliseconds."""


class SlaveWatch:
    """Made by the master; ends with the mastership. `matched` is called when a slave begins to count."""

    def __init__(
        self, mastership: Mastership, identity: IdentityFile, matched: Callable[[], None], *, wait_ms: int
    ) -> None:
        self._mastership, self._identity, self._matched, self._wait_ms = mastership, identity, matched, wait_ms
        self.fenced_by: Epoch | None = None
        self.yields_from: int | None = None
        self._must_match = mastership.log.is_empty or mastership.log.is_tail_cut or not identity.value.complete
        self._began_ms = self._ticked_ms = mastership.host.monotonic_ms()
        self.follower = Follower()
        mastership.readonly.change(Reason.SLAVE_DOWN, True)

    @property
    def confirmed_end(self) -> int | None:
        """Offset from which the slave still needs the log; None without a slave."""
        slave = self.follower.connected
        return None if slave is None else slave.shipper.confirmed_end

    @property
    def in_step(self) -> tuple[str, ...]:
        """Incarnations of the slaves whose copies have all that is acknowledged."""
        slave = self.follower.in_sync
        return () if slave is None else (slave.incarnation,)

    @property
    def is_level(self) -> bool:
        """Whether the slave has confirmed all that there is, and knows what was acknowledged."""
        slave, gate = self.follower.in_sync, self._mastership.gate
        is_level = slave is not None and gate.matched_end == self._mastership.log.end and gate.point == slave.point_sent
        return is_level and self.follower.state is FollowerState.IN_SYNC

    def is_slave(self, link: Link) -> bool:
        slave = self.follower.connected
        return slave is not None and slave.link is link

    def _enter(self, event: FollowerEvent, now: Facts) -> None:
        """Move the slave's state, and what depends on it: a slave counts until `event` says that it does not."""
        mastership, before = self._mastership, self.follower.connected
        state = self.follower.enter(event, now, at_ms=mastership.host.monotonic_ms())
        slave = self.follower.connected
        mastership.readonly.change(Reason.SLAVE_DOWN, slave is None)
        mastership.readonly.change(Reason.SLAVE_LAG, state in (FollowerState.CATCHING_UP, FollowerState.LAGGING))
        if before is not None and (slave is None or slave.shipper is not before.shipper):
            self._without_slave()

    # Requests.

    def hello(self, link: Link, packet: Packet) -> None:
        mastership = self._mastership
        hello = Hello.decode(packet.body)
        if hello.group != mastership.group or hello.incarnation == self._identity.value.incarnation:
            raise InvalidRequest(f"this is the master of {mastership.group}; you are of {hello.group!r}, or myself")
        if hello.assigned_term != mastership.epoch.term and hello.known <= mastership.epoch:
            # It follows an older row, or a newer one: another broker may be the slave by now, and this one's copy must
            # not be what an acknowledgement rests on.
            raise InvalidRequest(
                f"you are the slave of term {hello.assigned_term}, this is the master of term {mastership.epoch.term}: "
                "ask the metaserver again"
            )
        points = self._identity.points
        try:
            agreement = agree(
                hello, mastership.log, mastership.epoch, has_begun=mastership.has_begun,
                kept_end=points.keeps(mastership.log), point=points.own,
            )  # fmt: skip
        except Fenced:
            self._fenced(hello.known)
            raise
        except CorruptFrame as problem:
            mastership.found_damage(problem)
            raise
        except Diverged as error:
            link.refuse(packet, error)
            self._diverged(link, error)
            return
        self._compare(hello)
        if isinstance(agreement, Yield):
            self.yields_from = agreement.offset
            raise CopyRolledBack(
                f"this master wrote alone from {agreement.offset} on, in the way of what you confirmed: it begins anew"
            )
        if agreement.action != Action.RESTORE and points.lacks is not None:
            self._check_refilled(points.lacks)
        log.info(
            "slave says hello group=%s peer=%s end=%d: %s from %d",
            mastership.group, link.peer, hello.end, agreement.action.value, agreement.offset,
        )  # fmt: skip
        if agreement.action == Action.RESTORE:
            self._enter(FollowerEvent.RESTORES, Restoring(link, agreement.offset))
            link.answer(packet, agreement.encode())
        else:
            self._ship_to(link, packet, agreement, hello.incarnation)

    def _compare(self, hello: Hello) -> None:
        """Whatever the slave knows to be acknowledged must be in our log."""
        mastership, points = self._mastership, self._identity.points
        if hello.point is not None and is_lacking(mastership.log, hello.point):
            log.critical(
                "rolled back group=%s end=%d: this disk lacks what was acknowledged up to %s, says the slave",
                mastership.group, mastership.log.end, hello.point,
            )  # fmt: skip
            points.rolled_back(hello.point)

    def _check_refilled(self, lacks: Point) -> None:
        """Raise CopyRolledBack if the slave, which has no more than we, lacks the acknowledged point as well."""
        if is_lacking(self._mastership.log, lacks):
            raise CopyRolledBack(
                f"this master lacks what was acknowledged up to {lacks}, and so do you: the copy that has it must be "
                "started in its place"
            )
        self._identity.points.refilled()

    def _without_slave(self) -> None:
        """Consumers go on below the high watermark; pulls that were given more ask again."""
        gate = self._mastership.gate
        gate.slave_gone()
        gate.refuse_unsafe(
            NotServed(f"the slave of {self._mastership.group} is missing: only what it has is delivered")
        )

    def _ship_to(self, link: Link, packet: Packet, agreement: Agreement, incarnation: str) -> None:
        mastership, older = self._mastership, self.follower.connected
        shipper = Shipper(
            mastership.log, link, mastership.host.read, begin=agreement.offset, chain=agreement.chain,
            bytes_per_s=mastership.settings.catch_up_bytes_per_s, found_damage=mastership.found_damage,
        )  # fmt: skip
        self._enter(FollowerEvent.FOLLOWS, CatchingUp(shipper, incarnation))
        if older is not None and older.link is not link:
            older.link.close("a newer connection of the slave replaces this one")
        link.answer(packet, agreement.encode())
        if agreement.action == Action.SEED:
            shipper.seed()
        if not mastership.has_begun:
            self._begin("its slave matched")
        mastership.host.pass_soon()

    def confirm(self, link: Link, packet: Packet) -> None:
        mastership, slave = self._mastership, self.follower.connected
        confirmation: Confirmation = commands.decode_confirmation(packet.body)
        if slave is None or slave.link is not link or confirmation.epoch != mastership.epoch:
            link.close("a confirmation of another link or epoch proves nothing here")
            return
        try:
            slave.shipper.confirm(confirmation.matched_end, confirmation.chain)
        except Diverged as error:
            self._diverged(link, error)
            return
        if isinstance(slave, InSync):
            mastership.gate.confirmed(confirmation.matched_end, confirmation.chain)
        elif self._is_caught_up(confirmation.matched_end):
            self._enter(FollowerEvent.MATCHED, InSync(slave.shipper, slave.incarnation))
            mastership.gate.slave_matched(confirmation.matched_end, confirmation.chain)
            mastership.readonly.change(Reason.DIVERGED, False)
            self._matched()
            log.info("slave matched group=%s peer=%s end=%d", mastership.group, link.peer, confirmation.matched_end)
        self._check_lag(mastership.host.monotonic_ms())
        slave.shipper.ship()

    def _is_caught_up(self, confirmed_end: int) -> bool:
        """Whether a slave that joins may count: before that it would only hold up consumers."""
        mastership = self._mastership
        return confirmed_end >= mastership.gate.high_watermark and mastership.log.end - confirmed_end <= CAUGHT_UP_BYTES

    def restore(self, link: Link, packet: Packet) -> None:
        """Frames that we lost and the slave still has."""
        if not self._is_restoring(link):
            link.close("nobody asked for these frames")
            return
        offset, data = commands.split_offset(packet.body)
        self._mastership.log.append_frames(offset, data)
        self._mastership.host.pass_soon()

    def restore_snapshot(self, link: Link, packet: Packet) -> None:
        mastership = self._mastership
        base, snapshot = commands.split_offset(packet.body)
        if not self._is_restoring(link) or not (mastership.log.is_empty or base > mastership.log.end):
            link.close("nobody asked for this snapshot")
            return
        if not mastership.log.is_idle:
            link.close("what an earlier link sent is still being written: say hello again")
            return
        # What was restored on an earlier link may end before the slave's log begins by now: retention went on there.
        mastership.log.seed(base, snapshot, "taken-back")
        self._confirm_restored(base, mastership.log.chain)

    def _is_restoring(self, link: Link) -> bool:
        restoring = self.follower.restoring
        return restoring is not None and restoring.link is link and not self._mastership.has_begun

    # Events.

    def ship(self) -> None:
        if (slave := self.follower.connected) is not None:
            slave.shipper.ship()

    def committed(self, end: int, chain: int) -> None:
        """Our disk has everything before `end`."""
        self._confirm_restored(end, chain)
        self.ship()

    def link_lost(self, link: Link) -> None:
        if self._is_restoring(link):
            self._enter(FollowerEvent.LOST, Absent())
        elif self.is_slave(link):
            self._enter(FollowerEvent.LOST, Absent())
            log.warning("slave lost group=%s peer=%s: the group is readonly", self._mastership.group, link.peer)

    def tick(self, now_ms: int) -> None:
        elapsed_ms, self._ticked_ms = now_ms - self._ticked_ms, now_ms
        if (slave := self.follower.connected) is not None:
            slave.shipper.allow(elapsed_ms)
            slave.shipper.ship()
        self.remember_point()
        self._check_lag(now_ms)
        waited_ms = now_ms - self._began_ms
        may_go_on = not self._must_match and not self.follower.restoring and self._identity.points.lacks is None
        if not self._mastership.has_begun and may_go_on and waited_ms >= self._wait_ms:
            self._begin("went on without its slave")

    def remember_point(self) -> None:
        """Note up to where we acknowledged, and tell the slave: both remember it outside the log."""
        point, slave = self._mastership.gate.point, self.follower.in_sync
        if point is None:
            return
        self._identity.points.acknowledged(point)
        if slave is not None and point != slave.point_sent:
            slave.point_sent = point
            told = Confirmation(point.epoch, point.end, point.chain)
            slave.link.tell(Command.ACKNOWLEDGED, commands.encode_confirmation(told))

    def step_down(self) -> None:
        self.remember_point()
        slave = self.follower.connected
        if self.follower.may(FollowerEvent.LOST):
            self._enter(FollowerEvent.LOST, Absent())
        if slave is not None:
            slave.link.close("the mastership is over")

    def _begin(self, why: str) -> None:
        """Write the epoch frame: from here on this mastership's bytes are its own."""
        mastership = self._mastership
        mastership.has_begun = True
        self._identity.completed(True)
        self._identity.points.beginning(mastership.log.end)
        mastership.log.tail_is_whole()
        mastership.append(FrameKind.EPOCH, "", encode_json_body(broker=self._identity.value.incarnation, why=why))
        log.info(
            "mastership begins group=%s epoch=%s offset=%d: %s",
            mastership.group,
            mastership.epoch,
            mastership.log.end,
            why,
        )

    def _confirm_restored(self, end: int, chain: int) -> None:
        slave = self.follower.restoring
        if slave is not None and end > slave.begin:  # not for what came on an earlier link
            confirmation = Confirmation(self._mastership.epoch, end, chain)
            slave.link.tell(Command.CONFIRM, commands.encode_confirmation(confirmation))

    def _diverged(self, link: Link, error: Diverged) -> None:
        self._enter(FollowerEvent.PARTED, Parted())
        self._mastership.readonly.change(Reason.DIVERGED, True)
        log.critical("copies differ group=%s peer=%s: %s", self._mastership.group, link.peer, error)
        link.close(str(error))

    def _fenced(self, known: Epoch) -> None:
        self._mastership.readonly.change(Reason.FENCED, True)
        self.fenced_by = known
        log.warning("master fenced group=%s epoch=%s by=%s", self._mastership.group, self._mastership.epoch, known)

    def _check_lag(self, now_ms: int) -> None:
        """A slave in sync lags while it is too far behind, in bytes or in time."""
        mastership, settings, slave = self._mastership, self._mastership.settings, self.follower.in_sync
        if slave is None:
            return
        matched_end = mastership.gate.matched_end
        behind = mastership.log.end - matched_end
        if slave.oldest_unconfirmed is None or slave.oldest_unconfirmed[0] <= matched_end:
            slave.oldest_unconfirmed = (mastership.log.end, now_ms) if behind else None
        age_ms = now_ms - slave.oldest_unconfirmed[1] if slave.oldest_unconfirmed else 0
        is_late = behind > settings.slave_lag_bytes_max or age_ms > settings.slave_lag_ms_max
        if is_late and self.follower.state is FollowerState.IN_SYNC:
            self._enter(FollowerEvent.FELL_BEHIND, slave)
            log.warning(
                "slave lags group=%s bytes=%d age_ms=%d: the group is readonly", mastership.group, behind, age_ms
            )
        elif not is_late and self.follower.state is FollowerState.LAGGING:
            self._enter(FollowerEvent.CAUGHT_UP, slave)
        if age_ms > 2 * settings.slave_lag_ms_max:
            slave.link.close("no confirmation for too long: consumers go on without this slave")
