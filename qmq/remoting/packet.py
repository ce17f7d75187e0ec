"""Core. QMQ's packet, the unit of the TCP protocol, and the reader that cuts a byte stream into packets.

All integers big-endian:

    offset  size  field
    0       4     length of everything behind this field: 20 + body
    4       2     header length, always 18
    6       4     magic 0xDEC10ADE
    10      2     request: command code; response: response code
    12      2     version of the requester
    14      4     opaque: request id, chosen by the requester, echoed in the response
    18      4     flag: 1 response, 2 one-way (no response wanted)
    22      2     request code: the command, also in its response
    24      -     body

Source: reference of QMQ's wire protocol, section 1. Several requests may be in flight in both directions of a
connection; responses may come in any order.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from qmq.codec import Buffer
from qmq.errors import ErrorCode, InvalidRequest

MAGIC = 0xDEC10ADE
PACKET_HEADER_BYTES = 24
VERSION = 100
"""Version of the bodies of qmq's commands; QMQ's own clients send 3 to 9."""
RESPONSE = 1
ONE_WAY = 2
_HEADER = struct.Struct(">ihIhhiih")


class Packet(NamedTuple):
    code: int
    opaque: int
    flag: int
    request_code: int
    body: memoryview

    @property
    def is_response(self) -> bool:
        return bool(self.flag & RESPONSE)


def packet_header(code: int, opaque: int, flag: int, request_code: int, body_bytes: int) -> bytes:
    """Pack the header of a body of `body_bytes`."""
    return _HEADER.pack(20 + body_bytes, 18, MAGIC, code, VERSION, opaque, flag, request_code)


class PacketTooLarge(InvalidRequest):
    """A packet exceeds the limit of its connection. `request` is its header, for an answer; its body is not read."""

    code = ErrorCode.MESSAGE_TOO_LARGE
    limit = "packet_bytes_max"

    def __init__(self, request: Packet, packet_bytes: int, limit: int) -> None:
        super().__init__(
            f"a packet of {packet_bytes} bytes is over the limit of {limit}; send less at once, or raise "
            "packet_bytes_max on the brokers (before AUTHENTICATE the limit is lower)"
        )
        self.request = request


class PacketReader:
    """Cuts received bytes into packets without copying large ones twice.

    The transport writes into `buffer()`, then `received(n)` returns the packets that became complete. Small packets
    gather in a staging area and are copied out of it; a packet that does not fit is received straight into a
    buffer of its own. A packet's body never changes after it was returned.
    """

    FIRST_BYTES, STAGING_BYTES = 4 * 1024, 256 * 1024
    """The staging area grows while reads fill it. Most connections carry little: 256 KiB for each cost more time than
    everything else about a rejected connection.
    """

    def __init__(self, packet_bytes_max: int) -> None:
        self.packet_bytes_max = packet_bytes_max
        """May be raised, for instance after authentication."""
        self._staging = memoryview(bytearray(self.FIRST_BYTES))
        self._filled = 0
        self._large: memoryview | None = None
        self._large_filled = 0

    def buffer(self) -> memoryview:
        """Return the place of the next bytes; never empty."""
        if self._large is not None:
            return self._large[self._large_filled :]
        return self._staging[self._filled :]

    def received(self, count: int) -> list[Packet]:
        """Consume `count` bytes written into `buffer()`; return the packets complete now.

        Raises:
            InvalidRequest: the stream is not QMQ's protocol, or (PacketTooLarge) a packet exceeds the limit; close the
                connection.
        """
        if self._large is not None:
            self._large_filled += count
            if self._large_filled < len(self._large):
                return []
            large, self._large = self._large, None
            return [self._parse(large)]
        self._filled += count
        was_full = self._filled == len(self._staging)
        packets: list[Packet] = []
        at = 0
        while self._filled - at >= PACKET_HEADER_BYTES:
            size = self._packet_bytes(at)
            if self._filled - at < size:
                if size > self.STAGING_BYTES // 4:
                    self._receive_large(at, size)
                    return packets
                break
            packets.append(self._parse(memoryview(bytes(self._staging[at : at + size]))))
            at += size
        if at or was_full:
            rest = bytes(self._staging[at : self._filled])
            if was_full and len(self._staging) < self.STAGING_BYTES:
                self._staging = memoryview(bytearray(min(4 * len(self._staging), self.STAGING_BYTES)))
            self._staging[: len(rest)] = rest
            self._filled = len(rest)
        return packets

    def close(self) -> None:
        """Free the memory after the last receive. A connection and its owner refer to each other, so both stay until
        Python's cycle collector runs, once an hour for old objects in a server.
        """
        self._staging = memoryview(b"")
        self._filled = 0
        self._large = None

    def _packet_bytes(self, at: int) -> int:
        length, header_bytes, magic = struct.unpack_from(">ihI", self._staging, at)
        if magic != MAGIC or header_bytes != 18:
            raise InvalidRequest("not QMQ's protocol: wrong magic number or header length")
        if length < 20:
            raise InvalidRequest(f"a packet of {length} bytes is shorter than its header, or over the limit of 2 GiB")
        if length > self.packet_bytes_max:
            header = self._parse(memoryview(bytes(self._staging[at : at + PACKET_HEADER_BYTES])))
            raise PacketTooLarge(header, length, self.packet_bytes_max)
        return int(length) + 4

    def _receive_large(self, at: int, size: int) -> None:
        self._large = memoryview(bytearray(size))
        self._large_filled = self._filled - at
        self._large[: self._large_filled] = self._staging[at : self._filled]
        self._filled = 0

    @staticmethod
    def _parse(data: memoryview) -> Packet:
        _, _, _, code, _, opaque, flag, request_code = _HEADER.unpack_from(data)
        return Packet(code, opaque, flag, request_code, data[PACKET_HEADER_BYTES:])


def read_packet(data: Buffer) -> Packet:
    """Parse one whole packet, for tests and tools."""
    return PacketReader._parse(memoryview(data))
