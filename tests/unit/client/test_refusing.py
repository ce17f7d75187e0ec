"""Core. Wait of a producer while all broker groups of a subject refuse."""

from __future__ import annotations

from qmq.client.routes import SEEN_MS, RefusalClock, Routing
from tests.unit.client.test_routing import group, route

WAIT_MS = 5_000


def refusing(*groups) -> tuple[Routing, RefusalClock]:
    routing = Routing()
    routing.update([route(*groups)])
    return routing, RefusalClock(routing, WAIT_MS)


def over_at(waiting: RefusalClock, *moments_ms: int, only: str = "") -> list[int]:
    return [now_ms for now_ms in moments_ms if waiting.is_over("a", only, now_ms)]


def test_wait_ends_after_continuous_refusals():
    routing, waiting = refusing(group("g1", writable=False), group("g2"))
    assert over_at(waiting, 0, 4_999, 9_000) == [], "one group takes messages"
    routing.failed("g2", "disk", now_ms=9_000, is_readonly=True)
    assert over_at(waiting, *range(10_000, 16_000, 500)) == [15_000, 15_500]


def test_writable_group_resets_the_wait():
    routing, waiting = refusing(group("g1"))
    routing.failed("g1", "draining", now_ms=0, is_readonly=True)
    assert over_at(waiting, 0, 2_000, 4_000) == []
    routing.worked("g1")
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
    routing.worked("g1")
    waiting.worked("a", "g1")
    routing.failed("g1", "draining", now_ms=4_500, is_readonly=True)
    assert over_at(waiting, 4_500, 5_000, 9_499, 9_500) == [9_500]
    assert over_at(waiting, 5_000, only="g2") == [5_000], "the other one refused all the time"
