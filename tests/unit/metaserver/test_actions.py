"""Shell. Rules of all actions: words, rights, plans, one transaction with its audit row."""

from __future__ import annotations

import asyncio
import json

import pytest
from sqlalchemy.exc import OperationalError

from qmq.errors import OutcomeUnknown, QmqError
from qmq.metaserver.actions import ACTIONS, Status
from qmq.metaserver.actions.arguments import read_arguments
from qmq.metaserver.actions.context import wall_ms
from qmq.metaserver.actions.runner import HANDLERS
from qmq.metaserver.routes.audience import Counts
from qmq.metaserver.storage.changes import CommitUnknown
from qmq.metaserver.storage.database import DatabaseAway
from qmq.metaserver.storage.repository import Repository
from tests.unit.metaserver.actions_world import caller, place

QMQ = {
    "AddBroker",
    "ReplaceBroker",
    "ListBrokers",
    "ListBrokerGroups",
    "ListSubjectRoutes",
    "AddSubjectBrokerGroup",
    "RemoveSubjectBrokerGroup",
    "AddNewSubject",
    "ExtendSubjectRoute",
    "AddDb",
    "MarkReadonlyBrokerGroup",
    "UnMarkReadonlyBrokerGroup",
    "ResetOffset",
}


def test_every_action_has_its_handler():
    assert set(HANDLERS) == set(ACTIONS)
    assert ACTIONS.keys() >= QMQ | {"QuerySubjectRoute"}
    for name, action in ACTIONS.items():
        assert (HANDLERS[name].plan is not None) == action.changes, name
        assert bool(HANDLERS[name].look or HANDLERS[name].look_as) != action.changes, name


@pytest.mark.parametrize(
    "name, words, complaint",
    [
        pytest.param("ListBrokers", {"brokergroup": "g1"}, "did you mean brokerGroup", id="near"),
        pytest.param("ListBrokers", {"zzz": "1"}, "known are brokerGroup, details", id="far"),
        pytest.param("AddBroker", place("g1", 0, "h") | {"servePort": "x"}, "servePort 'x' is no port", id="port"),
        pytest.param("AddBroker", place("g1", 0, "h") | {"servePort": "99999"}, "from 1 to 65535", id="port too large"),
        pytest.param("AddBroker", {"brokerGroup": "g1"}, "role is empty", id="missing"),
        pytest.param("AddBroker", place("g" * 101, 0, "h"), "longer than 100", id="long name"),
        pytest.param("AddBroker", place("g1", 0, "h") | {"dryRun": "yes"}, "neither true nor false", id="flag"),
        pytest.param("AuditTrail", {"limit": "1001"}, "from 1 to 1000", id="number too large"),
        pytest.param("AuditTrail", {"limit": "9" * 50}, "no number", id="number too long"),
        pytest.param("AuditTrail", {"limit": "٣"}, "no number", id="digit of another script"),
        pytest.param("AuditTrail", {"who": "a\0b"}, "zero character", id="zero character"),
        pytest.param("OnOffline", {"state": "off", "subject": "s"}, "none of online, offline", id="choice"),
        pytest.param("Restore", {"backup": "{"}, "no JSON document", id="JSON"),
        pytest.param("Restore", {"backup": "[" * 100_000}, "no JSON document", id="deep JSON"),
        pytest.param("MarkReadonlyBrokerGroup", {"brokerGroup": "a/b"}, "'/'", id="slash"),
        pytest.param("AddNewSubject", {"subject": "*", "tag": ""}, "tag is empty", id="empty tag"),
    ],
)
def test_wrong_words_are_refused(name, words, complaint):
    """Weakness 2: QMQ cuts or ignores wrong words, or answers with a stack trace."""
    with pytest.raises(QmqError, match=complaint):
        read_arguments(ACTIONS[name], {key: str(value) for key, value in words.items()})


def test_words_have_defaults():
    words = read_arguments(
        ACTIONS["MarkReadonlyBrokerGroup"], {"brokerGroup": "g1", "action": "ignored", "dryRun": "TRUE"}
    )
    assert words["subject"] == "*" and not words.is_given("subject")
    assert words.flag("dryRun") and words.number("waitMs") == 0


REQUIRED = {"servePort": 1, "syncPort": 2, "ip": "10.0.0.1", "role": 0, "state": "offline", "failover": "on"}
REQUIRED |= {"keep": "memory", "backup": "{}", "definitions": "{}"}
BELOW = {"viewer": "client", "operator": "viewer", "admin": "operator"}


async def test_each_action_requires_its_role(world):
    for name, action in ACTIONS.items():
        words = {word.name: REQUIRED.get(word.name, "x") for word in action.all_parameters if word.required}
        words |= {"role": "viewer"} if name == "AddToken" else {}
        refused = await world.refused(name, caller(BELOW[action.role]), **words)
        assert f"needs {action.role}" in refused, name
    assert not await world.audit()


CHANGES = {
    "AddBroker": place("g3", 0, "g3-a"),
    "AddNewSubject": {"subject": "s9", "tag": "t"},
    "AddSubjectBrokerGroup": {"subject": "s2", "brokerGroup": "g1"},
    "DrainGroup": {"brokerGroup": "g1"},
    "ExtendSubjectRoute": {"relatedSubject": "s2", "relatedBrokerGroup": "g2", "newBrokerGroup": "g1"},
    "LimitGroup": {"subject": "s1", "group": "shop", "perSecond": 7},
    "MarkReadonlyBrokerGroup": {"brokerGroup": "g1", "subject": "s1"},
    "OnOffline": {"subject": "s1", "consumerGroup": "g", "state": "offline"},
    "RemoveSubject": {"subject": "s1"},
    "RemoveSubjectBrokerGroup": {"subject": "s1", "brokerGroup": "g1", "force": "true"},
    "SetFailover": {"brokerGroup": "g1", "failover": "on"},
    "SetGroupTag": {"brokerGroup": "g1", "tag": "fast"},
    "SetLimits": {"subject": "s1", "expiresAfterS": "60"},
    "SwapRoles": {"brokerGroup": "g1"},
}
"""Changes of a cluster with two groups, s1 in both and s2 in g2."""


async def stored(world):
    return (await world.database.read(lambda repository: repository.dump()))["tables"], len(await world.audit())


async def test_dry_run_changes_nothing(world):
    """Weakness 33: QMQ's tools have no dry run. A plan keeps its word until something concerned changes: otherwise no
    plan could be confirmed while brokers proceed and new subjects arrive.
    """
    await world.serving_copies("s1", groups=("g1", "g2"))
    await world.routed("s2", groups=("g2",))
    before = await stored(world)
    plans = {name: await world.done(name, **words, dryRun="true") for name, words in CHANGES.items()}
    assert await stored(world) == before
    await world.routed("s3")
    world.beat("g1-a", log_end=9000)
    for name, words in CHANGES.items():
        again = await world.done(name, **words, dryRun="true")
        assert again["wouldChange"] and again["plan"] == plans[name]["plan"] != "", name


async def test_repeated_change_changes_nothing(world):
    await world.routed_copies("s1", groups=("g1", "g2"))
    for name in ("LimitGroup", "MarkReadonlyBrokerGroup", "OnOffline", "SetFailover", "SetGroupTag", "DrainGroup"):
        await world.done(name, **CHANGES[name])
        before = await stored(world)
        await world.done(name, **CHANGES[name])
        assert await stored(world) == before, name


async def test_dry_run_counts_affected_clients(world):
    await world.routed_copies("s1", "s2")
    world.hub.counts = [Counts(producers=4, consumers=0, watchers=40)]
    shown = await world.done("MarkReadonlyBrokerGroup", brokerGroup="g1", dryRun="true")
    assert shown["blastRadius"] == "2 subjects, 1 group, 40 clients"
    assert shown["subjects"] == {"count": 2, "names": ["s1", "s2"]}
    assert (shown["before"], shown["after"]) == ({"readonlySubjects": []}, {"readonlySubjects": ["*"]})


async def test_unknown_action_is_refused_with_a_near_one(world):
    answer = await world.run("AddBrokr")
    assert answer.status == Status.REFUSED and "did you mean AddBroker?" in answer.message


async def test_each_change_is_one_row_of_the_trail(world):
    """Weakness 32: author, address, action, parameters, values before and after."""
    await world.done("AddBroker", **place("g1", 0, "h1"))
    await world.refused("AddBroker", **place("g1", 0, "h2"))
    await world.done("ReplaceBroker", **place("g1", 0, "h3"))
    newest, oldest = await world.audit()
    assert (newest.who, newest.peer, newest.action, newest.result) == ("anna", "10.0.0.9", "ReplaceBroker", "done")
    assert newest.parameters["hostname"] == "h3" and len(newest.parameters["request"]) == 16
    assert (newest.before["master"]["hostname"], newest.after["master"]["hostname"]) == ("h1", "h3")
    assert (newest.before["term"], newest.after["term"]) == (1, 2)
    assert oldest.before is None
    page = await world.done("AuditTrail", limit=1)
    rest = await world.done("AuditTrail", limit=1, before=page["next"])
    assert [page["rows"][0]["id"], rest["rows"][0]["id"]] == [newest.id, oldest.id]
    found = await world.done("AuditTrail", request=newest.parameters["request"], name="ReplaceBroker", who="anna")
    assert [row["id"] for row in found["rows"]] == [newest.id] and found["next"] is None


async def test_refused_dry_run_has_the_reasons(world):
    await world.copies("g1")
    answer = await world.run("AddBroker", **place("g1", 0, "h9"), dryRun="true")
    assert answer.status == Status.REFUSED and "has a MASTER already" in answer.message
    assert answer.data["reasons"] and not answer.data["wouldChange"]


async def test_scope_of_a_token_limits_changes(world):
    await world.routed_copies("shop.a", "other", groups=("g1", "g2"))
    of_g1, of_shop = caller("operator", groups=["g1"]), caller("operator", subjects=["shop.*"])
    assert "g2" in await world.refused("MarkReadonlyBrokerGroup", of_g1, brokerGroup="g2")
    assert "other" in await world.refused("MarkReadonlyBrokerGroup", of_shop, brokerGroup="g1")
    assert (await world.run("MarkReadonlyBrokerGroup", of_shop, brokerGroup="g1", subject="shop.a")).done
    limited = caller("admin", groups=["g1"])
    for name, words in {
        "AddToken": {"name": "n", "role": "admin"},
        "Backup": {},
        "ListTokens": {},
        "AuditTrail": {},
        "OnOffline": {"state": "offline", "subject": "*"},
    }.items():
        assert "concerns all" in await world.refused(name, limited, **words), name


async def test_subject_scope_protects_other_subjects_of_a_group(world):
    """A change of a group's brokers affects all its subjects, also later ones."""
    await world.routed_copies("shop.a", "other")
    of_shop, of_g2 = caller("admin", subjects=["shop.*"]), caller("admin", groups=["g2"])
    replaced, removed = place("g1", 1, "g1-c"), {"hostname": "g1-b", "servePort": 20881}
    for name, words in (("ReplaceBroker", replaced), ("RemoveBroker", removed), ("SetGroupTag", {"brokerGroup": "g1"})):
        assert "'other'" in await world.refused(name, of_shop, **words)
    assert "whole broker groups" in await world.refused("AddBroker", of_shop, **place("g2", 0, "g2-a"))
    off = {"state": "offline", "subject": "other"}
    assert "'g1'" in await world.refused("OnOffline", of_g2, **off)
    assert (await world.run("ReplaceBroker", caller("admin", subjects=["shop.*", "other"]), **replaced)).done


async def test_preview_of_roles_counts_subjects_of_the_group(world):
    await world.routed_copies("s1", "s2", groups=("g1", "g2"))
    await world.routed("s3", groups=("g2",))
    world.hub.counts = [Counts(3, 0, 9)]
    shown = await world.done("ReplaceBroker", **place("g1", 1, "g1-c"), dryRun="true")
    assert shown["blastRadius"] == "2 subjects, 1 group, 9 clients" and shown["subjects"]["names"] == ["s1", "s2"]
    shown = await world.done("OnOffline", state="offline", subject="s3", dryRun="true")
    assert shown["blastRadius"] == "1 subject, 1 group, 9 clients"


async def test_lost_race_is_planned_again(world):
    """Weakness 6: QMQ reads, computes and compares once, and leaves the loss to the operator."""
    await world.copies("g1", "g2", "g3")
    await world.routed("s1")
    change, lost = world.registry.change, 0

    async def change_after_another(changes, audit):
        nonlocal lost
        if not lost:
            lost += 1
            route = world.registry.routes["s1"]
            routes = [("s1", ("g1", "g2"), route.version)]
            await world.database.write(lambda repository: repository.store_routes(routes))
        await change(changes, audit)

    world.registry.change = change_after_another
    await world.done("AddSubjectBrokerGroup", subject="s1", brokerGroup="g3")
    assert world.groups_of("s1") == ("g1", "g2", "g3") and lost == 1
    assert [row.action for row in await world.audit()].count("AddSubjectBrokerGroup") == 1


async def test_repeatedly_lost_race_is_refused(world):
    await world.copies("g1", "g2")
    await world.routed("s1")
    change, rounds = world.registry.change, 0

    async def always_late(changes, audit):
        nonlocal rounds
        rounds += 1
        route = world.registry.routes["s1"]
        await world.database.write(lambda repository: repository.store_routes([("s1", ("g1",), route.version)]))
        await change(changes, audit)

    world.registry.change = always_late
    assert "another change of" in await world.refused("AddSubjectBrokerGroup", subject="s1", brokerGroup="g2")
    assert rounds == 5 and world.groups_of("s1") == ("g1",)


class BrokenCommit:
    """A database with a connection that breaks in the next commit: after it, or before it."""

    def __init__(self, monkeypatch, *, stored):
        change = Repository.change

        def broken(repository, changes, audit=None, order=None):
            monkeypatch.setattr(Repository, "change", change)
            if stored:
                change(repository, changes, audit, order)
            raise CommitUnknown("the connection broke")

        monkeypatch.setattr(Repository, "change", broken)


@pytest.mark.parametrize("stored", [True, False], ids=["stored", "not stored"])
async def test_unanswered_commit_is_looked_up(world, monkeypatch, stored):
    BrokenCommit(monkeypatch, stored=stored)
    answer = await world.run("AddBroker", **place("g1", 0, "h1"))
    assert answer.status == (Status.DONE if stored else Status.WAIT), answer
    assert ("g1" in world.registry.directory.groups) == stored
    assert len(await world.audit()) == int(stored)


async def test_unanswered_commit_is_found_after_a_clock_step(world, monkeypatch):
    BrokenCommit(monkeypatch, stored=True)
    monkeypatch.setattr("metaserver.storage.operators.now_ms", lambda: wall_ms() - 60_000)
    assert (await world.run("AddBroker", **place("g1", 0, "h1"))).done


@pytest.mark.parametrize("stored", [True, False], ids=["stored", "not stored"])
async def test_outcome_is_looked_up_once_the_database_returns(world, monkeypatch, stored):
    monkeypatch.setattr("qmq.metaserver.actions.runner.SETTLE_PAUSE_S", 0)
    change, read, failures = world.registry.change, world.database.read, [DatabaseAway("starting")]

    async def away_at_first(work, **options):
        if failures:
            raise failures.pop()
        return await read(work, **options)

    async def unanswered(changes, audit):
        if stored:
            await change(changes, audit)
        monkeypatch.setattr(world.database, "read", away_at_first)
        raise OutcomeUnknown("the connection broke")

    monkeypatch.setattr(world.registry, "change", unanswered)
    answer = await world.run("AddBroker", **place("g1", 0, "h1"))
    assert answer.status == (Status.DONE if stored else Status.REFUSED), answer
    assert not failures


async def test_unknown_outcome_names_the_later_lookup(world, monkeypatch):
    monkeypatch.setattr("qmq.metaserver.actions.runner.SETTLE_PAUSE_S", 0)

    def away(repository):
        raise OperationalError("SELECT", {}, OSError("killed"))

    async def broken(changes, audit):
        monkeypatch.setattr(Repository, "versions", away)
        raise OutcomeUnknown("the connection broke")

    world.registry.change = broken
    answer = await world.run("AddBroker", **place("g1", 0, "h1"))
    assert answer.status == Status.UNKNOWN and "AuditTrail with request=" in answer.message


async def test_database_outage_stops_changes_only(world):
    await world.routed_copies("s1")

    async def away():
        raise DatabaseAway("killed")

    world.registry.mirror.catch_up = away
    answer = await world.run("MarkReadonlyBrokerGroup", brokerGroup="g1")
    assert answer.status == Status.WAIT and "does not answer" in answer.message
    assert [broker["hostname"] for broker in await world.done("ListBrokers")] == ["g1-a", "g1-b"]
    assert [route["subject"] for route in await world.done("ListSubjectRoutes")] == ["s1"]


async def test_concurrent_additions_make_one_master(world):
    answers = await asyncio.gather(*(world.run("AddBroker", **place("g1", 0, f"h{n}")) for n in range(5)))
    assert sorted(answer.status for answer in answers) == [-1, -1, -1, -1, 0]
    assert len(await world.audit()) == 1


async def test_password_is_stored_encrypted_only(world):
    """Weakness 29: a password is neither shown nor recorded, and is stored encrypted."""
    words = {"host": "db1", "port": 3306, "username": "app", "password": "hunter2"}
    answers = [await world.run("AddDb", **words, dryRun="true"), await world.run("AddDb", **words)]
    answers.append(await world.run("ListDbs"))
    trail = [(row.parameters, row.before, row.after) for row in await world.audit()]
    [source] = await world.database.read(lambda repository: repository.data_sources())
    assert "hunter2" not in json.dumps([[answer.data for answer in answers], trail, source.password])
    assert world.context.vault.decrypt(source.password) == "hunter2"
    assert all(answer.done for answer in answers)
