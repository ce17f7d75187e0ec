"""Core. Report about one copy from its files alone: owner, log end, acknowledged end, problems.

The log is recovered as at a start of the broker, on a disk that keeps changes in memory (`qmq.log.overlay_disk`). So
the report equals the broker's own state, and no file changes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

from qmq.codec import decode_envelope, split_batch
from qmq.crc import decode_checked
from qmq.errors import CorruptFrame, InvalidMessage
from qmq.log import MessageLog, manifest
from qmq.log.disk import Disk
from qmq.log.frame import Frame, FrameKind
from qmq.log.segments import segment_at, segment_bases
from qmq.replication import identity
from qmq.replication.assignment import Assignment
from qmq.replication.identity import Identity, IdentityFile, Point, PointFile, is_behind_damage, is_lacking

_FILES = (identity.NAME, identity.POINTS, identity.COPY)
EPOCHS_MAX = 20
"""Newest masterships that a report lists."""
IDS_MAX = 10_000
"""Message ids that a report lists."""


class NoCopy(Exception):
    """There is no copy of a log in this directory."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """Reason why this copy must not be a master in its present state. `name` is a reason of `qmq.replication.readonly`
    where one fits.
    """

    name: str
    found: str


def report(disk: Disk, *, verify: bool = False, above: int | None = None) -> dict[str, Any]:
    """Return the report about the copy on `disk`, as JSON fields.

    Args:
        verify: read every closed segment, too; a start of the broker reads only the newest ones.
        above: offset from which messages are listed, too; they are lost if a copy that ends there replaces this one.

    Raises:
        NoCopy: the disk has no files of a broker or delay server.
        DiskFailed: a file cannot be read.
    """
    if not any(map(disk.has, _FILES)) and not segment_bases(disk) and not disk.has(manifest.NAME):
        raise NoCopy("it has neither broker.json nor log/: this is no data directory of a broker or delay server")
    troubles = [*_damaged_files(disk)]
    listed = _manifest(disk, troubles)
    stored = _identity(disk)
    memory = PointFile(disk)
    log = MessageLog(disk, segment_bytes=1 << 30, tail_bytes=0)
    state = log.state
    troubles += _troubles(log, memory, stored)
    troubles += _unreadable(log) if verify else ()
    return {
        **_owner(stored),
        "epochs": [
            {"term": e.epoch.term, "boot": e.epoch.boot, "offset": e.offset, **_begun(log, e.offset)}
            for e in state.epochs[-EPOCHS_MAX:]
        ],
        "epochCount": len(state.epochs),
        "log": {
            "begin": log.start,
            "end": log.end,
            "chain": f"{log.chain:016x}",
            "epoch": list(state.epoch),
            "highWatermark": state.high_watermark,
            "lastFrameMs": state.timestamp_ms,
            "segments": len(log.bases),
            "tornBytes": log.torn_bytes,
        },
        "acknowledged": _point(memory.own),
        "lacks": _point(memory.lacks),
        "confirmedEnd": memory.keeps(log),
        "manifest": listed,
        "subjects": dict(sorted(state.next_sequence.items())),
        "troubles": [asdict(trouble) for trouble in troubles],
        **({} if above is None else {"above": messages_above(log, above, ids_max=IDS_MAX)}),
    }


def _damaged_files(disk: Disk) -> Iterator[Trouble]:
    for name in filter(disk.has, _FILES):
        try:
            decode_checked(disk.read(name, 0, disk.size(name)))
        except ValueError as error:
            effect = "it does not start" if name == identity.NAME else "its content is lost"
            yield Trouble("file_damaged", f"{name} is damaged ({error}): {effect}")


def _manifest(disk: Disk, troubles: list[Trouble]) -> dict[str, Any]:
    """Compare the manifest with the files, before recovery makes them agree."""
    there = segment_bases(disk)
    data = disk.read(manifest.NAME, 0, disk.size(manifest.NAME))
    try:
        listed = manifest.decode_manifest(data) if data else None
    except ValueError as error:
        troubles.append(Trouble("file_damaged", f"{manifest.NAME} is damaged ({error}): it is rebuilt from the files"))
        listed = None
    missing = sorted(set(listed or ()) - set(there))
    if missing:
        troubles.append(Trouble("file_gone", f"files of listed segments are gone: {', '.join(map(str, missing))}"))
    not_listed = sorted(set(there) - set(listed)) if listed is not None else []
    return {"listed": listed is not None, "agrees": listed == there, "missing": missing, "notListed": not_listed}


def _identity(disk: Disk) -> Identity:
    with suppress(CorruptFrame):  # reported with the other files
        return IdentityFile(disk, new_incarnation="").value
    return Identity("")


def _owner(stored: Identity) -> dict[str, Any]:
    role = ""
    with suppress(KeyError, TypeError, ValueError):
        role = Assignment.from_json(stored.assignment).role.name if stored.assignment else ""
    hostname, _, port = stored.owner.partition(":")
    return {
        "group": stored.group,
        "hostname": hostname,
        "servePort": int(port) if port.isdigit() else None,
        "role": role,
        "incarnation": stored.incarnation,
        "term": stored.term,
        "boot": stored.boot,
        "complete": stored.complete,
    }


def _troubles(log: MessageLog, memory: PointFile, stored: Identity) -> Iterator[Trouble]:
    lacks = memory.lacks or (memory.own if memory.own and is_lacking(log, memory.own) else None)
    if lacks is not None:
        why = (
            "its log is damaged before"
            if is_behind_damage(log, lacks)
            else "its disk was restored to an older state, or lost frames"
        )
        yield Trouble("rolled_back", f"it lacks acknowledged frames up to {lacks}: {why}")
    if log.damage is not None:
        damage = log.damage
        yield Trouble("corrupt", f"no frames at [{damage.begin}, {damage.end}): {damage.reason}")
    if log.is_tail_cut:
        yield Trouble("tail_cut", f"bytes behind {log.end}, possibly acknowledged, were cut or set aside")
    if not stored.complete:
        yield Trouble("incomplete", "according to its records it never had all frames of its master")
    if log.is_empty:
        yield Trouble("empty", "its log holds no frame")


def _unreadable(log: MessageLog) -> Iterator[Trouble]:
    """Read each closed segment up to its first damage, as the scrub does."""
    for base in log.bases[:-1]:
        at, chain, is_over = base, None, False
        try:
            while not is_over:
                at, chain, is_over = log.stored.verify(base, at, chain, 4 << 20)
        except CorruptFrame as problem:
            yield Trouble("corrupt", str(problem))


def _begun(log: MessageLog, offset: int) -> dict[str, str]:
    """Return the master and the reason that the epoch frame at `offset` states, if it is readable."""
    try:
        (frame, body), *_ = _frames(log, offset, most=1)
        fields = json.loads(bytes(body)) if frame.kind == FrameKind.EPOCH else {}
        return {"incarnation": str(fields.get("broker", "")), "why": str(fields.get("why", ""))}
    except (CorruptFrame, ValueError):
        return {"incarnation": "", "why": ""}


def _point(point: Point | None) -> dict[str, Any] | None:
    if point is None:
        return None
    return {"term": point.epoch.term, "boot": point.epoch.boot, "end": point.end, "chain": f"{point.chain:016x}"}


def messages_above(log: MessageLog, offset: int, *, ids_max: int) -> dict[str, Any]:
    """Return the messages from `offset` on: first and last sequence per subject, and the first ids."""
    ranges: dict[str, list[int]] = {}
    ids: list[list[Any]] = []
    stopped = ""
    try:
        begin = segment_at(log.bases, max(offset, log.start)) if log.bases else offset
        for frame, body in _frames(log, begin):
            if frame.kind != FrameKind.MESSAGES or frame.end <= offset:
                continue
            known = ranges.setdefault(frame.subject, [frame.first_sequence, 0])
            known[1] = frame.first_sequence + frame.count - 1
            for at, message in enumerate(islice(split_batch(body, frame.count), ids_max - len(ids))):
                ids.append([frame.subject, frame.first_sequence + at, decode_envelope(bytes(message)).id])
    except (CorruptFrame, InvalidMessage) as error:
        stopped = str(error)
    return {"offset": offset, "subjects": dict(sorted(ranges.items())), "ids": ids, "stopped": stopped}


def _frames(log: MessageLog, begin: int, most: int | None = None) -> Iterator[tuple[Frame, memoryview]]:
    """Yield frames with their bodies from `begin` on; raises CorruptFrame at the first unreadable one."""
    at = begin
    while at < log.end:
        chunk = log.stored.read(at, log.end, 1 if most else 4 << 20)
        view = memoryview(chunk.data)
        for frame in chunk.frames[:most]:
            yield frame, view[frame.offset + frame.body_at - chunk.begin : frame.end - chunk.begin]
        if most:
            return
        at = chunk.end
