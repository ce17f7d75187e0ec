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

WORLDS = [
    ("two messages, two terms", Bounds(terms=2, messages=2, crashes=0), 22_945),
    ("two messages, a crash", Bounds(terms=1, messages=2, crashes=1), 33_897),
    ("two crashes", Bounds(terms=1, messages=1, crashes=2), 85_643),
    ("three terms", Bounds(terms=3, messages=1, crashes=0), 75_183),
    ("a disk is put back", Bounds(terms=1, messages=1, crashes=0, rollbacks=1), 18_388),
]

PUT_BACK = Bounds(terms=1, messages=1, crashes=0, rollbacks=1)

SMALL = Bounds(terms=2, messages=2, crashes=1)

COUNTEREXAMPLES = [
    # omitted rule, broken promise, least number of steps
    pytest.param("boot", "matching", 9, id="boot"),
    pytest.param("master_fsync", "safe", 7, id="no fsync on the master before acknowledging"),
    pytest.param("slave_fsync", "safe", 7, id="no fsync on the slave before confirming"),
    pytest.param("recovery_fsync", "safe", 8, id="frames found by a restart count as fsynced"),
    pytest.param("matched_end", "safe", 11, id="the slave's own length confirms"),
    pytest.param("fence", "matching", 15, id="older epochs are not refused"),
    pytest.param("persist", "matching", 9, id="epoch not persisted"),
    pytest.param("history", "matching", 10, id="truncate by length"),
    pytest.param("both_copies", "safe", 2, id="one copy acknowledges"),
    pytest.param("hello_counts_nothing", "safe", 8, id="the requested offset confirms"),
    # a slave keeps confirmed frames for any later packet: a second rule against the same fault, omitted with it
    pytest.param("own_connection keeps_confirmed", "safe", 9, id="an agreement arrives again"),
    pytest.param("compare_and_set", "one master", 4, id="the row changes without its term"),
]


OF_DISKS_PUT_BACK = [
    # the same, with a rolled-back disk
    pytest.param("keeps_confirmed", "safe", 13, PUT_BACK, id="a slave cuts confirmed frames"),
    pytest.param(
        "keeps_acknowledged", "safe", 16, PUT_BACK._replace(terms=2), id="an old master forgets acknowledged frames"
    ),
    pytest.param("row", "good faith", 11, PUT_BACK, id="the row's point is ignored"),
]

FAILOVERS = Bounds(terms=2, messages=1, crashes=0)

OF_FAILOVERS = [
    # the same, with a rolled-back disk and a master chosen by the metaserver
    pytest.param("chosen_in_sync", 11, id="a restarted slave that never matched is chosen"),
    # a copy in sync since its restart has all frames: the row's point is a second rule, omitted with it
    pytest.param("chosen_covers chosen_in_sync", 10, id="the row's point is not compared"),
]

WITHOUT_A_WAY_OUT = [
    # without this rule nothing is lost, but the two copies never match again
    pytest.param("gives_way", id="no master yields"),
    pytest.param("proof", id="an epoch used twice counts as one"),
]


@pytest.mark.parametrize(("bounds", "states"), [pytest.param(*world, id=name) for name, *world in WORLDS])
def test_all_rules_together_keep_every_promise(bounds: Bounds, states: int) -> None:
    found = explore(bounds)
    print(f"{bounds}: {found}")
    assert not found.violation, str(found)
    assert found.states == states, "the model changed: compare it with the protocol, then change the number"


def test_worlds_have_enough_states() -> None:
    of_copies = [states for world in LOOKED_THROUGH for states in world.values if isinstance(states, int)]
    assert sum(states for _, _, states in WORLDS) + sum(of_copies) >= 500_000


@pytest.mark.parametrize(("rule", "promise", "length"), COUNTEREXAMPLES)
def test_omitted_rule_breaks_its_promise(rule: str, promise: str, length: int) -> None:
    found = explore(SMALL, ALL._replace(**dict.fromkeys(rule.split(), False)))
    print(f"without {rule}: {found}")
    assert found.violation.startswith(promise), str(found)
    assert len(found.steps) == length, str(found)


@pytest.mark.parametrize(("rule", "promise", "length", "bounds"), OF_DISKS_PUT_BACK)
def test_omitted_rule_breaks_after_a_rollback(rule: str, promise: str, length: int, bounds: Bounds) -> None:
    found = explore(bounds, ALL._replace(**{rule: False}))
    print(f"without {rule}: {found}")
    assert found.violation.startswith(promise), str(found)
    assert len(found.steps) == length, str(found)


def test_failover_keeps_every_promise() -> None:
    found = explore(FAILOVERS, start=FAILOVER)
    print(f"{FAILOVERS}: {found}")
    assert not found.violation, str(found)
    assert found.states == 12_053, "the model changed: compare it with the protocol, then change the number"


@pytest.mark.parametrize(("rule", "length"), OF_FAILOVERS)
def test_omitted_failover_rule_breaks_its_promise(rule: str, length: int) -> None:
    found = explore(FAILOVERS._replace(rollbacks=1), ALL._replace(**dict.fromkeys(rule.split(), False)), FAILOVER)
    print(f"without {rule}: {found}")
    assert found.violation.startswith("failover"), str(found)
    assert len(found.steps) == length, str(found)


@pytest.mark.parametrize("rule", WITHOUT_A_WAY_OUT)
def test_omitted_rule_prevents_recovery_after_a_rollback(rule: str) -> None:
    assert wedged(PUT_BACK, ALL._replace(**{rule: False}))


def test_every_rule_has_a_counterexample() -> None:
    examples = [*COUNTEREXAMPLES, *OF_DISKS_PUT_BACK, *OF_FAILOVERS, *WITHOUT_A_WAY_OUT]
    assert sorted(str(example.values[0]).split()[0] for example in examples) == sorted(Rules._fields)


def test_brokers_recover_after_a_rollback() -> None:
    assert wedged(PUT_BACK) == []


def test_brokers_recover_after_a_failover() -> None:
    assert wedged(FAILOVERS, start=FAILOVER) == []


def test_brokers_recover_from_every_state() -> None:
    assert wedged(Bounds(terms=2, messages=1, crashes=1)) == []


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
