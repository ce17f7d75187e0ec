"""Core. Files of a message log: their names, and the search for frames in them.

log/<base>.log    frames; preallocated, so zeros follow the last frame of the newest one
log/<base>.idx    index of a closed segment (qmq.log.index); made again if it is missing or damaged
log/<base>.snap   state at the segment's base (qmq.log.fold); replay starts at the newest whole one
log/manifest      list of the segments that must exist (qmq.log.manifest)
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from qmq.errors import CorruptFrame
from qmq.log.disk import Disk
from qmq.log.frame import HEADER_BYTES, Frame, check_body, decode_header, find_frame, intact_bytes
from qmq.message_sizes import FRAME_BYTES_MAX

FOLDER = "log"
TAIL_CUT = f"{FOLDER}/tail-cut"
"""Exists while acknowledged bytes may be missing: the log's end was cut off, or all of it set aside, and this copy has
not matched the other one since.
"""
CHUNK_BYTES = 4 << 20
SEARCH_BYTES, HEADER_BYTES_MAX = 4096, HEADER_BYTES + (1 << 16)
"""Bytes of the first read of a search, where most frames begin; upper bound of a header's size."""
NO_END = 1 << 63
"""Offset behind every log."""


@lru_cache  # called twice per commit
def log_name(base: int) -> str:
    return f"{FOLDER}/{base:020d}.log"


def index_name(base: int) -> str:
    return f"{FOLDER}/{base:020d}.idx"


def snapshot_name(base: int) -> str:
    return f"{FOLDER}/{base:020d}.snap"


def segment_bases(disk: Disk) -> list[int]:
    """Return the base offsets of the present segment files, ascending."""
    return [int(name[:-4]) for name in disk.names(FOLDER) if name.endswith(".log")]


def segment_at(bases: list[int], offset: int) -> int:
    """Return the base of the segment that holds `offset`; `bases` ascend.

    Raises:
        CorruptFrame: the log begins behind `offset`, because retention has deleted the segment since the caller looked
            it up.
    """
    at = bisect_right(bases, offset) - 1
    if at < 0:
        raise CorruptFrame(offset, "the log begins behind it")
    return bases[at]


class Chunk(NamedTuple):
    """Whole frames `[begin, end)`, checked; `chain` is that of the last one."""

    begin: int
    end: int
    chain: int
    data: bytes
    frames: list[Frame]


def read_chunk(disk: Disk, bases: list[int], begin: int, end: int, bytes_max: int = CHUNK_BYTES) -> Chunk:
    """Read whole frames from `begin`, up to about `bytes_max` and not past `end`; at least one.

    All is checked but the first frame's chain, which the caller may have. Blocks; may run on any thread.

    Raises:
        CorruptFrame: no frame begins at `begin`.
    """
    base, stop = within(bases, begin, end)
    data = disk.read(log_name(base), begin - base, min(bytes_max, stop - begin))
    frames: list[Frame] = []
    at, chain = 0, None
    while begin + at < stop:
        try:
            frame = decode_header(data, at, begin + at, chain)
        except CorruptFrame:
            if at:
                break
            more = disk.read(log_name(base), begin - base, min(HEADER_BYTES_MAX, stop - begin))
            if len(more) <= len(data):
                break  # no header is longer, or the file ends
            data = more
            continue
        if frame.end - begin > len(data):
            if at:
                break
            data = disk.read(log_name(base), begin - base, frame.end - begin)
        check_body(frame, memoryview(data)[at + frame.body_at : frame.end - begin])
        frames.append(frame)
        at, chain = frame.end - begin, frame.chain
    if chain is None:
        decode_header(data, 0, begin, None)  # raises, with the reason
        raise CorruptFrame(begin, "the log ends here")
    return Chunk(begin, begin + at, chain, data[:at], frames)


def read_intact(disk: Disk, bases: list[int], begin: int, end: int, bytes_max: int) -> bytes:
    """Read as `read_chunk` does, for bytes that are passed on: only the frames' CRCs are checked."""
    base, stop = within(bases, begin, end)
    data = disk.read(log_name(base), begin - base, min(bytes_max, stop - begin))
    if whole := intact_bytes(memoryview(data), begin):
        return data[:whole]
    return read_chunk(
        disk, bases, begin, end, bytes_max
    ).data  # a longer frame, or damage, which raises with its reason


def within(bases: list[int], begin: int, end: int) -> tuple[int, int]:
    """Return the base of the segment that holds `begin`, and the end of the range within it."""
    base, at = segment_at(bases, begin), bisect_right(bases, begin)
    return base, min(end, bases[at]) if at < len(bases) else end


def next_frame(disk: Disk, bases: list[int], begin: int) -> int | None:
    """Return the offset of the first valid header at or after `begin`, over all segments; None if nothing follows."""
    for base in bases[max(bisect_right(bases, begin) - 1, 0) :]:
        at, end, size = max(begin, base), base + disk.used(log_name(base)), SEARCH_BYTES
        while at < end:
            data = disk.read(log_name(base), at - base, min(size, end - at))
            if (found := find_frame(data, at)) is not None:
                return at + found
            if len(data) < size:
                break
            at += max(0, size - HEADER_BYTES_MAX)  # a header may begin at the end of what was read
            size = min(4 * size, CHUNK_BYTES + HEADER_BYTES_MAX)
    return None


def frame_behind(disk: Disk, bases: list[int], offset: int) -> int | None:
    """Return the offset of the first valid header behind `offset`, where there is no frame; None if nothing follows."""
    return next_frame(disk, bases, offset + 8)


def read_raw(disk: Disk, bases: list[int], begin: int, end: int) -> bytes:
    """Return the raw bytes `[begin, end)`; shorter where the used part of a file is."""
    parts = []
    inside = bases[max(bisect_right(bases, begin) - 1, 0) : bisect_left(bases, end)]
    for base, following in pairwise([*inside, end]):  # a file may have zeros behind the segment's end
        first, last = max(begin, base), min(following, base + disk.used(log_name(base)))
        parts.append(disk.read(log_name(base), first - base, max(last - first, 0)))
    return b"".join(parts)


assert FRAME_BYTES_MAX > CHUNK_BYTES  # a chunk grows to its first frame, never the reverse
