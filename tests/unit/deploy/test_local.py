"""Shell. `qmq dev` gets the requested port or starts nothing, and ends on request."""

from __future__ import annotations

import signal
import socket

import pytest

from qmq.deploy import local
from qmq.deploy.local import Stopped, check_ports
from qmq.deploy.plan import HOST, Groups, load_plan
from qmq.errors import NotServed
from tests.support.ports import free_ports


def test_free_ports_are_fine(tmp_path):
    check_ports(tmp_path, *free_ports(2))
    check_ports(tmp_path, None, None)


@pytest.mark.parametrize("option", ["--port", "--broker-port"])
def test_a_port_in_use_is_refused(tmp_path, option):
    with socket.create_server((HOST, 0)) as server, pytest.raises(NotServed, match=f"in use .* another {option}$"):
        taken = server.getsockname()[1]
        check_ports(tmp_path, *((taken, None) if option == "--port" else (None, taken)))


def test_cluster_keeps_its_ports(tmp_path):
    first, second = free_ports(2)
    plan = load_plan(tmp_path / "plan.json", Groups(("g1",)), first, second)
    check_ports(tmp_path, plan.http_port, plan.brokers[0].serve_port)
    with pytest.raises(NotServed, match=f"has port {plan.http_port} already"):
        check_ports(tmp_path, plan.http_port + 1, None)
    with pytest.raises(NotServed, match=f"has port {plan.brokers[0].serve_port} already: leave out --broker-port"):
        check_ports(tmp_path, None, plan.brokers[0].serve_port + 1)


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
