"""Shell. A row is part of the application's transaction, or `send` fails: faults, commit styles, several databases."""

from __future__ import annotations

import threading
from contextlib import contextmanager, suppress

import pytest
from sqlalchemy import create_engine, event, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.ext.horizontal_shard import ShardedSession
from sqlalchemy.orm import Session, scoped_session, sessionmaker

import qmq
from qmq.errors import InvalidRequest, RolledBack
from qmq.idempotence.transaction import BlockingSqlTransaction
from qmq.outbox.sqlalchemy import sends_after_commit
from tests.support.waiting import until
from tests.unit.idempotence.stores import Handed, async_url
from tests.unit.outbox.test_sqlalchemy import Order
from tests.unit.outbox.test_transactions import Failed, paid, sent
from tests.unit.outbox.worlds import TABLE, SessionWorld

PAY = "INSERT INTO orders VALUES (1)"


@contextmanager
def other_connection(world):
    engine = create_engine(world.url)
    with engine.connect() as connection:
        yield connection
    engine.dispose()


def run_elsewhere(world, statement):
    with other_connection(world) as connection:
        connection.execute(text(statement))
        connection.commit()


# Faults of the INSERT: context managers around a transaction, which they yield after its first change.


def schema_fault(change, back):
    @contextmanager
    def fault(world, kind):
        run_elsewhere(world, change[kind])
        yield lambda execute: None
        run_elsewhere(world, back[kind])

    return fault


def statement_fault(before, after=None):
    @contextmanager
    def fault(world, kind):
        yield lambda execute: execute(before[kind])
        if after:
            with world.begin() as begun:
                begun.execute(after[kind])

    return fault


@contextmanager
def table_locked(world, kind):
    with other_connection(world) as other:

        def strike(execute):
            limit = {"mariadb": "SET innodb_lock_wait_timeout = 1", "postgresql": "SET LOCAL lock_timeout = '50ms'"}
            execute(limit[kind])
            other.execute(text(LOCKS[kind]))

        yield strike


@contextmanager
def connection_lost(world, kind):
    def strike(execute):
        if kind == "mariadb":
            (id,) = world._read("SELECT trx_mysql_thread_id FROM information_schema.innodb_trx")
            run_elsewhere(world, f"KILL {id}")
        else:
            others = "datname = current_database() AND pid <> pg_backend_pid() AND backend_xid IS NOT NULL"
            run_elsewhere(world, f"SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE {others}")

    yield strike


@contextmanager
def deadlock(world, kind):
    """The other transaction waits for the order, and holds the lock that the row waits for."""
    threads = []
    with other_connection(world) as other:

        def wait_for_order():
            with suppress(DBAPIError):
                other.execute(text("DELETE FROM orders" if kind == "mariadb" else "LOCK TABLE orders"))

        def strike(execute):
            if kind == "postgresql":
                execute("SET LOCAL deadlock_timeout = '20ms'")
                other.execute(text("SET LOCAL deadlock_timeout = '60s'"))
            else:  # the database ends the transaction with fewer changes
                other.execute(text("CREATE TEMPORARY TABLE ballast (number INTEGER) ENGINE=InnoDB"))
                other.execute(text("INSERT INTO ballast SELECT seq FROM seq_1_to_1000"))
            other.execute(text(LOCKS[kind]))
            threads.append(threading.Thread(target=wait_for_order))
            threads[0].start()
            until(lambda: world._read(WAITING[kind]) != [0])

        yield strike
        threads[0].join(30)
        other.rollback()


LOCKS = {
    "mariadb": f"SELECT * FROM {TABLE} FOR UPDATE",  # of an empty table: the gap for new rows
    "postgresql": f"LOCK TABLE {TABLE} IN EXCLUSIVE MODE",
}
WAITING = {
    "mariadb": "SELECT count(*) FROM information_schema.innodb_trx WHERE trx_state = 'LOCK WAIT'",
    "postgresql": "SELECT count(*) FROM pg_locks WHERE NOT granted",
}
KINDS = ("sqlite", "mariadb", "postgresql")
FAULTS = {
    "table missing": schema_fault(
        dict.fromkeys(KINDS, f"ALTER TABLE {TABLE} RENAME TO gone"),
        dict.fromkeys(KINDS, f"ALTER TABLE gone RENAME TO {TABLE}"),
    ),
    "row too long": schema_fault(
        {
            "sqlite": f"CREATE TRIGGER short BEFORE INSERT ON {TABLE} BEGIN SELECT RAISE(ABORT, 'too long'); END",
            "mariadb": f"ALTER TABLE {TABLE} MODIFY content VARCHAR(10) NOT NULL",
            "postgresql": f"ALTER TABLE {TABLE} ALTER content TYPE VARCHAR(10)",
        },
        {
            "sqlite": "DROP TRIGGER short",
            "mariadb": f"ALTER TABLE {TABLE} MODIFY content LONGTEXT NOT NULL",
            "postgresql": f"ALTER TABLE {TABLE} ALTER content TYPE TEXT",
        },
    ),
    "read-only": statement_fault(
        {"sqlite": "PRAGMA query_only = ON", "postgresql": "SET TRANSACTION READ ONLY"},
        {"sqlite": "PRAGMA query_only = OFF", "postgresql": "SELECT 1"},
    ),
    "disk full": statement_fault({"sqlite": "PRAGMA max_page_count = 1"}, {"sqlite": "PRAGMA max_page_count = 100000"}),
    "table locked": table_locked,
    "connection lost": connection_lost,
    "deadlock": deadlock,
}
NOT_ON = {
    "sqlite": ("table locked", "connection lost", "deadlock"),  # a transaction with changes has the only lock
    "mariadb": ("read-only", "disk full"),  # a transaction stays writable
    "postgresql": ("disk full",),
}


@pytest.mark.parametrize("swallowed", [False, True], ids=["raised", "swallowed"])
@pytest.mark.parametrize("fault", FAULTS)
def test_failed_insert_leaves_the_connection_clean(world, broker, producer, fault, swallowed):
    kind = world.url.get_backend_name()
    if fault in NOT_ON[kind]:
        return
    big = qmq.Message("order.paid", {"text": "x" * 30_000}, id="paid-1")
    failed = None
    with FAULTS[fault](world, kind) as strike:
        try:
            with world.begin() as begun:
                begun.execute(PAY)
                strike(begun.execute)
                try:
                    producer.send(big, session=begun.session)
                except Exception as error:
                    failed = error
                    if not swallowed:
                        raise
        except Exception as error:
            assert failed is not None and (swallowed or error is failed), error
    assert failed is not None
    with world.begin() as begun:
        begun.execute("INSERT INTO orders VALUES (2)")
        producer.send(paid(2), session=begun.session)
    producer.flush()
    assert (world.orders(), world.rows(), sent(broker)) == ([2], [], ["paid-2"])


# AUTOCOMMIT.


def by_engine(url):
    return Session(create_engine(url, isolation_level="AUTOCOMMIT"))


def by_execution_options(url):
    return Session(create_engine(url).execution_options(isolation_level="AUTOCOMMIT"))


def by_session_connection(url):
    session = Session(create_engine(url))
    session.connection(execution_options={"isolation_level": "AUTOCOMMIT"})
    return session


def by_connection(url):
    connection = create_engine(url).connect().execution_options(isolation_level="AUTOCOMMIT")
    connection.begin()
    return connection


@pytest.mark.parametrize("way", [by_engine, by_execution_options, by_session_connection, by_connection])
def test_autocommit_is_refused(shop_url, producer, way):
    world = SessionWorld(shop_url)
    with way(shop_url) as session:
        with pytest.raises(InvalidRequest, match="AUTOCOMMIT"):
            producer.send(paid(1), session=session)
    getattr(session, "bind", session.engine if hasattr(session, "engine") else None).dispose()
    assert world.rows() == []
    world.close()


async def test_autocommit_is_refused_for_coroutines_and_handlers(shop_url, broker):
    world = SessionWorld(shop_url)

    engine = create_async_engine(async_url(shop_url), isolation_level="AUTOCOMMIT")
    async with qmq.Producer(metaserver=broker.metaserver, token="any", app="shop") as producer:
        async with AsyncSession(engine) as session:
            with pytest.raises(InvalidRequest, match="AUTOCOMMIT"):
                await producer.send(paid(1), session=session)
        async with engine.connect() as connection, connection.begin():
            with pytest.raises(InvalidRequest, match="AUTOCOMMIT"):
                await producer.send(paid(1), session=connection)
    await engine.dispose()
    engine = create_engine(shop_url, isolation_level="AUTOCOMMIT")
    once, handled = BlockingSqlTransaction(engine), []
    once.create_table()
    with pytest.raises(InvalidRequest, match="AUTOCOMMIT"):
        once(Handed("autocommit"), handled.append)
    engine.dispose()
    assert (handled, world.rows()) == ([], [])
    world.close()


# Commit styles.


def session_begin(engine, work):
    with Session(engine) as session, session.begin():
        work(session)


def as_you_go(engine, work):
    with Session(engine) as session:
        work(session)
        session.commit()


def sessionmaker_begin(engine, work):
    with sessionmaker(engine).begin() as session:
        work(session)


def without_autobegin(engine, work):
    with Session(engine, autobegin=False) as session, session.begin():
        work(session)


def scoped(engine, work):
    registry = scoped_session(sessionmaker(engine))
    try:
        work(registry)
        registry.commit()
    finally:
        registry.remove()


def session_connection(engine, work):
    with Session(engine) as session:
        work(session.connection())
        session.commit()


def core_begin(engine, work):
    with engine.connect() as connection, sends_after_commit(connection), connection.begin():
        work(connection)


def core_begin_once(engine, work):
    with engine.begin() as connection, sends_after_commit(connection):
        work(connection)
        connection.commit()


def core_as_you_go(engine, work):
    with engine.connect() as connection, sends_after_commit(connection):
        work(connection)
        connection.commit()


def joined(mode):
    def style(engine, work):
        with engine.connect() as connection, sends_after_commit(connection), connection.begin():
            with Session(connection, join_transaction_mode=mode) as session:
                work(session)
                session.commit()

    style.__name__ = mode
    return style


STYLES = [session_begin, as_you_go, sessionmaker_begin, without_autobegin, scoped, session_connection]
STYLES += [core_begin, core_begin_once, core_as_you_go]
STYLES += map(joined, ["conditional_savepoint", "rollback_only", "create_savepoint"])


def pay(producer, number):
    def work(session):
        session.execute(text(f"INSERT INTO orders VALUES ({number})"))
        producer.send(paid(number), session=session)

    return work


@pytest.mark.parametrize("style", STYLES, ids=lambda style: style.__name__)
def test_every_commit_style_commits_order_and_row_together(session_world, broker, producer, style):
    engine = create_engine(session_world.url, pool_size=1, max_overflow=0)
    fault = FAULTS["table missing"]
    with fault(session_world, "sqlite"), pytest.raises(DBAPIError):
        style(engine, pay(producer, 1))
    style(engine, pay(producer, 2))

    def failing(session):
        pay(producer, 3)(session)
        raise Failed

    with pytest.raises(Failed):
        style(engine, failing)
    style(engine, pay(producer, 4))
    producer.flush()
    engine.dispose()
    assert (session_world.orders(), sent(broker), session_world.rows()) == ([2, 4], ["paid-2", "paid-4"], [])


# Commits that lose the changes.


def test_failed_commit_leaves_nothing_to_the_next_user(session_world, broker, producer):
    """SQLAlchemy returns the connection within its transaction, as SQLite continues after a rejected commit."""
    run_elsewhere(session_world, "CREATE TABLE keys (n INTEGER PRIMARY KEY)")
    run_elsewhere(session_world, "CREATE TABLE items (n INTEGER REFERENCES keys (n) DEFERRABLE INITIALLY DEFERRED)")
    engine = create_engine(session_world.url, pool_size=1, max_overflow=0)
    event.listen(engine, "connect", lambda connection, _: connection.execute("PRAGMA foreign_keys = ON"))
    once = BlockingSqlTransaction(engine)
    once.create_table()

    def refused(session):
        session.execute(text("INSERT INTO items VALUES (1)"))
        pay(producer, 1)(session)

    for style in (as_you_go, core_begin):
        with pytest.raises(DBAPIError):
            style(engine, refused)
        as_you_go(engine, lambda session: session.execute(text("INSERT INTO orders VALUES (2)")))
    with pytest.raises(DBAPIError):
        once(Handed("m"), lambda _: once.session.execute(text("INSERT INTO items VALUES (1)")))
    as_you_go(engine, lambda session: session.execute(text("INSERT INTO orders VALUES (3)")))
    assert session_world._read("SELECT count(*) FROM qmq_handled") == [0]
    engine.dispose()
    producer.flush()
    assert (session_world.orders(), sent(broker), session_world.rows()) == ([2, 2, 3], [], [])


def test_only_rows_that_are_committed_are_sent(shop_url, broker, producer):
    """PostgreSQL rolls back at the COMMIT of a failed transaction; savepoints in SQL text are not reported."""
    world = SessionWorld(shop_url)
    with world.begin() as begun:
        producer.send(paid(1), session=begun.session)
        begun.execute("SAVEPOINT own")
        later = producer.send(paid(2), session=begun.session)
        begun.execute("ROLLBACK TO SAVEPOINT own")
    assert isinstance(later.result(30).error, RolledBack)
    with world.begin() as begun:
        begun.execute("INSERT INTO orders VALUES (3)")
        producer.send(paid(3), session=begun.session)
        with suppress(DBAPIError):
            begun.execute("SELECT nonsense")
    producer.flush()
    kept = [] if world.url.get_backend_name() == "postgresql" else [3]
    assert (world.orders(), sent(broker), world.rows()) == (kept, ["paid-1", *(f"paid-{n}" for n in kept)], [])
    world.close()


# Several databases.


@pytest.fixture
def two(tmp_path):
    worlds = [SessionWorld(f"sqlite:///{tmp_path / name}") for name in ("main.db", "other.db")]
    yield worlds
    for world in worlds:
        world.close()


def reads_from_a_replica(main, other):
    """As in SQLAlchemy's documentation."""

    class Routing(Session):
        def get_bind(self, mapper=None, clause=None, **others):
            return main.engine if self._flushing else other.engine

    session = Routing()
    session.execute(text("SELECT number FROM orders"))
    return session


def binds(main, other):
    return Session(binds={Order: main.engine})


def shards(main, other):
    return ShardedSession(
        shards={"main": main.engine, "other": other.engine},
        shard_chooser=lambda mapper, instance, clause=None: {1: "main"}[instance.number],
        identity_chooser=lambda *_, **__: ["main"],
        execute_chooser=lambda context: ["main"],
    )


@pytest.mark.parametrize("way", [reads_from_a_replica, binds, shards])
def test_row_is_written_where_the_session_writes(two, broker, producer, way):
    main, other = two
    broker.readonly()
    with way(main, other) as session:
        session.add(Order(number=1))
        producer.send(paid(1), session=session)
        session.commit()
    assert (main.orders(), main.rows(), other.rows()) == ([1], ["paid-1"], [])
    broker.writable()
    producer.flush()
    assert (sent(broker), main.rows()) == (["paid-1"], [])


def test_session_that_writes_elsewhere_is_refused_at_once(two, broker, producer):
    main, other = two
    with (
        pytest.raises(InvalidRequest, match="not commit together"),
        Session(main.engine, binds={Order: other.engine}) as session,
    ):
        with session.no_autoflush:
            session.add(Order(number=1))
            producer.send(paid(1), session=session)
        session.commit()
    with (
        pytest.raises(InvalidRequest, match="not commit together"),
        Session(main.engine, binds={Order: other.engine}) as session,
    ):
        session.add(Order(number=1))
        session.flush()
        producer.send(paid(1), session=session.connection())
    with Session(binds={Order: main.engine}) as session:
        with pytest.raises(InvalidRequest, match="no database for the outbox"):
            producer.send(paid(1), session=session)
        producer.send(paid(2), session=session.connection(bind_arguments={"mapper": Order}))
        session.commit()
    producer.flush()
    assert (main.orders(), other.orders(), sent(broker)) == ([], [], ["paid-2"])
