"""Laws of copies, messages and deliveries, checked while cores run. The product does not read the oracle.

Invariants have the numbers of ARCHITECTURE.md. The committed log is the one prefix below a high watermark of any
master: once both disks had it, no history may lack it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from qmq.codec import Buffer, decode_envelope, decode_message, split_batch
from qmq.log.frame import FLAG_NO_SLAVE_IN_SYNC, Frame, FrameKind
from qmq.log.progress_frame import decode_progress
from qmq.remoting.commands import Piece, Produced
from qmq.subjects import parse_derived
from qmq.types import NO_EPOCH, Epoch
from tests.simulation.cores.clients import TAG, is_tagged, order_key
from tests.simulation.cores.watched_log import WatchedLog
from tests.simulation.events import Events, Violation
from tests.simulation.ledger import Ledger, Place
from tests.simulation.states import Legality

if TYPE_CHECKING:
    from qmq.log import Commit
    from qmq.replication.identity import Point
    from tests.simulation.cores.clients import Consumer
    from tests.simulation.cores.machine import Machine, Process
    from tests.simulation.cores.operator import Move


@dataclass(slots=True)
class Committed:
    """End of the committed log: everything below `end` was fsynced on both disks."""

    end: int = 0
    chain: int = 0
    epoch: Epoch = NO_EPOCH


class Oracle(Ledger):
    """Made per seed. Raises Violation."""

    def __init__(self, events: Events) -> None:
        super().__init__()
        self._events = events
        self._legality = Legality()
        self.machines: list[Machine] = []
        self.committed = Committed()
        self._chains: dict[tuple[Epoch, int], int] = {}
        self._committed_frames: dict[int, int] = {}
        self._ackers: dict[Epoch, str] = {}
        self._lives: dict[int, WatchedLog] = {}
        """Term -> log of its master's process, in groups of more than two copies."""
        self._begins: dict[tuple[str, str], int] = {}
        """(subject, consumer group) -> first sequence that its last master gave it, unless an operator moved it."""
        self.copies = self.min_copies = 2
        self.has_operator = False
        """Whether an operator moves consumer groups."""
        self.deliveries_max = 0
        self.is_counted = True
        """Whether delivery attempts are unique: no moves, and no consumers that unsubscribe."""
        self._finished: dict[tuple[str, str, int], int] = {}
        """(consumer group, subject, sequence) -> deliveries so far when an application finished the message."""
        self._counts: dict[tuple[str, str, int, int], tuple[str, int]] = {}
        """(consumer group, subject, sequence, times) -> (consumer, pull sequence)."""
        self._uncounted: set[tuple[str, str, int]] = set()
        """(consumer group, subject, sequence) that a master delivered alone."""
        self.is_ordered = False
        """Whether messages have order keys, and no operator moves groups."""
        self.choosy: set[str] = set()
        """Consumer groups that filter by the tag."""
        self._last_finished: dict[tuple[str, str, str], int] = {}
        """(consumer group, subject, order key) -> last sequence that an application finished."""
        self._dead: dict[tuple[str, str, int], set[int]] = {}
        """(consumer group, subject, sequence) -> offsets of its dead letters, in any log."""
        self._dead_kept: set[tuple[str, str, int]] = set()
        """Those that are in the log at the end."""
        self._deliveries = 0
        self._delivered_last: dict[tuple[str, str, int], int] = {}
        """(consumer group, subject, sequence) -> number of its last delivery."""
        self._positions: dict[tuple[Epoch, int], int] = {}
        """(epoch, offset) of position frames -> deliveries before the frame was written."""
        self._moves: list[Move] = []
        self._numbers: dict[tuple[str, int], int] = {}
        """(consumer, pull sequence) -> sequence."""
        self.first_answers: dict[tuple[int, int], int] = {}
        self._written_ms: dict[int, int] = {}
        """Offset of a frame -> true time at which a master last wrote one there."""

    # Reports of logs.

    def check_frame(self, log: WatchedLog, frame: Frame, body: Buffer) -> None:
        """Check a frame right before it is folded into a log."""
        known = self._chains.setdefault((frame.epoch, frame.offset), frame.chain)
        if known != frame.chain:
            self._used_again(log, frame, known)
        if (dead := _dead_letter(frame, body)) is not None:
            self._dead.setdefault(dead, set()).add(frame.offset)

    def _used_again(self, log: WatchedLog, frame: Frame, known: int) -> None:
        """Check a second frame with the same epoch and offset (I3).

        A disk that was put back forgot its epochs and may use one again. Until it meets the other copy, none of its
        frames is acknowledged; if the other copy kept the older frame, the new one has to give way. So a repeated frame
        is legal unless the older one is committed, or kept by a copy while slaves follow the new one. With more than
        two copies each mastership has its own term, and no frame repeats.
        """
        what = f"two frames with epoch {frame.epoch} and offset {frame.offset}; one at {log.owner}"
        if self.copies > 2 or all(frame.epoch > machine.forgot for machine in self.machines):
            raise Violation(f"I3: {what}")
        writer = self._machine(log)
        master = writer.process.node.master if writer.process is not None else None
        is_alone = master is not None and master.epoch == frame.epoch and master.gate.too_few_in_sync
        is_kept = any(machine is not writer and machine.has_frame(frame.offset, known) for machine in self.machines)
        if not is_alone and (is_kept or self._committed_frames.get(frame.offset) == known):
            raise Violation(f"I3: {what}, the other {'kept by its peer' if is_kept else 'committed'}")
        self._events.count("epoch used again")
        if not is_kept:
            self._chains[frame.epoch, frame.offset] = frame.chain

    def writing(self, log: WatchedLog) -> None:
        """Note the time of a master's next frame."""
        self._written_ms[log.end] = self._events.now_ms

    def flushed(self, log: WatchedLog, commit: Commit) -> None:
        """Check the end and chain that a copy reports after a commit, also after one that only deleted."""
        if log.chains.get(commit.end) != commit.chain:
            raise Violation(f"I4: {log.owner} reports that its chain at {commit.end} is {commit.chain:016x}")

    def decided(self, log: WatchedLog, retention_ms: int) -> None:
        """Check the age of frames that a master decides to delete. Three clocks agreed to half a second both times."""
        start = log.state.kept.start
        age_ms = self._events.now_ms - max(ms for offset, ms in self._written_ms.items() if offset < start)
        if age_ms < retention_ms - 1000:
            raise Violation(f"P6: {log.owner} deletes the frames before {start}, which are {age_ms} ms old")

    def deleting(self, log: WatchedLog) -> None:
        """Check that an acknowledged frame allows a copy to delete its oldest segment."""
        kept = log.state.kept
        if log.bases[1] > kept.start or kept.decided_end > self.committed.end:
            raise Violation(f"P6: {log.owner} deletes up to {log.bases[1]} without an acknowledged frame: {kept}")

    def chosen(self, log: WatchedLog) -> None:
        """Check the log of a slave that the metaserver makes the master.

        The choice rests on its report. A log whose tail was lost or damaged since then does not begin before it is
        refilled (see `beginning`).
        """
        committed, is_known = self.committed, log.is_tail_cut or log.damage is not None
        has_it = committed.end <= log.flushed_end and self._has_committed(log)
        if not has_it and not is_known and committed.end > log.start:
            raise Violation(f"I25: {log.owner} is chosen, ends at {log.flushed_end}, and lacks {committed}")

    def beginning(self, log: WatchedLog, epoch: Epoch) -> None:
        """Check that a new master has everything committed, and that no newer master committed before."""
        if self.copies > 2 and self._lives.setdefault(epoch.term, log) is not log:
            raise Violation(f"I2: {log.owner} begins in {epoch}, and another process was the master in that term")
        committed, put_back = self.committed, self._is_put_back(log) or self._has_a_copy(log)
        if put_back and self.has_it_again(log):
            put_back = self._machine(log).is_put_back = False
        if epoch < committed.epoch and self.copies > 2:
            return  # it is deposed without a notice; copies that promised confirm nothing to it
        if put_back and self.copies == 2:
            return self._begins_in_good_faith(log)
        if epoch < committed.epoch:
            raise Violation(f"I2: {log.owner} becomes master in {epoch} after {committed.epoch} had committed")
        if log.end < committed.end or not self._has_committed(log):
            raise Violation(
                f"I1: {log.owner} becomes master in {epoch} at {log.end} without what was committed "
                f"up to {committed.end} in {committed.epoch}"
            )

    def group_begins(self, log: WatchedLog, epoch: Epoch, subject: str, group: str, position: int) -> None:
        """Check the first position of a consumer group; all of them start at the earliest message."""
        self._positions[epoch, log.end] = self._deliveries
        if (subject, group) in log.state.groups:
            if not self.has_operator:
                raise Violation(f"I9: {group} on {subject} is moved to {position} without an order")
            self._begins.pop((subject, group), None)
            return
        oldest = log.frames(subject, 0, 1)
        expected = oldest[0].begin if oldest else log.state.next_sequence.get(subject, 0)
        if position != expected:
            raise Violation(f"I9: {group} begins {subject} at {position}, not at {expected}")
        self._begins[subject, group] = position

    def moved(self, move: Move) -> None:
        """Note a move that was answered."""
        self._moves.append(move)

    def _machine(self, log: WatchedLog) -> Machine:
        return next(machine for machine in self.machines if machine.name == log.owner)

    def _is_put_back(self, log: WatchedLog) -> bool:
        return self._machine(log).is_put_back

    def _has_a_copy(self, log: WatchedLog) -> bool:
        """Whether a clone of its directory may have served in its place: the log lacks what that one confirmed."""
        broker = self._machine(log).broker
        return sum(machine.broker == broker for machine in self.machines) > 1

    def has_it_again(self, log: WatchedLog) -> bool:
        """Whether a log has everything that was ever committed."""
        return log.end >= self.committed.end and self._has_committed(log, can_be_read=True)

    def _is_refilled(self, machine: Machine, end: int) -> bool:
        process = machine.process
        end = max(end, machine.had_end)
        machine.is_put_back = process is None or process.log.flushed_end < end or not self.has_it_again(process.log)
        return not machine.is_put_back

    def _begins_in_good_faith(self, log: WatchedLog) -> None:
        """Check that a copy that was put back begins only without a report of what it lacks (I25)."""
        process = self._machine(log).process
        known = [] if process is None else [*process.received_points, process.node.identity.points.own]
        for point in known:
            if point is not None and point.end > log.end:
                raise Violation(f"I25: {log.owner} becomes master at {log.end}, although it has {point}")

    def _has_committed(self, log: WatchedLog, *, can_be_read: bool = False) -> bool:
        """Whether a log has the end of the committed log.

        A flipped bit may hide it; that counts as having it unless `can_be_read`.
        """
        if self.committed.end <= log.start:
            return True
        chain = log.chain_at(self.committed.end)
        hidden = chain is None and not can_be_read and log.hides(self.committed.end)
        return chain == self.committed.chain or hidden

    def cutting(self, log: WatchedLog, to: int) -> None:
        if to >= log.end or log.simulated_disk.flipped:
            return
        frame = log.frame_at(to)
        if frame is not None and self._committed_frames.get(to) == frame.chain:
            raise Violation(f"I5: {log.owner} cuts committed bytes from {to}")

    # Reports of processes.

    def check_process(self, process: Process) -> None:
        """Check a process after a call into its core."""
        self._legality.check(process.name, process.node)
        slave, promised = process.node.slave, process.node.identity.value.promised
        if slave is not None and slave.is_following and slave.term < promised:
            raise Violation(f"I2: {process.name} follows the master of term {slave.term}, and promised {promised}")
        master = process.node.master
        if master is None:
            return
        high = master.gate.high_watermark
        if master is not process.seen_master:
            process.seen_master, process.seen_high = master, high
            return
        if high == process.seen_high:
            return
        if high < process.seen_high:
            raise Violation(f"I6: the high watermark of {process.name} went from {process.seen_high} to {high}")
        process.seen_high = high
        if high > self.committed.end:
            self._commit(process, high, master.epoch)
            self._check_point(process.name, master.gate.point)

    def _commit(self, process: Process, high: int, epoch: Epoch) -> None:
        log = process.log
        chain = log.chain_at(high)
        if chain is None and log.simulated_disk.flipped:
            return  # unreadable at the moment
        if chain is None:
            raise Violation(f"I6: the high watermark {high} of {process.name} is the end of no frame")
        if not self._has_committed(log):
            raise Violation(f"I1: {process.name} commits in a history without {self.committed}")
        self._check_disks(log, max(self.committed.end, log.start), high)
        at = self.committed.end
        while at < high and (data := log.frame_bytes.get(at)) is not None:
            self._committed_frames[at] = log.chains[at + len(data)]
            at += len(data)
        self.committed = Committed(high, chain, epoch)

    def _check_point(self, name: str, point: Point | None) -> None:
        """Check the chain of an acknowledged point: with another chain, each copy would seem to lack it (I25)."""
        committed = self.committed
        if point is not None and point.end == committed.end and point.chain != committed.chain:
            raise Violation(f"I25: {name} acknowledges up to {point}, and has {committed}")

    def _check_disks(self, log: WatchedLog, begin: int, end: int) -> None:
        """Check that newly acknowledged frames would survive a power cut of all machines, on enough of them (I1)."""
        missing_max = len(self.machines) - self.min_copies
        images = []
        for machine in self.machines:
            if machine.is_put_back and not self._is_refilled(machine, end):
                continue  # it confirmed these bytes and lost them since
            bases = machine.bases()
            first = max(begin, bases[0] if bases else end)
            images.append((machine, bases, first, machine.disk.durable(bases, first, end)))
        images.sort(key=lambda image: image[0].name != log.owner)
        at = begin
        while at < end:
            data = log.frame_bytes.get(at)
            if data is None and any(m.disk.is_flipped(bases, at, end) for m, bases, _, _ in images):
                return
            if data is None and images:  # older than this process: enough disks must at least agree with its own
                data = images[0][3][at - images[0][2] :] if images[0][2] <= at else None
            missing = [
                machine.name
                for machine, bases, first, image in images
                if data is not None and at >= first and image[at - first : at - first + len(data)] != data
                if not machine.disk.is_flipped(bases, at, end)
            ]
            if len(missing) > missing_max:
                raise Violation(f"I1: frame at {at}, below the high watermark, is not on the disks of {missing}")
            if data is None or not data:
                return
            at += len(data)

    def acks(self, process: Process, epoch: Epoch, produced: Produced) -> None:
        """Check that one broker at most acknowledges in an epoch (I2)."""
        acker = self._ackers.setdefault(epoch, process.name)
        if acker != process.name:
            raise Violation(f"I2: {acker} and {process.name} both acknowledge in epoch {epoch}")

    # Reports of clients.

    def acknowledged(self, batch: tuple[int, int], subject: str, ids: list[str], produced: Produced) -> None:
        """Check and note a producer's receipt."""
        refused = {position for position, _ in produced.refused}
        stored = [identity for position, identity in enumerate(ids) if position not in refused]
        if len(stored) != produced.stored:
            raise Violation(f"I18: {produced.stored} messages stored of {len(stored)}")
        if self.first_answers.setdefault(batch, produced.first_sequence) != produced.first_sequence:
            raise Violation(f"I18: batch {batch} was stored twice")
        for i, identity in enumerate(stored):
            self.note_receipt(identity, (subject, produced.first_sequence + i))

    def received(self, consumer: Consumer, sequence: int, message: bytes) -> None:
        """Check and note a delivered message."""
        envelope, group, subject = decode_envelope(message), consumer.group, consumer.subject
        if consumer.is_choosy and TAG not in envelope.tags:
            raise Violation(f"I23: {group}, which asks for the tag {TAG}, gets {subject} {sequence} without it")
        self.note_delivery(envelope.id, (subject, sequence))
        self._deliveries += 1
        self._delivered_last[group, subject, sequence] = self._deliveries

    def counted(self, consumer: Consumer, piece: Piece, at: int) -> None:
        """Check the delivery attempt of a message. A later master may lack the attempts of a master that was alone."""
        times, sequence = piece.times, piece.sequence + at
        if times < 1 or (self.deliveries_max and times > self.deliveries_max):
            raise Violation(f"I21: {consumer.subject} {sequence} is delivered for the {times}th time")
        key = consumer.group, consumer.subject, sequence
        if piece.flags & FLAG_NO_SLAVE_IN_SYNC:
            self._uncounted.add(key)
        number = consumer.name, piece.pull_sequence + at
        if self._counts.setdefault((*key, times), number) != number and key not in self._uncounted:
            if self.is_counted:
                raise Violation(f"I21: {key} is delivered for the {times}th time twice")

    def finished(self, group: str, subject: str, sequence: int) -> None:
        """Check the order of finished messages; the application acks the message if it survives.

        A message with a dead letter does not hold up others: the lease of its consumer ran out, or its master's disk
        lost the dead letter and the next master delivers the message again.
        """
        key = group, subject, sequence
        name = order_key(self.delivered[subject, sequence]) if self.is_ordered else None
        if name is not None and key not in self._finished:
            last = self._last_finished.get((group, subject, name), 0)
            if sequence < last and key not in self._dead:
                raise Violation(f"I24: {group} was done with a later message of {name} before {subject} {sequence}")
            self._last_finished[group, subject, name] = max(last, sequence)
        self._finished[key] = self._deliveries

    def numbered(self, consumer: Consumer, pull_sequence: int, sequence: int) -> None:
        """Check that a pull sequence means one message."""
        if any(machine.was_put_back for machine in self.machines):
            return  # alone, it used numbers of a repeated epoch; none of its frames stays
        if self._numbers.setdefault((consumer.name, pull_sequence), sequence) != sequence:
            raise Violation(f"I8: pull sequence {pull_sequence} of {consumer.name} is given to two messages")

    # Checks at the end.

    def check_end(self, groups: list[str]) -> None:
        """Check that both copies are whole, equal, and hold every promised message once."""
        logs = [process.log for machine in self.machines if (process := machine.process) is not None]
        if len({(log.end, log.chain) for log in logs}) > 1:
            raise Violation("I3: the logs differ at the end")
        begin, end = max(log.start for log in logs), logs[0].end
        if len({machine.disk.durable(machine.bases(), begin, end) for machine in self.machines}) > 1:
            raise Violation("I14: the disks differ at the end although both logs read well")
        stored, begins = self._walk(logs[0])
        self._check_messages(stored, logs[0])
        for group in groups:
            self._check_group(group, begins, logs[0], stored)
        for move in self._moves:
            if move.offset >= logs[0].start and logs[0].chain_at(move.end) != move.chain:
                raise Violation(f"I8: {move} was answered, and no log has it")

    def _walk(self, log: WatchedLog) -> tuple[dict[tuple[str, int], str], dict[tuple[str, str], tuple[int, int]]]:
        """Return the messages, and the last position of each moved group as (sequence, deliveries before)."""
        stored: dict[tuple[str, int], str] = {}
        begins: dict[tuple[str, str], tuple[int, int]] = {}
        batches: dict[tuple[int, int], int] = {}
        dead: set[tuple[str, str, int]] = set()
        at = log.start
        while at < log.end:
            chunk = log.stored.read(at, log.end, 1 << 20)
            for frame in chunk.frames:
                begin = frame.offset - chunk.begin + frame.body_at
                body = chunk.data[begin : begin + frame.body_bytes]
                if frame.kind == FrameKind.POSITION and not (progress := decode_progress(body)).consumer:
                    if progress.entries:
                        since = self._positions[frame.epoch, frame.offset]
                        begins[frame.subject, progress.group] = progress.entries[0][0], since
                    else:  # forgotten
                        begins.pop((frame.subject, progress.group), None)
                    # a message that fails again after a move is a dead letter again
                    dead = {letter for letter in dead if letter[:2] != (progress.group, frame.subject)}
                if frame.kind != FrameKind.MESSAGES:
                    continue
                if parse_derived(frame.subject) is not None:
                    self._check_dead_letter(frame, body, dead)
                    continue
                if frame.producer and batches.setdefault((frame.producer, frame.batch), frame.offset) != frame.offset:
                    raise Violation(f"I18: batch {frame.producer}/{frame.batch} is in the log twice")
                for i, message in enumerate(split_batch(body, frame.count)):
                    stored[frame.subject, frame.first_sequence + i] = decode_envelope(bytes(message)).id
            at = chunk.end
        return stored, begins

    def _check_dead_letter(self, frame: Frame, body: Buffer, dead: set[tuple[str, str, int]]) -> None:
        found = _dead_letter(frame, body)
        if found is None or found in dead:
            raise Violation(f"I22: the dead letter at {frame.offset} is {'stored twice' if found else 'unreadable'}")
        dead.add(found)
        self._dead_kept.add(found)
        group, subject, sequence = found
        (message,) = split_batch(body, frame.count)
        identity = decode_envelope(bytes(message)).id
        if self.delivered.get((subject, sequence), identity) != identity:
            raise Violation(f"I22: {group}'s dead letter of {subject} {sequence} is another message, {identity}")

    def _check_messages(self, stored: dict[tuple[str, int], str], log: WatchedLog) -> None:
        kept: dict[str, int] = {}
        for subject, sequence in stored:
            kept[subject] = min(sequence, kept.get(subject, sequence))

        def is_kept(place: Place) -> bool:
            subject, sequence = place
            return bool(sequence >= kept.get(subject, log.state.next_sequence.get(subject, 0)))

        self.check_stored(stored, is_kept)
        if log.end < self.committed.end or not self._has_committed(log):
            raise Violation(f"I1: the log ends at {log.end}, without {self.committed}")

    def _check_group(
        self,
        name: str,
        begins: dict[tuple[str, str], tuple[int, int]],
        log: WatchedLog,
        stored: dict[tuple[str, int], str],
    ) -> None:
        got = self._delivered_last
        for (subject, group), state in log.state.groups.items():
            if group != name:
                continue
            end = log.state.next_sequence.get(subject, 0)
            # The position is unknown if retention took its frame.
            begin, since = begins.get((subject, group), (self._begins.get((subject, group), end), 0))
            if (subject, group) not in self._begins:  # moved back: of acked messages, a copy may have deleted more
                refs = log.frames(subject, 0, 1)
                begin = max(begin, refs[0].begin if refs else end)
            keys = [(name, subject, sequence) for sequence in range(begin, end)]
            if name in self.choosy:  # tags of messages that retention took are unknown
                keys = [key for key in keys if (identity := stored.get(key[1:])) and is_tagged(identity)]
            alive = [key for key in keys if key not in self._dead_kept and not self._died_before(key, log.start)]
            for what, seen in (("got", got), ("was done with", self._finished)):
                missing = [key[2] for key in alive if seen.get(key, 0) <= since]
                if missing:
                    raise Violation(
                        f"I9: {name} never {what} {len(missing)} messages of {subject}, from {missing[0]} on"
                    )
            if state.position != end or state.requeued or any(c.unacked for c in state.consumers.values()):
                raise Violation(f"I9: {name} is not done with {subject}")

    def _died_before(self, key: tuple[str, str, int], offset: int) -> bool:
        """Whether it had a dead letter in the part of the log that retention took."""
        return any(at < offset for at in self._dead.get(key, ()))


def _dead_letter(frame: Frame, body: Buffer) -> tuple[str, str, int] | None:
    """Return (consumer group, subject, sequence) of a dead letter's original; None for other frames."""
    derived = parse_derived(frame.subject)
    if frame.kind != FrameKind.MESSAGES or derived is None:
        return None
    (message,) = split_batch(body, frame.count)
    return derived.group, derived.real, int(str(decode_message(bytes(message))["qmq_deadSequence"]))
