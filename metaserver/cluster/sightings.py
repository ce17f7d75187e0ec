"""Core. Sightings: the newest session of each broker and its table of states, and the counters of other metaservers.

Time is the time this process was awake (`AwakeClock`). After a suspended machine resumes, every broker would otherwise
have been silent by the wall clock, and be marked down.

Each metaserver raises a counter in its row, and readers measure its pauses with their own clocks. After the database
was away, every row gets one timeout to advance.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto

from qmq.metaserver.model import BrokerKey, MetaserverRow, ReplicaState, SightingRow
from qmq.states import Machine, TransitionTable


class SightingState(Enum):
    """State of a broker's newest session, at one metaserver."""

    DOWN = auto()
    HEARD = auto()
    SILENT = auto()
    LOST = auto()
    LEFT = auto()
    ELSEWHERE = auto()
    DOUBTED = auto()
    SUSPECTED = auto()
    UNREAD = auto()


class SightingEvent(Enum):
    """Changes of that state."""

    JOIN = auto()
    BEAT = auto()
    LEAVE = auto()
    ROW_UP = auto()
    ROW_UP_OURS = auto()
    """The row names this metaserver, but no stream is open."""
    ROW_DOWN = auto()
    SILENCE = auto()
    """Of the broker, of its metaserver, or of the database."""
    SILENCE_ENDS = auto()
    SUSPICION = auto()
    """A slave here lost its connection to this master."""
    ANSWER = auto()
    ANSWER_TO_US = auto()
    """The broker is up, and its newest session was here."""
    NO_ANSWER = auto()


_S, _E = SightingState, SightingEvent
SIGHTING = TransitionTable(
    _S.DOWN,
    {
        (_S.DOWN, _E.JOIN): _S.HEARD,
        (_S.DOWN, _E.ROW_UP): _S.ELSEWHERE,
        (_S.DOWN, _E.ROW_UP_OURS): _S.LEFT,
        (_S.DOWN, _E.SILENCE): _S.UNREAD,
        (_S.HEARD, _E.LEAVE): _S.LEFT,
        (_S.HEARD, _E.SILENCE): _S.SILENT,
        (_S.SILENT, _E.BEAT): _S.HEARD,
        (_S.SILENT, _E.SILENCE_ENDS): _S.HEARD,
        (_S.SILENT, _E.LEAVE): _S.LEFT,
        (_S.SILENT, _E.ANSWER_TO_US): _S.SILENT,
        (_S.SILENT, _E.NO_ANSWER): _S.LOST,
        (_S.LOST, _E.BEAT): _S.HEARD,
        (_S.LOST, _E.LEAVE): _S.DOWN,
        (_S.LEFT, _E.SUSPICION): _S.LEFT,
        (_S.LEFT, _E.ANSWER_TO_US): _S.LEFT,
        (_S.LEFT, _E.NO_ANSWER): _S.DOWN,
        (_S.LEFT, _E.ROW_DOWN): _S.DOWN,
        (_S.ELSEWHERE, _E.SILENCE): _S.DOUBTED,
        (_S.ELSEWHERE, _E.SUSPICION): _S.SUSPECTED,
        (_S.ELSEWHERE, _E.ROW_DOWN): _S.DOWN,
        (_S.DOUBTED, _E.SILENCE_ENDS): _S.ELSEWHERE,
        (_S.DOUBTED, _E.SUSPICION): _S.SUSPECTED,
        (_S.DOUBTED, _E.ANSWER): _S.DOUBTED,
        (_S.DOUBTED, _E.NO_ANSWER): _S.DOWN,
        (_S.DOUBTED, _E.ROW_DOWN): _S.DOWN,
        (_S.SUSPECTED, _E.SUSPICION): _S.SUSPECTED,
        (_S.SUSPECTED, _E.ANSWER): _S.DOUBTED,
        (_S.SUSPECTED, _E.NO_ANSWER): _S.DOWN,
        (_S.SUSPECTED, _E.ROW_DOWN): _S.DOWN,
        (_S.UNREAD, _E.SILENCE_ENDS): _S.DOWN,
        (_S.UNREAD, _E.ROW_UP): _S.ELSEWHERE,
        (_S.UNREAD, _E.ANSWER): _S.DOUBTED,
        (_S.UNREAD, _E.ANSWER_TO_US): _S.LEFT,
        (_S.UNREAD, _E.NO_ANSWER): _S.UNREAD,
    },
)
"""The stream is open here in HEARD, SILENT and LOST; in LOST the broker did not answer a query.

LEFT: the stream here ended, and the broker is asked. ELSEWHERE: another metaserver has the stream. DOUBTED: that one is
silent. UNREAD: the broker is down, and asked because the database is away, so no row would report its return."""

LIVE = frozenset({_S.HEARD, _S.SILENT, _S.LOST})
UP = frozenset({_S.HEARD, _S.SILENT, _S.LEFT, _S.ELSEWHERE, _S.DOUBTED, _S.SUSPECTED})
ASKED = frozenset({_S.SILENT, _S.LEFT, _S.DOUBTED, _S.SUSPECTED, _S.UNREAD})


@dataclass(slots=True)
class Sighting:
    """Newest known session of a broker."""

    session: str
    metaserver: str
    incarnation: str
    life: Machine[SightingState]
    state: ReplicaState | None = None
    """None until the first heartbeat."""
    seen_ms: int = 0
    ask_ms: int = 0
    """Time of the next query in the present series."""
    asked: int = 0
    """Number of queries in that series."""
    stored: str = ""
    """Session in the stored row."""

    @property
    def live(self) -> bool:
        return self.life.state in LIVE

    @property
    def up(self) -> bool:
        return self.life.state in UP

    @property
    def is_asked(self) -> bool:
        return self.life.state in ASKED

    def on(self, event: SightingEvent, *, now_ms: int) -> None:
        """Change the state. The first query of a series is due at once."""
        was_asked = self.is_asked
        self.life.on(event, at_ms=now_ms)
        if self.is_asked and not was_asked:
            self.ask_ms = now_ms
            self.asked = 0


def row_of(key: BrokerKey, sighting: Sighting, *, begins: bool) -> SightingRow:
    return SightingRow(
        key, sighting.session, sighting.metaserver, sighting.incarnation, sighting.up, sighting.state, begins=begins
    )


def essence(state: ReplicaState) -> tuple[object, ...]:
    """Return the part of a state that all metaservers need.

    Offsets change with every message and are queried when needed.
    """
    return state.role, state.term, state.writable, state.readonly_reasons, state.durability


def same_stream(session: str, other: str) -> bool:
    """Return whether two sessions belong to one stream: a session that was renamed differs after the `+` only."""
    return session.partition("+")[0] == other.partition("+")[0]


GAP_MS = 3000
"""Readings come about once a second. Over a longer gap, a constant counter proves nothing."""
STOPPED_MS = 24 * 3600 * 1000
"""How long a metaserver that left is named: a stop removes its row, so nothing else would show it."""
FORGOTTEN_TIMEOUTS = 12
"""Timeouts without an advance after which a row is removed."""


@dataclass(slots=True)
class _Peer:
    row: MetaserverRow | None
    advanced_ms: int


class Peers:
    """Metaservers that use the same database. Owned by `Liveness`; used from the loop only."""

    def __init__(self, *, timeout_ms: int) -> None:
        self._timeout_ms = timeout_ms
        self._peers: dict[str, _Peer] = {}
        self._read_ms: int | None = None
        self._stopped: dict[str, int] = {}
        """HTTP address -> when its last row disappeared."""

    @property
    def rows(self) -> list[MetaserverRow]:
        return [peer.row for peer in self._peers.values() if peer.row is not None]

    def read(self, rows: Iterable[MetaserverRow], *, mentioned: Iterable[str] = (), now_ms: int) -> None:
        """Apply all rows, as read just now.

        Args:
            mentioned: ids that sightings name. One without a row gets a timeout to return, too.
        """
        found: dict[str, MetaserverRow | None] = {**dict.fromkeys(mentioned), **{row.id: row for row in rows}}
        after_gap = self._read_ms is None or now_ms - self._read_ms > GAP_MS
        before, self._peers, self._read_ms = self._peers, {}, now_ms
        for id, row in found.items():
            known = before.get(id)
            stands_still = known is not None and (row is None or (known.row is not None and row.beat == known.row.beat))
            self._peers[id] = _Peer(row, known.advanced_ms if known and stands_still and not after_gap else now_ms)
        present = {row.http_address for row in self.rows}
        left = {peer.row.http_address for peer in before.values() if peer.row is not None} - present
        self._stopped = {address: at_ms for address, at_ms in self._stopped.items() if address not in present}
        self._stopped |= dict.fromkeys(left, now_ms)

    def stopped(self, *, now_ms: int) -> list[str]:
        """Return the addresses of metaservers that stopped or were removed within a day and did not return."""
        return sorted(address for address, at_ms in self._stopped.items() if now_ms - at_ms < STOPPED_MS)

    def is_silent(self, id: str, *, now_ms: int) -> bool:
        """Return whether a metaserver's counter did not advance for the timeout, or the database was away.

        Silence only means that its brokers are asked.
        """
        peer = self._peers.get(id)
        if self.is_unread(now_ms=now_ms) or self._read_ms is None:
            return True
        return peer is not None and self._read_ms - peer.advanced_ms > self._timeout_ms

    def is_unread(self, *, now_ms: int) -> bool:
        """Return whether the rows could not be read for the timeout: the database is away."""
        return self._read_ms is None or now_ms - self._read_ms > self._timeout_ms

    def forgotten(self) -> list[str]:
        """Return the ids of rows to remove."""
        if self._read_ms is None:
            return []
        limit = self._read_ms - FORGOTTEN_TIMEOUTS * self._timeout_ms
        return [id for id, peer in self._peers.items() if peer.row is not None and peer.advanced_ms < limit]


PAUSE_MS = 2500
"""The clock is read every 2 s; a longer gap means that the process did not run."""


class AwakeClock:
    """Milliseconds that this process was awake. Created by main, read by the loop only."""

    def __init__(self) -> None:
        self._slept_ms = 0
        self._read_ms: int | None = None

    def at(self, monotonic_ms: int) -> int:
        """Return the time awake at a monotonic time; it never decreases."""
        if self._read_ms is not None and monotonic_ms - self._read_ms > PAUSE_MS:
            self._slept_ms += monotonic_ms - self._read_ms - PAUSE_MS
        self._read_ms = monotonic_ms
        return monotonic_ms - self._slept_ms
