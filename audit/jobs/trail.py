"""Shell. Trail of a message: its places in the logs, its deliveries, and their outcomes.

    tools.sh Trail --id=8f2c… --metaserver=http://127.0.0.1:8080 --token-file=token

It reads the logs of the broker groups, not the brokers' state. So it finds consumed messages as long as their segments
are kept. An id may occur in several subjects: --subject selects one.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from pyspark.storagelevel import StorageLevel

from qmq.audit.data_source import in_ms
from qmq.audit.jobs.query import Place, Rows, add_source_options, ask, needles, table
from qmq.audit.trail import STORED_COLUMNS, aftermath, deliveries, steps
from qmq.subjects import parse_derived


def find_trail(spark: SparkSession, places: Sequence[Place], identity: str, subject: str = "") -> Rows:
    """Return the steps of a message (`qmq.audit.trail.Step`); empty if no log has it."""
    messages = table(spark, places, "messages", columns=STORED_COLUMNS, contains=needles([identity]))
    stored = [row.asDict() for row in in_ms(messages.where(F.col("id") == identity)).collect()]
    stored = [message for message in stored if subject in ("", _real(message["subject"]))]
    if not stored:
        return []
    subjects, first = {message["subject"] for message in stored}, min(message["offset"] for message in stored)
    progress = table(spark, places, "progress", subject="\n".join([*sorted(subjects), ""]))
    progress = in_ms(progress).where(F.col("offset") > first).persist(StorageLevel.MEMORY_AND_DISK)
    try:
        pulls = [row.asDict() for row in deliveries(progress, stored).collect()]
        later = [row.asDict() for row in aftermath(progress, stored, pulls).collect()]
    finally:
        progress.unpersist()
    return [step._asdict() for step in steps(stored, [*pulls, *later])]


def _real(subject: str) -> str:
    derived = parse_derived(subject)
    return derived.real if derived else subject


def show(rows: Rows) -> Iterable[str]:
    """Yield a line per step."""
    if not rows:
        yield "no log has a message with this id"
    for row in rows:
        at = datetime.fromtimestamp(row["at_ms"] / 1000, UTC).isoformat(" ", "milliseconds")[:23]
        place = f"{row['broker_group'] or 'log'}@{row['offset']}"
        consumer = " ".join(name for name in (row["consumer_group"], row["consumer"]) if name)
        parts = [row["what"], consumer, row["text"], f"now {row['state']}" if row["state"] else ""]
        yield f"{at}  {place:<16} {row['subject']} {row['sequence']}  " + "  ".join(text for text in parts if text)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="tools.sh Trail",
        description="Trail of a message: its places in the logs, its deliveries, and their outcomes.",
    )
    add_source_options(parser)
    parser.add_argument("--id", required=True, help="id of the message")
    parser.add_argument("--subject", default="", help="read only this subject; an id may occur in several")
    options = parser.parse_args(arguments)
    return ask("qmq trail", options, lambda spark, places: find_trail(spark, places, options.id, options.subject), show)


if __name__ == "__main__":
    sys.exit(main())
