"""Shell. The audit night after night: what is new and a part of the old is read, and an exchanged log is named."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from qmq.audit.copies import place_options
from qmq.audit.group import audit_group
from qmq.audit.results import Group, Result
from qmq.codec import with_properties
from qmq.ledger import Ledger
from tests.support.spark import local_spark
from tests.unit.audit.divergences import change_message
from tests.unit.audit.forged import A, a_message, forged, write_world
from tests.unit.audit.logs import LogWriter

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::ResourceWarning")

PIECE_BYTES = 16_384
SHARE = 7


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    with local_spark("ledger") as session:
        yield session


def audit(spark: SparkSession, folder: Path) -> Result:
    places = {copy: place_options(str(folder / copy), "") for copy in ("master", "slave")}
    result = audit_group(spark, Group("g1", places), piece_bytes=PIECE_BYTES, ledger=Ledger(folder / "ledger"))
    assert result.unreadable is None
    return result


def read_bytes(result: Result) -> int:
    return max(side["bytes"] for side in result.read.values())


def both(folder: Path, rounds: int) -> LogWriter:
    """Write the first rounds of the same log again: what was there before is there, byte for byte."""
    for copy in ("master", "slave"):
        shutil.rmtree(folder / copy, ignore_errors=True)
        log = write_world(folder / copy, rounds=rounds)
    return log


def whats(result: Result) -> set[tuple[str, str]]:
    return {(row["what"], row["copy"]) for row in result.findings}


def test_second_night_reads_new_frames_and_a_seventh(spark: SparkSession, tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger")
    both(tmp_path, 40)
    first = audit(spark, tmp_path)
    assert first.status == 0
    (line,) = ledger.entries("g1")
    assert (line.verdict, line.verified, line.ends[A]) == ("proven equal", first.watermark, 400)
    log = both(tmp_path, 60)
    second = audit(spark, tmp_path)
    assert (second.status, second.findings) == (0, [])
    new = log.end - first.watermark
    assert new < read_bytes(second) <= new + first.watermark // SHARE
    line = ledger.entries("g1")[-1]
    assert (line.begin, line.verified, line.ends[A]) == (first.watermark, second.watermark, 600)

    # A log that was restored from before the second night, on both copies alike.
    both(tmp_path, 50)
    restored = audit(spark, tmp_path)
    assert whats(restored) == {("rewound", "both")}
    assert read_bytes(restored) > restored.watermark - PIECE_BYTES, "all of it is read again"
    assert ledger.known("g1").anchor == line, "it moves nothing"

    # A payload that was exchanged on both, every CRC and chain made right.
    both(tmp_path, 60)
    for copy in ("master", "slave"):
        with forged(tmp_path / copy) as frames:
            frame = change_message(frames, A, 33, with_properties(a_message(A, 33), {"text": "z" * 60}))
    rewritten = audit(spark, tmp_path)
    assert whats(rewritten) == {("rewritten", "both")}
    named = [row for row in rewritten.findings if row["end"]]
    assert named and named[0]["offset"] <= frame.at < named[0]["end"] + PIECE_BYTES


def test_pair_that_was_wiped_is_named(spark: SparkSession, tmp_path: Path) -> None:
    both(tmp_path, 5)
    assert audit(spark, tmp_path).status == 0
    for copy in ("master", "slave"):
        shutil.rmtree(tmp_path / copy)
        LogWriter(tmp_path / copy).close()
    assert whats(audit(spark, tmp_path)) == {("rewound", "both")}
    assert Ledger(tmp_path / "ledger").entries("g1")[-1].found == {"rewound": 1}
