"""Shell. A publisher for RabbitMQ as a worker: persistent messages, publisher confirms, a window of unconfirmed ones.

It costs as little as possible, so that RabbitMQ gets the two cores. The bytes before a message's content (method,
header and body frame) are packed once by pamqp, and confirmations are read without it. A whole client library would
take more of the machine and make RabbitMQ look slower than it is.
"""

from __future__ import annotations

import asyncio
import struct
import sys
import time
from collections import deque
from typing import Any, cast

import uvloop
from pamqp import base, commands, frame, header

from benchmarks.figures import percentile
from benchmarks.worker import answer, texts
from qmq.deploy.plan import HOST
from qmq.errors import NotServed

CHANNEL = 1
BURST = 100
"""Maximum of messages per write; more is no faster."""
ACK = bytes.fromhex("003c0050")
"""Class and method of basic.ack."""
_FRAME = struct.Struct(">BHI")
_TAG = struct.Struct(">QB")
END = b"\xce"


class Publisher(asyncio.Protocol):
    """One connection with one channel in confirm mode. Made by `open_publisher`."""

    def __init__(self) -> None:
        self._data = b""
        self._methods: deque[base.Frame] = deque()
        self._woken = asyncio.Event()
        self.sent = 0
        self.lost = ""
        self._confirmed_end = 0
        self._beyond: set[int] = set()

    @property
    def confirmed(self) -> int:
        """Number of confirmed messages."""
        return self._confirmed_end + len(self._beyond)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's has the methods, not the class

    def connection_lost(self, error: Exception | None) -> None:
        self.lost = self.lost or f"RabbitMQ closed the connection: {error}"
        self._woken.set()

    def data_received(self, data: bytes) -> None:
        data = self._data + data if self._data else data
        at = 0
        while len(data) - at >= 8:
            _, _, size = _FRAME.unpack_from(data, at)
            end = at + 8 + size
            if end > len(data):
                break
            if data[at + 7 : at + 11] == ACK:
                tag, multiple = _TAG.unpack_from(data, at + 11)
                self._acked(tag, bool(multiple))
            else:
                _, _, method = frame.unmarshal(data[at:end])
                if isinstance(method, commands.Connection.Close | commands.Channel.Close | commands.Basic.Nack):
                    self.lost = f"RabbitMQ refuses: {method.name} {getattr(method, 'reply_text', '')}"
                elif isinstance(method, base.Frame):
                    self._methods.append(method)
            at = end
        self._data = data[at:]
        self._woken.set()

    def _acked(self, tag: int, multiple: bool) -> None:
        """Count a confirmation: of everything up to `tag`, or of one message, which may overtake others."""
        if multiple:
            self._confirmed_end = max(self._confirmed_end, tag)
            self._beyond = {other for other in self._beyond if other > tag}
        else:
            self._beyond.add(tag)
        while self._confirmed_end + 1 in self._beyond:
            self._confirmed_end += 1
            self._beyond.remove(self._confirmed_end)

    async def wait(self) -> None:
        """Wait until something arrived."""
        await self._woken.wait()
        self._woken.clear()
        if self.lost:
            raise NotServed(self.lost)

    async def call(self, method: base.Frame, answer_type: type[base.Frame]) -> None:
        """Send a method and wait for its answer."""
        self.transport.write(frame.marshal(method, 0 if method.name.startswith("Connection.") else CHANNEL))
        await self.expect(answer_type)

    async def expect(self, answer_type: type[base.Frame]) -> None:
        while not self._methods:
            await self.wait()
        if not isinstance(method := self._methods.popleft(), answer_type):
            raise NotServed(f"RabbitMQ answers {method.name} instead of {answer_type.name}")


async def open_publisher(port: int) -> Publisher:
    """Connect, and put the channel into confirm mode."""
    loop = asyncio.get_running_loop()
    _, publisher = await loop.create_connection(Publisher, HOST, port)
    publisher.transport.write(header.ProtocolHeader().marshal())
    await publisher.expect(commands.Connection.Start)
    await publisher.call(commands.Connection.StartOk({}, "PLAIN", "\0guest\0guest", "en_US"), commands.Connection.Tune)
    tune = commands.Connection.TuneOk(channel_max=1, frame_max=131_072, heartbeat=0)
    publisher.transport.write(frame.marshal(tune, 0))
    await publisher.call(commands.Connection.Open("/"), commands.Connection.OpenOk)
    await publisher.call(commands.Channel.Open(), commands.Channel.OpenOk)
    await publisher.call(commands.Confirm.Select(), commands.Confirm.SelectOk)
    return publisher


class Client:
    """The worker's actions, with the qmq client's arguments where they mean the same."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._publisher: Publisher | None = None

    async def serve(self) -> None:
        await answer({"publish": self.publish, "send_one": self.send_one, "purge": self.purge})

    async def _opened(self, subject: str) -> Publisher:
        if self._publisher is None:
            self._publisher = await open_publisher(self._port)
        await self._publisher.call(commands.Queue.Declare(queue=subject, durable=True), commands.Queue.DeclareOk)
        return self._publisher

    async def purge(self, subject: str) -> dict[str, Any]:
        publisher = await self._opened(subject)
        await publisher.call(commands.Queue.Purge(queue=subject), commands.Queue.PurgeOk)
        return {}

    async def publish(self, subject: str, messages: int, size: int, in_flight: int) -> dict[str, Any]:
        """Publish with up to `in_flight` unconfirmed messages."""
        publisher = await self._opened(subject)
        packed = _packed(subject, size)
        began, first = time.perf_counter(), publisher.sent
        while publisher.confirmed < first + messages:
            room = min(in_flight - (publisher.sent - publisher.confirmed), first + messages - publisher.sent, BURST)
            if room > 0:
                at = publisher.sent & 63
                publisher.transport.write(b"".join((packed * 3)[at : at + room]))
                publisher.sent += room
                await asyncio.sleep(0)
            else:
                await publisher.wait()
        return {"seconds": time.perf_counter() - began, "messages": messages}

    async def send_one(self, subject: str, messages: int, size: int) -> dict[str, Any]:
        publisher = await self._opened(subject)
        packed = _packed(subject, size)
        times = []
        for number in range(messages):
            began = time.perf_counter()
            publisher.transport.write(packed[number & 63])
            publisher.sent += 1
            while publisher.confirmed < publisher.sent:
                await publisher.wait()
            times.append((time.perf_counter() - began) * 1e3)
        ordered = sorted(times)
        p50, p99 = percentile(ordered, 0.5), percentile(ordered, 0.99)
        return {"seconds": sum(times) / 1e3, "messages": messages, "p50_ms": p50, "p99_ms": p99}


def _packed(subject: str, size: int) -> list[bytes]:
    """Return messages in wire format: publish, header and body frames, persistent (delivery mode 2)."""
    properties = commands.Basic.Properties(delivery_mode=2)
    before = (
        frame.marshal(commands.Basic.Publish(exchange="", routing_key=subject), CHANNEL)
        + frame.marshal(header.ContentHeader(body_size=size, properties=properties), CHANNEL)
        + _FRAME.pack(3, CHANNEL, size)
    )
    return [before + text.encode() + END for text in texts(size)]


if __name__ == "__main__":
    uvloop.run(Client(int(sys.argv[1])).serve())
