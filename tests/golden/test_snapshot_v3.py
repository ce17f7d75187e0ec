"""Core. A snapshot of version 3, written before ranges had names, keeps its meaning."""

from __future__ import annotations

import json
import zlib

from qmq.log.fold import decode_snapshot, encode_snapshot
from qmq.log.group import Consumer, Group, UnackedRange
from qmq.log.requeued import Requeued, RequeuedRange

PLAIN = {
    "end": 4096,
    "chain": 7,
    "high_watermark": 4000,
    "timestamp_ms": 1_700_000_000_000,
    "epochs": [[1, 2, 0, 0]],
    "next_sequence": {"s": 20},
    "groups": [
        [
            "s",
            "g",
            12,
            5,
            [[1, 2, 1, 0], [7, 1, 3, 1_700_000_005_000]],
            False,
            11,
            88,
            [["c", 1 << 33, [[(1 << 33) - 4, 8, 3, 1]], [1 << 33]]],
        ],
    ],
    "producers": [[9, [[1, 0, 20, 4096]]]],
    "ordered": {},
    "retry_ms": 3,
}


def snapshot(version: int) -> bytes:
    packed = version.to_bytes(4, "little") + zlib.compress(json.dumps(PLAIN).encode(), 1)
    return zlib.crc32(packed).to_bytes(4, "little") + packed


def test_snapshot_of_version_3_is_read():
    state = decode_snapshot(snapshot(3))
    group = state.groups["s", "g"]
    assert group == Group(
        12,
        5,
        Requeued([RequeuedRange(1, 2, 1, 0), RequeuedRange(7, 1, 3, 1_700_000_005_000)]),
        {"c": Consumer(1 << 33, [UnackedRange((1 << 33) - 4, 8, 3, 1)], [1 << 33])},
        False,
        11,
        88,
    )
    assert decode_snapshot(encode_snapshot(state)) == state


def test_new_snapshot_has_version_4():
    assert int.from_bytes(encode_snapshot(decode_snapshot(snapshot(3)))[4:8], "little") == 4
