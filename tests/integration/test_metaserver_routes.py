"""Shell. Clients that watch routes: what they are told first, what is pushed, what is refused."""

from __future__ import annotations

import time

import grpc
import pytest

from qmq.proto import qmq_pb2 as pb
from tests.integration.metaserver_world import METADATA, in_world


@in_world
async def test_new_subject_gets_all_groups_that_take_messages(world):
    for name in ("g1", "g2", "g3"):
        await world.pair(name)
    async with world.watch("order.changed") as watch:
        assert await watch.next() == ["order.changed"]
        assert watch.writable("order.changed") == {"g1": True, "g2": True, "g3": True}
        route = watch.routes["order.changed"].groups[0]
        assert (route.master.ip, route.master.serve_port, route.term) == ("127.0.0.1", 20881, 2)


@in_world
async def test_new_subject_gets_two_groups_although_only_one_takes_messages(world):
    await world.pair("g1")
    await world.add("g2", 0, "g2-a")
    async with world.watch("s") as watch:
        await watch.next()
        assert watch.writable("s") == {"g1": True, "g2": False}


@in_world
async def test_dead_master_is_pushed_when_its_stream_ends_not_when_its_time_is_over(world):
    master, _ = await world.pair()
    async with world.watch("s") as watch:
        await watch.next()
        assert watch.writable("s") == {"g1": True}
        began = time.monotonic()
        await master.stop()
        await watch.next()
        assert watch.writable("s") == {"g1": False}
        assert time.monotonic() - began < world.settings.heartbeat_timeout_ms / 1000, "its time was not over yet"


@in_world
async def test_silent_master_is_taken_for_dead_after_the_timeout(world):
    master, _ = await world.pair()
    async with world.watch("s") as watch:
        await watch.next()
        master.fall_silent()
        await watch.next()
        assert watch.writable("s") == {"g1": False}


@pytest.mark.parametrize("reason", ["slave_down", "slave_lag", "disk", "draining"])
def test_route_follows_the_masters_own_reasons(tmp_path, reason):
    @in_world
    async def follow(world):
        master, _ = await world.pair()
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

    follow(tmp_path)


@in_world
async def test_mark_of_one_subject_leaves_the_others_writable(world):
    await world.pair()
    async with world.watch("a", "b") as watch:
        await watch.next()
        await world.done("MarkReadonlyBrokerGroup", brokerGroup="g1", subject="a")
        assert await watch.next() == ["a"]
        assert (watch.writable("a"), watch.writable("b")) == ({"g1": False}, {"g1": True})
        await world.done("MarkReadonlyBrokerGroup", brokerGroup="g1")
        assert await watch.next() == ["b"]
        await world.done("UnMarkReadonlyBrokerGroup", brokerGroup="g1")
        assert await watch.next() == ["b"]
        await world.done("UnMarkReadonlyBrokerGroup", brokerGroup="g1", subject="a")
        assert await watch.next() == ["a"]
        assert watch.writable("a") == {"g1": True}
        assert watch.versions == sorted(set(watch.versions))


@in_world
async def test_swap_pushes_the_new_master_with_its_term(world):
    await world.pair()
    async with world.watch("s") as watch:
        await watch.next()
        await world.done("SwapRoles", brokerGroup="g1")
        await watch.until(lambda routes: routes["s"].groups[0].term == 3 and routes["s"].groups[0].writable)


@in_world
async def test_more_subjects_can_be_added_to_a_watch(world):
    await world.pair()
    async with world.watch("a") as watch:
        assert await watch.next() == ["a"]
        await watch.call.write(pb.RouteRequest(subjects=["a", "b"]))
        assert await watch.next() == ["b"]


@in_world
async def test_every_request_is_answered_if_only_by_nothing_changed(world):
    await world.pair("g1")
    async with world.watch("s") as watch:
        assert await watch.next() == ["s"]
        await watch.call.write(pb.RouteRequest(subjects=["s"]))
        assert await watch.next() == []


@in_world
async def test_subject_without_a_group_gets_its_route_when_the_first_group_is_added(world):
    async with world.watch("s") as watch:
        await watch.next()
        assert "AddBroker" in watch.routes["s"].refused
        await world.add("g1", 0, "a")
        await watch.next()
        assert watch.writable("s") == {"g1": False} and watch.routes["s"].refused == ""


@in_world
async def test_short_route_is_extended_when_another_group_comes(world):
    await world.pair("g1")
    async with world.watch("s") as watch:
        await watch.next()
        assert watch.writable("s") == {"g1": True}
        await world.pair("g2")
        await watch.until(lambda routes: watch.writable("s") == {"g1": True, "g2": True})


ILLEGAL = {"slash": "a/b", "cr": "a\rb", "lf": "a\nb", "300 characters": "s" * 300, "empty": "", "blank": " a"}


@in_world
async def test_illegal_subjects_are_refused_one_by_one_and_stored_nowhere(world):
    await world.pair()
    async with world.watch("good", *ILLEGAL.values()) as watch:
        await watch.next()
        assert watch.writable("good") == {"g1": True}
        for name, subject in ILLEGAL.items():
            assert watch.routes[subject].refused and not watch.routes[subject].groups, name
        assert watch.routes["good"].refused == ""


@in_world
async def test_watch_of_too_many_subjects_is_refused(world):
    await world.add("g1", 0, "a")
    call = world.rpc.WatchRoutes(metadata=METADATA)
    for begin in range(0, 12_000, 4000):
        await call.write(pb.RouteRequest(subjects=[f" {number}" for number in range(begin, begin + 4000)]))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        while True:
            assert await call.read() is not grpc.aio.EOF
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


@in_world
async def test_known_routes_are_served_while_the_database_is_away(world):
    master, _ = await world.pair()
    async with world.watch("known") as watch:
        await watch.next()
        break_database(world)
        master.reasons = ["disk"]
        master.say()
        await watch.next()
        assert watch.writable("known") == {"g1": False}
        async with world.watch("known", "new") as second:
            await second.next()
            assert second.writable("known") == {"g1": False}
            assert "cannot be stored" in second.routes["new"].refused
            assert (await world.http.get("/health/ready")).status_code == 503
            mend_database(world)
            await second.until(lambda routes: routes["new"].refused == "")
            assert (await world.http.get("/health/ready")).status_code == 200


@in_world
async def test_restart_does_not_stop_producers(world):
    master, slave = await world.pair()
    async with world.watch("s") as watch:
        await watch.next()
    await world.stop()
    await world.start()
    async with world.watch("s") as watch:
        await watch.next()
        assert watch.writable("s") == {"g1": True}, "presumed until the broker had time to come back"
        await watch.next()
        assert watch.writable("s") == {"g1": False}, "it did not come back"


def break_database(world):
    """Let every transaction of the metaserver fail."""
    engine = world.server._engine
    engine.real_connect = engine.connect

    def refuse(*_, **__):
        raise OSError("the database is away")

    engine.connect = refuse


def mend_database(world):
    world.server._engine.connect = world.server._engine.real_connect
