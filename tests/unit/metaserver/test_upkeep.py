"""Shell. The background work of a metaserver: what is asked and stored, and what must not pile up or get lost."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from qmq.metaserver import upkeep as module
from qmq.metaserver.liveness import Question
from qmq.metaserver.model import BrokerKey, MetaserverRow
from qmq.metaserver.snapshot import Snapshots
from qmq.metaserver.upkeep import Upkeep
from tests.unit.metaserver.actions_world import World

KEY = BrokerKey("g1-a", 20881)


async def made(path):
    world = World(path / "database")
    await world.open()
    await world.copies()
    own = MetaserverRow("m1", "h", "g", 0, "1")
    return world, Upkeep(world.registry, world.brokers, Snapshots(None, "sqlite://"), own, poll_ms=1000)


def test_a_broker_is_not_asked_again_while_a_question_to_it_waits(tmp_path, monkeypatch):
    """Where a thousand machines are gone, questions would come faster than they time out."""

    async def test() -> None:
        world, upkeep = await made(tmp_path)
        ticks, asked, question = 0, [], Question(KEY, "m2.1", "x")
        ticked, go_on = asyncio.Event(), asyncio.Event()

        def to_ask(*, now_ms):
            nonlocal ticks
            ticks += 1
            if ticks % 10 == 0:
                ticked.set()
            return [question]

        async def ask(question):
            asked.append(question)
            await go_on.wait()

        monkeypatch.setattr(module, "TICK_S", 0)
        monkeypatch.setattr(world.liveness, "to_ask", to_ask)
        monkeypatch.setattr(upkeep, "ask", ask)
        watching = asyncio.create_task(upkeep._watch_silence())
        await ticked.wait()
        assert asked == [question]
        go_on.set()
        ticked.clear()
        await ticked.wait()
        assert len(asked) > 1, "once it is answered it may be asked again"
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching

    asyncio.run(test())


def test_what_a_master_says_while_its_last_words_are_stored_is_stored_too(tmp_path, monkeypatch):
    async def test() -> None:
        world, upkeep = await made(tmp_path)
        slave, said = world.registry.directory.groups["g1"].slave, world.registry.completeness
        write, stored = world.database.write, []

        async def slow(work):
            stored.append(said[slave.key])
            result = await write(work)
            if len(stored) == 1:
                said[slave.key] = slave, 2, False
            return result

        monkeypatch.setattr(world.database, "write", slow)
        said[slave.key] = slave, 2, True
        await upkeep._store_news()
        await upkeep._store_news()
        assert stored == [(slave, 2, True), (slave, 2, False)] and not said

    asyncio.run(test())
