"""Shell. A group without its slave is readonly at once, serves consumers, and acknowledges nothing by one copy.

Also operators' marks, a wrong data directory, and a stopped metaserver.
"""

from __future__ import annotations

import asyncio
import shutil
import signal
import time

import pytest

import qmq
from qmq.deploy.control import read_copy
from qmq.deploy.plan import HOST
from qmq.errors import ErrorCode
from qmq.log.frame import FLAG_NO_SLAVE_IN_SYNC, FrameKind
from qmq.remoting import commands
from qmq.remoting.commands import Ack, Command
from qmq.server.meta_link import ALONE_AFTER_S
from tests.integration.cluster_world import (
    WAIT_S,
    Wire,
    are_equal,
    begin,
    consume_all,
    data_of,
    end,
    ends,
    log_of,
    metrics,
    produce_body,
    producer,
    pull,
    reasons,
    running,
    send_all,
    state,
    subscribe,
    until,
)
from tests.support.promises import Tries


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    with running(tmp_path_factory.mktemp("cluster"), slave_lag_ms_max=4000, lease_ms=20_000) as cluster:
        yield cluster


@pytest.fixture
def cluster(shared):
    """The shared cluster, whole again for each test; each test has its own subject."""
    names = ["metaserver", *(broker.hostname for broker in shared.plan.brokers)]
    for name in names:
        shared.service(name).signal(signal.SIGCONT)
    begin(shared, *names)
    until(lambda: _answers(shared), "the metaserver answers")
    shared.wait_writable()
    return shared


@pytest.fixture
def subject(request):
    return f"s{sum(request.node.name.encode())}"


def place(cluster, action, broker, role):
    cluster.manage(
        action,
        brokerGroup=broker.group,
        role=role,
        hostname=broker.hostname,
        ip=HOST,
        servePort=broker.serve_port,
        syncPort=broker.sync_port,
    )


def test_group_without_its_slave_is_readonly_within_a_second(tmp_path):
    """W11."""
    with running(tmp_path, groups=("g1", "g2")) as cluster:
        master, slave = (cluster.broker("g1", role) for role in ("master", "slave"))

        def is_readonly():
            until(lambda: reasons(cluster, master) == ["slave_down"], "readonly")

        async def send_through_the_loss():
            async with producer(cluster) as sender:
                began, seen = time.monotonic(), set()
                while seen != {"g1", "g2"}:  # a group is in the route once its slave has matched
                    assert time.monotonic() < began + WAIT_S, f"only {seen} got messages"
                    seen.add((await sender.send(qmq.Message("s", {"n": "0"}))).broker_group)
                for again in (tries := Tries(1.0, "the group is readonly")):
                    if again:
                        begin(cluster, slave.hostname)
                        await asyncio.to_thread(cluster.wait_writable)
                    await asyncio.to_thread(end, cluster, slave.hostname)
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
        assert metrics(cluster, master)['qmq_broker_readonly{broker_group="g1",reason="slave_down"}'] == 1

        begin(cluster, slave.hostname)
        cluster.wait_writable("g1")
        assert send_all(cluster, "s", 50)


def test_consumers_go_on_without_the_slave(cluster, subject):
    master, slave = (cluster.broker("g1", role) for role in ("master", "slave"))
    send_all(cluster, subject, 10)
    end(cluster, slave.hostname)
    until(lambda: reasons(cluster, master) == ["slave_down"], "readonly")
    with Wire(master.serve_port, token=cluster.token) as wire:
        subscription = subscribe(wire, subject)
        pieces = pull(wire, subscription)
        assert sum(piece.count for piece in pieces) == 10 and all(
            piece.flags == FLAG_NO_SLAVE_IN_SYNC for piece in pieces
        )
        first = pieces[0].pull_sequence
        assert wire.ask(Command.ACK, commands.encode_ack(Ack(subscription, [(first, first + 4)]))).code == 0
    begin(cluster, slave.hostname)
    cluster.wait_writable()
    cluster.swap_roles("g1")
    cluster.wait_writable()
    assert [sequence for sequence, _ in consume_all(cluster, subject, "g", 6, consumer_id="c1")] == [4, 5, 6, 7, 8, 9]
    until(lambda: are_equal(cluster), "equal copies")
    for copy in (read_copy(data_of(cluster, broker)) for broker in (master, slave)):
        alone = [
            FrameKind(frame.kind)
            for frame in copy.frames
            if frame.flags & FLAG_NO_SLAVE_IN_SYNC and frame.subject == subject
        ]
        assert alone == [FrameKind.POSITION, FrameKind.PULL, FrameKind.ACK]


def test_readonly_mark_outlives_the_slave_and_a_restart(cluster, subject):
    master, slave = (cluster.broker("g1", role) for role in ("master", "slave"))
    send_all(cluster, subject, 5)
    cluster.manage("MarkReadonlyBrokerGroup", brokerGroup="g1")
    until(lambda: reasons(cluster, master) == ["operator"], "marked")
    end(cluster, slave.hostname)
    until(lambda: reasons(cluster, master) == ["operator", "slave_down"], "both reasons")
    begin(cluster, slave.hostname)
    until(lambda: reasons(cluster, master) == ["operator"], "only the mark is left")
    end(cluster, master.hostname)
    begin(cluster, master.hostname)
    until(lambda: reasons(cluster, master) == ["operator"], "the mark is still there")
    with Wire(master.serve_port, token=cluster.token) as wire:
        answer = wire.ask(Command.PRODUCE, produce_body(subject, {"n": "1"}))
        assert answer.code == ErrorCode.READ_ONLY and b"UnMarkReadonly" in bytes(answer.body)
    assert len(consume_all(cluster, subject, "g", 5)) == 5
    cluster.manage("UnMarkReadonlyBrokerGroup", brokerGroup="g1")
    cluster.wait_writable()


def test_empty_broker_is_not_promoted_over_messages(cluster, subject):
    """W3, W16: an operator stops both brokers and puts the emptied slave in the master's place."""
    master, slave = (cluster.broker("g1", role) for role in ("master", "slave"))
    receipts = send_all(cluster, subject, 20)
    end(cluster, master.hostname, slave.hostname)
    data_of(cluster, slave).rename(cluster.run_dir / "aside")
    place(cluster, "ReplaceBroker", slave, 0)  # the metaserver has no report of the empty directory yet
    place(cluster, "ReplaceBroker", master, 1)
    begin(cluster, slave.hostname, master.hostname)
    until(lambda: "another data directory" in log_of(cluster, slave.hostname), "the log has the reason")
    assert "Give it that one back" in log_of(cluster, slave.hostname)
    assert not cluster.writable("g1") and ends(cluster)[0] == (0, 0)
    end(cluster, slave.hostname)
    shutil.rmtree(data_of(cluster, slave))
    (cluster.run_dir / "aside").rename(data_of(cluster, slave))
    begin(cluster, slave.hostname)
    cluster.wait_writable()
    assert cluster.broker("g1", "master") == slave
    assert [id for _, id in consume_all(cluster, subject, "g", 20)] == [receipt.message_id for receipt in receipts]


def test_broker_with_data_of_another_group_is_refused(tmp_path):
    with running(tmp_path, groups=("g1", "g2")) as cluster:
        mine, other = cluster.broker("g1", "slave"), cluster.broker("g2", "slave")
        end(cluster, mine.hostname, other.hostname)
        before = [ends(cluster, group)[0] for group in ("g1", "g2")]
        first, two = data_of(cluster, mine), data_of(cluster, other)
        first.rename(tmp_path / "aside")
        shutil.copytree(two, first)
        begin(cluster, mine.hostname)
        until(lambda: "belongs to" in log_of(cluster, mine.hostname), "the log has the reason")
        assert [ends(cluster, group)[0] for group in ("g1", "g2")] == before
        assert reasons(cluster, cluster.broker("g1", "master")) == ["slave_down"]
        end(cluster, mine.hostname)
        shutil.rmtree(first)
        (tmp_path / "aside").rename(first)
        begin(cluster, mine.hostname, other.hostname)
        cluster.wait_writable()


def test_exchanged_directories_are_reported_without_a_master(tmp_path):
    with running(tmp_path) as cluster:
        cluster.wait_writable()
        sent = [receipt.message_id for receipt in send_all(cluster, "s", 20)]
        master, slave = (cluster.broker("g1", role) for role in ("master", "slave"))
        names = [master.hostname, slave.hostname]
        directories = [data_of(cluster, broker) for broker in (master, slave)]

        def exchange():
            end(cluster, *names)
            directories[0].rename(tmp_path / "aside")
            directories[1].rename(directories[0])
            (tmp_path / "aside").rename(directories[1])
            began = {name: len(log_of(cluster, name)) for name in names}
            begin(cluster, *names)
            return lambda name: log_of(cluster, name)[began[name] :]

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
        assert [id for _, id in consume_all(cluster, "s", "g", 20)] == sent


# Without the metaserver.


def test_brokers_restart_in_their_roles_without_the_metaserver(cluster, subject):
    master, slave = (cluster.broker("g1", role) for role in ("master", "slave"))
    send_all(cluster, subject, 10)
    with Wire(master.serve_port, token=cluster.token) as wire:
        subscribe(wire, subject)  # a new consumer group waits for the metaserver
    cluster.swap_roles("g1")
    cluster.wait_writable()
    end(cluster, "metaserver", master.hostname, slave.hostname)
    begin(cluster, master.hostname, slave.hostname)
    until(lambda: (found := state(cluster, slave)) and found.writable, "the last master accepts produces again")
    with Wire(slave.serve_port, token=cluster.token) as wire:
        produced = commands.decode_produced(wire.ask(Command.PRODUCE, produce_body(subject, {"n": "1"})).body)
        assert produced.first_sequence == 10
        assert sum(piece.count for piece in pull(wire, subscribe(wire, subject), timeout_ms=30_000)) == 11
    with Wire(master.serve_port, token=cluster.token) as wire:
        assert wire.ask(Command.PRODUCE, produce_body(subject, {"n": "1"})).code == ErrorCode.NOT_MASTER
    begin(cluster, "metaserver")
    cluster.wait_writable()
    assert cluster.broker("g1", "master") == slave


def test_clients_go_on_while_the_metaserver_is_away(cluster, subject):
    async def send_and_consume():
        async with producer(cluster) as sender:
            assert (await sender.send(qmq.Message(subject, {"n": "1"}))).is_stored
            await asyncio.to_thread(end, cluster, "metaserver")
            for n in range(50):
                assert (await sender.send(qmq.Message(subject, {"n": str(n)}))).is_stored
            await asyncio.to_thread(begin, cluster, "metaserver")
            for n in range(50):
                assert (await sender.send(qmq.Message(subject, {"n": str(n)}))).is_stored

    asyncio.run(send_and_consume())
    until(lambda: cluster.broker("g1", "master") and _answers(cluster), "the metaserver is back")
    assert len(consume_all(cluster, subject, "g", 101)) == 101


def _answers(cluster):
    try:
        return cluster.manage("ListBrokers")
    except qmq.QmqError:
        return None
