"""Shell. Plays a story of a consumer's session with one broker group: its packets in order, and its states.

The session and its subscription run in virtual time, as consumer c1 of subject s and group g. The broker group is the
master a and its slave b, whose disks fsync at once.

    consumer prefetch=12           a new consumer c1, without a connection; it prefetches so many messages
    produce m1 m2                  a producer stores messages
    connect | cut                  the connection opens; it breaks, and the packets on their way are lost
    arrive | answer                the requests on their way reach a; the answers of a reach the consumer
    settle                         both, until nothing is on its way
    take 3                         the application takes so many messages
    ack m1 | nack m2               the application decides messages
    leave                          the application closes the consumer
    wait 4                         so many ms pass

m1@0 is the message m1 with pull sequence 0, m1x2 its second delivery; suspected: a consumer that held it vanished.
Ranges are of pull sequences, half-open.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random
from types import SimpleNamespace
from typing import Any

from qmq.client.group_session import GroupSession
from qmq.client.received import ReceivedMessage
from qmq.client.subscription import Subscription
from qmq.client.terms import make_terms
from qmq.codec import decode_envelope, split_batch
from qmq.errors import OutcomeUnknown, from_code
from qmq.remoting import commands
from qmq.remoting.commands import Command, Verdict
from qmq.remoting.connection import Connection
from qmq.remoting.packet import ErrorCode
from tests.transcripts.story import LoopStory
from tests.unit.broker.world import Client, Group

LEAVE_S = 5.0


class Wire(Connection):
    """Connection of the session; its requests wait for the command `arrive`."""

    is_open = True

    def __init__(self, ask: Callable[..., None]) -> None:
        self.ask = ask  # type: ignore[method-assign]


class SessionPlayer(LoopStory):
    """Story of one session."""

    def __init__(self) -> None:
        super().__init__()
        self.patch.setattr("qmq.client.group_session.random", Random(0))
        self._group = Group().start()
        self._producer = self._group.client("producer")
        self._client: Client | None = None
        self._requests: list[tuple[Any, ...]] = []
        """Requests on their way to a."""
        self._waiting: dict[int, tuple[Any, ...]] = {}
        """Requests that a has, by number."""
        self._taken: dict[str, ReceivedMessage] = {}
        self._moves = 0

    # Commands.

    async def _do_consumer(self, *, prefetch: int) -> None:
        terms = make_terms(
            subject="s",
            group="g",
            consumer="c1",
            broadcast=False,
            start="earliest",
            tags=(),
            tag_mode="any",
            retries_max=16,
            retry_delay=0.0,
            most_once=False,
            prefetch_messages=prefetch,
            prefetch_bytes=1 << 20,
            unacked_max=1000,
        )
        nothing: Any = SimpleNamespace(refresh=lambda: None)
        self._subscription = Subscription(terms, nothing, nothing, lambda lease_ms: None, lambda: None)
        self._link: Any = SimpleNamespace(broker_group="g1", connection=None, is_open=False)
        self._session = GroupSession(self._subscription, self._link, "s")
        self._subscription._sessions["g1", "s"] = self._session
        self._moves = 0

    async def _do_produce(self, *ids: str) -> None:
        self._producer.store(*ids)

    async def _do_connect(self) -> None:
        self._client, self._link.connection = self._group.client("c1"), Wire(self._ask)
        self._session.opened()

    async def _do_cut(self) -> None:
        assert self._client is not None
        self._client.lost()
        self._link.connection = None
        lost = [*self._waiting.values(), *self._requests]
        self._waiting, self._requests, self._client = {}, [], None
        self._session.lost()
        for *_, answered in lost:
            answered(OutcomeUnknown("the connection was cut"))

    async def _do_arrive(self) -> None:
        assert self._client is not None
        requests, self._requests = self._requests, []
        for command, body, answered in requests:
            self._waiting[self._client.send(command, body)] = (command, answered)
        self._group.settle()

    async def _do_answer(self) -> None:
        assert self._client is not None
        for number in [number for number in self._client.link.order if number in self._waiting]:
            command, answered = self._waiting.pop(number)
            code, body = self._client.link.answers[number]
            if code in (ErrorCode.SUCCESS, ErrorCode.NO_MESSAGE):
                self.say(f"a -> c1: {self._answer_text(command, memoryview(body))}")
                answered(memoryview(body))
            else:
                self.say(f"a -> c1: {ErrorCode(code).name}")
                answered(from_code(code, body.decode()))

    async def _do_settle(self) -> None:
        while self._client is not None and (self._requests or self._waiting.keys() & self._client.link.answers.keys()):
            await self._do_arrive()
            await self._do_answer()
            await asyncio.sleep(0)

    async def _do_take(self, count: str) -> None:
        messages = self._subscription.take(int(count))
        self._taken |= {message.id: message for message in messages}
        shown = [f"{m.id}x{m.times}{' suspected' if m.is_suspected else ''}" for m in messages]
        self.say(f"application: {' '.join(shown)}")

    async def _do_ack(self, *ids: str) -> None:
        for id in ids:
            await self._taken[id].ack()

    async def _do_nack(self, *ids: str) -> None:
        for id in ids:
            await self._taken[id].nack("failed")

    async def _do_leave(self) -> None:
        self.process.start(self._subscription.close(LEAVE_S))

    async def _do_wait(self, ms: str) -> None:
        await asyncio.sleep(int(ms) / 1000)
        self._group.wait(int(ms))

    # Effects.

    def _effects(self, run: Any, *plain: str, **named: Any) -> list[str]:
        lines: list[str] = []
        for line in [*super()._effects(run, *plain, **named), *self._states()]:
            text, times = line, 1
            if lines and (lines[-1].removesuffix(")").rpartition(" (")[0] or lines[-1]) == line:
                times = int(lines[-1].rpartition(" (")[2].split()[0]) + 1 if lines[-1].endswith(" times)") else 2
                text = f"{lines.pop().partition(' (')[0]} ({times} times)"
            lines.append(text)
        return lines

    def _states(self) -> list[str]:
        """Return the new moves of the session."""
        moves, self._moves = self._session.history[self._moves :], len(self._session.history)
        return [f"session: {move.before.name} -- {move.event} -> {move.after.name}" for move in moves]

    def say(self, what: str, fields: Any = None) -> None:
        self.happened += self._states()
        super().say(what)

    def _ask(self, answered: Any, command: Command, *parts: Any) -> None:
        body = b"".join(parts)
        self._requests.append((command, body, answered))
        self.say(f"c1 -> a: {command.name} {request_text(command, memoryview(body))}".rstrip())

    def _answer_text(self, command: Command, body: memoryview) -> str:
        if command == Command.SUBSCRIBE:
            return f"subscribed, unacked {ranges_text(commands.decode_json(body)['unacked'])}"
        if command != Command.PULL:
            return "done"
        pulled = [
            f"{decode_envelope(bytes(data)).id}@{low(piece.pull_sequence + at)}"
            for piece in commands.decode_pulled(body)
            for at, data in enumerate(split_batch(piece.body, piece.count))
        ]
        return f"messages {' '.join(pulled)}" if pulled else "no messages"


def request_text(command: Command, body: memoryview) -> str:
    """Return the fields of a request that a reader needs."""
    if command == Command.SUBSCRIBE:
        fields = commands.decode_json(body)
        return "new" if fields["is_new"] else f"held_end={low(fields['held_end'])}"
    if command == Command.PULL:
        return f"messages_max={commands.decode_pull(body).messages_max}"
    if command == Command.ACK:
        return ranges_text(commands.decode_ack(body).ranges)
    if command == Command.NACK:
        return " ".join(
            f"{ranges_text([entry[:2]])} {Verdict(entry.verdict).name}" for entry in commands.decode_nack(body).entries
        )
    return ""


def ranges_text(ranges: Any) -> str:
    """Return half-open ranges of pull sequences, counted within the epoch."""
    return " ".join(f"[{low(begin)},{low(end)})" for begin, end in ranges) or "none"


def low(pull_sequence: int) -> int:
    """Return a pull sequence without its upper half, which names the epoch."""
    return pull_sequence & 0xFFFFFFFF
