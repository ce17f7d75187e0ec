"""Core. On a nearly full disk a segment grows instead of reserving its whole size."""

from __future__ import annotations

from pathlib import Path

import pytest

from qmq.log import RealDisk
from qmq.log.segments import log_name
from tests.unit.log.logs import Copy

SEGMENT_BYTES = 64 << 10


class NearlyFull(RealDisk):
    """A real disk with a chosen number of free bytes."""

    left = 1 << 30

    def free_bytes(self) -> int:
        return self.left


@pytest.fixture
def disk(tmp_path: Path):
    disk = NearlyFull(tmp_path)
    yield disk
    disk.close()


def test_segment_grows_on_a_nearly_full_disk(disk: NearlyFull):
    disk.left = 2 * SEGMENT_BYTES
    copy = Copy.begun(disk, segment_bytes=SEGMENT_BYTES)
    copy.flush()
    assert disk.size(log_name(copy.log.bases[0])) == SEGMENT_BYTES
    disk.left = 2 * SEGMENT_BYTES - 1
    while len(copy.log.bases) < 2:
        copy.fill(1, size=4000)
    assert disk.size(log_name(copy.log.bases[1])) < SEGMENT_BYTES // 4


@pytest.mark.parametrize("torn", [0, 1, 50])
def test_grown_segment_is_recovered(disk: NearlyFull, torn: int):
    copy = Copy.begun(disk, segment_bytes=SEGMENT_BYTES)
    disk.left = 0
    while len(copy.log.bases) < 3:
        copy.fill(3, size=4000)
    before = copy.messages("last").offset
    copy.flush()
    end, name, base = copy.log.end, log_name(copy.log.bases[-1]), copy.log.bases[-1]
    if torn:
        disk.truncate(name, end - base - torn)
    assert copy.reopen().end == (before if torn else end) and copy.log.damage is None
    copy.fill(3, name="after")
    last = copy.log.end
    assert copy.reopen().end == last
