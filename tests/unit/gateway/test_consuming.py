"""Shell. Messages delivered through the gateway: sessions, leases, handles, decisions."""

from __future__ import annotations

import asyncio

import pytest

from qmq.gateway.session import Session
from tests.unit.gateway.gateway_world import BILLING, WAIT_S, gateway, gateway_of

THREE = [{"properties": {"n": str(n)}, "tags": ["odd"] if n % 2 else []} for n in range(3)]


@pytest.fixture
async def world():
    async with gateway(unacked_max=3, sessions_max=3) as running:
        yield running


def numbers(messages):
    return [int(message["properties"]["n"]) for message in messages]


async def all_of(world, count, **query):
    messages = []
    async with asyncio.timeout(WAIT_S):
        while len(messages) < count:
            messages += await world.pull(**query)
    return messages


async def test_acked_messages_are_consumed(world):
    await world.send(*THREE)
    messages = await all_of(world, 3)
    assert numbers(messages) == [0, 1, 2] and {message["attempt"] for message in messages} == {1}
    assert await world.decide("ack", *messages) == (200, ["stored"] * 3)
    await world.broker.wait_until_consumed("order", "billing")


async def test_pull_waits_for_a_message(world):
    pulling = asyncio.create_task(world.pull())
    await world.broker.wait_until_subscribed("order", "billing")
    await world.send(THREE[0])
    assert numbers(await pulling) == [0]


async def test_pull_without_messages_is_empty(world):
    assert await world.pull(wait_s=0.1) == []


async def test_tags_select_messages(world):
    await world.send(*THREE)
    assert numbers(await world.pull(tags=["odd"])) == [1]


async def test_nacked_message_returns_with_its_attempt(world):
    await world.send(THREE[0])
    (message,) = await world.pull()
    assert await world.decide("nack", message, reason="closed", delay_s=0) == (200, ["stored"])
    (again,) = await world.pull()
    assert (again["id"], again["attempt"]) == (message["id"], 2) and again["handle"] != message["handle"]


async def test_dead_letter_keeps_its_reason(world):
    await world.send(THREE[0])
    assert await world.decide("dead-letter", *await world.pull(), reason="no such order") == (200, ["stored"])
    (dead,) = world.broker.dead_letters("order", "billing")
    assert dead["qmq_deadReason"] == "no such order"


async def test_too_long_delay_decides_nothing(world):
    await world.send(THREE[0])
    (message,) = await world.pull()
    body = {"handles": [message["handle"]], "delay_s": 1e12}
    assert (await world.http.post(f"{BILLING}/nack", json=body)).status_code == 400
    assert await world.decide("ack", message) == (200, ["stored"])


async def test_repeated_ack_has_the_same_outcome(world):
    await world.send(THREE[0])
    messages = await world.pull()
    for _ in range(2):
        assert await world.decide("ack", *messages) == (200, ["stored"])
    assert await world.decide("nack", *messages) == (409, ["decided"])


async def test_ended_lease_returns_the_message(world):
    await world.send(*THREE[:2])
    message, kept = await all_of(world, 2, lease_s=60)
    assert await world.decide("renew", kept, lease_s=600) == (200, ["renewed"])
    world.tick(59)
    assert world.counted("expired_total") == 0
    world.tick(61)
    assert await world.decide("ack", message) == (410, ["gone"])
    (again,) = await world.pull()
    assert (again["id"], again["attempt"], world.counted("expired_total")) == (message["id"], 2, 1)
    assert await world.decide("ack", kept) == (200, ["stored"])


async def test_message_that_the_session_lost_is_gone(world):
    await world.send(THREE[0])
    (message,) = await world.pull()
    (session,) = world.clients.sessions
    session.deliveries.find(message["handle"]).message._piece.is_dropped = True  # as after a lease at the broker
    for action in ("ack", "renew"):
        assert await world.decide(action, message) == (410, ["gone"])


async def test_lease_above_the_limit_is_refused(world):
    answer = await world.http.post(f"{BILLING}/pull", params={"lease_s": 1e6})
    assert answer.status_code == 400 and "43200" in answer.json()["error"]["message"]


async def test_handle_belongs_to_token_and_group(world):
    await world.send(THREE[0])
    (message,) = await world.pull()
    assert await world.decide("ack", message, token="shop2") == (410, ["gone"])
    body = {"handles": [message["handle"]]}
    for path in ("/v1/subjects/order/groups/other/ack", "/v1/subjects/else/groups/billing/ack"):
        assert (await world.http.post(path, json=body)).status_code == 410
    assert await world.decide("ack", message) == (200, ["stored"])


async def test_undecided_messages_are_limited(world):
    await world.send(*THREE, THREE[0])
    messages = await all_of(world, 3, max=100)
    assert len(messages) == 3
    answer = await world.http.post(f"{BILLING}/pull", params={"start": "earliest"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "LIMIT_REACHED")
    await world.decide("ack", messages[0])
    assert len(await world.pull()) == 1


async def test_clients_of_a_group_share_its_messages(world):
    await world.send(*THREE)
    first = await all_of(world, 3, client="a")
    assert await world.pull(client="b", wait_s=0.1) == []
    answer = await world.http.delete(f"{BILLING}/session?client=a")
    assert answer.status_code == 204
    again = await all_of(world, 3, client="b")
    assert sorted(numbers(again)) == sorted(numbers(first))


async def test_session_keeps_its_terms(world):
    await world.pull(wait_s=0)
    answer = await world.http.post(f"{BILLING}/pull", params={"start": "earliest", "retries_max": 5})
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "OTHER_TERMS")


async def test_idle_session_ends(world):
    await world.pull(wait_s=0)
    world.tick(9)
    assert len(world.clients.sessions) == 1
    world.tick(11)
    assert world.clients.sessions == []


async def test_stream_that_begins_keeps_its_session(world):
    await world.pull(wait_s=0)
    (session,) = world.clients.sessions
    session.used_s -= 3600
    with world.clients.of("shop") as mine:
        assert await mine.session(session.place, session.terms, is_full=False) is session
    world.tick()
    assert world.clients.sessions == [session]


async def test_sessions_are_limited(world):
    for client in "abc":
        await world.pull(client=client, wait_s=0)
    answer = await world.http.post(f"{BILLING}/pull", params={"client": "d"})
    assert answer.status_code == 429 and "the gateway has" in answer.json()["error"]["message"]


async def test_stopped_gateway_returns_messages_at_once(world):
    await world.send(*THREE)
    await all_of(world, 3)
    await world.clients.close()
    async with gateway_of(world.broker) as other:
        assert sorted(numbers(await all_of(other, 3))) == [0, 1, 2]


async def test_session_that_fails_is_replaced(world, monkeypatch):
    await world.send(THREE[0])
    await world.pull(wait_s=0)
    (session,) = world.clients.sessions
    session.has_ended = True
    assert len(await world.pull()) == 1
    assert world.clients.sessions != [session] and isinstance(world.clients.sessions[0], Session)


@pytest.mark.parametrize(
    "query", [{"client": "a b"}, {"max": 0}, {"max": 1001}, {"wait_s": -1}, {"start": "never"}, {"lease_s": 0}]
)
async def test_invalid_pull_is_refused(world, query):
    answer = await world.http.post(f"{BILLING}/pull", params=query)
    assert answer.status_code == 400 and list(query)[0] in answer.json()["error"]["message"]
    assert world.clients.sessions == []
