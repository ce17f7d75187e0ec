"""TCP at its worst: bytes arrive in order or the connection is dead, and both ends notice late.

Each direction of a connection is a queue. Bytes arrive in order after a random delay, wait while the path is cut, and
are lost with the connection. The ends notice a loss at different moments. So an end may go on sending to no receiver,
and packets of a dying connection may arrive while a newer one is at work.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from qmq.codec import Buffer
from qmq.errors import ErrorCode, QmqError
from qmq.rations import Ration
from qmq.remoting.commands import Command
from qmq.remoting.packet import ONE_WAY, RESPONSE, Packet, packet_header, read_packet
from tests.simulation.events import Events

Answered = Callable[[Packet], None]


class Owner(Protocol):
    """Owner of an end of a connection."""

    name: str

    def packet_received(self, link: End, packet: Packet) -> None: ...

    def link_lost(self, link: End) -> None: ...

    def writable_again(self, link: End) -> None: ...


class Listener(Protocol):
    """Machine with a process that accepts connections."""

    name: str
    process: Any


class End:
    """End of a connection: `qmq.replication.ports.Link`, with requests for clients."""

    def __init__(self, network: Network, host: str, peer: str, number: int) -> None:
        self._network = network
        self.host = host
        self.peer = peer
        self.number = number
        self.owner: Owner | None = None
        self.other: End
        self.writable = True
        self.unacked_bytes = self.owed_bytes = 0
        self.sends_on = False
        self.produced: dict[str, int] = {}
        self.ration = Ration()
        self.is_open = True
        self.is_dead = False
        """Whether the connection is broken, noticed here or not."""
        self.under_way: deque[bytes | None] = deque()
        """Packets sent and not arrived; None: the end of the stream."""
        self.waiting_events = 0
        self.last_arrival_us = 0
        self._requests: dict[int, Answered] = {}
        self._opaque = 0
        self.stalled_since_us: int | None = None

    def __repr__(self) -> str:
        return f"{self.host}>{self.peer}#{self.number}"

    # qmq.replication.ports.Link.

    def answer(self, request: Packet, *parts: Buffer, code: int = ErrorCode.SUCCESS) -> None:
        if not request.flag & ONE_WAY:
            self._network.on_answer(self, request, code, parts)
            self._send(code, RESPONSE, request.opaque, request.code, parts)

    def refuse(self, request: Packet, error: QmqError) -> None:
        self.answer(request, str(error).encode(), code=error.code)

    def push(self, command: Command, *parts: Buffer) -> None:
        self._send(command, ONE_WAY, 0, command, parts)

    def close(self, reason: str = "") -> None:
        if self.is_open:
            self.is_open = False
            self._network.closed(self)

    # Requests of clients.

    def request(self, command: Command, *parts: Buffer, then: Answered) -> None:
        self._opaque += 1
        self._requests[self._opaque] = then
        self._send(command, 0, self._opaque, command, parts)

    def _send(self, code: int, flag: int, opaque: int, request_code: int, parts: tuple[Buffer, ...]) -> None:
        if self.is_open:
            header = packet_header(code, opaque, flag, request_code, sum(map(len, parts)))
            self._network.send(self, b"".join((header, *parts)))

    # Called by the network.

    def received(self, data: bytes) -> None:
        if not self.is_open or self.owner is None:
            return
        packet = read_packet(data)
        if packet.is_response:
            then = self._requests.pop(packet.opaque, None)
            if then is not None:
                then(packet)
        else:
            self.owner.packet_received(self, packet)

    def lost(self) -> None:
        """Report the lost connection to the owner."""
        self.is_open = False
        self._requests.clear()
        owner, self.owner = self.owner, None
        if owner is not None:
            owner.link_lost(self)


@dataclass(slots=True)
class Path:
    """Way from one host to another."""

    is_cut: bool = False
    slow_ms: float = 0.0
    ends: dict[End, None] = field(default_factory=dict)
    """Ends that send on it."""


class Network:
    """All connections, and the paths below them."""

    def __init__(self, events: Events, *, delay_ms: float, stall: float, keepalive_ms: float) -> None:
        self._events = events
        self._delay_ms = delay_ms
        self._stall = stall
        self._keepalive_ms = keepalive_ms
        self.paths: dict[tuple[str, str], Path] = {}
        self._listeners: dict[str, Listener] = {}
        self._connections = 0
        self.on_answer: Callable[[End, Packet, int, tuple[Buffer, ...]], None] = lambda *_: None

    def listen(self, listener: Listener) -> None:
        self._listeners[listener.name] = listener

    def path(self, source: str, target: str) -> Path:
        path = self.paths.get((source, target))
        if path is None:
            path = self.paths[source, target] = Path()
        return path

    def is_through(self, first: str, second: str) -> bool:
        return not self.path(first, second).is_cut and not self.path(second, first).is_cut

    def delay_ms(self, source: str, target: str) -> float:
        rng = self._events.rng
        base = self._delay_ms * (0.2 + rng.random())
        if rng.random() < 0.01:
            base *= 20
        return base + self.path(source, target).slow_ms * rng.random()

    def connect(self, owner: Owner, target: str, then: Callable[[End | None], None]) -> None:
        """Connect `owner`'s host with `target`; `then` gets the end, or None without an answer."""
        events, host = self._events, owner.name

        def arrive() -> None:
            process = self._listeners[target].process
            if not self.is_through(host, target):
                events.between(200, 1500, lambda: then(None))
            elif process is None:
                events.after(self.delay_ms(target, host), lambda: then(None))
            else:
                ours, theirs = self._pair(host, target)
                theirs.owner = process
                events.after(self.delay_ms(target, host), lambda: established(ours))

        def established(ours: End) -> None:
            if not ours.is_open:
                then(None)
                return
            ours.owner = owner
            then(ours)

        events.after(self.delay_ms(host, target), arrive)

    def _pair(self, first: str, second: str) -> tuple[End, End]:
        self._connections += 1
        ours, theirs = End(self, first, second, self._connections), End(self, second, first, self._connections)
        ours.other, theirs.other = theirs, ours
        self.path(first, second).ends[ours] = None
        self.path(second, first).ends[theirs] = None
        return ours, theirs

    def send(self, end: End, data: bytes) -> None:
        if end.is_dead:
            return
        self._enqueue(end, data)
        if self._stall and end.writable and self._events.rng.random() < self._stall:
            end.writable = False
            self._events.count("flow control")
            self._events.between(1, 300, lambda: self._resume(end))

    def _resume(self, end: End) -> None:
        end.writable = True
        if end.is_open and end.owner is not None:
            end.owner.writable_again(end)

    def _enqueue(self, end: End, data: bytes | None) -> None:
        end.under_way.append(data)
        self._schedule_arrival(end)

    def _schedule_arrival(self, end: End) -> None:
        arrival_us = self._events.now_us + int(1000 * self.delay_ms(end.host, end.peer))
        end.last_arrival_us = max(end.last_arrival_us + 1, arrival_us)
        end.waiting_events += 1
        self._events.after((end.last_arrival_us - self._events.now_us) / 1000, lambda: self._arrive(end))

    def _arrive(self, end: End) -> None:
        end.waiting_events -= 1
        if not end.under_way:
            return
        if self.path(end.host, end.peer).is_cut:
            if end.stalled_since_us is None:
                end.stalled_since_us = self._events.now_us
                since_us = end.stalled_since_us
                self._events.between(self._keepalive_ms / 3, self._keepalive_ms, lambda: self._time_out(end, since_us))
            return
        data = end.under_way.popleft()
        if data is None:
            self._gone(end.other)
        else:
            end.other.received(data)

    def _time_out(self, end: End, since_us: int | None) -> None:
        """Break a connection after its other host acknowledged no packet for too long."""
        if end.stalled_since_us == since_us:
            if end.is_open and end.other.is_open:
                self._events.count("half-open connection")
            end.is_dead = end.other.is_dead = True
            self._gone(end)
            self._events.between(self._keepalive_ms / 3, self._keepalive_ms, lambda: self._gone(end.other))

    def _gone(self, end: End) -> None:
        end.is_dead = end.other.is_dead = True
        if end.is_open or end.owner is not None:
            end.lost()

    def closed(self, end: End) -> None:
        """Let a closed end's packets arrive, followed by the end of the stream."""
        if not end.is_dead:
            self._enqueue(end, None)
            end.is_dead = True
        self._events.between(0, 1, lambda: self._gone_quietly(end))

    def _gone_quietly(self, end: End) -> None:
        """Report a closed connection to the owner that closed it."""
        owner, end.owner = end.owner, None
        if owner is not None:
            owner.link_lost(end)

    # Faults.

    def cut(self, source: str, target: str) -> None:
        self.path(source, target).is_cut = True

    def heal(self, source: str, target: str) -> None:
        path = self.path(source, target)
        path.is_cut, path.slow_ms = False, 0.0
        for end in list(path.ends):
            if end.is_dead and not end.other.is_open:
                del path.ends[end]
                continue
            end.stalled_since_us = None
            for _ in range(len(end.under_way) - end.waiting_events):
                self._schedule_arrival(end)

    def heal_all(self) -> None:
        for source, target in list(self.paths):
            self.heal(source, target)
        self._stall = 0.0

    def connections(self) -> list[End]:
        """Return one end of each open connection."""
        ends = [end for path in self.paths.values() for end in path.ends]
        return sorted((end for end in ends if end.is_open and not end.is_dead), key=lambda end: (end.number, end.host))

    def reset(self, end: End, *, late_ms: float = 3.0) -> None:
        """Break a connection: any part of the packets under way is lost, and each end notices at another moment."""
        for broken in (end, end.other):
            if broken.under_way and self._events.chance(0.5):
                keep = self._events.rng.randrange(len(broken.under_way) + 1)
                while len(broken.under_way) > keep:
                    broken.under_way.pop()
            broken.is_dead = True
        self._events.between(0, 3, lambda: self._gone(end))
        self._events.between(0, late_ms, lambda: self._gone(end.other))

    def host_died(self, host: str, *, power: bool) -> None:
        """Close the connections of a dead process, as its kernel does unless the power is cut."""
        for path in [path for (source, _), path in self.paths.items() if source == host]:
            for end in list(path.ends):
                if end.is_dead and not end.is_open:
                    continue
                end.owner = None
                end.is_open = False
                end.is_dead = end.other.is_dead = True
                if power or self._events.chance(0.5):
                    keep = self._events.rng.randrange(len(end.under_way) + 1)
                    while len(end.under_way) > keep:
                        end.under_way.pop()
                other = end.other
                if power:
                    self._events.between(1, self._keepalive_ms, lambda other=other: self._gone(other))
                else:
                    end.under_way.append(None)
                    self._schedule_arrival(end)
