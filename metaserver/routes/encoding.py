"""Core. Routes as bytes on the wire, encoded once for all clients, from the present state of each broker group.

The bytes equal protobuf's deterministic serialization: fields in the order of their numbers. They are joined by hand
because the bytes of a broker group are the same in all routes.

    RouteUpdate    08 varint(version)   12 varint(length) SubjectRoute   12 …
    SubjectRoute   0a length subject    12 length BrokerGroupRoute …     1a length refused    21 version, 8 bytes LE
                   2a length refused_code

A route's version is the BLAKE2b hash (8 bytes, little-endian) of the SubjectRoute without its version, so it is equal
at every metaserver. 0 stands for "none"; a hash of 0 becomes 1.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

from qmq.metaserver.model import ALL_SUBJECTS, DELAY, NORMAL, Broker, Directory, Group, ReadonlyMark
from qmq.metaserver.routes.placement import IsWritable, takes_messages
from qmq.proto import qmq_pb2 as pb


class RouteBytes(NamedTuple):
    """One encoded route."""

    version: int
    data: bytes
    """Field `RouteUpdate.routes` with its key and length."""

    @property
    def message(self) -> pb.SubjectRoute:
        """The route, decoded."""
        return pb.RouteUpdate.FromString(self.data).routes[0]


class GroupBytes(NamedTuple):
    """Encoded field `SubjectRoute.groups` of one broker group."""

    writable: bytes
    readonly: bytes


def group_bytes(group: Group) -> GroupBytes:
    def field(writable: bool) -> bytes:
        route = pb.BrokerGroupRoute(
            broker_group=group.name, master=_address(group.master), writable=writable, term=group.term
        )
        return _field(b"\x12", route.SerializeToString(deterministic=True))

    return GroupBytes(field(True), field(False))


MISSING_RIGHT = "MISSING_RIGHT"
"""`SubjectRoute.refused_code` of a subject that the token may not use."""


def route_bytes(subject: str, groups: Iterable[bytes] = (), refused: str = "", code: str = "") -> RouteBytes:
    """Encode a route of groups' fields; `refused` and `code`: the reason for an empty one, for people and programs."""
    content = (_field(b"\x0a", subject.encode()) if subject else b"") + b"".join(groups)
    if refused:
        content += _field(b"\x1a", refused.encode("utf-8", "replace"))
    refused_code = _field(b"\x2a", code.encode()) if code else b""
    version = blake2b(content + refused_code, digest_size=8).digest()
    if version == bytes(8):
        version = b"\x01" + bytes(7)
    return RouteBytes(int.from_bytes(version, "little"), _field(b"\x12", content + b"\x21" + version + refused_code))


def update_bytes(version: int, routes: Iterable[RouteBytes]) -> bytes:
    """Encode a RouteUpdate."""
    return b"\x08" + _varint(version) + b"".join([route.data for route in routes])


def _field(key: bytes, content: bytes) -> bytes:
    return key + _varint(len(content)) + content


def _varint(number: int) -> bytes:
    groups = bytearray()
    while number > 0x7F:
        groups.append(number & 0x7F | 0x80)
        number >>= 7
    groups.append(number)
    return bytes(groups)


def _address(broker: Broker | None) -> pb.BrokerAddress | None:
    if broker is None:
        return None
    return pb.BrokerAddress(
        ip=broker.ip,
        serve_port=broker.serve_port,
        sync_port=broker.sync_port,
        control_port=broker.control_port,
        metrics_port=broker.metrics_port,
    )


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
    """Whether it accepts messages of subjects without a readonly mark."""


class GroupViews:
    """All groups of one kind as clients see them. Made by the hub, which calls `look` after changes."""

    def __init__(self, kind: int) -> None:
        self._kind = kind
        self._views: dict[str, _View] = {}
        self.state = 0
        """Raised by each change."""

    def look(self, directory: Directory, is_writable: IsWritable) -> list[str]:
        """Apply the present groups; return the names of those that clients see differently."""
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
        """Encode the route of a subject under the requested name; return it, its groups, and the writable ones."""
        fields, offered = [], []
        for group in groups:
            if view := self._views.get(group):
                writable = view.writable and ReadonlyMark(real, group) not in directory.marks
                fields.append(view.data.writable if writable else view.data.readonly)
                if writable:
                    offered.append(group)
        return route_bytes(name, fields, "" if fields else NO_GROUP[self._kind]), groups, tuple(offered)

    def has_more_than(self, groups: tuple[str, ...]) -> bool:
        """Return whether there is a group that could extend a route of these."""
        return len(self._views) > len(groups) or not self._views.keys() <= set(groups)


def _shown(group: Group) -> object:
    """Return the part of a group that clients see, besides whether it is writable."""
    return group.term, group.master
