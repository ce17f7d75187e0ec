"""Core. Replication of two brokers: matching, seeding, restoring, role changes."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from qmq.errors import CorruptFrame, Diverged, ErrorCode, OperatorError
from qmq.log.frame import NO_CHAIN, decode_frames
from qmq.log.repair import give_up, plan
from qmq.message_sizes import FRAME_BYTES_MAX
from qmq.remoting import commands
from qmq.remoting.commands import Command, Confirmation
from qmq.remoting.packet import Packet
from qmq.replication.agreement import Action, Agreement, Hello
from qmq.types import Epoch, Role
from tests.unit.broker.world import SETTINGS, Broker, Client, FakeLink, Group, a_group


def filled(frames: int = 80, **settings) -> Group:
    """Return a group with a log of several segments."""
    group, client = a_group(**settings)
    for i in range(frames):
        client.store(f"m{i}", size=200)
    assert len(group.a.log.bases) > 4
    return group


def replace_slave(group: Group, term: int = 1) -> None:
    """The slave's disk is lost; a new broker takes its place."""
    group.cut()
    group.b = Broker("new", group.a.settings)
    group.b.assign(Role.SLAVE, term)
    group.connect()


def replace_master(group: Group) -> None:
    """The master's disk is lost; a new broker takes its place in a new term."""
    group.cut()
    group.a = Broker("new master", group.a.settings)
    group.a.assign(Role.MASTER, 2)
    group.b.assign(Role.SLAVE, 2)
    group.connect()


def settle_slowly(group: Group) -> None:
    for _ in range(100):
        for broker in (group.a, group.b):
            broker.wait(100)
        group.settle()


def test_disk_of_the_other_broker_takes_no_part():
    group = filled()
    a, b = group.a, group.b
    group.cut()
    a.disk, b.disk = b.disk, a.disk
    for broker, role, owner in ((a, Role.MASTER, "b:"), (b, Role.SLAVE, "a:")):
        broker.crash()
        with pytest.raises(
            OperatorError, match=f"this data directory belongs to {owner}.* of g1; this process is {broker.name}:"
        ):
            broker.assign(role)
        assert not broker.node.start_without_metaserver() and broker.node.role is None
    a.disk, b.disk = b.disk, a.disk
    for broker in (a, b):
        broker.crash()
        assert broker.node.start_without_metaserver()


def test_moved_disk_takes_the_part_of_a_newer_row():
    group = filled()
    group.cut()
    moved = Broker("new-machine", group.b.settings)
    moved.disk = group.b.disk
    moved.crash()
    with pytest.raises(OperatorError, match="ReplaceBroker"):
        moved.assign(Role.SLAVE, 1)
    group.b = moved
    group.a.assign(Role.MASTER, 2)
    moved.assign(Role.SLAVE, 2)
    group.agree()
    assert group.a.node.writable and equal(group)
    moved.crash()
    assert moved.node.start_without_metaserver(), "it is this one's own by now"


def test_broker_of_three_copies_needs_the_metaserver():
    group = filled()
    a = group.a
    assert a.node.assignment is not None
    [slave] = a.node.assignment.slaves
    another = replace(slave, ip="10.0.0.3")
    a.node.assign(replace(a.node.assignment, term=2, slaves=(slave, another)))
    a.crash()
    assert not a.node.start_without_metaserver() and a.node.role is None
    a.assign(Role.MASTER, 3)
    a.crash()
    assert a.node.start_without_metaserver(), "of two copies again"


def equal(group: Group) -> bool:
    a, b = group.a.log, group.b.log
    return (a.end, a.chain, a.state) == (b.end, b.chain, b.state)


def repair(damaged: Broker, whole: Broker) -> None:
    """Run the step of qmq.server.repair."""
    wanted = damaged.node.repairs.plan(whole.log.start, whole.log.flushed_end)
    if wanted is not None:
        damaged.node.repairs.apply(wanted[0], whole.log.stored.read_bytes(*wanted))


def test_slave_seeded_behind_a_damaged_snapshot_is_repaired():
    """The slave counted as whole without the master's oldest segment; no other copy had its messages then."""
    group = filled(tail_bytes=0)
    group.a.drop_oldest_segment()
    first, second = group.a.log.bases[:2]
    group.a.disk.flip(f"log/{first:020d}.snap", 100)
    replace_slave(group)
    settle_slowly(group)
    assert group.a.node.writable and equal(group)
    assert group.b.node.readonly_reasons == ["corrupt"] and group.b.log.damage[:2] == (first, second)
    group.b.crash()
    assert group.b.log.damage[:2] == (first, second), "after a restart as well"
    repair(group.b, group.a)
    assert group.b.node.readonly_reasons == [] and group.b.log.bases == group.a.log.bases
    assert group.b.log.frames("s", 0, 1) == group.a.log.frames("s", 0, 1) != []


def test_given_up_damage_lets_a_new_slave_be_seeded():
    """The slave's disk was lost, and its replacement cannot be seeded: rebuilds end this way."""
    group = filled(tail_bytes=0)
    base, behind = group.a.log.bases[1:3]
    group.a.flip(base + 150)
    replace_slave(group)
    settle_slowly(group)
    assert group.a.node.readonly_reasons == ["corrupt", "slave_down"] and group.b.log.end < behind
    repair(group.a, group.b)
    assert group.a.log.damage is not None, "nobody else has it"
    group.a.node.role.step_down()  # the master is stopped
    give_up(group.a.log, plan(group.a.log))
    group.a.crash()
    group.a.assign(Role.MASTER, 1)
    group.b.crash()
    group.b.assign(Role.SLAVE, 1)
    group.connect()
    settle_slowly(group)
    assert group.a.node.writable and equal(group) and group.b.log.start == behind


def test_master_restored_behind_a_damaged_snapshot_is_readonly():
    group = filled(tail_bytes=0)
    group.b.drop_oldest_segment()
    first, second = group.b.log.bases[:2]
    group.b.disk.flip(f"log/{first:020d}.snap", 100)
    replace_master(group)
    settle_slowly(group)
    assert group.a.master.has_begun and equal(group)
    assert group.a.node.readonly_reasons == ["corrupt"] and group.a.log.damage[:2] == (first, second)
    client = group.client()
    assert client.code(client.produce("one more")) == ErrorCode.READ_ONLY
    repair(group.a, group.b)
    assert group.a.node.writable and group.a.log.bases == group.b.log.bases


def test_snapshot_damaged_on_its_way_is_not_stored():
    group = filled(tail_bytes=0)
    group.cut()
    client = group.client()
    client.subscribe()
    group.a.host.settle()
    group.a.drop_segments(left=1)
    old = Broker("old", group.a.settings)
    old.assign(Role.SLAVE)
    group.b = old
    group.connect()
    group.deliver_hello()
    command, body = group.at_master.pushed[0]
    group.at_master.pushed[0] = (command, body[:-1] + bytes([body[-1] ^ 1]))
    group.to_slave()
    assert not group.at_slave.is_open
    assert old.disk.names("quarantine") == [] and old.log.end == 0


def test_empty_master_restores_a_bare_snapshot():
    group = filled(tail_bytes=0)
    base = group.b.log.bases[-1]
    snapshot = group.b.disk.read(f"log/{base:020d}.snap", 0, 1 << 20)
    group.cut()
    group.b.log.cut(base, "test")
    group.b.log.seed(base, snapshot, "test")
    replace_master(group)
    group.settle()
    assert group.a.node.writable and equal(group) and group.a.log.start == base


def a_master_restoring_in_pieces() -> Group:
    """Return a group with a new master that has restored only the first segments from its slave."""
    group = filled(tail_bytes=0, catch_up_bytes_per_s=20_000)
    replace_master(group)
    while group.a.log.end < group.b.log.bases[2]:
        group.b.wait(100)
        group.settle()
    assert group.a.log.end < group.b.log.end
    return group


def test_retention_keeps_frames_that_the_master_restores():
    group = a_master_restoring_in_pieces()
    while not group.b.node.is_pinned(()):
        group.b.drop_oldest_segment()
    assert 0 < group.b.log.start <= group.a.log.end
    settle_slowly(group)
    assert group.a.node.writable and group.a.log.end == group.b.log.end


def test_master_restores_the_rest_after_retention():
    group = a_master_restoring_in_pieces()
    group.cut()
    taken_end = group.a.log.end
    while group.b.log.start <= taken_end:
        group.b.drop_oldest_segment()
    group.connect()
    settle_slowly(group)
    assert group.a.node.writable and equal(group)
    assert group.a.log.start == group.b.log.start > taken_end


@pytest.mark.parametrize("role", [Role.MASTER, Role.SLAVE])
def test_refilled_copy_is_master_only_when_complete(role):
    group = filled(tail_bytes=0, catch_up_bytes_per_s=20_000)
    group.cut()
    copy = group.a if role == Role.MASTER else group.b
    copy.log.set_aside("test")
    copy.crash()
    group.start(2)
    while not copy.log.end:
        group.a.wait(100)
        group.b.wait(100)
        group.settle()
    assert copy.log.end < 20_000
    group.cut()
    copy.crash()
    if role == Role.SLAVE:
        group.a, group.b = group.b, group.a
    copy.assign(Role.MASTER, 3)
    copy.wait(2 * copy.settings.slave_wait_ms)
    assert not copy.master.has_begun
    group.b.assign(Role.SLAVE, 3)
    group.connect()
    settle_slowly(group)
    assert group.a.node.writable and equal(group) and not copy.log.is_tail_cut


def test_second_hello_resets_the_slave():
    group, client = a_group()
    stored = client.produce("m")
    group.a.host.settle()
    group.to_slave()
    group.b.host.settle()
    group.at_slave.pushed.clear()
    group.b.slave.connected(group.at_slave)
    group.deliver_hello()
    assert group.a.master.gate.too_few_in_sync and not client.answered(stored)
    group.settle()
    assert client.receipt(stored).stored == 1 and equal(group)


@pytest.mark.parametrize("size", [0, 10])
def test_equal_epochs_with_other_bytes_diverge_uncut(size):
    """W3: found at the handshake, wherever the other copy's frames end."""
    group, other = Group.made(tail_bytes=0).start(), Group.made().start()
    for world, count, bytes_each in ((group, 10, 200), (other, 2, size)):
        for i in range(count):
            world.client().produce(f"m{i}", size=bytes_each)
            world.settle()
    group.cut()
    group.b, end, theirs = other.b, group.a.log.end, other.b.log.end
    group.agree()
    for broker in (group.a, group.b):
        assert "diverged" in broker.node.readonly_reasons and "corrupt" not in broker.node.readonly_reasons
    assert (group.a.log.end, group.b.log.end, group.a.log.damage) == (end, theirs, None)
    assert not group.a.node.writable


def test_master_from_a_backup_is_refilled():
    group = filled(tail_bytes=0)
    group.cut()
    group.a.log.cut(group.a.log.bases[2], "what came after the backup")
    group.a.crash()
    group.a.assign(Role.MASTER, 2)
    group.a.wait(group.a.settings.slave_wait_ms)
    while group.b.log.start <= group.a.log.end:
        group.b.drop_oldest_segment()
    group.b.assign(Role.SLAVE, 2)
    group.agree()
    group.connect()
    settle_slowly(group)
    assert group.a.node.writable and equal(group) and group.b.disk.names("quarantine") == []


def test_kept_copy_of_a_divergence_gets_a_new_slave():
    group, stranger = filled(), Group.made().start()
    group.cut()
    group.a = stranger.a
    group.agree()
    assert "diverged" in group.b.node.readonly_reasons
    group.b.assign(Role.MASTER, 2)
    group.b.wait(group.b.settings.slave_wait_ms)
    group.a, group.b = group.b, Broker("in place of the other", group.a.settings)
    group.b.assign(Role.SLAVE, 2)
    group.connect()
    settle_slowly(group)
    assert group.a.node.writable and equal(group)


def confirm(group: Group, link: FakeLink, confirmation: Confirmation) -> None:
    body = memoryview(commands.encode_confirmation(confirmation))
    group.a.node.packet_received(link, Packet(Command.CONFIRM, 0, 2, Command.CONFIRM, body))


def test_confirmation_needs_the_epoch_and_link():
    """W3, W15"""
    for epoch, through in ((Epoch(1, 0), "slave"), (Epoch(0, 9), "slave"), (Epoch(1, 1), "anybody")):
        group, client = a_group()
        stored = client.produce("m")
        group.a.host.settle()
        link = group.at_master if through == "slave" else FakeLink("another")
        confirm(group, link, Confirmation(epoch, group.a.log.end, group.a.log.chain))
        assert not client.answered(stored) and not link.is_open
        assert group.a.master.gate.high_watermark < group.a.log.end


def test_slave_counts_only_from_the_acknowledged_point():
    """W14: a slave that restarts in the middle of its first copy does not count either."""
    group = filled(tail_bytes=0)
    replace_slave(group)
    group.deliver_hello()
    client = group.client()
    client.subscribe()
    high = group.a.master.gate.high_watermark
    for restarts in range(2):
        for _ in range(200):
            group.a.host.settle()
            group.to_slave()
            group.b.host.settle()
            group.to_master()
            if high // 4 < group.b.log.end < high // 2:
                break
            assert group.a.master.gate.too_few_in_sync or group.b.log.flushed_end >= high
        assert group.a.master.gate.too_few_in_sync and not group.a.node.writable
        assert client.code(client.produce("n")) == ErrorCode.READ_ONLY
        if not restarts:
            group.cut()
            group.b.crash()
            group.b.assign(Role.SLAVE, 1)
            group.connect()
            group.deliver_hello()
            assert not group.b.node.identity.value.complete
    settle_slowly(group)
    assert group.a.node.writable and equal(group)


@pytest.mark.parametrize(
    "changed",
    [{"assigned_term": 0}, {"assigned_term": 2}, {"group": "g2"}, {"incarnation": "a-1"}],
    ids=["older row", "newer row", "another group", "the master itself"],
)
def test_foreign_hello_is_refused(changed):
    """Another broker may be the slave by now: no acknowledgement may rest on this copy."""
    group, _ = a_group()
    assert group.a.node.identity.value.incarnation == "a-1"
    group.cut()
    group.connect()
    hello = replace(Hello.decode(memoryview(group.b.host.hellos.pop())), **changed)
    packet = Packet(Command.HELLO, 1, 0, Command.HELLO, memoryview(hello.encode()))
    group.a.node.packet_received(group.at_master, packet)
    assert group.at_master.answers[1][0] == ErrorCode.INVALID_REQUEST
    assert group.a.master.slaves.of(group.at_master) is None and group.a.master.gate.too_few_in_sync


def test_slave_never_cuts_acknowledged_frames():
    """W3: the master's disk was restored; the master yields, and gets all frames from the slave."""
    group, client = a_group()
    client.store("first")
    older = group.a.disk.copy()
    for i in range(5):
        client.store(f"acknowledged {i}")
    group.cut()
    end = group.b.log.end
    group.a.disk.put_back(older)
    group.a.start()
    group.a.alone()
    group.agree()
    group.agree()
    assert group.b.log.end > end and group.b.disk.names("quarantine") == []
    assert group.a.node.writable and equal(group)
    assert group.a.disk.names("quarantine"), "what the rolled-back master wrote alone"


def swapped_with_a_tail(group: Group) -> Group:
    """Let an old master with a message of its own connect as the slave; its former slave began without it."""
    group.client().produce("never acknowledged")
    group.a.host.settle()
    group.cut()
    group.b.alone(2)
    group.a, group.b = group.b, group.a
    group.b.assign(Role.SLAVE, 2)
    group.connect()
    return group


def test_unacknowledged_tail_of_an_old_master_is_quarantined():
    group, client = a_group()
    client.store("kept")
    swapped_with_a_tail(group)
    group.settle()
    assert equal(group) and group.a.node.writable
    (_, report) = sorted(group.b.disk.names("quarantine"))
    quarantined = json.loads(group.b.disk.read(f"quarantine/{report}", 0, 1 << 20))
    assert quarantined["message_ids"] == ["never acknowledged"]


def test_restarted_master_waits_for_its_slave():
    group, _ = a_group()
    group.cut()
    group.a.crash()
    group.a.assign(Role.MASTER, 1)
    group.a.wait(4_999)
    assert not group.a.master.has_begun
    group.a.wait(1)
    assert group.a.master.has_begun and not group.a.node.writable
    fresh = Broker("fresh")
    fresh.assign(Role.MASTER, 1)
    fresh.wait(1_000_000)
    assert not fresh.master.has_begun, "a copy that never was complete waits for ever (I16)"


def test_newer_epoch_fences_the_master():
    group, client = a_group()
    client.subscribe()
    client.store("m")
    hello = Hello("g1", "x", Epoch(2, 0), [], 0, 0, 0)
    refused = client.send(Command.HELLO, hello.encode())
    assert client.code(refused) == ErrorCode.FENCED and not group.a.node.writable
    assert client.code(client.produce("n")) == ErrorCode.NOT_MASTER
    assert client.code(client.pull()) == ErrorCode.NOT_MASTER
    assert client.code(client.ack(0, 1)) == ErrorCode.NOT_MASTER


def test_master_begins_above_a_forgotten_boot():
    """The master's disk was restored; the slave has the later boot of the same term."""
    group, _ = a_group()
    group.b.node.identity.learn(Epoch(1, 7))
    group.cut()
    group.agree()
    assert group.a.master.epoch == Epoch(1, 8) and "fenced" not in group.a.node.readonly_reasons
    group.agree()
    assert group.a.node.writable and equal(group)


def test_part_is_resumed_once_without_the_metaserver():
    assert not Broker("new").node.start_without_metaserver()
    group, _ = a_group()
    master = group.a.master
    assert not group.a.node.start_without_metaserver() and group.a.master is master


def test_repair_searches_back_for_a_common_frame():
    group = filled(tail_bytes=0)
    group.cut()
    group.a.flip(group.a.log.bases[-1] + 12)
    group.a.crash()
    node, end = group.a.node, group.b.log.end
    damage = node.log.damage
    assert damage is not None and node.repairs.plan(0, end) == (damage.begin, damage.end)
    with pytest.raises((CorruptFrame, Diverged)):
        node.repairs.apply(damage.begin + 8, b"of another length")
    assert node.repairs.plan(0, end) == (max(damage.begin - FRAME_BYTES_MAX, 0), damage.begin + 1)


def test_slave_redirects_clients_to_the_master():
    group, _ = a_group()
    client = Client(group.b)
    assert client.code(client.produce("m")) == ErrorCode.NOT_MASTER
    assert client.code(client.subscribe()) == ErrorCode.NOT_MASTER


def test_older_or_contradicting_rows_change_nothing():
    group, _ = a_group()
    role = group.a.node.role
    group.a.assign(Role.SLAVE, 0)
    assert group.a.node.role is role
    with pytest.raises(OperatorError):
        group.a.assign(Role.SLAVE, 1)
    assert group.a.node.role is role and group.a.node.writable


def test_older_row_stays_ignored_after_a_restart():
    """The disk keeps the newest row, although its master sent no packet."""
    group, _ = a_group()
    group.b.assign(Role.SLAVE, 3)
    group.b.crash()
    group.b.assign(Role.MASTER, 2)
    assert group.b.node.role is None
    assert group.b.node.identity.value.known_term == 3, "its heartbeats carry this one"


def test_reassigned_term_has_no_second_master():
    """A database that lost its last change of roles assigns that change's term again."""
    group, _ = a_group()
    group.b.crash()
    with pytest.raises(OperatorError, match="swap=true"):
        group.b.assign(Role.MASTER, 1)
    assert group.b.node.start_without_metaserver() and group.b.node.master is None
    group.b.assign(Role.MASTER, 2)
    assert group.b.node.master is not None


def test_link_survives_a_change_of_other_ports():
    """The master may register after its slave; the slave's lost link then made the group readonly."""
    group = filled()
    node, host = group.b.node, group.b.host
    for change, changes in (({"control_port": 7}, 0), ({"sync_port": 8}, 1), ({"ip": "10.0.0.9"}, 1)):
        before = host.role_changes
        node.assign(replace(node.assignment, master=replace(node.assignment.master, **change)))
        assert host.role_changes - before == changes, change


def test_draining_master_accepts_nothing_until_it_ends():
    group, client = a_group()
    client.join()
    stored = client.produce("under way")
    group.a.node.changes.prepare_swap(1, hold_ms=1_000)
    assert not group.a.master.is_drained_to("")
    assert client.code(client.produce("m")) == ErrorCode.READ_ONLY
    assert client.code(client.pull()) == client.code(client.ack(0, 1)) == ErrorCode.NOT_SERVED
    group.settle()
    assert client.receipt(stored).stored == 1 and group.a.master.is_drained_to("")
    assert (group.a.log.end, group.a.log.chain) == (group.b.log.end, group.b.log.chain)
    group.a.wait(1_001)
    assert group.a.node.writable
    group.cut()
    with pytest.raises(OperatorError):
        group.a.node.changes.prepare_swap(1, hold_ms=1_000)
    with pytest.raises(OperatorError):
        group.b.node.changes.prepare_swap(1, hold_ms=1_000)


def test_master_is_drained_after_its_own_fsync():
    group, client = a_group()
    client.produce("m")
    group.a.host.turn()
    while group.to_slave():
        group.b.host.settle()
    while group.to_master():
        pass
    assert group.a.master.slaves.confirmed_end == group.a.log.end and not group.a.master.is_drained_to("")
    group.settle()
    assert group.a.master.is_drained_to("")


def test_waiting_pull_survives_a_cancelled_swap():
    group, client = a_group()
    client.join()
    pull = client.pull(timeout_ms=60_000)
    client.produce("m")
    group.a.node.changes.prepare_swap(1, hold_ms=1_000)
    group.settle()
    assert not client.answered(pull)
    group.a.node.changes.cancel_swap()
    group.settle()
    assert client.ids(pull) == ["m"]


def test_boot_is_above_all_boots_in_the_log():
    group, _ = a_group()
    group.cut()
    group.a.disk.remove("broker.json")
    group.a.start()
    group.a.assign(Role.MASTER, 1)
    assert group.a.master.epoch == Epoch(1, 2)


def test_slave_refuses_answers_of_an_older_master():
    """W16: a late answer of an ended mastership cuts and confirms nothing."""
    group = filled()
    group.b.node.identity.learn(Epoch(2, 1))
    group.connect()
    end = group.b.log.end
    late = Agreement(Epoch(1, 1), Action.FOLLOW, 0, 0, 0)
    group.b.node.agreed(group.at_slave, memoryview(late.encode()))
    assert not group.at_slave.is_open and not group.at_slave.pushed
    assert group.b.log.end == end and group.b.node.identity.value.epoch == Epoch(2, 1)


def test_reused_epoch_of_a_restored_disk_is_detected():
    """The broker's boot counter was restored with the log: the same epoch begins at the same offset twice."""
    group, client = a_group()
    client.store("first")
    group.cut()
    older = group.a.disk.copy()
    group.a.crash()
    group.b.crash()
    group.start()
    client = group.client()
    for i in range(5):
        client.store(f"acknowledged {i}")
    group.cut()
    end, epoch = group.b.log.end, group.a.master.epoch
    group.a.disk.put_back(older)
    group.a.start()
    group.a.alone()
    assert group.a.master.epoch == epoch and group.a.master.has_begun
    for _ in range(3):
        group.agree()
    assert group.a.node.writable and equal(group) and group.a.master.epoch > epoch
    assert group.b.log.end > end and group.b.disk.names("quarantine") == []
    assert group.a.log.state.next_sequence == {"s": 6}


def restored_group(*, nacked: bool):
    """Return a group with a restored master; its disk lacks the pull of a consumer that vanished since."""
    group, client = a_group()
    client.store("m")
    older = group.a.disk.copy()
    client.join("gone")
    pulled = client.pull()
    group.settle()
    (begin, _, _), *_ = client.pulled(pulled)
    if nacked:
        client.done(client.nack(begin, begin + 1, delay_ms=SETTINGS.lease_ms))
    group.cut()
    group.a.disk.put_back(older)
    group.a.start()
    group.a.assign(Role.MASTER, 1)
    group.agree()
    assert group.a.node.writable and equal(group)
    return group


def test_restored_master_states_no_lower_high_watermark():
    """I6: the new master's disk lacked frames that both copies had; the slave had them."""
    group = restored_group(nacked=False)
    data = group.a.log.stored.read(0, group.a.log.end, 1 << 30).data
    stated = [frame.high_watermark for frame, _ in decode_frames(data, 0, NO_CHAIN)]
    assert stated == sorted(stated)


@pytest.mark.parametrize("nacked", [False, True], ids=["un-acked", "nacked"])
def test_restored_master_redelivers_from_the_slave_log(nacked):
    """Only the slave's log had the consumers and retries when the mastership began."""
    group = restored_group(nacked=nacked)
    client = group.client("other")
    client.join("c2")
    pulled = client.pull(timeout_ms=10 * SETTINGS.lease_ms)
    for _ in range(30):
        group.a.wait(SETTINGS.lease_ms // 10)
        client.done(client.heartbeat())
    assert client.ids(pulled) == ["m"]


def test_acknowledged_frames_survive_a_replaced_copy():
    group, client = a_group()
    client.store("m0")
    client.produce("m1")
    client.produce("m2")  # in the same commit: the frame does not state yet that m1 is safe
    group.settle()
    client.store("m3")
    offset, end = group.a.log.frames("s", 1, 1)[0].offset, group.a.log.end
    group.a.flip(offset + 100)
    group.cut()
    group.a.crash()
    group.a.assign(Role.MASTER)
    damage = group.a.log.damage
    assert damage is not None and damage.begin == offset
    group.a.node.repairs.plan(0, 0)
    assert group.a.log.damage == damage and group.a.disk.names("quarantine") == []
    group.a.node.repairs.apply(offset, group.b.log.stored.read(offset, end, end).data)
    assert group.a.log.damage is None and group.a.log.end == end
