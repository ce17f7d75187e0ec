"""Core. Who watches which routes, what each watcher was sent, and what it uses as far as it said.

A topic is a route that somebody watches, under the name that he asked for: a retry subject is a topic of its own, with
the groups of its real subject. A seat is one watcher at one topic.

What a watcher may still use (`Seat.used`) is the version it confirmed last; before it confirmed any, the first one
that it was sent. So a route counts as old until its watcher says otherwise, never the other way round.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from qmq.metaserver.model import ALL_SUBJECTS, NORMAL
from qmq.metaserver.routes.encoding import RouteBytes
from qmq.rights import Caller

NOTHING = RouteBytes(0, b"")
"""Of a topic whose route is being made."""

UNSURE = -1
"""As the version that a watcher was sent: whatever it has, it gets the route."""

Send = Callable[[bytes], Awaitable[None]]


class Counts(NamedTuple):
    """Watchers of routes with a broker group: those that may still produce to it, or would, and all."""

    producers: int
    consumers: int
    watchers: int


class ClientInfo(NamedTuple):
    """A client that is connected, or polls."""

    app: str
    client_id: str
    peer: str
    subjects: tuple[str, ...]
    produces: bool
    streams: bool
    """Whether changes are pushed to it; else it polls over HTTP."""
    kind: int = NORMAL
    """Of the groups in its routes."""


@dataclass(slots=True, eq=False)
class Topic:
    """A route that is watched. `real`: the subject whose groups it has; empty: the name is refused."""

    name: str
    real: str
    route: RouteBytes = NOTHING
    groups: tuple[str, ...] = ()
    offered: tuple[str, ...] = ()
    """Groups that producers may use."""
    seats: dict[Seat, None] = field(default_factory=dict)
    """In the order in which they came, as everything here that is gone through: so they are told."""
    source: object = None
    """The stored route that the content was made of."""
    tried: int = -1
    """State of the groups when more of them were last looked for."""


@dataclass(slots=True, eq=False)
class Seat:
    """One watcher at one topic. Versions: 0 is none."""

    watch: Watch
    topic: Topic
    sent: int = 0
    used: int = 0
    owed: bool = False
    """It is in its watcher's `owed`."""

    @property
    def is_news(self) -> bool:
        """Whether the topic's route is another than the one that was sent."""
        return self.topic.route.version not in (0, self.sent)

    def says(self, version: int) -> None:
        """Note what its watcher says it uses, when it asks. If that is not what it was sent, it gets the route anew:
        what is under way to it arrives after it wrote this, and another metaserver may have told it something."""
        self.used = version
        self.sent = version if self.sent in (0, version) else UNSURE

    def told(self) -> RouteBytes:
        """Note that the route is being sent, and return it."""
        route = self.topic.route
        self.sent, self.used = route.version, self.used or route.version
        return route


@dataclass(slots=True, eq=False)
class Watch:
    """A watcher: one stream, or one client that polls."""

    app: str
    client_id: str
    produces: bool
    caller: Caller
    send: Send | None
    """None: it polls, or its stream broke."""
    looks_only: bool = False
    """A subject without a route gets none by this watch."""
    seats: dict[str, Seat] = field(default_factory=dict)
    owed: list[Seat] = field(default_factory=list)
    """Seats that there may be news for."""
    owes_answer: bool = False
    asking: bool = False
    """An answer is being put together: nothing is sent before."""
    sending: bool = False
    """A task sends, and looks at `owed` again afterwards."""
    revision: int = 0
    """Version of the last update."""
    seen_s: float = 0.0
    """When it last polled."""


class Audience:
    """All watchers and what they watch. Made by the hub, which calls it from the loop."""

    def __init__(self) -> None:
        self.topics: dict[str, Topic] = {}
        self.watches: dict[Watch, None] = {}
        self._by_group: dict[str, dict[Topic, None]] = {}
        self._more: dict[str, dict[Topic, None]] = {}
        """Topics of retry and dead-letter subjects, by their real subject."""

    def topics_of_group(self, group: str) -> Collection[Topic]:
        return self._by_group.get(group, {}).keys()

    def topics_of_subject(self, real: str) -> list[Topic]:
        """The subject's own topic, and those of its retry and dead-letter subjects."""
        own, more = self.topics.get(real), self._more.get(real, {})
        return [*more] if own is None else [own, *more]

    def take_seat(self, watch: Watch, name: str, real: str) -> Seat:
        """Let a watcher watch one more topic."""
        topic = self.topics.get(name)
        if topic is None:
            topic = self.topics[name] = Topic(name, real)
            if name != real:
                self._more.setdefault(real, {})[topic] = None
        seat = watch.seats[topic.name] = Seat(watch, topic)
        topic.seats[seat] = None
        return seat

    def take_refusal(self, watch: Watch, name: str, route: RouteBytes) -> Seat:
        """Give a watcher a topic of its own, which says why it may not watch `name`."""
        seat = watch.seats[name] = Seat(watch, Topic(name, "", route))
        return seat

    def leave(self, watch: Watch) -> None:
        """Forget a watcher, which has no seats any more."""
        self.watches.pop(watch, None)
        watch.owed.clear()  # no circles: the collector of those stops the process for long

    def drop(self, watch: Watch, names: Iterable[str]) -> list[Topic]:
        """End some of a watcher's seats; return the topics that nobody watches any more, which are forgotten, too."""
        ended = []
        for name in names:
            if (seat := watch.seats.pop(name, None)) is None:
                continue
            topic = seat.topic
            topic.seats.pop(seat, None)
            if not topic.seats and self.topics.get(topic.name) is topic:
                del self.topics[topic.name]
                self._index(topic, ())
                if topic.name != topic.real:
                    self._remove(self._more, topic.real, topic)
                ended.append(topic)
        return ended

    def settle(
        self, topic: Topic, route: RouteBytes, groups: tuple[str, ...] = (), offered: tuple[str, ...] = ()
    ) -> bool:
        """Give a topic its content; return whether it is new."""
        if groups != topic.groups:  # also if that does not show yet: groups that do not serve are not in the route
            self._index(topic, groups)
        if route.version == topic.route.version:
            return False
        topic.route, topic.offered = route, groups if offered == groups else offered  # mostly, and then not twice
        return True

    def old_routes(self, group: str, subject: str) -> Counts:
        """Count clients that may still use the group as writable, for `subject` or for any (`*`).

        As long as the topic itself offers the group, that is everybody who has any route of it; then everybody
        who has an older one.
        """
        watching, old = set(), set()
        for topic in self.topics_of_group(group):
            if subject not in (ALL_SUBJECTS, topic.real):
                continue
            is_offered = group in topic.offered
            for seat in topic.seats:
                watching.add(seat.watch)
                if seat.used and (is_offered or seat.used != topic.route.version):
                    old.add(seat.watch)
        producers = sum(1 for watch in old if watch.produces)
        return Counts(producers, len(old) - producers, len(watching))

    def clients(self) -> list[ClientInfo]:
        return [
            ClientInfo(one.app, one.client_id, one.caller.peer, tuple(one.seats), one.produces, one.send is not None)
            for one in self.watches
        ]

    def _index(self, topic: Topic, groups: tuple[str, ...]) -> None:
        for name in topic.groups:
            self._remove(self._by_group, name, topic)
        topic.groups = groups
        for name in groups:
            self._by_group.setdefault(name, {})[topic] = None

    @staticmethod
    def _remove(index: dict[str, dict[Topic, None]], key: str, topic: Topic) -> None:
        index[key].pop(topic, None)
        if not index[key]:
            del index[key]
