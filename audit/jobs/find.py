"""Shell. Find messages in the logs of all broker groups, by id, property, tag and time.

    tools.sh FindMessage --property=orderNo=42 --since=2026-01-31T12:00:00Z --metaserver=http://127.0.0.1:8080

`Browse` reads one subject from the running masters, piece by piece. This job reads all subjects in the logs, with dead
letters, on all cores of Spark.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence

from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from qmq.audit.data_source import in_ms
from qmq.audit.jobs.query import (
    Place,
    Rows,
    add_selection_options,
    add_source_options,
    ask,
    needles,
    selection_options,
    table,
)
from qmq.audit.trail import STORED_COLUMNS
from qmq.message import CONTENT_TYPE

ROWS_MAX = 1_000


def find(
    spark: SparkSession,
    places: Sequence[Place],
    *,
    identity: str = "",
    properties: Mapping[str, str] | None = None,
    tags: Sequence[str] = (),
    limit: int = ROWS_MAX,
    **options: str,
) -> Rows:
    """Return the first matching messages by time; `options` are the data source's."""
    pairs = dict(properties or {})
    texts = [text for pair in pairs.items() for text in pair] + [*tags, identity]
    messages = table(spark, places, "messages", columns=STORED_COLUMNS, contains=needles(texts), **options)
    if identity:
        messages = messages.where(F.col("id") == identity)
    for name, value in pairs.items():
        messages = messages.where(F.col("properties")[name] == value)
    for tag in tags:
        messages = messages.where(F.array_contains("tags", tag))
    first = in_ms(messages).orderBy("timestamp_ms", "broker_group", "offset", "sequence").limit(limit)
    return [row.asDict() for row in first.collect()]


def show(rows: Rows) -> Iterable[str]:
    """Yield a line per message."""
    for row in rows:
        place = f"{row['broker_group'] or 'log'}@{row['offset']}"
        about = " ".join([*row["tags"], row["properties"].get(CONTENT_TYPE, "")])
        yield f"{row['timestamp_ms']}  {place}  {row['subject']} {row['sequence']}  {row['id']}  {about}".rstrip()
    yield f"{len(rows)} messages"


def _pair(text: str) -> tuple[str, str]:
    name, is_there, value = text.partition("=")
    if not is_there or not name:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="tools.sh FindMessage",
        description="Find messages in the logs of all broker groups, by id, property, tag and time.",
    )
    add_source_options(parser)
    parser.add_argument("--id", default="", help="id of the message")
    parser.add_argument(
        "--property", action="append", type=_pair, default=[], help="NAME=VALUE; with several, it has all of them"
    )
    parser.add_argument(
        "--tag", action="append", default=[], help="tag of the message; with several, it has all of them"
    )
    add_selection_options(parser)
    parser.add_argument("--limit", type=int, default=ROWS_MAX, help="number of messages to show, the oldest ones")
    options = parser.parse_args(arguments)
    bounds = selection_options(options)

    def look(spark: SparkSession, places: Sequence[Place]) -> Rows:
        wanted = dict(options.property)
        return find(
            spark, places, identity=options.id, properties=wanted, tags=options.tag, limit=options.limit, **bounds
        )

    return ask("qmq find", options, look, show)


if __name__ == "__main__":
    sys.exit(main())
