"""Known bugs of the disk code that ships, each planted into it for a while."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any
from unittest import mock

from qmq.codec import Buffer
from qmq.log import Commit, MessageLog
from qmq.log.disk import RealDisk, failing
from qmq.log.system import System
from tests.support.planting import Bug, Patch


def _sync(self: RealDisk, name: str) -> None: ...


def fsync_is_skipped() -> list[Patch]:
    """What is written is said to be on the disk."""
    return [mock.patch.object(RealDisk, "sync", _sync)]


def names_are_not_lasting() -> list[Patch]:
    """No folder is fsynced after a name in it was made, changed or deleted."""
    return [mock.patch.object(RealDisk, "_sync_folders", lambda self, path: None)]


def data_directory_is_not_lasting() -> list[Patch]:
    """Nobody fsyncs the folder in which the data directory was made."""
    return [mock.patch.object(RealDisk, "_sync_all_folders", lambda self: None)]


def put_writes_in_place() -> list[Patch]:
    """A file is replaced by writing over it."""

    def put(self: RealDisk, name: str, data: Buffer) -> None:
        self.create(name, 0)
        self.write(name, 0, [data])
        self.sync(name)

    return [mock.patch.object(RealDisk, "put", put)]


def put_does_not_fsync_the_file() -> list[Patch]:
    """The new file gets its name before its bytes are on the disk."""
    real = RealDisk.put

    def put(self: RealDisk, name: str, data: Buffer) -> None:
        system = self._system
        with mock.patch.object(self, "_system", _WithoutFsyncOfFiles(system)):
            real(self, name, data)

    return [mock.patch.object(RealDisk, "put", put)]


class _WithoutFsyncOfFiles(System):
    """A system of which only folders are fsynced."""

    def __init__(self, system: System) -> None:
        self._system, self._folders = system, set[int]()

    def __getattribute__(self, name: str) -> Any:
        if name in ("open", "fsync", "_system", "_folders"):
            return object.__getattribute__(self, name)
        return getattr(object.__getattribute__(self, "_system"), name)

    def open(self, path: str, flags: int) -> int:
        fd = self._system.open(path, flags)
        if flags & os.O_DIRECTORY:
            self._folders.add(fd)
        return fd

    def fsync(self, fd: int) -> None:
        if fd in self._folders:
            self._system.fsync(fd)


def truncate_is_not_fsynced() -> list[Patch]:
    """What was cut off may come back."""

    def truncate(self: RealDisk, name: str, size: int) -> None:
        with failing(name):
            self._system.truncate(self._open(name).fd, size)

    return [mock.patch.object(RealDisk, "truncate", truncate)]


def short_write_is_taken_for_a_whole_one() -> list[Patch]:
    """Nobody looks at how much was written."""

    def write_all(self: RealDisk, file: Any, offset: int, buffers: Sequence[Buffer]) -> None:
        self._system.pwritev(file.fd, buffers, offset)

    return [mock.patch.object(RealDisk, "_write_all", write_all)]


def failed_fsync_is_tried_again() -> list[Patch]:
    """An fsync that fails is called once more, which succeeds."""

    def sync(self: RealDisk, file: Any, call: Any) -> None:
        try:
            call(file.fd)
        except OSError:
            call(file.fd)

    return [mock.patch.object(RealDisk, "_sync", sync)]


def failed_fsync_is_read_from_memory() -> list[Patch]:
    """The next process reads what a failed fsync did not keep."""
    return [mock.patch.object(RealDisk, "_sync", lambda self, file, call: call(file.fd))]


def commit_is_acknowledged_before_it_was_written() -> list[Patch]:
    """The last write of a commit comes with the next one."""
    real, late = MessageLog.perform, {}

    def perform(self: MessageLog, commit: Commit) -> None:
        steps = [*late.pop(self, []), *commit.steps]
        real(self, Commit(commit.end, commit.chain, commit.bytes, steps[:-1]))
        late[self] = steps[-1:]

    return [mock.patch.object(MessageLog, "perform", perform)]


DISK_BUGS = [
    Bug("fsync is skipped", fsync_is_skipped),
    Bug("names are not lasting", names_are_not_lasting),
    Bug("data directory is not lasting", data_directory_is_not_lasting),
    Bug("put writes in place", put_writes_in_place, first=26),
    Bug("put does not fsync the file", put_does_not_fsync_the_file, first=5),
    Bug("truncate is not fsynced", truncate_is_not_fsynced, first=124),
    Bug("short write is taken for a whole one", short_write_is_taken_for_a_whole_one),
    Bug("failed fsync is tried again", failed_fsync_is_tried_again, first=31),
    Bug("failed fsync is read from memory", failed_fsync_is_read_from_memory, first=100),
    Bug("commit is acknowledged before it was written", commit_is_acknowledged_before_it_was_written),
]
