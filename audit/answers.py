"""Core. What Spark's judges said of one broker group, put together on the driver: counts, and findings once each."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from qmq.audit.facts import ALL
from qmq.audit.findings import ACCOUNT, BOTH, EPOCHS, FINDING, HOUR, KEPT, MASTER, MORE, PIECE, SUBJECT, UNREAD, Kind

Row = dict[str, Any]
READ = ("messages", "bytes", "due_bytes", "frames")
"""What is counted of a copy; `due_bytes` are those below the high watermark."""
_FIELDS = ("what", "offset", "end", "subject", "sequence", "id", "text")


class Answer:
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
            if row["what"] == Kind.DAMAGED:
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
        batches = {row["offset"] for _, row in due if row["what"] == Kind.BATCH_TWICE}
        due = [(name, row) for name, row in due if row["what"] != Kind.ID_TWICE or row["offset"] not in batches]
        more: Counter[str] = Counter()
        for counted in self._more.values():
            more |= counted
        return list(together(due, self.names)), more

    def is_hurt(self) -> bool:
        """Return whether the master is damaged: then its consumers' messages cannot be accounted for."""
        return any(row["what"] == Kind.DAMAGED and MASTER in self._of(copy) for copy, row in self._findings)

    def _of(self, copy: str) -> tuple[str, ...]:
        return self.names if copy == ALL else (copy,)


def together(found: Iterable[tuple[str, Row]], names: Sequence[str]) -> Iterator[Row]:
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
