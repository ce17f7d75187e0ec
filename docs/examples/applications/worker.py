"""Orders by message: retries, order keys, a delay, a daily report, each order invoiced once."""

import asyncio
from datetime import timedelta

import qmq
from qmq.idempotence import Idempotence, MemoryKeys

producer, consumer = qmq.Producer(), qmq.Consumer()
once = Idempotence(MemoryKeys(), key=lambda message: str(message["number"]))  # or SqlKeys, RedisKeys
report = qmq.Message("report.due", {"kind": "sales"})


@consumer.listen("order.placed", group="billing", concurrency=8, retries_max=5, start="earliest", filters=[once])
async def invoice(message: qmq.ReceivedMessage) -> None:  # orders with one order key, a customer's, come in turn
    print("invoice", message["number"], "attempt", message.times)
    reminder = qmq.Message("order.unpaid", {"number": message["number"]})
    await producer.send(reminder, delay=timedelta(days=14), key=str(message["number"]))


@consumer.listen("order.unpaid", group="billing", start="earliest")
@consumer.listen("report.due", group="billing", start="earliest")
async def remind(message: qmq.ReceivedMessage) -> None:
    print(message.subject, dict(message.properties))


async def main() -> None:
    async with producer:
        await producer.put_recurring(report, name="daily", cron="0 8 * * *", timezone="UTC")
        await consumer.run()


if __name__ == "__main__":
    asyncio.run(main())
