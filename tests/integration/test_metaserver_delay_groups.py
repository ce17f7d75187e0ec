"""Shell. Groups of delay servers at the metaserver: their parts, the routes of delayed messages, marks and swaps."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from qmq.client import route_watch
from qmq.client.route_watch import RouteWatch
from qmq.client.routes import Routing
from qmq.types import GroupKind, Role
from tests.integration.metaserver_world import TOKEN
from tests.support.promises import Tries

DELAY = GroupKind.DELAY


async def test_operators_see_delay_roles_of_delay_servers(world):
    master, slave = await world.delay_copies()
    assert (master.assignment.role, slave.assignment.role) == (Role.MASTER, Role.SLAVE)
    shown = {row["hostname"]: row["role"] for row in await world.done("ListBrokers", brokerGroup="d1")}
    assert shown == {"d1-a": "DELAY_MASTER", "d1-b": "DELAY_SLAVE"}
    assert (await world.group("d1"))["kind"] == "DELAY"


async def test_group_has_a_single_kind(world):
    await world.delay_copies()
    await world.copies("g1")
    assert "group of delay servers" in await world.refused("AddBroker", **_place("d1", 1, "x"))
    assert "group of brokers" in await world.refused("AddBroker", **_place("g1", 6, "x"))
    assert "group of brokers" in await world.refused("ReplaceBroker", **_place("g1", 6, "x"))
    assert "keeps no messages" in str(await world.post("AddSubjectBrokerGroup", subject="s", brokerGroup="d1"))
    assert "delay servers" in await world.refused("SetGroupTag", brokerGroup="d1", tag="t")


def _place(group, role, hostname):
    words = {"brokerGroup": group, "role": role, "hostname": hostname, "ip": "127.0.0.1"}
    return words | {"servePort": 20881, "syncPort": 20882}


@pytest.mark.parametrize("role, kind, program", [(5, 1, "a broker"), (0, 2, "a delay server"), (5, 0, "a broker")])
async def test_the_wrong_program_is_not_let_in(world, role, kind, program):
    await world.add("x1", role, "x1-a")
    with pytest.raises(grpc.aio.AioRpcError, match=f"what runs there is {program}"):
        await world.broker("x1-a", kind=kind)


async def test_unknown_delay_server_gets_the_command_to_add(world):
    with pytest.raises(grpc.aio.AioRpcError, match="--role=5 .master. or 6 .slave."):
        await world.broker("d1-a", kind=2)


async def test_delayed_messages_have_all_delay_groups_as_route(world):
    await world.copies("g1")
    await world.delay_copies("d1")
    await world.delay_copies("d2")
    async with world.watch("order.changed", "%RETRY%s%g", kind=DELAY) as delayed, world.watch("other") as normal:
        await delayed.next()
        assert delayed.writable("order.changed") == delayed.writable("%RETRY%s%g") == {"d1": True, "d2": True}
        await normal.next()
        assert normal.writable("other") == {"g1": True}
        assert list(world.server.registry.routes) == ["other"]


async def test_illegal_subject_has_no_delay_route(world):
    await world.delay_copies()
    async with world.watch("a\nb", kind=DELAY) as watch:
        await watch.next()
        assert watch.routes["a\nb"].refused


async def test_new_delay_group_is_pushed_at_once(world):
    await world.copies("g1")
    async with world.watch("s", kind=DELAY) as watch:
        await watch.next()
        assert "AddBroker with roles 5 and 6" in watch.routes["s"].refused
        await world.delay_copies()
        await watch.until(lambda routes: not routes["s"].refused and watch.writable("s") == {"d1": True})


async def test_a_removed_delay_group_is_gone_from_the_routes(world):
    await world.delay_copies("d1")
    await world.add("d2", 5, "d2-a")
    async with world.watch("s", kind=DELAY) as watch:
        await watch.next()
        assert watch.writable("s") == {"d1": True, "d2": False}
        await world.done("RemoveBroker", hostname="d2-a", servePort=20881)
        await watch.until(lambda routes: watch.writable("s") == {"d1": True})


async def test_dead_delay_master_is_pushed(world):
    master, _ = await world.delay_copies()
    async with world.watch("s", kind=DELAY) as watch:
        await watch.next()
        await master.stop()
        await watch.until(lambda routes: watch.writable("s") == {"d1": False})


async def test_mark_of_a_delay_group_arrives_within_a_second(world):
    master, _ = await world.delay_copies()
    await world.copies("g1")
    async with world.watch("s", "t", kind=DELAY) as watch, world.watch("s") as normal:
        await watch.next()
        await normal.next()

        async def mark():
            await world.done("MarkReadonlyBrokerGroup", subject="s", brokerGroup="d1")
            await watch.until(lambda routes: watch.writable("s") == {"d1": False})

        for number in (tries := Tries(1.0, "a mark is known")):
            if number:
                await world.done("UnMarkReadonlyBrokerGroup", subject="s", brokerGroup="d1")
                await watch.until(lambda routes: watch.writable("s") == {"d1": True})
            await tries.time_async(mark)
        assert watch.writable("t") == {"d1": True}, "the mark is of another subject"
        await world.done("MarkReadonlyBrokerGroup", brokerGroup="d1")
        await watch.until(lambda routes: watch.writable("t") == {"d1": False})
        await master.until_assigned(lambda assignment: set(assignment.readonly_subjects) == {"*", "s"})
        await world.done("UnMarkReadonlyBrokerGroup", brokerGroup="d1")
        await watch.until(lambda routes: watch.writable("t") == {"d1": True})
        assert normal.writable("s") == {"g1": True} and len(normal.versions) == 1


async def test_mark_warns_without_another_delay_group(world):
    await world.delay_copies("d1")
    await world.copies("g1")
    answer = await world.done("MarkReadonlyBrokerGroup", details="true", brokerGroup="d1")
    assert answer["withoutOtherGroup"] == {"count": 1, "names": ["*"]}, "brokers do not take delayed messages"
    await world.done("UnMarkReadonlyBrokerGroup", brokerGroup="d1")
    await world.delay_copies("d2")
    answer = await world.done("MarkReadonlyBrokerGroup", details="true", brokerGroup="d1")
    assert answer["withoutOtherGroup"] == {"count": 0, "names": []}


async def test_held_route_is_not_sent_again(world):
    await world.delay_copies()
    async with world.watch("s", kind=DELAY) as watch:
        await watch.next()
        held = {"s": watch.routes["s"].version}
    async with world.watch("s", kind=DELAY, held=held) as again:
        assert await again.next() == []


async def test_a_stream_for_an_unknown_kind_is_refused(world):
    async with world.watch("s", kind=7) as watch:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await watch.next()
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT


class Client:
    """The library's own watch of delay groups."""

    def __init__(self, world):
        self.routing = Routing()
        self.watch = RouteWatch(
            metaserver=world.url,
            token=TOKEN,
            app="test",
            client_id="c",
            produces=True,
            on_routes=self.routing.update,
            kind=DELAY,
        )

    def writable(self, subject):
        return {group.broker_group: group.writable for group in self.routing.groups_of(subject)}


@pytest.mark.parametrize("is_walled", [False, True], ids=["over gRPC", "over HTTP"])
async def test_client_watches_and_confirms_delay_groups(world, monkeypatch, is_walled):
    monkeypatch.setattr(route_watch, "POLL_AFTER_S", 0.05 if is_walled else 60)
    monkeypatch.setattr(route_watch, "POLL_S", 0.1)
    if is_walled:
        monkeypatch.setattr(route_watch, "find_metaserver", lambda url, timeout_s: "127.0.0.1:9")
    await world.delay_copies("d1")
    await world.delay_copies("d2")
    await world.copies("g1")
    client = Client(world)
    client.watch.watch("s")
    running = asyncio.create_task(client.watch.run())
    await world.until(lambda: _is(client.writable("s") == {"d1": True, "d2": True}))
    answer = await world.done("MarkReadonlyBrokerGroup", details="true", brokerGroup="d1", waitMs=10_000)
    assert answer["allKnow"] and answer["watchers"] == 1
    assert client.writable("s") == {"d1": False, "d2": True}
    shown = (await world.done("Clients"))["clients"]
    assert [(row["clientId"], row["delayed"], row["pushed"]) for row in shown] == [("c", True, not is_walled)]
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def _is(value):
    return value


async def test_http_refuses_an_unknown_kind(world):
    answer = await world.http.get("/meta/routes?subject=s&kind=BACKUP", headers={"X-Api-Token": TOKEN})
    assert answer.status_code == 400
