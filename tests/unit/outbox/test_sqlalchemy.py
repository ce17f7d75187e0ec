"""Shell. SQLAlchemy only: coroutines, joined sessions, connections, failing commits."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, contextmanager

import pytest
from sqlalchemy import event, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, scoped_session, sessionmaker

import qmq
from qmq.errors import InvalidRequest, OutcomeUnknown, QueueFull, RolledBack
from qmq.idempotence.transaction import BlockingSqlTransaction, SqlTransaction
from qmq.outbox import sqlalchemy as adapter
from qmq.outbox.sqlalchemy import sends_after_commit
from tests.unit.idempotence.stores import Handed, async_url
from tests.unit.outbox.test_transactions import Failed, paid, sent
from tests.unit.outbox.worlds import TABLE, SessionWorld


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"
    number: Mapped[int] = mapped_column(primary_key=True)


@pytest.fixture
def world(shop_url):
    """One interface per database."""
    world = SessionWorld(shop_url)
    yield world
    world.close()


@asynccontextmanager
async def engine_and_producer(world, broker):
    engine = create_async_engine(async_url(world.url.render_as_string(hide_password=False)))
    async with qmq.Producer(metaserver=broker.metaserver, token="any", app="shop") as producer:
        yield engine, producer
    await engine.dispose()


async def test_coroutines_send_committed_messages(world, broker):
    async with engine_and_producer(world, broker) as (engine, producer):
        async with AsyncSession(engine) as session, session.begin():
            await session.execute(text("INSERT INTO orders VALUES (1)"))
            later = await producer.send(paid(1), session=session)
            with pytest.raises(Failed):
                async with session.begin_nested():
                    await producer.send(paid(2), session=session)
                    raise Failed
            await producer.send_many([paid(3), paid(4)], session=session)
            assert not later.done()
        assert (await later).is_stored
        with pytest.raises(Failed):
            async with AsyncSession(engine) as session, session.begin():
                refused = await producer.send(paid(5), session=session)
                raise Failed
        assert not (await refused).is_stored
        scoped = async_scoped_session(async_sessionmaker(engine), scopefunc=asyncio.current_task)
        await producer.send(paid(6), session=scoped)
        await scoped.commit()
        await scoped.remove()
        kept = await producer.send(paid(7), session=engine)
        await producer.flush()
        assert (await kept).is_stored
    assert sorted(sent(broker)) == [f"paid-{number}" for number in (1, 3, 4, 6, 7)]
    assert (world.orders(), world.rows()) == ([1], [])


def test_close_sends_committed_messages(world, broker):
    async def shop():
        async with engine_and_producer(world, broker) as (engine, producer):
            async with AsyncSession(engine) as session, session.begin():
                await producer.send(paid(1), session=session)
        return engine

    asyncio.run(shop())
    assert (sent(broker), world.rows()) == (["paid-1"], [])


async def test_a_blocking_session_may_be_used_beside_coroutines(session_world, broker):
    async with qmq.Producer(metaserver=broker.metaserver, token="any", app="shop") as producer:
        with session_world.begin() as begun:
            later = await producer.send(paid(1), session=begun.session)
        assert (await later).is_stored
        in_thread = await producer.send(paid(2), session=session_world.engine)
        assert (await in_thread).is_stored
    assert (sent(broker), session_world.rows()) == (["paid-1", "paid-2"], [])


def test_a_session_for_coroutines_needs_the_producer_for_them(session_world, producer):
    session = AsyncSession(create_async_engine("sqlite+aiosqlite://"))
    with pytest.raises(InvalidRequest):
        producer.send(paid(1), session=session)


def test_calls_of_a_transaction_are_read_and_deleted_together(session_world, broker, producer):
    with session_world.begin() as begun:
        for number in range(50):
            producer.send(paid(number), session=begun.session)
    producer.flush()
    assert session_world.statements == ["INSERT"] * 50 + ["SELECT", "DELETE"]
    assert sent(broker) == [f"paid-{number}" for number in range(50)]


def test_message_sent_during_flush_is_written(session_world, broker, producer):
    with Session(session_world.engine) as session:
        event.listen(session, "before_flush", lambda *_: producer.send(paid(1), session=session))
        event.listen(session, "before_commit", lambda *_: producer.send(paid(2), session=session))
        session.add(Order(number=7))
        session.commit()
    producer.flush()
    assert sorted(sent(broker)) == ["paid-1", "paid-2"]
    assert (session_world.orders(), session_world.rows()) == ([7], [])


def test_a_session_sends_transaction_after_transaction(session_world, broker, producer):
    registry = scoped_session(sessionmaker(session_world.engine))
    for number in range(3):
        producer.send(paid(number), session=registry)
        registry.commit()
    producer.send(paid(3), session=registry)
    registry.rollback()
    producer.send(paid(4), session=registry)
    registry.remove()
    producer.flush()
    assert (sent(broker), session_world.rows()) == (["paid-0", "paid-1", "paid-2"], [])


def test_a_connections_transaction_is_sent_after_its_commit(world, broker, producer):
    with world.engine.connect() as connection, sends_after_commit(connection), connection.begin():
        producer.send(paid(1), session=connection)
        with Session(connection, join_transaction_mode="create_savepoint") as session:
            producer.send(paid(2), session=session)
            session.commit()
            producer.send(paid(3), session=session)
            session.rollback()
        producer.flush()
        assert sent(broker) == []
    producer.flush()
    assert (sent(broker), world.rows()) == (["paid-1", "paid-2"], [])


def test_a_connections_transaction_that_fails_sends_nothing(session_world, broker, producer):
    engine = session_world.engine
    with pytest.raises(Failed):
        with engine.connect() as connection, sends_after_commit(connection), connection.begin():
            later = producer.send(paid(1), session=connection)
            raise Failed
    receipt = later.result(5)
    assert (receipt.outcome, type(receipt.error)) == (qmq.Outcome.REFUSED, RolledBack)
    with engine.connect() as connection, pytest.raises(InvalidRequest):
        producer.send(paid(1), session=connection)
    producer.flush()
    assert (sent(broker), session_world.rows()) == ([], [])


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_transaction_of_two_phases_includes_the_row(world, broker, producer, end):
    if world.engine.dialect.name == "sqlite":
        return  # which has no such feature
    with world.engine.connect() as connection, sends_after_commit(connection), connection.begin_twophase() as begun:
        connection.execute(text("INSERT INTO orders VALUES (1)"))
        producer.send(paid(1), session=connection)
        getattr(begun, end)()
    expected = [1] if end == "commit" else []
    if world.engine.dialect.name != "postgresql":  # which prepares only if configured
        with Session(world.engine, twophase=True) as session:
            session.execute(text("INSERT INTO orders VALUES (2)"))
            producer.send(paid(2), session=session)
            getattr(session, end)()
        expected += [2] if end == "commit" else []
    producer.flush()
    assert (sent(broker), world.orders(), world.rows()) == ([f"paid-{number}" for number in expected], expected, [])


def test_unreported_transactions_stay_in_the_outbox(session_world, broker, producer):
    with session_world.engine.connect() as connection, connection.begin():
        with Session(connection) as session:
            later = producer.send(paid(1), session=session)
            session.commit()
    receipt = later.result(5)
    assert (receipt.outcome, type(receipt.error)) == (qmq.Outcome.UNKNOWN, OutcomeUnknown)
    producer.flush()
    assert (sent(broker), session_world.rows()) == ([], ["paid-1"])


@contextmanager
def open_connection(engine):
    with engine.connect() as connection, sends_after_commit(connection):
        yield connection


@pytest.mark.parametrize("opened", [Session, open_connection], ids=["session", "connection"])
def test_failed_commit_has_unknown_outcome(session_world, broker, producer, opened):
    with session_world.engine.begin() as connection:
        connection.execute(text("CREATE TABLE items (n INTEGER REFERENCES keys (n) DEFERRABLE INITIALLY DEFERRED)"))
        connection.execute(text("CREATE TABLE keys (n INTEGER PRIMARY KEY)"))
    with opened(session_world.engine) as session:
        session.execute(text("PRAGMA foreign_keys = ON"))
        session.rollback()
        for number in (1, 2):
            session.execute(text("INSERT INTO items VALUES (1)"))
            later = producer.send(paid(number), session=session)
            with pytest.raises(DBAPIError):
                session.commit()
            session.rollback()
            receipt = later.result(5)
            assert (receipt.outcome, type(receipt.error)) == (qmq.Outcome.UNKNOWN, OutcomeUnknown)
    producer.flush()
    assert (sent(broker), session_world.rows()) == ([], [])


def test_undeletable_rows_stay(session_world, broker, producer, caplog):
    with session_world.engine.begin() as connection:
        stop = "BEFORE DELETE ON qmq_msg_queue BEGIN SELECT RAISE(ABORT, 'no'); END"
        connection.execute(text(f"CREATE TRIGGER stop {stop}"))
    with session_world.begin() as begun:
        later = producer.send(paid(1), session=begun.session)
    assert later.result(5).is_stored
    producer.flush()
    assert session_world.rows() == ["paid-1"]
    assert "rows stay" in caplog.text


def test_messages_above_the_limit_stay(session_world, broker):
    broker.readonly()
    limits = {"queue_messages_max": 2, "timeout_s": 10.0}
    with qmq.blocking.Producer(metaserver=broker.metaserver, token="any", app="shop", **limits) as producer:
        later = []
        for number in (1, 2):
            with session_world.begin() as begun:
                later += producer.send_many([paid(number), paid(number + 2)], session=begun.session)
        assert isinstance(later[-1].result(5).error, QueueFull)
        with pytest.raises(QueueFull):
            producer.send(paid(5), session=session_world.engine)
        broker.writable()
        producer.flush()
        assert (sent(broker), session_world.rows()) == (["paid-1", "paid-3"], ["paid-2", "paid-4"])


@pytest.mark.parametrize("table", ["messages", "main.messages"])
def test_another_table_may_be_named(session_world, broker, table):
    with session_world.engine.begin() as connection:
        connection.execute(text(f"ALTER TABLE {TABLE} RENAME TO messages"))
    options = {"metaserver": broker.metaserver, "token": "any", "app": "shop", "outbox_table": table}
    with qmq.blocking.Producer(**options) as producer:
        with session_world.begin() as begun:
            producer.send(paid(1), session=begun.session)
    assert sent(broker) == ["paid-1"]
    with session_world.engine.connect() as connection:
        assert connection.execute(text("SELECT count(*) FROM messages")).scalar() == 0


@pytest.mark.parametrize("session", [object(), "default", 1])
def test_invalid_session_is_refused(producer, session):
    with pytest.raises(InvalidRequest, match="expected a SQLAlchemy session"):
        producer.send(paid(1), session=session)


def test_handler_may_send_in_its_transaction(world, broker, producer):
    """Once, after its commit; redelivered, it sends nothing."""
    once = BlockingSqlTransaction(world.engine)
    once.create_table()

    def handle(message):
        producer.send(paid(1), session=once.session)
        producer.flush()
        assert sent(broker) == []

    once(Handed("m"), handle)
    producer.flush()
    once(Handed("m"), handle)
    with pytest.raises(Failed):
        once(Handed("other"), lambda _: (producer.send(paid(2), session=once.session), fail()))
    producer.flush()
    assert (sent(broker), world.rows()) == (["paid-1"], [])


async def test_a_handler_of_coroutines_may_so_too(world, broker):
    async with engine_and_producer(world, broker) as (engine, producer):
        once = SqlTransaction(engine)
        await once.create_table()

        async def handle(message):
            await producer.send(paid(1), session=once.session)

        await once(Handed("n"), handle)
        await once(Handed("n"), handle)
    assert (sent(broker), world.rows()) == (["paid-1"], [])


def fail():
    raise Failed


def test_nothing_is_kept_of_transactions_that_have_ended(session_world, producer):
    for number in range(3):
        with session_world.begin() as begun:
            producer.send(paid(number), session=begun.session)
    session = Session(session_world.engine)
    producer.send(paid(3), session=session)
    session.close()
    producer.flush()
    kept = [adapter._units, adapter._works, adapter._sessions_on, adapter._changed, adapter._announced]
    assert [len(collection) for collection in kept] == [0] * len(kept)
