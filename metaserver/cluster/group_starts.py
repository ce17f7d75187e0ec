"""Core. Where a consumer group begins on a broker group on which it has no position (decision 80).

A consumer group begins once in the cluster, when its row is stored. Later it begins nowhere behind a message that was
stored since: on a broker group that was no member of the route then, it begins with the first message.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from qmq.metaserver.model import ConsumerGroupRow, Route
from qmq.subjects import real_subject

CLOCKS_MS = 60_000
"""By how much clocks of metaservers and brokers may differ. A member that could not note where a subject ended delivers
so much more."""
STALE_MS = 3_600_000
"""A broadcast consumer's row is made anew if it is older and no member has a position: brokers forget absent ones."""

EXPECTED_MAX = 10_000
"""Consumer groups in one question to a broker."""


class Asked(NamedTuple):
    """A consumer group that has no position on the broker group that asks."""

    subject: str
    group: str
    latest: bool
    since_ms: int
    broadcast: bool

    @property
    def key(self) -> tuple[str, str]:
        return self.subject, self.group


class Begin(NamedTuple):
    """Begin with the first message stored at `since_ms` or later (0: with the first), or where `mark` was noted."""

    since_ms: int
    mark: str
    began_ms: int
    """From then on the group gets everything."""


def begin_at(row: ConsumerGroupRow, broker_group: str) -> Begin:
    """Return where the group begins on a broker group that lacks its position."""
    began_ms = max(row.created_ms, row.since_ms)
    return Begin(row.since_ms, row.mark, began_ms) if broker_group in row.members else Begin(0, "", began_ms)


def new_row(asked: Asked, members: Iterable[str], *, is_known: bool, mark: str, now_ms: int) -> ConsumerGroupRow:
    """Return the row of a group that has none.

    Args:
        is_known: a broker group has a position of it: it began before rows were kept, or the row was lost.
        mark: under which members noted where their subjects end; they did so after `now_ms`.
    """
    if is_known:
        return ConsumerGroupRow(*asked.key, 0, "", (), now_ms)
    since_ms = max(now_ms - CLOCKS_MS, 1) if asked.latest else asked.since_ms
    return ConsumerGroupRow(*asked.key, since_ms, mark if asked.latest else "", tuple(sorted(members)), now_ms)


def to_store(asked: Iterable[Asked], rows: Mapping[tuple[str, str], ConsumerGroupRow], *, now_ms: int) -> list[Asked]:
    """Return the groups whose row is missing, or may be of a broadcast consumer that every broker group forgot."""

    def is_stale(one: Asked) -> bool:
        return one.broadcast and now_ms - rows[one.key].created_ms > STALE_MS

    return list({one.key: one for one in asked if one.key not in rows or is_stale(one)}.values())


def expected_at(
    rows: Iterable[ConsumerGroupRow], routes: Mapping[str, Route], broker_group: str, subject: str = ""
) -> list[tuple[ConsumerGroupRow, Begin]]:
    """Return the consumer groups that may have no position on a broker group of their subject's route.

    Of all subjects at once only those for which the broker group joined later: members have positions.
    """

    def is_expected(row: ConsumerGroupRow) -> bool:
        route = routes.get(real_subject(row.subject))
        serves = route is not None and broker_group in route.groups
        return serves and (real_subject(row.subject) == subject or broker_group not in row.members)

    found = [(row, begin_at(row, broker_group)) for row in rows if is_expected(row)]
    return found[:EXPECTED_MAX]
