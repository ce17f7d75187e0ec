"""Shell. A watchdog that wins and loses its lease, and databases that are added and removed, without brokers or
metaserver.
"""

from __future__ import annotations

import asyncio
import threading
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from sqlalchemy import create_engine, text

from qmq.errors import NotServed
from qmq.outbox.schema import create_statements
from qmq.watchdog.database import Outbox
from qmq.watchdog.leader import Leader
from qmq.watchdog.lease import LeaseRow
from qmq.watchdog.settings import Source, WatchdogSettings
from tests.support.waiting import until_async

SETTINGS = WatchdogSettings(
    metaserver="http://nowhere", token="t", lease_ms=3000, beat_ms=50, refresh_ms=100, scan_ms=10, stop_ms=100
)


class Sender:
    """A sender without broker groups."""

    def on_change(self, callback):
        pass

    def watch(self, subject):
        pass

    def groups(self, subject):
        return []

    def is_usable(self, name):
        return False

    def is_any_usable(self):
        return False

    def why_not(self, subject):
        return "nobody is there"


class Link:
    """A metaserver with a row and databases set by the test."""

    def __init__(self, *sources):
        self.registered = list(sources)
        self.row = LeaseRow("", 0, 0)
        self.is_away = False
        self.released = 0
        self.beats = self.reads = 0

    async def hold(self, node, address, request, *, patience_ms):
        self.beats += 1
        if self.is_away:
            raise NotServed("away")
        if self.row.node in ("", node):
            new = self.row.node != node
            self.row = LeaseRow(node, self.row.term + new, 0 if new else self.row.beat + 1)
        return self.row

    async def release(self, node):
        self.released += 1
        self.row = LeaseRow("", self.row.term, self.row.beat)

    async def sources(self):
        self.reads += 1
        return list(self.registered), {}


def create_table(path):
    engine = create_engine(f"sqlite:///{path}")
    with engine.begin() as connection:
        for statement in create_statements("sqlite"):
            connection.execute(text(statement))
    engine.dispose()


@pytest.fixture
def source(tmp_path):
    create_table(path := tmp_path / "shop.db")
    return Source(f"sqlite://here:1/{path}", age_ms=0)


@asynccontextmanager
async def leading(link):
    """Run a watchdog."""
    watchdog = Leader(SETTINGS, link, Sender(), "here:1")
    task = asyncio.create_task(watchdog.run())
    try:
        async with asyncio.timeout(60):
            yield watchdog
        assert not task.done() or task.exception() is None
    finally:
        await watchdog.stop()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_reelected_leader_drains_again(source):
    """QMQ's watchdog sends nothing more after its second election."""
    link = Link(source)
    async with leading(link) as watchdog:
        for round_number in range(1, 4):
            await until_async(lambda: watchdog.is_leader and watchdog.drains)
            drain = watchdog.drains[source.url]
            await until_async(lambda drain=drain: drain.core.last_pass_ms is not None)
            assert (watchdog.lease.term, watchdog.elections) == (2 * round_number - 1, round_number)
            link.row = LeaseRow("another", link.row.term + 1, 0)
            await until_async(lambda: not watchdog.is_leader and not watchdog.drains)
            link.row = LeaseRow("", link.row.term, 0)
        await until_async(lambda: watchdog.is_leader)
    assert link.released == 1 and not link.row.node


async def test_leader_stops_with_its_lease(source):
    link = Link(source)
    async with leading(link) as watchdog:
        await until_async(lambda: watchdog.drains)
        link.is_away = True
        await until_async(lambda: not watchdog.is_leader and not watchdog.drains)
        assert watchdog.metaserver_trouble == "away"
        link.is_away = False
        await until_async(lambda: watchdog.drains)


async def test_new_drain_waits_for_the_last_write(source, monkeypatch):
    link, held, began, closed = Link(source), threading.Event(), threading.Event(), threading.Event()
    do, close = Outbox.do, Outbox.close

    def slow(self, work):
        began.set()
        held.wait(60)
        return do(self, work)

    monkeypatch.setattr(Outbox, "close", lambda self: (close(self), closed.set()))
    async with leading(link) as watchdog:
        monkeypatch.setattr(Outbox, "do", slow)
        await until_async(began.is_set)
        link.registered = [replace(source, rate=7)]
        await until_async(lambda: not watchdog.drains)
        count = link.reads
        await until_async(lambda: link.reads > count + 2)  # some refreshes
        assert not watchdog.drains and watchdog.is_hanging and not closed.is_set()
        held.set()
        await until_async(closed.is_set)
        await until_async(lambda: watchdog.drains)
        assert watchdog.drains[source.url].core.limits.rate == 7


async def test_removed_database_is_not_drained(source):
    link = Link(source)
    async with leading(link) as watchdog:
        await until_async(lambda: watchdog.drains)
        link.registered = []
        await until_async(lambda: not watchdog.drains)
        assert watchdog.is_leader


async def test_missing_table_is_reported_and_retried(tmp_path):
    path = tmp_path / "empty.db"
    path.touch()
    source = Source(f"sqlite://here:1/{path}", age_ms=0)
    async with leading(Link(source)) as watchdog:
        await until_async(lambda: watchdog.drains and "no such table" in watchdog.drains[source.url].trouble)
        create_table(path)
        await until_async(lambda: not watchdog.drains[source.url].trouble)


async def test_driver_error_concerns_its_database_alone(source, monkeypatch):
    """PyMySQL raises RuntimeError for a missing package, and UnicodeError for an invalid name."""
    begun = []
    begin = Leader._begin
    monkeypatch.setattr(Leader, "_begin", lambda self, *of: (begun.append(of[0]), begin(self, *of)))
    wrong = Source("mysql://db1..internal:3306", "shop", "secret", age_ms=0)
    link = Link(source, wrong)
    async with leading(link) as watchdog:
        await until_async(lambda: wrong.url in watchdog.drains and "label empty" in watchdog.drains[wrong.url].trouble)
        await until_async(lambda: watchdog.drains[source.url].core.last_pass_ms is not None)
        count = link.beats
        await until_async(lambda: link.beats > count + 3)
        assert sorted(begun) == sorted([source.url, wrong.url]), "no drain fails and begins anew"
