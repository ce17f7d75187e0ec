"""Core. A table of states allows its transitions, refuses and counts others, and is drawn unchanged."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum, auto

import pytest

from qmq.errors import BrokenInvariant, IllegalTransition
from qmq.states import TRANSITIONS_KEPT, Machine, Transition, TransitionTable, draw


class DoorState(Enum):
    OPEN = auto()
    SHUT = auto()
    LOCKED = auto()


@dataclass(frozen=True)
class Pushed:
    by: str


class Key(Enum):
    TURNED = auto()


MOVES = {
    (DoorState.OPEN, Pushed): DoorState.SHUT,
    (DoorState.SHUT, Pushed): DoorState.OPEN,
    (DoorState.SHUT, Key.TURNED): DoorState.LOCKED,
}


@pytest.fixture
def table() -> TransitionTable[DoorState]:
    return TransitionTable(DoorState.OPEN, MOVES)


def test_events_are_classes_or_enum_members(table: TransitionTable[DoorState]):
    door = Machine(table)
    assert door.state is DoorState.OPEN and door.may(Pushed) and not door.may(Key.TURNED)
    assert door.on(Pushed("wind"), at_ms=7) is DoorState.SHUT
    assert door.on(Key.TURNED) is DoorState.LOCKED
    assert list(door.history) == [
        Transition(DoorState.OPEN, "Pushed", DoorState.SHUT, 7),
        Transition(DoorState.SHUT, "TURNED", DoorState.LOCKED, 0),
    ]
    assert str(door.history[0]) == "7 OPEN -- Pushed -> SHUT"


def test_illegal_transition_raises_and_is_counted(table: TransitionTable[DoorState]):
    door = Machine(table)
    with pytest.raises(IllegalTransition, match="DoorState: TURNED cannot happen in OPEN"):
        door.on(Key.TURNED)
    assert door.state is DoorState.OPEN and not door.history and table.illegal == 1


def test_last_transitions_are_kept(table: TransitionTable[DoorState]):
    door = Machine(table)
    for number in range(TRANSITIONS_KEPT + 5):
        door.on(Pushed("wind"), at_ms=number)
    assert len(door.history) == TRANSITIONS_KEPT and door.history[0].at_ms == 5


def test_short_lives_share_a_history(table: TransitionTable[DoorState]):
    history: deque[Transition] = deque(maxlen=3)
    for _ in range(2):
        door = Machine(table, history)
        door.on(Pushed("wind"))
        door.on(Pushed("wind"))
    assert [move.after for move in history] == [DoorState.OPEN, DoorState.SHUT, DoorState.OPEN]


def test_unreachable_state_is_refused():
    with pytest.raises(BrokenInvariant, match="LOCKED"):
        TransitionTable(DoorState.OPEN, {(DoorState.OPEN, Pushed): DoorState.SHUT})


def test_drawing_equals_the_table(table: TransitionTable[DoorState]):
    assert draw(table) == (
        "OPEN  (begins here)\n    Pushed -> SHUT\nSHUT\n    Pushed -> OPEN\n    TURNED -> LOCKED\nLOCKED\n"
    )
