"""Shell. Logs as tables of Spark: a stream gives each message once, and a message's history is found."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql.streaming import StreamingQuery

from qmq.audit.group import audit_groups
from qmq.audit.jobs.find import find
from qmq.audit.jobs.trail import find_trail
from qmq.audit.wave import Options
from qmq.codec import encode_message, with_properties
from qmq.log.frame import FrameKind
from qmq.message import Message
from qmq.subjects import dead_letter_subject, retry_subject
from qmq.types import Epoch
from tests.support.snippets import snippets
from tests.support.spark import local_spark
from tests.unit.audit.logs import BEGIN_MS, LogWriter
from tests.unit.audit.test_delay_groups import write_groups
from tests.unit.audit.test_table import A, write

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")


PULL = 1 << 32
NOTEBOOK = Path(__file__).resolve().parents[2] / "docs/examples/logs/questions.py"


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    before = os.environ.get("PYTHONPATH")
    with local_spark("table tests") as session:
        assert os.environ.get("PYTHONPATH") == before, "programs started later import other modules"
        yield session


def test_snippet_of_the_page_names_options_of_the_table(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both tables are made and the first is read; the second needs a running broker."""
    write(tmp_path)
    ((_, text),) = snippets(Path(__file__).resolve().parents[2] / "docs" / "audit.md")
    monkeypatch.setattr("qmq.audit.data_source.start_spark", lambda master, name: spark)
    *before, of_path, of_broker = text.replace("/var/lib/qmq/b1", str(tmp_path)).strip().splitlines()
    names: dict[str, Any] = {}
    exec("\n".join([*before, f"first = {of_path}", f"second = {of_broker}"]), names)
    assert names["first"].columns == ["subject", "sequence", "id"] and names["first"].count() > 0
    assert "offset" in names["second"].columns


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
    log = LogWriter.begun(data)
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


def test_delay_group_is_accounted_for_on_spark(spark: SparkSession, tmp_path: Path) -> None:
    groups, _, _ = write_groups(tmp_path)
    options = [Options(parquet=tmp_path / "out", at_ms=at_ms) for at_ms in (1_000, 2_000)]
    expected, result = (audit_groups(at, groups, of)[0] for at, of in zip((None, spark), options))
    assert result.unreadable is None and result.delayed == expected.delayed
    assert result.findings == expected.findings != []
    rows = spark.read.parquet(str(tmp_path / "out/d1/delayed")).groupBy("run").sum("taken").collect()
    assert [row[1] for row in rows] == [8, 8]
