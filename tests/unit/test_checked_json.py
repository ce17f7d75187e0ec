"""Core. JSON with its own CRC decodes to the same value, or not at all."""

from __future__ import annotations

import pytest

from qmq.crc import decode_checked, encode_checked

FIELDS = {"incarnation": "é", "epochs": [[1, 2]], "lacks": None}


@pytest.mark.parametrize("indent", [None, 1])
def test_flipped_bits_of_checked_json_are_detected(indent):
    data = encode_checked(FIELDS, indent=indent)
    assert decode_checked(data) == FIELDS
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        try:
            assert decode_checked(bytes(flipped)) == FIELDS, "white space may differ, the fields may not"
        except ValueError:
            pass


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b"null", b'{"crc": 1}', b'{"crc": "1"}', b"\xff"])
def test_other_json_is_refused(data):
    with pytest.raises(ValueError):
        decode_checked(data)
