"""Shell. The audit of one broker group: freeze how far the copies must agree, read both, apply the rules."""

from __future__ import annotations

import time
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import pairwise
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession, Window
from pyspark.sql import functions as F
from pyspark.storagelevel import StorageLevel

from qmq.audit import rules
from qmq.audit.comparison import compare
from qmq.audit.conservation import STATES
from qmq.audit.copies import CannotRead, Copy, Description, open_copy
from qmq.audit.extents import PIECE_BYTES, split_range
from qmq.audit.history import CONSERVED_KEPT, FINDINGS_KEPT, SHARE, VERDICTS, History, look_back, moment, who
from qmq.audit.kinds import Kind
from qmq.audit.line import AHEAD_MS_MAX, FOREVER_MS
from qmq.audit.naming import name_findings
from qmq.audit.places import check_places
from qmq.audit.progress import CONSERVED
from qmq.audit.schema import BOTH, COPIES, FINDINGS, JOURNAL, MASTER, SLAVE
from qmq.audit.spark import read_copy
from qmq.ledger import Entry, Ledger, Piece, known_from

FINDINGS_MAX = 1000
"""Findings of one kind that are named one by one; all are counted."""
HOURS_MAX = 20_000
"""Counts per subject and hour that are listed: of 100,000 subjects, a week has 17 million for each copy."""

ACCOUNTS_MAX = 5_000
"""Consumer groups whose equation is listed."""

_NO_RANGE = "SELECT '' AS d_copy, 0L AS d_offset, 0L AS d_end WHERE false"
READ = ("records", "messages", "bytes", "due_bytes", "frames")
"""What is counted of a copy; `due_bytes` are those below the high watermark."""

_OF_HISTORY = frozenset({Kind.REWOUND, Kind.REWRITTEN, Kind.UNREAD, Kind.COUNT, Kind.LOST})
"""These hold on both copies alike, and yet what they were found in is not verified."""
Row = dict[str, Any]


@dataclass(slots=True)
class Result:
    """What the audit of one broker group found, and what it read to say so. Offsets below `watermark` were promised."""

    group: str
    places: dict[str, str]
    until_ms: int = FOREVER_MS
    """When the audit began, and a little more: no frame is of a later time."""
    start: int = 0
    begin: int = 0
    """From here on everything is read; before it, what `again` says."""
    again: list[Piece] = field(default_factory=list)
    cuts: list[int] = field(default_factory=list)
    """Where earlier runs ended: what is read in between can be held against what they read."""
    watermark: int = 0
    logs: dict[str, Description] = field(default_factory=dict)
    read: dict[str, Row] = field(default_factory=dict)
    findings: list[Row] = field(default_factory=list)
    found: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    hours: list[Row] = field(default_factory=list)
    conserved: list[Row] = field(default_factory=list)
    epochs: list[str] = field(default_factory=list)
    journal: int | None = None
    unreadable: str | None = None
    history: int | None = None
    """Offset from which on frames differ in their chain, as they follow a difference."""

    def add(self, what: Kind, **fields: Any) -> None:
        """Add a finding that the driver itself made."""
        self.findings.append(dict.fromkeys(FINDINGS.fieldNames()) | {"what": what.value} | fields)
        self.found[what] = self.found.get(what, 0) + 1

    @property
    def status(self) -> int:
        """0 proven equal, 1 findings, 2 could not read."""
        if self.unreadable:
            return 2
        return 1 if self.found else 0


@dataclass(frozen=True, slots=True)
class Group:
    """What to audit: the place of each copy, as options of the data source."""

    name: str
    places: dict[str, dict[str, str]]


def audit_group(
    spark: SparkSession, group: Group, *, journal: Path | None = None, piece_bytes: int = PIECE_BYTES,
    parquet: Path | None = None, ledger: Ledger | None = None, share: int = SHARE,
) -> Result:  # fmt: skip
    """Compare the copies of one broker group. Raises for nothing it meets; `unreadable` says why nothing is proven.

    With a `ledger`, what was verified is looked for, one part in `share` of it is read again, and a line is added.
    """
    result = Result(group.name, {copy: place.get("path") or place["broker"] for copy, place in group.places.items()})
    facts: DataFrame | None = None
    result.until_ms = int(time.time() * 1000) + AHEAD_MS_MAX
    held, entry = ExitStack(), None
    try:
        check_places(group.name, group.places)
        _hold(group, held)
        _freeze(group, result)
        history = _look_back(group, result, ledger, share)
        if _ranges(result):
            facts = rules.measure(_records(spark, group, result, piece_bytes)).persist(StorageLevel.MEMORY_AND_DISK)
            _count(facts, result)
            _judge(spark, group, facts, result, piece_bytes, history, parquet)
            if journal is not None:
                _hold_against(spark, group, facts, result, journal)
        if result.found:
            _check_kept(group, result)
        name_findings(group.name, group.places, result.logs, result.findings)
        _count_repaired(result)
        if parquet is not None and facts is not None:
            _store(spark, facts, result, parquet)
    except CannotRead as error:
        result.unreadable = str(error)
    except Exception as error:
        # Spark wraps what a worker raised, in many classes; all of them mean: not read.
        result.unreadable = _cause(error)
    else:
        if ledger is not None and facts is not None:
            entry = verified(facts, result, history, piece_bytes)
    finally:
        held.close()
        if facts is not None:
            facts.unpersist()
    if ledger is not None:
        ledger.append(_line(result, entry))
    return result


def _hold(group: Group, held: ExitStack) -> None:
    """Keep both copies as they are until `held` is closed.

    The slave is read when the master has been, and one piece after the other. A segment that retention removed
    meanwhile would look as if it had been lost.
    """
    for name in COPIES:
        held.enter_context(closing(open_copy(group.places[name]))).hold()


def _check_kept(group: Group, result: Result) -> None:
    """Raise CannotRead if a copy has no longer what was to be read: what was found may be just that.

    A broker that was restarted does not know who held its log, and of a directory that is in use nobody asks.
    """
    for name in COPIES:
        with closing(open_copy(group.places[name])) as copy:
            start = copy.describe().start
        if start > result.start:
            raise CannotRead(f"the {name} let go of [{result.start}, {start}) while it was read: audit it again")


def _cause(error: Exception) -> str:
    """Return the line that says what happened in a worker, out of Spark's many."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    named = [line for line in lines if line.startswith(("audit.", "qmq.", "OSError", "PermissionError"))]
    return (named or lines or [type(error).__name__])[-1 if named else 0]


def _freeze(group: Group, result: Result) -> None:
    """Ask both copies what they hold, and freeze the high watermark before the ends are read.

    A stated high watermark was true of both disks. So the higher of the two statements is due on both copies, and a
    copy that ends below it has lost something; taking the lower end instead would hide exactly that.
    """
    copies: dict[str, Copy] = {}
    try:
        for name in COPIES:
            copies[name] = open_copy(group.places[name])
        result.watermark = max(copy.describe().high_watermark for copy in copies.values())
        for name in COPIES:
            copies[name].close()
            copies[name] = open_copy(group.places[name])
        result.logs = {name: copy.describe() for name, copy in copies.items()}
    finally:
        for copy in copies.values():
            copy.close()
    logs = result.logs
    result.start = max(log.start for log in logs.values())
    for name, log in logs.items():
        if log.start < result.start:
            kept = f"[{log.start}, {result.start})"
            result.notes.append(f"the {name} keeps {kept}, which the other's retention removed: not compared")
        if log.torn_bytes:
            result.notes.append(f"{log.torn_bytes} bytes behind the {name}'s end at {log.end} are no frame (torn tail)")
        if log.end > result.watermark:
            past = log.end - result.watermark
            result.notes.append(f"the {name} goes on to {log.end}, {past} bytes past the high watermark")


def _look_back(group: Group, result: Result, ledger: Ledger | None, share: int) -> History:
    """Decide what is read: all, or what is new since a point that both copies still have, and a part of the old."""
    history = History(known_from([]), result.start)
    if ledger is not None:
        history = look_back(ledger.known(group.name), group.places, result.logs, share=share)
    if history.broken is not None:
        kind, copy, text = history.broken
        result.cuts = history.cuts()
        result.add(kind, copy=copy, text=text, offset=min(log.end for log in result.logs.values()))
    if history.anchor is not None:  # it was promised, though a log that is at rest does not state it
        result.watermark = max(result.watermark, history.anchor.verified)
    result.begin, result.again = history.begin, history.again
    if result.watermark <= result.start and not result.found:
        raise CannotRead(f"nothing lies below the high watermark {result.watermark}: nothing is proven")
    return history


def _ranges(result: Result) -> str:
    """Return what is read of both copies, cut at the high watermark, so that no piece lies on both sides of it."""
    end = max(log.end for log in result.logs.values())
    parts = [(piece.begin, piece.end) for piece in result.again]
    cuts = [result.begin, *(cut for cut in result.cuts if result.begin < cut < result.watermark), result.watermark]
    parts += [*pairwise(cuts), (result.watermark, end)]
    return ",".join(f"{begin}-{until}" for begin, until in parts if begin < until)


def _both(spark: SparkSession, group: Group, **options: object) -> DataFrame:
    """Read both copies into one DataFrame with a column `copy`."""
    sides = [read_copy(spark, group.places[name], **options).withColumn("copy", F.lit(name)) for name in COPIES]
    return reduce(DataFrame.unionByName, sides)


def _records(spark: SparkSession, group: Group, result: Result, piece_bytes: int) -> DataFrame:
    """Read every byte of both copies; what may be stored once, of the master's: what only one has differs anyway."""
    options = {"rows": "records", "ranges": _ranges(result), "piece_bytes": piece_bytes, "until_ms": result.until_ms}
    master, slave = (
        read_copy(spark, group.places[name], **options, stored=str(name == MASTER).lower()) for name in COPIES
    )
    return master.withColumn("copy", F.lit(MASTER)).unionByName(slave.withColumn("copy", F.lit(SLAVE)))


def _count(facts: DataFrame, result: Result) -> None:
    """Count what was read; an audit that read nothing fails."""
    sums = facts.groupBy("copy").agg(
        F.sum("records").alias("records"), F.sum("messages").alias("messages"), F.sum("bytes").alias("bytes"),
        F.sum(F.when(F.col("piece").between(result.begin, result.watermark - 1), F.col("bytes"))).alias("due_bytes"),
        F.sum("frames").alias("frames"),
    )  # fmt: skip
    read = {row["copy"]: {key: row[key] or 0 for key in READ} for row in sums.collect()}
    result.read = {name: read.get(name, dict.fromkeys(READ, 0)) for name in COPIES}
    if not any(side["frames"] for side in result.read.values()) and not result.found and result.begin == result.start:
        raise CannotRead("not one frame was read: nothing is proven")
    epochs = facts.where("kind = 'epoch'").groupBy("first", "last").agg(F.min("offset").alias("offset"))
    result.epochs = [f"{row['first']}.{row['last']} from {row['offset']}" for row in epochs.orderBy("offset").collect()]
    hours = rules.hours(facts).withColumn("hour", F.date_format("hour", "yyyy-MM-dd HH:00"))
    first = hours.orderBy("subject", "hour", "copy").limit(HOURS_MAX + 1).collect()
    result.hours = [row.asDict() for row in first[:HOURS_MAX]]
    if len(first) > HOURS_MAX:
        result.notes.append(f"only the first {HOURS_MAX} counts per subject and hour are listed; --parquet keeps all")


def _judge(
    spark: SparkSession,
    group: Group,
    facts: DataFrame,
    result: Result,
    piece_bytes: int,
    history: History,
    parquet: Path | None,
) -> None:
    differing = {row["piece"] for row in rules.unequal(facts).collect()}
    pieces = [(begin, until) for begin, until in _pieces(result, piece_bytes) if begin in differing]
    begins = {begin for begin, until in _reads(result)} - {until for begin, until in _reads(result)}
    damaged = _damaged(spark, rules.broken(facts, result.until_ms, begins), result)
    ends = None
    if history.anchor is not None and result.begin == history.anchor.verified:
        ends = spark.createDataFrame(list(history.anchor.ends.items()), "subject string, known long")
    new = facts.where(F.col("piece") >= result.begin)
    judged = rules.progress(new, damaged, result.begin).persist(StorageLevel.MEMORY_AND_DISK)
    _take(rules.within_copies(new, damaged, result.begin, ends), result)
    _take(judged.where(F.col("what") != CONSERVED), result)
    _account(rules.conserved(judged), result)
    if parquet is not None:
        rules.conserved(judged).write.mode("overwrite").parquet(str(parquet / result.group / "conserved"))
    judged.unpersist()
    _hold_against_before(facts, differing, result, history)
    if pieces:
        _compare(spark, group, pieces, damaged, result, piece_bytes)
    _check_all_was_read(result)
    for row in result.findings:  # what was judged on the master's copy alone holds for both where they are equal
        if row["what"] in (Kind.BATCH_TWICE, Kind.ID_TWICE):
            is_apart = any(begin <= row["offset"] < until for begin, until in pieces)
            row["copy"] = MASTER if is_apart else BOTH


def _compare(
    spark: SparkSession, group: Group, pieces: list[tuple[int, int]], damaged: DataFrame, result: Result,
    piece_bytes: int,
) -> None:  # fmt: skip
    """Read the pieces that differ again, frame by frame, and take what differs in them."""
    text = ",".join(f"{begin}-{until}" for begin, until in pieces)
    master, slave = (
        read_copy(spark, group.places[name], rows="frames", ranges=text, piece_bytes=piece_bytes)
        .where("kind is not null").persist(StorageLevel.MEMORY_AND_DISK)
        for name in COPIES
    )  # fmt: skip
    _take_differences(compare(master, slave, damaged, result.watermark), result)
    master.unpersist()
    slave.unpersist()
    _explain(pieces, result)


def _check_all_was_read(result: Result) -> None:
    """Make a finding of a copy of which not every byte was read, if nothing else says so: both may lack the same."""
    if result.found:
        return
    due = result.watermark - result.begin
    for name, read in result.read.items():
        if read["due_bytes"] != due:
            text = f"{read['due_bytes']} bytes of the {due} that are due were read, and no damage was met"
            result.add(Kind.UNREAD, copy=name, text=text)


def _damaged(spark: SparkSession, broken: DataFrame, result: Result) -> DataFrame:
    """Take the broken ranges as findings, and return them as a table that the other rules join.

    It is made on the driver: without damage, which is every night but one, Spark then drops those joins.
    """
    ranges = [(row["copy"], row["offset"], row["end"]) for row in _take(broken, result) if row["what"] == Kind.DAMAGED]
    ranges = [(copy, *span) for name, *span in ranges for copy in (COPIES if name == BOTH else (name,))]
    schema = "d_copy string, d_offset long, d_end long"
    return spark.createDataFrame(ranges, schema) if ranges else spark.sql(_NO_RANGE)


def _explain(pieces: list[tuple[int, int]], result: Result) -> None:
    """Make a finding of every piece whose hashes differ though nothing above says why: no difference is dropped."""
    changed = result.history if result.history is not None else result.watermark
    spans = [(row["offset"], row["end"] or row["offset"] + 1) for row in result.findings if row["offset"] is not None]
    for begin, until in pieces:
        if begin >= min(changed, result.watermark) or any(at < until and end > begin for at, end in spans):
            continue
        text = "the hashes of the records differ, the frames' headers do not"
        result.add(Kind.DIFFERENT, copy=SLAVE, text=text, offset=begin, end=until)


def _account(conserved: DataFrame, result: Result) -> None:
    """Take the equation of each consumer group, over all hours, as the master's copy has it."""
    sums = [F.sum(name).alias(name) for name in ("stored", *STATES)]
    rows = conserved.where(F.col("copy") == MASTER).groupBy("subject", "consumer_group")
    listed = (
        rows.agg(*sums, F.max("nacked").alias("nacked")).orderBy("subject", "consumer_group").limit(ACCOUNTS_MAX + 1)
    )
    result.conserved = [row.asDict() for row in listed.collect()]
    if len(result.conserved) > ACCOUNTS_MAX:
        del result.conserved[ACCOUNTS_MAX:]
        result.notes.append(f"only the first {ACCOUNTS_MAX} consumer groups are accounted for here; --parquet has all")


def _hold_against_before(facts: DataFrame, differing: set[int], result: Result, history: History) -> None:
    """Make findings of what both copies have alike, and not as it was before: the first range that was exchanged,
    subjects that end lower, frames that are gone although no retention frame gave them up."""
    rows = rules.digests(facts).where((F.col("copy") == MASTER) & (F.col("piece") < result.watermark)).collect()
    read = {row["piece"]: (row["bytes"], row["digest"]) for row in rows}
    changed = [
        piece for piece in history.exchanged(read)
        if not any(piece.begin <= begin < piece.end for begin in differing) and piece.end <= result.watermark
    ]  # fmt: skip
    before = history.known.anchor
    if before is not None and result.begin == result.start:
        now = {row["subject"]: row["known"] for row in rules.ends(facts).collect()}
        for subject, end in before.ends.items():
            if now.get(subject, end) < end:
                text = f"it ends at sequence {now[subject]}; the run of {before.run} found it at {end}"
                result.add(Kind.REWOUND, copy=BOTH, text=text, subject=subject, sequence=now[subject])
    kept_from = facts.where("kind = 'retention'").agg(F.max("first")).collect()[0][0]
    oldest = min(log.start for log in result.logs.values())
    if kept_from is not None and result.begin == result.start and kept_from < oldest:
        text = f"both logs begin at {oldest}, and frames are kept from {kept_from} on"
        result.add(Kind.RETENTION, copy=BOTH, text=text, offset=oldest)
    if changed:
        text = f"{len(changed)} ranges, of {sum(p.bytes for p in changed)} bytes, are not what was read before"
        result.add(Kind.REWRITTEN, copy=BOTH, text=text, offset=changed[0].begin, end=changed[0].end)


def _reads(result: Result) -> list[tuple[int, int]]:
    parts = [part.split("-") for part in _ranges(result).split(",") if part]
    return [(int(begin), int(until)) for begin, until in parts]


def _pieces(result: Result, piece_bytes: int) -> list[tuple[int, int]]:
    return [piece for begin, until in _reads(result) for piece in split_range(begin, until, piece_bytes)]


def _take(found: DataFrame, result: Result) -> list[Row]:
    """Count the findings per kind, keep the first ones of each, and return these. Both copies may be wrong alike."""
    alike = [name for name in FINDINGS.fieldNames() if name != "copy"]
    copy = F.when(F.countDistinct("copy") == 2, BOTH).otherwise(F.min("copy")).alias("copy")
    found = found.groupBy(*alike).agg(copy)
    order = Window.partitionBy("what").orderBy("offset", "sequence", "copy")
    size = F.count("*").over(Window.partitionBy("what"))
    first = found.select("*", F.row_number().over(order).alias("nth"), size.alias("of")).where(f"nth <= {FINDINGS_MAX}")
    rows = [row.asDict() for row in first.collect()]
    for row in rows:
        if row.pop("nth") == 1:
            result.found[row["what"]] = result.found.get(row["what"], 0) + row["of"]
        del row["of"]
    result.findings += rows
    return rows


def _take_differences(found: DataFrame, result: Result) -> None:
    """Take what differs below the high watermark as findings, and the rest as a note: it was promised to nobody."""
    found = found.persist(StorageLevel.MEMORY_AND_DISK)
    promised = F.col("offset") < result.watermark
    _take(found.where(promised & (F.col("what") != Kind.HISTORY.value)), result)
    history = found.where(promised & (F.col("what") == Kind.HISTORY.value))
    ((after, first),) = history.agg(F.count("*"), F.min("offset")).collect()
    if after and not any(row["offset"] < first for row in result.findings):
        _take(history.where(F.col("offset") == F.lit(first)), result)
    result.history = first
    if after:
        result.notes.append(f"{after} frames from {first} on differ in their chain alone, as they follow a difference")
    later = found.where(~promised).agg(F.sum("frames")).collect()[0][0]
    if later:
        result.notes.append(f"{later} frames past the high watermark are not the same on both copies")
    found.unpersist()


def _count_repaired(result: Result) -> None:
    """Count as repaired what turned out to be, when it was read again."""
    if repaired := sum(row["what"] == Kind.REPAIRED for row in result.findings):
        damaged = result.found.pop(Kind.DAMAGED) - repaired
        result.found |= {Kind.REPAIRED: repaired} | ({Kind.DAMAGED: damaged} if damaged else {})


def _hold_against(spark: SparkSession, group: Group, facts: DataFrame, result: Result, journal: Path) -> None:
    """Look for every acknowledged message of the journal in both copies, to the very end of each."""
    if not journal.is_file():
        raise CannotRead(f"journal {journal}: there is no such file")
    acked = spark.read.schema(JOURNAL).json(str(journal))
    acked = acked.where(F.col("group").isNull() | (F.col("group") == group.name))
    acked = acked.select("subject", "sequence", "id").persist(StorageLevel.MEMORY_AND_DISK)
    result.journal = acked.count()
    broken = acked.where("subject is null or sequence is null or id is null").count()
    if broken:
        raise CannotRead(f"journal {journal}: {broken} lines lack subject, sequence or id")
    messages = _both(spark, group, rows="messages", columns="subject,sequence,id")
    due = rules.due_messages(acked, facts, result.start)
    _take(rules.lost(due, messages), result)
    if older := acked.join(due, ["subject", "sequence", "id"], "left_anti").count():
        result.notes.append(f"{older} of the journal's messages may be older than what the copies keep: not looked for")
    acked.unpersist()


def verified(facts: DataFrame, result: Result, history: History, piece_bytes: int) -> Entry | None:
    """Return what the next run may build on; None if there is something that one copy alone has wrong, or is not as it
    was: what was verified before stays what is verified."""
    if any(row["copy"] != BOTH or row["what"] in _OF_HISTORY for row in result.findings):
        return None
    new = (F.col("piece") >= result.begin) & (F.col("piece") < result.watermark)
    last = facts.where(new & (F.col("kind") == "piece") & (F.col("end") == result.watermark)).limit(1).collect()
    anchor = history.anchor
    ends = dict(anchor.ends) if anchor is not None and anchor.verified == result.begin else {}
    for row in rules.ends(facts.where(new)).collect():
        ends[row["subject"]] = max(row["known"], ends.get(row["subject"], 0))
    rows = rules.digests(facts).where((F.col("copy") == MASTER) & (F.col("piece") < result.watermark)).collect()
    read = {row["piece"]: row for row in rows}
    pieces = [
        Piece(begin, until, read[begin]["bytes"], f"{read[begin]['digest'] & (1 << 64) - 1:016x}")
        for begin, until in _pieces(result, piece_bytes) if begin in read and until <= result.watermark
        and begin >= result.begin
    ]  # fmt: skip
    if last:
        chain, frame = last[0]["chain"], last[0]["size"]
    elif anchor is not None:
        chain, frame = anchor.chain, anchor.frame
    else:
        return None
    return Entry(
        "", 0, result.group, "", start=result.start, begin=result.begin, verified=result.watermark, chain=chain,
        frame=frame, ends=ends, pieces=sorted([*result.again, *pieces]),
    )  # fmt: skip


def _line(result: Result, entry: Entry | None) -> Entry:
    """Return the ledger's line of this run."""
    at_ms = result.until_ms - AHEAD_MS_MAX
    kept = [{name: value for name, value in row.items() if value is not None} for row in result.findings]
    entry = entry or Entry("", 0, result.group, "", start=result.start, begin=result.begin)
    return replace(
        entry, run=moment(at_ms), at_ms=at_ms, verdict=VERDICTS[result.status], why=result.unreadable or "",
        found=dict(result.found), findings=kept[:FINDINGS_KEPT], places=result.places, by=who(),
        read={name: read["bytes"] for name, read in result.read.items()}, conserved=result.conserved[:CONSERVED_KEPT],
    )  # fmt: skip


def _store(spark: SparkSession, facts: DataFrame, result: Result, parquet: Path) -> None:
    """Keep counts per subject and hour, and findings, for whoever asks later."""
    folder = parquet / result.group
    rules.hours(facts).write.mode("overwrite").parquet(str(folder / "hours"))
    rows = [{name: row.get(name) for name in FINDINGS.fieldNames()} for row in result.findings]
    spark.createDataFrame(rows, FINDINGS).write.mode("overwrite").parquet(str(folder / "findings"))
