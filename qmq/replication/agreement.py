"""Core. Agreement: the handshake that finds where a slave's log and its master's agree, and the next step of each.

    Hello      slave -> master   its identity, newest known epoch, epoch table, log start, log end, chain, the end
                                 of the frames it must keep, its acknowledged point
    Agreement  master -> slave   the master's epoch, its acknowledged point, and one of
        follow   from `offset`, where both chains are `chain`; further frames of the slave are a proven conflict and are
                 cut, after they went to quarantine
        restore  the slave has more of the same history, lost by a master that restarted: it sends everything from
                 `offset`, then another hello ("give" on the wire)
        seed     the slave ends before the master's oldest segment: a snapshot comes, then frames from there; if a
                 damaged snapshot makes that begin behind the master's, the slave gets the earlier part repaired
        wait     the slave would have to be filled, and an operator has to allow that: nothing is sent for now

Equal (epoch, offset) means equal bytes, so the epoch tables show where the logs part; chains prove it. A disk that was
restored to an older state also forgets epochs, and its broker may use one twice. The chain behind the epoch's first
frame shows that.

Where the logs part, the copy whose frames no other copy confirmed cuts them. This is the slave, or the master if it
wrote alone; the master then restores the slave's frames (`Yield`). If both copies confirmed theirs, neither cuts:
`Diverged`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

from qmq.codec import Buffer
from qmq.errors import CorruptFrame, Diverged, Fenced, InvalidRequest
from qmq.log.fold import EpochStart
from qmq.log.message_log import MessageLog
from qmq.message_sizes import OLDER_FRAME_BYTES_MAX
from qmq.remoting.commands import decode_json, encode_json
from qmq.replication.identity import Point
from qmq.types import NO_EPOCH, Epoch


class EpochProof(NamedTuple):
    """Proof of an epoch: the first frame of the epoch that begins at `offset` ends at `end` with chain `chain`."""

    offset: int
    end: int
    chain: int


EPOCHS_PROVEN = 8
"""Number of newest epochs with a proof: so many may be used twice after a disk was restored to an older state, before
the copies connect again.
"""


def proofs_of(log: MessageLog) -> list[EpochProof]:
    """Return proofs of the newest epochs of an idle log; unreadable frames prove nothing."""
    proofs = (_proof_at(entry.offset, log) for entry in log.state.epochs[-EPOCHS_PROVEN:])
    return [proof for proof in proofs if proof is not None]


def _proof_at(offset: int, log: MessageLog) -> EpochProof | None:
    try:
        first = log.stored.read(offset, log.flushed_end, 1).frames[0]
    except CorruptFrame:  # or retention deleted it, or it is not on disk yet
        return None
    return EpochProof(offset, first.end, first.chain)


@dataclass(frozen=True, slots=True)
class Hello:
    group: str
    incarnation: str
    known: Epoch
    epochs: list[EpochStart]
    start: int
    end: int
    chain: int
    assigned_term: int = 0
    """Term of the metaserver's row that made the sender a slave. A master counts only slaves of its own row."""
    proofs: list[EpochProof] = field(default_factory=list)
    """Proofs of the newest epochs of `epochs`."""
    kept_end: int = 0
    """The slave keeps everything before this offset, because it confirmed it (`PointFile.keeps`)."""
    point: Point | None = None
    owner: str = ""
    """hostname:serve_port of the copy's broker; empty from older versions."""
    fill_id: str = ""
    """Id of the slave's present or next filling; empty from versions without `wait`."""
    is_whole: bool = False
    """Whether the slave once had all frames of its master."""
    instance: str = ""
    """Id of the slave's data directory at its place; a copy of it has another id. Empty from older versions."""
    frame_bytes_max: int = OLDER_FRAME_BYTES_MAX
    """Longest body of a frame that the slave reads; older versions do not send it."""

    @property
    def would_be_filled(self) -> bool:
        """Whether the slave receives its missing part as a filling, not only to catch up."""
        return bool(self.fill_id) and not (self.is_whole and self.end)

    def has(self, point: Point) -> bool:
        """Return whether the slave's log has an acknowledged point. A point ends a frame of its own epoch, so the epoch
        table shows it. Frames deleted by retention count as present.
        """
        epochs = [entry.epoch for entry in self.epochs if entry.offset < point.end]
        return point.end <= self.start or (point.end <= self.end and epochs[-1:] == [point.epoch])

    def is_ahead_of(self, epoch: Epoch) -> bool:
        """Return whether the slave has frames newer than `epoch`, the newest epoch of another log. Then frames that
        only the other log has were never acknowledged: the master of the newer epoch would have had them.
        """
        return self.newest_epoch > epoch

    @property
    def newest_epoch(self) -> Epoch:
        """Newest epoch of the slave's frames; the zero epoch without frames."""
        return self.epochs[-1].epoch if self.epochs else NO_EPOCH

    def encode(self) -> bytes:
        table = [[*entry.epoch, entry.offset, entry.chain] for entry in self.epochs]
        return encode_json(
            group=self.group,
            incarnation=self.incarnation,
            term=self.known.term,
            boot=self.known.boot,
            epochs=table,
            start=self.start,
            end=self.end,
            chain=self.chain,
            assigned_term=self.assigned_term,
            proofs=[[*proof] for proof in self.proofs],
            kept_end=self.kept_end,
            point=_encode_point(self.point),
            owner=self.owner,
            fill_id=self.fill_id,
            whole=self.is_whole,
            instance=self.instance,
            frame_bytes_max=self.frame_bytes_max,
        )

    @classmethod
    def decode(cls, body: Buffer) -> Hello:
        """Parse a hello; raises InvalidRequest."""
        f = decode_json(
            body,
            group=str,
            incarnation=str,
            term=int,
            boot=int,
            epochs=list,
            start=int,
            end=int,
            chain=int,
            assigned_term=int,
            proofs=list,
            kept_end=int,
            point=list,
        )
        try:
            epochs = [EpochStart(Epoch(term, boot), offset, chain) for term, boot, offset, chain in f["epochs"]]
            proofs = [EpochProof(offset, end, chain) for offset, end, chain in f["proofs"]]
        except (ValueError, TypeError):
            raise InvalidRequest(
                "field 'epochs' must be a list of [term, boot, offset, chain], 'proofs' one of [offset, end, chain]"
            ) from None
        frame_bytes_max = f.get("frame_bytes_max", OLDER_FRAME_BYTES_MAX)
        numbers = [f[name] for name in ("term", "boot", "assigned_term", "start", "end", "chain", "kept_end")]
        numbers.append(frame_bytes_max)
        numbers += [number for epoch, *rest in epochs for number in (*epoch, *rest)]
        numbers += [number for proof in proofs for number in proof]
        if not all(isinstance(number, int) and 0 <= number < 1 << 64 for number in numbers):
            raise InvalidRequest("epochs, offsets and chains are numbers of 64 bits without sign")
        known = Epoch(f["term"], f["boot"])
        return cls(
            f["group"],
            f["incarnation"],
            known,
            epochs,
            f["start"],
            f["end"],
            f["chain"],
            f["assigned_term"],
            proofs,
            f["kept_end"],
            _decode_point(f["point"]),
            str(f.get("owner", "")),
            str(f.get("fill_id", "")),
            bool(f.get("whole", False)),
            str(f.get("instance", "")),
            frame_bytes_max,
        )


def _encode_point(point: Point | None) -> list[int]:
    return point.to_list() if point else []


def _decode_point(numbers: list[int]) -> Point | None:
    try:
        return Point.from_list(numbers) if numbers else None
    except (ValueError, TypeError):
        raise InvalidRequest("a point is [term, boot, end, chain], numbers of 64 bits without sign") from None


class Action(Enum):
    FOLLOW = "follow"
    RESTORE = "give"  # its name on the wire
    SEED = "seed"
    WAIT = "wait"


@dataclass(frozen=True, slots=True)
class Agreement:
    epoch: Epoch
    action: Action
    offset: int
    chain: int
    master_end: int
    """End of the master's log. A slave that reaches it has everything that was acknowledged before."""
    point: Point | None = None
    master_start: int | None = None
    """Begin of the master's log; None from older versions."""

    def encode(self) -> bytes:
        return encode_json(
            term=self.epoch.term,
            boot=self.epoch.boot,
            action=self.action.value,
            offset=self.offset,
            chain=self.chain,
            master_end=self.master_end,
            point=_encode_point(self.point),
            master_start=self.master_start,
        )

    @classmethod
    def decode(cls, body: Buffer) -> Agreement:
        """Parse an agreement; raises InvalidRequest."""
        f: dict[str, Any] = decode_json(
            body, term=int, boot=int, action=str, offset=int, chain=int, master_end=int, point=list
        )
        try:
            action = Action(f["action"])
        except ValueError:
            raise InvalidRequest(f"unknown action {f['action']!r}") from None
        point, start = _decode_point(f["point"]), f.get("master_start")
        if not isinstance(start, int | None):
            raise InvalidRequest("field 'master_start' must be an offset, or null")
        return cls(Epoch(f["term"], f["boot"]), action, f["offset"], f["chain"], f["master_end"], point, start)


@dataclass(frozen=True, slots=True)
class Yield:
    """Decision that the master cuts its frames from `offset` on, begins again, and restores the slave's frames, if it
    may.
    """

    offset: int


def agree(
    hello: Hello, log: MessageLog, epoch: Epoch, *, has_begun: bool, point: Point | None = None
) -> Agreement | Yield:
    """Return the action that the master of `epoch` decides for a slave with this `hello`, or that the master yields.

    Args:
        has_begun: whether this master has written its epoch frame. Before that it restores frames that it lost.
        point: newest acknowledged point that this copy remembers.

    Raises:
        Fenced: the slave has a newer epoch, or has frames of `epoch` from before this disk was restored to an older
            state. Acknowledge nothing more in this epoch.
        CorruptFrame: the master's own copy is damaged at the place to compare.
        Diverged: equal epochs have different bytes. An operator must decide; nothing was changed.
    """
    was_used = not has_begun and bool(hello.epochs) and hello.epochs[-1].epoch >= epoch
    if hello.known > epoch or was_used:
        raise Fenced(f"the slave has epoch {hello.known}, not older than the master's, {epoch}")
    offset, chain, ours_known = _last_common(hello, log)
    if not ours_known and log.start <= offset and not log.chain_is(offset, chain):
        log.stored.check_readable(offset)
        raise Diverged(f"the slave's chain at offset {offset}, {chain:016x}, differs from the master's")
    if hello.end > offset and log.end == offset and not has_begun:
        return Agreement(epoch, Action.RESTORE, offset, chain, log.end, point)
    if hello.kept_end > offset and log.end > offset:
        return Yield(offset)
    if offset < log.start:
        base, chain, _ = log.stored.seed_start()
        return Agreement(epoch, Action.SEED, base, chain, log.end, point, log.start)
    return Agreement(epoch, Action.FOLLOW, offset, chain, log.end, point)


def _last_common(hello: Hello, log: MessageLog) -> tuple[int, int, bool]:
    """Return the last offset up to which the epoch tables agree, the chain there, and whether that chain is the
    master's.
    """
    epochs, offered = log.state.epochs, hello.epochs
    proofs = {proof.offset: proof for proof in hello.proofs}
    common = 0
    while common < min(len(epochs), len(offered)) and epochs[common] == offered[common]:
        common += 1
    while common and _was_used_twice(proofs.get(epochs[common - 1].offset), log):
        common -= 1
    master_extent = (epochs[common].offset, epochs[common].chain) if common < len(epochs) else (log.end, log.chain)
    slave_extent = (
        (offered[common].offset, offered[common].chain) if common < len(offered) else (hello.end, hello.chain)
    )
    if slave_extent[0] <= master_extent[0]:
        return *slave_extent, False
    return *master_extent, True


def _was_used_twice(slave_proof: EpochProof | None, log: MessageLog) -> bool:
    """Return whether two masterships used one epoch at the same offset: their first frames differ."""
    return slave_proof is not None and _proof_at(slave_proof.offset, log) not in (None, slave_proof)
