"""Shell. A failure while one broker group is read or judged concerns only that group."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from qmq.audit import plan
from qmq.audit.copies import PathCopy
from qmq.audit.facts import LogRange, PieceFacts, Reading
from qmq.audit.findings import PIECE, UNREAD
from qmq.audit.rules import LogJudge
from tests.unit.audit.forged import write_world

BROKEN = "broken"


def job_of(data: Path) -> plan.Job:
    write_world(data, rounds=3)
    copy = PathCopy(data)
    end, bases = copy.describe().end, copy.bases
    copy.close()
    places = {name: {"path": str(data)} for name in ("master", "slave")}
    logs = {name: LogRange(0, end, 0) for name in places}
    return plan.Job(places, Reading(logs), [(0, end)], frozenset({0}), end, bases=dict.fromkeys(places, bases))


def facts(jobs: list[plan.Job]) -> list[Any]:
    tasks: list[list[plan.Task]] = [[(number, *job.pieces[0])] for number, job in enumerate(jobs)]
    numbers = pa.RecordBatch.from_arrays([pa.array(range(len(tasks)), pa.int64())], ["id"])
    return list(plan._read(jobs, tasks, [numbers]))


def judged_rows(jobs: list[plan.Job], batches: list[Any]) -> dict[int, list[tuple[str, Any]]]:
    """Return (kind, row) of each broker group."""
    found: dict[int, list[tuple[str, Any]]] = {number: [] for number in range(len(jobs))}
    for batch in plan._judge(jobs, batches):
        for row in batch.to_pylist():
            found[row["job"]].append((row["kind"], json.loads(row["payload"])))
    return found


def test_reader_that_fails_makes_its_own_group_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = [job_of(tmp_path / "whole"), job_of(tmp_path / BROKEN)]
    read = Reading.read

    def fails(self: Reading, copies: Any, begin: int, end: int) -> Any:
        if BROKEN in str(copies["master"]._folder):
            raise ZeroDivisionError("of the audit itself")
        return read(self, copies, begin, end)

    monkeypatch.setattr(Reading, "read", fails)
    found = judged_rows(jobs, facts(jobs))
    assert UNREAD not in dict(found[0]) and PIECE in dict(found[0])
    assert found[1] == [(UNREAD, {"text": "it could not be read at 0: ZeroDivisionError: of the audit itself"})]


def test_judge_that_fails_makes_its_own_group_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = [job_of(tmp_path / "whole"), job_of(tmp_path / BROKEN)]
    take = LogJudge.take

    def fails(self: LogJudge, piece: int, facts: PieceFacts) -> Iterator[Any]:
        yield from take(self, piece, facts)
        if facts.frames == 0:
            raise KeyError("of the audit itself")

    monkeypatch.setattr(LogJudge, "take", fails)
    batches = facts(jobs)
    rows = [row for batch in batches for row in batch.to_pylist()]
    for row in rows:
        if row["job"] == 1 and row["key"] == plan.GROUP:
            row["payload"] = pickle.dumps(PieceFacts())
    found = judged_rows(jobs, [pa.RecordBatch.from_pylist(rows, batches[0].schema)])
    assert UNREAD not in dict(found[0])
    [text] = [row["text"] for kind, row in found[1] if kind == UNREAD]
    assert text == "it could not be judged (group): KeyError: 'of the audit itself'"
