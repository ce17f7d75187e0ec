"""Core. What a delay server planned and did, held against what it promises: never early, at most once, truly cancelled.

Facts of kind `delayed`, a row per message that a frame decides about, of one of these (`text`):

    dispatch    planned for a broker group: first: its number, last: when it was due, value: the master's clock then,
                chain: producer id, total: batch number
    gone        cancelled, or written again elsewhere under another number: first: its number
    stored      a batch was stored by its broker group: chain, total
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from typing import Any

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from qmq.audit.kinds import Kind
from qmq.audit.schema import FINDINGS
from qmq.codec import Buffer
from qmq.log.delays import Outcome, decode_dispatch, decode_places, decode_settled
from qmq.log.frame import Frame, FrameKind


def facts_of(frame: Frame, body: Buffer) -> Iterator[dict[str, Any]]:
    """Return what a frame of a delay server's log decides. Raises ValueError if its body makes no sense."""
    about: dict[str, Any] = {"kind": "delayed", "offset": frame.offset, "end": frame.end, "subject": frame.subject}
    if frame.kind == FrameKind.DISPATCH:
        numbers = {"value": frame.timestamp_ms, "chain": f"{frame.producer:016x}", "total": frame.batch}
        for number, due_ms in decode_dispatch(body, frame.count)[1]:
            yield about | numbers | {"text": "dispatch", "first": number, "last": due_ms}
    elif frame.kind == FrameKind.SETTLED:
        for producer, batch, outcome in decode_settled(body, frame.count):
            if outcome == Outcome.STORED:
                yield about | {"text": "stored", "chain": f"{producer:016x}", "total": batch}
    else:
        for number, _ in decode_places(body, frame.count):
            if number:  # else it stands in place of nothing
                yield about | {"text": "gone", "first": number}


def broken_promises(facts: DataFrame) -> DataFrame:
    """Return messages that went early, twice, or after they were cancelled. in: facts; out: findings."""
    delayed = facts.where("kind = 'delayed'")
    dispatches = delayed.where("text = 'dispatch'")
    return reduce(DataFrame.unionByName, (early(dispatches), twice(delayed, dispatches), recalled(delayed, dispatches)))


def early(dispatches: DataFrame) -> DataFrame:
    """Return messages that were planned before they were due, by the clock of their master."""
    text = F.format_string("planned %d ms before it was due", F.col("last") - F.col("value"))
    return _findings(dispatches.where("value < last"), Kind.EARLY, text)


def twice(delayed: DataFrame, dispatches: DataFrame) -> DataFrame:
    """Return messages that were stored in more than one batch."""
    stored = delayed.where("text = 'stored'").select("copy", "chain", "total").distinct()
    sent = dispatches.join(stored, ["copy", "chain", "total"])
    again = sent.groupBy("copy", "subject", "first").agg(
        F.count("*").alias("times"), F.max("offset").alias("offset"), F.max("end").alias("end")
    )
    text = F.format_string("stored in %d batches", "times")
    return _findings(again.where("times > 1"), Kind.TWICE, text)


def recalled(delayed: DataFrame, dispatches: DataFrame) -> DataFrame:
    """Return messages that were planned although they had been cancelled or written again."""
    gone = delayed.where("text = 'gone'").groupBy("copy", "first").agg(F.min("offset").alias("gone"))
    planned = dispatches.join(gone, ["copy", "first"]).where("offset > gone")
    text = F.format_string("planned after it was cancelled or written again at %d", "gone")
    return _findings(planned, Kind.RECALLED, text)


def _findings(rows: DataFrame, what: Kind, text: Column) -> DataFrame:
    """`sequence` is the message's number: the offset at which it lies."""
    given = {
        "what": F.lit(what.value), "copy": F.col("copy"), "offset": F.col("offset"), "end": F.col("end"),
        "subject": F.col("subject"), "sequence": F.col("first"), "text": text,
    }  # fmt: skip
    return rows.select(
        *(given.get(field.name, F.lit(None)).cast(field.dataType).alias(field.name) for field in FINDINGS)
    )
