"""Shell. Silent network failures: packets are dropped both ways, one way, at random, or above a rate.

Rules of nftables on the loopback device, in a network namespace of the run's own (qmq.deploy.chaos.sandbox): no other
program of this machine is touched.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence

from qmq.deploy.chaos.sandbox import is_inside
from qmq.deploy.chaos.target import Strike, Target

TABLE = "inet qmq_chaos"
LOST_OF_TEN = 2
SLOW = "limit rate over 400 kbytes/second drop"


def _cut_copies(target: Target, group: str) -> None:
    """Drop all packets between master and slave."""
    port = target.cluster.broker(group, "master").sync_port
    _drop(target, f"tcp dport {port} drop", f"tcp sport {port} drop")


def _cut_one_way(target: Target, group: str) -> None:
    """Drop the packets between master and slave in one direction."""
    port, side = target.cluster.broker(group, "master").sync_port, target.rng.choice(["dport", "sport"])
    _drop(target, f"tcp {side} {port} drop")


def _cut_clients(target: Target, group: str) -> None:
    """Drop all packets between clients and the master, without a reset."""
    port = target.cluster.broker(group, "master").serve_port
    _drop(target, f"tcp dport {port} drop", f"tcp sport {port} drop")


def _cut_metaserver(target: Target, group: str) -> None:
    """Drop all packets of the metaserver."""
    ports = target.cluster.plan.http_port, target.cluster.plan.grpc_port
    _drop(target, *(f"tcp {side} {port} drop" for port in ports for side in ("dport", "sport")))


def _lose_packets(target: Target, group: str) -> None:
    _drop(target, *(f"tcp dport {port} numgen random mod 10 < {LOST_OF_TEN} drop" for port in _ports(target, group)))


def _slow_link(target: Target, group: str) -> None:
    _drop(target, *(f"tcp dport {port} {SLOW}" for port in _ports(target, group)))


def _ports(target: Target, group: str) -> Sequence[int]:
    master = target.cluster.broker(group, "master")
    return master.serve_port, master.sync_port


def _drop(target: Target, *rules: str) -> None:
    """Let rules hold for some seconds: sometimes for longer than a lease and every time-out of a connection."""
    chain = "\n".join(("type filter hook input priority 0;", *rules))
    _nft(f"table {TABLE} {{\nchain input {{\n{chain}\n}}\n}}")
    try:
        target.pause(0.5, 8.0)
    finally:
        _nft(f"delete table {TABLE}")


def _nft(commands: str) -> None:
    subprocess.run(["nft", "-f", "-"], input=commands, text=True, check=True)


def _missing() -> str:
    if not is_inside():
        return "the run has no network namespace of its own"
    return "" if shutil.which("nft") else "nft is not installed (Debian: apt-get install nftables)"


STRIKES = {
    "cut the copies apart": Strike(_cut_copies, _missing),
    "cut the copies in one direction": Strike(_cut_one_way, _missing),
    "cut clients off": Strike(_cut_clients, _missing),
    "cut the metaserver off": Strike(_cut_metaserver, _missing),
    "lose packets": Strike(_lose_packets, _missing),
    "slow link": Strike(_slow_link, _missing),
}
