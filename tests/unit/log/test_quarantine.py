"""Core. Contents and bound of a copy's quarantine."""

from __future__ import annotations

import pytest

from qmq.log.memory_disk import MemoryDisk
from qmq.log.quarantine import all_kept, bound, clear, keep_bytes, keep_files
from qmq.log.segments import log_name
from tests.unit.broker.world import Client, Group


def a_copy(disk: MemoryDisk, begin: int, size: int, why: str = "seeded-anew") -> None:
    disk.put("log/a", bytes(size))
    keep_files(disk, ["log/a"], begin, begin + size, why)


def tail_with_a_message() -> bytes:
    group = Group.made().start()
    Client(group.a).produce("m")
    group.settle()
    begin = group.a.log.frames("s", 0, 1)[0].offset
    return group.a.disk.read(log_name(0), begin, group.a.log.end - begin)


def test_quarantine_drops_lowest_offsets_first():
    disk = MemoryDisk()
    for begin in (400, 0, 200):
        a_copy(disk, begin, 100)
    assert [kept.begin for kept in all_kept(disk)] == [0, 200, 400]
    left = bound(disk, 250)
    assert [kept.begin for kept in left] == [200, 400] == [kept.begin for kept in all_kept(disk)]
    a_copy(disk, 0, 100)
    assert [kept.begin for kept in all_kept(disk)] == [0, 200, 400], "its name is free again"


@pytest.mark.parametrize(
    ("why", "is_evidence"),
    [
        ("conflict with the master of epoch 2.1", True),
        ("damaged and unknown to the other copy", True),
        ("damaged", False),
    ],
)
def test_only_operators_clear_evidence(why, is_evidence):
    disk = MemoryDisk()
    keep_bytes(disk, 136, tail_with_a_message(), why)
    (kept,) = all_kept(disk)
    assert (kept.is_evidence, kept.messages, kept.why) == (is_evidence, 1, why)
    assert bool(bound(disk, 0)) == is_evidence
    assert [part.name for part in clear(disk, [kept.name])] == [kept.name] * is_evidence and not all_kept(disk)


def test_evidence_is_messages_or_missing_report():
    disk = MemoryDisk()
    keep_bytes(disk, 0, b"an epoch frame", "conflict with the master of epoch 2.1")
    disk.put(f"quarantine/{40:020d}-{60:020d}-0.bytes", b"its report comes next")
    assert [kept.is_evidence for kept in all_kept(disk)] == [False, True]
    assert [kept.begin for kept in bound(disk, 0)] == [40]
