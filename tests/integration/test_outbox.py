"""Shell. The outbox end to end: a real cluster, real databases, and a shop that dies at each step of a transaction.

Whatever the shop leaves behind, each paid order has its ticket once.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import create_async_engine

from qmq.idempotence.tables import HandledTable
from qmq.idempotence.transaction import SqlTransaction
from qmq.outbox.row import decode_row
from qmq.outbox.schema import create_statements
from tests.integration.cluster_world import WAIT_S, consumer, producer, running
from tests.integration.outbox_process import STEPS
from tests.support.databases import database_url, mariadb, postgresql
from tests.unit.idempotence.stores import async_url

__all__ = ["database_url", "mariadb", "postgresql"]

ROOT = Path(__file__).parents[2]
ORDERS = 12
CRASHES = {step: 3 * number + 2 for number, step in enumerate(STEPS)}
"""Step -> the order that it happens to."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with running(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@pytest.fixture
def engine(database_url):
    engine = create_engine(database_url)
    with engine.begin() as connection:
        for statement in create_statements(engine.dialect.name):
            connection.execute(text(statement))
        HandledTable("qmq_handled").create(connection)
        connection.execute(text("CREATE TABLE orders (number INTEGER PRIMARY KEY)"))
        connection.execute(text("CREATE TABLE tickets (number INTEGER)"))
    yield engine
    engine.dispose()


def read(engine, statement):
    with engine.connect() as connection:
        return list(connection.execute(text(statement)).scalars())


def pay(cluster, engine, subject, crashes, *, blocking):
    """Run the shop once; returns how it ended."""
    url = engine.url.render_as_string(hide_password=False)
    options = {
        "url": url if blocking else async_url(url), "metaserver": cluster.metaserver, "subject": subject,
        "crashes": crashes, "orders": ORDERS, "blocking": blocking,
    }  # fmt: skip
    command = [sys.executable, "-m", "tests.integration.outbox_process", json.dumps(options)]
    return subprocess.run(command, cwd=ROOT, env=os.environ | {"QMQ_TOKEN": cluster.token}, timeout=WAIT_S).returncode


async def send_what_is_left(cluster, engine):
    """What a watchdog does: send the rows as they are, each with its own id, then delete them."""
    with engine.connect() as connection:
        rows = connection.execute(text("SELECT id, content FROM qmq_msg_queue")).all()
    async with producer(cluster) as sender:
        assert (await sender.send_many([decode_row(content) for _, content in rows])).all_stored
    with engine.begin() as connection:
        connection.execute(text("DELETE FROM qmq_msg_queue"))


async def issue_tickets(cluster, engine, subject, messages):
    """Consume so many messages; each writes its ticket in the transaction that notes that it was handled."""
    to_come, seen = asyncio.Event(), []
    tickets = create_async_engine(async_url(engine.url.render_as_string(hide_password=False)))
    once = SqlTransaction(tickets)

    async def count(message, handle):
        await handle(message)
        seen.append((message.id, message.get_int("number"), message.get_float("price"), message.get_bool("isVip")))
        if len(seen) == messages:
            to_come.set()

    client = consumer(cluster)

    @client.listen(subject, group="tickets", start="earliest", filters=[count, once])
    async def issue(message):
        await once.session.execute(text("INSERT INTO tickets VALUES (:number)"), {"number": message.get_int("number")})

    consuming = asyncio.create_task(client.run())
    await asyncio.wait_for(to_come.wait(), WAIT_S)
    client.stop()
    await consuming
    await tickets.dispose()
    return seen


@pytest.mark.parametrize(
    "database_url, blocking",
    [("sqlite", True), ("mariadb", False), ("postgresql", False)],
    indirect=["database_url"],
)
def test_a_shop_that_dies_at_each_step_has_a_ticket_for_each_paid_order_once(cluster, tmp_path, engine, blocking):
    subject = f"paid.{tmp_path.name}"
    crashes, deaths = dict(CRASHES), 0
    while pay(cluster, engine, subject, crashes, blocking=blocking) != 0:
        order, step = min((order, step) for step, order in crashes.items())
        del crashes[step]
        deaths += 1
        is_paid = order in read(engine, "SELECT number FROM orders")
        assert is_paid == (step != "before the commit")
    assert deaths == len(STEPS)
    assert sorted(read(engine, "SELECT number FROM orders")) == list(range(ORDERS))
    left = [decode_row(content).get_int("number") for content in read(engine, "SELECT content FROM qmq_msg_queue")]
    assert sorted(left) == sorted([CRASHES["after the commit"], CRASHES["before the delete"]])

    asyncio.run(send_what_is_left(cluster, engine))
    seen = asyncio.run(issue_tickets(cluster, engine, subject, ORDERS + 1))
    assert Counter(seen) == Counter(
        [(f"{subject}-{number}", number, 2.5, True) for number in [*range(ORDERS), CRASHES["before the delete"]]]
    )
    assert Counter(read(engine, "SELECT number FROM tickets")) == Counter(range(ORDERS))
