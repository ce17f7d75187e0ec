"""Shell. Room to start with on a full disk."""

from __future__ import annotations

import asyncio

import pytest

from qmq.log.disk import RealDisk
from qmq.server import reserve


class Shared(RealDisk):
    """A disk on which others have left so much beside the reserve."""

    left = 1 << 30

    def free_bytes(self):
        return self.left + (0 if self.has(reserve.NAME) else reserve.RESERVE_BYTES)


@pytest.fixture
def disk(tmp_path):
    disk = Shared(tmp_path)
    yield disk
    disk.close()


def test_the_reserve_is_given_up_for_a_start_and_made_again_when_there_is_room(disk):
    reserve.keep_reserve(disk, 1 << 20)
    assert disk.size(reserve.NAME) == reserve.RESERVE_BYTES
    asyncio.run(reserve.wait_for_room(disk))
    assert disk.has(reserve.NAME), "there is room without it"
    disk.left = 100
    asyncio.run(reserve.wait_for_room(disk))
    assert not disk.has(reserve.NAME)
    reserve.keep_reserve(disk, 1 << 20)
    assert not disk.has(reserve.NAME), "it would take what consumers need"
    disk.left = 1 << 30
    reserve.keep_reserve(disk, 1 << 20)
    assert disk.size(reserve.NAME) == reserve.RESERVE_BYTES


def test_without_reserve_and_room_the_start_waits_until_there_is_some(disk, monkeypatch, caplog):
    monkeypatch.setattr(reserve, "LOOK_S", 0.001)
    looked = []

    def free_bytes():
        looked.append(1)
        return reserve.NEEDED_BYTES - (len(looked) < 20)

    monkeypatch.setattr(disk, "free_bytes", free_bytes)
    asyncio.run(reserve.wait_for_room(disk))
    assert len(looked) == 20 and "waiting for room" in caplog.text
