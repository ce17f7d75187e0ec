"""Core. Consumer groups that have no position on this broker group: the cluster says where they begin (decision 80).

A group begins once in the cluster. The metaserver stores it at the first SUBSCRIBE anywhere; before that, the masters
of the subject's route note where the subject ends. A SUBSCRIBE waits here until the metaserver has answered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from qmq.errors import Overloaded, QmqError
from qmq.log import MessageLog
from qmq.remoting.packet import Packet
from qmq.replication.ports import Link
from qmq.subjects import real_subject

Key = tuple[str, str]
"""Subject, consumer group."""
NOTED_MAX = 10_000
"""Ends that were noted and are kept. A group whose end was dropped begins by time, some messages earlier."""
WAITING_MAX = 1_000
NOW = "now"
"""A mark that names the end of the subject as it is."""


class NewGroup(NamedTuple):
    """What a SUBSCRIBE asks for of a group that has no position here."""

    subject: str
    group: str
    latest: bool
    since_ms: int
    broadcast: bool


class Begin(NamedTuple):
    """Where a group begins: with the first message stored at `since_ms` or later (0: with the first that is kept), or,
    if the end of the subject was noted under `mark`, there. `began_ms`: when it began in the cluster; 0: not known."""

    since_ms: int
    mark: str = ""
    began_ms: int = 0

    @staticmethod
    def as_asked(start: str, since_ms: int) -> Begin:
        return Begin(since_ms if start == "since" else 0, NOW if start == "latest" else "")


Waiting = list[tuple[Link, Packet]]
Answered = Callable[[Begin | QmqError | None], Waiting]
"""Takes the answer; returns the packets to be handled now, as if they had just come."""
Ask = Callable[[NewGroup, Answered], None]
"""Asks the metaserver; the answer comes later, once. None: it is of a version that stores no consumer groups."""


class Beginning:
    """Made with a mastership, ends with it. `ask` is None if this broker group is all of the cluster."""

    def __init__(self, message_log: MessageLog, ask: Ask | None) -> None:
        self._log, self._ask = message_log, ask
        self._waiting: dict[Key, Waiting] = {}
        self._answers: dict[Key, Begin] = {}
        """Of groups that begin with the next SUBSCRIBE."""
        self._asked_for: set[Key] = set()
        """Groups that are counted in their token's ration, and have not begun."""
        self._noted: dict[tuple[str, Key], int] = {}

    def _must_ask(self, f: dict[str, Any]) -> bool:
        """Return whether the cluster decides where this SUBSCRIBE begins. It does not for consumers that never come
        back, nor for a retry or dead-letter subject from its beginning: that is the same everywhere, at any time."""
        is_derived = real_subject(f["subject"]) != f["subject"]
        return not f["ephemeral"] and not (is_derived and f["start"] == "earliest")

    def is_first(self, key: Key) -> bool:
        """Return whether no SUBSCRIBE of this group came before; it counts as come from now on."""
        is_first = key not in self._asked_for
        if self._ask is not None:
            self._asked_for.add(key)
        return is_first

    def answer_for(self, f: dict[str, Any], link: Link, packet: Packet) -> Begin | None:
        """Return where the group of a SUBSCRIBE begins; None: the packet waits until the metaserver has answered.

        Groups that wait already are not asked for again.
        """
        key = f["subject"], f["group"]
        as_asked = Begin.as_asked(f["start"], f["since_ms"])
        if self._ask is None or not self._must_ask(f):
            return as_asked
        if (answer := self._answers.get(key)) is not None:
            return answer
        is_asked = key in self._waiting
        if (len(self._waiting[key]) if is_asked else len(self._waiting)) >= WAITING_MAX:
            raise Overloaded(f"{WAITING_MAX:,} new consumer groups, or consumers of one, wait for the metaserver")
        self._waiting.setdefault(key, []).append((link, packet))
        if not is_asked:
            since_ms = f["since_ms"] if f["start"] == "since" else 0
            new = NewGroup(*key, f["start"] == "latest", since_ms, f["broadcast"])
            self._ask(new, lambda answer: self._answered(key, as_asked if answer is None else answer))
        return None

    def _answered(self, key: Key, answer: Begin | QmqError) -> Waiting:
        waiting = [(link, packet) for link, packet in self._waiting.pop(key, ()) if link.is_open]
        if isinstance(answer, QmqError):
            for link, packet in waiting:
                link.refuse(packet, answer)
            return []
        if waiting:  # else the mastership is over, or its consumers left
            self._answers[key] = answer
        return waiting

    def begun(self, key: Key) -> None:
        """The group has a position."""
        self._asked_for.discard(key)
        self._answers.pop(key, None)

    def note(self, mark: str, keys: Iterable[Key]) -> list[bool]:
        """Note where subjects end now; return which groups have a position already."""
        state, known = self._log.state, list[bool]()
        for key in keys:
            known.append(key in state.groups)
            self._noted[mark, key] = state.next_sequence.get(key[0], 0)
        while len(self._noted) > NOTED_MAX:
            del self._noted[next(iter(self._noted))]
        return known

    def noted(self, begin: Begin, key: Key) -> int | None:
        """Return what was noted of a group under the mark of `begin`; None: nothing, or no more."""
        if begin.mark == NOW:
            return self._log.state.next_sequence.get(key[0], 0)
        return self._noted.get((begin.mark, key))

    def step_down(self, error: QmqError) -> None:
        """The mastership is over: who waits asks the next master."""
        for waiting in self._waiting.values():
            for link, packet in waiting:
                link.refuse(packet, error)
        self._waiting.clear()
