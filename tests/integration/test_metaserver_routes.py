"""Shell. Clients that watch routes: what they are told first, what is pushed, what is refused."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from qmq.client import route_watch
from qmq.client.route_watch import RouteWatch
from qmq.client.routes import Routing
from qmq.proto import qmq_pb2 as pb
from tests.integration.metaserver_world import METADATA, TOKEN


async def test_new_subject_gets_all_groups_that_take_messages(world):
    for name in ("g1", "g2", "g3"):
        await world.copies(name)
    async with world.watch("order.changed") as watch:
        assert await watch.next() == ["order.changed"]
        assert watch.writable("order.changed") == {"g1": True, "g2": True, "g3": True}
        route = watch.routes["order.changed"].groups[0]
        assert (route.master.ip, route.master.serve_port, route.term) == ("127.0.0.1", 20881, 2)


async def test_new_subject_gets_two_groups(world):
    await world.copies("g1")
    await world.add("g2", 0, "g2-a")
    async with world.watch("s") as watch:
        await watch.next()
        assert watch.writable("s") == {"g1": True, "g2": False}


@pytest.mark.metaserver(heartbeat_timeout_ms=300000)
async def test_dead_master_is_pushed_when_its_stream_ends(world):
    master, _ = await world.copies()
    async with world.watch("s") as watch:
        await watch.next()
        assert watch.writable("s") == {"g1": True}
        await master.stop()
        await watch.next()
        assert watch.writable("s") == {"g1": False}, "its time is not over for minutes"


async def test_silent_master_is_taken_for_dead_after_the_timeout(world):
    master, _ = await world.copies()
    async with world.watch("s") as watch:
        await watch.next()
        master.fall_silent()
        await watch.next()
        assert watch.writable("s") == {"g1": False}


@pytest.mark.parametrize("reason", ["slave_down", "slave_lag", "disk", "draining"])
async def test_route_follows_the_masters_own_reasons(world, reason):
    master, _ = await world.copies()
    async with world.watch("s") as watch:
        await watch.next()
        master.reasons = [reason]
        master.say()
        await watch.next()
        assert watch.writable("s") == {"g1": False}
        assert (await world.group("g1"))["readonlyReasons"] == [reason]
        master.reasons = []
        master.say()
        await watch.next()
        assert watch.writable("s") == {"g1": True}


async def test_swap_pushes_the_new_master_with_its_term(world):
    await world.copies()
    async with world.watch("s") as watch:
        await watch.next()
        await world.done("SwapRoles", brokerGroup="g1")
        await watch.until(lambda routes: routes["s"].groups[0].term == 3 and routes["s"].groups[0].writable)


async def test_more_subjects_can_be_added_to_a_watch(world):
    await world.copies()
    async with world.watch("a") as watch:
        assert await watch.next() == ["a"]
        await watch.call.write(pb.RouteRequest(subjects=["a", "b"]))
        assert await watch.next() == ["b"]


async def test_every_request_is_answered_if_only_by_nothing_changed(world):
    await world.copies("g1")
    async with world.watch("s") as watch:
        assert await watch.next() == ["s"]
        await watch.call.write(pb.RouteRequest(subjects=["s"]))
        assert await watch.next() == []


ILLEGAL = {"slash": "a/b", "cr": "a\rb", "lf": "a\nb", "300 characters": "s" * 300, "empty": "", "blank": " a"}


async def test_illegal_subjects_are_refused_alone(world):
    await world.copies()
    async with world.watch("good", *ILLEGAL.values()) as watch:
        await watch.next()
        assert watch.writable("good") == {"g1": True}
        for name, subject in ILLEGAL.items():
            assert watch.routes[subject].refused and not watch.routes[subject].groups, name
        assert watch.routes["good"].refused == ""


@pytest.mark.metaserver(watch_subjects_max=2)
async def test_subject_over_the_limit_is_refused_alone(world):
    master, _ = await world.copies()
    async with world.watch("one", "two", "three") as watch:
        await watch.until(lambda routes: len(routes) == 3)
        assert "watches 2 subjects, the most that one may" in watch.routes["three"].refused
        master.reasons = ["disk"]
        master.say()
        await watch.until(lambda _: watch.writable("one") == watch.writable("two") == {"g1": False})


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
        assert watch.writable("s") == {"g1": True}, "presumed until the broker had time to come back"
        await watch.next()
        assert watch.writable("s") == {"g1": False}, "it did not come back"


async def test_new_stream_gets_only_changed_routes(world):
    """Weakness 25: no push, no version to make polls cheap; every poll of QMQ carries the whole answer."""
    await world.copies()
    async with world.watch("a", "b") as watch:
        await watch.next()
        held = {name: route.version for name, route in watch.routes.items()}
    await world.done("MarkReadonlyBrokerGroup", brokerGroup="g1", subject="b")
    await world.stop()
    await world.start()
    call = world.rpc.WatchRoutes(metadata=METADATA)
    await call.write(pb.RouteRequest(subjects=["a", "b"], held=held))
    assert [route.subject for route in (await call.read()).routes] == ["b"], "versions outlive the process"
    call.cancel()


async def _is(ask, expected):
    return await ask() == expected


async def test_a_client_that_asks_no_more_goes_on_listening(world):
    await world.copies()
    async with world.watch("s") as watch:
        await watch.next()
        await watch.call.done_writing()
        await world.done("MarkReadonlyBrokerGroup", brokerGroup="g1")
        await watch.next()
        assert watch.writable("s") == {"g1": False}


async def test_garbage_ends_the_stream_and_nothing_else(world):
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


class HttpClient:
    """A client whose network lets gRPC connect to nothing."""

    def __init__(self, world):
        self.routing = Routing()
        self.watch = RouteWatch(
            metaserver=world.url, token=TOKEN, app="test", client_id="h", produces=True, on_routes=self.routing.update
        )

    def writable(self, subject):
        return {group.broker_group: group.writable for group in self.routing.groups_of(subject)}


async def test_routes_are_served_over_http(world, monkeypatch):
    monkeypatch.setattr(route_watch, "POLL_AFTER_S", 0.05)
    monkeypatch.setattr(route_watch, "POLL_S", 0.1)
    await world.copies()
    monkeypatch.setattr(route_watch, "find_metaserver", lambda url, timeout_s: "127.0.0.1:9")
    client = HttpClient(world)
    client.watch.watch("süß & a:b")
    client.watch.watch("%RETRY%s%g")
    running = asyncio.create_task(client.watch.run())
    await world.until(lambda: _true(client.writable("süß & a:b") == client.writable("%RETRY%s%g") == {"g1": True}))
    await world.done("MarkReadonlyBrokerGroup", brokerGroup="g1")
    await world.until(lambda: _true(client.writable("süß & a:b") == {"g1": False}))
    await world.until(lambda: _is(lambda: _counted(world), (0, 0, 1)))
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def _true(value):
    return value


async def _counted(world):
    return tuple(world.server.hubs.old_routes("g1", "*"))


async def test_http_refuses_bad_requests_and_unknown_clients(world):
    headers = {"X-Api-Token": TOKEN}
    for query in ("", "subject=a&held=a", "subject=a&held=a:xyz", "subject=a&held=a:" + "1" * 17):
        answer = await world.http.get(f"/meta/routes?{query}", headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "INVALID_REQUEST"), query
    assert (await world.http.get("/meta/routes?subject=a")).status_code == 401
