"""Core. Frame-by-frame comparison of two copies, for many pairs at once: DataFrame to DataFrame (columns:
`audit.findings`).

The plan is the cost, not the rows: Spark takes 7 CPU seconds for it, for one pair or for many.
"""

from __future__ import annotations

from functools import reduce

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from qmq.audit.findings import COPIES, FINDINGS, MASTER, SLAVE, FindingKind

_COMPARED = (
    "end",
    "kind",
    "flags",
    "term",
    "boot",
    "subject",
    "first_sequence",
    "count",
    "high_watermark",
    "timestamp_ms",
    "producer",
    "batch",
    "body_crc",
    "body_bytes",
)
COLUMNS = ("offset", *_COMPARED, "chain", "body")
"""Compared columns of a frame; `body` is its hash, or null if damaged."""
_MESSAGES = ("pair", "subject", "first_sequence", "count")
"""Columns that identify a frame's messages wherever it stands."""
_SAME = (
    "pair",
    "kind",
    "flags",
    "subject",
    "first_sequence",
    "count",
    "timestamp_ms",
    "producer",
    "batch",
    "body_crc",
    "body_bytes",
)
"""Columns that a moved frame keeps; its high watermark, epoch and chain may change."""
SHIFTED_FRAMES_MIN, SHIFTS_MAX = 3, 5
"""Fewer moved frames are reported one by one; of more distances, only these are shifts."""


def finding(what: Column | FindingKind, text: Column | str, **columns: Column) -> list[Column]:
    """Return the columns of a finding; missing ones are null."""
    given = {"what": F.lit(what.value) if isinstance(what, FindingKind) else what, "copy": F.col("copy")} | columns
    given["text"] = F.lit(text) if isinstance(text, str) else text
    return [
        (given[field.name] if field.name in given else F.lit(None)).cast(field.dataType).alias(field.name)
        for field in FINDINGS
    ]


def compare(frames: DataFrame, damaged: DataFrame) -> DataFrame:
    """Compare the two copies of each pair frame by frame.

    in: pair int, side string (of COPIES), due boolean: below the high watermark, COLUMNS, of which subject, producer,
    batch, chain and body are string, others long; damaged ranges: d_pair int, d_copy string, d_offset, d_end long. out:
    pair, findings, frames long: the number of frames in the finding.

    Frames moved by one distance are one finding, and so are neighbours that one copy lacks; frames below and above the
    high watermark are kept apart. Frames missing within a damaged range are not reported again. A frame is `reordered`
    if the other copy has its messages elsewhere.
    """
    master, slave = (frames.where(F.col("side") == side).drop("side") for side in COPIES)
    sides, shifted = _without_shifted(master, slave)
    hurt = {copy: damaged.where(F.col("d_copy") == copy) for copy in COPIES}
    only = [
        _only(sides[MASTER], sides[SLAVE], hurt[SLAVE], FindingKind.MISSING),
        _only(sides[SLAVE], sides[MASTER], hurt[MASTER], FindingKind.EXTRA),
    ]
    m, s = sides[MASTER].alias("m"), sides[SLAVE].alias("s")
    other_body = (F.col("m.body_crc") == F.col("s.body_crc")) & (F.col("m.body") != F.col("s.body"))
    named = F.concat_ws(
        ", ",
        *(F.when(~F.col(f"m.{name}").eqNullSafe(F.col(f"s.{name}")), F.lit(name)) for name in _COMPARED),
        F.when(other_body, F.lit("body")),  # with the same CRC, so headers and chains are equal
    )
    same_place = (F.col("m.pair") == F.col("s.pair")) & (F.col("m.offset") == F.col("s.offset"))
    pairs = m.join(s, same_place).withColumn("differs", named)
    pairs = pairs.where((F.col("differs") != "") | (F.col("m.chain") != F.col("s.chain")))
    moved = sides[SLAVE].select(*_MESSAGES, F.lit(True).alias("moved")).where("count > 0")
    flat = pairs.select(
        "m.offset",
        "m.end",
        *(f"m.{name}" for name in _MESSAGES),
        "differs",
        (F.struct("m.subject", "m.first_sequence") != F.struct("s.subject", "s.first_sequence")).alias("other"),
    )
    flat = flat.join(moved.distinct(), [*_MESSAGES], "left")
    what = (
        F.when(F.col("differs") == "", FindingKind.HISTORY.value)
        .when(F.col("moved") & F.col("other"), FindingKind.REORDERED.value)
        .otherwise(FindingKind.DIFFERENT.value)
    )
    text = F.when(F.col("differs") == "", "only the chain differs").otherwise(
        F.concat(F.lit("the copies differ in "), "differs")
    )
    columns = {"offset": F.col("offset"), "end": F.col("end"), "subject": F.col("subject"), "copy": F.lit(SLAVE)}
    named_rows = finding(what, text, sequence=F.col("first_sequence"), **columns)
    different = flat.select("pair", *named_rows, F.lit(1).alias("frames"))
    return reduce(DataFrame.unionByName, [different, *only, shifted])


def _without_shifted(master: DataFrame, slave: DataFrame) -> tuple[dict[str, DataFrame], DataFrame]:
    """Remove frames that are in both copies at one distance: all frames after an extra one are.

    out: the rest of each copy; findings with frames.
    """
    stays = master.select("offset", *_SAME).intersect(slave.select("offset", *_SAME))
    ours, theirs = (
        side.join(stays, ["offset", *_SAME], "left_anti").select(
            *_SAME, F.col("offset").alias(f"{name}_offset"), F.col("end").alias(f"{name}_end")
        )
        for name, side in ((MASTER, master), (SLAVE, slave))
    )
    both = ours.join(theirs, [*_SAME]).withColumn("by", F.col("slave_offset") - F.col("master_offset"))
    often = both.where("by != 0").groupBy("pair", "by").agg(F.count("*").alias("of"))
    most = F.row_number().over(Window.partitionBy("pair").orderBy(F.desc("of"), "by"))
    often = often.where(F.col("of") >= SHIFTED_FRAMES_MIN).withColumn("nth", most).where(F.col("nth") <= SHIFTS_MAX)
    pairs = both.join(F.broadcast(often.drop("nth")), ["pair", "by"])
    order = Window.partitionBy("pair", "master_offset").orderBy(F.desc("of"), "by")
    pairs = pairs.withColumn("nth", F.row_number().over(order)).where("nth = 1")
    spans = pairs.groupBy("pair", "by").agg(
        F.min("master_offset").alias("offset"),
        F.max("master_end").alias("end"),
        F.count("*").alias("frames"),
        F.sum("count").alias("messages"),
        F.min_by("subject", "master_offset").alias("subject"),
        F.min_by("first_sequence", "master_offset").alias("first"),
    )
    text = F.format_string(
        "%d frames with %d messages stand %d bytes further %s in the slave",
        "frames",
        "messages",
        F.abs("by"),
        F.when(F.col("by") > 0, "on").otherwise("back"),
    )
    columns = {"offset": F.col("offset"), "end": F.col("end"), "subject": F.col("subject"), "copy": F.lit(SLAVE)}
    found = spans.select("pair", *finding(FindingKind.SHIFTED, text, sequence=F.col("first"), **columns), "frames")
    left = {
        name: side.join(pairs.select("pair", F.col(f"{name}_offset").alias("offset")), ["pair", "offset"], "left_anti")
        for name, side in ((MASTER, master), (SLAVE, slave))
    }
    return left, found


def _only(has: DataFrame, lacks: DataFrame, damaged: DataFrame, what: FindingKind) -> DataFrame:
    """Return the frames of `has` at no offset of `lacks` and in no damaged range of it; neighbours are one row."""
    alone = has.join(lacks.select("pair", "offset"), ["pair", "offset"], "left_anti")
    inside = (F.col("d_offset") <= F.col("offset")) & (F.col("offset") < F.col("d_end"))
    inside &= F.col("d_pair") == F.col("pair")
    alone = alone.join(F.broadcast(damaged), inside, "left_anti")
    elsewhere = lacks.where("count > 0").select(*_MESSAGES, F.lit(True).alias("elsewhere")).distinct()
    alone = alone.join(elsewhere, [*_MESSAGES], "left")
    alone = alone.withColumn("what", F.when(F.col("elsewhere"), FindingKind.REORDERED.value).otherwise(what.value))
    order = Window.partitionBy("pair", "what", "due").orderBy("offset")
    alone = alone.withColumn("begins", F.coalesce(F.lag("end").over(order) != F.col("offset"), F.lit(True)))
    alone = alone.withColumn("run", F.sum(F.col("begins").cast("long")).over(order))
    runs = alone.groupBy("pair", "what", "due", "run").agg(
        *(F.min_by(name, "offset").alias(name) for name in ("subject", "first_sequence")),
        F.min("offset").alias("offset"),
        F.max("end").alias("end"),
        F.sum("count").alias("messages"),
        F.count("*").alias("frames"),
    )
    lacking = SLAVE if what == FindingKind.MISSING else MASTER
    text = F.format_string(f"%d frames with %d messages; the {lacking} lacks them", "frames", "messages")
    columns = {"offset": F.col("offset"), "end": F.col("end"), "subject": F.col("subject"), "copy": F.lit(SLAVE)}
    return runs.select("pair", *finding(F.col("what"), text, sequence=F.col("first_sequence"), **columns), "frames")
