"""Shell. Room to start on a full disk."""

from __future__ import annotations

import asyncio

import pytest

from qmq.log.disk import REMOVED, SWEPT_BYTES, RealDisk
from qmq.server import running


class Shared(RealDisk):
    """A disk with a chosen number of free bytes beside the reserve."""

    left = 1 << 30

    def free_bytes(self):
        removed = sum(self.size(f"{REMOVED}/{name}") for name in self.names(REMOVED))
        return self.left + running.RESERVE_BYTES - self.size(running.RESERVE) - removed


@pytest.fixture
def disk(tmp_path):
    disk = Shared(tmp_path)
    yield disk
    disk.close()


def test_reserve_is_freed_and_rebuilt(disk):
    running.keep_reserve(disk, 1 << 20)
    assert disk.size(running.RESERVE) == running.RESERVE_BYTES
    asyncio.run(running.wait_for_room(disk))
    assert disk.has(running.RESERVE), "there is enough room"
    disk.left = 100
    asyncio.run(running.wait_for_room(disk))
    assert not disk.has(running.RESERVE)
    running.keep_reserve(disk, 1 << 20)
    assert not disk.has(running.RESERVE), "consumers need the room"
    disk.left = 1 << 30
    running.keep_reserve(disk, 1 << 20)
    assert disk.size(running.RESERVE) == running.RESERVE_BYTES


def test_large_reserve_is_freed_at_once(disk):
    running.keep_reserve(disk, 1 << 20)
    assert disk.size(running.RESERVE) > SWEPT_BYTES
    disk.left = 100
    asyncio.run(asyncio.wait_for(running.wait_for_room(disk), 10))
    assert disk.free_bytes() == 100 + running.RESERVE_BYTES


def test_removed_files_are_freed_before_the_reserve(disk):
    running.keep_reserve(disk, 1 << 20)
    disk.create("log/segment", 3 * SWEPT_BYTES)
    disk.remove("log/segment")
    disk.left = 3 * SWEPT_BYTES + 100  # all of them belong to the segment
    asyncio.run(asyncio.wait_for(running.wait_for_room(disk), 10))
    assert disk.has(running.RESERVE) and disk.free_bytes() >= running.NEEDED_BYTES


def test_start_waits_for_room(disk, monkeypatch, caplog):
    monkeypatch.setattr(running, "LOOK_S", 0.001)
    looked = []

    def free_bytes():
        looked.append(1)
        return running.NEEDED_BYTES - (len(looked) < 20)

    monkeypatch.setattr(disk, "free_bytes", free_bytes)
    asyncio.run(running.wait_for_room(disk))
    assert len(looked) == 20 and "waiting for room" in caplog.text
