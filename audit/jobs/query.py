r"""Shell. Query the message logs in SQL: views `messages` and `progress` over one copy per broker group.

    qmq query --source /data/b1 \
        --sql "SELECT subject, count(*) AS messages FROM messages GROUP BY 1"

Columns: docs/audit.md. Two copies of one group count everything twice. A damaged range ends the query with an error, as
an answer from part of the log would be wrong. The jobs `find` and `trail` share the options, the tables and the
printing.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from base64 import b64encode
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from functools import reduce
from typing import Any

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from qmq.access import add_token_options, find_token
from qmq.audit.copies import CannotRead, open_copy, place_options
from qmq.audit.data_source import read_copy, start_spark
from qmq.audit.places import find_places
from qmq.audit.tables import SCHEMAS
from qmq.errors import AccessError
from qmq.message_view import visible

Rows = list[dict[str, Any]]
Place = dict[str, str]


def add_source_options(parser: argparse.ArgumentParser, *, spark: bool = True) -> None:
    """Add the options of `ask`; without `spark`, those of a job in its own process."""
    parser.add_argument("--metaserver", default="", help="URL of a metaserver: read the logs of all broker groups")
    parser.add_argument(
        "--source",
        action="append",
        default=[],
        help="instead of --metaserver: a data directory, or HOST:CONTROL_PORT; once per group",
    )
    add_token_options(parser)
    if spark:
        parser.add_argument("--spark-master", help="spark://host:port, yarn, …; by default spark-submit's, or local[*]")
    parser.add_argument("--json", action="store_true", help="print a JSON array of rows instead of text")


def add_selection_options(parser: argparse.ArgumentParser) -> None:
    """Add options that select frames: other parts of the logs are not read. A WHERE does not spare the reading."""
    for name, text in (
        ("subject", "read only this subject"),
        ("since", "read messages stored from then on: a time, or ms since 1970"),
        ("until", "read messages stored before then: the same"),
    ):
        parser.add_argument(f"--{name}", default="", help=text)


def selection_options(options: argparse.Namespace) -> dict[str, str]:
    """Return the given selection options as options of the data source."""
    return {name: value for name in ("subject", "since", "until") if (value := getattr(options, name))}


def places_of(sources: Sequence[str], metaserver: str, token: str) -> list[Place]:
    """Return the logs to read, as options of the data source; raise CannotRead."""
    if bool(sources) == bool(metaserver):
        raise CannotRead("give either --metaserver, or --source, once per broker group")
    if metaserver:
        find_places(metaserver, token)
        return [{"metaserver": metaserver, "token": token}]
    places = [place_options(source, token) for source in sources]
    for place in places:
        with closing(open_copy(place)) as copy:
            copy.describe()
    return places


def table(spark: SparkSession, places: Sequence[Place], rows: str, **options: object) -> DataFrame:
    """Read a table of all the logs, without messages' bytes; a damaged range fails the query."""
    columns = ",".join(name for name in SCHEMAS[rows].names if name not in ("message", "problem"))
    given = {"rows": rows, "damage": "fail", "columns": columns} | options
    return reduce(DataFrame.unionByName, [read_copy(spark, place, **given) for place in places])


def needles(texts: Iterable[str]) -> str:
    """Return texts for the option `contains`. It only saves work, so texts that no line can hold are left out."""
    return "\n".join(text for text in texts if text and "\n" not in text)


def ask(
    name: str,
    options: argparse.Namespace,
    look: Callable[[SparkSession, list[Place]], Rows],
    show: Callable[[Rows], Iterable[str]],
) -> int:
    """Start Spark, query, and print the rows; return the exit status: 0, or 2 if a log could not be read."""
    spark = None
    try:
        token = find_token(options.token, token_file=options.token_file)
        places = places_of(options.source, options.metaserver, token)
        spark = start_spark(options.spark_master, name)
        rows = look(spark, places)
    except (AccessError, CannotRead, PySparkException) as error:
        print(error, file=sys.stderr)
        return 2
    finally:
        if spark is not None:
            spark.stop()
    if options.json:
        print(json.dumps(rows, default=_text))
    else:
        for line in show(rows):
            print(visible(line))
    return 0


def lines(rows: Rows) -> Iterable[str]:
    """Yield each row as its values with tabs between them."""
    return ("\t".join("" if value is None else _text(value) for value in row.values()) for row in rows)


def _text(value: object) -> str:
    """Return a value as text: binary columns, such as `body`, in Base64."""
    return b64encode(value).decode() if isinstance(value, bytes | bytearray) else str(value)


def columns_in(sql: str, rows: str) -> str:
    """Return the columns of a view that a query can mean, with commas; at least one.

    Spark does not pass them to the source, which decodes every column that it yields. Whole rows, named by `*`, and
    joins over unnamed columns mean all of them.
    """
    words = {word.lower() for word in re.findall(r"\w+", sql)}
    names = [name for name in SCHEMAS[rows].names if name not in ("message", "problem")]
    if "*" not in re.sub(r"(?i)count\s*\(\s*\*\s*\)", "", sql) and not words & {"natural", "describe", "desc", "table"}:
        names = [name for name in names if name in words] or ["subject"]
    return ",".join(names)


def run_query(spark: SparkSession, places: Sequence[Place], sql: str, **options: str) -> Rows:
    """Return the rows of the answer. Spark raises its own error for an invalid query. `options`: of the data source."""
    for view in ("messages", "progress"):
        columns = columns_in(sql, view)
        table(spark, places, view, columns=columns, **options).createOrReplaceTempView(view)
    return [row.asDict(recursive=True) for row in spark.sql(sql).collect()]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="qmq query",
        description="Query the message logs in SQL: views `messages` and `progress` over one copy per broker group.",
    )
    add_source_options(parser)
    parser.add_argument("--sql", required=True, help="query over the views `messages` and `progress`")
    add_selection_options(parser)
    options = parser.parse_args(arguments)
    selection = selection_options(options)
    return ask("qmq query", options, lambda spark, places: run_query(spark, places, options.sql, **selection), lines)


if __name__ == "__main__":
    sys.exit(main())
