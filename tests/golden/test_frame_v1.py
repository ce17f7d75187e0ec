"""Shell. Frames, version 1: bytes with their meaning, written by hand from the drawing in `qmq.log.frame`."""

from __future__ import annotations

import json
from operator import itemgetter
from pathlib import Path

import pytest

from qmq.errors import CorruptFrame
from qmq.log.frame import FrameKind, decode_frames, encode_header, subject_field
from qmq.types import Epoch

FOLDER = Path(__file__).parent / "frame_v1"
LOG = json.loads((FOLDER / "log.json").read_text())
REFUSED = json.loads((FOLDER / "refused.json").read_text())


@pytest.mark.parametrize("row", LOG, ids=itemgetter("name"))
def test_frame_encodes_to_golden_bytes(row):
    body = bytes.fromhex(row["body"])
    head, frame = encode_header(
        kind=FrameKind(row["kind"]),
        flags=row["flags"],
        subject=row["subject"],
        field=subject_field(row["subject"]),
        count=row["count"],
        body_bytes=len(body),
        body_crc=_crc(row),
        epoch=Epoch(row["term"], row["boot"]),
        offset=row["offset"],
        high_watermark=row["high_watermark"],
        timestamp_ms=row["timestamp_ms"],
        first_sequence=row["first_sequence"],
        producer=row["producer"],
        batch=row["batch"],
        previous_chain=row["previous_chain"],
    )
    assert (head + body).hex() == row["bytes"]
    assert [(frame, body)] == list(decode_frames(head + body, row["offset"], row["previous_chain"]))


def _crc(row):
    return int.from_bytes(bytes.fromhex(row["bytes"])[80:84], "little")


@pytest.mark.parametrize("row", LOG, ids=itemgetter("name"))
def test_golden_bytes_decode(row):
    [(frame, body)] = decode_frames(bytes.fromhex(row["bytes"]), row["offset"], row["previous_chain"])
    meaning = {name: row[name] for name in row if hasattr(frame, name)}
    assert {name: getattr(frame, name) for name in meaning} == meaning
    assert len(meaning) == 11
    assert frame.epoch == (row["term"], row["boot"])
    assert body.hex() == row["body"]


def test_golden_frames_form_one_log():
    data = b"".join(bytes.fromhex(row["bytes"]) for row in LOG)
    frames = [frame for frame, _ in decode_frames(data, LOG[0]["offset"], LOG[0]["previous_chain"])]
    assert [frame.chain for frame in frames] == [row["chain"] for row in LOG]
    assert frames[-1].end == LOG[0]["offset"] + len(data)


@pytest.mark.parametrize("row", REFUSED, ids=itemgetter("name"))
def test_wrong_bytes_are_refused(row):
    with pytest.raises(CorruptFrame, match=row["reason"]) as refusal:
        list(decode_frames(bytes.fromhex(row["bytes"]), row["offset"], row["previous_chain"]))
    assert refusal.value.offset == row["offset"]
