"""Shell. `qmq give-up` on a directory: a preview first; running brokers are refused."""

from __future__ import annotations

import fcntl

import pytest

from qmq.log import RealDisk
from qmq.log.frame import FrameKind
from qmq.log.segments import log_name
from qmq.tools.call import Exit
from qmq.tools.give_up import main
from tests.unit.log.logs import Copy


@pytest.fixture
def data(tmp_path):
    """Directory of a stopped broker with a damaged frame in its second segment."""
    folder = tmp_path / "data"
    disk = RealDisk(folder)
    copy = Copy(disk)
    copy.begin_epoch()
    copy.progress(FrameKind.POSITION, "", (0, 0, 0), subject="s0")
    copy.fill(40)
    path = folder / log_name(copy.log.bases[1])
    whole = bytearray(path.read_bytes())
    whole[150] ^= 1
    path.write_bytes(whole)
    disk.close()
    return folder


def test_give_up_needs_accepted_loss(data, capsys):
    before = {path: path.read_bytes() for path in data.rglob("*") if path.is_file()}
    assert main([str(data)]) == Exit.REFUSED
    output = capsys.readouterr().out
    assert "wrong body CRC" in output and "s0: sequences 0 to " in output and "not consumed by g: " in output
    assert "--accept-loss" in output
    assert {path: path.read_bytes() for path in before} == before
    assert main([str(data), "--accept-loss"]) == Exit.DONE
    assert "quarantine" in capsys.readouterr().out
    assert main([str(data)]) == Exit.DONE
    assert capsys.readouterr().out.startswith("the log is whole from ")


def test_give_up_refuses_running_brokers_and_empty_directories(data, tmp_path, capsys):
    with open(data / "lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert main([str(data), "--accept-loss"]) == Exit.REFUSED
    assert "stop it first" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert main([str(tmp_path / "empty"), "--accept-loss"]) == Exit.REFUSED
    assert main([str(tmp_path / "none")]) == Exit.REFUSED
    assert capsys.readouterr().err.count("qmq give-up: ") == 2
    assert not list((tmp_path / "empty").iterdir()) and not (tmp_path / "none").exists()
