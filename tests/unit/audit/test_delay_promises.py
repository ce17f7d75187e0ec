"""Shell. The audit of a delay group: messages sent twice, early, or after a cancel (P7)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qmq.codec import encode_message, join_batch
from qmq.log.delay_frames import Outcome, encode_dispatch, encode_places, encode_settled
from qmq.log.frame import FrameKind
from qmq.message import Message
from tests.unit.audit.logs import LogWriter
from tests.unit.audit.without_spark import audit

A = "order.changed"
LANE = 7


def delayed(data: Path, plant: Callable[[LogWriter, list[tuple[int, int]]], object] | None = None) -> LogWriter:
    """Write a delay server's log: three messages dispatched when due, one cancelled, one carried."""
    log = LogWriter.begun(data)
    frame = log.batch(A, 6)
    due_ms = log.timestamp_ms + 1000
    first = frame.offset + frame.body_at + 4 * 7
    places = [(first + 100 * number, due_ms) for number in range(6)]
    log.frame(FrameKind.CANCEL, A, encode_places(places[:1]), count=1)
    carried = encode_places(places[1:2]) + join_batch([encode_message(Message(A, {}, id="carried"), 0)])
    log.frame(FrameKind.CARRY, A, carried, count=1)
    log.timestamp_ms += 2000
    dispatched(log, places[2:5])
    settle(log, 1)
    if plant:
        plant(log, places)
    log.close()
    return log


def dispatched(log: LogWriter, places: list[tuple[int, int]], batch: int = 1) -> None:
    body = encode_dispatch("g1", encode_places(places))
    log.frame(FrameKind.DISPATCH, A, body, count=len(places), numbers=(LANE, batch))


def settle(log: LogWriter, batch: int, outcome: Outcome = Outcome.STORED) -> None:
    log.frame(FrameKind.SETTLED, "", encode_settled([(LANE, batch, outcome)]), count=1)


def dispatch_again(log: LogWriter, places: list[tuple[int, int]]) -> None:
    dispatched(log, places, 2)
    settle(log, 2)


def dispatch_early(log: LogWriter, places: list[tuple[int, int]]) -> None:
    log.timestamp_ms -= 1500
    dispatched(log, places, 2)


def plan_later(log: LogWriter, places: list[tuple[int, int]]) -> None:
    """The plan of batch 2 and its outcome are in neither copy."""
    dispatched(log, places, 3)
    settle(log, 3)


def plan_after_outcome(log: LogWriter, places: list[tuple[int, int]], outcome: Outcome) -> None:
    """The plan of the settled batch 2 is in neither copy; other messages are planned under its number."""
    settle(log, 2, outcome)
    dispatched(log, places[5:], 2)


def stored_before_plan(log: LogWriter, places: list[tuple[int, int]]) -> None:
    plan_after_outcome(log, places, Outcome.STORED)


def refused_before_plan(log: LogWriter, places: list[tuple[int, int]]) -> None:
    plan_after_outcome(log, places, Outcome.NOT_STORED)


def plan_twice(log: LogWriter, places: list[tuple[int, int]]) -> None:
    """The outcome of batch 2 is that of its first plan."""
    dispatched(log, places[5:], 2)
    settle(log, 2)
    dispatched(log, places[5:], 2)


@pytest.mark.parametrize(
    "plant, found",
    [
        pytest.param(None, {}, id="kept"),
        pytest.param(lambda log, places: dispatch_again(log, places[2:3]), {"twice": 1}, id="sent twice"),
        pytest.param(lambda log, places: dispatch_again(log, places[:2]), {"recalled": 2}, id="sent after a cancel"),
        pytest.param(lambda log, places: dispatch_early(log, places[5:]), {"early": 1}, id="sent early"),
        pytest.param(lambda log, places: dispatched(log, places[2:3], 2), {"twice": 1}, id="planned after stored"),
        pytest.param(lambda log, places: settle(log, 2), {"unplanned": 1}, id="settled and not planned"),
        pytest.param(lambda log, places: plan_later(log, places[5:]), {"unplanned": 1}, id="a hole between plans"),
        pytest.param(plan_twice, {"twice": 1}, id="planned twice under one number"),
        pytest.param(stored_before_plan, {"unplanned": 1, "twice": 1}, id="stored before its plan"),
        pytest.param(refused_before_plan, {"unplanned": 1}, id="refused before its plan"),
    ],
)
def test_promises_of_a_delay_server_are_judged(tmp_path: Path, plant: Any, found: dict[str, int]) -> None:
    """The copies are equal, so each finding is of both."""
    for copy in ("master", "slave"):
        delayed(tmp_path / copy, plant)
    result = audit(tmp_path)
    assert not result.unreadable and result.found == found
