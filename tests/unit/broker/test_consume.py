"""Core. What a master hands out, to whom, and what becomes of it (design, section 3)."""

from __future__ import annotations

from qmq.errors import ErrorCode
from qmq.remoting import commands
from qmq.remoting.commands import Command
from tests.unit.broker.world import Client, Group


def ids(client: Client, pull: int) -> list[str]:
    return [id for _, _, id in client.pulled(pull)]


def a_group(**settings) -> tuple[Group, Client]:
    group = Group.made(**settings).start()
    return group, Client(group.a)


def test_message_larger_than_a_pull_comes_alone_and_the_next_ones_follow_in_order():
    group, client = a_group()
    client.produce("big", size=900)
    client.produce("small 1")
    client.produce("small 2")
    client.subscribe()
    group.settle()
    first = client.pull(bytes_max=100)
    second = client.pull(bytes_max=0)
    third = client.pull(bytes_max=1 << 20)
    group.settle()
    assert [ids(client, pull) for pull in (first, second, third)] == [["big"], ["small 1"], ["small 2"]]
    sequences = [entry[0] for pull in (first, second, third) for entry in client.pulled(pull)]
    assert sequences == list(range(sequences[0], sequences[0] + 3))


def test_pull_of_old_and_brand_new_messages_reads_only_the_old_ones_from_disk():
    group, client = a_group(tail_bytes=0)
    client.produce("old")
    group.settle()
    client.produce("of another subject", subject="other")
    client.subscribe()
    group.settle()
    client.produce("new, not written yet")
    pull = client.pull()
    group.a.host.do_read()
    group.settle()
    assert ids(client, pull) == ["old", "new, not written yet"]
    assert group.a.node.writable


def test_pull_that_waits_is_answered_when_its_subscription_ends():
    group, client = a_group()
    client.subscribe()
    group.settle()
    pull = client.pull(timeout_ms=10_000)
    client.send(Command.UNSUBSCRIBE, commands.encode_json(subscription=1))
    assert client.code(pull) == ErrorCode.NO_MESSAGE


def test_pull_that_waits_learns_that_another_connection_took_its_consumer_id():
    group, client = a_group()
    client.subscribe()
    group.settle()
    waiting = client.pull(timeout_ms=10_000)
    Client(group.a, "another").subscribe()
    later = client.pull()
    assert client.code(waiting) == client.code(later) == ErrorCode.SUBSCRIPTION_REPLACED
