"""Core. How each broker group looks to clients at this moment, and routes made of that."""

from __future__ import annotations

from dataclasses import dataclass

from qmq.metaserver.model import ALL_SUBJECTS, DELAY, NORMAL, Directory, Group, ReadonlyMark
from qmq.metaserver.route_bytes import GroupBytes, RouteBytes, group_bytes, route_bytes
from qmq.metaserver.routing import IsWritable, takes_messages

NO_GROUP = {
    NORMAL: "none of the subject's broker groups has a master now; ListSubjectRoutes and ListBrokers show them",
    DELAY: "there is no group of delay servers with a master, which takes delayed messages; AddBroker with roles 5 and "
    "6 adds one",
}


@dataclass(slots=True)
class _View:
    group: Group
    data: GroupBytes
    writable: bool
    """Whether it takes messages of subjects that nobody marked."""


class GroupViews:
    """All groups of one kind as clients see them; `look` takes them in. Made by the hub."""

    def __init__(self, kind: int) -> None:
        self._kind = kind
        self._views: dict[str, _View] = {}
        self.state = 0
        """Raised with each change, so that one can tell whether anything is new since."""

    def look(self, directory: Directory, is_writable: IsWritable) -> list[str]:
        """Take in how the groups are now; return the names of those that look different."""
        groups = directory.groups_of(self._kind)
        changed = [name for name in self._views if name not in groups or groups[name].master is None]
        for name in changed:
            del self._views[name]
        for name, group in groups.items():
            if group.master is None:
                continue
            view, writable = self._views.get(name), takes_messages(group, ALL_SUBJECTS, directory, is_writable)
            if view is None or (view.group is not group and _shown(view.group) != _shown(group)):
                self._views[name] = _View(group, group_bytes(group), writable)
                changed.append(name)
                continue
            view.group = group
            if view.writable != writable:
                view.writable = writable
                changed.append(name)
        if changed:
            self.state += 1
        return changed

    def route(
        self, name: str, real: str, groups: tuple[str, ...], directory: Directory
    ) -> tuple[RouteBytes, tuple[str, ...], tuple[str, ...]]:
        """Make the route of a subject under the name that was asked for; with its groups, and those that are open."""
        fields, offered = [], []
        for group in groups:
            if view := self._views.get(group):
                writable = view.writable and ReadonlyMark(real, group) not in directory.marks
                fields.append(view.data.writable if writable else view.data.readonly)
                if writable:
                    offered.append(group)
        return route_bytes(name, fields, "" if fields else NO_GROUP[self._kind]), groups, tuple(offered)

    def has_more_than(self, groups: tuple[str, ...]) -> bool:
        """Whether there is a group that a route of these could be extended by."""
        return len(self._views) > len(groups) or not self._views.keys() <= set(groups)


def _shown(group: Group) -> object:
    """What clients see of a group, besides whether it is writable."""
    return group.term, group.master
