"""Shell. A cluster's ports and token are chosen once, from free ones, and kept."""

from __future__ import annotations

import json
import socket
import stat
import tomllib
from dataclasses import asdict

import pytest

from qmq.deploy.plan import HOST, Groups, load_plan, write_settings
from qmq.errors import NotServed
from qmq.metaserver.actions.context import Vault
from tests.support.ports import run_of_ports


@pytest.fixture
def first():
    return run_of_ports()


@pytest.fixture
def busy_port():
    """A port in use."""
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        listener.listen()
        yield listener.getsockname()[1]


def test_every_process_has_ports_of_its_own(tmp_path, first):
    plan = load_plan(tmp_path / "plan.json", Groups(("g1", "g2")), first, first)
    assert len(plan.ports) == len(set(plan.ports)) == 2 + 4 * 4
    assert [(broker.group, broker.hostname, broker.role) for broker in plan.brokers] == [
        ("g1", "g1-a", 0),
        ("g1", "g1-b", 1),
        ("g2", "g2-a", 0),
        ("g2", "g2-b", 1),
    ]


def test_a_port_in_use_is_passed_over(tmp_path, first):
    port = load_plan(tmp_path / "a.json", Groups(("g1",)), first, first).http_port
    with socket.create_server((HOST, port)):  # allows binding despite an earlier test's lingering connection
        assert load_plan(tmp_path / "b.json", Groups(("g1",)), port, port).http_port > port


def test_second_start_keeps_ports_and_token(tmp_path, first):
    path = tmp_path / "plan.json"
    plan = load_plan(path, Groups(("g1",)), first, first)
    assert load_plan(path, Groups(("g1",)), first + 100, first + 100) == plan


def test_added_process_keeps_its_port(tmp_path, first):
    path = tmp_path / "plan.json"
    plan = load_plan(path, Groups(("g1",)), first, first)
    more = load_plan(path, Groups(("g1",), others=("watchdog",)), first, first)
    assert set(more.others) == {"watchdog"} and len(set(more.ports)) == len(plan.ports) + 1
    assert load_plan(path, Groups(("g1",), others=("watchdog",)), first, first) == more


def test_clusters_have_different_private_secrets(tmp_path, first):
    first_plan, second_plan = (load_plan(tmp_path / name, Groups(("g1",)), first, first) for name in "ab")
    assert first_plan.token != second_plan.token and first_plan.password_key != second_plan.password_key
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o600


def test_old_plan_gets_a_password_key(tmp_path, first):
    path = tmp_path / "plan.json"
    plan = asdict(load_plan(path, Groups(("g1",)), first, first))
    del plan["password_key"]
    path.write_text(json.dumps(plan))
    keys = [load_plan(path, Groups(("g1",)), first, first).password_key for _ in range(2)]
    assert keys[0] == keys[1] and Vault([keys[0]]).is_open


def test_taken_port_of_a_plan_is_reported(tmp_path, busy_port, first):
    path = tmp_path / "plan.json"
    load_plan(path, Groups(("g1",)), first, first)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"http_port": busy_port}))
    with pytest.raises(NotServed, match=f"port {busy_port} of this cluster is in use"):
        load_plan(path, Groups(("g1",)), first, first)


def test_settings_are_read_back_as_they_were_written(tmp_path):
    settings = {"name": 'a "quoted" \\ path', "port": 1, "eager": True, "pause_s": 0.5, "tokens": ["é", "b"]}
    write_settings(tmp_path / "new" / "x.toml", settings)
    assert tomllib.loads((tmp_path / "new" / "x.toml").read_text()) == settings
