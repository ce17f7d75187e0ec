"""Shell. Crowds without a token on each port of processes with 256 descriptors."""

from __future__ import annotations

import socket
from contextlib import ExitStack

import pytest

from qmq.control_plane import find_metaserver
from tests.integration.cluster_world import running
from tests.integration.process_with_few_descriptors import LIMIT

METASERVER = "metaserver"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """A cluster with few descriptors for each process."""
    with running(tmp_path_factory.mktemp("few")) as cluster:
        names = [METASERVER, *cluster.hostnames]
        cluster.end(*names)
        cluster.begin_as("tests.integration.process_with_few_descriptors", *names)
        cluster.wait_metaserver()  # it may need longer than its brokers, which become writable without it
        cluster.wait_writable()
        yield cluster


def addresses(cluster):
    """Return the metaserver's HTTP and gRPC address."""
    return cluster.metaserver, find_metaserver(cluster.metaserver)


def crowd(stack, port):
    """Open more connections than a process has descriptors; the kernel may leave some waiting."""
    for _ in range(LIMIT + 50):
        sock = stack.enter_context(socket.socket())
        sock.setblocking(False)
        sock.connect_ex(("127.0.0.1", port))


def test_no_file_of_a_process_is_readable_by_others(cluster):
    folders = [cluster.data(broker) for broker in cluster.plan.brokers]
    found = [path for folder in folders for path in folder.rglob("*")] + [*cluster.run_dir.glob("metaserver/*.db*")]
    assert len(found) > 10 and not [path for path in found if path.stat().st_mode & 0o027]


def test_crowds_on_each_port_end_no_process(cluster):
    brokers = [cluster.broker("g1", role) for role in ("master", "slave")]
    names = [METASERVER, *(broker.hostname for broker in brokers)]
    before = [cluster.service(name).pid for name in names]
    ports = [
        port
        for broker in brokers
        for port in (broker.serve_port, broker.sync_port, broker.control_port, broker.metrics_port)
    ]
    with ExitStack() as stack:
        for port in (*ports, *(int(at.rpartition(":")[2]) for at in addresses(cluster))):
            crowd(stack, port)
        cluster.send_all("s", 1500, size=1000)  # begins new segments, so it opens files
        cluster.manage("AddToken", name="beside", role="client")
    cluster.wait_equal()
    assert [cluster.service(name).pid for name in names] == before
    logs = [cluster.log_of(name).lower() for name in names]
    assert not any("too many open files" in text or "descriptor is free" in text for text in logs)
    assert all("raise limitnofile" in text for text in logs), "each names the bound at its start"
