"""Core. Timers that fire together."""

from __future__ import annotations

import pytest

from qmq.ticking import until_next_second


@pytest.mark.parametrize(("now_s", "wait_s"), [(7.0, 1.0), (7.25, 0.75), (7.8, 0.2), (7.9, 1.1), (7.999, 1.001)])
def test_timer_fires_on_a_whole_second(now_s, wait_s):
    assert until_next_second(now_s) == pytest.approx(wait_s)
