"""Shell. Producers and consumers in the lifespan of a Litestar application."""

from __future__ import annotations

from contextlib import asynccontextmanager

import httpx
import pytest
from litestar import Litestar, get, post
from litestar.di import NamedDependency
from litestar.params import FromPath

import qmq
from qmq.litestar import Clients

ADDRESS = {"metaserver": "http://metaserver.invalid:8080", "app": "shop"}
HANDLED = []
producer, consumer = qmq.Producer(**ADDRESS), qmq.Consumer(**ADDRESS, consumer_id="c1")
clients = Clients(producer, consumer)


@consumer.listen("order", group="g", start="earliest")
async def on_order(message: qmq.ReceivedMessage) -> None:
    HANDLED.append(message["n"])


@post("/orders/{number:int}")
async def order(number: FromPath[int], producer: NamedDependency[qmq.Producer]) -> str:
    return (await producer.send(qmq.Message("order", {"n": str(number)}))).outcome


@get("/health", guards=[clients.check])
async def health() -> str:
    return "well"


@get("/running", guards=[clients.check_running])
async def running() -> str:
    return "runs"


app = Litestar(
    [order, health, running],
    lifespan=[clients.lifespan],
    dependencies=clients.dependencies,
    logging_config=None,  # of the whole process
)


@asynccontextmanager
async def web(*, is_begun=True):
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://app") as client:
        if not is_begun:
            yield client
            return
        async with app.lifespan():
            yield client


@pytest.mark.parametrize("number", ["1", "2"])
async def test_litestar_sends_and_handles_in_each_run(qmq_broker, number):
    HANDLED.clear()
    async with web() as client:
        assert (await client.post(f"/orders/{number}")).text == "stored"
        await qmq_broker.wait_until_consumed("order", "g")
        assert [(await client.get(path)).text for path in ("/health", "/running")] == ["well", "runs"]
    assert HANDLED == [number]


async def test_litestar_health_names_the_consumer_that_does_not_run():
    async with web(is_begun=False) as client:
        for path in ("/health", "/running"):
            answer = await client.get(path)
            assert (answer.status_code, answer.json()["detail"]) == (503, "consumer c1 does not run")
