"""Core. Subjects that operators chose for dead letters: which are allowed, and which broker groups must serve them.

A broker stores a dead letter in its own log, beside the ack of its original. So every broker group of the original's
subject must serve the dead letters' subject, or its consumers would not connect there.
"""

from __future__ import annotations

from collections.abc import Iterable

from qmq.metaserver.model import Routes, has_route
from qmq.metaserver.storage.changes import SetRoute
from qmq.operator_limits import OperatorLimits
from qmq.subjects import is_derived_name


def wider_routes(limits: Iterable[OperatorLimits], routes: Routes) -> list[SetRoute]:
    """Return the changes that extend routes to every group with dead letters of their subject.

    A subject without a route gets one with its next consumer, and is extended then.
    """
    wanted: dict[str, set[str]] = {}
    for limit in limits:
        if limit.subject in routes and has_route(routes, limit.dead_letters_to):
            wanted.setdefault(limit.dead_letters_to, set()).update(routes[limit.subject].groups)
    return [
        SetRoute(to, tuple(sorted(groups | set(routes[to].groups))), routes[to].version)
        for to, groups in wanted.items()
        if not groups <= set(routes[to].groups)
    ]


def sources_left(limits: Iterable[OperatorLimits], routes: Routes, subject: str, group: str) -> list[str]:
    """Return the subjects whose dead letters `group` stores in `subject`; the group must serve it while there are
    any.
    """
    sources = {limit.subject for limit in limits if limit.dead_letters_to == subject}
    return sorted(name for name in sources if name in routes and group in routes[name].groups)


def why_not(limits: Iterable[OperatorLimits], routes: Routes, after: OperatorLimits) -> list[str]:
    """Return why the dead letters may not go to the subject of `after`; `limits` are those of all subjects."""
    subject, to = after.subject, after.dead_letters_to
    if not to:
        return []
    if is_derived_name(subject) or is_derived_name(to):
        return ["retry and dead-letter subjects are brokers' own; name real ones"]
    if not has_route(routes, to):
        return [f"{to} has no route; it gets one with its first producer or consumer"]
    if subject in _reached(limits, to):
        return [f"dead letters would come back from {to} to {subject}, and in a circle"]
    return []


def _reached(limits: Iterable[OperatorLimits], subject: str) -> set[str]:
    """Return the subject, and those its messages may reach as dead letters of dead letters."""
    ways = [(limit.subject, limit.dead_letters_to) for limit in limits if limit.dead_letters_to]
    reached, new = {subject}, {subject}
    while new := {to for source, to in ways if source in new} - reached:
        reached |= new
    return reached
