"""Shell. Readonly reasons of a group of three copies, each ended as docs/runbook.md advises."""

from __future__ import annotations

import shutil
import signal

import pytest

from tests.integration.cluster_world import shared_cluster
from tests.integration.test_broker_damage import damage
from tests.integration.test_disks_put_back import back_up, put_back
from tests.support.waiting import until

COUNT = 60


shared = shared_cluster(copies=3, segment_bytes=64 * 1024, tail_bytes=0, slave_lag_ms_max=4000)


@pytest.fixture
def cluster(shared):
    """The shared cluster, whole again for each test."""
    for name in shared.hostnames:
        shared.service(name).signal(signal.SIGCONT)
    shared.begin(*shared.hostnames)
    until(lambda: all_are_in_sync(shared), "master and both slaves")
    return shared


def all_are_in_sync(cluster):
    return cluster.writable("g1") and cluster.slaves_in_sync() == 2


def is_readonly_for(cluster, plan, reason):
    until(lambda: cluster.reasons(plan) == [reason], f"readonly: {reason}")


def remembered_end(cluster):
    return cluster.row("SELECT max(log_end) FROM acknowledged_point WHERE group_name = 'g1'")[0]


def send(cluster, subject):
    """Send messages in several frames; return their ids."""
    return [
        receipt.message_id
        for turn in range(6)
        for receipt in cluster.send_all(subject, COUNT // 6, name=f"{subject}{turn}")
    ]


def test_lost_slaves_are_removed_and_replaced(cluster):
    master, (gone, other) = cluster.broker("g1", "master"), cluster.slaves()
    ids = send(cluster, "gone")
    cluster.end(gone.hostname, other.hostname)
    is_readonly_for(cluster, master, "slave_down")
    cluster.manage("RemoveBroker", hostname=gone.hostname, servePort=gone.serve_port, force="true")
    shutil.rmtree(cluster.data(gone))
    cluster.manage("AddBroker", role=1, **cluster.place(gone))
    cluster.begin(gone.hostname)
    cluster.wait_writable()
    assert [id for _, id in cluster.consume_all("gone", "g", COUNT)] == ids


def test_damaged_master_is_repaired_from_any_slave(cluster):
    master, (first, second) = cluster.broker("g1", "master"), cluster.slaves()
    ids = send(cluster, "damaged")
    until(lambda: len({cluster.state(plan).flushed_end for plan in (master, first, second)}) == 1, "equal ends")
    damage(cluster.data(master), "damaged", newest=True)
    cluster.end(first.hostname, second.hostname)
    with pytest.raises(TimeoutError):
        cluster.consume_all("damaged", "before", COUNT, timeout_s=5)
    until(lambda: "corrupt" in cluster.reasons(master), "readonly for the damage")
    cluster.begin(second.hostname)
    cluster.wait_writable()
    assert [id for _, id in cluster.consume_all("damaged", "after", COUNT)] == ids


def test_rolled_back_master_is_restored_from_a_slave(cluster, tmp_path):
    master, slaves = cluster.broker("g1", "master"), cluster.slaves()
    names = [master.hostname, *(plan.hostname for plan in slaves)]
    cluster.end(*names)
    back_up(cluster, master, tmp_path / "older")
    cluster.begin(*names)
    until(lambda: all_are_in_sync(cluster), "all three")
    ids = send(cluster, "put-back")
    until(lambda: remembered_end(cluster) == cluster.state(master).log_end, "the metaserver remembers all of it")
    cluster.end(*names)
    put_back(cluster, master, tmp_path / "older")
    cluster.begin(master.hostname)
    until(lambda: "rolled_back" in (cluster.reasons(master) or ()), "it says so of itself")
    cluster.begin(slaves[1].hostname)
    cluster.wait_writable()
    assert [id for _, id in cluster.consume_all("put-back", "g", COUNT)] == ids
