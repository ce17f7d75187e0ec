"""Core. What must go from a log is kept here, with a report of the message ids in it; never deleted by us.

quarantine/<begin>-<end>-<n>.bytes    bytes that were cut off or replaced
quarantine/<begin>-<end>-<n>.json     where they stood, why they went, the ids of the messages in them
quarantine/<begin>-<end>-<why>-<n>/   a whole copy that was set aside
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from qmq.codec import decode_envelope, split_batch
from qmq.errors import CorruptFrame, InvalidMessage
from qmq.log.disk import Disk
from qmq.log.frame import FrameKind, decode_frames

FOLDER = "quarantine"


def keep_bytes(disk: Disk, begin: int, data: bytes, why: str) -> str:
    """Keep bytes that stood at `begin`, durably; return the file's name. What is kept already is not kept once more: a
    block that stays bad is repaired again and again."""
    ids = list(_message_ids(data, begin))  # before the zeros go: some of them may end the last frame
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
    """Move files into a folder of their own here, durably."""
    label, taken = f"{FOLDER}/{begin:020d}-{end:020d}-{why}", 0
    while disk.names(f"{label}-{taken}"):
        taken += 1
    for name in names:
        disk.move(name, f"{label}-{taken}/{name.rpartition('/')[2]}")


def _message_ids(data: bytes, begin: int) -> Iterator[str]:
    """Name the messages, as far as they can be read."""
    try:
        for frame, body in decode_frames(data, begin, None):
            if frame.kind == FrameKind.MESSAGES:
                for message in split_batch(body, frame.count):
                    yield decode_envelope(bytes(message)).id
    except (CorruptFrame, InvalidMessage):
        return
