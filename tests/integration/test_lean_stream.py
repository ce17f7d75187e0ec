"""Shell. The benchmark's simulated watchers get the same updates from a metaserver as clients with grpc.aio."""

from __future__ import annotations

import asyncio

from benchmarks.lean_stream import connect
from qmq.proto import qmq_pb2 as pb
from tests.integration.metaserver_world import METADATA, WAIT_S

PATH = "/qmq.Metaserver/WatchRoutes"
SUBJECTS = ["s", "t", "%RETRY%s%group", "no/subject"]


class LeanWatch:
    """One lean stream and its routes."""

    def __init__(self, connection):
        self.routes, self.ended, self._heard = {}, asyncio.Event(), asyncio.Event()
        self.stream = connection.stream(self._take, self.ended.set)
        self.ask(subjects=SUBJECTS, app="bench", client_id="lean", produces=True)

    def ask(self, **words):
        self.stream.write(pb.RouteRequest(**words).SerializeToString())

    def _take(self, message):
        self.routes |= {route.subject: route for route in pb.RouteUpdate.FromString(message).routes}
        self._heard.set()

    async def until(self, condition):
        async with asyncio.timeout(WAIT_S):
            while not condition(self.routes):
                self._heard.clear()
                await self._heard.wait()


async def test_lean_streams_send_the_updates_of_grpc_aio(world):
    for name in ("g1", "g2"):
        await world.copies(name)
    connection = await connect(await world.address(), PATH, METADATA)
    lean = [LeanWatch(connection) for _ in range(3)]  # the first has literal headers, others indexed
    async with world.watch(*SUBJECTS) as watch:
        for mark in (None, "MarkReadonlyBrokerGroup", "UnMarkReadonlyBrokerGroup"):
            if mark:
                await world.done(mark, brokerGroup="g1")
            writable = mark != "MarkReadonlyBrokerGroup"
            for stream in (watch, *lean):
                await stream.until(lambda routes, writable=writable: is_told(routes, writable=writable))
            assert [stream.routes for stream in lean] == [watch.routes] * 3
    assert watch.routes["no/subject"].refused
    connection.close()


async def test_confirmation_over_a_lean_stream_counts(world):
    await world.copies("g1")
    connection = await connect(await world.address(), PATH, METADATA)
    lean = LeanWatch(connection)
    await lean.until(lambda routes: is_told(routes, writable=True))
    await world.done("MarkReadonlyBrokerGroup", brokerGroup="g1")
    await lean.until(lambda routes: is_told(routes, writable=False))
    assert (await old_routes(world)).producers == 1, "it was told, and has not said that it knows"
    lean.ask(held={route.subject: route.version for route in lean.routes.values()})
    await world.until(lambda: nobody_has_old_routes(world))
    connection.close()


async def test_refused_lean_stream_ends(world):
    connection = await connect(await world.address(), PATH, [("x-api-token", "wrong")])
    async with asyncio.timeout(WAIT_S):
        await LeanWatch(connection).ended.wait()
    connection.close()


def is_told(routes, *, writable):
    """Whether all routes have arrived, with g1 as expected."""
    return (
        set(routes) == set(SUBJECTS)
        and all(
            group.writable == writable
            for route in routes.values()
            for group in route.groups
            if group.broker_group == "g1"
        )
        and all(routes[subject].groups for subject in SUBJECTS[:3])
    )


async def old_routes(world):
    return await world.rpc.CountOldRoutes(pb.OldRoutesQuestion(broker_group="g1", subject="*"), metadata=METADATA)


async def nobody_has_old_routes(world):
    counts = await old_routes(world)
    return counts.producers == 0 and counts.watchers == 1
