"""Shell. Journal of a producer: acknowledged messages in local files, compared with the brokers' logs by the nightly
audit.

If both copies of a log lack a message, only its producer can report that. One line of JSON per message:

    {"subject": "order.changed", "group": "g1", "sequence": 81, "id": "…", "hash": "9f86d081884c7d65"}

`hash` is the start of the SHA-256 of the message's stored bytes. Files are named `<app>-<producer>-<number>.ndjson`.
All producers of a machine may share a folder; it stays below `bytes_max`, and the oldest files are deleted first. A
line torn by a crash is one message that is not checked.
"""

from __future__ import annotations

import errno
import json
import os
import random
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from io import FileIO
from pathlib import Path

from qmq.client.batch import Batch, Outcome, Result
from qmq.codec import batch_ends, labels_bytes, split_batch
from qmq.errors import InvalidRequest
from qmq.logs import bounded
from qmq.plain import plain

log = bounded(__name__)

SUFFIX = ".ndjson"
HASH_DIGITS = 16
"""64 bits: a changed message has the same digits by chance once in 2^64."""
_ILLEGAL = re.compile(r"[^\w.-]")
FILES = 8
"""Number of files that fill the folder. Room is made one file at a time."""


@dataclass(frozen=True, slots=True)
class Journal:
    """Place and sampling of a producer's journal.

    Args:
        folder: made if it is missing.
        one_in: sampling: one batch in so many, chosen at random, with all its messages; 1 records every message.
        bytes_max: limit of all files in the folder, those of other producers included.
    """

    folder: str | Path
    one_in: int = 100
    bytes_max: int = 1 << 30

    def __post_init__(self) -> None:
        if self.one_in < 1 or self.bytes_max < 1 << 20:
            raise InvalidRequest("a journal has one_in >= 1 and bytes_max >= 1 MiB")


class JournalWriter:
    """Writer of one producer's files; used on its loop. A disk error ends the journal, not the producer."""

    def __init__(self, journal: Journal, name: str) -> None:
        self._journal = journal
        self._name = _ILLEGAL.sub("_", name)
        self._random = random.Random()
        self._number = self._size = 0
        self._file: FileIO | None = None
        self._has_failed = False

    def stored(self, batch: Batch, result: Result) -> None:
        """Record an acknowledged batch, before its bytes are released."""
        if self._has_failed or result.outcome is not Outcome.STORED or self._random.randrange(self._journal.one_in):
            return
        try:
            self._write("".join(_lines(batch, result)).encode())
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):  # no disk failed: the next batch tries again
                log.warning("journal lacks a batch folder=%s error=%s", self._journal.folder, error)
                return
            self._has_failed = True
            log.error("journal has ended folder=%s error=%s", self._journal.folder, error)
            self.close()

    def _write(self, lines: bytes) -> None:
        if self._file is None or self._size + len(lines) > self._journal.bytes_max // FILES or self._is_removed():
            self._next_file()
        assert self._file is not None
        self._size += len(lines)
        rest = memoryview(lines)
        while rest:  # a nearly full disk writes a part, and fails at the next write
            rest = rest[self._file.write(rest) :]

    def _is_removed(self) -> bool:
        """Return whether another producer deleted this file to make room, so that its lines would be lost."""
        return self._file is not None and not os.fstat(self._file.fileno()).st_nlink

    def _next_file(self) -> None:
        self.close()
        folder = Path(plain(self._journal.folder))
        folder.mkdir(parents=True, exist_ok=True)
        _make_room(folder, self._journal.bytes_max - self._journal.bytes_max // FILES)
        self._number = self._number + 1
        self._size = 0
        self._file = FileIO(folder / f"{self._name}-{self._number:06d}{SUFFIX}", "a")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _lines(batch: Batch, result: Result) -> Iterable[str]:
    sequence = result.first_sequence
    for position, (identity, digest) in enumerate(zip(batch.ids, _digests(batch), strict=True)):
        if position in result.refused:
            continue
        record = {
            "subject": batch.subject,
            "group": result.broker_group,
            "sequence": sequence,
            "id": identity,
            "hash": digest[:HASH_DIGITS],
        }
        yield json.dumps(record) + "\n"
        sequence += 1


def _digests(batch: Batch) -> Iterator[str]:
    """Yield the hash of each message; a large one is not copied."""
    if len(batch) > 1:
        body = memoryview(b"".join(batch.blocks))
        if batch.flags:
            body = body[: len(body) - labels_bytes(len(batch))]
        yield from (sha256(message).hexdigest() for message in split_batch(body, len(batch)))
        return
    ends, digest = batch_ends(batch.blocks[0], 1), sha256()
    skipped, left = 4 * len(ends), ends[-1]
    for block in batch.blocks:
        part = memoryview(block)[skipped : skipped + left]
        skipped, left = max(0, skipped - len(block)), left - len(part)
        digest.update(part)
    yield digest.hexdigest()


def _make_room(folder: Path, bytes_max: int) -> None:
    """Delete the oldest files until the rest has at most `bytes_max`. Other producers may do so at the same time."""
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
