"""Shell. Many delayed messages come due while the servers of their group are killed and swapped; two ledgers are kept.

Receivers must get exactly the messages with a receipt: none lost, none early, none twice in the logs of broker groups.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

import qmq
from qmq import Message
from qmq.deploy.cluster import Cluster
from qmq.errors import QmqError
from tests.integration.cluster_world import running

SUBJECTS = ("due.one", "due.two", "due.three")
BATCH = 1000
DRAIN_S = 240.0


@dataclass
class Ledgers:
    """Receipts of senders and messages of receivers."""

    stored: dict[str, int] = field(default_factory=dict)
    """Message id -> due time, of messages with a receipt."""
    places: dict[str, set[tuple[str, str, int]]] = field(default_factory=dict)
    """Message id -> (subject, broker group, sequence) where it was received."""
    early: list[tuple[str, int]] = field(default_factory=list)
    late_ms: list[int] = field(default_factory=list)
    kills: int = 0
    swaps: int = 0

    @property
    def lost(self) -> list[str]:
        return sorted(self.stored.keys() - self.places.keys())

    @property
    def doubled(self) -> list[str]:
        return sorted(id for id, places in self.places.items() if len(places) > 1)

    @property
    def unknown(self) -> list[str]:
        return sorted(self.places.keys() - self.stored.keys())

    def summary(self) -> str:
        late = sorted(self.late_ms) or [0]
        return (
            f"sent {len(self.stored)}, received {len(self.places)}, lost {len(self.lost)}, "
            f"doubled {len(self.doubled)}, early {len(self.early)}, kill -9 {self.kills}, swaps {self.swaps}, "
            f"lateness p50 {late[len(late) // 2]} ms, most {late[-1]} ms"
        )


def run_trial(
    folder: Path, *, messages: int, kills: int, swaps: int, spread_s: float, say: Callable[[str], None] = print
) -> Ledgers:
    """Send `messages` that come due within `spread_s` seconds, and disturb the delay group meanwhile."""
    with running(folder, groups=("g1", "g2"), delay_groups=("d1",), restart_s=0.2, lease_ms=10_000) as cluster:
        cluster.wait_writable("g1", "g2", "d1")
        return asyncio.run(_trial(cluster, messages, kills, swaps, spread_s, say))


async def _trial(
    cluster: Cluster, messages: int, kills: int, swaps: int, spread_s: float, say: Callable[[str], None]
) -> Ledgers:
    ledgers, client = Ledgers(), {"metaserver": cluster.metaserver, "token": cluster.token, "app": "ledger"}
    sending_s = 2 + messages / 20_000
    begin = datetime.now(UTC) + timedelta(seconds=sending_s)
    consumer = qmq.Consumer(**client)
    receivers = [asyncio.create_task(_receive(consumer, subject, ledgers)) for subject in SUBJECTS]
    # Long enough for an outcome on a busy machine: a message is sent again only after that.
    async with qmq.Producer(**client, timeout_s=DRAIN_S) as producer:
        sender = asyncio.create_task(_send(producer, begin, messages, spread_s, ledgers))
        await asyncio.sleep(max(0.0, (begin - datetime.now(UTC)).total_seconds()))
        await asyncio.to_thread(_strike, cluster, kills, swaps, spread_s, ledgers, say)
        await sender
    deadline = time.monotonic() + DRAIN_S
    while ledgers.lost and time.monotonic() < deadline:
        await asyncio.sleep(0.2)
    await asyncio.sleep(1.0)  # duplicates
    for task in receivers:
        task.cancel()
    await asyncio.gather(*receivers, return_exceptions=True)
    return ledgers


async def _send(producer: qmq.Producer, begin: datetime, messages: int, spread_s: float, ledgers: Ledgers) -> None:
    """Send all messages in batches of one due time; repeat those without a receipt."""
    batches = [
        [Message(SUBJECTS[n % len(SUBJECTS)], {"n": str(n)}) for n in range(at, min(at + BATCH // 10, messages))]
        for at in range(0, messages, BATCH // 10)
    ]
    for number, batch in enumerate(batches):
        due, until = begin + timedelta(seconds=spread_s * number / len(batches)), time.monotonic() + DRAIN_S
        while batch:
            assert time.monotonic() < until, f"{len(batch)} messages are not stored within {DRAIN_S} s"
            receipts = await producer.send_many(batch, at=due)
            for message, receipt in zip(batch, receipts, strict=True):
                if receipt.is_stored:
                    ledgers.stored[message.id] = int(due.timestamp() * 1000)
            batch = [message for message, receipt in zip(batch, receipts, strict=True) if not receipt.is_stored]


async def _receive(consumer: qmq.Consumer, subject: str, ledgers: Ledgers) -> None:
    async with consumer.pull(subject, group="ledger", start="earliest") as puller:
        while True:
            got = await puller.pull(500, timeout=1)
            now_ms = time.time_ns() // 1_000_000
            for message in got:
                ledgers.places.setdefault(message.id, set()).add((subject, message.broker_group, message.sequence))
                if message.due_ms is not None:
                    ledgers.late_ms.append(now_ms - message.due_ms)
                    if now_ms < message.due_ms:
                        ledgers.early.append((message.id, message.due_ms - now_ms))
            if got:
                await puller.ack(got)


def _strike(
    cluster: Cluster, kills: int, swaps: int, spread_s: float, ledgers: Ledgers, say: Callable[[str], None]
) -> None:
    """Kill the master or slave, and swap their roles, evenly over the time in which messages come due."""
    faults = ["kill"] * kills + ["swap"] * swaps
    random.Random(1).shuffle(faults)
    began, step_s = time.monotonic(), spread_s / (len(faults) + 1)
    for number, fault in enumerate(faults):
        time.sleep(max(0.0, began + step_s * (number + 1) - time.monotonic()))
        if fault == "kill":
            role = "master" if ledgers.kills % 3 else "slave"
            cluster.kill("d1", role)
            ledgers.kills += 1
            say(f"kill -9 {role}")
            continue
        deadline = time.monotonic() + DRAIN_S
        while time.monotonic() < deadline:
            with suppress(QmqError, AssertionError, TimeoutError, RuntimeError):
                cluster.wait_writable("d1")
                cluster.swap_roles("d1")
                ledgers.swaps += 1
                say("swap")
                break
            time.sleep(0.2)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.delay_trial", description=__doc__)
    parser.add_argument("--messages", type=int, default=100_000)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--swaps", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=60.0, help="time in which the messages come due")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # end all processes, as Ctrl-C does
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        ledgers = run_trial(
            Path(folder), messages=options.messages, kills=options.kills, swaps=options.swaps, spread_s=options.seconds
        )
    print(ledgers.summary())
    return bool(ledgers.lost or ledgers.doubled or ledgers.early or ledgers.unknown)


if __name__ == "__main__":
    sys.exit(main())
