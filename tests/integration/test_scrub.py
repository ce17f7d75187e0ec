"""Shell. The scrub reads closed segments in the background, and repairs damage before a consumer meets it."""

from __future__ import annotations

import json
from zlib import crc32

import pytest

from qmq.log.frame import decode_frames, encode_header, subject_field
from qmq.log.segments import log_name
from tests.integration.cluster_world import flip_bit, shared_cluster, until
from tests.integration.tools_world import DONE, REFUSED, UNREACHABLE

COUNT = 200
FIELDS = ("kind flags subject count epoch offset high_watermark timestamp_ms first_sequence producer batch").split()


cluster = shared_cluster(segment_bytes=64 * 1024, tail_bytes=0, scrub_hours=0.0002)


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
    ended = cluster.tool("ScrubReport", "--json")
    return ended.returncode, {row["role"]: row for row in json.loads(ended.stdout)}


def test_report_of_whole_copies_is_clean(cluster):
    status, rows = report(cluster)
    assert status == DONE and rows.keys() == {"MASTER", "SLAVE"}
    assert all(row["why"] == "" and not row["damaged"] and not row["late"] for row in rows.values())
    slave = cluster.broker("g1", "slave").hostname
    cluster.end(slave)
    status, rows = report(cluster)
    cluster.begin(slave)
    cluster.wait_writable()
    assert status == UNREACHABLE and rows["MASTER"]["why"] == "" and "does not answer" in rows["SLAVE"]["why"]


@pytest.mark.parametrize("role, what", [("master", "flipped"), ("master", "of another history"), ("slave", "unlinked")])
def test_unread_damage_is_found_and_repaired(cluster, role, what):
    subject = f"{role}.{what.replace(' ', '-')}"
    sent = [receipt.message_id for receipt in cluster.send_all(subject, COUNT, size=900)]
    cluster.send_all("behind", 1)  # closes the segment even if all messages went as one batch
    cluster.wait_equal()
    broker = cluster.broker("g1", role)
    data, pid = cluster.data(broker), cluster.service(broker.hostname).pid
    bases = cluster.segments(broker)
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
    assert f"scrub found damage offset={bases[1]} " in cluster.log_of(broker.hostname)
    assert cluster.service(broker.hostname).pid == pid, "it did not end"
    if what == "flipped":
        assert len(list(data.glob("quarantine/*.bytes"))) > quarantined, "the old bytes are kept"
    samples = cluster.metrics(broker)
    assert samples['qmq_broker_scrub_findings_total{broker_group="g1"}'] >= 1
    assert samples['qmq_broker_scrubbed_bytes_total{broker_group="g1"}'] > 0
    status, rows = report(cluster)
    assert status == REFUSED and rows[role.upper()]["damaged"] and rows[role.upper()]["findings"] >= 1
    assert 0 < samples['qmq_broker_scrub_oldest_seconds{broker_group="g1"}'] < 600
    assert [id for _, id in cluster.consume_all(subject, "g", COUNT)] == sent
    mine, other = cluster.read_copies()
    assert mine.frames == other.frames
