"""Core. Which broker groups serve a subject, and which of them take messages now.

A new subject gets every group that takes messages; should that be fewer than `groups_min`, other groups are added,
so that a subject which was born during an outage is not tied to one group for ever. Consumers keep every group of
the route whatever its state: only `writable` says where to produce.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from metaserver.liveness import Liveness
from metaserver.model import Directory, Group


@dataclass(frozen=True, slots=True)
class GroupRoute:
    """One group of a subject's route, as a client sees it."""

    group: Group
    writable: bool


def choose_groups(
    subject: str, current: Iterable[str], directory: Directory, liveness: Liveness, *, groups_min: int, now_ms: int
) -> tuple[str, ...]:
    """Return the groups that the route of `subject` should list, sorted: `current`, and more where they are too few.

    Args:
        current: groups the route lists now, empty for a new subject. They always stay: they may hold messages.
        groups_min: a route with at least so many existing groups is left alone.

    Returns:
        Names of groups; empty when there is no broker group at all.
    """
    kept = set(current)
    known = {name for name in kept if name in directory.groups}
    if known and len(known) >= groups_min:
        return tuple(sorted(kept))
    candidates = {name: group for name, group in directory.groups.items() if group.master and name not in known}
    taking = {
        name
        for name, group in candidates.items()
        if liveness.is_writable(group, now_ms=now_ms) and not directory.is_marked(name, subject)
    }
    missing = groups_min - len(known) - len(taking)
    others = sorted(candidates.keys() - taking, key=lambda name: (directory.is_marked(name, subject), name))
    return tuple(sorted(kept | taking | set(others[: max(missing, 0)])))


def route_for_clients(
    subject: str, groups: Iterable[str], directory: Directory, liveness: Liveness, *, now_ms: int
) -> list[GroupRoute]:
    """Return the route as clients get it: every group that exists and has a master, with whether it takes messages."""
    known = (directory.groups[name] for name in groups if name in directory.groups)
    return [
        GroupRoute(
            group,
            liveness.is_writable(group, now_ms=now_ms) and not directory.is_marked(group.name, subject),
        )
        for group in known
        if group.master is not None
    ]
