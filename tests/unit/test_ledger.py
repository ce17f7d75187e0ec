"""Shell. The audit's ledger: durable lines, and the state after all lines."""

from __future__ import annotations

import fcntl
import random
from dataclasses import replace
from pathlib import Path

import pytest

from qmq.ledger import (
    PROVEN,
    Entry,
    Ledger,
    LedgerDamaged,
    Piece,
    all_status,
    encode_entry,
    gauges,
    known_from,
    pieces_due,
    write_gauges,
)

FIRST = Entry(
    "2026-11-21T01:00:00Z",
    1_000_000,
    "g1",
    PROVEN,
    start=0,
    begin=0,
    verified=700,
    chain="00ff",
    frame=650,
    ends={"a": 7, "b": 3},
    pieces=[Piece(0, 400, 400, "1"), Piece(400, 700, 300, "2")],
    read={"master": 700},
)
SECOND = replace(
    FIRST,
    run="2026-11-22T01:00:00Z",
    at_ms=2_000_000,
    verdict="findings",
    found={"damaged": 2},
    verified=0,
    pieces=[],
    ends={},
)


def test_entries_are_read_by_group(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger")
    assert (ledger.groups(), ledger.entries("g1")) == ([], [])
    for entry in (FIRST, SECOND, replace(FIRST, group="g2")):
        ledger.append(entry)
    assert ledger.groups() == ["g1", "g2"]
    assert ledger.entries("g1") == [FIRST, SECOND]


@pytest.mark.parametrize("kept", range(1, len(encode_entry(SECOND)), 40))
def test_torn_line_is_replaced(tmp_path: Path, kept: int) -> None:
    ledger = Ledger(tmp_path)
    ledger.append(FIRST)
    with (tmp_path / "g1.jsonl").open("ab") as file:
        file.write(encode_entry(SECOND)[:kept])
    assert ledger.entries("g1") == [FIRST]
    ledger.append(SECOND)
    assert ledger.entries("g1") == [FIRST, SECOND]


def test_line_of_a_concurrent_run_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger, other, path = Ledger(tmp_path), encode_entry(replace(SECOND, run="other")), tmp_path / "g1.jsonl"
    ledger.append(FIRST)
    with path.open("ab") as file:
        file.write(other[:100])

    def other_ends(_: object, operation: int) -> None:
        assert operation == fcntl.LOCK_EX
        with path.open("ab") as file:
            file.write(other[100:])

    monkeypatch.setattr(fcntl, "flock", other_ends)
    ledger.append(SECOND)
    assert [entry.run for entry in ledger.entries("g1")] == [FIRST.run, "other", SECOND.run]


def test_changed_line_is_refused(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    for entry in (FIRST, SECOND):
        ledger.append(entry)
    path = tmp_path / "g1.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"verified": 700', b'"verified": 900'))
    with pytest.raises(LedgerDamaged, match="line 1"):
        ledger.entries("g1")


def test_run_with_findings_moves_no_anchor(tmp_path: Path) -> None:
    known = known_from([FIRST, SECOND])
    assert known.anchor == FIRST
    assert known.runs == 2 and len(known.pieces) == 2


def test_longest_unread_pieces_come_first() -> None:
    entries = [replace(FIRST, pieces=[Piece(at, at + 10, 10, "x") for at in range(0, 700, 10)])]
    seen: list[int] = []
    for _ in range(7):
        chosen = pieces_due(known_from(entries), 0, 7)
        assert sum(piece.bytes for piece in chosen) == 100
        seen += [piece.begin for piece in chosen]
        entries.append(replace(FIRST, pieces=chosen))
    assert sorted(seen) == list(range(0, 700, 10)), "each once in seven runs"
    assert all(piece.begin >= 650 for piece in pieces_due(known_from(entries), 650, 7))


def test_rest_of_a_shortened_piece_is_due() -> None:
    entries = [replace(FIRST, pieces=[Piece(0, 100, 100, "x"), Piece(100, 200, 100, "y"), Piece(200, 300, 100, "z")])]
    rest = Piece(130, 200, 70, "")
    assert pieces_due(known_from(entries), 130, 1) == [rest, Piece(200, 300, 100, "z")]
    entries.append(replace(FIRST, pieces=[rest._replace(digest="r")]))
    assert pieces_due(known_from(entries), 130, 1) == [rest._replace(digest="r"), Piece(200, 300, 100, "z")]
    assert pieces_due(known_from(entries), 130, 7) == [Piece(200, 300, 100, "z")], "it was read last"
    assert pieces_due(known_from(entries), 150, 1)[0] == Piece(150, 200, 50, "")


def test_at_least_one_piece_is_due() -> None:
    assert pieces_due(known_from([FIRST]), 0, 7) == [Piece(0, 400, 400, "1")]


def test_status_and_gauges_of_the_last_runs(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    for entry in (FIRST, SECOND):
        ledger.append(entry)
    (status,) = all_status(ledger, now_ms=3_000_000)
    assert (status["verified"], status["ageS"], status["verdict"]) == (700, 2000, "findings")
    write_gauges(tmp_path / "audit.prom", ledger, now_ms=3_000_000)
    lines = (tmp_path / "audit.prom").read_text().splitlines()
    assert 'qmq_audit_verified_offset{broker_group="g1"} 700' in lines
    assert 'qmq_audit_age_seconds{broker_group="g1"} 2000' in lines
    assert 'qmq_audit_findings{broker_group="g1",kind="damaged"} 2' in lines
    assert 'qmq_audit_verdict{broker_group="g1",verdict="findings"} 1' in lines
    assert 'qmq_audit_unverified_bytes{broker_group="g1"} 0' in lines
    assert [path.name for path in tmp_path.glob("*audit.prom*")] == ["audit.prom"]


def test_gauge_of_unverified_bytes(tmp_path: Path) -> None:
    ledger, unverified = Ledger(tmp_path), []
    for entry in (replace(FIRST, unverified=4096), SECOND):
        ledger.append(entry)
        text = gauges(all_status(ledger, now_ms=3_000_000))
        unverified += [line.split()[1] for line in text.splitlines() if line.startswith("qmq_audit_unverified_bytes{")]
    assert unverified == ["4096", "0"]


def test_unverified_group_has_no_age() -> None:
    text = gauges([dict(all_status_of(SECOND))])
    assert "qmq_audit_age_seconds{" not in text and 'qmq_audit_verified_offset{broker_group="g1"} 0' in text


def all_status_of(entry: Entry) -> dict[str, object]:
    from qmq.ledger import status_of

    return status_of([entry], 3_000_000)


@pytest.mark.parametrize("count", [1, 2, 99, 200, 1000])
def test_newest_entries_are_the_last_lines(tmp_path, count):
    """Lines of any length, the last one torn."""
    ledger, dice = Ledger(tmp_path), random.Random(count)
    with (tmp_path / "g.jsonl").open("ab", buffering=0) as file:
        for number in range(200):
            why = "x" * dice.choice([0, 100, 40_000 * (number % 50 == 0)])
            file.write(encode_entry(Entry(f"run {number}", number, "g", PROVEN, why=why)))
        assert ledger.newest("g", count) == ledger.entries("g")[-count:]
        file.write(b'{"crc": 1, "run')
        assert ledger.newest("g", count) == ledger.entries("g")[-count:]
        file.write(b"\n")
        with pytest.raises(LedgerDamaged, match="of the last"):
            ledger.newest("g", count)
