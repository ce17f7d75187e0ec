"""Shell. The table is made by its SQL files and by Alembic, from nothing and from QMQ's, on each kind of database."""

from __future__ import annotations

import io

import pytest
from alembic import op
from alembic.migration import MigrationContext
from alembic.operations import Operations
from sqlalchemy import create_engine, inspect, make_url, text

from qmq.errors import InvalidRequest
from qmq.outbox.alembic import create_outbox, drop_outbox, upgrade_outbox
from qmq.outbox.schema import create_statements
from tests.unit.outbox.tables import QMQ_TABLE

QMQ_COLUMNS = ["id", "content", "status", "error", "create_time", "update_time"]
COLUMNS = [*QMQ_COLUMNS, "reason", "claim"]


@pytest.fixture
def engine(database_url):
    engine = create_engine(database_url)
    yield engine
    engine.dispose()


def look(engine, table="qmq_msg_queue", schema=None):
    """Columns and indexes."""
    found = inspect(engine)
    indexes = {index["name"]: index["column_names"] for index in found.get_indexes(table, schema)}
    return [column["name"] for column in found.get_columns(table, schema)], indexes


def migrate(engine, operation, **arguments):
    """As Alembic calls a migration: with its module `op`."""
    with engine.begin() as connection, Operations.context(MigrationContext.configure(connection)):
        operation(op, **arguments)


INDEXES = {
    "qmq_msg_queue_due": ["status", "update_time", "id"],
    "qmq_msg_queue_claim": ["claim"],
}


def test_alembic_makes_the_table_and_drops_it(engine):
    migrate(engine, create_outbox)
    assert look(engine) == (COLUMNS, INDEXES)
    migrate(engine, drop_outbox)
    assert not inspect(engine).has_table("qmq_msg_queue")


def test_qmqs_own_table_becomes_one_of_ours_and_keeps_its_rows(engine):
    with engine.begin() as connection:
        connection.execute(text(QMQ_TABLE[engine.dialect.name]))
        now = "(content, create_time) VALUES ('x', CURRENT_TIMESTAMP)"
        connection.execute(text(f"INSERT INTO qmq_msg_queue {now}"))
    assert look(engine) == (QMQ_COLUMNS, {})
    migrate(engine, upgrade_outbox)
    assert look(engine) == (COLUMNS, INDEXES)
    with engine.begin() as connection:
        assert connection.execute(text("SELECT content, claim FROM qmq_msg_queue")).all() == [("x", None)]


def test_another_name_and_schema_are_possible(engine):
    schema = {"sqlite": "main", "postgresql": "public"}.get(engine.dialect.name, engine.url.database)
    migrate(engine, create_outbox, table=f"{schema}.messages")
    columns, indexes = look(engine, "messages", schema)
    assert (columns, set(indexes)) == (COLUMNS, {"messages_due", "messages_claim"})


def test_offline_alembic_writes_the_statements():
    output = io.StringIO()
    context = MigrationContext.configure(
        url=make_url("postgresql+psycopg://"), dialect_name="postgresql", opts={"as_sql": True, "output_buffer": output}
    )
    with Operations.context(context):
        create_outbox(op)
    assert all(statement in output.getvalue() for statement in create_statements("postgresql"))


@pytest.mark.parametrize("dialect, table", [("oracle", "t"), ("sqlite", "a.b.c"), ("sqlite", "x; DROP TABLE y")])
def test_what_cannot_be_made_is_refused(dialect, table):
    with pytest.raises(InvalidRequest):
        create_statements(dialect, table)
