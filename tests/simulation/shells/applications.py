"""Programs of users on the shipped client, and the database of a shop. They report to the oracle."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from qmq import Consumer, Producer
from qmq.client.received import ReceivedMessage
from qmq.outbox.dbapi import Database
from qmq.outbox.schema import create_statements
from qmq.outbox.table import DEFAULT_TABLE
from tests.simulation.loop import current
from tests.simulation.shells.machines import URL, Application
from tests.simulation.shells.stand_ins import SINCE_1970_S, give_virtual_time

if TYPE_CHECKING:
    from tests.simulation.shells.world import World


class Shop:
    """SQLite database of the shop, in virtual time. An order has the id of its transaction's message."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._look: sqlite3.Connection | None = None

    def create(self) -> None:
        self._look = sqlite3.connect(self.path)
        for statement in [*create_statements("sqlite"), "CREATE TABLE orders (id TEXT PRIMARY KEY)"]:
            self._look.execute(statement)

    def connect(self) -> sqlite3.Connection:
        """Connect a program; the connection closes when its process is killed."""
        connection = sqlite3.connect(self.path, timeout=0)
        give_virtual_time(connection)
        if (process := current()) is not None:
            process.ended.append(connection.close)
        return connection

    def orders(self) -> set[str]:
        """Return the ids of committed orders."""
        return {row[0] for row in self._read("SELECT id FROM orders")}

    def rows(self) -> int:
        """Return the number of rows in the outbox that are to be sent."""
        return len(self._read(f"SELECT id FROM {DEFAULT_TABLE} WHERE status = 0"))

    def parked(self) -> list[tuple[str, str, str | None]]:
        """Return (content, reason, claim) of the rows that no drain sends."""
        return self._read(f"SELECT content, reason, claim FROM {DEFAULT_TABLE} WHERE status < 0")

    def write_unreadable_row(self) -> None:
        """Write a row that is no message, as a faulty program does."""
        with contextlib.closing(self.connect()) as connection, connection:
            connection.execute(f"INSERT INTO {DEFAULT_TABLE} (content) VALUES (?)", [UNREADABLE])

    def _read(self, statement: str) -> list[Any]:
        return self._look.execute(statement).fetchall() if self._look is not None else []

    def close(self) -> None:
        if self._look is not None:
            self._look.close()


UNREADABLE = '{"unreadable'
SUBJECTS = "orders", "letters"
GROUP = "readers"
TIMEOUT_S = 10.0
DELAYED = 0.3
"""Share of delayed messages, where a delay group exists."""
DELAY_S = 0.0, 15.0


def _producer(world: World, name: str) -> Producer:
    return Producer(metaserver=URL, app=name, token=world.token, timeout_s=TIMEOUT_S, answer_timeout_s=2.0)


class Program:
    """Program of a user, made for each start of its machine."""

    def __init__(self, world: World, application: Application) -> None:
        self._world = world
        self._name = application.name
        self._starts = application.starts

    async def run(self) -> None:
        raise NotImplementedError


class ProducerProgram(Program):
    async def run(self) -> None:
        world, rng = self._world, self._world.loop.rng
        async with _producer(world, self._name) as producer:
            while True:
                await asyncio.sleep(rng.expovariate(world.swarm.sends_per_s))
                if world.is_producing:
                    count = rng.choice((1, 1, 1, 3, 20))
                    subject = rng.choice(SUBJECTS)
                    sends = [self._send(producer, subject) for _ in range(count)]
                    if rng.random() < 0.5:  # or one by one
                        await asyncio.gather(*sends)
                    else:
                        for send in sends:
                            await send

    async def _send(self, producer: Producer, subject: str) -> None:
        world, oracle = self._world, self._world.oracle
        message, due_s = world.new_message(subject, self._name), None
        if world.swarm.delays and world.loop.rng.random() < DELAYED:
            due_s = SINCE_1970_S + world.loop.now_s + world.loop.rng.uniform(*DELAY_S)
        oracle.begin_send(self._name, message, due_s)
        receipt = await producer.send(message, at=None if due_s is None else datetime.fromtimestamp(due_s, UTC))
        oracle.end_send(self._name, message, receipt)


class ShopProgram(Program):
    """Program that changes its database and sends through its outbox: both happen or neither."""

    async def run(self) -> None:
        world, rng = self._world, self._world.loop.rng
        dice = Random(f"{world.seed} {self._starts} unreadable")
        async with _producer(world, self._name) as producer:
            world.oracle.producers.add(producer.id)
            database = Database(world.shop.connect)
            while True:
                await asyncio.sleep(rng.expovariate(world.swarm.sends_per_s / 2))
                if world.is_producing:
                    if world.swarm.unreadable and dice.random() < 0.1:
                        self._write_unreadable_row()
                    await self._sell(producer, database)

    def _write_unreadable_row(self) -> None:
        with contextlib.suppress(sqlite3.OperationalError):  # another program has the lock
            self._world.shop.write_unreadable_row()
            self._world.counts["unreadable row"] += 1

    async def _sell(self, producer: Producer, database: Database) -> None:
        """Run one transaction, which may be rolled back or end with the process."""
        world, rng = self._world, self._world.loop.rng
        messages = [world.new_message(rng.choice(SUBJECTS), self._name) for _ in range(rng.choice((1, 1, 3)))]
        world.oracle.staged(messages)
        try:
            with database.transaction() as transaction:
                transaction.connection.executemany(
                    "INSERT INTO orders VALUES (?)", [(message.id,) for message in messages]
                )
                for message in messages:
                    await producer.send(message, session=transaction)
                if rng.random() < 0.2:
                    await asyncio.sleep(rng.uniform(0, 0.02))
                if rng.random() < 0.1:
                    raise _GivenUp
        except (_GivenUp, sqlite3.OperationalError):
            world.counts["rolled back"] += 1


class _GivenUp(Exception):
    pass


class ConsumerProgram(Program):
    async def run(self) -> None:
        world, rng, oracle = self._world, self._world.loop.rng, self._world.oracle
        me = f"{self._name}-{self._starts}"
        consumer = Consumer(metaserver=URL, app=self._name, token=world.token, consumer_id=me, drain_s=2.0)

        async def handle(message: ReceivedMessage) -> None:
            oracle.begun(me, message)
            if rng.random() < 0.3:
                await asyncio.sleep(rng.uniform(0, 0.02))
            if world.is_at_war and rng.random() < world.swarm.fails:
                raise ValueError("the handler fails")
            oracle.consumed(me, message)

        for subject in SUBJECTS:
            consumer.listen(
                subject,
                group=GROUP,
                start="latest" if world.swarm.joins else "earliest",
                concurrency=rng.choice((1, 4)),
                retries_max=1000,
                retry_delay=0.5,
                most_once=False,
            )(handle)
        await consumer.run()
