"""Core. A broker's stored identity (I2, I16)."""

from __future__ import annotations

import pytest

from qmq.errors import BrokenInvariant, CorruptFrame
from qmq.log.memory_disk import MemoryDisk
from qmq.replication.identity import NAME, Identity, IdentityFile
from qmq.types import Epoch


def opened(disk: MemoryDisk, incarnation: str = "first") -> IdentityFile:
    return IdentityFile(disk, new_incarnation=incarnation)


def test_flipped_bits_of_the_identity_are_detected():
    disk = MemoryDisk()
    identity = opened(disk)
    identity.learn(Epoch(3, 2))
    for bit in range(8 * disk.size(NAME)):
        image = disk.copy()
        image.flip(NAME, bit)
        try:
            found = opened(image, "second").value
        except CorruptFrame:
            continue
        assert found == identity.value, f"bit {bit} changed what is known"  # white space in JSON carries no value


def test_cuts_of_the_identity_are_detected():
    disk = MemoryDisk()
    opened(disk)
    for size in range(1, disk.size(NAME)):
        image = disk.copy()
        image.truncate(NAME, size)
        with pytest.raises(CorruptFrame):
            opened(image, "second")


def test_known_epoch_only_grows():
    identity = opened(MemoryDisk())
    identity.learn(Epoch(3, 2))
    for older in (Epoch(2, 9), Epoch(3, 1)):
        with pytest.raises(BrokenInvariant):
            identity.learn(older)
    identity.learn(Epoch(3, 2))
    assert identity.value.epoch == Epoch(3, 2)


def test_boot_grows_at_each_start():
    disk = MemoryDisk()
    used = []
    for above in (0, 0, 7, 0, 3):
        used.append(opened(disk).next_boot(5, above=above))
    used.append(opened(disk).next_boot(6))
    assert used == [Epoch(5, 1), Epoch(5, 2), Epoch(5, 8), Epoch(5, 9), Epoch(5, 10), Epoch(6, 1)]
    with pytest.raises(BrokenInvariant):
        opened(disk).next_boot(5)


def test_unchanged_identity_is_not_written():
    disk = MemoryDisk()
    identity = opened(disk)

    def change_nothing() -> tuple[int, Identity]:
        identity.learn(Epoch(3, 2))
        identity.promise(4)
        identity.promise(3)
        identity.completed(True)
        identity.assigned("g1", {"term": 3}, "a:1")
        return disk.calls, identity.value

    assert change_nothing() == change_nothing() and identity.value.promised == 4


def test_each_filling_has_its_own_id():
    identity = opened(MemoryDisk())
    names = [identity.value.fill_id]
    for complete in (True, False, True):
        identity.completed(complete)
        names.append(identity.value.fill_id)
    assert names == ["first/0", "first/1", "first/1", "first/2"]


@pytest.mark.parametrize("other", [("g2", {"term": 3}, "a:1"), ("g1", {"term": 4}, "a:1"), ("g1", {"term": 3}, "b:1")])
def test_each_part_of_an_assignment_is_stored(other):
    disk = MemoryDisk()
    identity = opened(disk)
    identity.assigned("g1", {"term": 3}, "a:1")
    identity.assigned(*other)
    found = opened(disk).value
    assert (found.group, found.assignment, found.owner) == other


def test_identity_file_is_readable_json():
    disk = MemoryDisk()
    opened(disk)
    crc, *lines = disk.read(NAME, 0, disk.size(NAME)).decode().splitlines()[1:]
    assert crc.startswith(' "crc": ')
    assert lines[:4] == [' "incarnation": "first",', ' "group": "",', ' "term": 0,', ' "boot": 0,']
