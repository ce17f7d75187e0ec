"""Shell. Waves of broker groups: groups that are audited together. Only their results outlive the wave."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from qmq.audit.copies import CannotRead
from qmq.audit.findings import FULL_SHARE, Share
from qmq.audit.history import SHARE, History, run_name
from qmq.audit.places import Change
from qmq.audit.plan import Job
from qmq.audit.results import Group, GroupAnswer, Result
from qmq.audit.selection import PIECE_BYTES
from qmq.audit.store import Tables
from qmq.ledger import Entry, Ledger, known_from

THREADS = 16
"""Broker groups that the driver prepares and judges at once."""
WAVE_BYTES, WAVE_GROUPS, WAVE_SUBJECTS = 512 << 30, 256, 1_000_000
"""Bounds of one Spark action: bytes of all copies, groups, and subjects known from the ledger. It takes minutes on a
small cluster. Retention waits for that time, and the driver holds the answers of one wave.
"""


@dataclass(slots=True)
class Audit:
    """The audit of one broker group, step by step."""

    group: Group
    result: Result
    held: ExitStack = field(default_factory=ExitStack)
    history: History = field(default_factory=lambda: History(known_from([]), 0))
    job: Job | None = None
    share: Share = FULL_SHARE
    answer: GroupAnswer = field(default_factory=lambda: GroupAnswer(()))
    entry: Entry | None = None
    unstored: str | None = None
    """The reason why its tables are not whole. Its findings are reported all the same."""

    def store(self, step: Callable[[], None]) -> None:
        """Write a table. The first error is kept for the end of the audit."""
        try:
            step()
        except Exception as error:
            self.unstored = self.unstored or f"tables of --parquet cannot be written: {cause(error)}"

    @property
    def due_bytes(self) -> int:
        """Return the bytes to read, of all copies."""
        pieces = self.job.pieces if self.job is not None else ()
        return len(self.group.places) * sum(end - begin for begin, end in pieces)

    @property
    def known_subjects(self) -> int:
        """Return the number of subjects whose ends the driver holds."""
        return 0 if self.history.anchor is None else len(self.history.anchor.ends)

    def release(self) -> None:
        """Release the copies, and forget everything except the result: a run may have a thousand groups."""
        self.held.close()
        self.job, self.answer, self.entry = None, GroupAnswer(()), None
        self.history = History(known_from([]), 0)

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
    at_ms: int = field(default_factory=lambda: time.time_ns() // 1_000_000)
    """Begin of the run, which names its rows of `parquet`."""
    trail: Callable[[], Sequence[Change]] | None = None
    """Returns the commands that moved or removed consumer groups, after the logs were read; None: unknown."""

    @property
    def tables(self) -> Tables | None:
        # Without colons, which folders' names escape, and Spark takes for times.
        return None if self.parquet is None else Tables(self.parquet, run_name(self.at_ms).replace(":", ""))


def waves(audits: Sequence[Audit], prepare: Callable[[Audit], None]) -> Iterator[list[Audit]]:
    """Prepare the audits, and yield them in waves: a group's retention waits only while its own wave is audited."""
    wave: list[Audit] = []
    size = subjects = 0
    for begin in range(0, len(audits), THREADS):
        some = audits[begin : begin + THREADS]
        each(some, prepare)
        wave += some
        size += sum(audit.due_bytes for audit in some)
        subjects += sum(audit.known_subjects for audit in some)
        if size >= WAVE_BYTES or len(wave) >= WAVE_GROUPS or subjects >= WAVE_SUBJECTS:
            yield wave
            wave, size, subjects = [], 0, 0
    if wave:
        yield wave


def each(audits: Sequence[Audit], step: Callable[[Audit], None]) -> None:
    """Take one step of each running audit, some at a time: most of it is waiting for brokers and disks."""
    running = [audit for audit in audits if audit.result.unreadable is None]
    if len(running) < 2:
        for audit in running:
            _take(audit, step)
        return
    with ThreadPoolExecutor(THREADS) as threads:
        list(threads.map(lambda audit: _take(audit, step), running))


def _take(audit: Audit, step: Callable[[Audit], None]) -> None:
    """Take one step of an audit. An error ends only its own audit."""
    try:
        step(audit)
    except CannotRead as error:
        audit.result.unreadable = str(error)
    except Exception as error:
        # Spark wraps errors of workers in many classes; all mean that the group was not read.
        audit.result.unreadable = cause(error)


def cause(error: Exception) -> str:
    """Return the line with the worker's error out of Spark's many."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    named = [line for line in lines if line.startswith(("audit.", "qmq.", "OSError", "PermissionError"))]
    java = [text for line in lines if line.startswith(("Caused by: ", ": ")) for text in [line.partition(": ")[2]]]
    return (named or java or lines[:1] or [type(error).__name__])[-1]
