"""Shell. Between pieces: an epoch that is older is named once, where it begins, however many pieces it goes on for."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

from qmq.audit.borders import Borders
from qmq.audit.copies import PathCopy
from qmq.audit.rows import record_batches
from qmq.audit.source import split_range
from qmq.audit.walk import Walk
from qmq.types import Epoch
from tests.unit.audit.logs import LogWriter
from tests.unit.audit.test_messages import NOW_MS


def test_older_epoch_is_named_once_over_all_pieces(tmp_path: Path) -> None:
    log = LogWriter(tmp_path)
    log.mastership(Epoch(2, 1))
    for turn in range(30):
        if turn == 10:
            log.epoch = Epoch(1, 9)
        log.batch("s", 4)
    log.close()
    borders, found = Borders(NOW_MS, [0]), []
    with closing(PathCopy(tmp_path)) as copy:
        for begin, end in split_range(0, log.end, 2048):
            walk = Walk(copy, begin, end, is_start=begin == 0)
            rows = [row["fact"] for batch in record_batches(walk, begin) for row in batch.to_pylist() if row["fact"]]
            for fact in map(json.loads, rows):
                if fact["kind"] == "problem":
                    found.append((fact["what"], fact["offset"]))
                elif fact["kind"] == "piece":
                    said = borders.judge(fact | {"copy": "a", "piece": begin})
                    found += [(one["what"], one["offset"]) for one in said]
    assert found == [("epoch", log.frames[11].offset)]
