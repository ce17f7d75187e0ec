"""Shell. Trail and FindMessage: arguments of the audit's jobs, which run in a process of their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from qmq.tools.main import main


def job_of(monkeypatch: pytest.MonkeyPatch, *words: str, status: int = 0) -> tuple[list[str], str | None, int]:
    """Return arguments and token of the started process, and the exit status."""
    seen: list[tuple[list[str], str | None]] = []

    def run(command: list[str], *, env: dict[str, str], check: bool) -> subprocess.CompletedProcess[str]:
        seen.append((command[1:], env.get("QMQ_TOKEN")))
        return subprocess.CompletedProcess(command, status)

    monkeypatch.setattr(subprocess, "run", run)
    ended = int(main(list(words)))
    [(arguments, token)] = seen
    return arguments, token, ended


def test_trail_hides_the_token_from_the_process_list(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    secret = tmp_path / "token"
    secret.write_text("secret\n")
    secret.chmod(0o600)
    words = ("Trail", "--id=m-1", "--subject=a.b", "--metaserver=10.0.0.1", f"--token-file={secret}", "--json")
    arguments, token, ended = job_of(monkeypatch, *words)
    assert arguments == [
        "-m",
        "qmq.audit.jobs.trail",
        "--metaserver=http://10.0.0.1:8080",
        "--id=m-1",
        "--subject=a.b",
        "--json",
    ]
    assert (token, ended) == ("secret", 0)


def test_find_message_reads_directories(monkeypatch: pytest.MonkeyPatch) -> None:
    words = (
        "--property",
        "orderNo=42",
        "--property",
        "x=a b",
        "--tag=pay,odd",
        "--since=1700000000000",
        "--source=/data/b1,10.0.0.3:20883",
        "--sparkMaster=spark://m:7077",
    )
    arguments, token, ended = job_of(monkeypatch, "FindMessage", *words, status=2)
    assert arguments[:2] == ["-m", "qmq.audit.jobs.find"] and sys.executable not in arguments
    assert sorted(arguments[2:]) == [
        "--limit=1000",
        "--property=orderNo=42",
        "--property=x=a b",
        "--since=1700000000000",
        "--source=/data/b1",
        "--source=10.0.0.3:20883",
        "--spark-master=spark://m:7077",
        "--tag=odd",
        "--tag=pay",
    ]
    assert (token, ended) == (None, 3)


def test_find_message_needs_a_filter(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["FindMessage", "--source=/data/b1"]) == 2
    assert "no filter" in capsys.readouterr().err
