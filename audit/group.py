"""Shell. The audit of broker groups: freeze the range in which their copies must agree, read all in one plan, report.

The copies are described and held against retention. At the end, neither may have lost frames meanwhile.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

from pyspark.sql import SparkSession

from qmq.audit.copies import CannotRead, Copy, open_copy
from qmq.audit.delay_groups import Source, account_for, is_delay_group
from qmq.audit.executors import Executor, Executors, Failed, Rows, Start
from qmq.audit.facts import LogRange, Reading
from qmq.audit.findings import BOTH, MASTER, SLAVE, FindingKind, Row, share_of
from qmq.audit.frame_order import AHEAD_MS_MAX
from qmq.audit.history import History, find_verified, ledger_entry, verified
from qmq.audit.inspection import Pair, compare_pair, describe_findings
from qmq.audit.journal import check_journal, due_of_logs, due_since
from qmq.audit.places import check_places, places_now
from qmq.audit.plan import Job, judge_facts, read_task, tasks_of
from qmq.audit.results import Group, GroupAnswer, Result
from qmq.audit.store import store_counts, store_delays, store_findings
from qmq.audit.verdict import (
    check_against_history,
    check_all_was_read,
    check_trail,
    count_read,
    count_repaired,
    explain_pieces,
    leave_out_consequences,
    note_unlisted,
    take_accounts,
    take_differences,
)
from qmq.audit.wave import Audit, Options, cause, each, waves
from qmq.ledger import Ledger, known_from, lies_in

AGAIN_MAX = 3
"""Repetitions of an audit while its brokers recover."""


def audit_group(spark: SparkSession | Start | None, group: Group, **options: Any) -> Result:
    """Compare the copies of one broker group; see `audit_groups`."""
    return audit_groups(spark, [group], Options(**options))[0]


def audit_groups(spark: SparkSession | Start | None, groups: Sequence[Group], options: Options) -> list[Result]:
    """Compare the copies of each broker group; errors are stored in `unreadable` and not raised.

    Groups with absent brokers, or with changed roles, are audited again once they have recovered. `spark`: see
    `Executors`.
    """
    executors = Executors(spark)
    audits = _audit_all(executors, groups, options, groups)
    for _ in range(AGAIN_MAX):
        unread = {number: groups[number] for number, audit in enumerate(audits) if audit.result.unreadable}
        well = wait_until_well(unread)
        for number, audit in zip(well, _audit_all(executors, [*well.values()], options, groups)):
            audit.result.notes.append(f"read again; the reading before failed: {audits[number].result.unreadable}")
            audits[number] = audit
        if not well:
            break
    for audit in audits:
        if audit.result.unreadable is not None:
            _record(audit, options)
        audit.result.unreadable = audit.result.unreadable or audit.unstored
    return [audit.result for audit in audits]


def _audit_all(executors: Executors, groups: Sequence[Group], options: Options, known: Sequence[Group]) -> list[Audit]:
    """Audit groups once. `known`: groups with logs to search for messages of delay groups."""
    audits = [Audit(group, _new(group)) for group in groups]
    try:
        for wave in waves(audits, lambda audit: _prepare(audit, options, len(known))):
            _audit_wave(executors, wave, options, known)
    finally:
        for audit in audits:
            audit.held.close()
    return audits


def _audit_wave(executors: Executors, wave: Sequence[Audit], options: Options, known: Sequence[Group]) -> None:
    executor = executors.of(sum(audit.due_bytes for audit in wave))
    _read_and_judge(executor, wave, options)
    each(wave, lambda audit: _judge(audit, options))
    _compare(executor, wave, options)
    each(wave, lambda audit: conclude(audit, options))
    for audit in wave:  # each with Spark's own tasks, so one after the other
        each([audit], lambda audit: _account_for_delays(executors, audit, known, options))
        each([audit], lambda audit: _check_journal(executors, audit, options))
    each(wave, lambda audit: _finish(audit, options))
    for audit in wave:
        if options.tables is not None and audit.result.unreadable is None:
            audit.store(partial(store_findings, audit.result, options.tables))
        if audit.result.unreadable is None:  # others are audited again
            _record(audit, options)
        audit.release()


def _record(audit: Audit, options: Options) -> None:
    """Add the run's line to the ledger. If that fails, the findings are reported all the same."""
    if options.ledger is not None:
        try:
            options.ledger.append(ledger_entry(audit.result, audit.entry))
        except OSError as error:
            audit.unstored = audit.unstored or f"the ledger cannot be written: {error}"


def _new(group: Group) -> Result:
    places = {copy: place.get("path") or place["broker"] for copy, place in group.places.items()}
    until_ms = int(time.time() * 1000) + AHEAD_MS_MAX
    return Result(group.name, places, until_ms=until_ms, min_copies=group.min_copies)


def _prepare(audit: Audit, options: Options, groups: int) -> None:
    """Freeze the range to read, and plan the job. `groups`: number of the run's broker groups."""
    group, result = audit.group, audit.result
    check_places(group.name, group.places)
    hold_copies(group, audit.held)
    freeze(group, result)
    audit.history = history = look_back(group, result, options.ledger, options.share)
    reads = result.reads()
    begins = {begin for begin, _ in reads} - {until for _, until in reads}
    anchor = history.anchor
    bases = {name: [base for base in log.segments if base <= result.watermark] for name, log in result.logs.items()}
    audit.share = share_of(groups, takes_ends=options.ledger is not None or options.journal is not None)
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
        segments=segments_to_check(result, bases),
        share=audit.share,
    )


def _read_and_judge(executor: Executor, audits: Sequence[Audit], options: Options) -> None:
    """Read and judge all groups of a wave at once, and collect each group's answer."""
    asked = [audit for audit in audits if audit.job is not None and audit.result.unreadable is None]
    jobs = [audit.job for audit in asked if audit.job is not None]
    for audit in asked:
        audit.answer = GroupAnswer(tuple(audit.group.places), audit.share)
    if not any(job.pieces for job in jobs):
        return

    def store(judged: Rows) -> None:
        for number, audit in enumerate(asked):
            if (tables := options.tables) is not None:
                names = tuple(audit.group.places)
                audit.store(partial(store_counts, judged, number, audit.group.name, names, tables))

    try:
        tasks = tasks_of(jobs, options.piece_bytes)
        wanted = store if options.tables is not None else None
        for job, copy, kind, payload, _ in executor.fold(tasks, read_task, [judge_facts], wanted):
            asked[job].answer.take(copy, kind, json.loads(payload))
    except Exception as error:
        for audit in asked:
            audit.result.unreadable = cause(error)


def _judge(audit: Audit, options: Options) -> None:
    result, answer = audit.result, audit.answer
    if answer.unread:
        raise CannotRead(answer.unread[0])
    pieces = result.pieces(options.piece_bytes)
    if missing := {begin for begin, _ in pieces} - answer.pieces.keys():
        raise CannotRead(f"Spark gave no answer about {len(missing)} of {len(pieces)} pieces, from {min(missing)} on")
    count_read(answer, result)
    found, more = answer.findings()
    result.take(found)
    for kind, times in more.items():
        result.count(kind, times)
    take_accounts(answer, result)
    check_against_history(answer, result, audit.history)
    if options.trail is not None and answer.moved:
        try:
            check_trail(answer, result, options.trail())
        except CannotRead as error:
            result.notes.append(f"moved consumer groups are not compared with the audit trail: {error}")
    if answer.differing:
        check_kept(audit.group, result)  # else a copy being seeded is compared in vain


def _compare(executor: Executor, audits: Sequence[Audit], options: Options) -> None:
    """Compare the differing pieces of all groups frame by frame, one task per pair, and take the findings."""
    asked = [audit for audit in audits if audit.answer.differing and audit.result.unreadable is None]
    of = [(audit, name) for audit in asked for name in list(audit.group.places)[1:]]
    pairs = [_pair(audit, name, options) for audit, name in of]
    for (audit, name), found in zip(of, executor.run(compare_pair, pairs)):
        result = audit.result
        if isinstance(found, Failed):
            result.unreadable = f"the copies could not be compared: {found.reason}"
            continue
        rows = [row | {"copy": name} for row in found.rows]
        if result.is_behind(name):
            rows = [row for row in rows if row["what"] != FindingKind.MISSING or row["offset"] < result.logs[name].end]
        take_differences(rows, result)
        for kind, times in found.more.items():
            result.count(kind, times)


def _pair(audit: Audit, name: str, options: Options) -> Pair:
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
        [
            (begin, end)
            for begin, end in audit.differing(options.piece_bytes)
            if begin < logs[SLAVE].end or not result.is_behind(name)
        ],
        result.watermark,
        damaged,
    )


def conclude(audit: Audit, options: Options) -> None:
    """Check that every difference has a finding, and that all due bytes were read.

    Damage repaired between the two readings explains a difference that the second one does not see.
    """
    result, differing = audit.result, audit.differing(options.piece_bytes)
    if differing:
        add_reported_damage(audit.group, result)
        explain_pieces(differing, result)
        leave_out_consequences(result)
    check_all_was_read(result)


def _account_for_delays(executors: Executors, audit: Audit, groups: Sequence[Group], options: Options) -> None:
    """Account for the messages of a delay group; look for sent messages in the logs of all groups of this run.

    A directory does not record when it was copied, so its newest frame sets the time by which messages were due.
    """
    place = audit.group.places[MASTER]
    if not audit.group.is_delay and not any(map(is_delay_group, audit.group.places.values())):
        return
    targets = [Source(group.name, group.places[MASTER]) for group in groups if MASTER in group.places]
    before = audit.history.before
    newest_ms = max(audit.answer.last_ms, before.timestamp_ms if before is not None else 0)
    now_ms = newest_ms if "path" in place else audit.result.until_ms - AHEAD_MS_MAX
    closed = {group.name: group.closed for group in groups if group.closed}

    def store(judged: Rows) -> None:
        if options.tables is not None:
            audit.store(partial(store_delays, judged, audit.group.name, options.tables))

    source = Source(audit.group.name, place)
    wanted = store if options.tables is not None else None
    account = account_for(executors, source, targets, now_ms=now_ms, store=wanted, closed=closed)
    audit.result.delayed = account.rows
    audit.result.notes += account.notes
    for row in account.findings:
        audit.result.add(FindingKind(row.pop("what")), copy=BOTH, **row)
    for kind, times in account.more.items():
        audit.result.count(kind, times)


def _check_journal(executors: Executors, audit: Audit, options: Options) -> None:
    group, result = audit.group, audit.result
    if options.journal is None:
        return
    subjects = {name: audit.answer.subjects[name] for name in group.places}
    ends = {name: {subject: range.end for subject, range in rows.items()} for name, rows in subjects.items()}
    if (anchor := audit.history.anchor) is not None:
        ends = {name: dict(anchor.ends) | rows for name, rows in ends.items()}
    due = None if anchor is None or options.ledger is None else due_since(options.ledger, group, result)
    due = due or due_of_logs(group, result, subjects)
    equal_until = min([result.whole_until(), *audit.answer.differing])
    check_journal(executors, group, due, ends, result, options.journal, equal_until=equal_until)


def _finish(audit: Audit, options: Options) -> None:
    group, result = audit.group, audit.result
    add_reported_damage(group, result)
    if result.found:
        check_kept(group, result)
    describe_findings(group.name, group.places, result.logs, result.findings)
    count_repaired(result)
    note_unlisted(result)
    if options.ledger is not None:
        audit.entry = verified(audit.answer, result, audit.history, options.piece_bytes)


AGAIN_WAIT_S, POLL_S = 120.0, 0.5
"""Longest wait for brokers that recover: time for a restart, or for seeding a slave with some GB of log."""


def wait_until_well(groups: Mapping[int, Group]) -> dict[int, Group]:
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


def freeze(group: Group, result: Result) -> None:
    """Describe both copies, and freeze the high watermark before the ends are read.

    Frames below a stated high watermark were on both disks. So both copies must reach the higher watermark, and a copy
    that ends below it has lost frames. A comparison up to the lower end would hide that loss.
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
            result.notes.append(f"the {name} ends at {log.end}, {behind} bytes before the end that others acknowledged")
        if log.end > result.watermark:
            past = log.end - result.watermark
            result.notes.append(f"the {name} continues to {log.end}, {past} bytes past the high watermark")


def look_back(group: Group, result: Result, ledger: Ledger | None, share: int) -> History:
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


def segments_to_check(result: Result, bases: Mapping[str, Sequence[int]]) -> list[int]:
    """Return the closed segments within the ranges to read; index and snapshot lie beside them."""
    reads = result.reads()
    closed = {pair for places in bases.values() for pair in pairwise(places)}
    return sorted({base for base, end in closed if any(begin < end <= until for begin, until in reads)})


def hold_copies(group: Group, held: ExitStack) -> None:
    """Keep both copies from deleting segments until `held` is closed.

    The copies are read one after the other, piece by piece. A segment deleted by retention meanwhile would look lost.
    """
    for place in group.places.values():
        held.enter_context(closing(open_copy(place))).hold()


def check_kept(group: Group, result: Result) -> None:
    """Raise CannotRead if a copy has lost frames while it was read: that alone may have caused the findings.

    A restarted broker forgets holds on its log, and a directory in use has none.
    """
    for name, place in group.places.items():
        with closing(open_copy(place)) as copy:
            now, incarnation = copy.describe(), copy.owner().incarnation
        if incarnation != result.incarnations[name]:
            raise CannotRead(f"the {name} was emptied or replaced while it was read: audit it again")
        if now.start > result.start:
            raise CannotRead(f"the {name} deleted [{result.start}, {now.start}) while it was read: audit it again")
        if now.end < result.logs[name].end:
            span = f"[{now.end}, {result.logs[name].end})"
            raise CannotRead(f"the {name} cut off {span} while it was read, as after a failover: audit it again")


def add_reported_damage(group: Group, result: Result) -> None:
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
