"""Shell. Rules for every action: words, rights, plans, one transaction with its audit row."""

from __future__ import annotations

import asyncio
import json

import pytest
from sqlalchemy.exc import OperationalError

from qmq.errors import OutcomeUnknown, QmqError
from qmq.metaserver.actions import ACTIONS, Status
from qmq.metaserver.actions.desk import wall_ms
from qmq.metaserver.actions.runner import HANDLERS
from qmq.metaserver.actions.words import read_words
from qmq.metaserver.routes.audience import Counts
from qmq.metaserver.storage.database import DatabaseAway
from qmq.metaserver.storage.errors import CommitUnknown
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


def test_no_list_may_be_asked_by_anybody_but_qmqs_three():
    assert {name for name, action in ACTIONS.items() if not action.needs_token} == {
        "ListBrokers",
        "ListBrokerGroups",
        "ListSubjectRoutes",
    }


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
def test_wrong_words_are_refused_before_anything_is_looked_at(name, words, complaint):
    """Weakness 2: QMQ cuts or ignores bad input, or answers with a stack trace; here it is refused by name."""
    with pytest.raises(QmqError, match=complaint):
        read_words(ACTIONS[name], {key: str(value) for key, value in words.items()})


def test_words_have_defaults_and_know_what_was_given():
    words = read_words(ACTIONS["MarkReadonlyBrokerGroup"], {"brokerGroup": "g1", "action": "ignored", "dryRun": "TRUE"})
    assert words["subject"] == "*" and not words.is_given("subject")
    assert words.flag("dryRun") and words.number("waitMs") == 0


SAME_PLAN = {
    "AddNewSubject": {"subject": "s9", "tag": "t"},
    "AddSubjectBrokerGroup": {"subject": "s2", "brokerGroup": "g1"},
    "DrainGroup": {"brokerGroup": "g1"},
    "ExtendSubjectRoute": {"relatedSubject": "s2", "relatedBrokerGroup": "g2", "newBrokerGroup": "g1"},
    "MarkReadonlyBrokerGroup": {"brokerGroup": "g1", "subject": "s1"},
    "OnOffline": {"subject": "s1", "consumerGroup": "g", "state": "offline"},
    "RemoveSubjectBrokerGroup": {"subject": "s1", "brokerGroup": "g1", "force": "true"},
    "SetLimits": {"subject": "s1", "expiresAfterS": "60"},
    "SwapRoles": {"brokerGroup": "g1"},
}


async def test_a_plan_has_the_same_word_while_nothing_was_changed(world):
    """Else a plan could never be confirmed: brokers go on, and new subjects arrive."""
    await world.running_copies("g1")
    await world.running_copies("g2")
    await world.routed("s1", groups=("g1", "g2"))
    await world.routed("s2", groups=("g2",))
    before = {name: await world.done(name, **words, dryRun="true") for name, words in SAME_PLAN.items()}
    await world.routed("s3")
    world.beat("g1-a", log_end=9000)
    for name, words in SAME_PLAN.items():
        again = await world.done(name, **words, dryRun="true")
        assert again["wouldChange"] and again["plan"] == before[name]["plan"] != "", name


async def test_unknown_action_is_refused_with_a_near_one(world):
    answer = await world.run("AddBrokr")
    assert answer.status == Status.REFUSED and "did you mean AddBroker?" in answer.message


async def test_each_change_leaves_one_row_of_the_trail(world):
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


async def test_the_trail_is_read_in_pages_and_by_filter(world):
    for number in range(5):
        await world.done("AddBroker", **place(f"g{number}", 0, f"h{number}"))
    await world.done("MarkReadonlyBrokerGroup", brokerGroup="g3")
    first = await world.done("AuditTrail", limit=4)
    rest = await world.done("AuditTrail", limit=4, before=first["next"])
    ids = [row["id"] for row in first["rows"] + rest["rows"]]
    assert ids == sorted(ids, reverse=True) and len(ids) == 6 and rest["next"] is None
    assert [row["action"] for row in (await world.done("AuditTrail", name="MarkReadonlyBrokerGroup"))["rows"]] == [
        "MarkReadonlyBrokerGroup"
    ]
    assert len((await world.done("AuditTrail", brokerGroup="g3"))["rows"]) == 2
    assert (await world.done("AuditTrail", who="nobody"))["rows"] == []
    request = first["rows"][0]["parameters"]["request"]
    assert len((await world.done("AuditTrail", request=request))["rows"]) == 1


async def test_dry_run_says_what_would_change_and_changes_nothing(world):
    """Weakness 33: QMQ's tools have no dry run."""
    await world.copies("g1")
    await world.routed("s1", "s2")
    world.hub.counts = [Counts(producers=4, consumers=0, watchers=40)]
    rows = len(await world.audit())
    shown = await world.done("MarkReadonlyBrokerGroup", brokerGroup="g1", dryRun="true")
    assert shown["blastRadius"] == "2 subjects, 1 group, 40 clients"
    assert shown["wouldChange"] and shown["subjects"] == {"count": 2, "names": ["s1", "s2"]}
    assert (shown["before"], shown["after"]) == ({"readonlySubjects": []}, {"readonlySubjects": ["*"]})
    assert not world.registry.directory.marks and len(await world.audit()) == rows


async def test_dry_run_of_what_would_be_refused_is_refused_with_the_reasons(world):
    await world.copies("g1")
    answer = await world.run("AddBroker", **place("g1", 0, "h9"), dryRun="true")
    assert answer.status == Status.REFUSED and "has a MASTER already" in answer.message
    assert answer.data["reasons"] and not answer.data["wouldChange"]


async def test_a_role_too_low_is_refused(world):
    assert "needs admin" in await world.refused("AddBroker", caller("operator"), **place("g1", 0, "h1"))
    assert "needs operator" in await world.refused("MarkReadonlyBrokerGroup", caller("viewer"), brokerGroup="g1")
    assert "needs viewer" in await world.refused("ListBrokers", caller("client"))
    assert not await world.audit()


async def test_a_token_changes_only_what_is_in_its_scope(world):
    await world.copies("g1")
    await world.copies("g2")
    await world.routed("shop.a", "other", groups=("g1", "g2"))
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


async def test_who_is_limited_to_subjects_does_not_change_what_others_use(world):
    """A change of a group's brokers affects all its subjects, also later ones."""
    await world.copies("g1")
    await world.routed("shop.a", "other")
    of_shop, of_g2 = caller("admin", subjects=["shop.*"]), caller("admin", groups=["g2"])
    replaced, removed = place("g1", 1, "g1-c"), {"hostname": "g1-b", "servePort": 20881}
    for name, words in (("ReplaceBroker", replaced), ("RemoveBroker", removed), ("SetGroupTag", {"brokerGroup": "g1"})):
        assert "'other'" in await world.refused(name, of_shop, **words)
    assert "whole broker groups" in await world.refused("AddBroker", of_shop, **place("g2", 0, "g2-a"))
    off = {"state": "offline", "subject": "other"}
    assert "'g1'" in await world.refused("OnOffline", of_g2, **off)
    assert (await world.run("ReplaceBroker", caller("admin", subjects=["shop.*", "other"]), **replaced)).done


async def test_a_preview_of_changed_roles_counts_what_the_group_serves(world):
    await world.copies("g1")
    await world.copies("g2")
    await world.routed("s1", "s2", groups=("g1", "g2"))
    await world.routed("s3", groups=("g2",))
    world.hub.counts = [Counts(3, 0, 9)]
    shown = await world.done("ReplaceBroker", **place("g1", 1, "g1-c"), dryRun="true")
    assert shown["blastRadius"] == "2 subjects, 1 group, 9 clients" and shown["subjects"]["names"] == ["s1", "s2"]
    shown = await world.done("OnOffline", state="offline", subject="s3", dryRun="true")
    assert shown["blastRadius"] == "1 subject, 1 group, 9 clients"


async def test_a_lost_race_is_decided_anew(world):
    """Weakness 6: QMQ reads, computes and compares once, and leaves the loss to the operator."""
    await world.copies("g1")
    await world.copies("g2")
    await world.copies("g3")
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


async def test_who_always_loses_the_race_is_told_and_changes_nothing(world):
    await world.copies("g1")
    await world.copies("g2")
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
    """A database whose connection breaks in the next commit: after it, or before it."""

    def __init__(self, monkeypatch, *, stored):
        change = Repository.change

        def broken(repository, changes, audit=None, order=None):
            monkeypatch.setattr(Repository, "change", change)
            if stored:
                change(repository, changes, audit, order)
            raise CommitUnknown("the connection broke")

        monkeypatch.setattr(Repository, "change", broken)


@pytest.mark.parametrize("stored", [True, False], ids=["stored", "not stored"])
async def test_a_commit_without_an_answer_is_looked_for(world, monkeypatch, stored):
    BrokenCommit(monkeypatch, stored=stored)
    answer = await world.run("AddBroker", **place("g1", 0, "h1"))
    assert answer.status == (Status.DONE if stored else Status.WAIT), answer
    assert ("g1" in world.registry.directory.groups) == stored
    assert len(await world.audit()) == int(stored)


async def test_a_commit_without_an_answer_is_found_though_the_clock_was_set_back_meanwhile(world, monkeypatch):
    BrokenCommit(monkeypatch, stored=True)
    monkeypatch.setattr("metaserver.storage.tokens.now_ms", lambda: wall_ms() - 60_000)
    assert (await world.run("AddBroker", **place("g1", 0, "h1"))).done


@pytest.mark.parametrize("stored", [True, False], ids=["stored", "not stored"])
async def test_outcome_is_looked_up_once_the_database_returns(world, monkeypatch, stored):
    monkeypatch.setattr("qmq.metaserver.actions.runner.SETTLE_PAUSE_S", 0)
    change, attempts = world.registry.change, 0

    async def broken(changes, audit):
        if stored:
            await change(changes, audit)
        raise OutcomeUnknown("the connection broke")

    read = world.database.read

    async def away_at_first(work, **options):
        nonlocal attempts
        attempts += 1
        if attempts == 1:
            raise DatabaseAway("starting")
        return await read(work, **options)

    world.registry.change = broken
    plan_reads = world.actions._plan

    async def plan(*arguments):
        made = await plan_reads(*arguments)
        object.__setattr__(world.desk, "database", Proxy(away_at_first, world.database.write))
        return made

    world.actions._plan = plan
    answer = await world.run("AddBroker", **place("g1", 0, "h1"))
    assert answer.status == (Status.DONE if stored else Status.REFUSED), answer
    assert attempts == 2


class Proxy:
    def __init__(self, read, write):
        self.read = read
        self.write = write


async def test_what_nobody_can_find_out_says_how_to_find_out_later(world, monkeypatch):
    monkeypatch.setattr("qmq.metaserver.actions.runner.SETTLE_PAUSE_S", 0)

    def away(repository):
        raise OperationalError("SELECT", {}, OSError("killed"))

    async def broken(changes, audit):
        monkeypatch.setattr(Repository, "versions", away)
        raise OutcomeUnknown("the connection broke")

    world.registry.change = broken
    answer = await world.run("AddBroker", **place("g1", 0, "h1"))
    assert answer.status == Status.UNKNOWN and "AuditTrail with request=" in answer.message


async def test_while_the_database_is_away_changes_wait_and_lists_go_on(world):
    await world.copies("g1")
    await world.routed("s1")

    async def away():
        raise DatabaseAway("killed")

    world.registry.mirror.catch_up = away
    answer = await world.run("MarkReadonlyBrokerGroup", brokerGroup="g1")
    assert answer.status == Status.WAIT and "does not answer" in answer.message
    assert [broker["hostname"] for broker in await world.done("ListBrokers")] == ["g1-a", "g1-b"]
    assert [route["subject"] for route in await world.done("ListSubjectRoutes")] == ["s1"]


async def test_two_operators_at_once_make_one_master(world):
    answers = await asyncio.gather(*(world.run("AddBroker", **place("g1", 0, f"h{n}")) for n in range(5)))
    assert sorted(answer.status for answer in answers) == [-1, -1, -1, -1, 0]
    assert len(await world.audit()) == 1


async def test_a_secret_is_written_down_nowhere(world):
    """Weakness 29: a password is neither shown nor recorded, and what is stored is encrypted."""
    words = {"host": "db1", "port": 3306, "username": "app", "password": "hunter2"}
    answers = [await world.run("AddDb", **words, dryRun="true"), await world.run("AddDb", **words)]
    answers.append(await world.run("ListDbs"))
    trail = [(row.parameters, row.before, row.after) for row in await world.audit()]
    [source] = await world.database.read(lambda repository: repository.data_sources())
    assert "hunter2" not in json.dumps([[answer.data for answer in answers], trail, source.password])
    assert world.desk.vault.decrypt(source.password) == "hunter2"
    assert all(answer.done for answer in answers)
