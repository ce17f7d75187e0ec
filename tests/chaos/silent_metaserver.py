"""Shell. Real processes: masters end, and one of two metaservers stands still at about that moment.

    python -m tests.chaos.silent_metaserver --rounds 200

Two metaservers on MariaDB behind nginx, several groups of two copies, all of which lose their master in one go: half of
the masters are killed, half stand still. Printed is, for each, the time until its slave is the master; at the end, how
many acknowledged messages no consumer gets.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import qmq
from qmq.deploy.control import broker_state
from qmq.deploy.processes import suspend
from qmq.types import Role
from tests.integration.installation_world import TOKEN, Installation
from tests.support.databases import MariadbServer

GROUPS = 4
SUBJECTS = [f"s{number}" for number in range(2 * GROUPS)]
AROUND_S = 3.0
PAUSE_S = 0.02
ROUND_S = 30.0
SETTLED_S = 2.0


class Trial:
    def __init__(self, world: Installation, seed: int) -> None:
        self.world, self.dice = world, random.Random(seed)
        self.took: list[tuple[float, str]] = []
        self.acked: dict[str, set[str]] = {subject: set() for subject in SUBJECTS}
        self.is_over = False

    def state(self, broker):
        return broker_state(f"127.0.0.1:{broker.control}", TOKEN, timeout_s=2.0) if broker.pid else None

    def copies(self, group):
        """Its master and its slave; raises LookupError while they are not in sync."""
        brokers = self.world.brokers[2 * group : 2 * group + 2]
        states = [self.state(broker) for broker in brokers]
        for number, state in enumerate(states):
            if state is not None and state.role == Role.MASTER and state.term and state.in_step and state.writable:
                return brokers[number], brokers[1 - number]
        raise LookupError(group)

    def is_master(self, broker, term):
        state = self.state(broker)
        return state is not None and state.role == Role.MASTER and state.term > term

    async def in_sync(self, group):
        async with asyncio.timeout(120):
            while True:
                try:
                    return await asyncio.to_thread(self.copies, group)
                except LookupError:
                    await asyncio.sleep(0.2)

    async def round(self) -> None:
        pairs = [await self.in_sync(group) for group in range(GROUPS)]
        await asyncio.sleep(SETTLED_S + self.dice.random())
        silent = self.dice.choice(self.world.metaservers)
        before_s = self.dice.uniform(-1.0, AROUND_S)
        terms = [self.state(slave).term for _, slave in pairs]
        if before_s > 0:
            await asyncio.to_thread(suspend, silent.pid)
            await asyncio.sleep(before_s)
        began, names = time.monotonic(), []
        for group, (master, _) in enumerate(pairs):
            kills = (group + len(self.took)) % 2 == 0
            names.append("killed" if kills else "silent")
            if kills:
                master.is_held = True
                await asyncio.to_thread(master.kill)
            else:
                master.signal(signal.SIGSTOP)
        if before_s <= 0:
            await asyncio.sleep(-before_s)
            await asyncio.to_thread(suspend, silent.pid)
        waits = (self.until_master(slave, term) for (_, slave), term in zip(pairs, terms, strict=True))
        times = [took_s - began for took_s in await asyncio.gather(*waits)]
        self.took += zip(times, names, strict=True)
        silent.signal(signal.SIGCONT)
        for (master, _), name in zip(pairs, names, strict=True):
            if name == "killed":
                master.start()
            else:
                master.signal(signal.SIGCONT)
        each = " ".join(f"{name}={took_s:.1f}" for took_s, name in zip(times, names, strict=True))
        print(f"{len(self.took):4} metaserver silent {before_s:+.1f} s before: {each}", flush=True)

    async def until_master(self, slave, term):
        deadline = time.monotonic() + ROUND_S
        while time.monotonic() < deadline:
            if await asyncio.to_thread(self.is_master, slave, term):
                break
            await asyncio.sleep(PAUSE_S)
        return time.monotonic()

    async def send(self, producer, subject):
        number = 0
        while not self.is_over:
            number += 1
            receipt = await producer.send(qmq.Message(subject, {"n": number}, id=f"{subject}.{number}"))
            if receipt.is_stored:
                self.acked[subject].add(receipt.message_id)
            await asyncio.sleep(0.1)

    async def lost(self, subject):
        missing = set(self.acked[subject])
        consumer = qmq.Consumer(metaserver=self.world.url, token=TOKEN, app="judge")
        async with consumer.pull(subject, group="judge", start="earliest") as puller:
            while missing and (messages := await puller.pull(500, timeout=20)):
                missing -= {message.id for message in messages}
                await puller.ack(messages)
        return missing

    async def run(self, rounds) -> list[str]:
        """Return the ids of acknowledged messages that no consumer gets."""
        async with qmq.Producer(metaserver=self.world.url, token=TOKEN, app="trial", timeout_s=60) as producer:
            async with asyncio.TaskGroup() as tasks:
                for subject in SUBJECTS:
                    tasks.create_task(self.send(producer, subject))
                while len(self.took) < rounds:
                    await self.round()
                self.is_over = True
        for group in range(GROUPS):
            await self.in_sync(group)
        return [one for missing in await asyncio.gather(*map(self.lost, SUBJECTS)) for one in missing]

    def longest_s(self, kind) -> float:
        return max(took_s for took_s, name in self.took if name == kind)

    def show(self) -> None:
        for kind in ("killed", "silent"):
            times = sorted(took_s for took_s, name in self.took if name == kind)
            parts = ((part, times[min(len(times) - 1, len(times) * part // 100)]) for part in (50, 90, 99))
            shown = ", ".join(f"p{part} {took_s:.1f}" for part, took_s in parts)
            print(f"{kind}: {len(times)} rounds, {shown}, longest {times[-1]:.1f} s")
        print(f"acknowledged {sum(map(len, self.acked.values()))}")


@contextmanager
def trial(folder: Path, database: str, seed: int = 1) -> Iterator[Trial]:
    settings = {"failover": True, "heartbeat_timeout_ms": 5000, "groups_per_subject_new": GROUPS}
    world = Installation(folder, database, groups=GROUPS, **settings)
    try:
        world.start()
        yield Trial(world, seed)
    finally:
        world.stop()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.silent_metaserver", description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    server = MariadbServer()
    try:
        server.start()
        with (
            TemporaryDirectory(prefix="qmq-silent-") as folder,
            trial(Path(folder), server.create_database(), options.seed) as running,
        ):
            lost = asyncio.run(running.run(options.rounds))
            running.show()
    finally:
        server.remove()
    print(f"lost {len(lost)} {lost[:5]}")
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
