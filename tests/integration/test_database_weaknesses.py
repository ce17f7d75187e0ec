"""Shell. Weaknesses 1 to 10 of QMQ's metaserver, without 7: its database layer, on each kind of database."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError

from qmq.errors import InvalidName
from qmq.metaserver.model import AuditRow, DataSource, Offline, ReadonlyMark, TokenRow
from qmq.metaserver.roles import rules
from qmq.metaserver.storage.changes import (
    AddDataSource,
    AddSubject,
    AddToken,
    GroupInUse,
    RemoveGroup,
    RemoveRoute,
    SetGroupState,
    SetMark,
    SetOffline,
    SetRoles,
    SetRoute,
    StaleTerm,
    StaleVersion,
    UnknownGroup,
    UnsetMark,
    ValueRefused,
)
from qmq.metaserver.storage.repository import Repository
from tests.support.directories import add_group, brokers_of


@pytest.fixture
def repository(engine):
    repository = Repository(engine)
    for group in ("g1", "g2"):
        add_group(repository, group)
    return repository


def run(engine, statement, **values):
    with engine.begin() as connection:
        return connection.execute(text(statement), values)


def documented(beginning):
    """Return the SQL that docs/databases.md recommends to an operator."""
    lines = Path("docs/databases.md").read_text().splitlines()
    return [line.rstrip(";") for line in lines if line.startswith(beginning)]


def everything(repository):
    return {**repository.dump(), "time": 0}


# -- 1 ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", ["['g1']", "", "null", '["g1", 7]', '{"g1": 1}', '"g1"', "[[]]", r'["\ud800"]'])
def test_route_that_does_not_parse_stops_no_other(engine, repository, caplog, content):
    """Weakness 1: one bad row freezes all routes on all metaservers."""
    repository.store_routes([(subject, ("g1",), 0) for subject in ("a", "bad", "z")])
    run(engine, "UPDATE subject_route SET broker_group_json = :content WHERE subject_info = 'bad'", content=content)
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            assert [route.subject for route in repository.load_routes()[1]] == ["a", "z"]
    assert len(repository.bad_rows) == len(caplog.records) == 1, "logged once"
    assert "table=subject_route key='bad'" in caplog.text
    [stored] = repository.store_routes([("bad", ("g1",), 0)])
    assert stored.groups == (), "no client overwrites the bad row"
    repository.change([SetRoute("bad", ("g2",), 0)])  # an operator repairs it
    assert {route.subject: route.groups for route in repository.load_routes()[1]}["bad"] == ("g2",)


def test_row_repaired_in_sql_reaches_incremental_readers(engine, repository):
    repository.store_routes([("bad", ("g1",), 0), ("good", ("g1",), 0)])
    run(engine, "UPDATE subject_route SET broker_group_json = 'x' WHERE subject_info = 'bad'")
    seen, _ = repository.load_routes()
    run(engine, "UPDATE subject_route SET broker_group_json = '[\"g2\"]' WHERE subject_info = 'bad'")
    for statement in documented("UPDATE "):
        run(engine, statement.replace("SUBJECT", "bad"))
    version, [repaired] = repository.load_routes(seen)
    assert (repaired.subject, repaired.groups, repaired.changed) == ("bad", ("g2",), version)


@pytest.mark.parametrize("of_group", ["kind = 99", "term = 0"])
@pytest.mark.parametrize("of_broker", ["role = 99", "control_port = 70000", "metrics_port = -1"])
def test_invalid_group_or_broker_affects_no_other(engine, repository, of_group, of_broker):
    """Weakness 1: an unknown kind stops all refreshes."""
    run(engine, f"UPDATE broker_group SET {of_group} WHERE group_name = 'g1'")
    run(engine, f"UPDATE broker SET {of_broker} WHERE hostname = 'g2-b'")
    groups = repository.load().groups
    assert list(groups) == ["g2"]
    assert (groups["g2"].master, groups["g2"].slave) == (brokers_of("g2")[0], None)
    assert len(repository.bad_rows) == 2


STATE = {
    "role": 0,
    "term": 1,
    "boot": 1,
    "readonlyReasons": [],
    "writable": True,
    "durability": "slave",
    "incarnation": "i",
    "slaveIncarnation": "",
}


def test_bad_token_and_bad_sighting_stop_no_other(engine, repository):
    repository.change([AddToken(TokenRow(id, "n", "viewer", "salt", "hash")) for id in ("a", "b")])
    run(engine, "UPDATE api_token SET subjects_json = 'x' WHERE id = 'a'")
    assert [token.id for token in repository.load_tokens()] == ["b"]
    no_unicode = json.dumps({**STATE, "durability": "\ud800"})
    for port, state in enumerate(("[]", no_unicode, json.dumps(STATE)), start=1):
        run(
            engine,
            "INSERT INTO broker_sighting (hostname, serve_port, session, metaserver, incarnation, up, state_json, "
            "changed) VALUES ('h', :port, 's', 'm', 'i', :up, :state, 9)",
            up=True,
            port=port,
            state=state,
        )
    assert [row.key.serve_port for row in repository.load_sightings()[1]] == [3]
    assert len(repository.bad_rows) == 3


# -- 2, 3, 5 ------------------------------------------------------------------------------------------------------

LONG = "n" * 101

REFUSED = [
    pytest.param(SetRoute(LONG, ("g1",), 0), id="subject of a route"),
    pytest.param(AddSubject(LONG, "tag"), id="subject"),
    pytest.param(AddSubject("s", LONG), id="tag of a subject"),
    pytest.param(SetGroupState("g1", tag=LONG), id="tag of a group"),
    pytest.param(SetMark(ReadonlyMark(LONG, "g1")), id="subject of a mark"),
    pytest.param(SetOffline(Offline("s", LONG, "*")), id="consumer group"),
    pytest.param(SetOffline(Offline("s", "g", "c\x00")), id="NUL, which PostgreSQL refuses"),
    pytest.param(AddDataSource(DataSource("mmm://" + "u" * 250, "u", "p")), id="url"),
    pytest.param(AddDataSource(DataSource("mmm://u", "u", "p", status=1 << 31)), id="number beyond the column"),
    pytest.param(AddDataSource(DataSource("mmm://u", "u", "p" * 251)), id="password"),
    pytest.param(AddDataSource(DataSource("mmm://u", "u", "ends with a space ")), id="space that MariaDB would ignore"),
    pytest.param(AddToken(TokenRow(LONG, "n", "r", "s", "h")), id="id of a token"),
    pytest.param(AddToken(TokenRow("t", "n\ud800", "r", "s", "h")), id="half a character"),
    pytest.param(AddToken(TokenRow("t", "n", "r", "s", "h", created_ms=1 << 63)), id="time beyond the column"),
]


@pytest.mark.parametrize("change", REFUSED)
def test_oversized_value_is_refused_before_sql(repository, change):
    """Weakness 2: insert-ignore cuts names, and the answer is "ok"."""
    before = everything(repository)
    with pytest.raises((ValueRefused, InvalidName)):
        repository.change([SetMark(ReadonlyMark("*", "g2")), change], AuditRow("me", "here", "test"))
    assert everything(repository) == before


def test_broker_that_does_not_fit_is_refused(repository):
    before = everything(repository)
    for broken in ({"hostname": LONG}, {"ip": "1" * 261}, {"incarnation": LONG}, {"sync_port": 1 << 40}):
        broker = replace(brokers_of("g3")[0], **broken)
        with pytest.raises((ValueRefused, InvalidName)):
            repository.change([SetRoles(rules.add_broker(repository.load(), broker))])
    assert everything(repository) == before


def test_long_subjects_with_the_same_beginning_share_nothing(repository):
    """Weakness 3: two long names with the same first 100 characters share a row."""
    longest = "s" * 100
    repository.store_routes([(longest, ("g1",), 0)])
    with pytest.raises(InvalidName, match="longer than 100 bytes"):
        repository.store_routes([("another", ("g1",), 0), (longest + "s", ("g2",), 0)])
    assert [(route.subject, route.groups) for route in repository.load_routes()[1]] == [(longest, ("g1",))]


def test_limits_of_all_columns_agree(repository):
    """Weakness 5: group names have 30 characters, their marks 20; routes of ten groups overflow."""
    name, subject = "g" * 100, "s" * 100
    add_group(repository, name)
    many = [f"{number:03d}" + "n" * 50 for number in range(100)]
    for group in many:
        change = rules.add_broker(repository.load(), replace(brokers_of("g")[0], group=group, hostname=group))
        repository.change([SetRoles(change)])
    repository.change([SetMark(ReadonlyMark(subject, name)), SetRoute(subject, (name, *many), 0)])
    assert repository.load().marks == {ReadonlyMark(subject, name)}
    assert repository.load_routes()[1][0].groups == (name, *many)
    offline = Offline(subject, name, "c" * 100)
    repository.change([SetOffline(offline)])
    assert repository.load().offline == {offline}


# -- 4 ------------------------------------------------------------------------------------------------------------


def test_names_differ_by_case(repository):
    """Weakness 4: `Foo` uses the route of `foo` in SQL, and is missing in the cache."""
    stored = repository.store_routes([("foo", ("g1",), 0), ("Foo", ("g2",), 0), ("FOO", ("g1", "g2"), 0)])
    assert [route.groups for route in stored] == [("g1",), ("g2",), ("g1", "g2")]
    add_group(repository, "G1")
    repository.change([SetMark(ReadonlyMark("foo", "g1")), SetMark(ReadonlyMark("Foo", "g1"))])
    repository.change([UnsetMark(ReadonlyMark("foo", "G1")), UnsetMark(ReadonlyMark("foo", "g1"))])
    assert repository.load().marks == {ReadonlyMark("Foo", "g1")}
    assert set(repository.load().groups) == {"G1", "g1", "g2"}
    [again] = repository.store_routes([("Foo", ("g1",), 0)])
    assert again.groups == ("g2",)


# -- 6 ------------------------------------------------------------------------------------------------------------


def test_changes_of_an_action_are_atomic(repository):
    """Weakness 6: `*` actions are not transactional and are left half done."""
    repository.store_routes([(f"s{number}", ("g1",), 0) for number in range(10)])
    repository.change([SetRoute("s9", ("g1", "g2"), 1)])  # another change after the decision
    before = everything(repository)
    with pytest.raises(StaleVersion, match="s9"):
        repository.change(
            [SetRoute(f"s{number}", ("g2",), 1) for number in range(10)], AuditRow("me", "here", "ExtendSubjectRoute")
        )
    assert everything(repository) == before
    assert repository.audit_trail() == []


# -- 8 ------------------------------------------------------------------------------------------------------------


def test_removed_group_keeps_its_term(repository):
    """Weakness 8: groups and brokers cannot be deleted."""
    repository.store_routes([("s", ("g1", "g2"), 0)])
    repository.change([SetMark(ReadonlyMark("*", "g1"))])
    group = repository.load().groups["g1"]
    with pytest.raises(GroupInUse, match="has brokers"):
        repository.change([RemoveGroup("g1", group.term)])
    without = rules.RoleChange("g1", group.term, group, None)
    with pytest.raises(GroupInUse, match="1 routes name g1"):
        repository.change([SetRoles(without), RemoveGroup("g1", group.term + 1)])
    assert repository.load().groups["g1"] == group
    repository.change([SetRoute("s", ("g2",), 1), SetRoles(without), RemoveGroup("g1", group.term + 1)])
    assert list(repository.load().groups) == ["g2"] and repository.load().marks == frozenset()
    with pytest.raises(UnknownGroup):
        repository.change([RemoveGroup("g1", group.term + 1)])
    add_group(repository, "g1")
    again = repository.load().groups["g1"]
    assert again.term > group.term + 1, "no term of g1 ever has two masters"
    assert again.brokers == brokers_of("g1")
    with pytest.raises(StaleTerm):
        repository.change([RemoveGroup("g1", group.term)])


def test_subject_is_removed_and_created_again(repository):
    """Weakness 8: subjects cannot be deleted."""
    seen, _ = repository.load_routes()
    repository.store_routes([("s", ("g1",), 0)])
    repository.change([RemoveRoute("s", 1)])
    assert repository.load_routes()[1] == []
    version, [gone] = repository.load_routes(seen)
    assert (gone.subject, gone.groups) == ("s", ()), "readers of changes get the removal"
    with pytest.raises(StaleVersion):
        repository.change([RemoveRoute("s", 2)])
    [again] = repository.store_routes([("s", ("g2",), 0)])
    assert (again.groups, again.version) == (("g2",), 3)
    assert [route.groups for route in repository.load_routes(version)[1]] == [("g2",)]


# -- 9, 10 --------------------------------------------------------------------------------------------------------


def test_route_excludes_groups_that_cannot_serve(engine, repository):
    """Weakness 9: routes name groups that do not exist, or delay groups, and are never repaired."""
    add_group(repository, "delay")
    run(engine, "UPDATE broker_group SET kind = 2 WHERE group_name = 'delay'")
    for name in ("nowhere", "delay"):
        with pytest.raises(UnknownGroup, match=name):
            repository.change([SetRoute("s", ("g1", name), 0)])
    stored = repository.store_routes([("s", ("g1", "nowhere", "delay"), 0), ("t", ("nowhere",), 0)])
    assert [route.groups for route in stored] == [("g1",), ()]
    assert [route.subject for route in repository.load_routes()[1]] == ["s"]


def test_group_named_by_a_route_stays(engine, repository):
    repository.store_routes([("s", ("g1",), 0)])
    run(engine, 'UPDATE subject_route SET broker_group_json = \'["g1","gone"]\'')
    assert repository.store_routes([("s", ("g1", "gone", "g2"), 1)])[0].groups == ("g1", "gone", "g2")
    repository.change([SetRoute("s", ("gone", "g2"), 2)])
    repository.change([SetRoute("s", ("g2",), 3)])
    with pytest.raises(UnknownGroup):
        repository.change([SetRoute("s", ("g2", "gone"), 4)])


def test_foreign_keys_require_the_group(engine, repository):
    """Weakness 10: there are no foreign keys."""
    with pytest.raises(UnknownGroup):
        repository.change([SetMark(ReadonlyMark("*", "nowhere"))])
    with pytest.raises(IntegrityError):
        run(engine, "UPDATE broker SET group_name = 'nowhere' WHERE hostname = 'g1-a'")
    with pytest.raises(IntegrityError):
        run(
            engine,
            "INSERT INTO readonly_broker_group_setting (subject, broker_group, create_time) VALUES ('*', 'nowhere', 1)",
        )
