"""Core. From which copy a damaged one is repaired."""

from __future__ import annotations

import pytest

from qmq.log.recovery import Damage
from qmq.replication.sources import best_source


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
def test_damage_is_repaired_from_a_copy_that_has_it(extents, best):
    assert best_source(Damage(100, 200, "a bit"), extents) == best
