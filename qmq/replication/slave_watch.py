"""Core. A master's part towards its slave: agree where both logs match, ship, count confirmations, watch the lag.

A slave counts for nothing until it has matched and nearly caught up (W14). Before this master is in office, it takes
back what it lost; then it writes its epoch frame, and from there on its bytes are its own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from qmq.errors import CorruptFrame, Diverged, Fenced, InvalidRequest, NotServed
from qmq.log.frame import FrameKind
from qmq.log.progress import encode_office
from qmq.remoting import commands
from qmq.remoting.commands import Command, Confirmation
from qmq.remoting.packet import Packet
from qmq.replication.agreement import Action, Agreement, Hello, agree
from qmq.replication.identity import IdentityFile
from qmq.replication.ports import Link
from qmq.replication.readonly import Reason
from qmq.replication.reign import Reign
from qmq.replication.shipper import Shipper
from qmq.types import Epoch

log = logging.getLogger(__name__)

CAUGHT_UP_BYTES = 8 << 20
"""So close to the log's end, a slave that joins counts: the rest is under way within milliseconds."""


class SlaveWatch:
    """Made by the master; ends with the reign. `matched` is called when a slave begins to count."""

    def __init__(self, reign: Reign, identity: IdentityFile, matched: Callable[[], None]) -> None:
        self._reign, self._identity, self._matched = reign, identity, matched
        self.fenced_by: Epoch | None = None
        self._must_match = reign.log.is_empty or reign.log.is_tail_cut or not identity.value.complete
        self._began_ms = self._ticked_ms = reign.host.monotonic_ms()
        self._slave: Shipper | None = None
        self._slave_incarnation = ""
        self._giver: Link | None = None
        self._give_from = 0
        self._oldest_unconfirmed: tuple[int, int] | None = None
        reign.readonly.change(Reason.SLAVE_DOWN, True)

    @property
    def confirmed_end(self) -> int | None:
        """Offset from which the slave still needs the log; None without a slave."""
        return self._slave.confirmed_end if self._slave is not None else None

    @property
    def in_step_with(self) -> str:
        """Incarnation of the slave whose copy has all that is acknowledged; empty: none has."""
        return "" if self._slave is None or self._reign.gate.alone else self._slave_incarnation

    def is_slave(self, link: Link) -> bool:
        return self._slave is not None and self._slave.link is link

    # Requests.

    def hello(self, link: Link, packet: Packet) -> None:
        reign = self._reign
        hello = Hello.decode(packet.body)
        if hello.group != reign.group or hello.incarnation == self._identity.value.incarnation:
            raise InvalidRequest(f"this is the master of {reign.group}; you are of {hello.group!r}, or myself")
        if hello.assigned_term != reign.epoch.term and hello.known <= reign.epoch:
            # It follows an older row, or a newer one: another broker may be the slave by now, and this one's copy must
            # not be what an acknowledgement rests on.
            raise InvalidRequest(
                f"you are the slave of term {hello.assigned_term}, this is the master of term {reign.epoch.term}: "
                "ask the metaserver again"
            )
        try:
            agreement = agree(hello, reign.log, reign.epoch, in_office=reign.in_office)
        except Fenced:
            self._fenced(hello.known)
            raise
        except CorruptFrame as problem:
            reign.found_damage(problem)
            raise
        except Diverged as error:
            link.refuse(packet, error)
            self._diverged(link, error)
            return
        log.info(
            "slave says hello group=%s peer=%s end=%d: %s from %d",
            reign.group, link.peer, hello.end, agreement.action.value, agreement.offset,
        )  # fmt: skip
        self._forget_slave(replaced_by=link)
        self._giver, self._give_from = (link if agreement.action == Action.GIVE else None), agreement.offset
        link.answer(packet, agreement.encode())
        if agreement.action != Action.GIVE:
            self._slave_incarnation = hello.incarnation
            self._ship_to(link, agreement)

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
        gate = self._reign.gate
        gate.slave_gone()
        gate.refuse_unsafe(NotServed(f"the slave of {self._reign.group} is missing: only what it has is handed out"))

    def _ship_to(self, link: Link, agreement: Agreement) -> None:
        reign = self._reign
        self._slave = Shipper(
            reign.log, link, reign.host.read, begin=agreement.offset, chain=agreement.chain,
            bytes_per_s=reign.settings.catch_up_bytes_per_s, found_damage=reign.found_damage,
        )  # fmt: skip
        if agreement.action == Action.SEED:
            self._slave.seed()
        if not reign.in_office:
            self._take_office("its slave matched")
        self._check_lag(reign.host.monotonic_ms())
        reign.host.turn_soon()

    def confirm(self, link: Link, packet: Packet) -> None:
        reign, slave = self._reign, self._slave
        confirmation: Confirmation = commands.decode_confirmation(packet.body)
        if slave is None or slave.link is not link or confirmation.epoch != reign.epoch:
            link.close("a confirmation of another link or epoch proves nothing here")
            return
        try:
            slave.confirm(confirmation.matched_end, confirmation.chain)
        except Diverged as error:
            self._diverged(link, error)
            return
        if not reign.gate.alone:
            reign.gate.confirmed(confirmation.matched_end)
        elif self._is_caught_up(confirmation.matched_end):
            reign.gate.slave_matched(confirmation.matched_end)
            reign.readonly.change(Reason.DIVERGED, False)
            self._matched()
            log.info("slave matched group=%s peer=%s end=%d", reign.group, link.peer, confirmation.matched_end)
        self._check_lag(reign.host.monotonic_ms())
        slave.ship()

    def _is_caught_up(self, confirmed_end: int) -> bool:
        """Whether a slave that joins may count: before that it would only hold up consumers."""
        reign = self._reign
        return confirmed_end >= reign.gate.high_watermark and reign.log.end - confirmed_end <= CAUGHT_UP_BYTES

    def take_back(self, link: Link, packet: Packet) -> None:
        """Frames that we lost and the slave still has."""
        if link is not self._giver or self._reign.in_office:
            link.close("nobody asked for these frames")
            return
        offset, data = commands.split_offset(packet.body)
        self._reign.log.append_frames(offset, data)
        self._reign.host.turn_soon()

    def take_back_snapshot(self, link: Link, packet: Packet) -> None:
        reign = self._reign
        base, snapshot = commands.split_offset(packet.body)
        if link is not self._giver or reign.in_office or not (reign.log.is_empty or base > reign.log.end):
            link.close("nobody asked for this snapshot")
            return
        if not reign.log.is_idle:
            link.close("what an earlier link gave is still being written: say hello again")
            return
        # What we took back on an earlier link may end before the slave's log begins by now: retention went on there.
        reign.log.seed(base, snapshot, "taken-back")
        self._confirm_to_giver(base, reign.log.chain)

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
            self._reign.readonly.change(Reason.SLAVE_DOWN, True)
            log.warning("slave lost group=%s peer=%s: the group is readonly", self._reign.group, link.peer)

    def tick(self, now_ms: int) -> None:
        elapsed_ms, self._ticked_ms = now_ms - self._ticked_ms, now_ms
        if self._slave is not None:
            self._slave.allow(elapsed_ms)
            self._slave.ship()
        self._check_lag(now_ms)
        waited_ms = now_ms - self._began_ms
        may_go_on = not self._must_match and self._giver is None
        if not self._reign.in_office and may_go_on and waited_ms >= self._reign.settings.slave_wait_ms:
            self._take_office("went on without its slave")

    def resign(self) -> None:
        if self._slave is not None:
            self._slave.link.close("the reign is over")
            self._slave = None

    def _take_office(self, why: str) -> None:
        """Write the epoch frame: from here on this reign's bytes are its own."""
        reign = self._reign
        reign.in_office = True
        self._identity.completed(True)
        reign.log.tail_is_whole()
        reign.append(FrameKind.EPOCH, "", encode_office(broker=self._identity.value.incarnation, why=why))
        log.info("master in office group=%s epoch=%s offset=%d: %s", reign.group, reign.epoch, reign.log.end, why)

    def _confirm_to_giver(self, end: int, chain: int) -> None:
        if self._giver is not None and end > self._give_from:  # not for what an earlier giver gave
            confirmation = Confirmation(self._reign.epoch, end, chain)
            self._giver.tell(Command.CONFIRM, commands.encode_confirmation(confirmation))

    def _diverged(self, link: Link, error: Diverged) -> None:
        self._reign.readonly.change(Reason.DIVERGED, True)
        log.critical("copies differ group=%s peer=%s: %s", self._reign.group, link.peer, error)
        link.close(str(error))

    def _fenced(self, known: Epoch) -> None:
        self._reign.readonly.change(Reason.FENCED, True)
        self.fenced_by = known
        log.warning("master fenced group=%s epoch=%s by=%s", self._reign.group, self._reign.epoch, known)

    def _check_lag(self, now_ms: int) -> None:
        """Readonly while the slave is missing or too far behind, in bytes or in time."""
        reign, settings = self._reign, self._reign.settings
        reign.readonly.change(Reason.SLAVE_DOWN, self._slave is None)
        if reign.gate.alone or self._slave is None:
            self._oldest_unconfirmed = None
            reign.readonly.change(Reason.SLAVE_LAG, self._slave is not None)
            return
        matched_end = reign.gate.matched_end
        behind = reign.log.end - matched_end
        if self._oldest_unconfirmed is None or self._oldest_unconfirmed[0] <= matched_end:
            self._oldest_unconfirmed = (reign.log.end, now_ms) if behind else None
        age_ms = now_ms - self._oldest_unconfirmed[1] if self._oldest_unconfirmed else 0
        is_late = behind > settings.slave_lag_bytes_max or age_ms > settings.slave_lag_ms_max
        if reign.readonly.change(Reason.SLAVE_LAG, is_late) and is_late:
            log.warning("slave lags group=%s bytes=%d age_ms=%d: the group is readonly", reign.group, behind, age_ms)
        if age_ms > 2 * settings.slave_lag_ms_max:
            self._slave.link.close("no confirmation for too long: consumers go on without this slave")
