"""Shell. Bounds of a real broker's connections: strangers keep nobody out, and one token has so many."""

from __future__ import annotations

import socket
from contextlib import ExitStack

import pytest

from qmq.errors import ErrorCode
from qmq.remoting import commands
from qmq.remoting.commands import Command
from tests.integration.cluster_world import Wire, are_equal, running, send_all, until

CONNECTIONS, OF_A_TOKEN = 20, 5


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    directory = tmp_path_factory.mktemp("connections")
    with running(directory, connections_max=CONNECTIONS, token_connections_max=OF_A_TOKEN) as cluster:
        yield cluster


def silent(stack, port, count):
    """Open connections that say nothing."""
    return [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(count)]


def test_connections_that_say_nothing_keep_out_nobody_who_has_a_token(cluster):
    send_all(cluster, "s", 1)
    master = cluster.broker("g1", "master")
    with ExitStack() as stack:
        for port in (master.serve_port, master.sync_port):
            silent(stack, port, 2 * CONNECTIONS)
        with Wire(master.serve_port, token=cluster.token) as wire:
            assert wire.ask(Command.HEARTBEAT).code == 0
            silent(stack, master.serve_port, 2 * CONNECTIONS)
            assert wire.ask(Command.HEARTBEAT).code == 0, "who is in stays in"
    send_all(cluster, "s", 1)
    until(lambda: are_equal(cluster), "equal copies")


def test_one_token_has_so_many_connections_and_is_told_by_name(cluster):
    port = cluster.broker("g1", "master").serve_port
    one, other = (cluster.manage("AddToken", name=name, role="client")["token"] for name in ("one", "other"))
    with ExitStack() as stack:
        wires = [stack.enter_context(Wire(port, token=one)) for _ in range(OF_A_TOKEN)]
        with Wire(port) as refused:
            answer = refused.ask(Command.AUTHENTICATE, commands.encode_json(token=one, app="test"))
            assert answer.code == ErrorCode.OVERLOADED
            assert b"token 'one' has 5 connections to g1, and may have no more (token_connections_max)" in bytes(
                answer.body
            )
            assert refused.is_closed()
        for token in (other, cluster.token):
            stack.enter_context(Wire(port, token=token))
        wires[0].socket.close()

        def is_let_in():
            with Wire(port) as wire:
                answer = wire.ask(Command.AUTHENTICATE, commands.encode_json(token=one, app="test"))
                return answer is not None and answer.code == 0

        until(is_let_in, "a connection that ended makes room")
