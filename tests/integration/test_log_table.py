"""Shell. Logs as tables of Spark: filters reach the reader, and a stream gives each message once."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql.streaming import StreamingQuery

from qmq.audit.delay_groups import Source, account_for
from qmq.audit.delays import DELAY_STATES
from qmq.audit.group import audit_groups
from qmq.audit.jobs.find import find
from qmq.audit.jobs.trail import find_trail
from qmq.audit.results import Group
from qmq.audit.wave import Options
from qmq.codec import FLAG_DELAYED, encode_message, join_batch, with_properties
from qmq.delayserver.messages import with_due
from qmq.log.delay_frames import SCHEDULE_FOLDER, Outcome, encode_dispatch, encode_places, encode_settled
from qmq.log.frame import FrameKind
from qmq.message import Message
from qmq.subjects import dead_letter_subject, retry_subject
from qmq.types import Epoch
from tests.support.spark import local_spark
from tests.unit.audit.logs import BEGIN_MS, HOUR_MS, LogWriter
from tests.unit.audit.test_table import A, ruin, write

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")


PULL = 1 << 32
NOTEBOOK = Path(__file__).resolve().parents[2] / "docs/examples/logs/questions.py"


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    before = os.environ.get("PYTHONPATH")
    with local_spark("table tests") as session:
        assert os.environ.get("PYTHONPATH") == before, "programs started later import other modules"
        yield session


def test_options_skip_segments(spark: SparkSession, tmp_path: Path) -> None:
    write(tmp_path)
    ruin(tmp_path, 1)
    ruin(tmp_path, 2)
    log = spark.read.format("qmq").options(path=str(tmp_path), damage="fail", columns="subject,sequence", subject=A)
    ((count, last),) = log.option("sequences", "0-95").load().selectExpr("count(*)", "max(sequence)").collect()
    assert (count, last) == (100, 99), "whole frames"
    with pytest.raises(PySparkException, match="offset"):
        log.option("sequences", "").load().count()


def test_failed_stream_yields_each_message_once(spark: SparkSession, tmp_path: Path) -> None:
    """The second batch fails halfway; the next query continues from the checkpoint."""
    log, batches = LogWriter(tmp_path / "data"), tmp_path / "checkpoint"
    log.mastership(Epoch(1, 1))
    taken: dict[int, list[int]] = {}
    fails = True

    def take(rows: object, number: int) -> None:
        found = [row["sequence"] for row in rows.collect()]  # type: ignore[attr-defined]
        taken[number] = sorted(found[:5] if fails and number else found)
        if fails and number:
            raise RuntimeError("the power went")

    def run() -> StreamingQuery:
        stream = spark.readStream.format("qmq").options(path=str(tmp_path / "data"), columns="sequence").load()
        writer = stream.writeStream.foreachBatch(take).option("checkpointLocation", str(batches))
        query = writer.trigger(availableNow=True).start()
        query.awaitTermination()
        return query

    def grow() -> None:
        for _ in range(5):
            log.batch(A, 10)
        log.flush()

    grow()
    run()
    grow()
    with pytest.raises(PySparkException, match="the power went"):
        run()
    fails = False
    grow()
    run()  # repeats the failed batch with its plan
    run()
    log.close()
    assert taken == {0: list(range(40)), 1: list(range(40, 90)), 2: list(range(90, 140))}


def lived(data: Path) -> None:
    """Write a log in which order.changed-3 is delivered, nacked, dies, and returns to its group."""
    log = LogWriter(data)
    log.mastership(Epoch(1, 1))
    log.progress(FrameKind.POSITION, A, "g", "", (0, 0, 0))
    log.batch(A, 10)
    log.progress(FrameKind.PULL, A, "g", "c", (PULL, 0, 10))
    log.progress(FrameKind.NACK, A, "g", "c", (PULL + 3, PULL + 4, 0))
    log.progress(FrameKind.ACK, A, "g", "c", (PULL, PULL + 3, 0))
    log.progress(FrameKind.PULL, A, "g", "d", (PULL, 3, 1))
    message = Message(A, {"carrier": "AA"}, id=f"{A}-3", tags=("odd",))
    dead = with_properties(encode_message(message, BEGIN_MS), {"qmq_deadReason": "no", "qmq_deadSequence": "3"})
    log.messages(dead_letter_subject(A, "g"), [dead])
    log.progress(FrameKind.ACK, A, "g", "d", (PULL, PULL + 1, 0))
    log.messages(retry_subject(A, "g"), [encode_message(message, BEGIN_MS)])
    log.close()


def test_history_of_a_message_is_found_by_id(spark: SparkSession, tmp_path: Path) -> None:
    """Acks of neighbours are left out, though their frames are adjacent."""
    lived(tmp_path)
    found = find_trail(spark, [{"path": str(tmp_path)}], f"{A}-3")
    assert [(row["what"], row["consumer"], row["state"]) for row in found] == [
        ("stored", "", ""),
        ("pull", "c", "delivered"),
        ("nack", "c", "requeued"),
        ("pull", "d", "delivered"),
        ("stored", "", ""),
        ("ack", "d", "dead"),
        ("stored", "", ""),
    ]
    rows = find(spark, [{"path": str(tmp_path)}], properties={"carrier": "AA"}, tags=["odd"])
    assert [(row["subject"], row["sequence"]) for row in rows] == [
        (A, 3),
        (A, 9),
        (dead_letter_subject(A, "g"), 0),
        (retry_subject(A, "g"), 0),
    ]


def test_every_notebook_cell_runs(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lived(tmp_path)
    monkeypatch.setenv("QMQ_LOG", str(tmp_path))
    cells: dict[str, object] = {}
    for number, cell in enumerate(re.split("^# %%.*$", NOTEBOOK.read_text(), flags=re.MULTILINE)):
        exec(compile(cell, f"{NOTEBOOK.name}, cell {number}", "exec"), cells)
    shown = {line.replace(" ", "") for line in capsys.readouterr().out.splitlines()}
    assert {f"|{A}|10|2023-11-1422:00:00|", "|g|2|0.0|", "|%DEAD_RETRY%order.changed%g|no|1|"} <= shown


def delayed(data: Path, *, is_early: bool = False) -> tuple[LogWriter, list[int]]:
    """Write a delay group's log with seven messages due at once; return their numbers.

    Messages 0 to 2 are stored, 3 has an unknown outcome, 4 is cancelled, 5 is rewritten for tomorrow, 6 is not sent.
    With `is_early` the rewritten one is dispatched at once.
    """
    log = LogWriter(data)
    log.mastership(Epoch(1, 1))
    due_ms = log.timestamp_ms + 1_000
    encoded = [encode_message(Message(A, {}, id=f"m{n}"), 0) for n in range(7)]
    messages = [with_due(bytes([data[0] | FLAG_DELAYED]) + data[1:], due_ms) for data in encoded]
    frame = log.messages(A, messages)
    first = frame.offset + frame.body_at + 4 * (len(messages) + 1)
    numbers = [first + n * len(messages[0]) for n in range(7)]
    log.timestamp_ms += 2 * HOUR_MS
    for batch, chosen in ((1, numbers[:3]), (2, numbers[3:4])):
        body = encode_dispatch("g1", encode_places([(number, due_ms) for number in chosen]))
        log.frame(FrameKind.DISPATCH, A, body, count=len(chosen), numbers=(7, batch))
    sent = log.frames[-2]
    log.frame(FrameKind.SETTLED, "", encode_settled([(sent.producer, sent.batch, Outcome.STORED)]), count=1)
    log.frame(FrameKind.CANCEL, A, encode_places([(numbers[4], due_ms)]), count=1)
    tomorrow = join_batch([with_due(messages[5], due_ms + 24 * HOUR_MS)])
    carried = log.frame(FrameKind.CARRY, A, encode_places([(numbers[5], due_ms)]) + tomorrow, count=1)
    if is_early:
        numbers.append(carried.offset + carried.body_at + 16 + 4 * 2)
        body = encode_dispatch("g1", encode_places([(numbers[7], due_ms)]))
        log.frame(FrameKind.DISPATCH, A, body, count=1, numbers=(7, 3))
    log.close()
    return log, numbers


def test_every_delayed_message_has_a_single_state(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copies of both groups are equal. A directory is judged at the time of its last decision."""
    places = {}
    for copy in ("master", "slave"):
        log, numbers = delayed(tmp_path / "d1" / copy)
        (tmp_path / "d1" / copy / SCHEDULE_FOLDER).mkdir()
        target = LogWriter(tmp_path / "g1" / copy)
        target.mastership(Epoch(1, 1))
        target.batch(A, 1)
        target.close()
    for name in ("d1", "g1"):
        places[name] = {copy: {"path": str(tmp_path / name / copy)} for copy in ("master", "slave")}
    groups = [Group(name, of) for name, of in places.items()]
    result, _ = audit_groups(spark, groups, Options(parquet=tmp_path / "parquet"))
    sums = [tuple(row[name] for name in ("subject", "taken", *DELAY_STATES, "late")) for row in result.delayed]
    assert (result.unreadable, sums) == (None, [(A, 8, 3, 1, 1, 1, 1, 1, 3)])
    assert [(row["what"], row["copy"], row["sequence"], row["id"], row["offset"]) for row in result.findings] == [
        ("unsent", "both", 6, "m6", log.frames[1].offset),
        ("lost", "both", numbers[0], None, log.frames[2].offset),
    ]
    assert "3 messages" in result.findings[1]["text"] and "log of g1" in result.findings[1]["text"]
    later = account_for(
        spark,
        Source("d1", places["d1"]["master"]),
        [],
        now_ms=log.timestamp_ms + 2 * HOUR_MS,
        closed={"g1": ["it has no slave"]},
    )
    assert (later.rows[0]["under_way"], later.rows[0]["unsent"], later.findings) == (0, 2, [])
    assert later.notes == [
        "2 messages that were due an hour ago or earlier wait for broker groups that take none: g1 (it has no slave)"
    ]
    later = account_for(
        spark, Source("d1", places["d1"]["master"]), [], now_ms=log.timestamp_ms + 2 * HOUR_MS, closed={"g2": ["full"]}
    )
    assert [("planned for g1 at" in row["text"], row["sequence"]) for row in later.findings] == [
        (True, numbers[3]),
        (False, numbers[6]),
    ]
    log, numbers = delayed(tmp_path / "d2", is_early=True)
    early = account_for(spark, Source("d2", {"path": str(tmp_path / "d2")}), []).findings
    assert [(row["what"], row["sequence"], row["offset"]) for row in early] == [
        ("early", numbers[7], log.frames[-1].offset),
        ("unsent", numbers[6], log.frames[1].offset),
    ]
    monkeypatch.setattr("qmq.audit.delay_groups.FINDINGS_MAX", 1)
    few = account_for(spark, Source("d1", places["d1"]["master"]), [], now_ms=log.timestamp_ms + 2 * HOUR_MS)
    assert (few.findings, few.more) == (later.findings[:1], {"unsent": 1})
    kept = sorted(path.name for path in (tmp_path / "parquet/d1/delayed").glob("run=*/day=*"))
    assert kept == ["day=2023-11-14", "day=2023-11-15"]
