"""Core. What the metaserver knows: brokers, groups, routes of subjects, marks, and what else its tables hold.

A `Directory` is one consistent reading of the database. It is never changed in place: who changes the database reads
a new one. What brokers report about themselves is not in it but in `metaserver.cluster.liveness`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from qmq.operator_limits import OperatorLimits
from qmq.replication.assignment import SyncMode
from qmq.replication.points import Point
from qmq.types import GroupKind, Role

COPIES_MAX = 5
"""Of a group, the master among them."""
ALL_SUBJECTS = "*"
"""As the subject of a readonly mark: the whole broker group."""
AS_SETTING = "default"
"""Of a group's failover: as the metaservers' setting says."""

NORMAL, DELAY = GroupKind.NORMAL.value, GroupKind.DELAY.value


class BrokerKey(NamedTuple):
    """Names a broker process: no two rows of the table share it."""

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
    """What operators call the role that a broker has in a group of this kind. To the broker, master is master."""
    return _PARTS[role, kind]


def role_and_kind(part: Role) -> tuple[Role, int]:
    """The inverse of `part`."""
    return next(key for key, value in _PARTS.items() if value == part)


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
    fill_id: str = ""
    """Of the newest filling of its copy that an operator spoke of (`qmq.replication.assignment`); empty: of none."""
    fill_allowed: bool = False
    """SyncReplica allowed that filling; else CancelSync stopped it."""
    instance: str = ""
    """Names that data directory at its place; a copy of it has another one. Another one gets the part in a new term."""
    kind: int = field(default=NORMAL, compare=False)
    """Its group's, which is stored and never changes."""

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
    """The first of ReplaceBroker's two calls put the slave into the master's place; the slave's place is vacant."""
    kind: int = NORMAL
    tag: str = ""
    """Subjects of the same tag prefer this group."""
    draining: bool = False
    """Producers keep away and no route takes it in: it is being emptied."""
    full: bool = False
    """New subjects keep away; those that use it go on."""
    min_copies: int = 2
    """So many of them, the master's among them, have a message on disk when it is acknowledged."""
    lost_term: int = 0
    """In this term an operator accepted a loss, and nobody said since that he knows of it; 0: there is none."""
    failover: str = AS_SETTING
    """`on`, `off` or `default`: whether it fails over by itself."""
    sync_mode: str = SyncMode.AUTOMATIC
    """Whether a slave that is not whole is filled by itself, or waits for SyncReplica."""

    @property
    def brokers(self) -> tuple[Broker, ...]:
        return self.slaves if self.master is None else (self.master, *self.slaves)

    @property
    def slave(self) -> Broker | None:
        """Its one slave; None: it has none, or several."""
        return self.slaves[0] if len(self.slaves) == 1 else None


@dataclass(frozen=True, slots=True)
class Route:
    """Broker groups of a subject. `version` is the optimistic lock of its row."""

    subject: str
    groups: tuple[str, ...]
    """Empty: an operator removed the route; a client that has it drops it."""
    version: int
    changed: int = 0
    """The version of all routes that this one was written with."""
    update_time_ms: int = 0


Routes = Mapping[str, Route]
"""By subject. One without groups counts as none."""


def has_route(routes: Routes, subject: str) -> bool:
    return subject in routes and bool(routes[subject].groups)


class ReadonlyMark(NamedTuple):
    """An operator keeps producers of `subject` (or `*`) away from a group."""

    subject: str
    group: str


class Offline(NamedTuple):
    """Consumers that an operator switched off; `*` in any place stands for all."""

    subject: str
    group: str
    consumer: str


@dataclass(frozen=True, slots=True)
class SubjectInfo:
    """A subject that an operator announced, with the tag of the groups it prefers. Others need no announcement."""

    name: str
    tag: str
    update_time_ms: int = 0


@dataclass(frozen=True)
class Directory:
    """All but routes, as of one transaction. Created by the repository."""

    groups: Mapping[str, Group] = field(default_factory=dict)
    marks: frozenset[ReadonlyMark] = frozenset()
    offline: frozenset[Offline] = frozenset()
    subjects: Mapping[str, SubjectInfo] = field(default_factory=dict)
    version: int = 0
    """Raised by each change of what is in here."""
    groups_version: int = -1
    """Another one after each change of groups and brokers; -1: not known."""
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
        """The same groups and brokers, with other things beside them."""
        found = replace(self, marks=marks, offline=offline, limits=limits, subjects=subjects, version=version)
        found.__dict__["_by_key"] = self._by_key
        return found

    def told_anew(self, before: Directory) -> frozenset[BrokerKey]:
        """Brokers that must be told of the difference: of their group, its marks, consumers that are off, or limits."""
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
        marks: frozenset[tuple[str, str]] = self.marks  # asked for each group of each route: no new object for it
        return bool(marks) and ((subject, group) in marks or (ALL_SUBJECTS, group) in marks)


@dataclass(frozen=True, slots=True)
class PartedTail:
    """The end of a slave's log that its master's does not have; the slave confirmed it."""

    offset: int
    messages: tuple[tuple[str, int, int], ...]
    """(subject, first sequence, last sequence)."""


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
    incarnation: str = ""
    in_step: tuple[str, ...] = ()
    """A master's words: incarnations of the slaves whose copies are in step with its own."""
    point: Point | None = None
    """The newest acknowledged point that its copy knows."""
    in_sync: bool = False
    """A slave's words: since its process began, it has reached the end of the log of this term's master."""
    promised_term: int = 0
    """It follows no master of an older term, and is none."""
    last_term: int = 0
    last_boot: int = 0
    """Of its log's last frame."""
    incomplete: bool = False
    """Its copy never had all that its master had, as far as it wrote down."""
    fill_id: str = ""
    """Names the filling that its copy is in or that comes next; empty from a version that does not say it."""
    clock_off_s: int = 0
    """By so many seconds its machine's clock is ahead of the metaserver's and of other copies', or behind them."""
    lost_master: bool = False
    """A slave's words: it was in sync, and does not hear its master now."""
    instance: str = ""
    """Names its data directory at its place; empty from a version that does not say it."""
    quarantine_bytes: int = 0
    """Bytes that left its log and are kept."""
    quarantine_full: bool = False
    """They are more than its bound, and what is left is an operator's to clear."""
    parted: PartedTail | None = None
    """Of a slave that is `diverged`, when it was asked."""
    known_term: int = 0
    """Without a part: the newest term that it had written down when it registered."""

    @property
    def reach(self) -> tuple[int, int, int]:
        """Of copies whose logs grew by the same rules, the one with the most has everything."""
        return self.last_term, self.last_boot, self.flushed_end

    def is_master_in(self, term: int) -> bool:
        """Whether this broker is at work as the master of that term."""
        return self.role == Role.MASTER and self.term == term


@dataclass(frozen=True, slots=True)
class Points:
    """What the copies of a group said to be acknowledged."""

    by_incarnation: Mapping[str, Point] = field(default_factory=dict)
    loss_accepted_term: int = 0
    """In this term an operator accepted that what older points say is lost; 0: never."""


@dataclass(frozen=True, slots=True)
class SightingRow:
    """What all metaservers know about one broker's heartbeats. Written when it changes, not with each heartbeat."""

    key: BrokerKey
    session: str
    """Names the heartbeat stream, at random: the end of an older one changes nothing."""
    metaserver: str
    """Where the stream ends."""
    incarnation: str
    up: bool
    state: ReplicaState | None = None
    """What matters to routes and roles; its offsets are not stored and read as 0."""
    begins: bool = False
    """As an order to store: this session replaces whatever is there. Else it only goes on if it still is the newest."""
    changed: int = 0
    """The version of all sightings that this one was written with."""


@dataclass(frozen=True, slots=True)
class MetaserverRow:
    """A metaserver process that uses this database."""

    id: str
    """Random, made at its start."""
    http_address: str
    grpc_address: str
    beat: int
    """Raised about once a second. Readers time it with their own clocks."""
    version: str


@dataclass(frozen=True, slots=True)
class TokenRow:
    """An API token; what is secret about it is stored only as a salted hash."""

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
    """0: it is valid."""


@dataclass(frozen=True, slots=True)
class AuditRow:
    """One operator's action, as it is written down with what it changed. `id` and `time_ms` are given when stored."""

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
    """A client's database that the watchdog looks after. `url` (type://host:port/database) names it."""

    url: str
    user_name: str
    password: str
    room: str = "default"
    status: int = 0
    """QMQ's numbers: 0 online, -1 offline."""
    update_time_ms: int = 0
    table: str = "qmq_msg_queue"
    """Or schema.table."""
    rate: int = 10_000
    """Rows a second that the watchdog sends at most."""
    age_s: int = 60
    """A row is the watchdog's once it is that old; before, its application sends it."""


WATCHDOGS = "watchdog/"
"""What the names of watchdogs' leases begin with; their room follows."""


@dataclass(frozen=True, slots=True)
class LeaseRow:
    """Who of several processes acts under `name`. The beat rises while the holder lives, the term with each holder."""

    name: str
    node: str
    """Unique to the process; empty: nobody holds it."""
    term: int
    beat: int
    address: str = ""
    update_time_ms: int = 0


@dataclass(frozen=True, slots=True)
class ConsumerGroupRow:
    """A consumer group that began on a subject, and where it begins on a broker group on which it has no position."""

    subject: str
    group: str
    since_ms: int
    """On a member: begin with the first message stored at that time or later; 0: with the first that is kept."""
    mark: str
    """Under which members noted where the subject ended before this row was stored; empty: they noted nothing."""
    members: tuple[str, ...]
    """Broker groups of the subject's route when this row was stored."""
    created_ms: int

    @property
    def key(self) -> tuple[str, str]:
        return self.subject, self.group
