"""Broker groups of the delay world: each stores a batch once, as long as it remembers its number (P2).

They are away, refuse, store without an answer, or answer late. `GroupSenders` stands in for
`qmq.client.numbered_sender.NumberedSender`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from qmq.client.batch import Answer, NotStored, NumberedBatch, Stored, Unknown
from qmq.client.routes import group_of_key
from qmq.codec import Buffer, decode_envelope, split_batch
from qmq.errors import NotServed, Overloaded

if TYPE_CHECKING:
    from tests.simulation.delay.machine import DelayProcess
    from tests.simulation.delay.world import DelayWorld

NUMBERS = 64
PRODUCERS = 2000
ANSWER_MS = 400
"""Timeout after which an attempt's outcome is unknown."""
Done = Callable[[Answer], None]
Key = tuple[str, int, int]
"""(group, producer id, batch number)"""


def ids_of(batch: NumberedBatch) -> list[str]:
    body: Buffer = b"".join(batch.blocks)
    return [decode_envelope(bytes(message)).id for message in split_batch(body, batch.count)]


@dataclass
class Group:
    """Broker group, which never loses a stored batch."""

    name: str
    is_up: bool = True
    refuses: bool = False
    mute: float = 0.0
    """Probability that an answer is lost."""
    late_ms: float = 1.0
    windows: OrderedDict[int, dict[int, list[tuple[int, str]]]] = field(default_factory=OrderedDict)
    """Producer id -> number -> refused messages of that batch."""


class BrokerGroups:
    """All broker groups of a seed."""

    def __init__(self, world: DelayWorld, names: tuple[str, ...]) -> None:
        self._world = world
        self._events = world.events
        self.groups = {name: Group(name) for name in names}
        self.routes: dict[str, list[str]] = {subject: list(names) for subject in world.swarm.subjects}

    def heal(self) -> None:
        for group in self.groups.values():
            group.is_up, group.refuses, group.mute, group.late_ms = True, False, 0.0, 1.0
        for routes in self.routes.values():
            routes[:] = list(self.groups)

    def arrive(self, name: str, batch: NumberedBatch) -> Answer:
        """Store a batch that reached its group."""
        group, oracle = self.groups[name], self._world.oracle
        window = group.windows.setdefault(batch.producer, {})
        group.windows.move_to_end(batch.producer)
        if batch.number in window:
            self._events.count("batch known")
            refused = window[batch.number]
            return Stored(0, batch.count - len(refused), list(refused))
        if window and batch.number + NUMBERS <= max(window):
            self._events.count("batch forgotten")
            return Unknown("too old to tell")
        if group.refuses:
            return NotStored(NotServed(f"{name} refuses"))
        ids = ids_of(batch)
        refused = [(at, "too large") for at, id in enumerate(ids) if self._world.refuses(id)]
        if len(refused) < len(ids):
            window[batch.number] = refused
            bad = {at for at, _ in refused}
            for at, id in enumerate(ids):
                if at not in bad:
                    oracle.stored(id, (name, batch.producer, batch.number))
        for at, _ in refused:
            oracle.refused_later.add(ids[at])
            self._events.count("message refused later")
        if len(window) > NUMBERS:
            del window[min(window)]
        if len(group.windows) > PRODUCERS:
            group.windows.popitem(last=False)
        return Stored(0, len(ids) - len(refused), refused)


class GroupSenders:
    """Broker groups as one process sees them."""

    def __init__(self, world: DelayWorld, process: DelayProcess) -> None:
        self._world = world
        self._events = world.events
        self._process = process
        self._groups = world.brokers
        self._bytes = dict.fromkeys(self._groups.groups, 0)
        self._flights = dict.fromkeys(self._groups.groups, 0)

    def watch(self, subject: str) -> None:
        pass

    def groups(self, subject: str) -> list[str]:
        return [name for name in self._groups.routes.get(subject, []) if self.is_usable(name)]

    def home(self, subject: str, label: int) -> str | None:
        names = self._groups.routes.get(subject)
        return group_of_key(label >> 32, names) if names else None

    def sharers(self, subject: str) -> list[str]:
        return list(self._groups.routes.get(subject, []))

    def is_usable(self, name: str) -> bool:
        return self._groups.groups[name].is_up

    def room(self, name: str) -> int:
        return max(0, self._world.room - self._bytes[name]) if self.is_usable(name) else 0

    def in_flight(self, name: str) -> int:
        return self._flights[name]

    def why_not(self, subject: str) -> str:
        return "none is there"

    def send(self, name: str, batch: NumberedBatch, done: Done) -> None:
        events, group = self._events, self._groups.groups[name]
        is_first = self._world.oracle.attempting(self._process, name, batch)
        if not group.is_up:
            done(NotStored(NotServed(f"{name}: no connection")))
            return
        size = sum(map(len, batch.blocks))
        if self._flights[name] and self._bytes[name] + size > self._world.room:
            done(NotStored(Overloaded(f"{name} owes answers")))
            return
        self._world.oracle.unknown.add((name, batch.producer, batch.number))
        self._bytes[name] += size
        self._flights[name] += 1
        waiting = [done]

        def end(answer: Answer) -> None:
            if not waiting:
                return
            call = waiting.pop()
            self._bytes[name] -= size
            self._flights[name] -= 1
            if isinstance(answer, NotStored) and is_first:
                self._world.oracle.unknown.discard((name, batch.producer, batch.number))
            if isinstance(answer, Unknown):
                events.count("outcome unknown")
            self._process.guarded(lambda: call(answer))

        def arrive() -> None:
            if not group.is_up and events.chance(0.7):
                return  # lost on its way
            answer = self._groups.arrive(name, batch)
            if not events.chance(group.mute):
                events.after(group.late_ms * events.rng.random(), lambda: end(answer))

        events.after(0.2 + group.late_ms * events.rng.random(), arrive)
        events.after(ANSWER_MS, lambda: end(Unknown("no answer")))
