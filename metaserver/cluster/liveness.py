"""Core. Which broker is up, and which group takes messages: what heartbeats say, here and at other metaservers.

A broker beats at one metaserver, in a numbered *session*; what all must know of it is one row that all of them read.
Its own metaserver judges by the beats. The others believe the row while that metaserver lives. A stored "down" holds
until a new session begins; a stored "up" holds until somebody asked the broker and got no answer. So a metaserver that
restarts neither forgets that a broker is down nor takes one for dead that is only about to come back, and a broker that
moves to another metaserver is up all the time. While the database is away, sessions here and the last rows go on.

    Register ─> claim ─> join ─> beat … beat ─> leave ─> asked on its control port ─> answered: up │ not: down
                                      └─ silent for the timeout ─> asked, too

A clock that stands still while the process does. A process that was stopped, or a machine that was suspended, has not
listened meanwhile: by the wall, every broker would have been silent, and it would call them all down.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from qmq.errors import OperatorError
from qmq.metaserver.cluster.damping import Damping
from qmq.metaserver.cluster.metaservers import Peers
from qmq.metaserver.model import Broker, BrokerKey, Group, ReplicaState, SightingRow

ASK_AGAIN_MS = 200
ASK_EACH_MS = 10
"""A broker that nobody hears is asked again after 200 ms, then after twice as long, up to the timeout; where there are
many brokers, up to so long for each, as an answer costs about 3 ms."""


STOP_ONE = (
    "Stop the process that is not to go on, and delete its directory. This one is accepted once the other is stopped. "
    "A further copy of the group gets an empty directory and a name of its own (AddBroker, ReplaceBroker)"
)
"""What to do about two processes with one data directory."""


class PlaceTaken(OperatorError):
    """Another process with another data directory holds this broker's place. Stop one of them, then start again."""


@dataclass(slots=True)
class Sighting:
    """The newest session of a broker that we know of."""

    session: str
    metaserver: str
    incarnation: str
    up: bool
    state: ReplicaState | None = None
    """None until the first heartbeat."""
    seen_ms: int = 0
    live: bool = False
    """Its stream ends here, and has not ended."""
    ask_ms: int | None = None
    """When to ask the broker next; None: somebody hears it."""
    stored: str = ""
    """The session that the row names, as far as we know."""
    asked: int = 0
    """How often it was asked since nobody hears it."""
    suspected: bool = False
    """A broker here says that it is gone: it is asked once, though the metaserver that hears it lives."""


@dataclass(frozen=True, slots=True)
class Question:
    """Somebody should ask this broker on its control port whether it is there."""

    key: BrokerKey
    session: str
    incarnation: str


class Liveness:
    """Signs of life of all brokers. Created by main, lives as long as the process; call it from the loop only.

    Args:
        own: id of this metaserver.
        timeout_ms: silence after which a broker, or a metaserver, is doubted.
    """

    def __init__(self, own: str, *, timeout_ms: int) -> None:
        self.own = own
        self.timeout_ms = timeout_ms
        self.version = 0
        """Raised by each change of an answer that clients may see."""
        self.peers = Peers(timeout_ms=timeout_ms)
        self._damping = Damping()
        self._presumed_until_ms = 0
        self._presumed_brokers: dict[BrokerKey, str] = {}
        """Their incarnations; empty once the time is over."""
        self._sightings: dict[BrokerKey, Sighting] = {}
        self._claims: dict[BrokerKey, tuple[str, int]] = {}
        self._dirty: dict[BrokerKey, None] = {}
        self._sessions = 0

    # -- sessions here --------------------------------------------------------------------------------------------

    def check_free(self, key: BrokerKey, incarnation: str, *, now_ms: int, has_moved: bool = False) -> None:
        """Raise PlaceTaken if another incarnation holds the place.

        Args:
            has_moved: it comes from another machine than the one that was heard last, or its directory is at another
                place. One of the two directories is a copy.
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
        """Note that a process registered as `key`; raises PlaceTaken as `check_free` does."""
        self.check_free(key, incarnation, now_ms=now_ms)
        self._claims[key] = (incarnation, now_ms)

    def join(self, key: BrokerKey, incarnation: str, *, now_ms: int) -> str:
        """Begin a session here; return its name. Raises PlaceTaken as `claim` does."""
        self.check_free(key, incarnation, now_ms=now_ms)
        self._claims.pop(key, None)
        before = self._sightings.get(key)
        session = self._new_session()
        self._sightings[key] = Sighting(
            session,
            self.own,
            incarnation,
            up=True,
            seen_ms=now_ms,
            live=True,
            state=before.state if before and before.incarnation == incarnation else None,
            stored=before.stored if before else "",
        )
        self._changed(key)
        return session

    def beat(self, key: BrokerKey, session: str, state: ReplicaState, *, now_ms: int) -> bool:
        """Note a heartbeat. False: a newer session of the same broker took over, end this one."""
        sighting = self._sightings.get(key)
        if sighting is None or not sighting.live or not _same_stream(sighting.session, session):
            return False
        state = self._damping.damped(key, state, now_ms=now_ms)
        before, was_up = sighting.state, sighting.up
        sighting.seen_ms, sighting.state, sighting.up = now_ms, state, True
        sighting.ask_ms, sighting.asked = None, 0
        if not was_up or before is None or (before is not state and essence(before) != essence(state)):
            self._changed(key)
        return True

    def leave(self, key: BrokerKey, session: str, *, now_ms: int) -> None:
        """Note that a stream ended: that process is gone, or it is on its way to another metaserver. It is asked."""
        sighting = self._sightings.get(key)
        if sighting is not None and sighting.live and _same_stream(sighting.session, session):
            sighting.live = False
            sighting.ask_ms = now_ms if sighting.up else None

    # -- what others see ------------------------------------------------------------------------------------------

    def take_rows(self, rows: Sequence[SightingRow], *, now_ms: int, are_all: bool = False) -> None:
        """Take in rows that were read from the database, in any order.

        Args:
            are_all: the database has no others. What it lacks of ours it has lost: it was put back.
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
        """Whether our live session outlives a row of another one."""
        if not sighting.live:
            return False
        if sighting.stored == sighting.session and row.up:
            return False  # the broker has moved, and our stream has only not noticed yet
        sighting.stored = row.session  # ours began later, or the other one is over: our row will replace this one
        self._dirty[row.key] = None
        return True

    def _store_again(self, key: BrokerKey) -> None:
        sighting = self._sightings[key]
        if sighting.live and sighting.stored:
            sighting.stored = ""
            self._dirty[key] = None

    def _adopt(self, row: SightingRow, *, now_ms: int) -> None:
        ours = row.up and row.metaserver == self.own  # a session of ours that ended before its row came back to us
        self._sightings[row.key] = Sighting(
            row.session,
            row.metaserver,
            row.incarnation,
            row.up,
            row.state,
            seen_ms=now_ms,
            stored=row.session,
            ask_ms=now_ms if ours else None,
        )
        self._dirty.pop(row.key, None)
        self.version += 1

    def _agree(self, sighting: Sighting, row: SightingRow, *, now_ms: int) -> None:
        sighting.stored = row.session
        if row.key in self._dirty:
            return  # what we are about to store is newer
        if sighting.live:
            if sighting.up and not row.up:  # somebody took it for dead, and we hear it: say so in a new session
                stream, _, number = sighting.session.partition("+")
                sighting.session = f"{stream}+{int(number or 0) + 1}"
                self._changed(row.key)
            elif sighting.state and (row.state is None or essence(sighting.state) != essence(row.state)):
                self._dirty[row.key] = None  # we stored what it says now: the row was put back
            return
        if row.up and sighting.metaserver == self.own:
            return  # our own words
        if (sighting.up, sighting.state) != (row.up, row.state):
            sighting.up, sighting.state, sighting.seen_ms = row.up, row.state, now_ms
            self.version += 1

    def forget(self, keys: Iterable[BrokerKey]) -> None:
        """Drop what is known about brokers that no longer exist."""
        keys = list(keys)
        self._damping.forget(keys)
        for key in keys:
            self._claims.pop(key, None)
            self._dirty.pop(key, None)
            if self._sightings.pop(key, None) is not None:
                self.version += 1

    # -- doubts ---------------------------------------------------------------------------------------------------

    def serve(self, brokers: Iterable[Broker], *, now_ms: int) -> None:
        """Brokers can come back from now on: what is presumed until they had the time holds for one timeout.

        Args:
            brokers: all that the rows tell of. Who registers only now, for the first time, is not on its way back.
        """
        self._presumed_until_ms = now_ms + self.timeout_ms
        unknown = (broker for broker in brokers if broker.incarnation and broker.key not in self._sightings)
        self._presumed_brokers = {broker.key: broker.incarnation for broker in unknown}

    def tick(self, *, now_ms: int) -> None:
        """Notice silence: of brokers whose stream stays open, and of metaservers. Call it once `quiet_ms` are over."""
        if self._presumed_brokers and now_ms >= self._presumed_until_ms:
            self._presumed_brokers = {}
            self.version += 1  # who was told what was presumed must hear that it is over
        for sighting in self._sightings.values():
            if sighting.up and sighting.metaserver == self.own and not sighting.live:
                continue  # it is being asked since its stream ended
            if not self._is_doubtful(sighting, now_ms):
                sighting.ask_ms, sighting.asked = None, 0
            elif sighting.ask_ms is None:
                sighting.ask_ms = now_ms

    def quiet_ms(
        self, *, now_ms: int, silence_ms: int | None = None, brokers: Iterable[BrokerKey] | None = None
    ) -> int:
        """Return for how long none of `brokers`, by default of all, has been silent for `silence_ms`, by default the
        timeout, of those whom this metaserver hears; 0: somebody is doubted, or others hear some."""
        if self._presumed_brokers or any(not one.live or one.ask_ms is not None for one in self._sightings.values()):
            return 0
        known = self._sightings
        timed = known.values() if brokers is None else [known[key] for key in brokers if key in known]
        oldest_ms = min((one.seen_ms for one in timed), default=now_ms)
        return max(0, oldest_ms + (silence_ms or self.timeout_ms) - now_ms)

    def _is_doubtful(self, sighting: Sighting, now_ms: int) -> bool:
        if sighting.live:
            return sighting.up and now_ms - sighting.seen_ms > self.timeout_ms
        if not sighting.up:  # without the database nobody could tell us that it is back
            return self.peers.is_unread(now_ms=now_ms)
        if sighting.suspected:
            return True
        return now_ms >= self._presumed_until_ms and self.peers.is_silent(sighting.metaserver, now_ms=now_ms)

    def suspect(self, key: BrokerKey, *, now_ms: int) -> bool:
        """Let a broker be asked that another metaserver hears, as long as that one stands still unnoticed; False: it
        is heard here, or down."""
        sighting = self._sightings.get(key)
        if sighting is None or sighting.live or not sighting.up:
            return False
        sighting.suspected = True
        sighting.ask_ms = sighting.ask_ms or now_ms
        return True

    def to_ask(self, *, now_ms: int) -> list[Question]:
        """Return who should be asked now. Each question must get an answer with `answered`; until then it is not asked
        again before its next turn."""
        due = [
            Question(key, sighting.session, sighting.incarnation)
            for key, sighting in self._sightings.items()
            if sighting.ask_ms is not None and sighting.ask_ms <= now_ms
        ]
        for question in due:
            sighting = self._sightings[question.key]
            wait_ms = ASK_AGAIN_MS << min(sighting.asked, 10)
            sighting.ask_ms = now_ms + min(wait_ms, max(self.timeout_ms, ASK_EACH_MS * len(self._sightings)))
            sighting.asked += 1
        return due

    def doubt(self, key: BrokerKey) -> Question | None:
        """The question that would free a place: None if nobody holds it, or somebody hears its holder."""
        sighting = self._sightings.get(key)
        if sighting is None or not sighting.up or sighting.ask_ms is None:
            return None
        return Question(key, sighting.session, sighting.incarnation)

    def answered(self, question: Question, state: ReplicaState | None, *, now_ms: int) -> None:
        """Note the answer to a question; None: there was none, or another process gave it."""
        sighting = self._sightings.get(question.key)
        if sighting is None or sighting.session != question.session or sighting.ask_ms is None:
            return  # it is heard again, here or at another metaserver
        sighting.suspected = False
        if state is None and sighting.up:
            sighting.up, sighting.asked = False, 0
            self._changed(question.key)
        elif state is not None and (not sighting.up or not sighting.state or essence(sighting.state) != essence(state)):
            if not sighting.up:
                self._dirty.pop(question.key, None)  # nobody needs to hear any more that it was down
            sighting.up, sighting.state, sighting.seen_ms = True, state, now_ms
            self.version += 1

    # -- what to store --------------------------------------------------------------------------------------------

    @property
    def has_news(self) -> bool:
        """Whether `news` has something to store."""
        return bool(self._dirty)

    def news(self) -> list[SightingRow]:
        """Return the rows to store; then tell `stored` or `not_stored`, before any row is read."""
        rows = []
        for key in self._dirty:
            sighting = self._sightings[key]
            if sighting.live:
                rows.append(_row(key, sighting, begins=sighting.session != sighting.stored))
            elif not sighting.up and sighting.stored:
                # A session that ended before it was stored must not replace a newer one: only the older one is down.
                rows.append(_row(key, replace(sighting, session=sighting.stored), begins=False))
        self._dirty.clear()
        return rows

    def stored(self, rows: Iterable[SightingRow]) -> None:
        for row in rows:
            if (sighting := self._sightings.get(row.key)) is not None and sighting.session == row.session:
                sighting.stored = row.session

    def not_stored(self, rows: Iterable[SightingRow]) -> None:
        """They are due again."""
        self._dirty.update((row.key, None) for row in rows if row.key in self._sightings)

    def rows(self) -> list[SightingRow]:
        """All that is known, for a snapshot."""
        return [_row(key, sighting, begins=False) for key, sighting in self._sightings.items()]

    # -- answers --------------------------------------------------------------------------------------------------

    def state(self, key: BrokerKey, *, now_ms: int) -> ReplicaState | None:
        """What a broker that is up last said; None when it is down or has not said anything yet."""
        sighting = self._sightings.get(key)
        return sighting.state if sighting is not None and sighting.up else None

    def last_state(self, key: BrokerKey) -> ReplicaState | None:
        """What a broker said last, whether it is up or not."""
        sighting = self._sightings.get(key)
        return sighting.state if sighting is not None else None

    def is_up(self, key: BrokerKey, *, now_ms: int) -> bool:
        sighting = self._sightings.get(key)
        if sighting is not None and sighting.up:
            return True
        claimed = self._claims.get(key)
        return claimed is not None and now_ms - claimed[1] <= self.timeout_ms

    def may_be_up(self, broker: Broker, *, now_ms: int) -> bool:
        """Like `is_up`, but just after our own start a broker that registered before, and of which no row tells
        anything, counts as up: taking it for dead would let its part be given away."""
        return self.is_up(broker.key, now_ms=now_ms) or self._presumed(broker, now_ms)

    def is_writable(self, group: Group, *, now_ms: int) -> bool:
        """Whether the group's master takes messages in the group's term, as far as we know.

        A presumption costs a producer one refused attempt.
        """
        if group.master is None:
            return False
        if self._presumed(group.master, now_ms):
            return True
        state = self.state(group.master.key, now_ms=now_ms)
        return state is not None and state.writable and state.is_master_in(group.term)

    def silent_ms(self, key: BrokerKey, *, now_ms: int) -> int:
        """How long nothing came on a broker's open stream here; 0: it is down, or beats at another metaserver."""
        sighting = self._sightings.get(key)
        return now_ms - sighting.seen_ms if sighting is not None and sighting.live and sighting.up else 0

    def where(self, key: BrokerKey) -> str:
        """Id of the metaserver that hears, or last heard, a broker; empty: none ever did."""
        sighting = self._sightings.get(key)
        return sighting.metaserver if sighting else ""

    def mentioned(self) -> set[str]:
        """Ids of other metaservers whose word still counts for something."""
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


def essence(state: ReplicaState) -> tuple[object, ...]:
    """What all metaservers must know of a state; offsets change with every message, and are asked for when needed."""
    return state.role, state.term, state.writable, state.readonly_reasons, state.durability


def _same_stream(session: str, other: str) -> bool:
    """A session that had to begin anew although its stream went on has the same name up to the `+`."""
    return session.partition("+")[0] == other.partition("+")[0]


def _row(key: BrokerKey, sighting: Sighting, *, begins: bool) -> SightingRow:
    return SightingRow(
        key, sighting.session, sighting.metaserver, sighting.incarnation, sighting.up, sighting.state, begins=begins
    )


PAUSE_MS = 2500
"""The clock is read every other second at least; a longer break was no listening."""


class AwakeClock:
    """Milliseconds that this process was awake. Created by main, read by the loop only."""

    def __init__(self) -> None:
        self._slept_ms = 0
        self._read_ms: int | None = None

    def at(self, monotonic_ms: int) -> int:
        """Return the time awake at a monotonic time; it never goes back."""
        if self._read_ms is not None and monotonic_ms - self._read_ms > PAUSE_MS:
            self._slept_ms += monotonic_ms - self._read_ms - PAUSE_MS
        self._read_ms = monotonic_ms
        return monotonic_ms - self._slept_ms
