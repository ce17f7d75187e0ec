"""Core. Trail of one message in the logs: where it was stored, its deliveries, and their outcomes.

Messages are found by id: the producer's message at a delay group and at its target group; its dead letter of a consumer
group, which has the same id; and the redriven copy. The pulls that delivered each of these follow, then the answers of
their consumers. States are those of `qmq.log.group`; a step unknown to that table is listed and changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import reduce
from operator import or_
from typing import Any, NamedTuple

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from qmq.dead_letters import GROUP, REASON, SEQUENCE
from qmq.errors import IllegalTransition
from qmq.log.group import LIFE, MessageEvent, MessageState
from qmq.subjects import DEAD_LETTER, parse_derived

STORED_COLUMNS = "broker_group,offset,stored_at,subject,sequence,id,tags,properties,producer,batch"
"""Columns of a stored message for `steps`."""

_EVENTS = {
    "pull": MessageEvent.DELIVER,
    "passed": MessageEvent.PASS_OVER,
    "deferred": MessageEvent.DEFER,
    "expired": MessageEvent.PASS_OVER,
    "overflowed": MessageEvent.PASS_OVER,
    "ack": MessageEvent.ACK,
    "dead": MessageEvent.GIVE_UP,
    "nack": MessageEvent.NACK,
    "left": MessageEvent.LEAVE,
    "vanished": MessageEvent.LEAVE,
}
_COVERING = ("pull", "passed", "deferred", "expired", "overflowed")
_OF_PULLS = ("ack", "dead", "nack", "expired")
"""Events with a pull sequence. A message that expired at a consumer has one; if it expired at the broker, a sequence.
"""
_OF_CONSUMERS = ("left", "vanished")
_OF_GROUPS = ("position", "forgotten")

Row = Mapping[str, Any]


class Step(NamedTuple):
    """One event of a stored copy of the message, or of its whole consumer group."""

    at_ms: int
    broker_group: str
    offset: int
    subject: str
    sequence: int
    what: str
    """`stored`, or an event of the table `progress`."""
    consumer_group: str = ""
    consumer: str = ""
    state: str = ""
    """State of the message in that group from here on."""
    text: str = ""


def deliveries(progress: DataFrame, stored: Iterable[Row]) -> DataFrame:
    """Return the pulls over any of these messages. in, out: the table `progress`."""
    return progress.where(F.col("event").isin(*_COVERING)).where(_any(map(_covers, stored)))


def aftermath(progress: DataFrame, stored: Iterable[Row], pulls: Iterable[Row]) -> DataFrame:
    """Return later events of the delivered messages, and moves of their groups."""
    ends = [
        _ends_delivery(message, pull)
        for message in stored
        for pull in pulls
        if _is_of(pull, message) and pull["event"] == "pull"
    ]
    moves = [_is_same_log(message) & F.col("event").isin(*_OF_GROUPS) for message in stored]
    return progress.where(_any([*ends, *moves]))


def _any(conditions: Iterable[Column]) -> Column:
    """Return whether any condition holds."""
    return reduce(or_, conditions, F.lit(False))


def _is_same_log(message: Row) -> Column:
    of_group, of_subject = F.col("broker_group") == message["broker_group"], F.col("subject") == message["subject"]
    found: Column = of_group & of_subject & (F.col("offset") > message["offset"])
    return found


def _covers(message: Row) -> Column:
    sequence = F.lit(message["sequence"])
    end = F.col("sequence") + F.col("messages")
    found: Column = _is_same_log(message) & (F.col("sequence") <= sequence) & (sequence < end)
    return found


def _ends_delivery(message: Row, pull: Row) -> Column:
    number = F.lit(_number(message, pull))
    of_it = F.col("event").isin(*_OF_PULLS) & (F.col("pull") <= number) & (number < F.col("pull") + F.col("messages"))
    by_it = (F.col("consumer_group") == pull["consumer_group"]) & (F.col("consumer") == pull["consumer"])
    found: Column = _is_same_log(message) & by_it & (of_it | F.col("event").isin(*_OF_CONSUMERS))
    return found


def _number(message: Row, pull: Row) -> int:
    """Return the pull sequence under which a pull delivered the message."""
    return int(pull["pull"] + message["sequence"] - pull["sequence"])


def _is_of(event: Row, message: Row) -> bool:
    if (event["broker_group"], event["subject"]) != (message["broker_group"], message["subject"]):
        return False
    if event["event"] in _COVERING and event["sequence"] is not None:
        return bool(event["sequence"] <= message["sequence"] < event["sequence"] + event["messages"])
    return bool(event["offset"] > message["offset"])


def steps(stored: Iterable[Row], events: Iterable[Row]) -> list[Step]:
    """Return the steps by time and, within a log, by offset."""
    stored, events = list(stored), sorted(events, key=lambda event: event["offset"])
    found: list[Step] = []
    for message in stored:
        found.append(_stored(message))
        groups = {event["consumer_group"] for event in events if _is_of(event, message)}
        for group in sorted(groups):
            of_group = [event for event in events if event["consumer_group"] == group and _is_of(event, message)]
            found += _message_steps(message, of_group, _dead_letter_offset(message, group, stored))
    return sorted(found, key=lambda step: (step.at_ms, step.broker_group, step.offset))


def _stored(message: Row) -> Step:
    derived, text = parse_derived(message["subject"]), f"by producer {message['producer']}, batch {message['batch']}"
    if derived is not None:
        reason = (message["properties"] or {}).get(REASON, "")
        text = f"dead letter of {derived.group}: {reason}" if derived.kind == DEAD_LETTER else f"for {derived.group}"
    return Step(
        message["timestamp_ms"],
        message["broker_group"],
        message["offset"],
        message["subject"],
        message["sequence"],
        "stored",
        text=text,
    )


def _dead_letter_offset(message: Row, group: str, stored: Iterable[Row]) -> int | None:
    """Return the offset of the group's dead letter of the message, or None."""
    for other in stored:
        derived, properties = parse_derived(other["subject"]), other["properties"] or {}
        whose = derived.group if derived and derived.kind == DEAD_LETTER else properties.get(GROUP)
        if whose == group:
            of = properties.get(SEQUENCE)
            if other["broker_group"] == message["broker_group"] and of == str(message["sequence"]):
                return int(other["offset"])
    return None


def _message_steps(message: Row, events: list[Row], dead_at: int | None) -> Iterator[Step]:
    """Follow a message through one consumer group."""
    state, holder, number = LIFE.initial, "", -1
    for event in events:
        what, consumer = event["event"], event["consumer"] or ""
        by_consumer = what in _OF_PULLS and event["pull"] is not None
        if (by_consumer or what in _OF_CONSUMERS) and consumer != holder:
            continue  # this consumer does not hold the message
        if by_consumer and not event["pull"] <= number < event["pull"] + event["messages"]:
            continue
        if what in _OF_GROUPS:
            state, text = _moved(message, event)
        else:
            move = MessageEvent.ACK if by_consumer and what == "expired" else _EVENTS[what]
            if what == "ack" and dead_at is not None and dead_at < event["offset"]:
                move = MessageEvent.GIVE_UP
            try:
                state, text = LIFE.after(state, move), ""
            except IllegalTransition:
                text = "not a legal transition of its state"
        holder = consumer if state is MessageState.DELIVERED else ""
        if what == "pull":
            number = _number(message, event)
            text = f"pull sequence {number}"
        elif what == "nack" and event["due_ms"]:
            text = f"not before {event['due_ms']}"
        yield Step(
            event["timestamp_ms"],
            message["broker_group"],
            event["offset"],
            message["subject"],
            message["sequence"],
            what,
            event["consumer_group"],
            consumer,
            state.name.lower(),
            text,
        )


def _moved(message: Row, event: Row) -> tuple[MessageState, str]:
    if event["event"] == "forgotten":
        return MessageState.NEW, "the group was forgotten"
    state = MessageState.NEW if message["sequence"] >= event["sequence"] else MessageState.ACKED
    return state, f"the group begins at {event['sequence']}"
