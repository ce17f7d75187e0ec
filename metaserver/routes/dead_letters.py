"""Core. The subjects that operators chose for dead letters: which may be, and which broker groups have to serve them.

A broker stores a dead letter in its own log, beside the ack of its original. So the subject that it goes to is served
by each broker group of the subject that it comes from, or its consumers would never ask there.
"""

from __future__ import annotations

from collections.abc import Iterable

from qmq.metaserver.model import Routes, has_route
from qmq.metaserver.storage.changes import SetRoute
from qmq.operator_limits import OperatorLimits
from qmq.subjects import is_derived_name


def wider_routes(limits: Iterable[OperatorLimits], routes: Routes) -> list[SetRoute]:
    """Return the changes after which all dead letters are where consumers of their subjects ask for them.

    A subject whose route was removed is left alone: it gets another one with its next consumer, and is wider then.
    """
    wanted: dict[str, set[str]] = {}
    for one in limits:
        if one.subject in routes and has_route(routes, one.dead_letters_to):
            wanted.setdefault(one.dead_letters_to, set()).update(routes[one.subject].groups)
    return [
        SetRoute(to, tuple(sorted(groups | set(routes[to].groups))), routes[to].version)
        for to, groups in wanted.items()
        if not groups <= set(routes[to].groups)
    ]


def sources_left(limits: Iterable[OperatorLimits], routes: Routes, subject: str, group: str) -> list[str]:
    """Return the subjects whose dead letters `group` stores in `subject`: as long as there are any, it serves that."""
    sources = {one.subject for one in limits if one.dead_letters_to == subject}
    return sorted(name for name in sources if name in routes and group in routes[name].groups)


def why_not(limits: Iterable[OperatorLimits], routes: Routes, after: OperatorLimits) -> list[str]:
    """Say why dead letters may not go where `after` has them go; `limits` are those of all subjects."""
    subject, to = after.subject, after.dead_letters_to
    if not to:
        return []
    if is_derived_name(subject) or is_derived_name(to):
        return ["retry and dead-letter subjects are brokers' own; name real ones"]
    if not has_route(routes, to):
        return [f"{to} has no route; it gets one with its first producer or consumer"]
    if subject in _reached(limits, to):
        return [f"dead letters would come back from {to} to {subject}, and go round for ever"]
    return []


def _reached(limits: Iterable[OperatorLimits], subject: str) -> set[str]:
    """Return the subject, and those that messages of it may get to by dying, over others."""
    ways = [(one.subject, one.dead_letters_to) for one in limits if one.dead_letters_to]
    reached, new = {subject}, {subject}
    while new := {to for source, to in ways if source in new} - reached:
        reached |= new
    return reached
