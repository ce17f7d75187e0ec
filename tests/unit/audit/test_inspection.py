"""Core. A damaged place is read again: a broker may have repaired it since."""

from __future__ import annotations

from pathlib import Path

import pytest

from qmq.audit.copies import Description, place_options
from qmq.audit.findings import FindingKind
from qmq.audit.inspection import describe_findings
from qmq.audit.results import Result
from qmq.audit.verdict import count_repaired
from tests.unit.audit.logs import LogWriter
from tests.unit.audit.test_walk import flip


@pytest.mark.parametrize("is_repaired", [True, False])
def test_damage_repaired_by_reading_is_repaired(tmp_path: Path, is_repaired: bool) -> None:
    for name in ("master", "slave"):
        log = LogWriter.begun(tmp_path / name)
        frame = log.batch("order.changed", 3)
        log.close()
    if not is_repaired:
        flip(tmp_path / "slave", frame.end - 9)
    result = Result("g1", {}, logs={"slave": Description(0, log.end, 0, None, (0,))})
    result.add(FindingKind.DAMAGED, copy="slave", offset=frame.offset, end=frame.end, text="body CRC")
    result.add(FindingKind.DAMAGED, copy="slave", offset=log.end + 800, end=log.end + 808, text="no frame")
    places = {name: place_options(str(tmp_path / name), "") for name in ("master", "slave")}
    describe_findings("g1", places, result.logs, result.findings)
    count_repaired(result)
    assert result.found == (
        {FindingKind.REPAIRED: 1, FindingKind.DAMAGED: 1} if is_repaired else {FindingKind.DAMAGED: 2}
    )
    row = result.findings[0]
    assert (row["subject"], row["segment"], row["epoch"]) == ("order.changed", 0, "1.1")
    assert ("taken it from the other copy since" in row["text"]) == is_repaired
    assert ("the copies first differ at byte" in row["text"]) != is_repaired
