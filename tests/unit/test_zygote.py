"""Unit: a program that begins by a fork is a process of its own, and a child of who began it."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.support.zygote import ReadyPopen


def begun(program="qmq.broker", *words, **options):
    return ReadyPopen([sys.executable, "-m", program, *words], stderr=subprocess.PIPE, text=True, **options)


def once_it_reads(process, fifo):
    """Open the FIFO to write; a program that ends without reading it is a failure, not a wait."""
    while True:
        try:
            return os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
        except OSError as error:
            assert error.errno == errno.ENXIO
            assert process.poll() is None, process.communicate()[1]
            time.sleep(0.01)


def test_a_fork_runs_the_program_with_its_own_words_and_environment():
    environ = {name: value for name, value in os.environ.items() if name != "HOME"} | {"QMQ_BROKER_HOSTNAME": "a"}
    process = begun("qmq.broker", "--config", "/no such file", env=environ)
    said = process.communicate()[1]
    assert process.returncode == 2, said
    assert "/no such file: [Errno 2]" in said and "data: missing" in said and "hostname: missing" not in said


def test_a_fork_is_our_child_in_a_session_of_its_own_known_by_its_command_and_ends_by_a_signal(tmp_path):
    config = tmp_path / "config.toml"
    os.mkfifo(config)  # who reads it waits for a writer
    process = begun("qmq.broker", "--config", str(config), cwd=tmp_path, start_new_session=True)
    with os.fdopen(once_it_reads(process, config), "wb"):
        assert os.getsid(process.pid) == process.pid
        assert Path(f"/proc/{process.pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0") == [
            os.fsencode(word) for word in (sys.executable, "-m", "qmq.broker", "--config", config)
        ]
        assert os.readlink(f"/proc/{process.pid}/cwd") == str(tmp_path)
        process.kill()
        assert process.wait() == -signal.SIGKILL
    assert process.communicate()[1] == ""


def test_who_has_an_environment_that_imports_read_starts_from_nothing():
    process = begun("qmq.broker", env=os.environ | {"PYTHONVERBOSE": "1"})
    assert "import 'qmq.broker.main'" in process.communicate()[1]
