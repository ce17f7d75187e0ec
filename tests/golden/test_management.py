"""Shell. Requests of QMQ's own tools on /management and their answers: tests/golden/management/exchanges.json.

The exchanges run in order through the HTTP application and the actions of one metaserver.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from urllib.parse import urlencode

import httpx
import pytest

from qmq.metaserver.access import Access
from qmq.metaserver.actions import ACTIONS, Answer, Status
from qmq.metaserver.http.app import build_app
from qmq.metaserver.http.endpoints import render
from qmq.metaserver.http.guard import Limits
from qmq.metaserver.rpc.access import Refusals
from tests.unit.metaserver.actions_world import World, left

GOLDEN = json.loads((Path(__file__).parent / "management" / "exchanges.json").read_text())
EXCHANGES = GOLDEN["exchanges"]
TOKEN = "the key of the installation"


def pattern(answer):
    """Return the regular expression of an answer in which <text> and <ms> are placeholders."""
    parts = re.split(r"(<text>|<ms>)", answer)
    wild = {"<text>": r'[^"]+', "<ms>": r"[1-9]\d{12}"}
    return "".join(wild.get(part) or re.escape(part) for part in parts)


async def prepare(world, given):
    if "route" in given:
        subject, groups = given["route"]
        await world.routed(subject, groups=tuple(groups))
    for group, hostname in given.get("consumers", ()):
        await world.start(hostname)
        world.brokers.progress[group] = [left("s1", "shop", 0)]


def ask(client, exchange):
    words = {"X-Api-Token": exchange.get("token", TOKEN)}
    if exchange.get("in") == "query":
        return client.post(f"/management?{urlencode(exchange['request'])}", headers=words)
    return client.post("/management", data=exchange["request"], headers=words)


@pytest.mark.slow
async def test_management_answers_equal_qmqs(tmp_path):
    """Weakness 36: QMQ has three styles and mixed languages; ours are the same styles in one language."""

    world = World(tmp_path / "metaserver.db")
    await world.open()
    app = build_app(
        world.actions,
        Access([TOKEN]),
        world.metrics,
        Refusals(world.metrics),
        address="10.0.0.1:8081",
        database_trouble=lambda: "",
        limits=Limits(body_bytes_max=10_000, admin_body_bytes_max=10_000, body_timeout_ms=1000),
    )
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://m") as client:
        for exchange in EXCHANGES:
            if "given" in exchange:
                await prepare(world, exchange["given"])
                continue
            answer = await ask(client, exchange)
            assert answer.status_code == 200, exchange["claim"]
            assert answer.headers["content-type"].startswith(exchange.get("type", "application/json"))
            assert re.fullmatch(pattern(exchange["answer"]), answer.text), f"{exchange['claim']}: {answer.text}"
    world.database.close()


def test_every_action_of_qmq_has_an_exchange():
    asked = {exchange["request"].get("action") for exchange in EXCHANGES if "request" in exchange}
    assert asked >= {
        "AddBroker",
        "ReplaceBroker",
        "ListBrokers",
        "ListBrokerGroups",
        "ListSubjectRoutes",
        "AddSubjectBrokerGroup",
        "RemoveSubjectBrokerGroup",
        "AddNewSubject",
        "ExtendSubjectRoute",
        "AddDb",
        "MarkReadonlyBrokerGroup",
        "UnMarkReadonlyBrokerGroup",
        "ResetOffset",
        "QuerySubjectRoute",
    }


def test_unknown_outcome_is_no_refusal():
    for name in ("AddBroker", "AddNewSubject", "AddSubjectBrokerGroup", "ListBrokerGroups"):
        body = json.loads(render(ACTIONS[name], Answer(Status.UNKNOWN, "who knows"), {}).text)
        assert body["status"] == Status.UNKNOWN, name
