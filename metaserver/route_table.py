"""Core. The stored routes as they are known, and what is to be stored for subjects whose route is missing or short."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from qmq.metaserver.model import Directory, Route
from qmq.metaserver.routing import IsWritable, Loads, Placement, is_short

RouteOrder = tuple[str, tuple[str, ...], int]
"""Subject, groups, and the version of the route that they replace; 0: there is none."""


class RouteTable:
    """Made by the registry."""

    def __init__(self, *, groups_min: int, groups_new: int) -> None:
        self._groups_min, self._groups_new = groups_min, groups_new
        self._known: dict[str, Route] = {}
        self._loads = Loads()
        self.known: Mapping[str, Route] = self._known
        """By subject, always the same object."""

    def take(self, routes: Iterable[Route], *, all_of_them: bool = False) -> None:
        """Know these routes; those without groups are gone."""
        routes = list(routes)
        if all_of_them:
            gone = self._known.keys() - {route.subject for route in routes}
            routes += [replace(self._known[subject], groups=()) for subject in gone]
        for route in routes:
            before = self._known.get(route.subject)
            if before is not None and before.version > route.version and not all_of_them:
                continue  # what was just stored may be read late
            self._loads.moved(route.subject, before.groups if before else (), route.groups)
            if route.groups:
                self._known[route.subject] = route
            else:
                self._known.pop(route.subject, None)

    def of_groups(self, groups: Iterable[str]) -> dict[str, Route]:
        """The routes that list one of these groups, by subject."""
        return {subject: self._known[subject] for group in groups for subject in self._loads.of(group)}

    def is_short(self, subject: str, groups: Iterable[str], directory: Directory) -> bool:
        return is_short(subject, groups, directory, groups_min=self._groups_min)

    def orders(
        self, subjects: Iterable[str], directory: Directory, is_writable: IsWritable, stored_bytes: Mapping[str, int]
    ) -> list[RouteOrder]:
        """What is to be stored so that none of these subjects lacks a route or has too short a one, as far as there
        are groups for it."""
        placement: Placement | None = None
        orders = []
        for subject in dict.fromkeys(subjects):
            route = self._known.get(subject)
            groups = route.groups if route else ()
            if route and not self.is_short(subject, groups, directory):
                continue
            placement = placement or Placement(
                directory,
                is_writable,
                self._loads,
                groups_min=self._groups_min,
                groups_new=self._groups_new,
                stored_bytes=stored_bytes,
            )
            chosen = placement.choose(subject, groups)
            if chosen and set(chosen) != set(groups):
                orders.append((subject, chosen, route.version if route else 0))
        return orders
