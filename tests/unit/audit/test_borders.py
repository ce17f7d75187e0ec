"""Shell. Problems across pieces are reported once, at the same frame, for any borders."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, combinations, pairwise
from pathlib import Path

import pytest

from qmq.audit.findings import FINDING
from qmq.audit.rules import LogJudge
from qmq.audit.selection import split_range
from qmq.types import Epoch
from tests.unit.audit.logs import BEGIN_MS, LogWriter
from tests.unit.audit.test_messages import NOW_MS, facts_of


def test_older_epoch_is_named_once_over_all_pieces(tmp_path: Path) -> None:
    log = LogWriter.begun(tmp_path, epoch=Epoch(2, 1))
    for turn in range(30):
        if turn == 10:
            log.epoch = Epoch(1, 9)
        log.batch("s", 4)
    log.close()
    assert named(tmp_path, split_range(0, log.end, 2048)) == [("epoch", log.frames[11].offset)]


def named(data: Path, pieces: Iterable[tuple[int, int]]) -> list[tuple[str, int]]:
    group, found = LogJudge(NOW_MS, [0], 0), []
    for begin, end in pieces:
        found += group.take(begin, facts_of(data, begin, end))
    found += group.finish()
    return [(found_row.row["what"], found_row.row["offset"]) for found_row in found if found_row.kind == FINDING]


@pytest.mark.parametrize("apart_ms", [7_200_000, -7_200_000], ids=["ahead", "back"])
def test_wrong_time_is_found_across_any_borders(tmp_path: Path, apart_ms: int) -> None:
    log, frames, wrong = LogWriter(tmp_path), 8, 4
    for number in range(frames):
        log.timestamp_ms = BEGIN_MS + 1000 * number + (apart_ms if number == wrong else 0)
        if number:
            log.batch("s", 1)
        else:
            log.mastership(Epoch(2, 1))
    log.close()
    for begins in chain.from_iterable(combinations(range(1, frames), size) for size in range(frames)):
        borders = [0, *(log.frames[number].offset for number in begins), log.end]
        assert named(tmp_path, pairwise(borders)) == [("time", log.frames[wrong].offset)], begins


@pytest.mark.parametrize("moves_on", [False, True])
def test_still_watermark_is_named_once_for_any_borders(tmp_path: Path, moves_on: bool) -> None:
    log, still = LogWriter(tmp_path), range(3, 12)
    log.mastership(Epoch(2, 1))
    for number in range(14):
        log.timestamp_ms = BEGIN_MS + 60_000 * number
        log.watermark = log.frames[3].offset if number in still or (number > 3 and not moves_on) else None
        log.batch("s", 1)
    log.close()
    for begins in combinations(range(1, len(log.frames)), 3):
        borders = [0, *(log.frames[number].offset for number in begins), log.end]
        assert named(tmp_path, pairwise(borders)) == [("watermark", log.frames[3].offset)], begins
