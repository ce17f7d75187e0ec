"""Shell. Producers and consumers in the lifespan of a FastAPI application."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from contextlib import asynccontextmanager

import httpx
import pytest
from fastapi import Depends, FastAPI

import qmq
import qmq.blocking
from qmq.fastapi import Clients
from qmq.testing import Broker
from tests.support.http import is_served
from tests.support.ports import free_ports
from tests.support.waiting import until

WAIT_S = 120.0
DOES_NOT_RUN = "consumer same does not run: another connection uses consumer_id 'same'; give each consumer its own"


@asynccontextmanager
async def serving(app):
    """Run the lifespan of an application; yield a client of it."""
    async with app.router.lifespan_context(app):
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://app") as web:
            yield web


def application(broker, handle, *, consumer_id=None):
    """Return an application that sends a message per POST, and handles it."""
    options = {"metaserver": broker.metaserver, "app": "shop"}
    producer, consumer = qmq.Producer(**options), qmq.Consumer(**options, consumer_id=consumer_id)
    clients = Clients(producer, consumer)
    app = FastAPI(lifespan=clients.lifespan)

    @consumer.listen("order", group="g", start="earliest")
    async def on_order(message):
        await handle(producer, message)

    provided = Depends(clients.producer)

    @app.post("/orders/{number}")
    async def order(number: int, producer: qmq.Producer = provided) -> str:
        return (await producer.send(qmq.Message("order", {"n": str(number)}))).outcome

    @app.get("/health", dependencies=[Depends(clients.check)])
    async def health() -> str:
        return "well"

    return app


async def nothing(producer, message):
    pass


async def test_application_sends_and_handles_while_it_runs():
    handled = []

    async def handle(producer, message):
        handled.append(message["n"])

    async with Broker() as broker:
        async with serving(application(broker, handle)) as web:
            assert (await web.post("/orders/1")).json() == "stored"
            await broker.wait_until_consumed("order", "g")
            assert (await web.get("/health")).json() == "well"
    assert handled == ["1"]


async def test_the_end_waits_for_handlers_which_can_still_send():
    began, may_end = asyncio.Event(), asyncio.Event()

    async def handle(producer, message):
        began.set()
        await may_end.wait()
        assert (await producer.send(qmq.Message("order.done", {"n": message["n"]}))).is_stored

    async with Broker() as broker:
        async with serving(application(broker, handle)) as web:
            await web.post("/orders/1")
            await began.wait()
            asyncio.get_running_loop().call_later(0.2, may_end.set)
        assert len(broker.messages("order.done")) == 1
        await broker.wait_until_consumed("order", "g")


async def test_health_reports_an_ended_consumer():
    async with Broker() as broker:
        async with serving(application(broker, nothing, consumer_id="same")) as web:
            async with asyncio.timeout(WAIT_S):
                while (await web.get("/health")).status_code != 200:
                    await asyncio.sleep(0.02)  # the broker has the subscription before the client has its answer
            other = qmq.Consumer(metaserver=broker.metaserver, app="other", consumer_id="same")
            async with other.pull("order", group="g"), asyncio.timeout(WAIT_S):
                while (answer := await web.get("/health")).status_code == 200 or DOES_NOT_RUN not in answer.text:
                    assert answer.status_code == 200 or "is not connected: order: it " in answer.text
                    await asyncio.sleep(0.02)  # it leaves its group
                assert (answer.status_code, answer.json()) == (503, {"detail": DOES_NOT_RUN})
                assert (await web.post("/orders/1")).json() == "stored"


async def test_health_names_the_cause_of_no_connection():
    """A worker that never connected looked healthy."""

    async with Broker() as broker:
        app = application(broker, nothing, consumer_id="c1")
    async with serving(app) as web, asyncio.timeout(WAIT_S):
        while "sent no route: " not in (answer := await web.get("/health")).text:
            await asyncio.sleep(0.02)
        assert answer.status_code == 503
        assert answer.json()["detail"].startswith("consumer c1 is not connected: order: the metaserver at ")


async def test_application_without_its_consumer_does_not_start():
    async with Broker() as broker:
        options = {"metaserver": broker.metaserver, "app": "shop"}
        producer = qmq.Producer(**options)
        app = FastAPI(lifespan=Clients(producer, qmq.Consumer(**options)).lifespan)
        with pytest.raises(qmq.InvalidRequest, match="nothing to run"):
            async with serving(app):
                pass
        with pytest.raises(qmq.ClientClosed):
            await producer.send(qmq.Message("order", {"n": "1"}))


SERVER = """
import asyncio, sys
import uvicorn
from fastapi import FastAPI
import qmq
import qmq.blocking
from qmq.fastapi import Clients

metaserver, port = sys.argv[1:]
consumer = qmq.Consumer(metaserver=metaserver, app="shop")
app = FastAPI(lifespan=Clients(consumer).lifespan)

@consumer.listen("order", group="g", start="earliest")
async def handle(message):
    print("began", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    print("ended", flush=True)

@app.get("/")
async def root():
    return "here"

uvicorn.run(app, host="127.0.0.1", port=int(port), log_level="warning")
"""


def test_sigterm_finishes_the_handler_and_its_ack(qmq_blocking_broker):
    [port], broker = free_ports(1), qmq_blocking_broker
    with qmq.blocking.Producer(metaserver=broker.metaserver, app="test") as producer:
        assert producer.send(qmq.Message("order", {"n": "1"})).is_stored
    command = [sys.executable, "-c", SERVER, broker.metaserver, str(port)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout.readline() == "began\n"
            until(lambda: is_served(f"http://127.0.0.1:{port}/"), "it serves", WAIT_S)
            server.send_signal(signal.SIGTERM)
            until(lambda: not is_served(f"http://127.0.0.1:{port}/"), "it serves no more", WAIT_S)
            server.stdin.write("\n")
            server.stdin.flush()
            assert server.stdout.readline() == "ended\n"
            broker.wait_until_consumed("order", "g")
            server.wait(WAIT_S)
        finally:
            server.kill()
