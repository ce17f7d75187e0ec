"""Shell. A bit flips on one disk: it is never served, the group reports it, the other copy repairs it (P6)."""

from __future__ import annotations

import json
import re

import pytest

from qmq.deploy.control import read_copy
from qmq.errors import CorruptFrame
from qmq.log import RealDisk
from qmq.log.frame import FrameKind
from qmq.log.segments import log_name, segment_bases
from tests.integration.cluster_world import (
    are_equal,
    begin,
    consume_all,
    data_of,
    end,
    flip_bit,
    log_of,
    metrics,
    reasons,
    running,
    send_all,
    until,
)

COUNT = 400
FRAMES = 10


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with running(tmp_path_factory.mktemp("cluster"), segment_bytes=64 * 1024, tail_bytes=0) as cluster:
        yield cluster


@pytest.fixture
def ids(cluster, request):
    """Ids of messages of this test's subject, in several frames and segments of both copies."""
    begin(cluster, *(broker.hostname for broker in cluster.plan.brokers))  # an earlier test may have failed
    cluster.wait_writable()
    ids = []
    for turn in range(FRAMES):
        receipts = send_all(cluster, subject_of(request), COUNT // FRAMES, size=200, name=f"t{turn}")
        ids += [receipt.message_id for receipt in receipts]
    until(lambda: are_equal(cluster), "equal copies")
    return ids


@pytest.fixture
def subject(request):
    return subject_of(request)


def subject_of(request):
    return f"s{sum(request.node.name.encode())}"


def damage(data, subject, *, newest=False, where="body"):
    """Flip one bit of a messages frame, with frames behind it in its segment; return the frame's offset."""
    newest_base = segment_bases(RealDisk(data))[-1]
    frames = [f for f in read_copy(data).frames if f.kind == FrameKind.MESSAGES and f.subject == subject]
    bases = segment_bases(RealDisk(data))
    frame = next(
        f
        for f, after in zip(frames, frames[1:], strict=False)
        if f.offset not in bases and after.offset not in bases and (f.offset > newest_base) == newest
    )
    at = {"header": 12, "body": frame.body_at + frame.body_bytes // 2}[where]
    base = max(base for base in bases if base <= frame.offset)
    flip_bit(data / log_name(base), frame.offset - base + at)
    return frame.offset


def is_whole(data):
    try:
        return bool(read_copy(data))
    except (CorruptFrame, AssertionError):  # or a repair is under way
        return False


def both_copies(cluster):
    until(lambda: are_equal(cluster), "equal copies")
    return [read_copy(data_of(cluster, cluster.broker("g1", role))) for role in ("master", "slave")]


def test_damage_is_repaired_when_read(cluster, subject, ids):
    master = cluster.broker("g1", "master")
    data = data_of(cluster, master)
    quarantined = set(data.glob("quarantine/*.json"))
    offset = damage(data, subject)
    pid = cluster.service(master.hostname).pid
    got = consume_all(cluster, subject, "g", COUNT, prefetch_messages=20)
    assert [id for _, id in sorted(set(got))] == ids, "each is consumed, none as it was damaged"
    assert cluster.service(master.hostname).pid == pid, "the broker goes on"
    lines = log_of(cluster, master.hostname)
    assert re.search(f"log damaged.* offset={offset} ", lines) and "log repaired" in lines, lines[-2000:]
    cluster.wait_writable()
    [report] = set(data.glob("quarantine/*.json")) - quarantined
    assert json.loads(report.read_text())["begin"] == offset and report.with_suffix(".bytes").stat().st_size > 0
    send_all(cluster, subject, 10, name="after")
    mine, other = both_copies(cluster)
    assert mine.frames == other.frames
    assert [id for name, _, id in mine.messages if name == subject][:COUNT] == ids


def test_damage_makes_the_group_readonly_until_repaired(cluster, subject, ids):
    """Without the other copy the group stays readonly, and serves only whole frames."""
    master, slave = (cluster.broker("g1", role) for role in ("master", "slave"))
    damage(data_of(cluster, master), subject)
    end(cluster, slave.hostname)
    with pytest.raises(TimeoutError):
        consume_all(cluster, subject, "g", COUNT, prefetch_messages=20, timeout_s=10)
    until(lambda: "corrupt" in (reasons(cluster, master) or ()), "readonly for the damage")
    assert metrics(cluster, master)['qmq_broker_readonly{broker_group="g1",reason="corrupt"}'] == 1
    begin(cluster, slave.hostname)
    cluster.wait_writable()
    assert [id for _, id in consume_all(cluster, subject, "all of it", COUNT)] == ids
    assert "corrupt" not in reasons(cluster, master)


def test_missing_segments_are_fetched_from_the_other_copy(cluster, subject, ids):
    """Also the oldest file: without the manifest, the log would look like one after retention."""
    broker = cluster.broker("g1", "master")
    data = data_of(cluster, broker)
    end(cluster, *(plan.hostname for plan in cluster.plan.brokers))
    bases = segment_bases(RealDisk(data))
    assert len(bases) > 3
    for base in (bases[0], bases[-3]):
        (data / log_name(base)).unlink()
    begin(cluster, *(plan.hostname for plan in cluster.plan.brokers))
    until(lambda: segment_bases(RealDisk(data)) == bases and is_whole(data), "the files are back")
    cluster.wait_writable()
    mine, other = both_copies(cluster)
    assert mine.frames == other.frames and mine.start == bases[0]
    assert [id for _, id in consume_all(cluster, subject, "all of it", COUNT)] == ids


@pytest.mark.parametrize("role, where", [("master", "header"), ("slave", "body")])
def test_damage_at_start_is_repaired_before_registration(cluster, subject, ids, role, where):
    """Whole frames follow the damaged one in the newest segment, so it is no torn tail and nothing is cut (W4)."""
    broker = cluster.broker("g1", role)
    for _ in range(5):
        send_all(cluster, f"{subject}.newest", 1)
    end(cluster, broker.hostname)
    offset = damage(data_of(cluster, broker), f"{subject}.newest", newest=True, where=where)
    started = len(log_of(cluster, broker.hostname))
    begin(cluster, broker.hostname)
    cluster.wait_writable()
    lines = log_of(cluster, broker.hostname)[started:]
    assert f" end={offset} " in lines, "recovery went as far as the log was whole"
    assert f"begin={offset} " in lines and lines.index("log damaged") < lines.index(f"role {role}"), lines
    mine, other = both_copies(cluster)
    assert mine.frames == other.frames
    assert [id for _, id in consume_all(cluster, subject, "g", COUNT)] == ids
