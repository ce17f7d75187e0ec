"""Shell. Durability of files and names over the system's calls, and the state after a failed call."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path
from random import Random

import pytest

from qmq.errors import DiskFailed
from qmq.log import RealDisk
from qmq.log import disk as disk_module
from qmq.log.memory_disk import MemoryDisk, MemorySystem
from qmq.log.system import System
from tests.simulation.disk import SimulatedDisk
from tests.support.effort import examples

LUCK = [None, 1, 2, 3, 4]


def crashed(disk: MemoryDisk, call: int, work, luck: int | None) -> bool:
    """Cut the power at a call of the work; return whether the work was done before."""
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


def swept(disk: RealDisk) -> list[int]:
    """Sweep until nothing is left; return the remaining bytes after each piece."""
    left = []
    while disk.sweep():
        left.append(sum(disk.size(f"{disk_module.REMOVED}/{name}") for name in disk.names(disk_module.REMOVED)))
    return left


def test_removed_file_is_freed_in_pieces(monkeypatch, tmp_path):
    monkeypatch.setattr(disk_module, "SWEPT_BYTES", 1000)
    disk = RealDisk(tmp_path)
    for name, size in (("log/a", 2500), ("log/b", 1000), ("c", 1001)):
        disk.put(name, bytes(size))
        disk.remove(name)
        assert not disk.has(name) and disk.read(name, 0, 10) == b""
    assert sorted(disk.names(disk_module.REMOVED)) == ["c", "log-a"]
    assert swept(RealDisk(tmp_path)) == [2501, 2500, 1500, 500, 0], "also by the next process"
    assert not disk.sweep()


def test_sweeping_keeps_pace_with_writing(monkeypatch, tmp_path):
    monkeypatch.setattr(disk_module, "SWEPT_BYTES", 10)
    disk = RealDisk(tmp_path)
    disk.put("f", bytes(disk_module.SWEPT_SHARE * 20))
    disk.remove("f")
    left = swept(disk)
    assert left[0] == (disk_module.SWEPT_SHARE - 1) * 20 and len(left) < 2 * disk_module.SWEPT_SHARE


@pytest.mark.parametrize("size", [1500, 500], ids=["would be cut", "would be unlinked"])
def test_sweep_accepts_files_deleted_meanwhile(monkeypatch, tmp_path, size):
    """Operators delete there to free room; the broker must not end because of it."""
    monkeypatch.setattr(disk_module, "SWEPT_BYTES", 1000)
    disk = RealDisk(tmp_path)
    monkeypatch.setattr(disk, "names", lambda folder: ["log-a"])
    monkeypatch.setattr(disk, "size", lambda name: size)
    assert disk.sweep()


def test_mapped_file_is_removed_at_once(monkeypatch, tmp_path):
    """Truncating it would kill processes that still map it."""
    monkeypatch.setattr(disk_module, "SWEPT_BYTES", 1000)
    disk = RealDisk(tmp_path)
    disk.put("f", b"x" * 9000)
    mapped = disk.map("f")
    disk.remove("f")
    assert not disk.sweep() and bytes(mapped) == b"x" * 9000


@pytest.mark.parametrize("luck", LUCK)
def test_removed_large_file_stays_gone(monkeypatch, luck):
    monkeypatch.setattr(disk_module, "SWEPT_BYTES", 2)

    def work(disk):
        disk.remove("log/old")

    for call in each_call(work):
        disk = MemoryDisk()
        disk.put("log/old", b"old")
        done = crashed(disk, call, work, luck)
        assert disk.read("log/old", 0, 10) in (b"", b"old") and not (done and disk.has("log/old"))


def test_new_data_directory_is_durable():
    disk = MemoryDisk()
    disk.put("f", b"data")
    disk.crash()
    assert disk.read("f", 0, 10) == b"data"


CHANGES = {
    "put": (lambda disk: disk.put("log/old", b"new, and longer"), {"log/old": b"new, and longer"}),
    "move": (lambda disk: disk.move("log/old", "quarantine/there/moved"), {"quarantine/there/moved": b"old"}),
    "create": (lambda disk: disk.create("log/new", 5), {"log/old": b"old", "log/new": bytes(5)}),
    "create in a new folder": (lambda disk: disk.create("a/b/new", 5), {"log/old": b"old", "a/b/new": bytes(5)}),
    "create again": (lambda disk: disk.create("log/old", 5), {"log/old": bytes(5)}),
    "truncate": (lambda disk: disk.truncate("log/old", 1), {"log/old": b"o"}),
    "remove": (lambda disk: disk.remove("log/old"), {}),
}
"""A change of a disk with the file log/old, and the files after it."""


@pytest.mark.parametrize("luck", LUCK)
@pytest.mark.parametrize("name", CHANGES)
def test_change_is_durable_and_atomic(name, luck):
    work, after = CHANGES[name]
    for call in each_call(work):
        disk = MemoryDisk()
        disk.put("log/old", b"old")
        done = crashed(disk, call, work, luck)
        found = {name: disk.read(name, 0, 99) for name in disk.all_names()}
        if done:
            assert found == after
        elif name in ("put", "move"):
            assert found in ({"log/old": b"old"}, after)


@pytest.mark.parametrize("luck", LUCK)
def test_nested_name_of_a_killed_process_is_durable(luck):
    """Kept parts of a damaged log are in such folders."""

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
        assert disk.all_names() == seen, "the next process may have acted on them"


def test_bytes_of_a_failed_fsync_are_not_read():
    """Linux drops bytes it cannot write, still shows them to readers, and reports no error to a second fsync."""
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
    assert {b"written", bytes(7)} <= found, "some bytes were kept"


def test_short_write_is_continued():
    class Short(MemorySystem):
        def pwritev(self, fd, buffers, at):
            return super().pwritev(fd, [b"".join(buffers)[:3]], at)

    disk = MemoryDisk(Short())
    disk.create("f", 0)
    disk.write("f", 2, [b"abcd", b"", b"efghij"])
    disk.put("g", b"0123456789")
    assert disk.read("f", 0, 99) == b"\0\0abcdefghij" and disk.read("g", 0, 99) == b"0123456789"


def test_is_lost_detects_unlinked_and_replaced_files(tmp_path: Path):
    disk = RealDisk(tmp_path)
    for name in ("gone", "exchanged", "kept"):
        disk.create(name, 8)
    (tmp_path / "gone").unlink()
    (tmp_path / "other").write_bytes(b"12345678")
    (tmp_path / "other").replace(tmp_path / "exchanged")
    disk.remove("never there")
    assert [disk.is_lost(name) for name in ("gone", "exchanged", "kept", "never there")] == [True, True, False, False]


def test_file_removed_by_our_thread_is_not_lost(tmp_path: Path):
    class Meanwhile(System):
        def is_named(self, fd, path):
            disk.remove("f")
            return super().is_named(fd, path)

    disk = RealDisk(tmp_path, system=Meanwhile())
    disk.create("f", 8)
    assert not disk.is_lost("f")


def test_memory_system_equals_the_real_one(tmp_path: Path):
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


def test_foreign_folder_is_left_alone(tmp_path: Path):
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
def test_unsyncable_parent_folder_is_accepted(tmp_path: Path, code: int):
    """It may be on another file system, which cannot fsync folders."""

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


def test_reserved_bytes_are_not_used(tmp_path: Path):
    for disk in (MemoryDisk(), RealDisk(tmp_path)):
        assert disk.used("nowhere") == 0
        disk.create("empty", 0)
        disk.create("reserved", 1 << 20)
        assert disk.used("empty") == disk.used("reserved") == 0
        disk.put("f", b"data")
        assert disk.used("f") == 4
        disk.write("reserved", 0, [b"data"])
        assert 4 <= disk.used("reserved") <= 4096


def test_failed_seek_is_a_failed_disk():
    class Deaf(MemorySystem):
        def seek(self, fd, at, whence):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    disk = MemoryDisk(Deaf())
    disk.put("f", b"data")
    with pytest.raises(DiskFailed):
        disk.used("f")


@pytest.mark.parametrize("call", ["put", "move", "remove"])
def test_concurrent_reader_does_not_keep_the_old_file(call):
    """Otherwise readers would see the old file for ever, and its disk space would not be freed."""

    class Read(MemorySystem):
        def rename(self, path, to):
            disk.read("log/f", 0, 9)
            super().rename(path, to)

        def unlink(self, path):
            disk.read("log/f", 0, 9)
            super().unlink(path)

    disk = MemoryDisk(Read())
    disk.create("log/f", 0)
    disk.write("log/f", 0, [b"old"])
    arguments = {"put": ("log/f", b"new"), "move": ("log/f", "log/g"), "remove": ("log/f",)}
    getattr(disk, call)(*arguments[call])
    assert disk.read("log/f", 0, 9) == (b"new" if call == "put" else b"")


@pytest.mark.parametrize("call", ["move", "remove"])
def test_file_being_removed_is_not_lost(call):
    lost = []

    class Asked(MemorySystem):
        def rename(self, path, to):
            super().rename(path, to)
            lost.append(disk.is_lost("log/f"))

        def unlink(self, path):
            super().unlink(path)
            lost.append(disk.is_lost("log/f"))

    disk = MemoryDisk(Asked())
    disk.create("log/f", 8)
    getattr(disk, call)(*["log/f", "log/g"][: 2 if call == "move" else 1])
    assert lost == [False]


def test_open_files_are_bounded(monkeypatch):
    monkeypatch.setattr(disk_module, "OPEN_FILES_MAX", 3)
    disk = MemoryDisk()
    for n in range(5):
        disk.create(f"f{n}", 1)
    assert len(disk.system._open) == 3
    for n in range(5):
        disk.write(f"f{n}", 0, [b"%d" % n])
        disk.put(f"p{n}", b"%d" % n)
        disk.move(f"p{n}", f"q{n}")
        assert len(disk.system._open) == 3
    assert [disk.read(f"{kind}{n}", 0, 9) for kind in "fq" for n in range(5)] == [b"%d" % n for n in range(5)] * 2
    disk.reopen()
    assert not disk.system._open


@pytest.mark.parametrize("root", ["here", "made/here"])
def test_relative_data_directory(tmp_path: Path, monkeypatch, root):
    monkeypatch.chdir(tmp_path)
    RealDisk(Path(root)).put("f", b"data")
    assert (tmp_path / root / "f").read_bytes() == b"data"


def test_create_without_fsync():
    disk = MemoryDisk()
    disk.put("log/other", b"")
    before = disk.calls
    disk.create("log/f", 8, lasting=False)
    assert disk.calls == before + 2, "it is created and its room reserved"
    disk.put("log/other", b"again")
    disk.crash()
    disk.reopen()
    assert disk.has("log/f")


def test_failed_fsync_drops_the_cached_file():
    dropped = []

    class Failing(MemorySystem):
        def fdatasync(self, fd):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        def drop_cached(self, fd, begin, end):
            dropped.append((begin, end))

    disk = MemoryDisk(Failing())
    disk.create("f", 0)
    disk.write("f", 0, [b"data"])
    with pytest.raises(DiskFailed):
        disk.sync("f")
    assert dropped == [disk_module.WHOLE_FILE]


@pytest.mark.parametrize("most", [1, 2, 3])
def test_write_splits_long_buffer_lists(monkeypatch, most):
    monkeypatch.setattr(disk_module, "_IOV_MAX", most)
    disk = MemoryDisk()
    disk.create("f", 0)
    disk.write("f", 2, [b"ab", b"", b"cde", b"f", b"gh"])
    assert disk.read("f", 0, 99) == b"\0\0abcdefgh"


def test_system_calls_os_functions(tmp_path: Path, monkeypatch):
    called = []
    for name in ("fsync", "fdatasync", "posix_fadvise"):
        monkeypatch.setattr(os, name, lambda *args, name=name: called.append((name, *args)))
    system = System()
    system.fsync(7)
    system.fdatasync(8)
    system.drop_cached(9, 100, 250)
    assert called == [("fsync", 7), ("fdatasync", 8), ("posix_fadvise", 9, 100, 150, os.POSIX_FADV_DONTNEED)]


def test_unused_file_is_closed(tmp_path: Path):
    disk = RealDisk(tmp_path)
    disk.create("f", 8)
    fd = disk._descriptors["f"].fd
    os.fstat(fd)
    disk.remove("f")
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_file_mode_and_folders(tmp_path: Path):
    disk = RealDisk(tmp_path)
    disk.put("log/f", b"data")
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "log" / "f", tmp_path / "log")]
    assert modes == [0o640, 0o750], "other users read no message"
    assert not disk.has("log") and disk.size("log") == 0 and not disk.has("log/f/g") and disk.names("log/f") == []


def test_move_fsyncs_both_folders():
    """Some file systems need an fsync of both folders to make a rename durable."""
    synced = []

    class Told(MemorySystem):
        def rename(self, path, to):
            super().rename(path, to)
            synced.clear()

        def fsync(self, fd):
            super().fsync(fd)
            synced.append(self._open[fd])

    disk = MemoryDisk(Told())
    disk.put("log/f", b"data")
    disk.move("log/f", "quarantine/there/f")
    assert set(synced) == {"/data", "/data/log", "/data/quarantine", "/data/quarantine/there"}


def test_name_of_a_killed_process_is_durable():
    disk = MemoryDisk()
    disk.put("log/f", b"old")
    disk.fail_after(4)  # open, write, fsync, rename; now its folder
    with pytest.raises(DiskFailed):
        disk.put("log/f", b"new")
    disk.heal()
    disk.reopen()
    assert disk.read("log/f", 0, 9) == b"old"  # the rename failed
    disk.fail_after(5)
    with pytest.raises(DiskFailed):
        disk.put("log/f", b"new")
    disk.heal()
    disk.reopen()
    assert disk.read("log/f", 0, 9) == b"new"
    disk.crash()
    assert disk.read("log/f", 0, 9) == b"new", "the next process may have acted on it"
