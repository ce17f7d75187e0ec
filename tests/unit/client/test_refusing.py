"""Core. For how long a producer waits while all broker groups of a subject refuse."""

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


def test_a_wait_is_over_when_all_groups_refused_for_so_long():
    routing, waiting = refusing(group("g1", writable=False), group("g2"))
    assert over_at(waiting, 0, 4_999, 9_000) == [], "one group takes messages"
    routing.failed("g2", "disk", now_ms=9_000, is_readonly=True)
    assert over_at(waiting, *range(10_000, 16_000, 500)) == [15_000, 15_500]


def test_a_group_that_worked_or_is_writable_again_ends_it():
    routing, waiting = refusing(group("g1"))
    routing.failed("g1", "draining", now_ms=0, is_readonly=True)
    assert over_at(waiting, 0, 2_000, 4_000) == []
    routing.worked("g1")
    assert over_at(waiting, 4_500) == []
    routing.failed("g1", "draining", now_ms=5_000, is_readonly=True)
    assert over_at(waiting, *range(5_000, 10_001, 1_000)) == [10_000]


def test_who_cannot_be_reached_does_not_refuse():
    routing, waiting = refusing(group("g1"))
    routing.failed("g1", "disk", now_ms=0, is_readonly=True)
    routing.failed("g1", "lost", now_ms=200)
    assert over_at(waiting, *range(0, 20_000, 1_000)) == []


def test_an_order_key_waits_for_its_own_group_alone():
    _, waiting = refusing(group("g1", writable=False), group("g2"))
    assert over_at(waiting, *range(0, 7_000, 1_000), only="g1") == [5_000, 6_000]
    assert over_at(waiting, *range(0, 7_000, 1_000), only="g2") == []


def test_a_refusal_of_long_ago_is_no_reason_to_give_up_what_is_sent_now():
    _, waiting = refusing(group("g1", writable=False))
    assert over_at(waiting, 0, 1_000) == []
    later = 1_000 + WAIT_MS + SEEN_MS
    assert over_at(waiting, later, later + WAIT_MS - 1, later + WAIT_MS) == [later + WAIT_MS]
    waiting.forget({"a"})
    assert over_at(waiting, later + WAIT_MS + 1) == []


def test_two_short_spells_with_a_stored_message_between_them_are_not_one_long_one():
    routing, waiting = refusing(group("g1"), group("g2", writable=False))
    routing.failed("g1", "draining", now_ms=0, is_readonly=True)
    assert over_at(waiting, 0, 1_000) == over_at(waiting, 0, 1_000, only="g2") == []
    routing.worked("g1")
    waiting.worked("a", "g1")
    routing.failed("g1", "draining", now_ms=4_500, is_readonly=True)
    assert over_at(waiting, 4_500, 5_000, 9_499, 9_500) == [9_500]
    assert over_at(waiting, 5_000, only="g2") == [5_000], "the other one refused all the time"
