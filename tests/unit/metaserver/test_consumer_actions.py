"""Shell. Consumer groups: lag and positions."""

from __future__ import annotations

import pytest

from qmq.commands.action import differences
from qmq.errors import QmqError
from qmq.metaserver.actions import Status
from qmq.metaserver.actions.context import wall_ms
from qmq.metaserver.model import ConsumerGroupRow
from qmq.proto import qmq_pb2 as pb
from tests.unit.metaserver.actions_world import client, left


@pytest.fixture
async def world(world):
    """A metaserver with two groups; the consumer group shop has five messages of s1 left in each."""
    await world.serving_copies("s1", groups=("g1", "g2"))
    world.brokers.progress |= {group: [left("s1", "shop", 5)] for group in ("g1", "g2")}
    return world


async def test_reset_reaches_each_broker_and_is_recorded(world):
    """Weakness 35: QMQ's reset is lost with the broker's memory, and its answer is ignored."""
    done = await world.done("ResetOffset", subject="s1", group="shop", to="earliest")
    expected = {"before": 10, "after": 3, "skipped": 0, "repeated": 7}
    assert done["brokerGroups"] == {"g1": expected, "g2": expected}
    assert world.brokers.resets == [("g1", "s1", "shop", "earliest", 0), ("g2", "s1", "shop", "earliest", 0)]
    assert [row.result for row in await world.audit() if row.action == "ResetOffset"] == ["done", "begun"]


@pytest.mark.parametrize("code, to", [("1", "latest"), ("2", "earliest")])
async def test_reset_accepts_qmq_codes(world, code, to):
    """Weakness 33: QMQ's own tool never sends them."""
    await world.done("ResetOffset", subject="s1", group="shop", code=code)
    assert {reset[3] for reset in world.brokers.resets} == {to}


async def test_removed_group_leaves_brokers_and_database(world):
    """After a failure of one broker group the command can be repeated."""
    rows = [ConsumerGroupRow("s1", name, 0, "", (), 1) for name in ("shop", "other")]
    await world.database.write(lambda repository: repository.store_consumer_groups(rows))
    world.brokers.fail_for_real = frozenset({"g2"})
    answer = await world.run("RemoveConsumerGroup", subject="s1", group="shop")
    assert answer.status == Status.UNKNOWN and "done on g1" in answer.message
    world.brokers.fail_for_real = frozenset()
    await world.done("RemoveConsumerGroup", subject="s1", group="shop")
    assert {reset[:4] for reset in world.brokers.resets} == {(group, "s1", "shop", "removed") for group in ("g1", "g2")}
    stored = await world.database.read(lambda repository: repository.consumer_groups_of("s1"))
    assert [row.group for row in stored] == ["other"]
    trail = [row.result for row in await world.audit() if row.action == "RemoveConsumerGroup"]
    assert trail == ["done", "begun", "partly done", "begun"]
    for rows in world.brokers.progress.values():
        rows[:] = [left("%RETRY%s1%shop", "shop", 0)]
    assert "has a consumer group shop" in await world.refused("RemoveConsumerGroup", subject="s1", group="shop")


async def test_removal_reaches_groups_off_the_route(world):
    """Also one with nothing but the mailbox; broker groups without the consumer group are left alone."""
    await world.running_copies("g3", "g4", "g5")
    world.brokers.progress |= {"g3": [left("s1", "shop", 1)], "g4": [left("%RETRY%s1%shop", "shop", 1)]}
    world.brokers.progress["g5"] = [left("s2", "shop", 1), left("s1", "other", 1)]
    world.brokers.silent.add("g5")
    text = await world.refused("RemoveConsumerGroup", subject="s1", group="shop")
    assert text.startswith("g5, which may have it too: ") and not world.brokers.resets
    world.brokers.silent.clear()
    await world.done("RemoveConsumerGroup", subject="s1", group="shop")
    assert [reset[0] for reset in world.brokers.resets] == ["g1", "g2", "g3", "g4"]


async def test_removal_removes_the_groups_rules(world):
    for group in ("shop", "other"):
        await world.done("OnOffline", state="offline", subject="s1", consumerGroup=group)
        await world.done("LimitGroup", subject="s1", group=group, perSecond=5)
    await world.done("OnOffline", state="offline", subject="s1", consumerGroup="shop", clientId="c1")
    await world.done("OnOffline", state="offline", subject="s1")
    shown = await world.done("RemoveConsumerGroup", subject="s1", group="shop", dryRun="true")
    assert len(shown["before"]["offline"]) == 2 and shown["before"]["limits"][0]["perSecond"] == 5
    await world.done("RemoveConsumerGroup", subject="s1", group="shop")
    assert [tuple(rule) for rule in sorted(world.registry.directory.offline)] == [
        ("s1", "*", "*"),
        ("s1", "other", "*"),
    ]
    assert [limits.key for limits in world.registry.directory.limits] == [("s1", "other")]


async def test_reset_to_time_or_sequence(world):
    """Weakness 35: QMQ can reset to the first and the last message only."""
    await world.done("ResetOffset", subject="s1", group="shop", to="time", value=1000)
    await world.done("ResetOffset", subject="s1", group="shop", to="sequence", value=7, brokerGroup="g2")
    assert world.brokers.resets[-1] == ("g2", "s1", "shop", "sequence", 7)
    text = await world.refused("ResetOffset", subject="s1", group="shop", to="sequence", value=7)
    assert "name one of g1, g2" in text


async def test_wrong_resets_reach_no_broker(world):
    words = {"subject": "s1", "group": "shop"}
    assert "no position: give to=earliest" in await world.refused("ResetOffset", **words)
    assert "code 1 means latest" in await world.refused("ResetOffset", **words, code=1, to="earliest")
    assert "needs a value" in await world.refused("ResetOffset", **words, to="time")
    assert "takes no value" in await world.refused("ResetOffset", **words, to="latest", value=3)
    assert "none of 1, 2" in await world.refused("ResetOffset", **words, code=3)
    assert "g3 does not serve s1" in await world.refused("ResetOffset", **words, to="latest", brokerGroup="g3")
    assert "no route" in await world.refused("ResetOffset", subject="s9", group="shop", to="latest")
    assert not world.brokers.resets


async def test_reset_is_refused_by_one_broker_for_all(world):
    """Weakness 35: QMQ resets broker after broker until one fails."""
    world.brokers.silent.add("g2")
    text = await world.refused("ResetOffset", subject="s1", group="shop", to="latest")
    assert text.startswith("g2: ") and not world.brokers.resets
    text = await world.refused("ResetOffset", subject="s1", group="other", to="latest", brokerGroup="g1")
    assert "no consumer group other" in text


async def test_partial_reset_names_the_groups(world):
    world.brokers.fail_for_real = frozenset({"g2"})
    answer = await world.run("ResetOffset", subject="s1", group="shop", to="latest")
    assert answer.status == Status.UNKNOWN and "done on g1" in answer.message and "g2: " in answer.message
    assert list(answer.data["brokerGroups"]) == ["g1"] and list(answer.data["failed"]) == ["g2"]
    assert [row.result for row in await world.audit() if row.action == "ResetOffset"] == ["partly done", "begun"]


async def test_reset_requires_its_audit_row(world):

    async def away(changes, audit):
        raise QmqError("the database does not answer")

    world.registry.change = away
    assert not (await world.run("ResetOffset", subject="s1", group="shop", to="latest")).done
    assert not world.brokers.resets


async def test_dry_run_of_a_reset_shows_each_broker(world):
    """Weakness 35: QMQ does not show which messages a reset skips."""
    shown = await world.done("ResetOffset", subject="s1", group="shop", to="earliest", dryRun="true")
    changed = differences(shown["before"], shown["after"])
    assert [(change.path, change.before, change.after) for change in changed] == [
        (f"{name}.{field}", before, after)
        for name in ("g1", "g2")
        for field, before, after in (("position", 10, 3), ("repeated", 0, 7))
    ]
    assert shown["wouldChange"] and not world.brokers.resets

    async def skip(broker, request):
        return pb.ResetOffsetAnswer(before=10, after=10, skipped=5)

    world.brokers.reset_offset, words = skip, {"subject": "s1", "group": "shop", "to": "latest", "brokerGroup": "g1"}
    shown = await world.done("ResetOffset", **words, dryRun="true")
    assert differences(shown["before"], shown["after"]) == [("g1.skipped", 0, 5)]
    await world.done("ResetOffset", **words)
    assert (await world.audit())[0].after == {"g1": {"position": 10, "skipped": 5, "repeated": 0}}


async def test_lag_is_summed_over_brokers(world):
    now = wall_ms()
    world.brokers.progress["g1"] = [left("s1", "shop", 5, now - 90_000), left("s1", "bill", 1, now - 5000)]
    world.brokers.progress["g2"] = [left("s1", "shop", 7, now - 30_000)]
    world.brokers.progress["g2"][0].causes.append("order_key")
    answer = await world.done("Lag")
    shop, bill = answer["lag"]
    assert (shop["messages"], shop["brokerGroups"]) == (12, {"g1": 5, "g2": 7}) and 90 <= shop["ageSeconds"] < 100
    assert shop["causes"] == {"order_key": ["g2"]} and bill["causes"] == {}
    assert bill["group"] == "bill" and answer["unasked"] == {}
    for letters in (2, 3):
        done = left("s1", "done", 0)
        done.dead_letters = letters
        world.brokers.progress[f"g{letters - 1}"].append(done)
    last = (await world.done("Lag"))["lag"][-1]
    assert (last["group"], last["messages"], last["deadLetters"]) == ("done", 0, 5)
    assert [row["deadLetters"] for row in (await world.done("Consumers", group="done"))["groups"]] == [2, 3]
    world.brokers.silent.add("g2")
    partial = await world.done("Lag", subject="s1", group="shop")
    assert partial["lag"][0]["messages"] == 5 and "did not answer" in partial["unasked"]["g2"]


async def test_consumers_are_listed_with_their_state(world):
    """Weakness 37: QMQ lists all former consumers, not the current ones."""
    row = left("s1", "shop", 5)
    row.consumers.append(pb.ConsumerProgress(consumer="c1", connected=True, unacked=3, peer="10.1.1.1:5"))
    row.consumers.append(pb.ConsumerProgress(consumer="c2"))
    world.brokers.progress["g1"] = [row]
    await world.done("OnOffline", state="offline", subject="s1", consumerGroup="shop", clientId="c2")
    listed = await world.done("Consumers", subject="s1")
    assert [(row["consumer"], row["connected"], row["offline"]) for row in listed["groups"][0]["consumers"]] == [
        ("c1", True, False),
        ("c2", False, True),
    ]
    assert [group["brokerGroup"] for group in listed["groups"]] == ["g1", "g2"]
    assert "no route" in await world.refused("Consumers", subject="s9")


async def test_clients_are_filtered_by_subject_and_app(world):
    """Weakness 37: QMQ has its live clients in memory and no list of them."""
    world.hub.infos = [client("shop", "c2", "s1", "s2"), client("shop", "c1", "s1"), client("bill", "c3", "s2")]
    listed = await world.done("Clients", subject="s1")
    assert [row["clientId"] for row in listed["clients"]] == ["c1", "c2"] and listed["unasked"] == []
    assert [row["clientId"] for row in (await world.done("Clients", app="bill"))["clients"]] == ["c3"]
    assert len((await world.done("Clients", limit=1, here="true"))["clients"]) == 1
