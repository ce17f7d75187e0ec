"""Core. Liveness of brokers: up or down, and whether their groups accept produces, from heartbeats at all metaservers.

A broker sends heartbeats to one metaserver, in a numbered *session*. All metaservers share one row per broker.

- The metaserver with the session decides by the heartbeats; the others use the row while that metaserver is alive.
- A stored "down" holds until a new session begins.
- A stored "up" holds until a metaserver queried the broker and got no answer.

So a restarted metaserver neither forgets that a broker is down, nor marks one down that is about to reconnect. A broker
that changes its metaserver stays up. While the database is away, sessions here and the last rows stay valid.

    Register ─> claim ─> join ─> beat … beat ─> leave ─> asked on its control port ─> answered: up │ not: down
                                      └─ silent for the timeout ─> asked, too

A group that becomes readonly is published at once: a late producer loses an attempt. A broker that lost its mastership
repeatedly must stay writable for a while before others see it, so that routes do not flap. New terms and operators'
marks are not faults.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from qmq.errors import OperatorError
from qmq.metaserver.cluster.sightings import (
    SIGHTING,
    Peers,
    Sighting,
    SightingEvent,
    SightingState,
    essence,
    row_of,
    same_stream,
)
from qmq.metaserver.model import Broker, BrokerKey, Group, ReplicaState, SightingRow
from qmq.states import TRANSITIONS_KEPT, Machine, Transition

ASK_AGAIN_MS = 200
ASK_EACH_MS = 10
"""A silent broker is asked again after 200 ms, then after twice as long, up to the timeout. With many brokers the
longest wait is ASK_EACH_MS times their number, as a query costs about 3 ms.
"""


STOP_ONE = (
    "Stop the wrong one and delete its directory. This one is accepted once the other is stopped. "
    "A further copy of the group gets an empty directory and a name of its own (AddBroker, ReplaceBroker)"
)
"""Remedy for two processes with one data directory."""


class PlaceTaken(OperatorError):
    """Another process with another data directory serves as this broker. Stop one of them, then start again."""


@dataclass(frozen=True, slots=True)
class Question:
    """Query to make at a broker's control port."""

    key: BrokerKey
    session: str
    incarnation: str


WINDOW_MS = 60_000
LOSSES_FREE = 4
"""Losses within the window that cause no delay: restarts, swaps, operators' experiments."""
HOLD_MS = 2000
HOLD_MS_MAX = 10_000
ORDERS = frozenset({"operator", "draining"})
"""Readonly reasons that come from an operator."""
FLAPPING = "flapping"
"""Readonly reason: the broker is writable, but not for long enough yet."""


@dataclass(slots=True)
class _History:
    term: int = 0
    writable: bool = False
    since_ms: int = 0
    losses_ms: deque[int] = field(default_factory=deque)


class Damping:
    """Recent changes of each broker's readiness. Owned by `Liveness`."""

    def __init__(self) -> None:
        self._histories: dict[BrokerKey, _History] = {}

    def forget(self, keys: Iterable[BrokerKey]) -> None:
        """Drop brokers that no longer exist."""
        for key in keys:
            self._histories.pop(key, None)

    def damped(self, key: BrokerKey, state: ReplicaState, *, now_ms: int) -> ReplicaState:
        """Return the state to publish: `state`, or `state` marked not writable while the broker flaps."""
        history = self._histories.setdefault(key, _History())
        if state.term != history.term:
            history.term, history.writable = state.term, False
            history.losses_ms.clear()
        if state.writable != history.writable:
            history.writable, history.since_ms = state.writable, now_ms
            if not state.writable and ORDERS.isdisjoint(state.readonly_reasons):
                history.losses_ms.append(now_ms)
        while history.losses_ms and history.losses_ms[0] < now_ms - WINDOW_MS:
            history.losses_ms.popleft()
        hold_ms = min((len(history.losses_ms) - LOSSES_FREE) * HOLD_MS, HOLD_MS_MAX)
        if not state.writable or now_ms - history.since_ms >= hold_ms:
            return state
        return replace(state, writable=False, readonly_reasons=(*state.readonly_reasons, FLAPPING))


class Liveness:
    """Liveness of all brokers. Created by main, lives as long as the process; call it from the loop only.

    Args:
        own: id of this metaserver.
        timeout_ms: silence after which a broker or a metaserver is doubted.
    """

    def __init__(self, own: str, *, timeout_ms: int) -> None:
        self.own = own
        self.timeout_ms = timeout_ms
        self.version = 0
        """Raised by each change that clients may see."""
        self.peers = Peers(timeout_ms=timeout_ms)
        self._damping = Damping()
        self._presumed_until_ms = 0
        self._presumed_brokers: dict[BrokerKey, str] = {}
        """Incarnations of brokers that may still reconnect after our start; empty once that time is over."""
        self._sightings: dict[BrokerKey, Sighting] = {}
        self._history: deque[Transition] = deque(maxlen=TRANSITIONS_KEPT)
        self._claims: dict[BrokerKey, tuple[str, int]] = {}
        self._dirty: dict[BrokerKey, None] = {}
        self._sessions = 0

    # -- sessions here --------------------------------------------------------------------------------------------

    def check_free(self, key: BrokerKey, incarnation: str, *, now_ms: int, has_moved: bool = False) -> None:
        """Raise PlaceTaken if another incarnation serves as this broker.

        Args:
            has_moved: the process comes from another machine, or its directory is at another place. One of the two
                directories is a copy.
        """
        claimed, claimed_ms = self._claims.get(key, ("", 0))
        sighting = self._sightings.get(key)
        holders = {claimed} if now_ms - claimed_ms <= self.timeout_ms else set()
        if sighting is not None and sighting.up:
            holders.add(sighting.incarnation)
        if holders - {"", incarnation}:
            raise PlaceTaken(
                f"another process serves as {key} at this moment, with another data directory. Stop it first, or give "
                "this process a hostname and serve_port of its own and add it with AddBroker"
            )
        if has_moved and sighting is not None and sighting.up:
            raise PlaceTaken(
                f"another process serves as {key} at this moment, from another address or directory: one of the two "
                f"data directories is a copy of the other. {STOP_ONE}"
            )

    def claim(self, key: BrokerKey, incarnation: str, *, now_ms: int) -> None:
        """Record that a process registered as `key`. Raises PlaceTaken as `check_free` does."""
        self.check_free(key, incarnation, now_ms=now_ms)
        self._claims[key] = (incarnation, now_ms)

    def join(self, key: BrokerKey, incarnation: str, *, now_ms: int) -> str:
        """Begin a session here; return its name. Raises PlaceTaken as `claim` does."""
        self.check_free(key, incarnation, now_ms=now_ms)
        self._claims.pop(key, None)
        before = self._sightings.get(key)
        session = self._new_session()
        sighting = self._sightings[key] = Sighting(
            session,
            self.own,
            incarnation,
            Machine(SIGHTING, self._history),
            seen_ms=now_ms,
            state=before.state if before and before.incarnation == incarnation else None,
            stored=before.stored if before else "",
        )
        sighting.on(SightingEvent.JOIN, now_ms=now_ms)
        self._changed(key)
        return session

    def beat(self, key: BrokerKey, session: str, state: ReplicaState, *, now_ms: int) -> bool:
        """Record a heartbeat. False: a newer session replaced this one, which must end."""
        sighting = self._sightings.get(key)
        if sighting is None or not sighting.live or not same_stream(sighting.session, session):
            return False
        state = self._damping.damped(key, state, now_ms=now_ms)
        before, was_up = sighting.state, sighting.up
        sighting.seen_ms = now_ms
        sighting.state = state
        if sighting.life.state is not SightingState.HEARD:
            sighting.on(SightingEvent.BEAT, now_ms=now_ms)
        if not was_up or before is None or (before is not state and essence(before) != essence(state)):
            self._changed(key)
        return True

    def leave(self, key: BrokerKey, session: str, *, now_ms: int) -> None:
        """Record the end of a stream. The process has ended or changes its metaserver, so the broker is asked."""
        sighting = self._sightings.get(key)
        if sighting is not None and sighting.live and same_stream(sighting.session, session):
            sighting.on(SightingEvent.LEAVE, now_ms=now_ms)

    # -- rows of other metaservers --------------------------------------------------------------------------------

    def take_rows(self, rows: Sequence[SightingRow], *, now_ms: int, are_all: bool = False) -> None:
        """Apply rows that were read from the database, in any order.

        Args:
            are_all: the database has no other rows. If ours are missing, it was restored from an older copy.
        """
        if are_all:
            for key in self._sightings.keys() - {row.key for row in rows}:
                self._store_again(key)
        for row in rows:
            sighting = self._sightings.get(row.key)
            if sighting is None or (sighting.session != row.session and not self._stays(sighting, row)):
                self._adopt(row, now_ms=now_ms)
            elif sighting.session == row.session:
                self._agree(sighting, row, now_ms=now_ms)

    def _stays(self, sighting: Sighting, row: SightingRow) -> bool:
        """Return whether our open session remains, despite a row of another session."""
        if not sighting.live:
            return False
        if sighting.stored == sighting.session and row.up:
            return False  # the broker has moved, and the end of our stream has not arrived yet
        sighting.stored = row.session  # ours began later, or the other one ended: our row will replace this one
        self._dirty[row.key] = None
        return True

    def _store_again(self, key: BrokerKey) -> None:
        sighting = self._sightings[key]
        if sighting.live and sighting.stored:
            sighting.stored = ""
            self._dirty[key] = None

    def _adopt(self, row: SightingRow, *, now_ms: int) -> None:
        sighting = self._sightings[row.key] = Sighting(
            row.session,
            row.metaserver,
            row.incarnation,
            Machine(SIGHTING, self._history),
            row.state,
            seen_ms=now_ms,
            stored=row.session,
        )
        if row.up:  # ours: a session that ended here before its row was read back
            ours = row.metaserver == self.own
            sighting.on(SightingEvent.ROW_UP_OURS if ours else SightingEvent.ROW_UP, now_ms=now_ms)
        self._dirty.pop(row.key, None)
        self.version += 1

    def _agree(self, sighting: Sighting, row: SightingRow, *, now_ms: int) -> None:
        sighting.stored = row.session
        if row.key in self._dirty:
            return  # our unstored row is newer
        if sighting.live:
            if sighting.up and not row.up:
                # Marked down elsewhere while our heartbeats continue: publish it in a new session.
                stream, _, number = sighting.session.partition("+")
                sighting.session = f"{stream}+{int(number or 0) + 1}"
                self._changed(row.key)
            elif sighting.state and (row.state is None or essence(sighting.state) != essence(row.state)):
                self._dirty[row.key] = None  # we had stored the current state: the row was restored from an older copy
            return
        if row.up and sighting.metaserver == self.own:
            return  # our own row
        if (sighting.up, sighting.state) != (row.up, row.state):
            if sighting.up != row.up:
                sighting.on(SightingEvent.ROW_UP if row.up else SightingEvent.ROW_DOWN, now_ms=now_ms)
            sighting.state = row.state
            sighting.seen_ms = now_ms
            self.version += 1

    def forget(self, keys: Iterable[BrokerKey]) -> None:
        """Drop brokers that no longer exist."""
        keys = list(keys)
        self._damping.forget(keys)
        for key in keys:
            self._claims.pop(key, None)
            self._dirty.pop(key, None)
            if self._sightings.pop(key, None) is not None:
                self.version += 1

    # -- silence and queries --------------------------------------------------------------------------------------

    def serve(self, brokers: Iterable[Broker], *, now_ms: int) -> None:
        """Begin to accept brokers.

        For one timeout, registered brokers without a row may still reconnect and count as up.

        Args:
            brokers: all brokers of the rows.
        """
        self._presumed_until_ms = now_ms + self.timeout_ms
        unknown = (broker for broker in brokers if broker.incarnation and broker.key not in self._sightings)
        self._presumed_brokers = {broker.key: broker.incarnation for broker in unknown}

    def tick(self, *, now_ms: int) -> None:
        """Detect silence of brokers with an open stream, and of metaservers. Call it after `quiet_ms`."""
        if self._presumed_brokers and now_ms >= self._presumed_until_ms:
            self._presumed_brokers = {}
            self.version += 1  # clients must see that the presumption is over
        for sighting in self._sightings.values():
            is_doubtful = self._is_doubtful(sighting, now_ms)
            if is_doubtful != sighting.is_asked:
                sighting.on(SightingEvent.SILENCE if is_doubtful else SightingEvent.SILENCE_ENDS, now_ms=now_ms)

    def quiet_ms(
        self, *, now_ms: int, silence_ms: int | None = None, brokers: Iterable[BrokerKey] | None = None
    ) -> int:
        """Return how long no broker with a stream here can reach `silence_ms` of silence.

        0: a broker is doubted, or has its stream elsewhere. Defaults: all brokers, and the timeout.
        """
        known = self._sightings
        if self._presumed_brokers or any(
            seen.life.state is not SightingState.HEARD and seen.life.state is not SightingState.LOST
            for seen in known.values()
        ):
            return 0
        timed = known.values() if brokers is None else [known[key] for key in brokers if key in known]
        oldest_ms = min((sighting.seen_ms for sighting in timed), default=now_ms)
        return max(0, oldest_ms + (silence_ms or self.timeout_ms) - now_ms)

    def _is_doubtful(self, sighting: Sighting, now_ms: int) -> bool:
        """Return whether the broker should be asked, now that time has passed."""
        state = sighting.life.state
        if state in (SightingState.LEFT, SightingState.SUSPECTED):
            return True
        if sighting.live:
            return sighting.up and now_ms - sighting.seen_ms > self.timeout_ms
        if not sighting.up:
            return self.peers.is_unread(now_ms=now_ms)
        return now_ms >= self._presumed_until_ms and self.peers.is_silent(sighting.metaserver, now_ms=now_ms)

    def suspect(self, key: BrokerKey, *, now_ms: int) -> bool:
        """Schedule a query to a broker of another metaserver; its row is no proof if that metaserver hangs.

        False: its stream is here, or it is down.
        """
        sighting = self._sightings.get(key)
        if sighting is None or sighting.live or not sighting.up:
            return False
        sighting.on(SightingEvent.SUSPICION, now_ms=now_ms)
        return True

    def to_ask(self, *, now_ms: int) -> list[Question]:
        """Return the queries to make now.

        Pass each result to `answered`. The next query to the same broker is due after a growing wait.
        """
        due = [
            Question(key, sighting.session, sighting.incarnation)
            for key, sighting in self._sightings.items()
            if sighting.is_asked and sighting.ask_ms <= now_ms
        ]
        for question in due:
            sighting = self._sightings[question.key]
            wait_ms = ASK_AGAIN_MS << min(sighting.asked, 10)
            sighting.ask_ms = now_ms + min(wait_ms, max(self.timeout_ms, ASK_EACH_MS * len(self._sightings)))
            sighting.asked += 1
        return due

    def doubt(self, key: BrokerKey) -> Question | None:
        """Return the query that may free a place; None: the place is free, or heartbeats come from its holder."""
        sighting = self._sightings.get(key)
        if sighting is None or not sighting.up or not sighting.is_asked:
            return None
        return Question(key, sighting.session, sighting.incarnation)

    def answered(self, question: Question, state: ReplicaState | None, *, now_ms: int) -> None:
        """Record the result of a query; None: no answer, or one of another process."""
        sighting = self._sightings.get(question.key)
        if sighting is None or sighting.session != question.session or not sighting.is_asked:
            return  # heartbeats have resumed, here or at another metaserver
        was_up = sighting.up
        if state is None:
            sighting.on(SightingEvent.NO_ANSWER, now_ms=now_ms)
            if was_up:
                self._changed(question.key)
            return
        ours = sighting.metaserver == self.own
        sighting.on(SightingEvent.ANSWER_TO_US if ours else SightingEvent.ANSWER, now_ms=now_ms)
        if not was_up or not sighting.state or essence(sighting.state) != essence(state):
            if not was_up:
                self._dirty.pop(question.key, None)  # the unstored "down" is obsolete
            sighting.state = replace(state, has_offsets=False)  # they age: this broker sends no heartbeats here
            sighting.seen_ms = now_ms
            self.version += 1

    # -- rows to store --------------------------------------------------------------------------------------------

    @property
    def has_news(self) -> bool:
        """Return whether `news` has rows to store."""
        return bool(self._dirty)

    def news(self) -> list[SightingRow]:
        """Return the rows to store; then call `stored` or `not_stored`, before any row is read."""
        rows = []
        for key in self._dirty:
            sighting = self._sightings[key]
            if sighting.live:
                rows.append(row_of(key, sighting, begins=sighting.session != sighting.stored))
            elif not sighting.up and sighting.stored:
                # A session that ended before it was stored must not replace a newer one: only the older one is down.
                rows.append(row_of(key, replace(sighting, session=sighting.stored), begins=False))
        self._dirty.clear()
        return rows

    def stored(self, rows: Iterable[SightingRow]) -> None:
        for row in rows:
            if (sighting := self._sightings.get(row.key)) is not None and sighting.session == row.session:
                sighting.stored = row.session

    def not_stored(self, rows: Iterable[SightingRow]) -> None:
        """Mark the rows as unstored again."""
        self._dirty.update((row.key, None) for row in rows if row.key in self._sightings)

    def rows(self) -> list[SightingRow]:
        """Return all rows, for a snapshot."""
        return [row_of(key, sighting, begins=False) for key, sighting in self._sightings.items()]

    # -- answers --------------------------------------------------------------------------------------------------

    def state(self, key: BrokerKey) -> ReplicaState | None:
        """Return the last state of a broker that is up; None: it is down, or has not sent a heartbeat."""
        sighting = self._sightings.get(key)
        return sighting.state if sighting is not None and sighting.up else None

    def last_state(self, key: BrokerKey) -> ReplicaState | None:
        """Return the last state of a broker, up or down."""
        sighting = self._sightings.get(key)
        return sighting.state if sighting is not None else None

    def is_up(self, key: BrokerKey, *, now_ms: int) -> bool:
        sighting = self._sightings.get(key)
        if sighting is not None and sighting.up:
            return True
        claimed = self._claims.get(key)
        return claimed is not None and now_ms - claimed[1] <= self.timeout_ms

    def may_be_up(self, broker: Broker, *, now_ms: int) -> bool:
        """Return `is_up`, or True for a registered broker without a row shortly after our start.

        Otherwise its role could be given to another broker while it reconnects.
        """
        return self.is_up(broker.key, now_ms=now_ms) or self._presumed(broker, now_ms)

    def is_writable(self, group: Group, *, now_ms: int) -> bool:
        """Return whether the group's master accepts produces in the group's term.

        A wrong presumption costs a producer one rejected attempt.
        """
        if group.master is None:
            return False
        if self._presumed(group.master, now_ms):
            return True
        state = self.state(group.master.key)
        return state is not None and state.writable and state.is_master_in(group.term)

    def silent_ms(self, key: BrokerKey, *, now_ms: int) -> int:
        """Return the silence of a broker's open stream here; 0: it is down, or its stream is elsewhere."""
        sighting = self._sightings.get(key)
        return now_ms - sighting.seen_ms if sighting is not None and sighting.live and sighting.up else 0

    def where(self, key: BrokerKey) -> str:
        """Return the id of the metaserver of a broker's newest session; empty: there was none."""
        sighting = self._sightings.get(key)
        return sighting.metaserver if sighting else ""

    def mentioned(self) -> set[str]:
        """Return the ids of the other metaservers that decide about brokers stored as up."""
        named = {sighting.metaserver for sighting in self._sightings.values() if sighting.up and not sighting.live}
        return named - {self.own}

    def _presumed(self, broker: Broker, now_ms: int) -> bool:
        known_before = self._presumed_brokers.get(broker.key) == broker.incarnation
        return known_before and broker.key not in self._sightings and now_ms < self._presumed_until_ms

    def _changed(self, key: BrokerKey) -> None:
        self._dirty[key] = None
        self.version += 1

    def _new_session(self) -> str:
        self._sessions += 1
        return f"{self.own}.{self._sessions}"
