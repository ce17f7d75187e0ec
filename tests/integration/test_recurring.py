"""Shell. Recurring schedules through a real cluster with two delay groups: kills, swaps, operators' lists."""

from __future__ import annotations

import asyncio

import qmq
import qmq.blocking
from qmq import DelayOutcome, Message
from tests.integration.cluster_world import WAIT_S, shared_cluster, until

YEARLY = {"cron": "0 0 1 1 *", "timezone": "Europe/Berlin"}
"""Tests reschedule the template like any delayed message, instead of waiting a year."""


cluster = shared_cluster(delay_groups=("d1", "d2"), lease_ms=60_000)


async def pulled(cluster, subject, count):
    """Return the ids of `count` messages, and of any within the next second."""
    ids = []
    async with qmq.Consumer(**cluster.client).pull(subject, group="g", start="earliest") as puller:
        while messages := await puller.pull(100, timeout=WAIT_S if len(ids) < count else 1):
            ids += [message.id for message in messages]
            await puller.ack(messages)
    return ids


async def test_occurrence_arrives_once_despite_killed_masters(cluster):
    async with qmq.Producer(**cluster.client) as producer:
        names = [f"n{at}" for at in range(10)]
        for name in names:
            await producer.put_recurring(Message("recur.kill", {"n": name}), name=name, **YEARLY)
        for name in names:
            id = f"recurring:{name}"
            assert await producer.reschedule(subject="recur.kill", id=id, delay=3) is DelayOutcome.RESCHEDULED
        for group in ("d1", "d2"):
            cluster.kill(group, "master")
        ids = await pulled(cluster, "recur.kill", 10)
        assert sorted(id.split("@")[0] for id in ids) == names
        listed = await producer.list_recurring(subject="recur.kill")
        assert [schedule.name for schedule in listed] == names
        assert {(schedule.next_at.month, schedule.next_at.day, schedule.next_at.hour) for schedule in listed} == {
            (12, 31, 23)
        }


async def test_schedule_survives_a_swap_and_ends_when_deleted(cluster):
    async with qmq.Producer(**cluster.client) as producer:
        await producer.put_recurring(Message("recur.swap"), name="a", owner="billing", **YEARLY)
        for group in ("d1", "d2"):
            await asyncio.to_thread(cluster.swap_roles, group)
        cluster.wait_writable("d1", "d2")
        assert [schedule.owner for schedule in await producer.list_recurring(subject="recur.swap")] == ["billing"]
        await producer.reschedule(subject="recur.swap", id="recurring:a", delay=0)
        assert len(await pulled(cluster, "recur.swap", 1)) == 1
        assert await producer.delete_recurring(subject="recur.swap", name="a")
        assert await producer.reschedule(subject="recur.swap", id="recurring:a", delay=0) is DelayOutcome.CANCELLED


def test_operators_list_and_delete_schedules(cluster):
    with qmq.blocking.Producer(**cluster.client) as producer:
        producer.put_recurring(Message("recur.tools"), name="a", **YEARLY)
        rows = until(lambda: cluster.manage("ListDelayed", subject="recur.tools")["messages"], "it is listed")
        assert [row["id"] for row in rows] == ["recurring:a"]
        producer.send(Message("recur.tools"), delay=1000)
        [shown] = cluster.manage("ListSchedules", subject="recur.tools")["schedules"]
        assert (shown["name"], shown["owner"], shown["cron"], shown["timezone"]) == ("a", "test", *YEARLY.values())
        assert shown["next"] == rows[0]["due"]
        assert "a" in [row["name"] for row in cluster.manage("ListSchedules")["schedules"]]
        done = cluster.manage("CancelDelayed", subject="recur.tools", ids="recurring:a")
        assert done["ids"] == {"recurring:a": "cancelled"}
        assert producer.list_recurring(subject="recur.tools") == []
