"""Shell. Processes of a local cluster restart after a death, and none is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from qmq.deploy.cluster import AlreadyRunning, lock_directory
from qmq.deploy.processes import Service, end_leftovers, is_ours, module_command, stop_all
from tests.support.waiting import until

LIVES = "tests.unit.deploy.lives"
"""A module that runs until SIGTERM, which it ignores with "deaf" in its settings."""


@pytest.fixture
def service(tmp_path):
    """Yield a service that is not started yet, and end it afterwards."""
    (tmp_path / "a.toml").write_text("")
    service = Service("a", module_command(LIVES, tmp_path / "a.toml"), tmp_path / "logs" / "a.log")
    yield service
    service.signal(signal.SIGKILL)
    service.stop(time.monotonic())


def wait_until_up(service):
    until(lambda: service.log.exists() and b"up" in service.log.read_bytes())


def test_dead_process_restarts_after_its_rest(service):
    service.start()
    first = service.pid
    service.signal(signal.SIGKILL)
    until(lambda: service.pid is None)
    assert "status -9" in service.keep_alive(100.0, restart_s=1.0)
    assert service.keep_alive(100.9, restart_s=1.0) == ""
    assert service.pid is None
    assert "started again" in service.keep_alive(101.0, restart_s=1.0)
    assert service.pid not in (None, first)
    assert service.starts == 2
    assert service.keep_alive(200.0, restart_s=1.0) == ""


def test_a_process_that_was_asked_to_end_ends(service):
    service.start()
    wait_until_up(service)
    stop_all([service])
    assert service.exit_status == 0
    assert "up" in service.log_tail()


def test_a_process_that_does_not_listen_is_killed(service, tmp_path):
    (tmp_path / "a.toml").write_text("deaf")
    service.start()
    wait_until_up(service)
    service.signal(signal.SIGTERM)
    service.stop(time.monotonic() + 0.1)
    assert service.exit_status == -signal.SIGKILL


def test_only_leftovers_of_a_killed_runner_end(service, tmp_path):
    service.start()
    wait_until_up(service)
    stranger = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert is_ours(service.pid, tmp_path)
        pid = service.pid
        assert end_leftovers([pid, stranger.pid, os.getpid()], tmp_path) == [pid]
        until(lambda: service.pid is None)
        assert stranger.poll() is None
    finally:
        stranger.communicate(b"\n")


def test_directory_has_a_single_runner(tmp_path):
    with lock_directory(tmp_path):
        with pytest.raises(AlreadyRunning, match=f"process {os.getpid()}"):
            lock_directory(tmp_path)
    lock_directory(tmp_path).close()
