"""Core. Filling slaves on an operator's order: which filling begins, waits or stops."""

from __future__ import annotations

import json

import pytest

from qmq.replication.agreement import Hello
from qmq.replication.assignment import FillOrders
from qmq.replication.follower import FollowerState
from qmq.replication.readonly import Reason
from qmq.types import Epoch, Role
from tests.unit.broker.world import SETTINGS, Broker, Client, Group
from tests.unit.replication.copies import Copies

ROLES = {"a": Role.MASTER, "b": Role.SLAVE, "c": Role.SLAVE}


@pytest.mark.parametrize(
    "mode, orders, may_begin, is_cancelled",
    [
        ("automatic", (), True, False),
        ("", (), True, False),
        ("manual", (), False, False),
        ("of-a-later-version", (), False, False),
        ("manual", (("x/0", True),), True, False),
        ("manual", (("x/1", True), ("y/0", True)), False, False),
        ("automatic", (("x/0", False),), False, True),
        ("automatic", (("x/1", False),), True, False),
    ],
)
def test_fill_order_applies_to_one_filling(mode, orders, may_begin, is_cancelled):
    fill_orders = FillOrders.of(mode, orders)
    assert (fill_orders.may_begin("x/0"), fill_orders.is_cancelled("x/0")) == (may_begin, is_cancelled)


def heed(copies: Copies, mode: str, *orders: tuple[str, bool]) -> None:
    """Store these orders in the row; slaves without a link connect again, as the shell does."""
    for broker in (copies.a, copies.b, copies.c):
        fields = {"min_copies": copies.min_copies, "sync_mode": mode, "fills": orders}
        broker.assign(ROLES[broker.name], copies.a.node.identity.value.term, slaves=2, **fields)
    for name, wire in copies.wires.items():
        if wire.at_master is not None and not wire.at_master.is_open:
            wire.cut()
            copies.connect(name)
    copies.settle()


def with_new_c(mode: str = "manual", *, min_copies: int = 2, messages: int = 3) -> Copies:
    """Return three copies of which c restarted with an empty directory."""
    copies = Copies(min_copies=min_copies).start()
    client = Client(copies.a)
    for number in range(messages):
        client.produce(f"m{number}")
        copies.settle()
    copies.cut("c")
    copies.c = Broker("c", SETTINGS)
    copies.c.node.identity.value = copies.c.node.identity.value.__class__("c-new")
    copies.wires["c"].b = copies.c
    heed(copies, mode)
    copies.connect("c")
    return copies


def fill_id(broker: Broker) -> str:
    return broker.node.identity.value.fill_id


def test_new_slave_waits_while_the_group_continues():
    copies = with_new_c()
    assert copies.state("c") is FollowerState.UNFILLED and copies.c.log.is_empty
    assert copies.c.node.readonly_reasons == [Reason.UNFILLED] and copies.a.node.writable
    client = Client(copies.a)
    stored = client.produce("m9")
    copies.settle()
    assert client.receipt(stored).stored == 1 and copies.c.log.is_empty
    assert copies.a.master.in_sync == (copies.b.node.identity.value.incarnation,)
    assert not copies.c.slave.has_matched and copies.a.master.shipped_end == copies.a.log.end


def test_order_for_another_filling_changes_nothing():
    copies = with_new_c()
    link = copies.wires["c"].at_master
    heed(copies, "manual", ("another/0", True))
    assert copies.state("c") is FollowerState.UNFILLED and link.is_open


def test_manual_mode_continues_a_filling_under_way():
    copies = with_new_c()
    wire = copies.wires["c"]
    copies.a.assign(Role.MASTER, 1, slaves=2)
    wire.cut()
    wire.connect()
    wire.deliver_hello()
    heed(copies, "manual")
    assert copies.state("c") is FollowerState.IN_SYNC


def test_stop_order_does_not_stop_catching_up():
    copies = Copies().start()
    copies.cut("c")
    copies.store("m1")
    wire = copies.wires["c"]
    wire.connect()
    wire.deliver_hello()
    link = wire.at_master
    assert copies.state("c") is FollowerState.CATCHING_UP
    copies.a.assign(Role.MASTER, 1, slaves=2, fills=((fill_id(copies.c), False),))
    assert copies.state("c") is FollowerState.CATCHING_UP and link.is_open


def test_stop_order_does_not_stop_slave_in_sync():
    copies = with_new_c()
    order = fill_id(copies.c)
    heed(copies, "manual", (order, True))
    link = copies.wires["c"].at_master
    heed(copies, "manual", (order, False))
    assert copies.state("c") is FollowerState.IN_SYNC and link.is_open


def test_fill_order_survives_a_new_master():
    copies = with_new_c()
    heed(copies, "manual", (fill_id(copies.c), False))
    copies.cut("bc")
    fields = {"slaves": 2, "sync_mode": "manual", "fills": ((fill_id(copies.c), False),)}
    copies.b.assign(Role.MASTER, 2, **fields)
    copies.a.assign(Role.SLAVE, 2, **fields)
    copies.c.assign(Role.SLAVE, 2, **fields)
    copies.wires = {"a": Group(copies.b, copies.a), "c": Group(copies.b, copies.c)}
    copies.connect("ac")
    (watch,) = [watch for watch in copies.b.master.slaves.all if watch.owner.startswith("c:")]
    assert copies.b.node.writable and watch.follower.state is FollowerState.UNFILLED


def test_mastership_begins_with_an_unfilled_slave():
    """The frames of an unfilled slave were compared with the master's log already."""
    copies = with_new_c(min_copies=3)
    copies.cut("bc")
    for broker in (copies.a, copies.b, copies.c):
        broker.assign(ROLES[broker.name], 2, slaves=2, min_copies=3, sync_mode="manual")
    copies.connect("bc")
    assert copies.a.master.has_begun and copies.state("c") is FollowerState.UNFILLED


def test_whole_copy_below_the_log_waits_unchanged():
    """A snapshot would set its old copy aside, which needs an order."""
    copies = Copies().start()
    heed(copies, "manual")
    assert copies.c.slave.has_matched
    copies.cut("c")
    copies.outgrow(copies.a, copies.c, segments=4)
    end, order = copies.c.log.end, (fill_id(copies.c), True)
    copies.connect("c")
    assert copies.state("c") is FollowerState.UNFILLED and copies.c.log.end == end
    assert not copies.c.slave.has_matched, "it promises nothing"
    heed(copies, "manual", order)
    assert copies.state("c") is FollowerState.IN_SYNC and copies.c.log.start == copies.a.log.start
    assert copies.c.log.chain == copies.a.log.chain


@pytest.mark.parametrize("begins_late", [False, True])
def test_slave_of_an_older_version_is_filled(begins_late):
    copies = with_new_c(messages=30 if begins_late else 3)
    while begins_late and len(copies.a.log.bases) > 1:
        copies.a.drop_oldest_segment()
    assert (copies.a.log.start > 0) is begins_late
    assert Hello.decode(Hello("g1", "x", Epoch(1, 1), [], 0, 0, 0).encode()).would_be_filled is False
    copies.cut("c")
    wire = copies.wires["c"]
    wire.connect()
    fields = json.loads(copies.c.host.hellos[-1])
    del fields["fill_id"], fields["whole"]
    copies.c.host.hellos[-1] = json.dumps(fields).encode()
    copies.settle()
    assert copies.state("c") is FollowerState.IN_SYNC
