"""Shell. Audit of Spark: differing copies, running brokers, journals, queries, and full tables."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from pyspark.sql import SparkSession

from qmq.audit.copies import place_options
from qmq.audit.data_source import TableReader
from qmq.audit.executors import OnSpark
from qmq.audit.group import audit_group, audit_groups
from qmq.audit.jobs import query
from qmq.audit.report import as_markdown
from qmq.audit.results import Group, Result
from qmq.audit.wave import Options
from qmq.log.frame import Frame, FrameKind
from qmq.types import Epoch
from tests.support.small_disk import fill, small_disk
from tests.support.spark import local_spark
from tests.unit.audit.forged import derive
from tests.unit.audit.logs import LogWriter
from tests.unit.audit.served import serving
from tests.unit.audit.test_audited_range import (
    PIECE_BYTES,
    A,
    B,
    Broker,
    both,
    give_up_the_first_segment,
    write,
)
from tests.unit.audit.test_walk import change, flip

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    with local_spark("audit tests") as session:
        yield session


@pytest.fixture(scope="module", params=["in this process", "on Spark"])
def executor(request: pytest.FixtureRequest) -> SparkSession | None:
    return request.getfixturevalue("spark") if request.param == "on Spark" else None


def audit(spark: SparkSession | None, folder: Path, **options: Any) -> Result:
    places = {copy: place_options(str(folder / copy), "") for copy in ("master", "slave")}
    return audit_group(spark, Group("g1", places), piece_bytes=PIECE_BYTES, **options)


def named(result: Result) -> set[tuple[str, str, int | None]]:
    return {(row["what"], row["copy"], row["offset"]) for row in result.findings}


def test_equal_copies_are_proven_equal(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parquet has all counts per hour, the result the first ones."""
    monkeypatch.setattr("qmq.audit.findings.HOURS_MAX", 5)
    log = write(tmp_path / "master")
    write(tmp_path / "slave", segment_bytes=23_000)
    result = audit(spark, tmp_path, parquet=tmp_path / "out")
    assert (result.status, result.findings, result.unreadable) == (0, [], None)
    assert result.watermark == log.frames[-1].offset
    assert result.read["master"] == result.read["slave"]
    assert (result.read["master"]["messages"], result.read["master"]["bytes"]) == (800, log.end)
    assert [text.split()[0] for text in result.epochs] == ["1.1", "2.1"]
    hours = spark.read.parquet(str(tmp_path / "out/g1/hours")).collect()
    assert sum(row["messages"] for row in hours if row["copy"] == "slave") == 800
    assert len(hours) > len(result.hours) == 5 and any("first 5 counts" in note for note in result.notes)
    assert "Every byte of [0, " in as_markdown([result], 1.0)


def test_audits_at_once_share_a_session(spark: SparkSession) -> None:
    """Settings of one audit's action reach neither the other audit nor the caller's session."""
    before = spark.conf.getAll
    both_at_once = [OnSpark(spark)._task_rows(range(tasks)) for tasks in (3, 5)]
    assert [rows.rdd.getNumPartitions() for rows in both_at_once] == [3, 5]
    assert spark.conf.getAll == before


def test_tables_keep_the_rows_of_each_run(spark: SparkSession, tmp_path: Path) -> None:
    """Rows of version 0.2, which had no runs, count as an earlier one; a repeated run replaces its own."""
    out, log = tmp_path / "out", write(tmp_path / "master")
    write(tmp_path / "slave")
    spark.range(1).selectExpr("'lost' AS what").coalesce(1).write.parquet(str(out / "g1/findings"))
    flip(tmp_path / "slave", log.frames[50].end - 30)
    for second in (0, 1, 1):
        audit(spark, tmp_path, parquet=out, at_ms=1_800_000_000_000 + 1000 * second)
    runs = ["2027-01-15T080000Z", "2027-01-15T080001Z"]
    hours = spark.read.parquet(str(out / "g1/hours")).where("copy = 'slave'").groupBy("run").sum("messages").collect()
    assert sorted(hours) == [(run, 800) for run in runs]
    found = spark.read.parquet(str(out / "g1/findings")).selectExpr("run", "cast(day AS string)", "what").collect()
    assert sorted(found, key=str) == [*((run, "2027-01-15", "damaged") for run in runs), ("earlier", None, "lost")]


def test_full_disk_of_the_tables_hides_no_finding(spark: SparkSession, tmp_path: Path) -> None:
    """The reason is the disk's own."""
    log = write(tmp_path / "master")
    write(tmp_path / "slave")
    flip(tmp_path / "slave", log.frames[50].end - 30)
    with small_disk(tmp_path / "out", mib=1):
        fill(tmp_path / "out")
        result = audit(spark, tmp_path, parquet=tmp_path / "out")
    assert result.unreadable == "tables of --parquet cannot be written: java.io.IOException: No space left on device"
    assert named(result) == {("damaged", "slave", log.frames[50].offset)}


def three_copies(folder: Path) -> LogWriter:
    for copy in ("master", "slave", "slave2"):
        slave = write(folder / copy, rounds=24 if copy == "slave2" else 40)
    flip(folder / "slave2", slave.frames[40].end - 30)
    return slave


def flipped_bit(folder: Path) -> Frame:
    _, slave = both(folder)
    frame = next(frame for frame in slave.frames[50:] if frame.subject == A and frame.count)
    flip(folder / "slave", frame.end - 200)
    return frame


def another_epoch(folder: Path) -> Frame:
    write(folder / "master")
    slave = write(folder / "slave", plant=_other_epoch)
    return next(frame for frame in slave.frames if frame.epoch == Epoch(1, 2))


def other_tail(folder: Path) -> None:
    _, slave = both(folder, rounds=5)
    last = slave.frames[-1]
    change(folder / "slave", last.offset, bytes(last.end - last.offset))


DIFFERENT: tuple[Callable[[Path], Any], ...] = (
    three_copies,
    flipped_bit,
    another_epoch,
    other_tail,
)


class Case(NamedTuple):
    """Folder with differing logs, the planted differences, and the result."""

    folder: Path
    planted: Any
    result: Result


Cases = dict[Callable[[Path], Any], Case]


@pytest.fixture(scope="module")
def cases(executor: SparkSession | None, tmp_path_factory: pytest.TempPathFactory) -> Cases:
    """Audit all cases and two brokers in one run."""
    root = tmp_path_factory.mktemp("different")
    folders = {plant: root / plant.__name__ for plant in (*DIFFERENT, of_brokers)}
    planted = {plant: plant(folder) for plant, folder in folders.items()}
    groups = []
    with ExitStack() as stack:
        for plant, folder in folders.items():
            places = {copy.name: place_options(str(copy), "") for copy in sorted(folder.iterdir())}
            if plant == of_brokers:
                brokers = {copy: Broker(log, folder / copy) for copy, log in planted[plant].items()}
                addresses = {copy: stack.enter_context(serving(broker))[0] for copy, broker in brokers.items()}
                places = {copy: place_options(address, "secret") for copy, address in addresses.items()}
            groups.append(Group("g1" if plant == of_brokers else plant.__name__, places))
        results = audit_groups(executor, groups, Options(piece_bytes=PIECE_BYTES))
    return {plant: Case(folders[plant], planted[plant], result) for plant, result in zip(folders, results)}


def test_three_copies_are_compared_with_the_master(cases: Cases) -> None:
    """A late copy lacks frames that two others acknowledged: a note. Its own frames must be right."""
    _, slave, result = cases[three_copies]
    assert named(result) == {("damaged", "slave2", slave.frames[40].offset)}
    assert any(note.startswith(f"the slave2 ends at {slave.end}, ") for note in result.notes)


def test_flipped_bit_has_its_byte_and_message(cases: Cases) -> None:
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


def test_tail_past_the_watermark_is_a_note(cases: Cases) -> None:
    result = cases[other_tail].result
    assert (result.status, result.findings) == (0, [])
    assert any("1 frames past the high watermark" in note for note in result.notes)


def of_brokers(folder: Path) -> dict[str, LogWriter]:
    logs = dict(zip(("master", "slave"), both(folder)))
    flip(folder / "slave", logs["slave"].frames[40].offset + 40)
    return logs


def test_running_brokers_are_audited_over_grpc(cases: Cases) -> None:
    _, logs, result = cases[of_brokers]
    assert (result.watermark, result.read["master"]["messages"]) == (logs["master"].end, 800)
    assert named(result) == {("damaged", "slave", logs["slave"].frames[40].offset)}


def _no_batch(log: LogWriter) -> None:
    log.frame(FrameKind.MESSAGES, A, b"\xff" * 800, count=1000, first=200)
    log.sequences[A] = 1200


def test_invalid_batch_is_a_finding_with_a_journal(executor: SparkSession | None, tmp_path: Path) -> None:
    """Its CRC is right: a faulty master wrote it."""
    log, _ = both(tmp_path, plant=_no_batch)
    broken = next(frame for frame in log.frames if frame.count == 1000)
    journal = tmp_path / "acknowledged.ndjson"
    journal.write_text(json.dumps({"subject": A, "group": "g1", "sequence": 7, "id": f"{A}-7"}) + "\n")
    result = audit(executor, tmp_path, journal=journal)
    assert (result.status, result.unreadable) == (1, None)
    assert named(result) == {("damaged", "both", broken.offset)}


def test_messages_wrong_on_both_copies_are_found(executor: SparkSession | None, tmp_path: Path) -> None:
    """Both logs are equal and whole: only the journal shows it. Its last line is torn by a crash."""
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
    result = audit(executor, tmp_path, journal=journal)
    assert (result.unreadable, result.found) == (None, {"lost": 2, "altered": 1})
    assert {(row["what"], row["copy"], row["subject"], row["id"]) for row in result.findings} == {
        ("lost", "both", A, "never stored"),
        ("lost", "both", "never.seen", "x"),
        ("altered", "both", A, f"{A}-17"),
    }


def test_journal_older_than_the_log_is_not_counted(executor: SparkSession | None, tmp_path: Path) -> None:
    logs, snapshots = both(tmp_path, plant=give_up_the_first_segment), dict[Path, bytes]()
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
    result = audit(executor, tmp_path, journal=journal)
    assert (result.status, result.found, result.journal) == (0, {}, 3)
    assert any(note.startswith("2 of the journal's messages") for note in result.notes)
    # A snapshot lists the subjects before the begin of the log.
    for path, content in snapshots.items():
        path.write_bytes(content)
    result = audit(executor, tmp_path, journal=journal)
    assert [(row["what"], row["copy"], row["subject"]) for row in result.findings] == [("lost", "both", "older")]
    assert any(note.startswith("1 of the journal's messages") for note in result.notes)


def test_query_counts_messages_by_property(spark: SparkSession, tmp_path: Path) -> None:
    write(tmp_path)
    sql = f"""SELECT properties['carrier'] AS carrier, count(*) AS n FROM messages WHERE subject = '{A}'
              GROUP BY 1 ORDER BY 1"""
    rows = query.run_query(spark, [place_options(str(tmp_path), "")], sql)
    assert rows == [{"carrier": "AA", "n": 134}, {"carrier": "DL", "n": 133}, {"carrier": "UA", "n": 133}]
    rows = query.run_query(
        spark,
        [place_options(str(tmp_path), "")],
        "SELECT id, tags, year(created_at) AS year FROM messages WHERE sequence = 7 ORDER BY 1",
    )
    assert rows == [{"id": f"{subject}-7", "tags": ["odd"], "year": 2023} for subject in (A, B)]
    rows = query.run_query(spark, [place_options(str(tmp_path), "")], "SELECT count(*) AS n FROM messages", subject=B)
    assert rows == [{"n": 400}]


@pytest.mark.parametrize("pushdown", ["true", "false"])
def test_conditions_of_one_query_reach_no_other(spark: SparkSession, tmp_path: Path, pushdown: str) -> None:
    """A fixed bug: Spark keeps a pushed filter in the relation, so later counts were of one subject."""
    write(tmp_path)
    spark.conf.set("spark.sql.python.filterPushdown.enabled", pushdown)
    try:
        log = spark.read.format("qmq").load(str(tmp_path))
        one, all_of_them = log.where(f"subject = '{A}' AND stored_at > '2020-01-01'"), log.count()
        assert (one.count(), log.count(), one.union(log).count()) == (400, all_of_them, 400 + all_of_them)
        assert one.join(log, ["subject", "sequence"]).count() == 400
        log.createOrReplaceTempView("log")
        counts = [
            f"(SELECT count(*) FROM log {where})" for where in (f"WHERE subject = '{A}'", "", "WHERE sequence = 3")
        ]
        assert tuple(spark.sql(f"SELECT {', '.join(counts)}").collect()[0]) == (400, all_of_them, 2)
        cached = one.cache()
        assert (cached.count(), log.count(), cached.where("sequence < 10").count()) == (400, all_of_them, 10)
        cached.unpersist()
    finally:
        spark.conf.unset("spark.sql.python.filterPushdown.enabled")


def test_journal_that_has_grown_is_read_again(executor: SparkSession | None, tmp_path: Path) -> None:
    """A fixed bug: a later audit of the session judged the journal's first lines only."""
    both(tmp_path)
    journal = tmp_path / "acknowledged.ndjson"
    lines = [json.dumps({"subject": A, "group": "g1", "sequence": s, "id": f"{A}-{s}"}) + "\n" for s in range(400)]
    journal.write_text("".join(lines[:10]))
    assert audit(executor, tmp_path, journal=journal).journal == 10
    lines.append(json.dumps({"subject": A, "group": "g1", "sequence": 5_000, "id": "planted"}) + "\n")
    journal.write_text("".join(lines))
    result = audit(executor, tmp_path, journal=journal)
    assert (result.journal, [row["id"] for row in result.findings]) == (401, ["planted"])
