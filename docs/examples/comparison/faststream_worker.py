"""Orders by message with FastStream, RabbitMQ, its delayed-message plugin, Redis and taskiq-faststream. No order keys.

faststream run faststream_worker:app; taskiq scheduler faststream_worker:scheduler
"""

import redis.asyncio
from faststream import FastStream, Header
from faststream.rabbit import ExchangeType, RabbitBroker, RabbitExchange
from pydantic import BaseModel
from taskiq.schedule_sources import LabelScheduleSource
from taskiq_faststream import BrokerWrapper, StreamScheduler

broker = RabbitBroker("amqp://guest:guest@127.0.0.1:5672/")
app, keys = FastStream(broker), redis.asyncio.Redis()
later = RabbitExchange("later", type=ExchangeType.X_DELAYED_MESSAGE, arguments={"x-delayed-type": "direct"})
tasks = BrokerWrapper(broker)
tasks.task(message="sales", queue="report.due", schedule=[{"cron": "0 8 * * *"}])
scheduler = StreamScheduler(broker=tasks, sources=[LabelScheduleSource(tasks)])


class Order(BaseModel):
    number: int


@broker.subscriber("order.placed", later)
async def invoice(order: Order, attempt: int = Header("attempt", default=1)) -> None:
    if await keys.exists(f"invoiced:{order.number}"):
        return
    try:
        print("invoice", order.number, "attempt", attempt)
        await broker.publish(order, "order.unpaid", later, headers={"x-delay": 14 * 86_400_000}, persist=True)
        await keys.set(f"invoiced:{order.number}", 1, ex=30 * 86_400)
    except Exception:
        queue = "order.placed" if attempt < 5 else "order.dead"
        headers = {"x-delay": 5_000, "attempt": attempt + 1}
        await broker.publish(order, queue, later, headers=headers, persist=True)


@broker.subscriber("order.unpaid", later)
async def remind(order: Order) -> None:
    print("order.unpaid", order.number)


@broker.subscriber("report.due")
async def report(kind: str) -> None:
    print("report.due", kind)
