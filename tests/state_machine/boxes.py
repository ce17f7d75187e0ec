"""Brokers without sockets or bytes: which disk is in which box, what each disk holds, who believes to be what.

They follow the rules that brokers have (epochs, one slave per term, an acknowledgement needs both copies), so that
what they tell the metaserver is what brokers could tell it, as late as networks may deliver it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from qmq.proto import qmq_pb2 as pb
from qmq.types import Role

SERVE_PORT = 20881


@dataclass(eq=False)
class Disk:
    """A data directory. It stays with the group that it first served."""

    incarnation: str
    group: str = ""
    term: int = 0
    """The newest term that it knows; an older one is refused."""
    log: list[int] = field(default_factory=list)


@dataclass(eq=False)
class Process:
    """A running broker, until it stops."""

    disk: Disk
    assignment: pb.Assignment | None = None
    outbox: deque[pb.BrokerState] = field(default_factory=deque)
    """Heartbeats that are under way."""
    holds_until: float = 0.0
    """While a swap is prepared, it takes nothing new."""
    slave: Process | None = None
    """Whom it is linked with and whose copy counts; None on slaves."""
    refused: str = ""


@dataclass(eq=False)
class Box:
    """A machine: its name stays, its disk and its process come and go."""

    name: str
    ip: str
    disk: Disk
    disks: list[Disk] = field(default_factory=list)
    process: Process | None = None

    @property
    def key(self) -> tuple[str, int]:
        return self.name, SERVE_PORT


@dataclass
class Acknowledged:
    """What a group owes its producers."""

    messages: set[int] = field(default_factory=set)
    given_up: set[int] = field(default_factory=set)
    """An operator accepted their loss."""


class Brokers:
    """All boxes. Owned by the world."""

    def __init__(self, names: str) -> None:
        self._disks = 0
        self._messages = 0
        self.boxes = {name: Box(name, f"10.0.0.{number}", self._new_disk()) for number, name in enumerate(names, 1)}
        for box in self.boxes.values():
            box.disks.append(box.disk)
        self.acknowledged: dict[str, Acknowledged] = {}
        self.now = 0.0

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

    def disk(self, incarnation: str) -> Disk | None:
        return next(
            (disk for box in self.boxes.values() for disk in box.disks if disk.incarnation == incarnation), None
        )

    def at(self, ip: str) -> Box:
        return next(box for box in self.boxes.values() if box.ip == ip)

    def owed(self, group: str) -> set[int]:
        known = self.acknowledged.setdefault(group, Acknowledged())
        return known.messages - known.given_up

    # What brokers do.

    def take(self, process: Process, assignment: pb.Assignment) -> None:
        """A broker learns its part. An older term than it knows it does not obey."""
        disk = process.disk
        if assignment.term < disk.term or disk.group not in ("", assignment.broker_group):
            return
        old = process.assignment
        if old is None or (old.term, old.role) != (assignment.term, assignment.role):
            process.slave, process.holds_until = None, 0.0
        disk.term, disk.group = assignment.term, assignment.broker_group
        process.assignment = assignment

    def sync(self, box: Box) -> bool:
        """The master in a box and its slave connect, agree and catch up."""
        master = box.process
        if master is None or not self._is(master, Role.MASTER) or not self.assigned(master).slaves:
            return False
        assignment = self.assigned(master)
        slave = self.at(assignment.slaves[0].ip).process
        if slave is None or not self._is(slave, Role.SLAVE) or slave.disk.group != master.disk.group:
            return False
        theirs = self.assigned(slave)
        if theirs.term != assignment.term or self.at(theirs.master.ip) is not box:
            return False
        slave.disk.log[:] = master.disk.log
        master.slave = slave
        return True

    def produce(self, box: Box) -> bool:
        """A producer sends a message; with a slave it is acknowledged, without one it stays a tail."""
        master = box.process
        if master is None or not self._is(master, Role.MASTER) or master.holds_until > self.now:
            return False
        self._messages += 1
        master.disk.log.append(self._messages)
        if not self.is_linked(master):
            return False
        assert master.slave
        master.slave.disk.log.append(self._messages)
        group = self.assigned(master).broker_group
        self.acknowledged.setdefault(group, Acknowledged()).messages.add(self._messages)
        return True

    def is_linked(self, master: Process) -> bool:
        """Whether its slave's copy still grows with its own. The master notices a loss only when it looks."""
        slave = master.slave
        if slave is None or not any(box.process is slave for box in self.boxes.values()):
            return False
        return self._is(slave, Role.SLAVE) and self.assigned(slave).term == self.assigned(master).term

    def notice_lost_links(self) -> None:
        for box in self.boxes.values():
            if box.process and box.process.slave and not self.is_linked(box.process):
                box.process.slave = None

    def state(self, box: Box) -> pb.BrokerState:
        """What the broker in a box would say now."""
        process = box.process
        assert process
        disk, assignment = process.disk, process.assignment
        state = pb.BrokerState(
            hostname=box.name,
            serve_port=SERVE_PORT,
            incarnation=disk.incarnation,
            durability="fsync",
            boot=1,
            log_end=len(disk.log),
            flushed_end=len(disk.log),
            chain=hash(tuple(disk.log)) & (2**63 - 1),
        )
        if assignment is not None:
            state.broker_group, state.role, state.term = assignment.broker_group, assignment.role, assignment.term
            marked = "*" in assignment.readonly_subjects
            reasons = [
                *(["operator"] if marked else []),
                *(["slave_down"] if process.slave is None else []),
                *(["draining"] if process.holds_until > self.now else []),
            ]
            state.readonly_reasons.extend(reasons if assignment.role == Role.MASTER else [])
            state.writable = assignment.role == Role.MASTER and not reasons
            if process.slave is not None:
                state.in_step.append(process.slave.disk.incarnation)
        else:
            state.role = -1
        return state

    def identity(self, box: Box) -> pb.BrokerIdentity:
        assert box.process
        return pb.BrokerIdentity(
            hostname=box.name,
            ip=box.ip,
            serve_port=SERVE_PORT,
            sync_port=SERVE_PORT + 1,
            control_port=SERVE_PORT + 2,
            metrics_port=SERVE_PORT + 3,
            incarnation=box.process.disk.incarnation,
        )

    def assigned(self, process: Process) -> pb.Assignment:
        assert process.assignment is not None
        return process.assignment

    def _is(self, process: Process, role: Role) -> bool:
        return process.assignment is not None and process.assignment.role == role
