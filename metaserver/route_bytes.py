"""Core. A route as bytes on the wire, written once however many clients get it.

The bytes are those that protobuf's own deterministic serialization makes: fields in the order of their numbers. They
are joined by hand because most of a route is known before: what it says of a broker group is the same in all routes.

    RouteUpdate    08 varint(version)   12 varint(length) SubjectRoute   12 …
    SubjectRoute   0a length subject    12 length BrokerGroupRoute …     1a length refused    21 version, 8 bytes LE

A route's version is the BLAKE2b hash (8 bytes, little-endian) of the SubjectRoute without its version: a name of its
content, the same at every metaserver. 0 stands for "none", so a hash of 0 becomes 1.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from typing import NamedTuple

from qmq.metaserver.model import Broker, Group
from qmq.proto import qmq_pb2 as pb


class RouteBytes(NamedTuple):
    """One route, ready to be put into an update."""

    version: int
    data: bytes
    """The field `RouteUpdate.routes` with its key and length."""

    @property
    def message(self) -> pb.SubjectRoute:
        """The route as protobuf reads it."""
        return pb.RouteUpdate.FromString(self.data).routes[0]


class GroupBytes(NamedTuple):
    """What routes say of one broker group: the field `SubjectRoute.groups`."""

    writable: bytes
    readonly: bytes


def group_bytes(group: Group) -> GroupBytes:
    def field(writable: bool) -> bytes:
        route = pb.BrokerGroupRoute(
            broker_group=group.name, master=_address(group.master), writable=writable, term=group.term
        )
        return _field(b"\x12", route.SerializeToString(deterministic=True))

    return GroupBytes(field(True), field(False))


def route_bytes(subject: str, groups: Iterable[bytes] = (), refused: str = "") -> RouteBytes:
    """Join a route of groups' fields; `refused` says why it has none."""
    content = (_field(b"\x0a", subject.encode()) if subject else b"") + b"".join(groups)
    if refused:
        content += _field(b"\x1a", refused.encode("utf-8", "replace"))
    version = blake2b(content, digest_size=8).digest()
    if version == bytes(8):
        version = b"\x01" + bytes(7)
    return RouteBytes(int.from_bytes(version, "little"), _field(b"\x12", content + b"\x21" + version))


def update_bytes(version: int, routes: Iterable[RouteBytes]) -> bytes:
    """A RouteUpdate."""
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
