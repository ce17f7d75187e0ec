"""Shell. A disk is full to the last byte: the group is readonly, consumers continue, the broker does not crash."""

from __future__ import annotations

import shutil

import pytest

from tests.integration.cluster_world import running, until
from tests.support.small_disk import fill, small_disk

COUNT = 300


@pytest.mark.parametrize("role", ["master", "slave"])
def test_full_disk_makes_the_group_readonly(tmp_path, role):
    with running(tmp_path, segment_bytes=1 << 20, disk_free_limit=0) as cluster:
        broker = cluster.broker("g1", role)
        master = cluster.broker("g1", "master")
        data = cluster.data(broker)
        cluster.wait_writable()
        cluster.end(broker.hostname)
        kept = shutil.move(data, tmp_path / "kept")
        with small_disk(data, mib=64):
            shutil.copytree(kept, data, dirs_exist_ok=True)
            cluster.begin(broker.hostname)
            cluster.wait_writable()
            ids = [receipt.message_id for receipt in cluster.send_all("s", COUNT, size=200)]
            until(lambda: cluster.are_equal() and (data / "reserve").is_file(), "equal copies, and a reserve")
            filler = fill(data)
            until(lambda: "disk" in (cluster.reasons(master) or ()), "readonly, as its disk is full")
            assert cluster.consume_all("s", "before", COUNT)
            cluster.end(broker.hostname)
            cluster.begin(broker.hostname)
            until(lambda: "disk" in (cluster.reasons(master) or ()), "it starts on the full disk, and is readonly")
            pid = cluster.service(broker.hostname).pid
            got = cluster.consume_all("s", "after", COUNT)
            assert [id for _, id in sorted(set(got))] == ids
            assert cluster.service(broker.hostname).pid == pid, cluster.log_of(broker.hostname)[-3000:]
            filler.unlink()
            cluster.wait_writable()
            assert cluster.service(broker.hostname).pid == pid
            cluster.send_all("s", 10, name="again")
            cluster.wait_equal()
            cluster.end(broker.hostname)
