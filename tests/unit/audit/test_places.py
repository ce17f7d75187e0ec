"""Shell. Two places are audited only if they are two brokers of the group, with any names."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest

from qmq.audit import places
from qmq.audit.copies import CannotRead, place_options
from qmq.audit.places import check_places, places_now
from qmq.proto import qmq_pb2, qmq_pb2_grpc
from qmq.types import Role
from tests.support.ports import free_ports
from tests.unit.audit.logs import LogWriter
from tests.unit.audit.served import serving


class Broker(qmq_pb2_grpc.BrokerServicer):  # type: ignore[misc]
    def __init__(self, **state: Any) -> None:
        self._state = qmq_pb2.BrokerState(**state)

    def ReplicaStatus(self, request: Any, context: grpc.ServicerContext) -> Any:
        return self._state


@pytest.fixture
def brokers() -> Iterator[Any]:
    with ExitStack() as stack:
        yield lambda *hosts, **state: stack.enter_context(serving(Broker(**state), *hosts))


def refusal(first: str, second: str) -> str:
    with pytest.raises(CannotRead) as refused:
        check_places("g1", {"master": place_options(first, ""), "slave": place_options(second, "")})
    return str(refused.value)


def test_alias_of_one_broker_is_refused(brokers: Any) -> None:
    first, second = brokers("127.0.0.1", "127.0.0.2", broker_group="g1", incarnation="abc", role=Role.MASTER)
    assert "one broker, abc, under two names" in refusal(first, second)


def test_broker_of_another_group_is_refused(brokers: Any) -> None:
    (first,) = brokers("127.0.0.1", broker_group="g1", incarnation="abc", role=Role.MASTER)
    (second,) = brokers("127.0.0.1", broker_group="g2", incarnation="def", role=Role.SLAVE)
    assert "is a broker of g2, not of g1" in refusal(first, second)


def test_two_masters_are_refused(brokers: Any) -> None:
    (first,) = brokers("127.0.0.1", broker_group="g1", incarnation="abc", role=Role.MASTER)
    (second,) = brokers("127.0.0.1", broker_group="g1", incarnation="def", role=Role.MASTER)
    assert "both places of g1 report to be its master" in refusal(first, second)
    (slave,) = brokers("127.0.0.1", broker_group="g1", incarnation="ghi", role=Role.SLAVE)
    check_places("g1", {"master": place_options(first, ""), "slave": place_options(slave, "")})


def write(data: Path, incarnation: str = "") -> str:
    log = LogWriter.begun(data)
    log.batch("s", 3)
    log.close()
    if incarnation:
        (data / "broker.json").write_text(json.dumps({"group": "g1", "incarnation": incarnation}))
    return str(data)


def test_copy_of_one_broker_is_no_other_broker(tmp_path: Path) -> None:
    first = write(tmp_path / "b1", "abc")
    shutil.copytree(first, tmp_path / "copy")
    assert "one broker, abc" in refusal(first, str(tmp_path / "copy"))
    check_places(
        "g1",
        {
            name: place_options(place, "")
            for name, place in (("master", first), ("slave", write(tmp_path / "b2", "def")))
        },
    )


def test_same_files_under_two_paths_are_refused(tmp_path: Path) -> None:
    first = write(tmp_path / "b1")
    (tmp_path / "linked" / "log").mkdir(parents=True)
    for path in (tmp_path / "b1" / "log").iterdir():
        os.link(path, tmp_path / "linked" / "log" / path.name)
    assert "share the file of the segment at 0" in refusal(first, str(tmp_path / "linked"))


def test_directory_and_its_running_broker_are_refused(tmp_path: Path, brokers: Any) -> None:
    (first,) = brokers("127.0.0.1", broker_group="g1", incarnation="abc", role=Role.MASTER)
    assert "one broker, abc" in refusal(first, write(tmp_path / "b1", "abc"))


def test_identity_that_cannot_be_read_is_no_proof(tmp_path: Path) -> None:
    first, second = write(tmp_path / "b1", "abc"), write(tmp_path / "b2")
    (tmp_path / "b2" / "broker.json").write_text("{")
    assert "broker.json" in refusal(first, second)


def test_places_follow_the_current_roles(brokers: Any) -> None:
    (first,) = brokers("127.0.0.1", incarnation="a", role=Role.SLAVE)
    (second,) = brokers("127.0.0.1", incarnation="b", role=Role.MASTER, in_step=["a"])
    old = {"master": place_options(first, ""), "slave": place_options(second, "")}
    assert places_now(old) == {"master": old["slave"], "slave": old["master"]}


@pytest.mark.parametrize(
    "role, in_step",
    [
        pytest.param(Role.MASTER, ["another"], id="the slave lacks something"),
        pytest.param(Role.SLAVE, [], id="no master"),
    ],
)
def test_unhealthy_brokers_have_no_places(brokers: Any, role: Role, in_step: list[str]) -> None:
    (first,) = brokers("127.0.0.1", incarnation="a", role=role, in_step=in_step)
    (second,) = brokers("127.0.0.1", incarnation="b", role=Role.SLAVE)
    assert places_now({"master": place_options(first, ""), "slave": place_options(second, "")}) is None


def test_absent_brokers_and_directories_have_no_places(brokers: Any, tmp_path: Path) -> None:
    (first,) = brokers("127.0.0.1", incarnation="a", role=Role.MASTER)
    [port] = free_ports(1)
    assert places_now({"master": place_options(first, ""), "slave": place_options(f"127.0.0.1:{port}", "")}) is None
    with pytest.raises(CannotRead, match="is a directory"):
        places_now({"master": place_options(str(tmp_path), ""), "slave": place_options(first, "")})


# Groups and places of an audit of the whole installation.


def row(group, role, port):
    return {"group": group, "role": role, "ip": "10.0.0.1", "controlPort": port}


def groups(monkeypatch, *rows):
    monkeypatch.setattr(places, "_list_brokers", lambda metaserver, token: list(rows))
    found = places.find_places("http://m", "t")
    return {name: {copy: place["broker"] for copy, place in places.items()} for name, places in found.items()}


def test_delay_groups_are_audited_like_broker_groups(monkeypatch):
    rows = [row("g1", "MASTER", 1), row("g1", "SLAVE", 2), row("d1", "DELAY_SLAVE", 4), row("d1", "DELAY_MASTER", 3)]
    assert groups(monkeypatch, *rows) == {
        "d1": {"master": "10.0.0.1:3", "slave": "10.0.0.1:4"},
        "g1": {"master": "10.0.0.1:1", "slave": "10.0.0.1:2"},
    }


def test_each_slave_of_a_group_is_a_copy(monkeypatch):
    rows = [row("g1", role, port) | {"name": f"b{port}"} for role, port in (("SLAVE", 3), ("MASTER", 1), ("SLAVE", 2))]
    assert groups(monkeypatch, *rows) == {"g1": {"master": "10.0.0.1:1", "slave": "10.0.0.1:2", "slave2": "10.0.0.1:3"}}


def test_group_with_one_copy_is_found(monkeypatch):
    """It cannot be proven, and does not affect other groups."""
    rows = [row("d1", "DELAY_MASTER", 3), row("g1", "MASTER", 1), row("g1", "SLAVE", 2)]
    assert groups(monkeypatch, *rows) == {
        "d1": {"master": "10.0.0.1:3"},
        "g1": {"master": "10.0.0.1:1", "slave": "10.0.0.1:2"},
    }


def test_an_installation_without_groups_cannot_be_audited(monkeypatch):
    with pytest.raises(CannotRead, match="has no broker group"):
        groups(monkeypatch)


def test_group_status_comes_from_the_metaserver(monkeypatch):
    rows = [
        {"groupName": "g1", "writable": True, "minCopies": 3, "why": []},
        {"groupName": "g2", "writable": False, "why": ["it has no slave"], "kind": "NORMAL"},
        {"groupName": "d1", "writable": True, "kind": "DELAY"},
    ]
    monkeypatch.setattr(places, "_list_groups", lambda metaserver, token: rows)
    assert places.find_group_status("http://m", "t") == {
        "g1": (3, (), False),
        "g2": (2, ("it has no slave",), False),
        "d1": (2, (), True),
    }
