"""Shell. A producer's own journal: what it was told is stored, kept apart from the brokers, for the nightly audit.

Two copies of a log may both lack a message; then only who sent it can say so. A line of JSON per message:

    {"subject": "order.changed", "group": "g1", "sequence": 81, "id": "…", "hash": "9f86d081884c7d65"}

`hash` is the beginning of the SHA-256 of the message as it is encoded and stored. Files are called
`<app>-<producer>-<number>.ndjson`; all producers of a machine may share a folder, which stays below `bytes_max`: the
oldest files go first. A line that a crash tears off is one message that is not checked.
"""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256
from io import FileIO
from pathlib import Path

from qmq.client.batch import Batch, Outcome, Result
from qmq.codec import labels_bytes, split_batch
from qmq.errors import InvalidRequest
from qmq.logs import bounded
from qmq.plain import plain

log = bounded(__name__)

SUFFIX = ".ndjson"
HASH_DIGITS = 16
"""64 bits: a message that was exchanged has the same ones by chance once in 2^64."""
_ILLEGAL = re.compile(r"[^\w.-]")
FILES = 8
"""A folder is emptied by an eighth at a time."""


@dataclass(frozen=True, slots=True)
class Journal:
    """Where a producer keeps its journal, and of how many messages.

    Args:
        folder: made if it is missing.
        one_in: one batch in so many, chosen at random, all of its messages; 1: every message.
        bytes_max: what all files in the folder have together, those of other producers included.
    """

    folder: str | Path
    one_in: int = 100
    bytes_max: int = 1 << 30

    def __post_init__(self) -> None:
        if self.one_in < 1 or self.bytes_max < 1 << 20:
            raise InvalidRequest("a journal has one_in >= 1 and bytes_max >= 1 MiB")


class JournalWriter:
    """Writes one producer's files; used on its loop. A disk that fails ends the journal, not the producer."""

    def __init__(self, journal: Journal, name: str) -> None:
        self._journal = journal
        self._name = _ILLEGAL.sub("_", name)
        self._random = random.Random()
        self._number = self._size = 0
        self._file: FileIO | None = None
        self._has_failed = False

    def stored(self, batch: Batch, result: Result) -> None:
        """Take a batch that a broker acknowledged, before its bytes are let go of."""
        if self._has_failed or result.outcome is not Outcome.STORED or self._random.randrange(self._journal.one_in):
            return
        try:
            self._write("".join(_lines(batch, result)).encode())
        except OSError as error:
            self._has_failed = True
            log.error("journal has ended folder=%s error=%s", self._journal.folder, error)
            self.close()

    def _write(self, lines: bytes) -> None:
        if self._file is None or self._size + len(lines) > self._journal.bytes_max // FILES or self._is_removed():
            self._next_file()
        assert self._file is not None
        self._size += len(lines)
        rest = memoryview(lines)
        while rest:  # a disk that is nearly full takes a part, and fails with the next one
            rest = rest[self._file.write(rest) :]

    def _is_removed(self) -> bool:
        """Whether another producer made room, and took this file for an old one: nobody would read what it gets."""
        return self._file is not None and not os.fstat(self._file.fileno()).st_nlink

    def _next_file(self) -> None:
        self.close()
        folder = Path(plain(self._journal.folder))
        folder.mkdir(parents=True, exist_ok=True)
        _make_room(folder, self._journal.bytes_max - self._journal.bytes_max // FILES)
        self._number, self._size = self._number + 1, 0
        self._file = FileIO(folder / f"{self._name}-{self._number:06d}{SUFFIX}", "a")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _lines(batch: Batch, result: Result) -> Iterable[str]:
    body = memoryview(b"".join(batch.blocks))
    if batch.flags:
        body = body[: len(body) - labels_bytes(len(batch))]
    sequence = result.first_sequence
    for position, (identity, message) in enumerate(zip(batch.ids, split_batch(body, len(batch)), strict=True)):
        if position in result.refused:
            continue
        record = {
            "subject": batch.subject,
            "group": result.broker_group,
            "sequence": sequence,
            "id": identity,
            "hash": sha256(message).hexdigest()[:HASH_DIGITS],
        }
        yield json.dumps(record) + "\n"
        sequence += 1


def _make_room(folder: Path, bytes_max: int) -> None:
    """Remove the oldest files until the rest has no more than `bytes_max`. Others may do so at the same time."""
    files = []
    for path in folder.glob(f"*{SUFFIX}"):
        try:
            status = path.stat()
        except FileNotFoundError:
            continue
        files.append((status.st_mtime_ns, status.st_size, path))
    total = sum(size for _, size, _ in files)
    for _, size, path in sorted(files):
        if total <= bytes_max:
            return
        path.unlink(missing_ok=True)
        total -= size
