"""Shell. A disk is restored to an older state, or lost its last fsynced write: nothing acknowledged is lost, and only
the bad copy reports it (P6).
"""

from __future__ import annotations

import json
import shutil

import pytest

from qmq.deploy.control import read_copy
from qmq.errors import OperatorError
from qmq.log import RealDisk, quarantine
from qmq.log.segments import log_name
from tests.integration.cluster_world import running, until, zero_from

BEFORE = 20


@pytest.fixture
def cluster(tmp_path):
    with running(tmp_path / "cluster") as cluster:
        cluster.send_all("s", BEFORE, name="before")
        cluster.wait_equal()
        yield cluster


def back_up(cluster, plan, to):
    """Copy a stopped broker's data directory."""
    shutil.copytree(cluster.data(plan), to)


def put_back(cluster, plan, backup):
    """Restore a backup in place, as storage does; a directory elsewhere would wait for the metaserver."""
    data = cluster.data(plan)
    for path in data.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != "lock":
            path.unlink()
    shutil.copytree(backup, data, dirs_exist_ok=True, ignore=shutil.ignore_patterns("lock"))


def zero_newest_message(cluster, plan):
    """Zero the log from its newest messages frame on, as after a lying flush."""
    newest = [frame for frame in read_copy(cluster.data(plan)).frames if frame.subject == "s"][-1]
    zero_from(cluster.data(plan), newest.offset)


def restart_both(cluster):
    master, slave = cluster.pair()
    cluster.begin(master.hostname, slave.hostname)
    cluster.wait_writable()


def remembered(cluster):
    """Wait until both copies' files and the metaserver's row have the newest acknowledged point."""

    def has(plan):
        points = cluster.data(plan) / "points.json"
        own = json.loads(points.read_text())["own"] if points.exists() else None
        return own is not None and own[2] == cluster.state(plan).log_end

    for plan in cluster.pair():
        until(lambda plan=plan: has(plan), f"{plan.hostname} remembers the acknowledged point")
    end = cluster.state(cluster.broker("g1", "master")).log_end
    until(lambda: cluster.row("SELECT max(log_end) FROM acknowledged_point") == (end,), "the row remembers it")


def refused(cluster, action, words):
    """Return why an action on stopped brokers is refused; None while they still count as running."""
    try:
        cluster.manage(action, **words)
    except OperatorError as error:
        return None if "running" in str(error) else str(error)
    return "it is done"


def is_incomplete(cluster, plan):
    return cluster.row("SELECT complete FROM broker WHERE hostname = ?", plan.hostname) == (0,)


def all_ids(count, more):
    return sorted([f"before-{i}" for i in range(count)] + [f"after-{i}" for i in range(more)])


def returned(cluster, plan):
    """Wait until a master without its slave continues, or reports that it was rolled back."""
    name = plan.hostname
    until(
        lambda: "rolled_back" in (cluster.reasons(plan) or []) or "no slave matched in time" in cluster.log_of(name),
        f"{name} goes on alone, or says that it was rolled back",
    )


def check_nothing_is_lost(cluster, more):
    cluster.wait_writable()
    cluster.wait_equal()
    assert all(not cluster.reasons(plan) for plan in cluster.pair())
    got = cluster.consume_all("s", "g", BEFORE + more)
    assert sorted(id for _, id in got) == all_ids(BEFORE, more)
    assert sorted(sequence for sequence, _ in got) == list(range(BEFORE + more))
    cluster.send_all("s", 5, name="later")


@pytest.mark.parametrize(
    "lost, metaserver, memory, more",
    [
        pytest.param("copy from before", "up", "remembered", 1000, id="row and slave remember"),
        pytest.param("copy from before", "away", "remembered", 1, id="the slave alone remembers"),
        pytest.param("zeroed end", "up", "killed at once", 1, id="nobody remembers, zeroed end"),
    ],
)
def test_master_without_its_last_write_is_restored(cluster, tmp_path, more, metaserver, memory, lost):
    """The log ends at a frame's end, so the disk shows no damage; the slave returns after `slave_wait_ms`."""
    master, slave = cluster.pair()
    cluster.end(master.hostname, slave.hostname)
    back_up(cluster, master, tmp_path / "backup")
    restart_both(cluster)
    cluster.send_all("s", more, name="after")
    if memory == "remembered":
        remembered(cluster)
    cluster.end(*([] if metaserver == "up" else ["metaserver"]), master.hostname, slave.hostname)
    if lost == "zeroed end":
        zero_newest_message(cluster, master)
    else:
        put_back(cluster, master, tmp_path / "backup")
    cluster.begin(master.hostname)
    returned(cluster, master)
    cluster.begin(slave.hostname)
    until(lambda: (found := cluster.state(slave)) and found.term, "the slave has its part")
    cluster.begin(*([] if metaserver == "up" else ["metaserver"]))
    check_nothing_is_lost(cluster, more)
    if memory == "remembered":
        assert "rolled back" in cluster.log_of(master.hostname)
    assert "rolled back" not in cluster.log_of(slave.hostname)


def test_rolled_back_slave_is_promoted_by_force_only(cluster, tmp_path):
    """The master's machine is lost while the slave, with an older disk, is not refilled."""
    master, slave = cluster.pair()
    cluster.end(master.hostname, slave.hostname)
    back_up(cluster, slave, tmp_path / "backup")
    restart_both(cluster)
    cluster.send_all("s", 500, name="after")
    remembered(cluster)
    cluster.end(master.hostname, slave.hostname)
    put_back(cluster, slave, tmp_path / "backup")
    cluster.begin(slave.hostname)
    until(lambda: is_incomplete(cluster, slave), "the metaserver's row says that the slave is not complete")
    assert "rolled_back" in cluster.reasons(slave)
    cluster.end(slave.hostname)
    words = cluster.place(slave) | {"role": 0}
    refusal = until(lambda: refused(cluster, "ReplaceBroker", words), "the metaserver notices that both are down")
    assert "rolled back" in refusal and "acknowledged up to offset" in refusal and "acceptLoss" in refusal
    cluster.begin(master.hostname, slave.hostname)
    check_nothing_is_lost(cluster, 500)


def put_back_to_the_start(cluster, plan):
    """Remove log and acknowledged point of a stopped broker; its directory and identity stay."""
    data = cluster.data(plan)
    identity = (data / "broker.json").read_bytes()
    shutil.rmtree(data)
    data.mkdir()
    (data / "broker.json").write_bytes(identity)


def test_rolled_back_master_waits_for_the_other_copy(cluster):
    """The disk is put back while both are stopped. The new master does not begin without the other copy."""
    master, slave = cluster.pair()
    remembered(cluster)
    cluster.end(slave.hostname, master.hostname)
    put_back_to_the_start(cluster, slave)
    words = cluster.place(slave) | {"role": 0, "swap": "true"}
    assert until(lambda: refused(cluster, "ReplaceBroker", words), "both count as down") == "it is done"
    cluster.begin(slave.hostname)
    until(lambda: (found := cluster.state(slave)) and found.role == 0 and found.term, "it is the master")
    assert "rolled_back" in cluster.reasons(slave)
    cluster.begin(master.hostname)
    check_nothing_is_lost(cluster, 0)
    assert "no slave matched in time" not in cluster.log_of(slave.hostname)


def test_quarantine_is_listed_measured_and_cleared(cluster):
    _, slave = cluster.pair()
    cluster.end(slave.hostname)
    message = [frame for frame in read_copy(cluster.data(slave)).frames if frame.subject == "s"][-1]
    disk = RealDisk(cluster.data(slave))
    data = disk.read(log_name(0), message.offset, message.end - message.offset)
    quarantine.keep_bytes(disk, message.offset, data, "conflict with the master of epoch 1.1")
    disk.put("log/a", bytes(100))
    quarantine.keep_files(disk, ["log/a"], 0, 100, "seeded-anew")
    disk.close()
    cluster.begin(slave.hostname)
    size = 'qmq_broker_quarantine_bytes{broker_group="g1"}'
    until(lambda: cluster.state(slave) and cluster.metrics(slave)[size], "it is measured")
    (_, kept) = cluster.manage("ListQuarantine", brokerGroup="g1")["brokers"]
    assert [(part["why"], part["evidence"]) for part in kept["parts"]] == [
        ("seeded-anew", False),
        ("conflict with the master of epoch 1.1", True),
    ]
    words = {"brokerGroup": "g1", "host": slave.hostname}
    assert len(cluster.manage("ClearQuarantine", **words)["cleared"]) == 1
    with pytest.raises(OperatorError, match="go by name"):
        cluster.manage("ClearQuarantine", **words)
    cluster.manage("ClearQuarantine", parts=kept["parts"][1]["name"], **words)
    assert not cluster.metrics(slave)[size] and not disk.names("quarantine")
