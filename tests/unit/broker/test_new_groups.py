"""Core. New consumer groups: their begin in the cluster (decision 80), and rations per token."""

from __future__ import annotations

import pytest

from qmq.broker import positions
from qmq.broker.positions import Begin, NewGroup
from qmq.errors import ErrorCode, NotServed, OperatorError
from qmq.log.progress_frame import decode_progress
from qmq.rations import TokenGroups, TokenRation
from qmq.rights import Caller, TokenRole
from qmq.subjects import retry_subject
from qmq.types import Role
from tests.unit.broker.limited import hours_pass
from tests.unit.broker.world import Broker, Client, Group

KEY = ("s", "g")
FIRST = Begin(0)


class Cluster:
    """A broker group, and a metaserver played by the test."""

    def __init__(self, monkeypatch):
        self.asked = []
        monkeypatch.setattr(Broker, "ask", staticmethod(lambda group, answered: self.asked.append((group, answered))))
        self.world = Group.made().start()
        self.broker = self.world.a

    def produce(self, *ids):
        Client(self.broker).produce(*ids)
        self.world.settle()

    def subscribe(self, client=None, **terms):
        client = client or Client(self.broker)
        opaque = client.subscribe("c", **terms)
        self.world.settle()
        return client, opaque

    def answer(self, answer):
        """Answer the oldest question."""
        _, answered = self.asked.pop(0)
        for link, packet in answered(answer):
            self.broker.node.packet_received(link, packet)
        self.world.settle()

    @property
    def position(self):
        group = self.broker.log.state.groups.get(KEY)
        return None if group is None else group.position


@pytest.fixture
def cluster(monkeypatch):
    return Cluster(monkeypatch)


def test_new_group_waits_for_cluster_begin(cluster):
    cluster.produce("0", "1", "2")
    client, asked = cluster.subscribe(start="latest")
    other, also = cluster.subscribe(start="latest")
    assert not client.answered(asked) and not other.answered(also) and cluster.position is None
    assert [group for group, _ in cluster.asked] == [NewGroup("s", "g", True, 0, False)], "one question for both"
    cluster.answer(FIRST)
    assert client.code(asked) == ErrorCode.SUCCESS and other.answered(also)
    assert cluster.position == 0, "the group is older than this broker group's part in the route"
    _, again = cluster.subscribe(client, start="latest")
    assert client.code(again) == ErrorCode.SUCCESS and not cluster.asked, "a group with a position asks no more"


def test_group_begins_at_the_mark_before_it_was_stored(cluster):
    cluster.produce("0")
    assert cluster.broker.master.mark_groups("m1", [KEY]) == [False]
    cluster.produce("1")
    assert cluster.broker.master.mark_groups("m2", [KEY]) == [False], "of another metaserver, which lost the race"
    cluster.produce("2")
    cluster.subscribe(start="latest")
    cluster.answer(Begin(1, "m1", 77))
    assert cluster.position == 1
    _, body = cluster.broker.log.tail_body(cluster.broker.log.state.groups[KEY].began)
    assert decode_progress(body).entries == ((1, 0, 77),), "the audit reads when the group began"
    assert cluster.broker.master.mark_groups("m3", [KEY, ("s", "other")]) == [True, False]


def test_without_its_mark_a_group_begins_by_time(cluster):
    for name in "012":
        cluster.broker.host.clock_ms += 1_000
        cluster.produce(name)
    since_ms = cluster.broker.host.now_ms() - 1_000
    cluster.subscribe(start="latest")
    cluster.answer(Begin(since_ms, "noted by a master that was swapped"))
    assert cluster.position == 1


@pytest.mark.parametrize(
    "subject, terms",
    [
        ("s", {"broadcast": True, "ephemeral": True, "start": "latest"}),
        (retry_subject("s", "g"), {"start": "earliest"}),
    ],
)
def test_group_with_fixed_begin_skips_the_cluster(cluster, subject, terms):
    client, asked = cluster.subscribe(subject=subject, **terms)
    assert client.code(asked) == ErrorCode.SUCCESS and not cluster.asked


def test_new_group_waits_without_a_metaserver(cluster):
    cluster.subscribe(subject="known")
    cluster.answer(FIRST)
    client, asked = cluster.subscribe(start="latest")
    cluster.answer(NotServed("g is new here, and waits for the metaserver: the database does not answer"))
    assert client.code(asked) == ErrorCode.NOT_SERVED and "waits for the metaserver" in client.text(asked)
    assert cluster.position is None
    known, again = cluster.subscribe(subject="known")
    assert known.code(again) == ErrorCode.SUCCESS and not cluster.asked
    _, later = cluster.subscribe(client, start="latest")
    cluster.answer(FIRST)
    assert client.code(later) == ErrorCode.SUCCESS and cluster.position == 0


def test_older_metaserver_lets_groups_choose_their_begin(cluster):
    cluster.produce("0")
    cluster.subscribe(start="latest")
    cluster.answer(None)
    assert cluster.position == 1


def test_repeated_question_costs_one_group(cluster):
    client = rationed(cluster.broker, ration())
    for answer in (NotServed("away"), NotServed("away"), FIRST):
        _, asked = cluster.subscribe(client)
        cluster.answer(answer)
    assert client.code(asked) == ErrorCode.SUCCESS
    _, other = cluster.subscribe(client, subject="other")
    assert client.code(other) == ErrorCode.OVERLOADED and not cluster.asked, "what is refused is not stored"


def test_waiting_new_groups_are_bounded(cluster, monkeypatch):
    monkeypatch.setattr(positions, "WAITING_MAX", 3)
    clients = [cluster.subscribe() for _ in range(2)]
    for number in range(2):
        cluster.subscribe(subject=f"s{number}")
    client, refused = cluster.subscribe(subject="one-too-many")
    assert client.code(refused) == ErrorCode.OVERLOADED
    gone, left = cluster.subscribe()
    gone.lost()
    assert client.code(cluster.subscribe(client)[1]) == ErrorCode.OVERLOADED
    cluster.world.cut()
    cluster.broker.assign(Role.SLAVE, 2)
    assert {client.code(asked) for client, asked in clients} == {ErrorCode.NOT_MASTER} and not gone.answered(left)
    assert cluster.asked[0][1](FIRST) == [], "an answer that comes too late"


def test_move_reaches_a_group_that_never_joined(cluster):
    cluster.produce("0", "1")

    def reset(begin):
        return cluster.broker.master.move_group(
            *KEY, "latest", 0, dry_run=False, answer=lambda error: None, begin=begin
        )

    with pytest.raises(OperatorError, match="never subscribed"):
        reset(None)
    assert reset(FIRST) == (0, 2, 2, 0) and cluster.position == 2


# Rations.

OK, NO = ErrorCode.SUCCESS, ErrorCode.OVERLOADED


def ration(per_minute: int = 1, in_all: int = 100, role: TokenRole = TokenRole.CLIENT) -> TokenRation:
    return TokenRation(Caller("shop", role), TokenGroups(per_minute, in_all), None, lambda: 0)


def rationed(broker: Broker, granted: TokenRation) -> Client:
    client = Client(broker)
    client.link.ration = granted
    return client


def codes(world: Group, client: Client, *names: str, group: str = "g", **terms) -> list[ErrorCode]:
    """Subscribe to these subjects; return the answers."""
    opaques = [client.subscribe("c", subject=name, group=group, **terms) for name in names]
    world.settle()
    return [client.code(opaque) for opaque in opaques]


@pytest.mark.parametrize(
    ("per_minute", "in_all", "setting"), [(2, 100, "new_subjects_per_minute"), (100, 2, "token_groups_max")]
)
def test_new_groups_of_a_token_are_rationed(per_minute, in_all, setting):
    """500 subscriptions to subjects without a message left 500 groups in memory and in the log."""
    world = Group.made().start()
    client = rationed(world.a, ration(per_minute, in_all))
    assert codes(world, client, "never0", "never1") == [OK, OK]
    end = world.a.log.end
    refused = client.subscribe("c", subject="never2")
    world.settle()
    assert client.code(refused) == NO and f"({setting})" in client.text(refused)
    assert "token 'shop'" in client.text(refused) and "consumer groups" in client.text(refused)
    assert world.a.log.end == end and set(world.a.log.state.groups) == {("never0", "g"), ("never1", "g")}
    assert not world.a.master.causes.of(("never2", "g")) and len(world.a.master.subscriptions) == 2


def test_only_groups_that_begin_count():
    world = Group.made().start()
    granted = ration()
    client = rationed(world.a, granted)
    assert codes(world, client, "a", held_end=5) == [ErrorCode.INVALID_ACK]
    assert codes(world, client, "a/b") == [ErrorCode.INVALID_NAME]
    for _ in range(10):
        assert codes(world, client, "a") == codes(world, rationed(world.a, granted), "a") == [OK], "it returns"
    assert codes(world, client, "b") == [NO]


def test_forgotten_groups_count_no_more():
    """Broadcast consumers come and go for years, and an operator removes unused groups."""
    world = Group.made(broadcast_forget_hours=1.0).start()
    granted = ration(100, 2)
    client = rationed(world.a, granted)
    assert codes(world, client, "a", "b") == [OK, OK] and codes(world, client, "c") == [NO]
    client.lost()
    world.wait(1_000, times=40)
    world.a.master._delivery.move_group("a", "g", "removed", 0, dry_run=False, answer=lambda error: None)
    client = rationed(world.a, granted)
    assert codes(world, client, "c", broadcast=True, group="host") == [OK] and codes(world, client, "d") == [NO]
    client.lost()
    world.wait(1_000, times=40)  # its lease ends
    hours_pass(world)
    assert ("c", "host") not in world.a.log.state.groups
    assert codes(world, rationed(world.a, granted), "d", "e") == [OK, NO]


def test_another_masters_groups_do_not_count():
    world = Group.made().start()
    granted = ration(100, 1)
    assert codes(world, rationed(world.a, granted), "a") == [OK]
    world.a.assign(Role.SLAVE, 2)
    assert not granted._groups._made


def test_group_and_its_retry_subject_count_once():
    world = Group.made().start()
    client = rationed(world.a, ration(2))
    assert codes(world, client, "s", retry_subject("s", "g")) == [OK, OK]
    assert codes(world, client, retry_subject("never", "g")) == [OK], "its subject has no such group: it counts"
    assert codes(world, client, retry_subject("s", "other"), group="g") == [NO], "another group's"


def test_each_broadcast_consumer_is_a_group():
    world = Group.made().start()
    client = rationed(world.a, ration(2))
    found = [codes(world, client, "s", group=name, broadcast=True) for name in ("b0", "b1", "b0", "b2")]
    assert found == [[OK], [OK], [OK], [NO]]


def test_cluster_tokens_have_no_ration():
    world = Group.made().start()
    assert codes(world, rationed(world.a, ration(role=TokenRole.CLUSTER)), "a", "b", "c") == [OK] * 3
    assert codes(world, Client(world.a), "d", "e", "f") == [OK] * 3, "a connection without a ration"


@pytest.mark.parametrize("change", ["promotion", "restart"])
def test_groups_in_the_log_need_no_ration(change):
    """A slave refuses requests as a slave; groups that it copies count against no ration."""
    world = Group.made().start()
    assert codes(world, Client(world.a), "a", "b", "c") == [OK] * 3
    broker = world.b if change == "promotion" else world.a
    client = rationed(broker, ration())
    if change == "promotion":
        assert codes(world, client, "new", "a", "newer") == [ErrorCode.NOT_MASTER] * 3
        world.cut()
        world.b.assign(Role.MASTER, 2)
        world.a.assign(Role.SLAVE, 2)
        world.b.wait(6_000)
    else:
        world.cut()
        world.a.crash()
        world.a.alone()
    broker.host.settle()
    assert codes(world, client, "a", "b", "c") == [OK] * 3
