"""Shell. Messages of higher priority go first, and delay nothing once they are gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

import qmq
from qmq.errors import InvalidRequest
from tests.support.waiting import consuming, until_async
from tests.unit.client.test_prefetch import released
from tests.unit.client.world import LocalBroker, LocalMetaserver, cluster, consumer_of, fill

SUBJECTS = {"a": 0, "b": 1, "c": 9}
"""Subjects with the priorities of their listeners."""


class Calls:
    """Consumer with a listener per subject; its calls end on request."""

    def __init__(self, metaserver: LocalMetaserver, subjects: str) -> None:
        self.client = consumer_of(metaserver)
        self.began: list[str] = []
        self._open: dict[str, list[asyncio.Future[None]]] = {subject: [] for subject in SUBJECTS}
        for subject in subjects:
            priority = SUBJECTS[subject]
            self.client.listen(subject, group="g", start="earliest", priority=priority)(self._handle)

    async def _handle(self, message: qmq.ReceivedMessage) -> None:
        self.began.append(f"{message.subject}{message['n']}")
        self._open[message.subject].append(asyncio.get_running_loop().create_future())
        await self._open[message.subject][-1]

    def end(self, subject: str) -> None:
        """End the oldest call of this subject."""
        self._open[subject].pop(0).set_result(None)

    async def until(self, *began: str) -> None:
        await until_async(lambda: len(self.began) >= len(began))
        for _ in range(20):  # any other call would begin within a few turns
            await asyncio.sleep(0)
        assert self.began == list(began)

    async def waiting(self, subject: str, count: int) -> None:
        await until_async(lambda: self.subscription(subject).waiting_messages == count)

    def listener(self, subject: str) -> qmq.Listener:
        return self.client.listeners[subject, "g"]

    def subscription(self, subject: str):
        subscription = self.listener(subject)._subscription
        assert subscription is not None
        return subscription


@asynccontextmanager
async def calling(subjects: str = "ab") -> AsyncIterator[tuple[LocalBroker, Calls]]:
    """Run listeners of these subjects; end their calls at the end."""
    async with cluster("g1") as (metaserver, [broker]):
        calls = Calls(metaserver, subjects)
        async with consuming(calls.client):
            try:
                yield broker, calls
            finally:
                for subject, open_calls in calls._open.items():
                    while open_calls:
                        calls.end(subject)


async def one_class_waits_for_another(broker: LocalBroker, calls: Calls) -> None:
    """Start a call of higher priority, with a message waiting behind it, and two messages of lower priority."""
    fill(broker, range(2), "b")
    await calls.until("b0")
    fill(broker, range(2), "a")
    await calls.waiting("a", 2)
    await calls.until("b0")


async def test_higher_priority_is_emptied_first():
    async with calling("abc") as (broker, calls):
        fill(broker, range(3), "a")
        await calls.until("a0")
        fill(broker, range(3), "b")
        await calls.waiting("b", 2)
        await calls.until("a0", "b0")
        fill(broker, range(1), "c")
        await calls.until("a0", "b0", "c0")  # each class has a call of its own
        calls.end("a")
        await calls.until("a0", "b0", "c0")
        calls.end("b")
        await calls.until("a0", "b0", "c0", "b1")
        calls.end("b")
        await calls.until("a0", "b0", "c0", "b1", "b2", "a1")  # the last of them has begun, so others may


async def test_next_priority_follows_the_highest():
    async with calling("abc") as (broker, calls):
        fill(broker, range(2), "c")
        await calls.until("c0")
        for subject in "ba":
            fill(broker, range(2), subject)
            await calls.waiting(subject, 2)
        await calls.until("c0")
        calls.listener("c").stop()
        await calls.until("c0", "b0")
        assert released(broker)
        calls.end("b")
        await calls.until("c0", "b0", "b1", "a0")


async def test_idle_workers_are_not_woken():
    """A wake-up would cost something with thousands of idle workers."""

    async with calling() as (broker, calls):
        await until_async(lambda: calls.listener("a")._subscription is not None and calls.subscription("a")._takers)
        before = list(calls.subscription("a")._takers)
        fill(broker, range(1), "b")
        await calls.until("b0")
        assert list(calls.subscription("a")._takers) == before


async def test_lower_priority_continues_after_lost_connection():
    async with calling() as (broker, calls):
        await one_class_waits_for_another(broker, calls)
        for parcel in calls.subscription("b")._parcels:
            parcel.messages[0]._piece.is_dropped = True
        calls.subscription("b").drop()
        await calls.until("b0", "a0")


async def test_waiting_listener_stops_at_once():
    async with calling() as (broker, calls):
        await one_class_waits_for_another(broker, calls)
        subscription = calls.subscription("a")
        calls.listener("a").stop()
        await until_async(lambda: calls.listener("a")._subscription is None)
        assert subscription.is_closing and sum(entry.end - entry.begin for entry in released(broker)) >= 2
        assert calls.began == ["b0"]


async def test_equal_priorities_do_not_wait():
    async with calling() as (broker, calls):
        calls.client.listen("d", group="g", start="earliest", priority=1)(calls._handle)
        calls._open["d"] = []
        fill(broker, range(2), "b")
        await calls.until("b0")
        fill(broker, range(1), "d")
        await calls.until("b0", "d0")


@pytest.mark.parametrize("priority", [-1, 10, 1.5, True, "1", None])
def test_a_priority_is_one_of_few(priority):
    consumer = qmq.Consumer(metaserver="http://127.0.0.1:1", app="test", token="t")
    with pytest.raises(InvalidRequest, match="priority is a whole number, 0 to 9"):
        consumer.listen("a", group="g", priority=priority)
    assert not consumer.listeners
