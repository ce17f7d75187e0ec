"""gRPC in memory, below the generated code: channel and server as in `grpc.aio`, over the simulated network.

Each call is a connection. Messages are bytes, so both sides serialise as usual. Parts of gRPC that the product does not
use are missing.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, NamedTuple

import grpc
import grpc.aio

from qmq.logs import shielded
from qmq.types import Endpoint
from tests.simulation.shells.network import End, Network

EOF = grpc.aio.EOF


class Start(NamedTuple):
    method: str
    metadata: tuple[tuple[str, str], ...]


class Status(NamedTuple):
    code: grpc.StatusCode
    details: str


class Half(NamedTuple):
    """End of the caller's requests."""


class _Inbox:
    """Queue of arrivals on a connection."""

    def __init__(self) -> None:
        self._items: deque[Any] = deque()
        self._came = asyncio.Event()

    def put(self, item: Any) -> None:
        self._items.append(item)
        self._came.set()

    async def get(self) -> Any:
        while not self._items:
            self._came.clear()
            await self._came.wait()
        return self._items.popleft()


class _Caller:
    """Caller's end of a call."""

    def __init__(self, end: End) -> None:
        self.end = end
        self.inbox = _Inbox()

    def arrived(self, item: Any) -> None:
        self.inbox.put(item)

    def lost(self, error: Exception | None) -> None:
        self.inbox.put(Status(grpc.StatusCode.UNAVAILABLE, str(error) if error else "Socket closed"))


class Call:
    """One call: await it for its only answer, or iterate over its answers."""

    def __init__(self, channel: Channel, kind: _Kind, requests: Any, metadata: Any, timeout: float | None) -> None:
        self._channel = channel
        self._kind = kind
        self._loop = asyncio.get_running_loop()
        self._ends_s = None if timeout is None else self._loop.time() + timeout
        self._caller: asyncio.Future[_Caller] = self._loop.create_future()
        self._is_over = False
        self._work = self._loop.create_task(self._run(requests, tuple(map(tuple, metadata or ()))))
        channel.calls.append(self)

    async def _run(self, requests: Any, metadata: tuple[tuple[str, str], ...]) -> None:
        channel = self._channel
        try:
            caller = await channel.network.connect(channel.at.host, channel.at.port, _Caller)
        except OSError as error:
            failed = _Caller.__new__(_Caller)
            failed.inbox = _Inbox()
            failed.inbox.put(Status(grpc.StatusCode.UNAVAILABLE, f"failed to connect to {channel.at}: {error}"))
            self._caller.set_result(failed)
            return
        self._caller.set_result(caller)
        caller.end.send(Start(self._kind.method, metadata))
        if isinstance(requests, AsyncIterator):
            async for request in requests:
                caller.end.send(self._kind.serialize(request))
        else:
            caller.end.send(self._kind.serialize(requests))
        caller.end.send(Half())

    async def read(self) -> Any:
        """Return the next answer, or EOF.

        Raises:
            AioRpcError: the call failed.
        """
        if self._is_over:
            return EOF
        try:
            async with asyncio.timeout_at(self._ends_s):
                item = await (await shielded(self._caller)).inbox.get()
        except TimeoutError:
            item = Status(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
        if not isinstance(item, Status):
            return self._kind.deserialize(item)
        self._end()
        if item.code is grpc.StatusCode.OK:
            return EOF
        nothing = grpc.aio.Metadata()
        raise grpc.aio.AioRpcError(item.code, nothing, nothing, item.details)

    def __await__(self) -> Any:
        return self._only().__await__()

    async def _only(self) -> Any:
        try:
            answer = await self.read()
            await self.read()
            return answer
        except asyncio.CancelledError:
            self.cancel()
            raise

    def __aiter__(self) -> AsyncIterator[Any]:
        return self._all()

    async def _all(self) -> AsyncIterator[Any]:
        while (answer := await self.read()) is not EOF:
            yield answer

    def cancel(self) -> bool:
        if self._is_over:
            return False
        self._end()
        return True

    def _end(self) -> None:
        self._is_over = True
        self._work.cancel()
        if self in self._channel.calls:
            self._channel.calls.remove(self)
        if self._caller.done() and not self._caller.cancelled() and hasattr(self._caller.result(), "end"):
            self._caller.result().end.reset()


class _Kind(NamedTuple):
    """Method of a stub."""

    channel: Channel
    method: str
    serialize: Callable[[Any], bytes]
    deserialize: Callable[[bytes], Any]

    def __call__(self, requests: Any, *, metadata: Any = (), timeout: float | None = None) -> Call:
        return Call(self.channel, self, requests, metadata, timeout)


class Channel:
    """Stands in for grpc.aio.insecure_channel."""

    def __init__(self, network: Network, address: str) -> None:
        self.network = network
        self.at = Endpoint.parse(address)
        self.calls: list[Call] = []

    def _kind(
        self, method: str, request_serializer: Any, response_deserializer: Any, _registered_method: bool = True
    ) -> _Kind:
        return _Kind(self, method, request_serializer, response_deserializer)

    unary_unary = unary_stream = stream_unary = stream_stream = _kind

    async def __aenter__(self) -> Channel:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        for call in list(self.calls):
            call.cancel()


class Context:
    """Call context of a servicer."""

    def __init__(self, end: End, start: Start, handler: Any) -> None:
        self._end = end
        self._start = start
        self._handler = handler
        self.inbox = _Inbox()
        self.task: asyncio.Task[None] | None = None

    def peer(self) -> str:
        return f"ipv4:{self._end.other.ip}:1"

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return self._start.metadata

    async def abort(self, code: grpc.StatusCode, details: str = "") -> None:
        self._end.send(Status(code, details))
        self._end.close()
        raise grpc.aio.AbortError

    async def read(self) -> Any:
        item = await self.inbox.get()
        if isinstance(item, Half):
            self.inbox.put(item)
            return EOF
        return self._handler.request_deserializer(item) if self._handler.request_deserializer else item

    async def write(self, answer: Any) -> None:
        self._end.send(self._handler.response_serializer(answer) if self._handler.response_serializer else answer)

    async def requests(self) -> AsyncIterator[Any]:
        while (request := await self.read()) is not EOF:
            yield request


class _Details(NamedTuple):
    method: str
    invocation_metadata: tuple[tuple[str, str], ...]


class _Served:
    """Server's end of a call."""

    def __init__(self, server: RpcServer, end: End) -> None:
        self._server = server
        self._end = end
        self._context: Context | None = None
        server.calls.append(self)

    def arrived(self, item: Any) -> None:
        if isinstance(item, Start):
            self._context = Context(self._end, item, None)
            self._context.task = asyncio.ensure_future(self._serve(self._context, item))
        elif self._context is not None:
            self._context.inbox.put(item)

    def lost(self, error: Exception | None) -> None:
        if self in self._server.calls:
            self._server.calls.remove(self)
        if self._context is not None and self._context.task is not None:
            self._context.task.cancel()

    def stop(self) -> None:
        self._end.send(Status(grpc.StatusCode.UNAVAILABLE, "the server stops"))
        self._end.close()
        self.lost(None)

    async def _serve(self, context: Context, start: Start) -> None:
        try:
            handler = await self._server.handler(start)
            context._handler = handler
            if handler is None:
                await context.abort(grpc.StatusCode.UNIMPLEMENTED, "no such method")
            await self._answer(context, handler)
            self._end.send(Status(grpc.StatusCode.OK, ""))
        except grpc.aio.AbortError:
            pass
        except Exception as error:
            asyncio.get_running_loop().call_exception_handler({"message": f"rpc {start.method}", "exception": error})
            self._end.send(Status(grpc.StatusCode.UNKNOWN, f"Unexpected {type(error)}: {error}"))
        finally:
            self._end.close()
            if self in self._server.calls:
                self._server.calls.remove(self)

    async def _answer(self, context: Context, handler: Any) -> None:
        asks = context.requests() if handler.request_streaming else await context.read()
        if handler.response_streaming:
            behaviour = handler.stream_stream or handler.unary_stream
            answers = behaviour(asks, context)
            if isinstance(answers, AsyncIterator):
                async for answer in answers:
                    await context.write(answer)
            else:
                await answers
        else:
            await context.write(await (handler.stream_unary or handler.unary_unary)(asks, context))


class RpcServer:
    """Stands in for grpc.aio.server."""

    def __init__(self, network: Network, interceptors: Sequence[Any] = ()) -> None:
        self._network = network
        self._interceptors = interceptors
        self._handlers: dict[str, Any] = {}
        self._port = ("", 0)
        self.calls: list[_Served] = []
        self._is_over = asyncio.Event()

    def add_generic_rpc_handlers(self, handlers: Sequence[Any]) -> None:
        """Do nothing: the registered handlers, which follow, are the same."""

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        self._handlers |= {f"/{service}/{name}": handler for name, handler in handlers.items()}

    def add_insecure_port(self, address: str) -> int:
        at = Endpoint.parse(address)
        self._port = at.host, at.port
        return at.port

    async def start(self) -> None:
        self._network.listen(self._port, lambda end: _Served(self, end))

    async def wait_for_termination(self) -> None:
        await self._is_over.wait()

    async def stop(self, grace: float | None) -> None:
        self._network.close(self._port)
        for call in list(self.calls):
            call.stop()
        self._is_over.set()

    async def handler(self, start: Start) -> Any:
        details = _Details(start.method, start.metadata)

        async def found(_: Any) -> Any:
            return self._handlers.get(start.method)

        continuation: Callable[[Any], Awaitable[Any]] = found
        for interceptor in self._interceptors:
            return await interceptor.intercept_service(continuation, details)
        return await continuation(details)
