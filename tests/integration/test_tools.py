"""Shell. `tools/tools.sh` against a real metaserver: what it prints, where, and its exit status."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.integration.metaserver_world import TOKEN, in_world

TOOLS = Path(__file__).parents[2] / "tools" / "tools.sh"
DONE, REFUSED, USAGE, UNREACHABLE, UNKNOWN = range(5)


def run(command, metaserver, *words, token=TOKEN, **options):
    given = [f"--{name}={value}" for name, value in options.items()]
    given += [f"--token={token}"] if token else []
    environ = {name: value for name, value in os.environ.items() if not name.startswith("QMQ_")}
    environ |= {"QMQ_PYTHON": sys.executable, "http_proxy": "http://127.0.0.1:9"}
    return subprocess.run(
        [TOOLS, command, f"--metaserver={metaserver}", *given, *words], env=environ, capture_output=True, text=True
    )


async def tool(world, command, *words, **options):
    return await asyncio.to_thread(run, command, world.url, *words, **options)


def broker(role, hostname, port=20881):
    words = {"brokerGroup": "g1", "role": role, "hostname": hostname, "ip": "127.0.0.1"}
    return words | {"servePort": port, "syncPort": port + 1}


@in_world
async def test_life_of_a_group_as_an_operator_types_it(world):
    for role, name in ((0, "a"), (1, "b")):
        added = await tool(world, "AddBroker", **broker(role, name))
        assert (added.returncode, added.stderr) == (DONE, "")
    assert added.stdout == "b:20881 is now the SLAVE of g1\n"
    master, slave = await world.broker("a"), await world.broker("b")
    await world.until(lambda: world.writable("g1"))

    brokers = await tool(world, "ListBrokers", token=None)
    assert brokers.returncode == DONE
    assert [line.split()[:3] for line in brokers.stdout.splitlines()[1:]] == [
        ["g1", "MASTER", "a"],
        ["g1", "SLAVE", "b"],
    ]
    marked = await tool(world, "MarkReadonly", brokerGroup="g1", subject="order.changed")
    assert marked.returncode == DONE
    groups = await tool(world, "ListBrokerGroups")
    assert groups.stdout.split()[-1] == "order.changed"
    assert (await tool(world, "UnMarkReadonly", brokerGroup="g1", subject="order.changed")).returncode == DONE

    status = await tool(world, "ReplicaStatus", brokerGroup="g1")
    assert "g1  term 2  writable  logs are equal" in status.stdout and f"{77:016x}" in status.stdout
    swapped = await tool(world, "SwapRoles", brokerGroup="g1")
    assert swapped.returncode == DONE and "term 3, master b:20881, slave a:20881" in swapped.stdout
    assert (await master.until_term(3)).role == 1

    await master.stop()
    await world.until(lambda: down(world, "a"))
    replaced = await tool(world, "ReplaceBroker", **broker(1, "c"))
    assert replaced.stdout == "a:20881 was the SLAVE of g1 and is replaced\n"
    assert (await slave.until_term(4)).role == 0


@in_world
async def test_json_is_the_metaservers_answer(world):
    await world.pair()
    status = json.loads((await tool(world, "ReplicaStatus", "--json")).stdout)
    assert status["status"] == 0 and set(status) == {"status", "message", "data"}
    (group,) = status["data"]
    assert (group["brokerGroup"], group["equal"], group["lagBytes"]) == ("g1", True, 0)
    assert [(replica["role"], replica["reachable"]) for replica in group["replicas"]] == [
        ("MASTER", True),
        ("SLAVE", True),
    ]
    groups = json.loads((await tool(world, "ListBrokerGroups", "--json")).stdout)
    assert [group["groupName"] for group in groups] == ["g1"]
    refused = await tool(world, "SwapRoles", "--json", brokerGroup="g9")
    assert json.loads(refused.stdout)["status"] == -1 and "g9" in refused.stderr


@in_world
async def test_refusal_ends_with_1_and_says_why_on_stderr(world):
    for command, options in {
        "AddBroker": broker(9, "a"),
        "ReplaceBroker": broker(0, "a"),
        "SwapRoles": {"brokerGroup": "g1"},
        "MarkReadonly": {"brokerGroup": "g/1"},
        "UnMarkReadonly": {"brokerGroup": "g1"},
        "ReplicaStatus": {"brokerGroup": "g1"},
    }.items():
        ended = await tool(world, command, **options)
        assert (ended.returncode, ended.stdout) == (REFUSED, "") and ended.stderr.startswith("tools.sh: "), command
    wrong = await tool(world, "ListBrokers", token="wrong")
    assert wrong.returncode == REFUSED and "token is not valid" in wrong.stderr


@in_world
async def test_status_of_brokers_that_are_down_says_so(world):
    _, slave = await world.pair()
    await slave.stop()
    status = await tool(world, "ReplicaStatus")
    assert status.returncode == DONE
    assert "not both could be asked" in status.stdout and "did not answer" in status.stdout


@pytest.mark.parametrize(
    "end, chain, said",
    [
        pytest.param(4096, 78, "LOGS DIFFER", id="same end, another chain"),
        pytest.param(4000, 70, "the slave lacks 96 bytes", id="slave is behind"),
        pytest.param(4100, 70, "the slave lacks 0 bytes", id="slave was asked later"),
    ],
)
def test_status_tells_a_lag_from_a_difference(tmp_path, end, chain, said):
    @in_world
    async def tell(world):
        _, slave = await world.pair()
        slave.log_end, slave.chain = end, chain
        assert said in (await tool(world, "ReplicaStatus")).stdout

    tell(tmp_path)


@in_world
async def test_swap_with_a_lost_report_ends_with_4(world):
    _, slave = await world.pair()
    slave.report_new_terms = False
    ended = await tool(world, "SwapRoles", brokerGroup="g1")
    assert ended.returncode == UNKNOWN and "did not report in time" in ended.stderr


@pytest.mark.parametrize("words", [{"servePort": "x"}, {"token": None}], ids=["port", "no token"])
def test_wrong_usage_ends_with_2_without_asking(words):
    ended = run("AddBroker", "127.0.0.1:1", **(broker(0, "a") | words))
    assert (ended.returncode, ended.stdout) == (USAGE, "") and "usage:" in ended.stderr


def test_no_metaserver_ends_with_3():
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    ended = run("SwapRoles", f"127.0.0.1:{port}", brokerGroup="g1")
    assert ended.returncode == UNREACHABLE and "cannot reach a metaserver" in ended.stderr


@pytest.mark.parametrize(
    "command, answer, status",
    [
        pytest.param("SwapRoles", b"", UNKNOWN, id="change, connection closed"),
        pytest.param("ListBrokers", b"", UNREACHABLE, id="list, connection closed"),
        pytest.param("SwapRoles", b"HTTP/1.1 502 Bad\r\ncontent-length: 0\r\n\r\n", UNKNOWN, id="change, proxy error"),
        pytest.param("SwapRoles", b"HTTP/1.1 404 No\r\ncontent-length: 2\r\n\r\n{}", UNREACHABLE, id="another server"),
        pytest.param("SwapRoles", b"garbage\r\n\r\n", UNKNOWN, id="change, no HTTP"),
    ],
)
def test_answer_that_is_lost_after_sending(command, answer, status):
    with answering(answer) as port:
        ended = run(command, f"127.0.0.1:{port}", brokerGroup="g1")
    assert (ended.returncode, ended.stdout) == (status, "")
    assert ("look before you repeat it" in ended.stderr) == (status == UNKNOWN)


@contextmanager
def answering(answer):
    """A server that reads one request and answers it with the given bytes."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve():
            connection, _ = listener.accept()
            with connection:
                connection.settimeout(10)
                received = b""
                while b"brokerGroup=g1" not in received:
                    received += connection.recv(65536)
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield listener.getsockname()[1]
        thread.join()


async def down(world, hostname):
    brokers = await world.done("ListBrokers")
    return not any(broker["up"] for broker in brokers if broker["hostname"] == hostname)
