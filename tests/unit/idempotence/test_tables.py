"""Shell. The tables in docs/exactly-once.md equal those that the filters create and use."""

from __future__ import annotations

import ast
import asyncio
import re
from pathlib import Path

from sqlalchemy import Engine, create_engine, inspect, text

from qmq.idempotence import Idempotence
from qmq.idempotence.sqlalchemy import SqlKeys
from qmq.idempotence.transaction import BlockingSqlTransaction
from tests.unit.idempotence.stores import Handed

PAGE = (Path(__file__).parents[3] / "docs" / "exactly-once.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def shape(engine: Engine) -> dict[str, object]:
    """Columns and indexes of both tables."""
    found = inspect(engine)
    return {
        table: (
            [
                (entry["name"], str(entry["type"]).partition(" COLLATE")[0], entry["nullable"])
                for entry in found.get_columns(table)
            ],
            found.get_pk_constraint(table)["constrained_columns"],
            sorted((str(entry["name"]), str(entry["column_names"])) for entry in found.get_indexes(table)),
        )
        for table in ("qmq_handled", "qmq_claims")
    }


def make(engine: Engine) -> None:
    BlockingSqlTransaction(engine).create_table()
    asyncio.run(SqlKeys(engine).create_table())


def drop(engine: Engine) -> None:
    with engine.begin() as connection:
        for table in shape(engine):
            connection.execute(text(f"DROP TABLE {table}"))


def test_documented_tables_match_created_ones(database_url):
    engine = create_engine(database_url)
    make(engine)
    made = shape(engine)
    drop(engine)
    with engine.begin() as connection:
        for statement in filter(str.strip, re.sub(r"--.*", "", blocks("sql")[0]).split(";")):
            connection.execute(text(statement))
    assert shape(engine) == made
    make(engine)  # they exist: nothing happens

    handled = []
    for _ in range(2):
        BlockingSqlTransaction(engine)(Handed("a"), lambda message: handled.append(message.id))

        async def handle(message):
            handled.append(message.id)

        asyncio.run(Idempotence(SqlKeys(engine))(Handed("b"), handle))
    assert handled == ["a", "b"]
    engine.dispose()


def test_the_pages_examples_are_python():
    for block in blocks("python"):
        compile(block, "docs/exactly-once.md", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
