"""Shell. `qmq chaos`: verdict, picture, and refusals of impossible runs."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys

import pytest

from qmq.deploy.chaos import clients, trial
from qmq.deploy.chaos.faults import INSIDE
from qmq.deploy.chaos.main import _settings
from qmq.deploy.chaos.trial import STRIKES, attempt
from qmq.deploy.processes import module_command
from tests.support.ports import run_of_ports

RUN_S = 300
NETWORK = "cut the copies apart,cut the copies in one direction,cut clients off,slow link,lose packets"
MINUTE_S = 60.0


def qmq(*arguments):
    environ = {name: value for name, value in os.environ.items() if name != INSIDE}
    command = [sys.executable, "-m", "qmq", "chaos", *arguments]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=RUN_S)


@pytest.fixture(scope="module")
def possible():
    """Return the faults that this machine can inject."""
    listed = qmq("--list").stdout.splitlines()
    assert len(listed) == len(STRIKES)
    return {name for name in STRIKES if name in listed}


@pytest.mark.parametrize("faults", [NETWORK, "fill a disk", "wrong clock"])
def test_run_ends_with_a_verdict_and_a_picture(tmp_path, possible, faults):
    if missing := set(faults.split(",")) - possible:
        pytest.skip(f"this machine lacks what is needed for {missing}: see `qmq chaos --list`")
    folder = tmp_path / "run"
    run = qmq("--minutes", "0.1", "--faults", faults, "--dir", str(folder))
    assert run.returncode == 0, run.stdout + run.stderr
    verdict = json.loads((folder / "seed-1" / "verdict.json").read_text())
    assert verdict["findings"] == [] and len(verdict["sent"]) > 100
    assert {name for name, *_ in verdict["faults"] if not name.startswith("consumer ")} <= set(faults.split(","))
    assert "every promise was kept" in (folder / "seed-1" / "report.html").read_text()


@pytest.mark.parametrize(
    "arguments, why",
    [
        (["--faults", "earthquake"], "there is no fault 'earthquake'; --list names all of them"),
        (["--settings", "no such file.toml"], "No such file"),
        (["--minutes", "nan"], "argument --minutes: must be a number above 0"),
        (["--minutes", "ten"], "argument --minutes: must be a number above 0"),
    ],
)
def test_impossible_run_is_refused_with_its_reason(tmp_path, arguments, why):
    run = qmq(*arguments, "--dir", str(tmp_path / "run"))
    assert run.returncode == 2 and why in run.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "written, why",
    [
        (b'hostname = "mine"\nlease_ms = -1\n', "lease_ms: -1 ms is less than 500"),
        (b"segment_byte = 4096", "segment_byte: unknown setting"),
        (b'unconsumed = "\xff"', "can't decode"),
    ],
)
def test_invalid_broker_settings_are_refused(tmp_path, written, why):
    (settings := tmp_path / "broker.toml").write_bytes(written)
    run = qmq("--settings", str(settings), "--dir", str(tmp_path / "run"))
    assert run.returncode == 2 and why in run.stderr and "Traceback" not in run.stderr


def test_brokers_own_settings_file_is_accepted(tmp_path):
    """A file of docs/install.md; the run replaces the settings of the broker's place, so these may be wrong here."""
    (settings := tmp_path / "broker.toml").write_text(
        'hostname = "b1"\nip = "10.0.0.1"\nserve_port = 1\ndata = "/b1"\nmetaserver = "http://m"\nlease_ms = "700"\n'
    )
    assert _settings(settings) == {"lease_ms": "700"}


def test_group_with_a_killed_slave_is_not_well(tmp_path):
    """The master accepts messages until it notes the loss; that is no recovery."""
    down = []

    def strike(struck, is_over):
        slave = struck.target.cluster.service(struck.target.copies("g1")[1].hostname)
        starts = slave.starts
        struck.target.cluster.writable = lambda group: True  # as if the master noted the loss late
        struck._groups, struck._say = ["g1"], lambda line: down.append(slave.starts == starts)
        struck.strike("kill slave")

    outcome = asyncio.run(attempt(tmp_path, seed=1, strike=strike, http_port=run_of_ports()))
    assert not outcome.findings
    assert down == [False]


def test_folder_with_other_files_is_not_emptied(tmp_path):
    (tmp_path / "mine").write_text("1")
    run = qmq("--faults", "kill slave", "--dir", str(tmp_path))
    assert run.returncode == 2 and "is not empty" in run.stderr
    assert (tmp_path / "mine").read_text() == "1"


def test_waiting_producer_is_not_killed_as_failed():
    """A fixed bug: both times were 60 s, so a stalled producer of a readonly group ended as a failed client."""
    assert clients.END_S >= clients.SEND_S + 60.0


def test_unrecovered_group_and_unreadable_copy_are_findings(tmp_path, monkeypatch):
    """A slave stays down, and its log has bytes that are no frame; dead letters that wait for it end no run's drain."""
    monkeypatch.setattr(trial, "_unread", lambda cluster, letters: 1.0)
    monkeypatch.setattr(trial, "RECOVERY_S", 3.0)
    monkeypatch.setattr(trial, "EQUAL_S", 3.0)
    monkeypatch.setattr(trial, "DRAIN_S", 3.0)
    monkeypatch.setattr(clients, "SEND_S", 10.0)

    def strike(struck, is_over):
        target = struck.target
        for group in trial.BROKER_GROUPS:
            slave = target.cluster.broker(group, "slave")
            target.cluster.end(slave.hostname)
            with next((target.cluster.data(slave) / "log").glob("*.log")).open("r+b") as log:
                log.write(b"nothing that is a frame")
        struck.strike("kill metaserver")

    outcome = asyncio.run(attempt(tmp_path, seed=1, strike=strike, http_port=run_of_ports()))
    # A message to be delivered again waits for the slave: it counts as lost or skipped, by when it was sent.
    waits = "lost", "poll skipped", "not-drained"
    rules = [finding.rule for finding in outcome.findings if finding.rule not in waits]
    unread = ["dead-unread"] * len(trial.GROUPS)
    assert rules == ["not-well", *unread, "not-equal", "not-equal", "unreadable"], outcome.findings


def test_acknowledgement_by_one_copy_is_found(tmp_path):
    """A broker that acknowledges before its slave has the message: the first fault of a run shows it."""

    def strike(nemesis, is_over):
        cluster = nemesis.target.cluster
        names = [broker.hostname for broker in cluster.plan.brokers]
        cluster.end(*names)
        for name in names:
            service = cluster.service(name)
            service.command = module_command("tests.chaos.broker_that_acknowledges_early", service.command[-1])
        cluster.begin(*names)
        cluster.wait_writable()
        nemesis.strike_within(MINUTE_S, random.Random(1), [*STRIKES])
        assert len(nemesis.target.records) == 2, "the window and the fault"

    outcome = asyncio.run(attempt(tmp_path, seed=1, strike=strike, http_port=run_of_ports()))
    assert "lost-copy" in {finding.rule for finding in outcome.findings}, outcome.summary()  # its acks come early, too
