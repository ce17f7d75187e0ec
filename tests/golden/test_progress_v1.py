"""Core. Bodies of progress frames: bytes with their meaning, written by hand from the drawing in qmq.log."""

from __future__ import annotations

import pytest

from qmq.log.progress_frame import NOT_BEGUN, Departure, Progress, decode_progress, encode_progress

NAMES = "67" + "6331"
PULL = "0500000001000000"
"""Pull sequence 2**32 + 5."""
ROWS = [
    pytest.param(
        Progress("g", "c1", ((0, 0, 0),)),
        "0100020001000000" + "00" * 24 + NAMES + "00" * 5,
        id="position: a consumer vanished that never reports begun messages",
    ),
    pytest.param(
        Progress("g", "c1", ((1, 0, 0),)),
        "0100020001000000" + "01" + "00" * 23 + NAMES + "00" * 5,
        id="position: a consumer left",
    ),
    pytest.param(
        Progress("g", "c1", ((Departure.SUSPECTED, 0, 0), ((1 << 32) + 5, (1 << 32) + 6, 0))),
        "0100020002000000" + "02" + "00" * 23 + PULL + "0600000001000000" + "00" * 8 + NAMES + "00" * 5,
        id="position: a consumer vanished with one begun message",
    ),
    pytest.param(
        Progress("g", "c1", (((1 << 32) + 5, (1 << 32) + 6, NOT_BEGUN),)),
        "0100020001000000" + PULL + "0600000001000000" + "ff" * 8 + NAMES + "00" * 5,
        id="nack: not begun",
    ),
    pytest.param(Progress("g", "c1", ()), "0100020000000000" + NAMES + "00" * 5, id="pull: a consumer joined"),
    pytest.param(
        Progress("group", "c12", ()), "0500030000000000" + "67726f7570" + "633132", id="names without padding"
    ),
    pytest.param(
        Progress("g", "", ((5, 1, 0),)),
        "0100000001000000" + "05" + "00" * 7 + "01" + "00" * 15 + "67" + "00" * 7,
        id="position: begin of a broadcast group",
    ),
]
REFUSED = [
    pytest.param("01000200000000", id="cut in the head"),
    pytest.param("0100020001000000" + "00" * 16 + NAMES + "00" * 4, id="fewer entries than its count"),
    pytest.param("0000000002000000" + "00" * 24, id="one entry of two, and no names"),
    pytest.param("0100080000000000" + NAMES + "00" * 5, id="a consumer's name ends past the end"),
    pytest.param("0900000000000000" + NAMES + "00" * 5, id="a group's name ends past the end"),
]


@pytest.mark.parametrize("meaning, text", ROWS)
def test_progress_has_golden_bytes(meaning, text):
    assert encode_progress(meaning.group, meaning.consumer, meaning.entries).hex() == text
    assert decode_progress(bytes.fromhex(text)) == meaning


@pytest.mark.parametrize("text", REFUSED)
def test_malformed_progress_is_refused(text):
    with pytest.raises(ValueError, match="body of a progress frame"):
        decode_progress(bytes.fromhex(text))
