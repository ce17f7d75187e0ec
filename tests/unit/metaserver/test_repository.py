"""Shell. The repository: compare-and-set on terms and versions, one transaction each."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
from sqlalchemy import event, text

from qmq.metaserver.model import (
    DELAY,
    NORMAL,
    AuditRow,
    Broker,
    MetaserverRow,
    Offline,
    ReadonlyMark,
    ReplicaState,
    SightingRow,
    TokenRow,
)
from qmq.metaserver.roles import rules
from qmq.metaserver.storage.changes import (
    AddSubject,
    AddToken,
    AlreadyThere,
    ForgetGroup,
    NotThere,
    RemoveRoute,
    RevokeToken,
    SetGroupState,
    SetLimits,
    SetMark,
    SetOffline,
    SetRoles,
    SetRoute,
    StaleTerm,
    StaleVersion,
    UnsetMark,
    UnsetOffline,
)
from qmq.metaserver.storage.engine import open_database
from qmq.metaserver.storage.repository import Repository
from qmq.operator_limits import OperatorLimits
from qmq.types import Role

MASTER = Broker("g1", Role.MASTER, "a", "10.0.0.1", 1, 2)
SLAVE = Broker("g1", Role.SLAVE, "b", "10.0.0.2", 1, 2)
STATE = ReplicaState(
    0, 2, boot=1, readonly_reasons=("disk",), durability="fsync", incarnation="disk a", has_offsets=False
)
SIGHTING = SightingRow(MASTER.key, "session", "m1", "disk a", up=True, state=STATE, begins=True)
TOKEN = TokenRow("t1", "Ann", "operator", "salt", "hash", ("s", "t*"), ("g1",), 1000, 2000)


@pytest.fixture
def copies(repository):
    for broker in (MASTER, SLAVE):
        repository.change([SetRoles(rules.add_broker(repository.load(), broker))])
    return repository


def test_each_change_of_roles_raises_the_term_by_one(copies):
    group = copies.load().groups["g1"]
    assert (group.term, group.master, group.slave) == (2, MASTER, SLAVE)
    copies.change([SetRoles(rules.swap_roles(group, term=2))])
    swapped = copies.load().groups["g1"]
    assert (swapped.term, swapped.master.hostname, swapped.slave.hostname) == (3, "b", "a")


def test_group_is_stored_with_its_kind(copies):
    added = Broker("d1", Role.MASTER, "c", "10.0.0.3", 1, 2, kind=DELAY)
    copies.change([SetRoles(rules.add_broker(copies.load(), added))])
    copies.store_registration(replace(added, incarnation="disk c"), added)
    groups = copies.load().groups
    assert (groups["d1"].kind, groups["d1"].master.part) == (DELAY, Role.DELAY_MASTER)
    assert (groups["g1"].kind, groups["g1"].slave.part) == (NORMAL, Role.SLAVE)


def test_decision_is_stale_after_two_swaps(copies):
    copies.change([SetRoles(rules.swap_roles(copies.load().groups["g1"], term=2))])
    copies.change([SetRoles(rules.swap_roles(copies.load().groups["g1"], term=3))])
    old = copies.load().groups["g1"]
    for term in (4, 5):
        copies.change([SetRoles(rules.swap_roles(copies.load().groups["g1"], term=term))])
    assert copies.load().groups["g1"].brokers == old.brokers
    after = copies.load()
    with pytest.raises(StaleTerm):
        copies.change([SetRoles(rules.swap_roles(old, term=4))])
    assert copies.load() == after and after.groups["g1"].term == 6


def test_decision_is_stale_after_registration(copies):
    old = copies.load().groups["g1"]
    copies.store_registration(replace(SLAVE, incarnation="new disk"))
    with pytest.raises(StaleTerm):
        copies.change([SetRoles(rules.swap_roles(old, term=2))])
    group = copies.load().groups["g1"]
    assert group.term == 2 and group.slave.incarnation == "new disk"


def test_one_thread_wins_each_term(copies, migrated_url):
    group, results = copies.load().groups["g1"], []
    barrier = threading.Barrier(8, timeout=20)

    def swap():
        engine = open_database(migrated_url)
        barrier.wait()
        try:
            swap = SetRoles(rules.swap_roles(group, term=2))
            Repository(engine).change([swap], AuditRow("me", "here", "SwapRoles"))
            results.append("won")
        except StaleTerm:
            results.append("lost")
        finally:
            engine.dispose()

    threads = [threading.Thread(target=swap) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == ["lost"] * 7 + ["won"]
    assert copies.load().groups["g1"].term == 3 and len(copies.audit_trail()) == 1


def test_broker_added_twice_is_in_one_group(repository):
    empty = repository.load()
    repository.change([SetRoles(rules.add_broker(empty, MASTER))])
    with pytest.raises(StaleTerm):
        repository.change([SetRoles(rules.add_broker(empty, replace(MASTER, group="g2")))])
    assert list(repository.load().groups) == ["g1"]


def test_lost_group_is_forgotten_once(repository):
    """Two operators adopt a database at once."""
    repository.change([ForgetGroup("g1", 2)])
    with pytest.raises(StaleTerm):
        repository.change([ForgetGroup("g1", 2)])


def test_completeness_is_stored_for_its_disk_and_term(copies):
    seen = replace(SLAVE, incarnation="disk b")
    copies.store_registration(seen)
    copies.store_complete(replace(seen, incarnation="another"), term=2, complete=True)
    copies.store_complete(seen, term=1, complete=True)
    assert not copies.load().groups["g1"].slave.complete
    copies.store_complete(seen, term=2, complete=True)
    assert copies.load().groups["g1"].slave.complete


def test_routes_are_created_once_and_changed_by_version(copies):
    for name in ("g2", "g3"):
        copies.change([SetRoles(rules.add_broker(copies.load(), replace(MASTER, group=name, hostname=name)))])
    [created] = copies.store_routes([("s", ("g1",), 0)])
    assert (created.groups, created.version) == (("g1",), 1)
    assert copies.store_routes([("s", ("g2",), 0)]) == [created], "the first route counts"
    [changed] = copies.store_routes([("s", ("g1", "g2"), 1)])
    assert (changed.groups, changed.version) == (("g1", "g2"), 2)
    assert copies.store_routes([("s", ("g3",), 1)]) == [changed], "the older version lost"
    assert copies.load_routes()[1] == [changed]


MARK, OFFLINE = ReadonlyMark("*", "g1"), Offline("s", "group", "*")


@pytest.mark.parametrize(
    "add, remove, other, rows",
    [
        (SetMark(MARK), UnsetMark(MARK), SetMark(ReadonlyMark("s", "g1")), lambda directory: directory.marks),
        (SetOffline(OFFLINE), UnsetOffline(OFFLINE), SetOffline(Offline("*", "g", "c1")), lambda known: known.offline),
    ],
    ids=["mark", "offline"],
)
def test_marks_and_offline_rows_are_idempotent(copies, add, remove, other, rows):
    for changes, count in (([add, other], 2), ([add], 2), ([remove], 1), ([remove], 1)):
        copies.change(changes)
        assert len(rows(copies.load())) == count


def test_registration_compares_the_row(copies):
    copies.store_registration(replace(SLAVE, incarnation="disk"), SLAVE)
    with pytest.raises(StaleTerm):
        copies.store_registration(replace(SLAVE, incarnation="another disk"), SLAVE)
    assert copies.load().groups["g1"].slave.incarnation == "disk"
    with pytest.raises(NotThere):
        copies.store_registration(replace(SLAVE, hostname="nobody"))


def test_change_raises_its_versions_only(copies):
    def raised(act):
        before = copies.versions()
        act()
        return {name for name, version in copies.versions().items() if version != before[name]}

    assert set(copies.versions()) == {"directory", "beside_groups", "routes", "sightings"}
    assert raised(lambda: copies.change([SetMark(ReadonlyMark("*", "g1"))])) == {"directory", "beside_groups"}
    assert raised(lambda: copies.change([AddToken(TOKEN)])) == {"directory", "beside_groups"}
    assert raised(lambda: copies.change([SetGroupState("g1", draining=True)])) == {"directory"}
    assert raised(lambda: copies.change([SetRoute("s", ("g1",), 0)])) == {"routes"}
    assert raised(lambda: copies.store_routes([("t", ("g1",), 0)])) == {"routes"}
    assert raised(lambda: copies.store_sightings([SIGHTING])) == {"sightings"}
    assert raised(lambda: copies.change([], AuditRow("me", "here", "Reset"))) >= {"directory"}, (
        "settling waits for this version"
    )
    assert raised(lambda: copies.beat(MetaserverRow("m1", "h", "g", 1, "1"))) == set()
    assert copies.load().version == copies.versions()["directory"]


def test_groups_are_read_after_their_changes_only(copies):
    known = copies.load()
    copies.change([SetMark(ReadonlyMark("*", "g1"))])
    marked = copies.load(known)
    assert marked.groups is known.groups and marked.marks == {ReadonlyMark("*", "g1")}
    assert marked.find(SLAVE.key) == known.find(SLAVE.key) is not None
    copies.change([UnsetMark(ReadonlyMark("*", "g1")), SetGroupState("g1", tag="t")])
    tagged = copies.load(marked)
    assert tagged.groups["g1"].tag == "t" and tagged.marks == frozenset()
    copies.settle()
    assert copies.load(tagged).groups is tagged.groups
    copies.change([SetRoles(rules.add_broker(tagged, Broker("g2", Role.MASTER, "c", "10.0.0.3", 1, 2)))])
    assert copies.load(tagged).groups["g1"] is tagged.groups["g1"], "unchanged groups stay the same objects"


def test_edited_rows_are_read_after_raised_versions(copies):
    known = copies.load()
    with copies._transactions._engine.begin() as connection:
        connection.execute(text("UPDATE broker_group SET tag = 'edited'"))
        connection.execute(text("UPDATE meta_version SET version = version + 1"))
    assert copies.load(known).groups["g1"].tag == "edited"


def test_routes_are_read_from_a_version(copies):
    first, _ = copies.load_routes()
    [a, b] = copies.store_routes([("a", ("g1",), 0), ("b", ("g1",), 0)])
    second, both = copies.load_routes(first)
    assert both == [a, b] and {route.changed for route in both} == {second}
    [c] = copies.store_routes([("c", ("g1",), 0)])
    assert copies.load_routes(second) == (c.changed, [c])
    assert copies.load_routes(c.changed) == (c.changed, [])
    assert copies.load_routes()[1] == [a, b, c]


def test_many_subjects_are_one_transaction(copies):
    orders = [(f"s{number}", ("g1",), 0) for number in range(2500)]
    stored = copies.store_routes(orders)
    assert [route.subject for route in stored] == [subject for subject, _, _ in orders]
    assert len({route.changed for route in stored}) == 1
    assert sorted(copies.load_routes()[1], key=str) == sorted(stored, key=str)
    assert copies.store_routes([]) == []


def test_many_routes_are_removed_in_few_statements(copies):
    """One scan of the table per route would hold the locks for minutes."""
    copies.store_routes([(f"s{number}", ("g1",), 0) for number in range(50)])
    statements = []
    event.listen(copies._transactions._engine, "before_cursor_execute", lambda *arguments: statements.append(arguments))
    copies.change([RemoveRoute("s0", 1)])
    alone = len(statements)
    copies.change([RemoveRoute(f"s{number}", 1) for number in range(1, 50)])
    assert len(statements) == 2 * alone and copies.load_routes()[1] == []


@pytest.mark.parametrize("stale", [("s1", 2), ("s1", 0), ("s0", 1), ("unknown", 1)], ids=str)
def test_stale_removal_removes_no_route(copies, stale):
    copies.store_routes([("s0", ("g1",), 0), ("s1", ("g1",), 0)])
    with pytest.raises(StaleVersion):
        copies.change([RemoveRoute("s0", 1), RemoveRoute(*stale)])
    assert {route.subject for route in copies.load_routes()[1]} == {"s0", "s1"}


def test_sighting_goes_on_only_in_its_own_session(copies):
    seen = replace(SIGHTING, begins=True)
    copies.store_sightings([seen])
    version, [stored] = copies.load_sightings()
    assert stored == replace(seen, begins=False, changed=version)
    down = replace(seen, begins=False, up=False, state=None)
    copies.store_sightings([replace(down, session="older")])
    assert copies.load_sightings()[1] == [stored]
    copies.store_sightings([down])
    newest, changed = copies.load_sightings(version)
    assert changed == [replace(down, changed=newest)]
    copies.store_sightings([replace(seen, session="newer"), replace(seen, session="newest", up=False)])
    assert [row.session for row in copies.load_sightings()[1]] == ["newest"]


def test_sighting_of_a_broker_that_left_its_group_is_forgotten(copies):
    copies.store_sightings([SIGHTING, replace(SIGHTING, key=SLAVE.key)])
    group = copies.load().groups["g1"]
    copies.change([SetRoles(rules.RoleChange("g1", 2, group, group.master))])
    assert [row.key for row in copies.load_sightings()[1]] == [MASTER.key]


def test_metaserver_rows_stay_until_removed(repository):
    for beat in (1, 2):
        for id in ("m2", "m1"):
            repository.beat(MetaserverRow(id, "10.0.0.1:8080", "10.0.0.1:8081", beat, "1.0"))
    assert [(row.id, row.beat) for row in repository.load_metaservers()] == [("m1", 2), ("m2", 2)]
    repository.remove_metaserver("m1")
    assert [row.id for row in repository.load_metaservers()] == ["m2"]


def test_token_is_stored_once_and_revoked_once(repository):
    repository.change([AddToken(TOKEN)])
    with pytest.raises(AlreadyThere):
        repository.change([AddToken(replace(TOKEN, name="another"))])
    assert repository.load_tokens() == [TOKEN]
    repository.change([RevokeToken("t1")])
    [revoked] = repository.load_tokens()
    assert revoked.revoked_ms > 0
    repository.change([RevokeToken("t1")])
    assert repository.load_tokens() == [revoked]
    with pytest.raises(NotThere):
        repository.change([RevokeToken("t2")])


def test_audit_trail_is_read_by_page_and_filter(repository):
    for number in range(5):
        who = "Ann" if number % 2 else "Bob"
        audit = AuditRow(
            who, "10.0.0.1", f"Action{number}", {"subject": f"100%_{number}"}, [number], {"a": "ü"}, "done"
        )
        repository.change([], audit)
    newest, *_ = trail = repository.audit_trail()
    assert [row.action for row in trail] == [f"Action{number}" for number in (4, 3, 2, 1, 0)]
    assert newest == replace(audit, id=newest.id, time_ms=newest.time_ms) and newest.time_ms > 0
    assert [row.id for row in repository.audit_trail(trail[1].id, 2)] == [trail[2].id, trail[3].id]
    assert [row.action for row in repository.audit_trail(who="Ann")] == ["Action3", "Action1"]
    assert [row.action for row in repository.audit_trail(action="Action2")] == ["Action2"]
    assert [row.action for row in repository.audit_trail(about=["100%_3"])] == ["Action3"]
    assert repository.audit_trail(about=["0__"]) == [], "a name, not a pattern"
    assert repository.audit_trail(about=["100%"]) == [], "the whole name"
    assert [row.action for row in repository.audit_trail(about=["a", "100%_2"])] == ["Action2"], "all of them"
    assert repository.audit_trail(since_ms=newest.time_ms + 1) == []


def test_limits_replace_earlier_ones(repository):
    repository.change([SetLimits(OperatorLimits("s", "*", expires_after_s=60, expired_die=True))])
    both = {OperatorLimits("s", "*", expires_after_s=7), OperatorLimits("s", "g", per_second=9)}
    repository.change([SetLimits(limits) for limits in both])
    assert repository.load().limits == both
    repository.change([SetLimits(OperatorLimits("s", "*"))])
    assert repository.load().limits == {OperatorLimits("s", "g", per_second=9)}


def test_subject_is_announced_with_its_tag(repository):
    repository.change([AddSubject("s", "ssd")])
    with pytest.raises(AlreadyThere):
        repository.change([AddSubject("s", "hdd")])
    assert {name: info.tag for name, info in repository.load().subjects.items()} == {"s": "ssd"}


def test_several_slaves_and_min_copies_are_stored(copies):
    third = replace(SLAVE, hostname="c", ip="10.0.0.3", incarnation="")
    group = copies.load().groups["g1"]
    same = rules.RoleChange("g1", group.term, group, group.master, (SLAVE, third), min_copies=3)
    copies.change([SetRoles(same)])
    loaded = copies.load().groups["g1"]
    assert [slave.key for slave in loaded.slaves] == [SLAVE.key, third.key]
    assert (loaded.min_copies, loaded.term, loaded.slave) == (3, group.term + 1, None)
    copies.change([SetRoles(rules.swap_roles(loaded, term=loaded.term, to=third.key))])
    swapped = copies.load().groups["g1"]
    assert (swapped.master.key, swapped.min_copies) == (third.key, 3)
    assert {slave.key for slave in swapped.slaves} == {MASTER.key, SLAVE.key}
