"""Core. Bodies of a delay server's decision frames."""

from __future__ import annotations

import pytest

from qmq.log.delay_frames import (
    PLACE_BYTES,
    batch_begin,
    decode_dispatch,
    decode_places,
    decode_settled,
    encode_dispatch,
    encode_places,
    encode_settled,
)

PLACES = [(1_700_000_000_000, 7), (1_700_000_000_001, 0), (1 << 63, (1 << 64) - 1)]


def test_batch_of_a_carry_begins_behind_its_places():
    assert len(encode_places(PLACES)) == batch_begin(3, True) == 3 * PLACE_BYTES
    assert batch_begin(3, False) == 0


def test_places_are_read_at_their_offset():
    assert decode_places(b"12345678" + encode_places(PLACES), 3, 8) == PLACES
    assert decode_places(encode_places(PLACES), 2) == PLACES[:2]
    with pytest.raises(ValueError, match="no 4 places"):
        decode_places(encode_places(PLACES), 4)


@pytest.mark.parametrize("group", ["", "g", "group1", "group12", "group-eight", "größe"])
def test_dispatch_survives_encoding(group):
    body = encode_dispatch(group, encode_places(PLACES))
    assert len(body) % 8 == 0 and decode_dispatch(body, 3) == (group, PLACES)
    with pytest.raises(ValueError, match="no 4 places"):
        decode_dispatch(body, 4)


@pytest.mark.parametrize("body", [b"", b"\1", b"\2\0\xff\xff\0\0\0\0"])
def test_malformed_dispatch_is_refused(body):
    with pytest.raises(ValueError, match="dispatch"):
        decode_dispatch(body, 0)


def test_outcomes_survive_encoding():
    settled = [(1, 2, 0), (3, 4, 1)]
    assert decode_settled(encode_settled(settled), 2) == settled
    with pytest.raises(ValueError, match="no 3 outcomes"):
        decode_settled(encode_settled(settled), 3)
