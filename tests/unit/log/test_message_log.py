"""Core. Appending, reading, cutting and seeding one copy of a message log."""

from __future__ import annotations

import json

import pytest

from tests.unit.log.logs import Copy


def report_of(copy: Copy, name: str) -> dict:
    name = name.replace(".bytes", ".json")
    return json.loads(copy.disk.read(name, 0, copy.disk.size(name)))


@pytest.mark.parametrize("which", range(1, 5))
def test_log_is_cut_at_the_border_of_a_segment(which):
    copy = Copy()
    copy.office()
    copy.fill(60)
    base, bases = copy.log.bases[which], copy.log.bases[:which]
    chain = copy.log.state.chain
    copy.log.cut(base, "conflict")
    assert (copy.log.end, copy.log.bases) == (base, bases)
    assert copy.log.chain != chain
    copy.messages("after the cut")
    copy.flush()
    assert copy.reopen().state.chain == copy.log.chain and copy.log.end > base
