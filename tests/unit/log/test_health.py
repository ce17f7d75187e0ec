"""Core. States of a log's health."""

from __future__ import annotations

import pytest

from qmq.errors import CorruptFrame, IllegalTransition
from qmq.log.health import HEALTH, HealthEvent, LogLife
from qmq.log.health import LogHealth as H
from qmq.log.repair import repair
from tests.unit.log.logs import Copy
from tests.unit.log.test_repair import a_copy, damage, frame_offsets, others


def states(copy: Copy) -> list[H]:
    return [move.after for move in copy.log.health.history]


def test_health_after_a_reader_met_damage():
    copy, other = a_copy(), a_copy()
    offset = frame_offsets(copy, 0)[20]
    damage(copy, offset)
    copy.log.damaged_at(CorruptFrame(offset, "test"))
    repair(copy.log, others(other, offset, copy.log.damage.end))
    assert states(copy) == [H.WHOLE, H.DAMAGED, H.WHOLE]


def test_health_after_unreplayed_damage():
    copy, other = a_copy(), a_copy()
    offset = frame_offsets(copy, copy.log.bases[-1])[1]
    damage(copy, offset)
    copy.reopen()
    assert copy.log.health.is_unreplayed
    repair(copy.log, others(other, offset, copy.log.damage.end))
    assert states(copy) == [H.UNREPLAYED, H.WHOLE]


def test_cut_tail_is_whole_after_matching():
    copy = a_copy()
    offset = frame_offsets(copy, copy.log.bases[-1])[1]
    damage(copy, offset)
    copy.reopen()
    copy.log.cut(offset, "the other copy has another history there")
    assert states(copy) == [H.UNREPLAYED, H.TAIL_CUT]
    copy.log.tail_is_whole()
    assert states(copy)[-1] is H.WHOLE and copy.log.health.is_of(copy.log.damage)


def test_whole_log_cannot_be_repaired():
    illegal = HEALTH.illegal
    with pytest.raises(IllegalTransition):
        LogLife().on(HealthEvent.REPAIRED)
    assert HEALTH.illegal == illegal + 1
    HEALTH.illegal = illegal
