"""Shell. Between pieces: an epoch that is older is named once, where it begins, however many pieces it goes on for."""

from __future__ import annotations

from pathlib import Path

from qmq.audit.extents import split_range
from qmq.audit.rules import OfGroup
from qmq.audit.said import FINDING
from qmq.types import Epoch
from tests.unit.audit.logs import LogWriter
from tests.unit.audit.test_messages import NOW_MS, facts_of


def test_older_epoch_is_named_once_over_all_pieces(tmp_path: Path) -> None:
    log = LogWriter(tmp_path)
    log.mastership(Epoch(2, 1))
    for turn in range(30):
        if turn == 10:
            log.epoch = Epoch(1, 9)
        log.batch("s", 4)
    log.close()
    group, found = OfGroup(NOW_MS, [0], 0), []
    for begin, end in split_range(0, log.end, 2048):
        found += group.take(begin, facts_of(tmp_path, begin, end))
    found += group.finish()
    named = [(one.row["what"], one.row["offset"]) for one in found if one.kind == FINDING]
    assert named == [("epoch", log.frames[11].offset)]
