"""Shell. Both copies of a group stop, and not both return: the group recovers by itself, or with the command that
Doctor names, without losing confirmed frames of a returning copy. One page of the runbook each.
"""

from __future__ import annotations

import asyncio
import re
import shutil

import pytest

import qmq
from qmq.errors import OperatorError
from qmq.tools.inspect import inspect
from tests.integration.cluster_world import running_apart, until
from tests.integration.tools_world import DONE, REFUSED
from tests.support.ports import free_ports

COUNT = 20
GROUPS = ("order", "older", "saved", "none")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with running_apart(tmp_path_factory.mktemp("cluster"), GROUPS) as cluster:
        asyncio.run(send_to_all(cluster))
        yield cluster


async def send_to_all(cluster):
    """Send to each group alone, twice, so that its frames show the first part as acknowledged."""
    async with cluster.producer() as sender:
        for part in (range(COUNT - 1), range(COUNT - 1, COUNT)):
            messages = [qmq.Message(f"s.{group}", {"n": str(at)}, id=f"before-{at}") for group in GROUPS for at in part]
            assert all(receipt.is_stored for receipt in await sender.send_many(messages))


def check_all_is_there(cluster, group, count=COUNT):
    """Check that the group accepts messages, its copies are equal, and each acknowledged message is delivered."""
    cluster.wait_writable(group)
    cluster.wait_equal(group)
    ids = [id for _, id in cluster.consume_all(f"s.{group}", "check", count)]
    assert sorted(ids) == sorted(f"before-{at}" for at in range(count))
    cluster.send_all(f"s.{group}", 1, name="later")


def findings(cluster, group):
    """Return the metaserver's failed checks of a group's brokers: hostname -> check."""
    checks = cluster.manage("Doctor")["checks"]
    return {
        check["facts"]["hostname"]: check
        for check in checks
        if not check["ok"] and check["facts"].get("group") == group and "hostname" in check["facts"]
    }


def named_command(cluster, plan):
    """Return the parameters of the ReplaceBroker that Doctor names for a broker, once it does."""

    def find():
        check = findings(cluster, plan.group).get(plan.hostname)
        return check and re.search(r"ReplaceBroker((?: --\w+(?:=\S+)?)+)", check["remedy"])

    typed = until(find, f"Doctor names a command for {plan.hostname}")[1]
    return {name: value or "true" for name, value in re.findall(r"--(\w+)(?:=([^\s;,]+))?", typed)}


def carried_out(cluster, words):
    """Run ReplaceBroker once the brokers count as stopped; return "done", or why it is refused."""

    def tried():
        try:
            cluster.manage("ReplaceBroker", **words)
        except OperatorError as error:
            return None if "is running" in str(error) else str(error)
        return "done"

    return until(tried, "the brokers count as stopped")


def lose_disk(cluster, plan):
    """Lose the disk; a machine with the same name and an empty disk returns."""
    shutil.rmtree(cluster.data(plan))


def test_both_stop_and_both_return(cluster):
    master, slave = cluster.pair("order")
    cluster.end(master.hostname, slave.hostname)
    cluster.begin(slave.hostname)
    until(lambda: cluster.state(slave), "the slave runs")
    cluster.begin(master.hostname)
    check_all_is_there(cluster, "order")


def test_lost_master_is_replaced_by_its_slave(cluster):
    """The slave confirmed everything, so there is no loss to accept."""
    master, slave = cluster.pair("older")
    cluster.end(master.hostname)
    cluster.end(slave.hostname)
    lose_disk(cluster, master)
    words = named_command(cluster, master)
    assert (words["hostname"], words["role"], words["swap"]) == (slave.hostname, "0", "true")
    assert carried_out(cluster, words) == "done"
    cluster.begin(slave.hostname, master.hostname)
    check_all_is_there(cluster, "older")
    assert cluster.broker("older", "master") == slave


def test_disk_is_moved_to_a_new_machine(cluster, tmp_path):
    """The disk is an older backup: its missing messages are lost with the other two disks, and must be accepted as
    lost.
    """
    master, slave = cluster.pair("saved")
    cluster.end(master.hostname, slave.hostname)
    saved = tmp_path / "saved"
    shutil.copytree(cluster.data(master), saved)
    cluster.begin(master.hostname, slave.hostname)
    cluster.wait_writable("saved")
    cluster.send_all("s.saved", 5, name="after")
    acknowledged = cluster.state(master).high_watermark
    newest = "SELECT max(log_end) FROM acknowledged_point WHERE group_name = 'saved'"
    until(lambda: (cluster.row(newest)[0] or 0) >= acknowledged, "a metaserver remembers the point")
    cluster.end(master.hostname, slave.hostname)
    for plan in (master, slave):
        lose_disk(cluster, plan)

    held = inspect(saved)
    assert held["subjects"] == {"s.saved": COUNT} and held["log"]["end"] < acknowledged
    moved = free_ports(1)[0]
    into_new_machine(cluster, master, saved, moved)
    cluster.begin(master.hostname, slave.hostname)
    until(lambda: "rolled_back" in (cluster.reasons(master) or []), "the saved copy says what it lacks")
    found = until(lambda: findings(cluster, "saved").get(master.hostname), "so does Doctor")
    assert "rolled_back" in found["found"] and "acceptLoss" in found["remedy"]
    cluster.end(master.hostname, slave.hostname)
    words = cluster.place(master) | {"role": 0, "syncPort": moved, "acceptLoss": "true"}
    assert carried_out(cluster, words) == "done"
    cluster.begin(master.hostname, slave.hostname)
    check_all_is_there(cluster, "saved")
    assert "loss accepted" in cluster.log_of(master.hostname)


def into_new_machine(cluster, plan, saved, sync_port):
    """Start the same broker, by hostname and serve port, at another address with a saved directory."""
    shutil.copytree(saved, cluster.data(plan))
    path = cluster.settings_file(plan.hostname)
    path.write_text(path.read_text().replace(f"sync_port = {plan.sync_port}", f"sync_port = {sync_port}"))


def test_neither_disk_returns(cluster):
    """Everything is lost; the group begins anew once that is accepted."""
    master, slave = cluster.pair("none")
    cluster.end(master.hostname, slave.hostname)
    for plan in (master, slave):
        lose_disk(cluster, plan)
    cluster.begin(master.hostname, slave.hostname)

    def other_disk():
        found = findings(cluster, "none").get(master.hostname)
        return found if found and f"--gone={master.hostname}:{master.serve_port}" in found["remedy"] else None

    check = until(other_disk, "Doctor says that this is another disk")
    assert check["found"] == "runs on another data directory than before"
    cluster.end(master.hostname)
    gone = ",".join(f"{plan.hostname}:{plan.serve_port}" for plan in (master, slave))

    def recovered(*words):
        ended = cluster.tool("RecoverGroup", "--yes", *words, brokerGroup="none", gone=gone)
        return None if "is running" in ended.stderr else ended

    refused = until(recovered, "the master counts as stopped")
    assert refused.returncode == REFUSED and "LOST: acknowledged at offsets [0, " in refused.stderr
    assert "accept the loss with --acceptLoss" in refused.stderr
    done = until(lambda: recovered("--acceptLoss"), "the master counts as stopped")
    assert done.returncode == DONE and "lost for good: messages that none acknowledged up to offset" in done.stderr, (
        done.stderr
    )
    cluster.begin(master.hostname)
    cluster.wait_writable("none")
    cluster.send_all("s.none", COUNT, name="before")
    check_all_is_there(cluster, "none")
