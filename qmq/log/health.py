"""Core. Health of one copy of a log, as a table.

`MessageLog.damage` holds the unreadable range, in DAMAGED and UNREPLAYED only. The other copy's frames repair it. The
RECOVERED events and REPLAY_STOPPED are results of reading the copy back: at a start, after a cut, a seed or a repair.
"""

from __future__ import annotations

from enum import Enum, auto

from qmq.states import Machine, TransitionTable


class LogHealth(Enum):
    WHOLE = auto()
    TAIL_CUT = auto()  # acknowledged frames may be missing at the end: a master has to match its slave first
    DAMAGED = auto()  # a range below the end cannot be read: a master is readonly
    UNREPLAYED = auto()  # the frames behind the damage are not replayed: no role until it is repaired


class HealthEvent(Enum):
    RECOVERED_WHOLE = auto()
    RECOVERED_SHORT = auto()
    RECOVERED_DAMAGED = auto()
    REPLAY_STOPPED = auto()
    FOUND_DAMAGE = auto()  # a reader met bytes that are no frame
    REPAIRED = auto()  # or the segment with the damage was dropped
    REPAIRED_SHORT = auto()  # repaired, and the tail is still cut
    MATCHED = auto()  # this copy has all frames of the other one


_S, _E = LogHealth, HealthEvent

_READ_BACK: dict[object, LogHealth] = {
    _E.RECOVERED_WHOLE: _S.WHOLE,
    _E.RECOVERED_SHORT: _S.TAIL_CUT,
    _E.RECOVERED_DAMAGED: _S.DAMAGED,
    _E.REPLAY_STOPPED: _S.UNREPLAYED,
}
"""In every state."""

HEALTH = TransitionTable(
    LogHealth.WHOLE,
    {
        (_S.WHOLE, _E.FOUND_DAMAGE): _S.DAMAGED,
        (_S.TAIL_CUT, _E.MATCHED): _S.WHOLE,
        (_S.TAIL_CUT, _E.FOUND_DAMAGE): _S.DAMAGED,
        (_S.DAMAGED, _E.REPAIRED): _S.WHOLE,
        (_S.DAMAGED, _E.REPAIRED_SHORT): _S.TAIL_CUT,
        (_S.DAMAGED, _E.FOUND_DAMAGE): _S.DAMAGED,
        (_S.UNREPLAYED, _E.REPAIRED): _S.WHOLE,
        (_S.UNREPLAYED, _E.REPAIRED_SHORT): _S.TAIL_CUT,
        (_S.UNREPLAYED, _E.FOUND_DAMAGE): _S.UNREPLAYED,
    }
    | {(state, event): after for state in LogHealth for event, after in _READ_BACK.items()},
)


class LogLife(Machine[LogHealth]):
    """The health of one copy. Made and moved by its `MessageLog`."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(HEALTH)

    @property
    def is_unreplayed(self) -> bool:
        """Whether damage keeps this copy from being replayed to its end."""
        return self.state is LogHealth.UNREPLAYED

    def is_of(self, damage: object) -> bool:
        """Whether the state fits `damage`. For the simulators."""
        return (damage is None) == (self.state in (LogHealth.WHOLE, LogHealth.TAIL_CUT))
