"""Shell. A disk has unreadable blocks: the broker continues, and the other copy repairs them (P6)."""

from __future__ import annotations

import json

import pytest

from qmq.deploy.control import read_copy
from qmq.log import RealDisk
from qmq.log.segments import log_name, segment_bases
from tests.integration.broker_on_a_disk_with_bad_blocks import BAD_BLOCKS, BLOCK
from tests.integration.cluster_world import (
    are_equal,
    begin,
    begin_as,
    consume_all,
    data_of,
    end,
    log_of,
    running,
    send_all,
    settings_file,
    until,
)

COUNT = 400


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with running(tmp_path_factory.mktemp("cluster"), segment_bytes=64 * 1024, tail_bytes=0) as cluster:
        names = [broker.hostname for broker in cluster.plan.brokers]
        end(cluster, *names)
        begin_as(cluster, "tests.integration.broker_on_a_disk_with_bad_blocks", *names)
        cluster.wait_writable()
        yield cluster


@pytest.fixture
def subject(request):
    return f"s{sum(request.node.name.encode())}"


@pytest.fixture
def sent(cluster, subject):
    begin(cluster, *(broker.hostname for broker in cluster.plan.brokers))  # an earlier test may have failed
    cluster.wait_writable()
    first = segment_bases(RealDisk(data_of(cluster, cluster.broker("g1", "master"))))[-1]
    for turn in range(10):
        send_all(cluster, subject, COUNT // 10, size=600, name=f"t{turn}")
    until(lambda: are_equal(cluster), "equal copies")
    return first


def spoil(cluster, broker, base, *blocks):
    """Make blocks of a segment unreadable."""
    path = (data_of(cluster, broker) / log_name(base)).resolve()
    with bad_blocks(cluster, broker).open("a") as file:
        file.writelines(f"{path} {block}\n" for block in blocks)


def bad_blocks(cluster, broker):
    return settings_file(cluster, broker.hostname).with_name(BAD_BLOCKS)


def are_repaired(cluster, broker):
    return not bad_blocks(cluster, broker).read_text()


def bases_of(cluster, broker):
    return segment_bases(RealDisk(data_of(cluster, broker)))


def copies_are_whole(cluster):
    cluster.wait_writable()
    until(lambda: are_equal(cluster), "equal copies")
    mine, other = [read_copy(data_of(cluster, cluster.broker("g1", role))) for role in ("master", "slave")]
    return mine.frames == other.frames


def test_bad_blocks_are_repaired_while_consumers_go_on(cluster, subject, sent):
    master = cluster.broker("g1", "master")
    bases = [base for base in bases_of(cluster, master) if base >= sent]
    assert len(bases) > 2
    spoil(cluster, master, bases[0], (bases[1] - bases[0] - 1) // BLOCK)
    spoil(cluster, master, bases[1], 3, 4)
    pid = cluster.service(master.hostname).pid
    got = consume_all(cluster, subject, "g", COUNT, prefetch_messages=20)
    assert len({id for _, id in got}) == COUNT
    until(lambda: are_repaired(cluster, master), "written anew")
    assert cluster.service(master.hostname).pid == pid, "the broker goes on"
    lines = log_of(cluster, master.hostname)
    assert "disk cannot read" in lines and "log repaired" in lines
    assert copies_are_whole(cluster)
    assert [json.loads(path.read_text()) for path in data_of(cluster, master).glob("quarantine/*.json")]


def test_bad_block_at_start_is_repaired_before_registration(cluster, subject, sent):
    """The block lies in the newest segment, before whole frames: nothing is cut, and the process does not end again."""
    broker = cluster.broker("g1", "master")
    until(lambda: send_all(cluster, subject, 20, size=200) and written(cluster, broker) > 4 * BLOCK, "a few blocks")
    newest = bases_of(cluster, broker)[-1]
    end(cluster, broker.hostname)
    spoil(cluster, broker, newest, 1)
    begin(cluster, broker.hostname)
    starts = cluster.service(broker.hostname).starts
    cluster.wait_writable()
    until(lambda: are_repaired(cluster, broker), "written anew")
    assert cluster.service(broker.hostname).starts == starts, "it did not end"
    assert copies_are_whole(cluster)


def written(cluster, broker):
    """Return the bytes in the newest segment."""
    copy = read_copy(data_of(cluster, broker))
    return copy.end - bases_of(cluster, broker)[-1]
