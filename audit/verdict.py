"""Core. The result of a broker group from the judges' answer: counts, equations, findings, and a reason for each
difference."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

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
from qmq.audit.plan import HOURS_MAX
from qmq.audit.results import GroupAnswer, Result, digests_of, kept_from

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


def count_read(answer: GroupAnswer, result: Result) -> None:
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


def take_accounts(answer: GroupAnswer, result: Result) -> None:
    """Take the equation of each consumer group, over all hours, from the master's copy."""
    if answer.is_master_damaged():
        return
    result.conserved = sorted(answer.accounts, key=lambda row: (row["subject"], row["consumer_group"]))
    if len(result.conserved) > ACCOUNTS_MAX:
        del result.conserved[ACCOUNTS_MAX:]
        result.notes.append(f"only the first {ACCOUNTS_MAX} consumer groups are accounted for here; --parquet has all")


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
