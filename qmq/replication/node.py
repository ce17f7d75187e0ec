"""Core. Node: one process of a group, with its log and its present role.

The shell, or a simulator, calls it with each event; it calls back through `qmq.replication.ports.Host`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from qmq.errors import (
    BrokenInvariant,
    CopyRolledBack,
    CorruptFrame,
    DiskFailed,
    Diverged,
    Fenced,
    IllegalTransition,
    NotMaster,
    NotServed,
    OperatorError,
    QmqError,
)
from qmq.log import Commit, MessageLog
from qmq.remoting.packet import Packet
from qmq.replication.assignment import Assignment
from qmq.replication.clocks import MASTER, METASERVER, Clocks
from qmq.replication.copy_repair import CopyRepair
from qmq.replication.identity import IdentityFile, Point, is_behind_damage, is_lacking, log_lacking
from qmq.replication.master import Master, Promotion
from qmq.replication.ports import Host, Link
from qmq.replication.readonly import Reason
from qmq.replication.retention import Keeper
from qmq.replication.role_change import NodeEvent, NodeLife, NodeState, RoleChange
from qmq.replication.settings import CopySettings
from qmq.replication.slave import Slave
from qmq.types import Role

log = logging.getLogger(__name__)

M = TypeVar("M", bound=Master)


class Node(Generic[M]):
    """Role and log of one process. Made by main; used on one loop; ends with the process."""

    def __init__(
        self,
        *,
        message_log: MessageLog,
        host: Host,
        identity: IdentityFile,
        settings: CopySettings,
        promote: Callable[[Promotion], M],
    ) -> None:
        self.log = message_log
        self.host = host
        self.identity = identity
        self._settings = settings
        self._promote = promote
        self._name = f"{settings.hostname}:{settings.advertised.serve_port}"
        self.clocks = Clocks(settings.clock_difference_ms_max)
        self._disagreement = ""
        self.is_disk_full = False
        self.assignment: Assignment | None = None
        self.role: M | Slave | None = None
        self.life = NodeLife()
        self.changes = RoleChange(self)
        self.repairs = CopyRepair(self)
        self._has_matched = False
        """Whether this process has had all frames it confirmed: it began a mastership, or reached a master's end."""
        self._gives_up_from: int | None = None
        """Offset from which the log goes to quarantine before the next role, because this process wrote those frames
        alone as master.
        """

    @property
    def group(self) -> str:
        return self.identity.value.group

    @property
    def is_of_another(self) -> bool:
        """Whether another broker wrote the data directory, because a disk was moved or exchanged."""
        return self.identity.value.owner not in ("", self._name)

    @property
    def is_elsewhere(self) -> bool:
        """Whether the stored role was assigned to this directory at another place, or before the machine's last start.
        Then the directory may be a copy while the original is in use. False for directories of versions without
        instances.
        """
        return self.identity.value.instance not in ("", self.identity.instance)

    @property
    def owner(self) -> str:
        """Owner of the directory, as text."""
        return f"{self.identity.value.owner or 'a broker'} of {self.identity.value.group}"

    def move(self, event: NodeEvent) -> None:
        """Enter the state that follows `event`; raises IllegalTransition if the table has no such transition."""
        self.life.on(event, at_ms=self.host.monotonic_ms())

    def assign(self, assignment: Assignment) -> None:
        """Take the role in the metaserver's row. An older row is ignored."""
        known = self.assignment
        if self.is_of_another and assignment.term <= self.identity.value.known_term:
            raise OperatorError(
                f"this data directory belongs to {self.owner}; this process is {self._name}. If directories were "
                "exchanged, put each back. If this broker replaces the other for good, run ReplaceBroker"
            )
        if assignment.term < self.identity.value.known_term:
            newer = self.identity.value.known_term
            log.warning("assignment ignored group=%s term=%d: term %d is newer", self.group, assignment.term, newer)
            return
        if self.identity.value.group not in ("", assignment.group):
            raise OperatorError(
                f"this data directory belongs to {self.owner}, not to {assignment.group}: "
                "start this broker with an empty one"
            )
        last = self._remembered()
        if last is not None and last.term == assignment.term and last.role != assignment.role:
            raise OperatorError(
                f"term {assignment.term} has two different rows for {assignment.group}: the metaserver's database lost "
                "a change of roles, and used its term again. Stop both brokers, and begin a new term with "
                "ReplaceBroker and swap=true"
            )
        if assignment.role == Role.MASTER and assignment.term < self.identity.value.promised:
            promised = self.identity.value.promised
            log.warning(
                "assignment ignored group=%s term=%d: this copy promised term %d", self.group, assignment.term, promised
            )
            return
        held = self.changes.is_held
        self.assignment = assignment
        self.identity.assigned(assignment.group, assignment.to_json(), self._name)
        if self.role is not None and known is not None and known.term == assignment.term:
            if isinstance(self.role, Master):
                self.role.apply_operator_settings(assignment)
            if not assignment.meets_as(known):
                self.host.role_changed()
            return
        self.changes.end_hold()
        self.begin_role(is_failover=held)

    def start_without_metaserver(self) -> bool:
        """Take the last assigned role, which epochs make safe; return whether there was one.

        With more than two copies the process waits for the metaserver instead: another copy may be the master by now,
        and a master must get a term that its disk cannot have forgotten (`metaserver.roles.failover`).
        """
        remembered = self._remembered()
        if remembered is None or self.assignment is not None:
            return False
        if len(remembered.slaves) > 1:
            log.warning(
                "role not resumed without the metaserver group=%s: the group has several slaves", remembered.group
            )
            return False
        if self.is_of_another:
            log.error("role of another broker not resumed: the directory belongs to %s", self.owner)
            return False
        if self.is_elsewhere:
            log.error(
                "role not resumed without the metaserver group=%s: since its assignment the machine was restarted, or "
                "the directory was moved or copied. Only the metaserver can exclude another process with a copy",
                remembered.group,
            )
            return False
        self.assign(remembered)
        return True

    def lose_part(self, why: str) -> None:
        """End the role: confirm and acknowledge nothing more, because another process has this broker's role."""
        if self.assignment is None:
            return
        log.critical("part ends group=%s term=%d: %s", self.group, self.assignment.term, why)
        self.leave_role()
        self.assignment = None
        self.host.role_changed()

    def _remembered(self) -> Assignment | None:
        fields = self.identity.value.assignment
        return Assignment.from_json(fields) if fields is not None else None

    def begin_role(self, boot_above: int = 0, *, is_failover: bool = False) -> None:
        assignment = self.assignment
        if assignment is None or self.log.health.is_unreplayed:
            return  # a log that could not be replayed is repaired first (Node.repaired)
        if self._gives_up_from is not None:
            return  # the cut begins the role
        if assignment.role == Role.MASTER and assignment.term < self.identity.value.promised:
            return self.leave_role()  # until the row has the promised term
        self.leave_role()
        self._look_at_points()
        role: M | Slave
        if assignment.role == Role.MASTER:
            is_trusted = is_failover or self._has_matched or len(assignment.slaves) < 2
            promotion = Promotion(
                assignment.group,
                assignment.term,
                self.log,
                self.host,
                self.identity,
                self._settings,
                boot_above,
                self.clocks,
                is_failover,
                len(assignment.slaves),
                assignment.min_copies,
                0 if is_trusted else int(self._settings.rejoin_wait_s * 1000),
            )
            self.role = role = self._promote(promotion)
            role.apply_operator_settings(assignment)
            log.info("role master group=%s epoch=%s end=%d", assignment.group, role.epoch, self.log.end)
        else:
            self.role = role = Slave(
                group=assignment.group,
                term=assignment.term,
                message_log=self.log,
                host=self.host,
                identity=self.identity,
                bytes_per_s=self._settings.catch_up_bytes_per_s,
                may_be_behind=assignment.may_be_behind,
            )
            log.info("role slave group=%s term=%d end=%d", assignment.group, assignment.term, self.log.end)
        self.move(NodeEvent.MASTER_BEGAN if isinstance(role, Master) else NodeEvent.SLAVE_BEGAN)
        self.host.role_changed()
        if is_failover:
            role.tick(self.host.monotonic_ms())  # begins the mastership now if it may, not with the next tick

    @property
    def master(self) -> M | None:
        return None if isinstance(self.role, Slave) else self.role

    @property
    def slave(self) -> Slave | None:
        return self.role if isinstance(self.role, Slave) else None

    @property
    def readonly_reasons(self) -> list[str]:
        reasons = self.master.readonly.reasons if self.master else []
        lacks = self.identity.points.lacks
        if lacks is not None and not is_behind_damage(self.log, lacks):  # otherwise the repair decides
            reasons.append(Reason.ROLLED_BACK)
        if self.slave is not None and self.slave.is_unfilled:
            reasons.append(Reason.UNFILLED)
        if self.life.state is NodeState.DIVERGED:
            reasons.append(Reason.DIVERGED)
        if self.log.damage is not None and Reason.CORRUPT not in reasons:
            reasons.append(Reason.CORRUPT)
        return reasons

    @property
    def parted_at(self) -> int | None:
        """Offset where the log of a `diverged` slave parts from its master's; None if it is not `diverged`, or the
        offset is unknown.
        """
        return self.slave.parted_at if self.slave is not None and self.life.state is NodeState.DIVERGED else None

    @property
    def writable(self) -> bool:
        return self.master is not None and self.master.has_begun and not self.readonly_reasons

    def packet_received(self, link: Link, packet: Packet) -> None:
        """Handle a packet of an authenticated connection. DiskFailed and BrokenInvariant pass: the process must
        exit.
        """
        try:
            if self.role is None:
                raise NotMaster("this broker has no role yet: it waits for the metaserver, or for a repair")
            self.role.packet_received(link, packet)
        except (DiskFailed, BrokenInvariant):
            raise
        except Fenced as error:
            link.refuse(packet, error)
            self._fenced()
        except CopyRolledBack as error:
            link.refuse(packet, error)
            self._yield(error)
        except (CorruptFrame, Diverged) as error:
            self._link_failed(link, error)
        except IllegalTransition as error:
            link.refuse(packet, error)
            self._begin_anew(error)
        except QmqError as error:
            link.refuse(packet, error)

    def _begin_anew(self, why: IllegalTransition) -> None:
        """End the role and begin it again, as master in a new epoch: a missing transition is a bug of qmq, after which
        the intended state is unknown.
        """
        log.critical("role restarted group=%s: %s", self.group, why)
        self.begin_role()

    def agreed(self, link: Link, answer: memoryview | QmqError) -> None:
        """Handle the master's answer to the slave's hello."""
        slave = self.slave
        if slave is None:
            return
        try:
            if isinstance(answer, QmqError):
                raise answer
            slave.agreed(link, answer)
            if self.life.state is NodeState.DIVERGED:
                self.move(NodeEvent.AGREED)
        except (DiskFailed, BrokenInvariant):
            raise
        except IllegalTransition as error:
            self._begin_anew(error)
        except QmqError as error:
            self._link_failed(link, error)
            if self.log.health.is_unreplayed:
                self.leave_role()  # until the log is repaired

    def _link_failed(self, link: Link, error: QmqError) -> None:
        if isinstance(error, Diverged) and self.life.may(NodeEvent.PARTED):
            self.move(NodeEvent.PARTED)
            log.critical("copies differ group=%s peer=%s: %s", self.group, link.peer, error)
        else:
            log.warning("link to the other copy closed group=%s peer=%s: %s", self.group, link.peer, error)
        link.close(str(error))

    def _fenced(self) -> None:
        """Begin again if the newer epoch has this master's term: then it is an earlier boot that this disk forgot."""
        master = self.master
        if master is not None and master.fenced_by is not None and master.fenced_by.term == master.epoch.term:
            self.begin_role(boot_above=master.fenced_by.boot)

    def _yield(self, why: CopyRolledBack) -> None:
        """End the mastership, because frames that this copy wrote alone, or restored, contradict frames that the other
        copy confirmed. The former go to quarantine, and the next mastership first restores the confirmed frames from
        the other copy.
        """
        master = self.master
        if master is None or master.yields_from is None:
            return
        self._gives_up_from = master.yields_from
        self.move(NodeEvent.YIELDED)
        log.critical("mastership ends group=%s epoch=%s: %s", self.group, master.epoch, why)
        self.leave_role()
        self._give_up_tail()

    def _give_up_tail(self) -> None:
        if self._gives_up_from is None or not self.log.is_idle:
            return
        name = self.log.cut(self._gives_up_from, "contradicts frames that the other copy confirmed")
        log.warning("tail cut group=%s offset=%d quarantine=%s", self.group, self._gives_up_from, name)
        self._gives_up_from = None
        self.move(NodeEvent.TAIL_CUT)
        self.begin_role()

    def link_lost(self, link: Link) -> None:
        if self.role is not None:
            try:
                self.role.link_lost(link)
            except IllegalTransition as error:
                self._begin_anew(error)

    def writable_again(self, link: Link) -> None:
        if self.role is not None:
            self.role.writable_again(link)

    def end_of_pass(self) -> None:
        """Ship new frames, then write and fsync them, so both disks work at the same time."""
        if self.role is not None:
            self.role.end_of_pass()
        if (commit := self.log.take_commit()) is not None:
            self.host.commit(commit)

    def committed(self, commit: Commit) -> None:
        """Record that the commit is on disk. Frames that arrived meanwhile form the next commit."""
        has_more = self.log.flushed(commit)
        if isinstance(self.role, Master):
            self.role.committed(commit.end, commit.chain)
        elif self.role is not None:
            self.role.committed(commit)
        if has_more:
            self.host.pass_soon()
        self._give_up_tail()

    def quiet_ms(self) -> int:
        """Return the time until `tick` is needed unless something happens; 0 for now."""
        is_waiting = self.changes.is_waiting or self.identity.points.is_newer_than_saved
        return 0 if self.role is None or is_waiting or not self.log.is_idle else self.role.quiet_ms()

    def tick(self) -> None:
        """Check deadlines. Called about every 100 ms; about every second while `quiet_ms` allows it."""
        now_ms = self.host.monotonic_ms()
        self.changes.tick(now_ms)
        if self.role is not None:
            try:
                self.role.tick(now_ms)
            except IllegalTransition as error:
                self._begin_anew(error)
        self._save_points(now_ms)
        self.host.pass_soon()

    def remembered_elsewhere(
        self, points: Iterable[Point], *, loss_accepted_term: int = 0, may_be_behind: bool = False
    ) -> None:
        """Compare the log with the acknowledged points of the metaserver's row. Called before the assignment that they
        come with.

        A master with a slave in sync lacks nothing that any copy still has. Frames that an operator accepted as lost,
        in a term after their acknowledgement, do not count as missing. A slave may lack frames acknowledged without it
        (`may_be_behind`).
        """
        own = self.identity.points.own
        if own is not None and own.epoch.term < loss_accepted_term:
            self._look_at_points()  # the disk may have lost it during a stop, so it was not reported
        lacks = self.identity.points.lacks
        if lacks is not None and lacks.epoch.term < loss_accepted_term:
            log.warning("loss accepted group=%s: this copy lacks acknowledged frames up to %s", self.group, lacks)
            self.identity.points.forget()
        points = [] if may_be_behind else [point for point in points if self._may_lack(point)]
        if not points or (self.master is not None and self.master.in_sync):
            return
        for point in points:
            self._note_rolled_back(point, "the metaserver")
        if self.master is not None and self.master.has_begun:
            self.begin_role()

    def _look_at_points(self) -> None:
        """Compare the log with the acknowledged point that this copy stores, before a role begins."""
        points = self.identity.points
        if points.own is not None and self._may_lack(points.own):
            self._note_rolled_back(points.own, "this copy itself")
        if points.lacks is not None and not is_lacking(self.log, points.lacks):
            points.refilled()

    def _may_lack(self, point: Point) -> bool:
        return self.identity.value.complete and is_lacking(self.log, point)

    def _note_rolled_back(self, point: Point, source: str) -> None:
        log_lacking(self.log, self.group, point, source)
        self.identity.points.rolled_back(point)

    def _save_points(self, now_ms: int) -> None:
        if (save := self.identity.points.due(now_ms)) is not None:
            self.host.write(save, self._points_saved)

    def _points_saved(self, result: object) -> None:
        self.identity.points.saved()
        if isinstance(result, DiskFailed):
            raise result

    def acting_master(self) -> M:
        """Return the master for an operator's question about consumers.

        Raises:
            NotMaster, NotServed: this broker cannot answer.
        """
        if self.master is None:
            raise NotMaster(f"this broker is not the master of {self.group}; ask the other one")
        if not self.master.has_begun:
            raise NotServed(f"the master of {self.group} waits for its slave")
        return self.master

    def found_damage(self, problem: CorruptFrame) -> None:
        """Handle damage that a reader found."""
        if self.role is not None:
            self.role.found_damage(problem)

    def leave_role(self) -> None:
        """End the role, and save the acknowledged point before the log may be cut: this copy may be the only one that
        has it.
        """
        if self.role is not None:
            self._has_matched |= self.role.has_begun if isinstance(self.role, Master) else self.role.has_matched
            self.role.step_down()
            self.role = None
            self.move(NodeEvent.LEFT)
            self.identity.points.save()

    def repaired(self) -> None:
        """Resume, or begin a role, after a repair."""
        if self.master is not None:
            self.master.repaired()
        elif self.role is None:
            self.begin_role()

    def record_metaserver_clock(self, wall_ms: int) -> None:
        """Record the metaserver's clock."""
        self.clocks.record(METASERVER, wall_ms, monotonic_ms=self.host.monotonic_ms())

    def record_copy_clock(self, link: Link, wall_ms: int, *, is_disk_full: bool) -> None:
        """Record the clock of the other end of a sync link, if that is a copy of this group."""
        master = self.master
        if master is not None and (watch := master.slaves.of(link)) is not None:
            watch.is_disk_full = is_disk_full
            self.clocks.record(master.slaves.clock(watch), wall_ms, monotonic_ms=self.host.monotonic_ms())
        elif self.slave is not None and self.slave.is_master(link):
            self.clocks.record(MASTER, wall_ms, monotonic_ms=self.host.monotonic_ms())

    def clocks_ahead_ms(self) -> dict[str, int]:
        """Return how far this machine's clock is ahead of each clock with a recent reading."""
        return self.clocks.ahead_ms(now_ms=self.host.now_ms(), monotonic_ms=self.host.monotonic_ms())

    @property
    def clock_off_s(self) -> int:
        """Whole seconds by which this machine's clock is ahead of the others' (`Clocks.off_s`)."""
        return self.clocks.off_s(self.clocks_ahead_ms())

    def clocks_disagreement(self) -> str:
        """Return the clocks that are too far from this machine's, as text; empty if there are none."""
        return self.clocks.disagreement(self.clocks_ahead_ms())

    def decide_retention(self, keeper: Keeper) -> None:
        """Decide on deletions, if this is the master; log when clocks disagree.

        Raises:
            CorruptFrame: this copy is damaged.
        """
        disagreement = self.clocks_disagreement()
        if bool(disagreement) != bool(self._disagreement):
            if disagreement:
                log.error("clocks disagree group=%s, nothing is deleted until they agree: %s", self.group, disagreement)
            else:
                log.warning("clocks agree again group=%s", self.group)
            self._disagreement = disagreement
        if self.master is not None:
            self.master.decide_retention(keeper, self.clocks)

    def oldest_may_go(self, keeper: Keeper, readers: Iterable[int]) -> bool:
        """Return whether to delete the oldest segment now: its deletion was agreed, and no reader of this copy needs
        it.
        """
        return self.log.oldest_may_go and not self.is_pinned([*readers, keeper.used_from(self.log)])

    def is_pinned(self, readers: Iterable[int]) -> bool:
        """Return whether the oldest segment is still needed: by the other copy, a reader at `readers`, or this log.

        The next segment must be on disk: the commit that begins it makes its files. `MessageLog.oldest_may_go` checks
        the high watermark, against the end of the retention frame, which lies behind all that may go.
        """
        message_log = self.log
        if len(message_log.bases) < 2 or message_log.damage is not None:
            return True
        end = message_log.bases[1]
        needed = [*readers, message_log.flushed_end - 1]
        if self.role is not None and self.role.shipped_end is not None:
            needed.append(self.role.shipped_end)
        return end > min(needed)

    def set_disk_full(self, is_full: bool) -> None:
        """Set or clear the disk reason. Called in each tick, so that a new mastership gets the reason, too."""
        self.is_disk_full = is_full
        if self.master is None:
            return
        is_short = is_full or self.master.slaves.lack_room
        if self.master.readonly.change(Reason.DISK, is_short) and is_short:
            owner = "own" if is_full else "slave's"
            log.error("disk nearly full group=%s disk=%s: the group is readonly", self.group, owner)

    def set_memory_short(self, is_short: bool) -> None:
        if self.master is not None and self.master.readonly.change(Reason.MEMORY, is_short) and is_short:
            log.error("memory over its limit group=%s: producers wait, consumers continue", self.group)
