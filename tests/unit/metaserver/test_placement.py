"""Core. Groups of a subject, and which of them accept produces."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from qmq.metaserver.model import DELAY, NORMAL, Broker, Directory, Group, ReadonlyMark, Route, SubjectInfo
from qmq.metaserver.routes.encoding import GroupViews
from qmq.metaserver.routes.placement import Loads, Placement, wider_routes
from qmq.metaserver.storage.changes import SetRoute
from qmq.operator_limits import OperatorLimits
from qmq.types import Role


def world(writable="", readonly="", masterless="", delay="", draining="", full="", marks=(), tags=(), subjects=()):
    """Make groups named by single letters, in the given states; `tags`: (group, tag), `subjects`: (subject, tag)."""
    groups = {}
    for name in sorted({*writable, *readonly, *masterless, *delay, *draining, *full}):
        master = Broker(name, Role.MASTER, name, "10.0.0.1", 1, 2)
        groups[name] = Group(
            name,
            3,
            None if name in masterless else master,
            (),
            0,
            kind=DELAY if name in delay else NORMAL,
            tag=dict(tags).get(name, ""),
            draining=name in draining,
            full=name in full,
        )
    infos = {subject: SubjectInfo(subject, tag) for subject, tag in subjects}
    directory = Directory(groups, frozenset(ReadonlyMark(*mark) for mark in marks), subjects=infos)
    return directory, lambda group: group.name in {*writable, *delay, *draining, *full} - {*readonly}


def seen(groups, directory, is_writable):
    """Return the route of s with `groups`, as clients get it."""
    views = GroupViews(NORMAL)
    views.look(directory, is_writable)
    route, _, _ = views.route("s", "s", tuple(groups), directory)
    return [(group.broker_group, group.writable) for group in route.message.groups]


def placement(directory, is_writable, *, loads=None, groups_min=2, groups_new=4, **more):
    return Placement(directory, is_writable, loads or Loads(), groups_min=groups_min, groups_new=groups_new, **more)


@pytest.mark.parametrize(
    "current, groups, chosen",
    [
        pytest.param("", {"writable": "abc"}, "abc", id="new subject: all that accept produces, if they are few"),
        pytest.param("", {"writable": "abcdefgh"}, "abcd", id="new subject: a bounded number"),
        pytest.param("", {"writable": "ab", "readonly": "c"}, "ab", id="new subject: not the readonly one"),
        pytest.param("", {"writable": "a", "readonly": "bc"}, "ab", id="filled up to two"),
        pytest.param("", {"readonly": "abc"}, "ab", id="nothing accepts produces: two all the same"),
        pytest.param("", {"writable": "a"}, "a", id="only one exists"),
        pytest.param("", {"masterless": "ab"}, "", id="no master, no group"),
        pytest.param("", {}, "", id="nothing exists"),
        pytest.param("", {"writable": "abc", "marks": [("s", "a")]}, "bc", id="marked for the subject"),
        pytest.param("", {"writable": "abc", "marks": [("*", "a")]}, "bc", id="marked for all"),
        pytest.param("", {"writable": "abc", "marks": [("t", "a")]}, "abc", id="marked for another subject"),
        pytest.param("", {"writable": "ab", "readonly": "c", "marks": [("*", "a")]}, "bc", id="marked come last"),
        pytest.param("", {"writable": "ab", "marks": [("s", "a")]}, "ab", id="marked, as there is no other"),
        pytest.param("", {"writable": "abc", "full": "d"}, "abc", id="full groups keep away"),
        pytest.param("", {"writable": "a", "full": "b", "readonly": "c"}, "ac", id="a down one before a full one"),
        pytest.param("", {"writable": "a", "full": "b"}, "ab", id="a full one before none"),
        pytest.param("", {"writable": "a", "draining": "b"}, "a", id="draining groups get nothing new"),
        pytest.param("", {"writable": "a", "delay": "bc"}, "a", id="delay groups are apart"),
        pytest.param("ab", {"writable": "abc"}, "ab", id="enough: left alone"),
        pytest.param("ab", {"writable": "c", "readonly": "ab"}, "ab", id="readonly groups stay"),
        pytest.param("a", {"writable": "abc"}, "ab", id="too few: extended to enough"),
        pytest.param("a", {"readonly": "ab"}, "ab", id="too few: extended by what there is"),
        pytest.param("ax", {"writable": "ab"}, "abx", id="unknown names stay but do not count"),
        pytest.param("ad", {"writable": "ab", "delay": "d"}, "abd", id="delay groups do not count"),
        pytest.param("ad", {"writable": "ab", "draining": "d"}, "abd", id="draining groups do not count"),
        pytest.param("ab", {"writable": "abc", "marks": [("s", "a")]}, "abc", id="marked ones do not count"),
        pytest.param("ab", {"writable": "ab", "readonly": "c", "marks": [("s", "a")]}, "ab", id="no gain: left alone"),
    ],
)
def test_groups_of_a_subject(current, groups, chosen):
    """Weakness 9: in QMQ missing groups and delay groups count towards min.group.num for ever."""
    assert "".join(placement(*world(**groups)).choose("s", current)) == chosen


def test_new_subjects_go_to_least_loaded_writable_groups():
    """Weakness 21: QMQ places new subjects at random, without marks, states, load and disk."""
    directory, is_writable = world(writable="abcdef", readonly="g", marks=[("*", "a")], full="h")
    loads = Loads()
    for subject, groups in {"one": "bc", "two": "bc", "three": "b", "four": "b"}.items():
        loads.moved(subject, (), groups)
    chosen = placement(directory, is_writable, loads=loads, groups_new=2).choose("s")
    assert chosen == ("d", "e")


def test_many_new_subjects_are_spread_evenly():
    directory, is_writable = world(writable="abcdefghij")
    chooser = placement(directory, is_writable, groups_new=3)
    count = Counter(name for number in range(1000) for name in chooser.choose(f"s{number}"))
    assert max(count.values()) - min(count.values()) <= 1


def test_subjects_created_in_an_outage_are_spread():
    directory, is_writable = world(readonly="abcdefghij")
    chooser = placement(directory, is_writable)
    count = Counter(name for number in range(1000) for name in chooser.choose(f"s{number}"))
    assert set(count.values()) == {200}


def test_later_group_gets_the_next_subjects():
    directory, is_writable = world(writable="abc")
    loads = Loads()
    for number in range(100):
        loads.moved(f"old{number}", (), "ab")
    chosen = [placement(directory, is_writable, loads=loads, groups_new=2).choose(f"s{number}") for number in range(5)]
    assert all("c" in groups for groups in chosen)


def test_known_bytes_count():
    directory, is_writable = world(writable="abc")
    stored_bytes = {"a": 900 << 30, "b": 1 << 30}
    chooser = placement(directory, is_writable, groups_min=1, groups_new=1, stored_bytes=stored_bytes)
    assert chooser.choose("s") == ("b",), "c is not known to be empty"


def test_loads_follow_changed_routes():
    loads = Loads()
    loads.moved("s", (), ("a", "b"))
    loads.moved("t", (), ("a",))
    loads.moved("s", ("a", "b"), ("a", "c"))
    assert [loads.of(name) for name in "abcd"] == [{"s", "t"}, set(), {"s"}, set()]
    assert [loads.subjects(name) for name in "abcd"] == [2, 0, 1, 0]
    loads.moved("s", ("a", "c"), ())
    assert loads.of("a") == {"t"}


@pytest.mark.parametrize(
    "groups, chosen",
    [
        pytest.param({"writable": "abcd", "tags": [("c", "t"), ("d", "t")]}, "cd", id="those of its tag"),
        pytest.param({"writable": "abcd", "tags": [("d", "t")]}, "ad", id="too few of its tag: one without"),
        pytest.param({"writable": "abcd", "tags": [("d", "u")]}, "abc", id="none of its tag: those without one"),
        pytest.param({"writable": "ab", "readonly": "c", "tags": [("c", "t")]}, "ab", id="those of its tag are down"),
        pytest.param({"writable": "d", "tags": [("d", "u")]}, "d", id="only groups of another tag"),
    ],
)
def test_tagged_subject_prefers_its_tag(groups, chosen):
    chooser = placement(*world(**groups, subjects=[("s", "t")]))
    assert "".join(chooser.choose("s")) == chosen


def test_untagged_subject_avoids_tagged_groups():
    chooser = placement(*world(writable="abcd", tags=[("a", "t"), ("b", "t")]))
    assert chooser.choose("s") == ("c", "d")


@pytest.mark.parametrize("seed", range(200))
def test_placement_is_stable_and_bounded(seed):
    rng = Random(seed)
    letters = "abcdefgh"

    def some(chance):
        return "".join(name for name in letters if rng.random() < chance)

    flaws = ("readonly", "masterless", "delay", "draining", "full")
    states = {"writable": letters} | {name: some(0.2) for name in flaws}
    marks = [(rng.choice(["*", "s"]), name) for name in some(0.2)]
    directory, is_writable = world(**states, marks=marks)
    current = [*some(0.2), *rng.choice(["", "x"])]
    once = placement(directory, is_writable).choose("s", current)
    assert placement(directory, is_writable).choose("s", current) == once
    assert placement(directory, is_writable).choose("s", once) == once, "choosing again changes nothing"
    added = [directory.groups[name] for name in set(once) - set(current)]
    assert set(current) <= set(once) and len(added) <= 4
    assert all(group.kind == NORMAL and group.master and not group.draining for group in added)


def test_route_shows_all_groups_and_writability():
    directory, is_writable = world(writable="abe", readonly="c", masterless="d", draining="e", marks=[("s", "b")])
    shown = seen("abcdex", directory, is_writable)
    assert shown == [("a", True), ("b", False), ("c", False), ("e", False)]


SOURCES = {name: Route(name, groups, 3) for name, groups in {"a": ("g1", "g2"), "b": ("g3",), "t": ("g2",)}.items()}


def to(subject: str, group: str, other: str) -> OperatorLimits:
    """Return the limits that send a group's dead letters to another subject."""
    return OperatorLimits(subject, group, dead_letters_to=other)


def test_route_gets_all_source_groups_at_once():
    limits = [to("a", "x", "t"), to("b", "x", "t"), to("a", "y", "t"), OperatorLimits("a", "z", per_second=3)]
    assert wider_routes(limits, SOURCES) == [SetRoute("t", ("g1", "g2", "g3"), 3)]


def test_sufficient_or_missing_route_is_unchanged():
    wide = SOURCES | {"t": Route("t", ("g1", "g2", "g4"), 3), "removed": Route("removed", (), 5)}
    limits = [to("a", "x", "t"), to("gone", "x", "t"), to("a", "x", "nowhere"), to("a", "y", "removed")]
    assert wider_routes(limits, wide) == []
