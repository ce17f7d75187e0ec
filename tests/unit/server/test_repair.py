"""Shell. How long a copy under repair waits for its source."""

from __future__ import annotations

import asyncio

import pytest

from qmq.errors import NotServed
from qmq.proto import qmq_pb2 as pb
from qmq.replication.assignment import Address
from qmq.server import repair


class Slow:
    """A source that sends ten bytes of its log, each after `pause_s`."""

    def __init__(self, pause_s):
        self.pause_s = pause_s

    async def ReadLog(self, request, *, metadata, timeout=None):
        async with asyncio.timeout(timeout and timeout / 60):
            for at in range(request.begin, request.begin + 10):
                await asyncio.sleep(self.pause_s)
                yield pb.LogChunk(offset=at, data=b"x")


def fetched(monkeypatch, pause_s, silent_s):
    monkeypatch.setattr(repair, "SILENT_S", silent_s, raising=False)
    monkeypatch.setattr(repair, "BrokerStub", lambda channel: Slow(pause_s))
    return asyncio.run(repair._fetch(Address("127.0.0.1", 1, 2, 3), (), 100, 110))


def test_slow_repair_source_is_waited_for(monkeypatch):
    """A low or shared rate must not end each attempt halfway."""
    assert fetched(monkeypatch, 0.12, 1.0) == (100, b"x" * 10)


def test_silent_repair_source_is_asked_again(monkeypatch):
    with pytest.raises(NotServed, match="sent nothing"):
        fetched(monkeypatch, 30, 0.05)
