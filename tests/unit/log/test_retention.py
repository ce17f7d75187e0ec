"""Core. State after the retention frames of a log."""

from __future__ import annotations

import pytest

from qmq.log.retention import Kept, RetentionDecision


def decision(start: int, **lost: int) -> RetentionDecision:
    return RetentionDecision(start, "age", {}, {("s", group): messages for group, messages in lost.items()})


def a_kept() -> Kept:
    """Return the state after three frames that delete nothing, and one that deletes the bytes before 200."""
    kept = Kept()
    for offset in (100, 200, 300):
        kept.take(decision(0), offset=offset, end=offset + 50, time_ms=offset * 10)
    kept.take(decision(200, g=3), offset=400, end=450, time_ms=4_000)
    return kept


def test_retention_frames_accumulate():
    kept = a_kept()
    assert kept == Kept(200, 450, [(300, 3_000), (400, 4_000)], {("s", "g"): 3})
    kept.take(decision(200, h=1), offset=500, end=550, time_ms=5_000)
    assert kept == Kept(200, 450, [(300, 3_000), (400, 4_000), (500, 5_000)], {("s", "g"): 3, ("s", "h"): 1})
    kept.take(decision(600, g=4), offset=600, end=650, time_ms=6_000)
    assert kept == Kept(600, 650, [(600, 6_000)], {("s", "g"): 7, ("s", "h"): 1})


@pytest.mark.parametrize("start", [199, 501])
def test_invalid_retention_start_is_refused(start):
    kept = a_kept()
    with pytest.raises(ValueError, match="frames are kept from 200"):
        kept.take(decision(start), offset=500, end=550, time_ms=5_000)
    assert kept == a_kept()


@pytest.mark.parametrize(
    ("offset", "written_ms"), [(200, 3_000), (300, 3_000), (301, 4_000), (400, 4_000), (401, None)]
)
def test_first_stated_time_behind_an_offset(offset, written_ms):
    assert a_kept().written_before_ms(offset) == written_ms


@pytest.mark.parametrize(("high_watermark", "start"), [(449, 0), (450, 200), (451, 200)])
def test_agreed_start_needs_an_acknowledged_frame(high_watermark, start):
    assert a_kept().agreed_start(high_watermark) == start
