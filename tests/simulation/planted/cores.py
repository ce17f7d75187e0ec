"""Known bugs of cores, for `tests.simulation.bugs`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

from qmq.broker.answers import PullAnswer
from qmq.broker.delivery import Delivery
from qmq.codec import Buffer
from qmq.errors import CorruptFrame
from qmq.log import Commit, MessageLog, fold, message_log, recovery, segments
from qmq.log import frame as frames
from qmq.log.frame import Frame
from qmq.log.group import Consumer
from qmq.log.requeued import Requeued, RequeuedRange
from qmq.log.retention import Kept
from qmq.metaserver.roles import promotion
from qmq.metaserver.roles.promotion import CONDITIONS, SLAVE_CONDITIONS, Refusal
from qmq.remoting import commands
from qmq.remoting.commands import Command
from qmq.replication import agreement, readonly
from qmq.replication.ack_gate import AckGate
from qmq.replication.agreement import Action, Agreement, Hello
from qmq.replication.follower import FollowerEvent, InSync, SlaveWatch
from qmq.replication.identity import Identity, IdentityFile
from qmq.replication.node import Node
from qmq.replication.points import PointFile
from qmq.replication.quorum import Slaves
from qmq.replication.readonly import Reason
from qmq.replication.shipper import Shipper
from qmq.replication.slave import Slave
from qmq.tools.recover_group import Copy
from qmq.types import Epoch
from tests.simulation.bugs import Patch, bug
from tests.simulation.cores.machine import Process


@bug("cores")
def ack_before_fsync() -> list[Patch]:
    """The master counts what it has handed to the disk as fsynced."""
    real = Process.commit

    def commit(self: Process, commit: Commit) -> None:
        if self.node.master is not None:
            self.node.master.gate.flushed(commit.end, commit.chain)
        real(self, commit)

    return [mock.patch.object(Process, "commit", commit)]


@bug("cores")
def confirm_before_fsync() -> list[Patch]:
    """The slave confirms what it has received."""
    real = Slave.packet_received

    def packet_received(self: Slave, link: Any, packet: Any) -> None:
        real(self, link, packet)
        if packet.code == Command.FRAMES and self.is_master(link) and self.is_following:
            self._confirm(self._log.end, self._log.chain)

    return [mock.patch.object(Slave, "packet_received", packet_received)]


@bug("cores", first=109)
def ack_by_slaves_length() -> list[Patch]:
    """The end that the slave says in its hello counts as confirmed, whatever is in its log."""
    real = SlaveWatch.hello

    def hello(self: SlaveWatch, link: Any, packet: Any, said: Hello) -> None:
        real(self, link, packet, said)
        if self.is_of(link) and self._mastership.has_begun:
            slave = self.follower.connected
            self._enter(FollowerEvent.MATCHED, InSync(slave.shipper, slave.incarnation))
            self._mastership.gate.slave_matched(min(said.end, self._mastership.log.end), 0)

    return [mock.patch.object(SlaveWatch, "hello", hello)]


@bug("cores", first=825, favoured="replace")
def older_epochs_are_not_fenced() -> list[Patch]:
    """Nobody refuses an older epoch."""
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
        mock.patch("qmq.replication.follower.agree", agree),
        mock.patch.object(Slave, "agreed", agreed),
        mock.patch.object(IdentityFile, "learn", learn),
        mock.patch.object(Node, "assign", assign),
    ]


def _with_epoch(identity: Identity, epoch: Epoch) -> Identity:
    return replace(identity, term=epoch.term, boot=epoch.boot)


@bug("cores", first=5)
def truncate_by_length() -> list[Patch]:
    """The copies are taken to agree up to the shorter one's end."""

    def agree(hello: Hello, log: MessageLog, epoch: Epoch, *, has_begun: bool, **points: Any) -> Any:
        end = min(hello.end, log.end)
        return Agreement(epoch, Action.FOLLOW, end, 0, log.end)

    def cut_to(self: Slave, agreed: Agreement) -> None:
        if agreed.offset < self._log.end:
            self._log.cut(agreed.offset, "longer than the master's")

    def confirm(self: Shipper, end: int, chain: int) -> None:
        self.confirmed_end = end

    def append_frames(self: MessageLog, offset: int, data: memoryview) -> None:
        at = 0
        while at < len(data):
            frame = frames.decode_header(data, at, offset + at, None)
            end = frame.end - offset
            body = data[at + frame.body_at : end]
            self._take(frame, (data[at:end],), body)
            at = end

    return [
        mock.patch("qmq.replication.follower.agree", agree),
        mock.patch.object(Slave, "_cut_to", cut_to),
        mock.patch.object(Shipper, "confirm", confirm),
        mock.patch.object(MessageLog, "append_frames", append_frames),
    ]


@bug("cores", first=13)
def epoch_not_persisted() -> list[Patch]:
    """A broker knows its epoch until it dies."""
    real = IdentityFile._change

    def change(self: IdentityFile, **fields: Any) -> None:
        if "boot" in fields:
            self.value = _with_epoch(self.value, Epoch(fields["term"], fields["boot"]))
            return
        known = self.value.epoch
        self.value = _with_epoch(self.value, Epoch(self.value.term, 0))
        real(self, **fields)
        self.value = _with_epoch(self.value, known)

    return [mock.patch.object(IdentityFile, "_change", change)]


@bug("cores", first=26)
def crc_over_body_only() -> list[Patch]:
    """Nothing vouches for a header: a flipped bit in it is read as it is."""

    def decode_header(data: Buffer, at: int, offset: int, previous_chain: int | None) -> Frame:
        if len(data) - at < frames.HEADER_BYTES:
            raise CorruptFrame(offset, "the bytes end within a header")
        (
            magic,
            kind,
            flags,
            subject_bytes,
            count,
            body_bytes,
            term,
            boot,
            own_offset,
            high_watermark,
            timestamp_ms,
            first_sequence,
            producer,
            batch,
            chain,
            body_crc,
            _,
        ) = frames.HEADER.unpack_from(data, at)
        body_at = frames.HEADER_BYTES + subject_bytes + (-subject_bytes % 8)
        if magic != frames.MAGIC or body_bytes > frames.FRAME_BYTES_MAX or len(data) - at < body_at:
            raise CorruptFrame(offset, "no magic number")
        if own_offset != offset or not 1 <= kind <= 5 or body_bytes % 8:
            raise CorruptFrame(offset, f"this frame belongs to offset {own_offset}")
        subject = bytes(memoryview(data)[at + frames.HEADER_BYTES :][:subject_bytes]).decode("utf-8", "replace")
        return Frame(
            kind,
            flags,
            subject,
            count,
            body_bytes,
            Epoch(term, boot),
            own_offset,
            high_watermark,
            timestamp_ms,
            first_sequence,
            producer,
            batch,
            chain,
            body_crc,
            body_at,
            offset + body_at + body_bytes,
        )

    return [
        mock.patch.object(module, "decode_header", decode_header)
        for module in (frames, message_log, recovery, segments)
    ]


@bug("cores", first=130, favoured="rotten_tail")
def begins_after_a_cut_tail() -> list[Patch]:
    """A master whose tail was cut in recovery goes on without asking the slave for what it lost."""
    return [mock.patch.object(MessageLog, "is_tail_cut", property(lambda self: False))]


@bug("cores", first=189, favoured="rotten_tail")
def cut_tail_forgotten_by_a_restart() -> list[Patch]:
    """The master waits for its slave after a cut tail, but a second restart knows nothing of it."""
    return [mock.patch.object(MessageLog, "is_tail_cut", property(lambda self: self.torn_bytes > 0))]


@bug("cores", first=79)
def pulls_before_the_high_watermark() -> list[Patch]:
    """Messages are delivered as soon as they are written."""

    def progress(self: AckGate, end: int, data_end: int, answer: Any) -> None:
        answer(None)

    return [mock.patch.object(AckGate, "progress", progress)]


@bug("cores", first=5)
def boot_is_not_raised() -> list[Patch]:
    """A master that restarts in its term goes on in the same epoch."""

    def next_boot(self: IdentityFile, term: int, *, above: int = 0) -> Epoch:
        epoch = Epoch(term, max(1, above))
        if epoch > self.value.epoch:
            self.learn(epoch)
        return epoch

    return [mock.patch.object(IdentityFile, "next_boot", next_boot)]


@bug("cores")
def master_alone_acknowledges() -> list[Patch]:
    """While the slave is missing, the master's own disk is enough."""
    real = AckGate._release

    def release(self: AckGate) -> None:
        if self.too_few_in_sync:
            self.matched_end = self.flushed_end
        real(self)

    return [
        mock.patch.object(AckGate, "_release", release),
        mock.patch("qmq.replication.readonly.Readonly.check", _no_check),
    ]


def _no_check(self: object, group: str, subject: str) -> None: ...


@bug("cores", first=9)
def repeated_batch_is_stored_again() -> list[Patch]:
    """Nobody remembers batches."""
    return [mock.patch("qmq.log.fold.State.repeated", lambda self, producer, batch: None)]


@bug("cores")
def messages_of_a_departed_consumer_are_lost() -> list[Patch]:
    """What a consumer that left has not acked is given to nobody."""
    real = fold._position

    def position(state: Any, frame: Frame, body: Buffer) -> None:
        real(state, frame, body)
        for group in state.groups.values():
            group.requeued = Requeued()

    return [mock.patch.dict(fold._KINDS, {frames.FrameKind.POSITION: position})]


@bug("cores", first=12)
def vanished_consumers_messages_are_acked() -> list[Patch]:
    """W1: what a consumer that vanished has not acked counts as acked."""

    def leave(group: Any, progress: Any) -> None:
        ((told, _, _),) = progress.entries
        consumer = group.consumers.pop(progress.consumer, Consumer())
        for one in consumer.unacked if told else ():
            group.requeue(one, attempts=one.attempts - told, suspected=one.suspected)
        group.floor = max(group.floor, consumer.next_pull)

    return [mock.patch.object(fold, "_leave", leave)]


@bug("cores", first=14)
def pull_sequences_are_used_again() -> list[Patch]:
    """W2, W13: a new master goes on with the numbers where its own log ends."""

    def next_pull(self: fold.State, group: fold.Group, consumer: str) -> int:
        known = group.consumers.get(consumer)
        return known.next_pull if known else group.floor

    def was_given(self: fold.Consumer, end: int) -> bool:
        return True

    return [
        mock.patch.object(fold.State, "next_pull", next_pull),
        mock.patch.object(fold.Consumer, "was_given", was_given),
    ]


@bug("cores", first=9)
def new_group_is_in_memory_only() -> list[Patch]:
    """W8: where a group begins that has pulled nothing yet is forgotten by a restart."""
    real = Delivery.subscribe

    def subscribe(self: Delivery, link: Any, packet: Any) -> None:
        f = commands.decode_json(packet.body)
        subject, name, state = f["subject"], f["group"], self._mastership.log.state
        group = state.groups.get((subject, name))
        if group is not None and not group.consumers and not group.floor and self._mastership.may_progress:
            entry = state.next_sequence.get(subject, 0), 0, 0
            self._mastership.append_progress(frames.FrameKind.POSITION, (subject, name, ""), [entry])
        real(self, link, packet)

    return [mock.patch.object(Delivery, "subscribe", subscribe)]


@bug("cores")
def broker_acks_for_its_consumers() -> list[Patch]:
    """W10: what stands before a part that is delivered again counts as acked, though its consumer holds it."""
    real = Delivery._write_down

    def write_down(self: Delivery, subscription: Any, chosen: Any) -> None:
        consumer = self.consumption.consumer(*subscription.key)
        if not chosen.entries and chosen.parts and consumer is not None:
            first, end = consumer.acked_end, chosen.parts[0].pull_sequence
            if first < end:
                self._mastership.append_progress(frames.FrameKind.ACK, subscription.key, [(first, end, 0)])
        real(self, subscription, chosen)

    return [mock.patch.object(Delivery, "_write_down", write_down)]


@bug("cores")
def chosen_messages_are_counted_from_the_first() -> list[Patch]:
    """W9: what is chosen by its tags is numbered as if nothing had been passed over in between."""
    real = PullAnswer.send

    def send(self: Any) -> bool:
        sequence = self.chosen.parts[0].begin
        headers = []
        for part in self.chosen.parts:
            headers.append(sequence)
            sequence += part.end - part.begin
        numbers = iter(headers)

        def piece_header(pull_sequence: int, begin: int, *rest: int) -> bytes:
            return header(pull_sequence, next(numbers), *rest)

        header = commands.piece_header
        with mock.patch.object(commands, "piece_header", piece_header):
            return real(self)

    return [mock.patch.object(PullAnswer, "send", send)]


@bug("cores", first=4)
def keys_are_never_busy() -> list[Patch]:
    """A message is delivered although an earlier one of its order key is not done."""
    return [mock.patch("qmq.broker.group_filter.Keys.is_busy", lambda self, key: False)]


@bug("cores")
def deliveries_are_not_counted() -> list[Patch]:
    """What comes back counts as new."""

    def add(self: Requeued, new: RequeuedRange) -> None:
        real(self, new._replace(attempts=0))

    real = Requeued.add
    return [mock.patch.object(Requeued, "add", add)]


@bug("cores", first=8, moves=True)
def moved_group_counts_anew() -> list[Patch]:
    """A group that is moved uses its pull sequences again."""
    real = fold._position

    def position(state: Any, frame: Frame, body: Buffer) -> None:
        real(state, frame, body)
        progress = fold.decode_progress(body)
        if not progress.consumer:
            state.groups[frame.subject, progress.group].floor = 0

    return [mock.patch.dict(fold._KINDS, {frames.FrameKind.POSITION: position})]


@bug("cores", first=804, favoured="power_everywhere", moves=True)
def move_is_answered_too_early() -> list[Patch]:
    """An operator hears that a group is moved before both copies know it."""
    real = Delivery.move_group

    def move_group(self: Delivery, *where: Any, dry_run: bool, answer: Any) -> Any:
        reset = real(self, *where, dry_run=dry_run, answer=lambda error: None)
        process: Any = self._mastership.host
        process._after(0.01, lambda: answer(None))
        return reset

    return [mock.patch.object(Delivery, "move_group", move_group)]


@bug("cores", first=139)
def no_copy_lacks_anything() -> list[Patch]:
    """What a copy itself and the row remember is not compared with its log."""
    return [mock.patch.object(Node, "_may_lack", lambda self, point: False)]


@bug("cores", first=16, favoured="forgets_last_write")
def no_master_gives_way() -> list[Patch]:
    """A master that wrote alone keeps that, whatever its slave confirmed."""
    return [mock.patch.object(Node, "_yield", lambda self, why: None)]


@bug("cores", first=7, fails_over=True)
def any_slave_is_chosen() -> list[Patch]:
    """The metaserver asks for no more than a slave that is there, and the slave agrees to all."""
    return _chosen_without(set(Refusal) - {Refusal.NO_SLAVE, Refusal.HALF_SWAPPED, Refusal.SLAVE_DOWN})


@bug("cores", first=139, favoured="forgets_last_write", fails_over=True)
def slave_that_restarted_is_chosen() -> list[Patch]:
    """Nobody asks what a slave's own process has seen; and the metaserver forgets the acknowledged points."""
    return _chosen_without({Refusal.NOT_IN_SYNC_SINCE_START, Refusal.ROLLED_BACK, Refusal.BEHIND})


def _chosen_without(left_out: set[Refusal]) -> list[Patch]:
    """The failover leaves out conditions, and no slave has any of its own."""

    def prepare(self: Node[Any], term: int, **_: Any) -> None:
        return None

    tables = {"CONDITIONS": CONDITIONS, "SLAVE_CONDITIONS": SLAVE_CONDITIONS}
    kept = {name: tuple(one for one in table if one[0] not in left_out) for name, table in tables.items()}
    patches: list[Patch] = [mock.patch.object(promotion, name, table) for name, table in kept.items()]
    if Refusal.BEHIND in left_out:
        patches.append(mock.patch.object(promotion, "_is_behind", lambda facts: False))
    return [*patches, mock.patch.object(Node, "prepare_failover", prepare)]


@bug("cores", first=3)
def a_lost_slave_goes_on_counting() -> list[Patch]:
    """The gate is not told that the slave is gone."""
    return [mock.patch.object(SlaveWatch, "_without_slave", lambda self: None)]


@bug("cores")
def matched_by_each_confirmation() -> list[Patch]:
    """A slave in sync matches once more: a move that the table lacks."""
    real = SlaveWatch.confirm

    def confirm(self: SlaveWatch, link: Any, packet: Any) -> None:
        real(self, link, packet)
        if self.is_of(link) and (slave := self.follower.in_sync) is not None:
            self._enter(FollowerEvent.MATCHED, slave)

    return [mock.patch.object(SlaveWatch, "confirm", confirm)]


@bug("cores", copies=3, min_copies=3)
def largest_matched_end_counts() -> list[Patch]:
    """The slave that is ahead of the others decides what is acknowledged."""
    real = AckGate._rank

    def rank(self: AckGate) -> None:
        real(self)
        if self._matched and not self.too_few_in_sync:
            self.matched_end, self.matched_chain = max(self._matched.values())
            self._release()

    return [mock.patch.object(AckGate, "_rank", rank)]


@bug("cores", first=20)
def deletions_have_no_chain() -> list[Patch]:
    """What a copy says of its log once it deleted, and wrote nothing, is of another one."""
    real = MessageLog.take_commit

    def take_commit(self: MessageLog) -> Commit | None:
        commit = real(self)
        if commit is not None and not commit.bytes:
            commit.chain = 0
        return commit

    return [mock.patch.object(MessageLog, "take_commit", take_commit)]


@bug("cores")
def deletes_before_the_decision_is_acknowledged() -> list[Patch]:
    """A copy deletes segments as soon as the retention frame is in its log, below the high watermark or not."""
    return [mock.patch.object(Kept, "agreed_start", lambda self, high_watermark: self.start)]


@bug("cores")
def acknowledged_point_has_another_chain() -> list[Patch]:
    """The acknowledged point ends with one copy, and has the chain of the other."""
    real = AckGate._release

    def release(self: AckGate) -> None:
        before = self.high_watermark
        real(self)
        if self.high_watermark > before:
            self.high_chain = self.matched_chain if self.flushed_end <= self.matched_end else self.flushed_chain

    return [mock.patch.object(AckGate, "_release", release)]


@bug("cores", first=74, copies=3)
def promises_are_forgotten() -> list[Patch]:
    """What a copy promised is in memory only, until its hold ends."""
    return [mock.patch.object(IdentityFile, "promise", lambda self, term: None)]


@bug("cores", first=20, favoured="cut_off_master", copies=3)
def one_promise_too_few() -> list[Patch]:
    """A set of those that promised may miss each copy of a set that acknowledged."""

    def promises_needed(self: promotion.Facts) -> int:
        return len(self.group.brokers) - self.group.min_copies

    return [mock.patch.object(promotion.Facts, "promises_needed", property(promises_needed))]


@bug("cores", favoured="cut_off_master", copies=3)
def confirms_after_promising() -> list[Patch]:
    """A copy that promised goes on following its master."""
    real = Node.prepare_failover

    def prepare(self: Node[Any], term: int, **words: Any) -> None:
        with (
            mock.patch.object(Slave, "leave_master", lambda self, why: None),
            mock.patch.object(Process, "role_changed", lambda self: None),
        ):
            real(self, term, **words)

    return [mock.patch.object(Node, "prepare_failover", prepare)]


@bug("cores", first=3, copies=3)
def master_begins_in_its_old_term() -> list[Patch]:
    """The row keeps its term when the master of several slaves restarts."""
    return [mock.patch("qmq.metaserver.roles.rules.needs_new_life", lambda group, key: False)]


@bug("cores", first=108, favoured="power_everywhere", copies=3)
def restarted_master_waits_for_any_slave() -> list[Patch]:
    """A slave that was in sync before is not waited for, once another one is there."""
    return [mock.patch.object(Slaves, "_missing", lambda self: "")]


@bug("cores", first=4037, copies=3, min_copies=3)
def diverged_names_no_way_out() -> list[Patch]:
    """A slave keeps what the master's log has no place for, and nobody is told whose directory is set aside."""
    return [mock.patch.dict(readonly.WAY_OUT, {Reason.DIVERGED: "read the logs with the audit"})]


@bug("cores", first=13265, copies=3)
def a_copy_that_differs_never_goes_on() -> list[Patch]:
    """A master that lacks something takes what an older one wrote alone, keeps that, and so parts from the copy that
    has it; then a third one is preferred to that."""
    return [
        mock.patch.object(Hello, "has", lambda self, point: True),
        mock.patch.object(Hello, "is_ahead_of", lambda self, epoch: False),
        mock.patch.object(Copy, "may_go_on", property(lambda self: self.is_whole)),
    ]


@bug("cores", first=113501)
def mastership_ends_without_a_memory() -> list[Patch]:
    """What it acknowledged last is not written down."""
    return [mock.patch.object(PointFile, "save", lambda self: None)]


@bug("clones", first=9, favoured="clone_while_the_metaserver_is_away")
def a_copy_takes_up_a_part_alone() -> list[Patch]:
    """A directory that was copied starts without the metaserver, as one that stayed at its place may."""
    return [mock.patch.object(Node, "is_elsewhere", property(lambda self: False))]


@bug("clones", favoured="clone")
def a_copy_gets_the_same_term() -> list[Patch]:
    """A metaserver lets in whoever has the directory of its row, wherever that is."""
    return [mock.patch("qmq.metaserver.roles.rules.is_elsewhere", lambda known, said: False)]
