"""Shell. Plain DB-API connections: drivers that begin transactions implicitly, and drivers that do not."""

from __future__ import annotations

import sqlite3

import pytest

from qmq import Outcome
from qmq.errors import InvalidRequest
from qmq.outbox.courier import find
from qmq.outbox.dbapi import Database
from tests.unit.outbox.test_transactions import Failed, paid, sent
from tests.unit.outbox.worlds import DbapiWorld, connect


@pytest.fixture
def world(shop_url):
    """One interface per database."""
    world = DbapiWorld(shop_url)
    yield world
    world.close()


def run(connection, statement):
    cursor = connection.cursor()
    cursor.execute(statement)
    cursor.close()


def autocommits(connection):
    """Stop the driver from beginning transactions."""
    if isinstance(connection, sqlite3.Connection):
        connection.isolation_level = None
    elif hasattr(connection, "get_autocommit"):
        connection.autocommit(True)
    else:
        connection.autocommit = True


@pytest.mark.parametrize("prepare", [lambda _: None, autocommits], ids=["by the driver", "by us"])
def test_an_applications_own_connection_serves_for_transaction_after_transaction(world, broker, producer, prepare):
    database, connection = Database(lambda: connect(world.url)), connect(world.url)
    prepare(connection)
    with database.transaction(connection) as begun:
        run(connection, "INSERT INTO orders VALUES (1)")
        producer.send(paid(1), session=begun)
    with pytest.raises(Failed), database.transaction(connection) as begun:
        run(connection, "INSERT INTO orders VALUES (2)")
        producer.send(paid(2), session=begun)
        raise Failed
    with database.transaction(connection) as begun:
        with pytest.raises(Failed), begun.savepoint():
            run(connection, "INSERT INTO orders VALUES (3)")
            producer.send(paid(3), session=begun)
            raise Failed
        run(connection, "INSERT INTO orders VALUES (4)")
        producer.send(paid(4), session=begun)
    connection.close()
    producer.flush()
    assert (sent(broker), world.orders(), world.rows()) == (["paid-1", "paid-4"], [1, 4], [])


class Autocommitting(sqlite3.Connection):
    """As with Python 3.12's `autocommit=True`, and psycopg2's: the driver ends only transactions that it began."""

    def commit(self):
        pass

    def rollback(self):
        pass


def test_driver_ends_only_its_own_transactions(tmp_path, broker, producer):
    world = DbapiWorld(f"sqlite:///{tmp_path / 'shop.db'}")
    connection = sqlite3.connect(world.url.database, factory=Autocommitting, isolation_level=None)
    database = Database(lambda: connect(world.url))
    with database.transaction(connection) as begun:
        run(connection, "INSERT INTO orders VALUES (1)")
        producer.send(paid(1), session=begun)
    with pytest.raises(Failed), database.transaction(connection) as begun:
        run(connection, "INSERT INTO orders VALUES (2)")
        raise Failed
    with pytest.raises(Failed), database.transaction(connection) as begun:
        run(connection, "ROLLBACK")  # as SQLite does when the disk is full
        raise Failed
    assert not connection.in_transaction
    producer.flush()
    assert (sent(broker), world.orders(), world.rows()) == (["paid-1"], [1], [])
    connection.close()
    world.close()


def test_failed_commit_has_unknown_outcome(tmp_path, broker, producer):
    world = DbapiWorld(f"sqlite:///{tmp_path / 'shop.db'}")
    connection = connect(world.url)
    connection.executescript("""
        PRAGMA foreign_keys = ON;
        CREATE TABLE keys (n INTEGER PRIMARY KEY);
        CREATE TABLE items (n INTEGER REFERENCES keys (n) DEFERRABLE INITIALLY DEFERRED);
    """)
    with pytest.raises(sqlite3.IntegrityError):
        with Database(lambda: connect(world.url)).transaction(connection) as begun:
            connection.execute("INSERT INTO items VALUES (1)")
            later = producer.send(paid(1), session=begun)
    assert later.result(5).outcome is Outcome.UNKNOWN
    assert not connection.in_transaction
    connection.close()
    assert (sent(broker), world.rows()) == ([], [])
    world.close()


def test_an_unknown_driver_is_refused():
    with pytest.raises(InvalidRequest, match="not known"):
        with Database(lambda: object()).transaction(object()):
            pass


def test_bare_connection_is_refused_with_advice():
    connection = sqlite3.connect(":memory:")
    with pytest.raises(InvalidRequest, match=r"sqlite3\.Connection .* use qmq\.outbox\.dbapi\.Database"):
        find(connection)
    connection.close()
