"""Shell. A failure while one broker group is read or judged concerns only that group."""

from __future__ import annotations

import json
import pickle
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from qmq.audit import plan
from qmq.audit.copies import PathCopy
from qmq.audit.facts import LogRange, PieceFacts, Reading
from qmq.audit.findings import ACCOUNT, HOUR, PIECE, SUBJECT, UNREAD, Share, share_of
from qmq.audit.results import FirstRows
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


def facts(jobs: list[plan.Job]) -> list[plan.Fact]:
    return sorted(fact for task in plan.tasks_of(jobs, 1 << 20) for fact in plan.read_task(task))


def judged_rows(jobs: list[plan.Job], found: list[plan.Fact]) -> dict[int, list[tuple[str, Any]]]:
    """Return (kind, row) of each broker group."""
    rows: dict[int, list[tuple[str, Any]]] = {number: [] for number in range(len(jobs))}
    for judged in plan.judge_facts(found):
        for job, _, kind, payload, _ in judged:
            rows[job].append((kind, json.loads(payload)))
    return rows


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
    changed = [
        (*fact[:4], _with_no_frame(fact[4])) if fact[:2] == (1, plan.GROUP) and fact[2] != plan.SETUP else fact
        for fact in facts(jobs)
    ]
    found = judged_rows(jobs, changed)
    assert UNREAD not in dict(found[0])
    [text] = [row["text"] for kind, row in found[1] if kind == UNREAD]
    assert text == "it could not be judged (group): KeyError: 'of the audit itself'"


def _with_no_frame(packed: bytes) -> bytes:
    context, _ = pickle.loads(packed)
    return pickle.dumps((context, PieceFacts()))


def part_of(tasks: list[plan.Task], kind: type) -> list[int]:
    return [sum(isinstance(step, kind) for step in task) for task in tasks]


def test_task_holds_nothing_of_other_groups(tmp_path: Path) -> None:
    """A task of a cluster with a thousand groups is as small as one of a single group."""
    job = job_of(tmp_path / "data")
    one, many = (plan.tasks_of([job] * groups, 1) for groups in (1, 1_000))
    assert len(many) == 1_000 * len(one)
    assert max(len(pickle.dumps(task, 5)) for task in many) <= max(len(pickle.dumps(task, 5)) for task in one) + 8


def test_small_segments_share_a_task(tmp_path: Path) -> None:
    job = replace(job_of(tmp_path / "data"), segments=range(0, 37_000, 1_000))
    job = replace(job, bases=dict.fromkeys(job.places, range(0, 38_000, 1_000)), pieces=[(0, 38_000)])
    assert part_of(plan.tasks_of([job], 64 << 20), plan.Segment) == [37]
    assert part_of(plan.tasks_of([job], 1), plan.Piece).count(1) == 1


def test_groups_of_a_large_run_share_the_listed_rows() -> None:
    assert [share_of(groups, takes_ends=True).hours for groups in (1, 10, 100, 1_000)] == [20_000, 20_000, 2_000, 200]


@pytest.mark.parametrize("takes_ends", [True, False])
def test_driver_takes_no_more_than_its_share(tmp_path: Path, takes_ends: bool) -> None:
    """A row above the share shows that there are more. Ends of subjects serve ledger and journal alone."""
    job = replace(job_of(tmp_path / "data"), share=Share(hours=2, accounts=0, takes_ends=takes_ends))
    rows = [row for judged in plan.judge_facts(facts([job])) for row in judged]
    listed, all_rows = Counter(kind for _, _, kind, _, is_listed in rows if is_listed), Counter(row[2] for row in rows)
    assert (listed[HOUR], listed[ACCOUNT]) == (3, 1) and min(all_rows[HOUR], all_rows[SUBJECT]) > 3
    assert listed[SUBJECT] == (all_rows[SUBJECT] if takes_ends else 0)


def test_first_rows_are_kept_in_their_order() -> None:
    found = FirstRows(2, "hour")
    for hour in range(1_000, 0, -1):
        found.add({"subject": "s", "hour": hour})
        assert len(found._rows) <= 104
    assert ([row["hour"] for row in found.rows()], found.is_cut) == ([1, 2], True)


def test_verified_ends_reach_their_judges(tmp_path: Path) -> None:
    """They are facts of their own, so no task receives the ends of a hundred thousand subjects."""
    job = replace(job_of(tmp_path / "data"), ends={"order.changed": 7, "other": 3})
    found = judged_rows([job], facts([job]))[0]
    assert not [row for kind, row in found if kind == SUBJECT and row["subject"] == "other"]
    assert [row["text"] for kind, row in found if kind == "finding" and row.get("subject") == "order.changed"]
