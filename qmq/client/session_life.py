"""Core. A consumer's session with one broker group, for one subject: from subscribe to loss.

    UNSUBSCRIBED  (begins here)
        ASKED     -> SUBSCRIBING
        LOST      -> UNSUBSCRIBED
        CLOSED    -> CLOSED
    SUBSCRIBING
        ACCEPTED  -> SUBSCRIBED
        PUT_OFF   -> RESTING
        FORGOTTEN -> UNSUBSCRIBED
        LOST      -> UNSUBSCRIBED
        CLOSED    -> CLOSED
    SUBSCRIBED
        STOPPED   -> DRAINING
        PUT_OFF   -> RESTING
        FORGOTTEN -> UNSUBSCRIBED
        LOST      -> UNSUBSCRIBED
        CLOSED    -> CLOSED
    DRAINING
        PUT_OFF   -> RESTING
        FORGOTTEN -> UNSUBSCRIBED
        LOST      -> UNSUBSCRIBED
        CLOSED    -> CLOSED
    RESTING
        RESTED    -> UNSUBSCRIBED
        LOST      -> UNSUBSCRIBED
        CLOSED    -> CLOSED
    CLOSED
        LOST      -> CLOSED

What a state alone knows is in its class (`Subscribed`, …). An answer that comes in another state than its request was
sent in is not read: it is void, or is asked for again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from qmq.states import Life, TransitionTable


class SessionState(Enum):
    UNSUBSCRIBED = auto()  # no connection, or nothing left to do on it
    SUBSCRIBING = auto()  # SUBSCRIBE has no answer yet
    SUBSCRIBED = auto()  # messages and decisions travel
    DRAINING = auto()  # the subscription closes: no more pulls, decisions still travel
    RESTING = auto()  # the broker cannot answer now: ask again in a moment
    CLOSED = auto()


class SessionEvent(Enum):
    ASKED = auto()
    ACCEPTED = auto()
    STOPPED = auto()  # the subscription takes no more messages
    PUT_OFF = auto()  # an answer says: later, or not this subscription any more
    RESTED = auto()
    FORGOTTEN = auto()  # the broker does not know that we hold what we acked: begin anew
    LOST = auto()  # the connection
    CLOSED = auto()


SESSION = TransitionTable(
    SessionState.UNSUBSCRIBED,
    {
        (SessionState.UNSUBSCRIBED, SessionEvent.ASKED): SessionState.SUBSCRIBING,
        (SessionState.UNSUBSCRIBED, SessionEvent.LOST): SessionState.UNSUBSCRIBED,
        (SessionState.UNSUBSCRIBED, SessionEvent.CLOSED): SessionState.CLOSED,
        (SessionState.SUBSCRIBING, SessionEvent.ACCEPTED): SessionState.SUBSCRIBED,
        (SessionState.SUBSCRIBING, SessionEvent.PUT_OFF): SessionState.RESTING,
        (SessionState.SUBSCRIBING, SessionEvent.FORGOTTEN): SessionState.UNSUBSCRIBED,
        (SessionState.SUBSCRIBING, SessionEvent.LOST): SessionState.UNSUBSCRIBED,
        (SessionState.SUBSCRIBING, SessionEvent.CLOSED): SessionState.CLOSED,
        (SessionState.SUBSCRIBED, SessionEvent.STOPPED): SessionState.DRAINING,
        (SessionState.SUBSCRIBED, SessionEvent.PUT_OFF): SessionState.RESTING,
        (SessionState.SUBSCRIBED, SessionEvent.FORGOTTEN): SessionState.UNSUBSCRIBED,
        (SessionState.SUBSCRIBED, SessionEvent.LOST): SessionState.UNSUBSCRIBED,
        (SessionState.SUBSCRIBED, SessionEvent.CLOSED): SessionState.CLOSED,
        (SessionState.DRAINING, SessionEvent.PUT_OFF): SessionState.RESTING,
        (SessionState.DRAINING, SessionEvent.FORGOTTEN): SessionState.UNSUBSCRIBED,
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
    """`failures`: answers in a row that put it off."""

    failures: int = 0


@dataclass(slots=True, eq=False)
class Subscribed:
    """What the broker calls the subscription, its lease, and what is under way to it."""

    subscription: int
    lease_ms: int
    takes_begins: bool = field(default=False, kw_only=True)
    takes_expired: bool = field(default=False, kw_only=True)
    """The broker knows BEGIN and NOT_BEGUN."""
    pulls: int = 0
    asked: int = 0
    """Messages that these pulls may bring."""
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
    """One session's states. Made and moved by the session."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(SESSION, _FACTS, Unsubscribed())


class Urgency(Enum):
    """Why decisions are sent at once, also those amid messages that are not decided."""

    FLUSH = auto()  # somebody waits until brokers keep all decisions
    SWEEP = auto()  # once in a while, and after each subscribe
    ORDERED = auto()  # messages with an order key came: the next of a key waits for each decision
    FULL = auto()  # too many are not acked: the next pull waits
