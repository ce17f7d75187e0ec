"""Shell. `qmq worker`: processes that handle messages, are killed, and end."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path

import pytest

import qmq
import qmq.blocking
from qmq.errors import AccessError
from qmq.worker.plan import Exit
from qmq.worker.process import Run
from tests.support.ports import free_ports
from tests.support.waiting import until

ROOT = Path(__file__).parents[2]
HANDLERS = """
import os
import qmq

producer, consumer = qmq.Producer(), qmq.Consumer()


@consumer.listen("order", group="g", start="earliest", retry_delay=0)
async def on_order(message: qmq.ReceivedMessage) -> None:
    answer = qmq.Message("done", {"n": message["n"], "pid": os.getpid(), "version": VERSION})
    (await producer.send(answer)).check()


VERSION = 1
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop" / "handlers.py").write_text(HANDLERS)
    return tmp_path


@pytest.fixture
def launch(folder, qmq_blocking_broker):
    """Start a worker in the folder; it is killed after the test with all its processes."""
    started = []

    def launch(*options, target="shop.handlers:consumer"):
        environment = os.environ | {
            "QMQ_METASERVER": qmq_blocking_broker.metaserver,
            "QMQ_APP": "shop",
            "PYTHONPATH": str(ROOT),
        }
        command = [sys.executable, "-m", "qmq", "worker", target, *options]
        log = (folder / "log").open("w")
        with log:
            process = subprocess.Popen(command, cwd=folder, env=environment, stderr=log, start_new_session=True)
        started.append(process)
        return process

    yield launch
    for process in started:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def get(port, path):
    """Return the status and the text of a page; 0 while nothing listens."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()
    except OSError:
        return 0, ""


def send(broker, *numbers):
    with qmq.blocking.Producer(metaserver=broker.metaserver, app="test") as producer:
        assert producer.send_many([qmq.Message("order", {"n": n}) for n in numbers]).all_stored


def done(broker):
    """Return the handled numbers and the processes that handled them."""
    messages = broker.messages("done")
    return {int(message["n"]) for message in messages}, {int(message["pid"]) for message in messages}


def test_worker_handles_messages_beside_killed_processes(launch, qmq_blocking_broker):
    broker, (port,) = qmq_blocking_broker, free_ports(1)
    worker = launch("--processes", "2", "--concurrency", "4", "--http", f"127.0.0.1:{port}")
    until(lambda: get(port, "/ready") == (200, "ready\n"), "both processes are connected")
    assert get(port, "/live") == (200, "live\n")
    send(broker, *range(100))
    until(lambda: done(broker)[0] == set(range(100)))
    victim = max(done(broker)[1])
    os.kill(victim, signal.SIGKILL)
    send(broker, *range(100, 200))
    until(lambda: done(broker)[0] == set(range(200)))
    until(lambda: get(port, "/ready")[0] == 200, "the process is replaced")
    until(lambda: 'client="consumer",state="connected"} 2.0' in get(port, "/metrics")[1])
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(60) == 0


def test_reload_takes_the_changed_module(launch, folder, qmq_blocking_broker):
    broker, (port,) = qmq_blocking_broker, free_ports(1)
    worker = launch("--reload", "--http", f"127.0.0.1:{port}")
    until(lambda: get(port, "/ready")[0] == 200)
    module = folder / "shop" / "handlers.py"
    module.write_text("broken(")
    until(lambda: "cannot be imported" in (folder / "log").read_text(), "the new process fails")
    send(broker, 1)
    until(lambda: done(broker)[0] == {1})
    module.write_text(HANDLERS.replace("VERSION = 1", "VERSION = 22"))
    until(lambda: "status=0" in (folder / "log").read_text(), "the old process has ended")
    send(broker, 2)
    until(lambda: done(broker)[0] == {1, 2})
    assert [int(message["version"]) for message in broker.messages("done")] == [1, 22]
    worker.send_signal(signal.SIGINT)
    assert worker.wait(60) == 0


def test_processes_end_with_their_parent(launch, folder, qmq_blocking_broker):
    worker = launch()
    qmq_blocking_broker.wait_until_subscribed("order", "g")
    (pid,) = re.findall(r"process started pid=(\d+)", (folder / "log").read_text())
    worker.kill()
    until(lambda: not Path(f"/proc/{pid}").exists(), "the process has ended")
    send(qmq_blocking_broker, 1)
    assert done(qmq_blocking_broker)[0] == set()


def test_rejected_token_has_a_status_of_its_own():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        run = Run([], theirs)
        assert run._status(AccessError("unknown token")) is Exit.REFUSED
        assert run._status(RuntimeError()) is Exit.FAILED and run._status(None) is Exit.ENDED
        assert b"unknown token" in ours.recv(1000)


FIXED = 'import qmq\nconsumer = qmq.Consumer(consumer_id="c1")\nconsumer.listen("a", group="g")(print)\n'


@pytest.mark.parametrize(
    ("text", "target", "reason"),
    [
        (HANDLERS, "shop.handler:consumer", "No module named 'shop.handler'. Start in its folder"),
        (HANDLERS, "shop.handlers:consumers", "it has consumer. Name one as shop.handlers:consumer"),
        ("broken(", "shop.handlers:consumer", "SyntaxError"),
        ("import qmq\nconsumer = qmq.Consumer()\n", "shop.handlers", "a consumer has no listener"),
        (FIXED, "shop.handlers", "a consumer has a fixed consumer_id"),
    ],
)
def test_worker_that_cannot_start_ends_with_the_reason(launch, folder, text, target, reason):
    (folder / "shop" / "handlers.py").write_text(textwrap.dedent(text))
    assert launch("--processes", "2", target=target).wait(60) == 2
    assert reason in (folder / "log").read_text()
