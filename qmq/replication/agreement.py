"""Core. Where two copies of a log agree, and what follows from it: the handshake of a slave and its master.

    Hello      slave -> master   who it is, the newest epoch it knows, its epoch table, log start, log end, chain
    Agreement  master -> slave   the master's epoch, and one of
        follow   from `offset`, where both chains are `chain`; if the slave has more, that is a proven conflict and
                 is cut, after it went to quarantine
        give     the slave has more of the same history, lost by a master that restarted: it sends everything from
                 `offset`, then says hello again
        seed     the slave is behind the master's oldest segment: a snapshot comes, then frames from there

Equal (epoch, offset) means equal bytes, so the epoch tables tell where the logs part; chains prove it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from qmq.codec import Buffer
from qmq.errors import Diverged, Fenced, InvalidRequest
from qmq.log.fold import EpochStart
from qmq.log.message_log import MessageLog
from qmq.remoting.commands import decode_json, encode_json
from qmq.types import Epoch


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
    """Term of the metaserver's row that made it a slave; the master counts only the slave of its own row."""

    def encode(self) -> bytes:
        table = [[*entry.epoch, entry.offset, entry.chain] for entry in self.epochs]
        return encode_json(
            group=self.group, incarnation=self.incarnation, term=self.known.term, boot=self.known.boot, epochs=table,
            start=self.start, end=self.end, chain=self.chain, assigned_term=self.assigned_term,
        )  # fmt: skip

    @classmethod
    def decode(cls, body: Buffer) -> Hello:
        """Raises InvalidRequest."""
        f = decode_json(
            body, group=str, incarnation=str, term=int, boot=int, epochs=list, start=int, end=int, chain=int,
            assigned_term=int,
        )  # fmt: skip
        try:
            epochs = [EpochStart(Epoch(term, boot), offset, chain) for term, boot, offset, chain in f["epochs"]]
        except (ValueError, TypeError):
            raise InvalidRequest("field 'epochs' must be a list of [term, boot, offset, chain]") from None
        numbers = [f["term"], f["boot"], f["assigned_term"], f["start"], f["end"], f["chain"]]
        numbers += [number for epoch, *rest in epochs for number in (*epoch, *rest)]
        if not all(isinstance(number, int) and 0 <= number < 1 << 64 for number in numbers):
            raise InvalidRequest("epochs, offsets and chains are numbers of 64 bits without sign")
        known = Epoch(f["term"], f["boot"])
        return cls(
            f["group"], f["incarnation"], known, epochs, f["start"], f["end"], f["chain"], f["assigned_term"]
        )


class Action(Enum):
    FOLLOW = "follow"
    GIVE = "give"
    SEED = "seed"


@dataclass(frozen=True, slots=True)
class Agreement:
    epoch: Epoch
    action: Action
    offset: int
    chain: int
    master_end: int
    """Where the master's log ended: a copy that reached it once has everything that was acknowledged."""

    def encode(self) -> bytes:
        return encode_json(
            term=self.epoch.term, boot=self.epoch.boot, action=self.action.value, offset=self.offset, chain=self.chain,
            master_end=self.master_end,
        )  # fmt: skip

    @classmethod
    def decode(cls, body: Buffer) -> Agreement:
        """Raises InvalidRequest."""
        f: dict[str, Any] = decode_json(
            body, term=int, boot=int, action=str, offset=int, chain=int, master_end=int
        )
        try:
            action = Action(f["action"])
        except ValueError:
            raise InvalidRequest(f"unknown action {f['action']!r}") from None
        return cls(Epoch(f["term"], f["boot"]), action, f["offset"], f["chain"], f["master_end"])


def agree(hello: Hello, log: MessageLog, epoch: Epoch, *, in_office: bool) -> Agreement:
    """Decide as master of `epoch` what a slave that says `hello` has to do.

    Args:
        in_office: whether this master has written its epoch frame. Before that it takes back what it lost.

    Raises:
        Fenced: the slave knows a newer epoch. Nothing may be acknowledged in ours any more.
        CorruptFrame: our own copy is damaged where it is to be compared.
        Diverged: equal epochs with different bytes. A human has to look; nothing was changed.
    """
    if hello.known > epoch:
        raise Fenced(f"the slave knows epoch {hello.known}, newer than our {epoch}")
    offset, chain, ours_known = _last_common(hello, log)
    if not ours_known and log.start <= offset and not log.chain_is(offset, chain):
        log.check_readable(offset)
        raise Diverged(f"the slave's chain at offset {offset} is {chain:016x}; ours is another")
    if hello.end > offset and log.end == offset and not in_office:
        return Agreement(epoch, Action.GIVE, offset, chain, log.end)
    if offset < log.start:
        base, chain, _ = log.seed_start()
        return Agreement(epoch, Action.SEED, base, chain, log.end)
    return Agreement(epoch, Action.FOLLOW, offset, chain, log.end)


def _last_common(hello: Hello, log: MessageLog) -> tuple[int, int, bool]:
    """Return the last point up to which the epoch tables agree, the chain there, and whether that chain is our own."""
    ours, theirs = log.state.epochs, hello.epochs
    common = 0
    while common < min(len(ours), len(theirs)) and ours[common] == theirs[common]:
        common += 1
    our_extent = (ours[common].offset, ours[common].chain) if common < len(ours) else (log.end, log.chain)
    their_extent = (theirs[common].offset, theirs[common].chain) if common < len(theirs) else (hello.end, hello.chain)
    if their_extent[0] <= our_extent[0]:
        return *their_extent, False
    return *our_extent, True
