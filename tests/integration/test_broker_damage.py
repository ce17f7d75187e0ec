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
from tests.integration.cluster_world import flip_bit, shared_cluster, until

COUNT = 400
FRAMES = 10


cluster = shared_cluster(segment_bytes=64 * 1024, tail_bytes=0)


@pytest.fixture
def ids(cluster, subject):
    """Ids of messages of this test's subject, in several frames and segments of both copies."""
    cluster.begin(*cluster.hostnames)  # an earlier test may have failed
    cluster.wait_writable()
    ids = []
    for turn in range(FRAMES):
        receipts = cluster.send_all(subject, COUNT // FRAMES, size=200, name=f"t{turn}")
        ids += [receipt.message_id for receipt in receipts]
    cluster.wait_equal()
    return ids


def damage(data, subject, *, newest=False, where="body"):
    """Flip one bit of a messages frame, with frames behind it in its segment; return the frame's offset."""
    frames = [f for f in read_copy(data).frames if f.kind == FrameKind.MESSAGES and f.subject == subject]
    bases = segment_bases(RealDisk(data))
    frame = next(
        f
        for f, after in zip(frames, frames[1:], strict=False)
        if f.offset not in bases and after.offset not in bases and (f.offset > bases[-1]) == newest
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


def test_damage_is_repaired_when_read(cluster, subject, ids):
    master = cluster.broker("g1", "master")
    data = cluster.data(master)
    quarantined = set(data.glob("quarantine/*.json"))
    offset = damage(data, subject)
    pid = cluster.service(master.hostname).pid
    got = cluster.consume_all(subject, "g", COUNT, prefetch_messages=20)
    assert [id for _, id in sorted(set(got))] == ids, "each is consumed, none as it was damaged"
    assert cluster.service(master.hostname).pid == pid, "the broker goes on"
    lines = cluster.log_of(master.hostname)
    assert re.search(f"log damaged.* offset={offset} ", lines) and "log repaired" in lines, lines[-2000:]
    cluster.wait_writable()
    [report] = set(data.glob("quarantine/*.json")) - quarantined
    assert json.loads(report.read_text())["begin"] == offset and report.with_suffix(".bytes").stat().st_size > 0
    cluster.send_all(subject, 10, name="after")
    cluster.wait_equal()
    mine, other = cluster.read_copies()
    assert mine.frames == other.frames
    assert [id for name, _, id in mine.messages if name == subject][:COUNT] == ids


def test_missing_segments_are_fetched_from_the_other_copy(cluster, subject, ids):
    """Also the oldest file: without the manifest, the log would look like one after retention."""
    broker = cluster.broker("g1", "master")
    data = cluster.data(broker)
    cluster.end(*cluster.hostnames)
    bases = segment_bases(RealDisk(data))
    assert len(bases) > 3
    for base in (bases[0], bases[-3]):
        (data / log_name(base)).unlink()
    cluster.begin(*cluster.hostnames)
    until(lambda: segment_bases(RealDisk(data)) == bases and is_whole(data), "the files are back")
    cluster.wait_writable()
    cluster.wait_equal()
    mine, other = cluster.read_copies()
    assert mine.frames == other.frames and mine.start == bases[0]
    assert [id for _, id in cluster.consume_all(subject, "all of it", COUNT)] == ids


@pytest.mark.parametrize("role, where", [("master", "header"), ("slave", "body")])
def test_damage_at_start_is_repaired_before_registration(cluster, subject, ids, role, where):
    """Whole frames follow the damaged one in the newest segment, so it is no torn tail and nothing is cut (W4)."""
    broker = cluster.broker("g1", role)
    for _ in range(5):
        cluster.send_all(f"{subject}.newest", 1)
    cluster.end(broker.hostname)
    offset = damage(cluster.data(broker), f"{subject}.newest", newest=True, where=where)
    started = len(cluster.log_of(broker.hostname))
    cluster.begin(broker.hostname)
    cluster.wait_writable()
    lines = cluster.log_of(broker.hostname)[started:]
    assert f" end={offset} " in lines, "recovery went as far as the log was whole"
    assert f"begin={offset} " in lines and lines.index("log damaged") < lines.index(f"role {role}"), lines
    cluster.wait_equal()
    mine, other = cluster.read_copies()
    assert mine.frames == other.frames
    assert [id for _, id in cluster.consume_all(subject, "g", COUNT)] == ids
