"""Shell. Outcomes of the nightly job: a scheduler reads only its exit status and its files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from qmq.audit.jobs import consistency
from qmq.audit.jobs.consistency import UNFINISHED
from qmq.audit.page import _badge
from qmq.audit.results import Result
from qmq.ledger import NOT_READ, PROVEN, Entry, Ledger

LAST_NIGHT = '{"status": 0}'


class Spark:
    def stop(self) -> None: ...


def run(monkeypatch: pytest.MonkeyPatch, folder: Path, audit: Any, *words: str) -> tuple[int, dict[str, Any], str]:
    """Run the job over last night's files; return its status, its result and its report."""
    result, report = folder / "audit.json", folder / "audit.md"
    result.write_text(LAST_NIGHT)
    report.write_text("# Audit: proven equal")
    monkeypatch.setattr(consistency, "start_spark", lambda master, name: Spark())
    monkeypatch.setattr(consistency, "audit_groups", audit)
    words = words or ("--group", "g1", "--master", "a", "--slave", "b")
    status = consistency.main([*words, "--token", "t", "--result", str(result), "--report", str(report)])
    return status, json.loads(result.read_text()), report.read_text()


def not_read(spark: Spark, groups: Any, options: Any) -> list[Result]:
    return [Result(group.name, {}, unreadable="the broker is gone") for group in groups]


def fails(spark: Spark, groups: Any, options: Any) -> list[Result]:
    raise RuntimeError("a bug")


@pytest.mark.parametrize(
    "audit, words",
    [
        pytest.param(not_read, ("--group", "g1", "--master", "a"), id="wrong usage"),
        pytest.param(not_read, ("--all-groups", "--metaserver", "127.0.0.1:1"), id="no metaserver"),
        pytest.param(not_read, (), id="not read"),
        pytest.param(fails, (), id="a bug"),
    ],
)
def test_unread_run_overwrites_last_nights_result(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, audit: Any, words: tuple[str, ...]
) -> None:
    status, result, report = run(monkeypatch, tmp_path, audit, *words)
    assert (status, result["status"]) == (2, 2)
    assert report.startswith("# Audit: could not read")


def test_killed_job_leaves_no_old_results(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen = []

    def looks(spark: Spark, groups: Any, options: Any) -> list[Result]:
        seen.append((tmp_path / "audit.json").read_text())
        return not_read(spark, groups, options)

    run(monkeypatch, tmp_path, looks)
    assert [json.loads(text)["status"] for text in seen] == [2]


@pytest.mark.parametrize("is_damaged", [False, True])
def test_failed_run_hides_last_nights_verdict(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_damaged: bool
) -> None:
    """A damaged ledger of one group does not stop the audit of others."""
    ledger, where = Ledger(tmp_path / "ledger"), tmp_path / "page.html"
    ledger.append(Entry("r1", 1, "g1", PROVEN, verified=500))
    if is_damaged:
        ledger.path("g1").write_text("no entry\n")
    words = ("--group", "g1", "--master", "a", "--slave", "b", "--ledger", str(tmp_path / "ledger"))
    status, _, _ = run(monkeypatch, tmp_path, fails, *words, "--page", str(where))
    assert status == 2
    assert f"Audit: {_badge(NOT_READ)}" in where.read_text() and UNFINISHED in where.read_text()
    assert json.loads(where.with_suffix(".json").read_text())["why"] == UNFINISHED
    if not is_damaged:
        run(monkeypatch, tmp_path, not_read, *words, "--page", str(where))
        assert f"Audit: {_badge(NOT_READ)}" in where.read_text() and "g1: the broker is gone" in where.read_text()
        run(monkeypatch, tmp_path, lambda *about: [Result("g1", {})], *words, "--page", str(where))
        assert f"Audit: {_badge(PROVEN)}" in where.read_text()
        assert json.loads(where.with_suffix(".json").read_text())["why"] == ""


def test_unwritable_files_fail_before_the_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(consistency, "start_spark", lambda master, name: pytest.fail("an hour of work for nothing"))
    words = ["--group", "g1", "--master", "a", "--slave", "b", "--token", "t"]
    assert consistency.main([*words, "--result", str(tmp_path / "nowhere" / "audit.json")]) == 2
    assert "No such file or directory" in capsys.readouterr().err


@pytest.mark.parametrize("others", [("--page", "audit.html"), ("--report", "audit.json")])
def test_two_results_in_a_file_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, others: tuple[str, str]
) -> None:
    """The page's JSON replaced the result of each night."""
    monkeypatch.chdir(tmp_path)
    words = ["--group", "g1", "--master", "a", "--slave", "b", "--token", "t", "--ledger", "ledger", *others]
    assert consistency.main([*words, "--result", "audit.json"]) == 2
    assert "would be written twice" in capsys.readouterr().err


@pytest.mark.parametrize("words", [("--share", "0"), ("--piece-bytes", "0"), ("--piece-bytes", "-8")])
def test_parts_of_no_size_are_wrong_usage(words: tuple[str, str]) -> None:
    """With such a grid the loop would never end."""
    with pytest.raises(SystemExit) as ended:
        consistency.main(["--group", "g1", "--master", "a", "--slave", "b", *words])
    assert ended.value.code == 2
