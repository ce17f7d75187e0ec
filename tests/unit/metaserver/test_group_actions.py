"""Shell. Marks, drains, tags, and consumers switched off."""

from __future__ import annotations

from qmq.metaserver.model import BrokerKey, Offline
from qmq.metaserver.routes.audience import Counts
from qmq.metaserver.rpc.convert import assignment_for
from qmq.metaserver.storage.changes import AcceptLoss, SetGroupState, SetLimits
from qmq.operator_limits import OperatorLimits
from tests.unit.metaserver.actions_world import caller, left, place


async def test_mark_counts_clients_with_old_routes(world):
    """Weakness 20: QMQ does not show which producers follow a readonly mark."""
    await world.routed_copies("s1", groups=("g1", "g2"))
    await world.routed("s2", groups=("g1",))
    world.hub.counts = [Counts(producers=3, consumers=1, watchers=9)]
    answer = await world.done("MarkReadonlyBrokerGroup", brokerGroup="g1")
    assert (answer["producers"], answer["consumers"], answer["watchers"]) == (3, 1, 9)
    assert not answer["allKnow"] and answer["withoutOtherGroup"] == {"count": 1, "names": ["s2"]}


async def test_mark_waits_for_clients_with_old_routes(world):
    """Weakness 20: QMQ's operators wait for a minute and hope."""
    await world.copies("g1")
    world.hub.counts = [Counts(3, 0, 9)]
    late = await world.done("MarkReadonlyBrokerGroup", brokerGroup="g1", waitMs=1)
    assert not late["allKnow"] and late["producers"] == 3
    assert world.registry.directory.is_marked("g1", "anything")
    world.hub.asked, world.hub.counts = 0, [Counts(3, 0, 9), Counts(1, 0, 9), Counts(0, 0, 9)]
    answer = await world.done("MarkReadonlyBrokerGroup", brokerGroup="g1", waitMs=10_000)
    assert answer["allKnow"] and answer["producers"] == 0 and world.hub.asked == 3


async def test_mark_requires_existing_group_and_subject(world):
    await world.routed_copies("s1")
    assert "no broker group g9" in await world.refused("MarkReadonlyBrokerGroup", brokerGroup="g9")
    assert "no subject s9" in await world.refused("MarkReadonlyBrokerGroup", brokerGroup="g1", subject="s9")
    await world.done("MarkReadonlyBrokerGroup", brokerGroup="g1", subject="s1")
    assert (await world.done("MarkReadonlyBrokerGroup", brokerGroup="g1"))["readonlySubjects"] == ["*", "s1"]
    assert (await world.done("UnMarkReadonlyBrokerGroup", brokerGroup="g1"))["readonlySubjects"] == ["s1"]


async def test_mark_of_removed_subject_can_be_removed(world):
    await world.routed_copies("s1", groups=("g1", "g2"))
    await world.done("MarkReadonlyBrokerGroup", brokerGroup="g1", subject="s1")
    await world.done("RemoveSubject", subject="s1")
    await world.done("UnMarkReadonlyBrokerGroup", brokerGroup="g1", subject="s1")
    assert not world.registry.directory.marks


async def test_concurrent_drains_leave_one_group(world):
    await world.copies("g1", "g2")
    await world.done("AddBroker", **place("d1", 5, "d1-a"))  # of delay servers, so it does not count
    await precede(world, SetGroupState("g2", draining=True))
    assert "g1 is the only one" in await world.refused("DrainGroup", brokerGroup="g1")
    assert not world.registry.directory.groups["g1"].draining


async def test_drained_brokers_refuse_messages(world):
    """A producer with an old route would fill a group that its consumers leave."""
    await world.copies("g1", "g2")

    def refused(hostname):
        assignment = assignment_for(world.registry.directory, BrokerKey(hostname, 20881))
        return list(assignment.readonly_subjects)

    assert refused("g1-a") == []
    await world.done("DrainGroup", brokerGroup="g1")
    assert refused("g1-a") == refused("g1-b") == ["*"] and refused("g2-a") == []
    await world.done("MarkReadonlyBrokerGroup", brokerGroup="g1", subject="*")
    await world.done("UndrainGroup", brokerGroup="g1")
    assert refused("g1-a") == ["*"], "the mark stays"


async def test_marks_and_drains_are_listed(world):
    """Weakness 37: QMQ cannot list its marks."""
    await world.copies("g1", "g2")
    await world.done("MarkReadonlyBrokerGroup", brokerGroup="g1")
    await world.done("DrainGroup", brokerGroup="g2")
    listed = await world.done("ListReadonly")
    assert [(mark["brokerGroup"], mark["subject"], mark["allKnow"]) for mark in listed["marks"]] == [("g1", "*", True)]
    assert [drain["brokerGroup"] for drain in listed["draining"]] == ["g2"]
    assert (await world.done("ListReadonly", brokerGroup="g2"))["marks"] == []


async def test_drain_counts_remaining_messages(world):
    """Weakness 7: QMQ has no step between full use and removal."""
    await world.serving_copies("s1", "s2", groups=("g1", "g2"))
    world.brokers.progress["g1"] = [left("s1", "shop", 5, 1000), left("s1", "bill", 7), left("s2", "shop", 0)]
    world.hub.counts = [Counts(1, 0, 4)]
    drained = await world.done("DrainGroup", brokerGroup="g1")
    assert (drained["messagesLeft"], drained["subjects"], drained["producers"]) == (12, 2, 1)
    assert [(row["group"], row["messages"]) for row in drained["left"]] == [("bill", 7), ("shop", 5)]
    assert not drained["empty"] and world.registry.directory.groups["g1"].draining
    world.brokers.progress["g1"] = [left("s1", "shop", 0, dead=2)]
    world.hub.counts = [Counts(0, 0, 4)]
    drained = await world.done("DrainGroup", brokerGroup="g1")
    assert (drained["messagesLeft"], drained["deadLettersLeft"], drained["empty"]) == (0, 2, False)
    assert [(row["group"], row["deadLetters"]) for row in drained["left"]] == [("shop", 2)]
    world.brokers.progress.clear()
    assert (await world.done("DrainGroup", brokerGroup="g1"))["empty"]
    world.brokers.silent.add("g1")
    again = await world.done("DrainGroup", brokerGroup="g1")
    assert not again["empty"] and "did not answer" in again["unknown"]
    await world.done("UndrainGroup", brokerGroup="g1")
    assert not world.registry.directory.groups["g1"].draining


async def test_drained_group_joins_no_route(world):
    await world.copies("g1", "g2")
    await world.routed("s1")
    await world.done("DrainGroup", brokerGroup="g2")
    assert "being drained" in await world.refused("AddSubjectBrokerGroup", subject="s1", brokerGroup="g2")


async def test_group_tag_is_set_and_removed(world):
    """Weakness 40: in QMQ tags can be set by SQL only."""
    await world.copies("g1")
    await world.done("SetGroupTag", brokerGroup="g1", tag="fast")
    assert [group["tag"] for group in await world.done("ListBrokerGroups")] == ["fast"]
    await world.done("SetGroupTag", brokerGroup="g1", tag="")
    assert world.registry.directory.groups["g1"].tag == ""


async def test_consumers_are_switched_off_and_on(world):
    """Weakness 26: QMQ does this by GET, without a token, and lists it nowhere."""
    await world.done("OnOffline", state="offline", subject="s1", consumerGroup="shop", clientId="c1")
    await world.done("OnOffline", state="offline", subject="s1", consumerGroup="shop")
    await world.done("OnOffline", state="offline", subject="s2")
    assert world.registry.directory.offline == {
        Offline("s1", "shop", "c1"),
        Offline("s1", "shop", "*"),
        Offline("s2", "*", "*"),
    }
    text = await world.refused("OnOffline", state="online", subject="s1", consumerGroup="shop", clientId="c1")
    assert "they stay off by the rule subject=s1 consumerGroup=shop clientId=*" in text
    await world.done("OnOffline", state="online", subject="s1", consumerGroup="shop")
    assert await world.done("ListOffline") == [{"subject": "s2", "consumerGroup": "*", "clientId": "*"}]
    assert "stay off" in await world.refused("OnOffline", state="online", subject="s2", clientId="c9")
    assert await world.done("ListOffline", subject="s1") == []


async def test_limits_change_named_fields_only(world):
    await world.done("SetLimits", subject="s1", expiresAfterS="60")
    await world.done("SetLimits", subject="s1", expired="deadLetter")
    await world.done("LimitGroup", subject="s1", group="shop", perSecond="100")
    assert world.registry.directory.limits == {
        OperatorLimits("s1", "*", expires_after_s=60, expired_die=True),
        OperatorLimits("s1", "shop", per_second=100),
    }
    listed = await world.done("ListLimits")
    assert [(row["group"], row["expiresAfterS"], row["expired"], row["perSecond"]) for row in listed] == [
        ("*", 60, "deadLetter", 0),
        ("shop", 0, "drop", 100),
    ]
    await world.done("SetLimits", subject="s2", messagesMax="5")
    await world.done("SetLimits", subject="s2", whenFull="dropOldest")
    await world.done("SetLimits", subject="s2", bytesMax="7000000000")
    assert OperatorLimits("s2", "*", messages_max=5, drops_oldest=True, bytes_max=7_000_000_000) in (
        world.registry.directory.limits
    )
    await world.done("SetLimits", subject="s2", messagesMax="0", bytesMax="0", whenFull="refuse")
    plan = await world.done("SetLimits", subject="s1", expiresAfterS="0", dryRun="true")
    assert (plan["before"]["expiresAfterS"], plan["after"]["expiresAfterS"], plan["wouldChange"]) == (60, 0, True)
    await world.done("SetLimits", subject="s1", expiresAfterS="0", expired="drop")
    await world.done("LimitGroup", subject="s1", group="shop", perSecond="0")
    assert world.registry.directory.limits == frozenset() and await world.done("ListLimits") == []
    for words in ({"subject": "*", "group": "shop"}, {"subject": "s1", "group": "*"}):
        assert "one subject or consumer group at a time" in await world.refused("LimitGroup", perSecond="5", **words)
    assert "one subject or consumer group at a time" in await world.refused(
        "SetLimits", subject="*", expiresAfterS="60"
    )
    dead = "%DEAD_RETRY%s1%shop"
    assert "only be dropped" in await world.refused("SetLimits", subject=dead, expired="deadLetter")
    await world.done("SetLimits", subject=dead, expiresAfterS="60")


async def test_chosen_dead_letter_subject_gets_all_source_groups(world):
    await world.routed_copies("s1", groups=("g1", "g2"))
    await world.routed("dead", "other", groups=("g2",))
    words = {"subject": "s1", "group": "shop"}
    done = await world.done("LimitGroup", deadLettersTo="dead", **words)
    assert done["deadLettersTo"] == "dead" and world.groups_of("dead") == ("g1", "g2")
    await world.done("LimitGroup", perSecond="7", **words)
    assert world.registry.directory.limits == {OperatorLimits("s1", "shop", per_second=7, dead_letters_to="dead")}
    reasons = {
        "nowhere": "nowhere has no route",
        "s1": "in a circle",
        "%RETRY%other%shop": "name real subjects",
    }
    for to, reason in reasons.items():
        assert reason in await world.refused("LimitGroup", deadLettersTo=to, **words)
    await world.done("LimitGroup", subject="dead", group="people", deadLettersTo="other")
    text = await world.refused("LimitGroup", subject="other", group="people", deadLettersTo="s1")
    assert "return from s1 to other" in text
    await world.done("LimitGroup", deadLettersTo="%DEAD_RETRY", perSecond="0", **words)
    assert {limit.subject for limit in world.registry.directory.limits} == {"dead"}


async def test_group_with_dead_letter_source_stays_in_route(world):
    """A fixed bug: the group left the route and returned a second later, without a reason."""
    await world.routed_copies("s1", groups=("g1", "g2"))
    await world.routed("dead", groups=("g2",))
    await world.done("LimitGroup", subject="s1", group="shop", deadLettersTo="dead")
    words = {"brokerGroup": "g1", "force": "true"}
    text = await world.refused("RemoveSubjectBrokerGroup", subject="dead", **words)
    assert "g1 stores dead letters of s1 in dead" in text and world.groups_of("dead") == ("g1", "g2")
    await world.done("RemoveSubjectBrokerGroup", subject="s1", **words)
    await world.done("RemoveSubjectBrokerGroup", subject="dead", **words)
    assert world.groups_of("dead") == ("g2",)
    await world.done("AddSubjectBrokerGroup", subject="s1", brokerGroup="g1")
    await world.done("RemoveSubjectBrokerGroup", subject="*", **words)
    assert world.groups_of("s1") == ("g2",)


async def test_dead_letter_subject_requires_the_right_to_produce(world):
    await world.routed_copies("s1", "dead")
    words = {"subject": "s1", "group": "shop", "deadLettersTo": "dead", "dryRun": "true"}
    for subjects, may in ((("consume:s1",), False), (("s1", "consume:dead"), False), (("s1", "produce:dead"), True)):
        answer = await world.run("LimitGroup", caller("operator", subjects=subjects), **words)
        assert answer.done == may, answer


async def test_other_limits_need_no_dead_letter_right(world):
    await world.routed_copies("s1", "dead")
    words = {"subject": "s1", "group": "shop"}
    await world.done("LimitGroup", deadLettersTo="dead", **words)
    assert (await world.run("LimitGroup", caller("operator", subjects=("s1",)), perSecond="7", **words)).done
    await world.done("RemoveSubject", subject="dead")
    await world.done("LimitGroup", perSecond="8", **words)
    assert OperatorLimits("s1", "shop", per_second=8, dead_letters_to="dead") in world.registry.directory.limits


async def precede(world, *orders):
    """Make the next change meet a conflicting one."""
    change = world.registry.change

    async def after_another(changes, audit):
        world.registry.change = change
        await world.database.write(lambda repository: repository.change(orders))
        await change(changes, audit)

    world.registry.change = after_another


async def test_concurrent_limits_are_merged_without_circle(world):
    await world.routed_copies("s1", "dead")
    await precede(world, SetLimits(OperatorLimits("dead", "people", dead_letters_to="s1")))
    assert "in a circle" in await world.refused("LimitGroup", subject="s1", group="shop", deadLettersTo="dead")
    theirs = OperatorLimits("dead", "people", dead_letters_to="s1", per_second=7)
    await precede(world, SetLimits(theirs))
    await world.done("LimitGroup", subject="dead", group="people", deadLettersTo="%DEAD_RETRY")
    assert world.registry.directory.limits == {OperatorLimits("dead", "people", per_second=7)}


async def test_newer_loss_is_acknowledged_by_name(world):
    await world.copies("g1")
    await world.database.write(lambda repository: repository.change([AcceptLoss("g1", 5)]))
    await precede(world, AcceptLoss("g1", 9))
    done = await world.done("AcknowledgeLoss", brokerGroup="g1")
    assert done["lostTerm"] == 9
