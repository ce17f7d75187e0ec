"""Core. Operators' changes as values, one class per kind, and the errors of the database, by the caller's next step.

`Repository.change` applies any number of changes in one transaction: all or none. Errors of the driver during reads, or
before a commit, pass as SQLAlchemy's: nothing was changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qmq.errors import OperatorError, OutcomeUnknown
from qmq.metaserver.model import Broker, BrokerKey, DataSource, Offline, ReadonlyMark, TokenRow
from qmq.metaserver.roles.rules import RoleChange
from qmq.operator_limits import OperatorLimits
from qmq.replication.assignment import FillOrder
from qmq.replication.identity import Point


class Order:
    """Permission to commit a pending change. Any thread may read it."""

    is_withdrawn = False
    """Set before the outcome is reported as unknown: a change that has not reached its commit by then never does."""


@dataclass(frozen=True, slots=True)
class SetRoles:
    """Compare the term, raise it, set all roles at once. Raises StaleTerm."""

    change: RoleChange


@dataclass(frozen=True, slots=True)
class RememberPoint:
    """Store the log end of a promoted copy, one of several, as acknowledged."""

    group: str
    incarnation: str
    point: Point


@dataclass(frozen=True, slots=True)
class AcceptLoss:
    """Accept the loss of messages acknowledged before `term` that the remaining copy lacks.

    Doctor shows it until AcknowledgeLoss.
    """

    group: str
    term: int


@dataclass(frozen=True, slots=True)
class StoreAddresses:
    """Set a broker's addresses; its role stays. Raises NotThere."""

    broker: Broker


@dataclass(frozen=True, slots=True)
class OrderFill:
    """Allow or stop the filling of a slave's copy. Raises NotThere."""

    slave: BrokerKey
    order: FillOrder


@dataclass(frozen=True, slots=True)
class SetMark:
    """Set a mark; an existing one stays. Raises UnknownGroup."""

    mark: ReadonlyMark


@dataclass(frozen=True, slots=True)
class UnsetMark:
    """Remove a mark, if there is one."""

    mark: ReadonlyMark


@dataclass(frozen=True, slots=True)
class SetRoute:
    """Compare the version, set the groups. Raises StaleVersion; UnknownGroup for an added one."""

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
    """Remove all consumer groups of a subject and of its retry and dead-letter subjects, or the named one."""

    subject: str
    group: str = ""


@dataclass(frozen=True, slots=True)
class AddSubject:
    """Announce a subject with its tag. Raises AlreadyThere."""

    name: str
    tag: str


@dataclass(frozen=True, slots=True)
class DecidedOn:
    """Compare the version of the directory: the other changes hold only for this one. Raises StaleDirectory."""

    version: int


@dataclass(frozen=True, slots=True)
class NoRouteSince:
    """Compare the routes: since this version no route with `group` and without `without` was made or changed.

    Such a route would need the same change as the others. Raises StaleDirectory.
    """

    version: int
    group: str
    without: str = ""


@dataclass(frozen=True, slots=True)
class SetGroupState:
    """Set the fields that are not None. Raises UnknownGroup."""

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

    Its term is kept: a new group of this name continues from it, so no term ever has two masters.
    """

    group: str
    term: int


@dataclass(frozen=True, slots=True)
class ForgetGroup:
    """Store only the term of a lost group: an operator decided that the group is gone."""

    group: str
    term: int


@dataclass(frozen=True, slots=True)
class SetOffline:
    """Switch consumers off; an existing row stays."""

    offline: Offline


@dataclass(frozen=True, slots=True)
class UnsetOffline:
    """Switch consumers on again."""

    offline: Offline


@dataclass(frozen=True, slots=True)
class SetLimits:
    """Replace the limits of a subject and group."""

    limits: OperatorLimits


@dataclass(frozen=True, slots=True)
class AddDataSource:
    """Add a data source, or replace the one with this url."""

    source: DataSource


@dataclass(frozen=True, slots=True)
class RemoveDataSource:
    """Remove a data source. Raises NotThere."""

    url: str


@dataclass(frozen=True, slots=True)
class AddToken:
    """Add a token. Raises AlreadyThere for its id."""

    token: TokenRow


@dataclass(frozen=True, slots=True)
class RevokeToken:
    """Revoke a token; a revoked one is unchanged. Raises NotThere."""

    id: str


@dataclass(frozen=True, slots=True)
class RestoreAll:
    """Replace everything by a dump of `Repository.dump`. Raises ValueRefused for an invalid one.

    Terms never decrease: a group's term becomes one more than the larger of the two; without a row it is the dump's.
    """

    dump: Mapping[str, Any]
    is_newer: bool = False
    """The dump is a metaserver's memory and the database an older copy: the dump's masters are right."""


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


class DatabaseUnusable(Exception):
    """This database must not be used as it is. The text holds the reason and the remedy."""


class CommitUnknown(OutcomeUnknown):
    """The connection broke during a commit: the change is stored as a whole or not at all. Read, then decide."""


class Withdrawn(OperatorError):
    """The change was withdrawn before its commit, and not stored."""


class StaleTerm(OperatorError):
    """The group changed since it was read. Nothing was stored; read, then decide again."""

    def __init__(self, group: str) -> None:
        super().__init__(f"another change of {group} came first; look at its brokers, then repeat")


class StaleVersion(OperatorError):
    """The route changed since it was read. Nothing was stored; read, then decide again."""

    def __init__(self, subject: str) -> None:
        super().__init__(f"another change of the route of {subject} came first; look at it, then repeat")


class StaleDirectory(OperatorError):
    """Groups, marks or routes changed since they were read. Nothing was stored; decide again."""

    def __init__(self) -> None:
        super().__init__("another change of groups, marks or routes came first; look at them, then repeat")


class ValueRefused(OperatorError):
    """A value does not fit its column: too long, too large, or text that databases would alter. It is never cut."""


class UnknownGroup(OperatorError):
    """A route or a mark names a broker group that does not exist."""

    def __init__(self, group: str) -> None:
        super().__init__(f"there is no broker group {group}; ListBrokerGroups names them")


class GroupInUse(OperatorError):
    """A broker group that has brokers, or that routes name, cannot be removed."""


class AlreadyThere(OperatorError):
    """The row to add exists. The text shows it."""


class NotThere(OperatorError):
    """The row to change or remove does not exist."""
