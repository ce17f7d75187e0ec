"""Shell. `python -m qmq.metaserver` as a process: start, stop, death, wrong settings, ports."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

ROOT = Path(__file__).parents[2]
WAIT_S = 60
TOKEN = "the key of it all"


@contextmanager
def metaserver(folder, **settings):
    """Run a metaserver in `folder`; yield the process with its `url`, and kill it at the end."""
    ours = {"CLUSTER_TOKEN": TOKEN, "HTTP_PORT": "0", "GRPC_PORT": "0", "DATABASE": f"sqlite:///{folder / 'm.db'}"}
    given = ours | settings
    environ = os.environ | {f"QMQ_METASERVER_{name}": str(value) for name, value in given.items()}
    environ["PYTHONPATH"] = str(ROOT)
    command = [sys.executable, "-m", "qmq.metaserver"]
    with subprocess.Popen(command, cwd=folder, env=environ, stderr=subprocess.PIPE, text=True) as process:
        try:
            process.lines = []
            for line in process.stderr:
                process.lines.append(line)
                if serving := re.search(r"serving http=(\S+) ", line):
                    process.url = f"http://{serving[1]}"
                    break
            yield process
        finally:
            if process.poll() is None:
                process.kill()
            process.stderr.read()


def post(process, action, token=TOKEN, **words):
    body = {"action": action, **words}
    url, headers = f"{process.url}/management", {"X-Api-Token": token}
    return httpx.post(url, data=body, headers=headers, trust_env=False, timeout=WAIT_S)


def add(process, hostname="a", role=0):
    words = {"brokerGroup": "g1", "role": role, "hostname": hostname, "ip": "127.0.0.1"}
    return post(process, "AddBroker", **words, servePort=1, syncPort=2).json()


def test_installed_grpc_supports_the_chosen_engine(tmp_path, monkeypatch):
    monkeypatch.delenv("GRPC_EXPERIMENTS", raising=False)
    monkeypatch.setenv("GRPC_VERBOSITY", "error")  # the default
    assert "experiment" not in log_of(tmp_path).lower()
    monkeypatch.setenv("GRPC_EXPERIMENTS", "-no_such_engine")
    assert "no_such_engine" in log_of(tmp_path), "gRPC reports an unknown engine, and the operator's choice counts"


def log_of(folder):
    """Return the log of a metaserver from its start to its end."""
    with metaserver(folder) as process:
        assert httpx.get(f"{process.url}/meta/address", trust_env=False, timeout=WAIT_S).status_code == 200
        process.terminate()
        return "".join([*process.lines, process.stderr.read()])


def test_terms_survive_kill_9(tmp_path):
    with metaserver(tmp_path) as process:
        add(process, "a")
        assert add(process, "b", role=1)["status"] == 0
        process.kill()
        process.wait(WAIT_S)
    with metaserver(tmp_path) as process:
        groups = post(process, "ListBrokerGroups", details="true").json()
        assert [(group["groupName"], group["term"]) for group in groups] == [("g1", 2)]


def test_wrong_settings_end_with_2_and_all_complaints(tmp_path):
    with metaserver(tmp_path, HTTP_PORT="x", CLUSTER_TOKEN="short", GRPC_PORT="-1") as process:
        assert process.wait(WAIT_S) == 2
        assert "http_port: " in "".join(process.lines) and "grpc_port: " in "".join(process.lines)


@pytest.mark.parametrize("port", ["HTTP_PORT", "GRPC_PORT"])
def test_port_that_is_taken_ends_with_1(tmp_path, port):
    with socket.create_server(("127.0.0.1", 0)) as other:
        with metaserver(tmp_path, **{port: other.getsockname()[1]}) as process:
            assert process.wait(WAIT_S) == 1
            assert "cannot serve" in "".join(process.lines)
