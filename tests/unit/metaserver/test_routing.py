"""Core. Which groups a subject gets, and which of them take messages."""

from __future__ import annotations

import pytest

from metaserver.liveness import Liveness
from metaserver.model import Broker, BrokerKey, Directory, Group, ReadonlyMark, ReplicaState
from metaserver.routing import choose_groups, route_for_clients
from qmq.types import Role

NOW = 50_000


def world(writable="", readonly="", masterless="", marks=()):
    """Groups named by single letters, in the given states."""
    liveness = Liveness(timeout_ms=1000, started_ms=0)
    groups = {}
    for name in writable + readonly + masterless:
        master = Broker(name, Role.MASTER, name, "10.0.0.1", 1, 2)
        groups[name] = Group(name, 3, None if name in masterless else master, None, 0)
        session = liveness.join(BrokerKey(name, 1), "x", now_ms=NOW)
        state = ReplicaState(role=0, term=3, writable=name in writable)
        liveness.beat(BrokerKey(name, 1), session, state, now_ms=NOW)
    return Directory(groups, frozenset(ReadonlyMark(*mark) for mark in marks)), liveness


@pytest.mark.parametrize(
    "current, groups, chosen",
    [
        pytest.param("", {"writable": "abc"}, "abc", id="new subject: all that take messages"),
        pytest.param("", {"writable": "ab", "readonly": "c"}, "ab", id="new subject: not the readonly one"),
        pytest.param("", {"writable": "a", "readonly": "bc"}, "ab", id="filled up to two"),
        pytest.param("", {"readonly": "abc"}, "ab", id="nothing takes messages: two all the same"),
        pytest.param("", {"writable": "a"}, "a", id="only one exists"),
        pytest.param("", {"masterless": "ab"}, "", id="no master, no group"),
        pytest.param("", {}, "", id="nothing exists"),
        pytest.param("", {"writable": "abc", "marks": [("s", "a")]}, "bc", id="marked for the subject"),
        pytest.param("", {"writable": "abc", "marks": [("*", "a")]}, "bc", id="marked for all"),
        pytest.param("", {"writable": "abc", "marks": [("t", "a")]}, "abc", id="marked for another subject"),
        pytest.param("", {"writable": "ab", "readonly": "c", "marks": [("*", "a")]}, "bc", id="marked come last"),
        pytest.param("ab", {"writable": "abc"}, "ab", id="enough: left alone"),
        pytest.param("ab", {"writable": "c", "readonly": "ab"}, "ab", id="readonly groups stay"),
        pytest.param("a", {"writable": "abc"}, "abc", id="too few: extended"),
        pytest.param("a", {"readonly": "ab"}, "ab", id="too few: extended by what there is"),
        pytest.param("ax", {"writable": "ab"}, "abx", id="unknown names stay but do not count"),
    ],
)
def test_groups_of_a_subject(current, groups, chosen):
    directory, liveness = world(**groups)
    assert "".join(choose_groups("s", current, directory, liveness, groups_min=2, now_ms=NOW)) == chosen


def test_choosing_again_changes_nothing():
    directory, liveness = world(writable="a", readonly="bcd")
    once = choose_groups("s", "", directory, liveness, groups_min=3, now_ms=NOW)
    assert choose_groups("s", once, directory, liveness, groups_min=3, now_ms=NOW) == once


def test_clients_see_every_group_and_which_take_messages():
    directory, liveness = world(writable="ab", readonly="c", masterless="d", marks=[("s", "b")])
    routes = route_for_clients("s", "abcdx", directory, liveness, now_ms=NOW)
    assert [(route.group.name, route.writable) for route in routes] == [("a", True), ("b", False), ("c", False)]
