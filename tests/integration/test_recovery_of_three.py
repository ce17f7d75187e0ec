"""Shell. Three copies stop, and not all return: the group recovers by itself or by one command (docs/runbook.md)."""

from __future__ import annotations

import re
import shutil
import sqlite3
from contextlib import closing

import pytest

from qmq.errors import NotServed
from tests.integration.cluster_world import running, running_apart
from tests.integration.tools_world import DONE, REFUSED
from tests.support.waiting import until

COUNT = 20
GROUPS = ("all", "gone")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Without automatic failover."""
    with running_apart(tmp_path_factory.mktemp("cluster"), GROUPS, copies=3) as cluster:
        yield cluster


def plans_of(cluster, group):
    """Return master and slaves, all in sync and with acknowledged messages."""
    master, slaves = cluster.broker(group, "master"), cluster.slaves(group)
    cluster.wait_in_sync(group)
    cluster.send_all(f"s.{group}", COUNT)
    until(lambda: len({cluster.state(plan).log_end for plan in (master, *slaves)}) == 1, "all have everything")
    return master, *slaves


def key(plan):
    return f"{plan.hostname}:{plan.serve_port}"


def qmq(cluster, command, group, *words, **options):
    """Run a command once no killed broker counts as running; return the finished process."""

    def tried():
        ended = cluster.tool(command, "--yes", *words, brokerGroup=group, **options)
        return None if "is running" in ended.stderr or "is up; SwapRoles" in ended.stderr else ended

    return until(tried, "the brokers count as stopped")


def lose(cluster, *plans):
    for plan in plans:
        shutil.rmtree(cluster.data(plan))


def check_all_is_there(cluster, group):
    cluster.wait_writable(group)
    assert len(cluster.consume_all(f"s.{group}", "check", COUNT)) == COUNT
    cluster.send_all(f"s.{group}", 1, name="later")


def test_three_copies_return_in_any_order(cluster):
    master, *slaves = plans_of(cluster, "all")
    names = [plan.hostname for plan in (slaves[0], master, slaves[1])]
    cluster.end(*names)
    for name in names:
        cluster.begin(name)
    check_all_is_there(cluster, "all")


def test_after_a_power_cut_the_masters_disk_is_lost(cluster):
    """Both slaves restarted, so an operator must confirm that no disk was put back and the master never returns."""
    master, *slaves = plans_of(cluster, "gone")
    cluster.end(*(plan.hostname for plan in (master, *slaves)))
    lose(cluster, master)
    cluster.begin(*(plan.hostname for plan in slaves))
    until(lambda: all(cluster.state(plan) and cluster.state(plan).term for plan in slaves), "both slaves are back")
    refused = qmq(cluster, "Failover", "gone")
    assert refused.returncode == REFUSED and "Failover --brokerGroup=gone --masterGone=true" in refused.stderr
    done = qmq(cluster, "RecoverGroup", "gone", gone=key(master))
    assert done.returncode == DONE and "LOST" not in done.stderr, done.stderr
    check_all_is_there(cluster, "gone")
    cluster.begin(master.hostname)
    cluster.wait_in_sync("gone")


def test_old_database_copy_after_a_power_cut_is_recovered(tmp_path):
    """Three brokers without a part wait for a row as new as their logs; Doctor names the one command."""
    with running(tmp_path / "cluster", copies=3) as cluster:
        database = tmp_path / "cluster" / "metaserver" / "metaserver.db"
        old = tmp_path / "old.db"
        cluster.manage("AddNewSubject", subject="s.g1", tag="g1")
        master, *slaves = plans_of(cluster, "g1")
        with closing(sqlite3.connect(database)) as live, closing(sqlite3.connect(old)) as copy:
            live.backup(copy)
        for slave in slaves:
            cluster.swap_roles("g1", to=slave.hostname)
            cluster.wait_in_sync()
        cluster.end(*(plan.hostname for plan in (master, *slaves)), "metaserver")
        for name in database.parent.iterdir():
            name.unlink() if name.name.startswith(database.name) or name.suffix == ".json" else None
        shutil.copy(old, database)
        cluster.begin("metaserver", *(plan.hostname for plan in (master, *slaves)))

        def named():
            try:
                checks = cluster.manage("Doctor")["checks"]
            except NotServed:
                return None  # the metaserver has just started
            remedies = " ".join(check["remedy"] for check in checks if not check["ok"])
            return re.search(r"AdoptRoles --brokerGroup=g1 --hostname=(\S+) --servePort=(\d+) --force=true", remedies)

        hostname, port = until(named, "Doctor names the command").groups()
        cluster.manage("AdoptRoles", brokerGroup="g1", hostname=hostname, servePort=port, force="true")
        check_all_is_there(cluster, "g1")
        assert cluster.broker("g1", "master").hostname == hostname
