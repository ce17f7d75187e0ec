"""Shell. One slave of three diverges, or its disk is full: the two others acknowledge, and the slave returns."""

from __future__ import annotations

import json
import shutil

from qmq.deploy.control import read_copy
from qmq.tools.inspect import inspect
from tests.integration.cluster_world import running
from tests.integration.test_readonly_of_three import remembered_end
from tests.integration.test_recovery_of_three import key, lose, plans_of, qmq
from tests.integration.tools_world import DONE, REFUSED
from tests.support.small_disk import fill, small_disk
from tests.support.waiting import until

COUNT = 20
SEGMENT_BYTES = 1 << 20


def failed_checks(cluster, plan):
    """Return Doctor's failed checks of a broker: name -> remedy."""
    checks = cluster.manage("Doctor")["checks"]
    return {check["name"]: check["remedy"] for check in checks if not check["ok"] and plan.hostname in check["name"]}


def test_diverged_slave_is_named_and_refilled(tmp_path):
    """It confirmed frames that were accepted as lost while it was down. It keeps them; its directory is set aside."""
    with running(tmp_path / "cluster", copies=3) as cluster:
        cluster.manage("AddNewSubject", subject="s.g1", tag="g1")
        master, kept, other = plans_of(cluster, "g1")
        cluster.end(kept.hostname)
        cluster.send_all("s.g1", COUNT, name="lost")
        acknowledged = cluster.state(master).log_end
        until(lambda: remembered_end(cluster) == acknowledged, "the metaserver remembers it")
        cluster.end(master.hostname, other.hostname)
        lose(cluster, master)
        report = tmp_path / "kept.json"
        report.write_text(json.dumps(inspect(cluster.data(kept))))
        words = {"gone": f"{key(master)},{key(other)}", "reports": report}
        refused = qmq(cluster, "RecoverGroup", "g1", **words)
        assert refused.returncode == REFUSED and "LOST: acknowledged at offsets" in refused.stderr, refused.stderr
        assert qmq(cluster, "RecoverGroup", "g1", "--acceptLoss", **words).returncode == DONE
        cluster.begin(kept.hostname, master.hostname)
        cluster.wait_writable()
        cluster.send_all("s.g1", COUNT, name="later")
        cluster.begin(other.hostname)
        until(lambda: cluster.reasons(other) == ["diverged"], "it says that it differs")
        assert cluster.state(kept).writable and not cluster.reasons(kept)
        cluster.send_all("s.g1", COUNT, name="more")
        remedies = until(lambda: failed_checks(cluster, other), "Doctor names it")
        assert any("docs/runbook.md, diverged" in remedy for remedy in remedies.values()), remedies
        assert any("RecoverGroup" in remedy for remedy in remedies.values()), remedies
        plan = qmq(cluster, "RecoverGroup", "g1", "--dry-run")
        assert f"set aside the data directory of {key(other)}, stopped" in plan.stdout, plan.stdout + plan.stderr
        only_there = f"MAYBE LOST: s.g1, sequences {COUNT} to {2 * COUNT - 1} ({COUNT}): only {key(other)} has them"
        assert only_there in plan.stdout, plan.stdout
        cluster.end(other.hostname)
        aside = shutil.move(cluster.data(other), tmp_path / "aside")
        cluster.begin(other.hostname)
        until(lambda: cluster.slaves_in_sync() == 2 and cluster.all_are_equal(), "it is filled again")
        assert len(cluster.consume_all("s.g1", "check", 3 * COUNT)) == 3 * COUNT
        cluster.end(*cluster.hostnames)
        assert {f"lost-{at}" for at in range(COUNT)} <= {id for _, _, id in read_copy(aside).messages}


def test_slave_with_a_full_disk_is_passed_over(tmp_path):
    with running(tmp_path / "cluster", copies=3, segment_bytes=SEGMENT_BYTES, disk_free_limit=0) as cluster:
        cluster.wait_in_sync()
        master, slave = cluster.pair()
        data = cluster.data(slave)
        cluster.end(slave.hostname)
        kept = shutil.move(data, tmp_path / "kept")
        with small_disk(data, mib=64):
            shutil.copytree(kept, data, dirs_exist_ok=True)
            cluster.begin(slave.hostname)
            until(lambda: cluster.slaves_in_sync() == 2 and (data / "reserve").is_file(), "in sync, with a reserve")
            points, end_now = data / "points.json", cluster.state(master).log_end
            until(lambda: points.is_file() and f" {end_now}," in points.read_text(), "it has written down that point")
            filler = fill(data)
            cluster.send_all("s", 400, size=10_000)  # several segments
            assert cluster.state(master).writable and not cluster.reasons(master)
            until(lambda: cluster.slaves_in_sync() == 1, "the full one is missed")
            until(lambda: "No space left on device" in cluster.log_of(slave.hostname), "its write fails, so it ends")
            pid = until(lambda: cluster.state(slave) and cluster.service(slave.hostname).pid, "it is there again")
            cluster.send_all("s", 400, size=10_000, name="more")
            assert len(cluster.consume_all("s", "g", 800)) == 800
            assert cluster.service(slave.hostname).pid == pid, cluster.log_of(slave.hostname)[-3000:]
            filler.unlink()
            until(lambda: cluster.slaves_in_sync() == 2 and cluster.all_are_equal(), "it has caught up")
            assert not cluster.reasons(slave)
            cluster.end(slave.hostname)
