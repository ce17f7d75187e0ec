"""Core. A slave does what its master and it agreed on, and what it refuses changes nothing."""

from __future__ import annotations

import pytest

from qmq.errors import CorruptFrame, ErrorCode
from qmq.remoting import commands
from qmq.remoting.commands import Command, Confirmation
from qmq.remoting.packet import Packet
from qmq.replication.agreement import Action, Agreement
from qmq.replication.points import Point
from qmq.replication.ports import QUIET_MS
from qmq.replication.slave_life import SlaveState
from qmq.types import Epoch, Role
from tests.unit.broker.test_replication import a_master_that_takes_back_piece_by_piece
from tests.unit.broker.world import SETTINGS, Broker, Client, FakeLink, Group


def stored() -> Group:
    group = Group.made().start()
    Client(group.a).produce("m")
    group.settle()
    return group


def sent(broker: Broker, link: FakeLink, command: Command, body: bytes) -> int:
    """A packet arrives; return the code of the answer, 0 without one."""
    broker.node.packet_received(link, Packet(command, 1, 0, command, memoryview(body)))
    code, _ = link.answers.pop(1, (0, b""))
    return code


@pytest.mark.parametrize("is_following", [True, False])
def test_a_slave_takes_what_belongs_to_its_state_and_refuses_the_rest(is_following):
    group = stored()
    end, chain, epoch = group.b.log.end, group.b.log.chain, group.a.master.epoch
    if not is_following:
        group.connect()
    confirmation = commands.encode_confirmation(Confirmation(epoch, end, chain))
    base, _, snapshot = group.a.log.seed_start()
    packets = {
        Command.FRAMES: bytes(commands.offset_header(end)),
        Command.ACKNOWLEDGED: confirmation,
        Command.CONFIRM: confirmation,
        Command.SNAPSHOT: bytes(commands.offset_header(base)) + bytes(snapshot),
        Command.HELLO: b"",
    }
    refused = {command for command, body in packets.items() if sent(group.b, group.at_slave, command, body)}
    assert refused == set(packets) - ({Command.FRAMES, Command.ACKNOWLEDGED} if is_following else set())
    assert sent(group.b, group.at_slave, Command.HELLO, b"") == ErrorCode.INVALID_REQUEST
    assert (group.b.log.end, group.b.log.chain) == (end, chain) and not group.b.disk.names("quarantine")


@pytest.mark.parametrize(
    ("boot", "more", "is_noted"),
    [
        pytest.param(1, 0, True, id="all that it has"),
        pytest.param(1, -8, True, id="less"),
        pytest.param(1, 8, False, id="more than is on its disk"),
        pytest.param(0, 0, False, id="of another epoch"),
    ],
)
def test_a_slave_remembers_what_its_master_says_of_frames_that_are_on_its_disk(boot, more, is_noted):
    group = stored()
    points, told = group.b.node.identity.points, Confirmation(Epoch(1, boot), group.b.log.flushed_end + more, 7)
    points.own = None
    sent(group.b, group.at_slave, Command.ACKNOWLEDGED, commands.encode_confirmation(told))
    assert points.own == (Point(told.epoch, told.matched_end, 7) if is_noted else None)


def test_a_slave_that_cannot_follow_gives_up_no_more_and_no_less_than_before():
    """It was a master that wrote alone: what it wrote then it confirmed to nobody, and never followed since."""
    group = stored()
    group.cut()
    broker, link = group.b, FakeLink("master")
    broker.assign(Role.MASTER, 2)
    broker.wait(SETTINGS.slave_wait_ms)
    broker.host.settle()
    end, points = broker.log.end, broker.node.identity.points
    kept = points.keeps(broker.log)
    assert kept < end
    broker.assign(Role.SLAVE, 3)
    broker.slave.connected(link)
    wrong = Agreement(Epoch(3, 1), Action.FOLLOW, end, broker.log.chain ^ 1, end)
    broker.node.agreed(link, memoryview(wrong.encode()))
    assert not link.is_open and "diverged" in broker.node.readonly_reasons
    assert points.keeps(broker.log) == kept and broker.log.end == end and not link.told


def test_a_slave_that_refuses_to_be_seeded_is_as_whole_as_it_was():
    group = stored()
    group.connect()
    end = group.b.log.end
    seed = Agreement(group.a.master.epoch, Action.SEED, end - 8, 0, end)
    group.b.node.agreed(group.at_slave, memoryview(seed.encode()))
    assert not group.at_slave.is_open
    assert group.b.slave.has_matched and group.b.node.identity.value.complete


def test_a_slave_looks_at_deadlines_only_while_it_restores_its_master():
    group = a_master_that_takes_back_piece_by_piece()
    assert group.b.slave.quiet_ms() == 0
    for _ in range(30):
        group.b.wait(100)
        group.settle()
    assert group.b.slave.is_following and group.b.slave.quiet_ms() == QUIET_MS


@pytest.mark.parametrize("is_master", [True, False])
def test_what_a_reader_met_before_a_repair_is_no_damage_now(is_master):
    group = stored()
    broker = group.a if is_master else group.b
    broker.node.found_damage(CorruptFrame(broker.log.start, "read while it was repaired"))
    assert broker.log.damage is None and broker.node.readonly_reasons == []


def test_who_leaves_its_master_confirms_nothing_more_on_that_link():
    group = stored()
    link = group.at_slave
    Client(group.a).produce("m2")
    group.a.host.settle()
    group.to_slave()
    group.b.slave.step_down()
    group.b.host.settle()
    assert not link.is_open and not link.told
    assert group.b.slave.life.state is SlaveState.DISCONNECTED
    group.b.slave.step_down()
