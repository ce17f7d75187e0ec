"""Core. Statements: within the databases' bounds, and with the right ids even without RETURNING."""

from __future__ import annotations

import sqlite3

import pytest

from qmq.errors import InvalidRequest
from qmq.message import Message
from qmq.outbox.row import encode_row
from qmq.outbox.schema import create_statements
from qmq.outbox.table import BYTES_MAX, ROWS_MAX, Flavor, Inserted, Rows, parts_of, table_name


def of_sqlite(statements):
    """An outbox in memory that records its statements."""
    connection = sqlite3.connect(":memory:")
    for statement in create_statements("sqlite"):
        connection.execute(statement)

    def execute(statement, values):
        statements.append(statement)
        return connection.execute(statement, tuple(values)).fetchall()

    return Rows(execute, "qmq_msg_queue", Flavor.SQLITE, "qmark"), connection


def test_statements_have_bounded_size():
    statements = []
    rows, connection = of_sqlite(statements)
    contents = [f"content {number:04}" for number in range(2 * ROWS_MAX + 1)]
    inserted = rows.insert(contents)
    assert len(statements) == 3
    ids = [id for part in inserted for id in part.ids]
    assert sorted(content for _, content in rows.read(ids)) == sorted(contents)
    statements.clear()
    rows.delete([*inserted[1:], *(Inserted([id], ["content 0007"]) for id in inserted[0].ids if id != 1)])
    assert len(statements) == 3
    assert sorted(content for _, content in rows.read(ids)) == sorted({*contents[:ROWS_MAX]} - {"content 0007"})
    connection.close()


def test_row_with_a_reused_id_is_not_deleted():
    """As in a database that lost its last commits by a restore or a failover."""
    rows, connection = of_sqlite([])
    sent, kept = (encode_row(Message("a", {"x": ',"subject":'}, id=id), 1) for id in ('a,"subject":1', 'a,"subject":2'))
    inserted = rows.insert([sent])
    connection.execute("UPDATE qmq_msg_queue SET content = ?", (kept,))
    rows.delete(inserted)
    assert rows.read([1]) == [(1, kept)]
    connection.execute("UPDATE qmq_msg_queue SET content = ?", (sent,))
    rows.delete(inserted)
    assert rows.read([1]) == []
    connection.close()


def test_ids_of_many_lengths_are_deleted_together():
    statements = []
    rows, connection = of_sqlite(statements)
    inserted = rows.insert([encode_row(Message("a", id="ä" * size), 1) for size in range(1, 50)])
    rows.delete(inserted)
    assert len(statements) == 2 and rows.read(inserted[0].ids) == []
    connection.close()


def test_an_id_is_never_used_again():
    rows, connection = of_sqlite([])
    first = rows.insert(["a"])
    rows.delete(first)
    assert rows.insert(["b"])[0].ids != first[0].ids
    connection.close()


def test_large_contents_share_no_statement():
    large = "x" * (BYTES_MAX - 1)
    assert [len(part) for part in parts_of(["a", large, "b", large, large + "xxx", "c"])] == [2, 2, 1, 1]
    assert list(parts_of([])) == []


def test_ids_are_counted_from_the_first():
    """MySQL, where several servers count in steps."""
    asked = []

    def execute(statement, values):
        asked.append((statement.partition(" ")[0], len(values)))
        return [(40, 3)] if statement.startswith("SELECT") else []

    assert Rows(execute, "t", Flavor.MYSQL, "pyformat").insert(["a", "b", "c"])[0].ids == [40, 43, 46]
    assert asked == [("INSERT", 3), ("SELECT", 0)]


@pytest.mark.parametrize(
    "paramstyle, marks", [("qmark", ["?", "?"]), ("format", ["%s", "%s"]), ("numeric_dollar", ["$1", "$2"])]
)
def test_values_are_marked_as_the_driver_wants_it(paramstyle, marks):
    asked = []
    Rows(lambda statement, values: asked.append(statement) or [], "t", Flavor.POSTGRESQL, paramstyle).insert(["a", "b"])
    assert all(f"({mark}, 0, 0, clock_timestamp(), clock_timestamp())" in asked[0] for mark in marks)


def test_another_driver_is_refused():
    with pytest.raises(InvalidRequest):
        Rows(lambda *_: [], "t", Flavor.SQLITE, "named")


@pytest.mark.parametrize("name", ["", "a b", "a;b", "a.b.c", "a.", "1a", "ä", '"a"', "x" * 70])
def test_invalid_table_name_is_refused(name):
    with pytest.raises(InvalidRequest):
        table_name(name)
