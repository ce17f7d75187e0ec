"""Shell. Produce: one message of an operator is planned, recorded, sent; and offers of the console."""

from __future__ import annotations

from dataclasses import replace

import pytest

from qmq.client.batch import Outcome, Receipt
from qmq.errors import NotServed
from qmq.metaserver.console import offers
from qmq.rights import TokenRole
from tests.unit.metaserver.actions_world import World, caller


@pytest.fixture
async def world(tmp_path):
    world = World(tmp_path / "metaserver.db")
    world.sent = []

    async def send(message):
        world.sent.append(message)
        return Receipt(Outcome.STORED, "m-1", message.subject, "g1", 7, None)

    world.actions._desk = replace(world.desk, send=send)
    await world.open()
    await world.running_copies("g1")
    await world.routed("order.changed")
    yield world
    world.close()


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
        ({"subject": "%RETRY%order.changed%g"}, "written by brokers alone"),
    ],
)
async def test_bad_message_is_refused(world, words, text):
    assert text in await world.refused("Produce", **WORDS | words)
    assert world.sent == []


async def test_produce_requires_the_right(world):
    limited = caller(TokenRole.OPERATOR, subjects=("consume:*",))
    assert "may not produce to" in await world.refused("Produce", limited, **WORDS)
    assert "needs operator" in await world.refused("Produce", caller(TokenRole.VIEWER), **WORDS)


async def test_metaserver_without_a_producer_sends_nothing(world):
    world.actions._desk = world.desk
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
def test_group_offers_what_applies_now(state, there, hidden):
    found = set(offers.of_broker_group(ROW | state))
    assert there <= found and not hidden & found


def test_offers_follow_the_table_of_commands():
    assert {"ResetOffset", "OnOffline", "LimitGroup", "Redrive"} <= set(offers.of_consumer_group())
    assert {"Produce", "SetLimits", "RemoveSubject"} <= set(offers.of_subject())
    assert not set(offers.of_subject()) & {"ResetOffset", "AddNewSubject"}
