"""Core. Three copies keep the promises in every state of small worlds, and need each rule for that.

`tests.model.copies` describes the model. Larger worlds: `python -m tests.model.copies WORLD TERMS MESSAGES CRASHES
CHANGES FAULTS GONE`; docs/decisions/0043-failover-among-three.md lists those that were searched.
"""

from __future__ import annotations

import pytest

from tests.model.copies import ALL, WORLDS, Bounds, Rules, count, explore

LOOKED_THROUGH = [
    # world, bounds, number of states
    pytest.param(
        "three_of_two",
        Bounds(2, 2, 1, 0, 0, 1),
        144_988,
        id="two of three, two messages, a crash, the master is declared gone",
    ),
    pytest.param("three_of_two", Bounds(2, 1, 0, 0, 1), 143_080, id="two of three, a rollback of a disk or the row"),
    pytest.param(
        "three_of_three",
        Bounds(2, 1, 1, 1, 0, 1),
        59_590,
        id="three of three, members and m change, a crash, the master is declared gone",
    ),
    pytest.param(
        "others_than_before", Bounds(3, 1, 0, 0, 0, 1), 5_513, id="members have changed, the master is declared gone"
    ),
    pytest.param("two_of_two", Bounds(2, 1, 0, 1, 1), 29_083, id="a third copy comes, a rollback of a disk or the row"),
    pytest.param(
        "two_of_two", Bounds(3, 1, 0, 0, 1), 142_700, id="two of two, three terms, a rollback of a disk or the row"
    ),
]

COUNTEREXAMPLES = [
    # omitted rule, world, bounds, broken promise, least number of steps
    pytest.param("enough_copies", "three_of_two", Bounds(2, 1, 0), "choice", 5, id="one copy less acknowledges"),
    pytest.param(
        "own_fsync row", "three_of_two", Bounds(2, 1, 1), "choice", 6, id="the master's own fsync is not needed"
    ),
    pytest.param(
        "own_epoch in_this_term",
        "three_of_two",
        Bounds(4, 1, 0),
        "complete",
        15,
        id="older frames count alone (Raft's figure 8)",
    ),
    pytest.param("enough_promises", "three_of_two", Bounds(2, 1, 0), "choice", 6, id="one promise is enough"),
    pytest.param("promise_first", "three_of_two", Bounds(2, 1, 0), "choice", 7, id="requested without a promise"),
    pytest.param("promise_durable", "three_of_two", Bounds(2, 1, 1), "choice", 9, id="a crash forgets a promise"),
    pytest.param("highest", "three_of_two", Bounds(2, 1, 0), "choice", 7, id="any promised copy is chosen"),
    pytest.param("in_this_term", "three_of_two", Bounds(3, 1, 0, 1), "choice", 7, id="in sync before members changed"),
    pytest.param("new_term", "three_of_two", Bounds(2, 1, 0, 1), "choice", 7, id="members change within a term"),
    pytest.param("in_sync", "three_of_two", Bounds(2, 1, 0, 0, 1), "choice", 9, id="a copy that restarted promises"),
    pytest.param(
        "row_first", "three_of_two", Bounds(2, 1, 0, 0, 1), "complete", 6, id="a broker begins without the row"
    ),
    pytest.param("row", "three_of_two", Bounds(2, 1, 0, 0, 1), "complete", 7, id="the row's point is ignored"),
    pytest.param(
        "new_life", "two_of_two", Bounds(2, 1, 0, 1, 1), "cut", 16, id="an epoch that a slave has is used again"
    ),
    pytest.param(
        "chosen_point",
        "three_of_two",
        Bounds(3, 1, 0, 0, 1),
        "complete",
        12,
        id="the frames at its choice are forgotten",
    ),
    pytest.param("above", "three_of_two", Bounds(3, 1, 0, 0, 1), "one master", 9, id="an old row assigns a term twice"),
    pytest.param("compare_and_set", "three_of_two", Bounds(2, 1, 0), "one master", 8, id="one promise, two choices"),
    pytest.param(
        "seen_whole", "three_of_two", Bounds(3, 0, 0, 1, 0, 1), "choice", 8, id="gone, and a copy never in sync counts"
    ),
    pytest.param(
        "frame_of_term",
        "others_than_before",
        Bounds(3, 0, 0, 0, 0, 1),
        "choice",
        5,
        id="gone, and a copy that followed no master counts",
    ),
]


@pytest.mark.parametrize(("world", "bounds", "states"), LOOKED_THROUGH)
def test_all_rules_together_keep_every_promise(world: str, bounds: Bounds, states: int) -> None:
    found = count(WORLDS[world], bounds)
    print(f"{world} {bounds}: {found}")
    assert not found.violation, str(found)
    assert found.states == states, "the model changed: compare it with the protocol, then change the number"


@pytest.mark.parametrize(("rule", "world", "bounds", "promise", "length"), COUNTEREXAMPLES)
def test_omitted_rule_breaks_its_promise(rule: str, world: str, bounds: Bounds, promise: str, length: int) -> None:
    found = explore(WORLDS[world], bounds, ALL._replace(**dict.fromkeys(rule.split(), False)))
    print(f"without {rule}: {found}")
    assert found.violation.startswith(promise) and promise, str(found)
    assert len(found.steps) == length, str(found)


def test_every_rule_has_a_counterexample() -> None:
    assert {str(example.values[0]).split()[0] for example in COUNTEREXAMPLES} == set(Rules._fields)
