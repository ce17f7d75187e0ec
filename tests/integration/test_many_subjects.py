"""Shell. A producer, a delay group and a watchdog at the limit of subjects, while roles swap.

`SUBJECTS=20000` runs it at the size of a large installation.
"""

from __future__ import annotations

import os
import time
from collections import Counter

import httpx
from sqlalchemy.exc import OperationalError

import qmq
import qmq.blocking
from qmq.deploy.control import read_copy
from qmq.outbox.row import encode_row
from tests.integration import cluster_world
from tests.integration.cluster_world import until
from tests.integration.watchdog_world import KEY, Application, WatchdogProcess, register

SUBJECTS = int(os.environ.get("SUBJECTS", "120"))
WAIT_S = 60.0 + SUBJECTS / 10
"""A watchdog claims and deletes one row of each subject at a time."""
SWAPS = ((), ("d1",), ("g1", "g2"))
"""Groups to swap before each round. The subject above the limit comes after the second round, as a delay master that
begins later requests all subjects anew.
"""
BOUND = {"watch_subjects_max": SUBJECTS, "password_keys": [KEY]}


def names(prefix: str, subjects: int = SUBJECTS) -> list[str]:
    return [f"{prefix}.s{number:05d}" for number in range(subjects)]


def test_subject_over_the_limit_harms_no_other(tmp_path):
    application = Application(f"sqlite:///{tmp_path / 'app.db'}")
    with cluster_world.running(
        tmp_path / "cluster", groups=("g1", "g2"), delay_groups=("d1",), metaserver=BOUND
    ) as cluster:
        register(cluster, application.source)
        with WatchdogProcess(cluster, tmp_path, claims_max=32) as watchdog, _producer(cluster) as producer:
            for number, groups in enumerate(SWAPS):
                for group in groups:
                    cluster.swap_roles(group)
                _send_everywhere(producer, application, number)
                _is_sent(cluster, application, waiting=1 if number > 1 else 0)
                if number == 1:
                    _one_too_many(cluster, producer, application)
            assert watchdog.metrics()["qmq_watchdog_refused_routes"] == 1
            assert list(watchdog.health()["routes"]) == ["rows.one.too.many"]
            assert cluster.metrics(_delay_master(cluster))['qmq_delayserver_refused_routes{broker_group="d1"}'] == 1
            assert _health(_delay_master(cluster))["refusedRoutes"] == 1
        checks = {check["name"]: check for check in cluster.manage("Doctor")["checks"]}
        assert not checks["routes"]["ok"] and f"watches {SUBJECTS} subjects" in checks["routes"]["found"]
        assert "watch interrupted" not in cluster.log_of(_delay_master(cluster).hostname)
        data = [cluster.data(cluster.broker(group, "master")) for group in ("g1", "g2")]
    application.close()
    stored = {(subject, id) for folder in data for subject, _, id in read_copy(folder).messages}
    assert Counter(subject for subject, _ in stored) == dict.fromkeys(
        [*names("now"), *names("later"), *names("rows")], len(SWAPS)
    )


def _producer(cluster):
    timeout_s = 10.0 + SUBJECTS / 100
    return qmq.blocking.Producer(metaserver=cluster.metaserver, app="test", token=cluster.token, timeout_s=timeout_s)


def _send_everywhere(producer, application, number):
    began = time.monotonic()
    receipts = producer.send_many(qmq.Message(name, {"n": str(number)}) for name in names("now"))
    assert receipts.all_stored, [receipt for receipt in receipts if not receipt.is_stored][:3]
    later = producer.send_many((qmq.Message(name, {"n": str(number)}) for name in names("later")), delay=1)
    assert later.all_stored, [receipt for receipt in later if not receipt.is_stored][:3]
    rows = [_row(name, number) for name in names("rows")]
    _patiently(lambda: application.write_rows(rows) or True, "the rows are committed")
    print(f"round {number}: sent in {time.monotonic() - began:.1f} s")


def _is_sent(cluster, application, waiting=0):
    began = time.monotonic()
    _patiently(lambda: application.count() == waiting, "the watchdog sent the rows")
    print(f"rows of the watchdog: {time.monotonic() - began:.1f} s")

    def pending():
        return cluster.metrics(_delay_master(cluster))['qmq_delayserver_pending_messages{broker_group="d1"}']

    until(lambda: pending() == waiting, "the delay group sent what was due", WAIT_S)
    print(f"messages of the delay group: {time.monotonic() - began:.1f} s")


def _one_too_many(cluster, producer, application):
    """Exceed the limit of each client: the message is refused at the producer, and waits at the two others."""
    receipt = producer.send(qmq.Message("now.one.too.many", {}))
    assert receipt.outcome is qmq.Outcome.REFUSED and f"watches {SUBJECTS} subjects" in receipt.reason
    with _producer(cluster) as another:
        assert another.send(qmq.Message("later.one.too.many", {}), delay=1).is_stored
    _patiently(lambda: application.write_rows([_row("rows.one.too.many", 0)]) or True, "the row is committed")


def _patiently(condition, what):
    """Wait for a condition of the database, which is locked while the watchdog commits many rows."""

    def holds():
        try:
            return condition()
        except OperationalError:
            return False

    until(holds, what, WAIT_S)


def _row(subject, number):
    return encode_row(qmq.Message(subject, {"n": str(number)}, id=f"{subject}-{number}"), 1)


def _health(broker):
    return httpx.get(f"http://127.0.0.1:{broker.metrics_port}/health/ready", trust_env=False, timeout=60).json()


def _delay_master(cluster):
    return cluster.broker("d1", "master")
