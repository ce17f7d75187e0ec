"""Core. Readers share a rate, and idle time saves nothing."""

from __future__ import annotations

from qmq.server.control import Pace


def test_readers_share_the_rate():
    pace, ready = Pace(1000), {"a": 0.0, "b": 0.0}
    given = 0
    while (now_s := min(ready.values())) < 10:
        who = min(ready, key=lambda name: ready[name])
        ready[who] = now_s + pace.wait_s(100, now_s)
        given += 100
    assert 9_800 <= given <= 10_400


def test_idle_time_saves_no_rate():
    pace = Pace(1000)
    assert pace.wait_s(500, 100.0) == 0.0
    assert pace.wait_s(500, 100.0) == 0.5
    assert pace.wait_s(500, 200.0) == 0.0
    assert pace.wait_s(500, 200.0) == 0.5
