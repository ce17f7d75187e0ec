"""Shell. Redrive through the metaserver: plan, audit trail, exact outcome of each dead letter."""

from __future__ import annotations

from qmq.metaserver.actions import Status
from tests.unit.metaserver.actions_world import caller
from tests.unit.metaserver.console_world import text_of

WORDS = {"subject": "s", "group": "billing"}


async def with_dead_letters(world, *reasons):
    await world.running_copies("g1")
    await world.routed("s")
    world.brokers.dead = [(f"m-{number}", reason) for number, reason in enumerate(reasons)]


async def test_a_plan_moves_nothing_and_the_change_what_it_said(world):
    await with_dead_letters(world, "timeout", "no price", "timeout")
    plan = await world.done("Redrive", dryRun="true", reason="timeout", **WORDS)
    assert plan["wouldChange"] and (plan["before"]["deadLetters"], plan["after"]["goBack"]) == (3, 2)
    assert len(world.brokers.dead) == 3
    done = await world.done("Redrive", reason="timeout", **WORDS)
    assert (done["moved"], done["ids"]) == (2, ["m-0", "m-2"]) and world.brokers.dead == [("m-1", "no price")]
    assert [row.result for row in await world.audit()][:2] == ["done", "begun"]
    assert not (await world.done("Redrive", dryRun="true", reason="timeout", **WORDS))["wouldChange"]


async def test_no_more_go_back_than_the_limit(world):
    await with_dead_letters(world, "a", "b", "c")
    assert (await world.done("Redrive", limit=2, **WORDS))["ids"] == ["m-0", "m-1"]
    assert world.brokers.dead == [("m-2", "c")]
    assert (await world.done("Redrive", id="m-9", **WORDS))["moved"] == 0


async def test_what_stays_and_what_is_unknown_is_told(world):
    await with_dead_letters(world, "a", "refuse me")
    answer = await world.run("Redrive", **WORDS)
    assert answer.status == Status.UNKNOWN and "1 went back, not all: readonly" in answer.message
    assert world.brokers.dead == [("m-1", "refuse me")] and (await world.audit())[0].result == "partly done"
    world.brokers.dead = [("m-2", "lose me")]
    answer = await world.run("Redrive", **WORDS)
    assert answer.status == Status.UNKNOWN and answer.data["unknown"] == 1
    world.brokers.silent = {"g1"}
    answer = await world.run("Redrive", **WORDS)
    assert answer.status == Status.WAIT and "no dead letter went back" in answer.message


async def test_a_token_for_some_subjects_needs_the_right_to_redrive(world):
    await with_dead_letters(world, "a")
    for subjects, may in ((("consume:s",), False), (("other",), False), (("redrive:s",), True), (("s",), True)):
        answer = await world.run("Redrive", caller("operator", subjects=subjects), dryRun="true", **WORDS)
        assert answer.done == may, answer
    assert "needs operator" in await world.refused("Redrive", caller("viewer"), **WORDS)


async def test_dead_letters_go_to_a_subject_that_has_a_route_by_who_may_redrive_and_produce(world):
    await with_dead_letters(world, "a")
    words = {**WORDS, "to": "repaired"}
    assert "repaired has no route" in await world.refused("Redrive", **words)
    assert "written by brokers alone" in await world.refused("Redrive", **{**words, "to": "%RETRY%t%g"})
    await world.routed("repaired")
    redrive, both = ("redrive:s",), ("redrive:s", "produce:repaired")
    assert "may not produce" in await world.refused("Redrive", caller("operator", subjects=redrive), **words)
    assert "may not redrive" in await world.refused("Redrive", caller("operator", subjects=("repaired",)), **words)
    assert world.brokers.dead
    answer = await world.run("Redrive", caller("operator", subjects=both), **words)
    assert answer.done and answer.data["moved"] == 1, answer
    assert world.brokers.destinations[-1] == ("repaired", ["g1"]) and not world.brokers.dead
    assert (await world.audit())[0].parameters["to"] == "repaired"


async def test_dead_letters_go_back_through_the_console_once_that_is_confirmed(console):
    await console.log_in("operator")
    await with_dead_letters(console, "timeout")
    assert "/change?action=Redrive" not in await console.see("/messages", subject="s")
    words = {"csrf": await console.csrf(), "action": "Redrive", **WORDS}
    text = text_of((await console.send("/change", step="plan", **words)).text)
    assert "goBack" in text and "Do it" in text and console.brokers.dead
    assert "moved 1" in text_of((await console.send("/change", step="confirm", **words)).text)
    assert console.brokers.dead == [] and (await console.audit())[0].who == "operator"


async def test_who_may_not_consume_from_a_subject_has_nobody_look_for_dead_letters_there(world):
    await with_dead_letters(world, "a")
    await world.routed("shared")
    words = {**WORDS, "from": "shared"}
    assert "may not consume" in await world.refused("Redrive", caller("operator", subjects=("redrive:s",)), **words)
    assert not world.brokers.destinations, "no broker was asked"
    both = ("redrive:s", "consume:shared")
    assert (await world.run("Redrive", caller("operator", subjects=both), dryRun="true", **words)).done
