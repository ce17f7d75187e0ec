"""Shell. Consumer groups are stored once, when they first appear in the cluster (decision 80)."""

from __future__ import annotations

import asyncio

import pytest

from qmq.errors import NotServed
from qmq.metaserver.cluster.group_starts import CLOCKS_MS, STALE_MS, Begin, NewGroup
from qmq.metaserver.rpc import servicer
from qmq.metaserver.rpc.servicer import ConsumerGroups
from qmq.metaserver.storage.changes import RestoreAll
from qmq.metaserver.storage.database import DatabaseAway

NOW_MS = 1_800_000_000_000
BILLING = NewGroup("s1", "billing", latest=True, since_ms=0, broadcast=False)
FIRST = Begin(0, "", NOW_MS)


class Masters:
    """Masters of broker groups with their positions. `before` is called at each query."""

    def __init__(self):
        self.known = {}
        self.silent = set()
        self.asked = []
        self.before = lambda: asyncio.sleep(0)

    async def mark_groups(self, broker, mark, groups):
        self.asked.append((broker.group, mark))
        await self.before()
        if broker.group in self.silent:
            raise NotServed("does not answer")
        return [group.key in self.known.get(broker.group, ()) for group in groups]


async def made(world, *, groups=("g1", "g2"), subject="s1"):
    await world.running_copies("g1", "g2", "g3")
    await world.routed(subject, groups=groups)
    masters = Masters()
    return ConsumerGroups(world.registry, world.database, masters), masters


@pytest.fixture(autouse=True)
def at_noon(monkeypatch):
    clock = [NOW_MS]
    monkeypatch.setattr(servicer, "wall_ms", lambda: clock[0])
    return clock


async def begin(groups, at, *asked):
    return (await groups.begin(at, asked or (BILLING,)))[0]


async def test_new_group_begins_at_marks_or_first_message(world):
    groups, masters = await made(world)
    first = await begin(groups, "g1")
    assert {name for name, _ in masters.asked} == {"g1", "g2"}, "the one that asks notes its end before the row, too"
    assert first == Begin(NOW_MS - CLOCKS_MS, masters.asked[0][1], NOW_MS)
    masters.asked.clear()
    assert await begin(groups, "g2") == first, "whatever it asks for: it began"
    assert await begin(groups, "g3") == FIRST, "it was no member"
    assert not masters.asked, "a group that is stored costs no question to a broker"


async def test_start_is_resolved_once(world):
    groups, _ = await made(world)
    dated = NewGroup("s1", "dated", latest=False, since_ms=NOW_MS - 5, broadcast=False)
    assert await begin(groups, "g1", dated) == Begin(NOW_MS - 5, "", NOW_MS)
    early = NewGroup("s1", "early", latest=False, since_ms=0, broadcast=False)
    assert await begin(groups, "g1", early) == FIRST
    assert await begin(groups, "g2", early._replace(latest=True)) == FIRST


async def test_group_with_a_position_is_not_new(world):
    """Groups may be older than the table, or an emptied or older database lacks their rows."""
    groups, masters = await made(world)
    masters.known["g1"] = {BILLING.key}
    masters.silent = {"g2"}
    assert await begin(groups, "g2") == FIRST


async def test_silent_broker_group_begins_by_time(world):
    groups, masters = await made(world)
    masters.silent = {"g2"}
    world.stop("g2-a")
    assert (await begin(groups, "g1")).mark
    assert (await begin(groups, "g2")).since_ms == NOW_MS - CLOCKS_MS
    assert {name for name, _ in masters.asked} == {"g1"}, "a master that is known to be down costs no time"


async def test_first_stored_row_counts(world):
    """Both find no row and query; the first write decides."""
    groups, masters = await made(world)
    rival, theirs = ConsumerGroups(world.registry, world.database, Masters()), {}

    async def overtake():
        theirs[await begin(rival, "g2")] = None

    masters.before = overtake
    assert [await begin(groups, "g1")] == list(theirs)


async def test_many_groups_in_one_request(world):
    groups, masters = await made(world)
    asked = [BILLING._replace(group=f"g{number}") for number in range(1_500)]
    await begin(groups, "g1", *asked[:700])
    masters.asked.clear()
    assert len(set(await groups.begin("g1", [*asked, *asked]))) == 2, "two marks"
    assert len(masters.asked) == 2, "one question to each master"


async def test_forgotten_broadcast_consumer_begins_again(world):
    groups, masters = await made(world)
    cache = BILLING._replace(group="cache-7", broadcast=True)
    first = await begin(groups, "g1", cache)
    later = servicer.wall_ms() + STALE_MS + 1
    servicer.wall_ms = lambda: later  # restored by the fixture
    masters.known["g2"] = {cache.key}
    assert await begin(groups, "g1", cache) == first, "one remembers it"
    masters.known.clear()
    masters.silent = {"g2"}
    assert await begin(groups, "g1", cache) == first, "one may remember it"
    masters.silent.clear()
    assert (await begin(groups, "g1", cache)).since_ms == later - CLOCKS_MS
    assert await begin(groups, "g1") == await begin(groups, "g2"), "a group that is no broadcast never begins anew"


async def test_row_holds_whether_it_is_a_broadcast(world):
    groups, masters = await made(world)
    names = {"cache-7": True, "older-cache": True, "billing": False}
    masters.known["g2"] = {("s1", "older-cache")}
    for name, is_broadcast in names.items():
        await begin(groups, "g1", BILLING._replace(group=name, broadcast=is_broadcast))
    rows = await world.database.read(lambda repository: repository.consumer_groups_of("s1"))
    assert {row.group: row.is_broadcast for row in rows} == names


async def test_forget_removes_rows_of_one_subject(world):
    groups, masters = await made(world)
    retries = "%RETRY%s1%billing"
    for subject in ("s1", retries, "s2"):
        await begin(groups, "g1", BILLING._replace(subject=subject))
    await world.done("RemoveSubject", subject="s1")
    left = await world.database.read(lambda repository: repository.consumer_groups_of(""))
    assert [row.subject for row in left] == ["s2"]


async def test_restore_keeps_consumer_groups(world):
    groups, _ = await made(world)
    await begin(groups, "g1")
    dump = await world.database.read(lambda repository: repository.dump())
    await begin(groups, "g1", BILLING._replace(group="newer"))
    await world.database.write(lambda repository: repository.change([RestoreAll(dump)]))
    rows = await world.database.read(lambda repository: repository.consumer_groups_of("s1"))
    assert [row.group for row in rows] == ["billing", "newer"]


async def test_no_group_begins_without_database(world):
    groups, masters = await made(world)
    world.database._mark_away("stopped by the test")
    with pytest.raises(DatabaseAway, match="does not answer"):
        await begin(groups, "g1")
    assert not masters.asked
