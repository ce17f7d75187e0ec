"""Core. Conditions of a promotion."""

from __future__ import annotations

from dataclasses import replace

import pytest

from qmq.metaserver.model import Broker, Group, Points, ReplicaState
from qmq.metaserver.roles import promotion
from qmq.metaserver.roles.promotion import BEHIND, CONDITIONS, SLAVE_CONDITIONS, Facts, Refusal
from qmq.replication.identity import Point
from qmq.types import Epoch, Role

C = Broker("g1", Role.SLAVE, "c", "10.0.0.3", 1, 2, incarnation="disk c")
A = Broker("g1", Role.MASTER, "a", "10.0.0.1", 1, 2, incarnation="disk a")
B = Broker("g1", Role.SLAVE, "b", "10.0.0.2", 1, 2, incarnation="disk b", complete=True)
ROW = Group("g1", 4, A, (B,), 0)
MASTER_STATE = ReplicaState(Role.MASTER, 4, boot=2, writable=True, incarnation="disk a", in_step=("disk b",))
SLAVE_STATE = ReplicaState(Role.SLAVE, 4, boot=2, flushed_end=100, incarnation="disk b", in_sync=True)
POINTS = Points({"disk a": Point(Epoch(4, 2), 100, 7), "disk b": Point(Epoch(4, 2), 90, 8)})
FINE = Facts(ROW, 4, 4, MASTER_STATE, {B.key: SLAVE_STATE}, POINTS)


def row(**fields):
    return replace(FINE, group=replace(ROW, **fields))


def slave_is(**fields):
    return row(slaves=(replace(B, **fields),))


def slave_reports(**fields):
    return replace(FINE, slave_states={B.key: replace(SLAVE_STATE, **fields)})


def master_state(**fields):
    return replace(FINE, master_state=replace(MASTER_STATE, **fields))


def acknowledged(term, end, *, accepted=0):
    return replace(FINE, points=Points({"disk a": Point(Epoch(term, 1), end, 7)}, accepted))


REFUSED = [
    pytest.param(row(slaves=()), Refusal.NO_SLAVE, id="the slave's place is vacant"),
    pytest.param(row(master=None), Refusal.NO_SLAVE, id="the master's place is vacant"),
    pytest.param(row(master=None, slaves=(B, C)), Refusal.NO_SLAVE, id="two slaves, and the master's place is vacant"),
    pytest.param(row(half_swapped=True), Refusal.HALF_SWAPPED, id="an operator is at it"),
    pytest.param(replace(FINE, reported_term=5), Refusal.OLD_ROW, id="a broker reports a newer term than the row"),
    pytest.param(replace(FINE, slave_states={}), Refusal.SLAVE_DOWN, id="the slave does not answer"),
    pytest.param(replace(FINE, unwilling={B.key: "heard"}), Refusal.HEARS_ITS_MASTER, id="it hears its master"),
    pytest.param(slave_reports(incarnation="empty"), Refusal.OTHER_DISK, id="its disk was replaced"),
    pytest.param(slave_reports(incarnation=""), Refusal.OTHER_DISK, id="it does not name its disk"),
    pytest.param(slave_is(instance="1"), Refusal.OTHER_DISK, id="its disk is a copy"),
    pytest.param(
        replace(slave_is(incarnation=""), master_state=replace(MASTER_STATE, in_step=("",))),
        Refusal.OTHER_DISK,
        id="the row names no disk",
    ),
    pytest.param(slave_reports(term=3), Refusal.OTHER_TERM, id="it followed an older master last"),
    pytest.param(slave_reports(term=5), Refusal.OTHER_TERM, id="it is ahead of the row"),
    pytest.param(slave_reports(role=Role.MASTER), Refusal.OTHER_TERM, id="it is a master"),
    pytest.param(slave_is(complete=False), Refusal.NEVER_IN_SYNC, id="it was never in sync, by the row"),
    pytest.param(replace(FINE, master_state=None), Refusal.NOT_IN_SYNC_AT_THE_END, id="the master never reported"),
    pytest.param(master_state(term=3), Refusal.NOT_IN_SYNC_AT_THE_END, id="the master reported in an older term last"),
    pytest.param(master_state(role=Role.SLAVE), Refusal.NOT_IN_SYNC_AT_THE_END, id="the master had not begun"),
    pytest.param(master_state(in_step=()), Refusal.NOT_IN_SYNC_AT_THE_END, id="no slave was in sync"),
    pytest.param(master_state(in_step=("disk c",)), Refusal.NOT_IN_SYNC_AT_THE_END, id="another copy was in sync"),
    pytest.param(
        master_state(readonly_reasons=("slave_down",)), Refusal.NOT_IN_SYNC_AT_THE_END, id="the slave was lost before"
    ),
    pytest.param(slave_reports(in_sync=False), Refusal.NOT_IN_SYNC_SINCE_START, id="the slave restarted meanwhile"),
    pytest.param(slave_reports(readonly_reasons=("rolled_back",)), Refusal.ROLLED_BACK, id="its disk was put back"),
    pytest.param(slave_reports(readonly_reasons=("corrupt",)), Refusal.DAMAGED, id="it is damaged"),
    pytest.param(slave_reports(readonly_reasons=("diverged",)), Refusal.DAMAGED, id="the copies differ"),
    pytest.param(slave_reports(flushed_end=99), Refusal.BEHIND, id="one byte of what was acknowledged is missing"),
    pytest.param(acknowledged(3, 101), Refusal.BEHIND, id="what an older term acknowledged is missing"),
    pytest.param(acknowledged(3, 101, accepted=3), Refusal.BEHIND, id="loss was accepted before that was acknowledged"),
]


@pytest.mark.parametrize(("facts", "why"), REFUSED)
def test_each_condition_refuses_alone(facts, why):
    refused, shown = promotion.refusal(facts)
    of_slave = {
        refusal: f"1 of its 1 slaves would have to promise, and b:1 {text}" for refusal, _, text in SLAVE_CONDITIONS
    }
    of_slave[Refusal.HEARS_ITS_MASTER] = "1 of its 1 slaves would have to promise, and b:1 does not: heard"
    texts = {refusal: text for refusal, _, text in CONDITIONS} | of_slave | {Refusal.BEHIND: BEHIND}
    assert (refused, shown) == (why, texts[why])


def test_each_condition_has_an_example():
    every = {why for why, _, _ in (*CONDITIONS, *SLAVE_CONDITIONS)} | {Refusal.BEHIND, Refusal.HEARS_ITS_MASTER}
    assert {param.values[1] for param in REFUSED} == every


@pytest.mark.parametrize(
    "facts",
    [
        pytest.param(FINE, id="all is known and well"),
        pytest.param(replace(FINE, points=Points()), id="nothing was acknowledged yet"),
        pytest.param(acknowledged(3, 101, accepted=4), id="an operator accepted the loss of what is missing"),
        pytest.param(master_state(writable=False, readonly_reasons=("operator",)), id="the group was marked readonly"),
        pytest.param(master_state(writable=False, readonly_reasons=("slave_lag",)), id="the slave was behind, not out"),
        pytest.param(replace(FINE, reported_term=0), id="this metaserver has just begun and heard no term"),
    ],
)
def test_complete_slave_is_promoted_in_next_term(facts):
    assert promotion.refusal(facts) is None
    change = promotion.choose(facts)
    assert (change.term, change.new_term) == (4, 5)
    assert promotion.choose(replace(facts, used_term=7)).new_term == 8
    assert (change.master.key, change.master.role) == (B.key, Role.MASTER)
    assert (change.slave.key, change.slave.role, change.slave.complete) == (A.key, Role.SLAVE, False)


# Three copies and more.


def copies(count, m, *, ends=None, in_step="bcde", epochs=None, **fields):
    """Return facts about `count` copies, of which m acknowledge; the slaves are named b to e."""
    names = "bcde"[: count - 1]
    slaves = tuple(replace(B, hostname=name, incarnation=f"disk {name}", complete=False) for name in names)
    reported = {
        slave.key: replace(
            SLAVE_STATE,
            incarnation=slave.incarnation,
            flushed_end=(ends or {}).get(slave.hostname, 100),
            last_term=(epochs or {}).get(slave.hostname, 4),
            last_boot=1,
        )
        for slave in slaves
    }
    master_state = replace(MASTER_STATE, in_step=tuple(f"disk {name}" for name in in_step if name in names))
    group = replace(ROW, slaves=slaves, min_copies=m)
    return replace(FINE, group=group, master_state=master_state, slave_states=reported, **fields)


def without(facts, *names):
    left = {key: reported for key, reported in facts.slave_states.items() if key.hostname not in names}
    return replace(facts, slave_states=left)


@pytest.mark.parametrize(
    ("count", "m", "enough"), [(3, 2, 2), (3, 3, 1), (4, 3, 2), (4, 4, 1), (5, 3, 3), (5, 4, 2), (5, 5, 1)]
)
def test_promises_intersect_every_acknowledging_set(count, m, enough):
    facts = copies(count, m)
    if m == count:
        complete = tuple(replace(slave, complete=True) for slave in facts.group.slaves)
        facts = replace(facts, group=replace(facts.group, slaves=complete))
    names = "bcde"[: count - 1]
    assert facts.promises_needed == enough
    assert promotion.refusal(without(facts, *names[enough:])) is None
    refused, text = promotion.refusal(without(facts, *names[enough - 1 :]))
    assert refused == Refusal.SLAVE_DOWN
    assert text.startswith(f"{enough} of its {count - 1} slaves would have to promise, and ")


@pytest.mark.parametrize(
    ("ends", "epochs", "best"),
    [
        ({"b": 100, "c": 200}, {}, "c"),
        ({"b": 200, "c": 100}, {}, "b"),
        ({"b": 300, "c": 200}, {"b": 3}, "c"),  # of an older epoch, so the longer log has less
    ],
)
def test_longest_promising_slave_is_promoted(ends, epochs, best):
    change = promotion.choose(copies(3, 2, ends=ends, epochs=epochs))
    others = {"a", "b", "c"} - {best}
    assert change.master.hostname == best and {slave.hostname for slave in change.slaves} == others
    assert not any(slave.complete for slave in change.slaves) and change.min_copies == 2


@pytest.mark.parametrize(("wrong", "ends", "best"), [("b", {}, "c"), ("c", {}, "b"), ("c", {"b": 100, "c": 200}, "c")])
def test_correct_clock_breaks_the_tie(wrong, ends, best):
    facts = copies(3, 2, ends=ends)
    states = facts.slave_states.items()
    reported = {key: replace(state, clock_off_s=30 * (key.hostname == wrong)) for key, state in states}
    assert promotion.choose(replace(facts, slave_states=reported)).master.hostname == best


def test_row_gets_the_promised_term():
    facts = copies(3, 2)
    promised = {key: replace(reported, promised_term=facts.new_term) for key, reported in facts.slave_states.items()}
    assert facts.new_term == 5 and promotion.choose(replace(facts, slave_states=promised)).new_term == 5
    earlier = {key: replace(reported, promised_term=9) for key, reported in facts.slave_states.items()}
    assert promotion.choose(replace(facts, slave_states=earlier)).new_term == 9, "no slave refuses the row"
    assert promotion.choose(replace(facts, used_term=11, slave_states=earlier)).new_term == 12


def test_longest_slave_must_reach_acknowledged_point():
    assert promotion.refusal(copies(3, 2, ends={"c": 40})) is None
    assert promotion.refusal(copies(3, 2, ends={"b": 99, "c": 40}))[0] == Refusal.BEHIND


def test_acks_of_a_lone_master_prevent_promotion():
    assert promotion.refusal(copies(3, 2, in_step="c")) is None
    assert promotion.refusal(copies(3, 2, in_step=""))[0] == Refusal.NOT_IN_SYNC_AT_THE_END
    assert promotion.refusal(copies(5, 3, in_step="c"))[0] == Refusal.NOT_IN_SYNC_AT_THE_END


def test_connected_slave_of_several_does_not_promise():
    facts = copies(3, 2)
    refused, _ = promotion.refusal(replace(facts, unwilling={facts.group.slaves[0].key: "heard"}))
    assert refused == Refusal.HEARS_ITS_MASTER


@pytest.mark.parametrize(("count", "m"), [(2, 2), (3, 2), (3, 3), (5, 3)])
@pytest.mark.parametrize("left_out", ["", "in the row's term", "the operator's word"])
def test_operator_admits_restarted_slave(count, m, left_out):
    """With n = m the row names the complete copies; otherwise the log does, by a frame of the row's term."""
    facts = copies(count, m, in_step="", master_gone=left_out != "the operator's word")
    slaves = tuple(replace(slave, complete=count == m) for slave in facts.group.slaves)
    term = 3 if left_out == "in the row's term" else 4
    reported = {key: replace(state, in_sync=False, last_term=term) for key, state in facts.slave_states.items()}
    facts = replace(facts, group=replace(facts.group, slaves=slaves), slave_states=reported)
    is_chosen = facts.master_gone and (term == 4 or count == m)
    assert (promotion.refusal(facts) is None) == is_chosen


@pytest.mark.parametrize("why", Refusal)
def test_each_refusal_has_a_remedy(why):
    text = promotion.remedy_of(why, ROW)
    assert text and "{" not in text
    assert "g1" in text or why in {
        Refusal.NO_SLAVE,
        Refusal.HALF_SWAPPED,
        Refusal.OLD_ROW,
        Refusal.HEARS_ITS_MASTER,
        Refusal.NOT_STORED,
    }
