"""Core. The replication protocol keeps its promises in every state of small worlds, and needs each rule for that.

`tests.model.protocol` describes the model. One world with everything in it is too large for a minute of one slow core,
so there are six, each searched to its end: more messages, more crashes, more terms, a rolled-back disk, and a master
that the metaserver chooses by itself. Together with those of `tests.model.test_copies` they have more than half a
million states. Larger ones: `python -m tests.model.protocol TERMS MESSAGES CRASHES DISKS`; `2 2 1` has 1,121,384
states. `pytest -rP` prints the results.
"""

from __future__ import annotations

from collections import Counter

import pytest

from tests.model.protocol import ALL, FAILOVER, START, Agreement, Bounds, Rules, State, explore, steps, wedged
from tests.model.test_copies import LOOKED_THROUGH

SMALL = Bounds(terms=2, messages=2, crashes=1)
FAILOVERS = Bounds(terms=2, messages=1, crashes=0)
PUT_BACK = Bounds(terms=1, messages=1, crashes=0, rollbacks=1)

WORLDS = [
    # bounds, first state, number of states
    pytest.param(Bounds(terms=2, messages=2, crashes=0), START, 22_945, id="two messages, two terms"),
    pytest.param(Bounds(terms=1, messages=2, crashes=1), START, 33_897, id="two messages, a crash"),
    pytest.param(Bounds(terms=1, messages=1, crashes=2), START, 85_643, id="two crashes"),
    pytest.param(Bounds(terms=3, messages=1, crashes=0), START, 75_183, id="three terms"),
    pytest.param(PUT_BACK, START, 18_388, id="a disk is put back"),
    pytest.param(FAILOVERS, FAILOVER, 12_053, id="the metaserver chooses a master"),
]

TWO_TERMS = PUT_BACK._replace(terms=2)
CHOSEN = FAILOVERS._replace(rollbacks=1)

COUNTEREXAMPLES = [
    # omitted rules, broken promise, least number of steps, bounds, first state
    pytest.param("boot", "matching", 9, SMALL, START, id="boot"),
    pytest.param("master_fsync", "safe", 7, SMALL, START, id="no fsync on the master before acknowledging"),
    pytest.param("slave_fsync", "safe", 7, SMALL, START, id="no fsync on the slave before confirming"),
    pytest.param("recovery_fsync", "safe", 8, SMALL, START, id="frames found by a restart count as fsynced"),
    pytest.param("matched_end", "safe", 11, SMALL, START, id="the slave's own length confirms"),
    pytest.param("fence", "matching", 15, SMALL, START, id="older epochs are not refused"),
    pytest.param("persist", "matching", 9, SMALL, START, id="epoch not persisted"),
    pytest.param("history", "matching", 10, SMALL, START, id="truncate by length"),
    pytest.param("both_copies", "safe", 2, SMALL, START, id="one copy acknowledges"),
    pytest.param("hello_counts_nothing", "safe", 8, SMALL, START, id="the requested offset confirms"),
    # a slave keeps confirmed frames for any later packet: a second rule against the same fault, omitted with it
    pytest.param("own_connection keeps_confirmed", "safe", 9, SMALL, START, id="an agreement arrives again"),
    pytest.param("compare_and_set", "one master", 4, SMALL, START, id="the row changes without its term"),
    pytest.param("keeps_confirmed", "safe", 13, PUT_BACK, START, id="a slave cuts confirmed frames"),
    pytest.param("keeps_acknowledged", "safe", 16, TWO_TERMS, START, id="an old master forgets acknowledged frames"),
    pytest.param("row", "good faith", 11, PUT_BACK, START, id="the row's point is ignored"),
    pytest.param(
        "chosen_in_sync", "failover", 11, CHOSEN, FAILOVER, id="a restarted slave that never matched is chosen"
    ),
    # a copy in sync since its restart has all frames: the row's point is a second rule, omitted with it
    pytest.param(
        "chosen_covers chosen_in_sync", "failover", 10, CHOSEN, FAILOVER, id="the row's point is not compared"
    ),
]

WITHOUT_A_WAY_OUT = [
    # without this rule nothing is lost, but the two copies never match again
    pytest.param("gives_way", id="no master yields"),
    pytest.param("proof", id="an epoch used twice counts as one"),
]


@pytest.mark.parametrize("bounds, start, states", WORLDS)
def test_all_rules_together_keep_every_promise(bounds: Bounds, start: State, states: int) -> None:
    found = explore(bounds, start=start)
    print(f"{bounds}: {found}")
    assert not found.violation, str(found)
    assert found.states == states, "the model changed: compare it with the protocol, then change the number"


def test_worlds_have_enough_states() -> None:
    worlds = [*WORLDS, *LOOKED_THROUGH]
    assert sum(states for world in worlds for states in world.values if isinstance(states, int)) >= 500_000


@pytest.mark.parametrize("rule, promise, length, bounds, start", COUNTEREXAMPLES)
def test_omitted_rule_breaks_its_promise(rule: str, promise: str, length: int, bounds: Bounds, start: State) -> None:
    found = explore(bounds, ALL._replace(**dict.fromkeys(rule.split(), False)), start)
    print(f"without {rule}: {found}")
    assert found.violation.startswith(promise), str(found)
    assert len(found.steps) == length, str(found)


@pytest.mark.parametrize("rule", WITHOUT_A_WAY_OUT)
def test_omitted_rule_prevents_recovery_after_a_rollback(rule: str) -> None:
    assert wedged(PUT_BACK, ALL._replace(**{rule: False}))


def test_every_rule_has_a_counterexample() -> None:
    examples = [*COUNTEREXAMPLES, *WITHOUT_A_WAY_OUT]
    assert sorted(str(example.values[0]).split()[0] for example in examples) == sorted(Rules._fields)


@pytest.mark.parametrize(
    "bounds, start",
    [
        pytest.param(Bounds(terms=2, messages=1, crashes=1), START, id="crash"),
        pytest.param(PUT_BACK, START, id="rollback"),
        pytest.param(FAILOVERS, FAILOVER, id="failover"),
    ],
)
def test_brokers_recover_from_every_state(bounds: Bounds, start: State) -> None:
    assert wedged(bounds, start=start) == []


def test_model_reaches_every_event() -> None:
    bounds = Bounds(terms=3, messages=1, crashes=1)
    happened: Counter[str] = Counter()
    seen, frontier = {START}, [START]
    while frontier and not EVERYTHING <= happened.keys():
        following = []
        for state in frontier:
            for step, after in steps(state, bounds, ALL):
                happened.update(events(step, state, after))
                if after not in seen:
                    seen.add(after)
                    following.append(after)
        frontier = following
    assert EVERYTHING <= happened.keys()


EVERYTHING = {
    "swap",
    "learns",
    "fenced",
    "crash",
    "fsync",
    "begin",
    "append",
    "answer",
    "confirm",
    "take back",
    "hello",
    "agreed",
    "receive",
    "learns an older row",
    "asks for the tail",
    "cuts",
    "crash loses",
    "crash keeps what was not fsynced",
    "frame of a master that is gone",
    "acknowledged in term 1",
    "acknowledged in term 2",
    "acknowledged in term 3",
}


def events(step: tuple[object, ...], before: State, after: State) -> list[str]:
    """Return the names of events that the model should reach."""
    names = [str(step[0])]
    if after.safe != before.safe:
        names.append(f"acknowledged in term {after.safe[-1] // 1000}")
    match step:
        case ("learns", _, _, (int(term), _)) if term < before.term:
            names.append("learns an older row")
        case ("answer", _, Agreement(wants_tail=True)):
            names.append("asks for the tail")
        case ("agreed", _, tuple(old), tuple(new), _) if old != new:
            names.append("cuts")
        case ("receive", int(who), _) if before.brokers[who].pipe is not None:
            names.append("frame of a master that is gone")
        case ("crash", int(who), _):
            old_log, new_log = before.brokers[who].log, after.brokers[who].log
            names += ["crash loses"] * (new_log != old_log)
            names += ["crash keeps what was not fsynced"] * (len(new_log) > after.brokers[who].flushed)
    return names
