"""Core. What judges say: findings, and what the driver needs to know of pieces and subjects. All of it can be JSON."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

from qmq.audit.kinds import Kind

FINDING = "finding"
"""A row of `audit.schema.FINDINGS` without its copy, and for the driver

    seen    offset of what made it plain: behind damage of that copy it may follow from that
    due     of a gap: where the last frame of the subject before it ends; damage in between explains it
"""
MORE = "more"
"""{kind: findings of it that are counted and not listed}"""
PIECE = "piece"
"""begin, bytes, frames, messages, digest, apart: whether the copies have other bytes; and of its last frame, if it has
any: end, chain, size: its offset"""
SUBJECT = "subject"
"""subject, first: its first sequence, end: the one after its last, due_end: the same of what was promised"""
HOUR = "hour"
"""subject, hour since 1970 UTC, messages, bytes"""
ACCOUNT = "account"
"""subject, consumer_group, stored and each state of `audit.conservation`, nacked: of all hours together"""
EPOCHS = "epochs"
"""{epoch: offset where it begins}"""
KEPT = "kept"
"""from: frames are kept from here on, by the retention frames"""
UNREAD = "unread"
"""text: why a piece was not read"""

Row = dict[str, Any]


class Said(NamedTuple):
    """One thing that a judge says; its kind is one of the above, or `audit.progress.CONSERVED`."""

    kind: str
    row: Row


class Judging(Protocol):
    """Takes what one copy says, piece after piece."""

    def take(self, piece: int, said: Any, /) -> Iterable[Said]: ...

    def finish(self) -> Iterable[Said]: ...


def finding(what: Kind, text: str, *, seen: int | None = None, **fields: Any) -> Said:
    row: Row = dict.fromkeys(("offset", "end", "subject", "sequence", "id"))
    return Said(FINDING, row | fields | {"what": what.value, "text": text, "seen": seen})
