"""Core. Trail of a message: its steps, from rows of the tables `messages` and `progress`."""

from __future__ import annotations

from typing import Any

import pytest

from qmq.audit.trail import steps
from qmq.subjects import dead_letter_subject

S, P = "order.changed", 1 << 32
DEAD = dead_letter_subject(S, "g")


def stored(offset: int = 100, subject: str = S, sequence: int = 7, **properties: str) -> dict[str, Any]:
    return {
        "broker_group": "g1",
        "offset": offset,
        "timestamp_ms": offset,
        "subject": subject,
        "sequence": sequence,
        "id": "m",
        "tags": [],
        "properties": properties,
        "producer": "0a",
        "batch": 3,
    }


def event(offset: int, what: str, consumer: str | None = "c", **fields: Any) -> dict[str, Any]:
    given = {
        "broker_group": "g1",
        "offset": offset,
        "timestamp_ms": offset,
        "subject": S,
        "event": what,
        "consumer_group": "g",
        "consumer": consumer,
        "pull": None,
        "sequence": None,
        "messages": None,
        "due_ms": None,
    }
    return given | fields


def pull(offset: int, consumer: str = "c", at: int = P) -> dict[str, Any]:
    """Delivers sequences 5 to 14: the message has the third pull sequence."""
    return event(offset, "pull", consumer, pull=at, sequence=5, messages=10)


def ack(offset: int, consumer: str = "c", begin: int = P, count: int = 10, what: str = "ack") -> dict[str, Any]:
    return event(offset, what, consumer, pull=begin, messages=count, due_ms=9_000 if what == "nack" else None)


@pytest.mark.parametrize(
    ("events", "life"),
    [
        pytest.param([], [], id="never delivered"),
        pytest.param([pull(200), ack(300)], [("pull", "delivered"), ("ack", "acked")], id="delivered and acked"),
        pytest.param([pull(200), ack(300, count=2), ack(310, begin=P + 3)], [("pull", "delivered")], id="others acked"),
        pytest.param([pull(200), ack(300, "d")], [("pull", "delivered")], id="another consumer acked"),
        pytest.param(
            [pull(200), ack(250, what="nack"), pull(300, "d", P + 50), ack(310), ack(320, "d", P + 52, 1)],
            [("pull", "delivered"), ("nack", "requeued"), ("pull", "delivered"), ("ack", "acked")],
            id="nacked, and acked by the next one; an ack of the first one is not its",
        ),
        pytest.param(
            [pull(200), event(210, "vanished", "d"), event(220, "vanished", "c"), event(230, "left", "c")],
            [("pull", "delivered"), ("vanished", "requeued")],
            id="its consumer vanished",
        ),
        pytest.param([event(200, "expired", sequence=7, messages=1)], [("expired", "acked")], id="expired"),
        pytest.param(
            [pull(200), ack(250, "d", what="expired"), ack(300, what="expired")],
            [("pull", "delivered"), ("expired", "acked")],
            id="expired in a consumer's hands",
        ),
        pytest.param([pull(200), ack(300, what="dead")], [("pull", "delivered"), ("dead", "dead")], id="a dead letter"),
        pytest.param([event(200, "passed", sequence=7, messages=1)], [("passed", "acked")], id="passed over"),
        pytest.param([event(200, "overflowed", sequence=7, messages=1)], [("overflowed", "acked")], id="overflowed"),
        pytest.param(
            [event(200, "deferred", sequence=7, messages=1), pull(300)],
            [("deferred", "requeued"), ("pull", "delivered")],
            id="deferred for its order key",
        ),
        pytest.param(
            [pull(200), ack(300), event(400, "position", None, sequence=2), pull(500, "c", P + 90)],
            [("pull", "delivered"), ("ack", "acked"), ("position", "new"), ("pull", "delivered")],
            id="its group was put back",
        ),
    ],
)
def test_each_event_moves_the_message_on(events: list[dict[str, Any]], life: list[tuple[str, str]]) -> None:
    found = steps([stored()], events[::-1])
    assert [step.what for step in found[:1]] == ["stored"] and "producer 0a, batch 3" in found[0].text
    assert [(step.what, step.state) for step in found[1:]] == life


def test_redriven_dead_letter_is_stored_three_times() -> None:
    died = stored(250, DEAD, 0, qmq_deadSequence="7", qmq_deadReason="timeout")
    back = stored(400, f"%RETRY%{S}%g", 0)
    redriven = event(450, "pull", subject=back["subject"], pull=P + 20, sequence=0, messages=1)
    found = steps([back, died, stored()], [pull(200), ack(260), redriven])
    assert [(step.offset, step.what, step.state) for step in found] == [
        (100, "stored", ""),
        (200, "pull", "delivered"),
        (250, "stored", ""),
        (260, "ack", "dead"),
        (400, "stored", ""),
        (450, "pull", "delivered"),
    ]
    assert [step.text for step in found if step.what == "stored"][1:] == ["dead letter of g: timeout", "for g"]
    other = steps([died, stored(sequence=8)], [pull(200), ack(260)])
    assert other[-1].state == "acked", "the dead letter is another message's"


def test_groups_have_a_life_each() -> None:
    other = [event | {"consumer_group": "h"} for event in (pull(210), ack(330, what="nack"))]
    found = steps([stored()], [pull(200), ack(300), *other])
    ends = {step.consumer_group: step.state for step in found}
    assert ends == {"": "", "g": "acked", "h": "requeued"}
