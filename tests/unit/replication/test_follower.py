"""Core. A master's view of its slave goes by its table."""

from __future__ import annotations

import pytest

from qmq.errors import IllegalTransition
from qmq.replication import follower
from qmq.replication.agreement import Action, Agreement
from qmq.replication.follower import FOLLOWER, Absent, CatchingUp, Follower, FollowerEvent, FollowerState, Restoring
from qmq.replication.readonly import Reason
from tests.unit.broker.world import Client, Group

S = FollowerState


def states(group: Group) -> list[FollowerState]:
    return [move.after for move in group.a.master.slaves.all[0].follower.history]


def test_slave_joins_lags_catches_up_and_leaves():
    group = Group.made(slave_lag_ms_max=1000).start()
    client, master = Client(group.a), group.a.master
    assert states(group) == [S.CATCHING_UP, S.IN_SYNC] and not master.readonly.reasons
    client.produce("m")
    group.a.host.settle()
    group.a.wait(100)
    group.a.wait(1100)
    assert master.slaves.all[0].follower.state is S.LAGGING and master.readonly.reasons == [Reason.SLAVE_LAG]
    group.settle()
    group.a.wait(100)
    assert master.slaves.all[0].follower.state is S.IN_SYNC and not master.readonly.reasons
    group.cut()
    assert states(group)[2:] == [S.LAGGING, S.IN_SYNC, S.ABSENT]
    assert master.readonly.reasons == [Reason.SLAVE_DOWN]


def test_confirmation_of_another_log_is_divergence():
    group = Group.made().start()
    gate, slave = group.a.master.gate, group.b.slave
    Client(group.a).produce("m")
    group.a.host.settle()
    slave._confirm(group.a.log.end, 0xBAD)
    group.to_master()
    assert group.a.master.slaves.all[0].follower.state is S.DIVERGED and gate.too_few_in_sync
    assert group.a.master.readonly.reasons == [Reason.DIVERGED, Reason.SLAVE_DOWN]
    group.connect()
    group.settle()
    assert group.a.master.slaves.all[0].follower.state is S.IN_SYNC and not group.a.master.readonly.reasons


def test_illegal_follower_transition_restarts_the_mastership(monkeypatch):
    group = Group.made().start()
    epoch, illegal = group.a.master.epoch, FOLLOWER.illegal

    def agree(hello, log, epoch, **_):
        return Agreement(epoch, Action.RESTORE, log.end, log.chain, log.end)

    with monkeypatch.context() as patch:
        patch.setattr(follower, "agree", agree)  # as if a master in sync had something to get back
        group.connect()
        group.deliver_hello()
    assert FOLLOWER.illegal == illegal + 1 and group.a.master.epoch > epoch
    group.connect()
    group.settle()
    assert states(group) == [S.CATCHING_UP, S.IN_SYNC] and group.a.node.writable


def test_follower_states_have_their_own_fields():
    follower = Follower()
    with pytest.raises(IllegalTransition):
        follower.enter(FollowerEvent.MATCHED, Absent(), at_ms=0)
    follower.enter(FollowerEvent.RESTORES, Restoring(object(), 7, 0), at_ms=0)
    assert follower.restoring.begin == 7 and follower.connected is None and follower.is_legal
    follower.now = CatchingUp(object(), "b")
    assert not follower.is_legal
