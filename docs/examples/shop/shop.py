"""Shell. A shop with FastAPI and SQLAlchemy: pays orders, and issues a ticket for each paid order.

One transaction holds an order and its message; another one holds a ticket and the note that its message was handled.
The process may be killed at any step between them.

Environment: SHOP_DATABASE (a SQLAlchemy URL), QMQ_METASERVER and QMQ_TOKEN.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from deaths import Deaths, Step
from fastapi import FastAPI
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

import qmq
from qmq.fastapi import Clients
from qmq.idempotence.tables import handled_table
from qmq.idempotence.transaction import SqlTransaction
from qmq.outbox.schema import create_statements

METASERVER = os.environ["QMQ_METASERVER"]

engine = create_async_engine(os.environ["SHOP_DATABASE"])
deaths = Deaths(engine.sync_engine)
producer = qmq.Producer(metaserver=METASERVER, app="shop")
consumer = qmq.Consumer(metaserver=METASERVER, app="shop")
once = SqlTransaction(engine)


class Base(DeclarativeBase):
    """Tables of the shop, and the table of handled messages."""


class Order(Base):
    """A paid order."""

    __tablename__ = "orders"
    number: Mapped[int] = mapped_column(primary_key=True)


class Ticket(Base):
    """An issued ticket. No constraint keeps an order from having two tickets, or none, so the page would show it."""

    __tablename__ = "tickets"
    id: Mapped[int] = mapped_column(primary_key=True)
    order_number: Mapped[int]


handled_table(Base.metadata)


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Create the tables, as a migration would, and run producer and consumer."""
    async with engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
        if not await connection.run_sync(lambda sync: sync.dialect.has_table(sync, "qmq_msg_queue")):
            for statement in create_statements(connection.dialect.name):
                await connection.execute(text(statement))
    async with Clients(producer, consumer).lifespan(app):
        yield
    await engine.dispose()


app = FastAPI(title="Shop", lifespan=lifespan)


@app.post("/orders/{number}")
async def pay(number: int, die: Step | None = None) -> dict[str, int]:
    """Pay an order. `die`: the step at which this process kills itself."""
    deaths.next = die
    async with AsyncSession(engine) as session, session.begin():
        session.add(Order(number=number))
        await producer.send(qmq.Message("shop.paid", {"order": number}), session=session)
    return {"paid": number}


@consumer.listen("shop.paid", group="tickets", start="earliest", filters=[once])
async def issue(message: qmq.ReceivedMessage) -> None:
    """Issue the ticket in the transaction that notes the message as handled."""
    once.session.add(Ticket(order_number=message.get_int("order")))
