"""Shell. The audit of broker groups: freeze how far the copies of each must agree, read all in one plan, report."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import reduce
from itertools import pairwise
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.storagelevel import StorageLevel

from qmq.audit import journal as journals
from qmq.audit.answers import Answer, together
from qmq.audit.conservation import STATES
from qmq.audit.consumption import CONSERVED
from qmq.audit.copies import CannotRead, Copy, Description, open_copy
from qmq.audit.delay_groups import Source, account_for, is_delay_group, write_by_day
from qmq.audit.derived import read_snapshot
from qmq.audit.facts import LogRange, Reading
from qmq.audit.findings import BOTH, COPIES_MIN, DERIVED, FINDINGS, HOUR, JOURNAL, MASTER, SLAVE, Kind
from qmq.audit.frame_order import AHEAD_MS_MAX, FOREVER_MS
from qmq.audit.history import CHAINS, CONSERVED_KEPT, FINDINGS_KEPT, SHARE, VERDICTS, History, look_back, moment, who
from qmq.audit.inspection import Pair, differences, name_findings
from qmq.audit.places import check_places, places_now
from qmq.audit.plan import FINDINGS_MAX, HOURS_MAX, Job, judged
from qmq.audit.selection import PIECE_BYTES, split_range
from qmq.ledger import Entry, Ledger, Piece, known_from, lies_in

AGAIN_MAX, AGAIN_WAIT_S, POLL_S = 3, 120.0, 0.5
"""So often an audit is done again, if its brokers are well within so long: one that restarts is, and a slave that was
wiped has a log of some GB again."""
ACCOUNTS_MAX = 5_000
"""Consumer groups whose equation is listed."""

_OF_HISTORY = frozenset({Kind.REWOUND, Kind.REWRITTEN, Kind.UNREAD, Kind.LOST, Kind.ALTERED})
"""These hold on both copies alike, and yet what they were found in is not verified."""
_SHORT = _OF_HISTORY | {
    Kind.DAMAGED,
    Kind.REPAIRED,
    Kind.MISSING,
    Kind.EXTRA,
    Kind.SHIFTED,
    Kind.DIFFERENT,
    Kind.REORDERED,
    Kind.HISTORY,
}
"""These say why less was read than is due; what other findings are about was read."""
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
    incarnations: dict[str, str] = field(default_factory=dict)
    """Of the brokers that were read; empty where nothing tells."""
    read: dict[str, Row] = field(default_factory=dict)
    findings: list[Row] = field(default_factory=list)
    found: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    hours: list[Row] = field(default_factory=list)
    conserved: list[Row] = field(default_factory=list)
    delayed: list[Row] = field(default_factory=list)
    """Of a delay group: what became of its messages, per subject."""
    epochs: list[str] = field(default_factory=list)
    journal: int | None = None
    unreadable: str | None = None
    unverified: int = 0
    """Bytes that were never verified, and that retention has removed by now."""
    wrong_before: list[Row] = field(default_factory=list)
    """Findings of earlier runs about both copies, at places that this one does not read."""
    history: int | None = None
    """Offset from which on frames differ in their chain, as they follow a difference."""
    min_copies: int = COPIES_MIN

    def add(self, what: Kind, **fields: Any) -> None:
        """Add a finding that the driver itself made."""
        self.count(what, 1)
        if self.found[what] <= FINDINGS_MAX:
            self.findings.append(dict.fromkeys(FINDINGS.fieldNames()) | {"what": what.value} | fields)

    def count(self, what: str, times: int) -> None:
        """Count findings, listed or not."""
        self.found[what] = self.found.get(what, 0) + times

    def is_behind(self, copy: str) -> bool:
        """Return whether a copy ends too early to have acknowledged all, and enough others did (decision 42)."""
        whole = sum(log.end >= self.watermark for log in self.logs.values())
        return self.logs[copy].end < self.watermark and whole >= self.min_copies

    def whole_until(self) -> int:
        """Return up to where every copy goes, of what is due. What lies behind was not read on all of them."""
        return min([self.watermark, *(log.end for name, log in self.logs.items() if self.is_behind(name))])

    @property
    def status(self) -> int:
        """0 proven equal, 1 findings, 2 could not read."""
        if self.unreadable:
            return 2
        return 1 if self.found else 0


@dataclass(frozen=True, slots=True)
class Group:
    """What to audit: the place of each copy, as options of the data source, and how many of them acknowledge."""

    name: str
    places: dict[str, dict[str, str]]
    min_copies: int = COPIES_MIN
    closed: tuple[str, ...] = ()
    """Why it takes no messages, if it is known to take none."""
    is_delay: bool = False
    """Whether it is known to be of delay servers: one between two masterships does not say so itself."""


@dataclass(slots=True)
class _Audit:
    """The audit of one broker group, step by step."""

    group: Group
    result: Result
    held: ExitStack = field(default_factory=ExitStack)
    history: History = field(default_factory=lambda: History(known_from([]), 0))
    job: Job | None = None
    answer: Answer = field(default_factory=lambda: Answer(()))
    entry: Entry | None = None

    def differing(self, piece_bytes: int) -> list[tuple[int, int]]:
        """Return the pieces of which the copies have other bytes."""
        return [piece for piece in _pieces(self.result, piece_bytes) if piece[0] in self.answer.differing]


@dataclass(frozen=True, slots=True)
class Options:
    """How broker groups are audited. With a `ledger`, what was verified is looked for, one part in `share` of it is
    read again, and a line is added."""

    journal: Path | None = None
    piece_bytes: int = PIECE_BYTES
    parquet: Path | None = None
    ledger: Ledger | None = None
    share: int = SHARE


def audit_group(spark: SparkSession, group: Group, **options: Any) -> Result:
    """Compare the copies of one broker group; see `audit_groups`."""
    return audit_groups(spark, [group], Options(**options))[0]


def audit_groups(spark: SparkSession, groups: Sequence[Group], options: Options) -> list[Result]:
    """Compare the copies of each broker group. Raises for nothing it meets; `unreadable` says why nothing is proven.

    Brokers that were away, or changed their roles, are audited again once they are well.
    """
    audits = _audit_all(spark, groups, options, groups)
    for _ in range(AGAIN_MAX):
        unread = {number: groups[number] for number, one in enumerate(audits) if one.result.unreadable}
        well = _wait_until_well(unread)
        for number, one in zip(well, _audit_all(spark, [*well.values()], options, groups)):
            one.result.notes.append(f"read again, because of what happened before: {audits[number].result.unreadable}")
            audits[number] = one
        if not well:
            break
    if options.ledger is not None:
        for one in audits:
            try:
                options.ledger.append(_line(one.result, one.entry))
            except OSError as error:  # what was found is reported all the same
                one.result.unreadable = one.result.unreadable or f"the ledger cannot be written: {error}"
    return [one.result for one in audits]


def _wait_until_well(groups: Mapping[int, Group]) -> dict[int, Group]:
    """Return, under the same numbers, the groups of brokers that are well within `AGAIN_WAIT_S`, by the roles they have
    then. A slave that is still being given its log would lack messages, and that is no finding."""
    waiting, well = dict(groups), dict[int, Group]()
    deadline = time.monotonic() + AGAIN_WAIT_S
    while waiting:
        for number, group in [*waiting.items()]:
            try:
                places = places_now(group.places)
            except CannotRead:
                del waiting[number]
                continue
            if places is not None:
                well[number] = replace(waiting.pop(number), places=places)
        if not waiting or time.monotonic() > deadline:
            break
        time.sleep(POLL_S)
    return dict(sorted(well.items()))


def _audit_all(spark: SparkSession, groups: Sequence[Group], options: Options, known: Sequence[Group]) -> list[_Audit]:
    """Audit groups once; `known`: in whose logs what delay groups sent is looked for."""
    audits = [_Audit(group, _new(group)) for group in groups]
    try:
        _each(audits, lambda one: _prepare(one, options))
        _ask(spark, audits, options)
        _each(audits, lambda one: _judge(one, options))
        _compare(spark, audits, options)
        _each(audits, lambda one: _conclude(one, options))
        _each(audits, lambda one: _account_for_delays(spark, one, known, options))
        _each(audits, lambda one: _finish(spark, one, options))
    finally:
        for one in audits:
            one.held.close()
    return audits


def _new(group: Group) -> Result:
    places = {copy: place.get("path") or place["broker"] for copy, place in group.places.items()}
    until_ms = int(time.time() * 1000) + AHEAD_MS_MAX
    return Result(group.name, places, until_ms=until_ms, min_copies=group.min_copies)


def _each(audits: Sequence[_Audit], step: Callable[[_Audit], None]) -> None:
    """Take a step of each audit that goes on. One that fails ends alone."""
    for one in audits:
        if one.result.unreadable is None:
            try:
                step(one)
            except CannotRead as error:
                one.result.unreadable = str(error)
            except Exception as error:
                # Spark wraps what a worker raised, in many classes; all of them mean: not read.
                one.result.unreadable = _cause(error)


def _prepare(one: _Audit, options: Options) -> None:
    group, result = one.group, one.result
    check_places(group.name, group.places)
    _hold(group, one.held)
    _freeze(group, result)
    one.history = history = _look_back(group, result, options.ledger, options.share)
    reads = _reads(result)
    begins = {begin for begin, _ in reads} - {until for _, until in reads}
    anchor = history.anchor
    bases = {name: [base for base in log.segments if base <= result.watermark] for name, log in result.logs.items()}
    one.job = Job(
        group.places,
        Reading(
            {name: LogRange(log.start, log.end, log.chain) for name, log in result.logs.items()},
            result.until_ms,
            result.begin,
        ),
        _pieces(result, options.piece_bytes),
        frozenset(begins),
        result.whole_until(),
        ends=dict(anchor.ends) if anchor is not None and result.begin == anchor.verified else None,
        before=history.before,
        kept=history.known.kept if anchor is not None and result.begin == anchor.verified else None,
        bases=bases,
        segments=_segments(result, bases),
    )


def _ask(spark: SparkSession, audits: Sequence[_Audit], options: Options) -> None:
    """Let Spark read and judge all groups, and give each its answer: one action. Two more store what was asked for."""
    asked = [one for one in audits if one.job is not None and one.result.unreadable is None]
    jobs = [one.job for one in asked if one.job is not None]
    for one in asked:
        one.answer = Answer(tuple(one.group.places))
    if not any(job.pieces for job in jobs):
        return
    said = judged(spark, jobs, options.piece_bytes)
    if options.parquet is not None:
        said = said.persist(StorageLevel.MEMORY_AND_DISK)
    try:
        for row in said.where("listed").select("job", "copy", "kind", "said").collect():
            asked[row["job"]].answer.take(row["copy"], row["kind"], json.loads(row["said"]))
        if options.parquet is not None:
            for number, one in enumerate(asked):
                _store(said.where(F.col("job") == number), tuple(one.group.places), options.parquet / one.group.name)
    except Exception as error:
        for one in asked:
            one.result.unreadable = _cause(error)
    finally:
        said.unpersist()


def _judge(one: _Audit, options: Options) -> None:
    result, answer = one.result, one.answer
    if answer.unread:
        raise CannotRead(answer.unread[0])
    pieces = _pieces(result, options.piece_bytes)
    if missing := {begin for begin, _ in pieces} - answer.pieces.keys():
        raise CannotRead(f"Spark gave no answer about {len(missing)} of {len(pieces)} pieces, from {min(missing)} on")
    _count(answer, result)
    found, more = answer.findings()
    _take(found, result)
    for kind, times in more.items():
        result.count(kind, times)
    _account(answer, result)
    _hold_against_before(answer, result, one.history)
    if answer.differing:
        _check_kept(one.group, result)  # else a copy that is being seeded is compared frame by frame, for nothing


def _compare(spark: SparkSession, audits: Sequence[_Audit], options: Options) -> None:
    """Read the pieces that differ again, frame by frame, of all groups at once, and take what differs in them. If that
    fails, it is done for each by itself: a group that cannot be read does not keep the others from being audited."""
    asked = [one for one in audits if one.answer.differing and one.result.unreadable is None]
    try:
        _compare_some(spark, asked, options)
    except Exception:
        _each(asked, lambda one: _compare_some(spark, [one], options))


def _compare_some(spark: SparkSession, audits: Sequence[_Audit], options: Options) -> None:
    of = [(one, name) for one in audits for name in list(one.group.places)[1:]]
    for (one, name), found in zip(of, differences(spark, [_pair(one, name, options) for one, name in of])):
        result = one.result
        found = [row | {"copy": name} for row in found]
        if result.is_behind(name):
            found = [row for row in found if row["what"] != Kind.MISSING or row["offset"] < result.logs[name].end]
        _take_differences(found, result)


def _pair(one: _Audit, name: str, options: Options) -> Pair:
    """Return master and the slave `name`, as `differences` compares them."""
    sides, result = {MASTER: MASTER, SLAVE: name}, one.result
    damaged = [
        (side, row["offset"], row["end"])
        for side, copy in sides.items()
        for row in result.findings
        if row["what"] == Kind.DAMAGED and row["copy"] in (copy, BOTH)
    ]
    logs = {side: result.logs[copy] for side, copy in sides.items()}
    return Pair(
        {side: one.group.places[copy] for side, copy in sides.items()},
        {side: LogRange(log.start, log.end, log.chain) for side, log in logs.items()},
        one.differing(options.piece_bytes),
        result.watermark,
        damaged,
    )


def _conclude(one: _Audit, options: Options) -> None:
    """See that what was read explains what was found, and is all that is due."""
    result, differing = one.result, one.differing(options.piece_bytes)
    if differing:
        _explain(differing, result)
    _check_all_was_read(result)
    for row in result.findings:  # what was judged on the master's copy alone holds for both where they are equal
        if row["what"] in (Kind.BATCH_TWICE, Kind.ID_TWICE):
            row["copy"] = MASTER if any(begin <= row["offset"] < until for begin, until in differing) else BOTH


def _account_for_delays(spark: SparkSession, one: _Audit, groups: Sequence[Group], options: Options) -> None:
    """Account for the messages of a delay group, and look for what it sent in the logs of all groups of this run.

    A directory says nothing of the time when it was copied: what is due by its last frame is due.
    """
    place = one.group.places[MASTER]
    if not one.group.is_delay and not any(map(is_delay_group, one.group.places.values())):
        return
    targets = [Source(group.name, group.places[MASTER]) for group in groups if MASTER in group.places]
    now_ms = None if "path" in place else one.result.until_ms - AHEAD_MS_MAX
    closed = {group.name: group.closed for group in groups if group.closed}
    account = account_for(
        spark, Source(one.group.name, place), targets, now_ms=now_ms, parquet=options.parquet, closed=closed
    )
    one.result.delayed = account.rows
    one.result.notes += account.notes
    for row in account.findings:
        one.result.add(Kind(row.pop("what")), copy=BOTH, **row)
    for kind, times in account.more.items():
        one.result.count(kind, times)


def _finish(spark: SparkSession, one: _Audit, options: Options) -> None:
    group, result = one.group, one.result
    if options.journal is not None:
        subjects = {name: one.answer.subjects[name] for name in group.places}
        ends = {name: {subject: row["end"] for subject, row in rows.items()} for name, rows in subjects.items()}
        if (anchor := one.history.anchor) is not None:
            ends = {name: dict(anchor.ends) | rows for name, rows in ends.items()}
        known = {name: _firsts(place, result.logs[name].start) for name, place in group.places.items()}
        if are_all := None not in known.values():
            firsts = {name: found or {} for name, found in known.items()}
        else:
            firsts = {name: {subject: row["first"] for subject, row in rows.items()} for name, rows in subjects.items()}
        _hold_against(spark, group, firsts, ends, result, options.journal, are_all=are_all)
    _add_met(group, result)
    if result.found:
        _check_kept(group, result)
    name_findings(group.name, group.places, result.logs, result.findings)
    _count_repaired(result)
    _note_unlisted(result)
    if options.parquet is not None:
        rows = [{name: row.get(name) for name in FINDINGS.fieldNames()} for row in result.findings]
        path = options.parquet / group.name / "findings"
        spark.createDataFrame(rows, FINDINGS).write.mode("overwrite").parquet(str(path))
    if options.ledger is not None:
        one.entry = verified(one.answer, result, one.history, options.piece_bytes)


def _firsts(place: Mapping[str, str], start: int) -> dict[str, int] | None:
    """Return the first sequence of each subject that had messages before a copy's log begins, by the snapshot there;
    None if there is none."""
    if start == 0:
        return {}
    try:
        with closing(open_copy(place)) as copy:
            state, _ = read_snapshot(copy.derived(start).snapshot, start)
    except OSError:
        return None
    return state.next_sequence if state is not None else None


def _hold(group: Group, held: ExitStack) -> None:
    """Keep both copies as they are until `held` is closed.

    The slave is read when the master has been, and one piece after the other. A segment that retention removed
    meanwhile would look as if it had been lost.
    """
    for place in group.places.values():
        held.enter_context(closing(open_copy(place))).hold()


def _check_kept(group: Group, result: Result) -> None:
    """Raise CannotRead if a copy no longer has what was to be read: what was found may be just that.

    A broker that was restarted does not know who held its log, and of a directory that is in use nobody asks.
    """
    for name, place in group.places.items():
        with closing(open_copy(place)) as copy:
            now, incarnation = copy.describe(), copy.owner().incarnation
        if incarnation != result.incarnations[name]:
            raise CannotRead(f"the {name} was emptied or replaced while it was read: audit it again")
        if now.start > result.start:
            raise CannotRead(f"the {name} let go of [{result.start}, {now.start}) while it was read: audit it again")
        if now.end < result.logs[name].end:
            span = f"[{now.end}, {result.logs[name].end})"
            raise CannotRead(f"the {name} cut off {span} while it was read, as after a failover: audit it again")


def _add_met(group: Group, result: Result) -> None:
    """Add damage that a running broker has met since the audit began, and that no reader saw: of what is read twice, it
    may be mended before the one comes by who would name it."""
    for name, place in group.places.items():
        met: Counter[tuple[int, int, str]] = Counter()
        if "broker" in place:
            with suppress(CannotRead), closing(open_copy(place)) as copy:  # one that is gone by now says nothing
                met = Counter(copy.describe().damaged) - Counter(result.logs[name].damaged)
        for begin, end, reason in met:
            if not any(_is_about(row, name, begin, end) for row in result.findings):
                result.add(Kind.DAMAGED, copy=name, offset=begin, end=end, text=reason)


def _is_about(row: Row, copy: str, begin: int, end: int) -> bool:
    at = row["offset"]
    return row["copy"] in (copy, BOTH) and at is not None and at < end and (row["end"] or at + 1) > begin


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
        for name in group.places:
            copies[name] = open_copy(group.places[name])
        result.watermark = max(copy.describe().high_watermark for copy in copies.values())
        for name in group.places:
            copies[name].close()
            copies[name] = open_copy(group.places[name])
        result.incarnations = {name: copy.owner().incarnation for name, copy in copies.items()}
        result.logs = {name: copy.describe() for name, copy in copies.items()}
    finally:
        for copy in copies.values():
            copy.close()
    logs = result.logs
    result.start = max(log.start for log in logs.values())
    for name, log in logs.items():
        for begin, end, why in log.damaged if "path" in group.places[name] else ():
            if begin >= log.end:  # what is gone further in front is not read
                result.add(Kind.DAMAGED, copy=name, offset=begin, end=max(end, result.watermark), text=why)
        if log.start < result.start:
            kept = f"[{log.start}, {result.start})"
            result.notes.append(f"the {name} keeps {kept}, which the other's retention removed: not compared")
        if log.torn_bytes:
            result.notes.append(f"{log.torn_bytes} bytes behind the {name}'s end at {log.end} are no frame (torn tail)")
        if result.is_behind(name):
            behind = result.watermark - log.end
            result.notes.append(f"the {name} ends at {log.end}, {behind} bytes behind what was acknowledged without it")
        if log.end > result.watermark:
            past = log.end - result.watermark
            result.notes.append(f"the {name} goes on to {log.end}, {past} bytes past the high watermark")


def _look_back(group: Group, result: Result, ledger: Ledger | None, share: int) -> History:
    """Decide what is read: all, or what is new since a point that both copies still have, and a part of the old."""
    history = History(known_from([]), result.start)
    if ledger is not None:
        history = look_back(ledger.known(group.name), group.places, result.logs, share=share)
    if history.broken is not None:
        for copy in history.broken.copies:
            result.add(history.broken.what, copy=copy, text=history.broken.text, offset=history.broken.offset)
    verified = history.known.anchor.verified if history.known.anchor else result.start
    if history.broken is None and verified < result.start:
        result.unverified = result.start - verified
        result.notes.append(f"retention has removed [{verified}, {result.start}), which no run had verified")
    if history.anchor is not None:  # it was promised, though a log that is at rest does not state it
        result.watermark = max(result.watermark, history.anchor.verified)
    ends = [log.end for name, log in result.logs.items() if log.end < history.begin and not result.is_behind(name)]
    if ends:
        # A copy lacks what it once had: from there on all is read, from where a piece begins that was read before.
        begin = max((cut for cut in history.cuts() if result.start <= cut <= min(ends)), default=result.start)
        again = [piece for piece in history.again if piece.end <= begin]
        history = replace(history, begin=begin, again=again, before=None)
    result.begin, result.again, result.cuts = history.begin, history.again, history.cuts()
    again = sorted(result.again)
    result.wrong_before = [
        row
        for row in history.known.wrong
        if result.start <= row["offset"] < result.begin and not lies_in(again, row["offset"])
    ]
    if result.watermark <= result.start and not result.found:
        raise CannotRead(f"nothing lies below the high watermark {result.watermark}: nothing is proven")
    return history


def _reads(result: Result) -> list[tuple[int, int]]:
    """Return what is read of both copies, cut at the high watermark, and where a copy that is behind ends, so that no
    piece lies on both sides."""
    end = max(log.end for log in result.logs.values())
    parts = [(piece.begin, piece.end) for piece in result.again]
    inner = sorted(cut for cut in {*result.cuts, result.whole_until()} if result.begin < cut < result.watermark)
    cuts = [result.begin, *inner, result.watermark]
    parts += [*pairwise(cuts), (result.watermark, end)]
    return [(begin, until) for begin, until in parts if begin < until]


def _pieces(result: Result, piece_bytes: int) -> list[tuple[int, int]]:
    return [piece for begin, until in _reads(result) for piece in split_range(begin, until, piece_bytes)]


def _segments(result: Result, bases: Mapping[str, Sequence[int]]) -> list[int]:
    """Return which closed segments are among what is read; beside them, and where they end, lie other files."""
    reads = _reads(result)
    closed = {pair for places in bases.values() for pair in pairwise(places)}
    return sorted({base for base, end in closed if any(begin < end <= until for begin, until in reads)})


def _count(answer: Answer, result: Result) -> None:
    """Count what was read; an audit that read nothing fails."""
    result.read = answer.read(result.begin, result.watermark)
    if not any(side["frames"] for side in result.read.values()) and not result.found and result.begin == result.start:
        raise CannotRead("not one frame was read: nothing is proven")
    epochs = sorted(answer.epochs.items(), key=lambda one: one[1])
    result.epochs = [f"{epoch} from {offset}" for epoch, offset in epochs]
    hours = sorted(answer.hours, key=lambda row: (row["subject"], row["hour"], row["copy"]))
    result.hours = [row | {"hour": _hour(row["hour"])} for row in hours[:HOURS_MAX]]
    if len(hours) > HOURS_MAX:
        result.notes.append(f"only the first {HOURS_MAX} counts per subject and hour are listed; --parquet keeps all")


def _hour(hours: int) -> str:
    return datetime.fromtimestamp(hours * 3600, UTC).strftime("%Y-%m-%d %H:00")


def _take(found: Sequence[Row], result: Result) -> None:
    """Count the findings per kind, and keep the first ones of each."""
    found = [{name: row[name] for name in FINDINGS.fieldNames()} for row in found]
    found = sorted(found, key=lambda row: (row["offset"] is None, row["offset"] or 0))
    kept = Counter(row["what"] for row in result.findings)
    for row in found:
        kept[row["what"]] += 1
        result.count(row["what"], 1)
        if kept[row["what"]] <= FINDINGS_MAX:
            result.findings.append(row)


def _account(answer: Answer, result: Result) -> None:
    """Take the equation of each consumer group, over all hours, as the master's copy has it."""
    if answer.is_hurt():
        return
    result.conserved = sorted(answer.accounts, key=lambda row: (row["subject"], row["consumer_group"]))
    if len(result.conserved) > ACCOUNTS_MAX:
        del result.conserved[ACCOUNTS_MAX:]
        result.notes.append(f"only the first {ACCOUNTS_MAX} consumer groups are accounted for here; --parquet has all")


def _take_differences(found: Sequence[Row], result: Result) -> None:
    """Take what differs below the high watermark as findings, and the rest as a note: it was promised to nobody."""
    promised = [row for row in found if row["offset"] < result.watermark]
    _take([row for row in promised if row["what"] != Kind.HISTORY], result)
    after = [row for row in promised if row["what"] == Kind.HISTORY]
    if after:
        first = min(row["offset"] for row in after)
        sides = MASTER, after[0]["copy"]
        before = (row for row in _of_log(result.findings) if row["copy"] in sides and row["offset"] is not None)
        if not any(row["offset"] < first for row in before):
            _take([row for row in after if row["offset"] == first], result)
        result.history = first
        result.notes.append(
            f"{len(after)} frames from {first} on differ in their chain alone, as they follow a difference"
        )
    if later := sum(row["frames"] for row in found if row["offset"] >= result.watermark):
        result.notes.append(f"{later} frames past the high watermark are not the same on both copies")


def _hold_against_before(answer: Answer, result: Result, history: History) -> None:
    """Make findings of what both copies have alike, and not as it was before: ranges that were exchanged, subjects that
    end lower, frames that are gone although no retention frame gave them up."""
    changed = [
        piece
        for piece in history.exchanged(_digests(answer, result))
        if not any(piece.begin <= begin < piece.end for begin in answer.differing) and piece.end <= result.watermark
    ]
    before = history.known.anchor
    if before is not None and result.begin == result.start:
        now = answer.ends()
        for subject, end in before.ends.items():
            if now.get(subject, end) < end:
                text = f"it ends at sequence {now[subject]}; the run of {before.run} found it at {end}"
                result.add(Kind.REWOUND, copy=BOTH, text=text, subject=subject, sequence=now[subject])
    if (kept := _kept_from(answer, result)) is not None:
        said = history.known.kept if history.anchor is not None else None
        _check_starts(result, max(kept, said or 0))
    for begin, end in _together((piece.begin, piece.end) for piece in changed):
        result.add(Kind.REWRITTEN, copy=BOTH, text="it is not what was read here before", offset=begin, end=end)


def _together(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return neighbours as one."""
    found: list[tuple[int, int]] = []
    for begin, end in ranges:
        if found and found[-1][1] == begin:
            begin, _ = found.pop()
        found.append((begin, end))
    return found


def _check_starts(result: Result, kept: int) -> None:
    """Make a finding of copies that begin behind what is kept: all of them alike, and each that lacks more."""
    if (oldest := _oldest(result)) > kept:
        text = f"both logs begin at {oldest}, and frames are kept from {kept} on"
        result.add(Kind.RETENTION, copy=BOTH, text=text, offset=oldest)
    for name, log in result.logs.items():
        if log.start > max(oldest, kept):
            text = f"its log begins at {log.start}, and the other copy's at {oldest}; frames are kept from {kept} on"
            result.add(Kind.RETENTION, copy=name, text=text, offset=log.start)


def _oldest(result: Result) -> int:
    return min(log.start for log in result.logs.values())


def _kept_from(answer: Answer, result: Result) -> int | None:
    """Return from where on frames are kept, by the retention frames; None if nothing tells.

    The frame that gave up what is gone is in what is left: a log without one gave up nothing.
    """
    if answer.kept_from is None and result.begin == result.start and not answer.is_hurt():
        return 0
    return answer.kept_from


def _digests(answer: Answer, result: Result) -> dict[int, tuple[int, int]]:
    """Return of each piece that is due its bytes and digest, as the master has them."""
    rows = {at: copies[MASTER] for at, copies in answer.pieces.items() if at < result.watermark and MASTER in copies}
    return {at: (row["bytes"], int(row["digest"], 16)) for at, row in rows.items() if row["bytes"]}


def _check_all_was_read(result: Result) -> None:
    """Make a finding of a copy of which not every byte was read, if nothing else says so: both may lack the same.

    A frame in which the watermark lies is read as a whole: that is more than is due, and no finding of this kind."""
    if not _SHORT.isdisjoint(result.found):
        return
    due = result.watermark - result.begin
    for name, read in result.read.items():
        if read["due_bytes"] < due and not result.is_behind(name):
            text = f"{read['due_bytes']} bytes of the {due} that are due were read, and no damage was met"
            result.add(Kind.UNREAD, copy=name, text=text)


def _explain(pieces: list[tuple[int, int]], result: Result) -> None:
    """Make a finding of every piece whose bytes differ though nothing above says why: no difference is dropped."""
    changed = result.history if result.history is not None else result.watermark
    told = [row for row in _of_log(result.findings) if row["copy"] != BOTH or row["what"] == Kind.DAMAGED]
    spans = [(row["offset"], row["end"] or row["offset"] + 1) for row in told if row["offset"] is not None]
    spans += [(log.end, result.watermark) for name, log in result.logs.items() if result.is_behind(name)]
    for begin, until in pieces:
        if begin >= min(changed, result.watermark) or any(at < until and end > begin for at, end in spans):
            continue
        text = "bytes differ, the frames' headers do not"
        result.add(Kind.DIFFERENT, copy=SLAVE, text=text, offset=begin, end=until)


def _of_log(findings: Sequence[Row]) -> list[Row]:
    return [row for row in findings if row["what"] not in DERIVED]


def _count_repaired(result: Result) -> None:
    """Count as repaired what turned out to be, when it was read again."""
    if repaired := sum(row["what"] == Kind.REPAIRED for row in result.findings):
        damaged = result.found.pop(Kind.DAMAGED) - repaired
        result.found |= {Kind.REPAIRED: repaired} | ({Kind.DAMAGED: damaged} if damaged else {})


def _note_unlisted(result: Result) -> None:
    listed = Counter(row["what"] for row in result.findings)
    for kind, times in result.found.items():
        if times > listed[kind]:
            result.notes.append(f"{times} findings are {kind}; the first {listed[kind]} of them are listed")


def _hold_against(
    spark: SparkSession,
    group: Group,
    firsts: dict[str, dict[str, int]],
    ends: dict[str, dict[str, int]],
    result: Result,
    journal: Path,
    *,
    are_all: bool,
) -> None:
    """Look for every acknowledged message of the journal in both copies, to the very end of each. `firsts`, `are_all`:
    of `due_messages`."""
    if not journal.exists():
        raise CannotRead(f"journal {journal}: there is no such file, nor a folder of them")
    acked = spark.read.schema(JOURNAL).json(str(journal), recursiveFileLookup=True)
    acked = acked.where(F.col("group").isNull() | (F.col("group") == group.name))
    acked = acked.select("subject", "sequence", "id", "hash").persist(StorageLevel.MEMORY_AND_DISK)
    ((lines, broken, hashed),) = acked.agg(
        F.count("*"), F.count_if(F.expr("subject is null or sequence is null or id is null")), F.count("hash")
    ).collect()
    if broken > journals.torn_max(journal):
        raise CannotRead(f"journal {journal}: {broken} lines lack subject, sequence or id")
    result.journal = lines - broken
    acked = acked.where("subject is not null and sequence is not null and id is not null")
    due = journals.due_messages(acked, firsts, result.start, are_all=are_all)
    sides = [
        journals.stored(spark, place, with_hash=hashed > 0).withColumn("copy", F.lit(name))
        for name, place in group.places.items()
    ]
    messages = reduce(DataFrame.unionByName, sides)
    found = [row.asDict() for row in journals.broken_promises(due, messages, few=lines).collect()]
    found = journals.not_behind(found, ends, min_copies=group.min_copies)
    _take(list(together(((row["copy"], row) for row in found), tuple(group.places))), result)
    if older := acked.join(due, ["subject", "sequence", "id"], "left_anti").count():
        result.notes.append(f"{older} of the journal's messages may be older than what the copies keep: not looked for")
    acked.unpersist()


def verified(answer: Answer, result: Result, history: History, piece_bytes: int) -> Entry | None:
    """Return what the next run may build on; None if there is something that one copy alone has wrong, or is not as it
    was: what was verified before stays what is verified. So it does if a copy does not even reach that far."""
    anchor, until = history.anchor, result.whole_until()
    if any(row["copy"] != BOTH or row["what"] in _OF_HISTORY for row in result.findings):
        return None
    if sum(result.found.values()) > len(result.findings):
        return None  # what is not listed may be wrong on one copy alone
    if any(begin in answer.differing and end <= until for begin, end in _pieces(result, piece_bytes)):
        return None  # each copy may have its own damage there
    again = [piece for piece in history.read_again(_digests(answer, result)) if piece.end <= until]
    if until < result.begin:
        return Entry("", 0, result.group, "", start=result.start, begin=result.begin, pieces=again)
    ends = dict(anchor.ends) if anchor is not None and anchor.verified == result.begin else {}
    for subject, end in answer.ends("due_end").items():
        ends[subject] = max(end, ends.get(subject, 0))
    read = _digests(answer, result)
    pieces = [
        Piece(begin, end, read[begin][0], f"{CHAINS}{read[begin][1]:016x}")
        for begin, end in _pieces(result, piece_bytes)
        if begin in read and result.begin <= begin and end <= until
    ]
    kept = _kept_from(answer, result)
    rows = [copies[MASTER] for at, copies in answer.pieces.items() if result.begin <= at < until]
    last = next((row for row in rows if row.get("end") == until), None)
    if last is not None:
        chain, frame = f"{last['chain']:016x}", last["size"]
    elif anchor is not None and anchor.verified == until:
        chain, frame = anchor.chain, anchor.frame
    else:
        return None
    return Entry(
        "",
        0,
        result.group,
        "",
        start=result.start,
        begin=result.begin,
        verified=until,
        kept=None if kept is None else max(kept, _oldest(result)),
        chain=chain,
        frame=frame,
        ends=ends,
        pieces=sorted([*again, *pieces]),
    )


def _line(result: Result, entry: Entry | None) -> Entry:
    """Return the ledger's line of this run."""
    at_ms = result.until_ms - AHEAD_MS_MAX
    kept = [{name: value for name, value in row.items() if value is not None} for row in result.findings]
    entry = entry or Entry("", 0, result.group, "", start=result.start, begin=result.begin)
    return replace(
        entry,
        run=moment(at_ms),
        at_ms=at_ms,
        verdict=VERDICTS[result.status],
        why=result.unreadable or "",
        found=dict(result.found),
        findings=kept[:FINDINGS_KEPT],
        places=result.places,
        by=who(),
        unverified=result.unverified,
        read={name: read["bytes"] for name, read in result.read.items()},
        conserved=result.conserved[:CONSERVED_KEPT],
        delayed=result.delayed[:CONSERVED_KEPT],
    )


def _store(said: DataFrame, names: tuple[str, ...], folder: Path) -> None:
    """Keep counts per subject and hour, and what became of messages, for whoever asks later. in: of one group."""
    copies = F.explode(F.when(F.col("copy") == "", F.array(*map(F.lit, names))).otherwise(F.array("copy")))
    rows = said.withColumn("copy", copies)
    of = F.from_json("said", "subject string, hour long, messages long, bytes long")
    hours = rows.where(F.col("kind") == HOUR).select("copy", of.alias("of"))
    hour = F.timestamp_seconds(F.col("of.hour") * 3600).alias("hour")
    write_by_day(hours.select("copy", "of.subject", hour, "of.messages", "of.bytes"), folder / "hours")
    numbers = ("stored", *STATES, "nacked")
    inner = "hour long, group string, " + ", ".join(f"{name} long" for name in numbers)
    outer = F.from_json("said", "subject string, said string")
    kept = rows.where(F.col("kind") == CONSERVED).select("copy", outer.alias("by"))
    kept = kept.select("copy", F.col("by.subject").alias("subject"), F.from_json("by.said", inner).alias("of"))
    columns = [F.col(f"of.{name}").alias(name) for name in numbers]
    group = F.col("of.group").alias("consumer_group")
    write_by_day(kept.select("copy", "subject", group, hour, *columns), folder / "conserved")
