"""Shell. Three brokers of one group, two of which acknowledge: one is killed, and producing goes on."""

from __future__ import annotations

import asyncio

import qmq
from qmq.deploy.copies import read_copy
from tests.integration.cluster_world import (
    begin,
    consume_all,
    data_of,
    end,
    log_of,
    producer,
    running,
    state,
)
from tests.support.waiting import until, until_async

FAILOVER = {"failover": True}


def slaves_in_sync(cluster):
    """Names of the slaves that are in sync."""
    said = state(cluster, cluster.broker("g1", "master"))
    told = {plan.hostname: state(cluster, plan) for plan in cluster.plan.brokers}
    return {name for name, one in told.items() if one and said and one.incarnation in said.in_step}


def slaves(cluster):
    master = cluster.broker("g1", "master").hostname
    return [plan.hostname for plan in cluster.plan.brokers if plan.hostname != master]


def ends(cluster):
    said = [state(cluster, plan) for plan in cluster.plan.brokers]
    return {one and (one.log_end, one.chain) for one in said}


def all_in_sync(cluster):
    until(lambda: slaves_in_sync(cluster) == set(slaves(cluster)), "both slaves are in sync")


def check_copies(cluster):
    """All three copies are equal, byte by byte; return one of them."""
    until(lambda: len(ends(cluster)) == 1 and None not in ends(cluster), "equal copies")
    end(cluster, *(plan.hostname for plan in cluster.plan.brokers))
    first, *others = [read_copy(data_of(cluster, plan)) for plan in cluster.plan.brokers]
    assert all(other == first for other in others)
    return first


async def send_until(cluster, is_over, stored):
    async def send(sender, name):
        at = 0
        while not is_over.is_set():
            at += 1
            receipt = await sender.send(qmq.Message("s", {"n": at}, id=f"{name}-{at}"))
            assert receipt.is_stored
            stored.append(receipt.message_id)

    async with producer(cluster) as sender, asyncio.TaskGroup() as tasks:
        for name in "wxyz":
            tasks.create_task(send(sender, name))


async def more(stored, what):
    enough = len(stored) + 300
    await until_async(lambda: len(stored) >= enough, what)


async def kill_under_load(cluster, kills):
    """Kill the master for good, again and again; each time producing goes on before it is back."""
    stored, is_over = [], asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(send_until(cluster, is_over, stored))
        for _ in range(kills):
            await more(stored, "messages")
            master = (await asyncio.to_thread(cluster.broker, "g1", "master")).hostname
            await asyncio.to_thread(end, cluster, master)
            await more(stored, "two copies go on by themselves")
            now = await asyncio.to_thread(cluster.broker, "g1", "master")
            assert now.hostname != master
            await asyncio.to_thread(begin, cluster, master)
            await asyncio.to_thread(all_in_sync, cluster)
        is_over.set()
    return stored


def test_killed_master_of_three_is_replaced_under_load(tmp_path):
    with running(tmp_path / "cluster", copies=3, metaserver=FAILOVER) as cluster:
        all_in_sync(cluster)
        stored = asyncio.run(kill_under_load(cluster, 3))
        assert len(stored) == len(set(stored))
        assert set(stored) <= {id for _, id in consume_all(cluster, "s", "g", len(stored))}
        trail = [row for row in cluster.manage("AuditTrail")["rows"] if row["action"] == "Failover"]
        assert len(trail) == 3 and all(len(row["parameters"]["promised"]) == 2 for row in trail)
        check_copies(cluster)


def test_copy_that_is_down_delays_the_failover(tmp_path):
    """Of three, two have to promise: the one that is there may lack what the dead ones acknowledged."""
    with running(tmp_path / "cluster", copies=3, metaserver=FAILOVER) as cluster:
        all_in_sync(cluster)
        master, (first, second) = cluster.broker("g1", "master").hostname, slaves(cluster)
        end(cluster, first)
        until(lambda: slaves_in_sync(cluster) == {second}, "it is missed")
        end(cluster, master)
        until(lambda: "no failover broker_group=g1 reason=slave_down" in log_of(cluster, "metaserver"), "it is refused")
        assert cluster.broker("g1", "master").hostname == master
        begin(cluster, master)
        cluster.wait_writable()


def test_roles_are_swapped_with_each_slave(tmp_path):
    with running(tmp_path / "cluster", copies=3) as cluster:
        all_in_sync(cluster)
        for target in [*slaves(cluster), cluster.broker("g1", "master").hostname]:
            cluster.swap_roles("g1", to=target)
            assert cluster.broker("g1", "master").hostname == target
            all_in_sync(cluster)
        master = cluster.broker("g1", "master")
        term = state(cluster, master).term
        cluster.kill("g1", "master")
        until(lambda: (said := state(cluster, master)) and said.writable and said.term == term + 1, "a new term")
        (row,) = [row for row in cluster.manage("AuditTrail")["rows"] if row["action"] == "NewTerm"][:1]
        assert row["parameters"]["cause"].endswith("has started") and row["after"]["term"] == term + 1


def test_a_broker_of_three_copies_waits_for_the_metaserver(tmp_path):
    with running(tmp_path / "cluster", copies=3) as cluster:
        all_in_sync(cluster)
        names = [plan.hostname for plan in cluster.plan.brokers]
        end(cluster, *names, "metaserver")
        begin(cluster, *names)
        for name in names:
            until(lambda name=name: "part not taken up without the metaserver" in log_of(cluster, name), "it waits")
        assert not any((said := state(cluster, plan)) and said.term for plan in cluster.plan.brokers)
        begin(cluster, "metaserver")
        cluster.wait_writable()
