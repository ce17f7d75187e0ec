"""Core. A master's view of one slave, from hello to loss.

    ABSENT  (begins here)
        FOLLOWS     -> CATCHING_UP
        RESTORES    -> RESTORING
        WAITS       -> UNFILLED
        PARTED      -> DIVERGED
    UNFILLED
        FOLLOWS     -> CATCHING_UP
        RESTORES    -> RESTORING
        WAITS       -> UNFILLED
        PARTED      -> DIVERGED
        LOST        -> ABSENT
    RESTORING
        FOLLOWS     -> CATCHING_UP
        RESTORES    -> RESTORING
        WAITS       -> UNFILLED
        PARTED      -> DIVERGED
        LOST        -> ABSENT
    CATCHING_UP
        MATCHED     -> IN_SYNC
        FOLLOWS     -> CATCHING_UP
        WAITS       -> UNFILLED
        PARTED      -> DIVERGED
        LOST        -> ABSENT
    IN_SYNC
        FELL_BEHIND -> LAGGING
        FOLLOWS     -> CATCHING_UP
        WAITS       -> UNFILLED
        PARTED      -> DIVERGED
        LOST        -> ABSENT
    LAGGING
        CAUGHT_UP   -> IN_SYNC
        FOLLOWS     -> CATCHING_UP
        WAITS       -> UNFILLED
        PARTED      -> DIVERGED
        LOST        -> ABSENT
    DIVERGED
        FOLLOWS     -> CATCHING_UP
        RESTORES    -> RESTORING
        WAITS       -> UNFILLED
        PARTED      -> DIVERGED

A slave counts, that is: its confirmations raise the high watermark, IN_SYNC and LAGGING only. The group is readonly
while fewer slaves than it takes are IN_SYNC. What a state alone knows is in its class (`Restoring`, …).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from qmq.replication.agreement import Hello
from qmq.replication.points import Point
from qmq.replication.ports import Link
from qmq.replication.shipper import Shipper
from qmq.states import Life, TransitionTable


class FollowerState(Enum):
    ABSENT = auto()  # no connection, or none with a hello that was agreed on
    UNFILLED = auto()  # connected; it would have to be filled, and an operator has to allow that
    RESTORING = auto()  # it sends what this master's disk lost; the mastership has not begun
    CATCHING_UP = auto()  # frames go to it; it has not matched yet
    IN_SYNC = auto()
    LAGGING = auto()  # behind by too many bytes, or for too long
    DIVERGED = auto()  # its log is not ours; its connection is closed, a person has to look


class FollowerEvent(Enum):
    FOLLOWS = auto()  # its hello was agreed on: it follows, from an offset or a snapshot
    RESTORES = auto()  # its hello was agreed on: it has more of the same history
    WAITS = auto()  # its hello was agreed on: it is not filled yet
    MATCHED = auto()  # it has all that is acknowledged, and nearly all else
    FELL_BEHIND = auto()
    CAUGHT_UP = auto()
    PARTED = auto()  # its hello or its confirmation contradicts our log
    LOST = auto()  # its connection, or the mastership


_S, _E = FollowerState, FollowerEvent

FOLLOWER = TransitionTable(
    FollowerState.ABSENT,
    {
        (_S.ABSENT, _E.FOLLOWS): _S.CATCHING_UP,
        (_S.ABSENT, _E.RESTORES): _S.RESTORING,
        (_S.ABSENT, _E.WAITS): _S.UNFILLED,
        (_S.ABSENT, _E.PARTED): _S.DIVERGED,
        (_S.UNFILLED, _E.FOLLOWS): _S.CATCHING_UP,
        (_S.UNFILLED, _E.RESTORES): _S.RESTORING,
        (_S.UNFILLED, _E.WAITS): _S.UNFILLED,
        (_S.UNFILLED, _E.PARTED): _S.DIVERGED,
        (_S.UNFILLED, _E.LOST): _S.ABSENT,
        (_S.RESTORING, _E.FOLLOWS): _S.CATCHING_UP,
        (_S.RESTORING, _E.RESTORES): _S.RESTORING,
        (_S.RESTORING, _E.WAITS): _S.UNFILLED,
        (_S.RESTORING, _E.PARTED): _S.DIVERGED,
        (_S.RESTORING, _E.LOST): _S.ABSENT,
        (_S.CATCHING_UP, _E.MATCHED): _S.IN_SYNC,
        (_S.CATCHING_UP, _E.FOLLOWS): _S.CATCHING_UP,
        (_S.CATCHING_UP, _E.WAITS): _S.UNFILLED,
        (_S.CATCHING_UP, _E.PARTED): _S.DIVERGED,
        (_S.CATCHING_UP, _E.LOST): _S.ABSENT,
        (_S.IN_SYNC, _E.FELL_BEHIND): _S.LAGGING,
        (_S.IN_SYNC, _E.FOLLOWS): _S.CATCHING_UP,
        (_S.IN_SYNC, _E.WAITS): _S.UNFILLED,
        (_S.IN_SYNC, _E.PARTED): _S.DIVERGED,
        (_S.IN_SYNC, _E.LOST): _S.ABSENT,
        (_S.LAGGING, _E.CAUGHT_UP): _S.IN_SYNC,
        (_S.LAGGING, _E.FOLLOWS): _S.CATCHING_UP,
        (_S.LAGGING, _E.WAITS): _S.UNFILLED,
        (_S.LAGGING, _E.PARTED): _S.DIVERGED,
        (_S.LAGGING, _E.LOST): _S.ABSENT,
        (_S.DIVERGED, _E.FOLLOWS): _S.CATCHING_UP,
        (_S.DIVERGED, _E.RESTORES): _S.RESTORING,
        (_S.DIVERGED, _E.WAITS): _S.UNFILLED,
        (_S.DIVERGED, _E.PARTED): _S.DIVERGED,
    },
)


@dataclass(slots=True, eq=False)
class Absent:
    pass


@dataclass(slots=True, eq=False)
class Unfilled:
    """`fill_id`: of the filling that is to be allowed."""

    link: Link
    fill_id: str


@dataclass(slots=True, eq=False)
class Restoring:
    """`begin`: offset from which it sends. `hello`: what it said before."""

    link: Link
    begin: int
    hello: Hello


@dataclass(slots=True, eq=False)
class Connected:
    """What CATCHING_UP, IN_SYNC and LAGGING have in common. `incarnation`: of the slave's data directory."""

    shipper: Shipper
    incarnation: str


@dataclass(slots=True, eq=False)
class CatchingUp(Connected):
    fill_id: str = ""
    """Of the filling that it is in; empty: it goes on where its log ended."""


@dataclass(slots=True, eq=False)
class InSync(Connected):
    """Also of LAGGING."""

    noted_end: int = 0
    """A log end, noted when it had confirmed the one noted before; `noted_ms`: when that was."""
    noted_ms: int = 0
    point_sent: Point | None = None
    """The newest acknowledged point that it was sent."""


@dataclass(slots=True, eq=False)
class Parted:
    pass


Facts = Absent | Unfilled | Restoring | CatchingUp | InSync | Parted

_FACTS: dict[FollowerState, type[Facts]] = {
    FollowerState.ABSENT: Absent,
    FollowerState.UNFILLED: Unfilled,
    FollowerState.RESTORING: Restoring,
    FollowerState.CATCHING_UP: CatchingUp,
    FollowerState.IN_SYNC: InSync,
    FollowerState.LAGGING: InSync,
    FollowerState.DIVERGED: Parted,
}


class Follower(Life[FollowerState, Facts]):
    """The slave of one mastership. Made with its `SlaveWatch`, which moves it."""

    __slots__ = ("connected", "in_sync", "restoring", "unfilled")

    def __init__(self) -> None:
        super().__init__(FOLLOWER, _FACTS, Absent())
        self.connected: Connected | None = None
        """The slave that frames go to; None: there is none."""
        self.in_sync: InSync | None = None
        """The slave that counts; None: there is none."""
        self.restoring: Restoring | None = None
        """The slave that sends what this master lost; None: there is none."""
        self.unfilled: Unfilled | None = None
        """The slave that waits until it may be filled; None: there is none."""

    def enter(self, event: object, now: Facts, *, at_ms: int) -> FollowerState:
        after = super().enter(event, now, at_ms=at_ms)
        self.connected = now if isinstance(now, Connected) else None
        self.in_sync = now if isinstance(now, InSync) else None
        self.restoring = now if isinstance(now, Restoring) else None
        self.unfilled = now if isinstance(now, Unfilled) else None
        return after
