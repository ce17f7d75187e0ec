"""Core. What must hold before the metaserver chooses a new master by itself."""

from __future__ import annotations

from dataclasses import replace

import pytest

from qmq.metaserver import failover
from qmq.metaserver.failover import CONDITIONS, Facts, Refusal
from qmq.metaserver.model import Broker, Group, Points, ReplicaState
from qmq.replication.points import Point
from qmq.types import Epoch, Role

A = Broker("g1", Role.MASTER, "a", "10.0.0.1", 1, 2, incarnation="disk a")
B = Broker("g1", Role.SLAVE, "b", "10.0.0.2", 1, 2, incarnation="disk b", complete=True)
ROW = Group("g1", 4, A, (B,), 0)
MASTER_SAID = ReplicaState(Role.MASTER, 4, boot=2, writable=True, incarnation="disk a", in_step=("disk b",))
SLAVE_SAID = ReplicaState(Role.SLAVE, 4, boot=2, flushed_end=100, incarnation="disk b", in_sync=True)
POINTS = Points({"disk a": Point(Epoch(4, 2), 100, 7), "disk b": Point(Epoch(4, 2), 90, 8)})
FINE = Facts(ROW, 4, 4, MASTER_SAID, SLAVE_SAID, POINTS)


def row(**fields):
    return replace(FINE, group=replace(ROW, **fields))


def slave_is(**fields):
    return row(slaves=(replace(B, **fields),))


def slave_says(**fields):
    return replace(FINE, slave_said=replace(SLAVE_SAID, **fields))


def master_said(**fields):
    return replace(FINE, master_said=replace(MASTER_SAID, **fields))


def acknowledged(term, end, *, accepted=0):
    return replace(FINE, points=Points({"disk a": Point(Epoch(term, 1), end, 7)}, accepted))


REFUSED = [
    pytest.param(row(slaves=()), Refusal.NO_SLAVE, id="the slave's place is vacant"),
    pytest.param(row(master=None), Refusal.NO_SLAVE, id="the master's place is vacant"),
    pytest.param(row(slaves=(B, replace(B, hostname="c"))), Refusal.SEVERAL_SLAVES, id="it has two slaves"),
    pytest.param(row(half_swapped=True), Refusal.HALF_SWAPPED, id="an operator is at it"),
    pytest.param(replace(FINE, reported_term=5), Refusal.OLD_ROW, id="a broker reports a newer term than the row"),
    pytest.param(replace(FINE, slave_said=None), Refusal.SLAVE_DOWN, id="the slave does not answer"),
    pytest.param(slave_says(incarnation="empty"), Refusal.OTHER_DISK, id="its disk was replaced"),
    pytest.param(slave_says(incarnation=""), Refusal.OTHER_DISK, id="it does not name its disk"),
    pytest.param(slave_is(incarnation=""), Refusal.OTHER_DISK, id="the row names no disk"),
    pytest.param(slave_says(term=3), Refusal.OTHER_TERM, id="it followed an older master last"),
    pytest.param(slave_says(term=5), Refusal.OTHER_TERM, id="it is ahead of the row"),
    pytest.param(slave_says(role=Role.MASTER), Refusal.OTHER_TERM, id="it is a master"),
    pytest.param(slave_is(complete=False), Refusal.NEVER_IN_SYNC, id="it was never in sync, by the row"),
    pytest.param(replace(FINE, master_said=None), Refusal.NOT_IN_SYNC_AT_THE_END, id="the master never reported"),
    pytest.param(master_said(term=3), Refusal.NOT_IN_SYNC_AT_THE_END, id="the master reported in an older term last"),
    pytest.param(master_said(role=Role.SLAVE), Refusal.NOT_IN_SYNC_AT_THE_END, id="the master had not begun"),
    pytest.param(master_said(in_step=()), Refusal.NOT_IN_SYNC_AT_THE_END, id="no slave was in sync"),
    pytest.param(master_said(in_step=("disk c",)), Refusal.NOT_IN_SYNC_AT_THE_END, id="another copy was in sync"),
    pytest.param(
        master_said(readonly_reasons=("slave_down",)), Refusal.NOT_IN_SYNC_AT_THE_END, id="the slave was lost before"
    ),
    pytest.param(slave_says(in_sync=False), Refusal.NOT_IN_SYNC_SINCE_START, id="the slave restarted meanwhile"),
    pytest.param(slave_says(readonly_reasons=("rolled_back",)), Refusal.ROLLED_BACK, id="its disk was put back"),
    pytest.param(slave_says(readonly_reasons=("corrupt",)), Refusal.DAMAGED, id="it is damaged"),
    pytest.param(slave_says(readonly_reasons=("diverged",)), Refusal.DAMAGED, id="the copies differ"),
    pytest.param(slave_says(flushed_end=99), Refusal.BEHIND, id="one byte of what was acknowledged is missing"),
    pytest.param(acknowledged(3, 101), Refusal.BEHIND, id="what an older term acknowledged is missing"),
    pytest.param(acknowledged(3, 101, accepted=3), Refusal.BEHIND, id="loss was accepted before that was acknowledged"),
]


@pytest.mark.parametrize(("facts", "why"), REFUSED)
def test_each_condition_alone_is_in_the_way(facts, why):
    refused, text = failover.refusal(facts)
    assert (refused, text) == (why, next(text for one, _, text in CONDITIONS if one == why))


def test_each_condition_has_an_example():
    assert {param.values[1] for param in REFUSED} == {why for why, _, _ in CONDITIONS}


@pytest.mark.parametrize(
    "facts",
    [
        pytest.param(FINE, id="all is known and well"),
        pytest.param(replace(FINE, points=Points()), id="nothing was acknowledged yet"),
        pytest.param(acknowledged(3, 101, accepted=4), id="an operator accepted the loss of what is missing"),
        pytest.param(master_said(writable=False, readonly_reasons=("operator",)), id="the group was marked readonly"),
        pytest.param(master_said(writable=False, readonly_reasons=("slave_lag",)), id="the slave was behind, not out"),
        pytest.param(replace(FINE, reported_term=0), id="this metaserver has just begun and heard no term"),
    ],
)
def test_a_slave_that_has_everything_is_chosen_in_the_next_term(facts):
    assert failover.refusal(facts) is None
    change = failover.choose(facts)
    assert (change.term, change.new_term) == (4, 5)
    assert failover.choose(replace(facts, term_floor=7)).new_term == 8
    assert (change.master.key, change.master.role) == (B.key, Role.MASTER)
    assert (change.slave.key, change.slave.role, change.slave.complete) == (A.key, Role.SLAVE, False)
