"""Core. An unread backlog costs disk, not memory."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest

from qmq.log import RealDisk
from tests.unit.log.logs import Copy


@pytest.mark.slow
def test_memory_stays_flat_while_a_backlog_grows(tmp_path: Path):
    disk = RealDisk(tmp_path)
    copy = Copy.begun(disk, segment_bytes=256 << 10, tail_bytes=128 << 10)
    held = []
    tracemalloc.start()
    try:
        for i in range(3_000):
            copy.messages(*"abc", subject=f"s{i % 5}", size=500)
            if i % 10 == 0:
                copy.flush()
            if i % 1_000 == 999:
                copy.flush()
                held.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
        disk.close()
    grown = copy.log.end * 2 // 3
    assert grown > 3 << 20 and held[-1] - held[0] < 300 << 10, f"{held} for {grown} more bytes of log"
