"""Core. Plan of an audit: tasks that read pieces, and judges that take their facts in order.

    task     pieces and segments of some broker groups, with everything needed to read them
    fact     (job: number of the broker group, key: names the judge, piece: offset where it begins, copy: its name, or
             empty for all copies, payload: pickled context and facts); of piece SETUP, a judge's setup
    judged   (job, copy, kind, payload, listed): a `JudgeRow` as JSON; listed: for the driver

Message bytes stay where they are read. Between tasks and judges travel a few rows per piece and subject, a hash per
message, and the pulls and acks. `qmq.audit.executors` runs both, in this process or on Spark.
"""

from __future__ import annotations

import json
import pickle
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice, pairwise
from typing import Any, NamedTuple

from qmq.audit.consumption import CONSERVED
from qmq.audit.copies import CannotRead, Copy, open_copy
from qmq.audit.dead_letters import check_dead_letters
from qmq.audit.delays import BatchJudge, DelayJudge, spread_batches, spread_delayed
from qmq.audit.derived import DerivedFilesJudge, check_segment
from qmq.audit.facts import ALL, PieceFacts, Reading
from qmq.audit.findings import (
    ACCOUNT,
    FINDING,
    FINDINGS_MAX,
    FULL_SHARE,
    HOUR,
    MORE,
    UNREAD,
    Judge,
    JudgeRow,
    Share,
    finding,
)
from qmq.audit.findings import SUBJECT as SUBJECT_ENDS
from qmq.audit.rules import DuplicateJudge, JudgePerCopy, LogJudge, PassOn, SubjectJudge, spread_stored
from qmq.log.frame import Frame

BUCKET_BYTES = 2 << 30
"""Log bytes per task that compares ids: messages of 1 KiB take 40 MB of memory, the smallest ones 300."""
ROWS_MAX = 10_000
SETUPS_MAX = 5_000
"""Verified ends of subjects in one task."""
SEGMENT_SHARE = 8
"""The check of the files beside a segment skips messages: it counts as one part in so many of the segment's bytes."""
SETUP = -1

GROUP, PROBLEM, DERIVED, LETTERS, BATCHES = "group", "unread", "derived", "letters", "batches"
SUBJECT, STORED, DELAYED = "subject:", "stored:", "delayed:"
"""Keys, or their prefixes."""

Fact = tuple[int, str, int, str, bytes]
Judged = tuple[int, str, str, str, bool]


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
    share: Share = FULL_SHARE
    """Rows for the driver."""

    @property
    def buckets(self) -> int:
        return sum(end - begin for begin, end in self.pieces) // BUCKET_BYTES + 1


class Context(NamedTuple):
    """Values that each judge of a broker group needs beside the facts: from its `Job` and `Share`."""

    names: tuple[str, ...]
    until_ms: int
    begin: int
    watermark: int
    is_continued: bool
    """Whether earlier runs verified the ends of all subjects."""
    hours: int
    accounts: int
    takes_ends: bool


class GroupPart(NamedTuple):
    """All that a task takes from the job of one broker group."""

    job: int
    context: Context
    places: Mapping[str, Mapping[str, str]]
    reading: Reading
    buckets: int


class Piece(NamedTuple):
    """A byte range of the log, of all copies."""

    part: GroupPart
    begin: int
    end: int


class Segment(NamedTuple):
    """A segment with index and snapshot."""

    part: GroupPart
    base: int


class Setup(NamedTuple):
    """Setups of some keys' judges."""

    job: int
    keys: Sequence[tuple[str, Any]]


Step = Piece | Segment | Setup
Task = list[Step]


class LogSetup(NamedTuple):
    """Setup of the `LogJudge` of a broker group: fields of its `Job`."""

    begins: frozenset[int]
    before: Frame | None
    kept: int | None


def tasks_of(jobs: Sequence[Job], piece_bytes: int) -> list[Task]:
    """Return the tasks; small pieces and segments share one, because a task costs more than they do."""
    tasks: list[Task] = []
    task: Task = []
    size = 0
    for step, weight in _steps(jobs):
        task.append(step)
        size += weight
        if size >= piece_bytes:
            tasks.append(task)
            task, size = [], 0
    return [*tasks, task] if task else tasks


def _steps(jobs: Sequence[Job]) -> Iterator[tuple[Step, int]]:
    """Yield steps of tasks with the number of bytes that each reads of a copy."""
    for number, job in enumerate(jobs):
        reading = job.reading
        is_continued = job.ends is not None
        context = Context(tuple(job.places), reading.until_ms, reading.begin, job.watermark, is_continued, *job.share)
        part = GroupPart(number, context, job.places, reading, job.buckets)
        yield Setup(number, [(GROUP, LogSetup(job.begins, job.before, job.kept))]), 0
        ends = iter((job.ends or {}).items())
        while some := [(f"{SUBJECT}{subject}", end) for subject, end in islice(ends, SETUPS_MAX)]:
            yield Setup(number, some), 0
        sizes = {begin: end - begin for bases in job.bases.values() for begin, end in pairwise(bases)}
        for base in job.segments:
            yield Segment(part, base), sizes.get(base, 0) // SEGMENT_SHARE
        for begin, end in job.pieces:
            yield Piece(part, begin, end), end - begin


def read_task(task: Task) -> Iterator[Fact]:
    """Yield the facts of a task."""
    for step in task:
        if isinstance(step, Setup):
            job, keys = step
            yield from ((job, key, SETUP, ALL, pickle.dumps(setup, 5)) for key, setup in keys)
            continue
        begin = step.begin if isinstance(step, Piece) else step.base
        for key, copy, payload in _rows_of(step):
            yield step.part.job, key, begin, copy, pickle.dumps((tuple(step.part.context), payload), 5)


def _rows_of(step: Piece | Segment) -> list[tuple[str, str, Any]]:
    """Return (key, copy, facts) of a step. An error becomes a fact of this broker group; the others are still
    judged."""
    begin = step.begin if isinstance(step, Piece) else step.base
    try:
        return list(_facts_of(step.part, begin, step.end) if isinstance(step, Piece) else _derived_of(step))
    except Exception as error:
        return [(PROBLEM, ALL, JudgeRow(UNREAD, {"text": _reason(error, f"read at {begin}")}))]


def _reason(error: Exception, what: str) -> str:
    return str(error) if isinstance(error, CannotRead) else f"it could not be {what}: {type(error).__name__}: {error}"


def _facts_of(job: GroupPart, begin: int, end: int) -> Iterator[tuple[str, str, Any]]:
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
    job: GroupPart, copies: Mapping[str, Copy], found: Mapping[str, PieceFacts]
) -> Iterator[tuple[str, str, Any]]:
    """Yield problems of one piece's dead letters, as `_facts_of`, for each copy that has them."""
    for copy, facts in found.items():
        if letters := facts.letters():
            for name in copies if copy == ALL else (copy,):
                for wrong in check_dead_letters(copies[name], _bases_of(job, copies[name]), letters):
                    yield LETTERS, name, finding(wrong.pop("what"), wrong.pop("text"), **wrong)


def _bases_of(part: GroupPart, copy: Copy) -> list[int]:
    """Return the bases of a copy's segments up to the watermark. A task asks for them, as a log may have thousands."""
    return [base for base in copy.bases_now() if base <= part.context.watermark]


def _derived_of(segment: Segment) -> Iterator[tuple[str, str, Any]]:
    """Yield problems of the files beside one segment, as `_facts_of`."""
    part = segment.part
    with ExitStack() as stack:
        copies = {name: stack.enter_context(closing(open_copy(place))) for name, place in part.places.items()}
        bases = {name: _bases_of(part, copy) for name, copy in copies.items()}
        for name, wrong in check_segment(copies, bases, segment.base):
            yield DERIVED, name, wrong


def _judge_of(about: Context, key: str, setup: Any) -> Judge:
    """Return a new judge of a key."""
    if key == GROUP:
        begins, before, kept = setup
        return LogJudge(about.until_ms, begins, about.begin, before=before, kept=kept)
    if key in (PROBLEM, LETTERS):
        return PassOn()
    if key == DERIVED:
        return DerivedFilesJudge()
    if key == BATCHES:
        return BatchJudge(is_whole=about.begin == 0)
    if key.startswith(STORED):
        return DuplicateJudge()
    if key.startswith(DELAYED):
        return DelayJudge()
    subject = key.removeprefix(SUBJECT)
    known = (setup or 0) if about.is_continued else None
    return SubjectJudge(subject, about.begin, known, about.watermark)


def judge_facts(facts: Iterable[Fact]) -> Iterator[list[Judged]]:
    """Judge facts that are sorted by job, key, piece and copy; yield rows, some thousand at a time."""
    listing = _Listing()
    judge: _KeyJudge | None = None
    for job, key, piece, copy, payload in facts:
        if judge is None or judge.at != (job, key):
            if judge is not None:
                judge.finish()
            judge = _KeyJudge((job, key), listing)
        judge.take(copy, piece, payload)
        if len(listing.rows) >= ROWS_MAX:
            yield listing.taken()
    if judge is not None:
        judge.finish()
    listing.end()
    yield listing.taken()


class _KeyJudge:
    """Judge of one key of a broker group. A failure leaves this group unproven, and only this one."""

    def __init__(self, at: tuple[int, str], listing: _Listing) -> None:
        self.at = at
        self._listing = listing
        self._setup: Any = None
        self._share = FULL_SHARE
        self._judge: JudgePerCopy | None = None
        self._has_failed = False

    def take(self, copy: str, piece: int, packed: bytes) -> None:
        if piece == SETUP:
            self._setup = pickle.loads(packed)
        else:
            self._add(lambda: self._judged(copy, piece, *pickle.loads(packed)))

    def _judged(self, copy: str, piece: int, context: Any, facts: Any) -> Iterable[tuple[str, JudgeRow]]:
        if self._judge is None:
            about = Context(*context)
            self._share = Share(about.hours, about.accounts, about.takes_ends)
            self._judge = JudgePerCopy(about.names, partial(_judge_of, about, self.at[1], self._setup))
        return self._judge.take(copy, piece, facts)

    def finish(self) -> None:
        if (judge := self._judge) is not None:
            self._add(judge.finish)

    def _add(self, step: Callable[[], Iterable[tuple[str, JudgeRow]]]) -> None:
        if self._has_failed:
            return
        number, key = self.at
        try:
            self._listing.add(number, step(), self._share)
        except Exception as error:
            self._has_failed = True
            unread = JudgeRow(UNREAD, {"text": _reason(error, f"judged ({key})")})
            self._listing.add(number, [(ALL, unread)], self._share)


class _Listing:
    """Rows of one task's judges. Findings and counts beyond the driver's lists are only counted."""

    def __init__(self) -> None:
        self.rows: list[Judged] = []
        self._listed: Counter[tuple[int, str]] = Counter()
        self._more: defaultdict[tuple[int, str], Counter[str]] = defaultdict(Counter)

    def add(self, job: int, rows: Iterable[tuple[str, JudgeRow]], share: Share) -> None:
        limits = {HOUR: share.hours, ACCOUNT: share.accounts}
        for copy, (kind, row) in rows:
            is_listed = kind != CONSERVED and (kind != SUBJECT_ENDS or share.takes_ends)
            if kind in limits:
                self._listed[job, kind] += 1
                is_listed = self._listed[job, kind] <= limits[kind] + 1  # the last one shows that there are more
            elif kind == FINDING:
                self._listed[job, row["what"]] += 1
                if self._listed[job, row["what"]] > 20 * FINDINGS_MAX:
                    self._more[job, copy][row["what"]] += 1
                    continue
            self.rows.append((job, copy, kind, json.dumps(row), is_listed))

    def end(self) -> None:
        self.rows += [(job, copy, MORE, json.dumps(more), True) for (job, copy), more in self._more.items()]

    def taken(self) -> list[Judged]:
        """Return the rows, and begin anew."""
        rows, self.rows = self.rows, []
        return rows
