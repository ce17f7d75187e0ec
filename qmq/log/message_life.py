"""Core. The life of one message of one consumer group, as a table; what the fold keeps of it in each state.

    NEW  (begins here)
        DELIVER   -> DELIVERED
        PASS_OVER -> ACKED
        DEFER     -> REQUEUED
    DELIVERED
        ACK       -> ACKED
        NACK      -> REQUEUED
        LEAVE     -> REQUEUED
        BURY      -> DEAD
    REQUEUED
        DELIVER   -> DELIVERED
        PASS_OVER -> ACKED
        DEFER     -> REQUEUED
    ACKED
    DEAD

    state       what the group's state says of it                                   fields that mean something
    NEW         it lies at or behind `Group.position`                               none
    DELIVERED   it lies in an `UnackedRange` of one `Consumer`                       pull, attempts, suspected
    REQUEUED    it lies in a `RequeuedRange` of the group                           attempts, suspected, due_ms
    ACKED       it lies before the position, and in no range                        none
    DEAD        as ACKED; a copy lies in the group's dead-letter subject            none here; the copy's properties

A message is in one state only. Each event is a frame of progress: what the table lacks, the fold refuses, and the log
that says so is damaged. A group that an operator moves begins anew with all of its messages, NEW or ACKED.

What of a message is counted. `attempts` rises with each delivery. A consumer that leaves, drains or vanishes without
having begun with a message lowers it again; if it vanished, `suspected` rises instead, for nobody else can tell
whether this message was the reason.
"""

from __future__ import annotations

from enum import Enum, auto

from qmq.states import TransitionTable


class MessageState(Enum):
    NEW = auto()
    DELIVERED = auto()
    REQUEUED = auto()
    ACKED = auto()
    DEAD = auto()


class MessageEvent(Enum):
    DELIVER = auto()
    """A pull frame numbers it for a consumer."""
    PASS_OVER = auto()
    """A pull frame goes over it for good: no filter wants it, retention took it, it expired, or too many wait."""
    DEFER = auto()
    """A pull frame goes over it for now: an earlier message of its order key is not settled."""
    ACK = auto()
    NACK = auto()
    """It comes again after a delay, counted, or not counted as not begun."""
    LEAVE = auto()
    """Its consumer left or vanished."""
    BURY = auto()
    """A copy is a dead letter, and the ack stands behind it."""


_S, _E = MessageState, MessageEvent

LIFE = TransitionTable(
    MessageState.NEW,
    {
        (_S.NEW, _E.DELIVER): _S.DELIVERED,
        (_S.NEW, _E.PASS_OVER): _S.ACKED,
        (_S.NEW, _E.DEFER): _S.REQUEUED,
        (_S.DELIVERED, _E.ACK): _S.ACKED,
        (_S.DELIVERED, _E.NACK): _S.REQUEUED,
        (_S.DELIVERED, _E.LEAVE): _S.REQUEUED,
        (_S.DELIVERED, _E.BURY): _S.DEAD,
        (_S.REQUEUED, _E.DELIVER): _S.DELIVERED,
        (_S.REQUEUED, _E.PASS_OVER): _S.ACKED,
        (_S.REQUEUED, _E.DEFER): _S.REQUEUED,
    },
)
