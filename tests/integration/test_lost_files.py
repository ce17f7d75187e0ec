"""Shell. A file that is taken away under a running broker is missed, though the broker has it open: the one that is
written within a second, others when somebody reads the log, as the audit does, which says what it made brokers repair.
"""

from __future__ import annotations

import pytest

from qmq.audit.copies import place_options
from qmq.audit.group import audit_group
from qmq.audit.results import Group
from qmq.deploy.copies import read_copy
from qmq.log.segments import log_name
from tests.integration.cluster_world import (
    are_equal,
    consume_all,
    data_of,
    ends,
    flip_bit,
    log_of,
    running,
    send_all,
    until,
)
from tests.support.spark import local_spark

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::ResourceWarning")

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
def test_file_that_is_written_is_missed_and_comes_back(cluster, role, how):
    """The process ends, so that what it fsynced there is acknowledged no more, and takes it from the other copy."""
    subject, broker = f"{role}.{how}", cluster.broker("g1", role)
    sent = [receipt.message_id for receipt in send_all(cluster, subject, COUNT)]
    until(lambda: are_equal(cluster), "equal copies")
    file, said = file_of(cluster, role, -1), len(log_of(cluster, broker.hostname))
    if how == "unlinked":
        file.unlink()
    else:
        (file.parent / "other").write_bytes(file.read_bytes()[:4096])
        (file.parent / "other").replace(file)
    until(lambda: "was taken away or exchanged" in log_of(cluster, broker.hostname)[said:], "the broker misses it")
    cluster.wait_writable()
    send_all(cluster, subject, 1, name="after")
    until(lambda: are_equal(cluster), "equal copies")
    until(lambda: are_both_whole(cluster), "whole copies")
    assert [id for _, id in consume_all(cluster, subject, "g", COUNT + 1)][:COUNT] == sent


def test_repairs_caused_by_the_audit_are_reported(cluster):
    """A file that is gone on one copy, a flipped bit on the other; no scrub comes by for a week.

    Behind the others: what masters wrote that had lost their newest file is no finding.
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
    with local_spark("lost files") as spark:
        result = audit_group(spark, Group("g1", places))
        assert (result.unreadable, result.found) == (None, {"repaired": 2}), [
            {k: r[k] for k in ("what", "copy", "offset", "end", "epoch", "text")} for r in result.findings
        ]
        of_slave, of_master = sorted(result.findings, key=lambda row: row["offset"])
        assert (of_slave["copy"], of_slave["offset"], of_slave["end"]) == ("slave", *bases[1:3])
        assert (of_master["copy"], of_master["segment"]) == ("master", int(flipped.stem))
        assert all("taken it from the other copy since" in row["text"] for row in result.findings)
        until(lambda: gone.exists() and cluster.wait_writable() is None, "both are whole")
        assert are_both_whole(cluster) and ends(cluster)
        assert audit_group(spark, Group("g1", places)).status == 0
