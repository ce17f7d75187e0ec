"""Shell. Carries out operators' changes, one after the other, on a connection whose transaction the caller ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import assert_never

from sqlalchemy import Connection

from qmq.metaserver.db import backup, consumer_groups, groups, operators, points, routes, tokens
from qmq.metaserver.db import changes as c
from qmq.metaserver.db.errors import StaleDirectory
from qmq.metaserver.db.transactions import DIRECTORY, ROUTES, SIGHTINGS, leave_groups, raise_versions

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
"""Changes after which each group and each broker is as before."""


def apply_all(connection: Connection, changes: Sequence[c.Change]) -> None:
    """Apply all changes; whatever one of them raises ends the transaction, and nothing was changed."""
    # One that only writes down what happened elsewhere takes its place in the line, too: `settle` waits for it.
    touched = sorted({name for change in changes for name in _touches(change)} or {DIRECTORY})
    versions = dict(zip(touched, raise_versions(connection, *touched), strict=True))
    if DIRECTORY in touched and all(isinstance(change, LEAVE_GROUPS) for change in changes):
        leave_groups(connection)
    for change in changes:
        _compare(connection, change, versions)
    changed = versions.get(ROUTES, 0)
    for are_routes, some in groupby(changes, lambda change: isinstance(change, c.SetRoute)):
        if are_routes:
            routes.set_routes(connection, [_order(change) for change in some], changed)
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
            return (DIRECTORY, ROUTES)  # no route may take the group in at this moment
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
            points.store_points(connection, {(change.group, change.incarnation): change.point})
        case c.AcceptLoss():
            points.accept_loss(connection, change.group, change.term)
            groups.set_state(connection, change.group, lost_term=change.term)
        case c.StoreAddresses():
            groups.store_addresses(connection, change.broker)
        case c.OrderFill():
            groups.store_fill_order(connection, change.slave, change.order)
        case c.SetMark():
            operators.set_mark(connection, change.mark)
        case c.UnsetMark():
            operators.unset_mark(connection, change.mark)
        case c.SetRoute():
            routes.set_routes(connection, [_order(change)], routes_version)
        case c.RemoveRoute():
            routes.remove_route(connection, change.subject, change.version, routes_version)
        case c.ForgetConsumerGroups():
            consumer_groups.forget(connection, change.subject)
        case c.AddSubject():
            operators.add_subject(connection, change.name, change.tag)
        case c.DecidedOn() | c.NoRouteSince():
            pass  # compared before anything was changed
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
            tokens.add_token(connection, change.token)
        case c.RevokeToken():
            tokens.revoke_token(connection, change.id)
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
