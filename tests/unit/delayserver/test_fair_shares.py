"""Core. Deficit round robin: the order of turns."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qmq.delayserver.pending_queue import FairShares


def serve(costs: dict[str, list[int]], *, quantum: int = 10, most: int = 1000) -> str:
    """Let each key spend its costs, one a visit; return the order of visits."""
    shares = FairShares[str](quantum)
    left = {key: list(batches) for key, batches in costs.items()}
    for key in left:
        shares.join(key)
    order = ""
    for key in shares.rounds(list(shares)):
        order += key
        while left[key] and shares.has_credit(key):
            shares.spend(key, left[key].pop(0))
        if not left[key]:
            shares.leave(key)
        if len(order) == most:
            break
    return order


@pytest.mark.parametrize(
    ("costs", "order"),
    [
        pytest.param({"a": [10] * 3}, "aaa", id="alone: it goes on"),
        pytest.param({"a": [10] * 4, "b": [10]}, "abaaa", id="one batch of the other is what a new one waits for"),
        pytest.param({"a": [10] * 3, "b": [10] * 3}, "ababab", id="two with equal batches take turns"),
        pytest.param({"a": [30] * 3, "b": [10] * 9}, "abbbabbbabbb", id="large batches make debts, which others see"),
        pytest.param({"a": [10] * 3, "b": [5] * 6}, "ababab", id="two small batches are one large one"),
        pytest.param({"a": [10] * 3, "b": [1000]}, "abaa", id="whoever has nothing more has no debts"),
        pytest.param({}, "", id="nobody"),
    ],
)
def test_turn_order_follows_credit(costs, order):
    assert serve(costs) == order


def test_unspent_credit_is_one_quantum_at_most():
    shares = FairShares[str](10)
    shares.join("blocked")
    shares.join("other")
    for _ in range(100):
        visited = []
        for key in shares.rounds(list(shares)):
            visited.append(key)
            if key == "other" and len(visited) < 5:
                shares.spend(key, 10)
        assert visited.count("blocked") == 1
    (first,) = list(shares.rounds(["blocked"]))
    shares.spend(first, 10)
    assert not shares.has_credit("blocked")


def test_next_round_continues_behind_the_last():
    shares = FairShares[str](10)
    for key in "abc":
        shares.join(key)
    visited = ""
    for _ in range(6):
        for key in shares.rounds(list(shares)):
            visited += key
            shares.spend(key, 10)
            break
    assert visited == "abcabc"


@given(st.lists(st.lists(st.integers(1, 40), min_size=60, max_size=60), min_size=2, max_size=5))
def test_fair_shares_spend_equally(batches):
    shares, spent = FairShares[int](10), [0] * len(batches)
    for key in range(len(batches)):
        shares.join(key)
    for key in shares.rounds(list(shares)):
        if not batches[key]:
            break  # the first one is empty now: before, all had work
        while batches[key] and shares.has_credit(key):
            spent[key] += batches[key][0]
            shares.spend(key, batches[key].pop(0))
    assert max(spent) - min(spent) <= 2 * (10 + 40)
