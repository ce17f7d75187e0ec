"""Shell. Python's garbage collector in a server."""

from __future__ import annotations

import asyncio
import gc
import mmap
import traceback
import weakref

import pytest

from qmq import memory


@pytest.fixture(autouse=True)
def alone():
    """Hide the objects of earlier tests from the collector: scanning them takes seconds."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


class Circle:
    def __init__(self):
        self.me = self


def young():
    return sum(type(object) is Circle for object in gc.get_objects(0))


async def collected(task):
    """Wait until no cycle is left, then end the collector."""
    async with asyncio.timeout(60):
        while any(type(object) is Circle for object in gc.get_objects()):
            await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_collector_runs_by_the_clock(monkeypatch):
    monkeypatch.setattr(memory, "YOUNG_S", 0.01)

    gc.collect()
    task = asyncio.create_task(memory.collect_by_the_clock())
    await asyncio.sleep(0)
    assert not gc.isenabled()
    kept = [Circle() for _ in range(5_000)]
    for _ in range(5_000):
        Circle()
    assert young() == 10_000, "nothing looked at them yet"
    async with asyncio.timeout(60):
        while young():
            await asyncio.sleep(0.01)
    assert sum(type(object) is Circle for object in gc.get_objects()) == len(kept), "what nobody has is gone"
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert gc.isenabled()


async def test_full_collection_is_periodic(monkeypatch):
    monkeypatch.setattr(memory, "YOUNG_S", 0.001)
    monkeypatch.setattr(memory, "FULL_S", 0.01)

    gc.collect()
    olds = [Circle() for _ in range(100)]
    gc.collect()  # now in the old generation
    olds.clear()
    task = asyncio.create_task(memory.collect_by_the_clock())
    await collected(task)


async def test_grown_memory_causes_a_full_collection(monkeypatch):
    monkeypatch.setattr(memory, "YOUNG_S", 0.001)
    monkeypatch.setattr(memory, "LOOK_EVERY", 1)

    gc.collect()
    task = asyncio.create_task(memory.collect_by_the_clock())
    await asyncio.sleep(0)
    olds = [Circle() for _ in range(4)]
    for old in olds:
        old.data = b"x" * (memory.memory_bytes() // 8 + memory.GROWTH_BYTES // 2)
    gc.collect(1)
    gc.collect(1)  # now in the old generation
    olds.clear()
    del old
    await collected(task)


def test_memory_is_private_memory():
    """The pages are the system's: free memory of the allocator would not grow the process."""
    with mmap.mmap(-1, 50 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as held:
        before = memory.memory_bytes()
        for page in range(0, len(held), mmap.PAGESIZE):
            held[page] = 1
        assert 40 << 20 < memory.memory_bytes() - before < 80 << 20


def test_idle_process_does_not_collect(monkeypatch):
    monkeypatch.setattr(memory, "YOUNG_S", 0.001)
    monkeypatch.setattr(memory, "QUICK_S", 60.0)
    monkeypatch.setattr(memory, "_pause_s", lambda rest_s: 0.001)
    looks, few = [], asyncio.Event()
    monkeypatch.setattr(memory.gc, "collect", lambda generation=2: looks.append(generation))
    counts = iter([0, memory.FEW - 1, memory.FEW, 0])

    def count():
        number = next(counts, 0)
        few.set() if not number and len(looks) > memory.IDLE_PASSES else None
        return number, 0, 0

    monkeypatch.setattr(memory.gc, "get_count", count)

    async def run():
        task = asyncio.create_task(memory.collect_by_the_clock())
        await few.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(run())
    assert len(looks) == memory.IDLE_PASSES + 1, "one for each turn at first, then one as soon as there is enough"


def test_kept_error_drops_its_variables():
    def connect():
        mine = Circle()
        mine.me = None
        made.append(weakref.ref(mine))
        raise ValueError

    def ask():
        held = Circle()
        held.me = None
        made.append(weakref.ref(held))
        try:
            connect()
        except ValueError as error:
            kept = error  # a cycle: the error's traceback holds this frame
            raise OSError("away") from kept

    made: list[weakref.ref[Circle]] = []
    gc.disable()
    try:
        with pytest.raises(OSError) as raised:
            memory.without_frames(ask)
        assert [ref() for ref in made] == [None, None]
        assert "connect()" in "".join(traceback.format_exception(raised.value))
    finally:
        gc.enable()
