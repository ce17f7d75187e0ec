"""Shell. Tables of an audit as Parquet: counts per subject and hour, equations, findings."""

from __future__ import annotations

from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from qmq.audit.conservation import STATES
from qmq.audit.consumption import CONSERVED
from qmq.audit.findings import FINDINGS, HOUR
from qmq.audit.results import Result

_FINDINGS = ", ".join(f"{name} {'long' if name in ('offset', 'end', 'sequence') else 'string'}" for name in FINDINGS)


def write_by_day(hours: DataFrame, folder: Path) -> None:
    """Write rows with an `hour` into one folder per day, replacing earlier ones."""
    hours.withColumn("day", F.to_date("hour")).write.mode("overwrite").partitionBy("day").parquet(str(folder))


def store_counts(judged_rows: DataFrame, names: tuple[str, ...], folder: Path) -> None:
    """Store counts per subject and hour, and the equations, as Parquet. in: rows of one group."""
    copies = F.explode(F.when(F.col("copy") == "", F.array(*map(F.lit, names))).otherwise(F.array("copy")))
    rows = judged_rows.withColumn("copy", copies)
    of = F.from_json("payload", "subject string, hour long, messages long, bytes long")
    hours = rows.where(F.col("kind") == HOUR).select("copy", of.alias("of"))
    hour = F.timestamp_seconds(F.col("of.hour") * 3600).alias("hour")
    write_by_day(hours.select("copy", "of.subject", hour, "of.messages", "of.bytes"), folder / "hours")
    numbers = ("stored", *STATES, "nacked")
    inner = "hour long, group string, " + ", ".join(f"{name} long" for name in numbers)
    outer = F.from_json("payload", "subject string, equation string")
    kept = rows.where(F.col("kind") == CONSERVED).select("copy", outer.alias("by"))
    kept = kept.select("copy", F.col("by.subject").alias("subject"), F.from_json("by.equation", inner).alias("of"))
    columns = [F.col(f"of.{name}").alias(name) for name in numbers]
    group = F.col("of.group").alias("consumer_group")
    write_by_day(kept.select("copy", "subject", group, hour, *columns), folder / "conserved")


def store_findings(spark: SparkSession, result: Result, folder: Path) -> None:
    """Store the findings of one group as Parquet."""
    rows = [{name: row.get(name) for name in FINDINGS} for row in result.findings]
    spark.createDataFrame(rows, _FINDINGS).write.mode("overwrite").parquet(str(folder / result.group / "findings"))
