"""Shell. A slave of three is filled on an operator's command: real processes, and the tool."""

from __future__ import annotations

import shutil

from tests.integration.cluster_world import running
from tests.integration.test_recovery_of_three import key, qmq
from tests.integration.test_slaves_of_three import failed_checks
from tests.integration.test_three_copies import check_copies
from tests.integration.tools_world import DONE, REFUSED
from tests.support.waiting import until

COUNT = 2_000
BYTES = 1_500
RATE = {"catch_up_bytes_per_s": 128 * 1024, "tail_bytes": 0}
"""Three megabytes take some 24 s, long enough to stop halfway."""


def is_partly_filled(cluster, slave, above=0):
    found = cluster.state(slave)
    return found is not None and above < found.log_end < cluster.state(cluster.broker("g1", "master")).log_end


def waits(cluster, slave):
    return cluster.reasons(slave) == ["unfilled"]


def ask(cluster, command, slave):
    return qmq(cluster, command, "g1", host=key(slave))


def test_new_slave_is_filled_on_request_and_stopped_halfway(tmp_path):
    with running(tmp_path / "cluster", copies=3, **RATE) as cluster:
        cluster.wait_in_sync()
        master, slave, other = (plan for plan in cluster.plan.brokers)
        assert qmq(cluster, "SetCopies", "g1", syncMode="manual").returncode == DONE
        refused = ask(cluster, "SyncReplica", slave)
        assert refused.returncode == REFUSED and "needs no fill" in refused.stderr, refused.stderr
        refused = ask(cluster, "CancelSync", slave)
        assert refused.returncode == REFUSED and "is in sync" in refused.stderr, refused.stderr
        cluster.end(slave.hostname)
        cluster.send_all("s", COUNT, size=BYTES)
        cluster.begin(slave.hostname)
        until(lambda: cluster.state(slave) and not waits(cluster, slave), "who only catches up does not wait")
        cluster.wait_in_sync()

        cluster.end(slave.hostname)
        shutil.rmtree(cluster.data(slave))
        cluster.begin(slave.hostname)
        until(lambda: waits(cluster, slave), "a new slave waits")
        assert cluster.state(slave).log_end == 0 and cluster.state(master).writable
        assert cluster.metrics(slave)['qmq_broker_readonly{broker_group="g1",reason="unfilled"}'] == 1
        [remedy] = until(lambda: failed_checks(cluster, slave), "Doctor names it").values()
        assert f"SyncReplica --brokerGroup=g1 --host={key(slave)}" in remedy
        cluster.end(slave.hostname)
        cluster.begin(slave.hostname)
        until(lambda: waits(cluster, slave), "also after its restart")
        cluster.swap_roles("g1", to=other.hostname)
        until(lambda: waits(cluster, slave) and cluster.state(other).writable, "and under another master")

        assert ask(cluster, "SyncReplica", slave).returncode == DONE
        until(lambda: is_partly_filled(cluster, slave), "it is being filled")
        assert ask(cluster, "CancelSync", slave).returncode == DONE
        until(lambda: waits(cluster, slave), "the filling stops")
        stopped_at = cluster.state(slave).log_end
        assert 0 < stopped_at < cluster.state(other).log_end
        cluster.send_all("s", 10)
        cluster.end(slave.hostname)
        cluster.begin(slave.hostname)
        until(lambda: waits(cluster, slave), "it waits on, also after its restart")
        assert cluster.state(slave).log_end == stopped_at, "what it has it keeps"

        assert ask(cluster, "SyncReplica", slave).returncode == DONE
        until(lambda: is_partly_filled(cluster, slave, stopped_at), "it goes on where it was stopped")
        cluster.wait_in_sync()
        actions = [row["action"] for row in cluster.manage("AuditTrail", brokerGroup="g1")["rows"]]
        assert actions.count("SyncReplica") == 2 and actions.count("CancelSync") == 1, actions
        assert len([message for message in check_copies(cluster).messages if message[0] == "s"]) == COUNT + 10
