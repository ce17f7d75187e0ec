"""Core. Files of a newer version: unknown fields are left out, unknown kinds are refused and nothing is changed."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from qmq.crc import crc32, decode_checked, encode_checked
from qmq.delayserver.schedule import Schedule
from qmq.delayserver.schedule.checkpoint import CHECKPOINT
from qmq.deploy.plan import Groups, load_plan
from qmq.errors import NewerFormat
from qmq.ledger import _decode, encode_entry
from qmq.log import fold
from qmq.log.frame import FrameKind
from qmq.log.manifest import decode_manifest, encode_manifest
from qmq.log.memory_disk import MemoryDisk
from qmq.metaserver.cluster import snapshot
from qmq.operator_limits import OperatorLimits
from qmq.replication.assignment import Address, Assignment
from qmq.replication.identity import COPY, NAME, POINTS, IdentityFile, Point, PointFile
from qmq.types import Epoch, Role
from tests.unit.delayserver.delay_log import HOUR_MS, DelayLog, delayed, flush_all, places
from tests.unit.log.logs import Copy
from tests.unit.metaserver.test_snapshot import SNAPSHOT
from tests.unit.test_ledger import FIRST

NEWER = {"later": 1}


def with_unknown_fields(value: object) -> object:
    """Return a JSON value with a field of a newer version in each object that has any."""
    if isinstance(value, list | tuple):
        return [with_unknown_fields(item) for item in value]
    if isinstance(value, dict):
        return {name: with_unknown_fields(item) for name, item in value.items()} | NEWER
    return value


def test_identity_of_a_newer_version_is_read():
    """A fixed bug: an older broker could not start after a newer one had run."""
    disk = MemoryDisk()
    file = IdentityFile(disk, new_incarnation="a")
    file.learn(Epoch(3, 2))
    limits = OperatorLimits("s", "*", expires_after_s=60, expired_die=True)
    assignment = Assignment(
        "g1", 4, Role.MASTER, Address("10.0.0.1", 1, 2, 3), (Address("10.0.0.2", 1, 2, 3),), limits=(limits,)
    )
    file.assigned("g1", assignment.to_json(), "b:1")
    stored = decode_checked(disk.read(NAME, 0, disk.size(NAME)))
    disk.put(NAME, encode_checked(with_unknown_fields(stored)))  # type: ignore[arg-type]
    found = IdentityFile(disk, new_incarnation="b").value
    assert (found.incarnation, found.epoch, found.known_term) == ("a", Epoch(3, 2), 4)
    assert Assignment.from_json(found.assignment or {}) == assignment


def test_files_of_a_newer_version_are_read(tmp_path: Path) -> None:
    document = with_unknown_fields(json.loads(json.dumps(snapshot._to_json(SNAPSHOT), default=list)))
    assert snapshot._from_json(document) == SNAPSHOT
    assert _decode(encode_checked(decode_checked(encode_entry(FIRST)) | NEWER)) == FIRST
    assert decode_manifest(encode_checked(decode_checked(encode_manifest([0, 64])) | NEWER)) == [0, 64]
    plan = load_plan(tmp_path / "plan.json", Groups(("g1",)), 9_000, 9_100)
    (tmp_path / "plan.json").write_text(json.dumps(with_unknown_fields(asdict(plan))))
    assert load_plan(tmp_path / "plan.json", Groups(("g1",)), 9_000, 9_100).brokers == plan.brokers


def test_acknowledged_points_of_a_newer_version_are_read() -> None:
    disk = MemoryDisk()
    file = PointFile(disk)
    own, lacks = Point(Epoch(3, 2), 500, 7), Point(Epoch(2, 1), 900, 8)
    file.following()
    file.rolled_back(lacks)
    file.acknowledged(own)
    file.save()
    for name in (POINTS, COPY):
        stored = decode_checked(disk.read(name, 0, disk.size(name)))
        disk.put(name, encode_checked(stored | NEWER))
    again = PointFile(disk)
    assert (again.own, again.lacks) == (own, lacks)


def changed_checkpoint(data: bytes, change: str) -> bytes:
    """Return a checkpoint as a newer version may write it, with a correct CRC."""
    begin = 12 + int.from_bytes(data[8:12], "little")
    head = json.loads(data[12:begin])
    if change == "unknown field":
        head |= NEWER
    elif change == "longer rows":
        head["segments"] = [[*row, 1] for row in head["segments"]]
    elif change == "shorter rows":
        head["segments"] = [row[:7] for row in head["segments"]]
    elif change == "other type":
        head["segments"] = 1
    text = json.dumps(head).encode()
    magic = b"QDC2" if change == "magic" else data[4:8]
    rest = magic + len(text).to_bytes(4, "little") + text + data[begin:]
    return crc32(rest).to_bytes(4, "little") + rest


@pytest.mark.parametrize(
    "change, is_rebuilt",
    [("unknown field", False), ("longer rows", False), ("shorter rows", True), ("other type", True), ("magic", True)],
)
def test_schedule_of_a_newer_version_loses_no_message(change: str, is_rebuilt: bool) -> None:
    """It is derived from the log, so the older version reads it or makes it again."""
    log, disk = DelayLog(), MemoryDisk()
    where = log.messages([delayed("s", f"m{i}", i * 1000) for i in range(200)])
    log.cancel(where[:50])
    schedule = Schedule(disk, segment_ms=HOUR_MS, log_start=log.start)
    log.file_into(schedule)
    flush_all(schedule)
    disk.put(CHECKPOINT, changed_checkpoint(bytes(disk.read(CHECKPOINT, 0, disk.size(CHECKPOINT))), change))
    older = Schedule(disk, segment_ms=HOUR_MS, log_start=log.start)
    assert bool(older.rebuilt) == is_rebuilt
    log.file_into(older)
    assert places(older.list(0, 1 << 62, None, 1000)()) == where[50:]


def test_frame_of_a_newer_version_stops_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is neither a torn tail nor damage: an older version cut it off, with all frames behind it."""
    copy = Copy.filled(5)
    copy.progress(FrameKind.POSITION, "", (5, 0, 0))
    copy.messages("after")
    copy.flush()
    before = copy.disk.copy()
    monkeypatch.setattr("qmq.log.frame._KINDS", frozenset({FrameKind.MESSAGES, FrameKind.EPOCH}))
    with pytest.raises(NewerFormat, match="frame of kind 4 .* Start the newer version"):
        copy.reopen()
    assert copy.disk.names("quarantine") == [] and copy.disk.names("log") == before.names("log")
    monkeypatch.undo()
    assert len(copy.reopen().frames("s", 0, 9)) == 1, "the newer version goes on"


def test_snapshot_of_a_newer_version_stops_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the log's first segments there is no other way to its state: the whole copy was set aside."""
    copy = Copy.filled(60, tail_bytes=0)
    whole = copy.disk.copy()
    monkeypatch.setattr(fold, "_VERSION", 3)
    assert Copy(whole, tail_bytes=0).log.end == copy.log.end, "from the first frame on"
    while copy.log.bases[0] == 0:
        copy.drop_oldest_segment()
    with pytest.raises(NewerFormat, match="snapshot of version 4"):
        copy.reopen()
    assert copy.disk.names("quarantine") == []
    monkeypatch.undo()
    assert copy.reopen().end > 0
