"""Core. Exclusive consumers: one at a time, and the next one when that is safe."""

from __future__ import annotations

from qmq.broker.group_status import Cause
from qmq.types import Role
from tests.unit.broker.world import Client, Group

KEY = ("s", "g")
LEASE_MS = 30_000


def joined(group: Group, name: str, began_ms: int, **terms) -> Client:
    return group.subscribed(name, exclusive_ms=began_ms, **terms)


def two(group: Group) -> tuple[Client, Client]:
    """Return the consumer that began first, and the next one."""
    return joined(group, "z", 1_000), joined(group, "a", 2_000)


def waiting_pull(client: Client) -> int:
    opaque = client.pull(timeout_ms=10_000_000)
    client.settle()
    return opaque


def test_next_exclusive_consumer_follows_when_the_first_leaves():
    group = Group.made().start()
    second, first = joined(group, "a", 2_000), joined(group, "z", 1_000)
    waiting = waiting_pull(second)
    group.client().store("m0")
    assert first.take() == ["m0"] and not second.answered(waiting)
    first.acked("m0")
    group.client().store("m1")
    assert not second.answered(waiting)
    first.lost()
    group.wait(200)
    assert second.ids(waiting) == ["m1"], "the first one has no unacked messages, so its lease need not end"


def test_next_exclusive_consumer_waits_for_the_lease_with_a_cause():
    group = Group.made().start()
    first, second = two(group)
    group.client().store("m0", "m1")
    assert first.take() == ["m0", "m1"]
    waiting = waiting_pull(second)
    group.client().produce("m2")
    first.lost()
    group.wait(LEASE_MS // 2)
    assert not second.answered(waiting) and Cause.EXCLUSIVE in group.a.master.causes.of(KEY)
    for _ in range(4):
        second.heartbeat()
        group.wait(LEASE_MS // 4)
    assert second.ids(waiting) == ["m0", "m1", "m2"] and Cause.EXCLUSIVE not in group.a.master.causes.of(KEY)


def test_offline_exclusive_consumer_passes_on_its_turn():
    group = Group.made().start()
    first, second = two(group)
    waiting = waiting_pull(second)
    waiting_pull(first)
    group.a.assign(Role.MASTER, offline=(("s", "g", "z"),))
    group.client().store("m0")
    assert second.ids(waiting) == ["m0"]


def test_vanished_exclusive_candidate_blocks_no_other():
    group = Group.made().start()
    first = joined(group, "z", 1_000)
    waiting_pull(first)
    group.a.node.tick()  # it is queued for the next pass
    first.lost()
    group.client().store("m0")
    assert joined(group, "a", 2_000).take() == ["m0"]


def test_only_waiting_exclusive_consumers_have_the_cause():
    group = Group.made().start()
    two(group)
    shared = [group.subscribed(name, group="shared") for name in "ab"]
    group.client().produce("m0", "m1", "m2")
    assert [consumer.take(most=1) for consumer in shared] == [["m0"], ["m1"]], "other groups share messages"
    for key in (KEY, ("s", "shared")):
        assert group.a.master.causes.of(key) and Cause.EXCLUSIVE not in group.a.master.causes.of(key)
