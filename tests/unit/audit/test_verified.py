"""Core. Verified point of a log, and the bytes that may not count as read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from qmq.audit.copies import Description, place_options
from qmq.audit.findings import BOTH, FINDINGS, MASTER, PIECE, FindingKind
from qmq.audit.group import _new, freeze, look_back
from qmq.audit.history import History, ledger_entry, verified
from qmq.audit.report import as_markdown
from qmq.audit.results import Group, GroupAnswer, Result
from qmq.audit.verdict import check_against_history, check_all_was_read, explain_pieces, note_unlisted, take_differences
from qmq.ledger import PROVEN, Entry, Ledger, Piece, known_from
from tests.unit.audit.logs import LogWriter

NAMES = ("master", "slave", "slave2")
WATERMARK = 1000
BEFORE = Entry("r1", 1, "g1", PROVEN, verified=500, chain="00aa", frame=480, ends={"a": 3})


def result_of(*ends: int, min_copies: int = 2, begin: int = 0) -> Result:
    logs = {name: Description(0, end, WATERMARK, 0, (0,)) for name, end in zip(NAMES, ends)}
    result = Result("g1", dict.fromkeys(logs, ""), watermark=WATERMARK, min_copies=min_copies, begin=begin)
    result.logs = logs
    return result


def answer_of(result: Result, *pieces: tuple[int, int], apart: frozenset[int] = frozenset()) -> GroupAnswer:
    answer = GroupAnswer(tuple(result.logs))
    for begin, end in pieces:
        row = {
            "begin": begin,
            "bytes": end - begin,
            "digest": "0f",
            "frames": 1,
            "messages": 0,
            "apart": begin in apart,
        }
        answer.take("", PIECE, row | ({"end": end, "chain": end, "size": begin} if end > begin else {}))
    result.read = answer.read(result.begin, result.watermark)
    return answer


def row_of(what: FindingKind, copy: str, offset: int, end: int | None = None) -> dict[str, Any]:
    about = {"what": what.value, "copy": copy, "offset": offset, "end": end, "text": "", "frames": 1}
    return dict.fromkeys(FINDINGS) | about


def known(*pieces: Piece) -> History:
    entry = replace(BEFORE, pieces=list(pieces))
    return History(known_from([entry]), 500, list(pieces))


@pytest.mark.parametrize("min_copies, is_behind", [(2, True), (3, False)])
def test_copy_may_be_behind_enough_others(min_copies: int, is_behind: bool) -> None:
    result = result_of(WATERMARK, WATERMARK, 600, min_copies=min_copies)
    assert result.is_behind("slave2") is is_behind


def test_bytes_missing_on_a_late_copy_stay_unverified() -> None:
    """The next run reads it once that copy has caught up."""
    result = result_of(WATERMARK, WATERMARK, 600)
    answer = answer_of(result, (0, 600), (600, WATERMARK), apart=frozenset({600}))
    entry = verified(answer, result, History(known_from([]), 0), 10_000)
    assert entry is not None and (entry.verified, entry.chain, entry.frame) == (600, f"{600:016x}", 0)
    assert [(piece.begin, piece.end) for piece in entry.pieces] == [(0, 600)]
    assert "read on all copies, slave2 as far as it goes, to 600, and they are" in as_markdown([result], 1.0)


def test_verified_point_stays_if_a_copy_is_short() -> None:
    result = result_of(WATERMARK, WATERMARK, 300, begin=500)
    old = [Piece(0, 200, 200, "c0f"), Piece(200, 500, 300, "c0f")]
    result.again = old
    answer = answer_of(result, (0, 200), (200, 500), (500, WATERMARK), apart=frozenset({200, 500}))
    entry = verified(answer, result, known(*old), 10_000)
    assert entry is not None and entry.verified == 0
    assert [(piece.begin, piece.end) for piece in entry.pieces] == [(0, 200)]


def test_copies_damaged_differently_are_not_verified() -> None:
    result = result_of(WATERMARK, WATERMARK)
    answer = answer_of(result, (0, WATERMARK), apart=frozenset({0}))
    result.findings.append(row_of(FindingKind.DAMAGED, BOTH, 100, 200))
    assert verified(answer, result, History(known_from([]), 0), 10_000) is None


def test_verified_point_is_the_end_of_a_frame() -> None:
    result = result_of(WATERMARK, WATERMARK, begin=500)
    answer = answer_of(result, (500, 800))
    assert verified(answer, result, known(Piece(0, 500, 500, "c0f")), 10_000) is None


@pytest.mark.parametrize("place, is_unverified", [(-3, False), (3, True)], ids=["behind it", "before it"])
def test_bytes_deleted_unverified_are_noted(tmp_path: Path, place: int, is_unverified: bool) -> None:
    for copy in ("master", "slave"):
        log = LogWriter.begun(tmp_path / copy, segment_bytes=2_000)
        for _ in range(40):
            log.batch("order.changed", 3)
        log.close()
        first, *gone, start = [int(path.stem) for path in sorted(log.folder.glob("*.log"))][:4]
        for base in (first, *gone):
            (log.folder / f"{base:020d}.log").unlink()
    frame, ledger = log.frames[place], Ledger(tmp_path / "ledger")
    ledger.append(replace(BEFORE, verified=frame.end, chain=f"{frame.chain:016x}", frame=frame.offset))
    group = Group("g1", {copy: place_options(str(tmp_path / copy), "") for copy in ("master", "slave")})
    result = _new(group)
    freeze(group, result)
    look_back(group, result, ledger, 7)
    assert result.start == start and result.unverified == (start - frame.end if is_unverified else 0)
    noted = [note for note in result.notes if "which no run had verified" in note]
    assert noted == [f"retention has removed [{frame.end}, {start}), which no run had verified"][: int(is_unverified)]
    assert ledger_entry(result, None).unverified == result.unverified


def test_each_range_that_was_exchanged_is_a_finding() -> None:
    result = result_of(WATERMARK, WATERMARK, begin=500)
    as_now, other = "c000000000000000f", "c0000000000000001"
    old = [Piece(at, at + 100, 100, as_now if at == 200 else other) for at in range(0, 400, 100)]
    answer = answer_of(result, *((piece.begin, piece.end) for piece in old), (500, WATERMARK))
    result.again = old
    check_against_history(answer, result, known(*old))
    found = [(row["what"], row["offset"], row["end"]) for row in result.findings]
    assert found == [(FindingKind.REWRITTEN, 0, 200), (FindingKind.REWRITTEN, 300, 400)]


@pytest.mark.parametrize("digest", ["c000000000000000f", "1234"])
def test_old_piece_that_returns_nothing_is_rewritten(digest: str) -> None:
    old = Piece(0, 500, 500, digest)
    assert known(old).exchanged({}) == [old]
    assert known(old).exchanged({0: (500, 15)}) == []


def test_piece_cut_by_retention_is_no_exchange() -> None:
    entry = replace(BEFORE, pieces=[Piece(0, 500, 500, "c000000000000000f")])
    rest = Piece(200, 500, 300, "")
    history = History(known_from([entry]), 500, [rest], start=200)
    assert history.exchanged({200: (300, 7)}) == []
    assert history.read_again({200: (300, 7)}) == [Piece(200, 500, 300, "c0000000000000007")]
    assert history.exchanged({}) == [rest]


def test_unlisted_findings_are_counted_and_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qmq.audit.results.FINDINGS_MAX", 3)
    result = result_of(WATERMARK, WATERMARK)
    answer = answer_of(result, (0, WATERMARK))
    for number in range(5):
        result.add(FindingKind.TIME, copy=BOTH, offset=number)
        assert (verified(answer, result, History(known_from([]), 0), 10_000) is None) == (number >= 3)
    note_unlisted(result)
    assert (result.found, len(result.findings)) == ({FindingKind.TIME: 5}, 3)
    assert result.notes == ["5 findings are time; the first 3 of them are listed"]


def test_unread_bytes_are_a_finding_beside_duplicates() -> None:
    result = result_of(WATERMARK, WATERMARK)
    answer_of(result, (0, 600))
    result.add(FindingKind.ID_TWICE, copy=BOTH, offset=10)
    check_all_was_read(result)
    assert result.found == {FindingKind.ID_TWICE: 1, FindingKind.UNREAD: 2}
    damaged = result_of(WATERMARK, WATERMARK)
    answer_of(damaged, (0, 600))
    damaged.add(FindingKind.DAMAGED, copy=BOTH, offset=600)
    check_all_was_read(damaged)
    assert damaged.found == {FindingKind.DAMAGED: 1}


def test_shared_findings_explain_no_difference() -> None:
    result = result_of(WATERMARK, WATERMARK)
    result.findings.append(row_of(FindingKind.TIME, BOTH, 10, 20))
    explain_pieces([(0, 500)], result)
    assert result.found == {FindingKind.DIFFERENT: 1}
    result = result_of(WATERMARK, WATERMARK)
    result.findings.append(row_of(FindingKind.TIME, BOTH, 10, 20))
    take_differences([row_of(FindingKind.HISTORY, "slave", 500, 510)], result)
    assert result.found == {FindingKind.HISTORY: 1}
    result.findings, result.found = [row_of(FindingKind.DAMAGED, MASTER, 10, 20)], {}
    take_differences([row_of(FindingKind.HISTORY, "slave", 500, 510)], result)
    assert not result.found
