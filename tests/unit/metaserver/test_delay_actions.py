"""Shell. Actions on delayed messages, and the contents of a group of delay servers."""

from __future__ import annotations

from dataclasses import replace

from qmq.errors import NotServed
from qmq.metaserver.actions import Status
from qmq.metaserver.model import BrokerKey
from qmq.proto import qmq_pb2 as pb
from tests.unit.metaserver.actions_world import place


class DelayServers:
    """Answers of delay masters; silent ones do not answer."""

    def __init__(self, world):
        self.world = world
        self.pending = {}
        self.fates = {}
        self.silent = set()
        self.listed = {}
        for name in ("delay_stats", "list_delayed", "cancel_delayed"):
            setattr(world.brokers, name, getattr(self, name))

    def _reach(self, broker):
        if broker.group in self.silent:
            raise NotServed(f"{broker.key} did not answer")

    async def delay_stats(self, broker, request):
        self._reach(broker)
        hours = [pb.HourCount(begin_ms=3_600_000, messages=2)] if request.end_ms > request.begin_ms else []
        return pb.DelayStatsAnswer(pending_messages=self.pending.get(broker.group, 0), hours=hours)

    async def list_delayed(self, broker, request):
        self._reach(broker)
        rows = self.listed.get(broker.group, [])
        messages = [pb.DelayedMessage(id=id, due_ms=due) for id, due in rows[: request.messages_max]]
        return pb.ListDelayedAnswer(messages=messages, more=len(rows) > request.messages_max)

    async def cancel_delayed(self, broker, request):
        self._reach(broker)
        fates = self.fates.get(broker.group, {})
        ids, keys = ([fates.get(name, "unknown") for name in names] for names in (request.ids, request.keys))
        return pb.CancelDelayedAnswer(ids=ids, keys=keys)


async def delay_groups(world, *names):
    for name in names:
        await world.done("AddBroker", **place(name, 5, f"{name}-a"))
        known = world.registry.directory.find(BrokerKey(f"{name}-a", 20881))
        registered = replace(known, control_port=20883, metrics_port=20884, incarnation=f"disk of {name}")
        await world.registry.registration.register(registered, lambda question: None)
        world.sessions[f"{name}-a"] = world.registry.join(registered.key, registered.incarnation)
        world.beat(f"{name}-a")
    return DelayServers(world)


async def test_counts_of_groups_are_summed(world):
    servers = await delay_groups(world, "d1", "d2")
    servers.pending = {"d1": 3, "d2": 4}
    answer = await world.done("DelayStats")
    assert [(row["brokerGroup"], row["pendingMessages"]) for row in answer["groups"]] == [("d1", 3), ("d2", 4)]
    assert answer["hours"] == [{"begin": 3_600_000, "messages": 4}]
    assert (await world.done("DelayStats", hours=0))["hours"] == []


async def test_messages_of_groups_are_merged_by_due_time(world):
    servers = await delay_groups(world, "d1", "d2")
    servers.listed = {"d1": [("a", 10), ("c", 30)], "d2": [("b", 20), ("d", 40)]}
    answer = await world.done("ListDelayed", limit=3)
    assert [row["id"] for row in answer["messages"]] == ["a", "b", "c"] and answer["more"]
    assert not (await world.done("ListDelayed"))["more"]


async def test_schedules_of_groups_are_merged_by_next_time(world):
    servers = await delay_groups(world, "d1", "d2", "d3")

    async def list_delayed(broker, request):
        assert request.recurring
        servers._reach(broker)
        due = {"d1": 30, "d2": 20}[broker.group]
        schedule = pb.RecurringSchedule(name=f"n{due}", owner=f"app {due}", cron="0 3 * * *", timezone="UTC")
        old = pb.DelayedMessage(subject="s", due_ms=1)  # as an older delay server answers
        return pb.ListDelayedAnswer(messages=[old, pb.DelayedMessage(subject="s", due_ms=due, schedule=schedule)])

    servers.silent, world.brokers.list_delayed = {"d3"}, list_delayed
    answer = await world.done("ListSchedules")
    assert [(row["name"], row["next"], row["cron"]) for row in answer["schedules"]] == [
        ("n20", 20, "0 3 * * *"),
        ("n30", 30, "0 3 * * *"),
    ]
    assert "d3" in answer["unasked"]
    assert [row["name"] for row in (await world.done("ListSchedules", owner="app 30"))["schedules"]] == ["n30"]


async def test_known_fate_of_any_group_counts(world):
    servers = await delay_groups(world, "d1", "d2")
    servers.fates = {"d1": {"a": "cancelled"}, "d2": {"b": "sent"}}
    answer = await world.done("CancelDelayed", subject="s", ids="a, b, c")
    assert answer["ids"] == {"a": "cancelled", "b": "sent", "c": "unknown"}
    assert [row.result for row in await world.audit() if row.action == "CancelDelayed"] == ["done", "begun"]


async def test_unknown_fate_needs_all_groups(world):
    servers = await delay_groups(world, "d1", "d2")
    servers.fates, servers.silent = {"d1": {"a": "cancelled"}}, {"d2"}
    assert (await world.done("CancelDelayed", subject="s", ids="a"))["ids"] == {"a": "cancelled"}
    answer = await world.run("CancelDelayed", subject="s", ids="a,b")
    assert answer.status == Status.UNKNOWN and "d2" in answer.message
    assert answer.data["ids"] == {"a": "cancelled", "b": "unknown"}


async def test_cancelled_key_needs_all_groups(world):
    servers = await delay_groups(world, "d1", "d2")
    servers.fates, servers.silent = {"d1": {"k": "cancelled"}}, {"d2"}
    answer = await world.run("CancelDelayed", subject="s", keys="k")
    assert answer.status == Status.UNKNOWN and "d2" in answer.message
    servers.silent = set()
    assert (await world.done("CancelDelayed", subject="s", keys="k"))["keys"] == {"k": "cancelled"}


async def test_counts_name_silent_groups(world):
    servers = await delay_groups(world, "d1", "d2")
    servers.silent = {"d2"}
    answer = await world.done("DelayStats")
    assert list(answer["unasked"]) == ["d2"] and [row["brokerGroup"] for row in answer["groups"]] == ["d1"]


async def test_missing_delay_servers_are_refused_with_the_remedy(world):
    await world.copies("g1")
    assert "AddBroker with roles 5 and 6" in await world.refused("DelayStats")
    assert "AddBroker with roles 5 and 6" in await world.refused("CancelDelayed", subject="s", ids="a")


async def test_drain_counts_delayed_messages(world):
    servers = await delay_groups(world, "d1", "d2")
    servers.pending = {"d1": 7}
    answer = await world.done("DrainGroup", brokerGroup="d1")
    assert answer["messagesLeft"] == 7 and not answer["empty"]
    servers.pending = {}
    assert (await world.done("DrainGroup", brokerGroup="d1"))["empty"]


async def test_mark_of_the_only_delay_group_warns(world):
    await delay_groups(world, "d1")
    await world.copies("g1")
    marked = await world.done("MarkReadonlyBrokerGroup", brokerGroup="d1")
    assert marked["withoutOtherGroup"] == {"count": 1, "names": ["*"]}, "brokers take no delayed messages"
    await world.done("UnMarkReadonlyBrokerGroup", brokerGroup="d1")
    await delay_groups(world, "d2")
    marked = await world.done("MarkReadonlyBrokerGroup", brokerGroup="d1")
    assert marked["withoutOtherGroup"] == {"count": 0, "names": []}
    assert "delay servers" in await world.refused("SetGroupTag", brokerGroup="d1", tag="t")


async def test_last_delay_server_requires_drain_or_force(world):
    await delay_groups(world, "d1", "d2", "d3")
    for name in ("d1", "d2"):
        world.stop(f"{name}-a")
    text = await world.refused("RemoveBroker", hostname="d1-a", servePort=20881)
    assert "would never be sent" in text and "d1" in world.registry.directory.groups
    await world.done("RemoveBroker", hostname="d1-a", servePort=20881, force="true")
    await world.done("DrainGroup", brokerGroup="d2")
    words = {"hostname": "d2-a", "servePort": 20881}
    shown = await world.done("RemoveBroker", **words, dryRun="true")
    assert shown["after"]["neverSent"].startswith("messages that pend at d2"), "no server is left to count them"
    await world.done("RemoveBroker", **words)
    assert (await world.audit())[0].after == shown["after"]
    assert world.registry.directory.groups.keys() == {"d3"}


async def test_unused_delay_group_can_be_removed(world):
    await world.done("AddBroker", **place("d1", 5, "d1-a"))
    await world.done("RemoveBroker", hostname="d1-a", servePort=20881)
    assert not world.registry.directory.groups
