"""Shell. Check of the producers' journal against both copies: two equal logs can both lack an acknowledged message."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from functools import reduce
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.storagelevel import StorageLevel

from qmq.audit.copies import CannotRead, open_copy
from qmq.audit.data_source import read_copy
from qmq.audit.derived import read_snapshot
from qmq.audit.findings import FINDINGS, FindingKind
from qmq.audit.results import Group, Result, merge_copies

HASH_DIGITS = 16
"""Leading digits of the SHA-256, as producers write them (`qmq.client.journal`)."""
BROADCAST_MAX = 1_000_000
"""Up to this number, keys are sent to every task (100 MB); above it, all messages are shuffled."""
JOURNAL = "subject string, group string, sequence long, id string, hash string"
_KEY = ["copy", "subject", "sequence", "id"]


def due_messages(
    journal: DataFrame, firsts: Mapping[str, Mapping[str, int]], start: int, *, are_all: bool = False
) -> DataFrame:
    """Return the journal's messages due on each copy: those that its retention cannot have deleted.

    in: journal subject string, sequence long, id string, hash string; out: the same, copy string. `firsts`: first
    sequence by copy and subject, in a log that begins at `start`; `are_all`: all messages of other subjects are due.
    """
    spark = journal.sparkSession
    copies = spark.createDataFrame([(copy,) for copy in firsts], "copy string")
    due = journal.crossJoin(F.broadcast(copies))
    if start > 0:
        rows = [(copy, subject, first) for copy, subjects in firsts.items() for subject, first in subjects.items()]
        kept = spark.createDataFrame(rows, "copy string, subject string, kept long")
        due = due.join(kept, ["copy", "subject"], "left" if are_all else "inner")
        due = due.where("sequence >= coalesce(kept, 0)").drop("kept")
    return due


def without_late_copies(
    found: Iterable[dict[str, Any]], ends: Mapping[str, Mapping[str, int]], *, min_copies: int
) -> list[dict[str, Any]]:
    """Return the findings without messages after a copy's end that enough others have: it did not acknowledge them.

    in: findings; `ends`: end sequence by copy and subject when the copies were frozen.
    """
    rows = list(found)
    lacking = Counter((row["subject"], row["sequence"], row["id"]) for row in rows if row["what"] == FindingKind.LOST)
    return [
        row
        for row in rows
        if row["what"] != FindingKind.LOST
        or row["sequence"] < ends[row["copy"]].get(row["subject"], 0)
        or len(ends) - lacking[row["subject"], row["sequence"], row["id"]] < min_copies
    ]


def torn_max(journal: Path) -> int:
    """Return the number of lines that may be torn: the last one of each file, if its producer crashed."""
    return sum(path.is_file() for path in journal.rglob("*")) if journal.is_dir() else 0


def stored(spark: SparkSession, place: Mapping[str, str], *, with_hash: bool) -> DataFrame:
    """Read the messages of a copy. out: subject string, sequence long, id string, now string: its hash, or null."""
    columns = "subject,sequence,id,message" if with_hash else "subject,sequence,id"
    messages = read_copy(spark, dict(place), rows="messages", columns=columns)
    content = F.substring(F.sha2("message", 256), 1, HASH_DIGITS) if with_hash else F.lit(None).cast("string")
    return messages.select("subject", "sequence", "id", content.alias("now"))


def broken_promises(due: DataFrame, messages: DataFrame, *, few: int) -> DataFrame:
    """Return acknowledged messages that a copy lacks at their sequence, or has with another content.

    in: due copy string, subject string, sequence long, id string, hash string, which may be null; messages copy and
    `stored`; `few`: number of due messages; out: findings.
    """
    wanted = due.select(*_KEY)
    met = messages.join(F.broadcast(wanted) if few <= BROADCAST_MAX else wanted, _KEY, "left_semi")
    held = due.join(met.withColumn("is_there", F.lit(True)), _KEY, "left")
    absent = _findings(held.where("is_there is null"), FindingKind.LOST, "acknowledged, and not in this copy")
    other = held.where("is_there and hash != now")
    return absent.unionByName(_findings(other, FindingKind.ALTERED, "acknowledged, and stored with another content"))


def _findings(rows: DataFrame, what: FindingKind, text: str) -> DataFrame:
    given = {"what": F.lit(what.value), "text": F.lit(text)} | {name: F.col(name) for name in _KEY}
    offsets = {name: F.lit(None).cast("long") for name in ("offset", "end")}
    return rows.select(*((given | offsets)[name].alias(name) for name in FINDINGS))


@contextmanager
def _lines_of(spark: SparkSession, journal: Path, group: Group) -> Iterator[DataFrame]:
    """Read the journal's lines of a group. out: subject string, sequence long, id string, hash string.

    Spark answers a later audit of the session from a cached frame until it is released: the journal may have grown.
    """
    lines = spark.read.schema(JOURNAL).json(str(journal), recursiveFileLookup=True)
    lines = lines.where(F.col("group").isNull() | (F.col("group") == group.name))
    lines = lines.select("subject", "sequence", "id", "hash").persist(StorageLevel.MEMORY_AND_DISK)
    try:
        yield lines
    finally:
        lines.unpersist()


def check_journal(
    spark: SparkSession,
    group: Group,
    firsts: dict[str, dict[str, int]],
    ends: dict[str, dict[str, int]],
    result: Result,
    journal: Path,
    *,
    are_all: bool,
) -> None:
    """Look for every message of the journal in both copies, up to their ends. `firsts`, `are_all`: of
    `due_messages`."""
    if not journal.exists():
        raise CannotRead(f"journal {journal}: there is no such file, nor a folder of them")
    with _lines_of(spark, journal, group) as lines:
        ((number, broken, hashed),) = lines.agg(
            F.count("*"), F.count_if(F.expr("subject is null or sequence is null or id is null")), F.count("hash")
        ).collect()
        if broken > torn_max(journal):
            raise CannotRead(f"journal {journal}: {broken} lines lack subject, sequence or id")
        result.journal = number - broken
        acked = lines.where("subject is not null and sequence is not null and id is not null")
        due = due_messages(acked, firsts, result.start, are_all=are_all)
        sides = [
            stored(spark, place, with_hash=hashed > 0).withColumn("copy", F.lit(name))
            for name, place in group.places.items()
        ]
        messages = reduce(DataFrame.unionByName, sides)
        found = [row.asDict() for row in broken_promises(due, messages, few=number).collect()]
        found = without_late_copies(found, ends, min_copies=group.min_copies)
        result.take(merge_copies(((row["copy"], row) for row in found), tuple(group.places)))
        if older := acked.join(due, ["subject", "sequence", "id"], "left_anti").count():
            result.notes.append(
                f"{older} of the journal's messages may be older than what the copies keep: not looked for"
            )


def first_sequences(place: Mapping[str, str], start: int) -> dict[str, int] | None:
    """Return the first sequence of each subject older than a copy's log, from the snapshot at its start; None without
    one.
    """
    if start == 0:
        return {}
    try:
        with closing(open_copy(place)) as copy:
            state, _ = read_snapshot(copy.derived(start).snapshot, start)
    except OSError:
        return None
    return state.next_sequence if state is not None else None
