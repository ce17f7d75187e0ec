"""Core. Reports from heartbeats that are not stored yet: acknowledged points, and completeness of slaves."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from qmq.metaserver.model import Broker, BrokerKey, Group, Points, ReplicaState
from qmq.metaserver.roles import rules
from qmq.replication.identity import Point
from qmq.types import NO_EPOCH

AWAY_MS = 10_000
"""A slave of several stays in sync in the row while it is away for less than this. On its return it confirms new
messages at once; after a power cut before the database stored that, the restarted master would not wait for it.
"""
NO_POINT = Point(NO_EPOCH, 0, 0)


class Reports:
    """Reports to store. Made by the registry; `Upkeep` stores them."""

    def __init__(self) -> None:
        self.completeness: dict[BrokerKey, tuple[Broker, int, bool]] = {}
        """Slaves with another completeness than in the row, with the term and the value that the master reported."""
        self._away_since: dict[BrokerKey, int] = {}
        """Begin of the time in which masters report slaves as not in sync while the row has them in sync."""
        self.points: dict[tuple[str, str], Point] = {}
        """Reported points that are not stored yet, by group and incarnation."""
        self._stored_points: dict[tuple[str, str], Point] = {}
        """Points that were stored."""

    def note_point(self, group: str, state: ReplicaState) -> bool:
        """Keep the point of a heartbeat; return whether it must be stored."""
        place = group, state.incarnation
        if state.point is None or state.point == self._stored_points.get(place):
            return False
        self.points[place] = state.point
        return True

    def points_are_stored(self, points: Mapping[tuple[str, str], Point]) -> None:
        """Drop stored points, except those with a newer report."""
        self._stored_points |= points
        for place, point in points.items():
            if self.points.get(place) == point:
                del self.points[place]

    def store_points_again(self) -> None:
        """Let the next heartbeats' points be stored again: the database may have been restored."""
        self._stored_points.clear()

    def forget_groups(self, groups: Collection[str]) -> None:
        """Drop the points of removed groups: a new group of the same name lacks those messages."""
        for place in [place for place in self.points if place[0] in groups]:
            del self.points[place]

    def newest_points(self, group: str, stored: Points) -> Points:
        """Return the stored points of a group, each replaced by a newer one that was reported here."""
        here = {
            incarnation: point
            for (name, incarnation), point in self.points.items()
            if name == group and point.epoch.term >= stored.loss_accepted_term
        }
        newer = {name: point for name, point in here.items() if point > stored.by_incarnation.get(name, NO_POINT)}
        return replace(stored, by_incarnation={**stored.by_incarnation, **newer})

    def note_completeness(self, group: Group, key: BrokerKey, state: ReplicaState, *, now_ms: int) -> bool:
        """Keep the completeness of slaves that a heartbeat reports; return whether any of it must be stored."""
        has_news = False
        for slave in group.slaves:
            complete = rules.slave_complete(group, slave, key, state) if slave.incarnation else None
            if complete is None:
                continue
            if not complete and key != slave.key and slave.complete:
                if now_ms - self._away_since.setdefault(slave.key, now_ms) < AWAY_MS:
                    continue
            else:
                self._away_since.pop(slave.key, None)
            if slave.complete == complete:
                self.completeness.pop(slave.key, None)
                continue
            self.completeness[slave.key] = (slave, group.term, complete)
            has_news = True
        return has_news
