"""Shell. Dump and restore of all tables: into an empty database, and over newer rows."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from qmq.errors import QmqError
from qmq.metaserver.model import AuditRow, Offline, ReadonlyMark, TokenRow
from qmq.metaserver.roles import rules
from qmq.metaserver.storage import try_backup
from qmq.metaserver.storage.changes import (
    AcceptLoss,
    AddSubject,
    AddToken,
    RestoreAll,
    RevokeToken,
    SetLimits,
    SetMark,
    SetOffline,
    SetRoles,
    SetRoute,
    UnsetMark,
    ValueRefused,
)
from qmq.metaserver.storage.engine import open_database
from qmq.metaserver.storage.repository import Repository
from qmq.operator_limits import OperatorLimits
from tests.support.directories import add_group, brokers_of

MARK = ReadonlyMark("*", "g1")
TOKEN = TokenRow("t1", "Ann", "operator", "salt", "hash", ("s",), (), 1000)


@pytest.fixture
def filled(repository):
    add_group(repository, "g1")
    slave = replace(brokers_of("g1")[1], incarnation="disk")
    repository.store_registration(slave)
    repository.store_complete(slave, term=2, complete=True)
    repository.store_routes([(f"s{number}", ("g1",), 0) for number in range(3)])
    changes = [SetMark(MARK), SetOffline(Offline("s", "*", "*")), AddSubject("s", "ssd"), AddToken(TOKEN)]
    changes.append(SetLimits(OperatorLimits("s", "g", per_second=7)))
    repository.change(changes, AuditRow("Ann", "here", "Everything"))
    return repository


@pytest.fixture
def other(tmp_path):
    """Tables of an empty SQLite file."""
    engine = open_database(f"sqlite:///{tmp_path / 'other.db'}")
    yield Repository(engine)
    engine.dispose()


def through_json(dump):
    return json.loads(json.dumps(dump))


def test_dump_restores_an_empty_database(filled, other):
    other.change([RestoreAll(through_json(filled.dump()))])  # from each kind
    before, after = filled.load(), other.load()
    assert (after.marks, after.offline, after.subjects) == (before.marks, before.offline, before.subjects)
    assert after.limits == before.limits == {OperatorLimits("s", "g", per_second=7)}
    assert after.groups["g1"].term == before.groups["g1"].term, "one more may be of a row that came after the dump"
    assert [broker.key for broker in after.groups["g1"].brokers] == [b.key for b in before.groups["g1"].brokers]
    assert [(route.subject, route.groups) for route in other.load_routes()[1]] == [
        (route.subject, route.groups) for route in filled.load_routes()[1]
    ]
    assert other.load_tokens() == filled.load_tokens()
    assert [(row.who, row.action) for row in other.audit_trail()] == [("Ann", "Everything")]


def test_restore_keeps_terms_and_revocations(filled):
    dump = through_json(filled.dump())
    add_group(filled, "g2")
    group = filled.load().groups["g1"]
    slave = replace(brokers_of("g1")[1], hostname="third")
    filled.change(
        [
            SetRoles(replace(rules.swap_roles(group, term=group.term), master=group.master, slaves=(slave,))),
            UnsetMark(MARK),
            SetRoute("s0", ("g2",), 1),
            SetRoute("new", ("g2",), 0),
            RevokeToken("t1"),
            AddToken(replace(TOKEN, id="t2")),
        ]
    )
    seen, _ = filled.load_routes()
    filled.change([RestoreAll(dump)], AuditRow("Ann", "here", "Restore"))
    directory = filled.load()
    assert list(directory.groups) == ["g1"] and directory.marks == {MARK}
    assert directory.groups["g1"].term == group.term + 2
    assert directory.groups["g1"].master.key == group.master.key
    assert not directory.groups["g1"].slave.complete, "that must be seen again"
    changed = {route.subject: route.groups for route in filled.load_routes(seen)[1]}
    assert changed == {"s0": ("g1",), "s1": ("g1",), "s2": ("g1",), "new": ()}, (
        "who reads what changed learns all of it"
    )
    assert {token.id: bool(token.revoked_ms) for token in filled.load_tokens()} == {"t1": True, "t2": False}
    assert [row.action for row in filled.audit_trail()] == ["Restore", "Everything"]
    add_group(filled, "g2")
    assert filled.load().groups["g2"].term == 4, "no term of g2 is given out again"


def test_restore_keeps_the_master(filled):
    """The backup's master may lack messages acknowledged since; its term would be the newest all the same."""
    master, slave = filled.load().groups["g1"].brokers
    filled.store_registration(replace(master, incarnation="first"))
    dump = through_json(filled.dump())
    group = filled.load().groups["g1"]
    filled.change([SetRoles(rules.swap_roles(group, term=group.term))])
    before = filled.load()
    with pytest.raises(ValueRefused, match="g1 is served by g1-b:20881, the backup has g1-a:20881"):
        filled.change([RestoreAll(dump)])
    dump["tables"]["broker"] = []
    with pytest.raises(ValueRefused, match="has no broker in its place"):
        filled.change([RestoreAll(dump)])
    assert filled.load() == before


def test_restore_keeps_the_incarnation_of_a_master(filled):
    """With a backup from before its first start, a master with an emptied disk would be accepted."""
    dump = through_json(filled.dump())
    master = filled.load().groups["g1"].master
    filled.store_registration(replace(master, incarnation="first"))
    filled.change([RestoreAll(dump)])
    assert filled.load().groups["g1"].master.incarnation == "first"


def test_restore_keeps_open_losses(filled):
    dump = through_json(filled.dump())
    filled.change([AcceptLoss("g1", 2)])
    filled.change([RestoreAll(dump)])
    assert filled.load().groups["g1"].lost_term == 2


def test_restored_route_exceeds_both_versions(filled):
    dump = through_json(filled.dump())
    filled.change([SetRoute("s0", ("g1",), 1)])
    filled.change([RestoreAll(dump)])
    assert {route.subject: route.version for route in filled.load_routes()[1]} == {"s0": 3, "s1": 2, "s2": 2}


BROKEN = [
    pytest.param(lambda dump: dump.clear(), id="nothing"),
    pytest.param(lambda dump: dump.update(version=2), id="another version"),
    pytest.param(lambda dump: dump.update(schema="0001"), id="other tables"),
    pytest.param(lambda dump: dump["tables"].pop("broker"), id="a table is missing"),
    pytest.param(lambda dump: dump["tables"].update(more=[]), id="a table too many"),
    pytest.param(lambda dump: dump["tables"].update(broker={}), id="a table that is none"),
    pytest.param(lambda dump: dump["tables"]["broker"].append(7), id="a row that is none"),
    pytest.param(lambda dump: dump["tables"]["broker"][0].pop("ip"), id="a column is missing"),
    pytest.param(lambda dump: dump["tables"]["broker"][0].update(id=1), id="a column too many"),
    pytest.param(lambda dump: dump["tables"]["broker"][0].update(role=99), id="an unknown role"),
    pytest.param(lambda dump: dump["tables"]["broker"][0].update(role="0"), id="text for a number"),
    pytest.param(lambda dump: dump["tables"]["broker"][0].update(complete=1), id="number for a truth"),
    pytest.param(lambda dump: dump["tables"]["broker"][0].update(group_name="nowhere"), id="broker of no group"),
    pytest.param(lambda dump: dump["tables"]["broker"][0].update(hostname="x" * 101), id="too long"),
    pytest.param(lambda dump: dump["tables"]["broker_group"][0].update(kind=9), id="an unknown kind"),
    pytest.param(lambda dump: dump["tables"]["subject_route"][0].update(broker_group_json="x"), id="no JSON"),
    pytest.param(lambda dump: dump["tables"]["subject_route"].append(dump["tables"]["subject_route"][0]), id="twice"),
]


@pytest.mark.parametrize("break_it", BROKEN)
def test_broken_dump_changes_nothing(other, break_it):
    add_group(other, "g1")
    other.store_routes([("s", ("g1",), 0)])
    before = other.dump()
    dump = through_json(before)
    break_it(dump)
    with pytest.raises(ValueRefused):
        other.change([RestoreAll(dump)], AuditRow("Ann", "here", "Restore"))
    assert {**other.dump(), "time": 0} == {**before, "time": 0}


def test_restore_merges_audit_trails(filled, other):
    """A fixed bug: 43 rows became 3 when a backup was restored over rows of the metaserver itself."""
    for number in range(5):
        filled.change([], AuditRow("Ann", "", f"Old{number}"))
    dump = through_json(filled.dump())
    other.change([], AuditRow("metaserver", "", "AddToken"))
    for _ in range(2):  # repeated: no row is duplicated
        other.change([RestoreAll(dump)])
        trail = [row.action for row in other.audit_trail()]
        assert sorted(trail) == sorted(["AddToken", "Everything", *(f"Old{number}" for number in range(5))])
        assert trail[0] == "AddToken", "newest first"


def test_try_backup_restores_the_file(filled, tmp_path, capsys, monkeypatch):
    whole, cut, foreign = (tmp_path / f"{name}.json" for name in ("whole", "cut", "foreign"))
    whole.write_text(json.dumps(filled.dump()))
    cut.write_text(whole.read_text()[:-100])
    dump = filled.dump()
    dump["tables"]["broker"][0]["role"] = "king"
    foreign.write_text(json.dumps(dump))
    monkeypatch.setattr("sys.argv", ["qmq", str(whole)])
    assert try_backup.main() == 0
    assert "can be restored; 1 broker_group, 2 broker" in capsys.readouterr().out
    for path in (cut, foreign, tmp_path / "none"):
        monkeypatch.setattr("sys.argv", ["qmq", str(whole), str(path)])
        assert try_backup.main() == 1
        assert f"{path}: cannot be restored" in capsys.readouterr().err


def test_try_backup_names_missing_rows(filled, tmp_path, monkeypatch):
    path = tmp_path / "backup.json"
    path.write_text(json.dumps(filled.dump()))
    monkeypatch.setattr(try_backup.Repository, "change", lambda *_: None)
    with pytest.raises(QmqError, match="2 of broker"):
        try_backup.try_backup(path)
