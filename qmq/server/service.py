"""Shell. Process around a broker's core: sockets, threads of the disk, timers. It holds no rule of the protocol.

One event loop owns all state. Fast fsyncs run on it, in the pass after packets have left: the slave works meanwhile,
and a lone message saves two thread hops (measured: 0.09 ms of 0.25). Slow fsyncs run on one thread: while it waits for
the disk, the loop gathers the next commit.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from qmq import descriptors, memory
from qmq.access import token_text
from qmq.errors import (
    AccessError,
    BrokenInvariant,
    CorruptFrame,
    DiskFailed,
    LogError,
    NotServed,
    QmqError,
)
from qmq.log import Commit, MessageLog
from qmq.log.disk import SWEEP_S, RealDisk
from qmq.log.quarantine import QuarantineKeeper
from qmq.message_sizes import SYNC_PACKET_BYTES_MAX
from qmq.remoting.commands import Command
from qmq.remoting.connection import Connection, connect, notice_dead_peers
from qmq.remoting.packet import Packet
from qmq.replication.identity import IdentityFile
from qmq.replication.master import Master, Promotion
from qmq.replication.node import Node
from qmq.replication.retention import Keeper
from qmq.replication.settings import CopySettings
from qmq.server.acceptor import Acceptor, Port
from qmq.server.access import Access
from qmq.server.overload import ConnectionState, DiskWatch, LimitsReached, MemoryAlarm, Shares
from qmq.server.pulse import Pulse
from qmq.server.running import DISK_FLOOR_BYTES, keep_reserve
from qmq.ticking import until_next_second
from qmq.types import Endpoint

if TYPE_CHECKING:
    from qmq.server.scrub import Scrub

log = logging.getLogger(__name__)

M = TypeVar("M", bound=Master)

TICK_S = 0.1
INLINE_COMMIT_BYTES = 64 * 1024
"""A larger commit always goes to the thread, because its writes would block the loop, however fast the fsync is. So
does a commit that begins or deletes a segment, which takes ten fsyncs.
"""
LOGGED_MAX = 1000
LOGGED_CHARS = 500
"""Limits: remembered mistakes of clients, each of which is logged once; characters of a logged mistake."""
RECONNECTS_S = (0.02, 0.05, 0.1, 0.2)
"""Waits of a slave before it reconnects, by attempts since its role changed: the new master of a failover begins some
milliseconds after its slaves, and accepts no message before one of them has matched.
"""
LOST_MS = 2000
"""A slave that receives no packet for this time, at least two beats, reports its master as lost."""
RELEASE_S = 1.0
"""Interval in which free memory is returned to the system while memory is short."""
BLOCKED_READ_MAX = 32
"""Blocked connections read per tick: each request is rejected in the end, and no kernel gives up a connection whose
peer is full.
"""
HOUSE_S, HOUSE_SOON_S = 10.0, 1.0
"""Intervals of retention's checks; the second while the disk is full, or something is to be deleted."""
DELETE_S = 0.1
"""Interval of the checks whether a segment is deleted and the next one may be. Other commits run in between."""

SYNC_COMMANDS = frozenset({Command.HELLO, Command.FRAMES, Command.CONFIRM, Command.SNAPSHOT, Command.BEAT})


class Service(Generic[M]):
    """One process of a group. Made by main; `run` returns when it is cancelled.

    `commands` are the commands of clients; `promote` makes the master of a new mastership; `shelves` are disks in
    folders of their own below `disk`.
    """

    def __init__(
        self,
        *,
        message_log: MessageLog,
        disk: RealDisk,
        identity: IdentityFile,
        settings: CopySettings,
        commands: frozenset[Command],
        promote: Callable[[Promotion], M],
        keeper: Keeper,
        shelves: Sequence[RealDisk] = (),
    ) -> None:
        self._settings = settings
        self._disk = disk
        self._keeper = keeper
        self._shelves = shelves
        self.access = Access(settings)
        self.node = Node(message_log=message_log, host=self, identity=identity, settings=settings, promote=promote)
        self.state_changed = asyncio.Event()
        self.is_registered = False
        """Whether a metaserver serves this process, as reported by its link."""
        self.reader_positions: dict[object, int] = {}
        self.log_holders: set[object] = set()
        """Readers of the whole log in many calls, such as the audit."""
        self.sync_us = 0.0
        self.commits = 0
        self.sync_seconds = 0.0
        self.bounds = descriptors.copy_ports(descriptors.limit(), settings.connections_max)
        self._ports = (
            Port(commands, settings.serve_port, self.bounds.clients),
            Port(SYNC_COMMANDS, settings.sync_port, self.bounds.sync),
        )
        self.acceptors: dict[Acceptor, None] = {}
        """Connections of clients. Of the blocked ones, the one read longest ago comes first."""
        self.memory_alarm = MemoryAlarm(int(settings.memory_limit * memory.ram_bytes()))
        self.memory_bytes = 0
        self.limits = LimitsReached()
        self.stops = dict.fromkeys(ConnectionState, 0)
        """How often connections entered each state."""
        self.shares = Shares[Acceptor]()
        self.scrub: Scrub | None = None
        self.disk_free_limit = max(settings.disk_free_limit, DISK_FLOOR_BYTES)
        self.quarantine = QuarantineKeeper(disk, settings.quarantine_bytes, settings.segment_bytes)
        self._disk_watch = DiskWatch(self.disk_free_limit)
        self._released_at = 0.0
        self._role_changed = asyncio.Event()
        self._pass_is_due = False
        self._loop: asyncio.AbstractEventLoop
        self._disk_thread = ThreadPoolExecutor(1, "disk")
        self._read_threads = ThreadPoolExecutor(4, "read")
        self._master_link: Connection | None = None
        self._master_packet_s = 0.0
        self._last_reported: object = None
        self._logged: set[str] = set()
        self._dozing: list[asyncio.Future[bool]] = []

    @property
    def connections(self) -> int:
        """Open connections of clients and slaves."""
        return sum(port.connections for port in self._ports)

    @property
    def disk_free_bytes(self) -> int:
        return self._disk.free_bytes()

    async def run(self) -> None:
        """Listen and serve."""
        self._loop = asyncio.get_running_loop()
        self._look_at_disk()  # before the first produce
        serve, sync = [await self._listen(port) for port in self._ports]
        async with serve, sync, asyncio.TaskGroup() as tasks:
            tasks.create_task(self.access.run())
            tasks.create_task(self.repeat(self._tick, TICK_S, self._quiet_ms))
            tasks.create_task(self._follow_master())
            tasks.create_task(self._keep_house())
            for disk in (self._disk, *self._shelves):
                tasks.create_task(self._sweep(disk))

    async def _listen(self, port: Port) -> asyncio.Server:
        host = self._settings.listen_on
        hosts = ["0.0.0.0", host] if host == "::" else host  # asyncio's socket for `::` takes no IPv4
        try:
            server = await self._loop.create_server(lambda: self._accept(port), hosts, port.number)
        except OSError as error:
            at = Endpoint(host, port.number)
            raise NotServed(f"cannot listen on {at}: {error}; stop its user, or set another port or bind") from None
        for sock in server.sockets:
            notice_dead_peers(sock)
        return server

    def _accept(self, port: Port) -> Connection:
        acceptor = Acceptor(self, port, self._settings, self.access)
        return acceptor.connection

    def fail(self, error: BaseException) -> None:
        """End the process after a failed disk or a bug, without another packet (I15)."""
        log.critical("process ends as fenced: %s: %s", type(error).__name__, error)
        logging.shutdown()
        os._exit(70)

    def log_once(self, peer: str, error: QmqError) -> None:
        """Log a client's mistake once, because the client may repeat it a thousand times a second."""
        text = str(error)[:LOGGED_CHARS]
        if self._is_news(text):
            log.warning("request refused peer=%s: %s", peer, text)

    def _is_news(self, text: str) -> bool:
        if text in self._logged:
            return False
        if len(self._logged) >= LOGGED_MAX:
            self._logged.clear()
        self._logged.add(text)
        return True

    def limit_reached(self, setting: str, peer: str, text: str, subject: str = "") -> None:
        """Report a setting that stopped or rejected a client, in metrics and in Doctor. The log gets it once per `text`
        and whenever it begins anew. An operator's limit is logged only when it begins anew, because its text counts
        waiting messages and so is always new.
        """
        begins = self.limits.reached(setting, self.monotonic_ms(), subject)
        if (not subject and self._is_news(text)) or begins:
            log.warning("limit reached setting=%s peer=%s: %s", setting, peer, text)

    def guarded(self, call: Callable[[], None]) -> None:
        """Wake sleeping tasks and call the core: see `_run_guarded`."""
        self._stir()
        self._run_guarded(call)

    def _run_guarded(self, call: Callable[[], None]) -> None:
        """Call the core. Fatal and unexpected errors end the process, because no process is better than one that does
        half of its work. Other QmqErrors pass to the caller.
        """
        try:
            call()
        except (DiskFailed, BrokenInvariant) as error:
            self.fail(error)
        except QmqError:
            raise
        except Exception as error:
            self.fail(error)

    def packet_received(self, connection: Connection, packet: Packet) -> None:
        """Pass a packet to the core. An unexpected error that cannot harm the log costs the sender its connection
        only.
        """
        self._stir()
        try:
            self.node.packet_received(connection, packet)
        except (DiskFailed, BrokenInvariant) as error:
            self.fail(error)
        except Exception:
            log.exception("packet not understood peer=%s code=%d", connection.peer, packet.code)
            connection.close("the broker failed on this packet")

    # The core's Host.

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def monotonic_ms(self) -> int:
        return time.monotonic_ns() // 1_000_000

    def pass_soon(self) -> None:
        if not self._pass_is_due:
            self._pass_is_due = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._pass_is_due = False
        try:
            self.node.end_of_pass()
        except Exception as error:  # a pass that breaks off would never write its commit, nor any later one
            self.fail(error)

    def commit(self, commit: Commit) -> None:
        if _is_small(commit) and 0 < self.sync_us < self._settings.inline_sync_us_max:
            self._loop.call_soon(self._commit_inline, commit)
        else:
            self._disk_thread.submit(self._commit_on_thread, commit)

    def _commit_inline(self, commit: Commit) -> None:
        def call() -> None:
            self._perform(commit)
            self.node.committed(commit)

        self.guarded(call)

    def _commit_on_thread(self, commit: Commit) -> None:
        try:
            self._perform(commit)
        except BaseException as error:
            self.fail(error)
        self._loop.call_soon_threadsafe(self.guarded, partial(self.node.committed, commit))

    def _perform(self, commit: Commit) -> None:
        began = time.perf_counter()
        self.node.log.perform(commit)
        took_us = (time.perf_counter() - began) * 1e6
        self.commits += 1
        self.sync_seconds += took_us / 1e6
        if _is_small(commit):
            self.sync_us += (took_us - self.sync_us) / 8 if self.sync_us else took_us

    def read(self, job: Callable[[], Any], done: Callable[[Any | LogError], None]) -> None:
        def on_thread() -> None:
            try:
                result = job()
            except LogError as error:
                result = error
            except BaseException as error:
                self.fail(error)
            self._loop.call_soon_threadsafe(self.guarded, lambda: done(result))

        self._read_threads.submit(on_thread)

    def write(self, job: Callable[[], Any], done: Callable[[Any | LogError], None]) -> None:
        self.read(job, done)

    def hello(self, body: bytes) -> None:
        link = self._master_link
        if link is not None:
            link.ask(lambda answer: self.guarded(lambda: self.node.agreed(link, answer)), Command.HELLO, body)

    def record_master_packet(self) -> None:
        self._master_packet_s = self._loop.time()

    @property
    def has_lost_master(self) -> bool:
        """Whether this is a slave that was in sync and receives nothing from its master."""
        packet_age_ms = self.master_packet_age_ms()
        slave = self.node.slave
        return slave is not None and slave.has_matched and (packet_age_ms is None or packet_age_ms >= LOST_MS)

    def master_packet_age_ms(self) -> int | None:
        """Age of the master's last packet in ms, or None without a link."""
        link = self._master_link
        return int((self._loop.time() - self._master_packet_s) * 1000) if link is not None and link.is_open else None

    def role_changed(self) -> None:
        self._role_changed.set()
        self.state_changed.set()

    # Tasks.

    async def repeat(self, call: Callable[[], None], every_s: float, quiet_ms: Callable[[], int]) -> None:
        """Call into the core every `every_s`; once a second while `quiet_ms` returns a longer time, and soon after
        something happens.
        """
        while True:
            await asyncio.sleep(0)  # lets a pass carry out the call's request, which may leave work
            quiet_s = 0.0 if self._pass_is_due else quiet_ms() / 1000
            if quiet_s <= every_s or await self._doze(quiet_s):
                await asyncio.sleep(every_s)
            self._run_guarded(call)

    async def _doze(self, seconds: float) -> bool:
        """Wait until the next whole second, at most `seconds`; return whether something happened before."""
        stirred: asyncio.Future[bool] = self._loop.create_future()
        timer = self._loop.call_later(min(seconds, until_next_second(self._loop.time())), _wake, stirred)
        self._dozing.append(stirred)
        try:
            return await stirred
        finally:
            timer.cancel()
            self._dozing.remove(stirred)

    def _stir(self) -> None:
        """Wake sleeping tasks."""
        for stirred in self._dozing:
            if not stirred.done():
                stirred.set_result(True)

    def _quiet_ms(self) -> int:
        """Return the time for which no tick is needed, unless something happens."""
        return 0 if self.memory_alarm.is_on or self._disk_watch.is_near else self.node.quiet_ms()

    def _tick(self) -> None:
        self._look_at_limits()
        self.node.tick()
        reported = (type(self.node.role), self.node.writable, tuple(self.node.readonly_reasons))
        if reported != self._last_reported:
            self._last_reported = reported
            self.state_changed.set()

    def _look_at_limits(self) -> None:
        node, alarm = self.node, self.memory_alarm
        descriptors.spares.fill()
        self._look_at_disk()
        self.memory_bytes = memory.used_bytes()
        if alarm.measured(self.memory_bytes):
            log.warning(
                "memory alarm %s used=%d limit=%d", "on" if alarm.is_on else "off", self.memory_bytes, alarm.limit_bytes
            )
            for acceptor in self.acceptors:
                acceptor.follow_flow()
        node.set_memory_short(alarm.is_on)
        if alarm.is_on:
            self._while_memory_is_short()

    def _look_at_disk(self) -> None:
        now_ms, log_end = self.monotonic_ms(), self.node.log.end
        if self._disk_watch.is_due(now_ms, log_end):
            self._disk_watch.measured(self._disk.free_bytes(), now_ms, log_end)
        self.node.set_disk_full(self._disk_watch.is_full)

    def _while_memory_is_short(self) -> None:
        for acceptor in list(
            islice(
                (acceptor for acceptor in self.acceptors if acceptor.flow.state is ConnectionState.BLOCKED),
                BLOCKED_READ_MAX,
            )
        ):
            del self.acceptors[acceptor]
            self.acceptors[acceptor] = None
            acceptor.connection.read(True)  # until one request came
        if self._loop.time() - self._released_at > RELEASE_S:
            self._released_at = self._loop.time()
            self._read_threads.submit(memory.release)

    async def _follow_master(self) -> None:
        """Keep one connection to the master's sync port while this process is a slave."""
        attempts = 0
        while True:
            if self._role_changed.is_set():
                self._role_changed.clear()
                attempts = 0
            peer = self.node.assignment.master if self.node.slave and self.node.assignment else None
            if peer is None or self.node.changes.is_held:
                await self._role_changed.wait()
                continue
            acceptor = _MasterLink(self)
            master = Endpoint(peer.ip, peer.sync_port)
            try:
                self._master_link, _ = await connect(
                    master,
                    handler=acceptor,
                    token=token_text(self._settings.token),
                    app=self._settings.hostname,
                    packet_bytes_max=SYNC_PACKET_BYTES_MAX,
                    timeout_s=3.0,
                )
                acceptor.pulse_of(self._master_link)
                self.record_master_packet()
                if self.node.slave is not None and not self.node.changes.is_held:
                    self.guarded(partial(self.node.slave.connected, self._master_link))
                    await self._until_lost_or_changed(acceptor)
                    self.state_changed.set()
                self._master_link.close("the roles changed")
            except (NotServed, AccessError) as error:
                log.warning("master not reached group=%s at=%s: %s", self.node.group, master, error)
            with suppress(TimeoutError):
                async with asyncio.timeout(RECONNECTS_S[min(attempts, len(RECONNECTS_S) - 1)]):
                    await self._role_changed.wait()
            attempts += 1

    async def _until_lost_or_changed(self, acceptor: _MasterLink) -> None:
        changed = asyncio.ensure_future(self._role_changed.wait())
        lost = asyncio.ensure_future(acceptor.lost.wait())
        _, pending = await asyncio.wait((changed, lost), return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()

    async def _keep_house(self) -> None:
        """Delete old segments and clean the quarantine, until cancelled."""
        while True:
            self.guarded(partial(keep_reserve, self._disk, self.disk_free_limit))
            self.guarded(self._look_after_log)
            self.read(self._look_after_quarantine, _raise_failure)
            is_soon = self._disk_watch.is_full or self.node.log.state.kept.start > self.node.log.start
            pause_s = HOUSE_SOON_S if is_soon else HOUSE_S
            await asyncio.sleep(DELETE_S if self.node.log.is_deleting else pause_s)

    async def _sweep(self, disk: RealDisk) -> None:
        """Free a disk's removed files, in pieces that block no other work; at full speed while the disk is full."""
        while True:
            swept: asyncio.Future[bool] = self._loop.create_future()
            self.read(disk.sweep, partial(_swept, swept))
            if not await swept:
                await asyncio.sleep(HOUSE_S)
            elif not self._disk_watch.is_full:
                await asyncio.sleep(SWEEP_S)

    def _look_after_log(self) -> None:
        try:
            self.node.decide_retention(self._keeper)
            self._delete_oldest()
        except CorruptFrame as problem:
            self.node.found_damage(problem)

    def _look_after_quarantine(self) -> None:
        message_log = self.node.log
        is_short = self.disk_free_bytes < 2 * self.disk_free_limit
        self.quarantine.look(message_log.end - message_log.start, is_disk_short=is_short)

    def _delete_oldest(self) -> None:
        """Begin to delete the oldest segment, if it may go and the deletion before has ended. The commit of one
        deletion takes ten fsyncs; a hundred at once would delay acknowledgements for seconds.
        """
        node = self.node
        if self.log_holders and not self._disk_watch.is_full:  # an audit that hangs keeps no disk full
            return
        if not node.log.is_deleting and node.oldest_may_go(self._keeper, self.reader_positions.values()):
            log.info("segment deleted group=%s base=%d", node.group, node.log.bases[0])
            node.log.drop_oldest_segment()
            self.pass_soon()


def _is_small(commit: Commit) -> bool:
    return commit.bytes <= INLINE_COMMIT_BYTES and commit.is_plain


def _swept(swept: asyncio.Future[bool], result: bool | LogError) -> None:
    """Pass on the result of a sweep. Raises DiskFailed, because otherwise the sweep would be repeated forever without a
    report.
    """
    if isinstance(result, LogError):
        raise result
    if not swept.done():  # false when the process stops and has cancelled the wait
        swept.set_result(result)


def _raise_failure(result: object) -> None:
    if isinstance(result, LogError):
        raise result


def _wake(stirred: asyncio.Future[bool]) -> None:
    if not stirred.done():
        stirred.set_result(False)


class _MasterLink:
    """Connection of a slave to its master."""

    def __init__(self, service: Service[Any]) -> None:
        self._service = service
        self.lost = asyncio.Event()
        self._pulse: Pulse | None = None

    def pulse_of(self, connection: Connection) -> Pulse:
        """Return the connection's heartbeats, made by the first packet: the first beat is often read together with the
        answer to the login.
        """
        if self._pulse is None:
            self._pulse = Pulse(self._service.node, connection, self._service.now_ms)
        return self._pulse

    def packet_received(self, connection: Connection, packet: Packet) -> None:
        self._service.record_master_packet()
        if not self.pulse_of(connection).received(packet):
            self._service.guarded(lambda: self._service.node.packet_received(connection, packet))

    def connection_lost(self, connection: Connection, reason: str) -> None:
        self.lost.set()
        log.warning("link to the master lost group=%s peer=%s: %s", self._service.node.group, connection.peer, reason)
        self._service.guarded(lambda: self._service.node.link_lost(connection))

    def writable_again(self, connection: Connection) -> None:
        self._service.guarded(lambda: self._service.node.writable_again(connection))
