"""Shell. A group without its slave is readonly at once; also a wrong data directory, and a stopped metaserver."""

from __future__ import annotations

import asyncio
import shutil
import signal
import time

import pytest

import qmq
from qmq.errors import ErrorCode
from qmq.remoting import commands
from qmq.remoting.commands import Command
from qmq.server.meta_link import ALONE_AFTER_S
from tests.integration.cluster_world import WAIT_S, Wire, produce_body, pull, running, shared_cluster, subscribe, until
from tests.support.promises import Tries

shared = shared_cluster(slave_lag_ms_max=4000, lease_ms=20_000)


@pytest.fixture
def cluster(shared):
    """The shared cluster, whole again for each test; each test has its own subject."""
    names = ["metaserver", *shared.hostnames]
    for name in names:
        shared.service(name).signal(signal.SIGCONT)
    shared.begin(*names)
    until(lambda: _answers(shared), "the metaserver answers")
    shared.wait_writable()
    return shared


def test_group_without_its_slave_is_readonly_within_a_second(tmp_path):
    """W11."""
    with running(tmp_path, groups=("g1", "g2")) as cluster:
        master, slave = cluster.pair()

        def is_readonly():
            until(lambda: cluster.reasons(master) == ["slave_down"], "readonly")

        async def send_through_the_loss():
            async with cluster.producer() as sender:
                began, seen = time.monotonic(), set()
                while seen != {"g1", "g2"}:  # a group is in the route once its slave has matched
                    assert time.monotonic() < began + WAIT_S, f"only {seen} got messages"
                    seen.add((await sender.send(qmq.Message("s", {"n": "0"}))).broker_group)
                for again in (tries := Tries(1.0, "the group is readonly")):
                    if again:
                        cluster.begin(slave.hostname)
                        await asyncio.to_thread(cluster.wait_writable)
                    await asyncio.to_thread(cluster.end, slave.hostname)
                    await tries.time_async(lambda: asyncio.to_thread(is_readonly))
                after = []
                for _ in (tries := Tries(5.0, "20 messages are stored elsewhere")):
                    began = time.monotonic()
                    after += [await sender.send(qmq.Message("s", {"n": str(n)})) for n in range(20)]
                    tries.took(time.monotonic() - began)
                return after

        after = asyncio.run(send_through_the_loss())
        assert all(receipt.is_stored and receipt.broker_group == "g2" for receipt in after), after
        with Wire(master.serve_port, token=cluster.token) as wire:
            answer = wire.ask(Command.PRODUCE, produce_body("s", {"n": "1"}))
            assert answer.code == ErrorCode.READ_ONLY
            assert b"slave_down, its slave is missing: start it" in bytes(answer.body)

        def is_reported():
            row = next(row for row in cluster.manage("ListBrokerGroups", details="true") if row["groupName"] == "g1")
            return (row["writable"], row["readonlyReasons"]) == (False, ["slave_down"])

        until(is_reported, "the metaserver reports it")
        assert cluster.metrics(master)['qmq_broker_readonly{broker_group="g1",reason="slave_down"}'] == 1

        cluster.begin(slave.hostname)
        cluster.wait_writable("g1")
        assert cluster.send_all("s", 50)


def test_empty_broker_is_not_promoted_over_messages(cluster, subject):
    """W3, W16: an operator stops both brokers and puts the emptied slave in the master's place."""
    master, slave = cluster.pair()
    receipts = cluster.send_all(subject, 20)
    cluster.end(master.hostname, slave.hostname)
    cluster.data(slave).rename(cluster.run_dir / "aside")
    cluster.manage(
        "ReplaceBroker", role=0, **cluster.place(slave)
    )  # the metaserver has no report of the empty directory yet
    cluster.manage("ReplaceBroker", role=1, **cluster.place(master))
    cluster.begin(slave.hostname, master.hostname)
    until(lambda: "another data directory" in cluster.log_of(slave.hostname), "the log has the reason")
    assert "Give it that one back" in cluster.log_of(slave.hostname)
    assert not cluster.writable("g1") and cluster.ends()[0] == (0, 0)
    cluster.end(slave.hostname)
    shutil.rmtree(cluster.data(slave))
    (cluster.run_dir / "aside").rename(cluster.data(slave))
    cluster.begin(slave.hostname)
    cluster.wait_writable()
    assert cluster.broker("g1", "master") == slave
    assert [id for _, id in cluster.consume_all(subject, "g", 20)] == [receipt.message_id for receipt in receipts]


def test_exchanged_directories_are_reported_without_a_master(tmp_path):
    with running(tmp_path) as cluster:
        sent = [receipt.message_id for receipt in cluster.send_all("s", 20)]
        master, slave = cluster.pair()
        names = [master.hostname, slave.hostname]
        directories = [cluster.data(broker) for broker in (master, slave)]

        def exchange():
            cluster.end(*names)
            directories[0].rename(tmp_path / "aside")
            directories[1].rename(directories[0])
            (tmp_path / "aside").rename(directories[1])
            began = {name: len(cluster.log_of(name)) for name in names}
            cluster.begin(*names)
            return lambda name: cluster.log_of(name)[began[name] :]

        since = exchange()
        for broker, other in ((master, slave), (slave, master)):
            text = f"this data directory belongs to {other.hostname}:{other.serve_port} of g1"
            until(lambda name=broker.hostname, text=text: text in since(name), f"{broker.hostname} logs the reason")
        alone_s = time.monotonic() + ALONE_AFTER_S + 1
        until(lambda: time.monotonic() > alone_s, "they would have taken up their parts alone")
        for broker in (master, slave):
            assert "metaserver's database" not in since(broker.hostname)
            assert "role master" not in since(broker.hostname) and "role slave" not in since(broker.hostname)
        exchange()
        cluster.wait_writable()
        assert [id for _, id in cluster.consume_all("s", "g", 20)] == sent


# Without the metaserver.


def test_brokers_restart_in_their_roles_without_the_metaserver(cluster, subject):
    master, slave = cluster.pair()
    cluster.send_all(subject, 10)
    with Wire(master.serve_port, token=cluster.token) as wire:
        subscribe(wire, subject)  # a new consumer group waits for the metaserver
    cluster.swap_roles("g1")
    cluster.wait_writable()
    cluster.end("metaserver", master.hostname, slave.hostname)
    cluster.begin(master.hostname, slave.hostname)
    until(lambda: (found := cluster.state(slave)) and found.writable, "the last master accepts produces again")
    with Wire(slave.serve_port, token=cluster.token) as wire:
        produced = commands.decode_produced(wire.ask(Command.PRODUCE, produce_body(subject, {"n": "1"})).body)
        assert produced.first_sequence == 10
        assert sum(piece.count for piece in pull(wire, subscribe(wire, subject), timeout_ms=30_000)) == 11
    with Wire(master.serve_port, token=cluster.token) as wire:
        assert wire.ask(Command.PRODUCE, produce_body(subject, {"n": "1"})).code == ErrorCode.NOT_MASTER
    cluster.begin("metaserver")
    until(lambda: _answers(cluster), "the metaserver answers")
    cluster.wait_writable()
    assert cluster.broker("g1", "master") == slave


def _answers(cluster):
    try:
        return cluster.manage("ListBrokers")
    except qmq.QmqError:
        return None
