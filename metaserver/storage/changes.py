"""Core. What operators change, one small value per kind of change.

`Repository.change` applies any number of them in one transaction: all or none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qmq.metaserver.model import Broker, BrokerKey, DataSource, Offline, ReadonlyMark, TokenRow
from qmq.metaserver.roles.rules import RoleChange
from qmq.operator_limits import OperatorLimits
from qmq.replication.assignment import FillOrder
from qmq.replication.points import Point


class Order:
    """A change that is under way. Any thread may look at it."""

    is_withdrawn = False
    """Set before somebody is told that it is unknown: what has not reached its commit by then, never does."""


@dataclass(frozen=True, slots=True)
class SetRoles:
    """Compare the term, raise it, set both roles at once. Raises StaleTerm."""

    change: RoleChange


@dataclass(frozen=True, slots=True)
class RememberPoint:
    """What a copy has that was chosen as the master of several counts as acknowledged."""

    group: str
    incarnation: str
    point: Point


@dataclass(frozen=True, slots=True)
class AcceptLoss:
    """An operator takes what was acknowledged before `term`, and the copy that stays lacks, for lost.

    It is told of until AcknowledgeLoss."""

    group: str
    term: int


@dataclass(frozen=True, slots=True)
class StoreAddresses:
    """Where a broker listens, as an operator says; its part stays. Raises NotThere."""

    broker: Broker


@dataclass(frozen=True, slots=True)
class OrderFill:
    """An operator allows or stops the filling of a slave's copy. Raises NotThere."""

    slave: BrokerKey
    order: FillOrder


@dataclass(frozen=True, slots=True)
class SetMark:
    """One that is there already stays. Raises UnknownGroup."""

    mark: ReadonlyMark


@dataclass(frozen=True, slots=True)
class UnsetMark:
    """None is fine too."""

    mark: ReadonlyMark


@dataclass(frozen=True, slots=True)
class SetRoute:
    """Compare the version, set the groups. Raises StaleVersion; UnknownGroup for one that is added."""

    subject: str
    groups: tuple[str, ...]
    version: int
    """Compared; 0: there must be no route yet."""


@dataclass(frozen=True, slots=True)
class RemoveRoute:
    """Compare the version, remove the route. Raises StaleVersion."""

    subject: str
    version: int


@dataclass(frozen=True, slots=True)
class ForgetConsumerGroups:
    """All consumer groups of a subject and of its retry and dead-letter subjects. None is fine too."""

    subject: str


@dataclass(frozen=True, slots=True)
class AddSubject:
    """Announce a subject with its tag. Raises AlreadyThere."""

    name: str
    tag: str


@dataclass(frozen=True, slots=True)
class DecidedOn:
    """Compare the version of the directory: the other changes are right only if nothing in it changed since. Raises
    StaleDirectory."""

    version: int


@dataclass(frozen=True, slots=True)
class NoRouteSince:
    """Compare the routes: none that lists `group`, and not `without`, was made or changed after this version of all of
    them; it would need the same change as the others. Raises StaleDirectory."""

    version: int
    group: str
    without: str = ""


@dataclass(frozen=True, slots=True)
class SetGroupState:
    """Set what is not None. Raises UnknownGroup."""

    group: str
    draining: bool | None = None
    full: bool | None = None
    tag: str | None = None
    lost_term: int | None = None
    failover: str | None = None
    sync_mode: str | None = None


@dataclass(frozen=True, slots=True)
class RemoveGroup:
    """Remove a group and its marks. Raises StaleTerm; GroupInUse while it has brokers or a route names it.

    Its term is remembered: should it come again, it goes on from there, so that no term ever has two masters.
    """

    group: str
    term: int


@dataclass(frozen=True, slots=True)
class ForgetGroup:
    """Leave a row that keeps the term of a group of which there is none: an operator decided that it is gone."""

    group: str
    term: int


@dataclass(frozen=True, slots=True)
class SetOffline:
    """One that is there already stays."""

    offline: Offline


@dataclass(frozen=True, slots=True)
class UnsetOffline:
    """None is fine too."""

    offline: Offline


@dataclass(frozen=True, slots=True)
class SetLimits:
    """In the place of those of the same subject and group."""

    limits: OperatorLimits


@dataclass(frozen=True, slots=True)
class AddDataSource:
    """One of the same url is overwritten."""

    source: DataSource


@dataclass(frozen=True, slots=True)
class RemoveDataSource:
    """Raises NotThere."""

    url: str


@dataclass(frozen=True, slots=True)
class AddToken:
    """Raises AlreadyThere for one of the same id."""

    token: TokenRow


@dataclass(frozen=True, slots=True)
class RevokeToken:
    """One that is revoked already stays as it is. Raises NotThere."""

    id: str


@dataclass(frozen=True, slots=True)
class RestoreAll:
    """Put what `Repository.dump` gave in the place of everything. Raises ValueRefused for what is no such thing.

    Terms never go back: a group's term becomes one more than the larger of the two; without a row it is the dump's.
    """

    dump: Mapping[str, Any]
    is_newer: bool = False
    """It is of a metaserver's memory, and the database is the old copy: its masters are the right ones."""


Change = (
    SetRoles
    | RememberPoint
    | AcceptLoss
    | StoreAddresses
    | OrderFill
    | SetMark
    | UnsetMark
    | SetRoute
    | RemoveRoute
    | ForgetConsumerGroups
    | AddSubject
    | DecidedOn
    | NoRouteSince
    | SetGroupState
    | RemoveGroup
    | SetOffline
    | UnsetOffline
    | SetLimits
    | AddDataSource
    | RemoveDataSource
    | AddToken
    | RevokeToken
    | ForgetGroup
    | RestoreAll
)
