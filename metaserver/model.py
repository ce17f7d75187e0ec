"""Core. What the metaserver knows: brokers, their groups, routes of subjects, operators' marks.

A `Directory` is one consistent reading of the database. It is never changed in place: who changes the database reads
a new one. What brokers report about themselves is not in it but in `metaserver.liveness`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from qmq.types import Role

ALL_SUBJECTS = "*"
"""As the subject of a readonly mark: the whole broker group."""

NORMAL = 1
"""QMQ's number for the kind of a group that serves messages at once; 2 is a group of delay servers."""


class BrokerKey(NamedTuple):
    """Names a broker process: no two rows of the table share it."""

    hostname: str
    serve_port: int

    def __str__(self) -> str:
        return f"{self.hostname}:{self.serve_port}"


@dataclass(frozen=True, slots=True)
class Broker:
    """A broker that an operator added; its control and metrics ports and its incarnation it tells by itself."""

    group: str
    role: Role
    hostname: str
    ip: str
    serve_port: int
    sync_port: int
    control_port: int = 0
    metrics_port: int = 0
    incarnation: str = ""
    """Names the data directory the broker last registered with; empty until it registered once."""
    complete: bool = False
    """A slave that was seen to hold every acknowledged message, with this incarnation and under this master.

    Once it does, nothing is acknowledged without it, so it stays complete until its disk or its part changes.
    """

    @property
    def key(self) -> BrokerKey:
        return BrokerKey(self.hostname, self.serve_port)


@dataclass(frozen=True, slots=True)
class Group:
    """The row (group, term, master, slave). It changes only by compare-and-set on the term."""

    name: str
    term: int
    master: Broker | None
    slave: Broker | None
    update_time_ms: int
    half_swapped: bool = False
    """The first of ReplaceBroker's two calls put the slave into the master's place; the slave's place is vacant."""

    @property
    def brokers(self) -> tuple[Broker, ...]:
        return tuple(broker for broker in (self.master, self.slave) if broker is not None)

    def holder(self, role: Role) -> Broker | None:
        return self.master if role == Role.MASTER else self.slave


@dataclass(frozen=True, slots=True)
class Route:
    """Broker groups of a subject. `version` is the optimistic lock of its row."""

    subject: str
    groups: tuple[str, ...]
    version: int


class ReadonlyMark(NamedTuple):
    """An operator keeps producers of `subject` (or `*`) away from a group."""

    subject: str
    group: str


@dataclass(frozen=True)
class Directory:
    """Groups, brokers and marks as of one transaction. Created by the repository."""

    groups: Mapping[str, Group] = field(default_factory=dict)
    marks: frozenset[ReadonlyMark] = frozenset()

    def brokers(self) -> list[Broker]:
        return [broker for group in self.groups.values() for broker in group.brokers]

    def find(self, key: BrokerKey) -> Broker | None:
        return next((broker for broker in self.brokers() if broker.key == key), None)

    def readonly_subjects(self, group: str) -> list[str]:
        return sorted(mark.subject for mark in self.marks if mark.group == group)

    def is_marked(self, group: str, subject: str) -> bool:
        return not self.marks.isdisjoint({ReadonlyMark(subject, group), ReadonlyMark(ALL_SUBJECTS, group)})


@dataclass(frozen=True, slots=True)
class ReplicaState:
    """What a broker says about itself, each second and when asked. Offsets are bytes of its message log."""

    role: int
    term: int
    boot: int = 0
    log_start: int = 0
    log_end: int = 0
    flushed_end: int = 0
    matched_end: int = 0
    high_watermark: int = 0
    chain: int = 0
    readonly_reasons: tuple[str, ...] = ()
    writable: bool = False
    durability: str = ""

    def reigns(self, term: int) -> bool:
        """Whether this broker is at work as the master of that term."""
        return self.role == Role.MASTER and self.term == term
