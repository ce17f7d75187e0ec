"""Shell. Events during the scrub of a closed segment, which takes a minute at the usual rate."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from qmq.errors import CorruptFrame, DiskFailed
from qmq.log.segments import log_name, snapshot_name
from qmq.server import scrub
from tests.unit.log.logs import Copy


async def test_missing_newest_file_ends_the_scrub(monkeypatch):
    monkeypatch.setattr(scrub, "LOOK_S", 0.01)
    monkeypatch.setattr(scrub, "PIECE_BYTES", 200)
    copy = Copy.filled(60, size=100, tail_bytes=0)
    assert len(copy.log.bases) > 1

    loop, is_read, failures = asyncio.get_running_loop(), asyncio.Event(), asyncio.Queue()
    verify = copy.log.stored.verify

    def verified(*args):
        try:
            return verify(*args)
        finally:
            loop.call_soon_threadsafe(is_read.set)

    monkeypatch.setattr(copy.log.stored, "verify", verified)
    reading = asyncio.ensure_future(scrub_of(copy, failures).run())
    await is_read.wait()
    copy.disk.system.unlink(copy.disk._path(f"log/{copy.log.bases[-1]:020d}.log"))
    async with asyncio.timeout(10):
        assert isinstance(await failures.get(), DiskFailed)
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)


def scrub_of(copy, failures):
    """Return a scrub that takes minutes per piece; `failures` collects the errors that would end the process."""
    service = SimpleNamespace(node=SimpleNamespace(log=copy.log, role="slave"), fail=failures.put_nowait)
    return scrub.Scrub(service, SimpleNamespace(scrub_hours=168, scrub_bytes_per_s=1))


async def test_damage_that_a_read_or_the_start_found_is_counted():
    """Repaired damage was missing in the metric unless a scrub found it first."""
    copy = Copy.filled(60, size=100, tail_bytes=0)
    begin = copy.log.bases[1]
    copy.flip(begin + 120)
    made = scrub_of(copy, asyncio.Queue())
    assert made.findings == 0 and made.last_finding_s is None
    for _ in range(2):
        copy.log.damaged_at(CorruptFrame(begin, "test"))
    assert made.findings == 1 and made.last_finding_s is not None
    copy.flip(copy.log.end - 300)  # in the last segment, which a start reads
    copy.reopen()
    assert copy.log.damage is not None and scrub_of(copy, asyncio.Queue()).findings == 1


async def test_disk_failure_in_closed_segment_ends_the_process(monkeypatch):
    copy = Copy.filled(60, size=100, tail_bytes=0)
    failure, failures = DiskFailed("read"), asyncio.Queue()

    def fail(*args):
        raise failure

    monkeypatch.setattr(copy.log.stored, "verify", fail)
    reading = asyncio.ensure_future(scrub_of(copy, failures).run())
    async with asyncio.timeout(10):
        assert await failures.get() is failure
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)


def tell_nobody(_problem):
    """As a node without a part."""


def scrubbed(copy, until, *, hours=168, free=1 << 30, role="slave"):
    """Scrub until a condition holds; `free`: bytes free on a disk that should have a MiB."""

    async def run():
        failures = []
        node = SimpleNamespace(log=copy.log, role=role, found_damage=copy.log.damaged_at if role else tell_nobody)
        service = SimpleNamespace(node=node, fail=failures.append, guarded=lambda call: call())
        service.disk_free_bytes, service.disk_free_limit = free, 1 << 20
        settings = SimpleNamespace(scrub_hours=hours, scrub_bytes_per_s=1 << 30)
        made = scrub.Scrub(service, settings)
        reading = asyncio.ensure_future(made.run())
        async with asyncio.timeout(10):
            while not until():
                await asyncio.sleep(0)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        assert failures == []
        return made.findings

    return asyncio.run(run())


@pytest.mark.parametrize("which", [1, 2, -1], ids=["an old one", "the next one as well", "that of the newest segment"])
def test_scrub_rebuilds_a_damaged_snapshot(which):
    copy = Copy.filled(60, size=100, tail_bytes=0)
    names = [snapshot_name(base) for base in copy.log.bases]
    before = copy.image()
    for name in {names[1], names[which]}:
        copy.disk.flip(name, 100)
    assert scrubbed(copy, lambda: copy.image() == before) == len({names[1], names[which]})
    assert copy.log.damage is None


def test_full_disk_rebuilds_no_snapshot():
    """The process would end, and meet the same segment after its restart."""
    copy = Copy.filled(60, size=100, tail_bytes=0)
    copy.disk.flip(snapshot_name(copy.log.bases[1]), 100)
    verify, verified = copy.log.stored.verify, []
    copy.log.stored.verify = lambda *args: verified.append(args[0]) or verify(*args)
    before = copy.image()
    assert scrubbed(copy, lambda: copy.log.bases[-2] in verified, free=1 << 10) == 0
    assert copy.image() == before


def test_only_segment_with_damaged_snapshot_rolls(monkeypatch):
    """A restart used to find it and set the whole copy aside."""
    monkeypatch.setattr(scrub, "LOOK_S", 0.01)
    copy = Copy.filled(60, size=100, tail_bytes=0)
    while len(copy.log.bases) > 1:
        copy.drop_oldest_segment()
    [base], end = copy.log.bases, copy.log.end
    copy.disk.flip(snapshot_name(base), 100)
    looked = []
    look = copy.log.roll_if_no_snapshot
    monkeypatch.setattr(copy.log, "roll_if_no_snapshot", lambda: looked.append(look()) or looked[-1])
    assert scrubbed(copy, lambda: bool(looked), hours=0) == 1
    copy.messages("next")
    copy.flush()
    state = copy.log.state
    assert copy.log.bases == [base, end]
    assert copy.reopen().bases == [base, end] and copy.log.state == state


def test_broker_without_a_part_reports_damage_once(monkeypatch):
    """A broker without a part used to log the same damage as fast as it could read."""
    copy = Copy.filled(60, size=100, tail_bytes=0)
    copy.disk.flip(log_name(copy.log.bases[1]), 8 * 300)
    looks, wait = [], scrub.Scrub._until_next_look

    async def until_next_look(self):
        looks.append(self)
        await wait(self)

    monkeypatch.setattr(scrub.Scrub, "_until_next_look", until_next_look)
    monkeypatch.setattr(scrub, "LOOK_S", 0.01)
    assert scrubbed(copy, lambda: len(looks) > 4, role=None) == 0
    assert scrubbed(copy, lambda: copy.log.damage is not None) == 1
