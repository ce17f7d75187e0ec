"""Core. Candidates by label equal those of a loop over all labels."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from qmq.broker.labels import TagRule

LABELS = st.lists(st.one_of(st.integers(0, (1 << 64) - 1), st.integers(0, 31).map(lambda bit: 1 << bit)), max_size=50)


@given(LABELS, st.integers(0, 50), st.integers(0, 50), st.integers(1, (1 << 32) - 1), st.booleans())
def test_candidates_have_any_or_all_bits(labels, begin, end, bits, is_all):
    end = min(end, len(labels))
    begin = min(begin, end)
    found = TagRule(frozenset([b"a"]), is_all, bits).candidates(array("Q", labels), begin, end)
    wanted = bits if is_all else 1
    assert [at for at in range(begin, end) if (labels[at] & bits == wanted if is_all else labels[at] & bits)] == found
