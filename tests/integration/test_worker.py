"""Shell. `qmq worker`: processes that handle messages, are killed, and end."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
from collections import Counter
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

import qmq
import qmq.blocking
from qmq.errors import AccessError
from qmq.worker.plan import Exit
from qmq.worker.process import Run
from tests.integration import cluster_world
from tests.support.http import ask
from tests.support.ports import free_ports
from tests.support.waiting import WAIT_S, until

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
def start(folder):
    """Return a function that starts a worker in the folder; it is killed after the test with all its processes."""
    started = []

    def start(metaserver, *options, target="shop.handlers:consumer", program=("-m", "qmq", "worker"), token=""):
        environment = os.environ | {
            "QMQ_METASERVER": metaserver,
            "QMQ_TOKEN": token,
            "QMQ_APP": "shop",
            "PYTHONPATH": str(ROOT),
        }
        command = [sys.executable, *program, target, *options]
        log = (folder / "log").open("w")
        with log:
            process = subprocess.Popen(command, cwd=folder, env=environment, stderr=log, start_new_session=True)
        started.append(process)
        return process

    yield start
    for process in started:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture
def launch(start, qmq_blocking_broker):
    """Return a function that starts a worker for the broker in memory."""
    return partial(start, qmq_blocking_broker.metaserver)


def get(port, path):
    """Return the status and the text of a page; 0 while nothing listens."""
    answer = ask(f"http://127.0.0.1:{port}{path}")
    return (answer.status_code, answer.text) if answer else (0, "")


def send(broker, *numbers, token=None):
    with qmq.blocking.Producer(metaserver=broker.metaserver, token=token, app="test", timeout_s=60.0) as producer:
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


TRAIL = """
import asyncio, os, pathlib
import qmq

consumer = qmq.Consumer()
trail = os.open("trail", os.O_WRONLY | os.O_CREAT | os.O_APPEND)


@consumer.listen("order", group="g", start="earliest")
async def on_order(message: qmq.ReceivedMessage) -> None:
    line = f"{os.getpid()} {message['n']}\\n"
    os.write(trail, f"begin {line}".encode())
    while message["n"] in range(100, 140) and not pathlib.Path("go").exists():
        await asyncio.sleep(0.01)
    os.write(trail, f"end {line}".encode())
"""


def test_worker_loses_nothing_on_a_cluster(start, folder):
    """A process is killed while it handles messages, and the broker group stops for a while."""
    (folder / "shop" / "handlers.py").write_text(TRAIL)

    def trail(word):
        """Return pid and number of each call that began, or ended."""
        lines = [line.split() for line in (folder / "trail").read_text().splitlines()]
        return [(int(pid), int(number)) for kind, pid, number in lines if kind == word]

    with cluster_world.running(folder / "cluster") as cluster:
        [port] = free_ports(1)
        options = ("--processes=2", "--concurrency=4", f"--http=127.0.0.1:{port}")
        worker = start(cluster.metaserver, *options, token=cluster.token)

        def handle(numbers, while_under_way=lambda: None):
            send(cluster, *numbers, token=cluster.token)
            while_under_way()
            until(lambda: {number for _, number in trail("end")} >= set(numbers), f"{numbers} are handled")
            until(lambda: cluster.open_messages("order") == 0, "all are acked")

        def kill_one():
            until(lambda: set(trail("begin")) - set(trail("end")), "a message is handled")
            victims.append(max(set(trail("begin")) - set(trail("end")))[0])
            os.kill(victims[0], signal.SIGKILL)
            (folder / "go").touch()

        victims = []
        until(lambda: get(port, "/ready") == (200, "ready\n"), "both processes are connected")
        handle(range(100))
        handle(range(100, 140), kill_one)
        until(lambda: get(port, "/ready")[0] == 200, "the process is replaced")
        brokers = cluster.hostnames
        cluster.end(*brokers)
        status, reason = until(lambda: (page := get(port, "/ready"))[0] == 503 and page, "no broker is left")
        assert "not connected" in reason
        cluster.begin(*brokers)
        until(lambda: get(port, "/ready")[0] == 200, "the brokers are back")
        handle(range(140, 160))
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(60) == 0
        calls = Counter(number for _, number in trail("begin"))
        repeated = {number for number, count in calls.items() if count > 1}
        assert set(calls) == set(range(160))
        assert repeated <= {number for pid, number in trail("begin") if pid == victims[0] and number in range(100, 140)}


BLOCKS = """
import os, pathlib, time
import qmq, qmq.blocking

blocked = pathlib.Path("blocked")


def block(_):
    blocked.write_text(str(os.getpid()))
    while True:
        time.sleep(1)
"""
BLOCKED_LOOP = """
producer, consumer = qmq.Producer(), qmq.Consumer()


@consumer.listen("order", group="g", start="earliest")
async def on_order(message: qmq.ReceivedMessage) -> None:
    if not blocked.exists():
        block(None)
    (await producer.send(qmq.Message("done", {"n": message["n"], "pid": os.getpid()}))).check()
"""
BLOCKED_BACKGROUND = """
producer, consumer = qmq.blocking.Producer(), qmq.blocking.Consumer()


@consumer.listen("order", group="g", start="earliest")
def on_order(message):
    answer = qmq.Message("done", {"n": message["n"], "pid": os.getpid()})
    if not blocked.exists():
        producer.send_nowait(qmq.Message("other"), on_done=block)
        time.sleep(3600)
    producer.send(answer).check()
"""


@pytest.mark.parametrize("handlers", [BLOCKED_LOOP, BLOCKED_BACKGROUND], ids=["loop", "background"])
def test_process_with_a_blocked_loop_is_replaced(launch, folder, qmq_blocking_broker, handlers):
    broker = qmq_blocking_broker
    (folder / "shop" / "handlers.py").write_text(BLOCKS + handlers)
    send(broker, 1)
    worker, blocked = launch("--kill-after", "10"), folder / "blocked"
    until(lambda: blocked.exists() and blocked.read_text(), "a process blocks")
    pid = blocked.read_text()
    until(lambda: f"process ended pid={pid} status=-9" in (folder / "log").read_text(), "it is killed")
    assert f"process killed pid={pid} reason=no report for" in (folder / "log").read_text()

    def is_redelivered():
        broker.advance(31)  # the lease of the killed one ends
        return done(broker)[0] == {1}

    until(is_redelivered, "its message is handled")
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(60) == 0


HUNG_THREADS = """
consumer = qmq.Consumer(drain_s=1.0)


@consumer.listen("order", group="g", start="earliest", timeout=0.1, retry_delay=0)
def on_order(message):
    if not blocked.exists():
        block(None)
"""


def test_process_whose_handler_threads_hang_is_replaced(launch, folder, qmq_blocking_broker):
    (folder / "shop" / "handlers.py").write_text(BLOCKS + HUNG_THREADS)
    send(qmq_blocking_broker, 1)
    worker = launch("--kill-after", "10")
    qmq_blocking_broker.wait_until_consumed("order", "g", timeout=WAIT_S)
    log, pid = (folder / "log").read_text(), (folder / "blocked").read_text()
    assert f"process ended pid={pid} status=1 reason=all threads of the handler of subject order hang" in log
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(60) == 0


MANAGE = """
import os, sys
from django.core.management import execute_from_command_line

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "settings")
execute_from_command_line(sys.argv)
"""
SETTINGS = """
INSTALLED_APPS = ["qmq.django"]
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": "shop.db"}}
"""


@pytest.fixture
def project(folder):
    """Make a Django project in a folder of its own; return the words of its runconsumer."""
    site = folder / "site"
    site.mkdir()
    for name, text in {"manage": MANAGE, "settings": SETTINGS}.items():
        (site / f"{name}.py").write_text(text)
    (site / "orders.py").write_text("from qmq.django.models import *\n" + HANDLERS)
    return "site/manage.py", "runconsumer"


def test_runconsumer_runs_processes_with_the_projects_settings(launch, project, qmq_blocking_broker):
    broker, (port,) = qmq_blocking_broker, free_ports(1)
    worker = launch("--processes", "2", "--http", f"127.0.0.1:{port}", target="orders", program=project)
    until(lambda: get(port, "/ready") == (200, "ready\n"), "both processes are connected")
    send(broker, *range(20))
    until(lambda: done(broker)[0] == set(range(20)))
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(60) == 0


def test_runconsumer_ends_with_the_status_of_a_worker(launch, folder, project):
    assert launch(target="order:consumer", program=project).wait(60) == 2
    assert "No module named 'order'. Start in its folder" in (folder / "log").read_text()


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
