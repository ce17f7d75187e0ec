"""Shell. The audit of one broker group: freeze how far the copies must agree, read both, apply the rules."""

from __future__ import annotations

from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession, Window
from pyspark.sql import functions as F
from pyspark.storagelevel import StorageLevel

from audit import rules
from audit.copies import CannotRead, Copy, Description, is_same_place, open_copy
from audit.schema import COPIES, FINDINGS, JOURNAL, MASTER, SLAVE
from audit.source import PIECE_BYTES, split_range
from audit.spark import read_copy
from audit.walk import Walk
from qmq.codec import decode_envelope, split_batch
from qmq.errors import QmqError
from qmq.log.frame import Frame, FrameKind

FINDINGS_MAX = 1000
"""Findings of one kind that are named one by one; all are counted."""
HOURS_MAX = 20_000
"""Counts per subject and hour that are listed: of 100,000 subjects, a week has 17 million for each copy."""
BYTES_NAMED_MAX = 100
"""Findings for which both copies are read again to name the first byte that differs."""

_NO_RANGE = "SELECT '' AS d_copy, 0L AS d_offset, 0L AS d_end WHERE false"
READ = ("records", "messages", "bytes", "due_bytes", "frames")
"""What is counted of a copy; `due_bytes` are those below the high watermark."""

Row = dict[str, Any]


@dataclass(slots=True)
class Result:
    """What the audit of one broker group found, and what it read to say so. Offsets below `watermark` were promised."""

    group: str
    places: dict[str, str]
    start: int = 0
    watermark: int = 0
    logs: dict[str, Description] = field(default_factory=dict)
    read: dict[str, Row] = field(default_factory=dict)
    findings: list[Row] = field(default_factory=list)
    found: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    hours: list[Row] = field(default_factory=list)
    epochs: list[str] = field(default_factory=list)
    journal: int | None = None
    unreadable: str | None = None
    history: int | None = None
    """Offset from which on frames differ in their chain, as they follow a difference."""

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
    parquet: Path | None = None,
) -> Result:  # fmt: skip
    """Compare the copies of one broker group. Raises for nothing it meets; `unreadable` says why nothing is proven."""
    result = Result(group.name, {copy: place.get("path") or place["broker"] for copy, place in group.places.items()})
    facts: DataFrame | None = None
    held = ExitStack()
    try:
        _check_places(group)
        _hold(group, held)
        _freeze(group, result)
        facts = rules.measure(_records(spark, group, result, piece_bytes)).persist(StorageLevel.MEMORY_AND_DISK)
        _count(facts, result)
        _judge(spark, group, facts, result, piece_bytes)
        if journal is not None:
            _hold_against(spark, group, facts, result, journal)
        if result.found:
            _check_kept(group, result)
        _name_bytes(group, result)
        if parquet is not None:
            _store(spark, facts, result, parquet)
    except CannotRead as error:
        result.unreadable = str(error)
    except Exception as error:
        # Spark wraps what a worker raised, in many classes; all of them mean: not read.
        result.unreadable = _cause(error)
    finally:
        held.close()
        if facts is not None:
            facts.unpersist()
    return result


def _check_places(group: Group) -> None:
    """Raise CannotRead unless there are two copies to compare: one proves nothing."""
    if missing := [copy for copy in COPIES if copy not in group.places]:
        raise CannotRead(f"broker group {group.name} has no {' and no '.join(missing)}")
    if is_same_place(*group.places.values()):
        raise CannotRead(f"master and slave of {group.name} are the same place: one copy proves nothing")


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
    if result.watermark <= result.start:
        raise CannotRead(f"nothing lies below the high watermark {result.watermark}: nothing is proven")


def _ranges(result: Result) -> str:
    """Return what is read of both copies, cut at the high watermark, so that no piece lies on both sides of it."""
    end = max(log.end for log in result.logs.values())
    parts = [(result.start, result.watermark), (result.watermark, end)]
    return ",".join(f"{begin}-{until}" for begin, until in parts if begin < until)


def _both(spark: SparkSession, group: Group, **options: object) -> DataFrame:
    """Read both copies into one DataFrame with a column `copy`."""
    sides = [read_copy(spark, group.places[name], **options).withColumn("copy", F.lit(name)) for name in COPIES]
    return reduce(DataFrame.unionByName, sides)


def _records(spark: SparkSession, group: Group, result: Result, piece_bytes: int) -> DataFrame:
    return _both(spark, group, rows="records", ranges=_ranges(result), piece_bytes=piece_bytes)


def _count(facts: DataFrame, result: Result) -> None:
    """Count what was read; an audit that read nothing fails."""
    sums = facts.groupBy("copy").agg(
        F.sum("records").alias("records"), F.sum("messages").alias("messages"), F.sum("bytes").alias("bytes"),
        F.sum(F.when(F.col("piece") < result.watermark, F.col("bytes"))).alias("due_bytes"),
        F.sum("frames").alias("frames"),
    )  # fmt: skip
    read = {row["copy"]: {key: row[key] or 0 for key in READ} for row in sums.collect()}
    result.read = {name: read.get(name, dict.fromkeys(READ, 0)) for name in COPIES}
    if not any(side["frames"] for side in result.read.values()):
        raise CannotRead("not one frame was read: nothing is proven")
    epochs = facts.where("kind = 'epoch'").groupBy("first", "last").agg(F.min("offset").alias("offset"))
    result.epochs = [f"{row['first']}.{row['last']} from {row['offset']}" for row in epochs.orderBy("offset").collect()]
    hours = rules.hours(facts).withColumn("hour", F.date_format("hour", "yyyy-MM-dd HH:00"))
    first = hours.orderBy("subject", "hour", "copy").limit(HOURS_MAX + 1).collect()
    result.hours = [row.asDict() for row in first[:HOURS_MAX]]
    if len(first) > HOURS_MAX:
        result.notes.append(f"only the first {HOURS_MAX} counts per subject and hour are listed; --parquet keeps all")


def _judge(spark: SparkSession, group: Group, facts: DataFrame, result: Result, piece_bytes: int) -> None:
    damaged = _damaged(spark, rules.broken(facts), result)
    _take(rules.within_copies(facts, damaged, result.start), result)
    if differing := {row["piece"] for row in rules.unequal(facts).collect()}:
        _compare(spark, group, differing, damaged, result, piece_bytes)
    _check_all_was_read(result)


def _compare(
    spark: SparkSession, group: Group, differing: set[int], damaged: DataFrame, result: Result, piece_bytes: int
) -> None:
    """Read the pieces that differ again, frame by frame, and take what differs in them."""
    pieces = [(begin, until) for begin, until in _pieces(result, piece_bytes) if begin in differing]
    text = ",".join(f"{begin}-{until}" for begin, until in pieces)
    master, slave = (
        read_copy(spark, group.places[name], rows="frames", ranges=text, piece_bytes=piece_bytes) for name in COPIES
    )
    _take_differences(rules.compare(master, slave, damaged), result)
    _explain(pieces, result)


def _check_all_was_read(result: Result) -> None:
    """Make a finding of a copy of which not every byte was read, if nothing else says so: both may lack the same."""
    if result.found:
        return
    due = result.watermark - result.start
    for name, read in result.read.items():
        if read["due_bytes"] != due:
            text = f"{read['due_bytes']} bytes of the {due} that are due were read, and no damage was met"
            row = dict.fromkeys(FINDINGS.fieldNames()) | {"what": "unread", "copy": name, "text": text}
            result.findings.append(row)
            result.found["unread"] = result.found.get("unread", 0) + 1


def _damaged(spark: SparkSession, broken: DataFrame, result: Result) -> DataFrame:
    """Take the broken ranges as findings, and return them as a table that the other rules join.

    It is made on the driver: without damage, which is every night but one, Spark then drops those joins.
    """
    ranges = [(row["copy"], row["offset"], row["end"]) for row in _take(broken, result) if row["what"] == "damaged"]
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
        row = dict.fromkeys(FINDINGS.fieldNames()) | {"what": "different", "copy": SLAVE, "text": text}
        result.findings.append(row | {"offset": begin, "end": until})
        result.found["different"] = result.found.get("different", 0) + 1


def _pieces(result: Result, piece_bytes: int) -> list[tuple[int, int]]:
    parts = [part.split("-") for part in _ranges(result).split(",")]
    return [piece for begin, until in parts for piece in split_range(int(begin), int(until), piece_bytes)]


def _take(found: DataFrame, result: Result) -> list[Row]:
    """Count the findings per kind, keep the first ones of each, and return these."""
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
    _take(found.where(promised & (F.col("what") != "history")), result)
    history = found.where(promised & (F.col("what") == "history"))
    ((after, first),) = history.agg(F.count("*"), F.min("offset")).collect()
    if after and not any(row["offset"] < first for row in result.findings):
        _take(history.where(F.col("offset") == F.lit(first)), result)
    result.history = first
    if after:
        result.notes.append(f"{after} frames from {first} on differ in their chain alone, as they follow a difference")
    later = found.where(~promised).count()
    if later:
        result.notes.append(f"{later} frames past the high watermark are not the same on both copies")
    found.unpersist()


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


def _name_bytes(group: Group, result: Result) -> None:
    """Add to findings, where both copies have bytes to show, the first that differs and the message it is in."""
    result.findings.sort(key=lambda row: (row["offset"] is None, row["offset"] or 0, row["what"], row["copy"]))
    named = [row for row in result.findings if row["offset"] is not None][:BYTES_NAMED_MAX]
    with closing(open_copy(group.places[MASTER])) as master, closing(open_copy(group.places[SLAVE])) as slave:
        for row in named:
            end = row["end"] or row["offset"] + 1
            byte = None
            if row["what"] in ("different", "damaged", "chain", "reordered"):
                byte = _first_difference(master, slave, row["offset"], end)
            if byte is not None:
                row["text"] += f"; the copies first differ at byte {byte}"
            row["byte"] = byte
            _name_message(master, slave, row, byte)


def _first_difference(master: Copy, slave: Copy, offset: int, end: int) -> int | None:
    """Return the offset of the first byte of `[offset, end)` that the copies do not share."""
    try:
        ours, theirs = (copy.window(offset, end - offset)[: end - offset] for copy in (master, slave))
    except (OSError, CannotRead):
        return None
    if ours == theirs or not ours or not theirs:
        return None
    common = min(len(ours), len(theirs))
    return offset + next((at for at in range(common) if ours[at] != theirs[at]), common)


def _name_message(master: Copy, slave: Copy, row: Row, byte: int | None) -> None:
    """Fill in subject, sequence and message id of the frame at the finding, from a copy in which it is whole."""
    own = {"missing": MASTER, "extra": SLAVE}.get(row["what"], row["copy"])
    for copy in (slave, master) if own == SLAVE else (master, slave):
        try:
            window = next(Walk(copy, row["offset"], row["offset"] + 1, is_start=True).windows(), None)
        except (OSError, CannotRead):
            continue
        if window is None or not window.frames or window.damaged:
            continue
        frame = window.frames[0]
        row["subject"] = row["subject"] or frame.subject or None
        if frame.kind == FrameKind.MESSAGES:
            row["id"] = None
            with suppress(QmqError):  # what is wrong with the frame may be that it holds no batch, or no message there
                messages = list(split_batch(window.body(frame), frame.count))
                position = _position(messages, _message_at(frame, byte))
                row["sequence"] = frame.first_sequence + position
                row["id"] = decode_envelope(bytes(messages[position])).id
        return


def _message_at(frame: Frame, byte: int | None) -> int:
    """Return where in the data of the batch a byte of the log lies; the first message stands for the header."""
    if byte is None:
        return 0
    return max(0, byte - frame.offset - frame.body_at - 4 * (frame.count + 1))


def _position(messages: list[memoryview], at: int) -> int:
    for position, message in enumerate(messages):
        at -= len(message)
        if at < 0:
            return position
    return len(messages) - 1


def _store(spark: SparkSession, facts: DataFrame, result: Result, parquet: Path) -> None:
    """Keep counts per subject and hour, and findings, for whoever asks later."""
    folder = parquet / result.group
    rules.hours(facts).write.mode("overwrite").parquet(str(folder / "hours"))
    rows = [{name: row.get(name) for name in FINDINGS.fieldNames()} for row in result.findings]
    spark.createDataFrame(rows, FINDINGS).write.mode("overwrite").parquet(str(folder / "findings"))
