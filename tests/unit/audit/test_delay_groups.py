"""Shell. Each message of a delay group is in one state, and its batches are compared with the logs of their targets."""

from __future__ import annotations

from pathlib import Path

import pyarrow.dataset
import pytest

from qmq.audit import delay_groups
from qmq.audit.copies import PathCopy
from qmq.audit.delay_groups import Account, Source, account_for
from qmq.audit.delays import DELAY_STATES
from qmq.audit.executors import Executors
from qmq.audit.group import audit_groups
from qmq.audit.results import Group
from qmq.audit.wave import Options
from qmq.codec import FLAG_DELAYED, encode_message, join_batch
from qmq.delayserver.schedule.record import with_due
from qmq.log.delay_frames import SCHEDULE_FOLDER, Outcome, encode_dispatch, encode_places, encode_settled
from qmq.log.frame import FrameKind
from qmq.message import Message
from tests.unit.audit.logs import HOUR_MS, LogWriter
from tests.unit.audit.test_table import A


def delayed(data: Path, *, is_early: bool = False) -> tuple[LogWriter, list[int]]:
    """Write a delay group's log with seven messages due at once; return their numbers.

    Messages 0 to 2 are stored, 3 has an unknown outcome, 4 is cancelled, 5 is rewritten for tomorrow, 6 is not sent.
    With `is_early` the rewritten one is dispatched at once.
    """
    log = LogWriter.begun(data)
    due_ms = log.timestamp_ms + 1_000
    encoded = [encode_message(Message(A, {}, id=f"m{n}"), 0) for n in range(7)]
    messages = [with_due(bytes([data[0] | FLAG_DELAYED]) + data[1:], due_ms) for data in encoded]
    frame = log.messages(A, messages)
    first = frame.offset + frame.body_at + 4 * (len(messages) + 1)
    numbers = [first + n * len(messages[0]) for n in range(7)]
    log.timestamp_ms += 2 * HOUR_MS
    for batch, chosen in ((1, numbers[:3]), (2, numbers[3:4])):
        body = encode_dispatch("g1", encode_places([(number, due_ms) for number in chosen]))
        log.frame(FrameKind.DISPATCH, A, body, count=len(chosen), numbers=(7, batch))
    sent = log.frames[-2]
    log.frame(FrameKind.SETTLED, "", encode_settled([(sent.producer, sent.batch, Outcome.STORED)]), count=1)
    log.frame(FrameKind.CANCEL, A, encode_places([(numbers[4], due_ms)]), count=1)
    tomorrow = join_batch([with_due(messages[5], due_ms + 24 * HOUR_MS)])
    carried = log.frame(FrameKind.CARRY, A, encode_places([(numbers[5], due_ms)]) + tomorrow, count=1)
    if is_early:
        numbers.append(carried.offset + carried.body_at + 16 + 4 * 2)
        body = encode_dispatch("g1", encode_places([(numbers[7], due_ms)]))
        log.frame(FrameKind.DISPATCH, A, body, count=1, numbers=(7, 3))
    log.close()
    return log, numbers


def write_groups(folder: Path) -> tuple[list[Group], LogWriter, list[int]]:
    """Write equal copies of a delay group and of its target; return them, the delay group's log and its numbers."""
    for copy in ("master", "slave"):
        log, numbers = delayed(folder / "d1" / copy)
        (folder / "d1" / copy / SCHEDULE_FOLDER).mkdir()
        target = LogWriter.begun(folder / "g1" / copy)
        target.batch(A, 1)
        target.close()
    places = {
        name: {copy: {"path": str(folder / name / copy)} for copy in ("master", "slave")} for name in ("d1", "g1")
    }
    return [Group(name, of) for name, of in places.items()], log, numbers


def test_every_delayed_message_has_a_single_state(tmp_path: Path) -> None:
    """A directory is judged at the time of its newest frame. Without Spark, tables are written all the same."""
    groups, log, numbers = write_groups(tmp_path)
    result, _ = audit_groups(None, groups, Options(parquet=tmp_path / "out"))
    sums = [tuple(row[name] for name in ("subject", "taken", *DELAY_STATES, "late")) for row in result.delayed]
    assert (result.unreadable, sums) == (None, [(A, 8, 3, 1, 1, 1, 1, 1, 3)])
    assert [(row["what"], row["copy"], row["sequence"], row["id"], row["offset"]) for row in result.findings] == [
        ("unsent", "both", 6, "m6", log.frames[1].offset),
        ("lost", "both", numbers[0], None, log.frames[2].offset),
    ]
    assert "3 messages" in result.findings[1]["text"] and "log of g1" in result.findings[1]["text"]
    rows = pyarrow.dataset.dataset(tmp_path / "out/d1/delayed", partitioning="hive").to_table().to_pylist()
    assert [(row["day"], row["taken"], row["late"]) for row in rows] == [("2023-11-14", 7, 3), ("2023-11-15", 1, 0)]


def account(folder: Path, log: LogWriter, closed: dict[str, list[str]] | None = None) -> Account:
    """Account for a delay group two hours after its last frame."""
    source = Source("d1", {"path": str(folder)})
    return account_for(Executors(None), source, [], now_ms=log.timestamp_ms + 2 * HOUR_MS, closed=closed)


def test_messages_for_closed_groups_are_a_note(tmp_path: Path) -> None:
    log, numbers = delayed(tmp_path)
    later = account(tmp_path, log, {"g1": ["it has no slave"]})
    assert (later.rows[0]["under_way"], later.rows[0]["unsent"], later.findings) == (0, 2, [])
    assert later.notes == [
        "2 messages that were due an hour ago or earlier wait for broker groups that accept none: g1 (it has no slave)"
    ]
    later = account(tmp_path, log, {"g2": ["full"]})
    assert [("planned for g1 at" in row["text"], row["sequence"]) for row in later.findings] == [
        (True, numbers[3]),
        (False, numbers[6]),
    ]


def test_unsent_messages_beyond_the_list_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, _ = delayed(tmp_path)
    every = account(tmp_path, log)
    monkeypatch.setattr(delay_groups, "FINDINGS_MAX", 1)
    few = account(tmp_path, log)
    assert (few.findings, few.more) == (every.findings[:1], {"unsent": 1})


@pytest.mark.parametrize("late_ms, state", [(HOUR_MS, "pending"), (HOUR_MS + 1, "unsent")])
def test_message_is_unsent_an_hour_after_its_time(tmp_path: Path, late_ms: int, state: str) -> None:
    log, _ = delayed(tmp_path)
    due_ms = log.frames[1].timestamp_ms + 1_000
    found = account_for(Executors(None), Source("d1", {"path": str(tmp_path)}), [], now_ms=due_ms + late_ms)
    assert (found.rows[0]["pending"], found.rows[0]["unsent"]) == ((2, 0) if state == "pending" else (1, 1))


def test_message_planned_before_its_own_time_is_early(tmp_path: Path) -> None:
    log, numbers = delayed(tmp_path, is_early=True)
    source = Source("d2", {"path": str(tmp_path)})
    early = account_for(Executors(None), source, [], now_ms=log.timestamp_ms).findings
    assert [(row["what"], row["sequence"], row["offset"]) for row in early] == [
        ("early", numbers[7], log.frames[-1].offset),
        ("unsent", numbers[6], log.frames[1].offset),
    ]


@pytest.mark.parametrize("buckets", [1, 5])
def test_buckets_do_not_change_the_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, buckets: int) -> None:
    groups, log, _ = write_groups(tmp_path)
    delays, target = (Source(group.name, group.places["master"]) for group in groups)
    whole = account_for(Executors(None), delays, [target], now_ms=log.timestamp_ms)
    monkeypatch.setattr(delay_groups, "BUCKET_BYTES", log.end // (buckets - 1) if buckets > 1 else 1 << 30)
    assert account_for(Executors(None), delays, [target], now_ms=log.timestamp_ms) == whole


def test_retention_of_a_target_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch in a segment that is deleted between two steps would look lost."""
    groups, log, _ = write_groups(tmp_path)
    held: list[Path] = []
    monkeypatch.setattr(PathCopy, "hold", lambda copy: held.append(copy._folder))
    delays, target = (Source(group.name, group.places["master"]) for group in groups)
    account_for(Executors(None), delays, [target], now_ms=log.timestamp_ms)
    assert [folder.relative_to(tmp_path).parts[0] for folder in held] == ["g1"]
