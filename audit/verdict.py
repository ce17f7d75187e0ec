"""Core. The result of a broker group from the judges' answer: counts, equations, findings, and a reason for each
difference."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from operator import itemgetter

from qmq.audit.copies import CannotRead
from qmq.audit.findings import (
    BOTH,
    DERIVED,
    MASTER,
    SLAVE,
    UNVERIFIED,
    FindingKind,
    Row,
)
from qmq.audit.history import (
    History,
)
from qmq.audit.places import Change
from qmq.audit.results import GroupAnswer, Result, digests_of, kept_from
from qmq.subjects import real_subject

DIFFERENCES = frozenset(
    {
        FindingKind.MISSING,
        FindingKind.EXTRA,
        FindingKind.SHIFTED,
        FindingKind.DIFFERENT,
        FindingKind.REORDERED,
    }
)
_SHORT = UNVERIFIED | DIFFERENCES | {FindingKind.DAMAGED, FindingKind.REPAIRED, FindingKind.HISTORY}
"""Kinds that explain why fewer bytes were read than due; other kinds concern bytes that were read."""


def count_read(answer: GroupAnswer, result: Result) -> None:
    """Count the bytes read; raise CannotRead if there are none."""
    result.read = answer.read(result.begin, result.watermark)
    if not any(side["frames"] for side in result.read.values()) and not result.found and result.begin == result.start:
        raise CannotRead("not one frame was read: nothing is proven")
    epochs = sorted(answer.epochs.items(), key=lambda pair: pair[1])
    result.epochs = [f"{epoch} from {offset}" for epoch, offset in epochs]
    result.hours = [row | {"hour": _hour(row["hour"])} for row in answer.hours.rows()]
    if answer.hours.is_cut:
        shown = f"only the first {len(result.hours)} counts per subject and hour are listed"
        result.notes.append(f"{shown}; --parquet keeps all")


def _hour(hours: int) -> str:
    return datetime.fromtimestamp(hours * 3600, UTC).strftime("%Y-%m-%d %H:00")


def take_accounts(answer: GroupAnswer, result: Result) -> None:
    """Take the equation of each consumer group, over all hours, from the master's copy."""
    if answer.is_master_damaged():
        return
    result.conserved = answer.accounts.rows()
    if answer.accounts.is_cut:
        shown = f"only the first {len(result.conserved)} consumer groups are accounted for here"
        result.notes.append(f"{shown}; --parquet keeps all")


def take_differences(found: Sequence[Row], result: Result) -> None:
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
        frames = sum(row["frames"] for row in after)
        result.notes.append(f"{frames} frames from {first} on differ in their chain alone, as they follow a difference")
    if later := sum(row["frames"] for row in found if row["offset"] >= result.watermark):
        result.notes.append(f"{later} frames past the high watermark are not the same on both copies")


def check_against_history(answer: GroupAnswer, result: Result, history: History) -> None:
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
        result.add(
            FindingKind.REWRITTEN, copy=BOTH, text="other bytes than an earlier run read here", offset=begin, end=end
        )


RECORDED_MS, CLOCKS_MS = 86_400_000, 600_000
"""Longest time from a command to its frame: a broker group may be absent meanwhile. And the maximum difference between
the clocks of brokers and metaservers.
"""


def check_trail(answer: GroupAnswer, result: Result, trail: Iterable[Change]) -> None:
    """Add a finding for each consumer group that was moved or removed without a command in the audit trail."""
    times: dict[tuple[str, str], list[int]] = defaultdict(list)
    for change in trail:
        times[change.subject, change.consumer_group].append(change.at_ms)
    for _, (row, copies) in sorted(answer.moved.items(), key=itemgetter(0)):
        known = times[real_subject(row["subject"]), row["consumer_group"]]
        if not any(-CLOCKS_MS <= row["at_ms"] - at_ms <= RECORDED_MS for at_ms in known):
            text = f"{row['text']}, and the audit trail has no command for it"
            about = {"offset": row["offset"], "end": row["end"], "subject": row["subject"]}
            for copy in (BOTH,) if len(copies) == len(answer.names) else sorted(copies):
                result.add(FindingKind.UNRECORDED, copy=copy, text=text, **about)


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


def check_all_was_read(result: Result) -> None:
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


def explain_pieces(pieces: list[tuple[int, int]], result: Result) -> None:
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


_FOLLOWING = frozenset(
    {
        FindingKind.SEQUENCE,
        FindingKind.PROGRESS,
        FindingKind.PASSED,
        FindingKind.UNACKED,
        FindingKind.CONSERVATION,
        FindingKind.DEAD_MISSING,
        FindingKind.DEAD_UNFOUNDED,
        FindingKind.UNPLANNED,
    }
)
"""Kinds of findings that a copy has only because it lacks earlier frames, or has extra ones."""


def leave_out_consequences(result: Result) -> None:
    """Leave out the consequences of differences between the copies, and note them.

    A frame that one copy alone has twice is reported as such, not as extra too. Behind a difference, a copy's judges
    meet gaps, and acks of absent messages. Findings about differing frames themselves stay: they name the wrong copy.
    """
    differences = [row for row in result.findings if row["what"] in DIFFERENCES]
    twice = {(row["copy"], row["offset"]) for row in result.findings if row["what"] == FindingKind.BATCH_TWICE}
    kept, left = [], Counter[str]()
    for row in result.findings:
        is_twice = row["what"] in (FindingKind.EXTRA, FindingKind.MISSING) and (_has(row), row["offset"]) in twice
        if is_twice or (row["what"] in _FOLLOWING and _follows(row, differences)):
            left[row["what"]] += 1
        else:
            kept.append(row)
    result.findings[:] = kept
    for kind, times in left.items():
        result.count(kind, -times)
        if not result.found[kind]:
            del result.found[kind]
        if kind in _FOLLOWING:
            result.notes.append(f"{times} findings of one copy alone are left out, as they follow a difference: {kind}")


def _has(row: Row) -> str:
    """Return the copy that has the frames that the other one lacks."""
    return MASTER if row["what"] == FindingKind.MISSING else str(row["copy"])


def _follows(row: Row, differences: Sequence[Row]) -> bool:
    """Return whether a finding lies behind a difference of its copy, and not in the differing frames."""
    ours = [other for other in differences if row["copy"] in (MASTER, other["copy"])]
    if row["copy"] == BOTH or not ours or row["offset"] is None:
        return row["copy"] != BOTH and bool(ours)
    theirs = {FindingKind.SHIFTED, FindingKind.EXTRA if row["copy"] == MASTER else FindingKind.MISSING}
    is_inside = any(
        other["offset"] <= row["offset"] < (other["end"] or 0) for other in ours if other["what"] not in theirs
    )
    return not is_inside and min(other["offset"] for other in ours) <= row["offset"]


def _of_log(findings: Sequence[Row]) -> list[Row]:
    return [row for row in findings if row["what"] not in DERIVED]


def count_repaired(result: Result) -> None:
    """Count damage that was repaired before the second reading as repaired."""
    if repaired := sum(row["what"] == FindingKind.REPAIRED for row in result.findings):
        damaged = result.found.pop(FindingKind.DAMAGED) - repaired
        result.found |= {FindingKind.REPAIRED: repaired} | ({FindingKind.DAMAGED: damaged} if damaged else {})


def note_unlisted(result: Result) -> None:
    listed = Counter(row["what"] for row in result.findings)
    for kind, times in result.found.items():
        if times > listed[kind]:
            result.notes.append(f"{times} findings are {kind}; the first {listed[kind]} of them are listed")
