"""Core. What Spark's judges said of one broker group, put together on the driver: counts, and findings once each."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

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
    HOUR,
    KEPT,
    MASTER,
    MORE,
    PIECE,
    SUBJECT,
    UNREAD,
    FindingKind,
)
from qmq.audit.frame_order import FOREVER_MS
from qmq.audit.selection import split_range
from qmq.ledger import Piece

Row = dict[str, Any]
READ = ("messages", "bytes", "due_bytes", "frames")
"""What is counted of a copy; `due_bytes` are those below the high watermark."""
_FIELDS = ("what", "offset", "end", "subject", "sequence", "id", "text")


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

    def add(self, what: FindingKind, **fields: Any) -> None:
        """Add a finding that the driver itself made."""
        self.count(what, 1)
        if self.found[what] <= FINDINGS_MAX:
            self.findings.append(dict.fromkeys(FINDINGS.fieldNames()) | {"what": what.value} | fields)

    def take(self, found: Iterable[Row]) -> None:
        """Count the findings per kind, and keep the first ones of each."""
        rows = [{name: row[name] for name in FINDINGS.fieldNames()} for row in found]
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
        """Return the lowest offset that any copy has."""
        return min(log.start for log in self.logs.values())


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


class GroupAnswer:
    """Takes (copy, kind, row) of `audit.findings`, of one broker group; `names` are its copies, the master first."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self.unread: list[str] = []
        self.pieces: dict[int, dict[str, Row]] = {}
        """Where a piece begins -> what was read of it, by copy."""
        self.subjects: dict[str, dict[str, Row]] = {name: {} for name in names}
        self.hours: list[Row] = []
        self.accounts: list[Row] = []
        self.epochs: dict[str, int] = {}
        self.kept_from: int | None = None
        self.differing: set[int] = set()
        """Pieces of which the copies have other bytes."""
        self._findings: list[tuple[str, Row]] = []
        self._more: dict[str, Counter[str]] = {name: Counter() for name in names}

    def take(self, copy: str, kind: str, row: Row) -> None:
        copies = self.names if copy == ALL else (copy,)
        if kind == FINDING:
            self._findings.append((copy, row))
        elif kind == PIECE:
            self.pieces.setdefault(row["begin"], {}).update(dict.fromkeys(copies, row))
            if row["apart"]:
                self.differing.add(row["begin"])
        elif kind == SUBJECT:
            for name in copies:
                self.subjects[name][row["subject"]] = row
        elif kind == HOUR:
            self.hours += [row | {"copy": name} for name in copies]
        elif kind == ACCOUNT and MASTER in copies:
            self.accounts.append(row)
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
        """Return what was read of each copy; what is due lies in `[begin, watermark)`."""
        found = {name: dict.fromkeys(READ, 0) for name in self.names}
        for at, copies in self.pieces.items():
            for name, row in copies.items():
                for key in ("messages", "bytes", "frames"):
                    found[name][key] += row[key]
                if begin <= at < watermark:
                    found[name]["due_bytes"] += row["bytes"]
        return found

    def ends(self, key: str = "end") -> dict[str, int]:
        """Return where each subject ends, on the copy that goes on furthest; `due_end`: below the watermark."""
        found: dict[str, int] = {}
        for subjects in self.subjects.values():
            for subject, row in subjects.items():
                if row[key]:
                    found[subject] = max(found.get(subject, 0), row[key])
        return found

    def findings(self) -> tuple[list[Row], Counter[str]]:
        """Return what is wrong, each once, with its copy, and how many of each kind more there are.

        What follows from damage is left out: a gap with damage in it, and what became plain only behind damage.
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
        ]
        batches = {row["offset"] for _, row in due if row["what"] == FindingKind.BATCH_TWICE}
        due = [(name, row) for name, row in due if row["what"] != FindingKind.ID_TWICE or row["offset"] not in batches]
        more: Counter[str] = Counter()
        for counted in self._more.values():
            more |= counted
        return list(merge_copies(due, self.names)), more

    def is_master_damaged(self) -> bool:
        """Return whether the master is damaged: then its consumers' messages cannot be accounted for."""
        return any(row["what"] == FindingKind.DAMAGED and MASTER in self._of(copy) for copy, row in self._findings)

    def _of(self, copy: str) -> tuple[str, ...]:
        return self.names if copy == ALL else (copy,)


def merge_copies(found: Iterable[tuple[str, Row]], names: Sequence[str]) -> Iterator[Row]:
    """Yield findings of `found`, (copy, row); what all copies have alike is one of BOTH."""
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
    """Return from where on frames are kept, by the retention frames; None if nothing tells.

    The frame that gave up what is gone is in what is left: a log without one gave up nothing.
    """
    if answer.kept_from is None and result.begin == result.start and not answer.is_master_damaged():
        return 0
    return answer.kept_from


def digests_of(answer: GroupAnswer, result: Result) -> dict[int, tuple[int, int]]:
    """Return of each piece that is due its bytes and digest, as the master has them."""
    rows = {at: copies[MASTER] for at, copies in answer.pieces.items() if at < result.watermark and MASTER in copies}
    return {at: (row["bytes"], int(row["digest"], 16)) for at, row in rows.items() if row["bytes"]}
