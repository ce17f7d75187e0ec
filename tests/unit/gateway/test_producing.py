"""Shell. Messages stored through the gateway's HTTP addresses: outcomes, keys, limits."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

import pytest

from qmq.errors import InvalidMessage, OutcomeUnknown
from qmq.gateway.models import _plain
from tests.unit.gateway.gateway_world import ORDERS, gateway

KEY = {"Idempotency-Key": "a-key-of-one-message"}
ORDER = {"properties": {"orderNo": "17"}}


@pytest.fixture
async def world():
    async with gateway(send_s=2) as running:
        yield running


async def test_stored_message_has_a_receipt(world):
    answer = await world.http.post(ORDERS, json=ORDER | {"tags": ["paid"], "id": "m1", "order_key": "17"})
    assert answer.status_code == 201
    assert answer.json() == {
        "outcome": "stored",
        "id": "m1",
        "subject": "order",
        "broker_group": "test",
        "sequence": 0,
    }
    (message,) = world.broker.messages("order")
    assert (message["orderNo"], message.tags, message.order_key) == ("17", {"paid"}, "17")


async def test_delayed_message_has_a_due_time(world):
    answer = await world.http.post(ORDERS, json=ORDER | {"delay_s": 3600})
    assert answer.status_code == 201 and answer.json()["due_ms"] > 0
    assert len(world.broker.delayed("order")) == 1


@pytest.mark.parametrize(
    "given, body",
    [
        ({"body": '{"a": "ü"}', "content_type": "application/json"}, '{"a": "ü"}'.encode()),
        ({"body": "", "content_type": "text/plain"}, b""),
        ({"body_base64": "AP+A", "content_type": "image/png"}, b"\x00\xff\x80"),
    ],
)
async def test_payload_returns_as_it_was_sent(world, given, body):
    assert (await world.http.post(ORDERS, json=ORDER | given)).status_code == 201
    (message,) = world.broker.messages("order")
    assert (message.body, message.content_type) == (body, given["content_type"])
    (pulled,) = await world.pull()
    assert given.items() <= pulled.items() and not {"body", "body_base64"} <= pulled.keys()


async def test_property_keeps_its_type(world):
    given = {"text": "7", "whole": 7, "real": 0.5, "yes": True}
    await world.send({"properties": given})
    (pulled,) = await world.pull()
    assert pulled["properties"] == given
    found = _plain({"late": datetime(2026, 1, 31, tzinfo=UTC), "none": float("nan")})
    assert found == {"late": "2026-01-31T00:00:00+00:00", "none": "nan"}


async def test_raw_request_is_the_payload(world):
    query = {"property": ["orderNo=17", "note=a=b"], "tags": ["paid"], "delay_s": "0"}
    headers = KEY | {"Content-Type": "application/x-protobuf"}
    answers = [
        await world.http.post(f"{ORDERS}:raw", params=query, content=content, headers=headers)
        for content in (b"\x00\xff", b"\x00\xff", b"\x00\xfe")
    ]
    assert [answer.status_code for answer in answers] == [201, 201, 422]
    (pulled,) = await world.pull()
    assert (pulled["body_base64"], pulled["content_type"]) == ("AP8=", "application/x-protobuf")
    assert pulled["properties"]["orderNo"] == "17" and pulled["properties"]["note"] == "a=b"


async def test_readonly_group_refuses_with_503(world):
    world.broker.readonly()
    answer = await world.http.post(ORDERS, json=ORDER)
    body = answer.json()
    assert (answer.status_code, body["outcome"], body["error"]["code"]) == (503, "refused", "NOT_SERVED")
    assert answer.headers["Retry-After"] == "1" and "remedy" in body["error"]


async def test_unknown_outcome_is_504(world):
    world.broker.refuse_next(OutcomeUnknown("no answer"), 1_000)
    answer = await world.http.post(ORDERS, json=ORDER)
    assert (answer.status_code, answer.json()["outcome"]) == (504, "unknown")


async def test_batch_has_an_outcome_per_message(world):
    messages = [ORDER, {"properties": {"qmq_reserved": "x"}}, ORDER | {"delay_s": 5}]
    answer = await world.http.post(f"{ORDERS}:batch", json={"messages": messages})
    outcomes = [sent["outcome"] for sent in answer.json()["outcomes"]]
    assert (answer.status_code, outcomes) == (400, ["stored", "refused", "stored"])
    assert answer.json()["error"]["message"] == "1 of the messages have another outcome"


async def test_batch_keeps_its_order(world):
    await world.send(*({"properties": {"n": str(n)}} for n in range(300)))
    assert [int(message["n"]) for message in world.broker.messages("order")] == list(range(300))


async def test_repeat_with_a_key_is_stored_once(world):
    first, second = [await world.http.post(ORDERS, json=ORDER, headers=KEY) for _ in range(2)]
    assert first.json() == second.json() and first.json()["id"] == KEY["Idempotency-Key"]
    assert "Idempotent-Replayed" not in first.headers and second.headers["Idempotent-Replayed"] == "true"
    assert len(world.broker.messages("order")) == world.counted("repeats_total") == 1


async def test_repeat_on_its_way_waits_for_the_outcome(world):
    answers = await asyncio.gather(*(world.http.post(ORDERS, json=ORDER, headers=KEY) for _ in range(5)))
    assert {answer.status_code for answer in answers} == {201}
    assert len(world.broker.messages("order")) == 1


async def test_key_of_another_message_is_refused(world):
    await world.http.post(ORDERS, json=ORDER, headers=KEY)
    answer = await world.http.post(ORDERS, json={"properties": {"orderNo": "18"}}, headers=KEY)
    assert (answer.status_code, answer.json()["error"]["code"]) == (422, "REPEAT_DIFFERS")


async def test_keys_belong_to_their_token(world):
    for token in ("shop", "shop2"):
        answer = await world.http.post(ORDERS, json=ORDER, headers=KEY | {"Authorization": f"Bearer {token}"})
        assert "Idempotent-Replayed" not in answer.headers


async def test_refused_message_is_sent_again_with_its_key(world):
    world.broker.refuse_next(InvalidMessage("too odd"))
    first, second = [await world.http.post(ORDERS, json=ORDER, headers=KEY) for _ in range(2)]
    assert (first.status_code, second.status_code) == (400, 201)


async def test_repeated_batch_stores_only_the_rest(world):
    world.broker.refuse_next(InvalidMessage("too odd"))
    batch = {"messages": [ORDER, ORDER | {"delay_s": 5}]}
    first, second = [await world.http.post(f"{ORDERS}:batch", json=batch, headers=KEY) for _ in range(2)]
    assert (first.status_code, second.status_code) == (400, 201)
    assert len(world.broker.messages("order")) == len(world.broker.delayed("order")) == 1


async def test_key_ends_with_its_time():
    async with gateway(repeat_s=1, repeats_max=1) as world:
        await world.http.post(ORDERS, json=ORDER, headers=KEY)
        await world.http.post(ORDERS, json=ORDER, headers={"Idempotency-Key": "a-newer-key"})
        answer = await world.http.post(ORDERS, json=ORDER, headers=KEY)
        assert "Idempotent-Replayed" not in answer.headers


@pytest.mark.parametrize(
    "body, text",
    [
        ({"properties": {"a": None}}, "properties.a"),
        ({"propertys": {}}, "propertys"),
        ({"delay_s": -1}, "delay_s"),
        ({"delay_s": 1, "at": "2030-01-01T00:00:00Z"}, "delay"),
        ({"at": "2030-01-01T00:00:00"}, "at"),
        ({"tags": ["x"] * 11}, "tags"),
        ({"properties": {"qmq_x": "1"}}, "qmq_"),
        ({"body": "a", "body_base64": "YQ=="}, "one payload"),
        ({"body_base64": "?"}, "Base64"),
    ],
)
async def test_invalid_message_is_refused_with_400(world, body, text):
    answer = await world.http.post(ORDERS, json=body)
    assert answer.status_code == 400 and text in answer.json()["error"]["message"]
    assert world.broker.messages("order") == []


async def test_request_that_is_no_json_is_refused(world):
    for content in (
        b"{",
        b'{"properties": {"a": "\\ud800"}}',
        b"[" * 100_000,
        b'{"properties":{"n":' + b"9" * 9999 + b"}}",
    ):
        answer = await world.http.post(ORDERS, content=content)
        assert answer.status_code == 400 and answer.json()["error"]["remedy"]


async def test_subject_that_is_no_name_is_refused(world):
    answer = await world.http.post(f"/v1/subjects/{'x' * 101}/messages", json=ORDER)
    assert (answer.status_code, answer.json()["outcome"]) == (400, "refused")
