"""Core. From which copy a damaged one is repaired."""

from __future__ import annotations

import pytest

from qmq.log.recovery import Damage
from qmq.replication.copy_repair import Sources

DAMAGE = Damage(100, 200, "a bit")


@pytest.mark.parametrize(
    "extents, best",
    [
        pytest.param([(0, 500)], 0, id="the only one"),
        pytest.param([(100, 200), (0, 190)], 0, id="it has just that"),
        pytest.param([(100, 200), (150, 300)], 0, id="and another one has more behind it"),
        pytest.param([(150, 300), (100, 200)], 1, id="the other one has more behind it, and not all of it"),
        pytest.param([], None, id="there is no other copy"),
        pytest.param([(0, 150), (0, 200)], 1, id="the one that has it all"),
        pytest.param([None, (0, 200)], 1, id="it has, and the other does not answer"),
        pytest.param([(0, 150), None], None, id="the one that does not answer may have it"),
        pytest.param([None], None, id="nobody answers"),
        pytest.param([(0, 150), (150, 180)], 1, id="nobody has it: the longest log decides"),
    ],
)
def test_best_source_of_a_repair(extents, best):
    assert Sources().best(DAMAGE, extents) == best


def test_repair_sources_take_turns():
    sources, extents = Sources(), [(0, 500), None, (0, 150), (0, 400)]
    assert [sources.best(DAMAGE, extents) for _ in range(6)] == [0, 0, 3, 3, 0, 0]


def test_new_damage_begins_at_the_first_source():
    sources, extents = Sources(), [(0, 500), (0, 500)]
    assert [sources.best(DAMAGE, extents) for _ in range(3)] == [0, 0, 1]
    assert sources.best(Damage(300, 400, "another bit"), extents) == 0
