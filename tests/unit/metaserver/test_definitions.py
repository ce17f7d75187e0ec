"""Shell. Definitions: an export is imported by another cluster, as one planned change that removes nothing."""

from __future__ import annotations

import json

import pytest

from qmq.metaserver.actions.definitions import LISTS
from qmq.operator_limits import OperatorLimits
from tests.unit.metaserver.actions_world import caller


async def filled(world):
    await world.routed_copies("order.changed", "dead", groups=("g1", "g2"))
    await world.done("SetGroupTag", brokerGroup="g1", tag="fast")
    await world.done("SetFailover", brokerGroup="g1", failover="on")
    await world.done("AddNewSubject", subject="pay", tag="fast")
    await world.done("MarkReadonlyBrokerGroup", brokerGroup="g2", subject="order.changed")
    await world.done("OnOffline", state="offline", subject="order.changed", consumerGroup="billing")
    await world.done("LimitGroup", subject="order.changed", group="billing", deadLettersTo="dead", perSecond=5)
    await world.done("SetLimits", subject="order.changed", expiresAfterS=60)
    await world.done("AddToken", name="shop", role="client", subjects="order.*")


def without_time(document):
    return {name: rows for name, rows in document.items() if name != "time"}


async def test_import_makes_another_cluster_alike(world, tmp_path):
    await filled(world)
    exported = await world.done("ExportDefinitions")
    assert all(exported[name] for name in LISTS) and "secret" not in json.dumps(exported)
    other = await world.another(f"sqlite:///{tmp_path}/other.db")
    await other.copies("g1", "g2")
    text = json.dumps(exported)
    planned = await other.done("ImportDefinitions", definitions=text, dryRun="true")
    assert planned["wouldChange"] and not other.registry.routes and not other.registry.directory.marks
    done = await other.done("ImportDefinitions", definitions=text)
    assert done["imported"]["routes"] == 2 and done["tokensMissing"] == ["shop"]
    again = await other.done("ExportDefinitions")
    assert without_time(again) | {"tokens": []} == without_time(exported) | {"tokens": []}
    assert (await other.audit())[0].action == "ImportDefinitions"
    assert (await other.done("ImportDefinitions", definitions=text))["imported"] == {}


async def test_import_removes_nothing(world):
    await filled(world)
    empty = (await world.done("ExportDefinitions")) | {name: [] for name in LISTS}
    assert not (await world.done("ImportDefinitions", definitions=json.dumps(empty), dryRun="true"))["wouldChange"]
    narrow = empty | {"routes": [{"subject": "order.changed", "brokerGroups": ["g1"]}]}
    await world.done("ImportDefinitions", definitions=json.dumps(narrow))
    assert world.groups_of("order.changed") == ("g1", "g2")


GROUP = {"name": "g1", "kind": "NORMAL", "tag": "", "failover": "on"}
BASE = {"format": "qmq definitions", "version": 1} | {name: [] for name in LISTS}


@pytest.mark.parametrize(
    ("document", "text"),
    [
        ([], "no definitions of qmq"),
        ({"format": "qmq metadata"}, "no definitions of qmq"),
        (BASE | {"version": 2}, "reads version 1"),
        (BASE | {"routes": {}}, "routes: missing"),
        (BASE | {"routes": [{"subject": "s", "brokerGroups": ["g9"]}]}, "no broker group g9 here; AddBroker"),
        (BASE | {"routes": [{"subject": "a/b", "brokerGroups": ["g1"]}]}, "wrong entry"),
        (BASE | {"routes": [7]}, "wrong entry"),
        (BASE | {"subjects": [{"name": "pay"}]}, "wrong entry"),
        (BASE | {"subjects": [{"name": "pay", "tag": "slow"}]}, "has the tag fast here"),
        (
            BASE | {"brokerGroups": [{"name": "g1", "kind": "DELAY", "tag": "", "failover": "on"}]},
            "has the kind NORMAL",
        ),
        (BASE | {"brokerGroups": [{"name": "g1", "kind": "NORMAL", "tag": "", "failover": "?"}]}, "wrong entry"),
        (BASE | {"limits": [{"subject": "s", "group": "*", "expiresAfterS": -1}]}, "wrong entry"),
    ],
)
async def test_bad_definitions_change_nothing(world, document, text):
    await filled(world)
    before = without_time(await world.done("ExportDefinitions"))
    assert text in await world.refused("ImportDefinitions", definitions=json.dumps(document))
    assert without_time(await world.done("ExportDefinitions")) == before


async def test_new_route_and_its_limits_come_together(world):
    await world.copies("g1", "g2")
    await world.routed("dead", groups=("g2",))
    limits = OperatorLimits("s", "billing")
    row = {"expiresAfterS": 0, "expired": "drop", "messagesMax": 0, "whenFull": "refuse", "perSecond": 0, "bytesMax": 0}
    document = BASE | {
        "routes": [{"subject": "s", "brokerGroups": ["g1"]}],
        "limits": [row | {"subject": limits.subject, "group": limits.group, "deadLettersTo": "dead"}],
    }
    await world.done("ImportDefinitions", definitions=json.dumps(document))
    assert set(world.groups_of("dead")) == {"g1", "g2"}, "dead letters go where their subject goes"
    assert [row.dead_letters_to for row in world.registry.directory.limits] == ["dead"]


async def test_definitions_require_an_unlimited_admin(world):
    for name, words in (("ExportDefinitions", {}), ("ImportDefinitions", {"definitions": json.dumps(BASE)})):
        assert "needs admin" in await world.refused(name, caller("operator"), **words)
        assert "concerns all" in await world.refused(name, caller("admin", groups=["g1"]), **words)
