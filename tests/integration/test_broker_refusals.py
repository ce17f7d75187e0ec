"""Shell. What a broker must not take, over real sockets: each is refused with what to do, logged once, changes nothing.

Everybody else goes on: a probe sends on a connection of its own all the while. W4, W7, W15, W16, W22.
"""

from __future__ import annotations

import random
import struct
import subprocess
import sys

import grpc
import pytest

from qmq.deploy.control import manage
from qmq.deploy.plan import HOST, write_settings
from qmq.deploy.processes import ROOT, suspend
from qmq.errors import ErrorCode, OperatorError
from qmq.proto import qmq_pb2 as pb
from qmq.proto.qmq_pb2_grpc import BrokerStub, MetaserverStub
from qmq.remoting import commands
from qmq.remoting.commands import Command, Confirmation
from qmq.remoting.packet import packet_header
from qmq.types import Epoch
from tests.integration.cluster_world import (
    WAIT_S,
    Probe,
    Wire,
    are_equal,
    consume_all,
    count_lines,
    ends,
    log_of,
    produce_body,
    running,
    send_all,
    state,
    until,
)
from tests.support.ports import free_ports

PORTS = ["serve_port", "sync_port", "control_port", "metrics_port"]
SETTINGS = {"packet_bytes_max": 128 * 1024, "message_bytes_max": 64 * 1024}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with running(tmp_path_factory.mktemp("cluster"), **SETTINGS) as cluster:
        yield cluster


@pytest.fixture
def master(cluster):
    return cluster.broker("g1", "master")


@pytest.fixture
def unchanged(cluster):
    """The logs end where they ended before the test, and a message is stored and consumed afterwards as ever."""
    until(lambda: are_equal(cluster), "equal copies")
    before = ends(cluster)
    yield
    until(lambda: are_equal(cluster), "equal copies")
    assert ends(cluster) == before
    with Probe(cluster) as probe:
        pass
    assert probe.slowest_s < 15.0


@pytest.fixture
def heard(cluster, master):
    """Returns how often a pattern was logged by the master since the test began."""
    begin = len(log_of(cluster, master.hostname))
    return lambda pattern: count_lines(log_of(cluster, master.hostname)[begin:], pattern)


def logged_once(heard, pattern):
    until(lambda: heard(pattern), f"the log says {pattern}")
    assert heard(pattern) == 1


# What does not parse.


@pytest.mark.parametrize("port", ["serve_port", "sync_port"])
@pytest.mark.parametrize("login", [False, True], ids=["a stranger", "a client"])
def test_oversized_packet_is_refused_before_its_body(cluster, master, unchanged, heard, port, login):
    with Wire(getattr(master, port), token=cluster.token if login else None) as wire:
        size = (64 << 20) + getattr(master, port) + login  # another one each time: what says the same is logged once
        wire.send(packet_header(Command.PRODUCE, 5, 0, Command.PRODUCE, size))
        answer = wire.answer()
        assert answer is not None and answer.opaque == 5 and answer.code == ErrorCode.MESSAGE_TOO_LARGE
        assert b"over the limit of" in bytes(answer.body) and b"packet_bytes_max" in bytes(answer.body)
        assert wire.is_closed()
    logged_once(heard, "over the limit of")


@pytest.mark.parametrize("seed", range(5))
def test_garbage_closes_only_its_connection(cluster, master, unchanged, heard, seed):
    with Wire(master.serve_port, token=cluster.token) as bystander:
        with Wire(master.serve_port) as wire:
            wire.send(random.Random(seed).randbytes(3000))
            assert wire.is_closed()
        answer = bystander.ask(Command.HEARTBEAT)
        assert answer is not None and answer.code == 0
    logged_once(heard, "not QMQ's protocol")


def test_negative_and_lying_lengths_close_the_connection(cluster, master, unchanged):
    for length in (-1, 0, 19, 2**31 - 1):
        with Wire(master.serve_port, token=cluster.token) as wire:
            header = struct.pack(">ihIhhiih", length, 18, 0xDEC10ADE, Command.PULL, 100, 1, 0, Command.PULL)
            wire.send(header + b"x" * 64)
            assert wire.is_closed()


def test_slow_half_packet_delays_no_connection(cluster, master, unchanged):
    with Wire(master.serve_port, token=cluster.token) as wire:
        wire.send(packet_header(Command.PRODUCE, 1, 0, Command.PRODUCE, 100_000) + b"x" * 10)
        with Wire(master.serve_port, token=cluster.token) as other:
            answer = other.ask(Command.HEARTBEAT)
            assert answer is not None and answer.code == 0


# What must not be stored.


ILLEGAL = [
    pytest.param("a/b", "slashes", id="slash"),
    pytest.param("a\rb", "control", id="CR"),
    pytest.param("a\nb", "control", id="LF"),
    pytest.param("s" * 300, "longer than 100 bytes", id="300 characters"),
    pytest.param("", "is empty", id="empty"),
    pytest.param("é" * 51, "longer than 100 bytes", id="102 bytes"),
]


@pytest.mark.parametrize("subject, why", ILLEGAL)
def test_illegal_subject_is_refused_and_the_connection_goes_on(cluster, master, unchanged, heard, subject, why):
    """W7."""
    with Wire(master.serve_port, token=cluster.token) as wire:
        for _ in range(3):
            answer = wire.ask(Command.PRODUCE, produce_body(subject, {"a": 1}))
            assert answer.code == ErrorCode.INVALID_NAME and why in bytes(answer.body).decode(), bytes(answer.body)
        assert wire.ask(Command.HEARTBEAT).code == 0
    logged_once(heard, why)


@pytest.mark.parametrize("subject, why", ILLEGAL)
def test_illegal_names_are_refused_to_consumers(cluster, master, unchanged, subject, why):
    with Wire(master.serve_port, token=cluster.token) as wire:
        for field in ("subject", "group", "consumer"):
            names = {"subject": "s", "group": "g", "consumer": "c"} | {field: subject}
            answer = wire.ask(Command.SUBSCRIBE, commands.encode_subscribe(**names))
            assert answer.code == ErrorCode.INVALID_NAME and why in bytes(answer.body).decode(), bytes(answer.body)


def test_batch_with_a_wrong_crc_is_not_stored(cluster, master, unchanged, heard):
    """W4."""
    with Wire(master.serve_port, token=cluster.token) as wire:
        for _ in range(3):
            answer = wire.ask(Command.PRODUCE, produce_body("crc", {"a": 1}, crc=1))
            assert answer.code == ErrorCode.INVALID_REQUEST and b"send it again" in bytes(answer.body)
    logged_once(heard, "does not match its CRC")


def test_oversized_message_is_refused_and_its_batch_stored(cluster, master):
    """W22."""
    with Wire(master.serve_port, token=cluster.token) as wire:
        body = produce_body("mates", {"a": 1}, {"a": "x" * 30_000, "b": "y" * 30_000, "c": "z" * 10_000}, {"a": 3})
        answer = wire.ask(Command.PRODUCE, body)
        produced = commands.decode_produced(answer.body)
        assert (produced.first_sequence, produced.stored) == (0, 2)
        assert [position for position, _ in produced.refused] == [1]
        again = commands.decode_produced(wire.ask(Command.PRODUCE, body).body)
        assert again == produced, "the batch is stored once"
    assert consume_all(cluster, "mates", "g", 2) == [(0, "id-0"), (1, "id-2")]


def test_restart_after_refused_input_loses_nothing(cluster, master):
    """W4, W7: in QMQ one such message stops the index, or cuts the log at the next start."""
    send_all(cluster, "around", 10, name="before")
    with Wire(master.serve_port, token=cluster.token) as wire:
        wire.ask(Command.PRODUCE, produce_body("s" * 300, {"a": 1}))
        wire.ask(Command.PRODUCE, produce_body("around", {"a": 1}, crc=1))
    send_all(cluster, "around", 10, name="after")
    pid = cluster.service(master.hostname).pid
    cluster.kill("g1", "master")
    until(lambda: cluster.service(master.hostname).pid not in (None, pid), "the master is started again")
    cluster.wait_writable("g1")
    got = consume_all(cluster, "around", "g", 20)
    assert [id for _, id in got] == [f"before-{n}" for n in range(10)] + [f"after-{n}" for n in range(10)]


# Who must not come in.


@pytest.mark.parametrize("port", ["serve_port", "sync_port"])
@pytest.mark.parametrize("code", [Command.PRODUCE, Command.PULL, Command.HELLO, Command.CONFIRM, Command.FRAMES, 20])
def test_nothing_is_answered_before_authenticate(cluster, master, unchanged, heard, port, code):
    """W15."""
    with Wire(getattr(master, port)) as wire:
        answer = wire.ask(code, produce_body("s", {"a": 1}))
        assert answer.code == ErrorCode.UNAUTHORIZED and b"AUTHENTICATE" in bytes(answer.body)
        assert wire.is_closed()
    logged_once(heard, "say who you are first")


@pytest.mark.parametrize("port", ["serve_port", "sync_port"])
@pytest.mark.parametrize("token", ["", "wrong", "é"])
def test_unknown_token_is_refused(cluster, master, unchanged, heard, port, token):
    """W15."""
    with Wire(getattr(master, port)) as wire:
        answer = wire.ask(Command.AUTHENTICATE, commands.encode_json(token=token, app="stranger"))
        assert answer.code == ErrorCode.UNAUTHORIZED and b"token" in bytes(answer.body)
        assert cluster.token.encode() not in bytes(answer.body)
        assert wire.is_closed()
    logged_once(heard, "token of 'stranger' is not valid here")
    assert cluster.token not in log_of(cluster, master.hostname)


@pytest.mark.parametrize("metadata", [(), (("x-api-token", "wrong"),)], ids=["no token", "wrong token"])
@pytest.mark.parametrize(
    "call", ["ReplicaStatus", "PrepareSwap", "CancelSwap", "DescribeLog", "ReadLog", "ReadDerived", "HoldLog"]
)
def test_broker_control_asks_for_the_token_in_every_call(cluster, master, unchanged, call, metadata):
    requests = {
        "PrepareSwap": pb.PrepareSwapRequest(term=99),
        "ReadLog": pb.ReadLogRequest(begin=0, end=100),
        "ReadDerived": pb.ReadDerivedRequest(base=0),
    }
    with grpc.insecure_channel(f"{HOST}:{master.control_port}") as channel:
        with pytest.raises(grpc.RpcError) as refused:
            answer = getattr(BrokerStub(channel), call)(
                requests.get(call, pb.Nothing()), metadata=metadata, timeout=WAIT_S
            )
            list(answer)
    assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED and "x-api-token" in refused.value.details()


@pytest.mark.parametrize("call", ["Register", "Heartbeat", "WatchRoutes"])
def test_metaserver_asks_for_the_token_in_every_call(cluster, unchanged, call):
    requests = {
        "Register": pb.BrokerIdentity(hostname="g1-a", serve_port=1),
        "Heartbeat": iter([pb.BrokerState(hostname="g1-a")]),
        "WatchRoutes": iter([pb.RouteRequest(subjects=["s"], produces=True)]),
    }
    with grpc.insecure_channel(f"{HOST}:{cluster.plan.grpc_port}") as channel:
        with pytest.raises(grpc.RpcError) as refused:
            answer = getattr(MetaserverStub(channel), call)(
                requests[call], metadata=(("x-api-token", "wrong"),), timeout=WAIT_S
            )
            list(answer)
    assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED and "x-api-token" in refused.value.details()


@pytest.mark.parametrize("token", ["", "wrong"])
@pytest.mark.parametrize("action", ["AddBroker", "ReplaceBroker", "SwapRoles", "MarkReadonlyBrokerGroup"])
def test_management_asks_for_the_token(cluster, unchanged, action, token):
    before = (cluster.manage("ListBrokers"), cluster.manage("ListBrokerGroups"))
    with pytest.raises(OperatorError, match="(?i)token"):
        manage(
            cluster.metaserver, token, action, brokerGroup="g1", role=0, hostname="x", ip=HOST, servePort=1, syncPort=2
        )
    assert (cluster.manage("ListBrokers"), cluster.manage("ListBrokerGroups")) == before


# Who claims a part that is another's.


def test_confirmation_of_a_stranger_releases_no_producer(cluster, master):
    """W15: in QMQ any client that sends an offset to the sync port makes producers be told "stored"."""
    slave = cluster.broker("g1", "slave")
    suspend(cluster.service(slave.hostname).pid)
    try:
        with Wire(master.serve_port, token=cluster.token) as wire, Wire(master.sync_port, token=cluster.token) as liar:
            wire.request(Command.PRODUCE, produce_body("unconfirmed", {"a": 1}))
            until(lambda: state(cluster, master).log_end > state(cluster, master).matched_end, "it is written")
            now = state(cluster, master)
            confirmation = Confirmation(Epoch(now.term, now.boot), now.log_end, now.chain)
            liar.request(Command.CONFIRM, commands.encode_confirmation(confirmation), flag=2)
            assert liar.is_closed()
            assert state(cluster, master).matched_end < now.log_end
            wire.socket.settimeout(0.5)
            with pytest.raises(TimeoutError):
                wire.answer()
            wire.socket.settimeout(WAIT_S)
            cluster.service(slave.hostname).signal(18)
            assert wire.answer().code == 0, "it is stored once the real slave goes on"
    finally:
        cluster.service(slave.hostname).signal(18)
    cluster.wait_writable("g1")


def test_client_and_sync_ports_serve_only_their_commands(cluster, master, unchanged):
    for port, code in ((master.sync_port, Command.PRODUCE), (master.serve_port, Command.HELLO)):
        with Wire(port, token=cluster.token) as wire:
            answer = wire.ask(code, b"{}")
            assert answer.code == ErrorCode.INVALID_REQUEST and b"not served on this port" in bytes(answer.body)


def test_hello_of_another_group_is_refused(cluster, master, unchanged):
    hello = {"group": "g9", "incarnation": "x", "term": 0, "boot": 0, "epochs": [], "start": 0, "end": 0, "chain": 0}
    hello |= {"assigned_term": 2, "proofs": [], "kept_end": 0, "point": []}
    with Wire(master.sync_port, token=cluster.token) as wire:
        answer = wire.ask(Command.HELLO, commands.encode_json(**hello))
        assert answer.code == ErrorCode.INVALID_REQUEST and b"master of g1" in bytes(answer.body)


def run_broker(folder, settings, *, timeout_s=WAIT_S):
    """Run a broker that is expected to end by itself; return its status and what it wrote."""
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


def test_second_broker_on_a_data_directory_refuses(cluster, master, unchanged, tmp_path):
    ports = dict(zip(PORTS, free_ports(4), strict=True))
    status, said = run_broker(tmp_path, settings_of(cluster, master, **ports))
    assert status == 1 and "another broker runs on" in said and "stop it first" in said


@pytest.mark.parametrize("taken", PORTS)
def test_second_broker_on_a_port_exits_and_names_it(cluster, master, unchanged, tmp_path, taken):
    ports = dict(zip(PORTS, free_ports(4), strict=True)) | {taken: getattr(master, taken)}
    status, said = run_broker(tmp_path, settings_of(cluster, master, data=str(tmp_path / "data"), **ports))
    assert status == 1 and f"cannot listen on {HOST}:{ports[taken]}" in said and "Traceback" not in said, said


def test_second_process_of_a_running_broker_is_refused(cluster, master, unchanged, tmp_path):
    """Same name and port on another address: the metaserver keeps to the one that runs, and its log says so once."""
    before = cluster.manage("ListBrokers")
    write_settings(tmp_path / "broker.toml", settings_of(cluster, master, ip="127.0.0.2", data=str(tmp_path / "data")))
    command = [sys.executable, "-m", "qmq.broker", "--config", str(tmp_path / "broker.toml")]
    log = tmp_path / "log"
    with log.open("wb") as file, subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=file) as other:
        try:
            until(lambda: "metaserver does not serve us" in log.read_text(), "it is told why")
            channel = grpc.insecure_channel(f"127.0.0.2:{master.control_port}")
            said = BrokerStub(channel).ReplicaStatus(pb.Nothing(), metadata=(("x-api-token", cluster.token),))
            assert (said.writable, said.term, said.log_end) == (False, 0, 0)
            channel.close()
        finally:
            other.kill()
    assert count_lines(log.read_text(), "metaserver does not serve us") == 1, log.read_text()
    assert "role master" not in log.read_text()
    assert cluster.manage("ListBrokers") == before


def test_second_master_for_a_group_is_refused(cluster, unchanged):
    """W16."""
    before = cluster.manage("ListBrokers")
    with pytest.raises(OperatorError, match="ReplaceBroker|SwapRoles"):
        cluster.manage("AddBroker", brokerGroup="g1", role=0, hostname="g1-c", ip=HOST, servePort=20001, syncPort=20002)
    with pytest.raises(OperatorError, match="SwapRoles"):
        cluster.manage(
            "ReplaceBroker", brokerGroup="g1", role=0, hostname="g1-c", ip=HOST, servePort=20001, syncPort=20002
        )
    assert cluster.manage("ListBrokers") == before
