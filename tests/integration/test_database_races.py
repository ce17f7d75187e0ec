"""Shell. Concurrent changes of several metaservers, on each kind of database."""

from __future__ import annotations

import multiprocessing
import random
import threading
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace

import pytest

from qmq.metaserver.model import BrokerKey, ReadonlyMark, SightingRow
from qmq.metaserver.roles import rules
from qmq.metaserver.storage.changes import (
    AddSubject,
    AlreadyThere,
    GroupInUse,
    RemoveGroup,
    SetMark,
    SetRoles,
    SetRoute,
    StaleTerm,
    StaleVersion,
    UnknownGroup,
    UnsetMark,
)
from qmq.metaserver.storage.engine import open_database
from qmq.metaserver.storage.repository import Repository
from tests.support.directories import add_group

METASERVERS = 4
WAIT_S = 60


@pytest.fixture
def engine(engine):
    for group in ("g1", "g2"):
        add_group(Repository(engine), group)
    return engine


@pytest.fixture
def race(engine, database_url):
    """Run `act(repository, number)` at the same moment, each on connections of its own; return all results."""

    def run(act):
        barrier = threading.Barrier(METASERVERS, timeout=WAIT_S)

        def attempt_of(number):
            own = open_database(database_url)
            try:
                barrier.wait()
                return act(Repository(own), number)
            finally:
                own.dispose()

        with ThreadPoolExecutor(METASERVERS) as pool:
            return list(pool.map(attempt_of, range(METASERVERS)))

    return run


def attempt(change, *errors):
    try:
        change()
    except errors:
        return False
    return True


def test_concurrent_changes_of_a_route_store_a_single_row(race, engine):
    repository = Repository(engine)
    repository.store_routes([("s", ("g1",), 0)])
    for version in range(1, 11):
        change = SetRoute("s", ("g1", "g2"), version)
        assert sum(race(lambda own, _: attempt(lambda: own.change([change]), StaleVersion))) == 1  # noqa: B023
    assert repository.load_routes()[1][0].version == 11


def test_metaservers_agree_on_routes_of_new_subjects(race, engine):
    subjects = [f"s{number}" for number in range(200)]

    def create(own, number):
        mine = random.Random(number).sample(subjects, len(subjects))  # another order must not deadlock
        orders = [(subject, ("g1",) if number % 2 else ("g2",), 0) for subject in mine]
        return {route.subject: route.groups for begin in (0, 100) for route in own.store_routes(orders[begin:][:100])}

    first, *others = race(create)
    assert all(other == first for other in others)
    stored = Repository(engine).load_routes()[1]
    assert {route.subject: (route.groups, route.version) for route in stored} == {
        subject: (groups, 1) for subject, groups in first.items()
    }


def test_concurrent_marks_leave_a_single_answer(race, engine):
    mark = ReadonlyMark("s", "g1")

    def flip(own, number):
        for _ in range(20):
            own.change([(UnsetMark if number % 2 else SetMark)(mark)])

    race(flip)
    repository = Repository(engine)
    assert repository.load().marks in ({mark}, frozenset())
    repository.change([SetMark(mark)])
    race(lambda own, _: own.change([SetMark(mark)]))
    assert repository.load().marks == {mark}
    race(lambda own, _: own.change([UnsetMark(mark)]))
    assert repository.load().marks == frozenset()


def test_a_subject_is_announced_once(race):
    assert sum(race(lambda own, _: attempt(lambda: own.change([AddSubject("s", "t")]), AlreadyThere))) == 1


def test_incremental_reader_sees_every_change(race, engine):
    """A version is raised inside the transaction, under a lock: none becomes visible after a later one."""
    writers_left = [METASERVERS - 1]
    lock = threading.Lock()

    def act(own, number):
        if number > 0:
            try:
                for turn in range(30):
                    own.store_routes([(f"w{number}-{turn}", ("g1",), 0), (f"all-{turn}", ("g1",), 0)])
            finally:
                with lock:
                    writers_left[0] -= 1
            return None
        seen, routes, version = 0, {}, 0
        while True:
            finished = writers_left[0] == 0
            before, (version, changed) = seen, own.load_routes(seen)
            assert version >= before and all(before < route.changed <= version for route in changed if before)
            routes.update({route.subject: route for route in changed})
            seen = version
            if finished and version == before:
                return routes

    read_bit_by_bit, *_ = race(act)
    stored = Repository(engine).load_routes()[1]
    assert read_bit_by_bit == {route.subject: route for route in stored}
    assert len(stored) == 30 * (METASERVERS - 1) + 30


def test_group_removal_and_route_extension_exclude_each_other(race, engine):
    repository = Repository(engine)
    for turn in range(5):
        name = f"empty{turn}"
        add_group(repository, name)
        group = repository.load().groups[name]
        repository.change([SetRoles(rules.RoleChange(name, group.term, group, None))])
        term = group.term + 1

        def act(own, number):
            change = RemoveGroup(name, term) if number % 2 else SetRoute(f"s{number}-{turn}", (name,), 0)  # noqa: B023
            return attempt(lambda: own.change([change]), GroupInUse, UnknownGroup, StaleTerm)

        race(act)
        uses = [route for route in repository.load_routes()[1] if name in route.groups]
        assert (name in repository.load().groups) == bool(uses)


def test_older_session_does_not_overwrite_a_newer(race, engine):
    repository, key = Repository(engine), BrokerKey("g1-a", 20881)
    old = SightingRow(key, "old", "m1", "disk", up=True, begins=True)
    repository.store_sightings([old])
    new = replace(old, session="new", metaserver="m2")

    def act(own, number):
        for _ in range(10):
            own.store_sightings([new if number == 0 else replace(old, up=False, begins=False)])

    race(act)
    [stored] = repository.load_sightings()[1]
    assert (stored.session, stored.metaserver, stored.up) == ("new", "m2", True)


def swap_until(url, term):
    """Swap the roles of g1 repeatedly; return the terms that this process made."""
    engine = open_database(url)
    repository, given = Repository(engine), []
    while (group := repository.load().groups["g1"]).term < term:
        if attempt(lambda: repository.change([SetRoles(rules.swap_roles(group, term=group.term))]), StaleTerm):
            given.append((group.term + 1, group.slave.hostname))
    engine.dispose()
    return given


def test_each_term_is_issued_by_a_single_process(engine, database_url):
    with ProcessPoolExecutor(3, mp_context=multiprocessing.get_context("spawn")) as pool:
        given = [swap for swaps in pool.map(swap_until, [database_url] * 3, [60] * 3) for swap in swaps]
    terms = dict(given)
    assert len(given) == len(terms), "each term belongs to one process"
    assert sorted(terms) == list(range(3, max(terms) + 1)), "terms are dense"
    assert all(terms[term] != terms[term - 1] for term in sorted(terms)[1:]), "each swap follows the previous one"
