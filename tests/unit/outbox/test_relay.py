"""Shell. A producer relays rows left in its outbox: through each interface, on each database."""

from __future__ import annotations

import asyncio
import logging
import threading
from dataclasses import dataclass, field

import pytest
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import sessionmaker

import qmq.blocking
from qmq import InvalidRequest, Message
from qmq.outbox import relay
from qmq.outbox.courier import find_database
from qmq.outbox.relay import Relays
from qmq.outbox.row import encode_row
from qmq.outbox.statements import Left, Statements
from qmq.outbox.table import Inserted
from qmq.outbox.unit import Written
from tests.support.waiting import until
from tests.unit.outbox.test_courier import Sender, courier_of

OLD = {"timeout_s": 0.2, "outbox_age_s": 0.3}
"""Rows are old at once."""


def leave(world, *ids, **options):
    """Leave rows behind, like a killed process."""
    contents = [encode_row(Message("order.paid", {"id": id}, id=id, **options), 1) for id in ids]
    asyncio.run(find_database(world.outside).run("qmq_msg_queue", lambda rows: rows.insert(contents)))


def producer_of(broker, world, **options):
    return qmq.blocking.Producer(
        metaserver=broker.metaserver, token="any", app="shop", outbox=world.outside, **(OLD | options)
    )


def test_rows_of_another_process_are_sent_once(world, broker):
    leave(world, "paid-1", "paid-2")
    leave(world, "paid-3", order_key="k")
    with producer_of(broker, world), producer_of(broker, world):
        until(lambda: world.rows() == [], "all are sent")
    assert sorted(message.id for message in broker.messages("order.paid")) == ["paid-1", "paid-2", "paid-3"]


def test_young_rows_are_left_to_their_process(session_world, broker):
    leave(session_world, "paid-1")
    with session_world.engine.begin() as connection:  # a row younger than the timeout would wait for the next look
        connection.exec_driver_sql("UPDATE qmq_msg_queue SET create_time = datetime(create_time, '-10 seconds')")
    with producer_of(broker, session_world, outbox_age_s=3600.0) as producer:
        until(lambda: producer.left_behind, "it is counted")
        [left] = producer.left_behind
        assert (left.rows, left.parked, left.is_degraded) == (1, 0, True) and "1 messages wait" in str(left)
    assert session_world.rows() == ["paid-1"] and broker.messages("order.paid") == []


def test_unsendable_row_is_parked(session_world, broker):
    leave(session_world, "paid-1")
    with session_world.engine.begin() as connection:
        connection.exec_driver_sql("UPDATE qmq_msg_queue SET content = 'poison'")
    with producer_of(broker, session_world) as producer:
        until(lambda: [(left.rows, left.parked) for left in producer.left_behind] == [(0, 1)], "it is parked")
        assert not producer.left_behind[0].is_degraded


@dataclass(eq=False)
class Database:
    """Rows with counts set by the test; each count is recorded, none is claimed."""

    name: str = "shop"
    left: Left = Left(0, 0, 0)
    error: Exception | None = None
    looks: int = 0
    looked: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self, table, work):
        self.looks += 1
        self.looked.set()
        if self.error is not None:
            raise self.error
        return self.left

    async def next_look(self):
        self.looked.clear()
        async with asyncio.timeout(20):
            await self.looked.wait()
        for _ in range(10):  # the relay takes the answer
            await asyncio.sleep(0)


def relays_of(database, *, wait_s=0.0):
    relays = Relays(
        new_sender=lambda: None, table="t", timeout_ms=1_000, age_ms=60_000, under_way=lambda database: set()
    )
    relays.use(database, wait_s=wait_s)
    return relays


def test_an_outage_is_logged_once_and_its_end_once(caplog):
    async def run():
        database = Database(left=Left(5, 31_000, 0))
        relays = relays_of(database)
        await database.next_look()
        [left] = relays.left_behind
        assert left.rows == 5 and 31 <= left.oldest_s < 60
        await database.next_look()
        database.left = Left(0, 0, 0)
        await database.next_look()
        assert relays.left_behind == []
        await relays.close()

    with caplog.at_level(logging.INFO, "qmq.outbox"):
        asyncio.run(run())
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2 and "messages=5 oldest_s=31" in lines[0] and "no message waits" in lines[1]


async def test_failed_send_triggers_a_look():
    tasks = asyncio.all_tasks()
    database = Database()
    relays = relays_of(database, wait_s=3600.0)
    [relay] = relays._relays.values()
    assert 54 <= await relay._pass() <= 66
    relays.left(database, "no route")
    assert relay._moved.is_set()
    assert await relay._pass() == 1.0, "refused early, it is left behind when the producer's time is over"
    assert 54 <= await relay._pass() <= 66
    database.left = Left(3, 2_000, 0)
    assert [await relay._pass() for _ in range(7)] == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    await relays.close()
    relays.use(Database("another"))
    assert asyncio.all_tasks() == tasks


async def test_lasting_database_failure_is_reported(caplog):
    database = Database(error=OSError("no column claim"))
    relays = relays_of(database)
    await database.next_look()
    assert relays.left_behind == []
    await database.next_look()
    [left] = relays.left_behind
    assert left.is_degraded and "no column claim" in left.reason and "docs/outbox.md" in left.reason
    await relays.close()
    assert len(caplog.records) == 1


@pytest.mark.parametrize("hangs", [False, True], ids=["slow", "hanging"])
async def test_close_waits_for_the_running_query(monkeypatch, hangs):
    """After close, the application disposes its engine; a thread would return its connection to no pool."""
    monkeypatch.setattr(relay, "STOP_S", 0.01 if hangs else 3600.0)
    may_end, ended = threading.Event(), []

    class InThread(Database):
        async def run(self, table, work):
            await super().run(table, work)
            return await asyncio.to_thread(self.query)

        def query(self):
            ended.append(may_end.wait(20))
            return self.left

    database = InThread()
    relays = relays_of(database)
    try:
        await database.next_look()
        closing = asyncio.create_task(relays.close())
        if not hangs:
            for _ in range(50):
                await asyncio.sleep(0)
            assert not closing.done()
            may_end.set()
        await closing
        assert ended == ([] if hangs else [True])
    finally:
        may_end.set()


async def test_own_rows_are_under_way_until_deleted():
    sender, database = Sender(), Database()
    sender.may = {"m": asyncio.Event()}
    courier = courier_of(sender)
    items = courier.items([Message("a", id="m")])
    courier.committed(Written(database, items, [Inserted([7], ["x"])]))
    await asyncio.sleep(0)
    assert courier.under_way(database) == {7} and courier.under_way(Database()) == set()
    sender.may["m"].set()
    await courier.drain()
    assert courier.under_way(database) == set()


def test_ordered_rows_are_claimed_all_or_none(session_world):
    from qmq.outbox.claims import ClaimRows, SettleClaims, Settled

    leave(session_world, "1", "2", "3")

    def do(work):
        database = find_database(session_world.outside)
        return asyncio.run(database.run("qmq_msg_queue", lambda rows: Statements(rows, 0).do(work)))

    def ordered(claim, ids, *known):
        return do(ClaimRows({claim: ids}, [], [], frozenset([claim]), frozenset(known)))[claim]

    assert do(ClaimRows({"1:1:1:g1": [1]}, [], [])) == {"1:1:1:g1": [1]}
    assert ordered("2:1:2:g2", [1, 2]) == [] and ordered("2:1:2:g1", [2, 3]) == []
    assert ordered("2:1:2:g2", [2]) == [2] and ordered("1:2:1:g1", [3], "1:1:1:g1") == [3]
    do(SettleClaims([Settled("1:1:1:g1", [1], []), Settled("9:9:9:g2", [2], [])], []))
    assert session_world.rows() == ["2", "3"]


def test_invalid_outbox_is_refused_with_advice(session_world):
    options = {"metaserver": "http://127.0.0.1:1", "app": "shop", "token": "any"}
    for wrong in (object(), sessionmaker(session_world.engine)(), "no alias"):
        with pytest.raises(InvalidRequest, match="engine|DATABASES"):
            qmq.Producer(**options, outbox=wrong)
    with pytest.raises(InvalidRequest, match="exceed timeout_s"):
        qmq.Producer(**options, outbox=session_world.engine, timeout_s=30.0, outbox_age_s=30.0)
    with pytest.raises(InvalidRequest, match=r"qmq\.Producer"):
        qmq.blocking.Producer(**options, outbox=create_async_engine("sqlite+aiosqlite:///shop.db"))
