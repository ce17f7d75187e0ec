"""Shell. A file removed under a running broker, which has it open, is missed: the newest within a second, others when
the log is read. The audit reports repairs that it caused.
"""

from __future__ import annotations

import pytest

from qmq.audit.copies import place_options
from qmq.deploy.control import read_copy
from qmq.log.segments import log_name
from tests.integration.cluster_world import (
    are_equal,
    consume_all,
    data_of,
    flip_bit,
    log_of,
    running,
    send_all,
    until,
)
from tests.unit.audit.without_spark import audit_places

COUNT = 300


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with running(tmp_path_factory.mktemp("cluster"), segment_bytes=64 * 1024, tail_bytes=0) as cluster:
        cluster.wait_writable()
        yield cluster


def bases_of(cluster, role):
    return sorted(int(path.stem) for path in data_of(cluster, cluster.broker("g1", role)).glob("log/*.log"))


def file_of(cluster, role, number):
    return data_of(cluster, cluster.broker("g1", role)) / log_name(bases_of(cluster, role)[number])


def are_both_whole(cluster):
    mine, other = (read_copy(data_of(cluster, cluster.broker("g1", role))) for role in ("master", "slave"))
    return mine.frames == other.frames


@pytest.mark.parametrize("role, how", [("master", "unlinked"), ("slave", "exchanged")])
def test_newest_file_is_missed_and_restored(cluster, role, how):
    """The process ends, so later fsyncs of the lost file acknowledge nothing, and fetches it from the other copy."""
    subject, broker = f"{role}.{how}", cluster.broker("g1", role)
    sent = [receipt.message_id for receipt in send_all(cluster, subject, COUNT)]
    until(lambda: are_equal(cluster), "equal copies")
    file, logged = file_of(cluster, role, -1), len(log_of(cluster, broker.hostname))
    if how == "unlinked":
        file.unlink()
    else:
        (file.parent / "other").write_bytes(file.read_bytes()[:4096])
        (file.parent / "other").replace(file)
    until(lambda: "was taken away or exchanged" in log_of(cluster, broker.hostname)[logged:], "the broker misses it")
    cluster.wait_writable()
    send_all(cluster, subject, 1, name="after")
    until(lambda: are_equal(cluster), "equal copies")
    until(lambda: are_both_whole(cluster), "whole copies")
    assert [id for _, id in consume_all(cluster, subject, "g", COUNT + 1)][:COUNT] == sent


def test_repairs_caused_by_the_audit_are_reported(cluster):
    """One copy lacks a file, the other has a flipped bit; the scrub is a week away.

    Reading them starts both repairs. A busy broker may finish after the audit: that place is still damaged.
    """
    for turn in range(9):
        send_all(cluster, "audited", 100, size=400, name=f"m{turn}")
    until(lambda: are_equal(cluster), "equal copies")
    bases = bases_of(cluster, "slave")
    assert bases == bases_of(cluster, "master") and len(bases) > 5
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
    assert are_both_whole(cluster)
    assert audit_places(places).status == 0
