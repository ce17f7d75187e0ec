"""Shell. Celery's own workers and clients on a cluster: no task is lost with a killed worker."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import contextmanager

import pytest

from tests.integration.cluster_world import shared_cluster
from tests.support.waiting import until

TASKS = 200
TEST_S = 120.0
SENDER = f"""
from tests.integration.celery_tasks import fail_once, note
for number in range({TASKS}):
    note.delay(number)
fail_once.delay("late")
note.apply_async(("eta",), countdown=1)
"""


cluster = shared_cluster(delay_groups=("d1",), lease_ms=3000)


@pytest.fixture
def environment(cluster, tmp_path):
    broker = f"qmq://{cluster.metaserver.removeprefix('http://')}"
    return os.environ | {"BROKER": broker, "NOTES": str(tmp_path / "notes"), "QMQ_TOKEN": cluster.token}


@contextmanager
def worker(environment, log):
    """Run a prefork worker with two processes in a session of its own."""
    command = "-m celery -A tests.integration.celery_tasks worker --concurrency 2 -l INFO -n".split()
    with open(log, "w") as out:
        process = subprocess.Popen(
            [sys.executable, *command, f"{log.name}@%h"],
            env=environment,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def read(environment):
    try:
        with open(environment["NOTES"]) as notes:
            return notes.read().splitlines()
    except FileNotFoundError:
        return []


def test_killed_celery_worker_loses_no_task(environment, tmp_path):
    subprocess.run([sys.executable, "-c", SENDER], env=environment, check=True, timeout=TEST_S)
    expected = {str(number) for number in range(TASKS)} | {"late after 1", "eta"}
    with worker(environment, tmp_path / "first") as first, worker(environment, tmp_path / "second") as second:
        until(lambda: len(read(environment)) >= TASKS // 4, "a quarter is done", TEST_S)
        os.killpg(first.pid, signal.SIGKILL)
        until(lambda: expected <= set(read(environment)), "all tasks are done", TEST_S)
        second.send_signal(signal.SIGTERM)
        assert second.wait(TEST_S) == 0
    done = read(environment)
    assert set(done) == expected
    assert len(done) - len(expected) <= 20, "only tasks of the killed worker ran again"


COUNT = """
import kombu, qmq.kombu
with kombu.Connection({broker!r}) as connection:
    print(connection.channel().queue_declare("counted", passive=True).message_count)
"""


def count(cluster, token):
    broker = f"qmq://:{token}@{cluster.metaserver.removeprefix('http://')}"
    code = COUNT.format(broker=broker)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=TEST_S)


def test_passive_declaration_counts_waiting_tasks(cluster):
    missing = count(cluster, cluster.token)
    assert "ChannelError" in missing.stderr and "counted" in missing.stderr
    cluster.send_all("counted", 3)
    cluster.consume_all("counted", "celery", 3)
    cluster.send_all("counted", 2, name="later")
    until(lambda: count(cluster, cluster.token).stdout == "2\n", "two tasks wait")
    client = cluster.manage("AddToken", name="client", role="client")["token"]
    refused = count(cluster, client)
    assert (
        refused.returncode == 1 and "ChannelError: queue counted: token 'client' has the role client" in refused.stderr
    )


def test_celery_sender_without_a_broker_reports_the_cause(environment):
    code = "from tests.integration.celery_tasks import note; note.apply_async((1,), retry=False)"
    lost = environment | {"BROKER": "qmq://127.0.0.1:1"}
    ran = subprocess.run([sys.executable, "-c", code], env=lost, capture_output=True, text=True, timeout=TEST_S)
    assert ran.returncode == 1
    assert "OperationalError: queue celery: task is refused: " in ran.stderr
    assert "the metaserver at http://127.0.0.1:1 sent no route" in ran.stderr
