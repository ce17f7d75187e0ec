"""Shell. Delayed messages through a real cluster: the example of docs/delay.md; killed and swapped delay masters."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta

import qmq
import qmq.blocking
from qmq import DelayOutcome, Message
from qmq.deploy.processes import ROOT
from tests.chaos.delay_trial import run_trial
from tests.integration.cluster_world import shared_cluster

cluster = shared_cluster(delay_groups=("d1",), lease_ms=60_000)


def now_ms():
    return time.time_ns() // 1_000_000


def test_example_cancels_the_unpaid_order(cluster):
    environment = {**os.environ, "RUN_DIR": str(cluster.run_dir)}
    command = [sys.executable, "docs/examples/unpaid_orders/orders.py", "--minutes", "0.2"]
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    lines = ran.stdout.splitlines()
    assert lines[3:] == ["A-1: paid", "A-2: paid", "A-3: cancelled", "A-3, paid too late: not accepted"]


async def test_delayed_messages_arrive_despite_a_killed_master(cluster):
    consumer = qmq.Consumer(**cluster.client)
    async with qmq.Producer(**cluster.client) as producer:
        due = datetime.now(UTC) + timedelta(seconds=25)  # a busy machine restarts the master slowly
        messages = [Message("kill.late", {"n": str(n)}) for n in range(500)]
        receipts = await producer.send_many(messages, at=due)
        assert receipts.all_stored and {receipt.broker_group for receipt in receipts} == {"d1"}
        moved = await producer.send(Message("kill.late", {"n": "moved"}), delay=timedelta(days=300), key="moved")
        cluster.kill("d1", "master")
        assert await producer.cancel(receipts[0]) is DelayOutcome.CANCELLED
        assert await producer.reschedule(moved, at=due) is DelayOutcome.RESCHEDULED
        assert await producer.cancel(subject="kill.late", id="nobody") is DelayOutcome.UNKNOWN
        got = {}
        async with consumer.pull("kill.late", group="g", start="earliest") as puller:
            while len(got) < 500:
                for message in await puller.pull(500, timeout=30):
                    assert message.due_ms is not None and now_ms() >= message.due_ms
                    got[message["n"]] = message.due_ms
                    await message.ack()
        due_ms = receipts[1].due_ms
        assert got == {str(n): due_ms for n in range(1, 500)} | {"moved": due_ms}
        assert await producer.cancel(receipts[7]) is DelayOutcome.SENT


def test_delayed_messages_arrive_once_despite_kills_and_swaps(tmp_path):
    """`make delay-ledger` runs 100,000 messages, twenty kills and five swaps."""
    ledgers = run_trial(tmp_path, messages=3_000, kills=4, swaps=1, spread_s=10.0, say=lambda line: None)
    assert len(ledgers.stored) == 3_000 and (ledgers.kills, ledgers.swaps) == (4, 1)
    assert (ledgers.lost, ledgers.doubled, ledgers.early, ledgers.unknown) == ([], [], [], [])
