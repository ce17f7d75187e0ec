"""Shell. Choice between this process and Spark, waves of broker groups, and the journal's part that is compared."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from qmq.audit import group, wave
from qmq.audit.copies import PathCopy, place_options
from qmq.audit.executors import HERE_BYTES_MAX, Executors, InProcess, OnSpark
from qmq.audit.group import audit_groups
from qmq.audit.jobs import consistency
from qmq.audit.results import Group
from qmq.audit.wave import Options
from qmq.ledger import Entry, Ledger
from tests.unit.audit.test_audited_range import A, both
from tests.unit.audit.without_spark import audit

SESSION: Any = MagicMock()


def no_start() -> Any:
    raise AssertionError("Spark was started")


@pytest.mark.parametrize(
    "spark, size, kind",
    [
        pytest.param(no_start, HERE_BYTES_MAX, InProcess, id="small logs"),
        pytest.param(lambda: SESSION, HERE_BYTES_MAX + 1, OnSpark, id="large logs"),
        pytest.param(None, HERE_BYTES_MAX + 1, InProcess, id="no Spark"),
    ],
)
def test_executor_follows_the_size_of_the_logs(spark: Any, size: int, kind: type) -> None:
    assert isinstance(Executors(spark).of(size), kind)


def test_small_audit_starts_no_spark(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    both(tmp_path)
    monkeypatch.setattr(consistency, "start_spark", lambda master, name: no_start())
    arguments = ["--group", "g1", "--master", str(tmp_path / "master"), "--slave", str(tmp_path / "slave")]
    assert consistency.main(arguments) == 0
    assert "Every byte of [0, " in capsys.readouterr().out


def test_retention_waits_for_one_wave_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    both(tmp_path)
    places = {copy: place_options(str(tmp_path / copy), "") for copy in ("master", "slave")}
    held: list[int] = [0, 0]
    close = PathCopy.close

    class Held(PathCopy):
        is_held = False

        def hold(self) -> None:
            self.is_held = True
            held[0] += 1
            held[1] = max(held)

        def close(self) -> None:
            held[0] -= self.is_held
            self.is_held = False
            close(self)

    monkeypatch.setattr(wave, "THREADS", 2)
    monkeypatch.setattr(wave, "WAVE_GROUPS", 2)
    monkeypatch.setattr(group, "open_copy", lambda place: Held(Path(place["path"])))
    results = audit_groups(None, [Group(f"g{number}", places) for number in range(6)], Options())
    assert [result.status for result in results] == [0] * 6
    assert held == [0, 4]


def test_ledger_lines_are_written_wave_by_wave(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The driver holds the ends of all subjects for one wave only."""
    both(tmp_path)
    places = {copy: place_options(str(tmp_path / copy), "") for copy in ("master", "slave")}
    steps: list[str] = []
    look_back, append = group.look_back, Ledger.append

    def prepared(*about: Any) -> Any:
        steps.append("prepared")
        return look_back(*about)

    def written(ledger: Ledger, entry: Entry) -> None:
        steps.append(entry.group)
        append(ledger, entry)

    monkeypatch.setattr(wave, "THREADS", 2)
    monkeypatch.setattr(wave, "WAVE_SUBJECTS", 1)
    monkeypatch.setattr(group, "look_back", prepared)
    monkeypatch.setattr(Ledger, "append", written)
    ledger, groups = Ledger(tmp_path / "ledger"), [Group(f"g{number}", places) for number in range(4)]
    for _ in range(2):  # the second run's waves are bounded by the subjects that the first one found
        assert [result.status for result in audit_groups(None, groups, Options(ledger=ledger))] == [0] * 4
    assert steps[:8] == ["prepared"] * 4 + ["g0", "g1", "g2", "g3"]
    assert steps[8:] == ["prepared", "prepared", "g0", "g1", "prepared", "prepared", "g2", "g3"]


def lines_of(sequences: range) -> str:
    return "".join(json.dumps({"subject": A, "group": "g1", "sequence": s, "id": f"{A}-{s}"}) + "\n" for s in sequences)


def test_journal_is_compared_from_the_run_before_last_on(tmp_path: Path) -> None:
    """A line that a producer wrote late is compared by the next run."""
    both(tmp_path)
    journal, ledger = tmp_path / "journal.ndjson", Ledger(tmp_path / "ledger")
    journal.write_text(lines_of(range(10)))
    for _ in range(2):
        assert audit(tmp_path, journal=journal, ledger=ledger).status == 0
    before, entry = ledger.newest("g1", 2)
    assert (entry.journal, entry.ends[A]) == (10, 400)
    lost = json.dumps({"subject": "never.stored", "group": "g1", "sequence": 0, "id": "planted"})
    journal.write_text(lines_of(range(10)) + lines_of(range(5_000, 5_001)) + lost)
    result = audit(tmp_path, journal=journal, ledger=ledger)
    assert [row["id"] for row in result.findings] == ["planted", f"{A}-5000"]
    assert f"10 of the journal's messages were compared by {before.run} or earlier" in result.notes
    # A run with findings ends the chain of compared runs: all is compared again.
    journal.write_text(lines_of(range(10)))
    result = audit(tmp_path, journal=journal, ledger=ledger)
    assert (result.journal, [note for note in result.notes if "journal" in note]) == (10, [])


def test_broken_lines_of_a_journal_are_an_error(tmp_path: Path) -> None:
    both(tmp_path)
    journal = tmp_path / "journal.ndjson"
    journal.write_text(lines_of(range(3)) + '{"subject": "torn", "gro')
    result = audit(tmp_path, journal=journal)
    assert result.unreadable == f"journal {journal}: 1 lines lack subject, sequence or id"
    whole = replace(Options(), journal=tmp_path / "absent")
    assert "there is no such file" in str(audit(tmp_path, journal=whole.journal).unreadable)
