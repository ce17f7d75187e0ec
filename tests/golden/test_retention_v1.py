"""Shell. Retention frames, version 1: bytes with their meaning, and the state after them."""

from __future__ import annotations

import json
from pathlib import Path
from zlib import crc32

import pytest

from qmq.log.fold import State, apply, decode_snapshot, encode_snapshot
from qmq.log.frame import FrameKind, decode_frames, encode_header
from qmq.log.retention import RetentionDecision, decode_retention, encode_retention
from qmq.types import Epoch

ROWS = json.loads((Path(__file__).parent / "retention_v1" / "frames.json").read_text())


def _decision(row):
    lost = {(subject, group): messages for subject, group, messages in row["unconsumed"]}
    return RetentionDecision(row["start"], row["rule"], row["clocks"], lost)


@pytest.mark.parametrize("row", ROWS, ids=[row["name"] for row in ROWS])
def test_retention_decision_has_golden_bytes(row):
    body = encode_retention(_decision(row))
    assert body.hex() == row["body"] and decode_retention(body) == _decision(row)
    head, frame = encode_header(
        kind=FrameKind.RETENTION,
        flags=0,
        subject="",
        field=b"",
        count=0,
        body_bytes=len(body),
        body_crc=crc32(body),
        epoch=Epoch(row["term"], row["boot"]),
        offset=row["offset"],
        high_watermark=row["high_watermark"],
        timestamp_ms=row["timestamp_ms"],
        first_sequence=0,
        producer=0,
        batch=0,
        previous_chain=row["previous_chain"],
    )
    assert (head + body).hex() == row["bytes"] and (frame.kind, frame.chain) == (row["kind"], row["chain"])


def test_golden_retention_frames_accumulate():
    state = State(end=ROWS[0]["offset"])
    for row in ROWS:
        [(frame, body)] = decode_frames(bytes.fromhex(row["bytes"]), row["offset"], row["previous_chain"])
        apply(state, frame, body)
    kept = state.kept
    assert (kept.start, kept.decided_end) == (1_073_741_824, state.end)
    assert kept.unconsumed == {("order.changed", "invoice"): 7}
    assert kept.times == [(row["offset"], row["timestamp_ms"]) for row in ROWS if row["offset"] > kept.start]
    assert kept.written_before_ms(ROWS[1]["offset"]) == ROWS[1]["timestamp_ms"]
    assert kept.written_before_ms(state.end) is None
    assert kept.agreed_start(state.end) == kept.start and kept.agreed_start(state.end - 1) == 0
    assert decode_snapshot(encode_snapshot(state)).kept == kept
