"""Shell. Rounds of a power cut of all three copies, after which one disk has forgotten its last fsync.

LYING_DISK_ROUNDS=200 pytest tests/chaos/test_lying_disk.py
"""

from __future__ import annotations

import asyncio
import os
import random
import signal

from qmq.deploy.processes import suspend
from qmq.log.segments import log_name
from qmq.message import Message
from tests.integration.cluster_world import (
    WAIT_S,
    consume_all,
    data_of,
    log_of,
    producer,
    reasons,
    row,
    running_apart,
    slaves_in_sync,
    state,
    until,
)

ROUNDS = int(os.environ.get("LYING_DISK_ROUNDS", "4"))
"""Each group of the cluster runs its own rounds at the same time."""
GROUPS = ("g1", "g2")
ACCUSED = ("copies differ", "rolled back", "log damaged", "tail cut", "seeding")


class Round:
    """Round of one group: `c` lags, `b` has everything, and the disk of `liar`, mostly the master, lies."""

    def __init__(self, cluster, group, rng):
        self.cluster, self.group = cluster, group
        self.a = cluster.broker(group, "master")
        slaves = [plan for plan in cluster.plan.brokers if plan.group == group and plan != self.a]
        rng.shuffle(slaves)
        self.b, self.c = slaves
        self.liar = self.a if rng.random() < 0.8 else self.b
        self.is_c_first = rng.random() < 0.8
        self.end = state(cluster, self.a).log_end
        self.seen = {plan: len(log_of(cluster, plan.hostname)) for plan in (self.a, self.b)}

    @property
    def copies(self):
        return self.a, self.b, self.c

    def lie(self):
        """Zero the newest frames on the disk of `liar`."""
        folder = data_of(self.cluster, self.liar) / "log"
        base = max(int(name.stem) for name in folder.glob("*.log") if int(name.stem) <= self.end)
        with (folder.parent / log_name(base)).open("r+b") as file:
            file.seek(self.end - base)
            rest = file.read()
            assert rest.strip(b"\0"), "the message was on this disk"
            file.seek(self.end - base)
            file.write(bytes(len(rest)))

    def come_back(self):
        """Start the master, mostly with the lagging copy; it waits for `b`."""
        cluster = self.cluster
        cluster.begin(self.a.hostname, *([self.c.hostname] if self.is_c_first else []))
        until(lambda: "rejoin" in (reasons(cluster, self.a) or ()), f"{self.group} waits for {self.b.hostname}")
        if self.is_c_first:
            until(lambda: state(cluster, self.c), "the lagging copy is there")
        assert not state(cluster, self.a).writable

    def complete(self):
        self.cluster.begin(self.b.hostname, self.c.hostname)
        until(lambda: slaves_in_sync(self.cluster, self.group) == 2, f"{self.group} is whole")
        assert state(self.cluster, self.a).writable
        honest = self.b if self.liar is self.a else self.a
        lines = log_of(self.cluster, honest.hostname)[self.seen[honest] :]
        assert not reasons(self.cluster, honest) and not any(word in lines for word in ACCUSED), lines[-2000:]


def are_reported(cluster):
    (count,) = row(cluster, "select count(*) from broker where complete")
    return count == 2 * len(GROUPS) and all(slaves_in_sync(cluster, group) == 2 for group in GROUPS)


def send_and_cut_power(cluster, rounds, name):
    """Kill all brokers as soon as each group has acknowledged its message."""

    async def send():
        async with producer(cluster) as sender:
            await asyncio.gather(*(sender.send(Message(f"s.{round.group}", {}, id=f"warm-{name}")) for round in rounds))
            for round in rounds:
                round.end = state(cluster, round.a).log_end
                suspend(cluster.service(round.c.hostname).pid)
            messages = [Message(f"s.{round.group}", {"x": "y" * 200}, id=name) for round in rounds]
            receipts = await asyncio.gather(*map(sender.send, messages))
            services = [cluster.service(plan.hostname) for round in rounds for plan in round.copies]
            for service in services:
                service.is_held = True
            for service in services:
                os.kill(service.pid, signal.SIGKILL)
            assert all(receipt.is_stored for receipt in receipts), receipts

    asyncio.run(send())
    cluster.end(*(plan.hostname for round in rounds for plan in round.copies))


def test_power_cut_with_one_lying_disk_loses_nothing(tmp_path):
    rng, expected = random.Random(ROUNDS), []
    with running_apart(tmp_path / "cluster", GROUPS, copies=3, rejoin_wait_s=WAIT_S) as cluster:
        for number in range(ROUNDS // len(GROUPS)):
            until(lambda: are_reported(cluster), "the metaserver's rows have all slaves as in sync")
            rounds = [Round(cluster, group, rng) for group in GROUPS]
            send_and_cut_power(cluster, rounds, f"m{number}")
            expected += [f"warm-m{number}", f"m{number}"]
            for step in (Round.lie, Round.come_back, Round.complete):
                for round in rounds:
                    step(round)
            cluster.wait_writable()
        for group in GROUPS:
            got = consume_all(cluster, f"s.{group}", "check", len(expected))
            assert got == list(enumerate(expected))
