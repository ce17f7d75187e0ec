"""Core. Choice of broker groups, the circuit breaker, and the wait for readonly groups."""

from __future__ import annotations

from collections import Counter

import pytest

from qmq.client.routes import (
    FAILURES_MAX,
    OPEN_MS,
    SEEN_MS,
    SUCCESSES,
    Breaker,
    BreakerState,
    GroupRoute,
    RefusalClock,
    Routing,
    SubjectRoute,
)
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
    routing.succeeded("g1")
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


def opened(now_ms: int = 0) -> Breaker:
    breaker = Breaker()
    assert [breaker.failed(now_ms) for _ in range(FAILURES_MAX)] == [False] * (FAILURES_MAX - 1) + [True]
    return breaker


def test_the_limits_are_those_of_qmq():
    assert (FAILURES_MAX, OPEN_MS, SUCCESSES) == (100, 5_000, 20)


def test_hundred_failures_open_the_breaker():
    """Rule: closed."""
    breaker = Breaker()
    for _ in range(FAILURES_MAX - 1):
        assert not breaker.failed(0)
    breaker.answered()
    for _ in range(FAILURES_MAX - 1):
        assert not breaker.failed(0)
    assert breaker.allows(0) and breaker.failed(0)
    assert not breaker.allows(0)


@pytest.mark.parametrize("after_ms, is_allowed", [(0, False), (OPEN_MS - 1, False), (OPEN_MS, True)])
def test_open_breaker_turns_half_open(after_ms, is_allowed):
    """Rule: open."""
    breaker = opened(now_ms=1_000)
    assert breaker.allows(1_000 + after_ms) is is_allowed
    assert breaker.state is (BreakerState.HALF_OPEN if is_allowed else BreakerState.OPEN)


def test_twenty_answers_close_the_breaker():
    """Rule: half-open, all requests pass."""
    breaker = opened()
    for _ in range(SUCCESSES):
        assert breaker.allows(OPEN_MS) and breaker.state is BreakerState.HALF_OPEN
        breaker.answered()
    assert breaker.state is BreakerState.CLOSED
    assert not breaker.failed(OPEN_MS), "closed, it counts to a hundred again"


def test_half_open_failure_reopens():
    """Rule: half-open."""
    breaker = opened()
    breaker.allows(OPEN_MS)
    for _ in range(SUCCESSES - 1):
        breaker.answered()
    assert breaker.failed(7_000)
    assert not breaker.allows(7_000 + OPEN_MS - 1) and breaker.allows(7_000 + OPEN_MS)


def test_late_failures_do_not_extend_opening():
    breaker = opened(now_ms=0)
    assert not breaker.failed(4_000)
    assert breaker.allows(OPEN_MS)


WAIT_MS = 5_000


def refusing(*groups) -> tuple[Routing, RefusalClock]:
    routing = Routing()
    routing.update([route(*groups)])
    return routing, RefusalClock(routing, WAIT_MS)


def over_at(waiting: RefusalClock, *moments_ms: int, only: str = "") -> list[int]:
    return [now_ms for now_ms in moments_ms if waiting.is_over("a", only, now_ms)]


def test_wait_ends_after_continuous_refusals():
    routing, waiting = refusing(group("g1", writable=False), group("g2"))
    assert over_at(waiting, 0, 4_999, 9_000) == [], "one group accepts produces"
    routing.failed("g2", "disk", now_ms=9_000, is_readonly=True)
    assert over_at(waiting, *range(10_000, 16_000, 500)) == [15_000, 15_500]


def test_writable_group_resets_the_wait():
    routing, waiting = refusing(group("g1"))
    routing.failed("g1", "draining", now_ms=0, is_readonly=True)
    assert over_at(waiting, 0, 2_000, 4_000) == []
    routing.succeeded("g1")
    assert over_at(waiting, 4_500) == []
    routing.failed("g1", "draining", now_ms=5_000, is_readonly=True)
    assert over_at(waiting, *range(5_000, 10_001, 1_000)) == [10_000]


def test_unreachable_group_does_not_count():
    routing, waiting = refusing(group("g1"))
    routing.failed("g1", "disk", now_ms=0, is_readonly=True)
    routing.failed("g1", "lost", now_ms=200)
    assert over_at(waiting, *range(0, 20_000, 1_000)) == []


def test_order_key_counts_its_own_group():
    _, waiting = refusing(group("g1", writable=False), group("g2"))
    assert over_at(waiting, *range(0, 7_000, 1_000), only="g1") == [5_000, 6_000]
    assert over_at(waiting, *range(0, 7_000, 1_000), only="g2") == []


def test_old_refusals_do_not_count():
    _, waiting = refusing(group("g1", writable=False))
    assert over_at(waiting, 0, 1_000) == []
    later = 1_000 + WAIT_MS + SEEN_MS
    assert over_at(waiting, later, later + WAIT_MS - 1, later + WAIT_MS) == [later + WAIT_MS]
    waiting.forget({"a"})
    assert over_at(waiting, later + WAIT_MS + 1) == []


def test_stored_message_splits_the_wait():
    routing, waiting = refusing(group("g1"), group("g2", writable=False))
    routing.failed("g1", "draining", now_ms=0, is_readonly=True)
    assert over_at(waiting, 0, 1_000) == over_at(waiting, 0, 1_000, only="g2") == []
    routing.succeeded("g1")
    waiting.succeeded("a", "g1")
    routing.failed("g1", "draining", now_ms=4_500, is_readonly=True)
    assert over_at(waiting, 4_500, 5_000, 9_499, 9_500) == [9_500]
    assert over_at(waiting, 5_000, only="g2") == [5_000], "the other one refused all the time"
