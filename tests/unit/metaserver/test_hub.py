"""Shell. Updates of routes: watchers of each change, bytes, and the count of old routes."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from unittest.mock import patch

import pytest

from qmq.errors import NotServed
from qmq.metaserver.cluster.mirror import Changes
from qmq.metaserver.model import Broker, Directory, Group, ReadonlyMark, Route
from qmq.metaserver.observability.metrics import Metrics
from qmq.metaserver.routes import hub as watch_module
from qmq.metaserver.routes.audience import Bounds, Counts, Quotas
from qmq.metaserver.routes.hub import TooManyWatches, WatchHub
from qmq.metaserver.routes.placement import Loads, Placement, is_short
from qmq.proto import qmq_pb2 as pb
from qmq.rights import Caller, Scope, TokenRole
from qmq.types import Role
from tests.support.waiting import settle, until_async

WAIT_S = 60
ANYBODY = Caller("app", TokenRole.CLIENT)
CLUSTER = Caller("cluster", TokenRole.CLUSTER)


class Registry:
    """A registry for the hub; its database can be away."""

    def __init__(self, groups=("g1", "g2")):
        self.changes = Changes()
        self.directory = Directory({name: _group(name) for name in groups})
        self.routes = {}
        self.routes_version = 0
        self.down = set()
        self.stored = []
        self.error = self.held_up = None

    def find(self, subject):
        return self.routes.get(subject)

    def is_short(self, subject, groups):
        return is_short(subject, groups, self.directory, groups_min=2)

    def is_writable(self, group):
        return group.name not in self.down

    async def routes_for(self, subjects):
        self.stored.append(list(subjects))
        if self.held_up:
            await self.held_up.wait()
        if self.error:
            raise self.error
        placement = Placement(self.directory, self.is_writable, Loads(), groups_min=2, groups_new=2)
        for subject in subjects:
            before = self.routes.get(subject, Route(subject, (), 0))
            if groups := placement.choose(subject, before.groups):
                self.routes[subject] = Route(subject, groups, before.version + 1)

    def change(self, **changes):
        self.directory = replace(self.directory, **changes)
        self.changes.publish()

    def mark(self, *marks):
        self.change(marks=frozenset(ReadonlyMark(*mark) for mark in marks))

    def set_down(self, *names):
        self.down = set(names)
        self.changes.publish()


def _group(name, term=1):
    return Group(name, term, Broker(name, Role.MASTER, name, "10.0.0.1", 1, 2), (), 0)


class Client:
    """Client end of a stream. `stuck`: it does not read."""

    def __init__(self, hub, *, produces=True, caller=ANYBODY, looks_only=False):
        self.updates = []
        self.routes = {}
        self.data = []
        self.stuck = None
        self._news = asyncio.Event()
        self.hub = hub
        self.watch = hub.join(
            app="shop", client_id="c", produces=produces, caller=caller, send=self._send, looks_only=looks_only
        )

    async def _send(self, data):
        if self.stuck:
            await self.stuck.wait()
        update = pb.RouteUpdate.FromString(data)
        self.data.append(data)
        self.updates.append([route.subject for route in update.routes])
        self.routes.update({route.subject: route for route in update.routes})
        self._news.set()

    async def ask(self, *subjects, held=None):
        count = len(self.updates)
        await self.hub.ask(self.watch, subjects, held or {})
        await self.until(lambda: len(self.updates) > count)
        return self.updates[count]

    async def until(self, condition):
        async with asyncio.timeout(WAIT_S):
            while not condition():
                self._news.clear()
                await self._news.wait()

    async def until_writable(self, subject, **groups):
        await self.until(lambda: self.writable(subject) == groups)

    def writable(self, subject):
        return {group.broker_group: group.writable for group in self.routes[subject].groups}

    def version(self, subject):
        return self.routes[subject].version

    def confirm(self, *subjects):
        self.hub.confirm(self.watch, {subject: self.version(subject) for subject in subjects or self.routes})


@pytest.fixture
def registry(request):
    marker = request.node.get_closest_marker("hub")
    return Registry(marker.args if marker and marker.args else ("g1", "g2"))


@pytest.fixture
async def hub(request, registry):
    """A hub on `registry`; marker `hub` names groups and options."""
    marker = request.node.get_closest_marker("hub")
    options = dict(marker.kwargs) if marker else {}
    allow = options.pop("allow", lambda caller, wanted: (wanted, ""))
    bounds = {"subjects_max": 100, "token_subjects_max": 10_000, "token_watches_max": 10_000} | options
    hub = WatchHub(registry, Metrics(), allow, Quotas(Bounds(*bounds.values())))
    running = asyncio.create_task(hub.run())
    await until_async(lambda: hub._views.state)
    yield hub
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_looking_creates_no_subject(registry, hub):
    await Client(hub).ask("known")
    looker = Client(hub, looks_only=True)
    assert await looker.ask("known", "typo") == ["known", "typo"]
    assert looker.writable("known") == {"g1": True, "g2": True}
    assert not looker.routes["typo"].groups and "typo has no route yet" in looker.routes["typo"].refused
    registry.set_down("g1")
    await looker.until_writable("known", g1=False, g2=True)
    assert registry.stored == [["known"]] and registry.find("typo") is None
    client = Client(hub)
    await client.ask("typo")
    assert client.routes["typo"].groups, "other clients create it"


async def test_new_subjects_are_stored_in_batches(registry, hub):
    registry.held_up = asyncio.Event()
    clients = [Client(hub) for _ in range(50)]
    asking = [asyncio.create_task(client.ask(f"s{number}")) for number, client in enumerate(clients)]
    await until_async(lambda: registry.stored)
    registry.held_up.set()
    await asyncio.gather(*asking)
    assert sum(map(len, registry.stored)) == 50 and len(registry.stored) <= 2
    assert clients[7].writable("s7") == {"g1": True, "g2": True}


async def test_resumed_client_gets_differences(registry, hub):
    """Weakness 25: every poll of QMQ's clients carries the whole answer."""
    before = Client(hub)
    await before.ask("a", "b")
    held = {subject: before.version(subject) for subject in "ab"}
    hub.leave(before.watch)
    registry.mark(("b", "g1"))
    again = Client(hub)
    assert await again.ask("a", "b", held=held) == ["b"]
    assert await again.ask("a", "b") == [], "each request is answered, also without a change"
    assert await again.ask("a", held={"a": 4711}) == ["a"], "a version that another metaserver sent"


async def test_mark_updates_its_subject_only(registry, hub):
    """Weaknesses 20 and 25: QMQ's clients poll, and see a change after up to a minute."""
    clients = [Client(hub) for _ in range(3)]
    for client in clients:
        await client.ask("a")
    bystander = Client(hub)
    await bystander.ask("b")
    registry.mark(("a", "g1"))
    for client in clients:
        await client.until_writable("a", g1=False, g2=True)
    route = clients[0].routes["a"].SerializeToString(deterministic=True)
    assert all(client.data[-1].endswith(route) for client in clients)
    assert len(bystander.updates) == 1


async def test_group_state_reaches_all_subjects(registry, hub):
    client = Client(hub)
    await client.ask("a", "b")
    registry.set_down("g2")
    await client.until_writable("b", g1=True, g2=False)
    await client.until_writable("a", g1=True, g2=False)
    registry.change(groups={"g1": _group("g1"), "g2": _group("g2", term=2)})
    await client.until(lambda: client.routes["a"].groups[1].term == 2)


async def test_all_readonly_route_is_sent(registry, hub):
    """Weakness 19: QMQ then answers "no groups", which its producers ignore as an error."""
    client = Client(hub)
    await client.ask("a")
    registry.mark(("*", "g1"), ("*", "g2"))
    await client.until_writable("a", g1=False, g2=False)
    assert client.routes["a"].refused == ""


async def test_derived_subjects_have_the_real_route(registry, hub):
    client = Client(hub, produces=False)
    names = ["a", "%RETRY%a%g", "%DEAD_RETRY%a%g"]
    assert set(await client.ask(*names)) == set(names)
    assert list(registry.routes) == ["a"]
    registry.mark(("a", "g1"))
    for name in names:
        await client.until_writable(name, g1=False, g2=True)


@pytest.mark.hub("g1")
async def test_short_route_is_served_then_extended(registry, hub):
    """Weakness 17: a subject with fewer groups than min.group.num must not depend on the database."""
    registry.routes["a"] = Route("a", ("g1",), 1)
    registry.error = OSError("away")
    client = Client(hub)
    await client.ask("a")
    assert client.writable("a") == {"g1": True} and registry.stored == [], "no other group exists"
    registry.change(groups={"g1": _group("g1"), "g2": _group("g2")})
    await until_async(lambda: registry.stored)
    assert client.writable("a") == {"g1": True}
    registry.error = None
    await client.until_writable("a", g1=True, g2=True)


async def test_known_routes_survive_database_outage(registry, hub):
    """Weaknesses 15 and 18: an error concerns the new subject only, and names its cause."""
    client = Client(hub)
    await client.ask("known")
    registry.error = OSError("SELECT secret")
    await client.ask("hidden")
    assert "secret" not in client.routes["hidden"].refused
    registry.error = NotServed("the database does not answer: new subjects wait")
    assert await client.ask("new", "known") == ["new"]
    assert "cannot be stored now: the database does not answer" in client.routes["new"].refused
    registry.mark(("known", "g1"))
    await client.until_writable("known", g1=False, g2=True)
    registry.error = None
    await client.until(lambda: not client.routes["new"].refused)
    assert client.writable("new") == {"g1": True, "g2": True}


async def test_hanging_database_does_not_delay_known_routes(registry, hub):
    """Weakness 15."""
    client, other = Client(hub), Client(hub)
    await client.ask("known")
    registry.held_up = asyncio.Event()
    asking = asyncio.create_task(client.ask("new", "known"))
    assert await other.ask("known") == ["known"]
    registry.mark(("known", "g1"))
    await other.until_writable("known", g1=False, g2=True)
    assert await asking == ["known"], "the answer leaves out the new subject after a moment"
    registry.held_up.set()
    await client.until(lambda: "new" in client.routes)


async def test_route_follows_first_and_last_group(registry, hub):
    registry.change(groups={})
    client = Client(hub)
    await client.ask("a")
    assert "AddBroker" in client.routes["a"].refused
    registry.change(groups={"g1": _group("g1")})
    await client.until_writable("a", g1=True)
    registry.change(groups={})
    await client.until(lambda: client.routes["a"].refused)


@pytest.mark.hub(subjects_max=3)
async def test_subject_over_the_bound_is_refused_alone(registry, hub):
    client = Client(hub)
    await client.ask("a", "b", "c")
    assert await client.ask("a", "d") == ["d"]
    assert "watches 3 subjects, the most that one may (watch_subjects_max)" in client.routes["d"].refused
    registry.set_down("g2")
    for subject in "abc":
        await client.until_writable(subject, g1=True, g2=False)
    assert list(client.watch.seats) == ["a", "b", "c"], "refused subjects use no memory"
    assert list(hub._quotas.refusals(time.monotonic())) == ["app"]
    hub.forget(client.watch, ["b", "none of its own"])
    assert await client.ask("d") == ["d"] and client.writable("d")["g1"]


@pytest.mark.hub(token_subjects_max=3)
async def test_subjects_are_bounded_per_token(registry, hub):
    first, second = Client(hub), Client(hub)
    await first.ask("a", "b")
    await second.ask("b", "c")
    refused = "token 'app' watches 3 subjects, the most that one token may (token_subjects_max)"
    assert second.writable("b") and refused in second.routes["c"].refused
    stranger, cluster = Client(hub, caller=Caller("other", TokenRole.CLIENT)), Client(hub, caller=CLUSTER)
    for client in (stranger, cluster):
        await client.ask("c", "d")
        assert client.writable("c") and client.writable("d")
    await cluster.ask("e", "f")
    assert cluster.writable("f")
    hub.leave(first.watch)
    await second.ask("c")
    assert second.writable("c"), "there is room again"


@pytest.mark.hub(token_watches_max=2)
async def test_watches_are_bounded_per_token(registry, hub):
    first = Client(hub)
    await first.ask("a")
    await hub.poll(["a"], {}, ANYBODY, app="shop", client_id="p", produces=True)
    with pytest.raises(TooManyWatches, match=r"token 'app' has 2 watches, .* \(token_watches_max\)"):
        Client(hub)
    with pytest.raises(TooManyWatches):
        await hub.poll(["a"], {}, ANYBODY, app="shop", client_id="q", produces=True)
    assert await hub.poll(["b"], {}, ANYBODY, app="shop", client_id="p", produces=True), "this one is known"
    Client(hub, caller=CLUSTER)
    registry.set_down("g2")
    await first.until_writable("a", g1=True, g2=False)
    hub.leave(first.watch)
    await Client(hub).ask("a")


@pytest.mark.hub(subjects_max=3)
async def test_poll_releases_unused_subjects(registry, hub):
    for subject in "abcdef":
        [route] = await hub.poll([subject], {}, ANYBODY, app="shop", client_id="p", produces=True)
        assert not route.message.refused
    assert hub._quotas.subjects == 3


async def test_updates_have_a_bounded_size(registry, hub):
    client, names = Client(hub), [f"s{number}" for number in range(30)]
    with patch.object(watch_module, "UPDATE_ROUTES_MAX", 7):
        await hub.ask(client.watch, names, {})
        await client.until(lambda: set(client.routes) == set(names))
        registry.set_down("g2")
        for name in names:
            await client.until_writable(name, g1=True, g2=False)
    assert max(map(len, client.updates)) == 7


async def test_forgotten_route_is_new_when_requested_again(registry, hub):
    client = Client(hub)
    await client.ask("a", "b")
    hub.forget(client.watch, ["a"])
    registry.set_down("g2")
    await client.until_writable("b", g1=True, g2=False)
    assert client.writable("a") == {"g1": True, "g2": True}
    assert hub.old_routes("g2", "a") == Counts(0, 0, 0)
    await client.ask("a")
    assert client.writable("a") == {"g1": True, "g2": False}


async def test_invalid_subjects_are_refused_one_by_one(registry, hub):
    client = Client(hub, caller=Caller("shop", TokenRole.CLIENT, Scope(("a", "consume:b"))))
    await client.ask("a", "b", "c/d", "%RETRY%a%g")
    assert client.writable("a") and "limited" in client.routes["b"].refused and client.routes["c/d"].refused
    assert client.writable("%RETRY%a%g")
    assert list(registry.routes) == ["a"]
    consumer = Client(hub, produces=False, caller=client.watch.caller)
    await consumer.ask("b")
    assert consumer.writable("b")


@pytest.mark.hub(allow=lambda caller, wanted: (min(wanted, 2), "" if wanted <= 2 else "too many"))
async def test_new_subjects_over_the_allowance_wait(registry, hub):
    client = Client(hub)
    await client.ask("a", "b", "c", "d")
    assert [bool(client.routes[name].refused) for name in "abcd"] == [False, False, True, True]
    assert hub._quotas.refusals(time.monotonic()) == {"app": "too many"}, "for Doctor"
    await client.until(lambda: not any(client.routes[name].refused for name in "abcd"))


async def test_slow_client_gets_newest_route_only(registry, hub):
    slow, fast = Client(hub), Client(hub)
    await slow.ask("a")
    await fast.ask("a")
    slow.stuck = asyncio.Event()
    for down in ("g1", "g2", "g1", "g2"):
        registry.set_down(down)
        await fast.until(lambda down=down: not fast.writable("a")[down])
    slow.stuck.set()
    await slow.until_writable("a", g1=True, g2=False)
    assert len(fast.updates) == 5 and len(slow.updates) == 3, "the update in flight and the newest"


async def test_sends_in_progress_are_bounded(registry, hub):
    most_allowed = watch_module.UPDATED_AT_ONCE * watch_module.BATCHES_UNDER_WAY
    count, sent = 2 * most_allowed, []
    under_way = most = 0

    async def send(peer):
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        for _ in range(20):  # longer than all those turns
            await asyncio.sleep(0)
        under_way -= 1
        sent.append(peer)

    for number in range(count):
        caller = replace(ANYBODY, peer=f"peer{number % 10}")
        watch = hub.join(app="", client_id="", produces=True, caller=caller, send=lambda _, who=caller.peer: send(who))
        await hub.ask(watch, ["a"], {})
    await until_async(lambda: len(sent) == count)
    sent.clear()
    most = 0
    with patch.object(
        watch_module, "SEND_WAIT_S", WAIT_S
    ):  # otherwise a busy machine looks like a client that does not read
        registry.set_down("g1")
        await until_async(lambda: len(sent) == count)
    assert most <= most_allowed
    assert sent == sorted(sent)


async def test_slow_client_delays_others_once(registry, hub):
    slow, *others = [Client(hub) for _ in range(6 * watch_module.UPDATED_AT_ONCE)]
    for client in (slow, *others):
        await client.ask("a")
    slow.stuck = asyncio.Event()
    for down in ("g1", "g2"):
        registry.set_down(down)
        for client in others:
            await client.until(lambda client=client, down=down: not client.writable("a")[down])
    slow.stuck.set()
    await slow.until_writable("a", g1=True, g2=False)


async def test_old_route_counts_until_confirmed(registry, hub):
    """Weakness 20: QMQ cannot count the producers with an old route."""
    producer, consumer, other = Client(hub), Client(hub, produces=False), Client(hub)
    for client, subject in ((producer, "a"), (consumer, "a"), (other, "b")):
        await client.ask(subject)
        client.confirm()
    assert hub.old_routes("g1", "a") == Counts(1, 1, 2), "all have a route with g1"
    registry.mark(("a", "g1"))
    await producer.until_writable("a", g1=False, g2=True)
    await consumer.until_writable("a", g1=False, g2=True)
    assert hub.old_routes("g1", "a") == Counts(1, 1, 2), "sent, not confirmed"
    producer.confirm()
    assert hub.old_routes("g1", "a") == Counts(0, 1, 2)
    assert hub.old_routes("g1", "*") == Counts(1, 1, 3), "and the producer of b"
    hub.leave(consumer.watch)
    assert hub.old_routes("g1", "a") == Counts(0, 0, 1)


async def test_resumed_old_route_counts_until_confirmed(registry, hub):
    first = Client(hub)
    await first.ask("a")
    held = {"a": first.version("a")}
    hub.leave(first.watch)
    registry.mark(("*", "g1"))
    again = Client(hub)
    await again.ask("a", held=held)
    await again.until(lambda: "a" in again.routes)
    assert hub.old_routes("g1", "*") == Counts(1, 0, 1)
    again.confirm()
    assert hub.old_routes("g1", "*") == Counts(0, 0, 1)


async def test_polling_client_gets_differences(registry, hub):
    async def poll(held):
        routes = await hub.poll(["a"], held, ANYBODY, app="shop", client_id="p", produces=True)
        return [route.message for route in routes]

    (route,) = await poll({})
    assert [group.broker_group for group in route.groups] == ["g1", "g2"]
    assert await poll({"a": route.version}) == []
    registry.mark(("*", "g1"))
    assert hub.old_routes("g1", "*") == Counts(1, 0, 1)
    async with asyncio.timeout(WAIT_S):
        while not (changed := await poll({"a": route.version})):
            await asyncio.sleep(0)
    (route,) = changed
    assert hub.old_routes("g1", "*") == Counts(1, 0, 1)
    assert await poll({"a": route.version}) == []
    assert hub.old_routes("g1", "*") == Counts(0, 0, 1)
    assert [(client.client_id, client.streams) for client in hub.clients()] == [("p", False)]
    watch = next(iter(hub._audience.watches))
    watch.seen_s -= watch_module.POLL_KEPT_S
    assert hub.old_routes("g1", "*") == Counts(0, 0, 0) and hub.clients() == []


async def test_clients_that_left_use_no_memory(registry, hub):
    clients = [Client(hub) for _ in range(3)]
    for client in clients:
        await client.ask("a", "%RETRY%a%g", "x/y")
    assert [client.subjects for client in hub.clients()] == [("a", "%RETRY%a%g", "x/y")] * 3
    for client in clients:
        hub.leave(client.watch)
    audience = hub._audience
    assert not any(client.watch.seats for client in clients), "circles stop the process when they are collected"
    assert not (audience.entries or audience.watches or audience._by_group or audience._more or hub._short)


async def test_route_is_sent_once_groups_serve(registry, hub):
    """Clients see no difference before: the route is equal with and without such a group."""
    client = Client(hub)
    await client.ask("a")
    registry.routes["a"] = Route("a", ("g1", "g2", "g3"), 2)
    registry.routes_version += 1
    registry.changes.publish()
    await until_async(lambda: hub._routes_version == registry.routes_version)
    registry.change(groups={name: _group(name) for name in ("g1", "g2", "g3")})
    await client.until_writable("a", g1=True, g2=True, g3=True)


async def test_reverted_route_is_sent_again(registry, hub):
    """A client may send its versions before an update in flight arrives."""
    client = Client(hub)
    await client.ask("a")
    entry, first = hub._audience.entries["a"], client.version("a")
    client.stuck = asyncio.Event()
    for marks in ([("a", "g1")], []):
        registry.mark(*marks)
        while (entry.route.version == first) is bool(marks):
            await asyncio.sleep(0)
        await settle()
    await hub.ask(client.watch, ["a"], {"a": first})
    client.stuck.set()
    await client.until(lambda: len(client.updates) == 3)
    assert client.updates[1:] == [["a"], ["a"]] and client.version("a") == first
