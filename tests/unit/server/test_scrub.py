"""Shell. What the scrub sees while it reads a closed segment, which takes a minute at the usual rate."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

from qmq.errors import DiskFailed
from qmq.log.memory_disk import MemoryDisk
from qmq.server import scrub
from tests.unit.log.logs import Copy


def test_newest_file_that_is_gone_is_missed_while_a_closed_segment_is_read(monkeypatch):
    monkeypatch.setattr(scrub, "LOOK_S", 0.01)
    monkeypatch.setattr(scrub, "PIECE_BYTES", 200)
    copy = Copy(MemoryDisk(), tail_bytes=0)
    copy.begin_epoch()
    copy.fill(60, size=100)
    assert len(copy.log.bases) > 1

    async def run():
        loop, is_read, failures = asyncio.get_running_loop(), asyncio.Event(), asyncio.Queue()
        verify = copy.log.verify

        def verified(*args):
            try:
                return verify(*args)
            finally:
                loop.call_soon_threadsafe(is_read.set)

        monkeypatch.setattr(copy.log, "verify", verified)
        service = SimpleNamespace(node=SimpleNamespace(log=copy.log), fail=failures.put_nowait)
        settings = SimpleNamespace(scrub_hours=168, scrub_bytes_per_s=1)  # minutes for each piece
        reading = asyncio.ensure_future(scrub.Scrub(service, settings).run())
        await is_read.wait()
        copy.disk.system.unlink(copy.disk._path(f"log/{copy.log.bases[-1]:020d}.log"))
        async with asyncio.timeout(10):
            assert isinstance(await failures.get(), DiskFailed)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)

    asyncio.run(run())
