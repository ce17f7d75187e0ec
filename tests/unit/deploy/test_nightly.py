"""Shell. A nightly job reports its outcome to Prometheus, and keeps its last success after a failure."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from configparser import RawConfigParser
from pathlib import Path

import pytest
import yaml

from qmq.cli import PROGRAMS
from qmq.deploy.nightly import main
from qmq.tools.commands import COMMANDS

ROOT = Path(__file__).parents[3]
UNITS = ROOT / "deploy" / "systemd"


def job(folder, *command, name="audit"):
    return main(["--name", name, "--textfile", str(folder), "--", *command])


def readings(folder, name="audit"):
    text = (folder / f"qmq_nightly_{name}.prom").read_text()
    return {metric: float(value) for metric, value in re.findall(r'^qmq_nightly_(\w+){name="\w+"} (\S+)$', text, re.M)}


def test_last_success_survives_a_failed_run(tmp_path):
    assert job(tmp_path, "true") == 0
    first = readings(tmp_path)
    assert first["exit_status"] == 0 and first["last_success_timestamp_seconds"] == first["last_run_timestamp_seconds"]
    assert job(tmp_path, "sh", "-c", "exit 2") == 2
    second = readings(tmp_path)
    assert second["exit_status"] == 2
    assert second["last_success_timestamp_seconds"] == first["last_success_timestamp_seconds"]
    assert oct((tmp_path / "qmq_nightly_audit.prom").stat().st_mode & 0o777) == "0o644", "node_exporter reads it"


def test_a_job_that_never_succeeded_has_no_success(tmp_path):
    assert job(tmp_path, "false") == 1
    assert set(readings(tmp_path)) == {"exit_status", "seconds", "last_run_timestamp_seconds"}


def test_unstartable_command_is_a_failure(tmp_path):
    assert job(tmp_path, "/no/such/program", name="backup") == 127
    assert readings(tmp_path, "backup")["exit_status"] == 127


def test_stop_reaches_the_job(tmp_path):
    code = "import signal, sys; print('up', flush=True); signal.pause()"
    words = ["-m", "qmq", "nightly", "--name", "audit", "--textfile", str(tmp_path), "--", sys.executable, "-c", code]
    with subprocess.Popen([sys.executable, *words], cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "up\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 128 + signal.SIGTERM
    assert readings(tmp_path)["exit_status"] == 128 + signal.SIGTERM


def test_prometheus_accepts_the_textfile(tmp_path):
    job(tmp_path, "true")
    text = (tmp_path / "qmq_nightly_audit.prom").read_bytes()
    ended = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_a_name_that_metrics_cannot_have_is_refused(tmp_path):
    with pytest.raises(SystemExit):
        job(tmp_path, "true", name='a"b')
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", ["audit", "backup", "scrub"])
def test_units_run_the_jobs_that_kubernetes_runs(name):
    unit, timer = (RawConfigParser(strict=False) for _ in range(2))
    for parser, kind in ((unit, "service"), (timer, "timer")):
        parser.optionxform = str
        parser.read(UNITS / f"qmq-{name}.{kind}")
    command = unit["Service"]["ExecStart"]
    assert (
        f"qmq nightly --name {name} --textfile ${{QMQ_TEXTFILE}} -- " in command
        and unit["Service"]["Type"] == "oneshot"
    )
    hour, minute = re.fullmatch(r"\*-\*-\* (\d\d):(\d\d)", timer["Timer"]["OnCalendar"]).groups()
    jobs = {
        document["metadata"]["name"]: document
        for document in yaml.safe_load_all((ROOT / "deploy/kubernetes/nightly.yml").read_text())
    }
    cron = jobs[f"qmq-{name}"]
    assert cron["kind"] == "CronJob" and cron["spec"]["schedule"] == f"{int(minute)} {int(hour)} * * *"
    (container,) = cron["spec"]["jobTemplate"]["spec"]["template"]["spec"]["containers"]
    typed = " ".join(container["command"])
    asked = {"audit": "audit", "backup": "Backup", "scrub": "ScrubReport"}[name]
    assert asked in {**PROGRAMS, **COMMANDS} and f"qmq {asked} " in typed and f"qmq {asked} " in command
    kept = [
        re.search(rf"{option} (\S+)", command_line)
        for option in ("--ledger", "--page")
        for command_line in (typed, command)
    ]
    assert all(kept) is (name == "audit") is any(kept), "the audit goes on where the night before ended"
