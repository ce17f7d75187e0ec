"""Shell. Requests that a broker refuses, over real sockets: the answer has the remedy, the log one line.

Neither the log nor other connections change. W4, W7, W15, W16. Each rule: tests/unit/server, tests/unit/broker.
"""

from __future__ import annotations

import random
import struct
import subprocess
import sys

import grpc
import pytest

from qmq.deploy.plan import HOST, write_settings
from qmq.deploy.processes import ROOT, suspend
from qmq.errors import ErrorCode
from qmq.message_sizes import SYNC_PACKET_BYTES_MAX
from qmq.proto import qmq_pb2 as pb
from qmq.proto.qmq_pb2_grpc import BrokerStub
from qmq.remoting import commands
from qmq.remoting.commands import Command, Confirmation
from qmq.remoting.packet import packet_header
from qmq.types import Epoch
from tests.integration.cluster_world import WAIT_S, Probe, Wire, count_lines, produce_body, shared_cluster, until
from tests.support.ports import free_ports

PORTS = ["serve_port", "sync_port", "control_port", "metrics_port"]
SETTINGS = {"packet_bytes_max": 128 * 1024, "message_bytes_max": 64 * 1024}


cluster = shared_cluster(**SETTINGS)


@pytest.fixture
def master(cluster):
    return cluster.broker("g1", "master")


@pytest.fixture
def unchanged(cluster):
    """Check that the logs end where they did before the test, and that a message is stored afterwards."""
    cluster.wait_equal()
    before = cluster.ends()
    yield
    cluster.wait_equal()
    assert cluster.ends() == before
    with Probe(cluster) as probe:
        pass
    assert probe.slowest_s < 15.0


@pytest.fixture
def heard(cluster, master):
    """Return a function that counts a pattern in the master's log since the test began."""
    begin = len(cluster.log_of(master.hostname))
    return lambda pattern: count_lines(cluster.log_of(master.hostname)[begin:], pattern)


def logged_once(heard, pattern):
    until(lambda: heard(pattern), f"the log says {pattern}")
    assert heard(pattern) == 1


# Packets that do not parse.


@pytest.mark.parametrize("port", ["serve_port", "sync_port"])
@pytest.mark.parametrize("login", [False, True], ids=["a stranger", "a client"])
def test_oversized_packet_is_refused_before_its_body(cluster, master, unchanged, heard, port, login):
    with Wire(getattr(master, port), token=cluster.token if login else None) as wire:
        size = SYNC_PACKET_BYTES_MAX + getattr(master, port) + login  # equal log lines are suppressed
        wire.send(packet_header(Command.PRODUCE, 5, 0, Command.PRODUCE, size))
        answer = wire.answer()
        assert answer is not None and answer.opaque == 5 and answer.code == ErrorCode.MESSAGE_TOO_LARGE
        assert b"over the limit of" in bytes(answer.body) and b"packet_bytes_max" in bytes(answer.body)
        assert wire.is_closed()
    logged_once(heard, "over the limit of")


def test_invalid_packets_close_only_their_connection(cluster, master, unchanged, heard):
    half = packet_header(Command.PRODUCE, 1, 0, Command.PRODUCE, 100_000) + b"x" * 10
    wrong = [
        struct.pack(">ihIhhiih", n, 18, 0xDEC10ADE, Command.PULL, 100, 1, 0, Command.PULL) for n in (-1, 0, 2**31 - 1)
    ]
    with (
        Wire(master.serve_port, token=cluster.token) as waits,
        Wire(master.serve_port, token=cluster.token) as bystander,
    ):
        waits.send(half)
        for data in (random.Random(1).randbytes(3000), *(header + b"x" * 64 for header in wrong)):
            with Wire(master.serve_port, token=cluster.token) as wire:
                wire.send(data)
                assert wire.is_closed()
        assert bystander.ask(Command.HEARTBEAT).code == 0
    logged_once(heard, "not QMQ's protocol")


# Batches that are not stored.


def test_refused_batches_leave_the_connection_open(cluster, master, unchanged, heard):
    """W4, W7."""
    subject, crc = produce_body("s" * 300, {"a": 1}), produce_body("crc", {"a": 1}, crc=1)
    with Wire(master.serve_port, token=cluster.token) as wire:
        for _ in range(3):
            answer = wire.ask(Command.PRODUCE, subject)
            assert answer.code == ErrorCode.INVALID_NAME and b"longer than 100 bytes" in bytes(answer.body)
            answer = wire.ask(Command.PRODUCE, crc)
            assert answer.code == ErrorCode.INVALID_REQUEST and b"send it again" in bytes(answer.body)
    logged_once(heard, "longer than 100 bytes")
    logged_once(heard, "does not match its CRC")


# Requests without a valid token.


@pytest.mark.parametrize("port, code", [("serve_port", Command.PRODUCE), ("sync_port", Command.HELLO)])
def test_requests_before_authenticate_are_rejected(cluster, master, unchanged, heard, port, code):
    """W15."""
    with Wire(getattr(master, port)) as wire:
        answer = wire.ask(code, produce_body("s", {"a": 1}))
        assert answer.code == ErrorCode.UNAUTHORIZED and b"AUTHENTICATE" in bytes(answer.body)
        assert wire.is_closed()
    logged_once(heard, "authenticate first")


@pytest.mark.parametrize("port", ["serve_port", "sync_port"])
def test_unknown_token_is_refused(cluster, master, unchanged, heard, port):
    """W15."""
    with Wire(getattr(master, port)) as wire:
        answer = wire.ask(Command.AUTHENTICATE, commands.encode_json(token="é", app="stranger"))
        assert answer.code == ErrorCode.UNAUTHORIZED and b"token" in bytes(answer.body)
        assert cluster.token.encode() not in bytes(answer.body)
        assert wire.is_closed()
    logged_once(heard, "token of 'stranger' is not valid here")
    assert cluster.token not in cluster.log_of(master.hostname)


# Processes that claim the part of another.


def test_forged_confirmation_acknowledges_nothing(cluster, master):
    """W15: in QMQ an offset sent to the sync port by any client acknowledges messages."""
    slave = cluster.broker("g1", "slave")
    suspend(cluster.service(slave.hostname).pid)
    try:
        with Wire(master.serve_port, token=cluster.token) as wire, Wire(master.sync_port, token=cluster.token) as liar:
            wire.request(Command.PRODUCE, produce_body("unconfirmed", {"a": 1}))
            until(lambda: cluster.state(master).log_end > cluster.state(master).matched_end, "it is written")
            now = cluster.state(master)
            confirmation = Confirmation(Epoch(now.term, now.boot), now.log_end, now.chain)
            liar.request(Command.CONFIRM, commands.encode_confirmation(confirmation), flag=2)
            assert liar.is_closed()
            assert cluster.state(master).matched_end < now.log_end
            wire.socket.settimeout(0.5)
            with pytest.raises(TimeoutError):
                wire.answer()
            wire.socket.settimeout(WAIT_S)
            cluster.service(slave.hostname).signal(18)
            assert wire.answer().code == 0, "it is stored once the real slave goes on"
    finally:
        cluster.service(slave.hostname).signal(18)
    cluster.wait_writable("g1")


def test_sync_port_refuses_clients_and_other_groups(cluster, master, unchanged):
    hello = {"group": "g9", "incarnation": "x", "term": 0, "boot": 0, "epochs": [], "start": 0, "end": 0, "chain": 0}
    hello |= {"assigned_term": 2, "proofs": [], "kept_end": 0, "point": []}
    for port, code, body, why in (
        (master.sync_port, Command.PRODUCE, b"{}", b"not served on this port"),
        (master.serve_port, Command.HELLO, b"{}", b"not served on this port"),
        (master.sync_port, Command.HELLO, commands.encode_json(**hello), b"master of g1"),
    ):
        with Wire(port, token=cluster.token) as wire:
            answer = wire.ask(code, body)
            assert answer.code == ErrorCode.INVALID_REQUEST and why in bytes(answer.body)


def run_broker(folder, settings, *, timeout_s=WAIT_S):
    """Run a broker that ends by itself; return its exit status and its output."""
    write_settings(folder / "broker.toml", settings)
    command = [sys.executable, "-m", "qmq.broker", "--config", str(folder / "broker.toml")]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s)
    return ended.returncode, ended.stderr


def settings_of(cluster, plan, **changes):
    return {
        "hostname": plan.hostname,
        "ip": HOST,
        "serve_port": plan.serve_port,
        "sync_port": plan.sync_port,
        "control_port": plan.control_port,
        "metrics_port": plan.metrics_port,
        "metaserver": cluster.metaserver,
        "token": cluster.token,
        "data": str(cluster.run_dir / plan.hostname / "data"),
    } | changes


def test_second_broker_on_a_directory_or_port_exits(cluster, master, unchanged, tmp_path):
    ports = dict(zip(PORTS, free_ports(4), strict=True))
    status, output = run_broker(tmp_path, settings_of(cluster, master, **ports))
    assert status == 1 and "another broker runs on" in output and "stop it first" in output
    for taken in PORTS:
        changes = ports | {taken: getattr(master, taken), "data": str(tmp_path / "data")}
        status, output = run_broker(tmp_path, settings_of(cluster, master, **changes))
        assert status == 1 and f"cannot listen on {HOST}:{changes[taken]}" in output and "Traceback" not in output


def test_second_process_of_a_running_broker_is_refused(cluster, master, unchanged, tmp_path):
    """It has the same name and port at another address: the metaserver keeps the running one, and its log has one
    line.
    """
    before = cluster.manage("ListBrokers")
    write_settings(tmp_path / "broker.toml", settings_of(cluster, master, ip="127.0.0.2", data=str(tmp_path / "data")))
    command = [sys.executable, "-m", "qmq.broker", "--config", str(tmp_path / "broker.toml")]
    log = tmp_path / "log"
    with log.open("wb") as file, subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=file) as other:
        try:
            until(lambda: "metaserver does not serve this broker" in log.read_text(), "it is told why")
            channel = grpc.insecure_channel(f"127.0.0.2:{master.control_port}")
            report = BrokerStub(channel).ReplicaStatus(pb.Nothing(), metadata=(("x-api-token", cluster.token),))
            assert (report.writable, report.term, report.log_end) == (False, 0, 0)
            channel.close()
        finally:
            other.kill()
    assert count_lines(log.read_text(), "metaserver does not serve this broker") == 1, log.read_text()
    assert "role master" not in log.read_text()
    assert cluster.manage("ListBrokers") == before
