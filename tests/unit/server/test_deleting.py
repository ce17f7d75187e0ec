"""Shell. Due segments are deleted one after the other, beside other writes."""

from __future__ import annotations

import asyncio
from functools import partial
from types import SimpleNamespace

from qmq.log.segments import segment_bases
from qmq.server import service
from qmq.server.service import Service
from tests.unit.log.logs import Copy


class World:
    """A service with a log that keeps its newest segment and gets a message per commit."""

    def __init__(self, copy: Copy) -> None:
        self.copy, self.gone, self.log_holders, self.reader_positions = copy, [], set(), {}
        self.node = SimpleNamespace(log=copy.log, group="g", decide_retention=lambda keeper: None)
        self.node.oldest_may_go = lambda keeper, readers: len(copy.log.bases) > 1
        self._disk, self._keeper, self.disk_free_limit = copy.disk, None, 1 << 50
        self._disk_watch = SimpleNamespace(is_full=False)
        self._look_after_quarantine = lambda: None
        self._look_after_log, self._delete_oldest = (
            partial(method, self) for method in (Service._look_after_log, Service._delete_oldest)
        )

    def guarded(self, call) -> None:
        call()

    def read(self, job, done) -> None:
        done(job())

    def pass_soon(self) -> None:
        asyncio.get_running_loop().call_soon(self._commit)

    def _commit(self) -> None:
        self.copy.messages("m")
        before = segment_bases(self.copy.disk)
        self.copy.flush()
        self.gone.append(len({*before} - {*segment_bases(self.copy.disk)}))


async def test_each_deleted_segment_is_a_commit(monkeypatch):
    """One commit with 70 deletions delayed acknowledgements by 3.8 s."""
    monkeypatch.setattr(service, "DELETE_S", 0.001)
    copy = Copy.filled(60)
    segments, world = len(copy.log.bases) - 1, World(copy)

    house = asyncio.ensure_future(Service._keep_house(world))
    async with asyncio.timeout(10):
        while sum(world.gone) < segments:
            await asyncio.sleep(0.001)
    house.cancel()
    await asyncio.gather(house, return_exceptions=True)
    assert segments > 5 and set(world.gone) == {1}
