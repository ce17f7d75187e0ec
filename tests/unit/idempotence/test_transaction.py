"""Shell. The key in the handler's own transaction: work and key are kept together, before the ack, or not at all.

Each test runs with a coroutine and with a plain function as handler, on each kind of database.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import Engine, create_engine, event, text
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import Session

from qmq.errors import InvalidRequest, RetryLater
from qmq.idempotence.transaction import BlockingSqlTransaction, SqlTransaction
from tests.unit.idempotence.stores import Handed, async_url

Step = Callable[[Session], object]
WAIT_S = 30


def ship(number: int) -> Step:
    return lambda session: session.execute(text("INSERT INTO shipment (number) VALUES (:number)"), {"number": number})


def run_sql(statement: str) -> Step:
    return lambda session: session.execute(text(statement))


def fail(error: BaseException) -> Step:
    def step(session: Session) -> None:
        raise error

    return step


class Coroutines:
    """Handlers that are coroutine functions."""

    def __init__(self, url: str) -> None:
        self._url = async_url(url)

    def deliver(self, message: Handed, *steps: Step, prepare: Callable[[Engine], None] = lambda engine: None) -> None:
        """Deliver a message to a handler with these steps. Returning means acked; raises the handler's error."""

        async def run():
            engine = create_async_engine(self._url)
            prepare(engine.sync_engine)
            once = SqlTransaction(engine)

            async def handler(message):
                for step in steps:
                    await once.session.run_sync(step)

            try:
                await once(message, handler)
            finally:
                await engine.dispose()

        asyncio.run(run())


class Threads:
    """Handlers that are plain functions."""

    def __init__(self, url: str) -> None:
        self._url = url

    def deliver(self, message: Handed, *steps: Step, prepare: Callable[[Engine], None] = lambda engine: None) -> None:
        engine = create_engine(self._url)
        prepare(engine)
        once = BlockingSqlTransaction(engine)

        def handler(message):
            for step in steps:
                step(once.session)

        try:
            once(message, handler)
        finally:
            engine.dispose()


@pytest.fixture
def database(database_url: str) -> Iterator[Engine]:
    """The application's database, with its table of shipments."""
    engine = create_engine(database_url)
    BlockingSqlTransaction(engine).create_table()
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE shipment (number INTEGER PRIMARY KEY)"))
    yield engine
    engine.dispose()


@pytest.fixture(params=[Coroutines, Threads], ids=["coroutine", "thread"])
def world(request, database, database_url):
    return request.param(database_url)


def kept(database: Engine) -> tuple[list[int], int]:
    """Return the shipments, and the number of keys."""
    with database.connect() as connection:
        numbers = [row.number for row in connection.execute(text("SELECT number FROM shipment ORDER BY number"))]
        return numbers, connection.execute(text("SELECT count(*) FROM qmq_handled")).scalar_one()


def test_work_and_key_are_kept_once(world, database):
    for _ in range(3):
        world.deliver(Handed("id-1"), ship(1))
    world.deliver(Handed("id-2"), ship(2))
    assert kept(database) == ([1, 2], 2)


@pytest.mark.parametrize(
    "error",
    [ValueError("bad"), RetryLater(0.0), asyncio.CancelledError(), SystemExit(1)],
    ids=lambda error: repr(error),
)
def test_failed_handler_keeps_nothing(world, database, error):
    with pytest.raises(type(error)):
        world.deliver(Handed("id-1"), ship(1), fail(error))
    assert kept(database) == ([], 0)
    world.deliver(Handed("id-1"), ship(1))
    assert kept(database) == ([1], 1)


@pytest.mark.parametrize("database_url", ["sqlite", "postgresql"], indirect=True)
def test_a_commit_that_the_database_refuses_fails_the_message(world, database):
    """QMQ swallows it and acks the message; its work is lost. (MariaDB checks nothing that late.)"""
    with database.begin() as connection:
        connection.execute(text("CREATE TABLE parcel (number INTEGER PRIMARY KEY)"))
        late = "number INTEGER REFERENCES parcel (number) DEFERRABLE INITIALLY DEFERRED"
        connection.execute(text(f"CREATE TABLE label ({late})"))

    def prepare(engine: Engine) -> None:
        if engine.dialect.name == "sqlite":
            event.listen(
                engine, "connect", lambda connection, _: connection.execute("PRAGMA foreign_keys = ON").close()
            )

    steps = ship(1), run_sql("INSERT INTO label (number) VALUES (7)")
    with pytest.raises(IntegrityError):
        world.deliver(Handed("id-1"), *steps, prepare=prepare)
    assert kept(database) == ([], 0)
    with database.begin() as connection:
        connection.execute(text("INSERT INTO parcel (number) VALUES (7)"))
    world.deliver(Handed("id-1"), *steps, prepare=prepare)
    assert kept(database) == ([1], 1)


@pytest.mark.parametrize("database_url", ["mariadb", "postgresql"], indirect=True)
def test_connection_cut_at_commit_fails_the_message(world, database):
    def cut(connection):
        is_postgresql = connection.dialect.name == "postgresql"
        number = connection.scalar(text(f"SELECT {'pg_backend_pid' if is_postgresql else 'connection_id'}()"))
        with database.begin() as other:
            other.execute(text(f"SELECT pg_terminate_backend({number})" if is_postgresql else f"KILL {number}"))

    with pytest.raises(DBAPIError):
        world.deliver(Handed("id-1"), ship(1), prepare=lambda engine: event.listen(engine, "commit", cut))
    assert kept(database) == ([], 0)
    world.deliver(Handed("id-1"), ship(1))
    assert kept(database) == ([1], 1)


def test_handlers_commit_keeps_nothing_early(world, database):
    with pytest.raises(ValueError):
        world.deliver(Handed("id-1"), ship(1), Session.commit, ship(2), fail(ValueError("bad")))
    assert kept(database) == ([], 0)
    world.deliver(Handed("id-1"), ship(1), Session.commit, ship(2))
    assert kept(database) == ([1, 2], 1)


def test_handlers_rollback_keeps_the_key(world, database):
    for _ in range(2):
        world.deliver(Handed("id-1"), ship(1), Session.rollback, ship(2))
    assert kept(database) == ([2], 1)


def test_swallowed_database_error_is_not_acked(world, database):
    """PostgreSQL then gives up the whole transaction, and answers its COMMIT with a rollback and no error."""
    world.deliver(Handed("id-0"), ship(0))

    def swallow(session: Session) -> None:
        with pytest.raises(IntegrityError):
            ship(0)(session)

    try:
        world.deliver(Handed("id-1"), ship(1), swallow)
        is_acked = True
    except DBAPIError:
        is_acked = False
    assert kept(database) == (([0, 1], 2) if is_acked else ([0], 1))


def test_handler_that_ends_the_transaction_is_not_acked(world, database):
    """MariaDB does so to the loser of a deadlock."""
    with pytest.raises(DBAPIError):
        world.deliver(Handed("id-1"), ship(1), run_sql("ROLLBACK"), ship(2))
    assert kept(database) == ([], 0)


@pytest.mark.parametrize("first_fails", [False, True], ids=["first one ends", "first one fails"])
def test_concurrent_deliveries_do_the_work_once(world, database, first_fails):
    began, may_end = threading.Event(), threading.Event()

    def wait(session: Session) -> None:
        began.set()
        assert may_end.wait(WAIT_S)
        if first_fails:
            raise ValueError("bad")

    done: list[str] = []

    def deliver(name: str, *steps: Step) -> None:
        try:
            world.deliver(Handed("id-1"), *steps)
        except (DBAPIError, ValueError):
            done.append(f"{name} failed")
        else:
            done.append(f"{name} acked")

    first = threading.Thread(target=deliver, args=("first", ship(1), wait))
    first.start()
    assert began.wait(WAIT_S)
    second_began = threading.Event()
    second = threading.Thread(target=lambda: (second_began.set(), deliver("second", ship(1))))
    second.start()
    assert second_began.wait(WAIT_S)
    may_end.set()
    first.join(WAIT_S)
    second.join(WAIT_S)
    if "second failed" in done:  # SQLite's lock is polled, for a limited time
        deliver("second", ship(1))
    assert {"first failed" if first_fails else "first acked", "second acked"} <= set(done)
    assert kept(database) == ([1], 1)


def test_forget_deletes_old_keys(world, database):
    world.deliver(Handed("id-1"), ship(1))
    once, now = BlockingSqlTransaction(database), datetime.now(UTC)
    assert once.forget(now - timedelta(days=1)) == 0
    assert once.forget(now + timedelta(days=1)) == 1
    assert kept(database) == ([1], 0)


async def test_coroutines_make_the_table_and_forget_as_well(database_url):
    engine = create_async_engine(async_url(database_url))
    try:
        once = SqlTransaction(engine, table="other_name")
        for _ in range(2):
            await once.create_table()

        async def handler(message):
            await once.session.execute(text("SELECT 1"))

        await once(Handed("id-1"), handler)
        assert await once.forget(datetime.now(UTC) + timedelta(days=1)) == 1
    finally:
        await engine.dispose()


@pytest.mark.parametrize("database_url", ["mariadb", "postgresql"], indirect=True)
async def test_concurrent_handlers_have_own_sessions(database, database_url):
    engine = create_async_engine(async_url(database_url))
    once, turns = SqlTransaction(engine), asyncio.Barrier(3)

    async def handler(message):
        mine = once.session
        await mine.execute(text("SELECT 1"))
        await turns.wait()
        assert once.session is mine
        sessions.add(mine)

    sessions = set()
    try:
        await asyncio.gather(*(once(Handed(f"id-{at}"), handler) for at in range(3)))
    finally:
        await engine.dispose()
    assert len(sessions) == 3


def test_there_is_no_session_outside_of_a_handler(tmp_path):
    engine = create_engine(f"sqlite:///{tmp_path / 'application.db'}")
    with pytest.raises(InvalidRequest, match="only while a handler runs"):
        _ = BlockingSqlTransaction(engine).session
