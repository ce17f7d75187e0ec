"""Shell. The scrub reads closed segments in the background, and repairs damage before a consumer meets it."""

from __future__ import annotations

import json
from zlib import crc32

import pytest

from qmq.deploy.control import read_copy
from qmq.log import RealDisk
from qmq.log.frame import decode_frames, encode_header, subject_field
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
    running,
    send_all,
    until,
)
from tests.integration.tools_world import DONE, REFUSED, UNREACHABLE, run

COUNT = 200
FIELDS = ("kind flags subject count epoch offset high_watermark timestamp_ms first_sequence producer batch").split()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cluster")
    with running(folder, segment_bytes=64 * 1024, tail_bytes=0, scrub_hours=0.0002) as cluster:
        cluster.wait_writable()
        yield cluster


def of_another_history(whole, base):
    """Return a segment's frames behind another history: each is valid, with another chain."""
    others, chain = b"", 1
    for frame, body in decode_frames(whole, base, None):
        fields = {name: getattr(frame, name) for name in FIELDS}
        header, made = encode_header(
            **fields,
            field=subject_field(frame.subject),
            body_bytes=len(body),
            body_crc=crc32(body),
            previous_chain=chain,
        )
        others, chain = others + header + body, made.chain
    return others


def report(cluster):
    """Return ScrubReport's exit status and its row of each copy."""
    ended = run("ScrubReport", cluster.metaserver, "--json", token=cluster.token)
    return ended.returncode, {row["role"]: row for row in json.loads(ended.stdout)}


def test_report_of_whole_copies_is_clean(cluster):
    status, rows = report(cluster)
    assert status == DONE and rows.keys() == {"MASTER", "SLAVE"}
    assert all(row["why"] == "" and not row["damaged"] and not row["late"] for row in rows.values())
    slave = cluster.broker("g1", "slave").hostname
    end(cluster, slave)
    status, rows = report(cluster)
    begin(cluster, slave)
    cluster.wait_writable()
    assert status == UNREACHABLE and rows["MASTER"]["why"] == "" and "does not answer" in rows["SLAVE"]["why"]


@pytest.mark.parametrize("role, what", [("master", "flipped"), ("master", "of another history"), ("slave", "unlinked")])
def test_unread_damage_is_found_and_repaired(cluster, role, what):
    subject = f"{role}.{what.replace(' ', '-')}"
    sent = [receipt.message_id for receipt in send_all(cluster, subject, COUNT, size=900)]
    send_all(cluster, "behind", 1)  # closes the segment even if all messages went as one batch
    until(lambda: are_equal(cluster), "equal copies")
    broker = cluster.broker("g1", role)
    data, pid = data_of(cluster, broker), cluster.service(broker.hostname).pid
    bases = segment_bases(RealDisk(data))
    file = data / log_name(bases[1])
    whole, quarantined = file.read_bytes(), len(list(data.glob("quarantine/*.bytes")))
    if what == "unlinked":
        file.unlink()
    elif what == "flipped":
        flip_bit(file, 41)
    else:
        (data / "other").write_bytes(of_another_history(whole, bases[1]))
        (data / "other").replace(file)  # an open descriptor still shows the right bytes
    until(lambda: file.is_file() and file.read_bytes() == whole, "it is repaired")
    cluster.wait_writable()
    assert f"scrub found damage offset={bases[1]} " in log_of(cluster, broker.hostname)
    assert cluster.service(broker.hostname).pid == pid, "it did not end"
    if what == "flipped":
        assert len(list(data.glob("quarantine/*.bytes"))) > quarantined, "the old bytes are kept"
    samples = metrics(cluster, broker)
    assert samples['qmq_broker_scrub_findings_total{broker_group="g1"}'] >= 1
    assert samples['qmq_broker_scrubbed_bytes_total{broker_group="g1"}'] > 0
    status, rows = report(cluster)
    assert status == REFUSED and rows[role.upper()]["damaged"] and rows[role.upper()]["findings"] >= 1
    assert 0 < samples['qmq_broker_scrub_oldest_seconds{broker_group="g1"}'] < 600
    assert [id for _, id in consume_all(cluster, subject, "g", COUNT)] == sent
    mine, other = (read_copy(data_of(cluster, cluster.broker("g1", copy))) for copy in ("master", "slave"))
    assert mine.frames == other.frames
