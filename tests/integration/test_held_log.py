"""Shell. What a running broker does for whoever reads its whole log, as the audit does: it says what there is, and
keeps it meanwhile. P9."""

from __future__ import annotations

import pytest

from qmq.audit.copies import BrokerCopy, CannotRead
from qmq.log.segments import snapshot_name
from tests.integration.cluster_world import data_of, running, send_all, until

SEGMENT_BYTES = 64 * 1024


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with running(tmp_path_factory.mktemp("cluster"), segment_bytes=SEGMENT_BYTES, retention_bytes=1) as cluster:
        cluster.wait_writable()
        yield cluster


def opened(cluster, role, token=None):
    broker = cluster.broker("g1", role)
    return BrokerCopy(f"127.0.0.1:{broker.control_port}", token or cluster.token)


@pytest.mark.parametrize("role", ["master", "slave"])
def test_held_log_keeps_its_segments_until_it_is_let_go(cluster, role):
    held, other = (opened(cluster, role) for _ in range(2))
    held.hold()
    begin = held.describe()
    for turn in range(10):
        send_all(cluster, "held", 40, size=600, name=f"{role}{turn}")
    until(lambda: len(held.describe().segments) > len(begin.segments) + 2, "more segments")
    one_that_is_not = opened(cluster, "slave" if role == "master" else "master")
    until(lambda: one_that_is_not.describe().start > begin.start, "retention at the other copy")
    assert held.describe().start == begin.start
    held.close()
    until(lambda: other.describe().start > begin.start, "retention goes on")
    for copy in (other, one_that_is_not):
        copy.close()


def test_log_is_described_though_its_oldest_snapshot_is_damaged(cluster):
    """Who asks wants its frames; a peer that is damaged is not mended before it was told of them."""
    copy = opened(cluster, "master")
    copy.hold()
    until(lambda: copy.describe().start > 0, "retention")
    before = copy.describe()
    snapshot = data_of(cluster, cluster.broker("g1", "master")) / snapshot_name(before.start)
    whole = snapshot.read_bytes()
    assert before.chain is not None
    snapshot.write_bytes(whole[:-1])
    try:
        assert copy.describe()[:2] == before[:2] and copy.describe().chain is None
        assert copy.window(before.start, 1)
    finally:
        snapshot.write_bytes(whole)
        copy.close()


def test_log_is_held_for_nobody_whose_token_is_unknown(cluster):
    copy = opened(cluster, "master", token="another")
    with pytest.raises(CannotRead, match="UNAUTHENTICATED"):
        copy.hold()
    copy.close()
