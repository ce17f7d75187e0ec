"""Unit. A forked program is a child of the test with its own command line, directory, session and exit status."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.support.waiting import until
from tests.support.zygote import ForkedProcess, launch


def launched(folder, *words, **environ):
    with (folder / "log").open("wb") as log:
        return launch(
            [sys.executable, "-m", "qmq.broker", *words],
            cwd=folder,
            env=os.environ | environ,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def test_fork_runs_with_arguments_and_environment(tmp_path):
    process = launched(tmp_path, "--config", "/no such file", QMQ_BROKER_HOSTNAME="a")
    assert isinstance(process, ForkedProcess) and process.wait(30) == 2
    printed = (tmp_path / "log").read_text()
    assert "/no such file: [Errno 2]" in printed and "data: missing" in printed and "hostname: missing" not in printed


def test_fork_is_a_child_with_its_own_session(tmp_path):
    config = tmp_path / "config.toml"
    os.mkfifo(config)  # the broker waits for a writer
    process = launched(tmp_path, "--config", str(config))
    expected = [os.fsencode(word) for word in (sys.executable, "-m", "qmq.broker", "--config", config)]
    shown = Path(f"/proc/{process.pid}/cmdline")
    until(lambda: shown.read_bytes().rstrip(b"\0").split(b"\0") == expected, "the command line is written")
    assert os.getsid(process.pid) == process.pid
    assert os.readlink(f"/proc/{process.pid}/cwd") == str(tmp_path)
    assert process.poll() is None
    process.kill()
    assert process.wait(30) == -signal.SIGKILL


def test_import_time_environment_starts_a_new_interpreter(tmp_path):
    process = launched(tmp_path, PYTHONVERBOSE="1")
    process.wait(30)
    assert "import 'qmq.broker.main'" in (tmp_path / "log").read_text()
