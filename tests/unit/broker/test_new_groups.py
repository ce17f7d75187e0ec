"""Core. Rations of new consumer groups per token: each group stays in the log and in memory."""

from __future__ import annotations

import pytest

from qmq.errors import ErrorCode
from qmq.rations import NewSubjects, TokenRation
from qmq.rights import Caller, TokenRole
from qmq.subjects import retry_subject
from qmq.types import Role
from tests.unit.broker.world import Broker, Client, Group


def rationed(groups: NewSubjects, role: TokenRole = TokenRole.CLIENT) -> TokenRation:
    return TokenRation(Caller("shop", role), groups, None, lambda: 0)


def a_client(broker: Broker, ration: TokenRation) -> Client:
    client = Client(broker)
    client.link.ration = ration
    return client


def codes(world: Group, client: Client, *names: str, group: str = "g", **terms) -> list[ErrorCode]:
    asked = [client.subscribe("c", subject=name, group=group, **terms) for name in names]
    world.settle()
    return [client.code(one) for one in asked]


OK, NO = ErrorCode.SUCCESS, ErrorCode.OVERLOADED


@pytest.mark.parametrize(
    ("per_minute", "in_all", "setting"), [(2, 100, "new_subjects_per_minute"), (100, 2, "new_subjects_max")]
)
def test_new_groups_of_a_token_are_rationed(per_minute, in_all, setting):
    """500 subscriptions to subjects without a message left 500 groups in memory and in the log."""
    world = Group.made().start()
    client = a_client(world.a, rationed(NewSubjects(per_minute, in_all, "consumer groups")))
    assert codes(world, client, "never0", "never1") == [OK, OK]
    end = world.a.log.end
    asked = client.subscribe("c", subject="never2")
    world.settle()
    text = client.text(asked)
    assert client.code(asked) == NO and f"({setting})" in text and "token 'shop' made" in text
    assert "consumer groups" in text
    assert world.a.log.end == end and set(world.a.log.state.groups) == {("never0", "g"), ("never1", "g")}
    assert not world.a.master.causes.of(("never2", "g")) and len(world.a.master.subscriptions) == 2


def test_returning_consumer_needs_no_ration():
    world = Group.made().start()
    ration = rationed(NewSubjects(1, 1, "consumer groups"))
    client = a_client(world.a, ration)
    assert codes(world, client, "a") == [OK]
    for _ in range(10):
        assert codes(world, client, "a") == [OK], "the same connection"
        assert codes(world, a_client(world.a, ration), "a") == [OK], "another one"
    assert codes(world, client, "b") == [NO]


def test_promoted_slave_has_the_groups():
    """A slave refuses requests as a slave; groups that it copies count against no ration."""
    world = Group.made().start()
    assert codes(world, world.client(), "a", "b", "c") == [OK] * 3
    early = a_client(world.b, rationed(NewSubjects(1, 1, "consumer groups")))
    assert codes(world, early, "new", "a", "newer") == [ErrorCode.NOT_MASTER] * 3
    world.cut()
    world.b.assign(Role.MASTER, 2)
    world.a.assign(Role.SLAVE, 2)
    world.b.wait(6_000)
    world.b.host.settle()
    assert codes(world, early, "a", "b", "c") == [OK] * 3
    world.b.host.settle()


def test_restarted_broker_has_its_groups():
    world = Group.made().start()
    assert codes(world, world.client(), "a", "b") == [OK] * 2
    world.cut()
    world.a.crash()
    world.a.alone()
    client = a_client(world.a, rationed(NewSubjects(1, 1, "consumer groups")))
    asked = [client.subscribe("c", subject=name) for name in "aba"]
    world.a.host.settle()
    assert [client.code(one) for one in asked] == [OK] * 3


def test_cluster_tokens_have_no_ration():
    world = Group.made().start()
    client = a_client(world.a, rationed(NewSubjects(1, 1, "consumer groups"), TokenRole.CLUSTER))
    assert codes(world, client, "a", "b", "c") == [OK] * 3
    assert codes(world, world.client(), "d", "e", "f") == [OK] * 3, "a connection without a ration"


def test_group_and_its_retry_subject_count_once():
    world = Group.made().start()
    client = a_client(world.a, rationed(NewSubjects(2, 2, "consumer groups")))
    assert codes(world, client, "s", retry_subject("s", "g")) == [OK, OK]
    assert codes(world, client, retry_subject("never", "g")) == [OK], "its subject has no such group: it counts"
    assert codes(world, client, retry_subject("s", "other"), group="g") == [NO], "another group's"


def test_refused_subscribe_is_not_counted():
    world = Group.made().start()
    client = a_client(world.a, rationed(NewSubjects(1, 1, "consumer groups")))
    assert codes(world, client, "a", held_end=5) == [ErrorCode.INVALID_ACK]
    assert codes(world, client, "a/b") == [ErrorCode.INVALID_NAME]
    assert codes(world, client, "a") == [OK]


def test_each_broadcast_consumer_is_a_group():
    world = Group.made().start()
    client = a_client(world.a, rationed(NewSubjects(2, 2, "consumer groups")))
    assert [codes(world, client, "s", group=name, broadcast=True)[0] for name in ("b0", "b1", "b0", "b2")] == [
        OK,
        OK,
        OK,
        NO,
    ]
