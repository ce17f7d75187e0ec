"""Orders with FastAPI: an order and its message commit together, and each order is invoiced once.

QMQ_METASERVER=http://127.0.0.1:8080 QMQ_APP=shop uvicorn fastapi_shop:app
"""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from fastapi import Depends, FastAPI, HTTPException
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

import qmq
from qmq.fastapi import Clients
from qmq.idempotence.transaction import SqlTransaction
from qmq.outbox.schema import create_statements

engine = create_async_engine(os.environ.get("SHOP_DATABASE", "sqlite+aiosqlite:///shop.db"))
producer, consumer = qmq.Producer(outbox=engine), qmq.Consumer()
clients, once = Clients(producer, consumer), SqlTransaction(engine)


class Base(DeclarativeBase): ...


class Order(Base):
    __tablename__ = "orders"
    number: Mapped[int] = mapped_column(primary_key=True)
    invoiced: Mapped[bool] = mapped_column(default=False)


@dataclass
class Placed:
    number: int


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    async with engine.begin() as connection:  # or migrations
        await connection.run_sync(Base.metadata.create_all)
        for statement in create_statements(engine.dialect.name):
            await connection.execute(text(statement))
    await once.create_table()
    async with clients.lifespan(app):
        yield


app = FastAPI(lifespan=lifespan)


@app.post("/orders/{number}", status_code=201)
async def place(number: int) -> None:
    async with AsyncSession(engine) as session, session.begin():
        session.add(Order(number=number))
        await producer.send("order.placed", Placed(number), session=session)


@consumer.listen("order.placed", group="billing", concurrency=8, start="earliest", filters=[once])
async def invoice(placed: Placed) -> None:
    order = await once.session.get_one(Order, placed.number)
    order.invoiced = True


@app.get("/orders/{number}")
async def show(number: int) -> dict[str, bool]:
    async with AsyncSession(engine) as session:
        if (order := await session.get(Order, number)) is None:
            raise HTTPException(404)
        return {"invoiced": order.invoiced}


@app.get("/health", dependencies=[Depends(clients.check)])
async def health() -> None: ...
