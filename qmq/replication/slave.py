"""Core. Slave of a broker group: it makes its log equal to its master's, fsyncs it, and confirms that.

It confirms the offset up to which the logs match, never the length of its own log. Bytes that it has to cut go to
quarantine first, and it never cuts frames below its acknowledged point. Facts of a state are in its class (`Following`,
…). A packet that does not belong to the present state is refused: a slave that follows takes no second snapshot, and
one that restores its master confirms nothing.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from enum import Enum, auto

from qmq.errors import CorruptFrame, Diverged, Fenced, InvalidRequest, NotMaster
from qmq.log import Commit, MessageLog
from qmq.message_sizes import FRAME_BYTES_MAX
from qmq.remoting import commands
from qmq.remoting.commands import Command, Confirmation
from qmq.remoting.packet import Packet
from qmq.replication.agreement import Action, Agreement, Hello, proofs_of
from qmq.replication.identity import IdentityFile, Point, is_lacking, log_lacking
from qmq.replication.ports import QUIET_MS, Host, Link
from qmq.replication.shipper import Shipper
from qmq.states import Life, TransitionTable


class SlaveState(Enum):
    DISCONNECTED = auto()
    AWAITING_FLUSH = auto()  # connected; the hello describes the disk, and a write is under way
    HELLO_SENT = auto()
    FOLLOWING = auto()  # it takes frames and confirms them
    UNFILLED = auto()  # the master fills it once an operator allows that; its copy stays as it is
    AWAITING_SNAPSHOT = auto()  # its copy begins anew at the begin of the master's log
    RESTORING = auto()  # it sends frames that the master lost


class SlaveEvent(Enum):
    CONNECTED = auto()
    FLUSHED = auto()
    FOLLOW = auto()  # answer of the master, as SEED, RESTORE and WAIT
    SEED = auto()
    RESTORE = auto()
    WAIT = auto()
    SNAPSHOT = auto()
    RESTORED = auto()  # the master has all frames of this copy: hello again
    LOST = auto()  # the connection was lost, or the role ended


_S, _E = SlaveState, SlaveEvent

SLAVE = TransitionTable(
    SlaveState.DISCONNECTED,
    {
        (_S.DISCONNECTED, _E.CONNECTED): _S.AWAITING_FLUSH,
        (_S.AWAITING_FLUSH, _E.FLUSHED): _S.HELLO_SENT,
        (_S.AWAITING_FLUSH, _E.CONNECTED): _S.AWAITING_FLUSH,
        (_S.AWAITING_FLUSH, _E.LOST): _S.DISCONNECTED,
        (_S.HELLO_SENT, _E.FOLLOW): _S.FOLLOWING,
        (_S.HELLO_SENT, _E.SEED): _S.AWAITING_SNAPSHOT,
        (_S.HELLO_SENT, _E.RESTORE): _S.RESTORING,
        (_S.HELLO_SENT, _E.WAIT): _S.UNFILLED,
        (_S.HELLO_SENT, _E.CONNECTED): _S.AWAITING_FLUSH,
        (_S.HELLO_SENT, _E.LOST): _S.DISCONNECTED,
        (_S.FOLLOWING, _E.CONNECTED): _S.AWAITING_FLUSH,
        (_S.FOLLOWING, _E.LOST): _S.DISCONNECTED,
        (_S.UNFILLED, _E.CONNECTED): _S.AWAITING_FLUSH,
        (_S.UNFILLED, _E.LOST): _S.DISCONNECTED,
        (_S.AWAITING_SNAPSHOT, _E.SNAPSHOT): _S.FOLLOWING,
        (_S.AWAITING_SNAPSHOT, _E.CONNECTED): _S.AWAITING_FLUSH,
        (_S.AWAITING_SNAPSHOT, _E.LOST): _S.DISCONNECTED,
        (_S.RESTORING, _E.RESTORED): _S.AWAITING_FLUSH,
        (_S.RESTORING, _E.CONNECTED): _S.AWAITING_FLUSH,
        (_S.RESTORING, _E.LOST): _S.DISCONNECTED,
    },
)


@dataclass(slots=True, eq=False)
class Disconnected:
    pass


@dataclass(slots=True, eq=False)
class AwaitingFlush:
    link: Link


@dataclass(slots=True, eq=False)
class HelloSent:
    link: Link


@dataclass(slots=True, eq=False)
class Following:
    link: Link
    agreement: Agreement
    is_complete: bool = False
    """Whether the slave's log has reached the master's end of this handshake."""


@dataclass(slots=True, eq=False)
class Unfilled:
    link: Link


@dataclass(slots=True, eq=False)
class AwaitingSnapshot:
    link: Link
    agreement: Agreement


@dataclass(slots=True, eq=False)
class Restoring:
    """Facts of RESTORING. `shipper`: sends the slave's frames to the master."""

    link: Link
    shipper: Shipper


Facts = Disconnected | AwaitingFlush | HelloSent | Following | Unfilled | AwaitingSnapshot | Restoring

_FACTS: dict[SlaveState, type[Facts]] = {
    SlaveState.DISCONNECTED: Disconnected,
    SlaveState.AWAITING_FLUSH: AwaitingFlush,
    SlaveState.HELLO_SENT: HelloSent,
    SlaveState.FOLLOWING: Following,
    SlaveState.UNFILLED: Unfilled,
    SlaveState.AWAITING_SNAPSHOT: AwaitingSnapshot,
    SlaveState.RESTORING: Restoring,
}


class SlaveLife(Life[SlaveState, Facts]):
    """States of one slave. Made by its `Slave`, which enters them."""

    __slots__ = ("link", "restoring")

    def __init__(self) -> None:
        super().__init__(SLAVE, _FACTS, Disconnected())
        self.link: Link | None = None
        """The connection to the master, or None."""
        self.restoring: Shipper | None = None
        """Shipper of the slave's frames to a master that lost some, or None."""

    def enter(self, event: object, now: Facts, *, at_ms: int) -> SlaveState:
        after = super().enter(event, now, at_ms=at_ms)
        self.link = None if isinstance(now, Disconnected) else now.link
        self.restoring = now.shipper if isinstance(now, Restoring) else None
        return after


log = logging.getLogger(__name__)

_DELETING = "the slave is deleting segments; connect again to change its log"


class Slave:
    """Role of one slave. Made by the node when it is assigned; the host makes its links, one at a time."""

    def __init__(
        self,
        *,
        group: str,
        term: int,
        message_log: MessageLog,
        host: Host,
        identity: IdentityFile,
        bytes_per_s: int,
        may_be_behind: bool = False,
    ) -> None:
        self._group = group
        self._log = message_log
        self._host = host
        self._identity = identity
        self.term = term
        self._bytes_per_s = bytes_per_s
        self._may_be_behind = may_be_behind
        self.life = SlaveLife()
        self.has_matched = False
        """Whether the slave's log reached a master's end of a handshake since this role began in this process. Then it
        lacks no frame acknowledged since.
        """
        self.parted_at: int | None = None
        """Offset where the slave's log parts from the master's, if at the last handshake both copies had confirmed
        their frames.
        """
        self._ticked_ms = host.monotonic_ms()

    @property
    def is_following(self) -> bool:
        return isinstance(self.life.now, Following)

    @property
    def is_unfilled(self) -> bool:
        """Whether the slave's copy must be filled, and an operator has not allowed that."""
        return isinstance(self.life.now, Unfilled)

    @property
    def shipped_end(self) -> int | None:
        """Offset from which a master that lost frames still needs this log; None if it lost none."""
        return None if (shipper := self.life.restoring) is None else shipper.confirmed_end

    def connected(self, link: Link) -> None:
        """Begin the handshake, once no write is under way."""
        self._enter(SlaveEvent.CONNECTED, AwaitingFlush(link))
        self._send_hello()

    def _enter(self, event: SlaveEvent, now: Facts) -> None:
        self.life.enter(event, now, at_ms=self._host.monotonic_ms())

    def is_master(self, link: Link) -> bool:
        return link is self.life.link

    def _send_hello(self) -> None:
        if not isinstance(self.life.now, AwaitingFlush) or not self._log.is_idle:
            return
        self._enter(SlaveEvent.FLUSHED, HelloSent(self.life.now.link))
        state, known, points = self._log.state, self._identity.value, self._identity.points
        hello = Hello(
            self._group,
            known.incarnation,
            known.epoch,
            state.epochs,
            self._log.start,
            self._log.end,
            self._log.chain,
            self.term,
            proofs_of(self._log),
            points.keeps(self._log),
            points.own,
            known.owner,
            known.fill_id,
            known.complete,
            self._identity.instance,
            FRAME_BYTES_MAX,
        )
        self._host.hello(hello.encode())

    def agreed(self, link: Link, body: memoryview) -> None:
        """Handle the master's answer to the slave's hello.

        Raises:
            Fenced: the master is older than one that this slave has followed, or promised to follow.
            Diverged: the slave would have to cut acknowledged frames, or the chains differ. Nothing was changed.
        """
        if not isinstance(self.life.now, HelloSent) or link is not self.life.now.link:
            return  # an answer to an earlier connection
        self.parted_at = None
        if not self._log.is_idle:
            return link.close(_DELETING)
        agreement = Agreement.decode(body)
        known = self._identity.value.epoch
        if agreement.epoch < known:
            raise Fenced(f"a master of epoch {agreement.epoch} answers; this broker has seen {known}")
        if agreement.epoch.term < self._identity.value.promised:
            promised = self._identity.value.promised
            raise Fenced(f"a master of epoch {agreement.epoch} answers; this broker promised term {promised}")
        self._identity.learn(agreement.epoch)
        self._compare(agreement.point)
        if agreement.action == Action.FOLLOW:
            self._cut_to(agreement)
            self._identity.points.following()
            self._enter(SlaveEvent.FOLLOW, Following(link, agreement))
            self._confirm(self._log.end, self._log.chain)
        elif agreement.action == Action.SEED:
            self._keep_confirmed(agreement.offset)
            self.has_matched = False
            self._identity.completed(False)
            self._enter(SlaveEvent.SEED, AwaitingSnapshot(link, agreement))
        elif agreement.action == Action.WAIT:
            self.has_matched = False
            self._enter(SlaveEvent.WAIT, Unfilled(link))
            log.warning("not filled group=%s end=%d: SyncReplica allows it", self._group, self._log.end)
        else:
            self._restore(link, agreement)

    def _compare(self, point: Point | None) -> None:
        """Check that the slave's log has the acknowledged point of the master. It must have it if this copy once had
        all frames of its masters and nothing is acknowledged without it.
        """
        if (
            point is not None
            and not self._may_be_behind
            and self._identity.value.complete
            and is_lacking(self._log, point)
        ):
            log_lacking(self._log, self._group, point, "the master; it is refilled")
            self._identity.points.rolled_back(point)

    def _cut_to(self, agreement: Agreement) -> None:
        offset = agreement.offset
        is_ours = self._log.start <= offset <= self._log.end
        if not is_ours or not self._log.chain_is(offset, agreement.chain):
            self._check_readable(offset)
            raise Diverged(f"the slave's chain at offset {offset} is not the master's, {agreement.chain:016x}")
        self._keep_confirmed(offset)
        if offset < self._log.end:
            name = self._log.cut(offset, f"conflict with the master of epoch {agreement.epoch}")
            log.warning("tail cut group=%s offset=%d quarantine=%s", self._group, offset, name)
            if self._log.end != offset:
                raise CorruptFrame(self._log.end, "read back after a cut, this copy is damaged before it")

    def _keep_confirmed(self, offset: int) -> None:
        """Raise Diverged if this copy confirmed frames from `offset` on, because they may be acknowledged (I5)."""
        kept_end = self._identity.points.keeps(self._log)
        if offset < kept_end:
            self.parted_at = offset
            raise Diverged(
                f"the master's log parts from this copy's at {offset}, and this copy confirmed all up to {kept_end}. "
                "The master's disk may have been restored to an older state"
            )

    def _check_readable(self, offset: int) -> None:
        try:
            self._log.stored.check_readable(offset)
        except CorruptFrame as problem:
            self.found_damage(problem)
            raise

    def _restore(self, link: Link, agreement: Agreement) -> None:
        begin, chain = agreement.offset, agreement.chain
        needs_snapshot = begin < self._log.start
        if not needs_snapshot and not self._log.chain_is(begin, chain):
            self._check_readable(begin)
            raise Diverged(
                f"the slave's chain at offset {begin} is not the master's, {chain:016x}: nothing is restored"
            )
        if needs_snapshot:
            begin, chain, _ = self._log.stored.seed_start()
        shipper = Shipper(
            self._log,
            link,
            self._host.read,
            begin=begin,
            chain=chain,
            bytes_per_s=self._bytes_per_s,
            found_damage=self.found_damage,
        )
        self._enter(SlaveEvent.RESTORE, Restoring(link, shipper))
        if needs_snapshot:
            shipper.seed()
        shipper.ship()

    def link_lost(self, link: Link) -> None:
        if link is self.life.link:
            self._enter(SlaveEvent.LOST, Disconnected())

    def writable_again(self, link: Link) -> None:
        if (shipper := self.life.restoring) is not None:
            shipper.ship()

    def packet_received(self, link: Link, packet: Packet) -> None:
        """Handle a packet of the master; refuse one of any other link.

        Raises:
            CorruptFrame: the frames do not continue the slave's log; close the link and connect again.
        """
        now = self.life.now
        if link is not self.life.link:
            link.refuse(packet, NotMaster(f"this is the slave of {self._group}: fetch the route again"))
        elif packet.code == Command.FRAMES and isinstance(now, Following):
            offset, data = commands.split_offset(packet.body)
            self._log.append_frames(offset, data)
            self._host.pass_soon()
        elif packet.code == Command.SNAPSHOT and isinstance(now, AwaitingSnapshot):
            self._seed(now, *commands.split_offset(packet.body))
        elif packet.code == Command.ACKNOWLEDGED and isinstance(now, Following):
            self._acknowledged(commands.decode_confirmation(packet.body))
        elif packet.code == Command.PARTED and isinstance(now, HelloSent):
            self.parted_at, _ = commands.split_offset(packet.body)
        elif packet.code == Command.CONFIRM and isinstance(now, Restoring):
            self._restored(now, commands.decode_confirmation(packet.body))
        else:
            raise InvalidRequest(f"packet {packet.code} was not expected from the master now")

    def _seed(self, awaiting: AwaitingSnapshot, base: int, snapshot: memoryview) -> None:
        if base != awaiting.agreement.offset:
            raise CorruptFrame(base, f"a snapshot at {awaiting.agreement.offset} was agreed on")
        if not self._log.is_idle:
            return awaiting.link.close(_DELETING)
        self._log.seed(base, snapshot, "seeded-anew", start=awaiting.agreement.master_start)
        self._identity.points.seeding()  # not earlier: it would record that all frames of the old log were confirmed
        log.warning("seeding group=%s from=%d: the old copy is in quarantine", self._group, base)
        self._enter(SlaveEvent.SNAPSHOT, Following(awaiting.link, awaiting.agreement))
        self._confirm(self._log.end, self._log.chain)

    def _restored(self, restoring: Restoring, theirs: Confirmation) -> None:
        restoring.shipper.confirm(theirs.matched_end, theirs.chain)
        if theirs.matched_end == self._log.end:
            self._enter(SlaveEvent.RESTORED, AwaitingFlush(restoring.link))
            self._send_hello()
        else:
            restoring.shipper.ship()

    def _acknowledged(self, confirmation: Confirmation) -> None:
        """Record that the master acknowledged frames that this slave confirmed."""
        if confirmation.epoch == self._identity.value.epoch and confirmation.matched_end <= self._log.flushed_end:
            self._identity.points.acknowledged(Point(confirmation.epoch, confirmation.matched_end, confirmation.chain))

    def end_of_pass(self) -> None:
        """Do nothing: the node starts the fsync."""

    def committed(self, commit: Commit) -> None:
        """Record that the slave's disk has everything before the commit's end."""
        if self.is_following:
            self._confirm(commit.end, commit.chain)
        else:
            self._send_hello()

    def _confirm(self, end: int, chain: int) -> None:
        """Confirm to the master that both logs match up to `end`, on this slave's disk."""
        now = self.life.now
        assert isinstance(now, Following)
        if not now.is_complete and end >= now.agreement.master_end:
            now.is_complete = self.has_matched = True
            self._identity.completed(True)
            self._identity.points.refilled()
            self._log.tail_is_whole()
        confirmation = Confirmation(now.agreement.epoch, end, chain)
        now.link.push(Command.CONFIRM, commands.encode_confirmation(confirmation))

    def found_damage(self, problem: CorruptFrame) -> None:
        """Record a damaged frame."""
        if self._log.stored.is_damaged(problem):
            self._log.damaged_at(problem)

    def quiet_ms(self) -> int:
        """See `Node.quiet_ms`."""
        return 0 if self.life.restoring is not None else QUIET_MS

    def tick(self, now_ms: int) -> None:
        elapsed_ms, self._ticked_ms = now_ms - self._ticked_ms, now_ms
        if (shipper := self.life.restoring) is not None:
            shipper.allow(elapsed_ms)
            shipper.ship()

    def leave_master(self, why: str) -> None:
        """Confirm nothing more to the present master. The host connects again when it may."""
        if (link := self.life.link) is not None:
            self._enter(SlaveEvent.LOST, Disconnected())
            link.close(why)

    def step_down(self) -> None:
        self.leave_master("the roles changed")
