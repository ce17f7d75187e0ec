"""Shell. Sources of routes: a stream, resumed by version; HTTP where gRPC is blocked; never an error."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from types import SimpleNamespace

import grpc
import pytest

import qmq
import qmq.blocking
from qmq.client import route_watch
from qmq.client.route_watch import RouteWatch
from qmq.client.routes import Routing
from qmq.message import Message
from qmq.remoting.commands import Command
from qmq.types import GroupKind
from tests.support.waiting import settle, until_async
from tests.unit.client.world import TOKEN, LocalMetaserver, cluster, producer_of


class Client:
    """A watch and its routes."""

    def __init__(self, metaserver: LocalMetaserver, *subjects: str, token: str = TOKEN) -> None:
        self.routing = Routing()
        self.brought = []
        self.watch = RouteWatch(
            metaserver=metaserver.url, token=token, app="test", client_id="c", produces=True, on_routes=self._take
        )
        for subject in subjects:
            self.watch.watch(subject)

    def _take(self, routes) -> None:
        self.brought += [route.subject for route in routes]
        self.routing.update(routes)

    def writable(self, subject: str) -> dict[str, bool]:
        return {group.broker_group: group.writable for group in self.routing.groups_of(subject)}


@asynccontextmanager
async def watching(*args, **options) -> AsyncIterator[Client]:
    client = Client(*args, **options)
    running = asyncio.create_task(client.watch.run())
    try:
        yield client
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(route_watch, "POLL_AFTER_S", 1000.0)
    monkeypatch.setattr(route_watch, "POLL_S", 0.05)
    monkeypatch.setattr(route_watch, "RETRY_S_MAX", 0.1)
    monkeypatch.setattr(route_watch, "CONFIRM_WITHIN_S", 0.0)


@pytest.fixture
async def client(metaserver) -> AsyncIterator[Client]:
    """Watch of the subject "a"."""
    async with watching(metaserver, "a") as client:
        yield client


@pytest.fixture
def polls_soon(quick, monkeypatch):
    """On a busy machine a poll may then come before the stream."""
    monkeypatch.setattr(route_watch, "POLL_AFTER_S", 0.05)


async def test_new_stream_brings_changed_routes():
    """Weakness 25: polls of QMQ's clients carry the whole answer, each minute."""

    async with cluster("g1") as (metaserver, [broker]), watching(metaserver, "a", "b") as client:
        await until_async(lambda: client.brought == ["a", "b"])
        metaserver.requests.clear()
        metaserver.refuse["b"] = "changed meanwhile"
        await metaserver.stop_grpc()
        await metaserver.open_grpc()
        await until_async(lambda: any(request.subjects for request in metaserver.requests) and len(client.brought) > 2)
        assert set(client.brought[2:]) == {"b"}
        first = next(request for request in metaserver.requests if request.subjects)  # without confirmations
        assert set(first.subjects) == set(first.held) == {"a", "b"}


async def test_routes_in_use_are_confirmed(metaserver, broker, client):
    """Weakness 20: QMQ does not report how many producers still use an old route."""
    await until_async(lambda: metaserver.confirmed() == {"a": metaserver.route_now("a").version})
    metaserver.set_group(broker, writable=False)
    await until_async(lambda: metaserver.confirmed() == {"a": metaserver.route_now("a").version})
    assert client.writable("a") == {"g1": False}
    assert [len(request.subjects) for request in metaserver.requests] == [1, 0, 0]


async def test_confirmation_delays_no_request(monkeypatch):
    monkeypatch.setattr(route_watch, "CONFIRM_WITHIN_S", 1e9)

    async with cluster("g1") as (metaserver, [broker]), watching(metaserver, "a") as client:
        await until_async(lambda: client.brought == ["a"])
        client.watch.watch("b")
        await until_async(lambda: client.brought == ["a", "b"])
        a, b = metaserver.route_now("a").version, metaserver.route_now("b").version
        assert [(list(request.subjects), dict(request.held)) for request in metaserver.requests] == [
            (["a"], {}),
            (["b"], {"a": a}),
        ]
        metaserver.requests.clear()
        await metaserver.stop_grpc()
        await metaserver.open_grpc()
        await until_async(lambda: metaserver.requests)
        assert metaserver.requests[0].held == {"a": a, "b": b}, "a new stream says it at once"


async def test_an_error_never_empties_a_route(metaserver, broker, client):
    """Weakness 18: QMQ's refusal takes all groups from a consumer."""
    await until_async(lambda: client.writable("a") == {"g1": True})
    version = metaserver.route_now("a").version
    metaserver.refuse["a"] = "the database does not answer"
    metaserver.notify()
    await until_async(lambda: len(client.brought) >= 2)
    assert client.writable("a") == {"g1": True}
    assert "does not answer" in client.routing.why_not("a")
    assert metaserver.confirmed() == {"a": version}, "what is in use is still the route before"
    del metaserver.refuse["a"]
    metaserver.set_group(broker, writable=False)
    await until_async(lambda: client.writable("a") == {"g1": False})
    await metaserver.stop()
    client.watch.refresh()
    await until_async(lambda: client.watch._failure)
    assert client.writable("a") == {"g1": False}


async def test_no_groups_on_purpose_are_no_groups(metaserver, client):
    """Weakness 19: with QMQ, an empty route and an error look the same."""
    await until_async(lambda: client.writable("a") == {"g1": True})
    metaserver.groups.clear()
    metaserver.notify()
    await until_async(lambda: client.writable("a") == {})


@pytest.mark.usefixtures("polls_soon")
async def test_blocked_grpc_falls_back_to_http(caplog, metaserver, broker):
    caplog.set_level(logging.INFO)

    await metaserver.block_grpc()
    async with watching(metaserver, "a") as client:
        await until_async(lambda: client.writable("a") == {"g1": True})
        metaserver.set_group(broker, writable=False)
        await until_async(lambda: client.writable("a") == {"g1": False})
        client.watch.watch("b")
        await until_async(lambda: client.writable("b"))
        await until_async(lambda: len(metaserver.polls[-1].get("held", ())) == 2)
        assert client.brought == ["a", "a", "b"], "each poll brings what differs"
        assert metaserver.polls[-1]["produces"] == ["true"] and not metaserver.requests
        await metaserver.unblock_grpc()
        await until_async(lambda: metaserver.requests)
        metaserver.set_group(broker, writable=True, term=2)
        await until_async(lambda: client.writable("a") == {"g1": True})
        count = len(metaserver.polls)
        await until_async(lambda: "routes come over gRPC again" in caplog.text)
        await settle()
        assert len(metaserver.polls) == count, "who has a stream does not poll"


@pytest.mark.parametrize("way", ["a stream", "a stream, behind an error of gRPC's own", "HTTP"])
@pytest.mark.usefixtures("polls_soon")
async def test_rejected_token_is_logged(way, caplog):
    """A consumer has no receipt for this error, and waits: a metaserver may not have a new token yet."""

    class Hasty(LocalMetaserver):
        """A request may fail on a call that has ended: then gRPC's own error comes first."""

        calls = 0

        async def WatchRoutes(self, requests, context):
            self.calls += 1
            if self.calls == 1 and way.endswith("own"):
                await context.abort(grpc.StatusCode.INTERNAL, "Internal error from Core")
            async for update in super().WatchRoutes(requests, context):
                yield update

    metaserver = Hasty()
    await metaserver.start()
    try:
        if way == "HTTP":
            await metaserver.block_grpc()
        async with watching(metaserver, "a", token="wrong") as client:
            text = f"rejects the token: unknown token metaserver={metaserver.url}"
            await until_async(lambda: text in caplog.text)
            assert "unknown token" in str(client.watch.refused)
    finally:
        await metaserver.stop()
    assert [record.levelname for record in caplog.records if "rejects the token" in record.message][0] == "ERROR"


@pytest.mark.usefixtures("polls_soon")
async def test_many_subjects_are_polled_in_several_requests(metaserver):
    names = [f"{number:03d}" + "ü" * 48 for number in range(100)]
    await metaserver.block_grpc()
    async with watching(metaserver, *names) as client:
        await until_async(lambda: set(client.brought) == set(names))
        assert max(len(words["subject"]) for words in metaserver.polls) <= 40


async def test_all_readonly_route_reaches_producers():
    """Weakness 19: QMQ's producers then keep the old route, so the operator's order has no effect."""

    async with cluster("g1", "g2") as (metaserver, brokers), producer_of(metaserver, timeout_s=3.0) as producer:
        assert (await producer.send(Message("a", {}))).is_stored
        for broker in brokers:
            metaserver.set_group(broker, writable=False)
        await until_async(lambda: metaserver.confirmed() == {"a": metaserver.route_now("a").version})
        attempts = [len(broker.attempts) for broker in brokers]
        receipt = await producer.send(Message("a", {}))
        assert receipt.outcome is qmq.Outcome.REFUSED
        assert receipt.reason == "g1: readonly; g2: readonly"
        assert [len(broker.attempts) for broker in brokers] == attempts
        waiting = asyncio.create_task(producer.send(Message("a", {})))
        await asyncio.sleep(0)
        metaserver.set_group(brokers[1], writable=True)
        assert (await waiting).broker_group == "g2", "the waiting call ends as soon as a group accepts produces"


async def test_consumer_keeps_a_refused_route(metaserver, producer):
    """Weaknesses 17 and 18."""
    consumer = qmq.Consumer(metaserver=metaserver.url, app="test", token=TOKEN)
    async with consumer.pull("a", group="g", start="earliest") as puller:
        await producer.send(Message("a", {"n": "1"}))
        assert len(await puller.pull(10, timeout=60)) == 1
        metaserver.refuse["a"] = "the database does not answer"
        metaserver.notify()
        await until_async(lambda: len(metaserver.updates) >= 4)
        await producer.send(Message("a", {"n": "2"}))
        assert len(await puller.pull(10, timeout=60)) == 1


async def test_requests_move_to_the_next_stream(monkeypatch):
    monkeypatch.setattr(route_watch, "ANSWER_TIMEOUT_S", 1000.0)

    async with cluster("g1") as (metaserver, _), watching(metaserver, "a") as client:
        await until_async(lambda: client.writable("a"))
        for number in range(3):
            metaserver.requests.clear()
            await metaserver.stop_grpc()
            await metaserver.open_grpc()
            await until_async(lambda: metaserver.requests)
            client.watch.watch(f"b{number}")
            await until_async(lambda number=number: client.writable(f"b{number}"))


@pytest.mark.usefixtures("polls_soon")
async def test_a_poll_that_a_stream_overtook_changes_nothing(monkeypatch, metaserver, broker):
    """The poll's answer is older, and the metaserver would not send the newer one again."""
    await metaserver.block_grpc()
    polling, go_on = threading.Event(), threading.Event()
    poll = route_watch.poll

    def late(*args, **options):
        routes = poll(*args, **options)
        polling.set()
        go_on.wait(60)
        return routes

    monkeypatch.setattr(route_watch, "poll", late)
    async with watching(metaserver, "a") as client:
        await until_async(polling.is_set)
        metaserver.set_group(broker, writable=False)
        await metaserver.unblock_grpc()
        version = metaserver.route_now("a", GroupKind.NORMAL).version
        await until_async(lambda: metaserver.confirmed().get("a") == version)
        assert client.writable("a") == {"g1": False}
        go_on.set()
        client.watch.watch("b")
        await until_async(lambda: client.writable("b"))
        assert client.writable("a") == {"g1": False} and metaserver.confirmed()["a"] == version


async def test_refreshes_are_rate_limited():
    """Each failed connect asks for fresh routes; a thousand clients of one dead broker would be a storm."""

    async with cluster("g1") as (metaserver, _), watching(metaserver, "a", "b") as client:
        await until_async(lambda: len(metaserver.confirmed()) == 2)
        metaserver.requests.clear()
        for number in range(5):
            client.watch.refresh()
            await until_async(lambda: metaserver.requests and client.watch._asked_at is None)
            client.watch.watch(f"new{number}")
            await until_async(lambda number=number: client.writable(f"new{number}"))
        assert sum("a" in request.subjects for request in metaserver.requests) == 1


async def test_subject_added_during_a_write_is_requested():
    """Otherwise its first message waits until something else changes."""

    watch = Client(LocalMetaserver(), "a").watch
    requests = watch._requests(asyncio.Event())
    assert (await anext(requests)).subjects == ["a"]
    watch.watch("b")
    assert (await anext(requests)).subjects == ["b"]


async def test_requests_have_bounded_size(monkeypatch):
    monkeypatch.setattr(route_watch, "REQUEST_SUBJECTS_MAX", 3)
    names = [f"s{number}" for number in range(10)]

    async with cluster("g1") as (metaserver, [broker]), watching(metaserver, *names) as client:
        await until_async(lambda: sorted(client.brought) == names)
        await until_async(lambda: sorted(metaserver.confirmed()) == names)
        metaserver.set_group(broker, writable=False)
        versions = {name: metaserver.route_now(name).version for name in names}
        await until_async(lambda: metaserver.confirmed() == versions)
        client.watch.forget(names[:7])
        client.watch.watch(names[6])
        await until_async(lambda: client.brought.count(names[6]) == 3)
        await until_async(lambda: sum(len(request.forgotten) for request in metaserver.requests) == 7)
        forgotten = [at for at, one in enumerate(metaserver.requests) if names[6] in one.forgotten]
        asked = [at for at, one in enumerate(metaserver.requests) if names[6] in one.subjects]
        assert asked[-1] >= forgotten[-1], "what is watched again was forgotten first"
        sizes = [max(map(len, (request.subjects, request.held, request.forgotten))) for request in metaserver.requests]
        assert max(sizes) == 3
        assert [name for request in metaserver.requests for name in request.forgotten] == names[:7]


async def test_refused_subject_is_requested_again(monkeypatch, metaserver):
    monkeypatch.setattr(route_watch, "REPEAT_S", 0.05)

    metaserver.refuse["b"] = "one subject too many"
    async with watching(metaserver, "a", "b") as client:
        await until_async(lambda: client.watch.refusals == {"b": "one subject too many"})
        assert client.writable("a") == {"g1": True}
        del metaserver.refuse["b"]  # without a notification
        await until_async(lambda: client.writable("b"))
        assert client.watch.refusals == {} and client.watch.trouble == ""


@pytest.mark.usefixtures("polls_soon")
async def test_lasting_silence_is_trouble(monkeypatch):
    monkeypatch.setattr(route_watch, "TROUBLE_S", 0.2)

    async with cluster("g1") as (metaserver, _), watching(metaserver, "a") as client:
        await until_async(lambda: client.writable("a"))
        await metaserver.stop()
        await until_async(lambda: client.watch.trouble)
        await metaserver.start(metaserver.http_port)
        await until_async(lambda: not client.watch.trouble)
        await metaserver.block_grpc()
        client.watch.watch("b")
        await until_async(lambda: client.writable("b"))
        assert client.watch.trouble == "", "polls keep routes up to date"


async def test_idle_routes_are_forgotten(monkeypatch, metaserver, broker, producer):
    monkeypatch.setattr(route_watch, "KEPT", 2)

    names = [f"s{number}" for number in range(6)]
    for name in names:
        assert (await producer.send(Message(name, {}, order_key="k"))).is_stored
    sender = producer._senders.of(is_delayed=False)
    broker.holds.add(Command.PRODUCE)
    waiting = asyncio.create_task(producer.send(Message("s0", {})))
    await until_async(lambda: broker.held)
    sender._watch._forget_idle()
    assert len(sender._queues) == 6, "all were used since the last time"
    sender._watch._forget_idle()
    assert list(sender._queues) == ["s0", "s4", "s5"], "the message of s0 has no outcome yet"
    assert list(sender._lanes) == list(sender._watch._held) == list(sender._queues)
    broker.release()
    assert (await waiting).is_stored
    for name in names:
        assert (await producer.send(Message(name, {}, order_key="k"))).is_stored
    assert {name for request in metaserver.requests for name in request.forgotten} == {"s1", "s2", "s3"}


@pytest.mark.parametrize("is_streaming", [True, False], ids=["gRPC", "polls"])
@pytest.mark.usefixtures("polls_soon")
async def test_another_metaserver_follows_a_dead_one(is_streaming):
    async with cluster("g1") as (first, [broker]), cluster("g1") as (second, _):
        if not is_streaming:
            await first.block_grpc()
            await second.block_grpc()
        both = SimpleNamespace(url=f"{first.url},{second.url}")
        second.set_group(broker, writable=True)
        async with watching(both, "a") as client:
            await until_async(lambda: client.brought)
            used, other = (first, second) if first.requests or not is_streaming else (second, first)
            await used.stop()
            other.set_group(broker, writable=False)
            await until_async(lambda: client.writable("a") == {"g1": False})


async def test_clients_without_arguments_use_the_environment(monkeypatch, metaserver):
    for name, value in {"METASERVER": metaserver.url, "APP": "shop", "TOKEN": TOKEN}.items():
        monkeypatch.setenv(f"QMQ_{name}", value)
    async with qmq.Producer() as producer:
        assert (await producer.send(qmq.Message("a"))).is_stored
    assert metaserver.requests[0].app == "shop"
    assert qmq.Consumer() and qmq.blocking.Producer() and qmq.blocking.Consumer()


async def test_read_that_fails_while_it_is_cancelled_is_no_unseen_error(monkeypatch):
    reading = asyncio.Event()

    class Stream:
        async def read(self):
            reading.set()
            try:
                await asyncio.Event().wait()
            finally:
                raise OSError("the connection broke")  # as grpcio's read does

        def cancel(self):
            pass

    monkeypatch.setattr(route_watch, "MetaserverStub", lambda _: SimpleNamespace(WatchRoutes=lambda *_, **__: Stream()))
    unseen = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unseen.append(context))
    async with cluster("g1") as (metaserver, _), watching(metaserver, "a"):
        await reading.wait()
    await settle()
    gc.collect()
    assert not unseen
