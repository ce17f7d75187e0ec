"""Shell. What the disk makes of the system's calls: files and names that last, and what a failed call leaves."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path
from random import Random

import pytest

from qmq.errors import DiskFailed
from qmq.log import RealDisk
from qmq.log.memory_disk import MemoryDisk
from qmq.log.memory_system import MemorySystem
from qmq.log.system import System
from tests.simulation.disk import SimulatedDisk
from tests.support.effort import examples

LUCK = [None, 1, 2, 3, 4]


def crashed(disk: MemoryDisk, call: int, work, luck: int | None) -> bool:
    """Do the work, whose process is killed at a call by a power cut; return whether it was done before."""
    disk.fail_after(call)
    try:
        work(disk)
    except DiskFailed:
        done = False
    else:
        done = True
    disk.heal()
    disk.crash(None if luck is None else Random(luck))
    disk.reopen()
    return done


def each_call(work) -> range:
    disk = MemoryDisk()
    disk.put("log/old", b"old")
    before = disk.calls
    work(disk)
    return range(1, disk.calls - before + 2)


def test_data_directory_that_was_just_made_is_lasting():
    disk = MemoryDisk()
    disk.put("f", b"data")
    disk.crash()
    assert disk.read("f", 0, 10) == b"data"


@pytest.mark.parametrize("luck", LUCK)
def test_file_that_is_put_is_the_old_one_or_the_new_one(luck):
    def work(disk):
        disk.put("log/old", b"new, and longer")

    for call in each_call(work):
        disk = MemoryDisk()
        disk.put("log/old", b"old")
        done = crashed(disk, call, work, luck)
        assert disk.read("log/old", 0, 99) in ([b"new, and longer"] if done else [b"old", b"new, and longer"])


@pytest.mark.parametrize("luck", LUCK)
def test_file_that_is_moved_has_one_of_its_names(luck):
    def work(disk):
        disk.move("log/old", "quarantine/there/moved")

    for call in each_call(work):
        disk = MemoryDisk()
        disk.put("log/old", b"old")
        done = crashed(disk, call, work, luck)
        names = disk.all_names()
        assert names == ["quarantine/there/moved"] or (names == ["log/old"] and not done)
        assert disk.read(names[0], 0, 9) == b"old"


@pytest.mark.parametrize("luck", LUCK)
@pytest.mark.parametrize("name", ["log/new", "made/just/new"])
def test_name_of_a_file_that_was_created_stays(name, luck):
    def create(disk: MemoryDisk) -> None:
        disk.create(name, 5)

    for call in each_call(create):
        disk = MemoryDisk()
        disk.put("log/old", b"old")
        if crashed(disk, call, create, luck):
            assert disk.has(name) and disk.read(name, 0, 9) == bytes(5)


@pytest.mark.parametrize("luck", LUCK)
def test_file_that_was_removed_cut_or_created_stays_so(luck):
    works = {
        "removed": (lambda disk: disk.remove("log/old"), b""),
        "cut": (lambda disk: disk.truncate("log/old", 1), b"o"),
        "created": (lambda disk: disk.create("log/old", 5), bytes(5)),
    }
    for work, expected in works.values():
        for call in each_call(work):
            disk = MemoryDisk()
            disk.put("log/old", b"old")
            if crashed(disk, call, work, luck):
                assert disk.read("log/old", 0, 9) == expected


def test_name_that_a_killed_process_made_is_lasting_for_the_next():
    disk = MemoryDisk()
    disk.put("log/f", b"old")
    disk.fail_after(4)  # open, write, fsync, rename; now its folder
    with pytest.raises(DiskFailed):
        disk.put("log/f", b"new")
    disk.heal()
    disk.reopen()
    assert disk.read("log/f", 0, 9) == b"old"  # the rename itself was refused
    disk.fail_after(5)
    with pytest.raises(DiskFailed):
        disk.put("log/f", b"new")
    disk.heal()
    disk.reopen()
    assert disk.read("log/f", 0, 9) == b"new"
    disk.crash()
    assert disk.read("log/f", 0, 9) == b"new", "somebody read it, and acted on it"


@pytest.mark.parametrize("luck", LUCK)
def test_name_that_a_killed_process_made_two_folders_down_is_lasting_for_the_next(luck):
    """What is kept of a damaged log is."""

    def work(disk):
        disk.put("quarantine/there/kept", b"kept")

    for call in each_call(work):
        disk = MemoryDisk()
        disk.put("log/old", b"old")
        disk.put("quarantine/there/other", b"other")
        disk.fail_after(call)
        with contextlib.suppress(DiskFailed):
            work(disk)
        disk.heal()
        disk.reopen()
        seen = disk.all_names()
        disk.crash(None if luck is None else Random(luck))
        disk.reopen()
        assert disk.all_names() == seen, "somebody read them, and acted on it"


def test_what_a_failed_fsync_did_not_keep_is_not_read_by_the_next_process():
    """Linux drops what it cannot write, shows it to readers, and says nothing when it is asked a second time."""
    found = set()
    for seed in range(20):
        disk = SimulatedDisk(Random(seed))
        disk.create("log/f", 100)
        disk.write("log/f", 0, [b"written"])
        disk.system.fails_once_at = disk.calls + 1
        with pytest.raises(DiskFailed):
            disk.sync("log/f")
        disk.reopen()
        read = disk.read("log/f", 0, 7)
        disk.sync("log/f")
        disk.crash()
        assert disk.read("log/f", 0, 7) == read
        found.add(read)
    assert {b"written", bytes(7)} <= found, "sometimes it was kept"


def test_write_that_is_cut_short_goes_on():
    class Short(MemorySystem):
        def pwritev(self, fd, buffers, at):
            return super().pwritev(fd, [b"".join(buffers)[:3]], at)

    disk = MemoryDisk(Short())
    disk.create("f", 0)
    disk.write("f", 2, [b"abcd", b"", b"efghij"])
    disk.put("g", b"0123456789")
    assert disk.read("f", 0, 99) == b"\0\0abcdefghij" and disk.read("g", 0, 99) == b"0123456789"


def test_file_that_is_open_and_has_lost_its_name_is_known(tmp_path: Path):
    disk = RealDisk(tmp_path)
    for name in ("gone", "exchanged", "kept"):
        disk.create(name, 8)
    (tmp_path / "gone").unlink()
    (tmp_path / "other").write_bytes(b"12345678")
    (tmp_path / "other").replace(tmp_path / "exchanged")
    disk.remove("never there")
    assert [disk.is_lost(name) for name in ("gone", "exchanged", "kept", "never there")] == [True, True, False, False]


def test_file_that_another_thread_of_ours_takes_away_is_not_lost(tmp_path: Path):
    class Meanwhile(System):
        def is_named(self, fd, path):
            disk.remove("f")
            return super().is_named(fd, path)

    disk = RealDisk(tmp_path, system=Meanwhile())
    disk.create("f", 8)
    assert not disk.is_lost("f")


def test_system_in_memory_does_what_the_real_one_does(tmp_path: Path):
    rng = Random(1)
    disks = MemoryDisk(), RealDisk(tmp_path / "made" / "here")
    names = ["a", "log/b", "log/c", "x/y/d"]
    for step in range(examples(600)):
        what, name, to = rng.choice(["create", "write", "put", "truncate", "move", "remove"]), *rng.sample(names, 2)
        offset, data = rng.randrange(50), os.urandom(rng.randrange(1, 60))
        outcomes = [_outcome(disk, what, name, to, offset, data) for disk in disks]
        assert outcomes[0] == outcomes[1], f"step {step}: {what} {name}"


def _outcome(disk: RealDisk, what: str, name: str, to: str, offset: int, data: bytes):
    arguments = {
        "create": (name, len(data)),
        "write": (name, offset, [data, data]),
        "put": (name, data),
        "truncate": (name, offset),
        "move": (name, to),
        "remove": (name,),
    }
    try:
        getattr(disk, what)(*arguments[what])
        failed = ""
    except DiskFailed as error:
        failed = type(error.__cause__).__name__
    there = [disk.names(folder) for folder in ("log", "x", "x/y", "nowhere")]
    files = [(disk.has(n), disk.is_lost(n), disk.size(n), disk.read(n, 3, 90), bytes(disk.map(n))) for n in (name, to)]
    return failed, there, files


def test_folder_that_is_not_ours_is_left_alone(tmp_path: Path):
    """The root of a mounted file system has a folder lost+found that only root may open."""

    class Guarded(System):
        def open(self, path, flags):
            if path in (str(tmp_path), str(tmp_path / "data" / "lost+found")):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
            return super().open(path, flags)

    (tmp_path / "data" / "lost+found").mkdir(parents=True)
    disk = RealDisk(tmp_path / "data", system=Guarded())
    disk.put("f", b"data")
    assert disk.read("f", 0, 9) == b"data"


@pytest.mark.parametrize("code", [errno.EACCES, errno.EINVAL, errno.EIO], ids=errno.errorcode.get)
def test_folder_above_that_cannot_be_fsynced_is_no_fault_of_the_disk(tmp_path: Path, code: int):
    """It may be of another file system, which knows no fsync of folders."""

    class Above(System):
        def open(self, path, flags):
            fd = super().open(path, flags)
            if path == str(tmp_path):
                self.above = fd
            return fd

        def fsync(self, fd):
            if fd == self.above:
                self.above = -1
                raise OSError(code, os.strerror(code))
            super().fsync(fd)

    if code == errno.EIO:
        with pytest.raises(DiskFailed):
            RealDisk(tmp_path / "data", system=Above())
    else:
        RealDisk(tmp_path / "data", system=Above()).put("f", b"data")
