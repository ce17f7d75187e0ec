"""Shell. `python -m qmq.broker` with settings that are wrong: every complaint at once, on stderr, and exit status 2."""

from __future__ import annotations

import os
import subprocess
import sys

from qmq.deploy.processes import ROOT


def run(config, **environ):
    return subprocess.run(
        [sys.executable, "-m", "qmq.broker", "--config", str(config)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | environ,
    )


def test_all_complaints_come_at_once_and_nothing_is_made(tmp_path):
    config = tmp_path / "broker.toml"
    config.write_text(
        f'data = "{tmp_path / "data"}"\nserve_port = 70000\nsync_port = "x"\ndurability = "hope"\ncolour = 1\n'
    )
    ended = run(config, QMQ_BROKER_LEASE_MS="-1")
    assert (ended.returncode, ended.stdout) == (2, "")
    complaints = {line.partition(":")[0] for line in ended.stderr.splitlines()}
    assert complaints == {"hostname", "token", "serve_port", "sync_port", "durability", "lease_ms", "colour"}
    assert "QMQ_BROKER_TOKEN" in ended.stderr and "Traceback" not in ended.stderr
    assert not (tmp_path / "data").exists()


def test_missing_or_invalid_settings_file_is_named(tmp_path):
    for config in (tmp_path / "none.toml", tmp_path / "broken.toml"):
        (tmp_path / "broken.toml").write_text("data = \n")
        ended = run(config, QMQ_BROKER_HOSTNAME="a", QMQ_BROKER_TOKEN="t", QMQ_BROKER_DATA=str(tmp_path / "data"))
        assert ended.returncode == 2 and str(config) in ended.stderr and "Traceback" not in ended.stderr
