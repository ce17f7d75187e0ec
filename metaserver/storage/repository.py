"""Shell. Every query and change of the metaserver's database; each method is one transaction.

The methods block; the loop calls them on a thread. They compare and set, and hold no rule of routing or roles.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, assert_never

from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import IntegrityError

from qmq.metaserver.model import (
    AuditRow,
    Broker,
    ConsumerGroupRow,
    DataSource,
    Directory,
    LeaseRow,
    MetaserverRow,
    Points,
    Route,
    SightingRow,
    TokenRow,
)
from qmq.metaserver.storage import backup, groups, heartbeats, operators, routes
from qmq.metaserver.storage import changes as c
from qmq.metaserver.storage.changes import Change, Order, StaleDirectory, Withdrawn
from qmq.metaserver.storage.routes import RouteOrder
from qmq.metaserver.storage.sql import (
    DIRECTORY,
    ROUTES,
    SIGHTINGS,
    BadRows,
    Transactions,
    groups_version,
    leave_groups,
    raise_versions,
    read_versions,
)
from qmq.replication.identity import Point


class Repository:
    """The metaserver's tables. Created by main with an engine of `open_database`; any thread may call it.

    After any error nothing was changed, except CommitUnknown: then read before acting.
    """

    def __init__(self, engine: Engine) -> None:
        self._transactions = Transactions(engine)
        self.bad_rows = BadRows()

    # -- cluster ----------------------------------------------------------------------------------------------------

    def ping(self) -> None:
        """Raise if the database does not answer."""
        self._transactions.read(lambda connection: connection.execute(text("SELECT 1")))

    def versions(self) -> dict[str, int]:
        """Return the versions of `directory`, `routes` and `sightings`, each raised by its changes, and of
        `beside_groups`.
        """
        return self._transactions.read(read_versions)

    def load(self, known: Directory | None = None) -> Directory:
        """Read groups, brokers, marks, subjects and offline consumers as of one moment; routes are separate.

        Args:
            known: an earlier reading. Unchanged groups keep their objects; without any change they are not read.
        """
        return self._transactions.read(lambda connection: self._load(connection, known or Directory()))

    def _load(self, connection: Connection, known: Directory) -> Directory:
        versions = read_versions(connection)
        if groups_version(versions) != known.groups_version:
            read = groups.load_groups(connection, self.bad_rows)
            same = {name: group for name, group in known.groups.items() if read.get(name) == group}
            known = Directory(groups=read | same, groups_version=groups_version(versions))
        return known.beside(
            marks=operators.load_marks(connection),
            offline=operators.load_offline(connection),
            limits=operators.load_limits(connection),
            subjects=operators.load_subjects(connection),
            version=versions[DIRECTORY],
        )

    def group_names(self) -> frozenset[str]:
        """Return the names of all groups that ever had a row, removed and invalid ones too."""
        return self._transactions.read(groups.all_names)

    def load_routes(self, after: int = 0) -> tuple[int, list[Route]]:
        """Return the version of all routes and those that changed after `after`; with 0, all.

        A route without groups was removed. Such rows are deleted after a month: then read all.
        """
        return self._transactions.read(
            lambda connection: (
                read_versions(connection)[ROUTES],
                routes.load_routes(connection, after, self.bad_rows),
            )
        )

    def store_routes(self, orders: Sequence[RouteOrder]) -> list[Route]:
        """Create or change routes, each by compare-and-set on its version (0: none yet), in one transaction.

        Returns:
            The stored routes afterwards, in this order. A route without groups: none of its groups exists.
        """
        if not orders:
            return []
        return self._transactions.write(
            lambda connection: routes.store_routes(
                connection, orders, raise_versions(connection, ROUTES)[0], self.bad_rows
            )
        )

    # -- brokers ----------------------------------------------------------------------------------------------------

    def store_registration(self, broker: Broker, before: Broker | None = None) -> None:
        """Store a broker's registration; with `before`, only if its row still equals it.

        Raises:
            StaleTerm: it does not. NotThere: the broker was removed.
        """

        def work(connection: Connection) -> None:
            raise_versions(connection, DIRECTORY)
            groups.store_registration(connection, broker, before)

        self._transactions.write(work)

    def store_complete(self, broker: Broker, *, term: int, complete: bool) -> None:
        """Store whether a slave is complete, unless its role or its disk changed meanwhile."""

        def work(connection: Connection) -> None:
            raise_versions(connection, DIRECTORY)
            groups.store_complete(connection, broker, term=term, complete=complete)

        self._transactions.write(work)

    def load_sightings(self, after: int = 0) -> tuple[int, list[SightingRow]]:
        """Return the version of all sightings and those that changed after `after`; with 0, all."""
        return self._transactions.read(
            lambda connection: (
                read_versions(connection)[SIGHTINGS],
                heartbeats.load_sightings(connection, after, self.bad_rows),
            )
        )

    def store_sightings(self, rows: Sequence[SightingRow]) -> None:
        """Store the rows that begin a session or belong to the stored one; leave out others."""

        def work(connection: Connection) -> None:
            heartbeats.store_sightings(connection, rows, raise_versions(connection, SIGHTINGS)[0])

        if rows:
            self._transactions.write(work)

    def load_points(self, group: str) -> Points:
        """Return the acknowledged points of the group's copies."""
        return self._transactions.read(lambda connection: heartbeats.load_points(connection, group))

    def store_points(self, rows: Mapping[tuple[str, str], Point]) -> None:
        """Store the point of each (group, incarnation), unless a newer one is stored."""
        self._transactions.write(lambda connection: heartbeats.store_points(connection, rows))

    # -- metaservers ------------------------------------------------------------------------------------------------

    def beat(self, row: MetaserverRow) -> tuple[list[MetaserverRow], dict[str, int], int | None]:
        """Write this metaserver's row; return all rows, the `versions`, and the counter before; None: there was
        no row.
        """

        def work(connection: Connection) -> tuple[list[MetaserverRow], dict[str, int], int | None]:
            rows = {metaserver.id: metaserver for metaserver in heartbeats.load_metaservers(connection)}
            heartbeats.store_beat(connection, row)
            before = rows[row.id].beat if row.id in rows else None
            return list((rows | {row.id: row}).values()), read_versions(connection), before

        return self._transactions.write(work)

    def look(self) -> tuple[set[str], dict[str, int]]:
        """Return the ids of all metaservers with a row, and the `versions`, which are empty if there is none."""
        return self._transactions.read(heartbeats.look)

    def load_metaservers(self) -> list[MetaserverRow]:
        return self._transactions.read(heartbeats.load_metaservers)

    def remove_metaserver(self, id: str) -> None:
        """Remove the row of a metaserver that stopped, or has been silent for long."""
        self._transactions.write(lambda connection: heartbeats.remove_metaserver(connection, id))

    # -- operators --------------------------------------------------------------------------------------------------

    def change(self, changes: Iterable[Change], audit: AuditRow | None = None, order: Order | None = None) -> None:
        """Apply all changes and add their audit row, in one transaction; nothing if `order` is withdrawn.

        Raises:
            OperatorError, InvalidName: one of them is refused, so all are. CommitUnknown: read, then decide.
        """
        listed = list(changes)

        def work(connection: Connection) -> None:
            apply_all(connection, listed)
            if audit is not None:
                operators.add_audit(connection, audit)
            if order is not None and order.is_withdrawn:
                raise Withdrawn("the database took too long, and the change was given up")

        self._transactions.write(work)

    def settle(self) -> None:
        """Wait until every pending change is stored or gone, by waiting for its locks.

        A change that has not begun, on a hanging thread for instance, holds no lock: withdraw it first.
        """

        def work(connection: Connection) -> None:
            raise_versions(connection, DIRECTORY, ROUTES)
            leave_groups(connection)

        self._transactions.write(work)

    def load_tokens(self) -> list[TokenRow]:
        """Read all tokens; they belong to the version `directory`."""
        return self._transactions.read(lambda connection: operators.load_tokens(connection, self.bad_rows))

    def audit_trail(
        self,
        before: int | None = None,
        limit: int = 100,
        *,
        who: str = "",
        action: str = "",
        since_ms: int = 0,
        until_ms: int = 0,
        about: Iterable[str] = (),
    ) -> list[AuditRow]:
        """Return audit rows, the newest first, with an id below `before`; `about`: names that each row must contain."""
        return self._transactions.read(
            lambda connection: operators.load_audit(
                connection,
                before=before,
                limit=limit,
                who=who,
                action=action,
                since_ms=since_ms,
                until_ms=until_ms,
                about=about,
            )
        )

    def data_sources(self) -> list[DataSource]:
        return self._transactions.read(operators.load_data_sources)

    def hold_lease(self, wish: LeaseRow, *, take: bool, release: bool) -> LeaseRow:
        """Keep, take or release a lease; return its row afterwards (see `storage.heartbeats`)."""
        return self._transactions.write(
            lambda connection: heartbeats.hold_lease(connection, wish, take=take, release=release)
        )

    def leases(self) -> list[LeaseRow]:
        return self._transactions.read(heartbeats.load_leases)

    # -- consumer groups --------------------------------------------------------------------------------------------

    def consumer_groups(self, keys: Iterable[tuple[str, str]]) -> dict[tuple[str, str], ConsumerGroupRow]:
        """Return the existing rows of these (subject, consumer group) keys."""
        listed = list(keys)
        return self._transactions.read(lambda connection: routes.load_consumer_groups(connection, listed))

    def consumer_groups_of(self, subject: str) -> list[ConsumerGroupRow]:
        """Return all consumer groups of a subject; of an empty name, of all subjects."""
        return self._transactions.read(lambda connection: routes.load_consumer_groups_of(connection, subject))

    def broadcasts(self, before_ms: int, after: tuple[str, str], rows_max: int) -> list[ConsumerGroupRow]:
        """Return rows of broadcast consumers that were stored before this time, with keys after `after`, in order."""
        return self._transactions.read(
            lambda connection: routes.load_broadcasts(connection, before_ms, after, rows_max)
        )

    def store_consumer_groups(
        self, rows: Sequence[ConsumerGroupRow], replaced: Sequence[ConsumerGroupRow] = ()
    ) -> None:
        """Store new rows in place of `replaced`; none at all if one of them has a row already.

        Read afterwards to get the rows that count, whichever metaserver stored them.
        """
        try:
            self._transactions.write(lambda connection: routes.store_consumer_groups(connection, rows, replaced))
        except IntegrityError:
            pass  # another metaserver was first

    def dump(self) -> dict[str, Any]:
        """Return all tables as a JSON value that `RestoreAll` takes."""
        return self._transactions.read(backup.dump)


LEAVE_GROUPS = (
    c.DecidedOn,
    c.NoRouteSince,
    c.SetMark,
    c.UnsetMark,
    c.SetRoute,
    c.RemoveRoute,
    c.ForgetConsumerGroups,
    c.AddSubject,
    c.SetOffline,
    c.UnsetOffline,
    c.SetLimits,
    c.AddDataSource,
    c.RemoveDataSource,
    c.AddToken,
    c.RevokeToken,
)
"""Changes that leave groups and brokers as they are."""


def apply_all(connection: Connection, changes: Sequence[c.Change]) -> None:
    """Apply all changes in order; an error ends the transaction, and nothing was changed."""
    # A transaction that changes no versioned row takes a lock too, as `settle` waits for locks.
    touched = sorted({name for change in changes for name in _touches(change)} or {DIRECTORY})
    versions = dict(zip(touched, raise_versions(connection, *touched), strict=True))
    if DIRECTORY in touched and all(isinstance(change, LEAVE_GROUPS) for change in changes):
        leave_groups(connection)
    for change in changes:
        _compare(connection, change, versions)
    changed = versions.get(ROUTES, 0)
    for kind, some in groupby(changes, type):
        if kind is c.SetRoute:
            routes.set_routes(connection, [_order(change) for change in some], changed)
        elif kind is c.RemoveRoute:
            removed = [(change.subject, change.version) for change in some if isinstance(change, c.RemoveRoute)]
            routes.remove_routes(connection, removed, changed)
        else:
            for change in some:
                _apply(connection, change, changed)


def _compare(connection: Connection, change: c.Change, raised: Mapping[str, int]) -> None:
    match change:
        case c.DecidedOn():
            is_stale = change.version + 1 != raised[DIRECTORY]
        case c.NoRouteSince():
            is_stale = routes.is_listed_since(connection, change.version, change.group, without=change.without)
        case _:
            is_stale = False
    if is_stale:
        raise StaleDirectory


def _touches(change: c.Change) -> tuple[str, ...]:
    match change:
        case c.SetRoute() | c.RemoveRoute() | c.NoRouteSince() | c.ForgetConsumerGroups():
            return (ROUTES,)
        case c.RemoveGroup():
            return (DIRECTORY, ROUTES)  # no route may add the group meanwhile
        case c.SetRoles():
            return (DIRECTORY, SIGHTINGS)
        case c.RestoreAll():
            return (DIRECTORY, ROUTES)
        case _:
            return (DIRECTORY,)


def _apply(connection: Connection, change: c.Change, routes_version: int) -> None:
    match change:
        case c.SetRoles():
            groups.set_roles(connection, change.change)
        case c.RememberPoint():
            heartbeats.store_points(connection, {(change.group, change.incarnation): change.point})
        case c.AcceptLoss():
            heartbeats.accept_loss(connection, change.group, change.term)
            groups.set_state(connection, change.group, lost_term=change.term)
        case c.StoreAddresses():
            groups.store_addresses(connection, change.broker)
        case c.OrderFill():
            groups.store_fill_order(connection, change.slave, change.order)
        case c.SetMark():
            operators.set_mark(connection, change.mark)
        case c.UnsetMark():
            operators.unset_mark(connection, change.mark)
        case c.SetRoute() | c.RemoveRoute():
            raise AssertionError("many in one statement, see apply_all")
        case c.ForgetConsumerGroups():
            routes.forget_consumer_groups(connection, change.subject, change.group)
        case c.AddSubject():
            operators.add_subject(connection, change.name, change.tag)
        case c.DecidedOn() | c.NoRouteSince():
            pass  # compared before any change
        case c.SetGroupState():
            _set_group_state(connection, change)
        case c.RemoveGroup():
            groups.remove_group(connection, change.group, change.term)
        case c.ForgetGroup():
            groups.forget_group(connection, change.group, change.term)
        case c.SetOffline():
            operators.set_offline(connection, change.offline)
        case c.UnsetOffline():
            operators.unset_offline(connection, change.offline)
        case c.SetLimits():
            operators.set_limits(connection, change.limits)
        case c.AddDataSource():
            operators.add_data_source(connection, change.source)
        case c.RemoveDataSource():
            operators.remove_data_source(connection, change.url)
        case c.AddToken():
            operators.add_token(connection, change.token)
        case c.RevokeToken():
            operators.revoke_token(connection, change.id)
        case c.RestoreAll():
            backup.restore(connection, change.dump, routes_version, is_newer=change.is_newer)
        case _:
            assert_never(change)


def _order(change: c.Change) -> routes.RouteOrder:
    assert isinstance(change, c.SetRoute)
    return change.subject, change.groups, change.version


def _set_group_state(connection: Connection, change: c.SetGroupState) -> None:
    given = {"draining": change.draining, "is_full": change.full, "tag": change.tag, "lost_term": change.lost_term}
    given |= {"failover": change.failover, "sync_mode": change.sync_mode}
    groups.set_state(connection, change.group, **{name: value for name, value in given.items() if value is not None})
