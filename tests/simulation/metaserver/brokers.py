"""Model of brokers without sockets and bytes: boxes, the disks in them, the frames on each disk, the roles.

The model follows the rules of brokers: epochs, promises, acknowledgement by `min_copies` copies. So metaservers receive
only states that brokers can report. Groups of two and more copies follow the same rules.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import takewhile
from typing import NamedTuple

from qmq.errors import OperatorError
from qmq.proto import qmq_pb2 as pb
from qmq.types import Role

SERVE_PORT = 20881


class Refused(Exception):
    """A broker rejects its assignment and logs the reason."""


class Frame(NamedTuple):
    """Frame of a log. `message` 0: the frame that begins a mastership."""

    term: int
    boot: int
    message: int


Log = list[Frame]


@dataclass(eq=False)
class Disk:
    """Data directory. It belongs to the group that it served first."""

    incarnation: str
    group: str = ""
    term: int = 0
    """Newest term of the disk; assignments of older terms are ignored."""
    role: int = -1
    """Role in that term."""
    boot: int = 0
    promised: int = 0
    """Promised term: no master of an older term is followed."""
    complete: bool = False
    """Whether the log had all of its master's log once."""
    fills: int = 0
    """Number of fills."""
    point: pb.AcknowledgedPoint | None = None
    """Newest acknowledged point stored here."""
    lacks: pb.AcknowledgedPoint | None = None
    """Acknowledged point that the log lacks."""
    log: Log = field(default_factory=list)
    is_old: bool = False
    """Whether the disk was put back and is not whole again."""

    def put_back(self, frames: int, *, forgets: bool) -> None:
        """Drop the last frames, as of a machine that stood still; `forgets`: also newer terms and points."""
        del self.log[max(len(self.log) - frames, 0) :]
        self.is_old = True
        if forgets:
            last = self.log[-1] if self.log else Frame(0, 0, 0)
            self.term = last.term
            self.boot = last.boot
            self.promised = 0
            self.role = -1
            self.point = self.lacks = None

    def compare(self, points: Iterable[pb.AcknowledgedPoint]) -> None:
        """Compare points with the log, if the log was complete once."""
        for point in points if self.complete else ():
            if not self.has(point) and (self.lacks is None or point.end > self.lacks.end):
                self.lacks = point
        if self.lacks and self.has(self.lacks):
            self.lacks = None

    def forget_before(self, term: int) -> None:
        """Drop points older than this term: an operator accepted their loss."""
        if self.point and self.point.term < term:
            self.point = None
        if self.lacks and self.lacks.term < term:
            self.lacks = None

    @property
    def fill_id(self) -> str:
        return f"{self.incarnation}/{self.fills}"

    @property
    def messages(self) -> set[int]:
        return {frame.message for frame in self.log}

    def has(self, point: pb.AcknowledgedPoint) -> bool:
        return point.end <= len(self.log) and chain(self.log[: point.end]) == point.chain


def chain(log: Log) -> int:
    return hash(tuple(log)) & (2**63 - 1)


@dataclass(eq=False)
class Process:
    """Running broker, until it stops."""

    disk: Disk
    assignment: pb.Assignment | None = None
    outbox: deque[pb.BrokerState] = field(default_factory=deque)
    """Heartbeats under way."""
    holds_until: float = 0.0
    """Until then, a master stores nothing and a slave follows no master: the roles change."""
    has_begun: bool = False
    """Whether the master's epoch frame is in its log."""
    in_sync: bool = False
    """Whether the slave's log reached its master's log end, in this term and process."""
    slaves: list[Process] = field(default_factory=list)
    """Linked slaves with counting copies."""
    met: list[Process] = field(default_factory=list)
    """Slaves that sent a hello in this mastership."""
    is_unfilled: bool = False
    """Whether the slave waits for an operator's permission to be filled."""

    def begin_role(self) -> None:
        self.is_unfilled = False
        self.slaves = []
        self.met = []
        self.holds_until = 0.0
        self.has_begun = False
        self.in_sync = False

    def is_in(self, role: Role, term: int | None = None) -> bool:
        part = self.assignment
        return part is not None and part.role == role and term in (None, part.term)


@dataclass(eq=False)
class Box:
    """Machine: its name stays, its disk and process change."""

    name: str
    ip: str
    disk: Disk
    disks: list[Disk] = field(default_factory=list)
    process: Process | None = None
    is_cut_off: bool = False
    """Whether the box is cut off from all metaservers."""
    is_lost: bool = False
    """Whether the machine is gone for good. A machine with an empty disk may take its name."""

    @property
    def key(self) -> tuple[str, int]:
        return self.name, SERVE_PORT


@dataclass
class Acknowledged:
    """Messages that a group owes its producers."""

    messages: set[int] = field(default_factory=set)
    given_up: set[int] = field(default_factory=set)
    """Messages that an operator accepted as lost."""
    masters: dict[int, Disk] = field(default_factory=dict)
    """Term -> disk of the master that acknowledged in it."""


class Brokers:
    """All boxes of a world."""

    def __init__(self, names: str) -> None:
        self._disks = 0
        self._messages = 0
        self.boxes: dict[str, Box] = {}
        for name in names:
            self.add_box(name)
        self.acknowledged: dict[str, Acknowledged] = {}
        self.now = 0.0
        self.broken = ""
        """First broken promise of the brokers."""

    def add_box(self, name: str) -> Box:
        """Return a new machine."""
        disk = self._new_disk()
        box = self.boxes[name] = Box(name, f"10.0.0.{len(self.boxes) + 1}", disk, [disk])
        return box

    def _new_disk(self) -> Disk:
        self._disks += 1
        return Disk(f"disk{self._disks}")

    def change_disk(self, box: Box, back_to: int | None) -> None:
        """Put another disk into a stopped box: a new one, or one that was in it before."""
        assert box.process is None
        if back_to is None or back_to >= len(box.disks):
            box.disks.append(self._new_disk())
            back_to = len(box.disks) - 1
        box.disk = box.disks[back_to]
        box.disk.is_old = True

    def disk(self, incarnation: str) -> Disk | None:
        return next(
            (disk for box in self.boxes.values() for disk in box.disks if disk.incarnation == incarnation), None
        )

    def at(self, ip: str) -> Box:
        return next(box for box in self.boxes.values() if box.ip == ip)

    def owed(self, group: str) -> set[int]:
        known = self.acknowledged.setdefault(group, Acknowledged())
        return known.messages - known.given_up

    def take(self, process: Process, assignment: pb.Assignment) -> None:
        """Give a broker its assignment. It ignores older terms than its disk has.

        Raises:
            Refused: the assignment does not fit the disk.
        """
        disk, old = process.disk, process.assignment
        if not assignment.term:
            return  # it only carries the clock
        if disk.group not in ("", assignment.broker_group):
            raise Refused("start this broker with an empty one")
        self._take_points(process, assignment)
        if assignment.term < disk.term or (assignment.role == Role.MASTER and assignment.term < disk.promised):
            return
        if disk.term == assignment.term and disk.role not in (-1, assignment.role):
            raise Refused(f"term {disk.term} has two different rows")
        if old is None or (old.term, old.role) != (assignment.term, assignment.role):
            process.begin_role()
            disk.compare([disk.point] if disk.point else [])
            if assignment.role == Role.MASTER:
                disk.boot = disk.boot + 1 if disk.term == assignment.term else 1
        disk.term, disk.role, disk.group = assignment.term, assignment.role, assignment.broker_group
        process.assignment = assignment

    def _take_points(self, process: Process, assignment: pb.Assignment) -> None:
        """Compare the remembered points with the log.

        A slave that may be behind lacks points legitimately; a master with slaves lacks none.
        """
        disk, has_slaves = process.disk, process.is_in(Role.MASTER) and bool(process.slaves)
        disk.forget_before(assignment.loss_accepted_term)
        may_be_behind = assignment.role == Role.SLAVE and len(assignment.slaves) >= assignment.min_copies
        if may_be_behind or has_slaves:
            return
        disk.compare(assignment.points)
        if disk.lacks and process.is_in(Role.MASTER) and process.has_begun:
            process.begin_role()
            disk.boot += 1

    def sync(self, box: Box, number: int | None = None) -> bool:
        """Let the master in a box and its slaves, or one of them, connect, agree and catch up."""
        master = box.process
        if master is None or not master.is_in(Role.MASTER):
            return False
        slaves = list(master.assignment.slaves)
        chosen = slaves if number is None or not slaves else [slaves[number % len(slaves)]]
        there = [slave for address in chosen if (slave := self.at(address.ip).process)]
        met = [slave for slave in there if self._meet(master, slave)]
        if not met or not self._begin(master):
            return False
        for slave in met:
            self._link(master, slave)
        return True

    def _meet(self, master: Process, slave: Process) -> bool:
        """Let both agree; before a mastership begins, the master restores what it lost from the slave."""
        if not slave.is_in(Role.SLAVE, master.assignment.term) or self._is_held(slave):
            return False
        if slave.disk.group != master.disk.group or slave.disk is master.disk:
            return False
        mine, theirs = master.disk.log, slave.disk.log
        if not master.has_begun and theirs[: len(mine)] == mine:
            mine[:] = theirs  # the slave's additional frames may be acknowledged
            master.disk.compare(())
        if slave not in master.met:
            master.met.append(slave)
        return True

    def _link(self, master: Process, slave: Process) -> None:
        mine, theirs = master.disk.log, slave.disk.log
        slave.is_unfilled = self._is_to_wait(master, slave)
        if slave.is_unfilled:
            return
        self._check_cut(slave.disk, mine)
        theirs[:] = mine
        slave.disk.fills += not slave.disk.complete
        slave.disk.boot, slave.disk.complete, slave.in_sync = master.disk.boot, True, True
        slave.disk.is_old, slave.disk.lacks = False, None
        if slave not in master.slaves:
            master.slaves.append(slave)
        self._acknowledge(master)

    def _is_to_wait(self, master: Process, slave: Process) -> bool:
        """Whether the slave was never whole, lacks acknowledged frames, and is not allowed to be filled."""
        part, disk, point = master.assignment, slave.disk, master.disk.point
        pairs = zip(master.disk.log, disk.log, strict=False)
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        if disk.complete or point is None or same >= point.end:
            return False
        orders = [order.allowed for order in part.fills if order.fill_id == disk.fill_id]
        return not (orders[0] if orders else part.sync_mode != "manual")

    def _is_held(self, slave: Process) -> bool:
        return slave.holds_until > self.now or slave.disk.promised > slave.disk.term

    def _begin(self, master: Process) -> bool:
        """Write the epoch frame if this copy lacks nothing, or has met enough others."""
        disk = master.disk
        if not master.has_begun and not disk.lacks and self._has_met_enough(master):
            disk.log.append(Frame(disk.term, disk.boot, 0))
            master.has_begun, disk.is_old, disk.complete = True, False, True
        return master.has_begun

    def _has_met_enough(self, master: Process) -> bool:
        if master.disk.log and master.disk.complete:
            return True
        assignment = master.assignment
        needed = assignment.min_copies - 1
        met = sum(self.is_linked(master, slave) for slave in master.met)
        return met >= max(needed, len(assignment.slaves) + 1 - needed)

    def _check_cut(self, disk: Disk, log: Log) -> None:
        cut = disk.messages & self.owed(disk.group) - {frame.message for frame in log}
        if cut:
            self.broken = f"{disk.incarnation} of {disk.group} gives up {cut}, which was acknowledged"

    def produce(self, box: Box) -> bool:
        """Store a message; with too few slaves it is not acknowledged and stays a tail."""
        master = box.process
        if master is None or not master.is_in(Role.MASTER) or self.is_draining(master) or not self._begin(master):
            return False
        self._messages += 1
        frame = Frame(master.disk.term, master.disk.boot, self._messages)
        self.notice_lost_links()
        for disk in (master.disk, *(slave.disk for slave in master.slaves)):
            disk.log.append(frame)
        return self._acknowledge(master)

    def _acknowledge(self, master: Process) -> bool:
        """Acknowledge the frames that enough copies have, once one of them is of the present epoch."""
        disk, assignment = master.disk, master.assignment
        if self.are_too_few_in_sync(master):
            return False
        known = self.acknowledged.setdefault(assignment.broker_group, Acknowledged())
        known.messages |= disk.messages - {0} - known.given_up
        last = disk.log[-1]
        point = pb.AcknowledgedPoint(term=last.term, boot=last.boot, end=len(disk.log), chain=chain(disk.log))
        for copy in (disk, *(slave.disk for slave in master.slaves)):
            copy.point = point
        if known.masters.setdefault(assignment.term, disk) is not disk:
            other = known.masters[assignment.term].incarnation
            self.broken = f"{other} and {disk.incarnation} of {disk.group} acknowledged in term {assignment.term}"
        return True

    def check_masters(self) -> None:
        """Check that each master of the newest acknowledging term, or of a later one, has all acknowledged messages."""
        for box in self.boxes.values():
            if (master := box.process) and master.has_begun and master.is_in(Role.MASTER):
                group = master.assignment.broker_group
                newest = max(self.acknowledged.setdefault(group, Acknowledged()).masters, default=0)
                if master.disk.term >= newest and (missing := self.owed(group) - master.disk.messages):
                    self.broken = f"{box.name} is at work for {group} in term {master.disk.term} without {missing}"

    def are_too_few_in_sync(self, master: Process) -> bool:
        return len(master.slaves) < max(master.assignment.min_copies, 2) - 1

    def is_draining(self, master: Process) -> bool:
        return master.holds_until > self.now or master.disk.promised > master.disk.term

    def is_linked(self, master: Process, slave: Process) -> bool:
        """Whether the slave's copy still follows its master's."""
        runs = any(box.process is slave for box in self.boxes.values())
        return runs and slave.is_in(Role.SLAVE, master.assignment.term) and not self._is_held(slave)

    def cut(self, box: Box, number: int) -> None:
        """Break the link with one slave."""
        if box.process and box.process.slaves:
            del box.process.slaves[number % len(box.process.slaves)]

    def notice_lost_links(self) -> None:
        for box in self.boxes.values():
            if master := box.process:
                master.slaves = [slave for slave in master.slaves if self.is_linked(master, slave)]

    # Calls of the metaserver while roles change.

    def prepare_swap(self, box: Box, *, term: int, until: float, target: str, promised_term: int) -> None:
        master = box.process
        self.notice_lost_links()
        if not master.is_in(Role.MASTER, term) or not master.has_begun:
            raise OperatorError("not the master in this term")
        if self.are_too_few_in_sync(master):
            raise OperatorError("its slave is missing")
        if target and target not in [slave.disk.incarnation for slave in master.slaves]:
            raise OperatorError("that slave is missing")
        master.holds_until = until
        master.disk.promised = max(master.disk.promised, promised_term)

    def prepare_failover(self, box: Box, *, term: int, until: float, promised_term: int, master_gone: bool) -> None:
        slave = box.process
        self.notice_lost_links()
        if not slave.is_in(Role.SLAVE, term) or slave.disk.term != term:
            raise OperatorError("not a slave in this term")
        if any(other.process and slave in other.process.slaves for other in self.boxes.values()):
            raise OperatorError("its master sent a packet")
        if self.is_unfit(slave, master_gone):
            raise OperatorError("it was not in sync since its process began, or is incomplete")
        slave.holds_until = until
        slave.disk.promised = max(slave.disk.promised, promised_term)

    def is_unfit(self, slave: Process, master_gone: bool) -> bool:
        return not (slave.in_sync or (master_gone and slave.disk.complete)) or slave.disk.lacks is not None

    # Reports of brokers.

    def state(self, box: Box) -> pb.BrokerState:
        """Return the state that the broker in a box reports now."""
        process = box.process
        disk, assignment = process.disk, process.assignment
        last = disk.log[-1] if disk.log else Frame(0, 0, 0)
        state = pb.BrokerState(
            hostname=box.name,
            serve_port=SERVE_PORT,
            incarnation=disk.incarnation,
            durability="fsync",
            boot=disk.boot,
            log_end=len(disk.log),
            flushed_end=len(disk.log),
            chain=chain(disk.log),
            acknowledged=disk.point,
            promised_term=disk.promised,
            known_term=disk.term,
            last_term=last.term,
            last_boot=last.boot,
            in_sync=process.in_sync,
            incomplete=not disk.complete,
            fill_id=disk.fill_id,
            in_step=[slave.disk.incarnation for slave in process.slaves],
            role=-1,
        )
        if assignment is not None:
            state.broker_group, state.role, state.term = assignment.broker_group, assignment.role, assignment.term
            state.readonly_reasons.extend(self._reasons(process))
            state.writable = assignment.role == Role.MASTER and process.has_begun and not state.readonly_reasons
        return state

    def _reasons(self, process: Process) -> list[str]:
        reasons = ["rolled_back"] if process.disk.lacks else []
        reasons += ["unfilled"] if process.is_unfilled else []
        if process.is_in(Role.MASTER):
            reasons += ["operator"] if "*" in process.assignment.readonly_subjects else []
            waits = sum(self.is_linked(process, slave) and slave.is_unfilled for slave in process.met)
            needed = max(process.assignment.min_copies, 2) - 1
            if self.are_too_few_in_sync(process):
                reasons += ["unfilled" if len(process.slaves) + waits >= needed else "slave_down"]
            reasons += ["draining"] if self.is_draining(process) else []
        return reasons

    def identity(self, box: Box) -> pb.BrokerIdentity:
        return pb.BrokerIdentity(
            broker_group=box.process.disk.group,
            term=box.process.disk.term,
            hostname=box.name,
            ip=box.ip,
            serve_port=SERVE_PORT,
            sync_port=SERVE_PORT + 1,
            control_port=SERVE_PORT + 2,
            metrics_port=SERVE_PORT + 3,
            incarnation=box.process.disk.incarnation,
            begins=box.process.assignment is None,
        )
