"""The half hour passes at once: qmq.testing moves the clock forward (docs/testing.md).

cd docs/examples/unpaid_orders && python -m pytest test_orders.py
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, closing

from orders import UNPAID, Orders, listen

import qmq


@asynccontextmanager
async def shop(broker, database=":memory:"):
    """Orders with a running consumer that ends them."""
    consumer = qmq.Consumer(metaserver=broker.metaserver, app="orders")
    async with qmq.Producer(metaserver=broker.metaserver, app="orders") as producer:
        with closing(Orders(database, producer)) as orders:
            listen(consumer, orders)
            task = asyncio.create_task(consumer.run())
            yield orders
            consumer.stop()
            await task


def test_unpaid_order_is_cancelled_after_half_an_hour(qmq_broker):
    async def test():
        async with shop(qmq_broker) as orders:
            await orders.open("A-1")
            qmq_broker.advance(29 * 60)
            assert orders.state("A-1") == "open"
            qmq_broker.advance(2 * 60)
            await qmq_broker.wait_until_consumed(UNPAID, "orders")
            assert orders.state("A-1") == "cancelled"
            assert not await orders.pay("A-1")

    asyncio.run(test())


def test_paid_order_stays_paid(qmq_broker):
    async def test():
        async with shop(qmq_broker) as orders:
            await orders.open("A-1")
            await orders.open("A-2")
            assert await orders.pay("A-1")
            qmq_broker.advance(31 * 60)
            await qmq_broker.wait_until_consumed(UNPAID, "orders")
            assert (orders.state("A-1"), orders.state("A-2")) == ("paid", "cancelled")
            assert [message["order"] for message in qmq_broker.messages(UNPAID)] == ["A-2"]

    asyncio.run(test())


def test_payment_after_the_message_was_sent_counts(qmq_broker):
    async def test():
        async with qmq.Producer(metaserver=qmq_broker.metaserver, app="orders") as producer:
            with closing(Orders(":memory:", producer)) as orders:
                await orders.open("A-1")
                qmq_broker.advance(31 * 60)  # stored at the broker, not delivered yet
                assert await orders.pay("A-1")
                consumer = qmq.Consumer(metaserver=qmq_broker.metaserver, app="orders")
                listen(consumer, orders)
                task = asyncio.create_task(consumer.run())
                await qmq_broker.wait_until_consumed(UNPAID, "orders")
                consumer.stop()
                await task
                assert orders.state("A-1") == "paid"

    asyncio.run(test())


def test_orders_survive_lost_connections_and_new_masters(qmq_broker):
    async def test():
        async with shop(qmq_broker) as orders:
            for n in range(20):
                await orders.open(f"A-{n}")
                if n == 5:
                    qmq_broker.drop_connections()
                if n == 10:
                    qmq_broker.swap_roles()
            for n in range(10):
                assert await orders.pay(f"A-{n}")
            qmq_broker.advance(31 * 60)
            await qmq_broker.wait_until_consumed(UNPAID, "orders")
            assert [orders.state(f"A-{n}") for n in range(20)] == ["paid"] * 10 + ["cancelled"] * 10

    asyncio.run(test())
