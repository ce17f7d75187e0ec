"""Connections between processes: each direction keeps its order, as TCP does, and suffers faults.

Bytes wait while the way is cut, as TCP sends them again; after 15 s the connection is given up
(`qmq.remoting.connection`, `CHANNEL_OPTIONS`). The kernel of a killed process closes its connections; a machine without
power closes none.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from tests.simulation.loop import Process, VirtualLoop, current

GIVEN_UP_S = 15.0
FIN, RST = "FIN", "RST"


class Receiver(Protocol):
    """Process's side of a connection, called in that process."""

    def arrived(self, item: Any) -> None: ...

    def lost(self, error: Exception | None) -> None: ...


class Wire:
    """One direction of a connection."""

    def __init__(self, network: Network, source: End, target: End) -> None:
        self._network = network
        self.source = source
        self.target = target
        self._items: deque[tuple[float, Any]] = deque()
        self._last_s = 0.0
        self.is_black = False
        """Whether a middlebox has dropped the connection without a notice."""

    def send(self, item: Any) -> None:
        self._last_s = max(self._last_s, self._network.arrival_s(self.source.ip, self.target.ip))
        self._items.append((self._last_s, item))
        self._network.loop.at(self._last_s, self.pump)

    def drop(self) -> None:
        self._items.clear()

    def pump(self) -> None:
        """Deliver everything that has arrived by now."""
        if self._network.is_cut(self.source.ip, self.target.ip) or self.is_black:
            return
        while self._items and self._items[0][0] <= self._network.loop.now_s:
            self.target.receive(self._items.popleft()[1])


class End:
    """End of a connection, in the kernel of its machine."""

    def __init__(self, network: Network, process: Process, peer_port: int) -> None:
        self._network = network
        self.process = process
        self.ip = process.ip
        self.port = peer_port
        self._receiver: Receiver | None = None
        self._early: list[Callable[[Receiver], None]] = []
        """Arrivals before the receiver was set."""
        self.is_open = True
        self.is_gone = False
        """Whether its machine lost power."""
        self.other: End
        self.wire: Wire

    @property
    def receiver(self) -> Receiver | None:
        return self._receiver

    @receiver.setter
    def receiver(self, receiver: Receiver) -> None:
        self._receiver = receiver
        for notify in self._early:
            notify(receiver)

    def send(self, item: Any) -> None:
        if self.is_open:
            self.wire.send(item)

    def close(self) -> None:
        """Close the end; bytes under way still arrive."""
        if self.is_open:
            self.is_open = False
            self.wire.send(FIN)

    def reset(self) -> None:
        if self.is_open:
            self.is_open = False
            self.wire.drop()
            self.wire.send(RST)

    def vanish(self) -> None:
        self.is_open = False
        self.is_gone = True
        self.wire.drop()
        self._network.loop.at(self._network.loop.now_s + GIVEN_UP_S, self.other.give_up)

    def receive(self, item: Any) -> None:
        if self.is_gone:
            return
        if not self.is_open:
            if item not in (FIN, RST):
                self.wire.send(RST)
            return
        if item is FIN:
            self.is_open = False
            self._notify_lost(None)
        elif item is RST:
            self.wire.drop()
            self.is_open = False
            self._notify_lost(ConnectionResetError(104, "Connection reset by peer"))
        else:
            self._notify(lambda receiver: receiver.arrived(item))

    def give_up(self) -> None:
        """Give the connection up after a silence."""
        if self.is_open:
            self.wire.drop()
            self.is_open = False
            self._notify_lost(TimeoutError(110, "Connection timed out"))

    def _notify_lost(self, error: Exception | None) -> None:
        self._notify(lambda receiver: receiver.lost(error))

    def _notify(self, notify: Callable[[Receiver], None]) -> None:
        def call() -> None:
            if self._receiver is None:
                self._early.append(notify)
            else:
                notify(self._receiver)

        self._network.loop.call_soon(call, context=self.process.context)


Accept = Callable[[End], Receiver]


class Network:
    """Network of one run. `slow` adds seconds to the way between two machines."""

    def __init__(self, loop: VirtualLoop, note: Callable[[str], None]) -> None:
        self.loop = loop
        self._note = note
        self._listening: dict[tuple[str, int], tuple[Process, Accept]] = {}
        self._ends: list[End] = []
        self._cut: dict[tuple[str, str], float] = {}
        self.slow: dict[tuple[str, str], float] = {}
        self.buffer_bytes = 1 << 16
        """Bytes on the way before a writer has to wait."""
        self.off: set[str] = set()
        """Machines without power."""

    def arrival_s(self, source: str, target: str) -> float:
        delay_s = self.loop.rng.uniform(0.0001, 0.002)
        if self.loop.rng.random() < 0.01:
            delay_s += self.loop.rng.uniform(0, 0.25)  # a packet was lost and is sent again
        return self.loop.now_s + delay_s + self.slow.get((source, target), 0.0)

    # Faults.

    def is_cut(self, source: str, target: str) -> bool:
        return (source, target) in self._cut

    def cut(self, source: str, target: str) -> None:
        now_s = self.loop.now_s
        if (source, target) not in self._cut:
            self._cut[source, target] = now_s
            self.loop.at(now_s + GIVEN_UP_S, self._give_up, source, target, now_s)

    def _give_up(self, source: str, target: str, since_s: float) -> None:
        if self._cut.get((source, target)) == since_s:
            for end in self._between(source, target):
                end.give_up()
            self.loop.at(self.loop.now_s + GIVEN_UP_S, self._give_up, source, target, since_s)

    def heal(self) -> None:
        self._cut.clear()
        self.slow.clear()
        for end in list(self._ends):
            end.wire.pump()

    def _between(self, first: str, second: str) -> list[End]:
        self._ends = [end for end in self._ends if end.is_open or end.other.is_open]
        return [end for end in self._ends if {end.ip, end.other.ip} == {first, second}]

    def reset(self, first: str, second: str) -> int:
        """Reset all connections between two machines; bytes under way are lost."""
        ends = self._between(first, second)
        for end in ends:
            end.wire.drop()
            end.receive(RST)
        return len(ends)

    def forget(self, first: str, second: str) -> int:
        """Let a middlebox drop the connections without a notice."""
        ends = self._between(first, second)
        for end in ends:
            end.wire.is_black = True
            self.loop.at(self.loop.now_s + GIVEN_UP_S, end.give_up)
        return len(ends)

    def power_off(self, ip: str) -> None:
        for end in self._ends:
            if end.ip == ip:
                end.vanish()

    # Calls of processes.

    def listen(self, port: tuple[str, int], accept: Accept) -> None:
        process = current()
        if port in self._listening and not self._listening[port][0].is_dead:
            raise OSError(98, "Address already in use")
        self._listening[port] = process, accept

    def close(self, port: tuple[str, int]) -> None:
        process, _ = self._listening.get(port, (None, None))
        if process is current():
            self._listening.pop(port, None)

    def answers(self, port: tuple[str, int]) -> bool:
        """Whether a process listens there and is not stopped."""
        process, _ = self._listening.get(port, (None, None))
        return process is not None and not process.is_dead and not process.is_stopped

    async def connect(self, host: str, port: int, receiver: Callable[[End], Receiver]) -> Receiver:
        """Connect to a port.

        Raises:
            OSError: no process listens there.
        """
        process = current()
        connected: asyncio.Future[None] = self.loop.create_future()
        ours = End(self, process, port)
        self._syn(ours, (host, port), connected)
        try:
            await connected
        except BaseException:
            ours.reset() if hasattr(ours, "wire") else None
            raise
        ours.receiver = receiver(ours)
        return ours.receiver

    def _syn(self, ours: End, at: tuple[str, int], connected: asyncio.Future[None]) -> None:
        """Send the connection request, again and again while a caller waits."""

        def arrives() -> None:
            if connected.cancelled() or ours.process.is_dead:
                return
            if self.is_cut(ours.ip, at[0]) or self.is_cut(at[0], ours.ip) or at[0] in self.off:
                self.loop.at(self.loop.now_s + 0.3, arrives)
                return
            server, accept = self._listening.get(at, (None, None))
            if server is None or server.is_dead or accept is None:
                refused = ConnectionRefusedError(111, f"Connect call failed {at}")
                self._answer(at[0], ours.ip, connected, refused)
                return
            theirs = End(self, server, at[1])
            ours.other, theirs.other = theirs, ours
            ours.wire, theirs.wire = Wire(self, ours, theirs), Wire(self, theirs, ours)
            self._ends += [ours, theirs]
            for end in (ours, theirs):
                end.process.ended.append(end.reset if self.loop.rng.random() < 0.5 else end.close)
            self.loop.call_soon(self._accept, theirs, accept, context=server.context)
            self._answer(at[0], ours.ip, connected, None)

        self.loop.at(self.arrival_s(ours.ip, at[0]), arrives)

    def _accept(self, end: End, accept: Accept) -> None:
        end.receiver = accept(end)

    def _answer(self, source: str, target: str, connected: asyncio.Future[None], error: OSError | None) -> None:
        def arrives() -> None:
            if not connected.done():
                connected.set_result(None) if error is None else connected.set_exception(error)

        self.loop.at(self.arrival_s(source, target), arrives)


class Transport(asyncio.Transport):
    """Process's end of a connection, as asyncio shows it to a BufferedProtocol."""

    def __init__(self, network: Network, end: End, protocol: asyncio.BufferedProtocol) -> None:
        super().__init__()
        self._network = network
        self._end = end
        self._protocol = protocol
        self._loop = network.loop
        self._is_closing = self._is_lost = self._is_paused = False
        self._unread: deque[bytes] = deque()
        self._unread_end: tuple[Exception | None] | None = None
        self._high = network.buffer_bytes
        self._out = 0
        self._is_full = False
        protocol.connection_made(self)

    # Calls of the network.

    def arrived(self, item: bytes) -> None:
        self._unread.append(item)
        self._read()

    def lost(self, error: Exception | None) -> None:
        if error is None and self._unread:
            self._unread_end = (error,)  # bytes before the end are read first
            self._read()
        else:
            self._end_now(error)

    def _read(self) -> None:
        while self._unread and not self._is_paused and not self._is_closing:
            data = self._unread.popleft()
            peer = self._end.other.receiver
            if isinstance(peer, Transport):
                self._loop.at(self._network.arrival_s(self._end.ip, self._end.other.ip), peer.taken, len(data))
            self._feed(data)
        if self._unread_end is not None and not self._unread:
            self._end_now(*self._unread_end)

    def _feed(self, data: bytes) -> None:
        """Deliver the bytes in random pieces."""
        at = 0
        while at < len(data) and not self._is_closing:
            buffer = self._protocol.get_buffer(-1)
            size = min(len(data) - at, len(buffer))
            if self._loop.rng.random() < 0.2:
                size = self._loop.rng.randint(1, size)
            memoryview(buffer)[:size] = data[at : at + size]
            at += size
            self._protocol.buffer_updated(size)

    def taken(self, size: int) -> None:
        """Note that the other end has read this many bytes."""
        self._out -= size
        if self._is_full and self._out <= self._high // 4 and not self._is_lost:
            self._is_full = False
            self._loop.call_soon(self._protocol.resume_writing, context=self._end.process.context)

    def _end_now(self, error: Exception | None) -> None:
        if not self._is_lost:
            self._is_closing = self._is_lost = True
            self._protocol.connection_lost(error)

    # Calls of the protocol.

    def write(self, data: Any) -> None:
        if self._is_closing or not data:
            return
        self._out += len(data)
        self._end.send(bytes(data))
        if self._out > self._high and not self._is_full:
            self._is_full = True
            self._protocol.pause_writing()

    def writelines(self, list_of_data: Any) -> None:
        self.write(b"".join(list_of_data))

    def close(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            self._end.close()
            self._loop.call_soon(self._end_now, None)

    def abort(self) -> None:
        if not self._is_lost:
            self._is_closing = True
            self._end.reset()
            self._loop.call_soon(self._end_now, None)

    def is_closing(self) -> bool:
        return self._is_closing

    def pause_reading(self) -> None:
        self._is_paused = True

    def resume_reading(self) -> None:
        self._is_paused = False
        self._loop.call_soon(self._read)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Set less room than the program asks for, so that it is full at times."""

    def get_write_buffer_size(self) -> int:
        return self._out

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return (self._end.other.ip, self._end.port) if name == "peername" else default


class NetworkLoop(VirtualLoop):
    """Loop that processes see: their connections go over the simulated network."""

    network: Network

    async def create_server(self, factory: Any, host: Any = None, port: Any = None, **_: Any) -> Any:
        self.network.listen((host, port), lambda end: Transport(self.network, end, factory()))
        return Server(self.network, (host, port))

    async def create_connection(self, factory: Any, host: Any = None, port: Any = None, **_: Any) -> Any:
        protocol = factory()
        transport = await self.network.connect(host, port, lambda end: Transport(self.network, end, protocol))
        return transport, protocol


class Server:
    """Stands in for asyncio's server."""

    sockets = ()

    def __init__(self, network: Network, port: tuple[str, int]) -> None:
        self._network = network
        self._port = port

    async def __aenter__(self) -> Server:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._network.close(self._port)
