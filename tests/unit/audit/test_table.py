"""Shell. Logs as tables, without Spark: selected rows are read, and other segments are not."""

from __future__ import annotations

import argparse
import json
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxBytes

from qmq.audit.copies import CannotRead
from qmq.audit.data_source import TableReader, TableStream
from qmq.audit.jobs import consistency, count, find, query, trail
from qmq.audit.jobs.query import columns_in
from qmq.audit.selection import WrongOption
from qmq.audit.tables import SCHEMAS
from qmq.errors import CorruptFrame
from qmq.log.frame import FrameKind, find_frame
from qmq.log.progress_frame import DEFERRED, EXPIRED, NOT_BEGUN, OVERFLOWED, PASSED, Departure
from tests.unit.audit.beside import bases_of
from tests.unit.audit.logs import BEGIN_MS, HOUR_MS, LogWriter

A, B = "order.changed", "user.created"
PULL = 1 << 32


def write(data: Path) -> LogWriter:
    """Write four segments, an hour and 100 messages each; A is in the first and third, B in the others."""
    log = LogWriter.begun(data, segment_bytes=13_000)
    for segment in range(4):
        log.timestamp_ms = BEGIN_MS + segment * HOUR_MS
        for _ in range(10):
            log.batch((A, B)[segment % 2], 10)
        assert len(bases_of(data)) == segment + 1
    log.close()
    return log


def ruin(data: Path, number: int) -> None:
    """Make a segment unreadable after its first frame."""
    base = bases_of(data)[number]
    path = data / "log" / f"{base:020d}.log"
    raw = bytearray(path.read_bytes())
    second = find_frame(bytes(raw), base, 8)
    raw[second:] = b"\xff" * (len(raw) - (second or 0))
    path.write_bytes(raw)


def rows(data: Path, *, columns: str = "", **options: object) -> list[dict[str, Any]]:
    """Read as Spark does."""
    given = {"path": str(data), "damage": "fail"} | {name: str(value) for name, value in options.items()}
    names = columns.split(",") if columns else SCHEMAS[given.get("rows", "messages")].names
    reader = TableReader(given, names)
    return [row for part in reader.partitions() for batch in reader.read(part) for row in batch.to_pylist()]


@pytest.mark.parametrize(
    ("options", "ruined", "sequences"),
    [
        pytest.param({"subject": A}, (1, 3), range(200), id="subject"),
        pytest.param({"subject": f"other, {A}"}, (1, 3), range(200), id="subjects"),
        pytest.param({"subject": f"a,b\n{A}\n"}, (1, 3), range(200), id="subjects with a comma"),
        pytest.param({"subject": A, "sequences": "0-95"}, (1, 2, 3), range(100), id="first sequences"),
        pytest.param({"subject": A, "sequences": "105-999"}, (0, 1, 3), range(100, 200), id="later sequences"),
        pytest.param({"subject": A, "sequences": "104-105"}, (0, 1, 3), range(100, 110), id="one sequence"),
        pytest.param({"until": "2023-11-14T22:30:00Z"}, (1, 2, 3), range(100), id="until"),
        pytest.param({"since": BEGIN_MS + 3 * HOUR_MS}, (0, 1), range(100, 200), id="since"),
        pytest.param({"end": 13_000}, (1, 2, 3), range(100), id="offset"),
    ],
)
def test_unselected_segments_are_not_read(
    tmp_path: Path, options: dict[str, object], ruined: tuple[int, ...], sequences: range
) -> None:
    """They are unreadable: the read fails without the options."""
    write(tmp_path)
    for number in ruined:
        ruin(tmp_path, number)
    found = rows(tmp_path, **options)
    assert {row["sequence"] for row in found} == set(sequences) and len(found) == len(sequences)
    with pytest.raises(CorruptFrame):
        rows(tmp_path)


def test_bad_index_loses_no_message(tmp_path: Path) -> None:
    write(tmp_path)
    first_index, other, _ = sorted((tmp_path / "log").glob("*.idx"))
    first_index.unlink()
    other.write_bytes(other.read_bytes()[:-9] + b"123456789")
    assert len(rows(tmp_path, subject=A)) == len(rows(tmp_path, subject=B)) == 200


def test_only_frames_that_may_match_are_decoded(tmp_path: Path) -> None:
    write(tmp_path)
    found = rows(tmp_path, contains=f"{B}-17")
    assert [row["id"] for row in found] == [f"{B}-{number}" for number in range(10, 20)], "the query takes one of them"
    assert rows(tmp_path, contains="carrier\nnobody's") == []
    assert len(rows(tmp_path, contains="carrier\nAA\nodd")) == 400


def test_damaged_range_is_a_row_unless_strict(tmp_path: Path) -> None:
    log = write(tmp_path)
    ruin(tmp_path, 1)
    found = rows(tmp_path, damage="rows")
    damaged = [row for row in found if row["problem"]]
    assert [(row["offset"], row["sequence"]) for row in damaged] == [(log.frames[12].offset, None)]
    assert len(found) == 311, "one frame of ten, and three other segments"


def test_progress_has_a_row_per_event(tmp_path: Path) -> None:
    log = LogWriter.begun(tmp_path)
    log.batch(A, 30)
    log.progress(FrameKind.POSITION, A, "g", "", (5, 0, 0))
    log.progress(FrameKind.PULL, A, "g", "c")
    log.progress(
        FrameKind.PULL,
        A,
        "g",
        "c",
        (PULL, 5, 10),
        (PASSED, 15, 2),
        (DEFERRED, 17, 1),
        (EXPIRED, 18, 1),
        (OVERFLOWED, 19, 1),
    )
    log.progress(FrameKind.ACK, A, "g", "c", (PULL, PULL + 6, 0), (PULL + 9, PULL + 10, EXPIRED))
    log.progress(FrameKind.NACK, A, "g", "c", (PULL + 6, PULL + 8, BEGIN_MS), (PULL + 8, PULL + 9, NOT_BEGUN))
    log.progress(FrameKind.POSITION, A, "g", "c", (Departure.NONE_BEGUN, 0, 0))
    log.progress(FrameKind.POSITION, A, "g", "d", (Departure.VANISHED, 0, 0))
    log.progress(FrameKind.POSITION, A, "g", "")
    log.close()
    found = rows(tmp_path, rows="progress", columns="event,consumer,pull,sequence,messages,due_at")
    assert [tuple(row.values()) for row in found] == [
        ("position", None, None, 5, None, None),
        ("joined", "c", None, None, None, None),
        ("pull", "c", PULL, 5, 10, None),
        ("passed", "c", None, 15, 2, None),
        ("deferred", "c", None, 17, 1, None),
        ("expired", "c", None, 18, 1, None),
        ("overflowed", "c", None, 19, 1, None),
        ("ack", "c", PULL, None, 6, None),
        ("expired", "c", PULL + 9, None, 1, None),
        ("nack", "c", PULL + 6, None, 2, datetime.fromtimestamp(BEGIN_MS / 1000, UTC)),
        ("nack", "c", PULL + 8, None, 1, None),
        ("left", "c", None, None, None, None),
        ("vanished", "d", None, None, None, None),
        ("forgotten", None, None, None, None, None),
    ]


def test_stream_stops_at_the_high_watermark(tmp_path: Path) -> None:
    log = LogWriter.begun(tmp_path)
    stream = TableStream({"path": str(tmp_path)}, ["sequence"])
    seen, at = [], None
    for _ in range(6):
        log.batch(A, 10)
        log.flush()
        start = at or stream.initialOffset()
        assert at is not None or start == {"": 0}
        at = stream.latestOffset(start)
        assert at[""] == log.frames[-1].offset, "the last frame is not yet on both copies, as far as the log says"
        for part in stream.partitions(start, at):
            seen += [row["sequence"] for batch in stream.read(part) for row in batch.to_pylist()]
        assert stream.partitions(at, at) == []
        assert stream.latestOffset({"": 1 << 40}) == {"": 1 << 40}, "a copy that knows less takes nothing back"
    log.close()
    assert seen == list(range(50))


def offsets_of(stream: TableStream, start: dict[str, int]) -> list[int]:
    """Return the end of each batch until there is none."""
    ends, limit = [], stream.getDefaultReadLimit()
    while (end := stream.latestOffset(start, limit)) != start:
        start = end
        ends.append(end[""])
    return ends


def test_stream_batches_end_at_frames_within_the_limit(tmp_path: Path) -> None:
    """A frame larger than the limit is a batch of its own."""
    log = write(tmp_path)
    at, end = {frame.offset for frame in log.frames}, log.frames[-1].offset
    stream = TableStream({"path": str(tmp_path), "maxBytesPerTrigger": "5000"}, ["sequence"])
    assert stream.getDefaultReadLimit() == ReadMaxBytes(5000)
    ends = offsets_of(stream, stream.initialOffset())
    assert set(ends) <= at and ends[-1] == end and len(ends) == 10
    assert max(after - before for before, after in pairwise([0, *ends])) < 5000 + 1300, (
        "the frame under way is read whole"
    )
    small = TableStream({"path": str(tmp_path), "maxbytespertrigger": "1"}, ["sequence"])
    assert offsets_of(small, small.initialOffset()) == sorted(at - {0})
    everything = TableStream({"path": str(tmp_path)}, ["sequence"])
    assert everything.getDefaultReadLimit() == ReadAllAvailable()
    assert offsets_of(everything, everything.initialOffset()) == [end]


def test_available_now_ends_at_its_first_offsets(tmp_path: Path) -> None:
    log = LogWriter.begun(tmp_path)
    log.batch(A, 10)
    log.batch(A, 10)
    log.flush()
    stream = TableStream({"path": str(tmp_path)}, ["sequence"])
    stream.prepareForTriggerAvailableNow()
    log.batch(A, 10)
    log.close()
    assert stream.latestOffset(stream.initialOffset())[""] == log.frames[2].offset


def test_stream_starts_at_the_named_offsets(tmp_path: Path) -> None:
    log = write(tmp_path)

    def first_of(starting: object) -> int:
        return TableStream({"path": str(tmp_path), "startingOffsets": str(starting)}, ["sequence"]).initialOffset()[""]

    third = next(frame for frame in log.frames if frame.timestamp_ms >= BEGIN_MS + 2 * HOUR_MS)
    assert first_of("earliest") == first_of(1) == 0
    assert first_of("latest") == first_of(BEGIN_MS + 9 * HOUR_MS) == log.frames[-1].offset
    assert first_of(BEGIN_MS + HOUR_MS + 1) == first_of("2023-11-15T00:00:00Z") == third.offset


def test_stream_overtaken_by_retention_fails(tmp_path: Path) -> None:
    write(tmp_path)
    first, second = bases_of(tmp_path)[:2]
    stream = TableStream({"path": str(tmp_path)}, ["sequence"])
    start, end = stream.initialOffset(), stream.latestOffset()
    (tmp_path / "log" / f"{first:020d}.log").unlink()
    with pytest.raises(
        CannotRead, match=rf"retention has removed \[0, {second}\) of broker group '' .* new checkpoint"
    ):
        stream.partitions(start, end)
    with pytest.raises(CannotRead, match="another log"):
        stream.partitions(end, {"": 1 << 40})


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"since": "yesterday"}, "not a time"),
        ({"until": "12:00"}, "not a time"),
        ({"damage": "maybe"}, "not 'rows' or 'fail'"),
        ({"sequences": "7"}, "not a half-open range"),
        ({"ranges": "0-9,8"}, "not a half-open range"),
        ({"begin": "first"}, "not a number"),
        ({"piece_bytes": "64m"}, "not a number"),
        ({"subjects": A}, "unknown option 'subjects'; options are begin, .* subject,"),
        ({"maxBytesPerTrigger": "1"}, "unknown option"),
        ({"broker": "127.0.0.1:1"}, "not broker and path"),
    ],
)
def test_invalid_options_are_refused(tmp_path: Path, options: dict[str, str], text: str) -> None:
    write(tmp_path)
    with pytest.raises(WrongOption, match=text):
        TableReader({"path": str(tmp_path)} | options, ["id"]).partitions()


@pytest.mark.parametrize(
    "options", [{"startingOffsets": "first"}, {"maxBytesPerTrigger": "1m"}, {"begin": "0"}, {"maxFilesPerTrigger": "1"}]
)
def test_invalid_stream_options_are_refused(tmp_path: Path, options: dict[str, str]) -> None:
    with pytest.raises(WrongOption):
        TableStream({"path": str(tmp_path)} | options, ["id"])


class _Spark:
    def stop(self) -> None: ...


def test_printed_rows_are_harmless(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(query, "places_of", lambda *_: [])
    monkeypatch.setattr(query, "start_spark", lambda *_: _Spark())
    rows = [{"id": "\x1b[2J\u202e", "body": bytearray(b"\xff\0"), "tags": None}]
    options = ["--source=x", "--token=t"]
    for json_option in ([], ["--json"]):
        parser = argparse.ArgumentParser()
        query.add_source_options(parser)
        assert query.ask("q", parser.parse_args([*options, *json_option]), lambda *_: rows, query.lines) == 0
    text, found = capsys.readouterr().out.splitlines()
    assert text == "\\u001b[2J\\u202e\t/wA=\t" and json.loads(found)[0]["body"] == "/wA="
    assert found.isascii()
    message = {"timestamp_ms": 1, "broker_group": "g1", "offset": 5, "subject": "s", "sequence": 7, "id": "m"}
    shown = [message | {"tags": ["a"], "properties": {"qmq_contentType": "image/png"}}]
    assert list(find.show(shown)) == ["1  g1@5  s 7  m  a image/png", "1 messages"]


@pytest.mark.parametrize("job", [consistency, count, find, query, trail])
def test_help_begins_with_the_task_of_the_job(job: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        job.main(["--help"])
    _, purpose, *_ = capsys.readouterr().out.split("\n\n")
    assert ended.value.code == 0 and not purpose.startswith(("Shell", "options"))


@pytest.mark.parametrize(
    "sql, columns",
    [
        ("SELECT count(*) FROM messages", "subject"),
        ("SELECT Properties['a'], count( * ) FROM messages WHERE id = 'x' GROUP BY 1", "id,properties"),
        ("SELECT m.sequence + 1 FROM messages m", "sequence"),
        ("SELECT * FROM messages", None),
        ("SELECT m.* FROM messages m", None),
        ("SELECT count(*) FROM messages NATURAL JOIN progress", None),
        ("DESCRIBE messages", None),
    ],
)
def test_query_decodes_only_the_named_columns(sql: str, columns: str | None) -> None:
    every = [name for name in SCHEMAS["messages"].names if name not in ("message", "problem")]
    assert columns_in(sql, "messages") == (columns or ",".join(every))
