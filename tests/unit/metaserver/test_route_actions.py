"""Shell. Routes: groups are added, extended, removed; all or nothing."""

from __future__ import annotations

import asyncio

import pytest

from qmq.metaserver.actions import Status
from qmq.metaserver.model import DELAY
from qmq.metaserver.routes.audience import Counts
from tests.unit.metaserver.actions_world import left


async def two_groups(world, *subjects, groups=("g1", "g2")):
    await world.running_copies("g1", "g2")
    await world.routed(*subjects, groups=groups)


async def test_added_group_is_in_the_route(world):
    await two_groups(world, "s1", groups=("g2",))
    route = await world.done("AddSubjectBrokerGroup", subject="s1", brokerGroup="g1")
    assert (route["subject"], route["brokerGroups"], route["version"]) == ("s1", ["g1", "g2"], 2)
    again = await world.done("AddSubjectBrokerGroup", subject="s1", brokerGroup="g1")
    assert again["version"] == 2 and world.groups_of("s1") == ("g1", "g2")


async def test_route_takes_existing_broker_groups_only(world):
    """Weakness 9: QMQ's routes may name groups that do not exist, or delay servers."""
    await two_groups(world, "s1", groups=("g1",))
    group = world.registry.directory.groups["g2"]
    object.__setattr__(group, "kind", DELAY)
    answer = await world.run("AddSubjectBrokerGroup", subject="s1", brokerGroup="g9")
    assert "no broker group g9" in answer.message
    assert answer.details["subjectRoute"]["brokerGroups"] == ["g1"]
    assert "delay servers" in await world.refused("AddSubjectBrokerGroup", subject="s1", brokerGroup="g2")
    words = {"relatedSubject": "*", "relatedBrokerGroup": "g1"}
    assert "no broker group g9" in await world.refused("ExtendSubjectRoute", **words, newBrokerGroup="g9")
    assert world.groups_of("s1") == ("g1",)


async def test_subject_without_route_gets_no_group(world):
    await two_groups(world)
    assert "has no route" in await world.refused("AddSubjectBrokerGroup", subject="s1", brokerGroup="g1")
    text = await world.refused("AddSubjectBrokerGroup", subject="%RETRY%s1%shop", brokerGroup="g1")
    assert "belongs to s1" in text


async def test_extension_reaches_routes_of_the_related_group(world):
    await two_groups(world, "s1", "s2", groups=("g1",))
    await world.routed("s3", groups=("g2",))
    words = {"relatedBrokerGroup": "g1", "newBrokerGroup": "g2"}
    shown = await world.done("ExtendSubjectRoute", relatedSubject="*", dryRun="true", **words)
    assert shown["subjects"]["names"] == ["s1", "s2"] and world.groups_of("s1") == ("g1",)
    assert world.hub.groups == ["g1"], "clients of the group that serves them now are reached"
    assert (await world.done("ExtendSubjectRoute", relatedSubject="*", **words))["changed"] == 2
    assert [world.groups_of(name) for name in ("s1", "s2", "s3")] == [("g1", "g2"), ("g1", "g2"), ("g2",)]
    assert (await world.done("ExtendSubjectRoute", relatedSubject="s1", **words))["changed"] == 0
    assert "s9 has no route" in await world.refused("ExtendSubjectRoute", relatedSubject="s9", **words)
    assert len([row for row in await world.audit() if row.action == "ExtendSubjectRoute"]) == 1


async def test_group_with_messages_stays_in_the_route(world):
    """Weakness 7: QMQ removes a group from routes despite unconsumed messages."""
    await two_groups(world, "s1", "s2")
    await world.done("MarkReadonlyBrokerGroup", brokerGroup="g1")
    world.brokers.progress["g1"] = [left("s1", "shop", 5), left("%RETRY%s1%shop", "shop", 1), left("s2", "shop", 0)]
    text = await world.refused("RemoveSubjectBrokerGroup", subject="s1", brokerGroup="g1")
    assert "shop has 5 messages of s1 to do there" in text and "1 message of %RETRY%s1%shop" in text
    assert "not everything in g1" in await world.refused("RemoveSubjectBrokerGroup", subject="*", brokerGroup="g1")
    assert (await world.done("RemoveSubjectBrokerGroup", subject="s2", brokerGroup="g1"))["changed"] == 1
    forced = await world.done("RemoveSubjectBrokerGroup", subject="s1", brokerGroup="g1", force="true")
    assert forced["changed"] == 1 and world.groups_of("s1") == ("g2",)


async def test_group_with_dead_letters_stays_in_the_route(world):
    """Redrive reads groups of the route only, so the last copy of these messages would be lost."""
    await two_groups(world, "s1", "s2")
    await world.done("MarkReadonlyBrokerGroup", brokerGroup="g1")
    world.brokers.progress["g1"] = [left("s1", "shop", 0, dead=3), left("s2", "shop", 2, dead=1)]
    text = await world.refused("RemoveSubjectBrokerGroup", subject="s1", brokerGroup="g1")
    assert "shop has 3 dead letters of s1 there" in text and "Redrive" in text
    assert "3 dead letters of s1" in await world.refused("RemoveSubject", subject="s1")
    text = await world.refused("RemoveSubjectBrokerGroup", subject="s2", brokerGroup="g1")
    assert "shop has 2 messages of s2 to do there, and 1 dead letter" in text
    await world.done("RemoveSubjectBrokerGroup", subject="s1", brokerGroup="g1", force="true")
    assert world.groups_of("s1") == ("g2",)


async def test_silent_group_stays_in_the_route(world):
    """Weakness 7: unknown contents refuse the change."""
    await two_groups(world, "s1")
    await world.done("MarkReadonlyBrokerGroup", brokerGroup="g1")
    world.brokers.silent.add("g1")
    text = await world.refused("RemoveSubjectBrokerGroup", subject="s1", brokerGroup="g1")
    assert "the contents of g1 are unknown" in text and "did not answer" in text


async def test_writable_group_stays_in_the_route(world):
    await two_groups(world, "s1", "s2")
    text = await world.refused("RemoveSubjectBrokerGroup", subject="*", brokerGroup="g1")
    assert "producers of 2 subjects (s1, s2) may send to g1" in text and "DrainGroup" in text
    await world.done("MarkReadonlyBrokerGroup", subject="s1", brokerGroup="g1")
    await world.done("RemoveSubjectBrokerGroup", subject="s1", brokerGroup="g1")
    await world.done("DrainGroup", brokerGroup="g1")
    await world.done("RemoveSubjectBrokerGroup", subject="*", brokerGroup="g1")
    assert world.groups_of("s1") == world.groups_of("s2") == ("g2",)


async def test_removal_for_all_subjects_is_atomic(world):
    """Weakness 6: one subject that cannot be changed leaves QMQ's `*` half done."""
    await two_groups(world, "s1", "s2", "s3")
    await world.routed("only", groups=("g1",))
    await world.done("DrainGroup", brokerGroup="g1")
    answer = await world.run("RemoveSubjectBrokerGroup", subject="*", brokerGroup="g1", force="true")
    assert answer.status == Status.REFUSED
    assert answer.data == {"only": "g1 is the only broker group of only; AddSubjectBrokerGroup first"}
    assert [world.groups_of(name) for name in ("s1", "s2", "s3")] == [("g1", "g2")] * 3


def with_a_new_route_before_each_try(world, groups, tries=100):
    """Add a client's new subject before each attempt to store a change."""
    change, names = world.registry.change, [f"new.{number}" for number in reversed(range(tries))]

    async def preceded(changes, audit):
        if names:
            route = (names.pop(), groups, 0)
            await world.database.write(lambda repository: repository.store_routes([route]))
        await change(changes, audit)

    world.registry.change = preceded


ALL = {
    "ExtendSubjectRoute": {"relatedSubject": "*", "relatedBrokerGroup": "g1", "newBrokerGroup": "g2"},
    "RemoveSubjectBrokerGroup": {"subject": "*", "brokerGroup": "g1"},
}


@pytest.mark.parametrize(
    "action, others", [("ExtendSubjectRoute", ("g1", "g2")), ("RemoveSubjectBrokerGroup", ("g2",))]
)
async def test_unrelated_new_subjects_do_not_delay_changes(world, action, others):
    """With a new subject every second, a plan that takes seconds would never be stored."""
    await world.copies("g1", "g2", "g3")
    await world.routed("a", "b", groups=("g1", "g3"))
    with_a_new_route_before_each_try(world, others)
    assert (await world.done(action, **ALL[action], details="true"))["changed"] == 2


@pytest.mark.parametrize("action", ALL)
async def test_change_of_all_includes_a_new_route(world, action):
    await world.copies("g1", "g2", "g3")
    await world.routed("a", groups=("g1", "g3"))
    with_a_new_route_before_each_try(world, ("g1", "g3"), tries=1)
    assert (await world.done(action, **ALL[action], details="true"))["changed"] == 2
    assert world.groups_of("new.0") == world.groups_of("a")


async def test_missing_group_does_not_count_as_another(world):
    """Weakness 9: for QMQ a name without a group keeps a subject from losing its last group."""
    await two_groups(world, "s1")
    route = world.registry.routes["s1"]
    object.__setattr__(route, "groups", ("g1", "gone"))
    await world.done("MarkReadonlyBrokerGroup", brokerGroup="g1")
    text = await world.refused("RemoveSubjectBrokerGroup", subject="s1", brokerGroup="g1", force="true")
    assert "only broker group" in text


async def test_removal_of_an_absent_group_is_done(world):
    await two_groups(world, "s1", groups=("g1",))
    assert (await world.done("RemoveSubjectBrokerGroup", subject="s1", brokerGroup="g2"))["changed"] == 0
    assert "no broker group g9" in await world.refused("RemoveSubjectBrokerGroup", subject="*", brokerGroup="g9")
    assert "s9 has no route" in await world.refused("RemoveSubjectBrokerGroup", subject="s9", brokerGroup="g1")


async def test_subject_is_announced_once(world):
    first = await world.done("AddNewSubject", subject="s1", tag="fast")
    assert (first["name"], first["tag"]) == ("s1", "fast") and first["updateTime"] > 0
    answer = await world.run("AddNewSubject", subject="s1", tag="slow")
    assert answer.status == Status.REFUSED and answer.data["tag"] == "fast"
    answers = await asyncio.gather(*(world.run("AddNewSubject", subject="s2", tag="t") for _ in range(3)))
    assert sorted(answer.status for answer in answers) == [-1, -1, 0]


async def test_single_route_is_shown(world):
    """Weakness 37: QMQ has the action and does not register it."""
    await two_groups(world, "s1")
    await world.done("AddNewSubject", subject="s1", tag="fast")
    await world.done("MarkReadonlyBrokerGroup", subject="s1", brokerGroup="g1")
    route = await world.done("QuerySubjectRoute", subject="%RETRY%s1%shop")
    assert (route["subject"], route["tag"], route["brokerGroups"]) == ("s1", "fast", ["g1", "g2"])
    assert [(group["writable"], group["readonly"]) for group in route["groups"]] == [(False, True), (True, False)]
    assert "has no route" in await world.refused("QuerySubjectRoute", subject="s9")


async def test_routes_are_filtered_and_paged(world):
    await two_groups(world, "a1", "a2", "b1", groups=("g1",))
    await world.routed("b2", groups=("g2",))
    assert [route["subject"] for route in await world.done("ListSubjectRoutes")] == ["a1", "a2", "b1", "b2"]
    assert [route["subject"] for route in await world.done("ListSubjectRoutes", brokerGroup="g2")] == ["b2"]
    assert [route["subject"] for route in await world.done("ListSubjectRoutes", prefix="a")] == ["a1", "a2"]
    assert [route["subject"] for route in await world.done("ListSubjectRoutes", after="a1", limit=2)] == ["a2", "b1"]


async def test_unused_subject_can_be_removed(world):
    """Weakness 8: in QMQ a subject stays for ever."""
    await two_groups(world, "s1")
    world.brokers.progress["g2"] = [left("s1", "shop", 2)]
    world.hub.counts = [Counts(0, 0, 3)]
    text = await world.refused("RemoveSubject", subject="s1")
    assert "shop has 2 messages" in text and "3 clients use s1 now" in text
    world.brokers.progress.clear()
    world.hub.counts = [Counts(0, 0, 0)]
    await world.done("RemoveSubject", subject="s1")
    assert "s1" not in world.registry.routes
