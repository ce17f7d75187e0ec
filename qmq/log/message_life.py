"""Core. The states of one message in one consumer group, as a table, with the fields of the fold in each state.

    state       place in the group's state                                          fields in use
    NEW         at or behind `Group.position`                                       none
    DELIVERED   in an `UnackedRange` of one `Consumer`                              pull, attempts, suspected
    REQUEUED    in a `RequeuedRange` of the group                                   attempts, suspected, due_ms
    ACKED       before the position, and in no range                                none
    DEAD        as ACKED; a copy is in the group's dead-letter subject              none here; the copy's properties

A message is in one state only. Each event is a progress frame. The fold refuses an event that the table lacks, and the
log with it is damaged. An operator's move of a group begins it anew: all messages are NEW or ACKED.

`attempts` rises with each delivery. A consumer that leaves, drains or vanishes without having begun with a message
lowers it again. If the consumer vanished, `suspected` rises instead: the message may have been the cause.
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
    """a pull frame numbers it for a consumer"""
    PASS_OVER = auto()
    """a pull frame skips it for good: filtered out, deleted by retention, expired, or too many wait"""
    DEFER = auto()
    """a pull frame skips it for now: an earlier message of its order key is not settled"""
    ACK = auto()
    NACK = auto()
    """it comes again after a delay; the delivery counts, or does not as not begun"""
    LEAVE = auto()
    """its consumer left or vanished"""
    GIVE_UP = auto()
    """a copy is a dead letter, and its ack follows"""


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
        (_S.DELIVERED, _E.GIVE_UP): _S.DEAD,
        (_S.REQUEUED, _E.DELIVER): _S.DELIVERED,
        (_S.REQUEUED, _E.PASS_OVER): _S.ACKED,
        (_S.REQUEUED, _E.DEFER): _S.REQUEUED,
    },
)
