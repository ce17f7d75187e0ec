"""Shell. Redrive through the metaserver: plan, audit trail, exact outcome of each dead letter."""

from __future__ import annotations

from qmq.metaserver.actions import Status
from tests.unit.metaserver.actions_world import caller

WORDS = {"subject": "s", "group": "billing"}


async def with_dead_letters(world, *reasons):
    await world.serving_copies("s")
    world.brokers.dead = [(f"m-{number}", reason) for number, reason in enumerate(reasons)]


async def test_redrive_moves_the_planned_letters(world):
    await with_dead_letters(world, "timeout", "no price", "timeout")
    plan = await world.done("Redrive", dryRun="true", reason="timeout", **WORDS)
    assert plan["wouldChange"] and (plan["before"]["deadLetters"], plan["after"]["moved"]) == (3, 2)
    assert len(world.brokers.dead) == 3
    done = await world.done("Redrive", reason="timeout", **WORDS)
    assert (done["moved"], done["ids"]) == (2, ["m-0", "m-2"]) and world.brokers.dead == [("m-1", "no price")]
    assert [row.result for row in await world.audit()][:2] == ["done", "begun"]
    assert not (await world.done("Redrive", dryRun="true", reason="timeout", **WORDS))["wouldChange"]


async def test_redrive_is_limited(world):
    await with_dead_letters(world, "a", "b", "c")
    assert (await world.done("Redrive", limit=2, **WORDS))["ids"] == ["m-0", "m-1"]
    assert world.brokers.dead == [("m-2", "c")]
    assert (await world.done("Redrive", id="m-9", **WORDS))["moved"] == 0


async def test_partial_redrive_reports_the_rest(world):
    await with_dead_letters(world, "a", "refuse me")
    answer = await world.run("Redrive", **WORDS)
    assert answer.status == Status.UNKNOWN and "1 went back to billing, not all: readonly" in answer.message
    assert world.brokers.dead == [("m-1", "refuse me")] and (await world.audit())[0].result == "partly done"
    world.brokers.dead = [("m-2", "lose me")]
    answer = await world.run("Redrive", **WORDS)
    assert answer.status == Status.UNKNOWN and answer.data["unknown"] == 1
    world.brokers.silent = {"g1"}
    answer = await world.run("Redrive", **WORDS)
    assert answer.status == Status.WAIT and "no dead letter went back to billing:" in answer.message


async def test_redrive_requires_its_right(world):
    await with_dead_letters(world, "a")
    for subjects, may in ((("consume:s",), False), (("other",), False), (("redrive:s",), True), (("s",), True)):
        answer = await world.run("Redrive", caller("operator", subjects=subjects), dryRun="true", **WORDS)
        assert answer.done == may, answer
    assert "needs operator" in await world.refused("Redrive", caller("viewer"), **WORDS)


async def test_redrive_to_another_subject_requires_both_rights(world):
    await with_dead_letters(world, "a")
    words = {**WORDS, "to": "repaired"}
    assert "repaired has no route" in await world.refused("Redrive", **words)
    assert "written by brokers alone" in await world.refused("Redrive", **{**words, "to": "%RETRY%t%g"})
    await world.routed("repaired")
    redrive, both = ("redrive:s",), ("redrive:s", "produce:repaired")
    assert "may not produce" in await world.refused("Redrive", caller("operator", subjects=redrive), **words)
    assert "may not redrive" in await world.refused("Redrive", caller("operator", subjects=("repaired",)), **words)
    assert world.brokers.dead
    world.brokers.silent = {"g1"}
    assert "no dead letter went to repaired:" in (await world.run("Redrive", **words)).message
    world.brokers.silent = set()
    answer = await world.run("Redrive", caller("operator", subjects=both), **words)
    assert answer.done and answer.data["moved"] == 1, answer
    assert world.brokers.destinations[-1] == ("repaired", ["g1"]) and not world.brokers.dead
    assert (await world.audit())[0].parameters["to"] == "repaired"


async def test_redrive_from_another_subject_requires_consuming(world):
    await with_dead_letters(world, "a")
    await world.routed("shared")
    words = {**WORDS, "from": "shared"}
    assert "may not consume" in await world.refused("Redrive", caller("operator", subjects=("redrive:s",)), **words)
    assert not world.brokers.destinations, "no broker was asked"
    both = ("redrive:s", "consume:shared")
    assert (await world.run("Redrive", caller("operator", subjects=both), dryRun="true", **words)).done
