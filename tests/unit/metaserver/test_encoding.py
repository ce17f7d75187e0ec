"""Core. Routes as bytes: equal to protobuf's, under a version that depends on the content."""

from __future__ import annotations

from hashlib import blake2b
from random import Random

import pytest

from qmq.metaserver.model import Broker, Group
from qmq.metaserver.routes.encoding import group_bytes, route_bytes, update_bytes
from qmq.proto import qmq_pb2 as pb
from qmq.types import Role


def group(name, term=3, port=1):
    return Group(name, term, Broker(name, Role.MASTER, name, "10.0.0.1", port, port + 1, 5, 6), (), 0)


@pytest.mark.parametrize("seed", range(50))
def test_bytes_equal_protobuf(seed):
    rng = Random(seed)
    groups = [group(f"g{number}" * rng.randint(1, 40), rng.randint(0, 1 << 40)) for number in range(rng.randint(0, 60))]
    flags = [rng.random() < 0.5 for _ in groups]
    subject, refused = "süß" * rng.randint(1, 50), rng.choice(["", "no group", "x" * 500])
    code = rng.choice(["", "MISSING_RIGHT"])
    fields = [bytes_.writable if flag else bytes_.readonly for bytes_, flag in zip(map(group_bytes, groups), flags)]
    route = route_bytes(subject, fields, refused, code)
    message = pb.SubjectRoute(
        subject=subject,
        refused=refused,
        refused_code=code,
        groups=[
            pb.BrokerGroupRoute(
                broker_group=each.name,
                term=each.term,
                writable=flag,
                master=pb.BrokerAddress(ip="10.0.0.1", serve_port=1, sync_port=2, control_port=5, metrics_port=6),
            )
            for each, flag in zip(groups, flags)
        ],
    )
    digest = blake2b(message.SerializeToString(deterministic=True), digest_size=8).digest()
    message.version = int.from_bytes(digest, "little")
    assert route.message == message and route.version == message.version
    update = update_bytes(1 << 41, [route, route])
    assert update == pb.RouteUpdate(version=1 << 41, routes=[message, message]).SerializeToString(deterministic=True)


def test_version_depends_on_content_only():
    fields = [group_bytes(group("g1")).writable]
    version = route_bytes("s", fields).version
    assert version == route_bytes("s", [group_bytes(group("g1")).writable]).version != 0
    others = [
        route_bytes("t", fields),
        route_bytes("s", [group_bytes(group("g1")).readonly]),
        route_bytes("s", [group_bytes(group("g1", term=4)).writable]),
        route_bytes("s", [group_bytes(group("g1", port=9)).writable]),
        route_bytes("s", fields * 2),
        route_bytes("s", fields, "no"),
        route_bytes("s", fields, "no", "MISSING_RIGHT"),
    ]
    assert len({version, *(other.version for other in others)}) == 8
