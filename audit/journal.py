"""Core. What producers were told, held against both copies: two equal logs can both lack a message."""

from __future__ import annotations

from collections.abc import Mapping

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from qmq.audit.comparison import finding
from qmq.audit.kinds import Kind


def due_messages(journal: DataFrame, firsts: Mapping[str, Mapping[str, int]], start: int) -> DataFrame:
    """Return what of the journal is due on which copy: not what the copy's retention may have removed.

    in: journal subject string, sequence long, id string; out: the same, copy string. `firsts`: by copy and subject its
    first sequence, in a log that begins at `start`.
    """
    spark = journal.sparkSession
    copies = spark.createDataFrame([(copy,) for copy in firsts], "copy string")
    due = journal.crossJoin(F.broadcast(copies))
    if start > 0:
        rows = [(copy, subject, first) for copy, subjects in firsts.items() for subject, first in subjects.items()]
        kept = spark.createDataFrame(rows, "copy string, subject string, kept long")
        due = due.join(kept, ["copy", "subject"]).where("sequence >= kept").drop("kept")
    return due


def lost(due: DataFrame, messages: DataFrame) -> DataFrame:
    """Return what was acknowledged to a producer and is not in a copy at its sequence.

    in: due copy string, subject string, sequence long, id string; messages the same; out: findings.
    """
    absent = due.join(messages, ["copy", "subject", "sequence", "id"], "left_anti")
    columns = {name: F.col(name) for name in ("subject", "sequence", "id")}
    return absent.select(*finding(Kind.LOST, "acknowledged, and not in this copy", **columns))
