"""Core. A master's part towards its slave: agree where both logs match, ship, count confirmations, watch the lag.

A slave counts for nothing until it has matched and nearly caught up (W14). Before the mastership begins, the master
takes back what it lost; then it writes its epoch frame, and from there on its bytes are its own. If it wrote alone what
is in the way of what its slave confirmed, the mastership ends: the node cuts that, and begins another one.

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

    def __init__(self, mastership: Mastership, identity: IdentityFile, matched: Callable[[], None]) -> None:
        self._mastership, self._identity, self._matched = mastership, identity, matched
        self.fenced_by: Epoch | None = None
        self.yields_from: int | None = None
        self._must_match = mastership.log.is_empty or mastership.log.is_tail_cut or not identity.value.complete
        self._point_told: Point | None = None
        self._began_ms = self._ticked_ms = mastership.host.monotonic_ms()
        self._slave: Shipper | None = None
        self._slave_incarnation = ""
        self._giver: Link | None = None
        self._give_from = 0
        self._oldest_unconfirmed: tuple[int, int] | None = None
        mastership.readonly.change(Reason.SLAVE_DOWN, True)

    @property
    def confirmed_end(self) -> int | None:
        """Offset from which the slave still needs the log; None without a slave."""
        return self._slave.confirmed_end if self._slave is not None else None

    @property
    def in_step_with(self) -> str:
        """Incarnation of the slave whose copy has all that is acknowledged; empty: none has."""
        return "" if self._slave is None or self._mastership.gate.no_slave_in_sync else self._slave_incarnation

    def is_slave(self, link: Link) -> bool:
        return self._slave is not None and self._slave.link is link

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
        if agreement.action != Action.GIVE and points.lacks is not None:
            self._check_refilled(points.lacks)
        log.info(
            "slave says hello group=%s peer=%s end=%d: %s from %d",
            mastership.group, link.peer, hello.end, agreement.action.value, agreement.offset,
        )  # fmt: skip
        self._forget_slave(replaced_by=link)
        self._giver, self._give_from = (link if agreement.action == Action.GIVE else None), agreement.offset
        link.answer(packet, agreement.encode())
        if agreement.action != Action.GIVE:
            self._slave_incarnation = hello.incarnation
            self._ship_to(link, agreement)

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

    def _forget_slave(self, replaced_by: Link) -> None:
        """Until it has matched again, a slave counts for nothing."""
        if self._slave is None:
            return
        older, self._slave = self._slave.link, None
        self._without_slave()
        if older is not replaced_by:
            older.close("a newer connection of the slave replaces this one")

    def _without_slave(self) -> None:
        """Consumers go on below the high watermark; pulls that were given more ask again."""
        gate = self._mastership.gate
        gate.slave_gone()
        gate.refuse_unsafe(
            NotServed(f"the slave of {self._mastership.group} is missing: only what it has is handed out")
        )

    def _ship_to(self, link: Link, agreement: Agreement) -> None:
        mastership = self._mastership
        self._slave = Shipper(
            mastership.log, link, mastership.host.read, begin=agreement.offset, chain=agreement.chain,
            bytes_per_s=mastership.settings.catch_up_bytes_per_s, found_damage=mastership.found_damage,
        )  # fmt: skip
        if agreement.action == Action.SEED:
            self._slave.seed()
        if not mastership.has_begun:
            self._begin("its slave matched")
        self._check_lag(mastership.host.monotonic_ms())
        mastership.host.pass_soon()

    def confirm(self, link: Link, packet: Packet) -> None:
        mastership, slave = self._mastership, self._slave
        confirmation: Confirmation = commands.decode_confirmation(packet.body)
        if slave is None or slave.link is not link or confirmation.epoch != mastership.epoch:
            link.close("a confirmation of another link or epoch proves nothing here")
            return
        try:
            slave.confirm(confirmation.matched_end, confirmation.chain)
        except Diverged as error:
            self._diverged(link, error)
            return
        if not mastership.gate.no_slave_in_sync:
            mastership.gate.confirmed(confirmation.matched_end, confirmation.chain)
        elif self._is_caught_up(confirmation.matched_end):
            mastership.gate.slave_matched(confirmation.matched_end, confirmation.chain)
            mastership.readonly.change(Reason.DIVERGED, False)
            self._matched()
            log.info("slave matched group=%s peer=%s end=%d", mastership.group, link.peer, confirmation.matched_end)
        self._check_lag(mastership.host.monotonic_ms())
        slave.ship()

    def _is_caught_up(self, confirmed_end: int) -> bool:
        """Whether a slave that joins may count: before that it would only hold up consumers."""
        mastership = self._mastership
        return confirmed_end >= mastership.gate.high_watermark and mastership.log.end - confirmed_end <= CAUGHT_UP_BYTES

    def take_back(self, link: Link, packet: Packet) -> None:
        """Frames that we lost and the slave still has."""
        if link is not self._giver or self._mastership.has_begun:
            link.close("nobody asked for these frames")
            return
        offset, data = commands.split_offset(packet.body)
        self._mastership.log.append_frames(offset, data)
        self._mastership.host.pass_soon()

    def take_back_snapshot(self, link: Link, packet: Packet) -> None:
        mastership = self._mastership
        base, snapshot = commands.split_offset(packet.body)
        if (
            link is not self._giver
            or mastership.has_begun
            or not (mastership.log.is_empty or base > mastership.log.end)
        ):
            link.close("nobody asked for this snapshot")
            return
        if not mastership.log.is_idle:
            link.close("what an earlier link gave is still being written: say hello again")
            return
        # What we took back on an earlier link may end before the slave's log begins by now: retention went on there.
        mastership.log.seed(base, snapshot, "taken-back")
        self._confirm_to_giver(base, mastership.log.chain)

    # Events.

    def ship(self) -> None:
        if self._slave is not None:
            self._slave.ship()

    def committed(self, end: int, chain: int) -> None:
        """Our disk has everything before `end`."""
        self._confirm_to_giver(end, chain)
        self.ship()

    def link_lost(self, link: Link) -> None:
        if self._giver is link:
            self._giver = None
        if self.is_slave(link):
            self._slave = None
            self._without_slave()
            self._mastership.readonly.change(Reason.SLAVE_DOWN, True)
            log.warning("slave lost group=%s peer=%s: the group is readonly", self._mastership.group, link.peer)

    def tick(self, now_ms: int) -> None:
        elapsed_ms, self._ticked_ms = now_ms - self._ticked_ms, now_ms
        if self._slave is not None:
            self._slave.allow(elapsed_ms)
            self._slave.ship()
        self.remember_point()
        self._check_lag(now_ms)
        waited_ms = now_ms - self._began_ms
        may_go_on = not self._must_match and self._giver is None and self._identity.points.lacks is None
        if not self._mastership.has_begun and may_go_on and waited_ms >= self._mastership.settings.slave_wait_ms:
            self._begin("went on without its slave")

    def remember_point(self) -> None:
        """Note up to where we acknowledged, and tell the slave: both remember it outside the log."""
        point, slave = self._mastership.gate.point, self._slave
        if point is None:
            return
        self._identity.points.acknowledged(point)
        if slave is not None and point != self._point_told and not self._mastership.gate.no_slave_in_sync:
            self._point_told = point
            told = Confirmation(point.epoch, point.end, point.chain)
            slave.link.tell(Command.ACKNOWLEDGED, commands.encode_confirmation(told))

    def step_down(self) -> None:
        self.remember_point()
        if self._slave is not None:
            self._slave.link.close("the mastership is over")
            self._slave = None

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

    def _confirm_to_giver(self, end: int, chain: int) -> None:
        if self._giver is not None and end > self._give_from:  # not for what an earlier giver gave
            confirmation = Confirmation(self._mastership.epoch, end, chain)
            self._giver.tell(Command.CONFIRM, commands.encode_confirmation(confirmation))

    def _diverged(self, link: Link, error: Diverged) -> None:
        self._mastership.readonly.change(Reason.DIVERGED, True)
        log.critical("copies differ group=%s peer=%s: %s", self._mastership.group, link.peer, error)
        link.close(str(error))

    def _fenced(self, known: Epoch) -> None:
        self._mastership.readonly.change(Reason.FENCED, True)
        self.fenced_by = known
        log.warning("master fenced group=%s epoch=%s by=%s", self._mastership.group, self._mastership.epoch, known)

    def _check_lag(self, now_ms: int) -> None:
        """Readonly while the slave is missing or too far behind, in bytes or in time."""
        mastership, settings = self._mastership, self._mastership.settings
        mastership.readonly.change(Reason.SLAVE_DOWN, self._slave is None)
        if mastership.gate.no_slave_in_sync or self._slave is None:
            self._oldest_unconfirmed = None
            mastership.readonly.change(Reason.SLAVE_LAG, self._slave is not None)
            return
        matched_end = mastership.gate.matched_end
        behind = mastership.log.end - matched_end
        if self._oldest_unconfirmed is None or self._oldest_unconfirmed[0] <= matched_end:
            self._oldest_unconfirmed = (mastership.log.end, now_ms) if behind else None
        age_ms = now_ms - self._oldest_unconfirmed[1] if self._oldest_unconfirmed else 0
        is_late = behind > settings.slave_lag_bytes_max or age_ms > settings.slave_lag_ms_max
        if mastership.readonly.change(Reason.SLAVE_LAG, is_late) and is_late:
            log.warning(
                "slave lags group=%s bytes=%d age_ms=%d: the group is readonly", mastership.group, behind, age_ms
            )
        if age_ms > 2 * settings.slave_lag_ms_max:
            self._slave.link.close("no confirmation for too long: consumers go on without this slave")
