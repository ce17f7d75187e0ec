"""Core. Failover and swap: orders of the metaserver, promises, and their ends."""

from __future__ import annotations

import pytest

from qmq.errors import ErrorCode, IllegalTransition, NotServed, OperatorError
from qmq.replication.follower import FollowerState
from qmq.replication.identity import Point
from qmq.replication.ports import QUIET_MS
from qmq.replication.readonly import Reason
from qmq.types import Epoch, Role
from tests.unit.broker.world import Broker, Client
from tests.unit.replication.copies import Copies, group_at_rest

HOLD_MS = 1_000


def hold(broker: Broker, term: int = 1, **words) -> None:
    broker.node.changes.prepare_failover(
        term, **({"hold_ms": HOLD_MS, "silent_ms": 500, "packet_age_ms": None} | words)
    )


def test_slave_reconnects_after_its_hold(monkeypatch):
    group, calls = group_at_rest(), []
    hold(group.b)
    monkeypatch.setattr(group.b.host, "role_changed", lambda: calls.append(group.b.node.changes.is_held))
    group.b.wait(HOLD_MS)
    assert calls == [] and group.b.node.changes.is_held
    group.b.wait(1)
    assert calls == [False]


@pytest.mark.parametrize("packet_age_ms, is_gone", [(0, False), (499, False), (500, True), (None, True)])
def test_hold_is_refused_while_the_master_sends(packet_age_ms, is_gone):
    group = group_at_rest()
    if is_gone:
        hold(group.b, packet_age_ms=packet_age_ms)
    else:
        with pytest.raises(OperatorError, match=f"sent a packet {packet_age_ms} ms ago"):
            hold(group.b, packet_age_ms=packet_age_ms)
    assert group.b.node.changes.is_held is is_gone and group.at_slave.is_open is not is_gone


@pytest.mark.parametrize(
    "harm",
    [
        pytest.param(lambda node: node.identity.points.rolled_back(Point(Epoch(1, 1), 1 << 40, 7)), id="rolled back"),
        pytest.param(lambda node: setattr(node.slave, "has_matched", False), id="not in sync since it began"),
    ],
)
def test_incomplete_copy_refuses_a_failover(harm):
    group = group_at_rest()
    harm(group.b.node)
    with pytest.raises(OperatorError, match="was not in sync since its process began, or is incomplete"):
        hold(group.b, promised_term=2)
    assert not group.b.node.changes.is_held and group.b.node.identity.value.promised == 0


@pytest.mark.parametrize(
    "harm, may",
    [
        pytest.param(lambda node: None, True, id="whole"),
        pytest.param(lambda node: node.identity.completed(False), False, id="never whole"),
        pytest.param(lambda node: node.log.cut(node.log.state.epochs[0].offset + 8, ""), False, id="cut"),
    ],
)
def test_master_gone_needs_a_whole_copy(harm, may):
    group = group_at_rest()
    group.b.crash()
    group.b.assign(Role.SLAVE, 1)
    harm(group.b.node)
    if may:
        hold(group.b, master_gone=True)
    else:
        with pytest.raises(OperatorError, match="is incomplete"):
            hold(group.b, master_gone=True)
    assert group.b.node.changes.is_held is may


def test_prepared_swap_expires():
    group = group_at_rest()
    group.a.node.changes.prepare_swap(1, HOLD_MS)
    group.a.wait(HOLD_MS)
    assert group.a.node.readonly_reasons == [Reason.DRAINING]
    group.a.wait(1)
    assert group.a.node.writable
    group.settle()
    group.wait(100)
    assert group.a.node.quiet_ms() == QUIET_MS


@pytest.mark.parametrize("term", [0, 2])
def test_swap_of_another_term_is_refused(term):
    group = group_at_rest()
    with pytest.raises(OperatorError, match=f"not the master of g1 in term {term}"):
        group.a.node.changes.prepare_swap(term, HOLD_MS)
    assert group.a.node.writable


def test_waiting_master_refuses_a_swap():
    group = group_at_rest()
    group.cut()
    group.a.crash()
    group.a.assign(Role.MASTER, 1)
    with pytest.raises(OperatorError, match="not the master of g1"):
        group.a.node.changes.prepare_swap(1, HOLD_MS)
    with pytest.raises(OperatorError, match="accepted new messages"):
        group.a.node.changes.promise_swap(2)
    with pytest.raises(NotServed, match="waits for its slave"):
        group.a.node.acting_master()


def test_swap_cancelled_in_the_promised_term():
    group = group_at_rest()
    group.a.node.changes.prepare_swap(1, HOLD_MS)
    group.wait(HOLD_MS + 1)
    assert group.a.node.writable
    group.a.node.changes.promise_swap(2)
    assert group.a.node.identity.value.promised == 2 and group.a.node.quiet_ms() == QUIET_MS
    group.a.wait(10 * HOLD_MS)
    assert group.a.node.readonly_reasons == [Reason.DRAINING]
    group.start(2)
    group.a.node.changes.prepare_swap(2, HOLD_MS)
    group.a.node.changes.cancel_swap()
    assert group.a.node.writable


def test_slave_ignores_cancel_and_refuses_promise():
    group = group_at_rest()
    group.b.node.changes.cancel_swap()
    with pytest.raises(OperatorError, match="not the master of g1 any more"):
        group.b.node.changes.promise_swap(2)
    assert group.b.node.identity.value.promised == 0


def promised(copies: Copies, broker: Broker, term: int = 2) -> None:
    broker.node.changes.prepare_failover(1, hold_ms=1_000, silent_ms=0, packet_age_ms=None, promised_term=term)


def test_promise_survives_a_restart():
    copies = Copies().start()
    promised(copies, copies.c)
    assert copies.c.disk.has("broker.json")
    copies.c.crash()
    copies.c.assign(Role.SLAVE, 1, slaves=2)
    copies.c.wait(5_000)  # the hold has expired
    assert copies.c.node.changes.is_held
    copies.cut("c")
    copies.wires["c"].connect()
    copies.settle()
    assert copies.state("c") is not FollowerState.IN_SYNC
    copies.c.assign(Role.SLAVE, 2, slaves=2)
    assert not copies.c.node.changes.is_held


def test_row_below_a_promise_is_ignored():
    """The copy keeps its role: it may already follow the master of a newer term."""
    group = group_at_rest()
    node, role = group.b.node, group.b.node.role
    node.identity.promise(3)
    group.b.assign(Role.MASTER, 2)
    assert node.role is role and node.assignment.term == 1
    group.b.assign(Role.MASTER, 3)
    assert node.master is not None


def test_restarted_copy_promises_only_without_its_master():
    """Its disk may have been rolled back. It must also have been a whole copy."""
    copies = Copies().start(connected="c")
    copies.c.crash()
    copies.c.assign(Role.SLAVE, 1, slaves=2)
    with pytest.raises(OperatorError, match="was not in sync since its process began"):
        promised(copies, copies.c)
    copies.c.node.changes.prepare_failover(
        1, hold_ms=1_000, silent_ms=0, packet_age_ms=None, promised_term=2, master_gone=True
    )
    assert copies.c.node.identity.value.promised == 2
    copies.b.node.identity.next_boot(1, above=0)
    with pytest.raises(OperatorError, match="is incomplete"):
        copies.b.node.changes.prepare_failover(
            1, hold_ms=1, silent_ms=0, packet_age_ms=None, promised_term=2, master_gone=True
        )


def test_master_without_unpromised_slaves_acknowledges_nothing():
    copies = Copies().start()
    client = Client(copies.a)
    for broker in (copies.b, copies.c):
        promised(copies, broker)
    copies.settle()
    stored = client.produce("m1")
    copies.settle()
    assert client.code(stored) == ErrorCode.READ_ONLY
    copies.cut()
    copies.start(term=2, master=copies.b)
    stored = Client(copies.b).produce("m2")
    copies.settle()
    assert copies.b.node.writable and stored and copies.a.log.chain == copies.b.log.chain == copies.c.log.chain


def test_swap_waits_for_its_target():
    copies = Copies().start()
    client = Client(copies.a)
    stored = client.produce("m1")
    copies.wires["b"].settle()
    target = copies.c.node.identity.value.incarnation
    copies.a.node.changes.prepare_swap(1, 1_000, target=target)
    assert client.answered(stored) and not copies.a.master.is_drained_to(target)
    with pytest.raises(OperatorError, match="accepted new messages"):
        copies.a.node.changes.promise_swap(2, target=target)
    copies.settle()
    assert copies.a.master.is_drained_to(target)
    copies.a.node.changes.promise_swap(2, target=target)


def test_swap_needs_a_slave_in_sync():
    copies = Copies().start()
    copies.cut("c")
    with pytest.raises(OperatorError, match="not in sync"):
        copies.a.node.changes.prepare_swap(1, 1_000, target=copies.c.node.identity.value.incarnation)


def test_promised_master_drains_until_the_new_term():
    copies = Copies().start()
    copies.a.node.changes.prepare_swap(1, 500, target=copies.b.node.identity.value.incarnation)
    copies.settle()
    copies.a.node.changes.promise_swap(2)
    copies.a.wait(5_000)
    copies.a.node.changes.cancel_swap()
    assert Reason.DRAINING in copies.a.master.readonly
    copies.start(term=2)  # the swap was cancelled: the row has the promised term and the same master
    assert copies.a.node.writable


def test_promised_master_does_not_restart_in_its_term():
    copies = Copies().start()
    copies.a.node.changes.prepare_swap(1, 500, target=copies.b.node.identity.value.incarnation)
    copies.settle()
    copies.a.node.changes.promise_swap(2)
    copies.a.node._begin_anew(IllegalTransition("a state without this move"))
    copies.settle()
    assert copies.a.node.role is None and not copies.a.node.writable
    copies.cut()
    copies.start(term=2)
    assert copies.a.node.writable


def test_failover_of_another_term_is_refused():
    group = group_at_rest()
    for broker, term in ((group.b, 2), (group.b, 0), (group.a, 1)):
        with pytest.raises(OperatorError, match=f"not the slave of g1 in term {term}"):
            broker.node.changes.prepare_failover(term, hold_ms=1_000, silent_ms=0, packet_age_ms=None)
    assert not group.b.node.changes.is_held


def test_role_change_is_reported_after_it_happened(monkeypatch):
    group, calls = group_at_rest(), []
    node, host = group.b.node, group.b.host
    monkeypatch.setattr(host, "role_changed", lambda: calls.append((type(node.role).__name__, node.changes.is_held)))
    hold(group.b)
    group.b.assign(Role.SLAVE, 2)
    hold(group.b, 1, master_gone=True)
    group.b.assign(Role.MASTER, 3)
    assert calls == [("Slave", True), ("Slave", False), ("Slave", True), ("BrokerMaster", False)]


def test_new_part_ends_the_swap_deadline(caplog):
    group = group_at_rest()
    group.a.node.changes.prepare_swap(1, HOLD_MS)
    assert group.a.node.quiet_ms() == 0
    group.cut()
    group.a.assign(Role.SLAVE, 2)
    assert group.a.node.quiet_ms() == QUIET_MS and "rolled back" not in caplog.text
