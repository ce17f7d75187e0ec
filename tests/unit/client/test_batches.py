"""Shell. Handlers of lists: common and single outcomes, and no effect on neighbours."""

from __future__ import annotations

from collections import Counter

import pytest

import qmq
from qmq.errors import InvalidRequest
from tests.support.waiting import consuming, until_async
from tests.unit.client.world import fill, handling, ns


async def test_handler_gets_lists_and_acks_them():
    calls = []

    async def handle(messages: list[qmq.ReceivedMessage]) -> None:
        calls.append(ns(messages))

    async with handling(handle, 100, batch=7) as broker:
        await until_async(lambda: sum(map(len, calls)) == 100 and not broker.unacked())
    assert [number for call in calls for number in call] == list(range(100))
    assert max(map(len, calls)) == 7 and len(calls) < 40 and not broker.nacks


@pytest.mark.parametrize("raises", [False, True])
async def test_own_decisions_override_the_call(raises):
    handed = Counter()

    async def handle(messages: list[qmq.ReceivedMessage]) -> None:
        handed.update(numbers := ns(messages))
        if numbers == list(range(6)):
            messages[1].dead_letter_nowait("no such order")
            messages[2].nack_nowait("later", delay=0.01)
            messages[3].ack_nowait()
            if raises:
                raise ValueError("not now")

    async with handling(handle, 6, batch=6, retry_delay=0.01) as broker:
        await until_async(lambda: sum(handed.values()) == (10 if raises else 7) and not broker.unacked())
    assert handed == Counter({0: 2, 1: 1, 2: 2, 3: 1, 4: 2, 5: 2} if raises else [0, 1, 2, 2, 3, 4, 5])
    reasons = {nack.reason for nack in broker.nacks}
    assert reasons == {"no such order", "later"} | ({"ValueError('not now')"} if raises else set())


@pytest.mark.parametrize("retries_max", [3, 8, 32])
async def test_failing_message_dies_alone(retries_max):
    handled, dead = set(), []

    async def handle(messages: list[qmq.ReceivedMessage]) -> None:
        if 17 in (numbers := ns(messages)):
            if messages[0].times == retries_max:
                dead.append(numbers)
            raise ValueError("17 is a poison")
        handled.update(numbers)

    async with handling(handle, 100, batch=64, retries_max=retries_max, retry_delay=0.0) as broker:
        await until_async(lambda: dead and not broker.unacked())
    assert dead == [[17]] and handled == set(range(100)) - {17}


async def test_a_call_that_fails_is_logged_once(caplog):
    calls = []

    async def handle(messages: list[qmq.ReceivedMessage]) -> None:
        calls.append(len(messages))
        if len(calls) == 1:
            raise ValueError("not now")

    async with handling(handle, 50, batch=50, retry_delay=0.0) as broker:
        await until_async(lambda: len(calls) > 1 and not broker.unacked())
    (line,) = [record.getMessage() for record in caplog.records if "handler failed" in record.getMessage()]
    assert f"messages={calls[0]}" in line


async def test_suspected_message_has_its_own_list(consumer, broker):
    broker.suspected = {3, 4}
    fill(broker, range(10), apart=True)
    calls = []

    @consumer.listen("a", group="g", start="earliest", batch=10, concurrency=2)
    async def handle(messages: list[qmq.ReceivedMessage]) -> None:
        calls.append(ns(messages))
        assert {3, 4}.isdisjoint(calls[-1]) or broker.begun[-1] == calls[-1][0]

    async with consuming(consumer):
        await until_async(lambda: sum(map(len, calls)) == 10 and not broker.unacked())
    assert [3] in calls and [4] in calls and sorted(broker.begun) == [3, 4]


async def test_most_once_list_has_acked_messages():
    handled = []

    async def handle(messages: list[qmq.ReceivedMessage]) -> None:
        assert all(message.is_settled for message in messages)
        handled.extend(ns(messages))

    async with handling(handle, 30, batch=10, most_once=True):
        await until_async(lambda: len(handled) == 30)
    assert handled == list(range(30))


async def _filter(message, handle):
    await handle(message)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"batch": 100, "prefetch_messages": 99}, "prefetch"),
        ({"batch": 10, "filters": [_filter]}, "filters"),
    ],
)
def test_batches_that_cannot_be_are_refused_at_once(wrong, says):
    consumer = qmq.Consumer(metaserver="http://127.0.0.1:1", app="test", token="t")
    with pytest.raises(InvalidRequest, match=says):
        consumer.listen("a", group="g", **wrong)
