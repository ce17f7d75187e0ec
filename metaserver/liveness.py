"""Core. Which broker is up, and which group takes messages: what heartbeats say, and for how long it holds.

A broker first claims its place (Register), then beats. A process with another data directory may take the place only
when the holder is gone: its stream ended, or its last sign of life is older than the timeout.
"""

from __future__ import annotations

from dataclasses import dataclass

from metaserver.model import Broker, BrokerKey, Group, ReplicaState
from qmq.errors import OperatorError


class PlaceTaken(OperatorError):
    """Another process with another data directory holds this broker's place. Stop one of them, then start again."""


@dataclass(slots=True)
class Sighting:
    """The process that holds a broker's place."""

    incarnation: str
    seen_ms: int
    state: ReplicaState | None = None
    """None until the first heartbeat."""
    session: int = 0
    """Number of the heartbeat stream, so that the end of a replaced stream changes nothing; 0: not beating yet."""
    gone: bool = False
    """Its stream ended."""


class Liveness:
    """Signs of life of all brokers. Created by main, lives as long as the process; call it from the loop only."""

    def __init__(self, *, timeout_ms: int, started_ms: int) -> None:
        self.timeout_ms = timeout_ms
        self._presumed_until_ms = started_ms + timeout_ms
        self._sightings: dict[BrokerKey, Sighting] = {}
        self._sessions = 0

    def claim(self, key: BrokerKey, incarnation: str, *, now_ms: int) -> None:
        """Note that a process registered as `key`; raises PlaceTaken as `check_free` does."""
        self.check_free(key, incarnation, now_ms=now_ms)
        holder = self._sightings.get(key)
        if holder is None or holder.gone or holder.incarnation != incarnation:
            self._sightings[key] = Sighting(incarnation, now_ms)
        else:
            holder.seen_ms = now_ms

    def check_free(self, key: BrokerKey, incarnation: str, *, now_ms: int) -> None:
        """Raise PlaceTaken if another incarnation holds the place and was seen within the timeout."""
        holder = self._sightings.get(key)
        if holder and holder.incarnation != incarnation and self._fresh(holder, now_ms):
            raise PlaceTaken(
                f"another process serves as {key} at this moment, with another data directory. Stop it first, or give "
                "this process a hostname and serve_port of its own and add it with AddBroker"
            )

    def join(self, key: BrokerKey, incarnation: str, *, now_ms: int) -> int:
        """Begin a heartbeat stream; return its session number. Raises PlaceTaken as `claim` does."""
        self.claim(key, incarnation, now_ms=now_ms)
        self._sessions += 1
        self._sightings[key].session = self._sessions
        return self._sessions

    def beat(self, key: BrokerKey, session: int, state: ReplicaState, *, now_ms: int) -> bool:
        """Note a heartbeat. False: a newer stream of the same broker took over, end this one."""
        sighting = self._sightings.get(key)
        if sighting is None or sighting.session != session:
            return False
        sighting.seen_ms, sighting.state = now_ms, state
        return True

    def leave(self, key: BrokerKey, session: int) -> None:
        """Note that a stream ended: that process is gone, or will be back with a new stream."""
        sighting = self._sightings.get(key)
        if sighting is not None and sighting.session == session:
            sighting.gone = True

    def state(self, key: BrokerKey, *, now_ms: int) -> ReplicaState | None:
        """What a broker that is up last said; None when it is down or has not said anything yet."""
        sighting = self._sightings.get(key)
        return sighting.state if sighting and self._fresh(sighting, now_ms) else None

    def is_up(self, key: BrokerKey, *, now_ms: int) -> bool:
        sighting = self._sightings.get(key)
        return sighting is not None and self._fresh(sighting, now_ms)

    def may_be_up(self, broker: Broker, *, now_ms: int) -> bool:
        """Like `is_up`, but just after our own start a broker that registered before counts as up.

        It needs a moment to come back to us, and taking it for dead would let its part be given away.
        """
        return self.is_up(broker.key, now_ms=now_ms) or self._presumed(broker, now_ms)

    def is_writable(self, group: Group, *, now_ms: int) -> bool:
        """Whether the group's master takes messages in the group's term, as far as we know.

        Just after our own start, a group whose master registered before is presumed to: else each restart of the
        metaserver would stop all producers. A presumption costs a producer one refused attempt.
        """
        if group.master is None:
            return False
        if self._presumed(group.master, now_ms):
            return True
        state = self.state(group.master.key, now_ms=now_ms)
        return state is not None and state.writable and state.reigns(group.term)

    def next_change_ms(self, *, now_ms: int) -> int:
        """When silence alone may change an answer next; a time in the past never, far away when nothing is known."""
        times = [sighting.seen_ms + self.timeout_ms + 1 for sighting in self._sightings.values() if not sighting.gone]
        times.append(self._presumed_until_ms)
        return min((time for time in times if time > now_ms), default=now_ms + self.timeout_ms)

    def _presumed(self, broker: Broker, now_ms: int) -> bool:
        never_seen = broker.key not in self._sightings
        return bool(broker.incarnation) and never_seen and now_ms < self._presumed_until_ms

    def _fresh(self, sighting: Sighting, now_ms: int) -> bool:
        return not sighting.gone and now_ms - sighting.seen_ms <= self.timeout_ms
