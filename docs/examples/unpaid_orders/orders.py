"""Shell. Orders that nobody pays are cancelled after half an hour.

    make run                                                          # a cluster, in another terminal
    python docs/examples/unpaid_orders/orders.py --minutes 0.1        # three orders, of which two are paid

Each order sends itself a message that is due in half an hour; paying takes it back. Whether an order is paid or
cancelled is decided in one place, the row of the database: a payment that comes in the same moment as the message finds
the order open or cancelled, never both. So nothing here hangs on which of the two was faster.
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
    """The shop's orders, by number: open, paid or cancelled.

    Args:
        database: path of an SQLite file.
        producer: open while orders come in.
        pay_within: how long an order waits for its payment.
    """

    def __init__(self, database: str, producer: qmq.Producer, *, pay_within: timedelta = HALF_AN_HOUR) -> None:
        self._database = sqlite3.connect(database, isolation_level=None)
        self._database.execute("CREATE TABLE IF NOT EXISTS orders (number TEXT PRIMARY KEY, state TEXT NOT NULL)")
        self._producer, self._pay_within = producer, pay_within

    def close(self) -> None:
        self._database.close()

    async def open(self, number: str) -> None:
        """Take an order. Raises QmqError if its end cannot be planned; then there is no order.

        The message goes first: one without an order does no harm, an order without a message would stay open for ever.
        """
        receipt = await self._producer.send(qmq.Message(UNPAID, {"order": number}), delay=self._pay_within, key=number)
        receipt.check()
        self._database.execute("INSERT INTO orders VALUES (?, 'open')", (number,))

    async def pay(self, number: str) -> bool:
        """Pay an order; return False if it is not open any more."""
        if not self._change(number, "paid"):
            return False
        try:
            await self._producer.cancel(subject=UNPAID, key=number)
        except qmq.QmqError:
            pass  # the message will come, and find the order paid
        return True

    def end_unpaid(self, message: qmq.ReceivedMessage) -> None:
        """Handle the message of an order: its time is up. Handled twice, it does the same as once."""
        self._change(str(message["order"]), "cancelled")

    def state(self, number: str) -> str | None:
        row = self._database.execute("SELECT state FROM orders WHERE number = ?", (number,)).fetchone()
        return row[0] if row else None

    def _change(self, number: str, state: str) -> bool:
        """Give an open order another state; return whether it was open."""
        changed = self._database.execute(
            "UPDATE orders SET state = ? WHERE number = ? AND state = 'open'", (state, number)
        )
        return changed.rowcount == 1


def listen(consumer: qmq.Consumer, orders: Orders) -> None:
    """Let a consumer end the orders whose time is up."""

    @consumer.listen(UNPAID, group="orders", start="earliest")
    async def on_unpaid(message: qmq.ReceivedMessage) -> None:
        orders.end_unpaid(message)


async def show(metaserver: str, token: str, pay_within: timedelta) -> None:
    """Take three orders, pay two of them, and wait until the time of the third is up."""
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
    parser = argparse.ArgumentParser(description="Orders that nobody pays are cancelled.")
    parser.add_argument("--minutes", type=float, default=30.0, help="within which an order has to be paid")
    pay_within = timedelta(minutes=parser.parse_args().minutes)
    metaserver, token = local_cluster()
    asyncio.run(show(metaserver, token, pay_within))


if __name__ == "__main__":
    main()
