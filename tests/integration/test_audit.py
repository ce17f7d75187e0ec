"""Shell. Audits the auditor: what is planted in copied logs must be named at its exact offset, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from hashlib import sha256
from pathlib import Path
from threading import Event
from typing import Any, NamedTuple

import grpc
import pytest
from pyspark.sql import SparkSession

from qmq.audit.copies import PathCopy, place_options
from qmq.audit.data_source import TableReader, read_copy
from qmq.audit.group import Options, audit_group, audit_groups
from qmq.audit.jobs import consistency, query
from qmq.audit.report import as_json, as_markdown
from qmq.audit.results import Group, Result
from qmq.codec import encode_message, join_batch
from qmq.log.delay_frames import Outcome, encode_dispatch, encode_places, encode_settled
from qmq.log.frame import Frame, FrameKind
from qmq.log.retention import RetentionDecision, encode_retention
from qmq.message import Message
from qmq.proto import qmq_pb2, qmq_pb2_grpc
from qmq.types import Epoch, Role
from tests.integration.cluster_world import until
from tests.support.spark import local_spark
from tests.unit.audit.forged import derive
from tests.unit.audit.logs import LogWriter
from tests.unit.audit.test_walk import change, flip

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::ResourceWarning")

PIECE_BYTES = 65_536
A, B = "order.changed", "user.created"
PULL = 1 << 32


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    with local_spark("audit tests") as session:
        yield session


def write(
    data: Path,
    *,
    rounds: int = 40,
    segment_bytes: int = 40_000,
    at: int = 20,
    plant: Callable[[LogWriter], object] | None = None,
) -> LogWriter:
    """Write a log as a broker would: two subjects, one consumer, two epochs; `plant` adds something in round `at`."""
    log = LogWriter(data, segment_bytes=segment_bytes)
    log.mastership(Epoch(1, 1))
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


def audit(spark: SparkSession, folder: Path, **options: Any) -> Result:
    places = {copy: place_options(str(folder / copy), "") for copy in ("master", "slave")}
    return audit_group(spark, Group("g1", places), piece_bytes=PIECE_BYTES, **options)


def named(result: Result) -> set[tuple[str, str, int | None]]:
    return {(row["what"], row["copy"], row["offset"]) for row in result.findings}


def both(folder: Path, **options: Any) -> tuple[LogWriter, LogWriter]:
    return write(folder / "master", **options), write(folder / "slave", **options)


def test_equal_copies_are_proven_equal(spark: SparkSession, tmp_path: Path) -> None:
    log = write(tmp_path / "master")
    write(tmp_path / "slave", segment_bytes=23_000)
    result = audit(spark, tmp_path, parquet=tmp_path / "out")
    assert (result.status, result.findings, result.unreadable) == (0, [], None)
    assert result.watermark == log.frames[-1].offset
    assert result.read["master"] == result.read["slave"]
    assert (result.read["master"]["messages"], result.read["master"]["bytes"]) == (800, log.end)
    assert sum(row["messages"] for row in result.hours if row["copy"] == "slave") == 800
    assert [text.split()[0] for text in result.epochs] == ["1.1", "2.1"]
    assert spark.read.parquet(str(tmp_path / "out/g1/hours")).count() == len(result.hours)
    assert "Every byte of [0, " in as_markdown([result], 1.0)


def test_listed_counts_do_not_grow_with_the_log(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qmq.audit.group.HOURS_MAX", 5)
    both(tmp_path)
    result = audit(spark, tmp_path, parquet=tmp_path / "out")
    assert result.status == 0 and len(result.hours) == 5
    assert any("first 5 counts" in note for note in result.notes)
    assert spark.read.parquet(str(tmp_path / "out/g1/hours")).count() > 5


def _flip_body(log: LogWriter, data: Path) -> tuple[str, str, int]:
    frame = log.frames[50]
    flip(data, frame.end - 30)
    return "damaged", "slave", frame.offset


def _flip_header(log: LogWriter, data: Path) -> tuple[str, str, int]:
    frame = log.frames[51]
    flip(data, frame.offset + 33)
    return "damaged", "slave", frame.offset


def _erase(log: LogWriter, data: Path) -> tuple[str, str, int]:
    first, last = log.frames[124], log.frames[127]
    change(data, first.offset, bytes(last.end - first.offset))
    return "damaged", "slave", first.offset


def _swap_bytes(log: LogWriter, data: Path) -> tuple[str, str, int]:
    """Swap two whole frames of one size, as a misdirected write would."""
    first, second = (frame for frame in log.frames[60:68] if frame.kind == FrameKind.PULL)
    with_copy = PathCopy(data)
    ours, theirs = (with_copy.window(f.offset, f.end - f.offset) for f in (first, second))
    with_copy.close()
    change(data, first.offset, theirs)
    change(data, second.offset, ours)
    return "damaged", "slave", first.offset


def _cut_middle(log: LogWriter, data: Path) -> tuple[str, str, int]:
    path = sorted((data / "log").glob("*.log"))[1]
    frame = next(f for f in log.frames if f.offset > int(path.stem) + 9_000)
    path.write_bytes(path.read_bytes()[: frame.offset - int(path.stem)])
    return "damaged", "slave", frame.offset


def _cut_end(log: LogWriter, data: Path) -> tuple[str, str, int]:
    path = sorted((data / "log").glob("*.log"))[-1]
    frame = next(f for f in log.frames if f.offset > int(path.stem) + 3_000)
    path.write_bytes(path.read_bytes()[: frame.offset + 100 - int(path.stem)])
    return "missing", "slave", frame.offset


def damaged_in_many_ways(folder: Path) -> set[tuple[str, str, int]]:
    _, slave = both(folder)
    plants = (_flip_body, _flip_header, _erase, _swap_bytes, _cut_middle)
    second = [frame for frame in slave.frames[60:68] if frame.kind == FrameKind.PULL][1]
    return {plant(slave, folder / "slave") for plant in plants} | {("damaged", "slave", second.offset)}


def truncated(folder: Path) -> tuple[LogWriter, tuple[str, str, int]]:
    _, slave = both(folder)
    return slave, _cut_end(slave, folder / "slave")


def three_copies(folder: Path) -> LogWriter:
    for copy in ("master", "slave", "slave2"):
        slave = write(folder / copy, rounds=24 if copy == "slave2" else 40)
    flip(folder / "slave2", slave.frames[40].end - 30)
    return slave


def two_copies_of_which_one_is_behind(folder: Path) -> None:
    write(folder / "master")
    write(folder / "slave", rounds=24)


def flipped_bit(folder: Path) -> Frame:
    _, slave = both(folder)
    frame = next(frame for frame in slave.frames[50:] if frame.subject == A and frame.count)
    flip(folder / "slave", frame.end - 200)
    return frame


def another_epoch(folder: Path) -> Frame:
    write(folder / "master")
    slave = write(folder / "slave", plant=_other_epoch)
    return next(frame for frame in slave.frames if frame.epoch == Epoch(1, 2))


def another_order(folder: Path) -> set[int]:
    for copy, subjects in (("master", "ab"), ("slave", "ba")):
        log = LogWriter(folder / copy)
        log.mastership(Epoch(1, 1))
        log.batch("first", 3)
        for subject in subjects:
            log.batch(subject, 4)
        log.batch("last", 3)
        log.batch("last", 3)
        log.close()
    return {frame.offset for frame in log.frames[2:4]}


def longer_slave(folder: Path) -> int:
    master, _ = write(folder / "master", rounds=30), write(folder / "slave", rounds=32)
    return master.end


def other_tail(folder: Path) -> None:
    _, slave = both(folder, rounds=5)
    last = slave.frames[-1]
    change(folder / "slave", last.offset, bytes(last.end - last.offset))


def empty_slave(folder: Path) -> None:
    write(folder / "master", rounds=5)
    LogWriter(folder / "slave").close()


DIFFERENT: tuple[Callable[[Path], Any], ...] = (
    damaged_in_many_ways,
    truncated,
    three_copies,
    two_copies_of_which_one_is_behind,
    flipped_bit,
    another_epoch,
    another_order,
    longer_slave,
    other_tail,
    empty_slave,
)


class Case(NamedTuple):
    """Logs that differ, what was planted in them, what the audit says of them."""

    folder: Path
    planted: Any
    result: Result


Cases = dict[Callable[[Path], Any], Case]


@pytest.fixture(scope="module")
def cases(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Cases:
    """Audit all logs that differ, and two brokers, in one run: Spark plans their comparison once, and that takes longer
    than all the rest."""
    root = tmp_path_factory.mktemp("different")
    folders = {plant: root / plant.__name__ for plant in (*DIFFERENT, of_brokers)}
    planted = {plant: plant(folder) for plant, folder in folders.items()}
    groups = []
    with ExitStack() as stack:
        for plant, folder in folders.items():
            places = {copy.name: place_options(str(copy), "") for copy in sorted(folder.iterdir())}
            if plant == of_brokers:
                brokers = {copy: Broker(log, folder / copy) for copy, log in planted[plant].items()}
                addresses = {copy: stack.enter_context(serving(broker)) for copy, broker in brokers.items()}
                places = {copy: place_options(address, "secret") for copy, address in addresses.items()}
            groups.append(Group("g1" if plant == of_brokers else plant.__name__, places))
        results = audit_groups(spark, groups, Options(piece_bytes=PIECE_BYTES))
    return {plant: Case(folders[plant], planted[plant], result) for plant, result in zip(folders, results)}


def test_every_damage_is_found_and_nothing_else(cases: Cases) -> None:
    _, planted, result = cases[damaged_in_many_ways]
    assert result.status == 1
    assert named(result) == planted


def test_truncated_log_lacks_acknowledged_messages(cases: Cases) -> None:
    _, (slave, cut), result = cases[truncated]
    assert set(result.found) == {"missing"}
    assert cut == min(named(result), key=lambda finding: finding[2] or 0)
    lacking = len([frame for frame in slave.frames if cut[2] <= frame.offset < result.watermark])
    assert result.found["missing"] == 1 and result.findings[0]["text"].startswith(f"{lacking} frames with ")


def test_each_copy_of_three_is_held_against_the_master(cases: Cases) -> None:
    """A copy that is behind lacks what two others acknowledged without it: a note. What it has must be right."""
    _, slave, result = cases[three_copies]
    assert named(result) == {("damaged", "slave2", slave.frames[40].offset)}
    assert any(note.startswith(f"the slave2 ends at {slave.end}, ") for note in result.notes)
    assert "missing" in cases[two_copies_of_which_one_is_behind].result.found, "of two, none may lack it"


def test_flipped_bit_is_named_with_its_byte_and_message(cases: Cases) -> None:
    _, frame, result = cases[flipped_bit]
    (finding,) = result.findings
    assert finding["byte"] == frame.end - 200
    assert finding["subject"] == A
    assert finding["id"] == f"{A}-{finding['sequence']}"
    assert frame.first_sequence < finding["sequence"] < frame.first_sequence + 10


def _other_epoch(log: LogWriter) -> None:
    log.epoch = Epoch(1, 2)


def test_other_epoch_with_valid_checksums_is_different(cases: Cases) -> None:
    folder, first, result = cases[another_epoch]
    different, unbegun = result.findings[:2]
    assert different | {"text": ""} == {
        "what": "different",
        "copy": "slave",
        "offset": first.offset,
        "end": first.end,
        "subject": A,
        "sequence": 200,
        "id": f"{A}-200",
        "text": "",
        "byte": first.offset + 20,
        "group": "another_epoch",
        "epoch": "1.2",
        "host": str(folder / "slave"),
        "segment": max(b for b in result.logs["slave"].segments if b <= first.offset),
    }
    assert "boot" in different["text"]
    assert (unbegun["what"], unbegun["copy"], unbegun["offset"]) == ("epoch_frame", "slave", first.offset)
    assert set(result.found) == {"different", "epoch_frame"}
    assert any("differ in their chain alone" in note for note in result.notes)


def test_messages_in_another_order_are_reordered(cases: Cases) -> None:
    _, offsets, result = cases[another_order]
    assert {row["offset"] for row in result.findings} == offsets
    assert set(result.found) == {"reordered"}


def _broken_chain(log: LogWriter) -> None:
    log.chain ^= 1


def _skipped(log: LogWriter) -> None:
    log.sequences[A] += 5


def _repeated(log: LogWriter) -> None:
    log.sequences[A] -= 10


def _older_epoch(log: LogWriter) -> None:
    log.epoch = Epoch(0, 9)


def _ack_too_far(log: LogWriter) -> None:
    log.progress(FrameKind.ACK, A, "g", "c", (PULL + 200, PULL + 210, 0))


def _pull_too_far(log: LogWriter) -> None:
    log.progress(FrameKind.PULL, A, "g", "late", (PULL, 5_000, 1))


def _ack_of_a_stranger(log: LogWriter) -> None:
    log.progress(FrameKind.ACK, A, "unknown", "c", (PULL, PULL + 1, 0))


def test_equal_copies_of_a_wrong_log_are_findings(spark: SparkSession, tmp_path: Path) -> None:
    plants = {2: _pull_too_far, 4: _ack_of_a_stranger, 6: _skipped, 10: _repeated, 12: _older_epoch, 15: _broken_chain}
    whats = ["progress", "progress", "sequence", "sequence", "epoch", "chain"]

    def write_wrong(data: Path) -> list[int]:
        offsets: list[int] = []
        log = LogWriter(data)
        log.mastership(Epoch(1, 1))
        log.progress(FrameKind.POSITION, A, "g", "", (0, 0, 0))
        for turn in range(20):
            log.epoch = Epoch(1, 1)
            if turn in plants:
                offsets.append(log.end)
                plants[turn](log)
            log.batch(A, 10)
        log.close()
        return offsets

    offsets = write_wrong(tmp_path / "master")
    assert write_wrong(tmp_path / "slave") == offsets
    expected = {(what, "both", offset) for what, offset in zip(whats, offsets)} | {("id_twice", "both", offsets[3])}
    assert named(audit(spark, tmp_path)) == expected


def _no_batch(log: LogWriter) -> None:
    log.frame(FrameKind.MESSAGES, A, b"\xff" * 800, count=1000, first=200)
    log.sequences[A] = 1200


def test_invalid_batch_is_a_finding_with_a_journal(spark: SparkSession, tmp_path: Path) -> None:
    """Its CRC is right: it came so from a master that is wrong."""
    log, _ = both(tmp_path, plant=_no_batch)
    broken = next(frame for frame in log.frames if frame.count == 1000)
    journal = tmp_path / "acknowledged.ndjson"
    journal.write_text(json.dumps({"subject": A, "group": "g1", "sequence": 7, "id": f"{A}-7"}) + "\n")
    result = audit(spark, tmp_path, journal=journal)
    assert (result.status, result.unreadable) == (1, None)
    assert named(result) == {("damaged", "both", broken.offset)}


def test_ack_beyond_pulled_messages_is_found(spark: SparkSession, tmp_path: Path) -> None:
    offsets: list[int] = []

    def plant(log: LogWriter) -> None:
        offsets.append(log.end)
        _ack_too_far(log)

    both(tmp_path, plant=plant)
    result = audit(spark, tmp_path)
    assert named(result) == {("progress", "both", offsets[0])}
    assert "ends past" in result.findings[0]["text"]


def message_of(size: int, id: str) -> bytes:
    """A message that is encoded in so many bytes."""
    data = encode_message(Message("s", {"text": ""}, id=id), 1)
    return encode_message(Message("s", {"text": "x" * (size - len(data))}, id=id), 1)


def test_breaks_at_the_border_of_two_pieces_are_named(spark: SparkSession, tmp_path: Path) -> None:
    """Frames of 1,024 bytes, so that one begins where a piece begins, and its reader knows nothing before it."""
    border = 2 * PIECE_BYTES
    for copy in ("master", "slave"):
        log = LogWriter(tmp_path / copy)
        while log.end < 4 * PIECE_BYTES:
            if log.end == border:
                log.chain ^= 1
                log.sequences["s"] += 7
                log.epoch = Epoch(0, 1)
            log.messages("s", [message_of(1024 - 88 - 8 - 8, f"{log.end:012d}")])
        log.close()
    result = audit(spark, tmp_path)
    expected = {(what, "both", border) for what in ("chain", "sequence", "epoch")}
    assert named(result) == expected | {("epoch_frame", "both", 0)}


def test_slave_only_frame_below_the_watermark_is_extra(cases: Cases) -> None:
    _, master_end, result = cases[longer_slave]
    assert set(result.found) == {"extra"}
    assert result.findings[0]["offset"] == master_end
    assert result.findings[0]["id"] == f"{A}-300"


def test_tail_past_the_watermark_is_a_note(cases: Cases) -> None:
    result = cases[other_tail].result
    assert (result.status, result.findings) == (0, [])
    assert any("1 frames past the high watermark" in note for note in result.notes)


def test_messages_missing_or_altered_on_both_copies_are_found(spark: SparkSession, tmp_path: Path) -> None:
    """Both logs are equal and whole: only who sent the messages can say so. Its last line is torn by a crash."""
    both(tmp_path)
    reader = TableReader({"path": str(tmp_path / "slave"), "subject": A}, ["sequence", "message"])
    kept = [row for part in reader.partitions() for batch in reader.read(part) for row in batch.to_pylist()]
    hashes = {row["sequence"]: sha256(row["message"]).hexdigest()[:16] for row in kept} | {17: "0" * 16}
    lines = [{"subject": A, "group": "g1", "sequence": s, "id": f"{A}-{s}", "hash": hashes[s]} for s in range(400)]
    lines += [
        {"subject": A, "group": "g1", "sequence": 399, "id": "never stored"},
        {"subject": "never.seen", "group": "g1", "sequence": 0, "id": "x", "hash": "1" * 16},
        {"subject": "elsewhere", "group": "g2", "sequence": 0, "id": "y"},
    ]
    journal = tmp_path / "journal"
    journal.mkdir()
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (journal / "shop-1.ndjson").write_text(text + '{"subject": "torn", "gro')
    result = audit(spark, tmp_path, journal=journal)
    assert (result.unreadable, result.found) == (None, {"lost": 2, "altered": 1})
    assert {(row["what"], row["copy"], row["subject"], row["id"]) for row in result.findings} == {
        ("lost", "both", A, "never stored"),
        ("lost", "both", "never.seen", "x"),
        ("altered", "both", A, f"{A}-17"),
    }


def _give_up_the_first_segment(log: LogWriter) -> None:
    start = sorted(int(path.stem) for path in log.folder.glob("*.log"))[1]
    log.frame(FrameKind.RETENTION, "", encode_retention(RetentionDecision(start, "age", {}, {})))


def test_journal_older_than_the_log_is_not_counted(spark: SparkSession, tmp_path: Path) -> None:
    logs, snapshots = both(tmp_path, plant=_give_up_the_first_segment), dict[Path, bytes]()
    for log in logs:
        derive(log.folder.parent)
        log.folder.joinpath(f"{0:020d}.log").unlink()
        snapshots |= {path: path.read_bytes() for path in log.folder.glob("*.snap")}
    for path in snapshots:
        path.unlink()
    lines = [{"subject": A, "group": "g1", "sequence": s, "id": f"{A}-{s}"} for s in (3, 399)]
    lines.append({"subject": "older", "group": "g1", "sequence": 0, "id": "x"})
    journal = tmp_path / "acknowledged.ndjson"
    journal.write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = audit(spark, tmp_path, journal=journal)
    assert (result.status, result.found, result.journal) == (0, {}, 3)
    assert any(note.startswith("2 of the journal's messages") for note in result.notes)
    # A snapshot says which subjects there were before the log begins.
    for path, content in snapshots.items():
        path.write_bytes(content)
    result = audit(spark, tmp_path, journal=journal)
    assert [(row["what"], row["copy"], row["subject"]) for row in result.findings] == [("lost", "both", "older")]
    assert any(note.startswith("1 of the journal's messages") for note in result.notes)


def test_copies_are_compared_from_the_later_start(spark: SparkSession, tmp_path: Path) -> None:
    both(tmp_path, plant=_give_up_the_first_segment)
    first, second = sorted((tmp_path / "slave/log").glob("*.log"))[:2]
    first.unlink()
    result = audit(spark, tmp_path)
    assert (result.status, result.findings, result.start) == (0, [], int(second.stem))
    assert any(f"[0, {second.stem.lstrip('0')})" in note for note in result.notes)


def test_missing_first_segment_prevents_the_proof(spark: SparkSession, tmp_path: Path) -> None:
    both(tmp_path)
    first, second = sorted((tmp_path / "slave/log").glob("*.log"))[:2]
    first.unlink()
    result = audit(spark, tmp_path)
    assert [(row["what"], row["copy"], row["offset"]) for row in result.findings] == [
        ("retention", "slave", int(second.stem))
    ]


def test_empty_copy_lacks_everything(cases: Cases) -> None:
    result = cases[empty_slave].result
    assert (result.status, result.findings[0]["what"], result.findings[0]["offset"]) == (1, "missing", 0)
    assert result.findings[0]["text"].startswith("21 frames "), "of 22: the high watermark does not cover the last"


def test_audit_that_read_nothing_fails(spark: SparkSession, tmp_path: Path) -> None:
    for copy in ("master", "slave"):
        LogWriter(tmp_path / copy).close()
    result = audit(spark, tmp_path)
    assert result.status == 2
    assert as_json([result], 0.0)["verdict"] == "could not read"
    assert audit(spark, tmp_path / "nowhere").status == 2
    assert as_json([], 0.0)["status"] == 2


class Broker(qmq_pb2_grpc.BrokerServicer):  # type: ignore[misc]
    """Serves the directory `master` or `slave` over DescribeLog and ReadLog, as a broker does that is in sync."""

    def __init__(self, log: LogWriter, data: Path) -> None:
        self._log, self._copy, self._name = log, PathCopy(data), data.name
        self.start, self.served_end = 0, log.end
        self.described = self.holders = 0

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
    """Its retention takes the first segment as soon as the audit knows what there is to read, unless it is held.

    `forgets`: it was restarted, and knows nothing of who held it.
    """

    forgets = False

    def DescribeLog(self, request: Any, context: grpc.ServicerContext) -> Any:
        answer = super().DescribeLog(request, context)
        if self.described == 2 and (self.forgets or not self.holders):
            self.start = self._copy.describe().segments[1]
        return answer


@contextmanager
def serving(broker: Broker) -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(8))
    qmq_pb2_grpc.add_BrokerServicer_to_server(broker, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


def of_brokers(folder: Path) -> dict[str, LogWriter]:
    logs = dict(zip(("master", "slave"), both(folder)))
    flip(folder / "slave", logs["slave"].frames[40].offset + 40)
    return logs


def test_running_brokers_are_audited_over_grpc(cases: Cases) -> None:
    _, logs, result = cases[of_brokers]
    assert (result.watermark, result.read["master"]["messages"]) == (logs["master"].end, 800)
    assert named(result) == {("damaged", "slave", logs["slave"].frames[40].offset)}


def test_broker_that_refuses_the_token_is_not_read(spark: SparkSession, tmp_path: Path) -> None:
    brokers = [Broker(log, tmp_path / copy) for log, copy in zip(both(tmp_path), ("master", "slave"))]
    with serving(brokers[0]) as one, serving(brokers[1]) as two:
        places = {"master": place_options(one, "wrong"), "slave": place_options(two, "secret")}
        assert "UNAUTHENTICATED" in (audit_group(spark, Group("g1", places)).unreadable or "")


def test_retention_takes_nothing_that_is_to_be_read(spark: SparkSession, tmp_path: Path) -> None:
    """The slave is read last: by then a segment of both that was described may be old enough to go."""
    brokers = [BusyBroker(log, tmp_path / copy) for log, copy in zip(both(tmp_path), ("master", "slave"))]
    with serving(brokers[0]) as one, serving(brokers[1]) as two:
        places = {"master": place_options(one, "secret"), "slave": place_options(two, "secret")}
        result = audit_group(spark, Group("g1", places), piece_bytes=PIECE_BYTES)
        until(lambda: not any(broker.holders for broker in brokers), "nothing held")
    assert (result.status, result.found, result.start) == (0, {}, 0)
    assert result.read["slave"]["messages"] == 800


def test_copy_released_while_read_is_read_again(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logs = both(tmp_path, plant=_give_up_the_first_segment)
    brokers = [BusyBroker(log, tmp_path / copy) for log, copy in zip(logs, ("master", "slave"))]
    brokers[1].forgets = True
    with serving(brokers[0]) as one, serving(brokers[1]) as two:
        group = Group("g1", {"master": place_options(one, "secret"), "slave": place_options(two, "secret")})
        again = audit_group(spark, group, piece_bytes=PIECE_BYTES)
        brokers[1].start = brokers[1].described = 0
        monkeypatch.setattr("qmq.audit.group.AGAIN_MAX", 0)
        once = audit_group(spark, group, piece_bytes=PIECE_BYTES)
    let_go = f"the slave let go of [0, {brokers[1].start})"
    assert once.status == 2 and str(once.unreadable).startswith(let_go)
    assert (again.status, again.found, again.start) == (0, {}, brokers[1].start)
    assert any(let_go in note for note in again.notes)


def test_short_reads_of_both_brokers_prevent_the_proof(spark: SparkSession, tmp_path: Path) -> None:
    """What is left is equal, and whole up to the border of a piece."""
    brokers = [Broker(log, tmp_path / copy) for log, copy in zip(both(tmp_path), ("master", "slave"))]
    for broker in brokers:
        broker.served_end = PIECE_BYTES
    with serving(brokers[0]) as one, serving(brokers[1]) as two:
        places = {"master": place_options(one, "secret"), "slave": place_options(two, "secret")}
        result = audit_group(spark, Group("g1", places), piece_bytes=PIECE_BYTES)
    assert (result.status, result.found) == (1, {"unread": 2})
    assert "Findings" in as_markdown([result], 1.0)


def test_query_counts_messages_by_property(spark: SparkSession, tmp_path: Path) -> None:
    write(tmp_path)
    sql = f"""SELECT properties['carrier'] AS carrier, count(*) AS n FROM messages WHERE subject = '{A}'
              GROUP BY 1 ORDER BY 1"""
    rows = query.run_query(spark, [place_options(str(tmp_path), "")], sql)
    assert rows == [{"carrier": "AA", "n": 134}, {"carrier": "DL", "n": 133}, {"carrier": "UA", "n": 133}]
    rows = query.run_query(
        spark,
        [place_options(str(tmp_path), "")],
        "SELECT id, tags, year(created) AS year FROM messages WHERE sequence = 7 ORDER BY 1",
    )
    assert rows == [{"id": f"{subject}-7", "tags": ["odd"], "year": 2023} for subject in (A, B)]


def test_frames_and_damaged_ranges_are_rows(spark: SparkSession, tmp_path: Path) -> None:
    log = write(tmp_path, rounds=5)
    broken = log.frames[6]
    flip(tmp_path, broken.offset + 20)
    place = place_options(str(tmp_path), "")
    rows = read_copy(spark, place, rows="frames", piece_bytes=2_048).orderBy("offset").collect()
    assert [row["offset"] for row in rows] == [frame.offset for frame in log.frames]
    assert [row["problem"] for row in rows if row["problem"]] == ["wrong header CRC"]
    last = rows[-1]
    assert (last["end"], last["chain"]) == (log.end, f"{log.chain:016x}")


def test_command_line_that_lacks_a_copy_could_not_read(capsys: pytest.CaptureFixture[str]) -> None:
    assert consistency.main(["--group", "g1", "--master", "x"]) == 2
    assert "--slave" in capsys.readouterr().err


def delayed(data: Path, plant: Callable[[LogWriter, list[tuple[int, int]]], object] | None = None) -> LogWriter:
    """Write a delay server's log: messages that are dispatched when they are due, one cancelled, one carried."""
    log = LogWriter(data)
    log.mastership(Epoch(1, 1))
    frame = log.batch(A, 6)
    due_ms = log.timestamp_ms + 1000
    first = frame.offset + frame.body_at + 4 * 7
    places = [(first + 100 * number, due_ms) for number in range(6)]
    log.frame(FrameKind.CANCEL, A, encode_places(places[:1]), count=1)
    carried = encode_places(places[1:2]) + join_batch([encode_message(Message(A, {}, id="carried"), 0)])
    log.frame(FrameKind.CARRY, A, carried, count=1)
    log.timestamp_ms += 2000
    dispatch = encode_dispatch("g1", encode_places(places[2:5]))
    sent = log.frame(FrameKind.DISPATCH, A, dispatch, count=3)
    log.frame(FrameKind.SETTLED, "", encode_settled([(sent.producer, sent.batch, Outcome.STORED)]), count=1)
    if plant:
        plant(log, places)
    log.close()
    return log


def dispatch_again(log: LogWriter, places: list[tuple[int, int]]) -> None:
    again = log.frame(FrameKind.DISPATCH, A, encode_dispatch("g2", encode_places(places)), count=len(places))
    log.frame(FrameKind.SETTLED, "", encode_settled([(again.producer, again.batch, Outcome.STORED)]), count=1)


def dispatch_early(log: LogWriter, places: list[tuple[int, int]]) -> None:
    log.timestamp_ms -= 1500
    log.frame(FrameKind.DISPATCH, A, encode_dispatch("g1", encode_places(places)), count=len(places))


@pytest.mark.parametrize(
    "plant, found",
    [
        pytest.param(None, {}, id="kept"),
        pytest.param(lambda log, places: dispatch_again(log, places[2:3]), {"twice": 1}, id="sent twice"),
        pytest.param(lambda log, places: dispatch_again(log, places[:2]), {"recalled": 2}, id="sent after a cancel"),
        pytest.param(lambda log, places: dispatch_early(log, places[5:]), {"early": 1}, id="sent early"),
    ],
)
def test_promises_of_a_delay_server_are_judged(
    spark: SparkSession, tmp_path: Path, plant: Any, found: dict[str, int]
) -> None:
    """P7; each finding is of both copies, which are equal."""
    for copy in ("master", "slave"):
        delayed(tmp_path / copy, plant)
    result = audit(spark, tmp_path)
    assert not result.unreadable and result.found == found
