"""Shell. gRPC streams for simulated clients at a fraction of grpc.aio's cost: HTTP/2 over a socket of our own.

A metaserver informs 20,000 clients within seconds. With grpc.aio, the simulated clients alone took more CPU time than
two cores have in that time, and dominated the measurement. This module sends the same frames as grpc.aio and keeps only
the state that it needs:

    connection    preface, SETTINGS, WINDOW_UPDATE; an ACK of the other's SETTINGS and of each PING
    stream        HEADERS: literals that enter the table (RFC 7541, 6.2.1) on the first stream, then numbers (6.1)
    message       DATA: 0, length (4 bytes, big-endian), content
    an answer     both windows get its size back, with a PING, as grpc measures the round trip each time;
                  header blocks are not decoded

    frame         length (3 bytes), type, flags, stream (4 bytes), all big-endian; then the content
"""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import Callable, Iterable
from typing import cast

from qmq.types import Endpoint

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
ACK, END_STREAM, END_HEADERS, PADDED = 0x1, 0x1, 0x4, 0x8
WINDOW = 4 << 20
"""Window that grpc.aio grants the other end."""
WINDOW_AT_FIRST = 65_535
OWN_SETTINGS = struct.pack(">HIHIHIHI", 2, 0, 3, 0, 4, WINDOW, 6, 16_384)
"""No pushes, no streams from the other end, the window of a stream, the length of headers."""
FIRST_IN_TABLE = 62
"""HPACK's number of the latest entry, above the static table."""
KEEPALIVE_S = 10.0
"""From `qmq.control_plane.CHANNEL_OPTIONS`."""
HEAD = struct.Struct(">I")


def frame(kind: int, flags: int, stream: int, content: bytes = b"") -> bytes:
    return HEAD.pack(len(content) << 8 | kind) + bytes((flags,)) + HEAD.pack(stream) + content


class Stream:
    """One call with messages both ways. Ends with the other end or the connection, then calls `on_end`."""

    __slots__ = ("_connection", "_partial", "number", "on_end", "on_message")

    def __init__(
        self, connection: Connection, number: int, on_message: Callable[[bytes], None], on_end: Callable[[], None]
    ) -> None:
        self._connection = connection
        self.number = number
        self.on_message = on_message
        self.on_end = on_end
        self._partial = b""

    def write(self, message: bytes) -> None:
        self._connection.send_data(self.number, b"\0" + HEAD.pack(len(message)) + message)

    def take(self, data: bytes) -> None:
        """Pass on complete messages."""
        data = self._partial + data if self._partial else data
        while len(data) >= 5 and len(data) >= (end := 5 + HEAD.unpack_from(data, 1)[0]):
            if data[0]:
                raise ValueError("a compressed message was not asked for")
            self.on_message(data[5:end])
            data = data[end:]
        self._partial = data


class Connection(asyncio.Protocol):
    """One socket with its streams, made by `connect`; used only on the loop."""

    def __init__(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        self._headers = tuple(headers)
        self._streams: dict[int, Stream] = {}
        self._next = 1
        self._buffer = b""
        self._window = WINDOW_AT_FIRST
        self._heard_s = 0.0
        self._is_probing = False
        """Whether a PING of ours is unanswered."""
        self.is_open = False

    # For the owner.

    def stream(self, on_message: Callable[[bytes], None], on_end: Callable[[], None]) -> Stream:
        """Begin a call."""
        stream = Stream(self, self._next, on_message, on_end)
        self._streams[stream.number] = stream
        self._transport.write(frame(HEADERS, END_HEADERS, stream.number, self._header_block()))
        self._next += 2
        return stream

    def send_data(self, number: int, data: bytes) -> None:
        """Send unless the stream has ended. Messages of simulated clients always fit the other end's windows."""
        if number not in self._streams:
            return
        self._window -= len(data)
        if self._window < 0:
            raise ValueError("the metaserver does not read what its clients say")
        self._transport.write(frame(DATA, 0, number, data))

    def close(self) -> None:
        self._transport.close()

    def _header_block(self) -> bytes:
        if self._next > 1:
            return bytes(0x80 | FIRST_IN_TABLE + number for number in reversed(range(len(self._headers))))
        return b"".join(b"\x40" + _text(name) + _text(value) for name, value in self._headers)

    # For the loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transport has another class
        self.is_open = True
        self._heard_s = time.monotonic()
        more = HEAD.pack(WINDOW - WINDOW_AT_FIRST)
        self._transport.write(PREFACE + frame(SETTINGS, 0, 0, OWN_SETTINGS) + frame(WINDOW_UPDATE, 0, 0, more))
        self._keep_alive()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        streams = self._streams
        self._streams = {}
        for stream in streams.values():
            stream.on_end()

    def data_received(self, data: bytes) -> None:
        self._heard_s = time.monotonic()
        data = self._buffer + data if self._buffer else data
        begin, replies = 0, b""
        while len(data) >= begin + 9:
            head = HEAD.unpack_from(data, begin)[0]
            end = begin + 9 + (head >> 8)
            if len(data) < end:
                break
            number = HEAD.unpack_from(data, begin + 5)[0]
            replies += self._take(head & 0xFF, data[begin + 4], number, data[begin + 9 : end])
            begin = end
        self._buffer = data[begin:]
        if replies and self.is_open:
            self._transport.write(replies)

    def _take(self, kind: int, flags: int, number: int, content: bytes) -> bytes:
        """Take one frame; return the reply."""
        reply = b""
        if kind == DATA:
            reply = self._take_data(flags, number, content)
        elif kind == PING and flags & ACK:
            self._is_probing = False
        elif kind == PING:
            reply = frame(PING, ACK, 0, content)
        elif kind == SETTINGS and not flags & ACK:
            reply = frame(SETTINGS, ACK, 0)
        elif kind == WINDOW_UPDATE and number == 0:
            self._window += HEAD.unpack(content)[0]
        elif kind == GOAWAY:
            self._transport.close()
        if kind == RST_STREAM or (kind in (DATA, HEADERS) and flags & END_STREAM):
            if stream := self._streams.pop(number, None):
                stream.on_end()
        return reply

    def _take_data(self, flags: int, number: int, content: bytes) -> bytes:
        if flags & PADDED:
            raise ValueError("grpc does not pad")
        if stream := self._streams.get(number):
            stream.take(content)
        back = HEAD.pack(len(content))
        return frame(WINDOW_UPDATE, 0, number, back) + frame(WINDOW_UPDATE, 0, 0, back) + self._probe()

    def _probe(self) -> bytes:
        if self._is_probing:
            return b""
        self._is_probing = True
        return frame(PING, 0, 0, bytes(8))

    def _keep_alive(self) -> None:
        """Send a PING after each such silence of the other end."""
        if not self.is_open:
            return
        silent_s = time.monotonic() - self._heard_s
        if silent_s >= KEEPALIVE_S and (probe := self._probe()):
            self._transport.write(probe)
        wait_s = KEEPALIVE_S - silent_s if silent_s < KEEPALIVE_S else KEEPALIVE_S
        asyncio.get_running_loop().call_later(wait_s, self._keep_alive)


async def connect(address: str, path: str, metadata: Iterable[tuple[str, str]]) -> Connection:
    """Open a connection for streams that all call `path` with the same metadata.

    Raises:
        OSError: the connection is refused.
    """
    endpoint = Endpoint.parse(address)
    headers = {
        ":path": path,
        ":authority": address,
        ":method": "POST",
        ":scheme": "http",
        "content-type": "application/grpc",
        "te": "trailers",
        "grpc-accept-encoding": "identity, deflate, gzip",
        "user-agent": "grpc-python-asyncio/lean",
        **dict(metadata),
    }
    encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
    loop = asyncio.get_running_loop()
    _, connection = await loop.create_connection(lambda: Connection(encoded), endpoint.host, endpoint.port)
    return connection


def _text(text: bytes) -> bytes:
    """Return a string literal of HPACK, not Huffman-coded."""
    if len(text) >= 0x7F:
        raise ValueError(f"too long for a header here: {len(text)} bytes")
    return bytes((len(text),)) + text
