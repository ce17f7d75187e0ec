"""Shell. A process' own file of records, without a buffer: a kill does not lose a record of a finished action."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from zlib import crc32

import qmq
from qmq.deploy.chaos.records import Record, line_of


class Journal:
    """Appends records to a file. A written record survives the process, as the kernel has it."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def write(self, *records: Record) -> None:
        self.write_all(records)

    def write_all(self, records: Iterable[Record]) -> None:
        data = "".join(map(line_of, records)).encode()
        while data:
            data = data[os.write(self._file, data) :]

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._file)


def now() -> float:
    """Microseconds are enough, and short."""
    return round(time.monotonic(), 6)


def content_of(message: qmq.Message) -> int:
    """Return the checksum of the fields that a consumer must receive unchanged."""
    fields = str(message["n"]), message["x"], message.order_key, sorted(message.tags), message.retries_max
    return crc32(repr(fields).encode())
