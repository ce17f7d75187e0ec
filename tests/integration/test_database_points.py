"""Shell. Acknowledged points on each kind of database: they only rise."""

from __future__ import annotations

import pytest

from qmq.metaserver.model import Broker, Points
from qmq.metaserver.roles import rules
from qmq.metaserver.storage.changes import AcceptLoss, RemoveGroup, RestoreAll, SetRoles
from qmq.metaserver.storage.repository import Repository
from qmq.replication.identity import Point
from qmq.types import Epoch, Role

HIGHEST = (1 << 64) - 1
NEWEST = Point(Epoch(3, 2), 1 << 40, HIGHEST)
OLDER = [Point(Epoch(3, 2), 100, 7), Point(Epoch(3, 1), 1 << 50, 7), Point(Epoch(2, 9), 1 << 50, 7)]


@pytest.fixture
def repository(engine):
    return Repository(engine)


MASTER = Broker("g1", Role.MASTER, "a", "10.0.0.1", 1, 2)


def stored(repository, group="g1"):
    return repository.load_points(group)


def test_points_only_rise_per_group_and_disk(repository):
    assert stored(repository) == Points()
    repository.store_points({("g1", "a"): OLDER[0], ("g1", "b"): OLDER[2], ("g2", "a"): OLDER[1]})
    repository.store_points({("g1", "a"): NEWEST})
    for older in OLDER:
        repository.store_points({("g1", "a"): older})
    repository.store_points({("g1", "a"): NEWEST})
    assert stored(repository) == Points({"a": NEWEST, "b": OLDER[2]})
    assert stored(repository, "g2") == Points({"a": OLDER[1]})


def test_accepted_loss_removes_points(repository):
    repository.change([SetRoles(rules.add_broker(repository.load(), MASTER))])
    repository.store_points({("g1", "a"): NEWEST, ("g2", "a"): NEWEST})
    repository.change([AcceptLoss("g1", 4)])
    assert stored(repository) == Points({}, 4)
    later = Point(Epoch(4, 1), 200, 9)
    repository.store_points({("g1", "a"): later})
    assert stored(repository) == Points({"a": later}, 4)
    assert stored(repository, "g2") == Points({"a": NEWEST})


def removed(repository):
    change = rules.remove_broker(repository.load(), MASTER, lambda _: False)
    repository.change([SetRoles(change), RemoveGroup("g1", change.new_term)])


def reported_late(repository):
    """A metaserver stores reported points up to a second later."""
    removed(repository)
    repository.store_points({("g1", "a"): NEWEST})


def not_in_a_backup(repository):
    repository.change([RestoreAll(repository.empty)])


@pytest.mark.parametrize("gone", [removed, reported_late, not_in_a_backup])
def test_recreated_group_begins_without_points(repository, gone):
    """With old points, its restarted new master would count as rolled back."""
    repository.empty = repository.dump()
    repository.change([SetRoles(rules.add_broker(repository.load(), MASTER))])
    repository.store_points({("g1", "a"): NEWEST, ("g2", "a"): NEWEST})
    gone(repository)
    assert "g1" not in repository.load().groups
    repository.change([SetRoles(rules.add_broker(repository.load(), MASTER))])
    assert stored(repository) == Points()
    assert stored(repository, "g2") == Points({"a": NEWEST})
