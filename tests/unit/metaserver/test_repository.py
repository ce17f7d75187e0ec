"""Shell. The database: migrations from nothing, compare-and-set on terms and versions, one transaction each."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from metaserver import roles
from metaserver.db.engine import open_database
from metaserver.db.repository import Repository, StaleTerm
from metaserver.model import Broker, ReadonlyMark
from qmq.types import Role

MASTER = Broker("g1", Role.MASTER, "a", "10.0.0.1", 1, 2)
SLAVE = Broker("g1", Role.SLAVE, "b", "10.0.0.2", 1, 2)


@pytest.fixture
def repository(database_url):
    engine = open_database(database_url)
    yield Repository(engine)
    engine.dispose()


@pytest.fixture
def pair(repository):
    for broker in (MASTER, SLAVE):
        repository.change_roles(roles.add_broker(repository.load(), broker))
    return repository


def test_each_change_of_roles_raises_the_term_by_one(pair):
    group = pair.load().groups["g1"]
    assert (group.term, group.master, group.slave) == (2, MASTER, SLAVE)
    pair.change_roles(roles.swap_roles(group, term=2))
    swapped = pair.load().groups["g1"]
    assert (swapped.term, swapped.master.hostname, swapped.slave.hostname) == (3, "b", "a")


def test_decision_on_an_older_term_changes_nothing(pair):
    old = pair.load().groups["g1"]
    pair.change_roles(roles.swap_roles(old, term=2))
    after = pair.load()
    with pytest.raises(StaleTerm):
        pair.change_roles(roles.swap_roles(old, term=2))
    assert pair.load() == after


def test_decision_is_stale_also_when_the_roles_went_there_and_back(pair):
    pair.change_roles(roles.swap_roles(pair.load().groups["g1"], term=2))
    pair.change_roles(roles.swap_roles(pair.load().groups["g1"], term=3))
    old = pair.load().groups["g1"]
    for term in (4, 5):
        pair.change_roles(roles.swap_roles(pair.load().groups["g1"], term=term))
    assert pair.load().groups["g1"].brokers == old.brokers
    with pytest.raises(StaleTerm):
        pair.change_roles(roles.swap_roles(old, term=4))
    assert pair.load().groups["g1"].term == 6


def test_decision_on_brokers_that_registered_since_changes_nothing(pair):
    old = pair.load().groups["g1"]
    pair.store_registration(replace(SLAVE, incarnation="new disk"))
    with pytest.raises(StaleTerm):
        pair.change_roles(roles.swap_roles(old, term=2))
    group = pair.load().groups["g1"]
    assert group.term == 2 and group.slave.incarnation == "new disk"


def test_of_many_threads_with_connections_of_their_own_exactly_one_wins_each_term(pair, database_url):
    group, results = pair.load().groups["g1"], []
    barrier = threading.Barrier(8, timeout=20)

    def swap():
        engine = open_database(database_url)
        barrier.wait()
        try:
            Repository(engine).change_roles(roles.swap_roles(group, term=2))
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
    assert pair.load().groups["g1"].term == 3


def test_same_broker_added_to_two_groups_at_once_is_in_one(repository):
    empty = repository.load()
    repository.change_roles(roles.add_broker(empty, MASTER))
    with pytest.raises(StaleTerm):
        repository.change_roles(roles.add_broker(empty, replace(MASTER, group="g2")))
    assert list(repository.load().groups) == ["g1"]


def test_completeness_is_stored_for_the_disk_and_term_it_was_seen_in(pair):
    seen = replace(SLAVE, incarnation="disk b")
    pair.store_registration(seen)
    pair.store_complete(replace(seen, incarnation="another"), term=2, complete=True)
    pair.store_complete(seen, term=1, complete=True)
    assert not pair.load().groups["g1"].slave.complete
    pair.store_complete(seen, term=2, complete=True)
    assert pair.load().groups["g1"].slave.complete


def test_routes_are_created_once_and_changed_by_version(pair):
    for name in ("g2", "g3"):
        pair.change_roles(roles.add_broker(pair.load(), replace(MASTER, group=name, hostname=name)))
    created = pair.store_route("s", ["g1"], version=0)
    assert (created.groups, created.version) == (("g1",), 1)
    assert pair.store_route("s", ["g2"], version=0) == created, "who came first counts"
    changed = pair.store_route("s", ["g1", "g2"], version=1)
    assert (changed.groups, changed.version) == (("g1", "g2"), 2)
    assert pair.store_route("s", ["g3"], version=1) == changed, "the older version lost"
    assert pair.load_routes()[1] == [changed]


def test_marks_are_set_and_removed_any_number_of_times(pair):
    mark = ReadonlyMark("*", "g1")
    for _ in range(2):
        pair.mark_readonly(mark)
    assert pair.load().marks == {mark}
    for _ in range(2):
        pair.unmark_readonly(mark)
    assert pair.load().marks == frozenset()
