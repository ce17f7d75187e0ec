"""Core. Choice of the group for the next batch."""

from __future__ import annotations

from collections import Counter

from qmq.client.routes import GroupRoute, Routing, SubjectRoute
from qmq.types import Endpoint


def route(*groups: GroupRoute, subject: str = "a", refused: str = "") -> SubjectRoute:
    return SubjectRoute(subject, groups, refused)


def group(name: str, *, port: int = 1, writable: bool = True, term: int = 1) -> GroupRoute:
    return GroupRoute(name, Endpoint("127.0.0.1", port), writable, term)


def idle(_: str) -> int:
    return 0


def test_least_loaded_group_is_chosen():
    routing = Routing()
    routing.update([route(group("g1"), group("g2"), group("g3"))])
    chosen = Counter(routing.choose("a", now_ms=0, load=idle) for _ in range(30))
    assert chosen == {"g1": 10, "g2": 10, "g3": 10}
    assert {routing.choose("a", now_ms=0, load={"g1": 3, "g2": 1, "g3": 2}.get) for _ in range(5)} == {"g2"}


def test_full_readonly_and_resting_groups_are_not_chosen():
    routing = Routing()
    routing.update([route(group("g1", writable=False), group("g2"), group("g3"))])
    routing.failed("g2", "slave_down", now_ms=1000)
    assert routing.choose("a", now_ms=1001, load=idle) == "g3"
    assert routing.choose("a", now_ms=1001, load={"g3": None}.get) is None
    assert routing.choose("unknown", now_ms=1001, load=idle) is None
    assert "g1: readonly" in routing.why_not("a")
    assert "g2: slave_down" in routing.why_not("a")


def test_rest_doubles_until_success():
    routing = Routing()
    routing.update([route(group("g1"))])
    now_ms, rests = 0, []
    for _ in range(9):
        until_ms = routing.failed("g1", "no", now_ms=now_ms)
        assert routing.failed("g1", "no", now_ms=now_ms) == until_ms, "failures of one moment are one failure"
        rests.append(until_ms - now_ms)
        now_ms = until_ms
    assert rests == [20, 40, 80, 160, 320, 640, 1280, 2000, 2000]
    routing.failed("g1", "no", now_ms=now_ms)
    routing.worked("g1")
    assert not routing.resting("g1", now_ms)


def test_a_group_that_turns_writable_rests_no_longer():
    routing = Routing()
    routing.update([route(group("g1"))])
    routing.failed("g1", "readonly", now_ms=0)
    routing.update([route(group("g1"))])
    assert routing.resting("g1", 1), "the same route again is no news"
    routing.update([route(group("g1", writable=False))])
    routing.update([route(group("g1", writable=True))])
    assert not routing.resting("g1", 1)


def test_older_term_is_ignored():
    routing = Routing()
    routing.update([route(group("g1", port=1, term=1))])
    assert routing.update([route(group("g1", port=2, term=2))]) == {"g1"}
    assert routing.update([route(group("g1", port=1, term=1))]) == set()
    assert routing.master("g1") == Endpoint("127.0.0.1", 2)


def test_missing_route_reason_is_reported():
    routing = Routing()
    assert "no route" in routing.why_not("a")
    routing.update([route(refused="no broker group is registered")])
    assert routing.why_not("a") == "no broker group is registered"
    assert routing.groups_of("a") == ()
