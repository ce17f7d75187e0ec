"""Shell. Logs as tables of Spark itself: filters reach the reader, and a stream gives each message once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql.streaming import StreamingQuery

from qmq.audit.jobs.find import find
from qmq.audit.jobs.trail import find_trail
from qmq.codec import encode_message, with_properties
from qmq.log.frame import FrameKind
from qmq.message import Message
from qmq.subjects import dead_letter_subject, retry_subject
from qmq.types import Epoch
from tests.support.spark import local_spark
from tests.unit.audit.logs import BEGIN_MS, LogWriter
from tests.unit.audit.test_table import A, ruin, write

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::ResourceWarning")


PULL = 1 << 32


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    with local_spark("table tests") as session:
        yield session


def test_a_filter_of_a_query_keeps_segments_from_being_read(spark: SparkSession, tmp_path: Path) -> None:
    write(tmp_path)
    ruin(tmp_path, 1)
    ruin(tmp_path, 2)
    messages = spark.read.format("qmq").options(path=str(tmp_path), damage="fail", columns="subject,sequence").load()
    messages.createOrReplaceTempView("messages")
    ((count, last),) = spark.sql(
        f"SELECT count(*), max(sequence) FROM messages WHERE subject = '{A}' AND sequence < 95"
    ).collect()
    assert (count, last) == (95, 94)
    with pytest.raises(PySparkException, match="offset"):
        spark.sql(f"SELECT count(*) FROM messages WHERE subject = '{A}'").collect()


def test_a_stream_that_failed_and_went_on_gives_each_message_once(spark: SparkSession, tmp_path: Path) -> None:
    """The second batch fails when half of it was taken; the next query goes on from the checkpoint."""
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
    run()  # repeats what failed, as it was planned
    run()
    log.close()
    assert taken == {0: list(range(40)), 1: list(range(40, 90)), 2: list(range(90, 140))}


def lived(data: Path) -> None:
    """Write a log in which order.changed-3 is delivered, nacked, dies, and is given back to its group."""
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


def test_what_became_of_a_message_is_found_by_its_id(spark: SparkSession, tmp_path: Path) -> None:
    """Its neighbours' acks are not its, though their frames lie beside."""
    lived(tmp_path)
    found = find_trail(spark, [{"path": str(tmp_path)}], f"{A}-3")
    assert [(row["what"], row["consumer"], row["state"]) for row in found] == [
        ("stored", "", ""), ("pull", "c", "delivered"), ("nack", "c", "requeued"), ("pull", "d", "delivered"),
        ("stored", "", ""), ("ack", "d", "dead"), ("stored", "", ""),
    ]  # fmt: skip
    rows = find(spark, [{"path": str(tmp_path)}], properties={"carrier": "AA"}, tags=["odd"])
    assert [(row["subject"], row["sequence"]) for row in rows] == [
        (A, 3), (A, 9), (dead_letter_subject(A, "g"), 0), (retry_subject(A, "g"), 0)
    ]  # fmt: skip
