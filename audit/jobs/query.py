"""Shell. Ask the message logs in SQL: views `messages` and `progress` over one copy per broker group.

    qmq query --source /data/b1 \\
        --sql "SELECT subject, count(*) AS messages FROM messages GROUP BY 1"

Columns: docs/audit.md. Two copies of one group count everything twice. A damaged range that is read ends the query with
an error, as an answer over a part of the log is none.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from pyspark.sql import SparkSession

from qmq.audit.jobs.sources import Place, Rows, add_source_options, ask, lines, table


def run_query(spark: SparkSession, places: Sequence[Place], sql: str) -> Rows:
    """Return the answer's rows. Raises Spark's own error for a query that is wrong."""
    for view in ("messages", "progress"):
        table(spark, places, view).createOrReplaceTempView(view)
    return [row.asDict(recursive=True) for row in spark.sql(sql).collect()]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="qmq query", description=__doc__.splitlines()[0])
    add_source_options(parser)
    parser.add_argument("--sql", required=True, help="query over the views `messages` and `progress`")
    options = parser.parse_args(arguments)
    return ask("qmq query", options, lambda spark, places: run_query(spark, places, options.sql), lines)


if __name__ == "__main__":
    sys.exit(main())
