"""Shell. Reading a running broker: a real control port over a real log, without the rest of a broker."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc.aio
import pytest

from qmq.audit.copies import BrokerCopy
from qmq.audit.data_source import TableReader
from qmq.log import MessageLog
from qmq.log.disk import RealDisk
from qmq.proto import qmq_pb2 as pb
from qmq.server import control
from qmq.server.control import CopyControl
from tests.unit.audit.beside import bases_of
from tests.unit.audit.logs import BEGIN_MS
from tests.unit.audit.test_table import A, write


class Served(CopyControl[Any]):
    """Counts the bytes it sends, and requests for more than an index."""

    sent = snapshots = 0

    @property
    def end(self) -> int:
        return self._service.node.log.end

    async def ReadLog(self, request: Any, context: Any) -> Any:
        async for chunk in super().ReadLog(request, context):
            self.sent += len(chunk.data)
            yield chunk

    async def ReadDerived(self, request: Any, context: Any) -> Any:
        async for part in super().ReadDerived(request, context):
            self.snapshots += bool(part.snapshot)
            yield part


@pytest.fixture
def broker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, Served]]:
    """Return a broker's address, and the server of the log of `write`."""
    write(tmp_path)
    disk = RealDisk(tmp_path)
    message_log = MessageLog(disk, segment_bytes=1 << 30, tail_bytes=0)
    node = SimpleNamespace(group="g1", log=message_log, parted_at=None)
    service = SimpleNamespace(node=node, reader_positions={})
    monkeypatch.setattr(control, "state_message", lambda *args: pb.BrokerState(high_watermark=message_log.end))
    monkeypatch.setattr(control, "caller", lambda: SimpleNamespace(scope=SimpleNamespace(all_subjects=True)))
    ready, loop = threading.Event(), asyncio.new_event_loop()
    found: list[tuple[str, Served]] = []

    async def serve() -> None:
        settings: Any = SimpleNamespace(read_log_bytes_per_s=1 << 40, catch_up_bytes_per_s=1 << 40)
        served, server = Served(service, settings, SimpleNamespace()), grpc.aio.server()  # type: ignore[arg-type]
        served.add_to(server)
        found.append((f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}", served))
        await server.start()
        ready.set()
        await ended.wait()
        await server.stop(0)

    ended = asyncio.Event()
    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    ready.wait()
    yield found[0]
    loop.call_soon_threadsafe(ended.set)
    thread.join()
    loop.close()
    disk.close()


def rows(address: str, **options: str) -> list[dict[str, Any]]:
    reader = TableReader({"broker": address, "damage": "fail"} | options, ["subject", "sequence"])
    return [row for part in reader.partitions() for batch in reader.read(part) for row in batch.to_pylist()]


def test_broker_copy_reads_only_selected_segments(tmp_path: Path, broker: tuple[str, Served]) -> None:
    """The first and third of four segments have this subject, and the newest has no index; no snapshot is sent."""
    address, served = broker
    found = rows(address, subject=A)
    assert [row["sequence"] for row in found] == list(range(200))
    _, second, third, _ = bases_of(tmp_path)
    assert served.sent < served.end - (third - second)
    assert served.snapshots == 0


def test_one_frame_is_sent_by_itself(broker: tuple[str, Served]) -> None:
    address, served = broker
    copy = BrokerCopy(address, "")
    index = copy.index(0)
    assert index is not None
    [ref] = index.frames(A, 50, 1)
    data = copy.frame(ref.offset, ref.length)
    copy.close()
    assert len(data) == served.sent == ref.length


def test_ranges_that_touch_are_all_read(tmp_path: Path, broker: tuple[str, Served]) -> None:
    """The limit of one read does not end the next one."""
    address, _ = broker
    first, second, third, _ = bases_of(tmp_path)
    found = rows(address, ranges=f"{first}-{second},{second}-{third}")
    assert [row["sequence"] for row in found] == [*range(100), *range(100)]


def test_segments_of_other_times_are_skipped(tmp_path: Path, broker: tuple[str, Served]) -> None:
    address, served = broker
    found = rows(address, until=str(BEGIN_MS + 1))
    assert [row["sequence"] for row in found] == list(range(100))
    first, second, *_ = bases_of(tmp_path)
    assert served.sent < served.end / 2


async def _repair_behind_an_audit(data: Path, timeout_s: float) -> tuple[int, int]:
    """Read a log for a repair while an audit has used up its share of minutes; return the results of both."""
    disk = RealDisk(data)
    message_log = MessageLog(disk, segment_bytes=1 << 30, tail_bytes=0)
    service = SimpleNamespace(node=SimpleNamespace(group="g1", log=message_log), reader_positions={})
    settings = SimpleNamespace(read_log_bytes_per_s=16, catch_up_bytes_per_s=1 << 40)
    served = CopyControl[Any](service, settings, SimpleNamespace())  # type: ignore[arg-type]
    audit = served.ReadLog(pb.ReadLogRequest(end=message_log.end), None)
    first = len((await anext(audit)).data)
    got = 0
    async with asyncio.timeout(timeout_s):
        async for chunk in served.ReadLog(pb.ReadLogRequest(end=message_log.end, for_repair=True), None):
            got += len(chunk.data)
    await audit.aclose()  # type: ignore[attr-defined]
    disk.close()
    return first, message_log.end - got


def test_repair_does_not_wait_for_audits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise its group lacks a master meanwhile, or is readonly."""
    monkeypatch.setattr(control, "caller", lambda: SimpleNamespace(scope=SimpleNamespace(all_subjects=True)))
    write(tmp_path)
    first, missing = asyncio.run(_repair_behind_an_audit(tmp_path, timeout_s=30))
    assert first > 16 * 60 and missing == 0
