"""Shell. Copies are compared byte by byte, in any parts of their answers."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from random import Random
from shutil import copytree

import pytest

from qmq.audit.copies import PathCopy
from qmq.audit.facts import ALL, LogRange, Reading
from tests.unit.audit.logs import LogWriter
from tests.unit.audit.test_walk import flip


class InOddParts(PathCopy):
    def window(self, offset: int, size: int) -> bytes:
        return super().window(offset, min(size, 1001))


@pytest.mark.parametrize("kind", [PathCopy, InOddParts])
def test_differing_copy_is_judged_by_itself(tmp_path: Path, kind: type[PathCopy]) -> None:
    log = LogWriter.begun(tmp_path / "master")
    for _ in range(20):
        log.batch("s", 2)
    log.close()
    reading = Reading({name: LogRange(0, log.end, 0) for name in ("master", "slave")})
    copytree(tmp_path / "master", tmp_path / "slave")

    def facts_by_copy() -> Mapping[str, object]:
        with closing(PathCopy(tmp_path / "master")) as master, closing(kind(tmp_path / "slave")) as slave:
            return reading.read({"master": master, "slave": slave}, 0, log.end)

    assert facts_by_copy().keys() == {ALL}
    rng = Random(5)
    for at in [0, 999, 1000, 1001, log.end - 1, *(rng.randrange(log.end) for _ in range(20))]:
        flip(tmp_path / "slave", at)
        assert facts_by_copy().keys() == {"master", "slave"}, at
        flip(tmp_path / "slave", at)
