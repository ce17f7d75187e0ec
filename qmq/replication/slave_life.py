"""Core. A slave's own states towards its master, from connection to loss.

    DISCONNECTED  (begins here)
        CONNECTED -> AWAITING_FLUSH
    AWAITING_FLUSH
        FLUSHED   -> HELLO_SENT
        CONNECTED -> AWAITING_FLUSH
        LOST      -> DISCONNECTED
    HELLO_SENT
        FOLLOW    -> FOLLOWING
        SEED      -> AWAITING_SNAPSHOT
        RESTORE   -> RESTORING
        WAIT      -> UNFILLED
        CONNECTED -> AWAITING_FLUSH
        LOST      -> DISCONNECTED
    FOLLOWING
        CONNECTED -> AWAITING_FLUSH
        LOST      -> DISCONNECTED
    UNFILLED
        CONNECTED -> AWAITING_FLUSH
        LOST      -> DISCONNECTED
    AWAITING_SNAPSHOT
        SNAPSHOT  -> FOLLOWING
        CONNECTED -> AWAITING_FLUSH
        LOST      -> DISCONNECTED
    RESTORING
        RESTORED  -> AWAITING_FLUSH
        CONNECTED -> AWAITING_FLUSH
        LOST      -> DISCONNECTED

What a state alone knows is in its class (`Following`, …). A packet that comes in another state than it belongs to is
refused: a slave that follows takes no second snapshot, and one that restores its master confirms nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from qmq.replication.agreement import Agreement
from qmq.replication.ports import Link
from qmq.replication.shipper import Shipper
from qmq.states import Life, TransitionTable


class SlaveState(Enum):
    DISCONNECTED = auto()
    AWAITING_FLUSH = auto()  # connected; its hello says what is on its disk, and something is still being written
    HELLO_SENT = auto()
    FOLLOWING = auto()  # it takes frames and confirms them
    UNFILLED = auto()  # the master fills it once an operator allows that; its copy stays as it is
    AWAITING_SNAPSHOT = auto()  # its copy begins anew where the master's begins
    RESTORING = auto()  # it sends the master what that one lost


class SlaveEvent(Enum):
    CONNECTED = auto()
    FLUSHED = auto()
    FOLLOW = auto()  # the agreement says so, as SEED, RESTORE and WAIT
    SEED = auto()
    RESTORE = auto()
    WAIT = auto()
    SNAPSHOT = auto()
    RESTORED = auto()  # the master has all that this copy has: hello again
    LOST = auto()  # the connection, or the role


_S, _E = SlaveState, SlaveEvent

SLAVE = TransitionTable(
    SlaveState.DISCONNECTED,
    {
        (_S.DISCONNECTED, _E.CONNECTED): _S.AWAITING_FLUSH,
        (_S.AWAITING_FLUSH, _E.FLUSHED): _S.HELLO_SENT,
        (_S.AWAITING_FLUSH, _E.CONNECTED): _S.AWAITING_FLUSH,
        (_S.AWAITING_FLUSH, _E.LOST): _S.DISCONNECTED,
        (_S.HELLO_SENT, _E.FOLLOW): _S.FOLLOWING,
        (_S.HELLO_SENT, _E.SEED): _S.AWAITING_SNAPSHOT,
        (_S.HELLO_SENT, _E.RESTORE): _S.RESTORING,
        (_S.HELLO_SENT, _E.WAIT): _S.UNFILLED,
        (_S.HELLO_SENT, _E.CONNECTED): _S.AWAITING_FLUSH,
        (_S.HELLO_SENT, _E.LOST): _S.DISCONNECTED,
        (_S.FOLLOWING, _E.CONNECTED): _S.AWAITING_FLUSH,
        (_S.FOLLOWING, _E.LOST): _S.DISCONNECTED,
        (_S.UNFILLED, _E.CONNECTED): _S.AWAITING_FLUSH,
        (_S.UNFILLED, _E.LOST): _S.DISCONNECTED,
        (_S.AWAITING_SNAPSHOT, _E.SNAPSHOT): _S.FOLLOWING,
        (_S.AWAITING_SNAPSHOT, _E.CONNECTED): _S.AWAITING_FLUSH,
        (_S.AWAITING_SNAPSHOT, _E.LOST): _S.DISCONNECTED,
        (_S.RESTORING, _E.RESTORED): _S.AWAITING_FLUSH,
        (_S.RESTORING, _E.CONNECTED): _S.AWAITING_FLUSH,
        (_S.RESTORING, _E.LOST): _S.DISCONNECTED,
    },
)


@dataclass(slots=True, eq=False)
class Disconnected:
    pass


@dataclass(slots=True, eq=False)
class AwaitingFlush:
    link: Link


@dataclass(slots=True, eq=False)
class HelloSent:
    link: Link


@dataclass(slots=True, eq=False)
class Following:
    link: Link
    agreement: Agreement
    is_complete: bool = False
    """Since this handshake, our log reached the end that the master's had then."""


@dataclass(slots=True, eq=False)
class Unfilled:
    link: Link


@dataclass(slots=True, eq=False)
class AwaitingSnapshot:
    link: Link
    agreement: Agreement


@dataclass(slots=True, eq=False)
class Restoring:
    """`shipper`: sends our frames to the master."""

    link: Link
    shipper: Shipper


Facts = Disconnected | AwaitingFlush | HelloSent | Following | Unfilled | AwaitingSnapshot | Restoring

_FACTS: dict[SlaveState, type[Facts]] = {
    SlaveState.DISCONNECTED: Disconnected,
    SlaveState.AWAITING_FLUSH: AwaitingFlush,
    SlaveState.HELLO_SENT: HelloSent,
    SlaveState.FOLLOWING: Following,
    SlaveState.UNFILLED: Unfilled,
    SlaveState.AWAITING_SNAPSHOT: AwaitingSnapshot,
    SlaveState.RESTORING: Restoring,
}


class SlaveLife(Life[SlaveState, Facts]):
    """One slave's states. Made and moved by `Slave`."""

    __slots__ = ("link", "restoring")

    def __init__(self) -> None:
        super().__init__(SLAVE, _FACTS, Disconnected())
        self.link: Link | None = None
        """The connection to the master; None: there is none."""
        self.restoring: Shipper | None = None
        """What sends our frames to a master that lost some; None: nothing does."""

    def enter(self, event: object, now: Facts, *, at_ms: int) -> SlaveState:
        after = super().enter(event, now, at_ms=at_ms)
        self.link = None if isinstance(now, Disconnected) else now.link
        self.restoring = now.shipper if isinstance(now, Restoring) else None
        return after
