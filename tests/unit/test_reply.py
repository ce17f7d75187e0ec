"""Shell. Request and reply over an in-memory broker: each request gets its own answer, or an error in time."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest

import qmq
from qmq.errors import InvalidMessage, NoAnswer, NotServed
from qmq.reply import Requester, is_request, reply
from qmq.testing import Broker
from tests.support.waiting import until_async

QUERY, ANSWERS = "price.query", "price.answers"
LONG_S = 120.0


class Shop:
    """Producer, requester, and a service that answers with `answer`."""

    def __init__(self, broker, producer, requester):
        self.broker = broker
        self.producer = producer
        self.requester = requester

    async def ask(self, number, timeout=LONG_S):
        answer = await self.requester.request(qmq.Message(QUERY, {"n": str(number)}), timeout=timeout)
        return answer["square"]


@asynccontextmanager
async def shop(answer=None):
    """Run a service with the handler `answer(producer, message)`; by default it answers with the square of a number."""
    async with Broker() as broker:
        options = {"metaserver": broker.metaserver, "app": "shop"}
        service, client = qmq.Consumer(**options), qmq.Consumer(**options)
        async with qmq.Producer(**options) as producer:

            @service.listen(QUERY, group="prices", start="earliest", concurrency=8, retry_delay=0.0)
            async def on_query(message):
                await (answer or squared)(producer, message)

            running = asyncio.create_task(service.run())
            try:
                async with Requester(producer, client, reply_subject=ANSWERS) as requester:
                    yield Shop(broker, producer, requester)
            finally:
                running.cancel()
                await asyncio.wait([running])


async def squared(producer, message):
    await reply(producer, message, qmq.Message("", {"square": str(message.get_int("n") ** 2)}))


async def silent(producer, message):
    pass


async def test_each_request_gets_its_own_answer():
    async with shop() as world:
        answers = await asyncio.gather(*(world.ask(number) for number in range(200)))
        assert answers == [str(number**2) for number in range(200)]
        assert (world.requester.waiting, world.requester.late_answers) == (0, 0)


async def test_answers_survive_reconnects_and_failover():
    async with shop() as world:
        assert await world.ask(1) == "1"
        for trouble in (world.broker.drop_connections, world.broker.swap_roles):
            asking = asyncio.create_task(world.ask(3))
            await asyncio.sleep(0)
            trouble()
            assert await asking == "9"


async def test_missing_answer_raises_no_answer():
    async with shop(silent) as world:
        with pytest.raises(NoAnswer, match="no answer to message .* within 1.5 s"):
            await world.ask(1, timeout=1.5)
        assert world.requester.waiting == 0


async def test_late_answers_are_counted():
    may_answer = asyncio.Event()

    async def late(producer, message):
        if message["n"] == "1":
            await may_answer.wait()
        await squared(producer, message)
        await squared(producer, message)

    async with shop(late) as world:
        with pytest.raises(NoAnswer):
            await world.ask(1, timeout=1.5)
        assert await world.ask(2) == "4"
        may_answer.set()
        await until_async(lambda: world.requester.late_answers == 3)
        assert await world.ask(3) == "9"


async def test_requesters_get_their_own_answers():
    async with shop() as world:
        other = qmq.Consumer(metaserver=world.broker.metaserver, app="shop")
        async with Requester(world.producer, other, reply_subject=ANSWERS) as second:
            answers = await asyncio.gather(
                *(world.ask(number) for number in range(20)),
                *(second.request(qmq.Message(QUERY, {"n": str(number)}), timeout=LONG_S) for number in range(20)),
            )
            assert [answer["square"] for answer in answers[20:]] == answers[:20]
            assert (world.requester.late_answers, second.late_answers) == (0, 0)


async def test_unstored_request_fails_at_once():
    async with shop() as world:
        world.broker.refuse_next(InvalidMessage("not today"))
        with pytest.raises(NotServed, match="not stored: .*not today"):
            await world.ask(1)
        with pytest.raises(InvalidMessage):
            await world.requester.request(qmq.Message(QUERY, {"n": object()}), timeout=LONG_S)
        assert world.requester.waiting == 0


async def test_unstored_answer_retries_the_request():
    times = []

    async def refused_once(producer, message):
        times.append(message.times)
        if len(times) == 1:
            world.broker.refuse_next(InvalidMessage("not today"))
        await squared(producer, message)

    async with shop(refused_once) as world:
        assert await world.ask(5) == "25"
        assert times == [1, 2]


async def test_cancelled_request_does_not_wait():
    async with shop(silent) as world:
        asking = asyncio.create_task(world.ask(1))
        await until_async(lambda: world.requester.waiting)
        asking.cancel()
        await asyncio.wait([asking])
        assert asking.cancelled() and world.requester.waiting == 0


async def test_closing_ends_waiting_requests():
    async with shop(silent) as world:
        client = qmq.Consumer(metaserver=world.broker.metaserver, app="shop")
        async with Requester(world.producer, client, reply_subject=ANSWERS) as requester:
            asking = asyncio.create_task(requester.request(qmq.Message(QUERY, {"n": "1"}), timeout=LONG_S))
            await until_async(lambda: requester.waiting)
        with pytest.raises(qmq.ClientClosed, match="the requester is closed"):
            await asking
        with pytest.raises(qmq.ClientClosed, match="not open"):
            await requester.request(qmq.Message(QUERY, {"n": "1"}), timeout=LONG_S)
        assert requester.waiting == 0


async def test_replaced_requester_fails_all_requests():
    async with shop(silent) as world:
        options = {"metaserver": world.broker.metaserver, "app": "shop", "consumer_id": "same"}
        requester = Requester(world.producer, qmq.Consumer(**options), reply_subject=ANSWERS)
        two = Requester(world.producer, qmq.Consumer(**options), reply_subject=ANSWERS)
        async with requester:
            asking = asyncio.create_task(requester.request(qmq.Message(QUERY, {"n": "1"}), timeout=LONG_S))
            await world.broker.wait_until_subscribed(ANSWERS, "same")
            async with two:
                with pytest.raises(qmq.SubscriptionReplaced):
                    await asking
                with pytest.raises(qmq.SubscriptionReplaced):
                    await requester.request(qmq.Message(QUERY, {"n": "1"}), timeout=LONG_S)


async def test_only_requests_are_answered():
    async with shop() as world:
        message = qmq.Message(QUERY, {"n": "1"}, id="id-1")
        assert not is_request(message)
        with pytest.raises(qmq.InvalidRequest, match="message id-1 is no request"):
            await reply(world.producer, message, qmq.Message("", {}))


async def test_requester_makes_its_clients_of_the_environment(monkeypatch):
    async with shop() as service:
        monkeypatch.setenv("QMQ_METASERVER", service.broker.metaserver)
        monkeypatch.setenv("QMQ_APP", "shop")
        requester = Requester(reply_subject=ANSWERS)
        for number in (3, 4):  # each time with another producer
            async with requester:
                answer = await requester.request(qmq.Message(QUERY, {"n": str(number)}), timeout=LONG_S)
                assert int(answer["square"]) == number * number
