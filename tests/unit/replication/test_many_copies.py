"""Core. Groups of three copies, two or all of which must acknowledge; each slave has its own link to the master."""

from __future__ import annotations

import pytest

from qmq.replication.clocks import METASERVER, SLAVE
from qmq.replication.copy_report import messages_above
from qmq.replication.follower import FollowerState
from qmq.replication.quorum import OTHERS_WAIT_MS
from qmq.replication.readonly import Reason
from qmq.types import Role
from tests.unit.broker.world import SETTINGS, Broker, Client, Group
from tests.unit.replication.copies import Copies


@pytest.mark.parametrize("min_copies, is_stored", [(2, True), (3, False)])
def test_min_copies_acknowledge(min_copies, is_stored):
    copies = Copies(min_copies=min_copies).start()
    client = Client(copies.a)
    stored = client.produce("m1")
    copies.wires["b"].settle()  # packets to c stay under way
    assert client.answered(stored) == is_stored
    copies.settle()
    assert client.receipt(stored).stored == 1


@pytest.mark.parametrize("min_copies, full, is_writable", [(2, "c", True), (2, "bc", False), (3, "c", False)])
def test_full_disk_matters_if_its_copy_is_needed(min_copies, full, is_writable):
    """A group of three may lose one copy; a copy with a full disk counts as lost."""
    copies = Copies(min_copies=min_copies).start()
    for watch in copies.a.master.slaves.all:
        watch.is_disk_full = watch.owner[0] in full
    copies.a.node.set_disk_full(False)
    assert copies.a.node.writable == is_writable
    assert copies.a.node.readonly_reasons == ([] if is_writable else [Reason.DISK])
    for watch in copies.a.master.slaves.all:
        watch.is_disk_full = False
    copies.a.node.set_disk_full(False)
    assert copies.a.node.writable


def test_master_restores_from_any_slave_before_beginning():
    copies = Copies().start()
    Client(copies.a).produce("m1")
    copies.a.host.turn()  # shipped, not yet on its own disk
    copies.wires["b"].to_slave()
    copies.b.host.settle()
    copies.a.crash()
    end = copies.b.log.end
    assert copies.a.log.end < end == copies.b.log.flushed_end
    copies.c.crash()
    copies.b.crash()
    copies.start(connected="c")
    assert not copies.a.master.has_begun  # c has no more frames; b may have
    copies.connect("b")
    assert copies.a.master.has_begun
    assert copies.a.log.chain == copies.b.log.chain == copies.c.log.chain and copies.a.log.end > end


def test_master_waits_for_the_third_copy():
    copies = Copies().start()
    copies.a.crash()
    copies.start(connected="")
    copies.connect("b")
    copies.a.wait(OTHERS_WAIT_MS - 100)
    assert not copies.a.master.has_begun
    copies.wait(100)
    assert copies.a.master.has_begun and copies.a.node.writable


def powered_off_after_a_lie() -> tuple[Copies, int]:
    """Restart all copies: b has an acknowledged message that c and the lying disk of a lack."""
    copies = Copies().start()
    copies.cut("c")
    lie = copies.a.disk.copy()
    stored = Client(copies.a)
    request = stored.produce("m1")
    copies.settle()
    assert stored.receipt(request).stored == 1
    end = copies.b.log.end
    copies.a.disk.put_back(lie)
    for broker in (copies.a, copies.b, copies.c):
        broker.crash()
    assert copies.a.log.end < end == copies.b.log.end
    return copies, end


@pytest.mark.parametrize("order", ["c", "", "cb"], ids=["late copy first", "no copy", "both in time"])
def test_restarted_master_waits_for_copies_in_sync(order):
    """Without any slave it waits too: its new frames would conflict with the copy that returns later."""
    copies, end = powered_off_after_a_lie()
    copies.start(connected=order[:1], term=2, awaited="bc")
    copies.a.wait(int(SETTINGS.rejoin_wait_s * 1000) - 100)
    assert not copies.a.master.has_begun and Reason.REJOIN in copies.a.node.readonly_reasons
    copies.connect("".join(name for name in "bc" if name not in order[:1]))
    assert copies.a.node.writable and not copies.b.node.readonly_reasons
    assert copies.a.log.chain == copies.b.log.chain == copies.c.log.chain and copies.a.log.end > end


def test_rejoin_wait_ends_and_names_the_missing_copy(caplog):
    copies, _ = powered_off_after_a_lie()
    copies.start(connected="c", term=2, awaited="bc")
    copies.wait(int(SETTINGS.rejoin_wait_s * 1000))
    assert copies.a.node.writable and not copies.a.node.readonly_reasons
    (line,) = [record.getMessage() for record in caplog.records if "wait for copies ended" in record.getMessage()]
    assert "b:20881" in line and "c:20881" not in line
    copies.connect("b")
    assert copies.state("b") is FollowerState.DIVERGED and Reason.DIVERGED in copies.b.node.readonly_reasons
    above = messages_above(copies.b.log, copies.b.node.parted_at, ids_max=9)
    assert above["subjects"] == {"s": [0, 0]} and [id for _, _, id in above["ids"]] == ["m1"]


def test_restarted_master_ignores_slaves_absent_before():
    copies = Copies().start()
    copies.a.crash()
    copies.start(connected="b", awaited="b")
    copies.wait(OTHERS_WAIT_MS)
    assert copies.a.node.writable


def test_row_without_the_slave_ends_the_wait():
    """An operator removed the slave or replaced its disk."""
    copies, _ = powered_off_after_a_lie()
    copies.start(connected="c", term=2, awaited="bc")
    copies.a.wait(2 * OTHERS_WAIT_MS)
    assert not copies.a.master.has_begun
    copies.a.assign(Role.MASTER, 2, slaves=2, awaited=(f"c:{SETTINGS.serve_port}",))
    copies.a.wait(100)
    assert copies.a.master.has_begun


@pytest.mark.parametrize("proof", ["it was the master", "it was a slave in sync"])
def test_continuing_process_waits_for_no_copy(proof):
    """The disk of a running process has not forgotten what the process confirmed."""
    copies = Copies().start()
    master = copies.a if proof == "it was the master" else copies.b
    copies.cut()
    copies.start(term=2, connected="c", master=master, awaited="abc".replace(master.name, ""))
    master.wait(OTHERS_WAIT_MS)
    assert master.master.has_begun


def test_broker_with_a_replaced_disk_counts_once():
    copies = Copies(min_copies=3).start(connected="b")
    replaced = Broker("b", copies.b.settings)  # the same address with an empty disk, while the old link is open
    replaced.assign(Role.SLAVE, 1, slaves=2, min_copies=3)
    copies.wires["again"] = Group(copies.a, replaced)
    copies.connect(["again"])
    copies.wait(OTHERS_WAIT_MS)
    assert len(copies.a.master.slaves.in_sync) <= 1 and copies.a.master.gate.too_few_in_sync


def ahead_of_the_master(copies: Copies, names: str) -> Copies:
    """Store a message on the disks of these slaves alone."""
    copies.start()
    Client(copies.a).produce("m1")
    copies.a.host.turn()
    for name in names:
        copies.wires[name].to_slave()
        copies.wires[name].b.host.settle()
    return copies


def parted_from_b(copies: Copies) -> Copies:
    """Restart the master without a message that b alone has; only c is connected."""
    ahead_of_the_master(copies, "b")
    copies.a.crash()
    copies.start(connected="c")
    return copies


def test_diverged_slave_keeps_its_frames():
    copies = parted_from_b(Copies())
    copies.wait(OTHERS_WAIT_MS)
    assert copies.a.master.has_begun
    kept = copies.b.log.end
    copies.connect("b")
    assert copies.state("b") is FollowerState.DIVERGED and copies.b.log.end == kept
    assert copies.a.master.yields_from is None
    copies.store("m2")
    assert copies.a.node.writable and copies.a.log.chain == copies.c.log.chain
    assert "diverged" in copies.b.node.readonly_reasons and not copies.a.node.readonly_reasons


@pytest.mark.parametrize("min_copies, connected, begins", [(2, "b", False), (2, "bc", True), (3, "bc", True)])
def test_diverged_slave_does_not_delay_the_master(min_copies, connected, begins):
    """A diverged slave has none of the frames that the master's disk may have lost. Another slave may, so the master
    waits for that one.
    """
    copies = parted_from_b(Copies(min_copies=min_copies))
    copies.wait(SETTINGS.slave_wait_ms)
    copies.a.crash()
    copies.a.node.identity.completed(False)
    copies.start(connected=connected, term=2)
    copies.a.wait(SETTINGS.slave_wait_ms - 1)
    assert copies.state("b") is FollowerState.DIVERGED and not copies.a.master.has_begun
    copies.wait(1)
    assert copies.a.master.has_begun == begins
    assert copies.a.node.writable == (begins and min_copies == 2) and copies.b.log.end


def put_back(copies: Copies) -> Copies:
    """Return copies of which c has frames it wrote alone as an older master, and b an acknowledged message; the
    master's disk is older than both.
    """
    copies.start(master=copies.b)
    copies.cut("ac")
    before = copies.a.disk.copy()
    copies.start(term=2, master=copies.c, connected="")
    copies.c.wait(SETTINGS.slave_wait_ms)
    copies.c.host.settle()  # it began alone
    copies.start(term=3, connected="b")
    copies.a.wait(OTHERS_WAIT_MS)
    copies.store("m1", size=900)
    copies.wait(200)
    assert copies.b.node.identity.points.own.end == copies.b.log.end > copies.c.log.end
    copies.cut()
    copies.a.disk.put_back(before)
    copies.a.start()
    return copies


def test_rolled_back_master_ignores_slaves_below_the_point():
    """Frames that an older master wrote alone would conflict with the copy that has the point."""
    copies = put_back(Copies())
    copies.a.node.remembered_elsewhere([copies.b.node.identity.points.own])
    copies.start(term=4, connected="c")
    assert copies.a.log.end < copies.c.log.end and copies.a.node.readonly_reasons == ["slave_down", "rolled_back"]
    copies.connect("b")
    copies.cut("c")
    copies.connect("c")
    assert copies.a.node.writable and copies.a.log.chain == copies.b.log.chain == copies.c.log.chain


@pytest.mark.parametrize("taken", ["nothing", "all", "all, and it followed"])
@pytest.mark.parametrize("remembers", [True, False], ids=["", "no acknowledged point"])
def test_master_drops_restored_frames_below_the_point(taken, remembers):
    copies = put_back(Copies())
    if not remembers:
        copies.b.node.identity.points.own = None
    copies.start(term=4, connected="")
    kept = copies.b.log.state.epochs
    wire = copies.wires["c"]
    wire.connect()
    copies.c.host.settle()
    assert wire.deliver_hello() and copies.state("c") is FollowerState.RESTORING
    if taken == "all":
        assert wire.to_master() and copies.a.log.end == copies.c.log.end
    elif taken != "nothing":
        copies.settle()
        assert copies.state("c") is FollowerState.IN_SYNC and not copies.a.master.has_begun
    copies.connect("b")
    assert not copies.a.master.has_begun or copies.a.log.end == copies.b.log.end
    copies.cut()
    copies.connect("cb")
    copies.wait(OTHERS_WAIT_MS)
    assert copies.a.node.writable and copies.a.log.chain == copies.b.log.chain
    assert copies.a.log.state.epochs[: len(kept)] == kept
    copies.cut("c")
    copies.connect("c")  # it keeps the frames that it confirmed to this master
    assert copies.state("c") is (FollowerState.DIVERGED if "followed" in taken else FollowerState.IN_SYNC)


def test_master_below_a_diverged_slaves_point_waits():
    """It keeps the frames it confirmed, and lacks the other slave's acknowledged point."""
    copies = parted_from_b(Copies())
    copies.a.wait(OTHERS_WAIT_MS)
    copies.store("m2")
    copies.wait(200)
    kept = copies.b.log.end
    copies.cut()
    copies.start(term=2, master=copies.b)
    copies.b.wait(SETTINGS.slave_wait_ms)
    assert not copies.b.master.has_begun and copies.b.log.end == kept
    assert Reason.ROLLED_BACK in copies.b.node.readonly_reasons


def test_master_yields_after_hellos_of_all_slaves():
    copies = ahead_of_the_master(Copies(), "bc")
    copies.begin_alone_twice()
    copies.start(connected="b")
    assert copies.state("b") is FollowerState.DIVERGED  # c may have confirmed these frames
    copies.connect("c")
    copies.cut()
    copies.connect("bc")
    assert copies.a.master.has_begun and copies.a.log.chain == copies.b.log.chain == copies.c.log.chain


@pytest.mark.parametrize("order", ["bc", "cb"])
def test_hello_of_a_diverged_slave_counts_for_yielding(order):
    """The frames that it confirmed itself stay in its log."""
    copies = parted_from_b(Copies())
    copies.a.wait(OTHERS_WAIT_MS)
    client = Client(copies.a)
    client.produce("m2")
    copies.settle()
    copies.a.wait(200)  # now it stores the point of m2, which b lacks
    copies.settle()
    client.produce("m3")
    copies.a.host.turn()
    copies.wires["c"].to_slave()
    copies.c.host.settle()
    kept, parted_end = copies.c.log.end, copies.b.log.end  # only the disk of c has m3
    copies.begin_alone_twice()
    copies.start(connected=order[0])
    assert copies.state(order[0]) is FollowerState.DIVERGED and copies.a.master.yields_from is None
    copies.connect(order[1])
    for _ in range(2):
        copies.cut()
        copies.connect(order)
    assert (copies.state("b"), copies.b.log.end) == (FollowerState.DIVERGED, parted_end)
    copies.wait(OTHERS_WAIT_MS)
    assert copies.a.node.writable and copies.a.log.chain == copies.c.log.chain
    assert copies.a.log.state.epochs[-1].offset == kept


def test_master_yields_to_an_interrupted_restore():
    copies = ahead_of_the_master(Copies(), "bc")
    copies.a.crash()
    copies.start(connected="")
    copies.wires["b"].connect()
    copies.b.host.settle()
    assert copies.wires["b"].deliver_hello() and copies.state("b") is FollowerState.RESTORING
    copies.cut("b")  # before any of its frames arrived
    copies.a.wait(SETTINGS.slave_wait_ms)
    copies.a.host.settle()
    assert copies.a.master.has_begun
    copies.connect("bc")
    copies.cut()
    copies.connect("bc")
    assert copies.a.node.writable and copies.a.log.chain == copies.b.log.chain == copies.c.log.chain


def test_master_yields_held_frames_to_its_only_slave():
    only, several = Group.made().start().a, Copies().start().a
    for broker in (only, several):
        broker.master.slaves.holds(broker.log.end)
    assert only.master.slaves.may_yield(0) and not several.master.slaves.may_yield(0)


def test_restored_frames_are_held_from_the_hello():
    copies = Copies().start()
    copies.store("m1")
    end = copies.b.log.end
    copies.cut()
    copies.a = Broker("a", SETTINGS)
    copies.start(term=2, connected="")
    copies.wires["b"].connect()
    copies.b.host.settle()
    assert copies.wires["b"].deliver_hello() and copies.state("b") is FollowerState.RESTORING
    assert copies.a.master.slaves._held_end == end


def test_absent_slave_is_not_rolled_back():
    copies = Copies().start()
    copies.cut("c")
    copies.store("m1")
    copies.a.wait(200)  # the point is stored
    point = copies.a.node.identity.points.own
    copies.c.node.remembered_elsewhere([point], may_be_behind=True)
    assert copies.c.node.identity.points.lacks is None
    wire = copies.wires["c"]
    wire.connect()
    copies.c.host.settle()
    wire.deliver_hello()
    assert copies.c.node.identity.points.lacks is None


def test_retention_needs_the_clocks_of_all_slaves():
    copies = Copies().start()
    asked = []

    class Asked:
        def due(self, message_log, now_ms):
            asked.append(now_ms)

        def used_from(self, message_log):
            return 0

    node, watches = copies.a.node, copies.a.master.slaves.all
    node.record_metaserver_clock(copies.a.host.now_ms())
    for watch in watches:
        node.decide_retention(Asked())
        assert not asked
        name = copies.a.master.slaves.clock(watch)
        node.clocks.record(name, copies.a.host.now_ms(), monotonic_ms=copies.a.host.monotonic_ms())
    node.decide_retention(Asked())
    asked_once = len(asked)
    node.changes.prepare_swap(1, 1_000)
    node.decide_retention(Asked())
    assert len(asked) == asked_once == 1
    assert {METASERVER, f"{SLAVE} b:20881", f"{SLAVE} c:20881"} == set(node.clocks_ahead_ms())
