"""Shell. A producer's outbox and committed messages, for every outcome of their transactions."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest

from qmq import Message, Outcome, Receipt
from qmq.outbox.courier import Courier
from qmq.outbox.row import decode_row
from qmq.outbox.table import Inserted, head_of
from qmq.outbox.unit import Written


@dataclass(frozen=True)
class Database:
    """One of many."""

    name: int

    async def run(self, table, work):
        await asyncio.sleep(0)
        return work(self)

    def delete(self, inserted):
        deleted[self.name] = [*deleted.get(self.name, []), *(id for part in inserted for id in part.ids)]


deleted: dict[int, list[int]] = {}
"""Ids of rows, by database."""


@pytest.fixture(autouse=True)
def nothing_deleted():
    deleted.clear()


class Sender:
    """Stores a message as soon as allowed."""

    def __init__(self):
        self.may = {}

    async def send_many(self, messages):
        for message in messages:
            if message.id in self.may:
                await self.may[message.id].wait()
        return [Receipt(Outcome.STORED, message.id, message.subject, "g1", 0, None) for message in messages]


def courier_of(sender):
    return Courier(sender.send_many, table="t", id_prefix="p-", messages_max=1_000)


def commit(courier, id, database, row):
    items = courier.items([Message("a", id=id)])
    rows = [Inserted([row], [head_of(items[0].content)])]
    courier.committed(Written(database, items, rows, is_checked=True))
    return items[0].receipt


async def test_flush_waits_for_earlier_commits_only():
    sender = Sender()
    courier = courier_of(sender)
    sender.may = {"first": asyncio.Event(), "second": asyncio.Event()}
    first = commit(courier, "first", Database(1), 1)
    flushing = asyncio.create_task(courier.drain())
    await asyncio.sleep(0)
    commit(courier, "second", Database(1), 2)
    await asyncio.sleep(0)
    assert not flushing.done()
    sender.may["first"].set()
    async with asyncio.timeout(5):
        await flushing
    assert first.done() and deleted.pop(1) == [1]
    sender.may["second"].set()
    await courier.drain()
    assert deleted.pop(1) == [2] and not courier.is_busy


async def test_databases_without_rows_are_forgotten():
    """An application may open an engine for each request."""

    courier = courier_of(Sender())
    for number in range(20):
        for row in range(3):
            commit(courier, f"m-{number}-{row}", Database(number), row)
    await courier.drain()
    assert all(sorted(deleted.pop(number)) == [0, 1, 2] for number in range(20))
    kept = [name for name, value in vars(courier).items() if isinstance(value, dict) and value]
    assert kept == []


async def test_staged_message_keeps_all_that_it_carries():
    fields = {"tags": {"t"}, "order_key": "k", "retries_max": 3, "expires_after": 1.5, "content_type": "a/b"}
    (item,) = courier_of(Sender()).items([Message("a", {"n": 1}, id="m", body=b"x", **fields)])
    for kept in (item.message, decode_row(item.content)):
        assert (kept.subject, kept.id, kept["n"], kept.body) == ("a", "m", 1, b"x")
        assert {name: getattr(kept, name) for name in fields} == fields
