"""Machine with a disk, and the broker processes that run on it one after the other.

`Process` does the work of qmq.server.service around the core, with events instead of sockets, threads and timers.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qmq.broker.answers import Counters
from qmq.broker.master import BrokerMaster
from qmq.broker.retention import Retention
from qmq.broker.settings import BrokerSettings
from qmq.codec import Buffer
from qmq.errors import (
    BrokenInvariant,
    CorruptFrame,
    DiskFailed,
    ErrorCode,
    LogError,
    OperatorError,
    QmqError,
    from_code,
)
from qmq.log import Commit
from qmq.log.fold import State, apply
from qmq.log.frame import decode_frames
from qmq.log.recovery import recover
from qmq.log.segments import read_raw
from qmq.remoting.commands import Command, decode_produced
from qmq.remoting.packet import Packet
from qmq.replication.assignment import Assignment
from qmq.replication.clocks import MASTER, SLAVE
from qmq.replication.copy_repair import Sources
from qmq.replication.identity import IdentityFile, Point
from qmq.replication.node import Node
from qmq.replication.retention import HOUR_MS, Keeper
from qmq.types import NO_EPOCH
from tests.simulation.cores.network import End
from tests.simulation.cores.watched_log import WatchedLog, frame_on_disk
from tests.simulation.disk import SimulatedDisk
from tests.simulation.events import Violation

if TYPE_CHECKING:
    from tests.simulation.cores.world import World


@dataclass(frozen=True)
class Limits:
    """Sizes and times of a seed, small so that every limit is met."""

    segment_bytes: int
    tail_bytes: int
    window_bytes: int
    message_bytes_max: int
    lease_ms: int
    slave_wait_ms: int
    slave_lag_bytes_max: int
    slave_lag_ms_max: int
    catch_up_bytes_per_s: int
    sync_ms: float
    retention_ms: int

    def of_copy(self, name: str) -> dict[str, Any]:
        """Return the settings that brokers and delay servers share."""
        limits = asdict(self)
        del limits["lease_ms"], limits["sync_ms"]
        retention_hours = limits.pop("retention_ms") / HOUR_MS
        known = {"hostname": name, "data": Path(name), "token": "t", "clock_difference_ms_max": 500}
        return known | limits | {"retention_hours": retention_hours}


class Machine:
    """Machine, which outlives its processes.

    Args:
        broker: name of the broker on it; by default the machine's own.
    """

    def __init__(self, world: World, name: str, broker: str = "") -> None:
        self.world = world
        self.name = name
        self.broker = broker or name
        self.disk = SimulatedDisk(world.events.rng)
        self.process: Process | None = None
        self.wall_skew_ms = 0
        self.lives = 0
        self.is_put_back = False
        """Whether its disk lost fsynced bytes and has not got all of them again."""
        self.was_put_back = False
        self.had_end = 0
        """Log end at its last crash, while it is put back: its confirmations may still be on the way."""
        self._last_end = 0
        self.forgot = NO_EPOCH
        """Newest epoch of its disk when it was put back: it may use epochs up to there again."""
        self.stays_down = False

    def bases(self) -> list[int]:
        return self.disk.bases()

    def has_frame(self, offset: int, chain: int) -> bool:
        """Whether its log holds this frame; while it is down, whether its disk does."""
        if self.process is None:
            frame = frame_on_disk(self.disk, self.bases(), offset)
        else:
            log = self.process.log
            frame = log.frame_at(offset) if offset < log.end else None
        return frame is not None and frame.chain == chain

    def start(self) -> None:
        """Start a process, which may end at once."""
        events = self.world.events
        if self.process is not None or self.stays_down:
            return
        self.lives += 1
        if events.chance(self.world.swarm.crash_in_recovery):
            events.count("crash in recovery")
            self.disk.fail_after(events.rng.randint(1, 20))
        else:
            self.disk.heal()
        if events.chance(0.3):
            self._check_recovery()
        try:
            self.disk.reopen()
            self.process = self.make_process()
        except DiskFailed:
            events.note(f"{self.name} dies in recovery")
            self.disk.heal()
            self._lose_unsynced()
            self.start_later()
        else:
            self.process.begin()

    def make_process(self) -> Process:
        return Process(self)

    def start_later(self) -> None:
        if not self.stays_down:
            self.world.events.between(*self.world.swarm.down_ms, self.start)

    def die(self, why: str, *, power: bool = False) -> None:
        """End the process; without power, the disk loses unsynced bytes."""
        process, events = self.process, self.world.events
        if process is None:
            return
        events.note(f"{self.name} dies: {why}")
        process.is_alive = False
        self.process = None
        self._last_end = process.log.flushed_end
        self.world.network.host_died(self.name, power=power)
        if power and process.performing is not None and events.chance(0.7):
            self._die_while_writing(process)
        self.disk.heal()
        self.disk.close()
        if power:
            self._lose_unsynced()
        self.start_later()

    def _die_while_writing(self, process: Process) -> None:
        """Cut the power between two calls of a commit."""
        self.disk.heal()
        self.disk.fail_after(self.world.events.rng.randint(1, 25))
        try:
            process.log.perform(process.performing)
        except DiskFailed:
            self.world.events.count("crash within a commit")

    def _lose_unsynced(self) -> None:
        if not self.world.metaserver.may_forget(self.name):
            self.disk.system.keep_lied_bytes()
        self.disk.crash(self.world.events.rng if self.world.events.chance(0.8) else None)
        if self.disk.system.forgot_synced:
            self.forgot_what_it_had()

    def forgot_what_it_had(self) -> None:
        """Note that the disk lost fsynced bytes."""
        self.is_put_back = self.was_put_back = True
        self.had_end = self._last_end

    def _check_recovery(self) -> None:
        """Check that recovering twice equals recovering once, and both equal folding every frame (I17)."""
        image = self.disk.copy()
        once = recover(image)
        state = deepcopy(once.state)
        again = recover(image)
        if (again.state, again.bases, again.damage) != (state, once.bases, once.damage) or again.torn_bytes < 0:
            raise Violation(f"I17: recovering the log of {self.name} a second time gives something else")
        if once.damage is not None or not once.bases or once.bases[0] != 0 or self.disk.flipped:
            return
        fold = State()
        for frame, body in decode_frames(read_raw(image, once.bases, 0, state.end), 0, 0):
            apply(fold, frame, body)
        if fold != state:
            raise Violation(f"I17: the state of {self.name} is not the fold of its log")
        self.world.events.count("recovery compared")


class Doze:
    """Pause of a timer while no work is due, as in `qmq.server.service.Service.repeat`."""

    def __init__(self, process: Process, quiet_ms: Callable[[], int]) -> None:
        self._process = process
        self._quiet_ms = quiet_ms
        self._until_ms = 0
        self._stirs = 0

    def begin(self) -> None:
        self._until_ms = self._process.monotonic_ms() + self._quiet_ms()
        self._stirs = self._process.stirs

    def lasts(self) -> bool:
        is_over = self._process.stirs != self._stirs or self._process.monotonic_ms() >= self._until_ms
        return not is_over and self._quiet_ms() > 0  # a pass may have left work


class Process:
    """One process of a broker: the core's Host, and the owner of its connections."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.world = machine.world
        self.name = machine.name
        self.broker = machine.broker
        self._events = machine.world.events
        self.is_alive = True
        self.performing: Commit | None = None
        self.seen_master: BrokerMaster | None = None
        self.seen_high = 0
        self.received_points: list[Point] = []
        """Acknowledged points that the metaserver sent."""
        self._sources = Sources()
        self._pass_is_due = False
        self._master_link: End | None = None
        self._connecting = 0
        self.stirs = 0
        """Number of events so far."""
        self._tick_doze = Doze(self, lambda: self.node.quiet_ms())
        self._build()
        if self.log.torn_bytes:
            self._events.count("torn tail")
        if self.log.damage is not None:
            self._events.count("damage found in recovery")

    def _build(self) -> None:
        """Make the log, the node and the keeper."""
        identity, self.log = self._identity(), self._watched_log()
        limits = self.world.swarm.limits
        settings = BrokerSettings(**limits.of_copy(self.broker), serve_port=1, lease_ms=limits.lease_ms)
        self.keeper: Keeper = Retention(settings)
        self.node = Node(
            message_log=self.log,
            host=self,
            identity=identity,
            settings=settings,
            promote=partial(BrokerMaster, settings=settings, counters=Counters()),
        )

    def _identity(self) -> IdentityFile:
        machine = self.machine
        return IdentityFile(machine.disk, new_incarnation=f"{machine.name}{machine.lives}", instance=machine.name)

    def _watched_log(self) -> WatchedLog:
        limits = self.world.swarm.limits
        return WatchedLog(
            self.machine.disk,
            owner=self.name,
            oracle=self.world.oracle,
            segment_bytes=limits.segment_bytes,
            tail_bytes=limits.tail_bytes,
        )

    def begin(self) -> None:
        self._events.note(f"{self.name} starts end={self.log.end} torn={self.log.torn_bytes} damage={self.log.damage}")
        self._every(90, 110, self._tick)
        self._every(200, 500, self._poll_metaserver)
        self._every(200, 600, self._keep_whole)
        self._every(500, 1500, self._drop_old_segments)
        self._after(self.world.swarm.lonely_start_ms, self._start_alone)

    def _after(self, ms: float, call: Callable[[], None]) -> None:
        self._events.after(ms, lambda: call() if self.is_alive else None)

    def _every(self, low_ms: float, high_ms: float, call: Callable[[], None]) -> None:
        def again() -> None:
            if self.is_alive:
                call()
                self._events.between(low_ms, high_ms, again)

        self._events.between(low_ms, high_ms, again)

    def guarded(self, call: Callable[[], Any]) -> None:
        """Run a call into the core that reports an event."""
        self.stirs += 1
        self.run_guarded(call)

    def run_guarded(self, call: Callable[[], Any]) -> None:
        """Run a call into the core; end the process if the call's error must end it."""
        if not self.is_alive:
            return
        try:
            call()
        except DiskFailed as error:
            self._events.count("disk refused")
            self.machine.die(str(error), power=self._events.chance(0.5))
        except BrokenInvariant as error:
            raise Violation(f"BrokenInvariant at {self.name}: {error}") from error
        else:
            self.world.oracle.check_process(self)
            if self.world.watch is not None:
                self.world.watch(self)

    # qmq.replication.ports.Host.

    def now_ms(self) -> int:
        return 1_700_000_000_000 + self._events.now_ms + self.machine.wall_skew_ms

    def monotonic_ms(self) -> int:
        return self._events.now_ms

    def pass_soon(self) -> None:
        if not self._pass_is_due:
            self._pass_is_due = True
            self._after(0.05, self._turn)

    def _turn(self) -> None:
        self._pass_is_due = False
        self.run_guarded(self.node.end_of_pass)

    def commit(self, commit: Commit) -> None:
        self.performing = commit
        self._after(self._disk_ms() * self._events.rng.random(), partial(self._perform, commit))

    def _disk_ms(self) -> float:
        slow = 100 if self._events.chance(self.world.swarm.slow_sync) else 1
        return self.world.swarm.limits.sync_ms * slow

    def _perform(self, commit: Commit) -> None:
        self.performing = None  # a commit that fails here has done its work: a crash does not repeat it
        self.guarded(lambda: self.log.perform(commit))
        if self.is_alive:
            self._after(self._disk_ms() * self._events.rng.random(), lambda: self._committed(commit))

    def _committed(self, commit: Commit) -> None:
        self.guarded(lambda: self.node.committed(commit))

    def read(self, job: Callable[[], Any], done: Callable[[Any | LogError], None]) -> None:
        def run() -> None:
            try:
                result = job()
            except LogError as error:
                result = error
            self._after(self._disk_ms() * self._events.rng.random(), lambda: self.guarded(lambda: done(result)))

        self._after(self._disk_ms() * self._events.rng.random(), run)

    def write(self, job: Callable[[], Any], done: Callable[[Any | LogError], None]) -> None:
        self.read(job, done)

    def hello(self, body: bytes) -> None:
        link = self._master_link
        if link is None:
            return

        def answered(packet: Packet) -> None:
            answer: memoryview | QmqError = packet.body
            if packet.code != ErrorCode.SUCCESS:
                answer = from_code(packet.code, str(packet.body, "utf-8", "replace"))
                self._events.count(f"hello refused {packet.code}")
            self._events.note(f"{self.name} hello answered {packet.code} {bytes(packet.body)[:150]!r}")
            self.guarded(lambda: self.node.agreed(link, answer))

        self._events.note(f"{self.name} sends hello on {link} end={self.log.end}")
        link.request(Command.HELLO, body, then=answered)

    def role_changed(self) -> None:
        self._events.note(f"{self.name} is {self.describe()}")
        self._connecting += 1
        self._after(0, partial(self._follow, self._connecting))

    def describe(self) -> str:
        node = self.node
        if node.master is not None:
            master = node.master
            return (
                f"master {master.epoch} begun={master.has_begun} end={self.log.end} high={master.gate.high_watermark} "
                f"alone={master.gate.too_few_in_sync} readonly={master.readonly.reasons}"
            )
        known = node.identity.value.epoch
        return f"{type(node.role).__name__} end={self.log.end} epoch={known} damage={self.log.damage}"

    # The slave's connection.

    def _follow(self, attempt: int) -> None:
        if attempt != self._connecting:
            return
        if self._master_link is not None:
            self._master_link.close("the roles changed")
            self._master_link = None
        assignment = self.node.assignment
        if self.node.slave is None or assignment is None or assignment.master is None or self.node.changes.is_held:
            return

        def connected(link: End | None) -> None:
            if not self.is_alive or attempt != self._connecting:
                if link is not None:
                    link.close("too late")
            elif link is None:
                self._events.between(20, 300, lambda: self._follow(attempt) if self.is_alive else None)
            elif self.node.slave is not None:
                self._master_link = link
                slave = self.node.slave
                self.guarded(lambda: slave.connected(link))

        self.world.network.connect(self, assignment.master.ip, connected)

    # tests.simulation.cores.network.Owner.

    def packet_received(self, link: End, packet: Packet) -> None:
        if packet.code not in _QUIET:
            self._events.note(f"{self.name} {link} gets {packet.code} {packet.opaque} {len(packet.body)}")
        self.guarded(lambda: self.node.packet_received(link, packet))

    def link_lost(self, link: End) -> None:
        self._events.note(f"{self.name} loses {link}")
        self.guarded(lambda: self.node.link_lost(link))
        if link is self._master_link and self.is_alive:
            self._master_link = None
            attempt = self._connecting
            self._events.between(20, 300, lambda: self._follow(attempt) if self.is_alive else None)

    def writable_again(self, link: End) -> None:
        self.guarded(lambda: self.node.writable_again(link))

    def on_answer(self, packet: Packet, code: int, parts: tuple[Buffer, ...]) -> None:
        """Report an answer to the oracle."""
        if packet.code == Command.PRODUCE and code == ErrorCode.SUCCESS:
            produced = decode_produced(memoryview(b"".join(parts)))
            master = self.node.master
            if produced.stored and master is not None:
                self.world.oracle.acks(self, master.epoch, produced)

    # Timers.

    def _tick(self) -> None:
        if not self._tick_doze.lasts():
            self.run_guarded(self.node.tick)
            self._tick_doze.begin()

    def _start_alone(self) -> None:
        if self.node.assignment is None:
            self.guarded(lambda: self._count_if(self.node.start_without_metaserver(), "start without metaserver"))

    def _count_if(self, happened: bool, what: str) -> None:
        if happened:
            self._events.count(what)

    def _poll_metaserver(self) -> None:
        self.world.metaserver.poll(self)

    def assign(self, assignment: Assignment) -> None:
        """Deliver an assignment."""
        try:
            self.guarded(lambda: self.node.assign(assignment))
        except OperatorError as error:
            raise Violation(f"I13: {self.name} got an illegal assignment: {error}") from error

    def _keep_whole(self) -> None:
        """Repair damage as qmq.server.repair does."""
        damage = self.log.damage
        assignment = self.node.assignment
        if damage is None or assignment is None or not assignment.peers:
            return
        peers = [self.world.machine(peer.ip).process for peer in assignment.peers]
        reached = [peer if peer and self.world.network.is_through(self.name, peer.name) else None for peer in peers]
        extents = [(peer.log.start, peer.log.flushed_end) if peer else None for peer in reached]
        best = self._sources.best(damage, extents)
        other = reached[best] if best is not None else None
        if other is None:
            return
        wanted: list[tuple[int, int] | None] = []
        self.guarded(lambda: wanted.append(self.node.repairs.plan(other.log.start, other.log.flushed_end)))
        if not wanted or wanted[0] is None:
            if self.is_alive and self.log.damage is None:
                self._events.count("repaired without the other copy's bytes")
                self._events.note(f"{self.name} repaired {damage}")
            return
        begin, end = wanted[0]
        found = other.log.stored.next_frame(max(begin, other.log.start))
        at, data = found, b""
        try:
            while at is not None and at < min(end, other.log.flushed_end):
                data += other.log.stored.read(at, other.log.flushed_end, 1 << 20).data
                at = (found or 0) + len(data)
        except CorruptFrame:
            return
        first = end if found is None or not data else found
        self._after(self.world.network.delay_ms(self.name, other.name), lambda: self._repair(damage, first, data))

    def _repair(self, damage: object, begin: int, data: bytes) -> None:
        if self.log.damage is not damage:
            return
        try:
            self.guarded(lambda: self.node.repairs.apply(begin, data))
        except LogError as error:
            self._events.note(f"{self.name} cannot repair: {error}")
            self._events.count("repair refused")
        else:
            if self.is_alive and self.log.damage is not damage:
                self._events.note(f"{self.name} repaired {damage}")
                self._events.count("repaired")

    def _drop_old_segments(self) -> None:
        """Delete old segments as qmq.server.service does."""
        try:
            self.guarded(self._drop)
        except CorruptFrame as problem:
            self._events.count("damage found by retention")
            self.guarded(partial(self.node.found_damage, problem))

    def _drop(self) -> None:
        self._read_clocks()
        before = self.log.state.kept.start
        self.node.decide_retention(self.keeper)
        if self.log.state.kept.start > before:
            self._events.count("deletion decided")
            self.world.oracle.decided(self.log, self.world.swarm.limits.retention_ms)
        while self.is_alive and self.node.oldest_may_go(self.keeper, ()):
            self._events.count("segment dropped")
            self.world.oracle.deleting(self.log)
            self.log.drop_oldest_segment()
            self.pass_soon()

    def _read_clocks(self) -> None:
        """Deliver the readings of the metaserver's and the peers' clocks, as heartbeats do each second."""
        self.node.record_metaserver_clock(1_700_000_000_000 + self._events.now_ms)
        for peer in self.node.assignment.peers if self.node.assignment is not None else ():
            other = self.world.machine(peer.ip).process
            if other is not None and self.world.network.is_through(self.name, other.name):
                several = self.world.copies > 2
                slave = f"{SLAVE} {other.node.identity.value.owner}" if several else SLAVE
                whose = slave if self.node.master is not None else MASTER
                self.node.clocks.record(whose, other.now_ms(), monotonic_ms=self.monotonic_ms())


_QUIET = frozenset({Command.CONFIRM, Command.PULL, Command.HEARTBEAT})
