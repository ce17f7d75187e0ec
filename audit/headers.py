"""Core. Parser of many frames at once: those before the first invalid one.

numpy checks thousands of frames as `qmq.log.frame` checks one; only CRCs and chains take one call each. It gives no
reason for an invalid frame: the caller parses that frame alone.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import lru_cache
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from qmq.crc import crc32
from qmq.log.frame import HEADER, HEADER_BYTES, MAGIC, Frame, FrameKind
from qmq.message_sizes import FRAME_BYTES_MAX
from qmq.types import Epoch

_SIZES = struct.Struct("<6xH4xI")
_NAMES = (
    "magic",
    "kind",
    "flags",
    "subject_bytes",
    "count",
    "body_bytes",
    "term",
    "boot",
    "offset",
    "high_watermark",
    "timestamp_ms",
    "first_sequence",
    "producer",
    "batch",
    "chain",
    "body_crc",
    "header_crc",
)
"""Fields in the order of `decode_header`, which documents their sizes."""
_HEAD = np.dtype([(name, f"<{code}") for name, code in zip(_NAMES, HEADER.format.removeprefix("<"), strict=True)])
_CRC_AT, _CHAIN_AT, _CHAINED_BYTES = HEADER_BYTES - 4, HEADER_BYTES - 16, 84
_IS_KIND = np.isin(np.arange(256), [int(kind) for kind in FrameKind])
_epoch = lru_cache(64)(Epoch)

NUMBER_MAX = (1 << 63) - 1
"""Maximum of sequences and offsets: tables and arrays are signed."""
TIME_MS_MAX = 253_402_300_799_999
"""End of the year 9999. Wrong times may be any number; calendars end here."""

Heads = npt.NDArray[np.void]
Flags = npt.NDArray[np.bool_]


def all_bodies(heads: Heads) -> Flags:
    return np.ones(len(heads), bool)


def no_messages(heads: Heads) -> Flags:
    return np.asarray(heads["kind"] != FrameKind.MESSAGES)


def whole_frames(
    data: memoryview,
    offset: int,
    end: int,
    chain: int | None,
    *,
    bodies: Callable[[Heads], Flags] = all_bodies,
) -> list[Frame]:
    """Return the frames of `data`, at `offset` of a log, that begin before `end`; possibly none.

    Each passes `decode_header` with the chain of the frame before it. `chain` is that of the first one, or None if
    unknown. `bodies` selects the frames to check with their bodies.
    """
    if offset % 8:
        return []
    places = _places(data, end - offset)
    words = np.frombuffer(data[: len(data) // 8 * 8], "<u8")
    rows = words[(places // 8)[:, None] + np.arange(HEADER_BYTES // 8)]
    heads = rows.view(_HEAD)[:, 0]
    fits = (heads["magic"] == MAGIC) & (heads["offset"] == places + offset) & _IS_KIND[heads["kind"]]
    fits &= heads["body_bytes"] <= FRAME_BYTES_MAX
    fits &= (heads["first_sequence"] <= NUMBER_MAX) & (heads["high_watermark"] <= NUMBER_MAX)
    until = _first_wrong(fits)
    rows, heads, places = rows[:until], heads[:until], places[:until]
    body_at = HEADER_BYTES + (heads["subject_bytes"].astype(np.int64) + 7) // 8 * 8
    fields = [
        bytes(data[begin:behind])
        for begin, behind in zip((places + HEADER_BYTES).tolist(), (places + body_at).tolist())
    ]
    fits = _has_crcs(rows, heads, fields) & _has_chains(rows, heads, fields, chain)
    checked = np.flatnonzero(bodies(heads))
    fits[checked] &= _has_bodies(data, (places + body_at)[checked], heads[checked])
    until = _first_wrong(fits)
    return _frames(heads[:until], fields, body_at[:until])


def _places(data: memoryview, end: int) -> npt.NDArray[np.int64]:
    """Return the places of frames that begin before `end`, by their stated sizes, and end in `data`."""
    found, at, size = [], 0, len(data)
    while at < end and at + HEADER_BYTES <= size:
        subject_bytes, body_bytes = _SIZES.unpack_from(data, at)
        behind = at + HEADER_BYTES + (subject_bytes + 7) // 8 * 8 + body_bytes
        if behind > size or body_bytes % 8:
            break
        found.append(at)
        at = behind
    return np.array(found, np.int64)


def _first_wrong(fits: Flags) -> int:
    """Return the number of valid frames before the first invalid one."""
    wrong = np.flatnonzero(~fits)
    return int(wrong[0]) if len(wrong) else len(fits)


def _has_crcs(rows: npt.NDArray[np.generic], heads: Heads, fields: list[bytes]) -> Flags:
    stored = rows.tobytes()
    begins = range(0, len(stored), HEADER_BYTES)
    found = [crc32(field, crc32(stored[begin : begin + _CRC_AT])) for begin, field in zip(begins, fields)]
    return np.asarray(np.array(found, np.uint32) == heads["header_crc"])


def _has_chains(rows: npt.NDArray[np.generic], heads: Heads, fields: list[bytes], chain: int | None) -> Flags:
    """Return which frames continue the chain of the frame before."""
    octets = rows.view(np.uint8)
    chained = np.empty((len(heads), _CHAINED_BYTES), np.uint8)
    chained[1:, :8] = octets[:-1, _CHAIN_AT : _CHAIN_AT + 8]
    chained[:1, :8] = np.frombuffer((chain or 0).to_bytes(8, "little"), np.uint8)
    chained[:, 8:80] = octets[:, :_CHAIN_AT]
    chained[:, 80:] = octets[:, _CHAIN_AT + 8 : _CRC_AT]
    stored = chained.tobytes()
    begins = range(0, len(stored), _CHAINED_BYTES)
    digests = [
        blake2b(stored[begin : begin + _CHAINED_BYTES] + field, digest_size=8).digest()
        for begin, field in zip(begins, fields)
    ]
    same = np.frombuffer(b"".join(digests), "<u8") == heads["chain"]
    if chain is None:
        same[:1] = True
    return np.asarray(same)


def _has_bodies(data: memoryview, begins: npt.NDArray[np.int64], heads: Heads) -> Flags:
    ends = begins + heads["body_bytes"]
    found = [crc32(data[begin:end]) for begin, end in zip(begins.tolist(), ends.tolist())]
    return np.asarray(np.array(found, np.uint32) == heads["body_crc"])


@lru_cache(4096)
def _subject(field: bytes, size: int) -> str:
    return field[:size].decode("utf-8", "replace")


def _frames(heads: Heads, fields: list[bytes], body_at: npt.NDArray[np.int64]) -> list[Frame]:
    def column(name: str) -> list[int]:
        return heads[name].tolist()  # type: ignore[no-any-return]

    columns = (
        column("kind"),
        column("flags"),
        map(_subject, fields, column("subject_bytes")),
        column("count"),
        column("body_bytes"),
        map(_epoch, column("term"), column("boot")),
        *map(column, ("offset", "high_watermark", "timestamp_ms", "first_sequence", "producer", "batch", "chain")),
        column("body_crc"),
        body_at.tolist(),
        (heads["offset"].astype(np.int64) + body_at + heads["body_bytes"]).tolist(),
    )
    return list(map(Frame, *columns))
