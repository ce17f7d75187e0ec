"""Planted bugs of broker cores, and of the disk below them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

from qmq.broker.answers import PullAnswer
from qmq.broker.delivery import Delivery
from qmq.broker.serving import Serving
from qmq.log import Commit, MessageLog, fold
from qmq.log import frame as frames
from qmq.log.disk import RealDisk, failing
from qmq.log.group import Consumer
from qmq.log.progress_frame import Departure
from qmq.log.requeued import Requeued, RequeuedRange
from qmq.log.retention import Kept
from qmq.metaserver.roles import promotion
from qmq.metaserver.roles.promotion import CONDITIONS, SLAVE_CONDITIONS, Refusal
from qmq.remoting import commands
from qmq.replication import agreement, readonly
from qmq.replication.ack_gate import AckGate
from qmq.replication.agreement import Hello
from qmq.replication.follower import FollowerEvent, SlaveWatch
from qmq.replication.identity import Identity, IdentityFile, PointFile
from qmq.replication.node import Node
from qmq.replication.readonly import Reason
from qmq.replication.role_change import RoleChange
from qmq.replication.slave import Slave
from qmq.tools.recover_group import Copy
from qmq.types import Epoch
from tests.simulation.bugs import Patch, bug, plant
from tests.simulation.cores.machine import Process


@bug("cores", Process, "commit")
def ack_before_fsync(real: Any, self: Process, commit: Commit) -> None:
    """The master counts bytes as fsynced when their commit begins."""
    if self.node.master is not None:
        self.node.master.gate.flushed(commit.end, commit.chain)
    real(self, commit)


@bug("cores", first=825, favoured="replace")
def older_epochs_are_not_fenced() -> list[Patch]:
    """Older epochs are accepted everywhere."""
    real_agree, real_agreed, real_learn, real_assign = agreement.agree, Slave.agreed, IdentityFile.learn, Node.assign

    def agree(hello: Hello, log: MessageLog, epoch: Epoch, *, has_begun: bool, **points: Any) -> Any:
        return real_agree(replace(hello, known=min(hello.known, epoch)), log, epoch, has_begun=has_begun, **points)

    def agreed(self: Slave, link: Any, body: memoryview) -> None:
        self._identity.value = _with_epoch(self._identity.value, Epoch(0, 0))
        real_agreed(self, link, body)

    def learn(self: IdentityFile, epoch: Epoch) -> None:
        if epoch > self.value.epoch:
            real_learn(self, epoch)

    def assign(self: Node, assignment: Any) -> None:
        known = self.identity.value
        if assignment.term < known.term:
            self.identity.value = _with_epoch(known, Epoch(assignment.term, known.boot + 10))
            self.assignment = None
        real_assign(self, assignment)

    return [
        patch("qmq.replication.follower.agree", agree),
        patch.object(Slave, "agreed", agreed),
        patch.object(IdentityFile, "learn", learn),
        patch.object(Node, "assign", assign),
    ]


def _with_epoch(identity: Identity, epoch: Epoch) -> Identity:
    return replace(identity, term=epoch.term, boot=epoch.boot)


@bug("cores", IdentityFile, "_change", first=13)
def epoch_not_persisted(real: Any, self: IdentityFile, **fields: Any) -> None:
    """A broker forgets its epoch when its process ends."""
    if "boot" in fields:
        self.value = _with_epoch(self.value, Epoch(fields["term"], fields["boot"]))
        return
    known = self.value.epoch
    self.value = _with_epoch(self.value, Epoch(self.value.term, 0))
    real(self, **fields)
    self.value = _with_epoch(self.value, known)


# Batch numbers are not remembered.
plant(
    "cores",
    "repeated batch is stored again",
    patch("qmq.log.fold.State.repeated", lambda self, producer, batch: None),
    first=9,
)


@bug("cores", fold, "_leave", first=12)
def vanished_consumers_messages_are_acked(real: Any, group: Any, progress: Any) -> None:
    """W1: unacked messages of a consumer that vanished count as acked."""
    if progress.entries[0][0] != Departure.VANISHED:
        return real(group, progress)
    consumer = group.consumers.pop(progress.consumer, Consumer())
    group.floor = max(group.floor, consumer.next_pull)


@bug("cores", first=14)
def pull_sequences_are_used_again() -> list[Patch]:
    """W2, W13: a new master continues the pull sequences of its own log."""

    def next_pull(self: fold.State, group: fold.Group, consumer: str) -> int:
        known = group.consumers.get(consumer)
        return known.next_pull if known else group.floor

    def was_given(self: fold.Consumer, end: int) -> bool:
        return True

    return [
        patch.object(fold.State, "next_pull", next_pull),
        patch.object(fold.Consumer, "was_given", was_given),
    ]


@bug("cores", Delivery, "subscribe", first=9)
def new_group_is_in_memory_only(real: Any, self: Delivery, link: Any, packet: Any) -> None:
    """W8: the start of a consumer group without pulls is lost in a restart."""
    f = commands.decode_json(packet.body)
    subject, name, state = f["subject"], f["group"], self._mastership.log.state
    group = state.groups.get((subject, name))
    if group is not None and not group.consumers and not group.floor and self._mastership.may_progress:
        entry = state.next_sequence.get(subject, 0), 0, 0
        self._mastership.append_progress(frames.FrameKind.POSITION, (subject, name, ""), [entry])
    real(self, link, packet)


@bug("cores", Serving, "_write_down")
def broker_acks_for_its_consumers(real: Any, self: Serving, subscription: Any, chosen: Any) -> None:
    """W10: messages before a redelivered piece count as acked, though their consumer has them."""
    consumer = self._subscriptions.consumer(*subscription.key)
    if not chosen.entries and chosen.parts and consumer is not None:
        first, end = consumer.acked_end, chosen.parts[0].pull_sequence
        if first < end:
            self._mastership.append_progress(frames.FrameKind.ACK, subscription.key, [(first, end, 0)])
    real(self, subscription, chosen)


@bug("cores", PullAnswer, "send")
def chosen_messages_are_counted_from_the_first(real: Any, self: Any) -> bool:
    """W9: filtered messages get consecutive sequences, as if none had been passed over."""
    sequence = self.chosen.parts[0].begin
    headers = []
    for part in self.chosen.parts:
        headers.append(sequence)
        sequence += part.end - part.begin
    numbers = iter(headers)

    def piece_header(pull_sequence: int, begin: int, *rest: int) -> bytes:
        return header(pull_sequence, next(numbers), *rest)

    header = commands.piece_header
    with patch.object(commands, "piece_header", piece_header):
        return real(self)


@bug("cores", first=4)
def keys_are_never_busy() -> list[Patch]:
    """A message is delivered before an earlier one of its order key is done."""
    return [
        patch("qmq.broker.group_filter.Keys.is_busy", lambda self, key: False),
        patch("qmq.broker.group_filter.Keys.settled", lambda self, sequence: None),
    ]


@bug("cores", Requeued, "add")
def deliveries_are_not_counted(real: Any, self: Requeued, new: RequeuedRange) -> None:
    """Redelivered messages count as new."""
    real(self, new._replace(attempts=0))


@bug("cores", Delivery, "move_group", first=804, favoured="power_everywhere", moves=True)
def move_is_answered_too_early(real: Any, self: Delivery, *where: Any, answer: Any, **words: Any) -> Any:
    """A move is answered before both copies have it."""
    reset = real(self, *where, answer=lambda error: None, **words)
    process: Any = self._mastership.host
    process._after(0.01, lambda: answer(None))
    return reset


# Acknowledged points are not compared with the log.
plant("cores", "no copy lacks anything", patch.object(Node, "_may_lack", lambda self, point: False), first=139)


@bug("cores", first=7, fails_over=True)
def any_slave_is_chosen() -> list[Patch]:
    """The metaserver chooses any slave that runs, and the slave agrees."""
    kept = Refusal.NO_SLAVE, Refusal.HALF_SWAPPED, Refusal.SLAVE_DOWN
    tables = {"CONDITIONS": CONDITIONS, "SLAVE_CONDITIONS": SLAVE_CONDITIONS}
    return [
        *(
            patch.object(promotion, name, tuple(condition for condition in table if condition[0] in kept))
            for name, table in tables.items()
        ),
        patch.object(promotion, "_is_behind", lambda facts: False),
        patch.object(RoleChange, "prepare_failover", lambda self, term, **_: None),
    ]


# A slave that is gone goes on counting.
plant(
    "cores",
    "a lost slave goes on counting",
    patch.object(SlaveWatch, "_without_slave", lambda self: None),
    first=3,
)


@bug("cores", SlaveWatch, "confirm")
def matched_by_each_confirmation(real: Any, self: SlaveWatch, link: Any, packet: Any) -> None:
    """A slave in sync is matched again: an illegal move."""
    real(self, link, packet)
    if (slave := self.follower.in_sync) is not None:
        self._enter(FollowerEvent.MATCHED, slave)


@bug("cores", MessageLog, "take_commit", first=20)
def deletions_have_no_chain(real: Any, self: MessageLog) -> Commit | None:
    """A copy reports a wrong chain after a commit that only deleted."""
    commit = real(self)
    if commit is not None and not commit.bytes:
        commit.chain = 0
    return commit


# A copy deletes segments before the retention frame is below the high watermark.
plant(
    "cores",
    "deletes before the decision is acknowledged",
    patch.object(Kept, "agreed_start", lambda self, high_watermark: self.start),
)


@bug("cores", AckGate, "_release")
def acknowledged_point_has_another_chain(real: Any, self: AckGate) -> None:
    """The acknowledged point has the end of one copy and the chain of the other."""
    before = self.high_watermark
    real(self)
    if self.high_watermark > before:
        self.high_chain = self.matched_chain if self.flushed_end <= self.matched_end else self.flushed_chain


@bug("cores", RoleChange, "prepare_failover", favoured="cut_off_master", copies=3)
def confirms_after_promising(real: Any, self: RoleChange, term: int, **words: Any) -> None:
    """A copy that promised goes on following its master."""
    with (
        patch.object(Slave, "leave_master", lambda self, why: None),
        patch.object(Process, "role_changed", lambda self: None),
    ):
        real(self, term, **words)


# The row keeps its term when the master of several slaves restarts.
plant(
    "cores",
    "master begins in its old term",
    patch("qmq.metaserver.roles.rules.needs_new_term", lambda group, key: False),
    first=3,
    copies=3,
)
# The remedy of a diverged slave does not name the data directory to set aside.
plant(
    "cores",
    "diverged names no way out",
    patch.dict(readonly.WAY_OUT, {Reason.DIVERGED: "read the logs with the audit"}),
    first=4037,
    copies=3,
    min_copies=3,
)


@bug("cores", first=13265, copies=3)
def a_copy_that_differs_never_goes_on() -> list[Patch]:
    """A master that lacks frames restores what an older master wrote alone, and so parts from the copy with the missing
    frames; then a third copy is preferred to that one.
    """
    return [
        patch.object(Hello, "has", lambda self, point: True),
        patch.object(Hello, "is_ahead_of", lambda self, epoch: False),
        patch.object(Copy, "may_go_on", property(lambda self: self.is_whole)),
    ]


# The last acknowledged point of a mastership is not stored.
plant("cores", "mastership ends without a memory", patch.object(PointFile, "save", lambda self: None), first=113501)
# A copied directory starts without the metaserver, as one that stayed in place may.
plant(
    "clones",
    "a copy takes up a part alone",
    patch.object(Node, "is_elsewhere", property(lambda self: False)),
    first=9,
    favoured="clone_while_the_metaserver_is_away",
)
# The metaserver accepts any process with the directory of its row.
plant(
    "clones",
    "a copy gets the same term",
    patch("qmq.metaserver.roles.rules.is_elsewhere", lambda known, said: False),
    favoured="clone",
)


@bug("cores", RealDisk, "truncate", first=124)
def truncate_is_not_fsynced(self: RealDisk, name: str, size: int) -> None:
    """Truncated bytes may return after a power cut."""
    with failing(name):
        self._system.truncate(self._open(name).fd, size)


# The next process reads bytes that a failed fsync did not keep.
plant(
    "cores",
    "failed fsync is read from memory",
    patch.object(RealDisk, "_sync", lambda self, file, call: call(file.fd)),
    first=100,
)
