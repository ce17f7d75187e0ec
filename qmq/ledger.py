"""Shell. Ledger of the audit: the part of each broker group's log that was proven, run after run.

A directory with one file per broker group, `<group>.jsonl`: a JSON object per line, appended and fsynced, never
changed. With JSON lines, a run appends one line without reading the file, the CRC shows a line torn by a crash, and an
operator reads the file with any tool. A Parquet file would be written as a whole, and by Spark alone (decision 36).

    crc        CRC-32 of the rest, as JSON with sorted keys
    run        start of the run, UTC: 2026-11-22T01:00:00Z
    at_ms      the same, ms since 1970
    group      broker group
    verdict    "proven equal", "findings" or "could not read"
    why        reason why it could not be read; empty otherwise
    found      {kind of finding: count}
    findings   the first findings: [{what, copy, offset, subject, sequence, id, text, …}]
    start      start of the log at that time
    begin      offset from which everything was read, up to `verified`
    verified   offset up to which both copies were read and found equal, by this run or earlier ones
    chain      the chain right before `verified`, 16 hexadecimal digits
    frame      offset of the last frame before `verified`, which has that chain
    ends       {subject: the sequence after its last message} at `verified`
    pieces     [[begin, end, bytes, digest], …]: ranges read and found equal, with a hash of their bytes
    read       {copy: bytes read}
    places     {copy: address or directory}
    by         caller: user@host
    unverified bytes that retention deleted since the run before, and that no run had verified
    conserved  [{subject, group, stored, …}]: the equation of each consumer group (docs/audit.md)
    journal    number of lines of the producers' journal that were compared; null without one
    kept       offset from which frames are kept, by the retention frames so far; null if none was read
"""

from __future__ import annotations

import fcntl
import os
import time
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from qmq.crc import decode_checked, encode_checked, of_known_fields
from qmq.errors import QmqError

PROVEN, FINDINGS, NOT_READ = "proven equal", "findings", "could not read"
SUFFIX = ".jsonl"
ALIKE = "both"
"""Copy named in findings about all copies."""
TAIL_BYTES = 1 << 14
"""Bytes of a file's end that are read first for its newest entries."""


class LedgerDamaged(QmqError):
    """A line before the last one is damaged. Restore the file, or move it aside: the next run then reads the whole log
    and begins anew.
    """


class Piece(NamedTuple):
    """Range of a log that was read, with the hash of its bytes."""

    begin: int
    end: int
    bytes: int
    digest: str


@dataclass(frozen=True)
class Entry:
    """One run's line about one broker group. The module docstring defines the fields."""

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
    journal: int | None = None


@dataclass(frozen=True)
class Known:
    """Combined entries of a broker group. `anchor`: the last entry that verified anything. `since`: offset from which
    everything up to the anchor's `verified` was verified. Each piece has the number of the run that read it last.
    """

    runs: int
    anchor: Entry | None
    pieces: dict[tuple[int, int], tuple[Piece, int]]
    since: int = 0
    kept: int | None = None
    wrong: list[dict[str, Any]] = field(default_factory=list)
    """Findings shared by both copies, at places not read since; the verified offset is behind them."""


def encode_entry(entry: Entry) -> bytes:
    plain = asdict(entry) | {"pieces": [list(piece) for piece in entry.pieces]}
    return encode_checked(plain) + b"\n"


def _decode(line: bytes) -> Entry | None:
    """Return the entry of a line; None if it is torn or damaged. Fields of later versions are left out."""
    try:
        plain = decode_checked(line)
        plain["pieces"] = [Piece(*piece) for piece in plain["pieces"]]
        return of_known_fields(Entry, plain)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


class Ledger:
    """Files of one directory, which is created by the first write. One run writes at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def groups(self) -> list[str]:
        """Return the broker groups that have entries, sorted."""
        return sorted(path.name.removesuffix(SUFFIX) for path in self._folder.glob(f"*{SUFFIX}"))

    def entries(self, group: str) -> list[Entry]:
        """Return the entries of a group, oldest first, without a torn last line.

        Raises:
            LedgerDamaged: another line is damaged.
        """
        path = self.path(group)
        return _entries(path, path.read_bytes().splitlines(keepends=True) if path.exists() else [])

    def newest(self, group: str, count: int) -> list[Entry]:
        """Return the last entries of a group, as `entries` does, without reading the entries before."""
        path, lines, block = self.path(group), list[bytes](), TAIL_BYTES
        with path.open("rb") as file:
            begin = size = file.seek(0, os.SEEK_END)
            while begin and len(lines) <= count:
                begin = max(0, size - block)
                file.seek(begin)
                lines = file.read(size - begin).splitlines(keepends=True)
                if begin:
                    del lines[0]  # the begin of the line is missing
                block *= 4
        last = lines[-count - 1 :]  # one more, as the last one may be torn
        return _entries(path, last, f" of the last {len(last)}")[-count:]

    def append(self, entry: Entry) -> None:
        """Append a run's line, durably; a torn last line is cut off first. The folder is touched, so that readers of
        all groups detect the change with one call.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        with self.path(entry.group).open("ab") as file:
            with suppress(OSError):  # a file system without locks; two runs at a time are rare
                fcntl.flock(file, fcntl.LOCK_EX)  # a line being written by another run is not torn
            size = file.seek(0, os.SEEK_END)  # before the read, because a line added meanwhile is not torn
            whole = self.path(entry.group).read_bytes().rfind(b"\n") + 1
            if whole < size:
                file.truncate(whole)
            file.write(encode_entry(entry))
            file.flush()
            os.fsync(file.fileno())
        now_ns = time.time_ns()  # the file system's own time has coarse ticks
        with suppress(PermissionError):  # another owner's folder: readers also open the files now and then
            os.utime(self._folder, ns=(now_ns, now_ns))

    def known(self, group: str) -> Known:
        """Return the combined entries of a group. Raises LedgerDamaged."""
        return known_from(self.entries(group))

    def path(self, group: str) -> Path:
        """Return the file of a broker group; it may be absent."""
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
    """Return the shared findings after one more run, which judged its range anew."""
    alike = [row for row in entry.findings if row.get("copy") == ALIKE and row.get("offset") is not None]
    if not entry.pieces or not (before or alike):  # most nights have none, and a ledger has years of them
        return before
    pieces = sorted(entry.pieces)
    found = [row for row in before if not lies_in(pieces, row["offset"])]
    return found + [row for row in alike if lies_in(pieces, row["offset"])]


def lies_in(pieces: Sequence[Piece], offset: int) -> bool:
    """Return whether an offset lies in one of these pieces, which are in order and disjoint."""
    at = bisect_right(pieces, offset, key=attrgetter("begin")) - 1
    return at >= 0 and offset < pieces[at].end


def _without_overlaps(pieces: Mapping[tuple[int, int], tuple[Piece, int]]) -> dict[tuple[int, int], tuple[Piece, int]]:
    """Return the pieces, of two overlapping ones only the one read last. Runs at one time begin at the same offset and
    end at different ones.
    """
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
    """Return the old pieces to read again now: the least recently read ones, one part in `share` of all, at least one.
    `start`: present start of the logs. If a piece begins before it, the rest of that piece has no digest until it is
    read as a piece of its own.
    """
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
"""A nightly run and half a day; a group not proven for longer is overdue."""

Readings = list[tuple[dict[str, str], float]]
"""Samples of a gauge: labels and value of each."""

_GAUGES = {
    "qmq_audit_verified_offset": "Offset up to which both copies of the log were read and found equal",
    "qmq_audit_age_seconds": "Time since the run that verified the log last, when this file was written",
    "qmq_audit_verified_timestamp_seconds": "When that run began, since 1970",
    "qmq_audit_run_timestamp_seconds": "When the last run began, with any verdict",
    "qmq_audit_verdict": "1 for the verdict of the last run",
    "qmq_audit_findings": "Findings of the last run",
    "qmq_audit_unverified_bytes": "Bytes that retention had removed when the last run came, and no run had verified",
}


def status_of(entries: list[Entry], now_ms: int) -> dict[str, Any]:
    """Return the audit status of one broker group. `entries`: all of its ledger, at least one."""
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
    """Return the status of every broker group of a ledger. Raises LedgerDamaged."""
    found = ((ledger.entries(group)) for group in ledger.groups())
    return [status_of(entries, now_ms) for entries in found if entries]


def is_old(row: dict[str, Any]) -> bool:
    """Return whether a group has not been proven for too long."""
    return row["ageS"] is None or row["ageS"] > OLD_S


def readings(status: list[dict[str, Any]]) -> dict[str, tuple[str, Readings]]:
    """Return the status as gauges: help text and samples of each."""
    found: dict[str, Readings] = {name: [] for name in _GAUGES}
    for row in status:
        group = {"broker_group": row["group"]}
        found["qmq_audit_verified_offset"].append((group, row["verified"]))
        if row["ageS"] is not None:
            found["qmq_audit_age_seconds"].append((group, row["ageS"]))
            found["qmq_audit_verified_timestamp_seconds"].append((group, row["verifiedMs"] / 1000))
        found["qmq_audit_run_timestamp_seconds"].append((group, row["runMs"] / 1000))
        for verdict in (PROVEN, FINDINGS, NOT_READ):
            found["qmq_audit_verdict"].append((group | {"verdict": verdict}, int(row["verdict"] == verdict)))
        found["qmq_audit_unverified_bytes"].append((group, row["unverifiedBytes"]))
        for kind, number in sorted(row["found"].items()):
            found["qmq_audit_findings"].append((group | {"kind": kind}, number))
    return {name: (help_text, found[name]) for name, help_text in _GAUGES.items()}


def gauges(status: list[dict[str, Any]]) -> str:
    """Write the status in Prometheus' text format."""
    return "".join(gauge(name, help_text, values) for name, (help_text, values) in readings(status).items())


def gauge(name: str, help_text: str, readings: Iterable[tuple[Mapping[str, str], object]]) -> str:
    """Return a gauge in Prometheus' text format, for node_exporter's textfile collector."""
    lines = [f"# HELP {name} {help_text}", f"# TYPE {name} gauge"]
    for labels, value in readings:
        named = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels.items())
        lines.append(f"{name}{{{named}}} {value}")
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def write_gauges(path: Path, ledger: Ledger, *, now_ms: int) -> None:
    """Write the gauges of a ledger, as a whole file at once, for node_exporter's textfile collector."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(gauges(all_status(ledger, now_ms)))
    beside.replace(path)
