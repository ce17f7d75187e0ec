"""Shell. The filters in real listeners, over a broker in memory: acked messages were handled, once."""

from __future__ import annotations

import pytest
from sqlalchemy import create_engine, event, text
from sqlalchemy.ext.asyncio import create_async_engine

import qmq
from qmq.idempotence import Idempotence, MemoryKeys
from qmq.idempotence.transaction import BlockingSqlTransaction, SqlTransaction
from qmq.testing import Broker
from tests.support.waiting import consuming

SHIP = text("INSERT INTO shipment (number) VALUES (:number)")


async def send(broker, *ids):
    async with qmq.Producer(metaserver=broker.metaserver, app="test") as producer:
        receipts = await producer.send_many([qmq.Message("order", {"n": str(at)}, id=id) for at, id in enumerate(ids)])
        assert receipts.all_stored


def make_shipments(url):
    engine = create_engine(url)
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE shipment (number INTEGER)"))
    BlockingSqlTransaction(engine).create_table()
    return engine


def shipments(engine):
    with engine.connect() as connection:
        return sorted(connection.execute(text("SELECT number FROM shipment")).scalars())


async def test_message_sent_twice_is_handled_once():
    async with Broker() as broker:
        consumer, handled = qmq.Consumer(metaserver=broker.metaserver, app="test"), []

        @consumer.listen("order", group="coroutine", start="earliest", filters=[Idempotence(MemoryKeys())])
        async def coroutine(message):
            handled.append(("coroutine", message.id))

        @consumer.listen("order", group="thread", start="earliest", filters=[Idempotence(MemoryKeys())])
        def thread(message):
            handled.append(("thread", message.id))

        await send(broker, "a", "b", "a", "b", "c")
        async with consuming(consumer):
            for group in ("coroutine", "thread"):
                await broker.wait_until_consumed("order", group)
        assert sorted(handled) == [(name, id) for name in ("coroutine", "thread") for id in "abc"]


async def test_coroutine_transaction_is_kept_once(tmp_path):
    database = make_shipments(f"sqlite:///{tmp_path / 'shop.db'}")
    engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path / 'shop.db'}")
    commits = []

    @event.listens_for(engine.sync_engine, "commit")
    def fail_once(connection):
        commits.append(connection)
        if len(commits) == 1:
            raise ConnectionError("the first commit fails")

    async with Broker() as broker:
        consumer = qmq.Consumer(metaserver=broker.metaserver, app="test")
        once = SqlTransaction(engine)

        @consumer.listen("order", group="g", start="earliest", filters=[once])
        async def handle(message):
            await once.session.execute(SHIP, {"number": message.get_int("n")})
            if message["n"] == "1" and message.times == 1:
                raise ValueError("bad")

        await send(broker, "a", "b", "c", "c")
        async with consuming(consumer):
            await broker.wait_until_consumed("order", "g")
        assert broker.dead_letters("order", "g") == []
    await engine.dispose()
    numbers = shipments(database)
    assert len(numbers) == 3 and {0, 1} < set(numbers), "what failed at its commit came again"
    database.dispose()


async def test_thread_transaction_is_kept_once(tmp_path):
    database = make_shipments(f"sqlite:///{tmp_path / 'shop.db'}")
    async with Broker() as broker:
        consumer = qmq.Consumer(metaserver=broker.metaserver, app="test")
        once = BlockingSqlTransaction(database)

        @consumer.listen("order", group="g", start="earliest", concurrency=2, filters=[once])
        def handle(message):
            once.session.execute(SHIP, {"number": message.get_int("n")})
            if message["n"] == "1" and message.times == 1:
                raise ValueError("bad")

        await send(broker, "a", "b", "b")
        async with consuming(consumer):
            await broker.wait_until_consumed("order", "g")
    numbers = shipments(database)
    assert len(numbers) == 2 and 0 in numbers
    database.dispose()


@pytest.mark.parametrize("wrong", [{"auto_ack": False}, {"most_once": True}], ids=["own acks", "at most once"])
@pytest.mark.parametrize("kind", ["keys", "transaction"])
def test_acks_other_than_after_the_handler_are_refused(tmp_path, wrong, kind):
    """QMQ: a transaction with the application's own ack never ends; a nack after its end is skipped."""
    engine = create_engine(f"sqlite:///{tmp_path / 'shop.db'}")
    check = Idempotence(MemoryKeys()) if kind == "keys" else BlockingSqlTransaction(engine)
    consumer = qmq.Consumer(metaserver="http://127.0.0.1:1", app="test")
    with pytest.raises(qmq.InvalidRequest, match="needs acks after the handler"):
        consumer.listen("order", group="g", filters=[check], **wrong)
