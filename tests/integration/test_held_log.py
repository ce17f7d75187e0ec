"""Shell. A running broker describes its log to a reader of all of it, such as the audit, and keeps it meanwhile
(P9).
"""

from __future__ import annotations

import time

import pytest

from qmq.audit.copies import BrokerCopy
from qmq.audit.derived import check_segment
from qmq.log.segments import index_name, snapshot_name
from tests.integration.cluster_world import shared_cluster, until

SEGMENT_BYTES = 64 * 1024
READ_BYTES_PER_S = 100_000


cluster = shared_cluster(segment_bytes=SEGMENT_BYTES, retention_bytes=1, read_log_bytes_per_s=READ_BYTES_PER_S)


def opened(cluster, role, token=None):
    broker = cluster.broker("g1", role)
    return BrokerCopy(f"127.0.0.1:{broker.control_port}", token or cluster.token)


@pytest.mark.parametrize("role", ["master", "slave"])
def test_held_log_keeps_its_segments_until_released(cluster, role):
    held, other = (opened(cluster, role) for _ in range(2))
    held.hold()
    begin = held.describe()
    for turn in range(10):
        cluster.send_all("held", 40, size=600, name=f"{role}{turn}")
    until(lambda: len(held.describe().segments) > len(begin.segments) + 2, "more segments")
    one_that_is_not = opened(cluster, "slave" if role == "master" else "master")
    until(lambda: one_that_is_not.describe().start > begin.start, "retention at the other copy")
    assert held.describe().start == begin.start
    held.close()
    until(lambda: other.describe().start > begin.start, "retention goes on")
    for copy in (other, one_that_is_not):
        copy.close()


def test_index_files_follow_from_the_log(cluster):
    copies = {role: opened(cluster, role) for role in ("master", "slave")}
    for copy in copies.values():
        copy.hold()
    begin = {role: copy.describe() for role, copy in copies.items()}
    for turn in range(8):
        cluster.send_all("held", 40, size=600, name=f"beside{turn}")
    for role, copy in copies.items():
        until(lambda copy=copy, role=role: len(copy.describe().segments) > len(begin[role].segments) + 1, "segments")
    bases = {role: copy.describe().segments[-3:] for role, copy in copies.items()}
    for role, copy in copies.items():
        base, folder = bases[role][0], cluster.data(cluster.broker("g1", role))
        files = [(folder / name(base)).read_bytes() for name in (index_name, snapshot_name)]
        derived = copy.derived(base)
        assert all(files) and files == [derived.index, derived.snapshot]
    for base in sorted({base for of in bases.values() for base in of[:-1]}):
        assert list(check_segment(copies, bases, base)) == []
    for copy in copies.values():
        copy.close()


def test_log_with_a_damaged_snapshot_is_described(cluster):
    """The caller needs the frames; only the chain before them is missing."""
    copy = opened(cluster, "master")
    copy.hold()
    until(lambda: copy.describe().start > 0, "retention")
    before = copy.describe()
    snapshot = cluster.data(cluster.broker("g1", "master")) / snapshot_name(before.start)
    whole = snapshot.read_bytes()
    assert before.chain is not None
    snapshot.write_bytes(whole[:-1])
    try:
        assert copy.describe()[:2] == before[:2] and copy.describe().chain is None
        assert copy.window(before.start, 1)
    finally:
        snapshot.write_bytes(whole)
        copy.close()


def test_all_readers_share_the_rate(cluster):
    """Bound of an audit's share of a broker's disk and processor."""
    cluster.send_all("held", 40, size=600, name="rate")
    copies = [opened(cluster, "slave") for _ in range(3)]
    begin = copies[0].describe()
    until(lambda: copies[0].describe().high_watermark > begin.start, "something to read")
    began_s = time.monotonic()
    given = [len(copy.window(copy.describe().start, 1)) for copy in copies]
    assert time.monotonic() - began_s > sum(given[:-1]) / READ_BYTES_PER_S > 0
    for copy in copies:
        copy.close()
