"""Shell. The file from which a metaserver starts while the database is away."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import islice

import pytest

from qmq.metaserver.cluster.snapshot import BadSnapshot, Snapshot, read_snapshot, write_snapshot
from qmq.metaserver.model import (
    Broker,
    BrokerKey,
    Directory,
    Group,
    Offline,
    ReadonlyMark,
    ReplicaState,
    Route,
    SightingRow,
    SubjectInfo,
    TokenRow,
)
from qmq.metaserver.storage.engine import name_of
from qmq.operator_limits import OperatorLimits
from qmq.types import Role

MASTER = Broker("g1", Role.MASTER, "a", "10.0.0.1", 1, 2, 3, 4, "disk a")
SLAVE = Broker("g1", Role.SLAVE, "b", "10.0.0.2", 1, 2, 3, 4, "disk b", complete=True)
STATE = ReplicaState(0, 7, readonly_reasons=("disk",), has_offsets=False)
SNAPSHOT = Snapshot(
    "sqlite:///m.db",
    1234,
    Directory(
        {"g1": Group("g1", 7, MASTER, (SLAVE,), 99, tag="pay", draining=True), "g2": Group("g2", 1, None, (), 1)},
        frozenset({ReadonlyMark("*", "g1"), ReadonlyMark("é subject", "g1")}),
        frozenset({Offline("*", "group", "*")}),
        {"s": SubjectInfo("s", "pay", 5)},
        version=42,
        limits=frozenset({OperatorLimits("s", "*", expires_after_s=60, expired_die=True)}),
    ),
    {"s": Route("s", ("g1", "g2"), 3, 17, 8)},
    17,
    [
        SightingRow(MASTER.key, "m1.1", "m1", "disk a", True, STATE),
        SightingRow(BrokerKey("b", 1), "m1.2", "m1", "disk b", False),
    ],
    [TokenRow("id", "name", "viewer", "salt", "hash", ("a*",), ("g1",), 1, 2, 3)],
)


@pytest.fixture
def path(tmp_path):
    """A file with the snapshot."""
    write_snapshot(tmp_path / "snapshot", SNAPSHOT)
    return tmp_path / "snapshot"


def test_snapshot_round_trip(path, tmp_path):
    assert read_snapshot(path, database="sqlite:///m.db") == SNAPSHOT
    write_snapshot(path, SNAPSHOT)
    assert [file.name for file in tmp_path.iterdir()] == ["snapshot"]


def test_shared_snapshot_is_never_damaged(tmp_path):
    path = tmp_path / "snapshot"
    routes = {f"s{number}": Route(f"s{number}", ("g1",), 1, 1) for number in range(3_000)}
    sizes = [replace(SNAPSHOT, routes=dict(islice(routes.items(), count))) for count in (10, 1_000, 3_000)]

    def write(snapshot):
        for _ in range(10):
            write_snapshot(path, snapshot)
            read_snapshot(path, database="sqlite:///m.db")

    with ThreadPoolExecutor(len(sizes)) as threads:
        for written in threads.map(write, sizes):
            assert written is None
    assert os.listdir(tmp_path) == ["snapshot"]


def test_failed_write_keeps_the_old_snapshot(path, tmp_path, monkeypatch):
    whole = path.read_bytes()

    def full(_):
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space left"):
        write_snapshot(path, SNAPSHOT)
    assert path.read_bytes() == whole and os.listdir(tmp_path) == ["snapshot"]


def test_snapshot_is_readable_by_owner_only(path):
    assert path.stat().st_mode & 0o077 == 0


def test_damaged_snapshot_is_detected(path):
    whole = path.read_bytes()
    for place in range(0, len(whole) - 1, 7):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(BadSnapshot):
            read_snapshot(path, database="sqlite:///m.db")
        path.write_bytes(whole[:place])
        with pytest.raises(BadSnapshot):
            read_snapshot(path, database="sqlite:///m.db")


def test_file_of_another_database_or_version_is_refused(path):
    with pytest.raises(BadSnapshot, match="of the database"):
        read_snapshot(path, database="sqlite:///other.db")
    head, _, body = path.read_bytes().partition(b"\n")
    path.write_bytes(json.dumps(json.loads(head) | {"qmq_snapshot": 99}).encode() + b"\n" + body)
    with pytest.raises(BadSnapshot, match="version 99"):
        read_snapshot(path, database="sqlite:///m.db")


def test_tls_is_no_part_of_a_database_name():
    """A snapshot made before a change of TLS counts."""
    assert (
        name_of("postgresql://u:p@h/d?sslmode=require&application_name=x")
        == "postgresql://u:***@h/d?application_name=x"
    )
