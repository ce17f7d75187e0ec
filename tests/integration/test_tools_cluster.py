"""Shell. Commands against a real cluster: moved consumers, marked groups, Doctor's findings."""

from __future__ import annotations

import json

from tests.integration.cluster_world import Probe, shared_cluster, until
from tests.integration.tools_world import DONE, REFUSED
from tests.support.ports import free_ports

cluster = shared_cluster(groups=("g1", "g2"))


def data(cluster, command, *words, **options):
    ended = cluster.tool(command, "--json", *words, **options)
    assert ended.returncode == DONE, ended.stderr
    return json.loads(ended.stdout)["data"]


def lag(cluster, subject, group):
    rows = data(cluster, "Lag", subject=subject, group=group)["lag"]
    return sum(row["messages"] for row in rows)


def findings(cluster, **options):
    ended = cluster.tool("Doctor", "--json", **options)
    return ended.returncode, json.loads(ended.stdout)


def failed(found):
    return {finding["step"] for finding in found if finding["level"] == "FAIL"}


def test_lag_consumers_and_a_reset_that_works(cluster):
    """Weakness 33: QMQ's ResetOffset never sent a request."""
    cluster.send_all("order.changed", 40)
    cluster.consume_all("order.changed", "billing", 40)
    assert lag(cluster, "order.changed", "billing") == 0

    def rates(name):
        return [
            row.get(name, 0) > 0 for group in ("g1", "g2") for row in data(cluster, "Rates", brokerGroup=group)["rates"]
        ]

    until(lambda: any(rates("taken")) and any(rates("delivered")), "the masters' samples say so")
    assert "DELIVERED/S" in cluster.tool("Rates", brokerGroup="g1").stdout
    shown = cluster.tool("ResetOffset", "--yes", subject="order.changed", group="billing", to="earliest")
    assert shown.returncode == DONE and "billing continues in order.changed: earliest" in shown.stdout, shown.stderr
    assert lag(cluster, "order.changed", "billing") == 40
    again = cluster.consume_all("order.changed", "billing", 40)
    assert len({message for _, message in again}) == 40
    cluster.tool("ResetOffset", "--yes", subject="order.changed", group="billing", action=2)
    assert lag(cluster, "order.changed", "billing") == 40
    cluster.tool("ResetOffset", "--yes", subject="order.changed", group="billing", action=1)
    assert lag(cluster, "order.changed", "billing") == 0
    consumers = cluster.tool("Consumers", subject="order.changed").stdout
    assert consumers.splitlines()[1].split()[:2] == ["order.changed", "billing"]


def test_mark_waits_for_every_producer(cluster):
    with Probe(cluster) as probe:
        (client,) = data(cluster, "Clients", subject="probe")["clients"]
        assert client["produces"] and client["app"] == "test"
        marked = cluster.tool("MarkReadonly", "--yes", "--wait=20", brokerGroup="g1", subject="probe")
        assert marked.stdout.splitlines()[1] == "no client holds the old route", marked.stderr
        sent = len(probe.receipts)
        until(lambda: len(probe.receipts) > sent + 20, "the probe goes on")
        assert {receipt.broker_group for receipt in probe.receipts[sent + 1 :]} == {"g2"}
        assert cluster.tool("UnMarkReadonly", "--yes", brokerGroup="g1", subject="probe").returncode == DONE


def test_doctor_finds_a_healthy_cluster_ok(cluster):

    def nothing_wrong():
        status, found = findings(cluster)
        return status == DONE and all(finding["level"] == "OK" for finding in found) and found

    found = until(nothing_wrong, "it finds nothing; a clock seems to differ while a process stands still")
    steps = {finding["step"] for finding in found}
    assert steps >= {
        "name resolution",
        "HTTP port",
        "database",
        "clocks",
        "gRPC port",
        "token",
        "brokers",
        "groups",
        "metaservers",
        "broker ports",
        "disks",
        "terms",
        "copies",
        "versions",
    }
    assert sum(finding["step"] == "broker ports" for finding in found) == 4


def test_doctor_names_the_broker_that_is_down(cluster):
    cluster.end("g2-b")
    until(lambda: not all(row["up"] for row in data(cluster, "ListBrokers")), "the metaserver notices")
    status, found = findings(cluster)
    (cause,) = (finding for finding in found if finding["level"] != "OK")
    assert status == REFUSED and cause["step"] == "brokers" and "g2-b" in cause["found"]
    assert "start it on 127.0.0.1" in cause["do"] and "ReplaceBroker --brokerGroup=g2 --role=1" in cause["do"]
    text = cluster.tool("Doctor", "--transitions").stdout
    assert "FAIL  brokers" in text and "1 to look at" in text
    assert "MATCHED -> IN_SYNC" in text and "FOLLOW -> FOLLOWING" in text and "LOST -> ABSENT" in text
    cluster.begin("g2-b")
    until(lambda: findings(cluster)[0] == DONE, "all is well again")


def test_doctor_names_the_missing_step(cluster):
    (closed,) = free_ports(1)
    metrics = cluster.broker("g1", "master").metrics_port
    for options, step in (
        ({"metaserver": "no-such-host.invalid:8080"}, "name resolution"),
        ({"metaserver": f"127.0.0.1:{closed}"}, "HTTP port"),
        ({"metaserver": f"127.0.0.1:{metrics}"}, "HTTP"),
        ({"token": "qmq_x_y"}, "token"),
    ):
        status, found = findings(cluster, **options)
        assert status == REFUSED and failed(found) == {step} and found[-1]["step"] == step, found
