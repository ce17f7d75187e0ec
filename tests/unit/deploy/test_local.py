"""Shell. `qmq dev` gets the requested port or starts nothing, and ends on request."""

from __future__ import annotations

import signal
import socket

import pytest

from qmq.deploy import local
from qmq.deploy.local import Stopped, check_port
from qmq.deploy.plan import HOST, Groups, load_plan
from qmq.errors import NotServed
from tests.support.ports import free_ports


def test_a_free_port_is_fine(tmp_path):
    check_port(tmp_path, free_ports(1)[0])


def test_a_port_in_use_is_refused(tmp_path):
    with socket.create_server((HOST, 0)) as taken, pytest.raises(NotServed, match="in use"):
        check_port(tmp_path, taken.getsockname()[1])


def test_cluster_keeps_its_port(tmp_path):
    first, second = free_ports(2)
    kept = load_plan(tmp_path / "plan.json", Groups(("g1",)), first, second).http_port
    check_port(tmp_path, kept)
    with pytest.raises(NotServed, match=f"has port {kept} already"):
        check_port(tmp_path, second)


@pytest.mark.parametrize("port", ["99999", "0", "-1", "abc", "²"])
def test_invalid_port_is_refused(tmp_path, capsys, port):
    with pytest.raises(SystemExit, match="2"):
        local.main([f"--dir={tmp_path / 'run'}", f"--port={port}"])
    assert f"'{port}' is no port" in capsys.readouterr().err and not (tmp_path / "run").exists()


def test_unusable_directory_has_no_traceback(tmp_path, capsys, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    assert local.main([f"--dir={tmp_path / 'file' / 'run'}"]) == 1
    assert f"{tmp_path / 'file' / 'run'}" in capsys.readouterr().err


def test_signal_during_a_finaliser_is_kept(monkeypatch):
    """Python prints a finaliser's exception and goes on: this and all later signals would have no effect."""
    monkeypatch.setattr(Stopped, "arrived", False)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        with pytest.raises(Stopped):
            local._stopped(signal.SIGTERM, None)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    with pytest.raises(Stopped):
        local._until_stopped()
