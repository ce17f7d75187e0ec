"""Shell. Handlers that use Django's ORM, over restarts of the database."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.db import connections, transaction

import qmq
from qmq.client import django_connections
from tests.support.databases import DatabaseServer
from tests.support.waiting import until_async
from tests.unit.client.world import fill, handling
from tests.unit.outbox.worlds import DjangoWorld


@pytest.fixture
def alias(database_server: DatabaseServer):
    """Alias of a Django database with lasting connections and no health checks."""
    world = DjangoWorld(database_server.create_database())
    connections.databases[world.connection.alias]["CONN_MAX_AGE"] = None
    world.engine.dispose()
    yield world.connection.alias
    database_server.ensure()
    world.close()


@pytest.mark.parametrize("kind", ["plain", "coroutine", "batch"])
async def test_all_messages_are_handled_after_a_restart(alias, kind, database_server):
    handled: set[str] = set()

    def query(message: qmq.ReceivedMessage) -> None:
        with connections[alias].cursor() as cursor:
            cursor.execute("SELECT 1")
        handled.add(str(message["n"]))

    async def coroutine(message: qmq.ReceivedMessage) -> None:
        await sync_to_async(query)(message)

    def batch(messages: list[qmq.ReceivedMessage]) -> None:
        for message in messages:
            query(message)

    handler: Any = {"plain": query, "coroutine": coroutine, "batch": batch}[kind]
    options = {"batch": 5} if kind == "batch" else {}
    async with handling(handler, 20, concurrency=4, retries_max=3, retry_delay=0.01, **options) as broker:
        await until_async(lambda: len(handled) == 20)
        database_server.kill()
        database_server.start()  # not in a thread: the server would end with it
        fill(broker, range(20, 220))
        await until_async(lambda: not broker.unacked() and len(handled) + len(broker.dead["a", "g"]) >= 220)
        assert (len(handled), broker.dead["a", "g"]) == (220, [])
    await sync_to_async(connections.close_all)()


class Connection:
    """Connection of Django, with the facts that decide its end."""

    def __init__(self, *, failed: bool = False, usable: bool = True, in_block: bool = False) -> None:
        self.errors_occurred, self.in_atomic_block, self._usable = failed, in_block, usable
        self.checked = False

    def is_usable(self) -> bool:
        return self._usable

    def close_if_unusable_or_obsolete(self) -> None:
        self.checked = True


@pytest.mark.parametrize(
    ("connection", "is_alone", "checked"),
    [
        (Connection(), True, True),
        (Connection(), False, False),
        (Connection(failed=True), False, False),
        (Connection(failed=True, usable=False), False, True),
        (Connection(failed=True, usable=False, in_block=True), False, False),
    ],
)
def test_only_broken_connections_of_others_are_closed(monkeypatch, connection, is_alone, checked):
    monkeypatch.setattr(connections, "all", lambda **_: [connection])
    django_connections.close_old(is_alone=is_alone)
    assert connection.checked is checked


def test_failing_close_is_no_failure_of_the_message(monkeypatch):
    monkeypatch.setattr(connections, "all", lambda **_: 1 / 0)
    django_connections.close_old()


@pytest.fixture
def world(tmp_path):
    world = DjangoWorld(f"sqlite:///{tmp_path / 'shop.db'}")
    yield world
    world.close()


def test_open_transactions_are_left_alone(world):
    with transaction.atomic(using=world.connection.alias):
        inner = world.connection.connection
        django_connections.close_old()
        assert world.connection.connection is inner is not None


async def test_plain_handlers_keep_no_aged_connection(world):
    alias, open_after, threads = world.connection.alias, list[bool](), set[int]()

    def query(message: qmq.ReceivedMessage) -> None:
        open_after.append(connections[alias].connection is not None)
        threads.add(threading.get_ident())
        connections[alias].ensure_connection()

    async with handling(query, 3) as broker:
        await until_async(lambda: len(open_after) == 3 and not broker.unacked())
    assert (open_after, len(threads)) == ([False] * 3, 1)
