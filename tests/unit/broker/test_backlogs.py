"""Core. How old the oldest message is that a group has not acked: as it changes, from disk as well, and at a bound."""

from __future__ import annotations

from qmq.broker import backlogs
from qmq.errors import CorruptFrame
from qmq.log.segments import log_name
from tests.unit.broker.world import Client, Group

KEY = ("s", "g")


def a_group(**settings) -> tuple[Group, Client]:
    group = Group.made(**settings).start()
    client = Client(group.a)
    client.subscribe()
    group.settle()
    return group, client


def looked(group: Group, ms: int = 100) -> dict[tuple[str, str], int]:
    """Return the ages after a tick."""
    group.a.wait(ms)
    group.settle()
    group.a.wait(0)
    group.a.node.tick()
    group.settle()
    return group.a.master.backlogs.ages_ms(group.a.host.now_ms())


def test_age_is_that_of_the_oldest_message_wherever_it_is():
    group, client = a_group()
    assert looked(group) == {}
    client.produce("m0")
    group.settle()
    assert looked(group, 4_000) == {KEY: 4_000}, "not delivered"
    client.produce("m1")
    first = client.pull(most=1)
    group.settle()
    assert looked(group, 1_000) == {KEY: 5_000}, "delivered"
    pull_sequence = client.pulled(first)[0][0]
    client.nack(pull_sequence, pull_sequence + 1, delay_ms=60_000)
    group.settle()
    assert looked(group, 1_000) == {KEY: 6_000}, "requeued"


def test_age_is_the_next_messages_once_the_oldest_is_acked_and_none_after_the_last():
    group, client = a_group()
    client.produce("m0")
    group.settle()
    looked(group, 3_000)
    client.produce("m1")
    first = client.pull(most=2)
    group.settle()
    (pull_sequence, *_), *_ = client.pulled(first)
    client.ack(pull_sequence, pull_sequence + 1)
    group.settle()
    assert looked(group, 500) == {KEY: 500}
    client.ack(pull_sequence + 1, pull_sequence + 2)
    group.settle()
    assert looked(group) == {}


def test_time_of_a_message_that_is_on_disk_alone_is_read_there():
    group, client = a_group(tail_bytes=0)
    client.produce("m0")
    group.settle()
    assert looked(group, 2_000) == {KEY: 2_000}
    clock_ms = group.a.host.clock_ms
    group.a.crash()
    group.a.host.clock_ms = clock_ms
    group.start()
    assert looked(group)[KEY] > 2_000


def test_few_are_read_at_once_and_all_in_the_end(monkeypatch):
    monkeypatch.setattr(backlogs, "READ_AT_ONCE", 2)
    group, client = a_group()
    for number in range(5):
        name = f"s{number}"
        client.produce("m", subject=name)
        client.subscribe(subject=name, start="earliest")
    group.settle()
    group.a.node.tick()
    assert len(group.a.host.reads) == 1
    found = [len(looked(group)) for _ in range(3)]
    assert found == [4, 5, 5]


def test_the_oldest_are_shown(monkeypatch):
    monkeypatch.setattr(backlogs, "AGES_MAX", 2)
    group, client = a_group(metrics_subjects=("s4",))
    for number in range(5):
        name = f"s{number}"
        client.produce("m", subject=name)
        client.subscribe(subject=name, start="earliest")
        group.settle()
        group.a.wait(1_000)
    assert {subject for subject, _ in looked(group)} == {"s0", "s1", "s4"}


def test_damage_that_is_met_while_backlogs_are_looked_at_is_told_of(monkeypatch):
    group, client = a_group(tail_bytes=0)
    client.produce("m0")
    group.settle()
    (ref,) = group.a.log.frames("s", 0, 1)
    group.a.disk.flip(log_name(0), 8 * ref.offset)

    def fails(*_):
        raise CorruptFrame(ref.offset, "an index had to be made again")

    monkeypatch.setattr(backlogs.Backlogs, "look", fails)
    group.a.wait(100)
    assert group.a.log.damage is not None and not group.a.node.writable
