"""Core. `qmq inspect` on directories after crashes, old backups and disk faults."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest

from qmq.log import RealDisk, manifest
from qmq.log.segments import log_name, segment_bases
from qmq.replication.assignment import Assignment
from qmq.replication.identity import IdentityFile, Point
from qmq.tools.inspect import main
from qmq.types import Epoch, Role
from tests.unit.log.logs import Copy

FRAMES = 40


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """Directory of a stopped slave, with a log of several segments and all its files."""
    data = tmp_path_factory.mktemp("slave") / "data"
    disk = RealDisk(data)
    copy = Copy(disk)
    copy.begin_epoch()
    copy.fill(FRAMES // 2)
    copy.begin_epoch(Epoch(2, 1))
    copy.fill(FRAMES // 2)
    identity = IdentityFile(disk, new_incarnation="i1")
    identity.assigned("g1", Assignment("g1", 2, Role.SLAVE).to_json(), "mq2:20883")
    identity.learn(Epoch(2, 1))
    identity.completed(True)
    identity.points.following()
    identity.points.acknowledged(Point(Epoch(2, 1), copy.log.end, copy.log.chain))
    identity.points.save()
    (data / "lock").touch()
    disk.close()
    return data


@pytest.fixture
def data(stopped, tmp_path):
    return shutil.copytree(stopped, tmp_path / "data")


def image(data: Path) -> dict[str, tuple[int, str]]:
    """Return every name below a directory, with its change time and a digest."""
    paths = [data, *sorted(data.rglob("*"))]
    return {
        str(path): (path.stat().st_mtime_ns, hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "")
        for path in paths
    }


def inspected(capsys, data, *options):
    """Return the report, and check that no file changed."""
    before = image(data)
    assert main([str(data), "--json", *options]) == 0
    assert image(data) == before, "it is read, never written"
    return json.loads(capsys.readouterr().out)


def troubles(found):
    return {trouble["name"]: trouble["found"] for trouble in found["troubles"]}


def test_whole_copy_is_reported(capsys, data):
    found = inspected(capsys, data, "--verify")
    end = found["log"]["end"]
    assert (found["group"], found["hostname"], found["servePort"], found["role"]) == ("g1", "mq2", 20883, "SLAVE")
    assert (found["incarnation"], found["term"], found["boot"], found["complete"]) == ("i1", 2, 1, True)
    assert [(epoch["term"], epoch["why"]) for epoch in found["epochs"]] == [(1, "test"), (2, "test")]
    assert found["acknowledged"] == {"term": 2, "boot": 1, "end": end, "chain": found["log"]["chain"]}
    assert found["confirmedEnd"] == end and found["subjects"] == {"s0": 14, "s1": 14, "s2": 12}
    assert found["manifest"] == {"listed": True, "agrees": True, "missing": [], "notListed": []}
    assert found["log"]["segments"] > 3 and found["troubles"] == []


def test_report_as_text(capsys, data):
    assert main([str(data), "--subjects=1"]) == 0
    text = capsys.readouterr().out
    assert "mq2:20883, SLAVE of g1" in text and "subjects (1 of 3)" in text and "s1" not in text
    assert "troubles      none" in text and "agrees with the files" in text


def test_messages_above_any_offset_are_listed(capsys, data):
    end = inspected(capsys, data)["log"]["end"]
    above = inspected(capsys, data, f"--above={end - 8}")["above"]
    assert above["subjects"] == {"s1": [13, 13]} and above["ids"] == [["s1", 13, "m19"]] and not above["stopped"]
    assert inspected(capsys, data, f"--above={end}")["above"]["ids"] == []
    assert len(inspected(capsys, data, "--above=0")["above"]["ids"]) == FRAMES


def cut_newest_message(data):
    """Cut the newest frame, as a disk without its last fsync does."""
    disk = RealDisk(data)
    copy = Copy(disk)
    end = copy.log.end
    last = copy.log.stored.read(segment_bases(disk)[-1], end, 1 << 20).frames[-1]
    with (data / log_name(segment_bases(disk)[-1])).open("r+b") as file:
        file.seek(last.offset - segment_bases(disk)[-1])
        file.write(bytes(last.end - last.offset))
    disk.close()


def tear(data):
    """Write half a frame behind the end."""
    base = segment_bases(RealDisk(data))[-1]
    disk = RealDisk(data)
    end = Copy(disk).log.end
    disk.close()
    with (data / log_name(base)).open("r+b") as file:
        file.seek(end - base)
        file.write(b"QMF1 and no more")


def flip_in(data, place):
    base = segment_bases(RealDisk(data))[place]
    with (data / log_name(base)).open("r+b") as file:
        file.seek(100)
        byte = file.read(1)[0]
        file.seek(100)
        file.write(bytes([byte ^ 1]))


def remove_oldest(data):
    os.unlink(data / log_name(0))


def spoil(name):
    return lambda data: (data / name).write_text("no JSON")


@pytest.mark.parametrize(
    "harm, name, words",
    [
        pytest.param(cut_newest_message, "rolled_back", "epoch 2.1", id="a lost fsync"),
        pytest.param(lambda data: flip_in(data, -1), "corrupt", "no frames at", id="a flipped bit in the newest"),
        pytest.param(lambda data: flip_in(data, 1), "corrupt", "CRC", id="a flipped bit in a closed one"),
        pytest.param(remove_oldest, "file_gone", "are gone: 0", id="a file that is gone"),
        pytest.param(tear, "tail_cut", "possibly acknowledged", id="a torn tail"),
        pytest.param(spoil("broker.json"), "file_damaged", "it does not start", id="a damaged identity"),
        pytest.param(spoil("points.json"), "file_damaged", "content is lost", id="a damaged memory"),
        pytest.param(spoil(manifest.NAME), "file_damaged", "rebuilt", id="a damaged manifest"),
        pytest.param(lambda data: os.unlink(data / "broker.json"), "incomplete", "never", id="no identity"),
        pytest.param(lambda data: shutil.rmtree(data / "log"), "rolled_back", "lacks", id="no log"),
    ],
)
def test_troubles_are_reported(capsys, data, harm, name, words):
    harm(data)
    found = inspected(capsys, data, "--verify")
    assert words in troubles(found)[name]


def test_any_cut_of_any_file_gives_a_report(capsys, data, tmp_path):
    for path in sorted(path for path in data.rglob("*") if path.is_file() and path.stat().st_size):
        for part in (0, 3):
            copied = tmp_path / f"{path.name}-{part}"
            shutil.copytree(data, copied)
            with (copied / path.relative_to(data)).open("r+b") as file:
                file.truncate(path.stat().st_size * part // 4)
            inspected(capsys, copied)


def test_only_stopped_copies_are_inspected(capsys, data, tmp_path):
    with (data / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        refused = main([str(data)])
        assert refused == 1 and "a process runs on it" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    for path, words in (
        (tmp_path / "empty", "no data directory"),
        (tmp_path / "nothing", "no such directory"),
        (data / "lock", "this is no directory"),
    ):
        assert main([str(path)]) == 1 and words in capsys.readouterr().err
    assert not (tmp_path / "nothing").exists() and not list((tmp_path / "empty").iterdir())
