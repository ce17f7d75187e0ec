"""Shell. Accounts for the messages of delay groups, in their own logs and in those of their targets
(`qmq.audit.delays`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.storagelevel import StorageLevel

from qmq.audit.copies import CannotRead, folder_of, open_copy
from qmq.audit.data_source import in_ms, read_copy
from qmq.audit.delays import (
    DELAY_STATES,
    absent_batches,
    account_per_hour,
    denied_batches,
    early_messages,
    message_states,
    unsent_messages,
    waits_for,
)
from qmq.audit.findings import FindingKind
from qmq.audit.selection import CLOCK_MS
from qmq.audit.walk import HEADER_BYTES_MAX
from qmq.errors import CorruptFrame
from qmq.log.delay_frames import SCHEDULE_FOLDER
from qmq.log.frame import decode_header
from qmq.types import Role

FINDINGS_MAX = 1_000
SUBJECTS_MAX = 5_000
_DELAYS = frozenset({Role.DELAY_MASTER, Role.DELAY_SLAVE})


class Source(NamedTuple):
    """One copy of a broker group's log."""

    group: str
    place: Mapping[str, str]


class Account(NamedTuple):
    """Equation per subject, findings {what, subject, sequence, offset, text}, and notes about waiting messages.

    `more`: findings per kind that are counted but not listed.
    """

    rows: list[dict[str, Any]]
    findings: list[dict[str, Any]]
    notes: list[str]
    more: dict[str, int]


def is_delay_group(place: Mapping[str, str]) -> bool:
    """Return whether a copy is a delay server's; raise CannotRead."""
    if path := place.get("path"):
        return (folder_of(Path(path)).parent / SCHEDULE_FOLDER).is_dir()
    with closing(open_copy(place)) as copy:
        return copy.owner().role in _DELAYS


def account_for(
    spark: SparkSession,
    delays: Source,
    targets: Sequence[Source],
    *,
    now_ms: int | None = None,
    store: Callable[[DataFrame], None] | None = None,
    closed: Mapping[str, Sequence[str]] | None = None,
) -> Account:
    """Account for each delayed message of a delay group at `now_ms`; by default, at its last decision.

    Args:
        targets: logs of broker groups; batches for other groups are not checked.
        store: called with `account_per_hour`.
        closed: reasons of readonly groups; messages waiting for them are a note.

    Raises:
        CannotRead: a log cannot be read.
    """
    rows = _table(spark, delays, "delays").persist(StorageLevel.MEMORY_AND_DISK)
    try:
        if now_ms is None:
            now_ms = rows.agg(F.max("timestamp_ms")).collect()[0][0] or 0
        found = message_states(rows, now_ms)
        hours = account_per_hour(found)
        if store is not None:
            store(hours)
        names = ("taken", *DELAY_STATES, "late")
        sums = [F.sum(name).alias(name) for name in names] + [F.max("late_ms_max").alias("late_ms_max")]
        listed = hours.groupBy("subject").agg(*sums).orderBy("subject").limit(SUBJECTS_MAX).collect()
        unsent = unsent_messages(found).where(~waits_for(closed or {})).drop("targets")
        broken = {FindingKind.EARLY: early_messages(rows)}
        if asked := _asked_since(rows, targets):
            logs = [_table(spark, source, "frames", since=since_ms) for source, since_ms in asked]
            frames = reduce(DataFrame.unionByName, logs)
            denied = denied_batches(rows, frames)
            sent = denied.select(F.explode("numbers").alias("sequence"))
            unsent = unsent.join(sent, "sequence", "left_anti").select(*unsent.columns)
            broken[FindingKind.LOST] = absent_batches(rows, frames, _kept_since(spark, asked))
            broken[FindingKind.TWICE] = denied.drop("numbers")
        findings, more = _listed(broken | {FindingKind.UNSENT: unsent})
        return Account([row.asDict() for row in listed], findings, [*_waiting(found, closed or {})], more)
    finally:
        rows.unpersist()


def _table(spark: SparkSession, source: Source, rows: str, **options: object) -> DataFrame:
    table = in_ms(read_copy(spark, dict(source.place), rows=rows, **options))
    return table.withColumn("broker_group", F.lit(source.group))


def _listed(tables: Mapping[FindingKind, DataFrame]) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """Return the first findings of each kind, and the number of further ones."""
    findings, more = [], {}
    for kind, table in tables.items():
        rows = table.orderBy("sequence").limit(FINDINGS_MAX + 1).collect()
        if len(rows) > FINDINGS_MAX:
            more[kind.value] = table.count() - FINDINGS_MAX
        findings += [row.asDict() | {"what": kind.value} for row in rows[:FINDINGS_MAX]]
    return findings, more


def _waiting(found: DataFrame, closed: Mapping[str, Sequence[str]]) -> Iterator[str]:
    if not closed:
        return
    rows = unsent_messages(found).where(waits_for(closed)).groupBy(F.array_sort("targets").alias("targets")).count()
    for row in sorted(rows.collect()):
        names = "; ".join(f"{name} ({', '.join(closed[name])})" for name in row["targets"])
        messages = f"{row['count']} messages that were due an hour ago or earlier"
        yield f"{messages} wait for broker groups that take none: {names}"


def _asked_since(rows: DataFrame, targets: Sequence[Source]) -> list[tuple[Source, int]]:
    """Return the targets that batches were planned for, each with the time from which on it may have them."""
    planned = rows.where("event = 'planned'").groupBy("target").agg(F.min("timestamp_ms").alias("at_ms"))
    since = {row["target"]: max(0, row["at_ms"] - CLOCK_MS) for row in planned.collect()}
    return [(source, since[source.group]) for source in targets if source.group in since]


def _kept_since(spark: SparkSession, asked: Sequence[tuple[Source, int]]) -> DataFrame:
    """Return the time from which on each target has all frames. out: target string, since_ms long."""
    return spark.createDataFrame(
        [(source.group, _begin_of(source)) for source, _ in asked], "target string, since_ms long"
    )


def _begin_of(source: Source) -> int:
    """Return the time of a log's oldest frame plus CLOCK_MS; 0 if nothing was ever removed."""
    with closing(open_copy(source.place)) as copy:
        start = copy.describe().start
        if start == 0:
            return 0
        try:
            return decode_header(copy.window(start, HEADER_BYTES_MAX), 0, start, None).timestamp_ms + CLOCK_MS
        except (CorruptFrame, OSError) as error:
            raise CannotRead(f"the oldest frame of {source.group} cannot be read: {error}") from None
