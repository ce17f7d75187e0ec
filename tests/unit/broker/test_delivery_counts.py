"""Core. One count of deliveries: the attempts that handlers see, `qmq_times`, and the number in the reason."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import NamedTuple

import pytest

from qmq.client.terms import RetryPolicy, refused_by_error, worn_out
from qmq.codec import encode_message, with_properties
from qmq.dead_letters import delivered, earlier_deliveries
from qmq.message import TIMES, Message
from qmq.remoting import commands
from qmq.remoting.commands import FLAG_SUSPECTED, Verdict
from qmq.subjects import retry_subject
from tests.unit.broker.test_dead_letters import dead_letters
from tests.unit.broker.world import Client, Group

WORN = ", and never acked"
FAIL, TIMEOUT = ValueError("no price"), TimeoutError("the handler ran for more than 5 s")
"""Errors of a handler: its own, and that of its time limit."""
UNSTARTED, VANISH, CRASH = "unstarted", "vanish", "crash"
"""A consumer returns the message unstarted at its shutdown; it vanishes before a handler begins; in a handler."""


class Delivered(NamedTuple):
    times: int
    properties: dict[str, str]


def deliver(group: Group, events: list[object], limit: int, broker_limit: int, source: str, times: str) -> list[int]:
    """Deliver one message until it is dead; return the attempts that handlers saw."""
    policy, seen, number = RetryPolicy(limit, 0.0), list[int](), 0
    for event in [*events, None]:
        client = group.client("c1")
        client.join("c1", subject=source, begins=True, deliveries_max=broker_limit)
        if not client.take():
            return seen  # the broker's limit
        (piece,) = commands.decode_pulled(memoryview(client.body(client.last_pull)))
        number, message = piece.pull_sequence, Delivered(piece.times + earlier_deliveries(times), {})
        if worn := worn_out(message, policy):
            client.done(client.nack(number, number + 1, verdict=worn.verdict, reason=worn.reason))
            return seen
        if event == UNSTARTED:
            client.done(client.nack(number, number + 1, verdict=Verdict.NOT_BEGUN))
        elif isinstance(event, Exception) or event == CRASH:
            seen.append(message.times)
            _handle(client, message, piece, event, policy)
        client.lost()
    return seen


def _handle(client: Client, message: Delivered, piece: commands.Piece, event: object, policy: RetryPolicy) -> None:
    number = piece.pull_sequence
    if piece.flags & FLAG_SUSPECTED:
        client.done(client.begin(number, number + 1))
    if isinstance(event, Exception):
        decision = refused_by_error(message, policy, event, datetime.now(UTC))
        client.done(client.nack(number, number + 1, verdict=decision.verdict, reason=decision.reason))


@pytest.mark.parametrize(
    ("events", "limit", "expected", "rest"),
    [
        pytest.param([FAIL], 1, [1], "; ValueError('no price')", id="first failure"),
        pytest.param([FAIL, FAIL, FAIL], 3, [1, 2, 3], "; ValueError('no price')", id="retries"),
        pytest.param([FAIL, VANISH, FAIL], 2, [1, 2], "; ValueError('no price')", id="consumer vanished"),
        pytest.param([CRASH, CRASH, CRASH], 2, [1, 1, 2], WORN, id="worn out by crashes"),
        pytest.param([FAIL, TIMEOUT], 2, [1, 2], f"; {TIMEOUT!r}", id="handler timeout"),
        pytest.param(
            [UNSTARTED, FAIL, UNSTARTED, FAIL], 2, [1, 2], "; ValueError('no price')", id="returned unstarted"
        ),
        pytest.param([FAIL, CRASH, CRASH, CRASH], 3, [1, 2, 2, 3], WORN, id="worn out after a failure"),
    ],
)
@pytest.mark.parametrize("times", ["", "5"], ids=["subject", "mailbox"])
def test_attempts_times_and_reason_agree(events, limit, expected, rest, times):
    """A crash that no BEGIN preceded is a suspicion: it is no attempt (decision 26)."""
    group, source, before = Group.made().start(), retry_subject("s", "g") if times else "s", earlier_deliveries(times)
    data = with_properties(encode_message(Message("s", id="m"), 0), {TIMES: times} if times else {})
    producer = group.client()
    producer.done(producer.produce_raw([data], subject=source))
    seen = deliver(group, events, limit + before, 0, source, times)
    (dead,) = dead_letters(group.a)
    assert seen == [count + before for count in expected]
    assert dead[TIMES] == str(seen[-1]) and dead["qmq_deadReason"] == delivered(seen[-1]) + rest


@pytest.mark.parametrize(
    ("events", "reason"),
    [
        ([FAIL, FAIL], "delivered 2 times, and never acked"),
        ([FAIL, VANISH], "delivered once (suspected: 1), and never acked"),
        ([VANISH, VANISH], "delivered 0 times (suspected: 2), and never acked"),
    ],
)
def test_brokers_limit_names_suspicions(events, reason):
    group = Group.made().start()
    group.client().store("m")
    seen = deliver(group, events, 9, 2, "s", "")
    (dead,) = dead_letters(group.a)
    assert (dead[TIMES], dead["qmq_deadReason"]) == (str(len(seen)), reason)
