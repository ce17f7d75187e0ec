"""Orders by message: retries, order keys, a delay, a daily report, each order invoiced once."""

import asyncio
from dataclasses import dataclass
from datetime import timedelta

import qmq
from qmq.idempotence import Idempotence, MemoryKeys


@dataclass
class Order:
    number: int


producer, consumer = qmq.Producer(), qmq.Consumer()
once = Idempotence(MemoryKeys(), key=lambda message: str(message.decode(Order).number))  # or SqlKeys, RedisKeys
report = qmq.Message("report.due", {"kind": "sales"})


@consumer.listen("order.placed", group="billing", concurrency=8, retries_max=5, start="earliest", filters=[once])
async def invoice(order: Order, message: qmq.ReceivedMessage) -> None:  # orders with one order key come in turn
    print("invoice", order.number, "attempt", message.times)
    await producer.send("order.unpaid", order, delay=timedelta(days=14), key=str(order.number))


@consumer.listen("order.unpaid", group="billing", start="earliest")
async def remind(order: Order) -> None:
    print("order.unpaid", order.number)


@consumer.listen("report.due", group="billing", start="earliest")
async def write_report(message: qmq.ReceivedMessage) -> None:
    print("report.due", message["kind"])


async def main() -> None:
    async with producer:
        await producer.put_recurring(report, name="daily", cron="0 8 * * *", timezone="UTC")
        await consumer.run()


if __name__ == "__main__":
    asyncio.run(main())
