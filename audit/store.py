"""Shell. Tables of an audit as Parquet: counts per subject and hour, equations, findings."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from qmq.audit.conservation import STATES
from qmq.audit.consumption import CONSERVED
from qmq.audit.findings import FINDINGS, HOUR
from qmq.audit.results import Result

_FINDINGS = ", ".join(f"{name} {'long' if name in ('offset', 'end', 'sequence') else 'string'}" for name in FINDINGS)


class Tables(NamedTuple):
    """Folder of the tables of all runs, and the name of this run.

    <group>/<table>/run=<name>/day=<date>: a run replaces nothing but its own rows. The day of a count is that of its
    hour, the day of a finding that of the run.
    """

    folder: Path
    run: str

    def write(self, rows: DataFrame, group: str, table: str) -> None:
        """Write rows with a `day`. Raises OSError."""
        folder = self.folder / group / table
        _keep_earlier(folder)
        rows.write.mode("overwrite").partitionBy("day").parquet(str(folder / f"run={self.run}"))

    def write_by_day(self, hours: DataFrame, group: str, table: str) -> None:
        """Write rows with an `hour`. Raises OSError."""
        self.write(hours.withColumn("day", F.to_date("hour")), group, table)


def _keep_earlier(folder: Path) -> None:
    """Move the rows of an audit before 0.3, which had no runs, to a run of their own: Spark reads one layout."""
    for days, at in (("day=*", ""), ("*.parquet", "day=__HIVE_DEFAULT_PARTITION__")):
        for path in [*folder.glob(days)]:
            place = folder / "run=earlier" / at
            place.mkdir(parents=True, exist_ok=True)
            path.rename(place / path.name)


def store_counts(judged: DataFrame, job: int, group: str, names: tuple[str, ...], tables: Tables) -> None:
    """Store counts per subject and hour, and the equations. in: `audit.executors`."""
    copies = F.explode(F.when(F.col("copy") == "", F.array(*map(F.lit, names))).otherwise(F.array("copy")))
    rows = judged.where(F.col("job") == job).withColumn("copy", copies)
    of = F.from_json("payload", "subject string, hour long, messages long, bytes long")
    hours = rows.where(F.col("kind") == HOUR).select("copy", of.alias("of"))
    hour = F.timestamp_seconds(F.col("of.hour") * 3600).alias("hour")
    tables.write_by_day(hours.select("copy", "of.subject", hour, "of.messages", "of.bytes"), group, "hours")
    numbers = ("stored", *STATES, "nacked")
    inner = "hour long, group string, " + ", ".join(f"{name} long" for name in numbers)
    outer = F.from_json("payload", "subject string, equation string")
    kept = rows.where(F.col("kind") == CONSERVED).select("copy", outer.alias("by"))
    kept = kept.select("copy", F.col("by.subject").alias("subject"), F.from_json("by.equation", inner).alias("of"))
    columns = [F.col(f"of.{name}").alias(name) for name in numbers]
    consumers = F.col("of.group").alias("consumer_group")
    tables.write_by_day(kept.select("copy", "subject", consumers, hour, *columns), group, "conserved")


def store_findings(spark: SparkSession, result: Result, tables: Tables) -> None:
    """Store the findings of one group."""
    rows = [{name: row.get(name) for name in FINDINGS} for row in result.findings]
    day = F.to_date(F.lit(tables.run[:10])).alias("day")
    tables.write(spark.createDataFrame(rows, _FINDINGS).select("*", day), result.group, "findings")
