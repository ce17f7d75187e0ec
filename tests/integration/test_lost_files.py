"""Shell. A file removed under a running broker, which has it open, is missed: the newest within a second, others when
the log is read. The audit reports repairs that it caused.
"""

from __future__ import annotations

import pytest

from qmq.audit.copies import place_options
from qmq.log.segments import log_name
from tests.integration.cluster_world import flip_bit, shared_cluster, until
from tests.unit.audit.without_spark import audit_places

COUNT = 300


cluster = shared_cluster(segment_bytes=64 * 1024, tail_bytes=0)


def file_of(cluster, role, number):
    plan = cluster.broker("g1", role)
    return cluster.data(plan) / log_name(cluster.segments(plan)[number])


@pytest.mark.parametrize("role, how", [("master", "unlinked"), ("slave", "exchanged")])
def test_newest_file_is_missed_and_restored(cluster, role, how):
    """The process ends, so later fsyncs of the lost file acknowledge nothing, and fetches it from the other copy."""
    subject, broker = f"{role}.{how}", cluster.broker("g1", role)
    sent = [receipt.message_id for receipt in cluster.send_all(subject, COUNT)]
    cluster.wait_equal()
    file, logged = file_of(cluster, role, -1), len(cluster.log_of(broker.hostname))
    if how == "unlinked":
        file.unlink()
    else:
        (file.parent / "other").write_bytes(file.read_bytes()[:4096])
        (file.parent / "other").replace(file)
    until(lambda: "was taken away or exchanged" in cluster.log_of(broker.hostname)[logged:], "the broker misses it")
    cluster.wait_writable()
    cluster.send_all(subject, 1, name="after")
    cluster.wait_equal()
    until(lambda: cluster.are_whole(), "whole copies")
    assert [id for _, id in cluster.consume_all(subject, "g", COUNT + 1)][:COUNT] == sent


def test_repairs_caused_by_the_audit_are_reported(cluster):
    """One copy lacks a file, the other has a flipped bit; the scrub is a week away.

    Reading them starts both repairs. A busy broker may finish after the audit: that place is still damaged.
    """
    for turn in range(9):
        cluster.send_all("audited", 100, size=400, name=f"m{turn}")
    cluster.wait_equal()
    bases, others = map(cluster.segments, cluster.pair())
    assert bases == others and len(bases) > 5
    gone, flipped = file_of(cluster, "slave", 1), file_of(cluster, "master", 3)
    gone.unlink()
    flip_bit(flipped, 3000)
    places = {}
    for role in ("master", "slave"):
        places[role] = place_options(f"127.0.0.1:{cluster.broker('g1', role).control_port}", cluster.token)
    result = audit_places(places)
    assert result.unreadable is None and sum(result.found.values()) == 2, result.findings
    assert {row["what"] for row in result.findings} <= {"repaired", "damaged"}, result.findings
    of_slave, of_master = sorted(result.findings, key=lambda row: row["offset"])
    # The end is the first frame that was read again: after a quick repair, the second one of the lost file.
    assert (of_slave["copy"], of_slave["offset"]) == ("slave", bases[1]) and bases[1] < of_slave["end"] <= bases[2]
    assert (of_master["copy"], of_master["segment"]) == ("master", int(flipped.stem))
    for row in result.findings:
        assert ("taken it from the other copy since" in row["text"]) == (row["what"] == "repaired")
    until(lambda: gone.exists() and cluster.wait_writable() is None, "both are whole")
    assert cluster.are_whole()
    assert audit_places(places).status == 0
