"""Clients of the delay world: producers, and askers that cancel and reschedule messages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from qmq.codec import encode_message, label_of, with_properties
from qmq.errors import ErrorCode
from qmq.message import DELAY_KEY, Message
from qmq.remoting import commands
from qmq.remoting.commands import Cancel, Command, Reschedule
from qmq.remoting.packet import Packet
from tests.simulation.cores.clients import Producer, Repeater, Request, order_key
from tests.simulation.cores.network import End

if TYPE_CHECKING:
    from tests.simulation.delay.world import DelayWorld

BEGAN_MS = 1_700_000_000_000
MESSAGES_MAX = 1500


class DelayProducer(Producer):
    """Producer of messages due between an hour ago and ten seconds ahead, by a correct clock."""

    world: DelayWorld

    def _make(self) -> None:
        rng, number, oracle = self._events.rng, self._next, self.world.oracle
        if len(oracle.sent) >= MESSAGES_MAX:
            return
        self._next += 1
        subject = rng.choice(self.world.swarm.subjects)
        ids, messages, labels = [], [], []
        for i in range(rng.randint(1, self.world.swarm.batch_messages)):
            id = f"{self.name}-{number}-{i}"
            later_ms = [rng.randint(0, most_ms) for most_ms in (200, 2000, 2000, 10_000)]
            due_ms = BEGAN_MS + self._events.now_ms + rng.choice((-3_600_000, 0, *later_ms))
            ids.append(id)
            messages.append(delayed(subject, id, due_ms, size=rng.choice((0, 10, 60, 200, 700))))
            labels.append(label_of((), order_key(id) if self.world.swarm.keys else None))
            oracle.sent[id] = subject
            oracle.dues[id] = {due_ms}
        self._add(number, subject, ids, messages, labels if self.world.swarm.keys else [])


def delayed(subject: str, id: str, due_ms: int, *, size: int = 0) -> bytes:
    """Encode a delayed message with its id as key."""
    data = with_properties(encode_message(Message(subject, {"n": "x" * size}, id=id), 0), {DELAY_KEY: f"key-{id}"})
    return bytes((data[0] | 2,)) + data[1:9] + due_ms.to_bytes(8, "big") + data[17:]


@dataclass
class Question(Request):
    id: str
    subject: str
    by_key: bool
    due_ms: int
    """New due time; 0: cancelled."""
    was_known: bool
    """Whether the message was acknowledged before its first question."""


class Asker(Repeater):
    """Client that cancels and reschedules messages, also those due at this moment, and repeats until it is answered."""

    world: DelayWorld

    def __init__(self, world: DelayWorld, name: str) -> None:
        super().__init__(world, name)
        self.is_asking = True
        self.open: list[Question] = []

    @property
    def requests(self) -> list[Request]:
        return list(self.open)

    def make(self) -> None:
        if self.is_asking and len(self.open) < 3 and self._events.chance(self.world.asking):
            self._make()

    def _make(self) -> None:
        rng, oracle = self._events.rng, self.world.oracle
        now_ms = BEGAN_MS + self._events.now_ms
        ids = [id for id in oracle.recent if id not in oracle.asked or rng.random() < 0.1]
        if rng.random() < 0.6:  # messages due at about this moment
            ids = [id for id in ids if any(-30 < due - now_ms < 60 for due in oracle.dues[id])] or ids
        if not ids:
            return
        id = rng.choice(ids)
        due_ms = 0 if rng.random() < 0.6 else now_ms + rng.choice((-1000, 20, rng.randint(0, 3000)))
        if id in oracle.asked:
            oracle.asked_again.add(id)
        oracle.asked.add(id)
        if due_ms:
            oracle.dues[id].add(due_ms)
        self.open.append(Question(id, oracle.sent[id], rng.random() < 0.3, due_ms, id in oracle.acked))

    def send(self, link: End, request: Request) -> None:
        name, key = ("", f"key-{request.id}") if request.by_key else (request.id, "")
        if request.due_ms:
            body = commands.encode_reschedule(Reschedule(request.subject, name, key, request.due_ms))
            command = Command.RESCHEDULE
        else:
            body = commands.encode_cancel(Cancel(request.subject, [name] if name else [], [key] if key else [], 0))
            command = Command.CANCEL
        link.request(command, body, then=lambda packet: self._answered(link, request, packet))

    def _answered(self, link: End, question: Question, packet: Packet) -> None:
        if question not in self.open:
            return
        if packet.code != ErrorCode.SUCCESS:
            self._events.count(f"question answered {packet.code}")
            return self.repeat_later(link, question, packet.code)
        self.open.remove(question)
        if question.due_ms:
            fate = str(commands.decode_rescheduled(packet.body))
        else:
            cancelled = commands.decode_cancelled(packet.body)
            fate = str([*cancelled.ids, *cancelled.keys][0])
        self._events.count(f"answered: {fate}")
        self._events.note(f"{self.name} {question.id} due={question.due_ms} answered {fate}")
        self.world.oracle.question_answered(question, fate)
