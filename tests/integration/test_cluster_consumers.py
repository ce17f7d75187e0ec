"""Shell. Consumers of one group on real brokers: cold backlogs, consumers that vanish, acks that stay. W1, W2, W8."""

from __future__ import annotations

import pytest

from tests.integration.cluster_world import (
    begin,
    consume_all,
    end,
    running,
    send_all,
    state,
)

LEASE_MS = 4000


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with running(tmp_path_factory.mktemp("cluster"), tail_bytes=16 * 1024, lease_ms=LEASE_MS) as cluster:
        yield cluster


def test_cold_backlog_comes_whole_and_in_order(cluster):
    """Most of it lies in closed segments, out of memory; a restart in between changes nothing (W6)."""
    count = 6000
    send_all(cluster, "cold", count, size=300)
    assert state(cluster, cluster.broker("g1", "master")).log_end > 6 * 256 * 1024
    expected = [(n, f"m-{n}") for n in range(count)]
    assert consume_all(cluster, "cold", "first", count) == expected
    master = cluster.broker("g1", "master")
    end(cluster, master.hostname)
    begin(cluster, master.hostname)
    cluster.wait_writable()
    assert consume_all(cluster, "cold", "second", count) == expected
