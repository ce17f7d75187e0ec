"""Shell. Copied data directories start beside or in place of their brokers; a ledger of receipts is kept.

Each round copies one of the two directories of every broker group while it runs. Even rounds kill and start original,
copy, the other broker and the metaserver in a seeded order, and send messages in between. Odd rounds start a copy of a
slave while the metaserver is down; later its master ends together with the copy, and the original becomes the master.

At the end of a round all processes run. Of the two with one directory, the one without a part is stopped and its
directory deleted, as the refusal advises. Then every message with a receipt must be there. If no copy of a broker
got its part, that broker may not have logged damage.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import qmq
import qmq.blocking
from qmq.deploy.cluster import Cluster
from qmq.deploy.control import broker_state
from qmq.deploy.plan import BrokerPlan
from qmq.deploy.processes import Service, module_command
from qmq.errors import NotServed
from qmq.proto.qmq_pb2 import BrokerState
from qmq.types import Role
from tests.integration.cluster_world import running_apart, until

COPY_IP = "127.0.0.2"
STEPS = 5
SEND_S = 2.0
LOOK_EVERY = 5
"""Rounds between comparisons of the ledger with consumed messages."""
QUICK = {"failover": True, "heartbeat_timeout_ms": 2000, "failover_silence_ms": 1000}
ACCUSATIONS = ("copies differ", "rolled back", "damaged", "mastership ends")


@dataclass
class Findings:
    rounds: int = 0
    acknowledged: int = 0
    copies_with_part: int = 0
    """Rounds that ended with the copy as the broker."""
    refused: int = 0
    """Rounds in which the metaserver refused a second process."""
    lost: list[str] = field(default_factory=list)
    accused: list[str] = field(default_factory=list)

    def summary(self) -> str:
        return (
            f"rounds {self.rounds}, acknowledged {self.acknowledged}, lost {len(self.lost)}, "
            f"accused {len(self.accused)}, copies that became the broker {self.copies_with_part}, "
            f"rounds with a refusal {self.refused}"
        )


class Pair:
    """One broker group in one round: a victim, a copy of its directory, and the other broker."""

    def __init__(self, cluster: Cluster, group: str, rng: random.Random, *, is_of_slave: bool = False) -> None:
        self.cluster, self.group, self.rng = cluster, group, rng
        self.victim = cluster.broker(group, "slave" if is_of_slave else rng.choice(["master", "slave"]))
        # By the plan, as roles may change between two requests.
        self.other = next(plan for plan in cluster.plan.brokers if plan.group == group and plan != self.victim)
        self.folder = cluster.run_dir / f"{group}-copy"
        self.had_part = False
        """Whether the copy ever had a part."""
        self.log_ends = {plan.hostname: cluster.service(plan.hostname).log.stat().st_size for plan in self.plans}
        shutil.copytree(cluster.data(self.victim), self.folder / "data")
        settings = Path(cluster.service(self.victim.hostname).command[-1]).read_text()
        settings = settings.replace(str(cluster.data(self.victim)), str(self.folder / "data"))
        config = self.folder / "copy.toml"
        config.write_text(re.sub(r'(?m)^ip = ".*"$', f'ip = "{COPY_IP}"', settings))
        self.copy = Service(f"{group}-copy", module_command(f"qmq.{self.victim.module}", config), self.folder / "log")

    @property
    def plans(self) -> tuple[BrokerPlan, BrokerPlan]:
        return self.victim, self.other

    def step(self) -> None:
        """Kill or start one of the three processes."""
        rng, cluster = self.rng, self.cluster
        match rng.choice(["copy", "copy", "victim", "victim", "other"]):
            case "copy" if self.copy.pid is None:
                self.copy.start()
            case "copy":
                self.copy.kill()
            case name:
                hostname = (self.victim if name == "victim" else self.other).hostname
                (cluster.end if cluster.service(hostname).pid else cluster.begin)(hostname)
        self.look()

    def look(self) -> None:
        state = self.copy_state()
        self.had_part = self.had_part or (state is not None and state.term > 0)

    def copy_state(self) -> BrokerState | None:
        return self._state(f"{COPY_IP}:{self.victim.control_port}") if self.copy.pid else None

    def _state(self, address: str) -> BrokerState | None:
        return broker_state(address, self.cluster.token)

    def all_run(self) -> None:
        for plan in self.plans:
            self.cluster.begin(plan.hostname)
        if self.copy.pid is None:
            self.copy.start()

    def copy_tried(self) -> bool:
        """Whether the copy took its part without the metaserver, or tried to."""
        log = (self.folder / "log").read_text()
        return "role not resumed" in log or "resumes its role" in log

    def leads(self, plan: BrokerPlan) -> bool:
        state = self._state(f"127.0.0.1:{plan.control_port}")
        return state is not None and bool(state.term) and state.role == Role.MASTER

    def is_reported_writable(self) -> bool:
        try:
            (status,) = self.cluster.manage("ReplicaStatus", brokerGroup=self.group)
        except NotServed:
            return False
        return bool(status["writable"])

    def winner(self) -> str:
        """Return which of the two with one directory has a part; empty if none has, or a role changes."""
        self.look()
        copy, victim = self.copy_state(), self._state(f"127.0.0.1:{self.victim.control_port}")
        other = self._state(f"127.0.0.1:{self.other.control_port}")
        if copy is None or victim is None or other is None or bool(copy.term) == bool(victim.term):
            return ""
        with_part = copy if copy.term else victim
        is_well = with_part.term == other.term and (with_part.writable or other.writable)
        return ("copy" if copy.term else "victim") if is_well else ""

    def keep(self, winner: str) -> None:
        """Stop the process without a part and delete its directory; a winning copy moves into the original's place."""
        self.copy.kill()
        if winner == "copy":
            self.cluster.end(self.victim.hostname)
            shutil.rmtree(self.cluster.data(self.victim))
            (self.folder / "data").rename(self.cluster.data(self.victim))
            self.cluster.begin(self.victim.hostname)
        log = self.folder / "log"
        self.log_text = log.read_text() if log.exists() else ""
        shutil.rmtree(self.folder)

    def log_lines(self) -> str:
        """Return this round's log lines of the group's brokers, without the copy's."""
        texts = []
        for plan in self.plans:
            with self.cluster.service(plan.hostname).log.open() as log:
                log.seek(self.log_ends[plan.hostname])
                texts.append(log.read())
        return "\n".join(texts)

    def accusations(self) -> list[str]:
        return [line for line in self.log_lines().splitlines() if any(word in line for word in ACCUSATIONS)]


def run_trial(folder: Path, *, rounds: int, groups: int, seed: int, say: Callable[[str], None] = print) -> Findings:
    """Run `rounds` rounds of `groups` broker groups."""
    names = tuple(f"g{number}" for number in range(1, groups + 1))
    findings = Findings()
    with running_apart(folder, names, slave_wait_ms=500, metaserver=QUICK) as cluster:
        ledger: list[tuple[str, str]] = []
        read: set[tuple[str, str]] = set()
        with qmq.blocking.Producer(
            metaserver=cluster.metaserver, token=cluster.token, app="clones", timeout_s=SEND_S
        ) as producer:
            for number in range(rounds):
                ledger += _round(cluster, names, producer, random.Random(f"{seed} {number}"), number, findings, say)
                findings.rounds += len(names)
                if number % LOOK_EVERY == LOOK_EVERY - 1 or number == rounds - 1:
                    findings.acknowledged = len(ledger)
                    read |= asyncio.run(_read_all(cluster, names))
                    findings.lost = sorted(f"{subject} {name}" for subject, name in set(ledger) - read)
                    say(findings.summary())
    return findings


def _round(
    cluster: Cluster,
    groups: tuple[str, ...],
    producer: qmq.blocking.Producer,
    rng: random.Random,
    number: int,
    findings: Findings,
    say: Callable[[str], None],
) -> list[tuple[str, str]]:
    cluster.wait_writable(*groups)
    is_failover = number % 2 == 1
    pairs = [Pair(cluster, group, random.Random(rng.random()), is_of_slave=is_failover) for group in groups]
    away = rng.choice([(), (0, 2), (0, STEPS), (1, 4)])
    stored: list[tuple[str, str]] = []

    def send(step: int) -> None:
        names = [(f"s.{group}", f"{number}.{step}.{n}") for group in groups for n in range(3)]
        receipts = producer.send_many(qmq.Message(subject, {"n": name}) for subject, name in names)
        stored.extend(name for name, receipt in zip(names, receipts, strict=True) if receipt.is_stored)

    send(-1)
    if is_failover:
        _fail_over(cluster, pairs, send)
    for step in range(0 if is_failover else STEPS):
        if away and step == away[0]:
            cluster.end("metaserver")
        elif away and step == away[1]:
            cluster.begin("metaserver")
        for pair in pairs:
            pair.step()
        for _ in range(rng.choice((1, 2))):
            send(step)
            for pair in pairs:
                pair.look()
    cluster.begin("metaserver")
    for pair in pairs:
        pair.all_run()
    for pair in pairs:
        winner = until(pair.winner, f"round {number}: one of the two has the part of {pair.group}")
        pair.keep(winner)
        findings.copies_with_part += winner == "copy"
        findings.refused += "another process" in pair.log_lines() + pair.log_text
        if not pair.had_part and (lines := pair.accusations()):
            findings.accused += [f"round {number}: {line}" for line in lines]
    say(f"round {number}: {len(stored)} acknowledged, {'failover' if is_failover else f'metaserver away {away}'}")
    return stored


def _fail_over(cluster: Cluster, pairs: list[Pair], send: Callable[[int], None]) -> None:
    """Start copies of the slaves without the metaserver; then end masters and copies after a receipt."""
    cluster.end("metaserver")
    for pair in pairs:
        pair.copy.start()
    for pair in pairs:
        until(pair.copy_tried, f"the copy of {pair.group} tries to take up its part")
    send(0)
    cluster.begin("metaserver")
    for pair in pairs:  # a master that ends before its first report has no successor
        until(pair.is_reported_writable, f"the metaserver knows that {pair.group} accepts produces")
    for step in range(1, 4):
        send(step)
    for pair in pairs:
        pair.copy.kill()
        cluster.end(pair.other.hostname)
    for pair in pairs:
        until(partial(pair.leads, pair.victim), f"{pair.victim.hostname} becomes the master")


async def _read_all(cluster: Cluster, groups: tuple[str, ...]) -> set[tuple[str, str]]:
    await asyncio.to_thread(cluster.wait_writable, *groups)
    consumer = qmq.Consumer(metaserver=cluster.metaserver, token=cluster.token, app="clones")
    found: set[tuple[str, str]] = set()
    for group in groups:
        async with consumer.pull(f"s.{group}", group="judge", start="earliest") as puller:
            while got := await puller.pull(500, timeout=3):
                found |= {(f"s.{group}", str(message["n"])) for message in got}
                await puller.ack(got)
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.clones", description=__doc__)
    parser.add_argument("--rounds", type=int, default=50, help="of each broker group")
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--dir", type=Path, help="kept; default: a temporary one")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # end all processes, as Ctrl-C does
    with tempfile.TemporaryDirectory() as temporary:
        findings = run_trial(
            options.dir or Path(temporary), rounds=options.rounds, groups=options.groups, seed=options.seed
        )
    print(findings.summary(), *findings.lost, *findings.accused, sep="\n")
    return bool(findings.lost or findings.accused)


if __name__ == "__main__":
    sys.exit(main())
