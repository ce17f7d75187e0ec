"""Shell. Ask the message logs in SQL: a view `messages` over one or more copies.

    qmq query --source /data/b1 \\
        --sql "SELECT subject, count(*) AS messages FROM messages GROUP BY 1"

Columns: subject, sequence, id, tags array<string>, properties map<string, string>, created timestamp, and where the
message stands (offset, term, boot, timestamp_ms). Give one copy per broker group: two copies count everything twice.
A damaged range ends the query with an error, as an answer over a part of the log is none.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import closing
from functools import reduce
from typing import Any

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from qmq.access import add_token_options, find_token
from qmq.audit.copies import CannotRead, open_copy, place_options
from qmq.audit.spark import read_copy, start_spark
from qmq.errors import AccessError


def open_view(spark: SparkSession, sources: Sequence[str], token: str) -> None:
    """Register the view `messages` over the given directories and brokers; raises CannotRead."""
    places = [place_options(source, token) for source in sources]
    for place in places:
        with closing(open_copy(place)) as copy:
            copy.describe()
    logs = [read_copy(spark, place, rows="messages") for place in places]
    damage = F.concat(F.lit("damaged log at offset "), F.col("offset"), F.lit(": "), F.col("problem"))
    whole = F.col("problem").isNull() | F.raise_error(damage)
    messages = reduce(DataFrame.unionByName, logs).where(whole).drop("problem", "message")
    messages.createOrReplaceTempView("messages")


def run_query(spark: SparkSession, sources: Sequence[str], sql: str, *, token: str = "") -> list[dict[str, Any]]:
    """Return the answer's rows. Raises CannotRead, or Spark's own error for a query that is wrong."""
    open_view(spark, sources, token)
    return [row.asDict(recursive=True) for row in spark.sql(sql).collect()]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="qmq query", description=__doc__.splitlines()[0])
    parser.add_argument("--source", action="append", required=True, help="data directory, or ip:control_port")
    parser.add_argument("--sql", required=True, help="query over the view `messages`")
    add_token_options(parser)
    parser.add_argument("--spark-master", help="spark://host:port, yarn, …; by default spark-submit's, or local[*]")
    parser.add_argument("--json", action="store_true", help="print a JSON array of rows instead of a table")
    options = parser.parse_args(arguments)
    try:
        token = find_token(options.token, token_file=options.token_file)
    except AccessError as error:
        print(error, file=sys.stderr)
        return 2
    spark = start_spark(options.spark_master, "qmq query")
    try:
        rows = run_query(spark, options.source, options.sql, token=token)
    except (CannotRead, PySparkException) as error:
        print(error, file=sys.stderr)
        return 2
    finally:
        spark.stop()
    if options.json:
        print(json.dumps(rows, default=str))
    else:
        for row in rows:
            print("\t".join("" if value is None else str(value) for value in row.values()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
