"""Core. Life of a consumer's session with one broker group, for one subject.

    UNSUBSCRIBED  (begins here)
        ASKED    -> SUBSCRIBING
        LOST     -> UNSUBSCRIBED
        CLOSED   -> CLOSED
    SUBSCRIBING
        ACCEPTED -> SUBSCRIBED
        REFUSED  -> RESTING
        RESET    -> UNSUBSCRIBED
        LOST     -> UNSUBSCRIBED
        CLOSED   -> CLOSED
    SUBSCRIBED
        STOPPED  -> DRAINING
        REFUSED  -> RESTING
        RESET    -> UNSUBSCRIBED
        LOST     -> UNSUBSCRIBED
        CLOSED   -> CLOSED
    DRAINING
        REFUSED  -> RESTING
        RESET    -> UNSUBSCRIBED
        LOST     -> UNSUBSCRIBED
        CLOSED   -> CLOSED
    RESTING
        RESTED   -> UNSUBSCRIBED
        LOST     -> UNSUBSCRIBED
        CLOSED   -> CLOSED
    CLOSED
        LOST     -> CLOSED

Each state has a class for its facts (`Subscribed`, …). An answer is ignored if the state has changed since its request
was sent; the request is repeated if needed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from qmq.states import Life, TransitionTable


class SessionState(Enum):
    UNSUBSCRIBED = auto()  # no connection, or nothing left to do on it
    SUBSCRIBING = auto()  # SUBSCRIBE has no answer yet
    SUBSCRIBED = auto()  # messages are pulled, decisions are sent
    DRAINING = auto()  # the subscription closes: no more pulls, decisions are still sent
    RESTING = auto()  # the broker cannot answer now; subscribe again after a pause
    CLOSED = auto()


class SessionEvent(Enum):
    ASKED = auto()
    ACCEPTED = auto()
    STOPPED = auto()  # the subscription takes no more messages
    REFUSED = auto()  # the broker refuses for now, or does not have this subscription any more
    RESTED = auto()
    RESET = auto()  # the broker does not count the acked messages as delivered to this consumer
    LOST = auto()  # the connection
    CLOSED = auto()


SESSION = TransitionTable(
    SessionState.UNSUBSCRIBED,
    {
        (SessionState.UNSUBSCRIBED, SessionEvent.ASKED): SessionState.SUBSCRIBING,
        (SessionState.UNSUBSCRIBED, SessionEvent.LOST): SessionState.UNSUBSCRIBED,
        (SessionState.UNSUBSCRIBED, SessionEvent.CLOSED): SessionState.CLOSED,
        (SessionState.SUBSCRIBING, SessionEvent.ACCEPTED): SessionState.SUBSCRIBED,
        (SessionState.SUBSCRIBING, SessionEvent.REFUSED): SessionState.RESTING,
        (SessionState.SUBSCRIBING, SessionEvent.RESET): SessionState.UNSUBSCRIBED,
        (SessionState.SUBSCRIBING, SessionEvent.LOST): SessionState.UNSUBSCRIBED,
        (SessionState.SUBSCRIBING, SessionEvent.CLOSED): SessionState.CLOSED,
        (SessionState.SUBSCRIBED, SessionEvent.STOPPED): SessionState.DRAINING,
        (SessionState.SUBSCRIBED, SessionEvent.REFUSED): SessionState.RESTING,
        (SessionState.SUBSCRIBED, SessionEvent.RESET): SessionState.UNSUBSCRIBED,
        (SessionState.SUBSCRIBED, SessionEvent.LOST): SessionState.UNSUBSCRIBED,
        (SessionState.SUBSCRIBED, SessionEvent.CLOSED): SessionState.CLOSED,
        (SessionState.DRAINING, SessionEvent.REFUSED): SessionState.RESTING,
        (SessionState.DRAINING, SessionEvent.RESET): SessionState.UNSUBSCRIBED,
        (SessionState.DRAINING, SessionEvent.LOST): SessionState.UNSUBSCRIBED,
        (SessionState.DRAINING, SessionEvent.CLOSED): SessionState.CLOSED,
        (SessionState.RESTING, SessionEvent.RESTED): SessionState.UNSUBSCRIBED,
        (SessionState.RESTING, SessionEvent.LOST): SessionState.UNSUBSCRIBED,
        (SessionState.RESTING, SessionEvent.CLOSED): SessionState.CLOSED,
        (SessionState.CLOSED, SessionEvent.LOST): SessionState.CLOSED,
    },
)


@dataclass(slots=True, eq=False)
class Unsubscribed:
    pass


@dataclass(slots=True, eq=False)
class Subscribing:
    """`failures`: refusals in a row."""

    failures: int = 0


@dataclass(slots=True, eq=False)
class Subscribed:
    """The subscription's number at the broker, its lease, and the requests in flight."""

    subscription: int
    lease_ms: int
    takes_begins: bool = field(default=False, kw_only=True)
    takes_expired: bool = field(default=False, kw_only=True)
    """Whether the broker stores EXPIRED."""
    takes_worn_out: bool = field(default=False, kw_only=True)
    pulls: int = 0
    asked: int = 0
    """Messages that the pulls in flight may bring."""
    acks: int = 0
    nacks: int = 0


@dataclass(slots=True, eq=False)
class Resting:
    failures: int


@dataclass(slots=True, eq=False)
class Closed:
    pass


Facts = Unsubscribed | Subscribing | Subscribed | Resting | Closed

_FACTS: dict[SessionState, type[Facts]] = {
    SessionState.UNSUBSCRIBED: Unsubscribed,
    SessionState.SUBSCRIBING: Subscribing,
    SessionState.SUBSCRIBED: Subscribed,
    SessionState.DRAINING: Subscribed,
    SessionState.RESTING: Resting,
    SessionState.CLOSED: Closed,
}


class SessionLife(Life[SessionState, Facts]):
    """Life of one session; the session makes it and enters its states."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(SESSION, _FACTS, Unsubscribed())


class Urgency(Enum):
    """Reasons to send decisions at once, also inside pieces with undecided messages."""

    FLUSH = auto()  # a call waits until brokers have stored all decisions
    SWEEP = auto()  # once in a while, and after each subscribe
    ORDERED = auto()  # messages with an order key came: the next of a key waits for each decision
    FULL = auto()  # too many messages are unacked: the next pull waits
