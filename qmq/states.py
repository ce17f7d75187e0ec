"""Core. State machines as tables: (state, event) -> next state. An event that the table lacks raises.

Each machine (a slave as its master sees it, a client's session, a batch on its way) has one table:

    class DoorState(Enum):
        OPEN = auto()
        SHUT = auto()

    class Pushed: ...                                           # an event: a class, or a member of an Enum

    DOOR = TransitionTable(DoorState.OPEN, {
        (DoorState.OPEN, Pushed): DoorState.SHUT,
    })

    door = Machine(DOOR)
    door.on(Pushed())                                           # door.state is SHUT; once more raises IllegalTransition

`draw` makes the drawings in the docs from the table, so they cannot differ.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from enum import Enum
from typing import Generic, NamedTuple, TypeVar

from qmq.errors import IllegalTransition, require

S = TypeVar("S", bound=Enum)
F = TypeVar("F")

_EVENT_TYPES = Enum, type

TRANSITIONS_KEPT = 100
"""Length of a history, in which a person can see the way to a state."""


class Transition(NamedTuple):
    """Transition of a machine; `at_ms` is the time by its owner's clock, or 0 if the owner has none."""

    before: Enum
    event: str
    after: Enum
    at_ms: int

    def __str__(self) -> str:
        return f"{self.at_ms} {self.before.name} -- {self.event} -> {self.after.name}"


class TransitionTable(Generic[S]):
    """Table of legal transitions. A module's constant, shared by all machines of one kind.

    Args:
        initial: first state of a machine.
        moves: (state, event type) -> next state. An event type is a class or a member of an Enum.
    """

    def __init__(self, initial: S, moves: Mapping[tuple[S, object], S]) -> None:
        self.initial = initial
        self.moves: dict[tuple[S, object], S] = dict(moves)
        self.following: dict[S, dict[object, tuple[S, str]]] = {state: {} for state in type(initial)}
        """State -> event type -> next state, and the event's name. Looked up twice per batch of messages."""
        for (state, event), after in self.moves.items():
            self.following[state][event] = after, event_name(event)
        self.illegal: int = 0
        """Number of illegal events, over all machines of the kind."""
        unreachable = set(type(initial)) - self._reachable()
        require(not unreachable, f"every state of {self.name} can be reached, but {unreachable}")

    @property
    def name(self) -> str:
        return type(self.initial).__name__

    def after(self, state: S, event: object) -> S:
        """Return the state after `event`.

        Raises:
            IllegalTransition: the table has no such transition.
        """
        after = self.moves.get((state, event_type(event)))
        if after is None:
            self.illegal += 1
            raise IllegalTransition(f"{self.name}: {event_name(event)} cannot happen in {state.name}")
        return after

    def knows(self, state: S, event: object) -> bool:
        """Return whether `event` is legal in `state`."""
        return (state, event_type(event)) in self.moves

    def _reachable(self) -> set[S]:
        found, frontier = {self.initial}, [self.initial]
        while frontier:
            state = frontier.pop()
            following = {after for (before, _), after in self.moves.items() if before is state} - found
            found |= following
            frontier += following
        return found


class Machine(Generic[S]):
    """One state machine. Its owner makes it, calls it on its own loop, and drops it at the end.

    Args:
        history: store of its moves; machines with short lives share one.
    """

    __slots__ = ("history", "state", "table")

    def __init__(self, table: TransitionTable[S], history: deque[Transition] | None = None) -> None:
        self.table: TransitionTable[S] = table
        self.state: S = table.initial
        self.history: deque[Transition] = deque(maxlen=TRANSITIONS_KEPT) if history is None else history

    def on(self, event: object, *, at_ms: int = 0) -> S:
        """Move by `event` and return the new state.

        Raises:
            IllegalTransition: the table has no such transition. State is unchanged.
        """
        before = self.state
        move = self.table.following[before].get(event if isinstance(event, _EVENT_TYPES) else type(event))
        if move is None:
            return self.table.after(before, event)  # raises
        self.state, name = move
        self.history.append(Transition(before, name, self.state, at_ms))
        return self.state

    def may(self, event: object) -> bool:
        """Return whether `event` is legal now."""
        return self.table.knows(self.state, event)


class Life(Machine[S], Generic[S, F]):
    """A machine with facts in each state: `now` holds those of the present one.

    Args:
        facts: class of the facts of each state.
        now: facts of the initial state.
    """

    __slots__ = ("_facts", "now")

    def __init__(self, table: TransitionTable[S], facts: Mapping[S, type], now: F) -> None:
        super().__init__(table)
        self._facts = facts
        self.now: F = now

    def enter(self, event: object, now: F, *, at_ms: int) -> S:
        """Move by `event` to a state with the facts `now`. Raises IllegalTransition: state is unchanged."""
        after = self.table.after(self.state, event)
        require(type(now) is self._facts[after], f"{after.name} does not have facts of type {type(now).__name__}")
        self.on(event, at_ms=at_ms)
        self.now = now
        return after

    @property
    def is_legal(self) -> bool:
        """Whether the state was reached by its table's last move, and has its own facts. For the simulators."""
        came_to = self.history[-1].after if self.history else self.table.initial
        return self.state is came_to and type(self.now) is self._facts[self.state]


def event_type(event: object) -> object:
    """Return the type of an event: its class, or the Enum member itself."""
    return event if isinstance(event, _EVENT_TYPES) else type(event)


def event_name(event: object) -> str:
    """Return an event's name in drawings and histories."""
    kind = event_type(event)
    return kind.name if isinstance(kind, Enum) else getattr(kind, "__name__", str(kind))


def draw(table: TransitionTable[S]) -> str:
    """Draw a table as text, in the order of its states: `STATE`, then an arrow for each of its events."""
    width = max((len(event_name(event)) for _, event in table.moves), default=0)
    lines = []
    for state in type(table.initial):
        lines.append(f"{state.name}{'  (begins here)' if state is table.initial else ''}")
        lines += [
            f"    {event_name(event):<{width}} -> {after.name}"
            for (before, event), after in table.moves.items()
            if before is state
        ]
    return "\n".join(lines) + "\n"
