"""Shell. The journal's check, without Spark: the rule, its blocks, and the part of each copy that is read."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from qmq.audit import journal, promises
from qmq.audit.data_source import Part, walks
from qmq.audit.promises import Due, Promise
from qmq.codec import encode_message
from qmq.message import Message
from tests.unit.audit.logs import LogWriter
from tests.unit.audit.test_audited_range import A, both
from tests.unit.audit.without_spark import audit

SIZES = (1, 3, 5, 2)


def promise(*copies: str, min_copies: int) -> Promise:
    ends = {"master": {"a": 9}, "slave": {"a": 9}, "slave2": {"a": 5}}
    due = Due({name: {} for name in copies}, are_all=True)
    return Promise(copies, due, {name: ends[name] for name in copies}, min_copies)


def test_late_copy_loses_no_acknowledged_message() -> None:
    three = promise("master", "slave", "slave2", min_copies=2)
    assert three.lost_on("a", 4, ["slave2"]) == ["slave2"]
    assert three.lost_on("a", 7, ["slave2"]) == []
    assert three.lost_on("a", 8, ["slave", "slave2"]) == ["slave", "slave2"]
    assert promise("master", "slave", "slave2", min_copies=3).lost_on("a", 7, ["slave2"]) == ["slave2"]
    assert promise("master", "slave", min_copies=2).lost_on("a", 12, ["slave"]) == ["slave"]


def messages_of(first: int, count: int, text: str = "v") -> list[bytes]:
    return [encode_message(Message("s", {"n": text}, id=f"m{at}"), 1) for at in range(first, first + count)]


def write(data: Path, texts: dict[int, str]) -> LogWriter:
    """Write frames of SIZES messages; `texts`: first sequence of a frame -> its other content."""
    log = LogWriter.begun(data)
    for size in SIZES:
        first = log.sequences.get("s", 0)
        log.messages("s", messages_of(first, size, texts.get(first, "v")))
    for _ in range(2):  # these state that the frames before are on both copies
        log.batch("other", 1)
    log.close()
    return log


def lines(*, hashed: bool = True) -> list[dict[str, Any]]:
    found = []
    for at, message in enumerate(messages_of(0, sum(SIZES))):
        line = {"subject": "s", "group": "g1", "sequence": at, "id": f"m{at}"}
        found.append(line | ({"hash": sha256(message).hexdigest()[:16]} if hashed else {}))
    return found


def journal_of(folder: Path, lines: list[dict[str, Any]]) -> Path:
    path = folder / "journal.ndjson"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.parametrize("block", [1, 2, 4, 1 << 18])
@pytest.mark.parametrize("piece_bytes", [1, 50, 1 << 20])
def test_every_line_meets_its_message(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, block: int, piece_bytes: int
) -> None:
    """Frames reach over ends of blocks, lines over ends of a file's pieces."""
    monkeypatch.setattr(promises, "BLOCK_MESSAGES", block)
    monkeypatch.setattr(journal, "PIECE_BYTES", piece_bytes)
    for name in ("master", "slave"):
        write(tmp_path / name, {})
    wrong = [{"subject": "s", "group": "g1", "sequence": 4, "id": "m5"}, {"subject": "t", "sequence": 0, "id": "m0"}]
    result = audit(tmp_path, journal=journal_of(tmp_path, [*lines(), *wrong]))
    assert (result.unreadable, result.journal) == (None, sum(SIZES) + 2)
    assert [(row["what"], row["copy"], row["id"]) for row in result.findings] == [
        ("lost", "both", "m5"),
        ("lost", "both", "m0"),
    ]


@pytest.mark.parametrize("copy", ["master", "slave"])
@pytest.mark.parametrize("hashed", [True, False])
def test_differing_copies_are_each_compared_with_the_journal(tmp_path: Path, copy: str, hashed: bool) -> None:
    for name in ("master", "slave"):
        write(tmp_path / name, {4: "w"} if name == copy else {})
    result = audit(tmp_path, piece_bytes=256, journal=journal_of(tmp_path, lines(hashed=hashed)))
    altered = {(row["copy"], row["id"]) for row in result.findings if row["what"] == "altered"}
    assert altered == ({(copy, f"m{at}") for at in range(4, 9)} if hashed else set())


def test_equal_bytes_are_read_from_one_copy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    both(tmp_path)
    read: dict[str, list[int]] = {}

    def walked(part: Part) -> Any:
        read.setdefault(Path(part.place["path"]).name, []).extend(extent.begin for extent in part.extents)
        return walks(part)

    monkeypatch.setattr(journal, "walks", walked)
    line = {"subject": A, "group": "g1", "sequence": 7, "id": f"{A}-7"}
    result = audit(tmp_path, journal=journal_of(tmp_path, [line]))
    assert (result.status, result.journal) == (0, 1)
    assert min(read["slave"]) == 0 and min(read["master"]) == result.watermark


def test_further_lost_messages_are_counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(promises, "LISTED_MAX", 2)
    for name in ("master", "slave"):
        write(tmp_path / name, {})
    absent = [{"subject": "t", "sequence": at, "id": f"m{at}"} for at in range(5)]
    result = audit(tmp_path, journal=journal_of(tmp_path, absent))
    assert (result.found, len(result.findings)) == ({"lost": 5}, 2)
