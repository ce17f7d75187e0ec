"""Shell. Every request's token, size and log line; health, metrics and CORS."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

from qmq.gateway.guard import access_log
from tests.unit.gateway.gateway_world import BILLING, ORDERS, gateway

ROOT = Path(__file__).parents[3]


@pytest.fixture
async def world():
    async with gateway(body_bytes_max=1_000) as running:
        yield running


@pytest.mark.parametrize("token, status", [("", 401), ("wrong", 401), ("shop", 201)])
async def test_token_is_checked_before_the_request(world, token, status):
    answer = await world.http.post(ORDERS, json={}, headers={"Authorization": f"Bearer {token}"})
    assert answer.status_code == status
    if status == 401:
        assert answer.headers["WWW-Authenticate"] and answer.json()["error"]["code"] == "UNAUTHORIZED"
        assert world.clients.tokens == 0


async def test_long_request_is_refused(world):
    answer = await world.http.post(ORDERS, content=b"x" * 1_001)
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "TOO_LARGE")


async def test_unknown_address_and_method_have_a_remedy(world):
    assert (await world.http.get("/v1/nothing")).json()["error"]["code"] == "NOT_FOUND"
    answer = await world.http.get(ORDERS)
    assert (answer.status_code, answer.headers["Allow"]) == (405, "POST")


async def test_access_log_has_no_token(world, monkeypatch, caplog):
    monkeypatch.setattr(access_log, "propagate", True)
    with caplog.at_level(logging.INFO):
        await world.http.post(ORDERS + "?token=shop", json={"properties": {"secret": "shop"}})
    (line,) = [record.getMessage() for record in caplog.records if record.name == access_log.name]
    assert line.startswith("request peer=127.0.0.1 method=POST path=/v1/subjects/order/messages status=201 bytes=")
    assert "shop" not in line


async def test_metrics_need_a_viewer(world):
    await world.http.post(ORDERS, json={})
    assert (await world.http.get("/metrics")).status_code == 403
    text = (await world.http.get("/metrics", headers={"Authorization": "Bearer viewer"})).text
    route = 'method="POST",route="/v1/subjects/{subject}/messages",status="201"'
    assert f"qmq_gateway_requests_total{{{route}}} 1.0" in text and 'sent_total{outcome="stored"} 1.0' in text


async def test_every_metric_is_documented(world):
    written = (ROOT / "docs" / "gateway.md").read_text()
    text = (await world.http.get("/metrics", headers={"Authorization": "Bearer viewer"})).text
    names = re.findall(r"(?m)^# TYPE qmq_gateway(_\w+) (?:gauge|counter|histogram)", text)
    names = [name for name in names if not name.endswith("_created")]
    assert len(names) > 8
    assert [name for name in names if f"{name}{{" not in written and f"{name}`" not in written] == []


async def test_ready_states_the_trouble(world):
    assert (await world.http.get("/ready")).json() == {"ready": True, "trouble": ""}
    world.access.is_up = False
    answer = await world.http.get("/ready")
    assert answer.status_code == 503 and "metaserver" in answer.json()["trouble"]
    assert (await world.http.get("/live")).status_code == 200


async def test_stopping_gateway_refuses_requests(world):
    await world.clients.close()
    answer = await world.http.post(f"{BILLING}/pull")
    assert (answer.status_code, answer.headers["Connection"]) == (503, "close")
    assert (await world.http.get("/ready")).status_code == 503


async def test_cors_is_off_by_default(world):
    answer = await world.http.get("/live", headers={"Origin": "https://shop.example"})
    assert "Access-Control-Allow-Origin" not in answer.headers


async def test_cors_admits_the_configured_origin():
    async with gateway(cors_origins=("https://shop.example",)) as world:
        for origin, allowed in (("https://shop.example", True), ("https://other.example", False)):
            asked = {"Origin": origin, "Access-Control-Request-Method": "POST"}
            answer = await world.http.options(ORDERS, headers=asked)
            assert ("Access-Control-Allow-Origin" in answer.headers) is allowed


async def test_unused_tokens_give_way_to_new_ones():
    async with gateway(tokens_max=2) as world:
        key = {"Idempotency-Key": "a-key-of-shop-0"}
        for number in (0, 1, 0, 2, 0):
            token = {"Authorization": f"Bearer shop{number}"}
            answer = await world.http.post(ORDERS, json={}, headers=token | (key if number == 0 else {}))
            assert answer.status_code == 201
        assert world.clients.tokens == 2 and answer.headers["Idempotent-Replayed"] == "true"
