"""Shell. A gateway in this process: its application without a port, on the in-memory broker."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import httpx

from qmq.errors import AccessError, MissingRight
from qmq.gateway.app import build_app
from qmq.gateway.clients import Clients
from qmq.gateway.guard import VIEWER
from qmq.gateway.metrics import Metrics
from qmq.gateway.settings import GatewaySettings
from qmq.testing import Broker

WAIT_S = 30
ORDERS = "/v1/subjects/order/messages"
BILLING = "/v1/subjects/order/groups/billing"
START = {"start": "earliest"}


class StubAccess:
    """Accepts tokens that begin with "shop"; "viewer" may read metrics."""

    is_up = True

    async def check(self, token, address=""):
        if not token:
            raise AccessError("the API token is missing")
        if address == VIEWER and token != "viewer":
            raise MissingRight("the token lacks the role viewer")
        if not token.startswith(("shop", "viewer")):
            raise AccessError("the token is rejected")

    async def check_subject(self, token, subject, *, produces):
        if subject.startswith("secret"):
            raise MissingRight("the token may not")

    async def trouble(self):
        return "" if self.is_up else "the metaserver does not answer"


class World:
    """A gateway with its broker; `get`, `post` and `delete` send requests as the token "shop"."""

    def __init__(self, broker, **settings):
        self.broker = broker
        self.settings = GatewaySettings(metaserver=broker.metaserver, **{"stop_s": 2} | settings)
        self.metrics = Metrics()
        self.access = StubAccess()
        self.clients = Clients(self.settings, self.metrics)
        self.app = build_app(self.settings, self.clients, self.access, self.metrics)
        self.http = httpx.AsyncClient(
            transport=httpx.ASGITransport(self.app),
            base_url="http://gateway",
            headers={"Authorization": "Bearer shop"},
            timeout=WAIT_S,
        )

    async def send(self, *messages, subject="order"):
        answer = await self.http.post(f"/v1/subjects/{subject}/messages:batch", json={"messages": list(messages)})
        assert answer.status_code == 201, answer.text

    async def pull(self, token="shop", **query):
        parameters = START | {"wait_s": WAIT_S} | query
        headers = {"Authorization": f"Bearer {token}"}
        answer = await self.http.post(f"{BILLING}/pull", params=parameters, headers=headers)
        assert answer.status_code == 200, answer.text
        return answer.json()["messages"]

    async def decide(self, action, *messages, token="shop", **more):
        body = {"handles": [message["handle"] for message in messages], **more}
        answer = await self.http.post(f"{BILLING}/{action}", json=body, headers={"Authorization": f"Bearer {token}"})
        return answer.status_code, [result["outcome"] for result in answer.json()["results"]]

    def tick(self, seconds=0.0):
        self.clients.tick(asyncio.get_running_loop().time() + seconds)

    def counted(self, name, **labels):
        return self.metrics.registry.get_sample_value(f"qmq_gateway_{name}", labels) or 0.0


@asynccontextmanager
async def gateway(**settings):
    async with Broker() as broker, gateway_of(broker, **settings) as world:
        yield world


@asynccontextmanager
async def gateway_of(broker, **settings):
    world = World(broker, **settings)
    try:
        yield world
    finally:
        await world.clients.close()
        await world.http.aclose()
