"""Shell. The audit of broker groups: freeze the range in which their copies must agree, read all in one plan,
report."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.storagelevel import StorageLevel

from qmq.audit.conservation import STATES
from qmq.audit.consumption import CONSERVED
from qmq.audit.copies import CannotRead, Copy, open_copy
from qmq.audit.delay_groups import Source, account_for, is_delay_group, write_by_day
from qmq.audit.derived import read_snapshot
from qmq.audit.facts import LogRange, Reading
from qmq.audit.findings import (
    BOTH,
    DERIVED,
    FINDINGS,
    HOUR,
    MASTER,
    SLAVE,
    UNVERIFIED,
    FindingKind,
    Row,
)
from qmq.audit.frame_order import AHEAD_MS_MAX
from qmq.audit.history import (
    SHARE,
    History,
    find_verified,
    ledger_entry,
    verified,
)
from qmq.audit.inspection import Pair, describe_findings, differences
from qmq.audit.journal import check_journal
from qmq.audit.places import check_places, places_now
from qmq.audit.plan import HOURS_MAX, Job, judged
from qmq.audit.results import Group, GroupAnswer, Result, digests_of, kept_from
from qmq.audit.selection import PIECE_BYTES
from qmq.ledger import Entry, Ledger, known_from, lies_in

AGAIN_MAX, AGAIN_WAIT_S, POLL_S = 3, 120.0, 0.5
"""Repetitions of an audit while its brokers recover, and the longest wait for that: time for a restart, or for seeding
a slave with some GB of log.
"""
ACCOUNTS_MAX = 5_000
"""Listed equations of consumer groups."""

_SHORT = UNVERIFIED | {
    FindingKind.DAMAGED,
    FindingKind.REPAIRED,
    FindingKind.MISSING,
    FindingKind.EXTRA,
    FindingKind.SHIFTED,
    FindingKind.DIFFERENT,
    FindingKind.REORDERED,
    FindingKind.HISTORY,
}
"""Kinds that explain why fewer bytes were read than due; other kinds concern bytes that were read."""


@dataclass(slots=True)
class _Audit:
    """The audit of one broker group, step by step."""

    group: Group
    result: Result
    held: ExitStack = field(default_factory=ExitStack)
    history: History = field(default_factory=lambda: History(known_from([]), 0))
    job: Job | None = None
    answer: GroupAnswer = field(default_factory=lambda: GroupAnswer(()))
    entry: Entry | None = None

    def differing(self, piece_bytes: int) -> list[tuple[int, int]]:
        """Return the pieces in which the copies differ."""
        return [piece for piece in self.result.pieces(piece_bytes) if piece[0] in self.answer.differing]


@dataclass(frozen=True, slots=True)
class Options:
    """Options of an audit. With a `ledger`, only new bytes and one part in `share` of the verified ones are read, and a
    line is added to it.
    """

    journal: Path | None = None
    piece_bytes: int = PIECE_BYTES
    parquet: Path | None = None
    ledger: Ledger | None = None
    share: int = SHARE


def audit_group(spark: SparkSession, group: Group, **options: Any) -> Result:
    """Compare the copies of one broker group; see `audit_groups`."""
    return audit_groups(spark, [group], Options(**options))[0]


def audit_groups(spark: SparkSession, groups: Sequence[Group], options: Options) -> list[Result]:
    """Compare the copies of each broker group; errors are stored in `unreadable` and not raised.

    Groups with absent brokers, or with changed roles, are audited again once they have recovered.
    """
    audits = _audit_all(spark, groups, options, groups)
    for _ in range(AGAIN_MAX):
        unread = {number: groups[number] for number, audit in enumerate(audits) if audit.result.unreadable}
        well = _wait_until_well(unread)
        for number, audit in zip(well, _audit_all(spark, [*well.values()], options, groups)):
            audit.result.notes.append(
                f"read again, because of what happened before: {audits[number].result.unreadable}"
            )
            audits[number] = audit
        if not well:
            break
    if options.ledger is not None:
        for audit in audits:
            try:
                options.ledger.append(ledger_entry(audit.result, audit.entry))
            except OSError as error:  # the findings are reported all the same
                audit.result.unreadable = audit.result.unreadable or f"the ledger cannot be written: {error}"
    return [audit.result for audit in audits]


def _wait_until_well(groups: Mapping[int, Group]) -> dict[int, Group]:
    """Return the groups, under their numbers, that recover within `AGAIN_WAIT_S`, with their roles then.

    A slave still being seeded has not recovered: its missing frames are no finding.
    """
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
    """Audit groups once. `known`: groups with logs to search for messages of delay groups."""
    audits = [_Audit(group, _new(group)) for group in groups]
    try:
        _each(audits, lambda audit: _prepare(audit, options))
        _read_and_judge(spark, audits, options)
        _each(audits, lambda audit: _judge(audit, options))
        _compare(spark, audits, options)
        _each(audits, lambda audit: _conclude(audit, options))
        _each(audits, lambda audit: _account_for_delays(spark, audit, known, options))
        _each(audits, lambda audit: _finish(spark, audit, options))
    finally:
        for audit in audits:
            audit.held.close()
    return audits


def _new(group: Group) -> Result:
    places = {copy: place.get("path") or place["broker"] for copy, place in group.places.items()}
    until_ms = int(time.time() * 1000) + AHEAD_MS_MAX
    return Result(group.name, places, until_ms=until_ms, min_copies=group.min_copies)


def _each(audits: Sequence[_Audit], step: Callable[[_Audit], None]) -> None:
    """Take one step of each running audit. An error ends only its own audit."""
    for audit in audits:
        if audit.result.unreadable is None:
            try:
                step(audit)
            except CannotRead as error:
                audit.result.unreadable = str(error)
            except Exception as error:
                # Spark wraps errors of workers in many classes; all mean that the group was not read.
                audit.result.unreadable = _cause(error)


def _prepare(audit: _Audit, options: Options) -> None:
    group, result = audit.group, audit.result
    check_places(group.name, group.places)
    _hold(group, audit.held)
    _freeze(group, result)
    audit.history = history = _look_back(group, result, options.ledger, options.share)
    reads = result.reads()
    begins = {begin for begin, _ in reads} - {until for _, until in reads}
    anchor = history.anchor
    bases = {name: [base for base in log.segments if base <= result.watermark] for name, log in result.logs.items()}
    audit.job = Job(
        group.places,
        Reading(
            {name: LogRange(log.start, log.end, log.chain) for name, log in result.logs.items()},
            result.until_ms,
            result.begin,
        ),
        result.pieces(options.piece_bytes),
        frozenset(begins),
        result.whole_until(),
        ends=dict(anchor.ends) if anchor is not None and result.begin == anchor.verified else None,
        before=history.before,
        kept=history.known.kept if anchor is not None and result.begin == anchor.verified else None,
        bases=bases,
        segments=_segments(result, bases),
    )


def _read_and_judge(spark: SparkSession, audits: Sequence[_Audit], options: Options) -> None:
    """Read and judge all groups in one Spark action, and collect each group's answer. Storing takes two more
    actions."""
    asked = [audit for audit in audits if audit.job is not None and audit.result.unreadable is None]
    jobs = [audit.job for audit in asked if audit.job is not None]
    for audit in asked:
        audit.answer = GroupAnswer(tuple(audit.group.places))
    if not any(job.pieces for job in jobs):
        return
    judged_rows = judged(spark, jobs, options.piece_bytes)
    if options.parquet is not None:
        judged_rows = judged_rows.persist(StorageLevel.MEMORY_AND_DISK)
    try:
        for row in judged_rows.where("listed").select("job", "copy", "kind", "payload").collect():
            asked[row["job"]].answer.take(row["copy"], row["kind"], json.loads(row["payload"]))
        if options.parquet is not None:
            for number, audit in enumerate(asked):
                _store(
                    judged_rows.where(F.col("job") == number),
                    tuple(audit.group.places),
                    options.parquet / audit.group.name,
                )
    except Exception as error:
        for audit in asked:
            audit.result.unreadable = _cause(error)
    finally:
        judged_rows.unpersist()


def _judge(audit: _Audit, options: Options) -> None:
    result, answer = audit.result, audit.answer
    if answer.unread:
        raise CannotRead(answer.unread[0])
    pieces = result.pieces(options.piece_bytes)
    if missing := {begin for begin, _ in pieces} - answer.pieces.keys():
        raise CannotRead(f"Spark gave no answer about {len(missing)} of {len(pieces)} pieces, from {min(missing)} on")
    _count(answer, result)
    found, more = answer.findings()
    result.take(found)
    for kind, times in more.items():
        result.count(kind, times)
    _account(answer, result)
    _check_against_history(answer, result, audit.history)
    if answer.differing:
        _check_kept(audit.group, result)  # else a copy being seeded is compared in vain


def _compare(spark: SparkSession, audits: Sequence[_Audit], options: Options) -> None:
    """Compare the differing pieces of all groups frame by frame, and take the findings.

    If that fails, compare each group by itself: one unreadable group does not stop the audit of the others.
    """
    asked = [audit for audit in audits if audit.answer.differing and audit.result.unreadable is None]
    try:
        _compare_some(spark, asked, options)
    except Exception:
        _each(asked, lambda audit: _compare_some(spark, [audit], options))


def _compare_some(spark: SparkSession, audits: Sequence[_Audit], options: Options) -> None:
    of = [(audit, name) for audit in audits for name in list(audit.group.places)[1:]]
    for (audit, name), found in zip(of, differences(spark, [_pair(audit, name, options) for audit, name in of])):
        result = audit.result
        found = [row | {"copy": name} for row in found]
        if result.is_behind(name):
            found = [
                row for row in found if row["what"] != FindingKind.MISSING or row["offset"] < result.logs[name].end
            ]
        _take_differences(found, result)


def _pair(audit: _Audit, name: str, options: Options) -> Pair:
    """Return master and the slave `name` as a pair for `differences`."""
    sides, result = {MASTER: MASTER, SLAVE: name}, audit.result
    damaged = [
        (side, row["offset"], row["end"])
        for side, copy in sides.items()
        for row in result.findings
        if row["what"] == FindingKind.DAMAGED and row["copy"] in (copy, BOTH)
    ]
    logs = {side: result.logs[copy] for side, copy in sides.items()}
    return Pair(
        {side: audit.group.places[copy] for side, copy in sides.items()},
        {side: LogRange(log.start, log.end, log.chain) for side, log in logs.items()},
        audit.differing(options.piece_bytes),
        result.watermark,
        damaged,
    )


def _conclude(audit: _Audit, options: Options) -> None:
    """Check that every difference has a finding, and that all due bytes were read."""
    result, differing = audit.result, audit.differing(options.piece_bytes)
    if differing:
        _explain(differing, result)
    _check_all_was_read(result)
    for row in result.findings:  # a judgement of the master's copy holds for both copies where they are equal
        if row["what"] in (FindingKind.BATCH_TWICE, FindingKind.ID_TWICE):
            row["copy"] = MASTER if any(begin <= row["offset"] < until for begin, until in differing) else BOTH


def _account_for_delays(spark: SparkSession, audit: _Audit, groups: Sequence[Group], options: Options) -> None:
    """Account for the messages of a delay group; look for sent messages in the logs of all groups of this run.

    A directory does not record when it was copied, so its last frame sets the time by which messages were due.
    """
    place = audit.group.places[MASTER]
    if not audit.group.is_delay and not any(map(is_delay_group, audit.group.places.values())):
        return
    targets = [Source(group.name, group.places[MASTER]) for group in groups if MASTER in group.places]
    now_ms = None if "path" in place else audit.result.until_ms - AHEAD_MS_MAX
    closed = {group.name: group.closed for group in groups if group.closed}
    account = account_for(
        spark, Source(audit.group.name, place), targets, now_ms=now_ms, parquet=options.parquet, closed=closed
    )
    audit.result.delayed = account.rows
    audit.result.notes += account.notes
    for row in account.findings:
        audit.result.add(FindingKind(row.pop("what")), copy=BOTH, **row)
    for kind, times in account.more.items():
        audit.result.count(kind, times)


def _finish(spark: SparkSession, audit: _Audit, options: Options) -> None:
    group, result = audit.group, audit.result
    if options.journal is not None:
        subjects = {name: audit.answer.subjects[name] for name in group.places}
        ends = {name: {subject: row["end"] for subject, row in rows.items()} for name, rows in subjects.items()}
        if (anchor := audit.history.anchor) is not None:
            ends = {name: dict(anchor.ends) | rows for name, rows in ends.items()}
        known = {name: _firsts(place, result.logs[name].start) for name, place in group.places.items()}
        if are_all := None not in known.values():
            firsts = {name: found or {} for name, found in known.items()}
        else:
            firsts = {name: {subject: row["first"] for subject, row in rows.items()} for name, rows in subjects.items()}
        check_journal(spark, group, firsts, ends, result, options.journal, are_all=are_all)
    _add_reported_damage(group, result)
    if result.found:
        _check_kept(group, result)
    describe_findings(group.name, group.places, result.logs, result.findings)
    _count_repaired(result)
    _note_unlisted(result)
    if options.parquet is not None:
        rows = [{name: row.get(name) for name in FINDINGS.fieldNames()} for row in result.findings]
        path = options.parquet / group.name / "findings"
        spark.createDataFrame(rows, FINDINGS).write.mode("overwrite").parquet(str(path))
    if options.ledger is not None:
        audit.entry = verified(audit.answer, result, audit.history, options.piece_bytes)


def _firsts(place: Mapping[str, str], start: int) -> dict[str, int] | None:
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


def _hold(group: Group, held: ExitStack) -> None:
    """Keep both copies from deleting segments until `held` is closed.

    The copies are read one after the other, piece by piece. A segment deleted by retention meanwhile would look lost.
    """
    for place in group.places.values():
        held.enter_context(closing(open_copy(place))).hold()


def _check_kept(group: Group, result: Result) -> None:
    """Raise CannotRead if a copy has lost frames while it was read: findings may come from just that.

    A restarted broker forgets holds on its log, and a directory in use has none.
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


def _add_reported_damage(group: Group, result: Result) -> None:
    """Add damage that a running broker has reported since the audit began and that no reader met.

    Bytes read twice may be repaired before the reader that would report them.
    """
    for name, place in group.places.items():
        met: Counter[tuple[int, int, str]] = Counter()
        if "broker" in place:
            with suppress(CannotRead), closing(open_copy(place)) as copy:  # an absent broker reports nothing
                met = Counter(copy.describe().damaged) - Counter(result.logs[name].damaged)
        for begin, end, reason in met:
            if not any(_is_about(row, name, begin, end) for row in result.findings):
                result.add(FindingKind.DAMAGED, copy=name, offset=begin, end=end, text=reason)


def _is_about(row: Row, copy: str, begin: int, end: int) -> bool:
    at = row["offset"]
    return row["copy"] in (copy, BOTH) and at is not None and at < end and (row["end"] or at + 1) > begin


def _cause(error: Exception) -> str:
    """Return the line with the worker's error out of Spark's many."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    named = [line for line in lines if line.startswith(("audit.", "qmq.", "OSError", "PermissionError"))]
    return (named or lines or [type(error).__name__])[-1 if named else 0]


def _freeze(group: Group, result: Result) -> None:
    """Describe both copies, and freeze the high watermark before the ends are read.

    A stated high watermark held for both disks. So both copies must reach the higher one, and a copy that ends below it
    has lost frames. The lower end instead would hide exactly that.
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
            if begin >= log.end:  # missing segments before it are found by reading
                result.add(FindingKind.DAMAGED, copy=name, offset=begin, end=max(end, result.watermark), text=why)
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
    """Choose the ranges to read: all, or the bytes after a verified point that both copies still have, and a part of
    the old ones.
    """
    history = History(known_from([]), result.start)
    if ledger is not None:
        history = find_verified(ledger.known(group.name), group.places, result.logs, share=share)
    if history.broken is not None:
        for copy in history.broken.copies:
            result.add(history.broken.what, copy=copy, text=history.broken.text, offset=history.broken.offset)
    verified = history.known.anchor.verified if history.known.anchor else result.start
    if history.broken is None and verified < result.start:
        result.unverified = result.start - verified
        result.notes.append(f"retention has removed [{verified}, {result.start}), which no run had verified")
    if history.anchor is not None:  # the verified range was acknowledged, though an idle log does not state it
        result.watermark = max(result.watermark, history.anchor.verified)
    ends = [log.end for name, log in result.logs.items() if log.end < history.begin and not result.is_behind(name)]
    if ends:
        # A copy lost verified bytes: read everything from there on, starting at an earlier piece's border.
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


def _segments(result: Result, bases: Mapping[str, Sequence[int]]) -> list[int]:
    """Return the closed segments within the ranges to read; index and snapshot lie beside them."""
    reads = result.reads()
    closed = {pair for places in bases.values() for pair in pairwise(places)}
    return sorted({base for base, end in closed if any(begin < end <= until for begin, until in reads)})


def _count(answer: GroupAnswer, result: Result) -> None:
    """Count the bytes read; raise CannotRead if there are none."""
    result.read = answer.read(result.begin, result.watermark)
    if not any(side["frames"] for side in result.read.values()) and not result.found and result.begin == result.start:
        raise CannotRead("not one frame was read: nothing is proven")
    epochs = sorted(answer.epochs.items(), key=lambda pair: pair[1])
    result.epochs = [f"{epoch} from {offset}" for epoch, offset in epochs]
    hours = sorted(answer.hours, key=lambda row: (row["subject"], row["hour"], row["copy"]))
    result.hours = [row | {"hour": _hour(row["hour"])} for row in hours[:HOURS_MAX]]
    if len(hours) > HOURS_MAX:
        result.notes.append(f"only the first {HOURS_MAX} counts per subject and hour are listed; --parquet keeps all")


def _hour(hours: int) -> str:
    return datetime.fromtimestamp(hours * 3600, UTC).strftime("%Y-%m-%d %H:00")


def _account(answer: GroupAnswer, result: Result) -> None:
    """Take the equation of each consumer group, over all hours, from the master's copy."""
    if answer.is_master_damaged():
        return
    result.conserved = sorted(answer.accounts, key=lambda row: (row["subject"], row["consumer_group"]))
    if len(result.conserved) > ACCOUNTS_MAX:
        del result.conserved[ACCOUNTS_MAX:]
        result.notes.append(f"only the first {ACCOUNTS_MAX} consumer groups are accounted for here; --parquet has all")


def _take_differences(found: Sequence[Row], result: Result) -> None:
    """Take differences below the high watermark as findings. Later ones become a note: they were not acknowledged."""
    promised = [row for row in found if row["offset"] < result.watermark]
    result.take([row for row in promised if row["what"] != FindingKind.HISTORY])
    after = [row for row in promised if row["what"] == FindingKind.HISTORY]
    if after:
        first = min(row["offset"] for row in after)
        sides = MASTER, after[0]["copy"]
        before = (row for row in _of_log(result.findings) if row["copy"] in sides and row["offset"] is not None)
        if not any(row["offset"] < first for row in before):
            result.take([row for row in after if row["offset"] == first])
        result.history = first
        result.notes.append(
            f"{len(after)} frames from {first} on differ in their chain alone, as they follow a difference"
        )
    if later := sum(row["frames"] for row in found if row["offset"] >= result.watermark):
        result.notes.append(f"{later} frames past the high watermark are not the same on both copies")


def _check_against_history(answer: GroupAnswer, result: Result, history: History) -> None:
    """Add findings about changes since earlier runs that both copies share.

    These are exchanged ranges, subjects that end lower, and frames gone without a retention frame.
    """
    changed = [
        piece
        for piece in history.exchanged(digests_of(answer, result))
        if not any(piece.begin <= begin < piece.end for begin in answer.differing) and piece.end <= result.watermark
    ]
    before = history.known.anchor
    if before is not None and result.begin == result.start:
        now = answer.ends()
        for subject, end in before.ends.items():
            if now.get(subject, end) < end:
                text = f"it ends at sequence {now[subject]}; the run of {before.run} found it at {end}"
                result.add(FindingKind.REWOUND, copy=BOTH, text=text, subject=subject, sequence=now[subject])
    if (kept := kept_from(answer, result)) is not None:
        kept_before = history.known.kept if history.anchor is not None else None
        _check_starts(result, max(kept, kept_before or 0))
    for begin, end in _together((piece.begin, piece.end) for piece in changed):
        result.add(FindingKind.REWRITTEN, copy=BOTH, text="it is not what was read here before", offset=begin, end=end)


def _together(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the ranges with neighbours joined."""
    found: list[tuple[int, int]] = []
    for begin, end in ranges:
        if found and found[-1][1] == begin:
            begin, _ = found.pop()
        found.append((begin, end))
    return found


def _check_starts(result: Result, kept: int) -> None:
    """Add findings about logs that begin after the first kept offset: all copies alike, or one more than the others."""
    if (oldest := result.oldest()) > kept:
        text = f"both logs begin at {oldest}, and frames are kept from {kept} on"
        result.add(FindingKind.RETENTION, copy=BOTH, text=text, offset=oldest)
    for name, log in result.logs.items():
        if log.start > max(oldest, kept):
            text = f"its log begins at {log.start}, and the other copy's at {oldest}; frames are kept from {kept} on"
            result.add(FindingKind.RETENTION, copy=name, text=text, offset=log.start)


def _check_all_was_read(result: Result) -> None:
    """Add a finding for each copy with unread bytes and no other explanation: both may lack the same bytes.

    A frame across the watermark is read whole. These are more bytes than due, and no finding.
    """
    if not _SHORT.isdisjoint(result.found):
        return
    due = result.watermark - result.begin
    for name, read in result.read.items():
        if read["due_bytes"] < due and not result.is_behind(name):
            text = f"{read['due_bytes']} bytes of the {due} that are due were read, and no damage was met"
            result.add(FindingKind.UNREAD, copy=name, text=text)


def _explain(pieces: list[tuple[int, int]], result: Result) -> None:
    """Add a finding for every differing piece without one, so that no difference is dropped."""
    changed = result.history if result.history is not None else result.watermark
    explained = [row for row in _of_log(result.findings) if row["copy"] != BOTH or row["what"] == FindingKind.DAMAGED]
    spans = [(row["offset"], row["end"] or row["offset"] + 1) for row in explained if row["offset"] is not None]
    spans += [(log.end, result.watermark) for name, log in result.logs.items() if result.is_behind(name)]
    for begin, until in pieces:
        if begin >= min(changed, result.watermark) or any(at < until and end > begin for at, end in spans):
            continue
        text = "bytes differ, the frames' headers do not"
        result.add(FindingKind.DIFFERENT, copy=SLAVE, text=text, offset=begin, end=until)


def _of_log(findings: Sequence[Row]) -> list[Row]:
    return [row for row in findings if row["what"] not in DERIVED]


def _count_repaired(result: Result) -> None:
    """Count damage that was repaired before the second reading as repaired."""
    if repaired := sum(row["what"] == FindingKind.REPAIRED for row in result.findings):
        damaged = result.found.pop(FindingKind.DAMAGED) - repaired
        result.found |= {FindingKind.REPAIRED: repaired} | ({FindingKind.DAMAGED: damaged} if damaged else {})


def _note_unlisted(result: Result) -> None:
    listed = Counter(row["what"] for row in result.findings)
    for kind, times in result.found.items():
        if times > listed[kind]:
            result.notes.append(f"{times} findings are {kind}; the first {listed[kind]} of them are listed")


def _store(judged_rows: DataFrame, names: tuple[str, ...], folder: Path) -> None:
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
