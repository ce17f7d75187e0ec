"""Shell. Disks are lost, emptied, put back as they were some time ago, or full."""

from __future__ import annotations

import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from qmq.deploy.chaos.faults.operators import exchange
from qmq.deploy.chaos.sandbox import is_inside
from qmq.deploy.chaos.target import Strike, Target
from qmq.deploy.plan import BrokerPlan

ROOM_BYTES = 64 << 20
"""Free space of a small disk. A broker takes no messages while less than half of it is free."""
PIECE_BYTES = 1 << 20


def _wipe_slave(target: Target, group: str) -> None:
    _, slave = target.copies(group)
    target.cluster.end(slave.hostname)
    shutil.rmtree(target.cluster.data(slave))
    target.pause(0, 0.5)
    target.cluster.begin(slave.hostname)


def _lose_master_disk(target: Target, group: str) -> None:
    """The slave, stopped until then, is the only copy left: it must hold every acknowledged message."""
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
    """A disk comes back as it was some seconds ago: an old snapshot of a virtual machine, a flush that was none."""
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
    """One copy moves to a small disk, which something else fills; then there is room again."""
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
    """Write a file that takes all that is free; return it."""
    filler, piece = folder / "filler", bytes(PIECE_BYTES)
    with filler.open("wb", buffering=0) as file, suppress(OSError):
        while file.write(piece):
            pass
    return filler


def _missing() -> str:
    return "" if is_inside() else "the run has no mounts of its own"


STRIKES = {
    "lose the master's disk": Strike(_lose_master_disk),
    "wipe slave": Strike(_wipe_slave),
    "put the master's disk back": Strike(_put_master_back),
    "put the slave's disk back": Strike(_put_slave_back),
    "fill a disk": Strike(_fill_disk, _missing),
}
