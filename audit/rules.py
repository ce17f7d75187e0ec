"""Core. What must hold between the frames of a log, and between its two copies: DataFrame to DataFrame.

Message bytes are hashed where they are read and never shuffled; the rules join what is left, a few rows per piece,
subject and hour, and a row per pull and ack. `facts` and `findings` are described in `audit.schema`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import reduce
from typing import Any

import pyarrow as pa
from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from audit import delays
from audit.progress import FINDING_ROWS, Judge
from audit.schema import COPIES, FACT, FINDINGS
from qmq.errors import CorruptFrame
from qmq.log.frame import decode_header

_COMPARED = (
    "end", "kind", "flags", "term", "boot", "subject", "first_sequence", "count", "high_watermark", "timestamp_ms",
    "producer", "batch", "body_crc", "body_bytes",
)  # fmt: skip


NO_FRAME = "no frame stands here"


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


def _finding(what: Column | str, text: Column | str, **columns: Column) -> list[Column]:
    """Return the columns of a finding; those not given come from columns of the same name or are null."""
    given = {"what": F.lit(what) if isinstance(what, str) else what, "copy": F.col("copy")} | columns
    given["text"] = F.lit(text) if isinstance(text, str) else text
    return [
        (given[field.name] if field.name in given else F.lit(None)).cast(field.dataType).alias(field.name)
        for field in FINDINGS
    ]


def within_copies(facts: DataFrame, damaged: DataFrame, start: int) -> DataFrame:
    """Return everything else that is wrong with a copy by itself. in: facts, damaged ranges; out: findings.

    `start` is where both logs were begun to be read; from 0 on, nothing before them excuses anything.
    """
    rules = (
        sequences(facts, damaged, start), epochs(facts), counts(facts), progress(facts, damaged, start),
        delays.broken_promises(facts),
    )  # fmt: skip
    return reduce(DataFrame.unionByName, rules)


def broken(facts: DataFrame) -> DataFrame:
    """Return what the readers could not make sense of, in pieces and between them. in: facts; out: findings.

    Damage that crosses the border of two pieces was seen from both sides; it becomes one finding, up to the next frame.
    """
    seen = damage(facts).unionByName(borders(facts))
    merged = seen.groupBy("what", "copy", "offset").agg(
        F.max("end").alias("end"),
        *(F.first(name, True).alias(name) for name in ("subject", "sequence", "id")),
        F.max_by("text", F.col("text") != NO_FRAME).alias("text"),
    )
    return merged.select(*FINDINGS.fieldNames())


def damage(facts: DataFrame) -> DataFrame:
    """Return what the readers found while they walked, within a piece. in: facts; out: findings."""
    what = (
        F.when(F.col("text").contains("wrong chain"), "chain")
        .when(F.col("text").startswith("sequence "), "sequence")
        .when(F.col("text").startswith("epoch "), "epoch")
        .otherwise("damaged")
    )
    columns = {name: F.col(name) for name in ("offset", "end", "subject")}
    return _of(facts, "problem").select(*_finding(what, F.col("text"), sequence=F.col("first"), **columns))


def _continuing(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Keep the pieces whose first frame does not continue `chain_before`."""
    for batch in batches:
        broken = [not _continues(row) for row in batch.to_pylist()]
        yield batch.filter(pa.array(broken, pa.bool_()))


def _continues(row: dict[str, Any]) -> bool:
    try:
        decode_header(bytes.fromhex(row["header"]), 0, row["offset"], int(row["chain_before"], 16))
    except CorruptFrame:
        return False
    return True


def borders(facts: DataFrame) -> DataFrame:
    """Return pieces that do not continue the piece before: bytes without a frame, another chain.

    in: facts; out: findings.
    """
    order = Window.partitionBy("copy").orderBy("piece")
    pieces = _of(facts, "piece").select(
        "copy", "offset", "end", "header", F.lag("end").over(order).alias("before"),
        F.lag("chain").over(order).alias("chain_before"),
    ).where("before is not null")  # fmt: skip
    apart = pieces.where("offset != before")
    no_frame = apart.select(
        *_finding("damaged", NO_FRAME, offset=F.col("before"), end=F.col("offset"))
    )
    joined = pieces.where("offset = before")
    apart_in_chain = joined.mapInArrow(_continuing, joined.schema)
    text = "it continues another history (wrong chain)"
    return no_frame.union(apart_in_chain.select(*_finding("chain", text, offset=F.col("offset"), end=F.col("end"))))


def sequences(facts: DataFrame, damaged: DataFrame, start: int) -> DataFrame:
    """Return gaps and repeats of a subject's sequences between runs.

    in: facts; damaged d_copy string, d_offset long, d_end long: ranges whose frames are unknown; out: findings.

    Runs are dense in themselves. A gap in front of which the log is damaged follows from that and is not named.
    """
    order = Window.partitionBy("copy", "subject").orderBy("offset")
    runs = _of(facts, "run").select(
        "copy", "subject", "offset", "end", "first", "last", "judged",
        F.lag("last").over(order).alias("due"), F.lag("end").over(order).alias("known_until"),
    )  # fmt: skip
    if start == 0:
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
        *_finding("sequence", text, sequence=F.col("first"), **columns)
    )


def epochs(facts: DataFrame) -> DataFrame:
    """Return epochs that go back from one piece to the next. in: facts; out: findings."""
    order = Window.partitionBy("copy").orderBy("offset")
    epoch = F.struct("first", "last")
    seen = _of(facts, "epoch").select(
        "copy", "piece", "offset", epoch.alias("epoch"), F.lag(epoch).over(order).alias("before"),
        F.lag("piece").over(order).alias("piece_before"),
    )  # fmt: skip
    text = F.format_string(
        "epoch %d.%d after epoch %d.%d", "epoch.first", "epoch.last", "before.first", "before.last"
    )
    back = seen.where("epoch < before and piece != piece_before")
    return back.select(*_finding("epoch", text, offset=F.col("offset")))


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
    return odd.select(*_finding("count", text, offset=F.col("piece")))


def progress(facts: DataFrame, damaged: DataFrame, start: int) -> DataFrame:
    """Return pulls, acks and positions that do not follow from the log: the brokers' own fold decides.

    in: facts, damaged ranges; out: findings. Sorted by copy, subject and offset, the frames pass one by one; memory
    grows with the consumers of a subject, not with the log. Behind damage nothing is judged: it may explain all.
    """
    kinds = facts.where("kind in ('progress', 'run')")
    hurt = damaged.groupBy(F.col("d_copy").alias("copy")).agg(F.min("d_offset").alias("hurt"))
    rows = kinds.join(F.broadcast(hurt), "copy", "left").where("hurt is null or offset < hurt")
    rows = rows.withColumn("start", F.lit(start))
    columns = ("copy", "subject", "offset", "end", "kind", "first", "last", "header", "body", "start")
    ordered = (
        rows.select(*columns).repartition("copy", "subject").sortWithinPartitions("copy", "subject", "offset")
    )
    return ordered.mapInArrow(_judge, FINDINGS)


def _judge(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    judge = Judge()
    for batch in batches:
        found = [finding for row in batch.to_pylist() for finding in judge.judge(row)]
        yield pa.RecordBatch.from_pylist(found, schema=FINDING_ROWS)


def unequal(facts: DataFrame) -> DataFrame:
    """Return the pieces of which the copies differ in any byte, or of which one copy has nothing.

    in: facts; out: piece long.
    """
    said = F.struct("records", "messages", "bytes", "digest")
    pieces = facts.where("kind is null and records > 0").groupBy("piece")
    both = pieces.agg(F.count("*").alias("copies"), F.min(said).alias("one"), F.max(said).alias("other"))
    return both.where("copies != 2 or one != other").select("piece")


def compare(master: DataFrame, slave: DataFrame, damaged: DataFrame) -> DataFrame:
    """Compare two copies frame by frame. in: two times `audit.rows.FRAMES`, damaged ranges; out: findings.

    A frame that a copy lacks where its bytes are damaged is not named again. A missing frame whose messages stand
    elsewhere in that copy is `reordered`.
    """
    sides = {"master": master, "slave": slave}
    frames = {copy: side.where("kind is not null") for copy, side in sides.items()}
    hurt = {copy: damaged.where(F.col("d_copy") == copy) for copy in sides}
    only = [_only(frames["master"], frames["slave"], hurt["slave"], "missing", "slave"),
            _only(frames["slave"], frames["master"], hurt["master"], "extra", "slave")]  # fmt: skip
    m, s = frames["master"].alias("m"), frames["slave"].alias("s")
    named = F.concat_ws(
        ", ", *(F.when(~F.col(f"m.{name}").eqNullSafe(F.col(f"s.{name}")), F.lit(name)) for name in _COMPARED)
    )
    pairs = m.join(s, F.col("m.offset") == F.col("s.offset")).withColumn("differs", named)
    pairs = pairs.where((F.col("differs") != "") | (F.col("m.chain") != F.col("s.chain")))
    moved = frames["slave"].select("subject", "first_sequence", "count", F.lit(True).alias("moved")).where("count > 0")
    key = ["subject", "first_sequence", "count"]
    flat = pairs.select("m.offset", "m.end", *(f"m.{name}" for name in key), "differs",
                        (F.struct("m.subject", "m.first_sequence") != F.struct("s.subject", "s.first_sequence"))
                        .alias("other"))  # fmt: skip
    flat = flat.join(moved.distinct(), key, "left")
    what = (
        F.when(F.col("differs") == "", "history")
        .when(F.col("moved") & F.col("other"), "reordered")
        .otherwise("different")
    )
    text = F.when(F.col("differs") == "", "only the chain differs").otherwise(
        F.concat(F.lit("the copies differ in "), "differs")
    )
    columns = {"offset": F.col("offset"), "end": F.col("end"), "subject": F.col("subject"), "copy": F.lit("slave")}
    different = flat.select(*_finding(what, text, sequence=F.col("first_sequence"), **columns))
    return reduce(DataFrame.unionByName, [different, *only])


def _only(has: DataFrame, lacks: DataFrame, damaged: DataFrame, what: str, copy: str) -> DataFrame:
    """Return the frames of `has` that stand at no offset of `lacks` nor in a damaged range of it."""
    alone = has.join(lacks.select("offset"), "offset", "left_anti")
    inside = (F.col("d_offset") <= F.col("offset")) & (F.col("offset") < F.col("d_end"))
    alone = alone.join(F.broadcast(damaged), inside, "left_anti")
    key = ["subject", "first_sequence", "count"]
    elsewhere = lacks.where("count > 0").select(*key, F.lit(True).alias("elsewhere")).distinct()
    alone = alone.join(elsewhere, key, "left")
    named = F.when(F.col("elsewhere"), "reordered").otherwise(what)
    lacking = "slave" if what == "missing" else "master"
    text = F.format_string(f"%d messages; the {lacking} lacks this frame", "count")
    columns = {"offset": F.col("offset"), "end": F.col("end"), "subject": F.col("subject"), "copy": F.lit(copy)}
    return alone.select(*_finding(named, text, sequence=F.col("first_sequence"), **columns))


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
    return absent.select(*_finding("lost", "acknowledged, and not in this copy", **columns))


def hours(facts: DataFrame) -> DataFrame:
    """Count per subject and hour.

    in: facts; out: copy string, subject string, hour timestamp, messages long, bytes long.
    """
    return (
        _of(facts, "hour")
        .groupBy("copy", "subject", F.timestamp_seconds(F.col("value") * 3600).alias("hour"))
        .agg(F.sum("total").alias("messages"), F.sum("size").alias("bytes"))
    )
