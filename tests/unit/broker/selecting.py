"""Core. Messages with tags and order keys, and a consumer of them, for tests of filtered pulls."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count
from typing import NamedTuple
from zlib import crc32

from qmq.codec import decode_envelope, encode_labels, encode_message, join_batch, label_of, split_batch
from qmq.errors import ErrorCode
from qmq.log.frame import FLAG_LABELLED, FLAG_ORDERED
from qmq.message import Message
from qmq.remoting import commands
from qmq.remoting.commands import Command
from tests.unit.broker.world import Client, Group

_batches = count(1)


class Sent(NamedTuple):
    """Message of a test."""

    tags: tuple[str, ...] = ()
    key: str | None = None


def produce(client: Client, messages: Iterable[Sent], *, first: int, subject: str = "s", labelled: bool = True) -> int:
    """Send one batch of messages named m<sequence>, from `first` on; batches without keys may be unlabelled."""
    some = list(messages)
    data = [
        encode_message(Message(subject, {"x": "y"}, tags=frozenset(message.tags), id=f"m{first + at}"), 0)
        for at, message in enumerate(some)
    ]
    body, flags = join_batch(data), 0
    if labelled:
        body += encode_labels([label_of(message.tags, message.key) for message in some])
        flags = FLAG_LABELLED | (FLAG_ORDERED if any(message.key for message in some) else 0)
    return client.send(
        Command.PRODUCE, commands.produce_header(9, next(_batches), len(some), crc32(body), subject, flags) + body
    )


class Got(NamedTuple):
    pull_sequence: int
    sequence: int
    times: int


class Consumer:
    """Consumer of a group on its own connection. Messages stay unacked until the test acks them."""

    def __init__(self, group: Group, name: str, /, **terms) -> None:
        self.group, self.name, self.terms = group, name, terms
        self.held: dict[int, int] = {}
        """Pull sequence -> sequence."""
        self.join()

    def join(self) -> None:
        """Connect, or reconnect with the unacked messages; after a swap to the new master."""
        self.client = self.group.client(self.name)
        self.subscription = self.client.join(self.name, held_end=max(self.held, default=-1) + 1, **self.terms)

    def ask(self, most: int = 1_000, timeout_ms: int = 0, bytes_max: int = 1 << 20) -> int:
        return self.client.pull(self.subscription, most, bytes_max, timeout_ms)

    def waits(self) -> int:
        """Send a pull that waits for messages, and settle."""
        opaque = self.ask(timeout_ms=60_000)
        self.group.settle()
        return opaque

    def pull(self, most: int = 1_000) -> list[Got]:
        """Pull the messages that are there now."""
        opaque = self.ask(most)
        self.group.settle()
        if not self.client.answered(opaque):
            self.group.a.wait(2_000)  # searched and not found
            self.group.settle()
        return self.got(opaque)

    def got(self, opaque: int) -> list[Got]:
        """Record the messages of a pull's answer."""
        if self.client.code(opaque) == ErrorCode.NO_MESSAGE:
            return []
        found = []
        for piece in commands.decode_pulled(memoryview(self.client.body(opaque))):
            for at, data in enumerate(split_batch(piece.body, piece.count)):
                got = Got(piece.pull_sequence + at, piece.sequence + at, piece.times)
                assert decode_envelope(bytes(data)).id == f"m{got.sequence}"
                assert got.pull_sequence not in self.held, "a pull sequence is given once"
                self.held[got.pull_sequence] = got.sequence
                found.append(got)
        return found

    def sequences(self, most: int = 1_000) -> list[int]:
        return [got.sequence for got in self.pull(most)]

    def ack(self, *sequences: int) -> None:
        """Ack these of the unacked messages, or all of them."""
        pulls = self._let_go(sequences)
        self._done(self.client.ack_ranges(*[(pull, pull + 1) for pull in pulls], subscription=self.subscription))

    def nack(self, *sequences: int, delay_ms: int = 0, dead: bool = False) -> None:
        for number in self._let_go(sequences):
            self._done(
                self.client.nack(number, number + 1, delay_ms=delay_ms, dead=dead, subscription=self.subscription)
            )

    def leave(self) -> None:
        self._done(self.client.send(Command.UNSUBSCRIBE, commands.encode_json(subscription=self.subscription)))
        self.held.clear()

    def _let_go(self, sequences: tuple[int, ...]) -> list[int]:
        pulls = sorted(number for number, sequence in self.held.items() if not sequences or sequence in sequences)
        assert pulls, "it holds none of these"
        for number in pulls:
            del self.held[number]
        return pulls

    def _done(self, opaque: int) -> None:
        self.group.settle()
        assert self.client.link.answers[opaque][0] == 0, self.client.text(opaque)
