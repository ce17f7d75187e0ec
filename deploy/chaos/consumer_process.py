"""Shell. A consumer as a process: listeners or pullers that make random decisions about messages and record
everything.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

import qmq
from qmq.client.group_session import GroupSession
from qmq.client.unacked import SentAck
from qmq.deploy.chaos.clients import RETRY_DELAY_S, Journal, Member, content_of, now
from qmq.deploy.chaos.records import (
    DEAD,
    DONE,
    LEFT,
    RETRY,
    Decided,
    Gone,
    Got,
    Joined,
    Kept,
    MasterChanged,
    Position,
    Record,
    Stalled,
)
from qmq.errors import NotServed
from qmq.remoting import commands

WATCH_S = 0.05
STALL_S = 0.5
"""A loop that comes this late may have lost its lease."""
FAILS, RETRIES, GIVES_UP, TAKES_TIME = 0.003, 0.01, 0.001, 0.05
DELAY_S_MAX = 1.0
WORK_S_MAX = 0.02


class Notes:
    """Records of one consumer: deliveries, decisions and confirmed decisions."""

    def __init__(self, consumer: str, journal: Journal) -> None:
        self.consumer = consumer
        self._journal = journal
        self._number = 0
        self._open: dict[int, qmq.ReceivedMessage] = {}

    def write(self, *records: Record) -> None:
        self._journal.write(*records)

    def got(self, messages: list[qmq.ReceivedMessage]) -> list[int]:
        """Record deliveries; return their numbers."""
        at, first = now(), self._number
        self._number += len(messages)
        numbers = list(range(first, self._number))
        self._journal.write_all(
            Got(
                at,
                self.consumer,
                number,
                message.subject,
                message.group,
                message.broker_group,
                message.sequence,
                message.pull_sequence,
                message.times,
                str(message.id),
                content_of(message),
            )
            for number, message in zip(numbers, messages)
        )
        self._open |= zip(numbers, messages)
        return numbers

    def decided(self, *decisions: tuple[int, str]) -> None:
        at = now()
        self._journal.write_all(Decided(at, self.consumer, number, decision) for number, decision in decisions)

    def look(self) -> None:
        """Record messages that are settled by now."""
        kept = [number for number, delivery in self._open.items() if delivery.is_settled]
        if kept:
            self.write(Kept(now(), self.consumer, kept))
        for number in [*kept, *(number for number, delivery in self._open.items() if delivery.is_dropped)]:
            self._open.pop(number, None)

    async def watch(self) -> None:
        """Call `look` at intervals, and record a stall if an interval is much too long."""
        before = now()
        while True:
            self.look()
            await asyncio.sleep(WATCH_S)
            if (at := now()) - before > STALL_S:
                self.write(Stalled(before, at, self.consumer))
            before = at

    def tap(self) -> None:
        """Record the positions that brokers send; the client's interface does not show them."""
        subscribed, acked = GroupSession._subscribed, GroupSession._acked

        def position(session: GroupSession, acked_end: int, begins: bool) -> None:
            terms, group = session._owner.terms, session._link.broker_group
            self.write(Position(now(), self.consumer, session.source, terms.group, group, acked_end, begins))

        def note_subscribed(session: GroupSession, body: memoryview) -> None:
            position(session, commands.decode_json(body, acked_end=int)["acked_end"], not session.unacked.held_end)
            subscribed(session, body)

        def note_acked(session: GroupSession, ack: SentAck, body: memoryview) -> None:
            position(session, commands.decode_acked(body), False)
            acked(session, ack, body)

        setattr(GroupSession, "_subscribed", note_subscribed)  # noqa: B010
        setattr(GroupSession, "_acked", note_acked)  # noqa: B010


def choose(message: qmq.ReceivedMessage, rng: random.Random) -> str:
    """Decide about a message; poisoned ones can never be done."""
    dice = rng.random()
    if message.get_bool("poison") or dice < RETRIES:
        return RETRY
    return DEAD if dice < RETRIES + GIVES_UP else DONE


async def handle(notes: Notes, rng: random.Random, message: qmq.ReceivedMessage) -> None:
    """Handle a message of a listener, with a random decision."""
    (number,) = notes.got([message])
    if rng.random() < TAKES_TIME:
        await asyncio.sleep(rng.uniform(0, WORK_S_MAX))
    decision = choose(message, rng)
    notes.decided((number, decision))
    if decision == DEAD:
        raise qmq.DeadLetter("by chance")
    if decision == RETRY and rng.random() < FAILS / RETRIES:
        raise RuntimeError("by chance")
    if decision == RETRY:
        raise qmq.RetryLater(delay_s=rng.uniform(0, DELAY_S_MAX))


async def pull(notes: Notes, rng: random.Random, puller: qmq.Puller, stop: asyncio.Event) -> None:
    """Pull, and decide about the messages of a pull in random order."""
    async with puller:
        while not stop.is_set():
            try:
                messages = await puller.pull(rng.randint(1, 200), timeout=0.5)
            except NotServed:  # no broker group is connected
                continue
            if not messages:
                continue
            numbers = notes.got(messages)
            together = list(zip(numbers, messages))
            rng.shuffle(together)
            if rng.random() < TAKES_TIME:
                await asyncio.sleep(rng.uniform(0, WORK_S_MAX))
            decisions = [(number, message, choose(message, rng)) for number, message in together]
            notes.decided(*((number, decision) for number, _, decision in decisions))
            await puller.ack([message for _, message, decision in decisions if decision == DONE])
            await puller.dead_letter([message for _, message, decision in decisions if decision == DEAD], "by chance")
            for _, message, decision in decisions:
                if decision == RETRY:
                    await message.nack("by chance", delay=rng.uniform(0, DELAY_S_MAX))


async def main(options: dict[str, Any]) -> None:
    life, rng = options["life"], random.Random(options["seed"])
    consumer = qmq.Consumer(metaserver=options["metaserver"], app="history", consumer_id=options["name"], drain_s=5.0)
    members = [Member(*fields) for fields in options["members"]]
    with Journal(Path(options["journal"])) as journal:
        notes = Notes(life, journal)
        notes.tap()
        stop, running = asyncio.Event(), []

        @consumer.on_master_changed
        def changed(event: qmq.MasterChanged) -> None:
            notes.write(MasterChanged(now(), life, event.broker_group, event.term))

        for member in members:
            terms: dict[str, Any] = {"group": member.group, "tags": member.tags, "retry_delay": RETRY_DELAY_S}
            notes.write(Joined(now(), life, member.subject, member.group, member.concurrency or 1, member.tags))
            if member.concurrency:
                listen = consumer.listen(
                    member.subject, start="earliest", concurrency=member.concurrency, prefetch_messages=200, **terms
                )
                listen(partial(handle, notes, rng))
            else:
                puller = consumer.pull(member.subject, start="earliest", prefetch_messages=500, **terms)
                running.append(asyncio.create_task(pull(notes, rng, puller, stop)))

        def end() -> None:
            stop.set()
            consumer.stop()

        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, end)
        if consumer.listeners:
            running.append(asyncio.create_task(consumer.run()))
        watching = asyncio.create_task(notes.watch())
        await asyncio.gather(*running)
        watching.cancel()
        notes.look()
        if not stop.is_set():
            raise RuntimeError("the consumer ended without SIGTERM")
        notes.write(Gone(now(), life, LEFT))


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    logging.getLogger("qmq.client.listener").setLevel(logging.ERROR)  # handlers fail all the time here
    asyncio.run(main(json.loads(sys.argv[1])))
