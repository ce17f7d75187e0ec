"""Shell. Producer's journal: stored messages, byte for byte, in bounded files."""

from __future__ import annotations

import errno
import json
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

import qmq
from qmq.client.batch import Batch, Outcome, Result, refused
from qmq.client.journal import FILES, JournalWriter
from qmq.codec import encode_message, join_batch
from qmq.errors import BrokerReadOnly, InvalidRequest
from qmq.message import Message
from qmq.types import Durability
from tests.unit.client.world import producer_of


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for path in sorted(folder.glob("*.ndjson")) for line in path.read_text().splitlines()]


async def test_journal_matches_stored_messages(tmp_path: Path, metaserver, broker) -> None:
    """Labels of tags and order keys follow the batch and are not part of a message."""
    async with producer_of(metaserver, journal=qmq.Journal(tmp_path / "made", one_in=1)) as producer:
        sent = [Message("a", {"n": str(n)}, tags={"t"} if n % 2 else (), order_key=f"k{n}") for n in range(5)]
        receipts = [*await producer.send_many(sent), await producer.send(Message("b", {"n": "9"}))]
    found = lines(tmp_path / "made")
    assert [(one["subject"], one["group"], one["sequence"], one["id"]) for one in found] == [
        (receipt.subject, "g1", receipt.sequence, receipt.message_id) for receipt in receipts
    ]
    kept = [*broker.subjects["a"], *broker.subjects["b"]]
    assert [one["hash"] for one in found] == [sha256(message).hexdigest()[:16] for message in kept]


def test_unstored_messages_are_not_journaled(tmp_path: Path) -> None:
    writer = JournalWriter(qmq.Journal(tmp_path, one_in=1), "shop/1")
    writer.stored(batch_of(3), refused("g1", BrokerReadOnly("g1")))
    writer.stored(batch_of(3), result_of(40, (1, "too large")))
    writer.close()
    assert [(line["id"], line["sequence"]) for line in lines(tmp_path)] == [("m0", 40), ("m2", 41)]
    assert [path.name for path in tmp_path.iterdir()] == ["shop_1-000001.ndjson"]


def batch_of(count: int, size: int = 10) -> Batch:
    messages = [encode_message(Message("a", {"x": "x" * size}, id=f"m{number}"), 0) for number in range(count)]
    return Batch("a", [f"m{number}" for number in range(count)], [join_batch(messages)], 0, lambda batch: None)


def result_of(first: int, *refused: tuple[int, str]) -> Result:
    return Result(Outcome.STORED, "g1", first, Durability.FSYNC, None, dict(refused))


def test_folder_stays_bounded_and_keeps_the_newest(tmp_path: Path) -> None:
    """This includes files of another producer that has ended."""
    (tmp_path / "old-1.ndjson").write_bytes(bytes(900_000))
    journal = qmq.Journal(tmp_path, one_in=1, bytes_max=1 << 20)
    writer, batch = JournalWriter(journal, "shop"), batch_of(500)
    for number in range(60):
        writer.stored(batch, result_of(500 * number))
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= journal.bytes_max
    writer.close()
    found = [line["sequence"] for line in lines(tmp_path)]
    assert found == list(range(found[0], 30_000)) and len(found) > 30_000 // 2 // FILES


def test_removed_file_is_replaced(tmp_path: Path) -> None:
    writer = JournalWriter(qmq.Journal(tmp_path, one_in=1), "quiet")
    writer.stored(batch_of(1), result_of(0))
    (tmp_path / "quiet-000001.ndjson").unlink()
    writer.stored(batch_of(1), result_of(1))
    writer.close()
    assert [line["sequence"] for line in lines(tmp_path)] == [1]


def test_one_batch_in_so_many_is_kept(tmp_path: Path) -> None:
    writer, batch = JournalWriter(qmq.Journal(tmp_path, one_in=10), "shop"), batch_of(2)
    for number in range(2_000):
        writer.stored(batch, result_of(2 * number))
    writer.close()
    assert 200 < len(lines(tmp_path)) < 800, "400 are expected; whole batches"


def test_disk_error_ends_only_the_journal(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    writer = JournalWriter(qmq.Journal(tmp_path / "file", one_in=1), "shop")
    for _ in range(3):
        writer.stored(batch_of(1), result_of(0))
    assert [record.message.split(" folder=")[0] for record in caplog.records] == ["journal has ended"]


def test_journal_survives_a_missing_descriptor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = JournalWriter(qmq.Journal(tmp_path, one_in=1), "shop")
    with monkeypatch.context() as patch:
        patch.setattr("qmq.client.journal.FileIO", lambda *_: _no_descriptor())
        writer.stored(batch_of(1), result_of(0))
    writer.stored(batch_of(1), result_of(1))
    writer.close()
    assert [line["sequence"] for line in lines(tmp_path)] == [1]


def _no_descriptor() -> None:
    raise OSError(errno.EMFILE, "Too many open files")


@pytest.mark.parametrize("wrong", [{"one_in": 0}, {"bytes_max": 1000}], ids=["none", "too small"])
def test_bounds_that_make_no_sense_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(InvalidRequest):
        qmq.Journal("x", **wrong)  # type: ignore[arg-type]
