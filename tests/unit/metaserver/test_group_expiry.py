"""Shell. Consumer groups without a consumer for `group_expiry_days`: reported for a day, then removed; broadcasts."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from qmq.errors import NotServed
from qmq.metaserver.actions.expiry import DAY_MS, WARNED_S, GroupExpiry
from qmq.metaserver.cluster.group_starts import STALE_MS
from qmq.metaserver.model import ConsumerGroupRow
from tests.unit.metaserver.actions_world import left

NOW_MS = 1_800_000_000_000
DAYS = 30


def unused(subject, group, days, messages=5):
    row = left(subject, group, messages)
    row.unused_since_ms = NOW_MS - int(days * DAY_MS) if days else 0
    return row


async def cluster(world, **progress):
    """Make broker groups with these rows, and a subject that the first two of them serve."""
    for group, rows in progress.items():
        await world.running_copies(group)
        world.brokers.progress[group] = rows
    await world.routed("s1", groups=tuple(progress)[:2])
    return GroupExpiry(world.context, world.actions, DAYS)


async def looks(expiry, *, days_later=1.0):
    """Look twice, a day apart; the ages of the rows are those of the second look."""
    now_s = days_later * WARNED_S
    await expiry.look(now_ms=NOW_MS - int(days_later * DAY_MS), now_s=1.0)
    await expiry.look(now_ms=NOW_MS, now_s=1.0 + now_s)


def shown(expiry):
    (metric,) = expiry.read()
    return {sample.labels["consumer_group"]: (sample.value - NOW_MS / 1000) / 86_400 for sample in metric.samples}


def removed(world):
    return {reset[0:4] for reset in world.brokers.resets}


async def test_unused_group_is_reported_for_a_day_then_removed(world):
    """With the plan of the command, and its rows in the trail."""
    expiry = await cluster(world, g1=[unused("s1", "shop", 90)], g2=[unused("s1", "shop", 40)])
    await expiry.look(now_ms=NOW_MS, now_s=1.0)
    assert not world.brokers.resets and shown(expiry) == {"shop": pytest.approx(1.0)}
    await expiry.look(now_ms=NOW_MS + DAY_MS // 2, now_s=1.0 + WARNED_S / 2)
    assert not world.brokers.resets
    await expiry.look(now_ms=NOW_MS + DAY_MS, now_s=1.0 + WARNED_S)
    assert removed(world) == {(group, "s1", "shop", "removed") for group in ("g1", "g2")}
    trail = [(row.who, row.result) for row in await world.audit() if row.action == "RemoveConsumerGroup"]
    assert trail == [("metaserver", "done"), ("metaserver", "begun")] and shown(expiry) == {}


@pytest.mark.parametrize(
    ("of_g2", "of_g3"),
    [
        (unused("s1", "shop", 22), unused("s1", "other", 90)),
        (unused("s1", "shop", 0), unused("s1", "other", 90)),
        (unused("s1", "shop", 90), unused("s1", "shop", 3)),
    ],
    ids=["used lately", "in use", "used off the route"],
)
async def test_group_used_anywhere_is_kept(world, of_g2, of_g3):
    expiry = await cluster(world, g1=[unused("s1", "shop", 90)], g2=[of_g2], g3=[of_g3])
    await looks(expiry)
    assert not any(reset[2] == "shop" for reset in world.brokers.resets) and "shop" not in shown(expiry)


async def test_removal_is_shown_a_week_before(world):
    rows = [unused("s1", name, days) for name, days in (("a", 22.9), ("b", 23.1), ("c", 29))]
    expiry = await cluster(world, g1=rows, g2=[])
    await looks(expiry)
    assert shown(expiry) == {"b": pytest.approx(6.9), "c": pytest.approx(1.0)} and not world.brokers.resets


async def test_group_that_came_back_is_reported_for_a_day_again(world):
    row = unused("s1", "shop", 90)
    expiry = await cluster(world, g1=[row], g2=[])
    await expiry.look(now_ms=NOW_MS - DAY_MS, now_s=1.0)
    since_ms, row.unused_since_ms = row.unused_since_ms, 0
    await expiry.look(now_ms=NOW_MS - DAY_MS // 2, now_s=WARNED_S / 2)
    row.unused_since_ms = since_ms
    await expiry.look(now_ms=NOW_MS, now_s=2 * WARNED_S)
    assert not world.brokers.resets and shown(expiry) == {"shop": pytest.approx(1.0)}


async def test_derived_subjects_keep_their_groups(world):
    """Their positions show which dead letters went back; a mailbox goes with its group."""
    rows = [unused(f"{kind}%s1%shop", "qmq.redrive", 90) for kind in ("%DEAD_RETRY", "%RETRY")]
    expiry = await cluster(world, g1=rows, g2=[])
    await looks(expiry)
    assert not world.brokers.resets and shown(expiry) == {}


async def test_silent_broker_group_stops_the_removal(world):
    expiry = await cluster(world, g1=[unused("s1", "shop", 90)], g2=[], g3=[])
    await expiry.look(now_ms=NOW_MS - DAY_MS, now_s=1.0)
    world.brokers.silent.add("g3")
    with pytest.raises(NotServed):
        await expiry.look(now_ms=NOW_MS, now_s=1.0 + WARNED_S)
    assert not world.brokers.resets


async def test_refused_removal_is_logged_and_tried_again(world, caplog):
    expiry = await cluster(world, g1=[unused("s1", "shop", 90)], g2=[unused("s1", "shop", 90)])
    world.brokers.fail_for_real = frozenset({"g2"})
    await looks(expiry)
    assert "unused consumer group not removed subject=s1 group=shop" in caplog.text
    world.brokers.fail_for_real = frozenset()
    await expiry.look(now_ms=NOW_MS + 1, now_s=3 * WARNED_S)
    assert removed(world) == {(group, "s1", "shop", "removed") for group in ("g1", "g2")}


async def broadcasts(world, *names, age_ms=STALE_MS + 1):
    rows = [ConsumerGroupRow("s1", name, 0, "", ("g1",), NOW_MS - age_ms, is_broadcast=True) for name in names]
    await world.database.write(lambda repository: repository.store_consumer_groups(rows))


async def rows_left(world):
    return [row.group for row in await world.database.read(lambda repository: repository.consumer_groups_of(""))]


async def test_forgotten_broadcast_loses_its_row(world):
    """A normal group's row stays: without it a broker group that joins would skip messages."""
    expiry = await cluster(world, g1=[], g2=[], g3=[left("s1", "at g3", 0)])
    await broadcasts(world, "away", "at g3")
    await broadcasts(world, "young", age_ms=STALE_MS - 1)
    normal = ConsumerGroupRow("s1", "shop", 0, "", ("g1",), 1)
    await world.database.write(lambda repository: repository.store_consumer_groups([normal]))
    await expiry.remove_broadcasts(now_ms=NOW_MS)
    assert await rows_left(world) == ["at g3", "shop", "young"]


async def test_silent_broker_group_keeps_broadcast_rows(world):
    expiry = await cluster(world, g1=[], g2=[])
    await broadcasts(world, "away")
    world.brokers.silent.add("g2")
    with pytest.raises(NotServed):
        await expiry.remove_broadcasts(now_ms=NOW_MS)
    assert await rows_left(world) == ["away"]


async def test_returned_broadcast_keeps_its_new_row(world, monkeypatch):
    """It returned after the question, so the row was replaced."""
    expiry = await cluster(world, g1=[])
    await broadcasts(world, "back")
    old = await world.database.read(lambda repository: repository.broadcasts(NOW_MS, ("", ""), 9))

    async def mark_groups(broker, mark, groups):
        new = [replace(row, created_ms=NOW_MS) for row in old]
        await world.database.write(lambda repository: repository.store_consumer_groups(new, old))
        return [False]

    monkeypatch.setattr(world.brokers, "mark_groups", mark_groups, raising=False)
    await expiry.remove_broadcasts(now_ms=NOW_MS)
    assert await rows_left(world) == ["back"]


async def test_many_broadcast_rows_are_checked_in_turns(world, monkeypatch):
    monkeypatch.setattr("qmq.metaserver.actions.expiry.ROWS_MAX", 2)
    expiry = await cluster(world, g1=[left("s1", name, 0) for name in "abd"])
    await broadcasts(world, *"abcde")
    for remaining in ("abcde", "abde", "abd", "abd"):
        await expiry.remove_broadcasts(now_ms=NOW_MS)
        assert await rows_left(world) == list(remaining)


async def test_broadcast_rows_go_without_a_setting(world, monkeypatch):
    """The loop runs with `group_expiry_days` 0, and again after a silent broker group."""
    await cluster(world, g1=[unused("s1", "shop", 90)])
    await broadcasts(world, "away", age_ms=NOW_MS - 1)
    world.brokers.silent.add("g1")
    looks = iter(range(9))

    async def next_look(seconds):
        if next(looks) == 1:
            assert await rows_left(world) == ["away"]
            world.brokers.silent.clear()
        elif not await rows_left(world):
            raise asyncio.CancelledError

    monkeypatch.setattr("qmq.metaserver.actions.expiry.asyncio.sleep", next_look)
    with pytest.raises(asyncio.CancelledError):
        await (expiry := GroupExpiry(world.context, world.actions, 0)).run()
    assert shown(expiry) == {}
