"""Shell. Page of the nightly audit: status of each broker group, and the newest runs, from the ledger."""

from __future__ import annotations

import time
from collections.abc import Collection
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

from qmq.ledger import PROVEN, Entry, Ledger, status_of

GROUPS_MAX = 100
RUNS_MAX = 100
"""Number of runs listed over all groups, the newest first."""
FINDINGS_MAX = 20
LOOK_AGAIN_S = 60.0
"""A run touches the folder after each line (`Ledger.append`); other edits show after this time. A stat of 2,000 files
makes a thread give the interpreter away 2,000 times: 390 ms for a page beside a busy loop.
"""

Stamp = tuple[int, int, int]
"""Version of a file: changes with each appended line, and when it is restored."""


class _Read(NamedTuple):
    stamp: Stamp
    status: dict[str, Any]
    runs: list[dict[str, Any]]
    """The newest runs; empty while the group is not among the listed ones."""


class Nights:
    """Ledger in a directory. Files are checked only after a run, and read again only when changed: with thousands of
    groups either would take longer than the page. Made by main; `shown` is called on any thread.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ledger = Ledger(folder)
        self._lock = Lock()
        self._read: dict[str, _Read] = {}
        self._touched_ns = 0
        self._look_again_s = 0.0

    def shown(self, only: str, *, now_ms: int, there: Collection[str] | None = None) -> dict[str, Any]:
        """Return the content of the page; raises LedgerDamaged, OSError.

        Args:
            only: one broker group; empty: all.
            there: the existing broker groups, or None if unknown. A group without any run is not proven; a removed
                group does not count.
        """
        with self._lock:
            found, known = self._refresh(), None if there is None else set(there)
            counted = [name for name in found if name == only or (not only and (known is None or name in known))]
            status = [self._read[name].status for name in counted]
            status.sort(key=lambda row: (row["verdict"] == PROVEN, row["runMs"]))
            newest = sorted(status, key=lambda row: (-row["runMs"], row["group"]))[:RUNS_MAX]
            runs = [run for row in newest for run in self._runs(row["group"])]
        missing = sorted(name for name in set(there or ()) - set(found) if only in ("", name))
        runs.sort(key=lambda run: (-run["atMs"], run["group"]))
        return {
            "status": [_aged(row, now_ms) for row in status[:GROUPS_MAX]],
            "unshown": max(0, len(status) - GROUPS_MAX),
            "proven": sum(row["verdict"] == PROVEN for row in status),
            "total": len(status) + len(missing),
            "missing": missing,
            "removed": sorted(set(found) - set(there)) if there is not None and not only else [],
            "oldest_ms": min((row["runMs"] for row in status), default=0),
            "runs": runs[:RUNS_MAX],
        }

    def status(self, *, now_ms: int) -> list[dict[str, Any]]:
        """Return the status of each group in the ledger; raises LedgerDamaged, OSError."""
        with self._lock:
            return [_aged(self._read[name].status, now_ms) for name in self._refresh()]

    def _refresh(self) -> list[str]:
        """Read the changed files; return the groups with entries."""
        if not self._folder.is_dir():
            raise FileNotFoundError(f"{self._folder} is no directory: has the audit run here, or is it mounted?")
        touched_ns = self._folder.stat().st_mtime_ns  # before the files, which a run writes first
        now_s = time.monotonic()
        if touched_ns != self._touched_ns or now_s >= self._look_again_s:
            names = self._ledger.groups()
            self._read = {name: found for name in names if (found := self._group(name)) is not None}
            self._touched_ns = touched_ns
            self._look_again_s = now_s + LOOK_AGAIN_S
        return list(self._read)

    def _group(self, name: str) -> _Read | None:
        stamp, known = self._stamp(name), self._read.get(name)
        if known is not None and known.stamp == stamp:
            return known
        entries = self._ledger.newest(name, 1)
        if entries and not entries[0].verified:  # that run verified nothing; an earlier one may have
            entries = self._ledger.entries(name)
        return _Read(stamp, status_of(entries, 0), []) if entries else None

    def _runs(self, name: str) -> list[dict[str, Any]]:
        """Return the newest runs of the groups read last; the other groups have none of the listed runs."""
        known = self._read[name]
        if not known.runs:
            runs = [_run_of(entry) for entry in self._ledger.newest(name, RUNS_MAX)]
            known = self._read[name] = known._replace(runs=runs)
        return known.runs

    def _stamp(self, name: str) -> Stamp:
        found = self._ledger.path(name).stat()
        return found.st_ino, found.st_size, found.st_mtime_ns


def _aged(row: dict[str, Any], now_ms: int) -> dict[str, Any]:
    return row | {"ageS": (now_ms - row["verifiedMs"]) // 1000 if row["verifiedRun"] else None}


def _run_of(entry: Entry) -> dict[str, Any]:
    return {
        "run": entry.run,
        "atMs": entry.at_ms,
        "group": entry.group,
        "verdict": entry.verdict,
        "why": entry.why,
        "verified": entry.verified,
        "found": entry.found,
        "findings": entry.findings[:FINDINGS_MAX],
        "read": sum(entry.read.values()),
        "by": entry.by,
    }
