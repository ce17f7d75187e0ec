"""Shell. Databases behind PgBouncer, and those that require TLS: of the metaserver, and of outboxes."""

from __future__ import annotations

import psycopg
import pytest
from sqlalchemy import make_url
from sqlalchemy.exc import DBAPIError

from qmq.metaserver.storage.changes import AddSubject
from qmq.metaserver.storage.engine import connect, open_database
from qmq.metaserver.storage.repository import Repository
from qmq.metaserver.storage.sql import begin
from qmq.outbox.schema import create_statements
from qmq.sql_drivers import Tls
from qmq.watchdog.database import Questions, open_source
from tests.support.certificates import make_certificates
from tests.support.databases import source_of

TIMEOUTS = "SELECT current_setting('lock_timeout'), current_setting('idle_in_transaction_session_timeout')"


@pytest.fixture
def pooled_url(postgresql, pgbouncer):
    """An empty database, by the pool's port."""
    url = postgresql.create_database()
    yield make_url(url).set(port=pgbouncer.port).render_as_string(hide_password=False)
    postgresql.drop_database(url)


@pytest.fixture
def tls_url(tls_server):
    url = tls_server.create_database()
    yield url
    tls_server.drop_database(url)


def add_outbox(url):
    engine = connect(url)
    with engine.begin() as connection:
        for statement in create_statements(engine.dialect.name.replace("mysql", "mariadb")):
            connection.exec_driver_sql(statement)
    engine.dispose()


def stats_of(source):
    questions = Questions(open_source(source), source)
    try:
        return questions.stats()
    finally:
        questions.close()


def test_pool_rejects_startup_options(pooled_url):
    parsed = make_url(pooled_url)
    with pytest.raises(psycopg.OperationalError, match="unsupported startup parameter"):
        psycopg.connect(host=parsed.host, port=parsed.port, user=parsed.username, options="-c lock_timeout=1000")


def test_metaserver_works_behind_a_pool(pooled_url):
    """Each transaction may be another server process's: no prepared statement, setting or lock outlives one."""
    engines = [open_database(pooled_url) for _ in range(2)]
    repositories = [Repository(engine) for engine in engines]
    for number in range(20):
        repositories[number % 2].change([AddSubject(f"s{number}", "")])
        assert repositories[1 - number % 2].versions()
    assert len(repositories[0].load().subjects) == 20
    for reading in (False, True):
        with engines[0].connect() as connection, begin(connection, reading=reading):
            assert connection.exec_driver_sql(TIMEOUTS).one() == ("10s", "2s")
    with psycopg.connect(make_url(pooled_url).set(drivername="postgresql").render_as_string()) as other:
        assert other.execute(TIMEOUTS).fetchone() == ("0", "0"), "no other client of the pool gets ours"
    for engine in engines:
        engine.dispose()


def test_outbox_is_read_behind_a_pool(pooled_url):
    add_outbox(pooled_url)
    source = source_of(pooled_url)
    for _ in range(10):
        assert stats_of(source).pending == 0
    engine = open_source(source)
    with engine.begin() as connection:
        assert connection.exec_driver_sql(TIMEOUTS).one() == ("3s", "1min")
    engine.dispose()


def test_metaserver_connects_with_its_certificate(tls_server, tls_url):
    engine = open_database(tls_url)
    assert Repository(engine).versions()
    engine.dispose()
    plain = make_url(tls_url).difference_update_query(["sslcert", "sslkey"]).render_as_string()
    with pytest.raises(DBAPIError):
        open_database(plain)


def test_outbox_is_read_with_tls(tls_server, tls_url):
    add_outbox(tls_url)
    assert stats_of(source_of(tls_url)).pending == 0


@pytest.mark.parametrize("mode, accepted", [("require", True), ("verify-ca", False), ("verify-full", False)])
def test_server_of_another_authority_is_refused(tls_server, tmp_path, mode, accepted):
    other, own = make_certificates(tmp_path, client="x"), tls_server.tls
    ca = str(other.ca) if mode.startswith("verify") else ""
    assert answers(tls_server, Tls(mode, ca, own.cert, own.key), "127.0.0.1") == accepted


@pytest.mark.parametrize("mode, accepted", [("verify-ca", True), ("verify-full", False)])
def test_other_name_is_refused_by_verify_full(tls_server, mode, accepted):
    """The certificate is for 127.0.0.1."""
    assert answers(tls_server, tls_server.tls._replace(mode=mode), "localhost") == accepted


def answers(server, tls, host):
    url = make_url(server.url("postgres" if "postgres" in server.drivername else "mysql"))
    engine = connect(url.set(host=host, query=tls.words()).render_as_string())
    try:
        with engine.connect() as connection:
            return bool(connection.exec_driver_sql("SELECT 1").scalar())
    except DBAPIError as error:
        assert "certificate" in str(error)
        return False
    finally:
        engine.dispose()
