"""Shell. A disk has unreadable blocks: the broker continues, and the other copy repairs them (P6)."""

from __future__ import annotations

import json

import pytest

from qmq.deploy.control import read_copy
from qmq.log.segments import log_name
from tests.integration.broker_on_a_disk_with_bad_blocks import BAD_BLOCKS, BLOCK
from tests.integration.cluster_world import shared_cluster, until

COUNT = 400


cluster = shared_cluster(
    program="tests.integration.broker_on_a_disk_with_bad_blocks", segment_bytes=64 * 1024, tail_bytes=0
)


@pytest.fixture
def sent(cluster, subject):
    cluster.begin(*cluster.hostnames)  # an earlier test may have failed
    cluster.wait_writable()
    first = cluster.segments(cluster.broker("g1", "master"))[-1]
    for turn in range(10):
        cluster.send_all(subject, COUNT // 10, size=600, name=f"t{turn}")
    cluster.wait_equal()
    return first


def spoil(cluster, broker, base, *blocks):
    """Make blocks of a segment unreadable."""
    path = (cluster.data(broker) / log_name(base)).resolve()
    with bad_blocks(cluster, broker).open("a") as file:
        file.writelines(f"{path} {block}\n" for block in blocks)


def bad_blocks(cluster, broker):
    return cluster.settings_file(broker.hostname).with_name(BAD_BLOCKS)


def are_repaired(cluster, broker):
    return not bad_blocks(cluster, broker).read_text()


def copies_are_whole(cluster):
    cluster.wait_writable()
    cluster.wait_equal()
    mine, other = cluster.read_copies()
    return mine.frames == other.frames


def test_bad_blocks_are_repaired_while_consumers_go_on(cluster, subject, sent):
    master = cluster.broker("g1", "master")
    bases = [base for base in cluster.segments(master) if base >= sent]
    assert len(bases) > 2
    spoil(cluster, master, bases[0], (bases[1] - bases[0] - 1) // BLOCK)
    spoil(cluster, master, bases[1], 3, 4)
    pid = cluster.service(master.hostname).pid
    got = cluster.consume_all(subject, "g", COUNT, prefetch_messages=20)
    assert len({id for _, id in got}) == COUNT
    until(lambda: are_repaired(cluster, master), "written anew")
    assert cluster.service(master.hostname).pid == pid, "the broker goes on"
    lines = cluster.log_of(master.hostname)
    assert "disk cannot read" in lines and "log repaired" in lines
    assert copies_are_whole(cluster)
    assert [json.loads(path.read_text()) for path in cluster.data(master).glob("quarantine/*.json")]


def test_bad_block_at_start_is_repaired_before_registration(cluster, subject, sent):
    """The block lies in the newest segment, before whole frames: nothing is cut, and the process does not end again."""
    broker = cluster.broker("g1", "master")
    until(lambda: cluster.send_all(subject, 20, size=200) and written(cluster, broker) > 4 * BLOCK, "a few blocks")
    newest = cluster.segments(broker)[-1]
    cluster.end(broker.hostname)
    spoil(cluster, broker, newest, 1)
    cluster.begin(broker.hostname)
    starts = cluster.service(broker.hostname).starts
    cluster.wait_writable()
    until(lambda: are_repaired(cluster, broker), "written anew")
    assert cluster.service(broker.hostname).starts == starts, "it did not end"
    assert copies_are_whole(cluster)


def written(cluster, broker):
    """Return the bytes in the newest segment."""
    copy = read_copy(cluster.data(broker))
    return copy.end - cluster.segments(broker)[-1]
