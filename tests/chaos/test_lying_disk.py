"""Shell. Rounds of a power cut of all three copies, after which one disk has forgotten its last fsync.

LYING_DISK_ROUNDS=200 pytest tests/chaos/test_lying_disk.py
"""

from __future__ import annotations

import asyncio
import os
import random
import signal

from qmq.deploy.processes import suspend
from qmq.message import Message
from tests.integration.cluster_world import WAIT_S, running_apart, until, zero_from

ROUNDS = int(os.environ.get("LYING_DISK_ROUNDS", "4"))
"""Each group of the cluster runs its own rounds at the same time."""
GROUPS = ("g1", "g2")
ACCUSED = ("copies differ", "rolled back", "log damaged", "tail cut", "seeding")


class Round:
    """Round of one group: `c` lags, `b` has everything, and the disk of `liar`, mostly the master, lies."""

    def __init__(self, cluster, group, rng):
        self.cluster, self.group = cluster, group
        self.a = cluster.broker(group, "master")
        slaves = cluster.slaves(group)
        rng.shuffle(slaves)
        self.b, self.c = slaves
        self.liar = self.a if rng.random() < 0.8 else self.b
        self.is_c_first = rng.random() < 0.8
        self.end = cluster.state(self.a).log_end
        self.seen = {plan: len(cluster.log_of(plan.hostname)) for plan in (self.a, self.b)}

    @property
    def copies(self):
        return self.a, self.b, self.c

    def lie(self):
        """Zero the newest frames on the disk of `liar`."""
        lost = zero_from(self.cluster.data(self.liar), self.end)
        assert lost.strip(b"\0"), "the message was on this disk"

    def come_back(self):
        """Start the master, mostly with the lagging copy; it waits for `b`."""
        cluster = self.cluster
        cluster.begin(self.a.hostname, *([self.c.hostname] if self.is_c_first else []))
        until(lambda: "rejoin" in (cluster.reasons(self.a) or ()), f"{self.group} waits for {self.b.hostname}")
        if self.is_c_first:
            until(lambda: cluster.state(self.c), "the lagging copy is there")
        assert not cluster.state(self.a).writable

    def complete(self):
        self.cluster.begin(self.b.hostname, self.c.hostname)
        until(lambda: self.cluster.slaves_in_sync(self.group) == 2, f"{self.group} is whole")
        assert self.cluster.state(self.a).writable
        honest = self.b if self.liar is self.a else self.a
        lines = self.cluster.log_of(honest.hostname)[self.seen[honest] :]
        assert not self.cluster.reasons(honest) and not any(word in lines for word in ACCUSED), lines[-2000:]


def are_reported(cluster):
    (count,) = cluster.row("select count(*) from broker where complete")
    return count == 2 * len(GROUPS) and all(cluster.slaves_in_sync(group) == 2 for group in GROUPS)


def send_and_cut_power(cluster, rounds, name):
    """Kill all brokers as soon as each group has acknowledged its message."""

    async def send():
        async with cluster.producer() as sender:
            await asyncio.gather(*(sender.send(Message(f"s.{round.group}", {}, id=f"warm-{name}")) for round in rounds))
            for round in rounds:
                round.end = cluster.state(round.a).log_end
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
            got = cluster.consume_all(f"s.{group}", "check", len(expected))
            assert got == list(enumerate(expected))
