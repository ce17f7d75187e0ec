"""Core. Quarantine: bytes that had to leave a log, each with a report of the message ids in them.

    quarantine/<begin>-<end>-<n>.bytes    bytes that were cut off or replaced
    quarantine/<begin>-<end>-<n>.json     their place, the reason, the ids of their messages
    quarantine/<begin>-<end>-<why>-<n>/   a whole copy that was set aside

The folder is bounded. Bytes that another copy has are deleted first, beginning with the oldest part of the log. A
possible last copy of a message is *evidence*; only an operator deletes it.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass

from qmq.codec import decode_envelope, split_batch
from qmq.errors import CorruptFrame, InvalidMessage
from qmq.log import quarantine
from qmq.log.disk import Disk, RealDisk
from qmq.log.frame import FrameKind, decode_frames

FOLDER = "quarantine"
HAD_BY_ANOTHER = frozenset({"damaged", "torn tail", "seeded-anew", "taken-back", "manifest-damaged"})
"""Reasons of items whose acknowledged bytes another copy has, or has deleted by retention."""
_LABEL = re.compile(r"(\d{20})-(\d{20})(?:-(.+))?-\d+")


@dataclass(frozen=True, slots=True)
class Kept:
    """Item of the quarantine. `messages`: number of ids in its report; 0 for a whole copy, which has no report."""

    name: str
    begin: int
    end: int
    why: str
    bytes: int
    messages: int
    is_evidence: bool
    files: tuple[str, ...]


def labels(disk: RealDisk) -> list[str]:
    """Return the names of the items in quarantine. Empty folders do not count: their items were cleared."""
    folders = [name for name in disk.folders(FOLDER) if disk.names(f"{FOLDER}/{name}")]
    names = {name.removesuffix(".bytes").removesuffix(".json") for name in disk.names(FOLDER)}
    return sorted(name for name in (*names, *folders) if _LABEL.fullmatch(name))


def all_kept(disk: RealDisk) -> list[Kept]:
    """Return the items in quarantine, those of the oldest part of the log first."""
    found = []
    for label in labels(disk):
        if (match := _LABEL.fullmatch(label)) is not None:
            found.append(_kept(disk, label, int(match[1]), int(match[2]), match[3] or ""))
    return sorted(found, key=lambda kept: (kept.end, kept.begin, kept.name))


def _kept(disk: RealDisk, label: str, begin: int, end: int, why: str) -> Kept:
    path = f"{FOLDER}/{label}"
    files = tuple(f"{path}/{name}" for name in disk.names(path))
    messages = 0
    if not files:
        files = tuple(filter(disk.has, (f"{path}.json", f"{path}.bytes")))
        with suppress(ValueError, KeyError, TypeError):
            report = json.loads(disk.read(f"{path}.json", 0, disk.size(f"{path}.json")))
            why, messages = str(report["why"]), len(report["message_ids"])
    # A cut tail without messages is an epoch or progress frame. Damaged bytes, and bytes whose report is not written
    # yet, may contain anything.
    is_cut = bool(why) and f"{path}.bytes" in files and "damage" not in why
    is_evidence = why not in HAD_BY_ANOTHER and not (is_cut and not messages)
    return Kept(label, begin, end, why, sum(map(disk.size, files)), messages, is_evidence, files)


def clear(disk: RealDisk, names: Collection[str]) -> list[Kept]:
    """Delete items by name; return those that existed."""
    gone = [kept for kept in all_kept(disk) if kept.name in names]
    for kept in gone:
        for file in kept.files:
            disk.remove(file)
    return gone


def bound(disk: RealDisk, bytes_max: int) -> list[Kept]:
    """Delete items that are no evidence until at most `bytes_max` are left; return the remaining items, which may have
    more.
    """
    left = all_kept(disk)
    over = sum(kept.bytes for kept in left) - bytes_max
    going = set()
    for kept in left:
        if over > 0 and not kept.is_evidence:
            going.add(kept.name)
            over -= kept.bytes
    clear(disk, going)
    return [kept for kept in left if kept.name not in going]


def keep_bytes(disk: Disk, begin: int, data: bytes, why: str) -> str:
    """Store bytes that were at `begin`, durably; return the file's name. Equal bytes are stored once, because a block
    that stays bad is repaired again and again.
    """
    ids = list(_message_ids(data, begin))  # before the zeros are stripped: some of them may end the last frame
    data = data.rstrip(b"\0")
    label, taken = f"{FOLDER}/{begin:020d}-{begin + len(data):020d}", 0
    while disk.has(kept := f"{label}-{taken}.bytes") and disk.read(kept, 0, disk.size(kept)) != data:
        taken += 1
    if not disk.has(kept):
        disk.put(kept, data)
    report = {"begin": begin, "end": begin + len(data), "why": why, "message_ids": ids}
    disk.put(f"{label}-{taken}.json", json.dumps(report, indent=1).encode())
    return kept


def keep_files(disk: Disk, names: list[str], begin: int, end: int, why: str) -> None:
    """Move files into a folder of their own in quarantine, durably."""
    label, taken = f"{FOLDER}/{begin:020d}-{end:020d}-{why}", 0
    while disk.names(f"{label}-{taken}"):
        taken += 1
    for name in names:
        disk.move(name, f"{label}-{taken}/{name.rpartition('/')[2]}")


def _message_ids(data: bytes, begin: int) -> Iterator[str]:
    """Yield the ids of the messages that can be read."""
    try:
        for frame, body in decode_frames(data, begin, None):
            if frame.kind == FrameKind.MESSAGES:
                for message in split_batch(body, frame.count):
                    yield decode_envelope(bytes(message)).id
    except (CorruptFrame, InvalidMessage):
        return


log = logging.getLogger(__name__)


class QuarantineKeeper:
    """Keeper of a copy's quarantine within its bound. Made by the service, which calls `look` on a thread every ten
    seconds.

    Args:
        bytes_max: bound from the settings; 0 for the size of the log.
    """

    def __init__(self, disk: RealDisk, bytes_max: int, segment_bytes: int) -> None:
        self._disk = disk
        self._bytes_max = bytes_max
        self._segment_bytes = segment_bytes
        self._seen: tuple[list[str], int] | None = None
        self.bytes = self.limit = 0

    def look(self, log_bytes: int, *, is_disk_short: bool) -> None:
        """Delete items above the bound that are no evidence; all such items if the disk is short."""
        self.limit = self._bytes_max or max(log_bytes, self._segment_bytes)
        bound = 0 if is_disk_short else self.limit
        names = quarantine.labels(self._disk)
        if self._seen is not None and self._seen[0] == names and (self._seen[1] <= bound or self.bytes <= bound):
            return
        before = self.bytes
        left = quarantine.bound(self._disk, bound)
        self.bytes = sum(kept.bytes for kept in left)
        self._seen = quarantine.labels(self._disk), bound
        if self.bytes > self.limit >= before:
            log.error(
                "quarantine over its bound bytes=%d bound=%d: the rest may be the last copy of messages; see "
                "ListQuarantine, then ClearQuarantine",
                self.bytes,
                self.limit,
            )

    @property
    def is_full(self) -> bool:
        return self.bytes > self.limit

    def clear(self, names: list[str]) -> list[quarantine.Kept]:
        """Delete items, evidence included; return those that existed. Blocks."""
        gone = quarantine.clear(self._disk, names)
        self.bytes = sum(kept.bytes for kept in quarantine.all_kept(self._disk))
        self._seen = None
        return gone

    def all(self) -> list[quarantine.Kept]:
        """Return all items, those of the oldest part of the log first. Blocks."""
        return quarantine.all_kept(self._disk)
