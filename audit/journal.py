"""Shell. Check of the producers' journal against both copies: two equal logs can both lack an acknowledged message."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial, reduce
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple, cast

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.storagelevel import StorageLevel

from qmq.audit.copies import CannotRead, open_copy
from qmq.audit.data_source import TableReader, read_copy
from qmq.audit.derived import read_snapshot
from qmq.audit.findings import FINDINGS, FindingKind, Row, finding_row
from qmq.audit.results import Group, Result, Sequences, merge_copies
from qmq.ledger import PROVEN, Ledger

HASH_DIGITS = 16
"""Leading digits of the SHA-256, as producers write them (`qmq.client.journal`)."""
BROADCAST_MAX = 1_000_000
"""Up to this number, keys are sent to every task (100 MB); above it, all messages are shuffled."""
JOURNAL = "subject string, group string, sequence long, id string, hash string"
TEXTS = {
    FindingKind.LOST: "acknowledged, and not in this copy",
    FindingKind.ALTERED: "acknowledged, and stored with another content",
}
_KEY = ["copy", "subject", "sequence", "id"]


@dataclass(frozen=True, slots=True)
class Due:
    """Messages that the copies must have.

    `firsts`: first sequence by copy and subject; `are_all`: all messages of other subjects are due. The logs are read
    from `begin` on. `run`: the earlier run that compared the messages before.
    """

    firsts: Mapping[str, Mapping[str, int]]
    are_all: bool
    begin: int = 0
    run: str = ""

    def is_due(self, copy: str, subject: str, sequence: int) -> bool:
        first = self.firsts[copy].get(subject)
        return sequence >= first if first is not None else self.are_all


def due_of_logs(group: Group, result: Result, subjects: Mapping[str, Mapping[str, Sequences]]) -> Due:
    """Return what is due on each copy: messages that its retention cannot have deleted."""
    known = {name: first_sequences(place, result.logs[name].start) for name, place in group.places.items()}
    if None not in known.values():
        return Due({name: found or {} for name, found in known.items()}, are_all=True)
    firsts = {
        name: {subject: range.first for subject, range in rows.items() if range.first is not None}
        for name, rows in subjects.items()
    }
    return Due(firsts, are_all=False)


def due_since(ledger: Ledger, group: Group, result: Result) -> Due | None:
    """Return what is due of messages that no earlier run compared, or None if that is unknown.

    The last two runs must have compared the journal and found nothing. Messages from the end of the first of them on
    are due: a producer writes a line once its message is acknowledged, perhaps after the audit has read the journal.
    """
    last = ledger.newest(group.name, 2) if ledger.path(group.name).exists() else []
    if len(last) < 2 or any(entry.verdict != PROVEN or entry.journal is None or not entry.verified for entry in last):
        return None
    before, _ = last
    if result.start > before.verified:
        return None
    return Due(dict.fromkeys(group.places, before.ends), are_all=True, begin=before.verified, run=before.run)


def _due_lines(acked: DataFrame, due: Due) -> DataFrame:
    """Return the lines that are due on each copy. in: `_lines_of`; out: the same, copy string."""
    spark = acked.sparkSession
    found = acked.crossJoin(F.broadcast(spark.createDataFrame([(copy,) for copy in due.firsts], "copy string")))
    rows = [(copy, subject, first) for copy, subjects in due.firsts.items() for subject, first in subjects.items()]
    if rows or not due.are_all:
        kept = spark.createDataFrame(rows, "copy string, subject string, kept long")
        found = found.join(kept, ["copy", "subject"], "left" if due.are_all else "inner")
        found = found.where("sequence >= coalesce(kept, 0)").drop("kept")
    return found


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


def stored(spark: SparkSession, place: Mapping[str, str], begin: int, *, with_hash: bool) -> DataFrame:
    """Read the messages of a copy from `begin` on.

    out: subject string, sequence long, id string, now string: its hash, or null.
    """
    columns = "subject,sequence,id,message" if with_hash else "subject,sequence,id"
    messages = read_copy(spark, dict(place), rows="messages", columns=columns, begin=begin)
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
    absent = _findings(held.where("is_there is null"), FindingKind.LOST)
    other = held.where("is_there and hash != now")
    return absent.unionByName(_findings(other, FindingKind.ALTERED))


def _findings(rows: DataFrame, what: FindingKind) -> DataFrame:
    given = {"what": F.lit(what.value), "text": F.lit(TEXTS[what])} | {name: F.col(name) for name in _KEY}
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
    spark: SparkSession | None,
    group: Group,
    due: Due,
    ends: Mapping[str, Mapping[str, int]],
    result: Result,
    journal: Path,
) -> None:
    """Look for every due message of the journal in all copies, up to their ends. Without `spark`, in this process."""
    if not journal.exists():
        raise CannotRead(f"journal {journal}: there is no such file, nor a folder of them")
    check = _check_here if spark is None else partial(_check_on_spark, spark)
    checked = check(group, due, journal)
    if checked.broken > torn_max(journal):
        raise CannotRead(f"journal {journal}: {checked.broken} lines lack subject, sequence or id")
    result.journal = checked.lines
    found = without_late_copies(checked.found, ends, min_copies=group.min_copies)
    result.take(merge_copies(((row["copy"], row) for row in found), tuple(group.places)))
    if checked.older and due.run:
        result.notes.append(f"{checked.older} of the journal's messages were compared by {due.run} or earlier")
    elif checked.older:
        result.notes.append(
            f"{checked.older} of the journal's messages may be older than the copies' logs, and are not compared"
        )


class _Checked(NamedTuple):
    """Findings, and numbers of lines: with a message, without, and of messages that are due on no copy."""

    found: list[Row]
    lines: int
    broken: int
    older: int


def _check_on_spark(spark: SparkSession, group: Group, due: Due, journal: Path) -> _Checked:
    with _lines_of(spark, journal, group) as lines:
        ((number, broken, hashed),) = lines.agg(
            F.count("*"), F.count_if(F.expr("subject is null or sequence is null or id is null")), F.count("hash")
        ).collect()
        acked = lines.where("subject is not null and sequence is not null and id is not null")
        wanted = _due_lines(acked, due)
        sides = [
            stored(spark, place, due.begin, with_hash=hashed > 0).withColumn("copy", F.lit(name))
            for name, place in group.places.items()
        ]
        messages = reduce(DataFrame.unionByName, sides)
        found = [row.asDict() for row in broken_promises(wanted, messages, few=number).collect()]
        older = acked.join(wanted, ["subject", "sequence", "id"], "left_anti").count()
    return _Checked(found, number - broken, broken, older)


Key = tuple[str, int, str]
"""Subject, sequence, id."""


def _check_here(group: Group, due: Due, journal: Path) -> _Checked:
    found: list[Row] = []
    acked, broken = _read_lines(journal, group.name)
    wanted_of_any: set[Key] = set()
    for name, place in group.places.items():
        wanted = [line for line in acked if due.is_due(name, *line[0][:2])]
        wanted_of_any.update(key for key, _ in wanted)
        met = _met(place, due.begin, {key for key, _ in wanted}, with_hash=any(hashed for _, hashed in wanted))
        for key, hashed in wanted:
            if key not in met:
                found.append(_broken_promise(FindingKind.LOST, name, key))
            elif hashed is not None and hashed != met[key]:
                found.append(_broken_promise(FindingKind.ALTERED, name, key))
    return _Checked(found, len(acked), broken, sum(key not in wanted_of_any for key, _ in acked))


def _broken_promise(what: FindingKind, copy: str, key: Key) -> Row:
    subject, sequence, id = key
    return finding_row(what, copy=copy, subject=subject, sequence=sequence, id=id, text=TEXTS[what])


def _read_lines(journal: Path, group: str) -> tuple[list[tuple[Key, str | None]], int]:
    """Return (key, hash) of a group's lines, and the number of lines without a message."""
    found: list[tuple[Key, str | None]] = []
    broken = 0
    paths = sorted(path for path in journal.rglob("*") if path.is_file()) if journal.is_dir() else [journal]
    for path in paths:
        if path != journal and path.name.startswith((".", "_")):  # as Spark does
            continue
        for text in path.read_bytes().splitlines():
            line = _line(text)
            if line is None or line.get("group", group) in (None, group):
                key = tuple((line or {}).get(name) for name in ("subject", "sequence", "id"))
                if list(map(type, key)) != [str, int, str]:
                    broken += bool(text.strip())
                else:
                    found.append((cast("Key", key), (line or {}).get("hash")))
    return found, broken


def _line(text: bytes) -> Row | None:
    try:
        line = json.loads(text)
    except ValueError:
        return None
    return line if isinstance(line, dict) else None


def _met(place: Mapping[str, str], begin: int, wanted: Container[Key], *, with_hash: bool) -> dict[Key, str | None]:
    """Return which wanted messages a copy has, with their hashes."""
    columns = ["subject", "sequence", "id", *(["message"] if with_hash else [])]
    reader = TableReader({**place, "begin": str(begin)}, columns)
    met: dict[Key, str | None] = {}
    for part in reader.partitions():
        for batch in reader.read(part):
            names = (batch.column(name).to_pylist() for name in columns[:3])
            for at, key in enumerate(zip(*names)):
                if key in wanted:
                    message = batch.column("message")[at].as_py() if with_hash else None
                    met[key] = None if message is None else sha256(message).hexdigest()[:HASH_DIGITS]
    return met


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
