"""Machines, each with one shipped process, a server or an application, that is restarted when it ends."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from random import Random
from types import ModuleType
from typing import TYPE_CHECKING, Any
from unittest import mock

from qmq.broker import main as broker_main
from qmq.broker.settings import BrokerSettings
from qmq.delayserver import main as delay_main
from qmq.delayserver.settings import DelaySettings
from qmq.errors import DiskFailed
from qmq.log import MessageLog, RealDisk
from qmq.metaserver.main import Metaserver
from qmq.metaserver.settings import MetaserverSettings
from qmq.replication.identity import IdentityFile
from qmq.replication.node import Node
from qmq.replication.settings import CopySettings
from qmq.server import running
from qmq.server.running import Tasks
from qmq.server.service import Service
from qmq.watchdog import main as watchdog_main
from qmq.watchdog.settings import WatchdogSettings
from tests.simulation.disk import Medium, SimulatedSystem
from tests.simulation.loop import Killed, Process, current
from tests.simulation.shells.stand_ins import GRPC_PORT, HTTP_PORT

if TYPE_CHECKING:
    from tests.simulation.shells.applications import Program
    from tests.simulation.shells.world import World

CLUSTER_TOKEN = "token of the cluster"
METASERVERS = "10.0.0.9"
"""Address in front of all metaservers."""
URL = f"http://{METASERVERS}:{HTTP_PORT}"
SERVE_PORT, SYNC_PORT, CONTROL_PORT = 20881, 20882, 20883
ROOT = "/data"
PASSWORD_KEY = "0" * 43 + "="


def stopped_by_sigterm() -> asyncio.Event:
    """Return an event that SIGTERM to the simulated process sets."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    return stop


class MachineSystem(SimulatedSystem):
    """File system below the disk of a copy: calls take time, and any call may be the process's last."""

    def __init__(self, rng: Random) -> None:
        super().__init__(rng)
        self.kill_at: int | None = None
        self.kills = 0
        self.sync_s = 0.0001
        self._had: list[bytes] = []
        """Files of the log each time before the disk lost something."""

    def heal(self) -> None:
        super().heal()
        self.kill_at = None

    def may(self, call: str, path: str, fd: int = -1) -> None:
        process = current()
        if process is not None and process.is_dead:
            raise Killed
        super().may(call, path, fd)
        if process is not None and self.kill_at is not None and self.calls >= self.kill_at:
            self.kill_at = None
            self.kills += 1
            process.kill()
            raise Killed

    def fdatasync(self, fd: int) -> None:
        super().fdatasync(fd)
        if (process := current()) is not None:
            process.spent_s += self.sync_s

    def has_durable(self, what: bytes) -> bool:
        """Whether some file of the log would have these bytes after a power cut."""
        return any(what in durable for durable in self._durable_logs())

    def _durable_logs(self) -> list[bytearray]:
        files = [file for path, file in self._durable.items() if path.startswith(f"{ROOT}/log/") and file]
        return [file.durable for file in reversed(files)]

    def loses(self) -> None:
        """Remember the disk's bytes, durable or reported so, before it loses some."""
        self._had.extend(map(bytes, self._durable_logs()))

    def has_lost(self, what: bytes) -> bool:
        """Whether these bytes were on the disk before it lost something."""
        return any(what in data for data in self._had)

    def crash(self, rng: Random | None = None) -> None:
        if self._lied:
            self.loses()
        super().crash(rng)


class Machine:
    """Machine, which outlives its processes.

    Args:
        work: makes the coroutine of a process.
    """

    def __init__(self, world: World, name: str, ip: str) -> None:
        self.world = world
        self.name = name
        self.ip = ip
        self.process: Process | None = None
        self.clock_s = 0.0
        self.is_off = False
        self.thread_s = (0.0001, 0.003)
        self.starts = 0

    async def work(self) -> None:
        raise NotImplementedError

    @property
    def is_running(self) -> bool:
        return self.process is not None and not self.process.is_dead

    def start(self) -> None:
        if self.is_running or self.is_off:
            return
        self.starts += 1
        process = self.process = Process(self.world.loop, self.name, self.ip)
        process.clock_s, process.thread_s = self.clock_s, self.thread_s
        process.ended.append(self._ended)
        process.start(self._run(process))
        self.world.note(f"{self.name} starts")

    async def _run(self, process: Process) -> None:
        """Run the process and restart it however it ends, as a service manager does."""
        try:
            await self.work()
            text = "ends"
        except Exception as error:
            text = f"ends: {type(error).__name__}: {error}"
        self.world.note(f"{self.name} {text}")
        process.kill()

    def _ended(self) -> None:
        reason = self.process.reason if self.process is not None else None
        self.world.note(f"{self.name} is gone {reason or ''}")
        if isinstance(reason, DiskFailed):
            self.world.counts["ended by its disk"] += 1
        elif reason is not None:
            self.world.fail(f"I15: {self.name} ended by {reason!r}")
        self.world.later(0.2, 3.0, self.start)

    def lose_power(self) -> None:
        self.world.network.power_off(self.ip)
        self.is_off = True
        self.world.network.off.add(self.ip)
        if self.process is not None:
            self.process.kill()
        self.world.later(0.5, 8.0, self._power_returns)

    def _power_returns(self) -> None:
        self.is_off = False
        self.world.network.off.discard(self.ip)
        self.start()

    def terminate(self) -> None:
        """Send SIGTERM."""
        if self.process is not None and (handler := self.process.signals.get(signal.SIGTERM)) is not None:
            self.world.loop.call_soon(handler, context=self.process.context)

    def step_clock(self, by_s: float) -> None:
        self.clock_s += by_s
        if self.process is not None:
            self.process.clock_s = self.clock_s


class CopyMachine(Machine):
    """Machine with one copy of a group's log."""

    main: ModuleType

    def __init__(self, world: World, name: str, ip: str) -> None:
        super().__init__(world, name, ip)
        self.system = MachineSystem(Random(world.loop.rng.random()))
        self.medium = Medium(self.system)
        self.message_log: MessageLog | None = None
        self.node: Node[Any] | None = None
        """Node of the newest process."""

    def disk(self, root: Path, *, cached_bytes: int | None = None) -> RealDisk:
        return RealDisk(root, cached_bytes=cached_bytes, system=self.system)

    async def work(self) -> None:
        await running.serve(self.settings, self._build, self.name, stopped_by_sigterm())

    @property
    def settings(self) -> CopySettings:
        raise NotImplementedError

    @property
    def _words(self) -> dict[str, Any]:
        """Return the settings that brokers and delay servers share."""
        return {
            "hostname": self.name,
            "ip": self.ip,
            "data": Path(ROOT),
            "metaserver": URL,
            "token": CLUSTER_TOKEN,
            "segment_bytes": self.world.swarm.segment_bytes,
            "tail_bytes": self.world.swarm.tail_bytes,
            "serve_port": SERVE_PORT,
            "sync_port": SYNC_PORT,
            "control_port": CONTROL_PORT,
        }

    def _build(self, settings: Any, message_log: MessageLog, disk: RealDisk, identity: IdentityFile) -> Tasks:
        self.message_log = message_log
        with mock.patch.object(self.main, "Service", self._new_service):
            tasks: Tasks = self.main._build(settings, message_log, disk, identity)
        return tasks

    def _new_service(self, **words: Any) -> Service[Any]:
        service = Service[Any](**words)
        self.node = service.node
        return service

    @property
    def is_writable(self) -> bool:
        return self.node is not None and self.node.writable

    def disk_is_well(self) -> None:
        self.thread_s, self.system.sync_s = (0.0001, 0.003), 0.0001
        if self.process is not None:
            self.process.thread_s = self.thread_s

    def lose_power(self) -> None:
        super().lose_power()
        self.system.crash(self.world.loop.rng)
        self.system.heal()

    def replace_disk(self) -> None:
        """Replace the disk by an empty one. Its former bytes count for nothing any more."""
        self.lose_power()
        self.medium.wipe()

    @property
    def is_whole(self) -> bool:
        """Whether it runs, and is undamaged or whole again."""
        return (
            self.is_running
            and self.message_log is not None
            and self.message_log.damage is None
            and not self.medium.flipped
            and not self.system.is_lying
        )

    def describe(self) -> str:
        message_log = self.message_log
        if not self.is_running or message_log is None:
            return f"{self.name} does not run"
        return f"{self.name} end={message_log.end} chain={message_log.chain:x} damage={message_log.damage}"


class BrokerMachine(CopyMachine):
    main = broker_main

    @property
    def settings(self) -> BrokerSettings:
        return BrokerSettings(**self._words, lease_ms=5000)


class DelayMachine(CopyMachine):
    main = delay_main

    @property
    def settings(self) -> DelaySettings:
        return DelaySettings(**self._words)


class MetaserverMachine(Machine):
    """Machine of a metaserver. The database outlives all machines."""

    def __init__(self, world: World, name: str, ip: str, folder: Path) -> None:
        super().__init__(world, name, ip)
        self._folder = folder
        self.metaserver: Metaserver | None = None
        self.is_serving = asyncio.Event()

    async def work(self) -> None:
        settings = MetaserverSettings(
            host=self.ip,
            http_port=HTTP_PORT,
            grpc_port=GRPC_PORT,
            database=f"sqlite:///{self._folder}/metaserver.db",
            snapshot=f"{self._folder}/{self.name}.snapshot",
            cluster_token=CLUSTER_TOKEN,
            password_keys=(PASSWORD_KEY,),
            failover=self.world.swarm.fails_over,
            **({"groups_per_subject_min": 1, "groups_per_subject_new": 1} if self.world.swarm.joins else {}),
        )
        self.metaserver = Metaserver(settings)
        await self.metaserver.serve(stopped_by_sigterm(), self.is_serving)


class WatchdogMachine(Machine):
    """Machine without a disk: its state is in the applications' databases and in its lease."""

    async def work(self) -> None:
        settings = WatchdogSettings(metaserver=URL, token=CLUSTER_TOKEN, refresh_ms=1000)
        await watchdog_main.serve(settings, stopped_by_sigterm())


class Application(Machine):
    """Machine with a user's program."""

    def __init__(self, world: World, name: str, ip: str, program: type[Program]) -> None:
        super().__init__(world, name, ip)
        self._program = program

    async def work(self) -> None:
        await self._program(self.world, self).run()
