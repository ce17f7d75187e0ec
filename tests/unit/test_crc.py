"""Core. The CRC packages of servers and clients compute the same value."""

from __future__ import annotations

import random
import zlib

import pytest
from zlib_ng import zlib_ng

from qmq import crc

SIZES = (0, 1, 7, 8, 63, 64, 65, 1000, 4096, 65_537, 1 << 20)


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_both_packages_compute_the_same_value(kind):
    chance = random.Random(7)
    for size in SIZES:
        data = kind(chance.randbytes(size))
        assert crc.crc32(data) == zlib.crc32(data)
        assert crc.crc32(data, 0xDEADBEEF) == zlib.crc32(data, 0xDEADBEEF), "goes on behind other bytes"


def test_value_equals_the_standard():
    assert crc.crc32(b"123456789") == 0xCBF43926


def test_server_has_the_fast_package():
    assert crc.crc32 is zlib_ng.crc32
