"""Shell. Parts joined by a delay server's main."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from qmq.delayserver import main
from qmq.delayserver.metrics import DelayCollector
from qmq.delayserver.settings import DelaySettings
from qmq.log import RealDisk
from qmq.log.disk import REMOVED, SWEPT_BYTES


class Joined(Exception):
    """The service is built."""


async def test_schedule_files_free_disk_like_the_log(tmp_path, monkeypatch):
    """Finished segments of the schedule stayed on the disk for ever."""
    shelf = RealDisk(tmp_path / "schedule")
    for name in ("segments/2.records", "segments/2.marks"):
        shelf.put(name, bytes(SWEPT_BYTES + 1))
        shelf.remove(name)
    swept = []

    def service(*, disk, shelves=(), **words):
        swept.extend([disk, *shelves])
        raise Joined

    monkeypatch.setattr(main, "Service", service)
    settings = DelaySettings(hostname="d", data=tmp_path, metaserver="http://127.0.0.1:1", token="t" * 40)
    with pytest.raises(Joined):
        main._build(settings, SimpleNamespace(start=0), RealDisk(tmp_path), SimpleNamespace())
    for disk in swept:
        while disk.sweep():
            pass
    assert not shelf.names(REMOVED)


def test_missing_metaserver_is_no_refused_route():
    """Doctor warned of refused routes whenever no metaserver answered."""
    collector = object.__new__(DelayCollector)
    collector._refusals = lambda: {"": "no metaserver answers", "order.changed": "too many subjects"}
    assert collector._refused_routes() == 1
