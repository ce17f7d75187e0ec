"""Core. From what a crash left to a log that can be trusted (design, section 2)."""

from __future__ import annotations

import pytest

from qmq.log.fold import decode_snapshot
from tests.unit.log.logs import Copy, fold_of


def a_log(frames: int = 60) -> Copy:
    copy = Copy(tail_bytes=0)
    copy.office()
    copy.fill(frames)
    assert len(copy.log.bases) > 4
    return copy


@pytest.mark.parametrize("bad", range(1, 5))
@pytest.mark.parametrize("missing", [False, True])
def test_damaged_or_missing_snapshots_are_made_again_from_an_earlier_one(bad, missing):
    copy = a_log()
    before, bases = copy.log.state, copy.log.bases
    wanted = {base: copy.disk.read(f"log/{base:020d}.snap", 0, 1 << 20) for base in bases}
    for base in bases[-bad:]:
        if missing:
            copy.disk.remove(f"log/{base:020d}.snap")
        else:
            copy.disk.flip(f"log/{base:020d}.snap", 77)
    assert copy.reopen().state == before and copy.log.damage is None
    made = {base: copy.disk.read(f"log/{base:020d}.snap", 0, 1 << 20) for base in bases}
    assert {b: decode_snapshot(data) for b, data in made.items()} == {b: decode_snapshot(d) for b, d in wanted.items()}
    assert decode_snapshot(made[bases[-1]]) == fold_of(copy.whole()[: bases[-1]])
