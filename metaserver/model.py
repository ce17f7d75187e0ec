"""Core. Rows of the metaserver's tables as values: brokers, groups, routes of subjects, readonly marks, tokens.

A `Directory` is one consistent reading of the database and never changes; a change of the database is read as a new
one. Brokers' reports about themselves are in `cluster.liveness`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from qmq.operator_limits import OperatorLimits
from qmq.replication.assignment import SyncMode
from qmq.replication.identity import Point
from qmq.types import GroupKind, Role

COPIES_MAX = 5
"""Copies of a group, the master's among them."""
ALL_SUBJECTS = "*"
"""As the subject of a readonly mark: the whole broker group."""
AS_SETTING = "default"
"""Value of a group's failover: the metaservers' setting applies."""

NORMAL, DELAY = GroupKind.NORMAL.value, GroupKind.DELAY.value


class BrokerKey(NamedTuple):
    """Name of a broker process, unique in the table."""

    hostname: str
    serve_port: int

    def __str__(self) -> str:
        return f"{self.hostname}:{self.serve_port}"


_PARTS = {
    (Role.MASTER, NORMAL): Role.MASTER,
    (Role.SLAVE, NORMAL): Role.SLAVE,
    (Role.MASTER, DELAY): Role.DELAY_MASTER,
    (Role.SLAVE, DELAY): Role.DELAY_SLAVE,
}


def part(role: Role, kind: int) -> Role:
    """Return operators' name of a role in a group of this kind. Brokers only have masters and slaves."""
    return _PARTS[role, kind]


def role_and_kind(part: Role) -> tuple[Role, int]:
    """Return the role and kind of group for a name from `part`."""
    return next(key for key, value in _PARTS.items() if value == part)


@dataclass(frozen=True, slots=True)
class Broker:
    """A broker that an operator added. Its control and metrics ports and its incarnation come with its registration."""

    group: str
    role: Role
    hostname: str
    ip: str
    serve_port: int
    sync_port: int
    control_port: int = 0
    metrics_port: int = 0
    incarnation: str = ""
    """Name of the data directory of the newest registration; empty before the first one."""
    complete: bool = False
    """Whether a slave held every acknowledged message, with this incarnation and under this master.

    From then on nothing is acknowledged without it, so it stays complete until its disk or its role changes.
    """
    fill_id: str = ""
    """Newest filling of its copy that an operator allowed or stopped (`qmq.replication.assignment`); empty: none."""
    fill_allowed: bool = False
    """True: SyncReplica allowed that filling. False: CancelSync stopped it."""
    instance: str = ""
    """Name of the data directory at its place. A broker with another one, such as a copy, gets the role in a new
    term.
    """
    kind: int = field(default=NORMAL, compare=False)
    """Kind of its group; never changes."""

    @property
    def part(self) -> Role:
        return part(self.role, self.kind)

    @property
    def key(self) -> BrokerKey:
        return BrokerKey(self.hostname, self.serve_port)


@dataclass(frozen=True, slots=True)
class Group:
    """The row (group, term, master, slaves). It changes only by compare-and-set on the term."""

    name: str
    term: int
    master: Broker | None
    slaves: tuple[Broker, ...]
    update_time_ms: int
    half_swapped: bool = False
    """The first of ReplaceBroker's two calls made the slave the master; the slave's place is vacant."""
    kind: int = NORMAL
    tag: str = ""
    """Subjects of the same tag prefer this group."""
    draining: bool = False
    """The group is being emptied: producers avoid it, and no route adds it."""
    full: bool = False
    """New subjects avoid the group; subjects that use it continue."""
    min_copies: int = 2
    """Copies, the master's among them, that have a message on disk when it is acknowledged."""
    lost_term: int = 0
    """Term in which an operator accepted a loss, until AcknowledgeLoss; 0: none."""
    failover: str = AS_SETTING
    """Automatic failover: `on`, `off` or `default`."""
    sync_mode: str = SyncMode.AUTOMATIC
    """Whether an incomplete slave is filled automatically, or waits for SyncReplica."""

    @property
    def brokers(self) -> tuple[Broker, ...]:
        return self.slaves if self.master is None else (self.master, *self.slaves)

    @property
    def slave(self) -> Broker | None:
        """The only slave; None: there is none, or several."""
        return self.slaves[0] if len(self.slaves) == 1 else None


@dataclass(frozen=True, slots=True)
class Route:
    """Broker groups of a subject. `version` is the optimistic lock of its row."""

    subject: str
    groups: tuple[str, ...]
    """Empty: an operator removed the route, and clients drop it."""
    version: int
    changed: int = 0
    """Version of all routes at which this one was written."""
    update_time_ms: int = 0


Routes = Mapping[str, Route]
"""Routes by subject. A route without groups counts as none."""


def has_route(routes: Routes, subject: str) -> bool:
    return subject in routes and bool(routes[subject].groups)


class ReadonlyMark(NamedTuple):
    """Readonly mark: producers of `subject` (or `*`) avoid a group."""

    subject: str
    group: str


class Offline(NamedTuple):
    """Consumers that an operator switched off; `*` in any place matches all."""

    subject: str
    group: str
    consumer: str


@dataclass(frozen=True, slots=True)
class SubjectInfo:
    """Subject that an operator announced, with the tag of the groups it prefers.

    Other subjects need no announcement.
    """

    name: str
    tag: str
    update_time_ms: int = 0


@dataclass(frozen=True)
class Directory:
    """Everything but routes, as of one transaction. Created by the repository."""

    groups: Mapping[str, Group] = field(default_factory=dict)
    marks: frozenset[ReadonlyMark] = frozenset()
    offline: frozenset[Offline] = frozenset()
    subjects: Mapping[str, SubjectInfo] = field(default_factory=dict)
    version: int = 0
    """Raised by each change of the content."""
    groups_version: int = -1
    """Differs after each change of groups and brokers; -1: unknown."""
    limits: frozenset[OperatorLimits] = frozenset()

    def beside(
        self,
        *,
        marks: frozenset[ReadonlyMark],
        offline: frozenset[Offline],
        limits: frozenset[OperatorLimits],
        subjects: Mapping[str, SubjectInfo],
        version: int,
    ) -> Directory:
        """Return the same groups and brokers with other marks, limits and subjects."""
        found = replace(self, marks=marks, offline=offline, limits=limits, subjects=subjects, version=version)
        found.__dict__["_by_key"] = self._by_key
        return found

    def brokers_affected(self, before: Directory) -> frozenset[BrokerKey]:
        """Return brokers with another assignment than in `before`: their group, its marks, offline consumers or
        limits.
        """
        if (self.offline, self.limits) != (before.offline, before.limits):
            return frozenset(self._by_key) | frozenset(before._by_key)
        names = {mark.group for mark in self.marks ^ before.marks}
        if self.groups is not before.groups:
            every = self.groups.keys() | before.groups.keys()
            names |= {name for name in every if self.groups.get(name) is not before.groups.get(name)}
        found = (directory.groups[name] for directory in (self, before) for name in names if name in directory.groups)
        return frozenset(broker.key for group in found for broker in group.brokers)

    def brokers(self) -> list[Broker]:
        return [broker for group in self.groups.values() for broker in group.brokers]

    def groups_of(self, kind: int) -> Mapping[str, Group]:
        return self._by_kind.get(kind, {})

    def find(self, key: BrokerKey) -> Broker | None:
        return self._by_key.get(key)

    def readonly_subjects(self, group: str) -> list[str]:
        return self._marks_by_group.get(group, [])

    @cached_property
    def _by_key(self) -> dict[BrokerKey, Broker]:
        return {broker.key: broker for broker in self.brokers()}

    @cached_property
    def _by_kind(self) -> dict[int, dict[str, Group]]:
        found: dict[int, dict[str, Group]] = {}
        for name, group in self.groups.items():
            found.setdefault(group.kind, {})[name] = group
        return found

    @cached_property
    def _marks_by_group(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for mark in sorted(self.marks):
            found.setdefault(mark.group, []).append(mark.subject)
        return found

    def is_marked(self, group: str, subject: str) -> bool:
        marks: frozenset[tuple[str, str]] = self.marks  # called for each group of each route: no new object for it
        return bool(marks) and ((subject, group) in marks or (ALL_SUBJECTS, group) in marks)


@dataclass(frozen=True, slots=True)
class PartedTail:
    """End of a slave's log that the master's log lacks; the slave confirmed it."""

    offset: int
    messages: tuple[tuple[str, int, int], ...]
    """(subject, first sequence, last sequence)."""


@dataclass(frozen=True, slots=True)
class ReplicaState:
    """State that a broker reports each second and when asked. Offsets are bytes of its message log."""

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
    incarnation: str = ""
    in_step: tuple[str, ...] = ()
    """From a master: incarnations of the slaves in sync."""
    point: Point | None = None
    """Newest acknowledged point of its copy."""
    in_sync: bool = False
    """From a slave: since its process began, it has reached the end of the log of this term's master."""
    promised_term: int = 0
    """Promised term: the broker follows no master of an older term, and is none."""
    last_term: int = 0
    last_boot: int = 0
    """Epoch of the last frame of its log."""
    incomplete: bool = False
    """Whether its copy never had everything of its master, by its own record."""
    fill_id: str = ""
    """Name of the current or next filling of its copy; empty from an older version."""
    clock_off_s: int = 0
    """Seconds by which its machine's clock differs from the metaserver's and other copies'."""
    lost_master: bool = False
    """From a slave: it was in sync, and has lost the connection to its master."""
    instance: str = ""
    """Name of its data directory at its place; empty from an older version."""
    quarantine_bytes: int = 0
    """Bytes of quarantined files."""
    quarantine_full: bool = False
    """Quarantine exceeds its bound, and only an operator may clear the rest."""
    parted: PartedTail | None = None
    """Divergence of a `diverged` slave, when asked."""
    known_term: int = 0
    """Newest term of a row that it has stored; 0 from an older version."""
    has_offsets: bool = True
    """False: read from a row or a snapshot, which have no current offsets; they are 0."""

    @property
    def reach(self) -> tuple[int, int, int]:
        """Sort key of copies with equal rules for their logs: the greatest copy has every frame."""
        return self.last_term, self.last_boot, self.flushed_end

    @property
    def newest_term(self) -> int:
        """Newest term that it proves: a slave may have stored a newer row than that of the master it follows."""
        return max(self.term, self.known_term)

    def is_master_in(self, term: int) -> bool:
        """Return whether this broker serves as the master of that term."""
        return self.role == Role.MASTER and self.term == term


@dataclass(frozen=True, slots=True)
class Points:
    """Acknowledged points that the copies of a group reported."""

    by_incarnation: Mapping[str, Point] = field(default_factory=dict)
    loss_accepted_term: int = 0
    """Term in which an operator accepted the loss of older points; 0: never."""


@dataclass(frozen=True, slots=True)
class SightingRow:
    """State of one broker's heartbeats, shared by all metaservers. Written when it changes, not with each heartbeat."""

    key: BrokerKey
    session: str
    """Random name of the heartbeat stream: the end of an older stream changes nothing."""
    metaserver: str
    """Metaserver that receives the stream."""
    incarnation: str
    up: bool
    state: ReplicaState | None = None
    """Part of the state that routes and roles depend on; offsets are not stored (`has_offsets`)."""
    begins: bool = False
    """When storing: this session replaces the stored one. False: it is stored only if it still is the newest."""
    changed: int = 0
    """Version of all sightings at which this one was written."""


@dataclass(frozen=True, slots=True)
class MetaserverRow:
    """A metaserver process that uses this database."""

    id: str
    """Random, made when the process starts."""
    http_address: str
    grpc_address: str
    beat: int
    """Raised about once a second. Readers measure its pauses with their own clocks."""
    version: str


@dataclass(frozen=True, slots=True)
class TokenRow:
    """API token; its secret is stored as a salted hash only."""

    id: str
    name: str
    role: str
    salt: str
    hash: str
    subjects: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    created_ms: int = 0
    expires_ms: int = 0
    """0: never."""
    revoked_ms: int = 0
    """0: valid."""


@dataclass(frozen=True, slots=True)
class AuditRow:
    """Audit row of one operator's action and its changes. `id` and `time_ms` are set when stored."""

    who: str
    peer: str
    action: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """Without secrets."""
    before: Any = None
    after: Any = None
    result: str = ""
    id: int = 0
    time_ms: int = 0


@dataclass(frozen=True, slots=True)
class DataSource:
    """Application's database that the watchdog scans, named by `url` (type://host:port/database)."""

    url: str
    user_name: str
    password: str
    room: str = "default"
    status: int = 0
    """QMQ's numbers: 0 online, -1 offline."""
    update_time_ms: int = 0
    table: str = "qmq_msg_queue"
    """Table, or schema.table."""
    rate: int = 10_000
    """Most rows that the watchdog sends per second."""
    age_s: int = 60
    """Age from which the watchdog sends a row; before, its application does."""


WATCHDOGS = "watchdog/"
"""Prefix of the names of watchdogs' leases; their room follows."""


@dataclass(frozen=True, slots=True)
class LeaseRow:
    """Lease `name` of one of several processes.

    The beat rises while the holder renews it, the term with each new holder.
    """

    name: str
    node: str
    """Unique to the process; empty: free."""
    term: int
    beat: int
    address: str = ""
    update_time_ms: int = 0


@dataclass(frozen=True, slots=True)
class ConsumerGroupRow:
    """Consumer group that began on a subject, and its begin on a broker group without a position of it."""

    subject: str
    group: str
    since_ms: int
    """On a member: begin with the first message stored at that time or later; 0: with the first one kept."""
    mark: str
    """Name under which members noted the subject's end before this row was stored; empty: none did."""
    members: tuple[str, ...]
    """Broker groups of the subject's route when this row was stored."""
    created_ms: int
    is_broadcast: bool = False
    """The group is one broadcast consumer with a fixed id, which every broker group forgets after an absence."""

    @property
    def key(self) -> tuple[str, str]:
        return self.subject, self.group
