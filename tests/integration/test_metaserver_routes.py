"""Shell. Clients that watch routes, also of delayed messages: first answers, pushed changes, refusals."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from qmq.client import route_watch
from qmq.client.route_watch import RouteWatch
from qmq.client.routes import Routing
from qmq.proto import qmq_pb2 as pb
from qmq.types import GroupKind
from tests.integration.metaserver_world import METADATA, TOKEN
from tests.support.waiting import until_async


async def test_new_subject_gets_all_writable_groups(world):
    for name in ("g1", "g2", "g3"):
        await world.copies(name)
    async with world.watch("order.changed") as watch:
        assert await watch.next() == ["order.changed"]
        assert watch.writable("order.changed") == {"g1": True, "g2": True, "g3": True}
        route = watch.routes["order.changed"].groups[0]
        assert (route.master.ip, route.master.serve_port, route.term) == ("127.0.0.1", 20881, 2)


@pytest.mark.metaserver(heartbeat_timeout_ms=300000)
async def test_dead_master_is_pushed_when_its_stream_ends(world):
    master, _ = await world.copies()
    async with world.watch("s") as watch:
        await watch.next()
        assert watch.writable("s") == {"g1": True}
        await master.stop()
        await watch.next()
        assert watch.writable("s") == {"g1": False}, "the timeout is minutes away"


async def test_silent_master_is_pushed_after_the_timeout(world):
    master, _ = await world.copies()
    async with world.watch("s") as watch:
        await watch.next()
        master.fall_silent()
        await watch.next()
        assert watch.writable("s") == {"g1": False}


async def test_more_subjects_can_be_added_to_a_watch(world):
    await world.copies()
    async with world.watch("a") as watch:
        assert await watch.next() == ["a"]
        for answered in (["b"], []):
            await watch.call.write(pb.RouteRequest(subjects=["a", "b"]))
            assert await watch.next() == answered


@pytest.mark.metaserver(heartbeat_timeout_ms=6000)
async def test_restart_does_not_stop_producers(world):
    master, slave = await world.copies()
    async with world.watch("s") as watch:
        await watch.next()
    await world.stop()
    await master.stop()
    await slave.stop()
    await world.start()
    async with world.watch("s") as watch:
        await watch.next()
        assert watch.writable("s") == {"g1": True}, "presumed until the broker could return"
        await watch.next()
        assert watch.writable("s") == {"g1": False}, "the broker did not return"


async def test_client_that_ended_requests_gets_updates(world):
    await world.copies()
    async with world.watch("s") as watch:
        await watch.next()
        await watch.call.done_writing()
        await world.done("MarkReadonlyBrokerGroup", brokerGroup="g1")
        await watch.next()
        assert watch.writable("s") == {"g1": False}


async def test_garbage_ends_its_stream_only(world):
    await world.copies()
    async with world.watch("s") as watch:
        await watch.next()
        method = world.channel.stream_stream("/qmq.Metaserver/WatchRoutes")
        call = method(metadata=METADATA)
        await call.write(b"\xff" * 10)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            assert await call.read() is not grpc.aio.EOF
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        await watch.call.write(pb.RouteRequest(subjects=["s"]))
        assert await watch.next() == []


SUBJECTS = ("süß & a:b", "%RETRY%s%g")


@pytest.mark.parametrize("kind, group", [(GroupKind.NORMAL, "g1"), (GroupKind.DELAY, "d1")])
@pytest.mark.parametrize("is_walled", [False, True], ids=["over gRPC", "over HTTP"])
async def test_client_watches_and_confirms_routes(world, monkeypatch, kind, group, is_walled):
    monkeypatch.setattr(route_watch, "POLL_AFTER_S", 0.05 if is_walled else 60)
    monkeypatch.setattr(route_watch, "POLL_S", 0.1)
    if is_walled:
        monkeypatch.setattr(route_watch, "find_metaserver", lambda url, timeout_s: "127.0.0.1:9")
    await world.copies("g1")
    await world.delay_copies("d1")
    routing, words = Routing(), {"metaserver": world.url, "token": TOKEN, "app": "test", "client_id": "c"}
    watch = RouteWatch(**words, produces=True, on_routes=routing.update, kind=kind)
    for subject in SUBJECTS:
        watch.watch(subject)
    running = asyncio.create_task(watch.run())

    def writable():
        return [{found.broker_group: found.writable for found in routing.groups_of(subject)} for subject in SUBJECTS]

    await until_async(lambda: writable() == [{group: True}] * 2)
    marked = await world.done("MarkReadonlyBrokerGroup", details="true", brokerGroup=group, waitMs=10_000)
    assert marked["allKnow"] and marked["watchers"] == 1
    assert writable() == [{group: False}] * 2
    [shown] = (await world.done("Clients"))["clients"]
    assert (shown["clientId"], shown["delayed"], shown["pushed"]) == ("c", kind == GroupKind.DELAY, not is_walled)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_http_refuses_bad_requests_and_unknown_clients(world):
    headers = {"X-Api-Token": TOKEN}
    for query in ("", "subject=a&held=a", "subject=a&held=a:xyz", "subject=a&held=a:" + "1" * 17):
        answer = await world.http.get(f"/meta/routes?{query}", headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "INVALID_REQUEST"), query
    assert (await world.http.get("/meta/routes?subject=a")).status_code == 401


# Routes of delayed messages.


async def test_unknown_kind_of_groups_is_refused(world):
    async with world.watch("s", kind=7) as watch:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await watch.next()
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    answer = await world.http.get("/meta/routes?subject=s&kind=BACKUP", headers={"X-Api-Token": TOKEN})
    assert answer.status_code == 400


async def test_delayed_messages_go_to_all_delay_groups(world):
    await world.copies("g1")
    await world.delay_copies("d1")
    await world.delay_copies("d2")
    async with (
        world.watch("order.changed", "%RETRY%s%g", kind=GroupKind.DELAY) as delayed,
        world.watch("other") as normal,
    ):
        await delayed.next()
        assert delayed.writable("order.changed") == delayed.writable("%RETRY%s%g") == {"d1": True, "d2": True}
        await normal.next()
        assert normal.writable("other") == {"g1": True}
        assert list(world.server.registry.routes) == ["other"]


async def test_new_delay_group_is_pushed_at_once(world):
    await world.copies("g1")
    async with world.watch("s", kind=GroupKind.DELAY) as watch:
        await watch.next()
        assert "AddBroker with roles 5 and 6" in watch.routes["s"].refused
        await world.delay_copies()
        await watch.until(lambda routes: not routes["s"].refused and watch.writable("s") == {"d1": True})
