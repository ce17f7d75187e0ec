"""Core. What must hold between the frames of a log, and between its two copies: DataFrame to DataFrame.

Message bytes are hashed where they are read and never shuffled; the rules join what is left, a few rows per piece,
subject and hour, and a row per pull and ack. `facts` and `findings` are described in `audit.schema`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from functools import reduce

import numpy as np
import pyarrow as pa
from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from qmq.audit import delays
from qmq.audit.borders import NO_FRAME, Borders
from qmq.audit.conservation import STATES
from qmq.audit.kinds import Kind
from qmq.audit.messages import STORED, unpack
from qmq.audit.progress import CONSERVED, FINDING_ROWS, Judge
from qmq.audit.schema import COPIES, FACT, FINDINGS, MASTER


def measure(records: DataFrame) -> DataFrame:
    """Hash every record and gather the facts: the one pass over all bytes.

    in: copy, piece, position, sequence, record, fact (`audit.rows.RECORDS`); out: facts. `digest` depends on every
    byte of the piece and on where it stands.
    """
    is_message = F.col("sequence") >= 0
    measured = records.groupBy("copy", "piece", "fact").agg(
        F.count("record").alias("records"),
        F.count_if(is_message).alias("messages"),
        F.sum(F.octet_length("record")).alias("bytes"),
        F.expr("bit_xor(xxhash64(position, record))").alias("digest"),
    )
    return measured.select(
        "copy", "piece", "records", "messages", "bytes", "digest", F.from_json("fact", FACT).alias("said")
    ).select("copy", "piece", "records", "messages", "bytes", "digest", "said.*")


def _of(facts: DataFrame, kind: str) -> DataFrame:
    return facts.where(F.col("kind") == kind)


def finding(what: Column | Kind, text: Column | str, **columns: Column) -> list[Column]:
    """Return the columns of a finding; those not given come from columns of the same name or are null."""
    given = {"what": F.lit(what.value) if isinstance(what, Kind) else what, "copy": F.col("copy")} | columns
    given["text"] = F.lit(text) if isinstance(text, str) else text
    return [
        (given[field.name] if field.name in given else F.lit(None)).cast(field.dataType).alias(field.name)
        for field in FINDINGS
    ]


def within_copies(facts: DataFrame, damaged: DataFrame, start: int, ends: DataFrame | None = None) -> DataFrame:
    """Return everything else that is wrong with a copy by itself. in: facts, damaged ranges; out: findings.

    `start` is where both logs were begun to be read; from 0 on, nothing before them excuses anything. `ends`, subject
    string, known long: where each subject ended there, if that was verified; those that are not in it did not exist.
    """
    rules = (
        sequences(facts, damaged, start, ends), retention(facts), counts(facts), stored_twice(facts),
        delays.broken_promises(facts),
    )  # fmt: skip
    return reduce(DataFrame.unionByName, rules)


def broken(facts: DataFrame, until_ms: int, begins: Collection[int]) -> DataFrame:
    """Return what the readers could not make sense of, in pieces and between them. in: facts; out: findings.

    Damage that crosses the border of two pieces was seen from both sides; it becomes one finding, up to the next frame.
    `until_ms` and `begins`: of `audit.borders.Borders`.
    """
    seen = problems(facts).unionByName(borders(facts, until_ms, begins))
    merged = seen.groupBy("what", "copy", "offset", "sequence").agg(
        F.max("end").alias("end"),
        *(F.first(name, True).alias(name) for name in ("subject", "id")),
        F.max_by("text", F.col("text") != NO_FRAME).alias("text"),
    )
    return merged.select(*FINDINGS.fieldNames())


def problems(facts: DataFrame) -> DataFrame:
    """Return what the readers found while they walked, within a piece. in: facts; out: findings."""
    columns = {name: F.col(name) for name in ("offset", "end", "subject", "id")}
    return _of(facts, "problem").select(*finding(F.col("what"), F.col("text"), sequence=F.col("first"), **columns))


def borders(facts: DataFrame, until_ms: int, begins: Collection[int]) -> DataFrame:
    """Return pieces that do not continue the piece before (audit.borders). in: facts; out: findings."""

    def judge(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        lines = Borders(until_ms, begins)
        for batch in batches:
            found = [finding for row in batch.to_pylist() for finding in lines.judge(row)]
            yield pa.RecordBatch.from_pylist(found, schema=FINDING_ROWS)

    columns = ("copy", "piece", "offset", "end", "header", "chain", "value", "total", "first", "last", "text")
    pieces = _of(facts, "piece").select(*columns).repartition(1).sortWithinPartitions("copy", "piece")
    return pieces.mapInArrow(judge, FINDINGS)


def stored_twice(facts: DataFrame) -> DataFrame:
    """Return batches and message ids that were stored twice under one producer. in: facts; out: findings.

    The last one of each is named. Of a batch that was stored twice, the ids are not named again. `sequence` is the
    place of the message in its frame: `audit.naming` reads which one that is.
    """

    def spread(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for row in batch.to_pylist():
                for what, packed in ((Kind.BATCH_TWICE, row["header"]), (Kind.ID_TWICE, row["body"])):
                    stored = unpack(packed, STORED)
                    names = pa.array([what.value] * len(stored))
                    columns = [
                        pa.array(column)
                        for column in (
                            stored["key"],
                            stored["frame"] + np.int64(row["offset"]),
                            stored["place"].astype(np.int64),
                        )
                    ]
                    yield pa.RecordBatch.from_arrays([names, *columns], names=["what", "key", "offset", "place"])

    rows = _of(facts, "stored").select("offset", "header", "body")
    spread_rows = rows.mapInArrow(spread, "what string, key long, offset long, place long")
    place = F.struct("offset", "place")
    again = spread_rows.groupBy("what", "key").agg(
        F.count("*").alias("times"), F.min(place).alias("first"), F.max(place).alias("last")
    ).where("times > 1")  # fmt: skip
    batches = again.where(F.col("what") == Kind.BATCH_TWICE.value)
    of_them = F.broadcast(batches.select(F.col("last.offset").alias("batch")).distinct())
    again = again.join(of_them, F.col("last.offset") == F.col("batch"), "left_anti").unionByName(batches)
    text = F.format_string("stored %d times by one producer, first at offset %d", "times", "first.offset")
    columns = {"copy": F.lit(MASTER), "offset": F.col("last.offset"), "sequence": F.col("last.place")}
    return again.select(*finding(F.col("what"), text, **columns))


def sequences(facts: DataFrame, damaged: DataFrame, start: int, ends: DataFrame | None = None) -> DataFrame:
    """Return gaps and repeats of a subject's sequences between runs.

    in: facts; damaged d_copy string, d_offset long, d_end long: ranges whose frames are unknown; out: findings.

    Runs are dense in themselves. A gap in front of which the log is damaged follows from that and is not named.
    """
    order = Window.partitionBy("copy", "subject").orderBy("offset")
    runs = _of(facts, "run").select(
        "copy", "subject", "offset", "end", "first", "last", "judged",
        F.lag("last").over(order).alias("due"), F.lag("end").over(order).alias("known_until"),
    )  # fmt: skip
    if ends is not None:
        runs = runs.join(ends, "subject", "left")
        runs = runs.withColumn("due", F.coalesce("due", "known", F.lit(0)))
    elif start == 0:
        runs = runs.withColumn("due", F.coalesce("due", F.lit(0)))
    jumps = runs.where("not judged and due is not null and first != due")
    between = (
        (F.col("d_copy") == F.col("copy"))
        & (F.col("d_offset") < F.col("offset"))
        & (F.col("d_end") > F.coalesce("known_until", F.lit(0)))
        & (F.col("first") > F.col("due"))
    )
    text = F.format_string(
        "sequence %d where %d is due (%s)", "first", "due",
        F.when(F.col("first") > F.col("due"), "gap: messages are missing").otherwise("repeated or reordered"),
    )  # fmt: skip
    columns = {name: F.col(name) for name in ("offset", "end", "subject")}
    return jumps.join(F.broadcast(damaged), between, "left_anti").select(
        *finding(Kind.SEQUENCE, text, sequence=F.col("first"), **columns)
    )


def retention(facts: DataFrame) -> DataFrame:
    """Return retention frames that give back what was given up, or give up themselves. in: facts; out: findings."""
    before = F.max("first").over(
        Window.partitionBy("copy").orderBy("offset").rowsBetween(Window.unboundedPreceding, -1)
    )
    said = _of(facts, "retention").withColumn("before", F.coalesce(before, F.lit(0)))
    text = F.format_string("frames are kept from %d on, and were from %d on before it", "first", "before")
    columns = {"offset": F.col("offset"), "end": F.col("end")}
    return said.where("first < before or first > offset").select(*finding(Kind.RETENTION, text, **columns))


def digests(facts: DataFrame) -> DataFrame:
    """Return what was hashed of each piece. in: facts; out: copy string, piece long, bytes long, digest long."""
    return facts.where("kind is null and records > 0").select("copy", "piece", "bytes", "digest")


def ends(facts: DataFrame) -> DataFrame:
    """Return where each subject ends. in: facts; out: subject string, known long."""
    return _of(facts, "run").groupBy("subject").agg(F.max("last").alias("known"))


def counts(facts: DataFrame) -> DataFrame:
    """Return pieces of which Spark saw fewer or more messages than the frames promise. in: facts; out: findings.

    A damaged body is not seen and its header counts, so pieces with damage are left out: that has its own finding.
    """
    hurt = _of(facts, "problem").select("copy", "piece").distinct()
    promised = F.sum(F.when(F.col("kind") == "hour", F.col("total")))
    due = F.coalesce(promised, F.lit(0)).alias("due")
    both = facts.groupBy("copy", "piece").agg(F.sum("messages").alias("seen"), due)
    text = F.format_string("Spark saw %d messages, the frames' headers promise %d", "seen", "due")
    odd = both.where("seen != due").join(hurt, ["copy", "piece"], "left_anti")
    return odd.select(*finding(Kind.COUNT, text, offset=F.col("piece")))


def progress(facts: DataFrame, damaged: DataFrame, start: int) -> DataFrame:
    """Return pulls, acks and positions that do not follow from the log: the brokers' own fold decides.

    in: facts, damaged ranges; out: findings, and rows for `conserved`. Sorted by copy, subject and offset, the frames
    pass one by one; memory grows with the consumers of a subject, not with the log. Behind damage nothing is judged: it
    may explain all.
    """
    kinds = facts.where("kind in ('progress', 'run', 'tags', 'hour')")
    hurt = damaged.groupBy(F.col("d_copy").alias("copy")).agg(F.min("d_offset").alias("hurt"))
    rows = kinds.join(F.broadcast(hurt), "copy", "left").where("hurt is null or offset < hurt")
    rows = rows.withColumn("start", F.lit(start))
    columns = ("copy", "subject", "offset", "end", "kind", "first", "last", "header", "body", "start", "value")
    ordered = rows.select(*columns).repartition("copy", "subject").sortWithinPartitions("copy", "subject", "offset")
    return ordered.mapInArrow(_judge, FINDINGS)


def _judge(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    judge = Judge()
    for batch in batches:
        found = [finding for row in batch.to_pylist() for finding in judge.judge(row)]
        yield pa.RecordBatch.from_pylist(found, schema=FINDING_ROWS)
    yield pa.RecordBatch.from_pylist(list(judge.finish()), schema=FINDING_ROWS)


def conserved(judged: DataFrame) -> DataFrame:
    """Return what became of the messages of each consumer group, by the hour in which they were stored.

    in: what `progress` returned; out: copy string, subject string, consumer_group string, hour timestamp, stored long,
    acked long, in_flight long, requeued long, passed long, expired long, never long, nacked long (of all hours
    together).
    """
    numbers = ("hour", "stored", *STATES, "nacked")
    said = F.from_json("text", "group string, " + ", ".join(f"{name} long" for name in numbers))
    rows = judged.where(F.col("what") == CONSERVED).select("copy", "subject", said.alias("said"))
    hour = F.timestamp_seconds(F.col("said.hour") * 3600).alias("hour")
    return rows.select(
        "copy", "subject", F.col("said.group").alias("consumer_group"), hour, *(f"said.{name}" for name in numbers[1:])
    )


def unequal(facts: DataFrame) -> DataFrame:
    """Return the pieces of which the copies differ in any byte, or of which one copy has nothing.

    in: facts; out: piece long.
    """
    said = F.struct("records", "messages", "bytes", "digest")
    pieces = facts.where("kind is null and records > 0").groupBy("piece")
    both = pieces.agg(F.count("*").alias("copies"), F.min(said).alias("one"), F.max(said).alias("other"))
    return both.where("copies != 2 or one != other").select("piece")


def due_messages(journal: DataFrame, facts: DataFrame, start: int) -> DataFrame:
    """Return what of the journal is due on which copy: not what the copy's retention may have removed.

    in: journal subject string, sequence long, id string; facts; out: the same, copy string.
    """
    copies = journal.sparkSession.createDataFrame([(copy,) for copy in COPIES], "copy string")
    due = journal.crossJoin(F.broadcast(copies))
    if start > 0:
        kept = _of(facts, "run").groupBy("copy", "subject").agg(F.min("first").alias("kept"))
        due = due.join(kept, ["copy", "subject"]).where("sequence >= kept").drop("kept")
    return due


def lost(due: DataFrame, messages: DataFrame) -> DataFrame:
    """Return what was acknowledged to a producer and is not in a copy at its sequence.

    Two equal logs can both lack a message, so only the producers' side of the story shows this.

    in: due copy string, subject string, sequence long, id string; messages the same; out: findings.
    """
    absent = due.join(messages, ["copy", "subject", "sequence", "id"], "left_anti")
    columns = {name: F.col(name) for name in ("subject", "sequence", "id")}
    return absent.select(*finding(Kind.LOST, "acknowledged, and not in this copy", **columns))


def hours(facts: DataFrame) -> DataFrame:
    """Count per subject and hour.

    in: facts; out: copy string, subject string, hour timestamp, messages long, bytes long.
    """
    return (
        _of(facts, "hour")
        .groupBy("copy", "subject", F.timestamp_seconds(F.col("value") * 3600).alias("hour"))
        .agg(F.sum("total").alias("messages"), F.sum("size").alias("bytes"))
    )
