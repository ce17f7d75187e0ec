"""Core. Plays a story of commands on the cores of brokers or delay servers, and lists the effects of each command.

A transcript is a text file. A block is one or more commands, a line `----`, and their effects; blank lines separate
blocks, lines with `#` are for the reader. Nothing happens between commands: no packet arrives, no fsync ends, no time
passes. The first command names the player: `metaserver` (`metaserver_player.py`), `consumer` (`session_player.py`), or
this one for others.

    group                          brokers a and b, with empty disks; `group segment_bytes=4096` changes settings
    group copies=3                 a, b and c; `group delay=1`: delay servers a and b
    assign a master term=1         an assignment of the metaserver; `slave` likewise; sync=manual: slaves await filling
    master b                       the connections of the next commands are those of b to all others
    prepare a | promise a term=1 | cancel a
                                   the steps of a swap at its master: produce no more; step down for good; go on
    hold b term=1 ms=3000          first half of a failover: b, the slave of that term, follows no master for so long
    swap term=2                    by force: roles are exchanged in the row, and the slave connects
    fill b allowed                 the row allows the filling that b is in, or that comes next; `stopped` likewise
    empty b                        b ends, loses its directory, and starts with an empty one
    copy b c                       a process c starts on a copy of b's directory
    slave c                        the next commands between the copies are between a and c; the old connection stays
    alone c                        c does not reach the metaserver, and takes its remembered part, if it may
    refused c                      the metaserver refuses c: another process has its part
    connect | cut | hello          the slave connects; the connection breaks; the slave's hello and its answer arrive;
                                   of three copies, `connect c` and `cut c`
    pass a                         the loop of a ends its pass: frames leave, an fsync is asked for
    fsync a | ship | confirm       a's oldest fsync ends; the next packet reaches the slave; the next one the master
    settle                         all of these, until nothing is left to do
    wait 5000                      time passes for all; `run 60000 step_ms=1000`: delay servers work meanwhile
    crash a                        a dies, loses what was not fsynced, and starts again
    produce s m1 m2 batch=3        a producer sends a batch of messages m1, m2; over=c over its connection c;
                                   key=k tags=red,blue for all of them; due_ms=5000 from now, to a delay server
    withdraw s m1                  a producer cancels a delayed message
    senders mute=1                 broker groups store messages of the delay server and do not answer
    subscribe c1 s g | pull c1 | ack c1 0 2 | nack c1 0 1 delay_ms=0 | gone c1
                                   a consumer of subject s and group g, which begins at the earliest message or, with
                                   start=latest, at the next; tags=red selects; nack dead=1 gives a message up; ranges
                                   are of pull sequences, half-open, counted within the epoch
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any

from qmq.codec import encode_labels, encode_message, label_of_message
from qmq.errors import ErrorCode
from qmq.log import MessageLog
from qmq.log.frame import Frame, FrameKind, decode_frames, label_flags
from qmq.log.memory_disk import MemoryDisk
from qmq.message import Message
from qmq.remoting import commands
from qmq.remoting.commands import Command
from qmq.types import Role
from tests.transcripts.metaserver_player import MetaserverPlayer
from tests.transcripts.session_player import SessionPlayer
from tests.transcripts.story import Story, blocks
from tests.unit.broker.world import SETTINGS, Broker, Client, FakeLink, Group
from tests.unit.delayserver import world as delay_world

PLAYERS: dict[str, type[Story]] = {"metaserver": MetaserverPlayer, "consumer": SessionPlayer}
"""Players of other stories than those of copies, by the first command of the file."""
EPOCH_BITS = 32
"""Pull sequences are shown without their upper half, which names the epoch."""


def play(text: str) -> str:
    """Return the transcript with the effects of a new run."""
    listed = [(head, [line for line in head if not line.startswith("#")]) for head, _ in blocks(text)]
    first = next(command for _, typed in listed for command in typed)
    played = []
    with closing(PLAYERS.get(first.split()[0], Player)()) as player:
        for head, typed in listed:
            happened = [line for command in typed for line in player.run(command)]
            played.append("\n".join([*head, "----", *happened] if typed else head))
    return "\n\n".join(played).rstrip("\n") + "\n"


@dataclass
class Seen:
    """Shown state of one broker."""

    frames: list[Frame] = field(default_factory=list)
    flushed: int = 0
    high: int = 0
    commits: int = 0
    role: str = "no role"
    reasons: list[str] = field(default_factory=list)


class Player(Story):
    """Story of the copies of one group."""

    def __init__(self) -> None:
        self._group = Group()
        self._wires: dict[str, Group] = {}
        self._brokers: dict[str, Broker] = {}
        self._seen: dict[str, Seen] = {}
        self._clients: dict[str, Client] = {}
        self._asked: dict[tuple[str, int], str] = {}
        self._bases: dict[str, int] = {}
        self._sent = 0
        """Number of shown batches of delay servers."""

    def _effects(self, run: Any, *plain: str, **named: Any) -> list[str]:
        packets = self._packets()
        run(*plain, **named)
        return [*self._of_brokers(), *self._of_wire(packets), *self._of_senders(), *self._of_clients()]

    # Commands.

    def _do_group(self, *, copies: int = 2, delay: int = 0, **settings: Any) -> None:
        if delay:
            self._group = delay_world.Copies.made(**settings)
            self._brokers = {"a": self._group.a, "b": self._group.b}
            self._wires = {"b": self._group}
        else:
            changed = replace(SETTINGS, **settings)
            self._brokers = {name: Broker(name, changed) for name in "abc"[:copies]}
            self._do_master("a")
        self._seen = {name: Seen() for name in self._brokers}

    def _do_master(self, name: str) -> None:
        master = self._brokers[name]
        self._wires = {key: Group(master, broker) for key, broker in self._brokers.items() if broker is not master}
        self._group = next(iter(self._wires.values()))

    def _do_assign(self, name: str, role: str, *, term: int, sync: str = "", min_copies: int = 2) -> None:
        slaves = max(1, len(self._wires))
        self._brokers[name].assign(Role[role.upper()], term, slaves=slaves, min_copies=min_copies, sync_mode=sync)

    def _do_prepare(self, name: str, *, term: int, hold_ms: int = 3000) -> None:
        self._brokers[name].node.changes.prepare_swap(term, hold_ms)

    def _do_promise(self, name: str, *, term: int) -> None:
        self._brokers[name].node.changes.promise_swap(term)

    def _do_cancel(self, name: str) -> None:
        self._brokers[name].node.changes.cancel_swap()

    def _do_fill(self, name: str, word: str) -> None:
        order = (self._brokers[name].node.identity.value.fill_id, word == "allowed")
        assignment = self._group.a.node.assignment
        assert assignment is not None
        self._group.a.node.assign(replace(assignment, fills=(order,)))

    def _do_empty(self, name: str) -> None:
        if self._group.at_master is not None and self._group.at_master.is_open:
            self._group.cut()
        self._brokers[name].disk = MemoryDisk()
        self._brokers[name].start()
        self._seen[name] = Seen()

    def _do_copy(self, name: str, copy: str) -> None:
        self._brokers[copy] = self._brokers[name].copied()
        frames = list(frames_from(self._brokers[copy].log, self._brokers[copy].log.start))
        self._seen[copy] = Seen(frames, self._brokers[copy].log.flushed_end)

    def _do_slave(self, name: str) -> None:
        self._group.b = self._brokers[name]
        self._group.at_master = self._group.at_slave = None
        self._wires = {name: self._group}

    def _do_alone(self, name: str) -> None:
        self._brokers[name].node.start_without_metaserver()

    def _do_refused(self, name: str) -> None:
        self._brokers[name].node.lose_part("another process has it")

    def _do_connect(self, *names: str) -> None:
        for name in names or self._wires:
            self._wires[name].connect()

    def _do_cut(self, *names: str) -> None:
        for name in names or self._wires:
            self._wires[name].cut()

    def _do_hello(self) -> None:
        self._group.deliver_hello()

    def _do_pass(self, name: str) -> None:
        self._brokers[name].host.turn()

    def _do_fsync(self, name: str) -> None:
        self._brokers[name].host.fsync()

    def _do_ship(self) -> None:
        self._group.to_slave()

    def _do_confirm(self) -> None:
        self._group.to_master()

    def _do_settle(self) -> None:
        ends: list[int] = []
        while ends != (ends := [broker.log.flushed_end for broker in self._brokers.values()] + self._watermarks()):
            for wire in self._wires.values():
                wire.settle()

    def _watermarks(self) -> list[int]:
        masters = [broker.node.master for broker in self._brokers.values()]
        return [master.gate.high_watermark for master in masters if master is not None]

    def _do_run(self, ms: str, *, step_ms: int = 100) -> None:
        assert isinstance(self._group, delay_world.Copies), "only delay servers run by themselves"
        self._group.run(int(ms), step_ms)

    def _do_senders(self, *, mute: int) -> None:
        self._senders.mute = set(self._senders.up) if mute else set()

    @property
    def _senders(self) -> delay_world.Senders:
        assert isinstance(self._group, delay_world.Copies), "only delay servers have senders"
        return self._group.senders

    def _do_wait(self, ms: str) -> None:
        for broker in self._brokers.values():
            broker.wait(int(ms))

    def _do_hold(self, name: str, *, term: int, ms: int) -> None:
        node = self._brokers[name].node
        node.changes.prepare_failover(term, hold_ms=ms, silent_ms=1500, packet_age_ms=None)

    def _do_crash(self, name: str) -> None:
        for wire in self._wires.values():
            if self._brokers[name] in (wire.a, wire.b) and wire.at_master is not None and wire.at_master.is_open:
                wire.cut()
        self._brokers[name].crash()
        self._seen[name] = replace(self._seen[name], flushed=0, commits=0, high=0)
        self._clients = {
            key: client for key, client in self._clients.items() if client.broker is not self._brokers[name]
        }

    def _do_swap(self, *, term: int) -> None:
        self._group.swap(term)

    def _do_produce(
        self,
        subject: str,
        *ids: str,
        batch: int,
        over: str = "producer",
        key: str | None = None,
        tags: str = "",
        due_ms: int | None = None,
    ) -> None:
        client = self._client(over)
        sent = [Message(subject, {}, id=id, order_key=key, tags=tuple(tags.split(",")) if tags else ()) for id in ids]
        messages, labels = (
            [encode_message(message, 0) for message in sent],
            [label_of_message(message) for message in sent],
        )
        if due_ms is not None:
            at_ms = self._group.a.host.now_ms() + due_ms
            messages = [delay_world.delayed(subject, id, at_ms) for id in ids]
        end = {"after": encode_labels(labels), "flags": label_flags(labels)} if key or tags else {}
        self._ask(client, client.produce_raw(messages, subject=subject, batch=batch, **end), f"batch {batch}")

    def _do_withdraw(self, subject: str, *ids: str) -> None:
        client = self._client("producer")
        body = commands.encode_cancel(commands.Cancel(subject, list(ids), [], 0))
        self._ask(client, client.send(Command.CANCEL, body), f"withdraw {' '.join(ids)}")

    def _do_subscribe(
        self, consumer: str, subject: str, group: str, *, start: str = "earliest", tags: str = "", attempts: int = 0
    ) -> None:
        client = self._client(consumer)
        terms: dict[str, Any] = {"tags": tags.split(",") if tags else [], "deliveries_max": attempts}
        self._ask(client, client.subscribe(consumer, subject=subject, group=group, start=start, **terms), "subscribe")

    def _do_pull(self, consumer: str, *, most: int = 100, timeout_ms: int = 0) -> None:
        client = self._client(consumer)
        self._ask(client, client.pull(most=most, timeout_ms=timeout_ms), "pull")

    def _do_ack(self, consumer: str, begin: str, end: str) -> None:
        base, client = self._bases.get(consumer, 0), self._client(consumer)
        self._ask(client, client.ack(base + int(begin), base + int(end)), f"ack [{begin},{end})")

    def _do_nack(self, consumer: str, begin: str, end: str, *, delay_ms: int = 0, dead: int = 0) -> None:
        base, client = self._bases.get(consumer, 0), self._client(consumer)
        opaque = client.nack(base + int(begin), base + int(end), delay_ms=delay_ms, dead=bool(dead))
        self._ask(client, opaque, f"nack [{begin},{end})")

    def _do_gone(self, consumer: str) -> None:
        self._clients.pop(consumer).lost()

    def _client(self, name: str) -> Client:
        client = self._clients.get(name)
        if client is None or client.broker is not self._group.a:
            client = self._clients[name] = Client(self._group.a, name)
        return client

    def _ask(self, client: Client, opaque: int, what: str) -> None:
        self._asked[client.link.peer, opaque] = what

    # Effects.

    def _of_brokers(self) -> Iterator[str]:
        for name, broker in self._brokers.items():
            yield from (f"{name}: {line}" for line in self._of_broker(broker, self._seen[name]))

    def _of_broker(self, broker: Broker, seen: Seen) -> Iterator[str]:
        log, gate = broker.log, broker.node.master.gate if broker.node.master else None
        frames = list(frames_from(log, log.start))
        kept = next((i for i, (old, new) in enumerate(zip(seen.frames, frames)) if old != new), len(frames))
        if kept < len(seen.frames):
            yield f"cut to {seen.frames[kept].offset}"
        yield from (f"append {describe(frame)}" for frame in frames[min(kept, len(seen.frames)) :])
        seen.frames = frames
        if len(broker.host.commits) > seen.commits:
            yield "fsync asked for"
        seen.commits = len(broker.host.commits)
        if log.flushed_end > seen.flushed:
            yield f"flushed {log.flushed_end}"
        seen.flushed = log.flushed_end
        if gate is not None and gate.high_watermark > seen.high:
            yield f"high watermark {gate.high_watermark}"
            seen.high = gate.high_watermark
        yield from self._of_role(broker, seen)

    def _of_role(self, broker: Broker, seen: Seen) -> Iterator[str]:
        master = broker.node.master
        role = "slave" if broker.node.slave else "no role"
        if master is not None:
            role = f"master {master.epoch.term}.{master.epoch.boot}" + (
                "" if master.has_begun else ", waits for its slave"
            )
        if role != seen.role:
            yield role
        reasons = sorted(str(reason) for reason in broker.node.readonly_reasons) if master is not None else []
        if reasons != seen.reasons:
            yield f"readonly: {', '.join(reasons)}" if reasons else "writable"
        seen.role, seen.reasons = role, reasons

    def _links(self) -> Iterator[tuple[str, FakeLink]]:
        """Yield each direction of each connection, with its shown name."""
        for wire in self._wires.values():
            for arrow, link in (("->", wire.at_master), ("<-", wire.at_slave)):
                if link is not None:
                    yield f"{wire.a.name} {arrow} {wire.b.name}", link

    def _packets(self) -> dict[str, int]:
        return {shown: len(link.pushed) for shown, link in self._links()}

    def _of_wire(self, before: dict[str, int]) -> Iterator[str]:
        for shown, link in self._links():
            for command, body in list(link.pushed)[before.get(shown, 0) :]:
                yield f"{shown}: {describe_packet(command, body)}"

    def _of_senders(self) -> Iterator[str]:
        if isinstance(self._group, delay_world.Copies):
            attempts = self._senders.attempts
            for group, _, number, ids in attempts[self._sent :]:
                yield f"a -> {group}: batch {number}: {' '.join(ids)}"
            self._sent = len(attempts)

    def _of_clients(self) -> Iterator[str]:
        for name, client in self._clients.items():
            for opaque in client.link.order:
                if (what := self._asked.pop((name, opaque), None)) is not None:
                    yield f"{name}: {what}: {self._answer(name, client, what, opaque)}"

    def _answer(self, name: str, client: Client, what: str, opaque: int) -> str:
        if code := client.code(opaque):
            return f"{ErrorCode(code).name} {client.text(opaque)}".rstrip()
        if what.startswith("batch"):
            receipt = client.receipt(opaque)
            return f"stored {receipt.first_sequence}..{receipt.first_sequence + receipt.stored}"
        if what == "subscribe":
            client.subscription(opaque)
            return "subscribed"
        if what.startswith("withdraw"):
            return " ".join(map(str, commands.decode_cancelled(client.body(opaque)).ids))
        if what != "pull":
            return "done"
        pulled, attempts = client.pulled(opaque), client.times(opaque)
        if pulled:
            self._bases[name] = pulled[0][0] >> EPOCH_BITS << EPOCH_BITS
        low = (1 << EPOCH_BITS) - 1
        return " ".join(f"{id}@{pull & low}x{times}" for (pull, _, id), times in zip(pulled, attempts)) or "no messages"


def frames_from(log: MessageLog, offset: int) -> Iterator[Frame]:
    """Yield the frames of a log from `offset`, from its tail and from its disk."""
    while offset < log.end:
        entry = log.tail_body(offset)
        on_disk = () if entry else decode_frames(log.stored.read_bytes(offset, log.end), offset, None)
        for frame in [entry[0]] if entry else [frame for frame, _ in on_disk]:
            yield frame
            offset = frame.end


def describe(frame: Frame) -> str:
    """Return the line of a frame."""
    span = f"[{frame.offset},{frame.end})"
    if frame.kind == FrameKind.MESSAGES:
        return f"messages {span} {frame.subject} {frame.first_sequence}..{frame.first_sequence + frame.count}"
    if frame.kind == FrameKind.EPOCH:
        return f"epoch {span} {frame.epoch.term}.{frame.epoch.boot}"
    return f"{FrameKind(frame.kind).name.lower()} {span} {frame.subject}"


def describe_packet(command: Command, body: bytes) -> str:
    """Return the line of a packet between the copies."""
    if command == Command.CONFIRM:
        confirmation = commands.decode_confirmation(memoryview(body))
        return f"confirm {confirmation.matched_end} in epoch {confirmation.epoch.term}.{confirmation.epoch.boot}"
    return command.name.lower()
