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
from tests.simulation.bugs import Patch, bug


def _sync(self: RealDisk, name: str) -> None: ...


@bug("cores")
def fsync_is_skipped() -> list[Patch]:
    """What is written is said to be on the disk."""
    return [mock.patch.object(RealDisk, "sync", _sync)]


@bug("cores")
def names_are_not_lasting() -> list[Patch]:
    """No folder is fsynced after a name in it was made, changed or deleted."""
    return [mock.patch.object(RealDisk, "_sync_folders", lambda self, path: None)]


@bug("cores")
def data_directory_is_not_lasting() -> list[Patch]:
    """Nobody fsyncs the folder in which the data directory was made."""
    return [mock.patch.object(RealDisk, "_sync_all_folders", lambda self: None)]


@bug("cores", first=26)
def put_writes_in_place() -> list[Patch]:
    """A file is replaced by writing over it."""

    def put(self: RealDisk, name: str, data: Buffer) -> None:
        self.create(name, 0)
        self.write(name, 0, [data])
        self.sync(name)

    return [mock.patch.object(RealDisk, "put", put)]


@bug("cores", first=5)
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


@bug("cores", first=124)
def truncate_is_not_fsynced() -> list[Patch]:
    """What was cut off may come back."""

    def truncate(self: RealDisk, name: str, size: int) -> None:
        with failing(name):
            self._system.truncate(self._open(name).fd, size)

    return [mock.patch.object(RealDisk, "truncate", truncate)]


@bug("cores")
def short_write_is_taken_for_a_whole_one() -> list[Patch]:
    """Nobody looks at how much was written."""

    def write_all(self: RealDisk, file: Any, offset: int, buffers: Sequence[Buffer]) -> None:
        self._system.pwritev(file.fd, buffers, offset)

    return [mock.patch.object(RealDisk, "_write_all", write_all)]


@bug("cores", first=31)
def failed_fsync_is_tried_again() -> list[Patch]:
    """An fsync that fails is called once more, which succeeds."""

    def sync(self: RealDisk, file: Any, call: Any) -> None:
        try:
            call(file.fd)
        except OSError:
            call(file.fd)

    return [mock.patch.object(RealDisk, "_sync", sync)]


@bug("cores", first=100)
def failed_fsync_is_read_from_memory() -> list[Patch]:
    """The next process reads what a failed fsync did not keep."""
    return [mock.patch.object(RealDisk, "_sync", lambda self, file, call: call(file.fd))]


@bug("cores")
def commit_is_acknowledged_before_it_was_written() -> list[Patch]:
    """The last write of a commit comes with the next one."""
    real, late = MessageLog.perform, {}

    def perform(self: MessageLog, commit: Commit) -> None:
        steps = [*late.pop(self, []), *commit.steps]
        real(self, Commit(commit.end, commit.chain, commit.bytes, steps[:-1]))
        late[self] = steps[-1:]

    return [mock.patch.object(MessageLog, "perform", perform)]
