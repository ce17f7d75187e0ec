"""Shell. Exactly one effect per message: the consumer crashes at each step and restarts, and the master is killed."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text

import qmq
from qmq.idempotence.tables import ClaimsTable, HandledTable
from tests.integration.cluster_world import WAIT_S, shared_cluster
from tests.support.redis import redis_server
from tests.unit.idempotence.stores import async_url

__all__ = ["redis_server"]

ROOT = Path(__file__).parents[2]
STEPS = ["before the key", "before the handler", "after the work", "before the commit", "before the ack"]
CONCURRENCY = 3
PLAIN = 40
"""Messages that do not crash; some are in flight with those that do."""


cluster = shared_cluster(lease_ms=10_000)


class Run:
    """One subject, its consumer process, and the messages it handled."""

    def __init__(self, cluster, directory, *, kind, url, steps):
        self._cluster, self._kind, self.steps = cluster, kind, steps
        self._subject = f"once.{directory.name}"
        self._crashes = directory / "crashes"
        self._crashes.mkdir()
        self.journal = directory / "journal"
        self.journal.touch()
        options = {
            "kind": kind,
            "url": url,
            "subject": self._subject,
            "metaserver": cluster.metaserver,
            "crashes": str(self._crashes),
            "journal": str(self.journal),
            "concurrency": str(CONCURRENCY),
        }
        self._command = [sys.executable, "-m", "tests.integration.once_process", json.dumps(options)]
        self._process = None
        self.starts = 0

    def send(self):
        """Send plain messages, and one per step that crashes there; return the step of each."""
        steps = ["none"] * PLAIN
        for at, step in enumerate(self.steps):
            steps.insert(at * PLAIN // len(self.steps), step)
        messages = [
            qmq.Message(self._subject, {"number": number, "crash": step}, id=f"{self._subject}-{number}")
            for number, step in enumerate(steps)
        ]

        async def send_all():
            async with self._cluster.producer() as sender:
                assert (await sender.send_many(messages)).all_stored
                assert (await sender.send_many(messages[:5])).all_stored  # as after an unknown outcome

        asyncio.run(send_all())
        return dict(enumerate(steps))

    def consume(self):
        """Restart the consumer until all messages are settled; kill the master once."""
        deadline, is_master_dead = time.monotonic() + 4 * WAIT_S, False
        try:
            while len(list(self._crashes.iterdir())) < len(self.steps) or self._left() != 0:
                assert time.monotonic() < deadline, f"not settled, {self._left()} left, {self.starts} starts"
                self._keep()
                if not is_master_dead and self.starts > 2:
                    is_master_dead = True
                    self._cluster.kill("g1", "master")
                time.sleep(0.2)
        finally:
            if self._process is not None:
                self._process.kill()
                self._process.wait()

    def _keep(self):
        if self._process is not None and self._process.poll() is not None:
            assert self._process.returncode == -9, "it did not end by a crash of its own"
            self._process = None
        if self._process is None:
            self.starts += 1
            self._process = subprocess.Popen(
                self._command, cwd=ROOT, env=os.environ | {"QMQ_TOKEN": self._cluster.token}
            )

    def _left(self):
        return self._cluster.open_messages(self._subject)


def make_tables(url):
    engine = create_engine(url)
    with engine.begin() as connection:
        HandledTable("qmq_handled").create(connection)
        ClaimsTable("qmq_claims").create(connection)
        connection.execute(text("CREATE TABLE ledger (number INTEGER)"))
    return engine


@pytest.mark.parametrize(
    "kind, database_url",
    [("transaction", "sqlite"), ("transaction", "mariadb"), ("transaction", "postgresql"), ("thread", "postgresql")],
    indirect=["database_url"],
)
def test_handler_transaction_has_exactly_one_effect(cluster, tmp_path, kind, database_url):
    engine = make_tables(database_url)
    url = async_url(database_url) if kind == "transaction" else database_url
    run = Run(cluster, tmp_path, kind=kind, url=url, steps=STEPS)
    steps = run.send()
    run.consume()
    with engine.connect() as connection:
        ledger = Counter(connection.execute(text("SELECT number FROM ledger")).scalars())
    engine.dispose()
    assert ledger == Counter(steps.keys())


@pytest.mark.parametrize("store", ["mariadb", "redis"])
def test_own_keys_repeat_only_after_a_crash(cluster, tmp_path, request, store):
    if store == "redis":
        url = request.getfixturevalue("redis_server").url
    else:
        plain = request.getfixturevalue(store).create_database()
        make_tables(plain).dispose()
        url = async_url(plain)
    run = Run(cluster, tmp_path, kind="keys", url=url, steps=[step for step in STEPS if step != "before the commit"])
    steps = run.send()
    run.consume()
    journal = Counter(int(line) for line in run.journal.read_text().split())
    assert set(journal) == set(steps), "no message is lost"
    repeats = sum(journal.values()) - len(steps)
    assert all(journal[number] >= 2 for number, step in steps.items() if step == "after the work")
    assert repeats <= len(run.steps) * CONCURRENCY, "only messages in a handler at a crash repeat"
