"""Shell. Produce: one message of an operator is planned, recorded, sent; and offers of the console."""

from __future__ import annotations

from dataclasses import replace

import pytest

from qmq.client.batch import Outcome, Receipt
from qmq.errors import NotServed
from qmq.metaserver.actions import messages
from qmq.metaserver.console import offers
from qmq.proto import qmq_pb2 as pb
from qmq.rights import TokenRole
from qmq.zstd import compressed
from tests.unit.metaserver.actions_world import caller


@pytest.fixture
async def world(world):
    """A metaserver with a producer, group g1 of two running copies, and a route."""
    world.sent = []

    async def send(message):
        world.sent.append(message)
        return Receipt(Outcome.STORED, "m-1", message.subject, "g1", 7, None)

    world.actions._context = replace(world.context, send=send)
    await world.serving_copies("order.changed")
    return world


WORDS = {"subject": "order.changed", "properties": '{"orderNo": 4711, "lines": [1], "gone": null}', "tags": "paid"}


async def test_message_is_planned_then_sent(world):
    planned = await world.done("Produce", **WORDS, dryRun="true")
    assert planned["wouldChange"] and planned["groups"]["names"] == ["g1"] and world.sent == []
    assert await world.done("Produce", **WORDS) == {"id": "m-1", "brokerGroup": "g1", "sequence": 7}
    (message,) = world.sent
    assert dict(message.properties) == {"orderNo": 4711, "lines": "[1]"} and message.tags == frozenset({"paid"})
    assert (await world.audit())[0].action == "Produce"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ({"subject": "nowhere"}, "has no route"),
        ({"properties": "{"}, "not JSON"),
        ({"properties": "[1]"}, "no JSON object"),
        ({"properties": "{}"}, "the message is empty"),
        ({"contentType": "text/plain"}, "give a body"),
        ({"body": "a", "contentType": " \t"}, "content type"),
        ({"body": "\ud800"}, "Unicode"),
        ({"subject": "%RETRY%order.changed%g"}, "written by brokers alone"),
    ],
)
async def test_bad_message_is_refused(world, words, text):
    assert text in await world.refused("Produce", **WORDS | words)
    assert world.sent == []


@pytest.mark.parametrize(
    ("words", "body", "content_type"),
    [
        ({"body": '{"a": 1}'}, b'{"a": 1}', "application/json"),
        ({"body": "é", "contentType": "text/plain", "properties": ""}, "é".encode(), "text/plain"),
    ],
)
async def test_body_is_planned_then_sent(world, words, body, content_type):
    plan = await world.done("Produce", **WORDS | words, dryRun="true")
    assert plan["after"]["body"] == words["body"] and plan["after"]["contentType"] == content_type
    await world.done("Produce", **WORDS | words)
    assert (world.sent[0].body, world.sent[0].content_type) == (body, content_type)
    assert words["body"] in str((await world.audit())[0])


async def test_produce_requires_the_right(world):
    limited = caller(TokenRole.OPERATOR, subjects=("consume:*",))
    assert "may not produce to" in await world.refused("Produce", limited, **WORDS)
    assert "needs operator" in await world.refused("Produce", caller(TokenRole.VIEWER), **WORDS)


async def test_metaserver_without_a_producer_sends_nothing(world):
    world.actions._context = world.context
    answer = await world.run("Produce", **WORDS)
    assert not answer.done and NotServed.__name__ == answer.code


async def test_browse_filters_by_property(world):
    await world.done("Browse", subject="order.changed", property="orderNo=4711, note=a b")
    assert dict(world.brokers.browsed[-1].properties) == {"orderNo": "4711", "note": "a b"}
    assert "write name=value" in await world.refused("Browse", subject="order.changed", property="orderNo")


def copy(role, *, up=True, **more):
    return {"role": role, "up": up, "readonlyReasons": [], "lagBytes": 0} | more


ROW = {
    "readonlySubjects": [],
    "draining": False,
    "lostTerm": 0,
    "kind": "NORMAL",
    "writable": True,
    "halfSwapped": False,
    "copies": [copy("MASTER"), copy("SLAVE")],
}


@pytest.mark.parametrize(
    ("state", "there", "hidden"),
    [
        ({}, {"DrainGroup", "SwapRoles", "MarkReadonlyBrokerGroup"}, {"Failover", "UndrainGroup", "ReplaceBroker"}),
        ({"draining": True}, {"UndrainGroup"}, {"DrainGroup"}),
        ({"readonlySubjects": ["*"]}, {"UnMarkReadonlyBrokerGroup"}, {"MarkReadonlyBrokerGroup"}),
        ({"copies": [copy("MASTER", up=False), copy("SLAVE")]}, {"Failover", "ReplaceBroker"}, {"SwapRoles"}),
        ({"lostTerm": 3}, {"AcknowledgeLoss"}, set()),
        ({"copies": [copy("MASTER"), copy("SLAVE", readonlyReasons=["unfilled"])]}, {"SyncReplica"}, {"CancelSync"}),
        ({"kind": "DELAY"}, {"DrainGroup"}, {"SetGroupTag"}),
    ],
)
def test_group_offers_applicable_actions(state, there, hidden):
    found = set(offers.of_broker_group(ROW | state))
    assert there <= found and not hidden & found


def test_offers_follow_the_table_of_commands():
    assert {"ResetOffset", "OnOffline", "LimitGroup", "Redrive"} <= set(offers.of_consumer_group())
    assert {"Produce", "SetLimits", "RemoveSubject"} <= set(offers.of_subject())
    assert not set(offers.of_subject()) & {"ResetOffset", "AddNewSubject"}


async def test_browse_shows_bodies(world):
    packed = compressed(b"0123456789" * 50)
    whole = pb.BrowsedMessage(sequence=1, id="m-1", body=packed, body_bytes=len(packed))
    pairs = (
        ("qmq_contentType", "text/x"),
        ("qmq_contentEncoding", "zstd"),
        ("qmq_types", "is"),
        ("no", "7"),
        ("a", "b"),
    )
    whole.properties.extend(pb.Property(name=name, value=value) for name, value in pairs)
    world.brokers.stored = [pb.BrowseAnswer(messages=[whole])]
    answer = await world.done("Browse", subject="order.changed", bodyBytes="100")
    assert world.brokers.browsed[-1].body_bytes_max == 100
    [message] = answer["messages"]
    assert message["body"] == "0123456789" * 10 and message["bodyCut"] and message["bodyEncoding"] == "zstd"
    assert message["properties"] == {"no": 7, "a": "b"} and message["contentType"] == "text/x"


async def test_bodies_of_an_answer_are_bounded(world, monkeypatch):
    monkeypatch.setattr(messages, "BODIES_BYTES_MAX", 25)
    rows = [pb.BrowsedMessage(sequence=at, id="m", body=b"x" * 10, body_bytes=10) for at in range(4)]
    world.brokers.stored = [pb.BrowseAnswer(messages=rows)]
    answer = await world.done("Browse", subject="order.changed")
    shown = [(len(message["body"]), message.get("bodyCut", False)) for message in answer["messages"]]
    assert shown == [(10, False), (10, False), (5, True), (0, True)]
