"""Shell. HTTP side with its real guard, tokens and routes, and actions that only record their calls."""

from __future__ import annotations

import random

import httpx

from qmq.errors import QmqError
from qmq.metaserver.access import Access, new_token
from qmq.metaserver.actions import ACTIONS, Answer, Status
from qmq.metaserver.actions.arguments import read_arguments
from qmq.metaserver.http.app import build_app
from qmq.metaserver.http.guard import Limits
from qmq.metaserver.observability.metrics import Metrics
from qmq.metaserver.rpc.access import Refusals, wall_ms
from qmq.rights import TokenRole

CLUSTER = "the key of the installation"
LIMITS = Limits(body_bytes_max=1000, admin_body_bytes_max=100_000, body_timeout_ms=100)
OPEN = {"/meta/address", "/health/live", "/health/ready"}


class FakeActions:
    """Fake actions: check words as the real ones do, and record the calls."""

    def __init__(self):
        self.ran = []
        self.answer = None

    async def run(self, name, words, caller):
        try:
            read_arguments(ACTIONS[name], words)
        except QmqError as error:
            return Answer(Status.REFUSED, str(error), code=type(error).__name__)
        self.ran.append((name, dict(words), caller))
        answer = self.answer or Answer(Status.DONE, data={"did": name})
        if isinstance(answer, Exception):
            raise answer
        return answer if isinstance(answer, Answer) else await answer()


class HttpWorld:
    """The application, one token of each role, and a client for it."""

    def __init__(self, limits=LIMITS, **options):
        self.actions = FakeActions()
        self.access = Access([CLUSTER])
        self.metrics = Metrics()
        self.tokens = {TokenRole.CLUSTER: CLUSTER}
        rows = []
        for seed, role in enumerate(set(TokenRole) - {TokenRole.CLUSTER}):
            dice = random.Random(seed).randbytes
            row, self.tokens[role] = new_token(role, role, known=(), random_bytes=dice, now_ms=wall_ms())
            rows.append(row)
        self.access.replace(rows)
        self.app = build_app(
            self.actions,
            self.access,
            self.metrics,
            Refusals(self.metrics),
            address="10.0.0.1:8081",
            database_trouble=lambda: "",
            limits=limits,
            **options,
        )
        transport = httpx.ASGITransport(self.app, client=("10.0.0.9", 5))
        self.client = httpx.AsyncClient(transport=transport, base_url="http://metaserver")

    def headers(self, role):
        return {} if role is None else {"X-Api-Token": self.tokens[role]}
