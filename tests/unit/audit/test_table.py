"""Shell. Logs as tables, without Spark: selected rows are read, and other segments are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.datasource import EqualTo, Filter, GreaterThan, GreaterThanOrEqual, In, LessThan, LessThanOrEqual

from qmq.audit.copies import CannotRead
from qmq.audit.data_source import TableReader, TableStream
from qmq.audit.selection import WrongOption
from qmq.audit.tables import SCHEMAS
from qmq.errors import CorruptFrame
from qmq.log.frame import FrameKind, find_frame
from qmq.log.progress_frame import DEFERRED, EXPIRED, NOT_BEGUN, OVERFLOWED, PASSED, Departure
from qmq.types import Epoch
from tests.unit.audit.logs import BEGIN_MS, HOUR_MS, LogWriter

A, B = "order.changed", "user.created"
PULL = 1 << 32


def write(data: Path) -> LogWriter:
    """Write four segments, an hour and 100 messages each; A is in the first and third, B in the others."""
    log = LogWriter(data, segment_bytes=13_000)
    log.mastership(Epoch(1, 1))
    for segment in range(4):
        log.timestamp_ms = BEGIN_MS + segment * HOUR_MS
        for _ in range(10):
            log.batch((A, B)[segment % 2], 10)
        assert len(bases(data)) == segment + 1
    log.close()
    return log


def bases(data: Path) -> list[int]:
    return sorted(int(path.stem) for path in (data / "log").glob("*.log"))


def ruin(data: Path, number: int) -> None:
    """Make a segment unreadable after its first frame."""
    base = bases(data)[number]
    path = data / "log" / f"{base:020d}.log"
    raw = bytearray(path.read_bytes())
    second = find_frame(bytes(raw), base, 8)
    raw[second:] = b"\xff" * (len(raw) - (second or 0))
    path.write_bytes(raw)


def rows(data: Path, *filters: Filter, columns: str = "", **options: object) -> list[dict[str, Any]]:
    """Read as Spark does, without Spark's own filtering."""
    given = {"path": str(data), "damage": "fail"} | {name: str(value) for name, value in options.items()}
    names = columns.split(",") if columns else SCHEMAS[given.get("rows", "messages")].names
    reader = TableReader(given, names)
    assert list(reader.pushFilters(list(filters))) == list(filters), "Spark applies all of them again"
    return [row for part in reader.partitions() for batch in reader.read(part) for row in batch.to_pylist()]


SUBJECT = EqualTo(("subject",), A)


@pytest.mark.parametrize(
    ("filters", "options", "ruined", "sequences"),
    [
        pytest.param([SUBJECT], {}, (1, 3), range(200), id="subject"),
        pytest.param([In(("subject",), (A, "other"))], {}, (1, 3), range(200), id="subjects"),
        pytest.param([], {"subject": A}, (1, 3), range(200), id="option subject"),
        pytest.param([SUBJECT, LessThan(("sequence",), 95)], {}, (1, 2, 3), range(100), id="first sequences"),
        pytest.param([SUBJECT, GreaterThan(("sequence",), 104)], {}, (0, 1, 3), range(100, 200), id="later sequences"),
        pytest.param([SUBJECT, EqualTo(("sequence",), 104)], {}, (0, 1, 3), range(100, 110), id="one sequence"),
        pytest.param([LessThanOrEqual(("timestamp_ms",), BEGIN_MS)], {}, (1, 2, 3), range(100), id="time"),
        pytest.param(
            [GreaterThanOrEqual(("timestamp_ms",), BEGIN_MS + 3 * HOUR_MS)], {}, (0, 1), range(100, 200), id="since"
        ),
        pytest.param([], {"until": "2023-11-14T22:30:00Z"}, (1, 2, 3), range(100), id="option until"),
        pytest.param([], {"since": BEGIN_MS + 3 * HOUR_MS}, (0, 1), range(100, 200), id="option since"),
        pytest.param([LessThan(("offset",), 13_000)], {}, (1, 2, 3), range(100), id="offset"),
    ],
)
def test_unselected_segments_are_not_read(
    tmp_path: Path, filters: list[Filter], options: dict[str, object], ruined: tuple[int, ...], sequences: range
) -> None:
    """They are unreadable: the read fails without the filters."""
    write(tmp_path)
    for number in ruined:
        ruin(tmp_path, number)
    found = rows(tmp_path, *filters, **options)
    assert {row["sequence"] for row in found} == set(sequences) and len(found) == len(sequences)
    with pytest.raises(CorruptFrame):
        rows(tmp_path)


def test_bad_index_loses_no_message(tmp_path: Path) -> None:
    write(tmp_path)
    first_index, other, _ = sorted((tmp_path / "log").glob("*.idx"))
    first_index.unlink()
    other.write_bytes(other.read_bytes()[:-9] + b"123456789")
    assert len(rows(tmp_path, SUBJECT)) == 200
    assert len(rows(tmp_path, EqualTo(("subject",), B))) == 200


def test_only_frames_that_may_match_are_decoded(tmp_path: Path) -> None:
    write(tmp_path)
    found = rows(tmp_path, EqualTo(("id",), f"{B}-17"))
    assert [row["id"] for row in found] == [f"{B}-{number}" for number in range(10, 20)], "Spark takes one of them"
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
    log = LogWriter(tmp_path)
    log.mastership(Epoch(1, 1))
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
    found = rows(tmp_path, rows="progress", columns="event,consumer,pull,sequence,messages,due_ms")
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
        ("nack", "c", PULL + 6, None, 2, BEGIN_MS),
        ("nack", "c", PULL + 8, None, 1, None),
        ("left", "c", None, None, None, None),
        ("vanished", "d", None, None, None, None),
        ("forgotten", None, None, None, None, None),
    ]


def test_stream_stops_at_the_high_watermark(tmp_path: Path) -> None:
    log = LogWriter(tmp_path)
    log.mastership(Epoch(1, 1))
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


def test_stream_overtaken_by_retention_fails(tmp_path: Path) -> None:
    write(tmp_path)
    first = bases(tmp_path)[0]
    stream = TableStream({"path": str(tmp_path)}, ["sequence"])
    start, end = stream.initialOffset(), stream.latestOffset()
    (tmp_path / "log" / f"{first:020d}.log").unlink()
    with pytest.raises(CannotRead, match=r"\[0, \d+\) of broker group '' is to be read"):
        stream.partitions(start, end)


@pytest.mark.parametrize(
    "options", [{"since": "yesterday"}, {"until": "12:00"}, {"damage": "maybe"}], ids=["since", "until", "damage"]
)
def test_invalid_options_are_refused(tmp_path: Path, options: dict[str, str]) -> None:
    with pytest.raises(WrongOption):
        TableReader({"path": str(tmp_path)} | options, ["id"])
