"""Shell. The bound of a copy's quarantine follows its log and its disk."""

from __future__ import annotations

from qmq.log.memory_disk import MemoryDisk
from qmq.log.quarantine import QuarantineKeeper
from tests.unit.log.test_quarantine import a_copy


def test_bound_is_the_log_or_a_segment():
    disk = MemoryDisk()
    for begin in (0, 200, 400):
        a_copy(disk, begin, 100)
    keeper = QuarantineKeeper(disk, 0, segment_bytes=150)
    for log_bytes, left in ((1_000, 300), (200, 200), (0, 100)):
        keeper.look(log_bytes, is_disk_short=False)
        assert (keeper.bytes, keeper.limit, keeper.is_full) == (left, max(log_bytes, 150), False)
    keeper.look(1_000, is_disk_short=True)
    assert keeper.bytes == 0


def test_evidence_over_the_bound_is_logged_once(caplog):
    disk = MemoryDisk()
    a_copy(disk, 0, 200, "not-listed")
    keeper = QuarantineKeeper(disk, 100, segment_bytes=1)
    for _ in range(2):
        keeper.look(0, is_disk_short=False)
    assert keeper.is_full and len([line for line in caplog.messages if "over its bound" in line]) == 1
    (kept,) = keeper.all()
    keeper.clear([kept.name])
    assert not keeper.is_full and keeper.bytes == 0
    a_copy(disk, 0, 300, "not-listed")
    keeper.look(0, is_disk_short=False)
    assert keeper.bytes == 300
