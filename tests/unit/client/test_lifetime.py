"""Shell. A failed client task is logged at once; a cancelled one is not."""

from __future__ import annotations

import asyncio

import pytest

import qmq
from qmq.client.lifetime import logged_task
from qmq.client.sender import Sender
from tests.unit.client.world import TOKEN


async def test_failed_task_is_logged_at_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, metaserver
) -> None:
    async def broken(self: Sender) -> None:
        raise ValueError("a defect")

    monkeypatch.setattr(Sender, "_tick", broken)
    async with qmq.Producer(metaserver=metaserver.url, app="test", token=TOKEN):
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert "client task failed" in caplog.text and "a defect" in caplog.text


async def test_a_part_that_is_cancelled_is_not(caplog: pytest.LogCaptureFixture) -> None:
    task = logged_task(asyncio.create_task(asyncio.sleep(3600)))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert not caplog.text
