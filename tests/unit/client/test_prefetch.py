"""Core, Shell. Prefetch of a listener, and the backlog left to other consumers."""

from __future__ import annotations

import asyncio

import pytest

from qmq.client.prefetch import AHEAD_S, BEFORE_KNOWN_MIN, Prefetch
from tests.support.waiting import consuming, until_async
from tests.unit.client.world import consumer_of, fill, handled_by


@pytest.mark.parametrize(
    "handler_s, concurrency, messages_max, wanted",
    [
        pytest.param(None, 1, 1000, BEFORE_KNOWN_MIN, id="nothing known"),
        pytest.param(None, 64, 1000, 128, id="nothing known, many handlers"),
        pytest.param(None, 1, 2, 2, id="nothing known, a small bound"),
        pytest.param(0.0, 1, 1000, 1000, id="too short to measure"),
        pytest.param(5e-6, 1, 1000, 1000, id="fast"),
        pytest.param(0.001, 1, 1000, 500, id="a millisecond"),
        pytest.param(0.2, 1, 1000, 3, id="slow"),
        pytest.param(0.2, 8, 1000, 20, id="slow, eight at once"),
        pytest.param(60.0, 1, 1000, 1, id="very slow"),
        pytest.param(60.0, 8, 1000, 8, id="very slow: one waits for each handler"),
        pytest.param(60.0, 8, 5, 5, id="never more than the application allows"),
    ],
)
def test_prefetch_is_half_a_second_of_work(handler_s, concurrency, messages_max, wanted):
    prefetch = Prefetch(messages_max, concurrency)
    if handler_s is not None:
        prefetch.record_call(handler_s)
    assert prefetch.messages == wanted


def test_slow_handler_is_noticed_soon():
    prefetch = Prefetch(1000, 1)
    prefetch.record_call(1e-5)
    assert prefetch.messages == 1000
    for _ in range(4):
        prefetch.record_call(0.2)
    assert prefetch.messages <= 2 * AHEAD_S / 0.2


def test_more_handlers_at_once_ask_for_more():
    prefetch = Prefetch(1000, 1)
    prefetch.record_call(0.25)
    prefetch.set_concurrency(10)
    assert prefetch.messages == 20


async def test_slow_backlog_stays_shared(metaserver, broker):
    """Regression: with a prefetch of 1,000, the first consumer took all 100 messages of 0.2 s each."""
    fill(broker, range(100))
    first, second, ended = consumer_of(metaserver), consumer_of(metaserver), asyncio.Event()
    slow, fast = handled_by(first, ended), handled_by(second)
    async with consuming(first):
        await until_async(lambda: slow.messages)
        async with consuming(second):
            await until_async(lambda: len(fast.messages) >= 90)
        ended.set()
