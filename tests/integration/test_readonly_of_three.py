"""Shell. Readonly reasons of a group of three copies, each ended as docs/runbook.md advises."""

from __future__ import annotations

import shutil
import signal

import pytest

from qmq.deploy.plan import HOST
from tests.integration.cluster_world import (
    begin,
    consume_all,
    data_of,
    end,
    reasons,
    row,
    running,
    send_all,
    slaves_in_sync,
    state,
)
from tests.integration.test_broker_damage import damage
from tests.integration.test_disks_put_back import back_up, put_back
from tests.support.waiting import until

COUNT = 60


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    small = {"segment_bytes": 64 * 1024, "tail_bytes": 0, "slave_lag_ms_max": 4000}
    with running(tmp_path_factory.mktemp("cluster"), copies=3, **small) as cluster:
        yield cluster


@pytest.fixture
def cluster(shared):
    """The shared cluster, whole again for each test."""
    names = [broker.hostname for broker in shared.plan.brokers]
    for name in names:
        shared.service(name).signal(signal.SIGCONT)
    begin(shared, *names)
    until(lambda: all_are_in_sync(shared), "master and both slaves")
    return shared


def all_are_in_sync(cluster):
    return cluster.writable("g1") and slaves_in_sync(cluster) == 2


def plans_of(cluster):
    """Return the master and the slaves."""
    master = cluster.broker("g1", "master")
    return master, [plan for plan in cluster.plan.brokers if plan != master]


def is_readonly_for(cluster, plan, reason):
    until(lambda: reasons(cluster, plan) == [reason], f"readonly: {reason}")


def remembered_end(cluster):
    return row(cluster, "SELECT max(log_end) FROM acknowledged_point WHERE group_name = 'g1'")[0]


def send(cluster, subject):
    """Send messages in several frames; return their ids."""
    return [
        receipt.message_id
        for turn in range(6)
        for receipt in send_all(cluster, subject, COUNT // 6, name=f"{subject}{turn}")
    ]


def test_lost_slaves_are_removed_and_replaced(cluster):
    master, (gone, other) = plans_of(cluster)
    ids = send(cluster, "gone")
    end(cluster, gone.hostname, other.hostname)
    is_readonly_for(cluster, master, "slave_down")
    place = {"hostname": gone.hostname, "servePort": gone.serve_port}
    cluster.manage("RemoveBroker", **place, force="true")
    shutil.rmtree(data_of(cluster, gone))
    cluster.manage("AddBroker", brokerGroup="g1", role=1, ip=HOST, syncPort=gone.sync_port, **place)
    begin(cluster, gone.hostname)
    cluster.wait_writable()
    assert [id for _, id in consume_all(cluster, "gone", "g", COUNT)] == ids


def test_damaged_master_is_repaired_from_any_slave(cluster):
    master, (first, second) = plans_of(cluster)
    ids = send(cluster, "damaged")
    until(lambda: len({state(cluster, plan).flushed_end for plan in (master, first, second)}) == 1, "equal ends")
    damage(data_of(cluster, master), "damaged", newest=True)
    end(cluster, first.hostname, second.hostname)
    with pytest.raises(TimeoutError):
        consume_all(cluster, "damaged", "before", COUNT, timeout_s=5)
    until(lambda: "corrupt" in reasons(cluster, master), "readonly for the damage")
    begin(cluster, second.hostname)
    cluster.wait_writable()
    assert [id for _, id in consume_all(cluster, "damaged", "after", COUNT)] == ids


def test_rolled_back_master_is_restored_from_a_slave(cluster, tmp_path):
    master, slaves = plans_of(cluster)
    names = [master.hostname, *(plan.hostname for plan in slaves)]
    end(cluster, *names)
    back_up(cluster, master, tmp_path / "older")
    begin(cluster, *names)
    until(lambda: all_are_in_sync(cluster), "all three")
    ids = send(cluster, "put-back")
    until(lambda: remembered_end(cluster) == state(cluster, master).log_end, "the metaserver remembers all of it")
    end(cluster, *names)
    put_back(cluster, master, tmp_path / "older")
    begin(cluster, master.hostname)
    until(lambda: "rolled_back" in (reasons(cluster, master) or ()), "it says so of itself")
    begin(cluster, slaves[1].hostname)
    cluster.wait_writable()
    assert [id for _, id in consume_all(cluster, "put-back", "g", COUNT)] == ids
