"""Core. Exclusive consumers: one at a time, and the next one when that is safe."""

from __future__ import annotations

import pytest

from qmq.broker.group_status import Cause
from qmq.types import Role
from tests.unit.broker.world import Client, Group

KEY = ("s", "g")
LEASE_MS = 30_000


def joined(world: Group, name: str, began_ms: int, **subscribe) -> Client:
    client = world.client(name)
    client.join(name, exclusive_ms=began_ms, **subscribe)
    return client


def asked(world: Group, client: Client) -> int:
    opaque = client.pull(timeout_ms=10_000_000)
    world.settle()
    return opaque


def ids(client: Client, opaque: int) -> list[str]:
    return client.ids(opaque) if client.answered(opaque) else []


def two(world: Group) -> tuple[Client, Client]:
    return joined(world, "z", 1_000), joined(world, "a", 2_000)


def test_the_one_that_began_first_gets_all_and_the_next_one_when_it_has_left():
    world = Group.made().start()
    second, first = joined(world, "a", 2_000), joined(world, "z", 1_000)
    waiting = asked(world, second)
    world.client().produce("m0")
    world.settle()
    got = asked(world, first)
    assert ids(first, got) == ["m0"] and not second.answered(waiting)
    number = first.pulled(got)[0][0]
    first.ack(number, number + 1)
    world.client().produce("m1")
    world.settle()
    assert not second.answered(waiting)
    first.lost()
    world.wait(200)
    assert ids(second, waiting) == ["m1"], "nothing that the first one had is un-acked: nobody waits for its lease"


def test_next_exclusive_consumer_waits_with_a_cause():
    world = Group.made().start()
    first, second = two(world)
    world.client().produce("m0", "m1")
    world.settle()
    assert ids(first, asked(world, first)) == ["m0", "m1"]
    waiting = asked(world, second)
    world.client().produce("m2")
    first.lost()
    world.wait(LEASE_MS // 2)
    assert not second.answered(waiting) and Cause.EXCLUSIVE in world.a.master.causes.of(KEY)
    for _ in range(4):
        second.heartbeat()
        world.wait(LEASE_MS // 4)
    assert ids(second, waiting) == ["m0", "m1", "m2"] and Cause.EXCLUSIVE not in world.a.master.causes.of(KEY)


def test_after_a_swap_one_exclusive_consumer_works():
    world = Group.made().start()
    first, _ = two(world)
    world.client().produce("m0")
    world.settle()
    assert ids(first, asked(world, first)) == ["m0"]
    world.swap(2)
    second = joined(world, "a", 2_000, held_end=0)
    world.client().produce("m1")
    waiting = asked(world, second)
    world.wait(1_000)
    assert not second.answered(waiting)


def test_offline_exclusive_consumer_passes_on_its_messages():
    world = Group.made().start()
    first, second = two(world)
    waiting = asked(world, second)
    asked(world, first)
    world.a.assign(Role.MASTER, offline=(("s", "g", "z"),))
    world.client().produce("m0")
    world.settle()
    assert ids(second, waiting) == ["m0"]


@pytest.mark.parametrize("began_ms", [(1, 1), (5, 5)])
def test_of_two_that_began_at_the_same_moment_one_has_its_turn(began_ms):
    world = Group.made().start()
    clients = [joined(world, name, at) for name, at in zip("ab", began_ms, strict=True)]
    waiting = [asked(world, client) for client in clients]
    world.client().produce("m0")
    world.settle()
    assert [ids(client, opaque) for client, opaque in zip(clients, waiting, strict=True)] == [["m0"], []]


def test_others_of_the_broker_share_as_ever():
    world = Group.made().start()
    two(world)
    other = joined(world, "c", 0, group="shared")
    world.client().produce("m0")
    assert ids(other, asked(world, other)) == ["m0"]


def test_vanished_exclusive_candidate_blocks_no_other():
    world = Group.made().start()
    first = joined(world, "z", 1_000)
    asked(world, first)
    world.a.node.tick()  # it is queued for the next pass
    first.lost()
    world.client().produce("m0")
    world.settle()
    second = joined(world, "a", 2_000)
    assert ids(second, asked(world, second)) == ["m0"]


def test_only_waiting_exclusive_consumers_have_the_cause():
    world = Group.made().start()
    two(world)
    shared = [joined(world, name, 0, group="shared") for name in "ab"]
    world.client().produce("m0", "m1", "m2")
    for one in shared:
        one.pull(most=1)
    world.settle()
    for key in (KEY, ("s", "shared")):
        assert world.a.master.causes.of(key) and Cause.EXCLUSIVE not in world.a.master.causes.of(key)
