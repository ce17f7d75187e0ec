"""Shell. Removed files are freed while a broker runs, and when it stops."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from qmq.errors import DiskFailed
from qmq.server.service import Service


class Ended(Exception):
    """The process ends."""


class World:
    """A service with reads that the test completes."""

    def __init__(self) -> None:
        self.disk, self._disk_watch = SimpleNamespace(sweep=None), SimpleNamespace(is_full=False)
        self._loop, self.pieces = asyncio.get_running_loop(), asyncio.Queue()

    def read(self, job, done) -> None:
        self.pieces.put_nowait(lambda result: Service._run_guarded(self, lambda: done(result)))

    def fail(self, error: BaseException) -> None:
        raise Ended from error


async def test_broker_stops_during_a_sweep():
    """It used to end as fenced, without saving its acknowledged point."""

    world = World()
    sweeping = asyncio.ensure_future(Service._sweep(world, world.disk))
    piece_is_done = await world.pieces.get()
    sweeping.cancel()
    await asyncio.gather(sweeping, return_exceptions=True)
    piece_is_done(True)


async def test_failed_sweep_ends_the_process():
    """It used to be retried silently twenty times a second."""

    world = World()
    sweeping = asyncio.ensure_future(Service._sweep(world, world.disk))
    piece_is_done = await world.pieces.get()
    with pytest.raises(Ended):
        piece_is_done(DiskFailed("removed/log-0: Input/output error"))
    sweeping.cancel()
