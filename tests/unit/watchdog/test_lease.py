"""Core. The watchdogs' lease, with the metaserver's row in memory: one holder at a time, by independent clocks."""

from __future__ import annotations

import random

import pytest

from qmq.watchdog.lease import Lease, LeaseRow

LEASE_MS = 5_000


class Row:
    """The metaserver's row, changed as `storage.heartbeats` does."""

    def __init__(self):
        self.row = LeaseRow("", 0, 0)

    def hold(self, node, request, *, release=False):
        row = self.row
        if row.node == node:
            self.row = LeaseRow("" if release else node, row.term, row.beat + 1)
        elif not row.node or (request.take and (request.term, request.beat) == (row.term, row.beat)):
            self.row = LeaseRow(node, row.term + 1, 0)
        return self.row


def turn(lease, row, now_ms, *, took_ms=0):
    lease.answered(row.hold(lease.node, lease.request(now_ms)), asked_ms=now_ms, now_ms=now_ms + took_ms)


def test_first_watchdog_holds_the_lease():
    row, a, b = Row(), Lease("a", LEASE_MS), Lease("b", LEASE_MS)
    for now_ms in range(0, 20_000, 1_000):
        turn(a, row, now_ms)
        turn(b, row, now_ms + 10)
        assert a.holds(now_ms + 20) and not b.holds(now_ms + 20)
    assert (a.term, b.term, b.holder) == (1, 0, "a")


def test_dead_holder_is_replaced_after_its_lease():
    row, a, b = Row(), Lease("a", LEASE_MS), Lease("b", LEASE_MS)
    turn(a, row, 0)
    taken = next(now_ms for now_ms in range(10, 20_000, 1_000) if turn(b, row, now_ms) or b.holds(now_ms))
    assert LEASE_MS < taken <= LEASE_MS + 2_000 and b.term == 2


def test_suspended_holder_does_not_act():
    row, a, b = Row(), Lease("a", LEASE_MS), Lease("b", LEASE_MS)
    turn(a, row, 0)
    for now_ms in range(10, 8_000, 1_000):
        turn(b, row, now_ms)
    assert not a.holds(8_000), "by its own clock, before it asks anybody"
    turn(a, row, 8_000)
    assert not a.holds(8_000) and b.holds(8_000)
    for now_ms in range(9_000, 20_000, 1_000):
        turn(a, row, now_ms)
    assert a.holds(19_000) and a.term == 3


def test_late_answer_does_not_extend_the_lease():
    row, a = Row(), Lease("a", LEASE_MS)
    turn(a, row, 0, took_ms=4_900)
    assert a.holds(4_950) and not a.holds(5_000)


def test_holder_asks_every_second_check():
    row, a, b = Row(), Lease("a", LEASE_MS), Lease("b", LEASE_MS)
    asked = {"a": [], "b": []}
    for now_ms in range(0, 9_000, 1_000):
        for lease in (a, b):
            if lease.is_due(now_ms):
                asked[lease.node].append(now_ms)
                turn(lease, row, now_ms)
        assert a.holds(now_ms) and not b.holds(now_ms)
    assert asked == {"a": [0, 2_000, 4_000, 6_000, 8_000], "b": list(range(0, 9_000, 1_000))}


@pytest.mark.parametrize("beats", [3, 5, 30])
def test_unanswered_request_leaves_time_for_another(beats):
    """For leases of several lengths in checks, including the shortest and the usual one."""
    beat_ms = LEASE_MS // beats
    row, a = Row(), Lease("a", LEASE_MS)
    turn(a, row, 0)
    lost_ms = next(now_ms for now_ms in range(beat_ms, LEASE_MS, beat_ms) if a.is_due(now_ms))
    again_ms = lost_ms + a.patience_ms
    assert a.is_due(again_ms) and a.holds(again_ms)
    turn(a, row, again_ms, took_ms=200)
    assert a.holds(LEASE_MS + 1)


def test_released_lease_is_taken_at_once():
    row, a, b = Row(), Lease("a", LEASE_MS), Lease("b", LEASE_MS)
    turn(a, row, 0)
    turn(b, row, 10)
    row.hold("a", a.request(20), release=True)
    turn(b, row, 30)
    assert b.holds(30)


def test_stale_row_does_not_win_the_lease():
    row, a, b = Row(), Lease("a", LEASE_MS), Lease("b", LEASE_MS)
    turn(a, row, 0)
    turn(b, row, 10)
    for now_ms in range(1_000, 9_000, 1_000):  # b cannot reach the metaserver meanwhile
        turn(a, row, now_ms)
    turn(b, row, 9_000)
    assert a.holds(9_001) and not b.holds(9_001)


@pytest.mark.parametrize("seed", range(50))
def test_lease_has_at_most_one_holder(seed):
    """Clocks differ, turns are lost or late, processes are suspended: true time is only the order of these steps."""
    rng, row = random.Random(seed), Row()
    leases = [Lease(name, LEASE_MS) for name in "abc"]
    shift = {lease.node: rng.randrange(1_000_000) for lease in leases}
    paused = dict.fromkeys("abc", 0)
    now_ms, terms = 0, []
    for _ in range(3_000):
        now_ms += rng.randrange(200)
        lease = rng.choice(leases)
        is_due = lease.is_due(now_ms + shift[lease.node])
        if now_ms >= paused[lease.node] and is_due and rng.random() < 0.4:
            own_ms, lag = now_ms + shift[lease.node], rng.randrange(800)
            answer = row.hold(lease.node, lease.request(own_ms))
            if rng.random() < 0.9:
                lease.answered(answer, asked_ms=own_ms - lag, now_ms=own_ms)
        if rng.random() < 0.01:
            paused[lease.node] = now_ms + rng.randrange(20_000)
        holding = [lease for lease in leases if lease.holds(now_ms + shift[lease.node])]
        assert len(holding) <= 1, f"seed {seed} at {now_ms}"
        terms += [lease.term for lease in holding]
    assert terms == sorted(terms) and len(set(terms)) > 1
