"""Core. What a report says of the files of a copy, before a start of the broker makes them agree."""

from __future__ import annotations

import pytest

from qmq.log.manifest import write_manifest
from qmq.log.memory_disk import MemoryDisk
from qmq.replication.copy_report import NoCopy, report
from qmq.replication.identity import IdentityFile
from tests.unit.log.logs import Copy


def a_copy() -> Copy:
    copy = Copy()
    copy.begin_epoch()
    copy.fill(60)
    return copy


def test_segments_that_are_not_listed_and_files_of_listed_ones_that_are_gone_are_named():
    copy = a_copy()
    bases = list(copy.log.bases)
    assert report(copy.disk)["manifest"] == {"listed": True, "agrees": True, "missing": [], "notListed": []}
    copy.disk.remove(f"log/{bases[1]:020d}.log")
    write_manifest(copy.disk, bases[:-1])
    found = report(copy.disk)
    assert found["manifest"] == {"listed": True, "agrees": False, "missing": [bases[1]], "notListed": [bases[-1]]}
    assert str(bases[1]) in next(one["found"] for one in found["troubles"] if one["name"] == "file_gone")


def test_of_a_copy_without_a_list_no_segment_is_missing():
    copy = a_copy()
    copy.disk.remove("log/manifest")
    assert report(copy.disk)["manifest"] == {"listed": False, "agrees": False, "missing": [], "notListed": []}


def test_closed_segments_are_read_to_who_asks_for_that():
    copy = a_copy()
    base = copy.log.bases[1]
    copy.disk.flip(f"log/{base:020d}.log", 8 * 200)
    names = [[one["name"] for one in report(copy.disk, verify=verify)["troubles"]] for verify in (False, True)]
    assert ["corrupt" in one for one in names] == [False, True]


@pytest.mark.parametrize("at", [0, 7, 30])
def test_messages_above_an_offset_are_named_by_subject_and_id(at):
    copy = a_copy()
    ref = copy.log.frames("s1", at // 3, 1)[0]
    above = report(copy.disk, above=ref.offset)["above"]
    assert above["subjects"]["s1"] == [at // 3, 19] and above["stopped"] == ""
    assert ["s1", at // 3, f"m{3 * (at // 3) + 1}"] in above["ids"]
    assert len(above["ids"]) == sum(last - first + 1 for first, last in above["subjects"].values())
    assert "above" not in report(copy.disk)


def test_a_copy_that_never_had_a_frame_says_so():
    disk = MemoryDisk()
    IdentityFile(disk, new_incarnation="b-1")
    assert [one["name"] for one in report(disk)["troubles"]] == ["incomplete", "empty"]


def test_a_disk_without_a_copy_is_none():
    with pytest.raises(NoCopy):
        report(Copy().disk)
