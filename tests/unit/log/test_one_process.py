"""Shell. A data directory has one process at a time, and another instance at each place and boot of the machine."""

from __future__ import annotations

import shutil

import pytest

from qmq.errors import QmqError
from qmq.log import disk as module
from qmq.log.disk import one_process


def instance_of(data):
    with one_process(data, "broker") as instance:
        return instance


def test_instance_is_of_one_directory_and_boot(tmp_path, monkeypatch):
    data, copied = tmp_path / "data", tmp_path / "copy"
    data.mkdir()
    instance = instance_of(data)
    assert instance and instance_of(data) == instance
    assert instance_of(shutil.copytree(data, copied)) != instance
    shutil.rmtree(data)
    assert instance_of(shutil.copytree(copied, data)) != instance_of(copied)
    boot_id = tmp_path / "boot_id"
    boot_id.write_text("another start")
    monkeypatch.setattr(module, "BOOT_ID", boot_id)
    assert instance_of(copied) != instance and instance_of(copied) == instance_of(copied)
    monkeypatch.setattr(module, "BOOT_ID", tmp_path / "not on this system")
    assert instance_of(copied) != instance_of(copied)


def test_second_process_is_refused(tmp_path):
    with one_process(tmp_path, "broker"), pytest.raises(QmqError, match="stop it first"):
        instance_of(tmp_path)
