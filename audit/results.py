"""Core. Result of one broker group's audit, and the judges' rows that it is built from: counts, and unique findings."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from operator import itemgetter
from typing import Any, NamedTuple

from qmq.audit.copies import Description
from qmq.audit.facts import ALL
from qmq.audit.findings import (
    ACCOUNT,
    BOTH,
    COPIES_MIN,
    EPOCHS,
    FINDING,
    FINDINGS,
    FINDINGS_MAX,
    FULL_SHARE,
    HOUR,
    KEPT,
    MASTER,
    MORE,
    MOVED,
    PIECE,
    SUBJECT,
    UNACKED_MS,
    UNREAD,
    FindingKind,
    Row,
    Share,
    finding_row,
)
from qmq.audit.frame_order import FOREVER_MS
from qmq.audit.selection import split_range
from qmq.ledger import Piece

READ = ("messages", "bytes", "due_bytes", "frames")
"""Counts per copy; `due_bytes` lie below the high watermark."""
_FIELDS = ("what", "offset", "end", "subject", "sequence", "id", "text")


@dataclass(slots=True)
class Result:
    """Findings of one broker group's audit, and the ranges read for them. Offsets below `watermark` were
    acknowledged."""

    group: str
    places: dict[str, str]
    until_ms: int = FOREVER_MS
    """Start of the audit plus AHEAD_MS_MAX: upper bound of all frames' times."""
    start: int = 0
    begin: int = 0
    """Everything from here on is read; before it, only `again`."""
    again: list[Piece] = field(default_factory=list)
    cuts: list[int] = field(default_factory=list)
    """Ends of earlier runs: ranges in between are compared with their digests."""
    watermark: int = 0
    logs: dict[str, Description] = field(default_factory=dict)
    incarnations: dict[str, str] = field(default_factory=dict)
    """Incarnations of the brokers; empty if unknown."""
    read: dict[str, Row] = field(default_factory=dict)
    findings: list[Row] = field(default_factory=list)
    found: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    hours: list[Row] = field(default_factory=list)
    conserved: list[Row] = field(default_factory=list)
    delayed: list[Row] = field(default_factory=list)
    """Of a delay group: equation of each subject."""
    epochs: list[str] = field(default_factory=list)
    journal: int | None = None
    unreadable: str | None = None
    unverified: int = 0
    """Bytes that retention deleted before any run verified them."""
    wrong_before: list[Row] = field(default_factory=list)
    """Findings of earlier runs about both copies, at places not read by this run."""
    history: int | None = None
    """First frame that differs only in its chain, as it follows a difference."""
    min_copies: int = COPIES_MIN

    def add(self, what: FindingKind, **fields: Any) -> None:
        """Add a finding made on the driver."""
        self.count(what, 1)
        if self.found[what] <= FINDINGS_MAX:
            self.findings.append(finding_row(what, **fields))

    def take(self, found: Iterable[Row]) -> None:
        """Count the findings by kind, and list the first ones of each."""
        rows = [{name: row[name] for name in FINDINGS} for row in found]
        rows = sorted(rows, key=lambda row: (row["offset"] is None, row["offset"] or 0))
        kept = Counter(row["what"] for row in self.findings)
        for row in rows:
            kept[row["what"]] += 1
            self.count(row["what"], 1)
            if kept[row["what"]] <= FINDINGS_MAX:
                self.findings.append(row)

    def count(self, what: str, times: int) -> None:
        """Count findings, listed or not."""
        self.found[what] = self.found.get(what, 0) + times

    def is_behind(self, copy: str) -> bool:
        """Return whether a copy ends below the watermark while enough others reach it (decision 42)."""
        whole = sum(log.end >= self.watermark for log in self.logs.values())
        return self.logs[copy].end < self.watermark and whole >= self.min_copies

    def whole_until(self) -> int:
        """Return the offset up to which all copies can be compared; bytes after it are missing in some."""
        return min([self.watermark, *(log.end for name, log in self.logs.items() if self.is_behind(name))])

    @property
    def status(self) -> int:
        """0 proven equal, 1 findings, 2 could not read."""
        if self.unreadable:
            return 2
        return 1 if self.found else 0

    def reads(self) -> list[tuple[int, int]]:
        """Return the ranges to read, cut at the high watermark and at the end of a copy that is behind."""
        end = max(log.end for log in self.logs.values())
        parts = [(piece.begin, piece.end) for piece in self.again]
        inner = sorted(cut for cut in {*self.cuts, self.whole_until()} if self.begin < cut < self.watermark)
        cuts = [self.begin, *inner, self.watermark]
        parts += [*pairwise(cuts), (self.watermark, end)]
        return [(begin, until) for begin, until in parts if begin < until]

    def pieces(self, piece_bytes: int) -> list[tuple[int, int]]:
        """Return `reads`, cut into pieces."""
        return [piece for begin, until in self.reads() for piece in split_range(begin, until, piece_bytes)]

    def oldest(self) -> int:
        """Return the lowest offset in any copy."""
        return min(log.start for log in self.logs.values())


@dataclass(frozen=True, slots=True)
class Group:
    """Broker group to audit: the place of each copy, as options of the data source, and how many copies acknowledge."""

    name: str
    places: dict[str, dict[str, str]]
    min_copies: int = COPIES_MIN
    closed: tuple[str, ...] = ()
    """Readonly reasons, if it is readonly."""
    is_delay: bool = False
    """Whether it is a group of delay servers; a broker between two masterships does not report that itself."""


class Sequences(NamedTuple):
    """Sequences of a subject: the first one, and the end; `due_end`: below the high watermark."""

    first: int | None
    end: int
    due_end: int


class FirstRows:
    """The first rows by subject and other columns, up to a limit; more are dropped, and `is_cut` is set."""

    def __init__(self, limit: int, *columns: str) -> None:
        self._limit = limit
        self._order = itemgetter("subject", *columns)
        self._rows: list[Row] = []
        self.is_cut = False

    def add(self, row: Row) -> None:
        self._rows.append(row)
        if len(self._rows) > 2 * self._limit + 100:
            self.rows()

    def rows(self) -> list[Row]:
        self._rows.sort(key=self._order)
        self.is_cut |= len(self._rows) > self._limit
        del self._rows[self._limit :]
        return self._rows


class GroupAnswer:
    """Judges' rows of one broker group, as (copy, kind, row) of `audit.findings`.

    Args:
        names: its copies, the master first.
        share: rows that are kept.
    """

    def __init__(self, names: Sequence[str], share: Share = FULL_SHARE) -> None:
        self.names = tuple(names)
        self.unread: list[str] = []
        self.pieces: dict[int, dict[str, Row]] = {}
        """Begin of a piece -> counts by copy."""
        self.subjects: dict[str, dict[str, Sequences]] = {name: {} for name in names}
        self.hours = FirstRows(share.hours, "hour", "copy")
        self.accounts = FirstRows(share.accounts, "consumer_group")
        self.moved: dict[tuple[Any, ...], tuple[Row, set[str]]] = {}
        """Groups that were moved or removed, each with the copies that have this frame."""
        self.epochs: dict[str, int] = {}
        self.kept_from: int | None = None
        self.last_ms = 0
        """Time of the newest frame."""
        self.differing: set[int] = set()
        """Pieces in which the copies differ."""
        self._findings: list[tuple[str, Row]] = []
        self._more: dict[str, Counter[str]] = {name: Counter() for name in names}

    def take(self, copy: str, kind: str, row: Row) -> None:
        """Take a row of a judge."""
        copies = self.names if copy == ALL else (copy,)
        if kind == FINDING:
            self._findings.append((copy, row))
        elif kind == PIECE:
            self.pieces.setdefault(row["begin"], {}).update(dict.fromkeys(copies, row))
            self.last_ms = max(self.last_ms, row.get("time_ms", 0))
            if row["apart"]:
                self.differing.add(row["begin"])
        elif kind == SUBJECT:
            found = Sequences(row["first"], row["end"], row["due_end"])
            for name in copies:
                self.subjects[name][row["subject"]] = found
        elif kind == HOUR:
            for name in copies:
                self.hours.add(row | {"copy": name})
        elif kind == ACCOUNT and MASTER in copies:
            self.accounts.add(row)
        elif kind == MOVED:
            key = row["offset"], row["end"], row["subject"], row["text"]
            self.moved.setdefault(key, (row, set()))[1].update(copies)
        elif kind == EPOCHS:
            for epoch, offset in row.items():
                self.epochs[epoch] = min(offset, self.epochs.get(epoch, offset))
        elif kind == KEPT:
            self.kept_from = max(row["from"], self.kept_from or 0)
        elif kind == MORE:
            for name in copies:
                self._more[name].update(row)
        elif kind == UNREAD:
            self.unread.append(row["text"])

    def read(self, begin: int, watermark: int) -> dict[str, Row]:
        """Return the counts of each copy; due bytes lie in `[begin, watermark)`."""
        found = {name: dict.fromkeys(READ, 0) for name in self.names}
        for at, copies in self.pieces.items():
            for name, row in copies.items():
                for key in ("messages", "bytes", "frames"):
                    found[name][key] += row[key]
                if begin <= at < watermark:
                    found[name]["due_bytes"] += row["bytes"]
        return found

    def ends(self, *, due: bool = False) -> dict[str, int]:
        """Return the end of each subject on the longer copy; `due`: below the watermark."""
        found: dict[str, int] = {}
        for subjects in self.subjects.values():
            for subject, known in subjects.items():
                if end := known.due_end if due else known.end:
                    found[subject] = max(found.get(subject, 0), end)
        return found

    def findings(self) -> tuple[list[Row], Counter[str]]:
        """Return the unique findings with their copy, and the number of further ones of each kind.

        Consequences are left out. Damage explains gaps across it, and problems revealed only after it. Missing messages
        explain problems about them. A batch stored twice explains its ids.
        """
        broken = defaultdict(list)
        for copy, row in self._findings:
            if row["what"] == FindingKind.DAMAGED:
                for name in self._of(copy):
                    broken[name].append((row["offset"], row["end"]))
        hurt = {name: min(ranges)[0] for name, ranges in broken.items()}
        due = [
            (name, row)
            for copy, row in self._findings
            for name in self._of(copy)
            if not (row["seen"] is not None and row["seen"] >= hurt.get(name, 1 << 64))
            and not ("due" in row and _lies_in(broken[name], row["due"], row["offset"]))
            and not ("since" in row and row["since"] + UNACKED_MS > self.last_ms)
        ]
        gaps = defaultdict(list)
        for name, row in due:
            if "gap" in row:
                gaps[name, row["subject"]].append(row["gap"])
        due = [
            (name, row)
            for name, row in due
            if "about" not in row or not _lies_in(gaps[name, row["about"][0]], *row["about"][1:])
        ]
        batches = {(name, row["offset"]) for name, row in due if row["what"] == FindingKind.BATCH_TWICE}
        due = [
            (name, row)
            for name, row in due
            if row["what"] != FindingKind.ID_TWICE or (name, row["offset"]) not in batches
        ]
        more: Counter[str] = Counter()
        for counted in self._more.values():
            more |= counted
        return list(merge_copies(due, self.names)), more

    def is_master_damaged(self) -> bool:
        """Return whether the master's copy is damaged, so that consumers' messages cannot be accounted for."""
        return any(row["what"] == FindingKind.DAMAGED and MASTER in self._of(copy) for copy, row in self._findings)

    def _of(self, copy: str) -> tuple[str, ...]:
        return self.names if copy == ALL else (copy,)


def merge_copies(found: Iterable[tuple[str, Row]], names: Sequence[str]) -> Iterator[Row]:
    """Yield the findings in `found`, (copy, row); one that all copies share becomes one of BOTH."""
    copies: defaultdict[tuple[Any, ...], set[str]] = defaultdict(set)
    for name, row in found:
        copies[tuple(row[field] for field in _FIELDS)].add(name)
    for values, of in copies.items():
        row = dict(zip(_FIELDS, values))
        for name in (BOTH,) if len(of) == len(names) else sorted(of):
            yield row | {"copy": name}


def _lies_in(ranges: Iterable[tuple[int, int]], begin: int, end: int) -> bool:
    return any(low < end and high > begin for low, high in ranges)


def kept_from(answer: GroupAnswer, result: Result) -> int | None:
    """Return the first offset kept, by the retention frames; None if unknown.

    The retention frame for deleted frames is in the rest of the log: a log without one has deleted nothing.
    """
    if answer.kept_from is None and result.begin == result.start and not answer.is_master_damaged():
        return 0
    return answer.kept_from


def digests_of(answer: GroupAnswer, result: Result) -> dict[int, tuple[int, int]]:
    """Return the bytes and digest of each due piece, from the master's copy."""
    rows = {at: copies[MASTER] for at, copies in answer.pieces.items() if at < result.watermark and MASTER in copies}
    return {at: (row["bytes"], int(row["digest"], 16)) for at, row in rows.items() if row["bytes"]}
