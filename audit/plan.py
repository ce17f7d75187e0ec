"""Shell. One Spark plan for all broker groups: each piece is read once, its facts are sorted, and judged.

    facts    job: number of the broker group, key: names the judge, piece: offset where it begins, copy: its name, or
             empty for all copies, payload: a pickled object
    judged   the same job and copy; kind and payload: an `audit.findings.JudgeRow` as JSON; listed: for the driver

Message bytes stay where they are read. Spark shuffles a few rows per piece and subject, a hash per message, and the
pulls and acks. It joins and compiles nothing: the plan is one sort with two functions of ours around it.
"""

from __future__ import annotations

import json
import pickle
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from qmq.audit.consumption import CONSERVED
from qmq.audit.copies import CannotRead, Copy, open_copy
from qmq.audit.dead_letters import check_dead_letters
from qmq.audit.delays import BatchJudge, DelayJudge, spread_batches, spread_delayed
from qmq.audit.derived import DerivedFilesJudge, check_segment
from qmq.audit.facts import ALL, PieceFacts, Reading
from qmq.audit.findings import FINDING, FINDINGS_MAX, HOUR, MORE, UNREAD, Judge, JudgeRow, finding
from qmq.audit.rules import DuplicateJudge, JudgePerCopy, LogJudge, PassOn, SubjectJudge, spread_stored
from qmq.log.frame import Frame

HOURS_MAX = 20_000
"""Listed counts per subject and hour: with 100,000 subjects, a week has 17 million per copy."""
BUCKET_BYTES = 2 << 30
"""Log bytes per task that compares ids: messages of 1 KiB take 40 MB of memory, the smallest ones 300."""
ROWS_MAX = 10_000

GROUP, PROBLEM, DERIVED, LETTERS, BATCHES = "group", "unread", "derived", "letters", "batches"
SUBJECT, STORED, DELAYED = "subject:", "stored:", "delayed:"
"""Keys, or their prefixes."""

_FACTS = "job int, key string, piece long, copy string, payload binary"
_FACT_ROWS = pa.schema(
    [("job", pa.int32()), ("key", pa.string()), ("piece", pa.int64()), ("copy", pa.string()), ("payload", pa.binary())]
)
_JUDGED = "job int, copy string, kind string, payload string, listed boolean"
_JUDGED_ROWS = pa.schema(
    [
        ("job", pa.int32()),
        ("copy", pa.string()),
        ("kind", pa.string()),
        ("payload", pa.string()),
        ("listed", pa.bool_()),
    ]
)

Task = tuple[int, int, int | None]
"""(job, begin, end) of a piece; (job, base, None) for the files beside a segment."""


@dataclass(frozen=True, slots=True)
class Job:
    """Reading and judging of one broker group. `begins`: offsets where reading begins after unread bytes."""

    places: Mapping[str, Mapping[str, str]]
    reading: Reading
    pieces: Sequence[tuple[int, int]]
    begins: frozenset[int]
    watermark: int
    ends: Mapping[str, int] | None = None
    """Verified end of each subject at `reading.begin`; missing subjects did not exist."""
    before: Frame | None = None
    """The verified frame that ends there."""
    kept: int | None = None
    """First offset kept there, by the retention frames before it."""
    bases: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Offsets of each copy's segments, up to the watermark."""
    segments: Sequence[int] = ()
    """Segments with index and snapshot to check."""

    @property
    def buckets(self) -> int:
        return sum(end - begin for begin, end in self.pieces) // BUCKET_BYTES + 1


def judged(spark: SparkSession, jobs: Sequence[Job], piece_bytes: int) -> DataFrame:
    """Return the judges' rows of all broker groups; see the module's docstring."""
    tasks = tasks_of(jobs, piece_bytes)
    parts = int(str(spark.conf.get("spark.sql.shuffle.partitions")))
    facts = spark.range(0, len(tasks), 1, len(tasks)).mapInArrow(partial(_read, tuple(jobs), tasks), _FACTS)
    ordered = facts.repartition(parts, "job", "key").sortWithinPartitions("job", "key", "piece", "copy")
    return ordered.mapInArrow(partial(_judge, tuple(jobs)), _JUDGED)


def tasks_of(jobs: Sequence[Job], piece_bytes: int) -> list[list[Task]]:
    """Return the pieces and segments of each Spark task."""
    tasks: list[list[Task]] = [[(number, base, None)] for number, job in enumerate(jobs) for base in job.segments]
    return [*tasks, *_tasks(jobs, piece_bytes)]


def _tasks(jobs: Sequence[Job], piece_bytes: int) -> Iterator[list[Task]]:
    """Yield pieces per task. Small pieces share a task, which costs more than they do."""
    task: list[Task] = []
    size = 0
    for number, job in enumerate(jobs):
        for begin, end in job.pieces:
            task.append((number, begin, end))
            size += end - begin
            if size >= piece_bytes:
                yield task
                task, size = [], 0
    if task:
        yield task


def _read(jobs: Sequence[Job], tasks: list[list[Task]], batches: Iterable[Any]) -> Iterator[Any]:
    for batch in batches:
        for number in batch.column(0).to_pylist():
            for job, begin, end in tasks[number]:
                rows = _rows_of(jobs[job], begin, end)
                packed = ((job, key, begin, copy, pickle.dumps(payload, 5)) for key, copy, payload in rows)
                columns = list(zip(*packed)) or [()] * len(_FACT_ROWS)
                arrays = [pa.array(column, field.type) for column, field in zip(columns, _FACT_ROWS)]
                yield pa.RecordBatch.from_arrays(arrays, schema=_FACT_ROWS)


def _rows_of(job: Job, begin: int, end: int | None) -> list[tuple[str, str, Any]]:
    """Return (key, copy, facts) of a task. An error becomes a fact of this broker group; the others are still
    judged."""
    try:
        return list(_derived_of(job, begin) if end is None else _facts_of(job, begin, end))
    except Exception as error:
        return [(PROBLEM, ALL, JudgeRow(UNREAD, {"text": _reason(error, f"read at {begin}")}))]


def _reason(error: Exception, what: str) -> str:
    return str(error) if isinstance(error, CannotRead) else f"it could not be {what}: {type(error).__name__}: {error}"


def _facts_of(job: Job, begin: int, end: int) -> Iterator[tuple[str, str, Any]]:
    """Yield (key, copy, facts) of one piece."""
    with ExitStack() as stack:
        copies = {name: stack.enter_context(closing(open_copy(place, limit=end))) for name, place in job.places.items()}
        found = job.reading.read(copies, begin, end)
        if begin >= job.reading.begin:
            yield from _dead_letters_of(job, copies, found)
    for copy, facts in found.items():
        for bucket, stored in spread_stored(facts, job.buckets):
            yield f"{STORED}{bucket}", copy, stored
        yield GROUP, copy, replace(facts, apart=copy != ALL, subjects={}, delayed=[], stored=[])
        if begin >= job.reading.begin:
            for subject, facts_of_subject in facts.subjects.items():
                yield f"{SUBJECT}{subject}", copy, facts_of_subject
            for bucket, delayed in spread_delayed(facts.delayed, job.buckets):
                yield f"{DELAYED}{bucket}", copy, delayed
            if batches := spread_batches(facts.delayed):
                yield BATCHES, copy, batches


def _dead_letters_of(
    job: Job, copies: Mapping[str, Copy], found: Mapping[str, PieceFacts]
) -> Iterator[tuple[str, str, Any]]:
    """Yield problems of one piece's dead letters, as `_facts_of`, for each copy that has them."""
    for copy, facts in found.items():
        if letters := facts.letters():
            for name in copies if copy == ALL else (copy,):
                for wrong in check_dead_letters(copies[name], job.bases[name], letters):
                    yield LETTERS, name, finding(wrong.pop("what"), wrong.pop("text"), **wrong)


def _derived_of(job: Job, base: int) -> Iterator[tuple[str, str, Any]]:
    """Yield problems of the files beside one segment, as `_facts_of`."""
    with ExitStack() as stack:
        copies = {name: stack.enter_context(closing(open_copy(place))) for name, place in job.places.items()}
        for name, wrong in check_segment(copies, job.bases, base):
            yield DERIVED, name, wrong


def _judge_of(job: Job, key: str) -> Judge:
    if key == GROUP:
        return LogJudge(job.reading.until_ms, job.begins, job.reading.begin, before=job.before, kept=job.kept)
    if key in (PROBLEM, LETTERS):
        return PassOn()
    if key == DERIVED:
        return DerivedFilesJudge()
    if key == BATCHES:
        return BatchJudge(is_whole=job.reading.begin == 0)
    if key.startswith(STORED):
        return DuplicateJudge()
    if key.startswith(DELAYED):
        return DelayJudge()
    subject = key.removeprefix(SUBJECT)
    known = None if job.ends is None else job.ends.get(subject, 0)
    return SubjectJudge(subject, job.reading.begin, known, job.watermark)


def _judge(jobs: Sequence[Job], batches: Iterable[Any]) -> Iterator[Any]:
    listing = _Listing()
    judge: _KeyJudge | None = None
    for batch in batches:
        numbers, keys, pieces, copies = (batch.column(column).to_pylist() for column in range(4))
        for place, here in enumerate(zip(numbers, keys)):
            if judge is None or here != judge.at:
                if judge is not None:
                    judge.finish()
                judge = _KeyJudge(here, jobs[here[0]], listing)
            judge.take(copies[place], pieces[place], batch.column(4)[place].as_py())
            if len(listing.rows) >= ROWS_MAX:
                yield listing.batch()
    if judge is not None:
        judge.finish()
    listing.end()
    yield listing.batch()


class _KeyJudge:
    """Judges one key of a broker group. A failure leaves this group unproven, and only this one."""

    def __init__(self, at: tuple[int, str], job: Job, listing: _Listing) -> None:
        self.at = at
        self._listing = listing
        self._judge: JudgePerCopy | None = JudgePerCopy(tuple(job.places), partial(_judge_of, job, at[1]))

    def take(self, copy: str, piece: int, packed: bytes) -> None:
        self._add(lambda judge: judge.take(copy, piece, pickle.loads(packed)))

    def finish(self) -> None:
        self._add(lambda judge: judge.finish())

    def _add(self, step: Callable[[JudgePerCopy], Iterable[tuple[str, JudgeRow]]]) -> None:
        if self._judge is None:
            return
        number, key = self.at
        try:
            self._listing.add(number, step(self._judge))
        except Exception as error:
            self._judge = None
            self._listing.add(number, [(ALL, JudgeRow(UNREAD, {"text": _reason(error, f"judged ({key})")}))])


class _Listing:
    """Rows of one task's judges. Findings and counts beyond the driver's lists are only counted."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, str, str, str, bool]] = []
        self._listed: Counter[tuple[int, str]] = Counter()
        self._more: defaultdict[tuple[int, str], Counter[str]] = defaultdict(Counter)

    def add(self, job: int, rows: Iterable[tuple[str, JudgeRow]]) -> None:
        for copy, (kind, row) in rows:
            is_listed = kind != CONSERVED
            if kind == HOUR:
                self._listed[job, kind] += 1
                is_listed = self._listed[job, kind] <= HOURS_MAX + 1
            elif kind == FINDING:
                self._listed[job, row["what"]] += 1
                if self._listed[job, row["what"]] > 20 * FINDINGS_MAX:
                    self._more[job, copy][row["what"]] += 1
                    continue
            self.rows.append((job, copy, kind, json.dumps(row), is_listed))

    def end(self) -> None:
        self.rows += [(job, copy, MORE, json.dumps(more), True) for (job, copy), more in self._more.items()]

    def batch(self) -> Any:
        columns = list(zip(*self.rows)) or [()] * len(_JUDGED_ROWS)
        self.rows = []
        arrays = [pa.array(column, field.type) for column, field in zip(columns, _JUDGED_ROWS)]
        return pa.RecordBatch.from_arrays(arrays, schema=_JUDGED_ROWS)
