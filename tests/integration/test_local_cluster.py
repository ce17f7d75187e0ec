"""Shell. `make run` and `make stop`: a cluster starts, restarts dead processes, describes itself, and ends whole."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from qmq.deploy.cluster import AlreadyRunning, Cluster
from qmq.deploy.plan import Groups, is_free, load_plan
from qmq.deploy.processes import ROOT
from qmq.errors import NotServed
from tests.support.ports import run_of_ports
from tests.support.waiting import until

PORT = run_of_ports()


def local(run_dir):
    return Cluster(run_dir, http_port=PORT, broker_port=PORT)


def read(run_dir):
    return json.loads((run_dir / "cluster.json").read_text())


def pids(cluster):
    brokers = [broker["pid"] for group in cluster["groups"].values() for broker in group.values()]
    return [cluster["metaserver_pid"], *brokers, *([cluster["watchdog"]["pid"]] if "watchdog" in cluster else [])]


def is_gone(pid):
    """Whether a process ended; one that was not reaped yet has no command line."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes() == b""
    except OSError:
        return True


def test_cluster_starts_and_restarts_with_its_data(tmp_path):
    with local(tmp_path) as cluster:
        first = read(tmp_path)
        assert first["metaserver"] == cluster.metaserver and first["token"] == cluster.token
        assert set(first["groups"]) == {"g1", "g2"}
        assert all(set(group) == {"master", "slave"} for group in first["groups"].values())
        assert not any(is_gone(pid) for pid in pids(first))

        with pytest.raises(AlreadyRunning, match="qmq dev stop"):
            local(tmp_path).start()

        # An unwritable file, as on a full disk, must not prevent restarts.
        (tmp_path / "cluster.json.new").mkdir()
        starts = cluster.starts
        cluster.kill("g2", "slave")
        until(lambda: cluster.starts > starts, "what died is not started again")
        (tmp_path / "cluster.json.new").rmdir()

        killed = first["groups"]["g1"]["master"]["pid"]
        cluster.kill("g1", "master")
        until(lambda: is_gone(killed), "the master lives on")
        until(lambda: read(tmp_path)["groups"]["g1"]["master"]["pid"] not in (None, killed), "it is not back")
        cluster.wait_writable("g1")

        cluster.swap_roles("g1")
        cluster.wait_writable()
        was = first["groups"]["g1"]["slave"]["hostname"]
        until(lambda: read(tmp_path)["groups"]["g1"]["master"]["hostname"] == was, "cluster.json missed the swap")
        last = read(tmp_path)
    assert all(is_gone(pid) for pid in pids(last))

    with local(tmp_path) as cluster:
        again = read(tmp_path)
        assert (again["token"], again["metaserver"]) == (first["token"], first["metaserver"])
        assert again["groups"]["g1"]["master"]["hostname"] == was, "the swap was forgotten"
    assert all(is_free(port) for port in cluster.plan.ports)


def test_broker_with_wrong_settings_is_reported(tmp_path):
    cluster = Cluster(tmp_path, http_port=PORT, broker_port=PORT, broker={"no_such_setting": 1})
    with pytest.raises(NotServed, match="refuses its settings(.|\n)*no_such_setting"):
        cluster.start()
    assert all(is_free(port) for port in cluster.plan.ports)


def command(run_dir, action):
    return [sys.executable, "-m", "qmq", "dev", action, "--dir", str(run_dir)]


def start_runner(run_dir):
    """Run as `make run` does, on ports of the test's own."""
    if not run_dir.exists():
        run_dir.mkdir()
        load_plan(run_dir / "plan.json", Groups(("g1", "g2")), PORT, PORT)
    log = run_dir / "runner.log"
    with log.open("wb") as file:
        runner = subprocess.Popen(command(run_dir, "run"), cwd=ROOT, stdout=file, stderr=file)
    until(lambda: b"Ctrl-C" in log.read_bytes() or runner.poll() is not None, "it does not come up", 180.0)
    assert runner.poll() is None, log.read_text()
    return runner


@pytest.mark.parametrize("how", ["Ctrl-C", "stop", "stop after the runner was killed"])
def test_all_processes_end(tmp_path, how):
    runner = start_runner(tmp_path / "run")
    running = pids(read(tmp_path / "run"))
    assert len(running) == 6, "a metaserver, two groups, a watchdog"
    if how == "Ctrl-C":
        slave_is_promoted(tmp_path / "run")
        running += pids(read(tmp_path / "run"))
        runner.send_signal(signal.SIGINT)
        assert runner.wait(120) == 0
        assert stop(tmp_path / "run") == "no cluster runs here"
    elif how == "stop":
        assert stop(tmp_path / "run") == "stopped"
        runner.wait(60)
        left = sum(path.stat().st_blocks * 512 for path in (tmp_path / "run").rglob("*"))
        assert left < 200 << 20, "a cluster on a laptop leaves no gigabytes"
    else:
        runner.kill()
        runner.wait()
        assert not any(is_gone(pid) for pid in running)
        assert stop(tmp_path / "run") == "stopped"
    assert all(is_gone(pid) for pid in running)


def slave_is_promoted(run_dir):
    """Kill the master of g1, and wait for the failover."""
    group = read(run_dir)["groups"]["g1"]
    os.kill(group["master"]["pid"], signal.SIGKILL)
    until(lambda: read(run_dir)["groups"]["g1"]["master"]["hostname"] == group["slave"]["hostname"], "no failover")


def stop(run_dir):
    """Return the last line of `make stop`."""
    stopped = subprocess.run(command(run_dir, "stop"), cwd=ROOT, text=True, capture_output=True, check=True)
    return stopped.stdout.splitlines()[-1]
