"""Core. Begin of a consumer group on a broker group that has no position of it (decision 80).

A consumer group begins once in the cluster, when its row is stored. No broker group begins after a message that was
stored since: one that joined the route later begins with its first message.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from qmq.metaserver.model import ConsumerGroupRow, Route
from qmq.subjects import real_subject

CLOCKS_MS = 60_000
"""Largest assumed difference of clocks. A member that could not note the subject's end gets the messages of this span
again.
"""
STALE_MS = 3_600_000
"""A broadcast consumer's row of this age is replaced, or removed, if no broker group has a position: brokers forget
absent consumers.
"""

EXPECTED_MAX = 10_000
"""Consumer groups in one request to a broker."""


class NewGroup(NamedTuple):
    """Consumer group without a position on the broker group that asks."""

    subject: str
    group: str
    latest: bool
    since_ms: int
    broadcast: bool

    @property
    def key(self) -> tuple[str, str]:
        return self.subject, self.group


class Begin(NamedTuple):
    """Begin at the first message stored at `since_ms` or later (0: at the first one), or at the place noted under
    `mark`.
    """

    since_ms: int
    mark: str
    began_ms: int
    """Time from which the group gets every message."""


def begin_at(row: ConsumerGroupRow, broker_group: str) -> Begin:
    """Return the begin of a group on a broker group that has no position of it."""
    began_ms = max(row.created_ms, row.since_ms)
    return Begin(row.since_ms, row.mark, began_ms) if broker_group in row.members else Begin(0, "", began_ms)


def new_row(group: NewGroup, members: Iterable[str], *, is_known: bool, mark: str, now_ms: int) -> ConsumerGroupRow:
    """Make the row of a group that has none.

    Args:
        is_known: a broker group has a position: the group began before rows existed, or its row was lost.
        mark: name under which members noted the ends of their subjects, after `now_ms`.
    """
    if is_known:
        return ConsumerGroupRow(*group.key, 0, "", (), now_ms, group.broadcast)
    since_ms = max(now_ms - CLOCKS_MS, 1) if group.latest else group.since_ms
    noted = mark if group.latest else ""
    return ConsumerGroupRow(*group.key, since_ms, noted, tuple(sorted(members)), now_ms, group.broadcast)


def to_store(
    groups: Iterable[NewGroup], rows: Mapping[tuple[str, str], ConsumerGroupRow], *, now_ms: int
) -> list[NewGroup]:
    """Return the groups without a row, and the broadcast consumers that every broker group may have forgotten."""

    def is_stale(group: NewGroup) -> bool:
        return group.broadcast and now_ms - rows[group.key].created_ms > STALE_MS

    return list({group.key: group for group in groups if group.key not in rows or is_stale(group)}.values())


def expected_at(
    rows: Iterable[ConsumerGroupRow], routes: Mapping[str, Route], broker_group: str, subject: str = ""
) -> list[tuple[ConsumerGroupRow, Begin]]:
    """Return the consumer groups that may lack a position on a broker group of their subject's route.

    Without a subject: only groups that began before the broker group joined the route; members have positions.
    """

    def is_expected(row: ConsumerGroupRow) -> bool:
        route = routes.get(real_subject(row.subject))
        serves = route is not None and broker_group in route.groups
        return serves and (real_subject(row.subject) == subject or broker_group not in row.members)

    found = [(row, begin_at(row, broker_group)) for row in rows if is_expected(row)]
    return found[:EXPECTED_MAX]
