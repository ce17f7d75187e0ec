"""Shell. Unpaid orders are cancelled after half an hour.

    make run                                                          # a cluster, in another terminal
    python docs/examples/unpaid_orders/orders.py --minutes 0.1        # three orders, of which two are paid

Each order sends a message that is due in half an hour; a payment cancels that message. The row in the database alone
decides whether an order is paid or cancelled. A payment and the message may come at the same moment: either of them
finds the order open, and the other one finds it paid or cancelled. So the result does not depend on their order.
"""

from __future__ import annotations

import argparse
import asyncio
import sqlite3
from contextlib import closing
from datetime import timedelta

import qmq
from qmq.deploy.hello import local_cluster

UNPAID = "order.unpaid"
HALF_AN_HOUR = timedelta(minutes=30)


class Orders:
    """The shop's orders by number: open, paid or cancelled.

    Args:
        database: path of an SQLite file.
        producer: open while orders are taken.
        pay_within: time for the payment of an order.
    """

    def __init__(self, database: str, producer: qmq.Producer, *, pay_within: timedelta = HALF_AN_HOUR) -> None:
        self._database = sqlite3.connect(database, isolation_level=None)
        self._database.execute("CREATE TABLE IF NOT EXISTS orders (number TEXT PRIMARY KEY, state TEXT NOT NULL)")
        self._producer = producer
        self._pay_within = pay_within

    def close(self) -> None:
        self._database.close()

    async def open(self, number: str) -> None:
        """Take an order. Raises QmqError if its message cannot be sent; then the order does not exist.

        The message goes first: a message without an order does no harm, but an order without a message stays open for
        ever.
        """
        receipt = await self._producer.send(qmq.Message(UNPAID, {"order": number}), delay=self._pay_within, key=number)
        receipt.check()
        self._database.execute("INSERT INTO orders VALUES (?, 'open')", (number,))

    async def pay(self, number: str) -> bool:
        """Pay an order; return False if it is no longer open."""
        if not self._change(number, "paid"):
            return False
        try:
            await self._producer.cancel(subject=UNPAID, key=number)
        except qmq.QmqError:
            pass  # the message will be delivered and finds the order paid
        return True

    def end_unpaid(self, message: qmq.ReceivedMessage) -> None:
        """Cancel the order of a due message, if it is still open. A second delivery changes nothing."""
        self._change(str(message["order"]), "cancelled")

    def state(self, number: str) -> str | None:
        row = self._database.execute("SELECT state FROM orders WHERE number = ?", (number,)).fetchone()
        return row[0] if row else None

    def _change(self, number: str, state: str) -> bool:
        """Change the state of an open order; return whether it was open."""
        changed = self._database.execute(
            "UPDATE orders SET state = ? WHERE number = ? AND state = 'open'", (state, number)
        )
        return changed.rowcount == 1


def listen(consumer: qmq.Consumer, orders: Orders) -> None:
    """Start a consumer that cancels orders at the end of their time."""

    @consumer.listen(UNPAID, group="orders", start="earliest")
    async def on_unpaid(message: qmq.ReceivedMessage) -> None:
        orders.end_unpaid(message)


async def show(metaserver: str, token: str, pay_within: timedelta) -> None:
    """Take three orders, pay two of them, and wait until the third is cancelled."""
    consumer = qmq.Consumer(metaserver=metaserver, app="orders", token=token)
    async with qmq.Producer(metaserver=metaserver, app="orders", token=token) as producer:
        with closing(Orders(":memory:", producer, pay_within=pay_within)) as orders:
            listen(consumer, orders)
            consuming = asyncio.create_task(consumer.run())
            for number in ("A-1", "A-2", "A-3"):
                await orders.open(number)
                print(f"{number}: {orders.state(number)}, to be paid within {pay_within}")
            for number in ("A-1", "A-2"):
                await orders.pay(number)
                print(f"{number}: {orders.state(number)}")
            while orders.state("A-3") == "open":
                await asyncio.sleep(0.1)
            print(f"A-3: {orders.state('A-3')}")
            print(f"A-3, paid too late: {'accepted' if await orders.pay('A-3') else 'not accepted'}")
            consumer.stop()
            await consuming


def main() -> None:
    parser = argparse.ArgumentParser(description="Unpaid orders are cancelled.")
    parser.add_argument("--minutes", type=float, default=30.0, help="within which an order has to be paid")
    pay_within = timedelta(minutes=parser.parse_args().minutes)
    metaserver, token = local_cluster()
    asyncio.run(show(metaserver, token, pay_within))


if __name__ == "__main__":
    main()
