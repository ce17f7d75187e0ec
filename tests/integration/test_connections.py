"""Shell. Bounds of a real broker's connections. A reached bound is named in the log, the metrics and by Doctor."""

from __future__ import annotations

import socket
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

import qmq
import qmq.blocking
from qmq.descriptors import CONTROL_MAX as CONTROL_CONNECTIONS
from qmq.errors import ErrorCode
from qmq.remoting import commands
from qmq.remoting.commands import Command
from qmq.tools.findings import judge_broker, judge_limits
from tests.integration.cluster_world import Wire, produce_body, shared_cluster, until

CONNECTIONS, OF_A_TOKEN = 20, 5
KIB = 1 << 10


cluster = shared_cluster(
    connections_max=CONNECTIONS,
    token_connections_max=OF_A_TOKEN,
    token_bytes_per_s=64 * KIB,
    new_subjects_per_minute=2,
    packet_bytes_max=128 * KIB,
    message_bytes_max=32 * KIB,
)


def silent(stack, port, count):
    """Open connections that send nothing."""
    return [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(count)]


def test_silent_connections_keep_no_token_holder_out(cluster):
    cluster.send_all("s", 1)
    master = cluster.broker("g1", "master")
    with ExitStack() as stack:
        for port in (master.serve_port, master.sync_port):
            silent(stack, port, 2 * CONNECTIONS)
        with Wire(master.serve_port, token=cluster.token) as wire:
            assert wire.ask(Command.HEARTBEAT).code == 0
            silent(stack, master.serve_port, 2 * CONNECTIONS)
            assert wire.ask(Command.HEARTBEAT).code == 0, "an authenticated connection stays"
    cluster.send_all("s", 1)
    cluster.wait_equal()


@pytest.mark.parametrize("port", ["serve_port", "sync_port"])
def test_unauthenticated_connection_is_closed_soon(cluster, port):
    with socket.create_connection(("127.0.0.1", getattr(cluster.broker("g1", "slave"), port)), timeout=60) as stranger:
        assert stranger.recv(1) == b""


def test_connections_of_a_control_port_are_bounded(cluster):
    """Further connections are closed at once; accepted ones receive the begin of HTTP/2."""
    port = cluster.broker("g1", "slave").control_port
    with ExitStack() as stack:
        accepted = [peer for peer in silent(stack, port, CONTROL_CONNECTIONS + 50) if _is_accepted(peer)]
    assert CONTROL_CONNECTIONS - 50 <= len(accepted) < CONTROL_CONNECTIONS + 50
    until(lambda: cluster.are_equal(), "the slave answers again")


def _is_accepted(stranger):
    stranger.settimeout(60)
    try:
        return bool(stranger.recv(9))
    except ConnectionError:
        return False


def timer_of_accepted(port, peer):
    """Return the kernel's timer of an accepted connection, 2 for keepalive; or None."""
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, here, there, _, _, timer, *_ = line.split()
        if [int(end.split(":")[1], 16) for end in (here, there)] == [port, peer]:
            return int(timer.split(":")[0])
    return None


def test_kernel_probes_idle_connections(cluster):
    master = cluster.broker("g1", "master")
    with ExitStack() as stack:
        for port in (master.serve_port, master.sync_port):
            _, own = silent(stack, port, 1)[0].getsockname()
            until(lambda port=port, own=own: timer_of_accepted(port, own) == 2, "the keepalive timer runs")


def client_of(cluster, name):
    token = cluster.manage("AddToken", name=name, role="client")["token"]
    return Wire(cluster.broker("g1", "master").serve_port, token=token)


def codes(wire, *bodies):
    return [wire.ask(Command.PRODUCE, body).code for body in bodies]


def reached(cluster, setting):
    """Return how often the master has counted a reached bound."""
    name = f'qmq_broker_limits_reached_total{{broker_group="g1",setting="{setting}"}}'
    return cluster.metrics(cluster.broker("g1", "master")).get(name, 0)


def too_many_connections(cluster):
    """Keep connections open until the broker has counted them; a busy machine accepts them late."""
    with ExitStack() as stack:
        silent(stack, cluster.broker("g1", "master").serve_port, 2 * CONNECTIONS)
        until(lambda: reached(cluster, "connections_max") > 0, "the bound is reached")


def too_many_of_a_token(cluster):
    """Other tokens have their own connections, and one that ended makes room."""
    port = cluster.broker("g1", "master").serve_port
    crowd, other = (cluster.manage("AddToken", name=name, role="client")["token"] for name in ("crowd", "other"))

    def log_in(stack):
        wire = stack.enter_context(Wire(port))
        return wire, wire.ask(Command.AUTHENTICATE, commands.encode_json(token=crowd, app="test"))

    with ExitStack() as stack:
        wires, answers = zip(*(log_in(stack) for _ in range(OF_A_TOKEN + 1)), strict=True)
        assert [answer.code for answer in answers] == [0] * OF_A_TOKEN + [ErrorCode.OVERLOADED]
        refusal = b"token 'crowd' has 5 connections to g1, and may have no more (token_connections_max)"
        assert refusal in bytes(answers[-1].body) and wires[-1].is_closed()
        for token in (other, cluster.token):
            stack.enter_context(Wire(port, token=token))
        wires[0].socket.close()

        def is_accepted():
            with ExitStack() as tried:
                answer = log_in(tried)[1]
                return answer is not None and answer.code == 0

        until(is_accepted, "a connection that ended makes room")


def too_many_bytes(cluster):
    with client_of(cluster, "loud") as wire:
        batch = produce_body("s", {"x": "x" * 30_000}, {"x": "x" * 30_000}, {"x": "x" * 30_000})

        def at_once():
            for _ in range(2):
                wire.request(Command.PRODUCE, batch)
            return [wire.answer().code for _ in range(2)]

        until(lambda: at_once()[1] == ErrorCode.OVERLOADED, "the second batch exceeds the ration")
        until(lambda: codes(wire, batch) == [0], "the ration is full again")


def too_many_new_subjects(cluster):
    with client_of(cluster, "inventive") as wire:
        answers = codes(wire, *(produce_body(f"inventive.{number}", {}) for number in range(3)))
        assert answers == [0, 0, ErrorCode.OVERLOADED]


def too_large_a_packet(cluster):
    with client_of(cluster, "large") as wire:
        assert codes(wire, bytes(129 * KIB)) == [ErrorCode.MESSAGE_TOO_LARGE] and wire.is_closed()


REACHES = {
    "connections_max": too_many_connections,
    "token_connections_max": too_many_of_a_token,
    "token_bytes_per_s": too_many_bytes,
    "new_subjects_per_minute": too_many_new_subjects,
    "packet_bytes_max": too_large_a_packet,
}


@pytest.mark.parametrize(("setting", "reach"), REACHES.items())
def test_reached_bound_is_in_metrics_log_and_doctor(cluster, setting, reach):
    cluster.send_all("s", 1)
    reach(cluster)
    master = cluster.broker("g1", "master")

    def page():
        return "".join(f"{name} {value}\n" for name, value in cluster.metrics(master).items())

    until(lambda: reached(cluster, setting) > 0, "the bound is counted")
    assert any(setting in finding.found for finding in judge_limits("g1", page()))
    lines = cluster.log_of(master.hostname).splitlines()
    assert 1 <= sum(f"limit reached setting={setting} " in line for line in lines) <= 3, "each cause once"


HOUR_MS = 3_600_000
OFF = 'qmq_broker_client_clocks_off{broker_group="g1"}'


@pytest.mark.parametrize(("ahead_ms", "how"), [(HOUR_MS, "s ahead of"), (-HOUR_MS, "s behind")])
def test_client_with_a_wrong_clock_is_listed(cluster, ahead_ms, how):
    """Its delayed messages would come an hour late, or at once."""
    master = cluster.broker("g1", "master")
    with Wire(master.serve_port) as wire:
        wall_ms = time.time_ns() // 1_000_000 + ahead_ms
        body = commands.encode_json(token=cluster.token, app="off", wall_ms=wall_ms)
        assert wire.ask(Command.AUTHENTICATE, body).code == 0
        page = cluster.metrics(master)
        assert page[OFF] == 1
        named = {name.split("{")[0]: value for name, value in page.items()}
        (finding,) = [found for found in judge_broker("g1", "MASTER", named) if found.step == "clocks"]
        assert "1 client" in finding.found
        (line,) = [line for line in cluster.log_of(master.hostname).splitlines() if how in line]
        assert "app=off" in line
    until(lambda: cluster.metrics(master)[OFF] == 0, "the connection is forgotten")


def test_clients_send_their_clock(cluster):
    with qmq.blocking.Producer(metaserver=cluster.metaserver, app="right", token=cluster.token) as producer:
        assert producer.send(qmq.Message("s", {})).is_stored
        ahead_ms = [entry["clock_ahead_ms"] for entry in cluster.connections() if entry["app"] == "right"]
    assert ahead_ms and all(ms is not None and abs(ms) < 10_000 for ms in ahead_ms)
