"""Core. Slaves of a master, up to four: whether enough of them count, and when the mastership begins.

Before it begins, slaves restore frames that the master lost, one slave after the other. Then the master writes its
epoch frame, and later bytes are its own. It waits a moment for all slaves of its row, because a slave never gives up
frames that it confirmed. Frames that only a late slave has would contradict the master's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from qmq.errors import InvalidRequest
from qmq.log.frame import FrameKind, encode_json_body
from qmq.message_sizes import FRAME_BYTES_MAX
from qmq.remoting import commands
from qmq.remoting.packet import Packet
from qmq.replication.agreement import Hello
from qmq.replication.assignment import FillOrders
from qmq.replication.clocks import SLAVE
from qmq.replication.follower import FollowerState, SlaveWatch
from qmq.replication.identity import IdentityFile, Point
from qmq.replication.mastership import NEVER, Mastership
from qmq.replication.ports import Link
from qmq.replication.readonly import Reason
from qmq.types import Epoch

log = logging.getLogger(__name__)

OTHERS_WAIT_MS = 1_000
"""Time for which a mastership with enough slaves waits for the others. Running slaves connect again within a tenth of
it.
"""


class Slaves:
    """Slaves of one mastership. Made by the master; ends with the mastership.

    Args:
        matched: called when a slave begins to count.
        wait_ms: time to wait before the mastership begins without any slave.
        count: number of slaves in the metaserver's row.
        rejoin_wait_ms: time to wait for each slave that was in sync at the last report.
    """

    def __init__(
        self,
        mastership: Mastership,
        identity: IdentityFile,
        matched: Callable[[], None],
        *,
        wait_ms: int,
        count: int,
        rejoin_wait_ms: int = 0,
    ) -> None:
        self._mastership = mastership
        self._identity = identity
        self.matched = matched
        self._wait_ms = wait_ms
        self._count = max(1, count)
        self._rejoin_wait_ms = rejoin_wait_ms
        self._awaited = frozenset[str]()
        self.fenced_by: Epoch | None = None
        self.yields_from: int | None = None
        self._must_match = mastership.log.is_empty or mastership.log.is_tail_cut or not identity.value.complete
        self._began_ms = mastership.host.monotonic_ms()
        self._begins_at = NEVER
        """Offset of the epoch frame, once the mastership has begun."""
        self.restored_from = mastership.log.end
        """Offset behind which slaves restored the frames, until the mastership begins."""
        self._held_end = 0
        """Offset before which a slave has the master's frames: it confirmed them in this mastership, or sends them."""
        self._watches: dict[str, SlaveWatch] = {}
        self.fill_orders = FillOrders()
        if self._count == 1:
            self._watch("")
        mastership.readonly.change(Reason.SLAVE_DOWN, True)

    @property
    def all(self) -> list[SlaveWatch]:
        return list(self._watches.values())

    def of(self, link: Link) -> SlaveWatch | None:
        """Return the slave that receives frames on this link."""
        for watch in self._watches.values():
            slave = watch.follower.connected
            if slave is not None and slave.shipper.link is link:
                return watch
        return None

    @property
    def in_sync(self) -> list[SlaveWatch]:
        """The slaves that count."""
        return [watch for watch in self._watches.values() if watch.follower.in_sync is not None]

    @property
    def lack_room(self) -> bool:
        """Whether disks of counting slaves are nearly full, and too few other slaves count."""
        in_sync = self.in_sync
        roomy = sum(not watch.is_disk_full for watch in in_sync)
        return roomy < len(in_sync) and roomy < self._mastership.gate.min_copies - 1

    @property
    def confirmed_end(self) -> int | None:
        """Offset from which a slave still needs the log; None if no slave is connected."""
        ends = [watch.confirmed_end for watch in self._watches.values() if watch.confirmed_end is not None]
        return min(ends, default=None)

    @property
    def are_fully_matched(self) -> bool:
        """Whether enough slaves count, and each connected one is fully matched."""
        there = [watch for watch in self._watches.values() if watch.follower.connected is not None]
        return not self._mastership.gate.too_few_in_sync and all(watch.is_fully_matched for watch in there)

    def clock(self, watch: SlaveWatch) -> str:
        """Return the name of a slave's clock (`qmq.replication.clocks`)."""
        return f"{SLAVE} {watch.name}" if watch.name else SLAVE

    def _watch(self, name: str) -> SlaveWatch:
        return self._watches.setdefault(name, SlaveWatch(name, self._mastership, self._identity, self))

    def hello(self, link: Link, packet: Packet) -> None:
        mastership = self._mastership
        hello = Hello.decode(packet.body)
        if hello.group != mastership.group or hello.incarnation == self._identity.value.incarnation:
            raise InvalidRequest(
                f"this is the master of {mastership.group}; the slave is of {hello.group!r}, or the same copy"
            )
        if hello.assigned_term != mastership.epoch.term and hello.known <= mastership.epoch:
            # The slave follows an older or a newer row. Another broker may be the slave by now, and an acknowledgement
            # must not rest on this slave's copy.
            raise InvalidRequest(
                f"the slave has term {hello.assigned_term}, this master term {mastership.epoch.term}: "
                "read the row of the group from the metaserver again"
            )
        # Named by broker, not by disk, so each broker counts once. The only slave of a group has no name.
        name = "" if self._count == 1 else hello.owner or hello.incarnation
        self._watch(name).hello(link, packet, hello)

    def confirm(self, link: Link, packet: Packet) -> None:
        if (watch := self.of(link)) is None:
            link.close("the confirmation is of another link or epoch")
        else:
            watch.confirm(link, packet)

    def restore(self, link: Link, packet: Packet) -> None:
        """Append frames that the master lost and a slave still has."""
        if (watch := self._restoring_on(link)) is None:
            link.close("no slave is restoring from this link: frames refused")
        else:
            watch.restore(packet)

    def restore_snapshot(self, link: Link, packet: Packet) -> None:
        mastership, watch = self._mastership, self._restoring_on(link)
        base, snapshot = commands.split_offset(packet.body)
        if watch is None or base <= mastership.log.end:
            link.close("no slave is restoring from this link: snapshot refused")
            return
        if not mastership.log.is_idle:
            link.close("frames of an earlier link are still being written; connect again")
            return
        for other in self._watches.values():
            if other is not watch:
                other.drop("the master's log is restored from a snapshot; connect again")
        # The part restored over an earlier link may end before the slave's log begins, if retention went on there.
        restoring = watch.follower.restoring
        assert restoring is not None
        mastership.log.seed(base, snapshot, "taken-back", start=restoring.hello.start)
        self.restored_from = base
        mastership.readonly.change(Reason.CORRUPT, mastership.log.damage is not None)
        watch.confirm_restored(base, mastership.log.chain)

    def _restoring_on(self, link: Link) -> SlaveWatch | None:
        return next((watch for watch in self._watches.values() if watch.is_restoring(link)), None)

    def changed(self) -> None:
        """Update the readonly reasons after a change of a slave's state."""
        needed, watches = self._mastership.gate.min_copies - 1, self._watches.values()
        connected = sum(watch.follower.connected is not None for watch in watches)
        unfilled = sum(watch.follower.unfilled is not None for watch in watches)
        timely = sum(watch.follower.state is FollowerState.IN_SYNC for watch in watches)
        readonly = self._mastership.readonly
        readonly.change(Reason.SLAVE_DOWN, connected + unfilled < needed)
        readonly.change(Reason.UNFILLED, connected < needed <= connected + unfilled)
        readonly.change(Reason.SLAVE_LAG, timely < needed <= connected)
        has_parted = any(watch.has_parted for watch in watches)
        readonly.change(Reason.DIVERGED, has_parted and len(self.in_sync) < needed)
        self._mastership.frame_bytes_max = min((watch.frame_bytes_max for watch in watches), default=FRAME_BYTES_MAX)

    def compared(self) -> None:
        """Begin the mastership if it may, after a slave was compared with the master."""
        self._begin_if_due(self._mastership.host.monotonic_ms())

    def fenced(self, known: Epoch) -> None:
        """Stop the mastership, because a slave has a newer epoch."""
        self._mastership.readonly.change(Reason.FENCED, True)
        self.fenced_by = known
        log.warning("master fenced group=%s epoch=%s by=%s", self._mastership.group, self._mastership.epoch, known)

    def may_yield(self, offset: int) -> bool:
        """Return whether only this copy has the master's frames from `offset` on.

        True with one slave. Of several slaves, another may have confirmed frames of an earlier mastership of this copy,
        until all slaves of the row sent hellos that show the contrary.
        """
        shared = [watch.shared_end for watch in self._watches.values() if watch.shared_end is not None]
        is_only_here = len(shared) == self._count and max(shared) <= offset
        return self._count == 1 or (self._held_end <= offset and (offset >= self._begins_at or is_only_here))

    def is_restoring_from(self, other: SlaveWatch, hello: Hello) -> bool:
        """Return whether a slave besides `other`, the sender of `hello`, restores the master's log and should continue.

        A slave with frames of a newer epoch comes first, because frames that an older master wrote alone would
        contradict its frames.
        """
        for watch in self._watches.values():
            restoring = watch.follower.restoring
            if watch is other or restoring is None:
                continue
            if not hello.is_ahead_of(restoring.hello.newest_epoch):
                return True
            watch.drop("another slave has frames of a newer epoch; connect again")
        return False

    def lacks(self, point: Point) -> None:
        """Drop slaves that restore the log but lack the acknowledged point, too: their frames would contradict it."""
        for watch in self._watches.values():
            restoring = watch.follower.restoring
            if restoring is not None and not restoring.hello.has(point):
                watch.drop("this master and the slave lack acknowledged frames; connect again")

    def yields(self, offset: int) -> None:
        """Record that the master's frames from `offset` on contradict a slave's confirmed frames."""
        self.yields_from = offset

    def holds(self, end: int) -> None:
        """Record that a slave has all up to `end`: it confirmed that, or sends it."""
        self._held_end = max(self._held_end, end)

    def apply_orders(self, orders: FillOrders, awaited: frozenset[str] = frozenset()) -> None:
        """Apply the orders which slaves may be filled, and the slaves to wait for. A slave that may be filled now, or
        must stop, sends another hello and gets a new answer.
        """
        self.fill_orders = orders
        self._awaited = awaited
        for watch in self._watches.values():
            watch.apply_orders(orders)

    def ship(self) -> None:
        for watch in self._watches.values():
            if (slave := watch.follower.connected) is not None:
                slave.shipper.ship()

    def committed(self, end: int, chain: int) -> None:
        """Record that the master's disk has everything before `end`."""
        for watch in self._watches.values():
            if watch.follower.restoring is not None:
                watch.confirm_restored(end, chain)

    def writable_again(self, link: Link) -> None:
        if (watch := self.of(link)) is not None and (slave := watch.follower.connected) is not None:
            slave.shipper.ship()

    def link_lost(self, link: Link) -> None:
        for watch in self._watches.values():
            watch.link_lost(link)

    def tick(self, now_ms: int) -> None:
        for watch in self._watches.values():
            watch.tick(now_ms)
        self.remember_point()
        self._begin_if_due(now_ms)

    def remember_point(self) -> None:
        """Record the acknowledged point and send it to the slaves. All copies store it outside the log."""
        if (point := self._mastership.gate.point) is not None:
            self._identity.points.acknowledged(point)
            for watch in self._watches.values():
                watch.send_point(point)

    def step_down(self) -> None:
        self.remember_point()
        for watch in self._watches.values():
            watch.drop("the mastership is over")

    def _begin_if_due(self, now_ms: int) -> None:
        """Begin once all slaves were compared, or enough of them while the others stay away, or no slave came in time.

        A slave whose log parts from the master's before its end has no frames that the master's disk may have lost.
        """
        watches, points = self._watches.values(), self._identity.points
        if self._mastership.has_begun:
            return
        waited_ms = now_ms - self._began_ms
        missing = self._missing()
        is_waited_for = bool(missing) and waited_ms < self._rejoin_wait_ms
        if self._mastership.readonly.change(Reason.REJOIN, is_waited_for) and is_waited_for:
            log.info("waiting for copies that were in sync group=%s copies=%s", self._mastership.group, missing)
        if is_waited_for or points.lacks is not None:
            return
        if any(watch.follower.restoring is not None for watch in watches):
            return
        compared = sum(watch.is_compared for watch in watches)
        with_parted = sum(watch.is_compared or watch.has_parted for watch in watches)
        if compared >= self._count:
            self._begin("its slave matched" if compared == 1 else "its slaves matched")
        elif compared >= self._enough and waited_ms >= min(OTHERS_WAIT_MS, self._wait_ms):
            self._begin(f"{compared} of its {self._count} slaves matched")
        elif waited_ms >= self._wait_ms and (not self._must_match or with_parted >= self._enough):
            self._begin("no slave matched in time")

    def _missing(self) -> str:
        """Return the slaves that were in sync at the last report and have not been compared since, as text.

        The master's disk may have lost frames that it reported as fsynced. Then only one of these slaves may have them,
        and the first slave that connects may be another one, which lagged. A slave whose log parts from the master's
        may be the one, too.
        """
        compared = {watch.name for watch in self._watches.values() if watch.is_compared}
        return ", ".join(sorted(self._awaited - compared))

    @property
    def _enough(self) -> int:
        """Number of slaves needed for an early begin. Acknowledged frames are on `min_copies` copies. If the master's
        disk may have lost them, at least one of these slaves must have them.
        """
        min_copies = self._mastership.gate.min_copies
        needed = min_copies - 1
        return max(needed, self._count + 1 - needed) if self._must_match else needed

    def _begin(self, why: str) -> None:
        """Begin the mastership: write the epoch frame, behind which all frames are its own."""
        mastership = self._mastership
        if self._rejoin_wait_ms and (missing := self._missing()):
            log.error(
                "wait for copies ended group=%s copies=%s: they were in sync; if this disk lost its last acknowledged "
                "frames, only these copies have them, and lose them now",
                mastership.group,
                missing,
            )
        mastership.has_begun = True
        mastership.gate.begins(self._identity.points.high_watermark(mastership.log))
        if mastership.at_begin is not None:
            mastership.at_begin()
        self._begins_at = mastership.log.end
        self._held_end = min(self._held_end, self._begins_at)  # without the frames that a slave was to send and did not
        self._identity.completed(True)
        self._identity.points.beginning(mastership.log.end)
        mastership.log.tail_is_whole()
        mastership.append(FrameKind.EPOCH, "", encode_json_body(broker=self._identity.value.incarnation, why=why))
        mastership.gate.counts_from = mastership.log.end
        log.info(
            "mastership begins group=%s epoch=%s offset=%d: %s",
            mastership.group,
            mastership.epoch,
            mastership.log.end,
            why,
        )
