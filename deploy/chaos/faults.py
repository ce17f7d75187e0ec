"""Shell. Faults that strike a broker group: of its processes, operators, disks, network and clocks."""

from __future__ import annotations

import fcntl
import os
import random
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

from qmq.deploy.chaos.records import MARKED, SLAVE_STOPPED, Record, Window
from qmq.deploy.cluster import Cluster
from qmq.deploy.plan import HOST, BrokerPlan
from qmq.deploy.processes import Service, suspend
from qmq.errors import OperatorError

INSIDE = "QMQ_CHAOS_SANDBOX"
SIOCSIFFLAGS, IFF_UP = 0x8914, 0x1
INTERFACE = "16sh"
"""Name and flags of a network device, as the ioctl takes them."""


def is_inside() -> bool:
    return INSIDE in os.environ


def enter_sandbox(module: str, arguments: Sequence[str]) -> None:
    """Run `module` again in network and mount namespaces of its own, so faults there affect no other program.

    Returns if it already runs there, or if the system does not allow it.
    """
    if is_inside():
        _raise_loopback()
        return
    command = ["unshare", "--net", "--mount", *(() if os.geteuid() == 0 else ("--map-root-user",)), "--"]
    if shutil.which("unshare") and subprocess.run([*command, "true"], capture_output=True).returncode == 0:
        environ = os.environ | {INSIDE: "1"}
        os.execvpe(command[0], [*command, sys.executable, "-m", module, *arguments], environ)


def _raise_loopback() -> None:
    """Start the loopback device: in a new network namespace it is down."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack(INTERFACE, b"lo", IFF_UP))


ROUTES_S = 4.0
"""Time after which a mark has reached all clients and brokers: usually a second, and longer if one of them stalls."""
ROOM_BYTES = 64 << 20
"""Free space of a small disk. A broker is readonly while less than half of it is free."""
PIECE_BYTES = 1 << 20
NFT_TABLE = "inet qmq_chaos"
LOST_OF_TEN = 2
SLOW_RULE = "limit rate over 400 kbytes/second drop"
CLOCK_LIBRARY = "faketime/libfaketimeMT.so.1"
CLOCK_STEPS = ("+3m", "-3m", "+1d", "-1d", "+400d")


@dataclass
class Target:
    """Cluster that faults strike, and their records. Made for one run; used by one thread."""

    cluster: Cluster
    rng: random.Random
    records: list[Record] = field(default_factory=list)
    """Faults and windows so far."""
    refused: list[str] = field(default_factory=list)
    """Operators' commands that were refused, with the reason. Some refusals are intended."""

    def pause(self, least_s: float, most_s: float) -> None:
        time.sleep(self.rng.uniform(least_s, most_s))

    def copies(self, group: str) -> tuple[BrokerPlan, BrokerPlan]:
        """Return the present master and slave of a group."""
        return self.cluster.broker(group, "master"), self.cluster.broker(group, "slave")

    def any_copy(self, group: str) -> BrokerPlan:
        return self.rng.choice(self.copies(group))

    def command(self, action: str, **parameters: object) -> bool:
        """Run an operator's command; return whether it was accepted."""
        try:
            self.cluster.manage(action, **parameters)
        except OperatorError as error:
            self.refused.append(str(error))
            return False
        return True


def nothing_is_missing() -> str:
    return ""


class Strike(NamedTuple):
    """Kind of fault. `hit` strikes a broker group and returns once the fault is removed."""

    hit: Callable[[Target, str], None]
    missing: Callable[[], str] = nothing_is_missing
    """Returns the missing program or right for this fault; empty: none."""


# Processes: killed or paused, at any moment and in any order.


def _kill_master(target: Target, group: str) -> None:
    target.cluster.kill(group, "master")


def _kill_slave(target: Target, group: str) -> None:
    target.cluster.kill(group, "slave")


def _kill_both(target: Target, group: str) -> None:
    first, second = target.rng.sample(["master", "slave"], 2)
    target.cluster.kill(group, first)
    target.pause(0, 0.05)
    target.cluster.kill(group, second)


def _kill_while_starting(target: Target, group: str) -> None:
    role = target.rng.choice(["master", "slave"])
    for _ in range(3):
        service = target.cluster.service(target.cluster.broker(group, role).hostname)
        next_start = service.starts + 1
        target.cluster.kill(group, role)
        target.cluster.wait(partial(_has_begun, service, next_start), f"{service.name} is not started again")
        target.pause(0, 1.5)
    target.cluster.kill(group, role)


def _kill_in_any_order(target: Target, group: str) -> None:
    for _ in range(target.rng.randint(4, 8)):
        target.cluster.kill(group, target.rng.choice(["master", "slave"]))
        target.pause(0, 1.2)


def _kill_metaserver(target: Target, group: str) -> None:
    target.cluster.service("metaserver").kill()


def _kill_metaserver_and_broker(target: Target, group: str) -> None:
    """Kill a broker while the metaserver is away: it must resume its last role."""
    target.cluster.end("metaserver")
    target.cluster.kill(group, target.rng.choice(["master", "slave"]))
    target.pause(0, 5.0)
    target.cluster.begin("metaserver")


def _stop_master(target: Target, group: str) -> None:
    _stop(target, target.cluster.broker(group, "master"))


def _stop_slave(target: Target, group: str) -> None:
    if (window := _stop(target, target.cluster.broker(group, "slave"))) is not None:
        target.records.append(window)


def _stop(target: Target, broker: BrokerPlan) -> Window | None:
    """Pause a process; return the seconds, or None if the process had ended."""
    service = target.cluster.service(broker.hostname)
    if (pid := service.pid) is None:
        return None
    suspend(pid)
    begin = time.monotonic()
    target.pause(0.5, 5.0)
    end = time.monotonic()
    service.signal(signal.SIGCONT)
    return Window(begin, end, SLAVE_STOPPED, broker.group)


def _has_begun(service: Service, start: int) -> bool:
    return service.starts >= start


# Operators: change roles and mark groups, some of them at the wrong moment.


def _swap_roles(target: Target, group: str) -> None:
    target.cluster.swap_roles(group)


def _kill_during_swap(target: Target, group: str) -> None:
    """Kill a copy during a swap. The swap may be refused or carried out; either way nothing is lost."""
    service = target.cluster.service(target.any_copy(group).hostname)
    killer = threading.Timer(target.rng.uniform(0, 0.15), lambda: service.signal(signal.SIGKILL))
    killer.start()
    target.command("SwapRoles", brokerGroup=group)
    killer.join()


def _replace_broker(target: Target, group: str) -> None:
    """Exchange the copies as in QMQ: stop both, put each in the other's place, start both."""
    master, slave = target.copies(group)
    target.cluster.end(master.hostname, slave.hostname)
    exchange(target, master, slave)
    target.cluster.begin(slave.hostname, master.hostname)


def exchange(target: Target, master: BrokerPlan, slave: BrokerPlan) -> bool:
    """Put each broker in the other's place; return whether both commands were accepted."""
    if not target.command("ReplaceBroker", **_place(slave, 0)):
        return False
    target.cluster.manage("ReplaceBroker", **_place(master, 1))
    return True


def _place(broker: BrokerPlan, role: int) -> dict[str, object]:
    return {
        "brokerGroup": broker.group,
        "role": role,
        "hostname": broker.hostname,
        "ip": HOST,
        "servePort": broker.serve_port,
        "syncPort": broker.sync_port,
    }


def _mark_readonly(target: Target, group: str) -> None:
    target.cluster.manage("MarkReadonlyBrokerGroup", brokerGroup=group)
    begin = time.monotonic() + ROUTES_S
    target.pause(ROUTES_S + 0.5, ROUTES_S + 1.5)
    target.records.append(Window(begin, time.monotonic(), MARKED, group))
    target.cluster.manage("UnMarkReadonlyBrokerGroup", brokerGroup=group)


# Disks: lost, emptied, put back as they were some time ago, or full.


def _wipe_slave(target: Target, group: str) -> None:
    _, slave = target.copies(group)
    target.cluster.end(slave.hostname)
    shutil.rmtree(target.cluster.data(slave))
    target.pause(0, 0.5)
    target.cluster.begin(slave.hostname)


def _lose_master_disk(target: Target, group: str) -> None:
    """Delete the master's data. The slave, paused until then, is the only copy left: it must have every acknowledged
    message.
    """
    master, slave = target.copies(group)
    target.cluster.service(slave.hostname).signal(signal.SIGSTOP)
    target.pause(0.3, 1.5)
    target.cluster.end(master.hostname, slave.hostname)
    if exchange(target, master, slave):
        shutil.rmtree(target.cluster.data(master))
    target.cluster.begin(slave.hostname, master.hostname)


def _put_master_back(target: Target, group: str) -> None:
    _put_back(target, target.copies(group)[0])


def _put_slave_back(target: Target, group: str) -> None:
    _put_back(target, target.copies(group)[1])


def _put_back(target: Target, broker: BrokerPlan) -> None:
    """Restore a disk to its state of some seconds ago, like an old snapshot of a virtual machine, or a lost flush."""
    data = target.cluster.data(broker)
    earlier = data.with_name("data.earlier")
    target.cluster.end(broker.hostname)
    shutil.copytree(data, earlier)
    target.cluster.begin(broker.hostname)
    target.cluster.wait_writable(broker.group)
    target.pause(1.0, 4.0)
    target.cluster.end(broker.hostname)
    shutil.rmtree(data)
    earlier.rename(data)
    target.cluster.begin(broker.hostname)


def _fill_disk(target: Target, group: str) -> None:
    """Move one copy to a small disk, fill that disk, and free it again."""
    broker = target.any_copy(group)
    data = target.cluster.data(broker)
    target.cluster.end(broker.hostname)
    with _small_disk(data):
        target.cluster.begin(broker.hostname)
        target.cluster.wait_writable(group)
        filler = fill(data)
        target.pause(1.0, 4.0)
        filler.unlink()
        target.cluster.wait_writable(group)
        target.cluster.end(broker.hostname)
    target.cluster.begin(broker.hostname)


@contextmanager
def _small_disk(data: Path) -> Iterator[None]:
    """Mount a small file system at a data directory, with its files; afterwards these are back on the disk."""
    aside = data.with_name("data.aside")
    data.rename(aside)
    data.mkdir()
    size = ROOM_BYTES + sum(path.stat().st_blocks * 512 for path in aside.rglob("*") if path.is_file())
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(data)], check=True)
    try:
        shutil.copytree(aside, data, dirs_exist_ok=True)
        yield
        shutil.rmtree(aside)
        shutil.copytree(data, aside)
    finally:
        subprocess.run(["umount", "--lazy", str(data)], check=True)
        data.rmdir()
        aside.rename(data)


def fill(folder: Path) -> Path:
    """Write a file that takes all free space; return it."""
    filler, piece = folder / "filler", bytes(PIECE_BYTES)
    with filler.open("wb", buffering=0) as file, suppress(OSError):
        while file.write(piece):
            pass
    return filler


def _mounts_missing() -> str:
    return "" if is_inside() else "the run has no mounts of its own"


# Network: packets dropped both ways, one way, at random, or above a rate. The rules of nftables hold on the loopback
# device of the run's own network namespace (`enter_sandbox`): no other program of this machine is affected.


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
    _drop(target, *(f"tcp dport {port} {SLOW_RULE}" for port in _ports(target, group)))


def _ports(target: Target, group: str) -> Sequence[int]:
    master = target.cluster.broker(group, "master")
    return master.serve_port, master.sync_port


def _drop(target: Target, *rules: str) -> None:
    """Apply rules for some seconds: sometimes for longer than a lease and every timeout of a connection."""
    chain = "\n".join(("type filter hook input priority 0;", *rules))
    _nft(f"table {NFT_TABLE} {{\nchain input {{\n{chain}\n}}\n}}")
    try:
        target.pause(0.5, 8.0)
    finally:
        _nft(f"delete table {NFT_TABLE}")


def _nft(commands: str) -> None:
    subprocess.run(["nft", "-f", "-"], input=commands, text=True, check=True)


def _network_missing() -> str:
    if not is_inside():
        return "the run has no network namespace of its own"
    return "" if shutil.which("nft") else "nft is not installed (Debian: apt-get install nftables)"


# Clocks: one machine is wrong by minutes, a day, a year; ahead or behind.


def _wrong_clock(target: Target, group: str) -> None:
    """Restart a copy with a wrong clock and, some seconds later, with the right one. The clock's rate stays right."""
    broker = target.any_copy(group)
    service = target.cluster.service(broker.hostname)
    target.cluster.end(broker.hostname)
    service.environ = {
        "LD_PRELOAD": str(_library()),
        "FAKETIME": target.rng.choice(CLOCK_STEPS),
        "DONT_FAKE_MONOTONIC": "1",
    }
    target.cluster.begin(broker.hostname)
    target.pause(2.0, 8.0)
    target.cluster.end(broker.hostname)
    service.environ = {}
    target.cluster.begin(broker.hostname)


@cache
def _library() -> Path | None:
    return next((path for root in ("/usr/lib", "/usr/lib64") for path in Path(root).glob(f"*/{CLOCK_LIBRARY}")), None)


def _clock_missing() -> str:
    return "" if _library() else "libfaketime is not installed (Debian: apt-get install faketime)"


STRIKES: dict[str, Strike] = {
    "kill master": Strike(_kill_master),
    "kill slave": Strike(_kill_slave),
    "kill both": Strike(_kill_both),
    "kill again while it starts": Strike(_kill_while_starting),
    "kill in any order": Strike(_kill_in_any_order),
    "kill metaserver": Strike(_kill_metaserver),
    "kill metaserver and a broker": Strike(_kill_metaserver_and_broker),
    "stop master": Strike(_stop_master),
    "stop slave": Strike(_stop_slave),
    "swap roles": Strike(_swap_roles),
    "kill during a swap": Strike(_kill_during_swap),
    "replace broker": Strike(_replace_broker),
    "mark readonly": Strike(_mark_readonly),
    "lose the master's disk": Strike(_lose_master_disk),
    "wipe slave": Strike(_wipe_slave),
    "put the master's disk back": Strike(_put_master_back),
    "put the slave's disk back": Strike(_put_slave_back),
    "fill a disk": Strike(_fill_disk, _mounts_missing),
    "cut the copies apart": Strike(_cut_copies, _network_missing),
    "cut the copies in one direction": Strike(_cut_one_way, _network_missing),
    "cut clients off": Strike(_cut_clients, _network_missing),
    "cut the metaserver off": Strike(_cut_metaserver, _network_missing),
    "lose packets": Strike(_lose_packets, _network_missing),
    "slow link": Strike(_slow_link, _network_missing),
    "wrong clock": Strike(_wrong_clock, _clock_missing),
}
