"""Shell. The audit's ledger: what was proven of each broker group's log, run after run, and up to where.

A directory with one file per broker group, `<group>.jsonl`: a JSON object a line, appended and fsynced, never changed.
JSON lines, because a run appends one line without reading what is there, a line that a crash tore is seen by its CRC
and left out, and an operator reads it with any tool; a Parquet file is written whole, and by Spark alone (decision 36).

    crc        CRC-32 of the rest, as JSON with sorted keys
    run        when the run began, UTC: 2026-11-22T01:00:00Z
    at_ms      the same, ms since 1970
    group      broker group
    verdict    "proven equal", "findings" or "could not read"
    why        why it could not be read; empty otherwise
    found      {kind of finding: how many}
    findings   the first of them, for whoever looks back: [{what, copy, offset, subject, sequence, id, text, …}]
    start      where the log began then
    begin      from where on everything was read, up to `verified`
    verified   up to here both copies were read and found equal, by this run or the ones before it
    chain      the chain right before `verified`, 16 hexadecimal digits
    frame      offset of the last frame before `verified`: where to look for that chain
    ends       {subject: the sequence after its last message} at `verified`
    pieces     [[begin, end, bytes, digest], …]: what was read and found equal, with a hash of all that stands there
    read       {copy: bytes read}
    places     {copy: where it was read}
    by         who ran it: user@host
    unverified bytes that retention has removed since the run before, and that no run had verified
    conserved  [{subject, group, stored, …}]: the equation of each consumer group (docs/audit.md)
    kept       from where on frames are kept, by the retention frames so far; null if none was read
"""

from __future__ import annotations

import fcntl
import os
import time
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from qmq.crc import decode_checked, encode_checked
from qmq.errors import QmqError
from qmq.textfile import gauge

PROVEN, FINDINGS, NOT_READ = "proven equal", "findings", "could not read"
SUFFIX = ".jsonl"
ALIKE = "both"
"""The copy of a finding that is about all of them."""
TAIL_BYTES = 1 << 14
"""So much of a file's end is read first for its newest entries."""


class LedgerDamaged(QmqError):
    """A line of the ledger, not the last, is not what was written. Restore the file, or move it aside: the next run
    then reads the whole log and begins anew."""


class Piece(NamedTuple):
    """A range of a log that was read, and what stood there."""

    begin: int
    end: int
    bytes: int
    digest: str


@dataclass(frozen=True)
class Entry:
    """One run's line about one broker group. The module's text says what the fields mean."""

    run: str
    at_ms: int
    group: str
    verdict: str
    why: str = ""
    found: dict[str, int] = field(default_factory=dict)
    findings: list[dict[str, Any]] = field(default_factory=list)
    start: int = 0
    begin: int = 0
    verified: int = 0
    chain: str = ""
    frame: int = 0
    ends: dict[str, int] = field(default_factory=dict)
    pieces: list[Piece] = field(default_factory=list)
    read: dict[str, int] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)
    by: str = ""
    unverified: int = 0
    conserved: list[dict[str, Any]] = field(default_factory=list)
    delayed: list[dict[str, Any]] = field(default_factory=list)
    kept: int | None = None


@dataclass(frozen=True)
class Known:
    """What all runs together say of a broker group: `anchor` is the last one that verified anything, `since` from where
    on all was verified up to there; each piece comes with the number of the run that read it last."""

    runs: int
    anchor: Entry | None
    pieces: dict[tuple[int, int], tuple[Piece, int]]
    since: int = 0
    kept: int | None = None
    wrong: list[dict[str, Any]] = field(default_factory=list)
    """Findings about both copies alike, of which nobody has read the place since: the point went on behind them."""


def encode_entry(entry: Entry) -> bytes:
    plain = asdict(entry) | {"pieces": [list(piece) for piece in entry.pieces]}
    return encode_checked(plain) + b"\n"


def _decode(line: bytes) -> Entry | None:
    """Return the entry of a line; None if it is torn or damaged. Fields of a later version are left out."""
    try:
        plain = decode_checked(line)
        known = {field.name for field in fields(Entry)}
        plain["pieces"] = [Piece(*piece) for piece in plain["pieces"]]
        return Entry(**{name: value for name, value in plain.items() if name in known})
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


class Ledger:
    """The files in one directory, which is made when it is written to first. One run writes at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def groups(self) -> list[str]:
        """Return the broker groups that have entries, sorted."""
        return sorted(path.name.removesuffix(SUFFIX) for path in self._folder.glob(f"*{SUFFIX}"))

    def entries(self, group: str) -> list[Entry]:
        """Return the entries of a group, oldest first; a torn last line is none.

        Raises:
            LedgerDamaged: another line is damaged.
        """
        path = self.path(group)
        return _entries(path, path.read_bytes().splitlines(keepends=True) if path.exists() else [])

    def newest(self, group: str, count: int) -> list[Entry]:
        """As `entries`, the last ones alone; what is before them is not read."""
        path, lines, block = self.path(group), list[bytes](), TAIL_BYTES
        with path.open("rb") as file:
            begin = size = file.seek(0, os.SEEK_END)
            while begin and len(lines) <= count:
                begin = max(0, size - block)
                file.seek(begin)
                lines = file.read(size - begin).splitlines(keepends=True)
                if begin:
                    del lines[0]  # it lacks its begin
                block *= 4
        last = lines[-count - 1 :]  # one more, as the last one may be torn
        return _entries(path, last, f" of the last {len(last)}")[-count:]

    def append(self, entry: Entry) -> None:
        """Add a run's line, durably; a torn last line is cut off first. The folder is touched, so that readers of all
        groups see by one look that there is something new."""
        self._folder.mkdir(parents=True, exist_ok=True)
        with self.path(entry.group).open("ab") as file:
            with suppress(OSError):  # a file system without locks; two runs at a time are rare
                fcntl.flock(file, fcntl.LOCK_EX)  # the line that another run is writing is not torn
            size = file.seek(0, os.SEEK_END)  # before the reading: what comes meanwhile is no torn line
            whole = self.path(entry.group).read_bytes().rfind(b"\n") + 1
            if whole < size:
                file.truncate(whole)
            file.write(encode_entry(entry))
            file.flush()
            os.fsync(file.fileno())
        now_ns = time.time_ns()  # not the file system's own time, whose ticks are coarse
        with suppress(PermissionError):  # the folder is somebody else's: readers look into the files now and then, too
            os.utime(self._folder, ns=(now_ns, now_ns))

    def known(self, group: str) -> Known:
        """Return what the entries of a group say together; raises LedgerDamaged."""
        return known_from(self.entries(group))

    def path(self, group: str) -> Path:
        """The file of a broker group; it need not be there."""
        return self._folder / f"{group}{SUFFIX}"


def _entries(path: Path, lines: list[bytes], among: str = "") -> list[Entry]:
    found: list[Entry] = []
    for number, line in enumerate(lines, 1):
        entry = _decode(line)
        if entry is not None:
            found.append(entry)
        elif number < len(lines) or line.endswith(b"\n"):
            raise LedgerDamaged(f"{path}, line {number}{among}: it does not match its CRC")
    return found


def known_from(entries: Iterable[Entry]) -> Known:
    """Fold the entries of one group, oldest first."""
    runs, since = 0, 0
    anchor: Entry | None = None
    kept: int | None = None
    pieces: dict[tuple[int, int], tuple[Piece, int]] = {}
    wrong: list[dict[str, Any]] = []
    for runs, entry in enumerate(entries, 1):
        wrong = _wrong_behind(wrong, entry)
        if entry.verified:
            begins_anew = anchor is None or entry.begin > anchor.verified
            anchor, since = entry, entry.begin if begins_anew else min(since, entry.begin)
        if entry.kept is not None:
            kept = max(entry.kept, kept or 0)
        for piece in entry.pieces:
            pieces[piece.begin, piece.end] = piece, runs
    return Known(runs, anchor, _without_overlaps(pieces), since, kept, wrong)


def _wrong_behind(before: list[dict[str, Any]], entry: Entry) -> list[dict[str, Any]]:
    """Return what both copies are known to have wrong alike behind one more run; what it read, it judged anew."""
    alike = [row for row in entry.findings if row.get("copy") == ALIKE and row.get("offset") is not None]
    if not entry.pieces or not (before or alike):  # most nights, and a ledger has years of them
        return before
    pieces = sorted(entry.pieces)
    found = [row for row in before if not lies_in(pieces, row["offset"])]
    return found + [row for row in alike if lies_in(pieces, row["offset"])]


def lies_in(pieces: Sequence[Piece], offset: int) -> bool:
    """Return whether an offset lies in one of these pieces, which are in order and do not overlap."""
    at = bisect_right(pieces, offset, key=attrgetter("begin")) - 1
    return at >= 0 and offset < pieces[at].end


def _without_overlaps(pieces: Mapping[tuple[int, int], tuple[Piece, int]]) -> dict[tuple[int, int], tuple[Piece, int]]:
    """Of two that overlap, keep the one that was read last: runs at one time begin at the same point, and each has an
    end of its own."""
    found: list[tuple[Piece, int]] = []
    for piece, run in sorted(pieces.values()):
        while found and found[-1][0].end > piece.begin:
            if found[-1][1] > run:
                break
            found.pop()
        else:
            found.append((piece, run))
    return {(piece.begin, piece.end): (piece, run) for piece, run in found}


def pieces_due(known: Known, start: int, share: int) -> list[Piece]:
    """Return what of the old is to be read again now: those that nobody has read for longest, up to one part in `share`
    of what there is; at least one. `start`: where the logs begin by now; what a piece still has behind it has no
    digest before it was read as a piece of its own."""
    verified = known.anchor.verified if known.anchor is not None else 0
    old: list[tuple[int, Piece]] = []
    for piece, run in known.pieces.values():
        if piece.begin < start < piece.end:
            piece = Piece(start, piece.end, piece.end - start, "")
        if piece.begin >= start and piece.end <= verified:
            old.append((run, piece))
    old.sort()
    left = sum(piece.bytes for _, piece in old) // share
    chosen: list[Piece] = []
    for _, piece in old:
        if chosen and piece.bytes > left:
            break
        chosen.append(piece)
        left -= piece.bytes
    return sorted(chosen)


OLD_S = 36 * 3600
"""A nightly run, and half a day: then nobody has looked for too long."""

Readings = list[tuple[dict[str, str], float]]
"""Labels and values."""

_GAUGES = {
    "qmq_audit_verified_offset": "Offset up to which both copies of the log were read and found equal",
    "qmq_audit_age_seconds": "Time since the run that verified the log last, when this file was written",
    "qmq_audit_verified_timestamp_seconds": "When that run began, since 1970",
    "qmq_audit_run_timestamp_seconds": "When the last run began, whatever came of it",
    "qmq_audit_verdict": "1 for the verdict of the last run",
    "qmq_audit_findings": "Findings of the last run",
    "qmq_audit_unverified_bytes": "Bytes that retention had removed when the last run came, and no run had verified",
}


def status_of(entries: list[Entry], now_ms: int) -> dict[str, Any]:
    """Say how the audit of one broker group stands. `entries` are all of its ledger, at least one."""
    last, known = entries[-1], known_from(entries)
    anchor = known.anchor
    return {
        "group": last.group,
        "verdict": last.verdict,
        "why": last.why,
        "run": last.run,
        "runMs": last.at_ms,
        "verified": anchor.verified if anchor else 0,
        "verifiedRun": anchor.run if anchor else "",
        "verifiedMs": anchor.at_ms if anchor else 0,
        "ageS": (now_ms - anchor.at_ms) // 1000 if anchor else None,
        "subjects": len(anchor.ends) if anchor else 0,
        "found": last.found,
        "findings": last.findings,
        "unverifiedBytes": last.unverified,
        "readBytes": sum(last.read.values()),
        "by": last.by,
        "runs": known.runs,
    }


def all_status(ledger: Ledger, now_ms: int) -> list[dict[str, Any]]:
    """Say so of every broker group of a ledger; raises LedgerDamaged."""
    found = ((ledger.entries(group)) for group in ledger.groups())
    return [status_of(entries, now_ms) for entries in found if entries]


def is_old(row: dict[str, Any]) -> bool:
    """Whether nobody has proven the group of this status for too long."""
    return row["ageS"] is None or row["ageS"] > OLD_S


def readings(status: list[dict[str, Any]]) -> dict[str, tuple[str, Readings]]:
    """Return the status as gauges: the text of help of each, and its readings."""
    found: dict[str, Readings] = {name: [] for name in _GAUGES}
    for one in status:
        group = {"broker_group": one["group"]}
        found["qmq_audit_verified_offset"].append((group, one["verified"]))
        if one["ageS"] is not None:
            found["qmq_audit_age_seconds"].append((group, one["ageS"]))
            found["qmq_audit_verified_timestamp_seconds"].append((group, one["verifiedMs"] / 1000))
        found["qmq_audit_run_timestamp_seconds"].append((group, one["runMs"] / 1000))
        for verdict in (PROVEN, FINDINGS, NOT_READ):
            found["qmq_audit_verdict"].append((group | {"verdict": verdict}, int(one["verdict"] == verdict)))
        found["qmq_audit_unverified_bytes"].append((group, one["unverifiedBytes"]))
        for kind, number in sorted(one["found"].items()):
            found["qmq_audit_findings"].append((group | {"kind": kind}, number))
    return {name: (help_text, found[name]) for name, help_text in _GAUGES.items()}


def gauges(status: list[dict[str, Any]]) -> str:
    """Write the status in Prometheus' text format."""
    return "".join(gauge(name, help_text, values) for name, (help_text, values) in readings(status).items())


def write_gauges(path: Path, ledger: Ledger, *, now_ms: int) -> None:
    """Write the gauges of a ledger into a file of node_exporter's textfile collector, which never sees half of one."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(gauges(all_status(ledger, now_ms)))
    beside.replace(path)
