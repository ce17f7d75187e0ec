"""Shell. The shop is killed at each step of a transaction; each paid order has one ticket in the end."""

from __future__ import annotations

import asyncio
import json
import os
import signal
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
from tests.integration.cluster_world import WAIT_S, shared_cluster, until
from tests.integration.outbox_process import STEPS
from tests.integration.watchdog_world import WatchdogProcess, register
from tests.unit.idempotence.stores import async_url

ROOT = Path(__file__).parents[2]
ORDERS = 12
CRASHES = {step: 3 * number + 2 for number, step in enumerate(STEPS)}
"""Step -> the order at which the shop is killed there."""


# The lease outlasts any pause: a redelivered message would count as a second ticket.
cluster = shared_cluster(lease_ms=60_000)


@pytest.fixture
def engine(database_url, application):
    engine = create_engine(database_url)
    with engine.begin() as connection:
        HandledTable("qmq_handled").create(connection)
        connection.execute(text("CREATE TABLE orders (number INTEGER PRIMARY KEY)"))
        connection.execute(text("CREATE TABLE tickets (number INTEGER)"))
    yield engine
    engine.dispose()


def read(engine, statement):
    with engine.connect() as connection:
        return list(connection.execute(text(statement)).scalars())


@pytest.fixture(scope="module")
def process(cluster):
    command = [sys.executable, "-m", "tests.integration.outbox_process"]
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=os.environ | {"QMQ_TOKEN": cluster.token},
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        yield process


def pay(process, cluster, engine, subject, crashes, *, blocking):
    """Run the shop once; return its exit status."""
    url = engine.url.render_as_string(hide_password=False)
    options = {
        "url": url if blocking else async_url(url),
        "metaserver": cluster.metaserver,
        "subject": subject,
        "crashes": crashes,
        "orders": ORDERS,
        "blocking": blocking,
    }
    process.stdin.write(json.dumps(options) + "\n")
    process.stdin.flush()
    return int(process.stdout.readline())


async def issue_tickets(cluster, engine, subject, messages):
    """Consume this many messages; each writes its ticket in the transaction of its idempotence key."""
    to_come, seen = asyncio.Event(), []
    tickets = create_async_engine(async_url(engine.url.render_as_string(hide_password=False)))
    once = SqlTransaction(tickets)

    async def count(message, handle):
        await handle(message)
        seen.append((message.id, message.get_int("number"), message.get_float("price"), message.get_bool("isVip")))
        if len(seen) == messages:
            to_come.set()

    client = cluster.consumer()

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
def test_crashing_shop_has_a_ticket_per_paid_order(process, cluster, tmp_path, engine, application, blocking):
    subject = f"paid.{tmp_path.name}"
    crashes, deaths = dict(CRASHES), 0
    while (status := pay(process, cluster, engine, subject, crashes, blocking=blocking)) != 0:
        assert status == -signal.SIGKILL
        order, step = min((order, step) for step, order in crashes.items())
        del crashes[step]
        deaths += 1
        is_paid = order in read(engine, "SELECT number FROM orders")
        assert is_paid == (step != "before the commit")
    assert deaths == len(STEPS)
    assert sorted(read(engine, "SELECT number FROM orders")) == list(range(ORDERS))
    left = [decode_row(content).get_int("number") for content in read(engine, "SELECT content FROM qmq_msg_queue")]
    assert sorted(left) == sorted([CRASHES["after the commit"], CRASHES["before the delete"]])

    register(cluster, application.source)
    with WatchdogProcess(cluster, tmp_path / "watchdog"):
        until(lambda: application.count() == 0, "the watchdog has sent the remaining rows")
    seen = asyncio.run(issue_tickets(cluster, engine, subject, ORDERS + 1))
    assert Counter(seen) == Counter(
        [(f"{subject}-{number}", number, 2.5, True) for number in [*range(ORDERS), CRASHES["before the delete"]]]
    )
    assert Counter(read(engine, "SELECT number FROM tickets")) == Counter(range(ORDERS))
