"""Shell. AuditStatus: reads a ledger on this machine, without metaserver or token; the exit status is the result."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from qmq.ledger import FINDINGS, PROVEN, Entry, Ledger
from qmq.tools.main import main

NOW_MS = int(time.time() * 1000)
GOOD = Entry("2026-11-22T01:00:00Z", NOW_MS - 7_260_000, "g1", PROVEN, verified=700, chain="00ff", ends={"a": 7})
BAD = replace(GOOD, group="g2", verdict=FINDINGS, found={"damaged": 2}, verified=0)


def status(folder: Path, *words: str) -> int:
    return int(main(["AuditStatus", f"--ledger={folder}", *words]))


def test_proven_group_shows_its_age(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Ledger(tmp_path).append(GOOD)
    assert status(tmp_path) == 0
    text = capsys.readouterr().out
    assert "700" in text and "2 h " in text and "all proven equal" in text


def test_old_proof_does_not_count(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for entry in (GOOD, replace(GOOD, group="g2", at_ms=NOW_MS - (36 * 3600 + 60) * 1000)):
        Ledger(tmp_path).append(entry)
    assert status(tmp_path) == 1
    text = capsys.readouterr().out
    assert "1 of 2 broker groups were proven equal, but not in the last 36 hours" in text and "all proven" not in text
    assert status(tmp_path, "--brokerGroup=g1") == 0


def test_findings_end_with_one_and_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for entry in (GOOD, BAD):
        Ledger(tmp_path).append(entry)
    assert status(tmp_path) == 1
    text = capsys.readouterr().out
    assert "2 damaged" in text and "never" in text and "1 of 2 broker groups" in text
    assert status(tmp_path, "--brokerGroup=g1", "--json") == 0
    assert [row["group"] for row in json.loads(capsys.readouterr().out)] == ["g1"]


def test_gauges_are_written_of_all_groups(tmp_path: Path) -> None:
    for entry in (GOOD, BAD):
        Ledger(tmp_path / "ledger").append(entry)
    status(tmp_path / "ledger", "--brokerGroup=g1", f"--metrics={tmp_path / 'audit.prom'}")
    assert 'qmq_audit_findings{broker_group="g2",kind="damaged"} 2' in (tmp_path / "audit.prom").read_text()


@pytest.mark.parametrize("damage", ["nowhere", "line"])
def test_unreadable_ledger_is_an_error(tmp_path: Path, damage: str) -> None:
    Ledger(tmp_path / "ledger").append(GOOD)
    if damage == "line":
        path = tmp_path / "ledger" / "g1.jsonl"
        path.write_bytes(path.read_bytes().replace(b"700", b"800"))
    assert status(tmp_path / ("ledger" if damage == "line" else "nowhere")) == 1
