"""Shell. Clusters on IPv6, and clusters behind a forwarder: others connect to addresses where no process listens."""

from __future__ import annotations

from collections import defaultdict
from contextlib import ExitStack, contextmanager

from qmq.deploy import cluster as deployed
from qmq.deploy import plan
from qmq.deploy.prometheus.config import find_targets
from qmq.types import Endpoint
from tests.integration import cluster_world
from tests.integration.cluster_world import ObservedCluster, running, until
from tests.support.cable import cable_to
from tests.support.ports import free_ports

PORTS = ("serve_port", "sync_port", "control_port", "metrics_port", "http_port", "grpc_port")


@contextmanager
def forwarded(monkeypatch):
    """Let clusters listen on all addresses and on other ports than they advertise; yield {setting: cables}."""
    cables = defaultdict(list)

    class Behind(ObservedCluster):
        def _service(self, name, module, settings):
            advertised = {key: settings[key] for key in PORTS if key in settings}
            listening = dict(zip(advertised, free_ports(len(advertised)), strict=True))
            for key, port in advertised.items():
                cables[key].append(stack.enter_context(cable_to(listening[key], port)))
            address = {"bind": "::"} if "ip" in settings else {"host": "::", "advertised_ip": plan.HOST}
            words = {f"advertised_{key}": port for key, port in advertised.items()}
            return super()._service(name, module, settings | listening | words | address)

    monkeypatch.setattr(cluster_world, "ObservedCluster", Behind)
    with ExitStack() as stack:
        yield cables


def set_host(monkeypatch, host):
    for module in (plan, deployed):
        monkeypatch.setattr(module, "HOST", host)


def produce_swap_consume(cluster):
    """Produce, swap and consume; return the ids of the consumed messages."""
    cluster.send_all("s", 20, name="before")
    master = cluster.broker("g1", "master").hostname
    cluster.swap_roles("g1")
    until(lambda: cluster.broker("g1", "master").hostname != master, "the roles are swapped")
    cluster.wait_writable("g1")
    cluster.send_all("s", 20, name="after")
    return sorted(message_id for _, message_id in cluster.consume_all("s", "g", 40))


IDS = sorted(f"{name}-{number}" for name in ("before", "after") for number in range(20))


def test_cluster_on_ipv6_stores_swaps_and_delivers(tmp_path, monkeypatch):
    set_host(monkeypatch, "::1")
    with running(tmp_path) as cluster:
        assert cluster.metaserver.startswith("http://[::1]:")
        assert produce_swap_consume(cluster) == IDS
        assert {row["ip"] for row in cluster.manage("ListBrokers")} == {"::1"}
        targets = [address for target in find_targets(cluster.manage) for address in target["targets"]]
        assert len(targets) == 3 and {Endpoint.parse(address).host for address in targets} == {"::1"}


def test_cluster_behind_forwarder_uses_advertised_addresses(tmp_path, monkeypatch):
    """They are a host name and ports where no process listens."""
    set_host(monkeypatch, "localhost")
    with forwarded(monkeypatch) as cables, running(tmp_path) as cluster:
        assert produce_swap_consume(cluster) == IDS
        broker = cluster.broker("g1", "master")
        row = next(row for row in cluster.manage("ListBrokers", details="true") if row["hostname"] == broker.hostname)
        assert row["ip"] == plan.HOST
        shown = (row["servePort"], row["syncPort"], row["controlPort"], row["metricsPort"])
        assert shown == (broker.serve_port, broker.sync_port, broker.control_port, broker.metrics_port)
        cluster.metrics(broker)
        unused = [key for key in PORTS if not any(cable.connections for cable in cables[key])]
        assert unused == [], "a process was reached past its advertised address"
