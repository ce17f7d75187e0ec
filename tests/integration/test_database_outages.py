"""Shell. Database servers that end or hang, and connections that break during a change."""

from __future__ import annotations

import asyncio
import threading

import pymysql
import pytest
from sqlalchemy import event, make_url, select
from sqlalchemy.exc import OperationalError, SQLAlchemyError

from qmq.metaserver.cluster.liveness import Liveness
from qmq.metaserver.cluster.registry import Registry
from qmq.metaserver.cluster.sightings import AwakeClock
from qmq.metaserver.model import AuditRow, ReadonlyMark
from qmq.metaserver.observability.metrics import Metrics
from qmq.metaserver.storage import engine as engines
from qmq.metaserver.storage.changes import CommitUnknown, SetMark
from qmq.metaserver.storage.database import Database, DatabaseAway
from qmq.metaserver.storage.engine import open_database
from qmq.metaserver.storage.repository import Repository
from qmq.metaserver.storage.sql import DIRECTORY, Transactions, begin, raise_versions
from qmq.metaserver.storage.tables import meta_version
from tests.support.cable import cable_to
from tests.support.directories import add_group
from tests.support.promises import Tries

MARK = ReadonlyMark("*", "g1")
LONG_S = 60


@pytest.fixture
def url(database_server):
    url = database_server.create_database()
    engine = open_database(url)
    add_group(Repository(engine), "g1")
    engine.dispose()
    yield url
    database_server.drop_database(url)


@pytest.fixture
def engine(url):
    engine = open_database(url)
    yield engine
    engine.dispose()


@pytest.fixture
def cable(database_server):
    with cable_to(database_server.port) as cable:
        yield cable


@pytest.fixture
def wired(url, cable):
    """Engine with connections through the cable."""
    engine = open_database(through(cable, url))
    yield engine
    engine.dispose()


def through(cable, url):
    return make_url(url).set(port=cable.port).render_as_string(hide_password=False)


def make_registry(database):
    clock = AwakeClock()
    liveness = Liveness("m1", timeout_ms=2000)
    return Registry(database, liveness, Metrics(), clock, lambda tokens: None, groups_min=1, groups_new=1)


def mark(repository):
    repository.change([SetMark(MARK)], AuditRow("me", "here", "MarkReadonlyBrokerGroup"))


def at_commit(engine, act):
    event.listen(engine, "commit", lambda _: act(), once=True)


@pytest.mark.parametrize("direction", ["cut_questions", "cut_answers"])
def test_broken_commit_has_an_unknown_outcome(wired, cable, engine, direction):
    repository, witness = Repository(wired), Repository(engine)
    at_commit(wired, lambda: setattr(cable, direction, True))
    with pytest.raises(CommitUnknown, match="as a whole or not at all"):
        mark(repository)
    stored = {MARK} if direction == "cut_answers" else set()
    assert repository.load().marks == witness.load().marks == stored
    assert len(witness.audit_trail()) == len(stored), "the audit row is stored with the change"
    mark(repository)
    assert witness.load().marks == {MARK}


@pytest.mark.parametrize("lost", [False, True], ids=["arrives later", "is lost"])
def test_commit_in_flight_is_stored_exactly_if_found(cable, url, engine, lost):
    """The connection breaks before the server gets the commit, so the missing row proves nothing yet."""

    async def change():
        database = Database(through(cable, url), timeout_ms=60_000)
        await database.open()
        registry = make_registry(database)

        def keep_back():
            cable.hold_questions = True

        def deliver_to_the_waiting(_connection, _cursor, statement, *_):
            if cable.is_holding.is_set() and "UPDATE meta_version" in statement:
                threading.Timer(0.2, cable.deliver, kwargs={"lost": lost}).start()

        at_commit(database._engine, keep_back)
        event.listen(database._engine, "before_cursor_execute", deliver_to_the_waiting)
        try:
            await registry.change([SetMark(MARK)], AuditRow("me", "here", "MarkReadonlyBrokerGroup"))
            return True
        except DatabaseAway as error:
            assert "was not stored" in str(error)
            return False
        finally:
            database.close()

    is_reported_stored = asyncio.run(change())
    cable.deliver(lost=lost)
    witness = Repository(engine)
    witness.settle()
    assert is_reported_stored == (witness.load().marks == {MARK}) == (not lost)
    assert len(witness.audit_trail()) == int(is_reported_stored)


def test_settling_waits_for_a_change_that_records(engine, url):
    other = open_database(url)
    is_stored, may_end = threading.Event(), threading.Event()

    def stand_still():
        is_stored.set()
        may_end.wait(LONG_S)

    at_commit(other, stand_still)
    writing = threading.Thread(target=Repository(other).change, args=([], AuditRow("me", "here", "ResetOffset")))
    writing.start()
    assert is_stored.wait(LONG_S)
    event.listen(engine, "before_cursor_execute", lambda *_: threading.Timer(0.2, may_end.set).start(), once=True)
    repository = Repository(engine)
    repository.settle()
    assert len(repository.audit_trail()) == 1
    writing.join()
    other.dispose()


def test_commit_on_a_killed_server_has_an_unknown_outcome(database_server, engine):
    repository = Repository(engine)
    at_commit(engine, database_server.kill)
    with pytest.raises(CommitUnknown):
        mark(repository)
    database_server.start()
    assert repository.load().marks == set()
    assert repository.audit_trail() == []


def test_commit_undone_by_a_cluster_is_repeated(engine):
    """Galera detects another node's change of the row at the commit, and returns these codes."""
    undone = pymysql.err.OperationalError(1213, "Deadlock found when trying to get lock")

    def undo():
        raise OperationalError("COMMIT", {}, undone)

    at_commit(engine, undo)
    mark(Repository(engine))
    assert len(Repository(engine).audit_trail()) == 1


def test_change_broken_before_its_commit_is_repeated_once(wired, cable, engine):
    tries = []

    def cut_first(_connection, _cursor, statement, *_):
        if "audit_trail" in statement:
            cable.cut_answers = not tries
            tries.append(statement)

    event.listen(wired, "before_cursor_execute", cut_first)
    mark(Repository(wired))
    assert len(tries) == 2
    assert len(Repository(engine).audit_trail()) == 1


def test_absent_database_fails_at_once_and_recovers(database_server, engine):
    repository = Repository(engine)
    repository.load()
    database_server.kill()
    for ask in (repository.load, repository.versions, repository.ping, lambda: mark(repository)):
        for _ in (tries := Tries(engines.CONNECT_S / 4, "an error")):
            with pytest.raises(OperationalError):
                tries.time(ask)
    database_server.start()
    assert list(repository.load().groups) == ["g1"]
    mark(repository)
    assert repository.load().marks == {MARK}


def test_hanging_change_delays_others_for_a_bounded_time(url, engine):
    stopped = open_database(url)
    with stopped.connect() as connection:
        begin(connection)
        raise_versions(connection, DIRECTORY)
        mark(Repository(engine))  # waits for that lock until the server ends the idle transaction
        connection.invalidate()
    assert Repository(engine).load().marks == {MARK}
    stopped.dispose()


def test_database_that_stands_still_is_given_up(database_server, url, monkeypatch):
    monkeypatch.setattr(engines, "ANSWER_S", 4)
    engine = open_database(url)
    transactions = Transactions(engine, limit_s=4)
    ask = select(meta_version.c.version)
    transactions.read(lambda connection: connection.execute(ask).all())
    with database_server.paused():
        for attempt in (transactions.read, transactions.write):
            with pytest.raises(SQLAlchemyError):
                attempt(lambda connection: connection.execute(ask).all())
    assert transactions.read(lambda connection: connection.execute(ask).all())
    engine.dispose()
