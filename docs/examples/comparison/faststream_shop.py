"""Orders with FastAPI, FastStream and RabbitMQ: an order and its message commit together, each order is invoiced once.

uvicorn faststream_shop:app
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from fastapi import FastAPI, HTTPException
from faststream import AckPolicy
from faststream.rabbit.fastapi import RabbitRouter
from pydantic import BaseModel
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

engine = create_async_engine("sqlite+aiosqlite:///shop.db")
router = RabbitRouter("amqp://guest:guest@127.0.0.1:5672/")


class Base(DeclarativeBase): ...


class Order(Base):
    __tablename__ = "orders"
    number: Mapped[int] = mapped_column(primary_key=True)
    invoiced: Mapped[bool] = mapped_column(default=False)


class Outbox(Base):
    __tablename__ = "outbox"
    id: Mapped[int] = mapped_column(primary_key=True)
    number: Mapped[int]


class Handled(Base):
    __tablename__ = "handled"
    number: Mapped[int] = mapped_column(primary_key=True)


class Placed(BaseModel):
    number: int


async def relay() -> None:
    while True:
        with suppress(Exception):  # RabbitMQ or the database does not answer
            async with AsyncSession(engine) as session, session.begin():
                found = select(Outbox).order_by(Outbox.id).limit(100).with_for_update()
                for row in (await session.scalars(found)).all():
                    await router.broker.publish(Placed(number=row.number), "order.placed", persist=True)
                    await session.delete(row)
        await asyncio.sleep(1.0)


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    async with engine.begin() as connection:  # or migrations
        await connection.run_sync(Base.metadata.create_all)
    relaying = asyncio.create_task(relay())
    yield
    relaying.cancel()


app = FastAPI(lifespan=lifespan)


@app.post("/orders/{number}", status_code=201)
async def place(number: int) -> None:
    async with AsyncSession(engine) as session, session.begin():
        session.add(Order(number=number))
        session.add(Outbox(number=number))


@router.subscriber("order.placed", ack_policy=AckPolicy.NACK_ON_ERROR)
async def invoice(placed: Placed) -> None:
    async with AsyncSession(engine) as session, session.begin():
        if await session.get(Handled, placed.number) is None:
            session.add(Handled(number=placed.number))
            (await session.get_one(Order, placed.number)).invoiced = True


@app.get("/orders/{number}")
async def show(number: int) -> dict[str, bool]:
    async with AsyncSession(engine) as session:
        if (order := await session.get(Order, number)) is None:
            raise HTTPException(404)
        return {"invoiced": order.invoiced}


@app.get("/health")
async def health() -> None:
    if not await router.broker.ping(timeout=2.0):
        raise HTTPException(503)


app.include_router(router)
