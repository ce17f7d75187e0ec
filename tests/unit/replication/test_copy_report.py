"""Core. Report of a copy's files before the broker's recovery makes them consistent."""

from __future__ import annotations

import pytest

from qmq.log.manifest import write_manifest
from qmq.log.memory_disk import MemoryDisk
from qmq.replication import copy_report
from qmq.replication.assignment import Assignment
from qmq.replication.copy_report import NoCopy, report
from qmq.replication.identity import IdentityFile, Point
from qmq.types import Epoch, Role
from tests.unit.log.logs import Copy


def test_report_of_all_files():
    copy = Copy.filled(60)
    identity = IdentityFile(copy.disk, new_incarnation="b-1")
    identity.assigned("g1", Assignment("g1", 2, Role.SLAVE).to_json(), "mq2:20883")
    identity.learn(Epoch(2, 3))
    identity.completed(True)
    own = Point(Epoch(1, 1), copy.log.end, copy.log.chain)
    identity.points.acknowledged(own)
    identity.points.save()
    log, point = copy.log, {"term": 1, "boot": 1, "end": own.end, "chain": f"{own.chain:016x}"}
    assert report(copy.disk, verify=True) == {
        "group": "g1",
        "hostname": "mq2",
        "servePort": 20883,
        "role": "SLAVE",
        "incarnation": "b-1",
        "term": 2,
        "boot": 3,
        "complete": True,
        "epochs": [{"term": 1, "boot": 1, "offset": 0, "incarnation": "b", "why": "test"}],
        "epochCount": 1,
        "log": {
            "begin": 0,
            "end": log.end,
            "chain": f"{log.chain:016x}",
            "epoch": [1, 1],
            "highWatermark": 0,
            "lastFrameMs": 5,
            "segments": len(log.bases),
            "tornBytes": 0,
        },
        "acknowledged": point,
        "lacks": None,
        "confirmedEnd": log.end,
        "manifest": {"listed": True, "agrees": True, "missing": [], "notListed": []},
        "subjects": {"s0": 20, "s1": 20, "s2": 20},
        "troubles": [],
    }


@pytest.mark.parametrize("who", ["the others", "this copy itself"])
def test_report_of_a_rolled_back_copy(who):
    copy = Copy.filled(60)
    identity = IdentityFile(copy.disk, new_incarnation="b-1")
    identity.completed(True)
    lost = Point(Epoch(1, 1), copy.log.end + 8, 7)
    if who == "the others":
        identity.points.rolled_back(lost)
    else:
        identity.points.acknowledged(lost)
        identity.points.save()
    found = report(copy.disk)
    assert [trouble["name"] for trouble in found["troubles"]] == ["rolled_back"] and str(lost) in str(found["troubles"])
    point = {"term": 1, "boot": 1, "end": lost.end, "chain": f"{lost.chain:016x}"}
    assert [found["lacks"], found["acknowledged"]] == ([point, None] if who == "the others" else [None, point])


def test_report_without_an_assignment():
    assert report(Copy.filled(60).disk)["incarnation"] == "", "nor one whose identity is gone"
    disk = MemoryDisk()
    IdentityFile(disk, new_incarnation="b-1")
    found = report(disk, above=0)
    assert (found["group"], found["hostname"], found["servePort"], found["role"]) == ("", "", None, "")
    assert found["above"] == {"offset": 0, "subjects": {}, "ids": [], "stopped": ""}


@pytest.mark.parametrize("name", ["broker.json", "points.json", "copy.json", "log/manifest", "log"])
def test_any_single_file_suffices_for_a_report(name):
    copy, disk = Copy.filled(60), MemoryDisk()
    identity = IdentityFile(copy.disk, new_incarnation="b-1")
    identity.points.following()
    identity.points.acknowledged(Point(Epoch(1, 1), 8, 7))
    identity.points.save()
    for file in [f"log/{base:020d}.log" for base in copy.log.bases] if name == "log" else [name]:
        disk.put(file, copy.disk.read(file, 0, copy.disk.size(file)))
    assert report(disk)["incarnation"] == ("b-1" if name == "broker.json" else "")


def test_empty_file_is_reported_damaged():
    copy = Copy.filled(60)
    copy.disk.put("points.json", b"")
    assert [trouble["name"] for trouble in report(copy.disk)["troubles"]] == ["file_damaged", "incomplete"]


def test_report_of_an_unreadable_epoch_frame():
    copy = Copy.filled(60)
    copy.flip(20)
    assert report(copy.disk)["epochs"] == [{"term": 1, "boot": 1, "offset": 0, "incarnation": "", "why": ""}]


def test_reported_ids_end_at_damage_or_limit(monkeypatch):
    copy = Copy.filled(60)
    copy.messages("a", "b", "c", subject="of three")
    copy.flush()
    last = copy.log.frames("of three", 0, 1)[0]
    copy.messages("d", subject="one")
    copy.flush()
    for ids_max, named in ((2, ["a", "b"]), (3, ["a", "b", "c"])):
        monkeypatch.setattr(copy_report, "IDS_MAX", ids_max)
        above = report(copy.disk, above=last.offset)["above"]
        assert (above["offset"], above["subjects"], above["stopped"]) == (
            last.offset,
            {"of three": [0, 2], "one": [0, 0]},
            "",
        )
        assert above["ids"] == [["of three", at, id] for at, id in enumerate(named)]
    copy.flip(copy.log.bases[2] + 200)
    found = report(copy.disk, above=copy.log.bases[1])
    assert found["epochs"][0]["incarnation"] == "b", "its own frame can be read"
    above = found["above"]
    assert above["stopped"]
    assert 0 < sum(last - first + 1 for first, last in above["subjects"].values()) < 60


def test_reported_ids_above_deleted_segments():
    copy = Copy.filled(60)
    copy.drop_oldest_segment()
    left = sum(20 - first[0].begin for first in (copy.log.frames(f"s{at}", 0, 1) for at in range(3)))
    assert len(report(copy.disk, above=8)["above"]["ids"]) == left < 60


def test_report_of_missing_and_unlisted_segments():
    copy = Copy.filled(60)
    bases = list(copy.log.bases)
    assert report(copy.disk)["manifest"] == {"listed": True, "agrees": True, "missing": [], "notListed": []}
    copy.disk.remove(f"log/{bases[1]:020d}.log")
    write_manifest(copy.disk, bases[:-1])
    found = report(copy.disk)
    assert found["manifest"] == {"listed": True, "agrees": False, "missing": [bases[1]], "notListed": [bases[-1]]}
    assert str(bases[1]) in next(trouble["found"] for trouble in found["troubles"] if trouble["name"] == "file_gone")


def test_report_without_a_manifest_misses_nothing():
    copy = Copy.filled(60)
    copy.disk.remove("log/manifest")
    assert report(copy.disk)["manifest"] == {"listed": False, "agrees": False, "missing": [], "notListed": []}


@pytest.mark.parametrize("at", [0, 1, -2])
def test_closed_segments_are_verified_on_request(at):
    copy = Copy.filled(60)
    copy.flip(copy.log.bases[at] + 200)
    names = [[trouble["name"] for trouble in report(copy.disk, verify=verify)["troubles"]] for verify in (False, True)]
    assert ["corrupt" in name for name in names] == [False, True]


def test_report_of_a_copy_without_frames():
    disk = MemoryDisk()
    IdentityFile(disk, new_incarnation="b-1")
    assert [trouble["name"] for trouble in report(disk)["troubles"]] == ["incomplete", "empty"]


def test_report_of_an_empty_disk_is_refused():
    with pytest.raises(NoCopy):
        report(Copy().disk)


@pytest.mark.parametrize("at", [0, 7, 30])
def test_messages_above_an_offset_are_listed(at):
    copy = Copy.filled(60)
    ref = copy.log.frames("s1", at // 3, 1)[0]
    above = report(copy.disk, above=ref.offset)["above"]
    assert above["subjects"]["s1"] == [at // 3, 19] and above["stopped"] == ""
    assert ["s1", at // 3, f"m{3 * (at // 3) + 1}"] in above["ids"]
    assert len(above["ids"]) == sum(last - first + 1 for first, last in above["subjects"].values())
    assert "above" not in report(copy.disk)
