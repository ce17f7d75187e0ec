"""Shell. Range that the audit reads: logs that begin late, are empty, held, released, cut short or refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from threading import Event
from typing import Any

import grpc
import pytest

from qmq.audit.copies import PathCopy, place_options
from qmq.audit.report import as_json, as_markdown
from qmq.audit.results import Result
from qmq.codec import encode_message
from qmq.ledger import Ledger
from qmq.log.frame import FrameKind
from qmq.log.retention import RetentionDecision, encode_retention
from qmq.message import Message
from qmq.proto import qmq_pb2, qmq_pb2_grpc
from qmq.types import Epoch, Role
from tests.support.waiting import until
from tests.unit.audit.logs import LogWriter
from tests.unit.audit.served import serving
from tests.unit.audit.without_spark import COPIES, audit, audit_places, named

PIECE_BYTES = 65_536
A, B = "order.changed", "user.created"
PULL = 1 << 32


def write(
    data: Path,
    *,
    rounds: int = 40,
    segment_bytes: int = 40_000,
    at: int = 20,
    plant: Callable[[LogWriter], object] | None = None,
) -> LogWriter:
    """Write a log as a broker would: two subjects, one consumer, two epochs; `plant` adds something in round `at`."""
    log = LogWriter.begun(data, segment_bytes=segment_bytes)
    log.progress(FrameKind.POSITION, A, "g", "", (0, 0, 0))
    for turn in range(rounds):
        log.timestamp_ms += 300_000
        if turn == at and plant:
            plant(log)
        log.batch(A, 10)
        log.batch(B, 10, size=35)
        pulled = PULL + 10 * turn
        log.progress(FrameKind.PULL, A, "g", "c", (pulled, 10 * turn, 10))
        log.progress(FrameKind.ACK, A, "g", "c", (pulled, pulled + 10, 0))
        if turn == 30:
            log.mastership(Epoch(2, 1))
    log.close()
    return log


def both(folder: Path, **options: Any) -> tuple[LogWriter, LogWriter]:
    return write(folder / "master", **options), write(folder / "slave", **options)


class Broker(qmq_pb2_grpc.BrokerServicer):  # type: ignore[misc]
    """Broker that serves the directory `master` or `slave`, as one that is in sync does."""

    def __init__(self, log: LogWriter, data: Path) -> None:
        self._log, self._copy, self._name = log, PathCopy(data), data.name
        self.start, self.served_end = 0, log.end
        self.described = self.holders = 0
        self.forgets = False

    def ReplicaStatus(self, request: Any, context: grpc.ServicerContext) -> Any:
        if dict(context.invocation_metadata()).get("x-api-token") != "secret":
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "no valid token")
        role, in_step = (Role.MASTER, ["slave"]) if self._name == "master" else (Role.SLAVE, [])
        return qmq_pb2.BrokerState(broker_group="g1", incarnation=self._name, role=role, in_step=in_step)

    def HoldLog(self, request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        if dict(context.invocation_metadata()).get("x-api-token") != "secret":
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "no valid token")
        gone = Event()
        context.add_callback(gone.set)
        self.holders += 1
        yield qmq_pb2.Nothing()
        gone.wait()
        self.holders -= 1

    def DescribeLog(self, request: Any, context: grpc.ServicerContext) -> Any:
        self.described += 1
        return qmq_pb2.LogDescription(
            log_start=self.start, log_end=self._log.end, high_watermark=self._log.end, segments=[self.start]
        )

    def ReadLog(self, request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        for frame in self._log.frames:
            if max(request.begin, self.start) <= frame.offset < min(request.end, self.served_end):
                data = self._copy.window(frame.offset, frame.end - frame.offset)
                yield qmq_pb2.LogChunk(offset=frame.offset, data=data)


class BusyBroker(Broker):
    """Broker that deletes the first segment after the second DescribeLog, unless the log is held.

    With `forgets` it restarted, and has no holders.
    """

    def DescribeLog(self, request: Any, context: grpc.ServicerContext) -> Any:
        answer = super().DescribeLog(request, context)
        if self.described == 2 and (self.forgets or not self.holders):
            self.start = self._copy.describe().segments[1]
        return answer


def give_up_the_first_segment(log: LogWriter) -> None:
    start = sorted(int(path.stem) for path in log.folder.glob("*.log"))[1]
    log.frame(FrameKind.RETENTION, "", encode_retention(RetentionDecision(start, "age", {}, {})))


def audit_served(brokers: Sequence[Broker], token: str = "secret") -> Result:
    """Audit a master and a slave; the token is the master's."""
    with serving(brokers[0]) as [master], serving(brokers[1]) as [slave]:
        places = {"master": place_options(master, token), "slave": place_options(slave, "secret")}
        return audit_places(places, piece_bytes=PIECE_BYTES)


def brokers_of(folder: Path, kind: type[Broker] = Broker, **options: Any) -> list[Broker]:
    return [kind(log, folder / copy) for log, copy in zip(both(folder, **options), ("master", "slave"))]


def test_broker_that_refuses_the_token_is_not_read(tmp_path: Path) -> None:
    assert "UNAUTHENTICATED" in (audit_served(brokers_of(tmp_path), "wrong").unreadable or "")


def test_held_log_is_kept_until_it_is_read(tmp_path: Path) -> None:
    """The slave is read last; its first segment is old enough by then."""
    brokers = brokers_of(tmp_path, BusyBroker)
    result = audit_served(brokers)
    until(lambda: not any(broker.holders for broker in brokers), "nothing held")
    assert (result.status, result.found, result.start) == (0, {}, 0)
    assert result.read["slave"]["messages"] == 800


def test_copy_released_while_read_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    brokers = brokers_of(tmp_path, BusyBroker, plant=give_up_the_first_segment)
    brokers[1].forgets = True
    again = audit_served(brokers)
    brokers[1].start = brokers[1].described = 0
    monkeypatch.setattr("qmq.audit.group.AGAIN_MAX", 0)
    once = audit_served(brokers)
    deleted = f"the slave deleted [0, {brokers[1].start})"
    assert once.status == 2 and str(once.unreadable).startswith(deleted)
    assert (again.status, again.found, again.start) == (0, {}, brokers[1].start)
    assert any(deleted in note for note in again.notes)


def test_short_reads_of_both_brokers_prevent_the_proof(tmp_path: Path) -> None:
    """Both return equal bytes up to the end of a piece."""
    brokers = brokers_of(tmp_path)
    for broker in brokers:
        broker.served_end = PIECE_BYTES
    result = audit_served(brokers)
    assert (result.status, result.found) == (1, {"unread": 2})
    assert "Findings" in as_markdown([result], 1.0)


def test_copies_are_compared_from_the_later_start(tmp_path: Path) -> None:
    both(tmp_path, plant=give_up_the_first_segment)
    first, second = sorted((tmp_path / "slave/log").glob("*.log"))[:2]
    first.unlink()
    result = audit(tmp_path)
    assert (result.status, result.findings, result.start) == (0, [], int(second.stem))
    assert any(f"[0, {second.stem.lstrip('0')})" in note for note in result.notes)


def test_audit_that_read_nothing_fails(tmp_path: Path) -> None:
    for copy in ("master", "slave"):
        LogWriter(tmp_path / copy).close()
    result = audit(tmp_path)
    assert result.status == 2
    assert as_json([result], 0.0)["verdict"] == "could not read"
    assert audit(tmp_path / "nowhere").status == 2
    assert as_json([], 0.0)["status"] == 2


def test_second_night_reads_new_frames_and_a_seventh(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger")
    both(tmp_path, rounds=20)
    first = audit(tmp_path, ledger=ledger, piece_bytes=2_048)
    assert (first.status, ledger.entries("g1")[-1].verified) == (0, first.watermark)
    for copy in COPIES:
        shutil.rmtree(tmp_path / copy)
    log, _ = both(tmp_path, rounds=30)
    second = audit(tmp_path, ledger=ledger, piece_bytes=2_048)
    new, read = log.end - first.watermark, max(side["bytes"] for side in second.read.values())
    assert (second.status, second.findings) == (0, [])
    assert new < read <= new + first.watermark // 7
    last = ledger.entries("g1")[-1]
    assert (last.verdict, last.begin, last.verified) == ("proven equal", first.watermark, second.watermark)
    assert last.ends[A] == 300


def test_log_restored_or_wiped_on_both_copies_is_rewound(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger")
    both(tmp_path, rounds=20)
    assert audit(tmp_path, ledger=ledger).status == 0
    verified = ledger.known("g1").anchor
    for rounds, ranges in ((15, 3), (0, 1)):
        for copy in COPIES:
            shutil.rmtree(tmp_path / copy)
            write(tmp_path / copy, rounds=rounds) if rounds else LogWriter(tmp_path / copy).close()
        result = audit(tmp_path, ledger=ledger)
        assert {(row["what"], row["copy"]) for row in result.findings} == {("rewound", "both")}
        assert ledger.known("g1").anchor == verified and ledger.entries("g1")[-1].found == {"rewound": ranges}
        read = max((side["bytes"] for side in result.read.values()), default=0)
        assert read >= result.watermark, "all of it is read again"


def test_breaks_at_the_border_of_two_pieces_are_findings(tmp_path: Path) -> None:
    """Frames of 1,024 bytes: one begins at the begin of a piece, whose reader has no frame before it."""
    border = 2 * PIECE_BYTES
    for copy in COPIES:
        log = LogWriter(tmp_path / copy)
        while log.end < 4 * PIECE_BYTES:
            if log.end == border:
                log.chain ^= 1
                log.sequences["s"] += 7
                log.epoch = Epoch(0, 1)
            id = f"{log.end:012d}"
            size = 1024 - 88 - 8 - 8 - len(encode_message(Message("s", {"text": ""}, id=id), 1))
            log.messages("s", [encode_message(Message("s", {"text": "x" * size}, id=id), 1)])
        log.close()
    expected = {(what, "both", border) for what in ("chain", "sequence", "epoch")}
    assert named(audit(tmp_path, piece_bytes=PIECE_BYTES)) == expected | {("epoch_frame", "both", 0)}
